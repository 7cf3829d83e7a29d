"""The nodes that a region consists of, with their bytes, and the references between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from ipygpumem.heap.kinds.libraries import MemoryPiece, PieceKey

NodeKey = int | PieceKey
"""Identity of an object, or the key of a piece of memory such as ``("torch", address)``, or of a
node of an autograd graph: ``("graph", id(node))``.
"""

NodeSpan = tuple[int, int, NodeKey]
"""The start and end of host memory, and the node that shows it. A plain tuple: each small tensor
has several.
"""


class Graph:
    """Nodes and the references between them. Nodes are objects with several references, and pieces
    of memory; objects with one reference are folded into the node that refers to them.

    Attributes:
        objects: the nodes that are objects, by identity; keeps them alive.
        pieces: the nodes that are memory of a library.
        edges: the nodes to which each node leads. A node without references is not among the keys.
        cpu_bytes: RAM of each node with the objects folded into it. Leaves, such as numbers and
            text, are missing: they are measured when they are asked for.
        device_bytes: bytes on accelerators of the nodes that have any.
        inside: number of references from objects of the graph to each node that is an object.
        inside_torch: number of references from torch's C++ objects, behind objects of the graph, to
            each tensor.
        folded: the folded objects that may lead to more, if they are wanted.
        arrays: the tensors and arrays that are folded into each node or are that node, if they are
            wanted.
        waking: a node and the identity of a task that a future in this node wakes, for each such
            future.
        of_other_libraries: pieces of torch's storages that another library has allocated, and whose
            owner is not inside.
        has_autograd: True if there are nodes of autograd graphs, whose references cannot be
            counted.
        uncounted: libraries that keep memory which nothing counts, by the node whose objects are of
            them.
        notes: the reasons why sizes are estimates, or memory is not all in RAM.
    """

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.pieces: dict[PieceKey, MemoryPiece] = {}
        self.edges: dict[NodeKey, tuple[NodeKey, ...]] = {}
        self.cpu_bytes: dict[NodeKey, int] = {}
        self.device_bytes: dict[NodeKey, Counter[str]] = {}
        self.inside: Counter[int] = Counter()
        self.inside_torch: Counter[int] = Counter()
        self.folded: list[object] = []
        self.arrays: dict[NodeKey, list[Any]] = {}
        self.waking: list[tuple[int, int]] = []
        self.of_other_libraries: set[NodeKey] = set()
        self.has_autograd = False
        self.uncounted: dict[NodeKey, set[str]] = {}
        self.notes: dict[str, None] = {}

    def lead(self, start: NodeKey, ends: Iterable[NodeKey]) -> None:
        """Add edges from a node."""
        self.edges[start] = tuple(dict.fromkeys(chain(self.edges.get(start, ()), ends)))

    def add_bytes(self, key: NodeKey, size: Mapping[str, int]) -> None:
        """Add bytes by device to a node."""
        self.cpu_bytes[key] = self.cpu_bytes.get(key, 0) + size.get("cpu", 0)
        for device, number in size.items():
            if device != "cpu":
                self.device_bytes.setdefault(key, Counter())[device] += number

    def reach(self, keys: Iterable[NodeKey], without: Collection[NodeKey] = ()) -> set[NodeKey]:
        """Return the nodes ``keys`` and all nodes to which they lead, except the nodes ``without``
        and nodes to which only these lead.
        """
        level = set(keys).difference(without)
        reached = set(level)
        while level:
            level = self.ends_of(level)
            level.difference_update(without)
            level -= reached
            reached |= level
        return reached

    def ends_of(self, keys: Collection[NodeKey]) -> set[NodeKey]:
        """Return the nodes to which an edge from some nodes leads.

        The loop runs in C, because two lists may share a million numbers, each of which is a node
        without edges.
        """
        if len(keys) > len(self.edges):
            keys = self.edges.keys() & keys
        return set(chain.from_iterable(filter(None, map(self.edges.get, keys))))


class GraphReading:
    """The nodes that one reading has found: after ``region.reader.read([model])``, the nodes behind
    ``model``.

    Attributes:
        added: the nodes that no earlier reading has read.
        revisited: nodes that were in the graph when the reading came to them, because an earlier
            reading had added them or an earlier reference of this one; and the nodes that own
            memory which added nodes show, too, as an array does that a new view shows.
    """

    def __init__(self) -> None:
        self.added: list[NodeKey] = []
        self.revisited: set[NodeKey] = set()


class Overlap(NamedTuple):
    """Memory that two nodes show."""

    owner: NodeKey | None
    """The node that was there first; None if the memory is not counted at all."""
    size_bytes: int


class Spans:
    """The addresses of host memory, each byte of which belongs to the node that claimed it first.

    >>> spans = Spans()
    >>> spans.claim(0, 100, 1)
    []
    >>> spans.claim(60, 200, 2)
    [Overlap(owner=1, size_bytes=40)]
    >>> spans.overlaps(190, 300)
    [Overlap(owner=2, size_bytes=10)]
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[NodeKey | None] = []

    def claim(self, start: int, end: int, owner: NodeKey | None) -> list[Overlap]:
        """Claim the bytes from ``start`` to ``end`` for a node; return the overlaps with bytes that
        were claimed before.
        """
        overlaps = self.overlaps(start, end)
        free: list[tuple[int, int]] = []
        position = start
        for number in self._between(start, end):
            if self._starts[number] > position:
                free.append((position, self._starts[number]))
            position = self._ends[number]
        if position < end:
            free.append((position, end))
        for begin, stop in free:
            self._insert(begin, stop, owner)
        return overlaps

    def overlaps(self, start: int, end: int) -> list[Overlap]:
        """Return the claimed bytes from ``start`` to ``end``."""
        overlaps = list[Overlap]()
        for number in self._between(start, end):
            size = min(end, self._ends[number]) - max(start, self._starts[number])
            overlaps.append(Overlap(self._owners[number], size))
        return overlaps

    def _between(self, start: int, end: int) -> range:
        """Return the positions, in the lists, of the spans that overlap with the bytes from
        ``start`` to ``end``.
        """
        first = bisect_right(self._ends, start)
        return range(first, bisect_left(self._starts, end))

    def _insert(self, start: int, end: int, owner: NodeKey | None) -> None:
        """Add a span that overlaps with no other one, in the order of addresses."""
        position = bisect_left(self._starts, start)
        self._starts.insert(position, start)
        self._ends.insert(position, end)
        self._owners.insert(position, owner)


class SmallPieces:
    """The addresses of small memory of libraries, which may be part of large memory that is read
    later.

    >>> pieces = SmallPieces()
    >>> pieces.add(40, 60, ("polars", 40))
    >>> list(pieces.taken(0, 100)), list(pieces.taken(0, 100))
    ([(('polars', 40), 20)], [])
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: dict[int, list[tuple[int, NodeKey]]] = {}
        """The end and the node of each piece, by its start."""

    def add(self, start: int, end: int, owner: NodeKey) -> None:
        """Add the memory of a node."""
        if start not in self._pieces:
            self._pieces[start] = []
            insort(self._starts, start)
        self._pieces[start].append((end, owner))

    def taken(self, start: int, end: int) -> Iterator[tuple[NodeKey, int]]:
        """Remove the pieces that begin between ``start`` and ``end``; yield the node of each, and
        its bytes before ``end``.
        """
        first = bisect_left(self._starts, start)
        last = bisect_left(self._starts, end)
        starts = self._starts[first:last]
        del self._starts[first:last]
        for piece_start in starts:
            for piece_end, owner in self._pieces.pop(piece_start):
                yield owner, min(end, piece_end) - piece_start
