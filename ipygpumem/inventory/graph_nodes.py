"""The nodes of autograd graphs, and the storages that they have saved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ipygpumem.heap.arrays import StorageKey, object_key, storage_key
from ipygpumem.heap.knowledge.graphs import saved_by
from ipygpumem.heap.knowledge.nodes import Nodes, is_leaf
from ipygpumem.introspect import name_of

_MOST_NODES = 1_000_000


class GraphNodes:
    """The nodes of the graphs of some tensors.

    Args:
        tensors: the tensors.
        at_rest: identities of models' parameters in eval mode.

    Attributes:
        leaves: for each node, by identity, the kinds of leaves behind it: True for parameters at
            rest, False for other ones.
        are_all: False if there were too many nodes.
    """

    def __init__(self, tensors: Iterable[Any], at_rest: set[int]) -> None:
        self.leaves: dict[int, set[bool]] = {}
        self._nodes = Nodes(_MOST_NODES, with_gradients=False)
        for tensor in tensors:
            for _ in self._nodes.of(tensor):
                if self._nodes.is_full:
                    break
        self.are_all = not self._nodes.is_full
        for node in self._nodes.finished:
            leaves = set[bool]()
            if is_leaf(node):
                leaves.add(id(node.variable) in at_rest)
            else:
                for part in self._nodes.following(node):
                    leaves |= self.leaves.get(id(part), set())
            self.leaves[id(node)] = leaves

    def first(self, tensor: Any) -> Any:
        """Return the first node of a tensor's graph; None if there is none or it must not be
        read.
        """
        return self._nodes.first(tensor)

    def behind(self, first: Iterable[Any], known: Collection[int]) -> tuple[list[Any], list[Any]]:
        """Return the nodes reachable from ``first``, inclusive, and the ``known`` ones where the
        search stopped.
        """
        new = dict[int, Any]()
        ends = list[Any]()
        waiting = [node for node in first if node is not None]
        while waiting:
            node = waiting.pop()
            if id(node) in known:
                ends.append(node)
            elif id(node) not in new:
                new[id(node)] = node
                waiting += self._nodes.following(node)
        return list(new.values()), ends

    def saved(self) -> Iterator[tuple[Any, Any]]:
        """Yield each node with each tensor that it has saved; a leaf with its gradient."""
        for node in self._nodes.finished:
            for item in saved_by(node):
                yield node, item

    def saved_behind(self, first: Iterable[Any]) -> set[StorageKey]:
        """Return the storages that the nodes behind ``first`` have saved, without those of leaves
        and of their gradients.
        """
        storages = set[StorageKey]()
        of_leaves = set[StorageKey]()
        for node in self.behind(first, ())[0]:
            saved = of_leaves if is_leaf(node) else storages
            for item in saved_by(node):
                saved.add(storage_key(item) or object_key(item))
        return storages - of_leaves

    def is_sum(self, node: Any) -> bool:
        """Return True if a node sums the results of one repeated computation, as ``total += loss``
        does.
        """
        first = self._past_single_steps(node)
        waiting = [first]
        counted = set[int]()
        kinds_of_terms = set[frozenset[str]]()
        terms = 0
        begins_with_number = False
        while waiting:
            node = waiting.pop()
            if adds(node):
                following = self._nodes.following(node)
                begins_with_number |= len(following) == 1  # as ``total = 0`` does
                waiting += following
            elif not is_leaf(node):
                term, ends = self.behind([node], counted)
                if not all(map(is_leaf, ends)):
                    return False  # two results of one computation
                terms += 1
                counted.update(map(id, term))
                kinds_of_terms.add(_kinds_in(term))
        least = 2 if begins_with_number else 3
        return terms >= least and len(kinds_of_terms) == 1

    def _past_single_steps(self, node: Any) -> Any:
        """Return the first node that adds or has several inputs, behind nodes such as a mean."""
        while not adds(node) and len(self._nodes.following(node)) == 1:
            (node,) = self._nodes.following(node)
        return node


def adds(node: Any) -> bool:
    """Return True for the node of an addition."""
    return name_of(type(node)) == "AddBackward0"


def _kinds_in(nodes: Iterable[Any]) -> frozenset[str]:
    """Return the names of the operations of some nodes."""
    return frozenset(name_of(type(node)) for node in nodes if not is_leaf(node))
