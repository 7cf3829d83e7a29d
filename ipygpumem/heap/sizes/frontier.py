"""The state that the readers of a graph share: the nodes that wait to be read, and the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.bulk import OBSERVERS, by_identity, types_of, without_types
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.sorted_types import SortedTypes
from ipygpumem.heap.sizes.graph import Graph, GraphReading
from ipygpumem.heap.sizes.memory import MemoryReader


class Frontier:
    """The nodes of a graph that wait to be read.

    Args:
        graph: the graph.
        types: the types of its objects.

    Attributes:
        waiting: the nodes to read, the next one last.
        unread: by identity, nodes that no reading has read: reserved ones, and those that an
            interrupted reading has left.
    """

    def __init__(self, graph: Graph, types: SortedTypes) -> None:
        self.waiting: list[Any] = []
        self.unread: dict[int, Any] = {}
        self._graph = graph
        self._types = types
        self._reading = GraphReading()

    def begin(self, reading: GraphReading) -> None:
        """Begin with a new reading, which receives the nodes."""
        self.waiting = []
        self._reading = reading

    def end(self) -> None:
        """Keep the nodes that are still waiting as ``unread``, for a later reading."""
        self.unread.update(by_identity(self.waiting))
        self.waiting = []

    def add_roots(self, roots: Sequence[object]) -> list[Any]:
        """Add those of the roots that no reading has read as nodes, and return them."""
        to_read = []
        for key, item in by_identity(roots).items():
            if key not in self._graph.objects:
                self._graph.objects[key] = item
            elif key in self.unread:
                del self.unread[key]
            else:
                continue
            self._reading.added.append(key)
            to_read.append(item)
        return to_read

    def add(self, shared: Sequence[Any]) -> None:
        """Add the objects of ``shared``, each of which has several references, as nodes. Nodes that
        may lead to more objects wait to be read; those that are in the graph are noted as
        revisited.
        """
        objects = self._graph.objects
        by_key = by_identity(shared)
        in_graph = by_key.keys() & objects.keys()
        nodes_to_add = by_key
        if in_graph:
            nodes_to_add = {key: item for key, item in by_key.items() if key not in in_graph}
        objects.update(nodes_to_add)
        self._reading.added += nodes_to_add
        self._reading.revisited |= in_graph
        self.waiting += without_types(self._types.leaves, list(nodes_to_add.values()))
        if self.unread:
            unread_keys = in_graph & self.unread.keys()
            self.waiting += map(self.unread.pop, unread_keys)
            self._reading.added += unread_keys


class ReadingLimits:
    """Limits the time, memory and number of objects of readings.

    Args:
        allowance: limits the time and memory.
        most: maximum number of objects to read at once.
        progress: called again and again.

    Attributes:
        is_complete: False if a limit was reached.
    """

    def __init__(
        self, allowance: Allowance | None, most: int, progress: Callable[[], object]
    ) -> None:
        self.allowance = allowance
        self.is_complete = True
        self._most = most
        self._progress = progress
        self._visited = 0

    def begin(self) -> None:
        """Begin with a new reading."""
        self._visited = 0

    def visit(self, number: int) -> None:
        """Count ``number`` more objects as read."""
        self._visited += number

    def is_reached(self) -> bool:
        """Return True if the reading has read as many objects as it may; ``is_complete`` becomes
        False then.
        """
        if self._visited <= self._most:
            return False
        self.is_complete = False
        return True

    def check(self) -> None:
        """Call the observers, and show progress.

        Raises:
            AllowanceError: the allowance is spent.
        """
        for observe in OBSERVERS:
            observe()
        if self.allowance is not None:
            self.allowance.check()
        self._progress()


@dataclass(frozen=True)
class Context:
    """The graph, and the state that the readers of one node and of many nodes share."""

    graph: Graph
    types: SortedTypes
    barriers: Barriers
    memory: MemoryReader
    frontier: Frontier
    limits: ReadingLimits
    sampled_from: int
    """Number of items from which a container is read in part."""
    keeps_folded: bool
    """True to fill ``graph.folded``."""

    def note_uncounted(self, key: int, items: Sequence[Any], type_ids: set[int]) -> None:
        """Record the libraries that keep memory of a node's objects which nothing counts.

        Args:
            key: the node.
            items: its objects.
            type_ids: at least the identities of their types.
        """
        own_bytes = self.types.own_bytes
        if own_bytes.uncounted(items, type_ids):
            libraries = own_bytes.uncounted(items, types_of(items))
            self.graph.uncounted.setdefault(key, set()).update(libraries)

    def note_uncounted_of_each(self, owners: Sequence[int], items: Sequence[Any]) -> None:
        """Record the libraries that keep memory of objects which nothing counts, at the node that
        owns each object.
        """
        if self.types.own_bytes.uncounted(items):
            for owner, item in zip(owners, items, strict=True):
                self.note_uncounted(owner, [item], {id(type(item))})
