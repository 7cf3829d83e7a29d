"""Reads objects and everything that they lead to, and adds the nodes and edges to a graph.

Most objects have one reference, and are folded into the node that refers to them. No user code
runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.bulk import CHUNK, by_identity, without_types
from ipygpumem.heap.kinds.libraries import MemoryPiece
from ipygpumem.heap.knowledge.barriers import Barriers, without_never_followed
from ipygpumem.heap.knowledge.sorted_types import SortedTypes
from ipygpumem.heap.sizes.folding import Folder, constants_among
from ipygpumem.heap.sizes.frontier import Context, Frontier, ReadingLimits
from ipygpumem.heap.sizes.graph import Graph, GraphReading
from ipygpumem.heap.sizes.levels import LevelReader
from ipygpumem.heap.sizes.memory import MemoryReader
from ipygpumem.heap.sizes.passing import PlainObjects

MOST_NODES = 20_000_000
"""Maximum number of objects, except numbers and text with one reference."""
_READ_TOGETHER = 8
"""Fewer nodes are read one by one, which takes 30 µs each."""


class GraphReader:
    """Adds objects to a graph.

    Args:
        graph: the graph.
        namespaces: identities of further dicts that are not entered, because they contain the
            user's names.
        allowance: limits the time and memory.
        most: maximum number of objects to read at once.
        sampled_from: number of items from which a container is read in part: an evenly spread
            sample stands for all.
        keeps_folded: fill ``graph.folded``.
        keeps_arrays: fill ``graph.arrays``.
        progress: called again and again.

    Attributes:
        limits: the limits, and whether one was reached.
        reading: the last reading; after an ``AllowanceError``, with the nodes found so far.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        namespaces: Iterable[int],
        allowance: Allowance | None,
        most: int,
        sampled_from: int,
        keeps_folded: bool,
        keeps_arrays: bool,
        progress: Callable[[], object],
    ) -> None:
        self.limits = ReadingLimits(allowance, most, progress)
        self.reading = GraphReading()
        self.types = SortedTypes()
        self.barriers = Barriers(namespaces)
        self.memory = MemoryReader(graph, self.types, keeps_arrays=keeps_arrays)
        self._graph = graph
        self._frontier = Frontier(graph, self.types)
        context = Context(
            graph,
            self.types,
            self.barriers,
            self.memory,
            self._frontier,
            self.limits,
            sampled_from,
            keeps_folded,
        )
        self._folder = Folder(context)
        self._level_reader = LevelReader(context, self._folder)
        self._plain_objects = PlainObjects(context, self._folder)

    def read(self, roots: Sequence[object]) -> GraphReading:
        """Add objects and everything that they lead to; return the nodes found.

        Raises:
            AllowanceError: the allowance is spent. The nodes so far stay in the graph.
        """
        self._begin()
        unread_roots = self._frontier.add_roots(roots)
        self.types.learn(unread_roots)
        entered = list(without_never_followed(without_types(self.types.leaves, unread_roots)))
        self.barriers.open(entered)
        self._frontier.waiting += entered
        return self._read_waiting()

    def read_items(self, container: object, items: Sequence[Any]) -> GraphReading:
        """Add items of a reserved container before the container itself is read; return the nodes
        found.

        Items to which only the container refers are folded into it.

        Raises:
            AllowanceError: the allowance is spent.
        """
        self._begin()
        self._folder.fold_items(container, items)
        return self._read_waiting()

    def read_pieces(self, pieces: Sequence[MemoryPiece]) -> GraphReading:
        """Add pieces of a library's memory before the object that leads to them is read; return the
        nodes found.

        Raises:
            AllowanceError: the allowance is spent.
        """
        self._begin()
        self.memory.add(pieces)
        return self._read_waiting()

    def pass_through(self, roots: Sequence[object]) -> None:
        """Let later readings count neither some objects nor anything to which they lead.

        Raises:
            AllowanceError: the allowance is spent.
        """
        self._begin()
        entered = without_never_followed(roots)
        self.barriers.open(entered)
        self.read(self._plain_objects.pass_over(self.barriers.enterable(entered)))

    def reserve(self, objects: Sequence[object]) -> None:
        """Add objects as nodes that no reading enters before they are released, as the named
        objects of ``Sizes``, each of which counts only when it is measured itself.
        """
        self._graph.objects.update(by_identity(objects))

    def release(self, objects: Sequence[object]) -> None:
        """Let readings enter reserved objects."""
        self._frontier.unread.update(by_identity(objects))

    def owned(self, objects: Sequence[Any]) -> list[Any]:
        """Return the objects of some whose memory counts for an object that refers to all of them:
        without constants, such as None, and without objects behind barriers.
        """
        entered = self.barriers.enterable(objects)
        constants = constants_among(entered, list(map(sys.getrefcount, entered)))
        return [item for item in entered if id(item) not in constants]

    def _begin(self) -> None:
        """Begin with a new reading."""
        self.reading = GraphReading()
        self._frontier.begin(self.reading)
        self.memory.reading = self.reading
        self.limits.begin()

    def _read_waiting(self) -> GraphReading:
        """Read nodes until none is waiting, or until a limit is reached; return the nodes found
        since ``_begin``.
        """
        futures_before = len(self._graph.waking)
        try:
            self._read_all()
        finally:
            self._frontier.end()
            self.limits.is_complete &= not self._folder.references.is_full
            self._folder.references.drop()
            self.memory.join_by_address()
            self._lead_to_tasks(futures_before)
        return self.reading

    def _read_all(self) -> None:
        """Read waiting nodes, one by one while there are few, until none is left or a limit is
        reached.
        """
        while self._frontier.waiting:
            if self.limits.is_reached():
                return
            waiting = self._frontier.waiting
            if len(waiting) < _READ_TOGETHER:
                node = waiting.pop()
                self.limits.visit(1)
                self._folder.look_ahead(node)
                self._folder.fold(id(node), [node])
            else:
                nodes = waiting[-CHUNK:]
                del waiting[-CHUNK:]
                self.limits.visit(len(nodes))
                self._level_reader.read(nodes)

    def _lead_to_tasks(self, futures_before: int) -> None:
        """Let new futures lead to the tasks that they wake, if another object leads to these, too.

        A future refers to the task that awaits it and does not own it: so it leads to no new task.

        Args:
            futures_before: number of futures of earlier readings.
        """
        for key, task in self._graph.waking[futures_before:]:
            if task in self._graph.objects:
                self._graph.inside[task] += 1
                self._graph.lead(key, [task])
