"""Walks through the nodes of autograd graphs, and reads never more of them than torch can destroy.

torch (seen with 2.13) keeps the Python object of a node for as long as the node lives. It destroys
nodes without such an object in a loop, but a chain of nodes with objects recursively: some 35,000
of them overflow a stack of 8 MiB, and the process crashes when the user's tensor dies. An object
cannot be taken back once a node was read. So all searches of the user's graphs share one limit, and
read ``grad_fn`` and ``next_functions`` only here. extras/fit/reduction.py reads both, too, with a
limit of its own: in the graphs of code that an estimate runs, which do not count here.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ipygpumem.introspect import name_of

LONGEST_CHAIN = 20_000
"""Maximum number of nodes on any path through a graph that all searches may have read together."""
MOST_NODES = 200_000
"""Maximum number of nodes in one search: a second of work. A time limit would make results vary
from call to call.
"""
_MOST_REFUSALS = 64
"""Maximum number of refused searches until dead nodes are forgotten again."""
_MOST_REMEMBERED = 400_000
"""Number of remembered nodes from which a search first forgets the dead ones."""


def is_leaf(node: Any) -> bool:
    """Return True if a graph ends in this node."""
    return name_of(type(node)) == "AccumulateGrad"


def has_graph(tensor: Any) -> bool:
    """Return True if a tensor that requires gradients has a graph (``grad_fn``).

    The node is read only if torch cannot tell without: a view whose base was changed in place gets
    its node only when it is read.
    """
    base: Any = sys.modules["torch"].Tensor
    if not base.is_leaf.__get__(tensor):
        return True
    if not base._is_view(tensor):
        return False
    with contextlib.suppress(RuntimeError):  # some views refuse
        return base.grad_fn.__get__(tensor) is not None
    return True


class _ReadNode(NamedTuple):
    """The facts about a node that some search has read; does not keep the node alive."""

    type_id: int
    """Identity of its type."""
    number: int
    """torch's number of the node; another node may get its identity later."""
    length: int
    """Maximum number of nodes with Python objects on a path from this node to the end of its graph.
    """
    is_expanded: bool
    """True if the nodes that follow it have been read, too."""

    def is_of(self, item: Any) -> bool:
        """Return True if an object is the node itself, and not a later one with its identity."""
        # The type comes first, because an object of the user's may have that identity.
        return self.type_id == id(type(item)) and self.number == _number_of(item)


class _AllSearches:
    """The nodes that all searches of this process have read; keeps none of them alive."""

    def __init__(self) -> None:
        self.longest = 0
        """Maximum number of nodes with Python objects on one path; nodes that have died may still
        count.
        """
        self._nodes: dict[int, _ReadNode] = {}
        """The nodes by identity."""
        self._tensors: set[int] = set()
        """Identities of tensors whose first nodes have been read."""
        self._refusals = 0
        """Number of searches that were refused since dead nodes were last forgotten."""
        self._refusals_to_wait = 1
        """Number of refused searches until dead nodes are forgotten again; doubled if that did not
        help.
        """

    def begin_search(self) -> None:
        """Forget dead nodes before a search if very many nodes are remembered."""
        if len(self._nodes) + len(self._tensors) > _MOST_REMEMBERED:
            self.forget_dead()

    def may_read(self, more: int) -> bool:
        """Return True if a search may read ``more`` new nodes on one path.

        The path may continue with the longest one that any search has read, so the sum of both must
        not exceed the limit.
        """
        return self.longest + more <= LONGEST_CHAIN

    def has_first_node_of(self, tensor: Any) -> bool:
        """Return True if the first node of a tensor has been read."""
        return id(tensor) in self._tensors

    def add_tensor(self, tensor: Any) -> None:
        """Remember that the first node of a tensor has been read."""
        self._tensors.add(id(tensor))

    def get(self, node: Any) -> _ReadNode | None:
        """Return the facts about a node that a search has read; None for any other node."""
        read_node = self._nodes.get(id(node))
        if read_node is None or not read_node.is_of(node):
            return None
        return read_node

    def add(self, node: Any, length: int, *, is_expanded: bool) -> None:
        """Remember a node that was read; ``length`` and ``is_expanded`` as in ``_ReadNode``."""
        self._nodes[id(node)] = _ReadNode(id(type(node)), _number_of(node), length, is_expanded)
        self.longest = max(self.longest, length)

    def expect_dead(self) -> None:
        """Let the next search that is refused forget dead nodes, and try again."""
        self._refusals_to_wait = 1

    def count_refusal(self) -> None:
        """Count a search that was refused, and forget dead nodes after some of them.

        Not after each: it takes long, and does not help as long as one graph is alive that many
        searches read.
        """
        self._refusals += 1
        if self._refusals < self._refusals_to_wait:
            return
        longest_before = self.longest
        self.forget_dead()
        self._refusals = 0
        if self.longest < longest_before:
            self._refusals_to_wait = 1
        else:
            self._refusals_to_wait = min(2 * self._refusals_to_wait, _MOST_REFUSALS)

    def forget_dead(self) -> None:
        """Forget nodes and tensors that are no longer alive.

        It lists all objects, which takes a tenth of a second.
        """
        live_nodes = dict[int, _ReadNode]()
        live_tensors = set[int]()
        for item in gc.get_objects():
            key = id(item)
            if key in self._tensors:
                live_tensors.add(key)
            read_node = self._nodes.get(key)
            if read_node is not None and read_node.is_of(item):
                live_nodes[key] = read_node
        self._nodes = live_nodes
        self._tensors = live_tensors
        self.longest = max((node.length for node in live_nodes.values()), default=0)


_ALL_SEARCHES = _AllSearches()
"""State of the whole process, like torch's graphs."""


def expect_dead_nodes() -> None:
    """Let the next search that would be refused look for dead nodes first.

    A command calls it once at its start: the user may have freed graphs since the last one.
    """
    _ALL_SEARCHES.expect_dead()


def _number_of(node: Any) -> int:
    """Return the number that torch gave to a node; 0 up to torch 2.0."""
    number = getattr(node, "_sequence_nr", None)
    return 0 if number is None else int(number())


@dataclass
class _Step:
    """A node on the path from a tensor to the node that is read now."""

    node: Any
    waiting: list[Any]
    """The following nodes to which the search has not gone yet."""
    longest_after: int
    """Maximum length of the paths that begin with a following node, as far as known."""
    is_expanded: bool
    """True if the following nodes have been read."""


class Nodes:
    """One search through graphs, with the nodes that it has read: ``nodes.of(tensor)`` walks
    through the graph of a tensor.

    The search keeps the nodes alive, so that their identities are not reused.

    Args:
        most: maximum number of nodes.
        with_gradients: True to go on from a leaf to the graph of its gradient, as left by
            ``backward(create_graph=True)``.

    Attributes:
        is_full: True if the search has left out nodes.
        finished: the nodes, each after those that follow it.
    """

    def __init__(self, most: int = MOST_NODES, *, with_gradients: bool = True) -> None:
        self.is_full = False
        self.finished: list[Any] = []
        self._most = most
        self._with_gradients = with_gradients
        self._lengths: dict[int, int] = {}
        """For each node that was entered, the maximum number of nodes on a path from it; 0 until
        that is known.
        """
        self._following: dict[int, list[Any]] = {}
        """The nodes that follow each node, as far as they were read."""
        self._was_refused = False
        """True once this search was refused: it asks for dead nodes only once."""
        _ALL_SEARCHES.begin_search()

    def following(self, node: Any) -> list[Any]:
        """Return the nodes that follow a node of this search; none if they were not read."""
        return self._following.get(id(node), [])

    def first(self, tensor: Any, position: int = 0) -> Any:
        """Return the first node of a tensor's graph; None if there is none, or if it must not be
        read: then ``is_full`` becomes True.

        Args:
            tensor: any tensor.
            position: number of nodes on the path on which the tensor was found.
        """
        base: Any = sys.modules["torch"].Tensor
        if base.is_leaf.__get__(tensor) and not base._is_view(tensor):
            return None
        if len(self._lengths) >= self._most:
            self.is_full = True
            return None
        if not _ALL_SEARCHES.has_first_node_of(tensor) and not self._may_read(position + 1):
            self.is_full = True
            return None
        node = None
        # A view that was changed in place may refuse to return its graph.
        with contextlib.suppress(RuntimeError):
            node = base.grad_fn.__get__(tensor)
        if node is not None:
            _ALL_SEARCHES.add_tensor(tensor)
        return node

    def of(self, tensor: Any) -> Iterator[Any]:
        """Read a tensor's graph, depth first, and yield each node that this search has not read
        before.
        """
        first_node = self.first(tensor)
        if first_node is None or id(first_node) in self._lengths:
            return
        path = [self._enter(first_node, position=1)]
        try:
            yield first_node
            while path:
                step = path[-1]
                if not step.waiting:
                    self._leave(path)
                    continue
                node = step.waiting.pop()
                if id(node) in self._lengths:
                    step.longest_after = max(step.longest_after, self._lengths[id(node)])
                    continue
                path.append(self._enter(node, len(path) + 1))
                yield node
        finally:  # the caller may stop early, and an interrupt may come
            while path:
                self._leave(path)

    def _enter(self, node: Any, position: int) -> _Step:
        """Read the nodes that follow a node, if they may be read; return the step for the node.

        Args:
            node: the node.
            position: its position on the path from the tensor, from 1 on.
        """
        self._lengths[id(node)] = 0
        if is_leaf(node):
            waiting = self._nodes_of_gradient(node, position)
            return _Step(node, waiting, longest_after=0, is_expanded=True)
        read_before = _ALL_SEARCHES.get(node)
        is_expanded = read_before is not None and read_before.is_expanded
        is_new_and_allowed = not is_expanded and self._may_read(position + 1)
        if len(self._lengths) < self._most and (is_expanded or is_new_and_allowed):
            following = [part for part, _ in node.next_functions if part is not None]
            self._following[id(node)] = following
            return _Step(node, list(following), longest_after=0, is_expanded=True)
        self.is_full = True
        if read_before is not None:
            return _Step(node, [], read_before.length - 1, is_expanded)
        # Other searches may have read nodes behind this one.
        return _Step(node, [], _ALL_SEARCHES.longest, is_expanded=False)

    def _nodes_of_gradient(self, leaf: Any, position: int) -> list[Any]:
        """Return the first node of the graph of a leaf's gradient, if there is one."""
        if not self._with_gradients:
            return []
        base: Any = sys.modules["torch"].Tensor
        gradient = base.grad.__get__(leaf.variable)
        node = None if gradient is None else self.first(gradient, position)
        return [] if node is None else [node]

    def _leave(self, path: list[_Step]) -> None:
        """Take the last node off a path, and record it: all nodes that follow it have been read, or
        the search was stopped.
        """
        step = path.pop()
        if step.waiting:  # stopped early: other searches may have read nodes behind these
            self.is_full = True
            step.longest_after = max(step.longest_after, _ALL_SEARCHES.longest)
        length = step.longest_after + 1
        self._lengths[id(step.node)] = length
        self.finished.append(step.node)
        if not is_leaf(step.node):
            _ALL_SEARCHES.add(step.node, length, is_expanded=step.is_expanded)
        if path:
            path[-1].longest_after = max(path[-1].longest_after, length)

    def _may_read(self, more: int) -> bool:
        """Return True if ``more`` new nodes may be read on one path.

        If they may not, dead nodes are forgotten once, which may change that.
        """
        if _ALL_SEARCHES.may_read(more):
            return True
        if more > LONGEST_CHAIN or self._was_refused:  # dead nodes would not help
            return False
        self._was_refused = True
        _ALL_SEARCHES.count_refusal()
        return _ALL_SEARCHES.may_read(more)
