"""Finds data that a line drops besides the memory of its row.

After ``box["top"] = (array, box["top"])``, no line frees the array alone: ``del box["top"]`` drops
the older tuple, too. The line then says so. An experiment knows which data is older; ``%gpumem
leaks`` only knows that there is more than the leak.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import _lru_cache_wrapper
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity, instances_among, of_types, without_types
from ipygpumem.heap.kinds.arrays import (
    Array,
    StorageKey,
    described,
    holding_objects,
    is_array,
    library_type,
)
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.frames import SUSPENDED
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.statements import outermost
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.walks.parts import cached
from ipygpumem.introspect import NUMBERS, is_exactly
from ipygpumem.inventory.remaining.earlier_data import EarlierData
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.units import format_bytes

_MOST_NEW = 300_000
"""Maximum number of objects to examine behind what one line removes."""
_MOST_LEAKS = 50
"""Maximum number of leaks, the largest ones, whose lines are examined."""
_UNSURE = 0.1
"""Share of a row's bytes by which two measurements may differ."""
_LARGE = 1 << 16
"""Minimum bytes to mention of an older object that the line itself names."""


class OlderData:
    """The older objects behind what the lines of an experiment's rows remove.

    It keeps these objects alive: drop it soon.

    Args:
        objects_since: returns the identities of the tracked objects made since the start of the
            experiment, and maybe of some that have died; none if they cannot be told apart.
        was_there: returns True for an array that may have been allocated before.
        earlier: the data at the start that the collector does not track.
        namespaces: the identities of the dicts with the user's names, which lead to everything.
        new: the objects of the rows that are no arrays.
    """

    def __init__(
        self,
        objects_since: Callable[[], set[int]],
        was_there: Callable[[object, Array], bool],
        earlier: EarlierData,
        namespaces: Iterable[int],
        new: Sequence[object],
    ) -> None:
        self._objects_since = objects_since
        self._made = set[int]()
        """Identities of the tracked objects made since the start; empty until they are needed."""
        self._was_there = was_there
        self._earlier = earlier
        self._namespaces = list(namespaces)
        self._new = list(by_identity(new).values())
        self._new_ids = set(map(id, self._new))
        self._objects_of_lines: dict[str, ObjectsOfLine] = {}
        """The object at the end of each reference that a line removes, by the line."""
        self._older: dict[str, dict[int, object]] = {}
        """The nearest older objects behind these, by identity and by the line."""

    def add_line(
        self, line: str, cuts: Sequence[Cut], removed_objects: Mapping[int, object]
    ) -> None:
        """Record the older objects behind what a line removes, if there are any.

        Args:
            line: the line.
            cuts: the references that it removes.
            removed_objects: the objects at the end of all lines' references, by identity.
        """
        of_line = ObjectsOfLine.of(cuts, removed_objects)
        if not _have_references(of_line.objects):
            return
        self._made = self._made or self._objects_since()
        references = ReferenceReader(Barriers(self._namespaces), has_text_keys=False)
        removed_older = self._older_among(of_line.objects)
        # What an older object has received, such as a future its result, may lead to older data.
        in_removed_older = _references_of(list(removed_older.values()), references)
        removed_older.update(self._older_among(in_removed_older))
        older = self._nearest_older([*of_line.objects, *in_removed_older], references)
        older.update(removed_older)
        if older:
            self._objects_of_lines[line] = of_line
            self._older[line] = older

    def _nearest_older(
        self, objects: Sequence[object], references: ReferenceReader
    ) -> dict[int, object]:
        """Return the first older object on each way from the objects, by identity: one of them, or
        one to which only new objects lead from there.
        """
        older = dict[int, object]()
        visited_ids = set[int]()
        level = by_identity(objects)
        while level and len(visited_ids) < _MOST_NEW:
            visited_ids.update(level)
            items = list(level.values())
            older_here = self._older_among(items)
            older.update(older_here)
            ends = older_here.keys() | _plain_arrays(items)
            new_here = [item for key, item in level.items() if key not in ends]
            below = by_identity(without_types(NUMBERS, references.of(new_here).of_python))
            level = {key: item for key, item in below.items() if key not in visited_ids}
        return older

    def _older_among(self, items: Sequence[object]) -> dict[int, object]:
        """Return the objects that are older than the experiment, by identity."""
        older = dict[int, object]()
        arrays = by_identity(_arrays_among(items))
        for item, array in described(list(arrays.values())):
            if self._was_there(item, array):
                older[id(item)] = item
        if self._made:
            are_older = map(not_, map(self._made.__contains__, map(id, items)))
            # Nearly all objects are new: so no set of identities is made of them.
            for item in filter(gc.is_tracked, compress(items, are_older)):
                if id(item) not in self._new_ids and id(item) not in arrays:
                    older[id(item)] = item
        older.update(by_identity(self._earlier.earlier_among(items)))
        return older

    def objects(self) -> list[object]:
        """Return the nearest older objects behind all lines, each once."""
        objects = dict[int, object]()
        for older in self._older.values():
            objects.update(older)
        return list(objects.values())

    def remarks(self, ended: Mapping[str, Set[int]]) -> dict[str, str]:
        """Return the remark on each line that drops older objects.

        Nothing else of ours may refer to these objects now: it would count as their holder.

        Args:
            ended: the arrays in the cycles that each line ends, by identity.
        """
        remarks = dict[str, str]()
        dropped_ids = set[int]()
        for line in self._older:
            dropped = self._dropped_by([line], ended)
            dropped_ids |= dropped.identities
            remarks[line] = self._remark([line], dropped)
        lines = list(self._older)
        if len(lines) > 1:
            # Two lines may remove the only two references to an object.
            dropped = self._dropped_by(lines, ended, without=dropped_ids)
            lines_to_remark = [
                line for line in lines if not dropped.identities.isdisjoint(self._older[line])
            ]
            if lines_to_remark and not remarks[lines_to_remark[-1]]:
                remarks[lines_to_remark[-1]] = self._remark(lines, dropped)
        return {line: remark for line, remark in remarks.items() if remark}

    def _dropped_by(
        self, lines: Sequence[str], ended: Mapping[str, Set[int]], without: Set[int] = frozenset()
    ) -> _DroppedObjects:
        """Return the older objects that die if the lines are run.

        Args:
            lines: the lines.
            ended: as in ``remarks``.
            without: identities of objects to leave out.
        """
        of_lines = ObjectsOfLine.joined([self._objects_of_lines[line] for line in lines])
        older = dict[int, object]()
        for line in lines:
            older.update(self._older[line])
        region = Region(
            [*of_lines.objects, *older.values(), *self._new],
            namespaces=self._namespaces,
            keeps_arrays=True,
        )
        ours = self._own_references(of_lines, older)
        in_ended_cycles = set[int]().union(*(ended.get(line, set()) for line in lines))
        dropped = _nodes_dropped(region, of_lines, ours, in_ended_cycles)
        dropped_older = {key for key in older if key in dropped and key not in without}
        size_bytes = self._older_bytes(region, dropped_older, dropped)
        return _DroppedObjects(dropped_older, size_bytes)

    def _own_references(
        self, of_lines: ObjectsOfLine, older: Mapping[int, object]
    ) -> Mapping[int, int]:
        """Return the number of our references to each object, by its identity.

        Args:
            of_lines: the objects to which lines remove references.
            older: the older objects behind these.
        """
        lists = [of_line.objects for of_line in self._objects_of_lines.values()]
        lists += [of_lines.objects, self._new]
        references = Counter(map(id, chain.from_iterable(lists)))
        for objects in (*self._older.values(), older):
            references.update(objects.keys())
        return references

    def _older_bytes(self, region: Region, older: Set[int], dropped: Set[NodeKey]) -> int:
        """Return the bytes of dropped older objects, and of the older ones to which they lead.

        Args:
            region: the objects behind the lines.
            older: identities of the nearest older objects that die.
            dropped: everything that dies.
        """
        new = {key for key in region.objects if key in self._made} | self._new_ids
        of_older = region.reach(older, without=new) & dropped
        new_arrays = dict[StorageKey, int]()
        for item, array in described(region.arrays_of(of_older)):
            if not self._was_there(item, array):
                new_arrays[array.storage] = array.size_bytes
        return region.bytes_of(of_older).total() - sum(new_arrays.values())

    def _remark(self, lines: Sequence[str], dropped: _DroppedObjects) -> str:
        """Return the remark on lines that drop older objects; empty if all of these have other
        holders.
        """
        removed_ids = set[int]()
        for line in lines:
            removed_ids.update(map(id, self._objects_of_lines[line].objects))
        # Closing a generator only names its code, which the function keeps.
        names_older = not dropped.identities.isdisjoint(removed_ids)
        if not dropped.identities or (names_older and dropped.size_bytes < _LARGE):
            return ""
        return _also_drops_older(dropped.size_bytes)


class _DroppedObjects(NamedTuple):
    """The older objects that lines drop."""

    identities: set[int]
    """The nearest older objects behind the lines."""
    size_bytes: int
    """Their bytes, with the older objects to which they lead."""


def _also_drops_older(size_bytes: int) -> str:
    """Return the remark on a line that drops so many bytes of older data."""
    return f"also drops {format_bytes(size_bytes)} of older data"


class KnownObjects(NamedTuple):
    """The objects whose age is known. It keeps them alive: drop it soon."""

    older: Sequence[object] = ()
    """The nearest older objects behind memory that experiments have left."""
    left_over: Sequence[object] = ()
    """The objects that experiments have left."""

    def bytes_of_older(self, region: Region, of_line: ObjectsOfLine, dropped: Set[NodeKey]) -> int:
        """Return the bytes of the older objects that a line drops; 0 if it names one of them: new
        data in that, such as the fit of an estimator, may be too small for a row.

        Args:
            region: the objects behind the lines.
            of_line: the objects to which the line removes references.
            dropped: everything that dies.
        """
        left_over_ids = set(map(id, self.left_over))
        older_ids = set(map(id, self.older)) - left_over_ids
        if not older_ids.isdisjoint(map(id, of_line.objects)):
            return 0
        dropped_older = region.reach(older_ids & dropped, without=left_over_ids) & dropped
        return region.bytes_of(dropped_older).total()


_NOTHING_KNOWN = KnownObjects()


class OtherData:
    """The data that lines drop besides the memory of their rows, however old it is.

    It keeps objects alive: drop it soon.

    Args:
        sizes: the bytes of the row of each line.
        cuts: the references that each line removes.
        removed_objects: the objects at the end of these references, by identity.
        namespaces: the identities of the dicts with the user's names, which lead to everything.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        cuts: Mapping[str, Sequence[Cut]],
        removed_objects: Mapping[int, object],
        namespaces: Iterable[int],
    ) -> None:
        self._namespaces = list(namespaces)
        self._sizes = sizes
        self._objects_of_lines: dict[str, ObjectsOfLine] = {}
        """The object at the end of each reference that a line removes."""
        for line in sizes:
            of_line = ObjectsOfLine.of(cuts.get(line, ()), removed_objects)
            if _have_references(of_line.objects):
                self._objects_of_lines[line] = of_line

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[HeldRow],
        removed_objects: Mapping[int, object],
        namespaces: Iterable[int],
    ) -> OtherData:
        """Return the data that the lines of the first rows drop.

        Args:
            rows: the rows, the largest first.
            removed_objects: the objects at the end of the references that lines remove.
            namespaces: the identities of the dicts with the user's names.
        """
        cuts = dict[str, Sequence[Cut]]()
        sizes = dict[str, int]()
        for row in rows[:_MOST_LEAKS]:
            if row.holder is None or row.row.is_at_least:
                continue
            is_single = row.row.arrays == row.row.objects == 1
            # A single array that a variable keeps on purpose is not freed by the line.
            is_kept = is_single and row.holder.has_kept_name
            sizes[row.line] = 0 if is_kept else row.row.size_bytes
            cuts[row.line] = row.cuts or cuts.get(row.line, ())
        return cls(sizes, cuts, removed_objects, namespaces)

    @property
    def objects(self) -> list[object]:
        """The objects at the end of the references that the lines remove, once for each
        reference.
        """
        of_lines = self._objects_of_lines.values()
        return list(chain.from_iterable(of_line.objects for of_line in of_lines))

    def remarks(
        self,
        smallest: int,
        ended: Mapping[str, Set[int]],
        known: KnownObjects = _NOTHING_KNOWN,
        *,
        is_certain: bool = False,
    ) -> dict[str, str]:
        """Return the remark on each line that drops older data, or at least ``smallest`` bytes of
        other data.

        Nothing else of ours may refer to these objects now: it would count as their holder.

        Args:
            smallest: the bytes.
            ended: the arrays in the cycles that each line ends, by identity.
            known: the objects whose age is known.
            is_certain: True to leave out the objects that the line names, and memory of libraries
                that may have other owners, such as a cache that two connections of sqlite3 share.
        """
        removed = self.objects
        region = Region([*removed, *known.older, *known.left_over], namespaces=self._namespaces)
        in_lists = Counter(map(id, removed))
        in_lists.update(in_lists)  # ``removed``, and the list of each line
        in_lists.update(map(id, [*known.older, *known.left_over]))
        remarks = dict[str, str]()
        for line, of_line in self._objects_of_lines.items():
            dropped = _nodes_dropped(region, of_line, in_lists, ended.get(line, set()))
            if is_certain:
                dropped_bytes = _certain_bytes(region, of_line, dropped)
            else:
                dropped_bytes = region.bytes_of(dropped).total()
            other_bytes = dropped_bytes - self._sizes[line]
            older_bytes = known.bytes_of_older(region, of_line, dropped)
            least_bytes = max(smallest, self._sizes[line] * _UNSURE)
            if other_bytes - older_bytes >= least_bytes:
                remarks[line] = f"also drops {format_bytes(other_bytes)} of other data"
            elif older_bytes:
                remarks[line] = _also_drops_older(older_bytes)
        return remarks


def _certain_bytes(region: Region, of_line: ObjectsOfLine, dropped: Set[NodeKey]) -> int:
    """Return the bytes of dropped nodes that are surely other data: neither the objects that the
    line names, nor memory of libraries that may have other owners.
    """
    counted = {key for key in dropped if isinstance(key, int) or key[0] == "torch"}
    dropped_ids = of_line.certain & dropped
    named = [item for item in of_line.objects if id(item) in dropped_ids]
    return region.bytes_of(counted).total() - region.reader.types.own_bytes.of(named)


class ObjectsOfLine(NamedTuple):
    """The objects that lose a reference when a line runs."""

    objects: list[object]
    """The objects, once for each reference."""
    certain: set[int]
    """The identities of the objects to which the line itself removes references, not a call."""

    @classmethod
    def of(cls, cuts: Sequence[Cut], removed_objects: Mapping[int, object]) -> ObjectsOfLine:
        """Return the objects at the end of a line's references.

        Args:
            cuts: the references.
            removed_objects: the objects at the end of all lines' references, by identity.
        """
        of_line = cls([], set())
        # The line does not close a generator that it deletes with a tuple around it.
        for reference in outermost(cuts):
            if reference.removed_id in removed_objects:
                of_line.objects.append(removed_objects[reference.removed_id])
                of_line.certain.add(reference.removed_id)
            else:
                of_line.objects.extend(_targets_of_call(reference, removed_objects))
        return of_line

    @classmethod
    def joined(cls, of_lines: Iterable[ObjectsOfLine]) -> ObjectsOfLine:
        """Return the objects of several lines."""
        together = cls([], set())
        for of_line in of_lines:
            together.objects.extend(of_line.objects)
            together.certain.update(of_line.certain)
        return together


def _nodes_dropped(
    region: Region, of_line: ObjectsOfLine, ours: Mapping[int, int], ended: Set[int]
) -> set[NodeKey]:
    """Return the nodes that die with the objects that a line removes.

    Args:
        region: what these objects lead to.
        of_line: the objects.
        ours: the references that do not count, as in ``held_from_outside``.
        ended: the arrays in the cycles that the line ends, by identity.
    """
    held_before = region.held_from_outside(ours)
    ours_and_removed = Counter(ours)
    ours_and_removed.update(map(id, of_line.objects))
    held_after = region.held_from_outside(ours_and_removed)
    held_after |= region.in_hidden_cycles() - ended
    # A holder that is read, too, because a child refers to its parent, leads to what it loses.
    lost = of_line.certain - held_before
    alive = region.reach(held_after, without=lost)
    return region.reach(map(id, of_line.objects)) - alive


def _references_of(items: Sequence[object], references: ReferenceReader) -> list[object]:
    """Return the objects to which the items refer, directly or by a dict, such as the dict of their
    attributes.

    An object refers to its attributes by a dict once that was read; until Python 3.10 always.
    """
    referents = references.of(items).of_python
    dicts = of_types({id(dict)}, referents)
    return [*referents, *references.of(dicts).of_python]


def _arrays_among(items: Sequence[object]) -> list[object]:
    """Return the tensors and NumPy arrays among the items."""
    array_type, tensor_type = library_type("numpy", "ndarray"), library_type("torch", "Tensor")
    bases = [kind for kind in (array_type, tensor_type) if kind is not None]
    return instances_among(items, *bases)


def _plain_arrays(items: Sequence[object]) -> set[int]:
    """Return the identities of the tensors and the arrays without objects."""
    arrays = by_identity(_arrays_among(items))
    of_numpy = list(filter(is_array, arrays.values()))
    of_objects = compress(of_numpy, holding_objects(of_numpy))
    return arrays.keys() - set(map(id, of_objects))


def _have_references(items: Sequence[object]) -> bool:
    """Return True if one of the items may have references: it is no array, or one of objects."""
    return len(_plain_arrays(items)) < len(by_identity(items))


def _targets_of_call(cut: Cut, removed_objects: Mapping[int, object]) -> Sequence[object]:
    """Return the objects that lose a reference when a call ends their owner."""
    owner = removed_objects.get(cut.owner_id) if cut.kind is Kind.CALL else None
    if is_exactly(owner, *SUSPENDED):
        return gc.get_referents(owner)
    if type(owner) is _lru_cache_wrapper:
        return cached(owner)
    return []


def with_remarks(rows: Iterable[HeldRow], remarks: Mapping[str, str]) -> list[HeldRow]:
    """Return the rows with the remark on each one's line, by the line."""
    return [row.with_comment(remarks.get(row.line, "")) for row in rows]
