"""Finds the holders of the arrays of watched names, and makes a row of each name's arrays in one
place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

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
_LEAST_SHARE_OF_OBJECTS = 0.03
"""Share of the arrays' bytes from which the bytes of array objects make a size "at least"."""


class HeldArrays(NamedTuple):
    """A name's arrays in one place, and the row that names their holder."""

    name: WatchedName
    """The name with these arrays alone: those in another place are in another ``HeldArrays``."""
    row: HeldRow


class ArrayHolders(NamedTuple):
    """The holders that ``find_array_holders`` has found."""

    arrays: list[HeldArrays]
    """The arrays of names, the largest first."""
    of_questions: dict[StorageKey, Holder]
    """The holders of the further storages and objects; the key of an object is "object" and its
    identity.
    """


class _NameAndHolder(NamedTuple):
    """A name's arrays, and their holder: that of the first one if they are in several places."""

    name: WatchedName
    holder: Holder


@dataclass(frozen=True)
class Questions:
    """Further storages and objects whose holders one search finds, together with those of names'
    arrays: each search passes over all references, so that two would take twice as long.
    """

    storages: Sequence[StorageKey] = ()
    objects: Sequence[object] = ()
    rows: Mapping[StorageKey, Row] = field(default_factory=dict)
    """The rows for which some of the objects stand."""


_NO_QUESTIONS = Questions()


def find_array_holders(
    watched: Sequence[WatchedName],
    heap: Heap,
    roots: Roots,
    *,
    smallest: int,
    questions: Questions = _NO_QUESTIONS,
) -> ArrayHolders:
    """Find the object that holds all live arrays of each name.

    Arrays of one name in several places make several rows. After ``batch = [x, y]``,
    ``cache.append(x)`` and ``app.last = y``, the first search finds ``cache`` for the name
    ``batch``, and that ``cache`` does not lead to ``y``; the second search finds ``app``. Arrays to
    which only names lead that the user keeps on purpose have no row.

    Args:
        watched: the names.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        smallest: minimum bytes of a row for arrays in a further place.
        questions: further objects whose holders the first search finds, too.
    """
    of_questions = dict[StorageKey, Holder]()
    found = _FoundNames()
    to_search = list(watched)
    for number in range(_MOST_PLACES):
        is_first = number == 0
        is_last = number == _MOST_PLACES - 1
        search = _NearestHolderSearch(
            to_search, heap, roots, questions if is_first else _NO_QUESTIONS
        )
        if is_first:
            of_questions = search.holders
        to_search = found.add(search, smallest, is_last=is_last)
        if not to_search:
            break
    held_arrays = list[HeldArrays]()
    with_holders = [*found.in_one_place, *_with_all_holders(found.scattered, heap, roots)]
    for name, holder in with_holders:
        row = _row_of(name, holder)
        if row is not None:
            held_arrays.append(HeldArrays(name, row))
    held_arrays.sort(key=lambda held: -held.row.row.size_bytes)
    return ArrayHolders(held_arrays, of_questions)


class _FoundNames:
    """The names whose holders the searches have found.

    Attributes:
        in_one_place: names with the arrays that are in one place, and the holder there.
        scattered: names with arrays in several places, and the holder of the first one.
    """

    def __init__(self) -> None:
        self.in_one_place: list[_NameAndHolder] = []
        self.scattered: list[_NameAndHolder] = []

    def add(
        self, search: _NearestHolderSearch, smallest: int, *, is_last: bool
    ) -> list[WatchedName]:
        """Add the names of a search, with the arrays to which their holders lead. Return names with
        the arrays elsewhere, which the next search looks for.

        Args:
            search: the search.
            smallest: minimum bytes of the arrays in one place.
            is_last: True if there is no next search.
        """
        to_search = list[WatchedName]()
        for name, arrays in search.alive:
            parts = [name] if is_last else search.parts(name, arrays, smallest)
            nearest, *elsewhere = parts
            to_search += elsewhere
            holder = search.holder(arrays)
            if holder is None:
                self.in_one_place.append(_NameAndHolder(nearest, NOT_REACHED))
            elif elsewhere or search.leads_to_all(arrays):
                self.in_one_place.append(_NameAndHolder(nearest, holder))
            else:
                # The holder leads to some of the arrays, and no further search looks for the
                # remaining ones: they are too small for a row, or this search was the last one.
                self.scattered.append(_NameAndHolder(nearest, holder))
        return to_search


class _NearestHolderSearch:
    """One search for the nearest holder of each name's arrays.

    Attributes:
        alive: the names with live arrays, each with its live arrays; the largest first.
        holders: the holder of each storage and object that was searched: the first array of each
            name stands for all of them.
    """

    def __init__(
        self, watched: Iterable[WatchedName], heap: Heap, roots: Roots, questions: Questions
    ) -> None:
        self.alive = _live_arrays_of_names(watched)
        self._rows: dict[StorageKey, Row] = {}
        """The row of all arrays of each name, by the storage of the first one."""
        for name, arrays in self.alive[:MOST_EXPLAINED]:
            self._rows[arrays[0].storage] = name.row(arrays)
        self.holders = explain(
            [*self._rows, *questions.storages],
            heap,
            roots,
            objects=questions.objects,
            rows={**self._rows, **questions.rows},
            all_places=True,
        )

    def parts(self, name: WatchedName, arrays: Sequence[Array], smallest: int) -> list[WatchedName]:
        """Return a name in two parts: with the arrays to which their holder leads, and with the
        arrays elsewhere. Return the name alone if it has none elsewhere, or if one of the parts has
        less than ``smallest`` bytes.

        Args:
            name: the name.
            arrays: its live arrays.
            smallest: minimum bytes of each part.
        """
        row = self._rows.get(arrays[0].storage)
        if row is None or row.is_whole:
            return [name]
        parts = list(name.divided(row.held_storages))
        if min(part.size_bytes for part in parts) < smallest:
            return [name]
        return parts

    def holder(self, arrays: Sequence[Array]) -> Holder | None:
        """Return the holder of a name's arrays; None if it was not searched."""
        return self.holders.get(arrays[0].storage)

    def leads_to_all(self, arrays: Sequence[Array]) -> bool:
        """Return True if the holder of a name's arrays leads to all of them."""
        return self._rows[arrays[0].storage].is_whole


def _with_all_holders(
    scattered: Sequence[_NameAndHolder], heap: Heap, roots: Roots
) -> Iterator[_NameAndHolder]:
    """Yield names whose arrays are in several places, with one holder for all places: its line
    removes the arrays from each place, unless there are too many arrays to search for each one.
    """
    with_few_arrays = [name for name, _ in scattered if len(name.live_arrays()) <= _MOST_SCATTERED]
    storages = list(chain.from_iterable(name.live_storages() for name in with_few_arrays))
    holders = explain(storages, heap, roots, all_places=True) if storages else {}
    for name, first_holder in scattered:
        holders_of_arrays = [holders[key] for key in name.live_storages() if key in holders]
        if holders_of_arrays:
            yield _NameAndHolder(name, holder_of_all(holders_of_arrays))
        else:
            path = f"{first_holder.path}, and other places"
            holder = replace(first_holder, path=path, remedy=REMOVE_THEM)
            yield _NameAndHolder(name, holder)


def _live_arrays_of_names(watched: Iterable[WatchedName]) -> list[tuple[WatchedName, list[Array]]]:
    """Return the names that have live arrays, each with these arrays; the name with the most bytes
    first.
    """
    alive = list[tuple[WatchedName, list[Array]]]()
    for name in watched:
        arrays = name.live_arrays()
        if arrays:
            alive.append((name, arrays))
    return sorted(alive, key=lambda pair: -size_of(pair[1]))


def _row_of(name: WatchedName, holder: Holder) -> HeldRow | None:
    """Return the row of a name's arrays; None if only a name leads to them that the user keeps on
    purpose, as with ``--keep``.
    """
    if holder.is_kept:
        return None
    if name.may_be_older:
        holder = holder_of_possibly_older(holder)
    arrays = name.live_arrays()
    row = replace(
        name.record,
        size_bytes=size_of(arrays),
        arrays=len(arrays),
        is_at_least=name.record.is_at_least or _have_large_objects(arrays),
    )
    return HeldRow(row, holder).with_comment(name.remark())


def _have_large_objects(arrays: Sequence[Array]) -> bool:
    """Return True if arrays are so small that their array objects matter, which are not counted: of
    a million arrays of 8 bytes, the size then is "at least" 8 MB.
    """
    arrays_by_library = Counter(array.storage[0] for array in arrays)
    objects_bytes = 0
    for library, number in arrays_by_library.items():
        objects_bytes += _OBJECT_BYTES.get(library, 0) * number
    return objects_bytes > _LEAST_SHARE_OF_OBJECTS * size_of(arrays)


def storages_with_holder_of(row: HeldRow, held_arrays: Iterable[HeldArrays]) -> set[StorageKey]:
    """Return the storages of the arrays whose rows become one with an object's row, because they
    have the same holder: those of the columns of a data frame, for the frame's row.
    """
    storages = set[StorageKey]()
    for name, row_of_arrays in held_arrays:
        has_same_line = row_of_arrays.line == row.line
        has_same_path = _path_of(row_of_arrays) == _path_of(row)
        has_other_name = row_of_arrays.row.name not in ("", row.row.name)
        if has_same_line and has_same_path and not has_other_name:
            storages.update(name.live_storages())
    return storages


def _path_of(row: HeldRow) -> str:
    """Return the path to a row's holder; empty if that was not searched."""
    return "" if row.holder is None else row.holder.path


def holder_of_possibly_older(holder: Holder) -> Holder:
    """Return a holder of memory that may be older than the experiment: its path says so, and it has
    no line, because the user may need the memory.
    """
    path = f"{holder.path}, possibly allocated before the experiment"
    return replace(holder, path=path, remedy=NO_REMEDY)
