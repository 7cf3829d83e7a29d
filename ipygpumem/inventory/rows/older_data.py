"""Finds data from before an experiment that a line drops together with the memory of its row.

After ``box["top"] = (array, box["top"])``, no line frees the new array alone: ``del box["top"]``
drops the older tuple, too. The line then says so.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity, of_types, without_types
from ipygpumem.heap.kinds.arrays import Array, StorageKey, described
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.introspect import NUMBERS
from ipygpumem.inventory.remaining.earlier_data import EarlierData
from ipygpumem.inventory.rows.dropped_objects import (
    RemovedObjects,
    arrays_among,
    have_references,
    nodes_dropped,
    plain_arrays,
)
from ipygpumem.units import format_bytes

_MOST_NEW = 300_000
"""Maximum number of objects to examine behind what one line removes."""
_LEAST_BYTES_TO_NAME = 1 << 16
"""Minimum bytes to mention of an older object that the line itself names."""


class OlderData:
    """Finds the data from before an experiment that the lines of the experiment's rows drop.

    It keeps the objects behind the lines alive: drop it soon.

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
        self._made_since = set[int]()
        """Identities of the tracked objects made since the start; empty until they are needed."""
        self._was_there = was_there
        self._earlier = earlier
        self._namespaces = list(namespaces)
        self._new = list(by_identity(new).values())
        self._new_ids = set(map(id, self._new))
        self._removed_by_line: dict[str, RemovedObjects] = {}
        """The objects to which each line removes references, if it may drop older objects."""
        self._older_by_line: dict[str, dict[int, object]] = {}
        """The nearest older objects behind these, by line and by identity."""

    def add_line(
        self, line: str, cuts: Sequence[Cut], removed_objects: Mapping[int, object]
    ) -> None:
        """Find the older objects behind the objects that a line removes, and note the line if there
        are any.

        Args:
            line: the line.
            cuts: the references that it removes.
            removed_objects: the objects at the end of all lines' references, by identity.
        """
        removed = RemovedObjects.of(cuts, removed_objects)
        if not have_references(removed.objects):
            return
        self._made_since = self._made_since or self._objects_since()
        references = ReferenceReader(Barriers(self._namespaces), has_text_keys=False)
        removed_older = self._older_among(removed.objects)
        # ``del jobs["a"]`` removes an older future. Its result is new, and may lead to further
        # older data: so the search goes on behind the removed older objects, too.
        in_removed_older = _references_of(list(removed_older.values()), references)
        removed_older.update(self._older_among(in_removed_older))
        older = self._nearest_older([*removed.objects, *in_removed_older], references)
        older.update(removed_older)
        if older:
            self._removed_by_line[line] = removed
            self._older_by_line[line] = older

    def _nearest_older(
        self, objects: Sequence[object], references: ReferenceReader
    ) -> dict[int, object]:
        """Return the first older object on each way from the objects, by identity. It is one of
        them, or only new objects lead to it from there. The search does not go on behind it.
        """
        older = dict[int, object]()
        visited_ids = set[int]()
        level = by_identity(objects)
        while level and len(visited_ids) < _MOST_NEW:
            visited_ids.update(level)
            items = list(level.values())
            older_here = self._older_among(items)
            older.update(older_here)
            ends = older_here.keys() | plain_arrays(items)
            new_here = [item for key, item in level.items() if key not in ends]
            below = by_identity(without_types(NUMBERS, references.of(new_here).of_python))
            level = {key: item for key, item in below.items() if key not in visited_ids}
        return older

    def _older_among(self, items: Sequence[object]) -> dict[int, object]:
        """Return the objects that are older than the experiment, by identity: arrays that were
        there, tracked objects that the collector did not list as new, and recognised data.
        """
        older = dict[int, object]()
        arrays = by_identity(arrays_among(items))
        for item, array in described(list(arrays.values())):
            if self._was_there(item, array):
                older[id(item)] = item
        if self._made_since:
            are_older = map(not_, map(self._made_since.__contains__, map(id, items)))
            # Nearly all objects are new: so no set of identities is made of them.
            for item in filter(gc.is_tracked, compress(items, are_older)):
                if id(item) not in self._new_ids and id(item) not in arrays:
                    older[id(item)] = item
        older.update(by_identity(self._earlier.earlier_among(items)))
        return older

    def objects(self) -> list[object]:
        """Return the nearest older objects behind all lines, each once."""
        objects = dict[int, object]()
        for older in self._older_by_line.values():
            objects.update(older)
        return list(objects.values())

    def remarks(self, ended: Mapping[str, Set[int]]) -> dict[str, str]:
        """Return the remark on each line that drops older objects, such as ``also drops 8 MiB of
        older data``.

        Nothing else of ours may refer to these objects now: it would count as their holder.

        Args:
            ended: the arrays in the cycles that each line ends, by identity.
        """
        remarks = dict[str, str]()
        dropped_ids = set[int]()
        for line in self._older_by_line:
            dropped = self._dropped_by([line], ended)
            dropped_ids |= dropped.identities
            remarks[line] = self._remark([line], dropped)
        lines = list(self._older_by_line)
        if len(lines) > 1:
            # Two lines may remove the only two references to an object. It dies only if both are
            # run, so the last of them gets the remark.
            dropped = self._dropped_by(lines, ended, without=dropped_ids)
            lines_to_remark = [
                line
                for line in lines
                if not dropped.identities.isdisjoint(self._older_by_line[line])
            ]
            if lines_to_remark and not remarks[lines_to_remark[-1]]:
                remarks[lines_to_remark[-1]] = self._remark(lines, dropped)
        return {line: remark for line, remark in remarks.items() if remark}

    def _dropped_by(
        self, lines: Sequence[str], ended: Mapping[str, Set[int]], without: Set[int] = frozenset()
    ) -> _DroppedObjects:
        """Return the older objects that die if all of the lines are run.

        Args:
            lines: the lines.
            ended: as in ``remarks``.
            without: identities of objects to leave out.
        """
        removed = RemovedObjects.joined([self._removed_by_line[line] for line in lines])
        older = dict[int, object]()
        for line in lines:
            older.update(self._older_by_line[line])
        region = Region(
            [*removed.objects, *older.values(), *self._new],
            namespaces=self._namespaces,
            keeps_arrays=True,
        )
        own_references = self._own_references(removed, older)
        in_ended_cycles = set[int]().union(*(ended.get(line, set()) for line in lines))
        dropped = nodes_dropped(region, removed, own_references, in_ended_cycles)
        dropped_older = {key for key in older if key in dropped and key not in without}
        size_bytes = self._older_bytes(region, dropped_older, dropped)
        return _DroppedObjects(dropped_older, size_bytes)

    def _own_references(
        self, removed: RemovedObjects, older: Mapping[int, object]
    ) -> Mapping[int, int]:
        """Return the number of our references to each object, by its identity.

        Args:
            removed: the objects to which lines remove references.
            older: the older objects behind these.
        """
        lists = [removed_by_line.objects for removed_by_line in self._removed_by_line.values()]
        lists += [removed.objects, self._new]
        references = Counter(map(id, chain.from_iterable(lists)))
        for objects in (*self._older_by_line.values(), older):
            references.update(objects.keys())
        return references

    def _older_bytes(self, region: Region, older: Set[int], dropped: Set[NodeKey]) -> int:
        """Return the bytes of the older objects that die: the nearest ones, and those behind them.
        New arrays in older objects are not counted.

        Args:
            region: the objects behind the lines.
            older: identities of the nearest older objects that die.
            dropped: everything that dies.
        """
        new = {key for key in region.objects if key in self._made_since} | self._new_ids
        of_older = region.reach(older, without=new) & dropped
        new_arrays = dict[StorageKey, int]()
        for item, array in described(region.arrays_of(of_older)):
            if not self._was_there(item, array):
                new_arrays[array.storage] = array.size_bytes
        return region.bytes_of(of_older).total() - sum(new_arrays.values())

    def _remark(self, lines: Sequence[str], dropped: _DroppedObjects) -> str:
        """Return the remark on lines that drop older objects; empty if there are none, because all
        of them have other holders, or if the line itself names them and they are small.
        """
        removed_ids = set[int]()
        for line in lines:
            removed_ids.update(map(id, self._removed_by_line[line].objects))
        # Closing a generator only names its code, which the function keeps.
        names_older = not dropped.identities.isdisjoint(removed_ids)
        if not dropped.identities or (names_older and dropped.size_bytes < _LEAST_BYTES_TO_NAME):
            return ""
        return also_drops_older(dropped.size_bytes)


class _DroppedObjects(NamedTuple):
    """The older objects that lines drop."""

    identities: set[int]
    """The nearest older objects behind the lines."""
    size_bytes: int
    """Their bytes, with the older objects to which they lead."""


def also_drops_older(size_bytes: int) -> str:
    """Return the remark ``also drops 8 MiB of older data``."""
    return f"also drops {format_bytes(size_bytes)} of older data"


def _references_of(items: Sequence[object], references: ReferenceReader) -> list[object]:
    """Return the objects to which the items refer, directly or by a dict, such as the dict of their
    attributes.

    An object refers to its attributes by a dict once code has read ``__dict__``; until Python 3.10,
    always.
    """
    referents = references.of(items).of_python
    dicts = of_types({id(dict)}, referents)
    return [*referents, *references.of(dicts).of_python]
