"""Finds the holders of the arrays of watched names, and makes a row of each name's arrays in one
place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ipygpumem.heap.holders.explanation import NOT_REACHED
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import Array, StorageKey
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.remedies import NO_REMEDY, REMOVE_THEM, Holder
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.inventory.remaining.watched_names import WatchedName, size_of
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import holder_of_all

MOST_EXPLAINED = 5000
"""Maximum number of arrays, largest first, whose holders are searched at once."""
_MOST_PLACES = 4
"""Maximum number of places to search for the arrays of one name."""

_MOST_SCATTERED = 40
"""Maximum number of a name's arrays in several places of which each one's holder is searched."""

_OBJECT_BYTES = {"numpy": 144, "torch": 480}
"""Bytes of an array without its data, roughly: the object, its shape, the storage."""
_LEAST_PART = 0.03
"""Smallest part of the memory to mention."""

Explained = tuple[WatchedName, HeldRow]
"""A name's arrays in one place, and their row with the holder."""
NameAndHolder = tuple[WatchedName, Holder]
"""A name's arrays, and their holder: that of the first one if they are in several places."""


@dataclass
class Questions:
    """Further storages and objects whose holders one search finds, together with the survivors'
    holders.
    """

    storages: Sequence[StorageKey] = ()
    objects: Sequence[object] = ()
    rows: Mapping[StorageKey, Row] = field(default_factory=dict)
    """The rows for which some of the objects stand."""
    holders: dict[StorageKey, Holder] = field(default_factory=dict)
    """The answers; the key of an object is "object" and its identity."""


def explained(
    watched: Sequence[WatchedName],
    heap: Heap,
    roots: Roots,
    *,
    smallest: int,
    questions: Questions | None = None,
) -> list[Explained]:
    """Return the live arrays of each name, largest first, with the object that holds all of them.

    Arrays of one name in several places make several rows: each search finds the holder of some of
    them, and the next one that of the remaining ones. Arrays to which only names to keep lead are
    left out.

    Args:
        watched: the names.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        smallest: minimum bytes of a row for arrays in a further place.
        questions: questions that the first search answers, too.
    """
    with_one_holder = list[NameAndHolder]()
    scattered = list[NameAndHolder]()
    to_search = list(watched)
    for number in range(_MOST_PLACES):
        search = _Search(to_search, heap, roots, questions if number == 0 else None)
        to_search = []
        may_divide = number < _MOST_PLACES - 1
        for item, arrays in search.alive:
            parts = [item]
            if may_divide:
                parts = search.parts(item, arrays, smallest)
            nearest, *remaining = parts
            to_search += remaining
            holder = search.holder(arrays)
            if holder is None:
                with_one_holder.append((nearest, NOT_REACHED))
            elif remaining or search.is_whole(arrays):
                with_one_holder.append((nearest, holder))
            else:
                scattered.append((nearest, holder))
        if not to_search:
            break
    rows = list[Explained]()
    for item, holder in [*with_one_holder, *_with_all_holders(scattered, heap, roots)]:
        row = _row_of(item, holder)
        if row is not None:
            rows.append((item, row))
    return sorted(rows, key=lambda pair: -pair[1].row.size_bytes)


class _Search:
    """One search for the nearest holder of each name's arrays.

    Attributes:
        alive: the names with live arrays, each with its live arrays; the largest first.
    """

    def __init__(
        self,
        watched: Iterable[WatchedName],
        heap: Heap,
        roots: Roots,
        questions: Questions | None,
    ) -> None:
        self.alive = _live_arrays_of_names(watched)
        self._rows: dict[StorageKey, Row] = {}
        for item, arrays in self.alive[:MOST_EXPLAINED]:
            self._rows[arrays[0].storage] = item.row(arrays)
        storages = list(self._rows)
        rows = dict(self._rows)
        objects: Sequence[object] = ()
        if questions is not None:
            storages += questions.storages
            rows.update(questions.rows)
            objects = questions.objects
        self._holders = explain(storages, heap, roots, objects=objects, rows=rows, all_places=True)
        if questions is not None:
            questions.holders.update(self._holders)

    def parts(self, item: WatchedName, arrays: Sequence[Array], smallest: int) -> list[WatchedName]:
        """Return a name with the arrays to which their holder leads, and one with the remaining
        arrays; the name itself if it has no remaining ones, or a part less than ``smallest`` bytes.

        Args:
            item: the name.
            arrays: its live arrays.
            smallest: minimum bytes of each part.
        """
        row = self._rows.get(arrays[0].storage)
        if row is None or row.is_whole:
            return [item]
        parts = list(item.divided(row.held_storages))
        if min(part.size_bytes for part in parts) < smallest:
            return [item]
        return parts

    def holder(self, arrays: Sequence[Array]) -> Holder | None:
        """Return the holder of a name's arrays; None if it was not searched."""
        return self._holders.get(arrays[0].storage)

    def is_whole(self, arrays: Sequence[Array]) -> bool:
        """Return True if the holder leads to all of a name's arrays."""
        return self._rows[arrays[0].storage].is_whole


def _with_all_holders(
    scattered: Sequence[NameAndHolder], heap: Heap, roots: Roots
) -> Iterator[NameAndHolder]:
    """Yield names whose arrays are in several places, with one holder for all places."""
    with_few_arrays = [item for item, _ in scattered if len(item.live_arrays()) <= _MOST_SCATTERED]
    storages = list(chain.from_iterable(item.live_storages() for item in with_few_arrays))
    holders = explain(storages, heap, roots, all_places=True) if storages else {}
    for item, first_holder in scattered:
        holders_of_arrays = [holders[key] for key in item.live_storages() if key in holders]
        if holders_of_arrays:
            yield item, holder_of_all(holders_of_arrays)
        else:
            path = f"{first_holder.path}, and other places"
            yield item, replace(first_holder, path=path, remedy=REMOVE_THEM)


def _live_arrays_of_names(watched: Iterable[WatchedName]) -> list[tuple[WatchedName, list[Array]]]:
    """Return the names with live arrays, each with its live arrays; the largest first."""
    alive = list[tuple[WatchedName, list[Array]]]()
    for item in watched:
        arrays = item.live_arrays()
        if arrays:
            alive.append((item, arrays))
    return sorted(alive, key=lambda pair: -size_of(pair[1]))


def _row_of(item: WatchedName, holder: Holder) -> HeldRow | None:
    """Return the row of a name's arrays; None if only a name to keep leads to them."""
    if holder.is_kept:
        return None
    if item.may_be_older:
        holder = holder_of_possibly_older(holder)
    arrays = item.live_arrays()
    row = replace(
        item.record,
        size_bytes=size_of(arrays),
        arrays=len(arrays),
        is_at_least=item.record.is_at_least or _have_large_objects(arrays),
    )
    return HeldRow(row, holder).with_comment(item.remark())


def _have_large_objects(arrays: Sequence[Array]) -> bool:
    """Return True if arrays are so small that the array objects, which are not counted, would make
    their size wrong.
    """
    arrays_by_library = Counter(array.storage[0] for array in arrays)
    objects_bytes = 0
    for library, number in arrays_by_library.items():
        objects_bytes += _OBJECT_BYTES.get(library, 0) * number
    return objects_bytes > _LEAST_PART * size_of(arrays)


def storages_with_holder_of(row: HeldRow, explained_rows: Iterable[Explained]) -> set[StorageKey]:
    """Return the storages of the arrays whose rows become one with an object's row, because they
    have the same holder.
    """
    storages = set[StorageKey]()
    for item, of_arrays in explained_rows:
        is_same = of_arrays.line == row.line and _path_of(of_arrays) == _path_of(row)
        if is_same and of_arrays.row.name in ("", row.row.name):
            storages.update(item.live_storages())
    return storages


def _path_of(row: HeldRow) -> str:
    """Return the path to a row's holder; empty if that was not searched."""
    return "" if row.holder is None else row.holder.path


def holder_of_possibly_older(holder: Holder) -> Holder:
    """Return the holder of memory that may be older than the experiment: no line to free it."""
    path = f"{holder.path}, possibly allocated before the experiment"
    return replace(holder, path=path, remedy=NO_REMEDY)
