"""Finds data of any age that a line drops together with the memory of its row.

An experiment knows which data is older than itself (``older_data.py``). ``%gpumem leaks`` and
``%gpumem why`` do not: they only know that a line frees more than its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

from ipygpumem.heap.graph import NodeKey
from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.region import Region
from ipygpumem.inventory.dropped_objects import ObjectsOfLine, have_references, nodes_dropped
from ipygpumem.inventory.held_rows import HeldRow
from ipygpumem.inventory.older_data import also_drops_older
from ipygpumem.units import format_bytes

_MOST_LEAKS = 50
"""Maximum number of leaks, the largest ones, whose lines are examined."""
_UNSURE = 0.1
"""Share of a row's bytes by which two measurements may differ."""


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
            if have_references(of_line.objects):
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
            dropped = nodes_dropped(region, of_line, in_lists, ended.get(line, set()))
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
                remarks[line] = also_drops_older(older_bytes)
        return remarks


def _certain_bytes(region: Region, of_line: ObjectsOfLine, dropped: Set[NodeKey]) -> int:
    """Return the bytes of dropped nodes that are surely other data: neither the objects that the
    line names, nor memory of libraries that may have other owners.
    """
    counted = {key for key in dropped if isinstance(key, int) or key[0] == "torch"}
    dropped_ids = of_line.certain & dropped
    named = [item for item in of_line.objects if id(item) in dropped_ids]
    return region.bytes_of(counted).total() - region.reader.types.own_bytes.of(named)
