"""The nodes of autograd graphs, the storages that they have saved, and the sums among them.

``total += loss`` in a loop makes a graph with an addition for each loss, and keeps all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from ipygpumem.heap.kinds.arrays import StorageKey, object_key, storage_key
from ipygpumem.heap.knowledge.graphs import saved_by
from ipygpumem.heap.knowledge.nodes import Nodes, is_leaf
from ipygpumem.introspect import name_of

_MOST_NODES = 1_000_000
"""Maximum number of nodes to read."""


class NodesBehind(NamedTuple):
    """The nodes that a search through autograd graphs has reached."""

    followed: list[Any]
    """The nodes whose inputs were followed, those at the start included."""
    boundary: list[Any]
    """The nodes at which the search stopped, because an earlier search had followed them."""


class GraphNodes:
    """The nodes of the graphs of some tensors.

    Args:
        tensors: the tensors.
        at_rest: identities of the parameters of models in eval mode.

    Attributes:
        leaves: for each node, by identity, the kinds of leaves behind it: True for parameters at
            rest, False for other ones.
        are_all: False if there were too many nodes.
    """

    def __init__(self, tensors: Iterable[Any], at_rest: set[int]) -> None:
        self._nodes = Nodes(_MOST_NODES, with_gradients=False)
        for tensor in tensors:
            for _ in self._nodes.of(tensor):
                if self._nodes.is_full:
                    break
        self.are_all = not self._nodes.is_full
        self.leaves = self._kinds_of_leaves(at_rest)

    def _kinds_of_leaves(self, at_rest: set[int]) -> dict[int, set[bool]]:
        """Return the kinds of leaves behind each node, for ``leaves``."""
        kinds_of_leaves: dict[int, set[bool]] = {}
        for node in self._nodes.finished:  # each after the nodes behind it
            kinds = set[bool]()
            if is_leaf(node):
                kinds.add(id(node.variable) in at_rest)
            else:
                for input_node in self._nodes.following(node):
                    kinds |= kinds_of_leaves.get(id(input_node), set())
            kinds_of_leaves[id(node)] = kinds
        return kinds_of_leaves

    def first(self, tensor: Any) -> Any:
        """Return the first node of a tensor's graph; None if it has no graph, or if the graph must
        not be read.
        """
        return self._nodes.first(tensor)

    def behind(self, first: Iterable[Any], followed_before: Collection[int]) -> NodesBehind:
        """Return the nodes that can be reached from ``first``, which are among them.

        Args:
            first: nodes at which the search starts; None stands for no node.
            followed_before: identities of the nodes at which it stops.
        """
        followed = dict[int, Any]()
        boundary = list[Any]()
        waiting = [node for node in first if node is not None]
        while waiting:
            node = waiting.pop()
            if id(node) in followed_before:
                boundary.append(node)
            elif id(node) not in followed:
                followed[id(node)] = node
                waiting += self._nodes.following(node)
        return NodesBehind(list(followed.values()), boundary)

    def saved(self) -> Iterator[tuple[Any, Any]]:
        """Yield each node with each tensor that it has saved for ``backward()``. A leaf counts as
        having saved its gradient.
        """
        for node in self._nodes.finished:
            for item in saved_by(node):
                yield node, item

    def saved_behind(self, first: Iterable[Any]) -> set[StorageKey]:
        """Return the storages that the nodes behind ``first`` have saved for ``backward()``,
        without those of leaves (parameters) and of their gradients.
        """
        storages = set[StorageKey]()
        storages_of_leaves = set[StorageKey]()
        for node in self.behind(first, ()).followed:
            saved = storages_of_leaves if is_leaf(node) else storages
            for item in saved_by(node):
                saved.add(storage_key(item) or object_key(item))
        return storages - storages_of_leaves

    def is_sum(self, node: Any) -> bool:
        """Return True if a node sums the results of one repeated computation, as ``total += loss``
        does.

        The graph of such a total is a chain of additions. Behind each of them is a *term*, the
        graph of one loss. All terms have the same operations, and share nothing but leaves.
        """
        waiting = [self._past_single_steps(node)]
        nodes_of_terms = set[int]()
        operations_of_terms = set[frozenset[str]]()
        number_of_terms = 0
        begins_with_number = False
        while waiting:
            node = waiting.pop()
            if adds(node):
                summands = self._nodes.following(node)
                begins_with_number |= len(summands) == 1  # ``total = 0; total += loss``
                waiting += summands
            elif not is_leaf(node):
                term = self.behind([node], nodes_of_terms)
                if not all(map(is_leaf, term.boundary)):
                    return False  # two results of one computation
                number_of_terms += 1
                nodes_of_terms.update(map(id, term.followed))
                operations_of_terms.add(_operations_of(term.followed))
        # ``loss = main_loss + penalty`` adds two results, too, and is no total of a loop.
        least_terms = 2 if begins_with_number else 3
        return number_of_terms >= least_terms and len(operations_of_terms) == 1

    def _past_single_steps(self, node: Any) -> Any:
        """Return the first node behind ``node`` that adds or has several inputs: for the mean
        ``total / number``, the node of ``total``.
        """
        while not adds(node) and len(self._nodes.following(node)) == 1:
            (node,) = self._nodes.following(node)
        return node


def adds(node: Any) -> bool:
    """Return True for the node of an addition."""
    return name_of(type(node)) == "AddBackward0"


def _operations_of(nodes: Iterable[Any]) -> frozenset[str]:
    """Return the names of the operations in a term: equal ones belong to one repeated
    computation.
    """
    return frozenset(name_of(type(node)) for node in nodes if not is_leaf(node))
