"""Finds data of any age that a line drops together with the memory of its row.

An experiment knows which data is older than itself (``older_data.py``). ``%gpumem leaks`` and
``%gpumem why`` do not: they only know that a line frees more than its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.inventory.rows.dropped_objects import RemovedObjects, have_references, nodes_dropped
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.older_data import also_drops_older
from ipygpumem.units import format_bytes

_MOST_LEAKS = 50
"""Maximum number of leaks, the largest ones, whose lines are examined."""
_MEASURING_ERROR = 0.1
"""Share of a row's bytes by which two measurements may differ."""


class KnownObjects(NamedTuple):
    """Objects whose age is known, because an experiment has examined them. It keeps them alive:
    drop it soon.
    """

    older: Sequence[object] = ()
    """The nearest older objects behind memory that experiments have left."""
    left_over: Sequence[object] = ()
    """The objects that experiments have left."""

    def bytes_of_older(self, region: Region, removed: RemovedObjects, dropped: Set[NodeKey]) -> int:
        """Return the bytes of the older objects that a line drops. It is 0 if the line names one of
        them: the new data in it, such as the fit of an estimator, may be too small for a row of its
        own.

        Args:
            region: the objects behind the lines.
            removed: the objects to which the line removes references.
            dropped: everything that dies.
        """
        left_over_ids = set(map(id, self.left_over))
        older_ids = set(map(id, self.older)) - left_over_ids
        if not older_ids.isdisjoint(map(id, removed.objects)):
            return 0
        dropped_older = region.reach(older_ids & dropped, without=left_over_ids) & dropped
        return region.bytes_of(dropped_older).total()


_NOTHING_KNOWN = KnownObjects()


class OtherData:
    """Finds the data that lines drop in addition to the memory of their rows, however old it is.

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
        self._removed_by_line: dict[str, RemovedObjects] = {}
        """The objects to which each line removes references, if anything may be behind them."""
        for line in sizes:
            removed = RemovedObjects.of(cuts.get(line, ()), removed_objects)
            if have_references(removed.objects):
                self._removed_by_line[line] = removed

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[HeldRow],
        removed_objects: Mapping[int, object],
        namespaces: Iterable[int],
    ) -> OtherData:
        """Return the search for the data that the lines of the first rows drop.

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
        by_lines = self._removed_by_line.values()
        return list(chain.from_iterable(removed.objects for removed in by_lines))

    def remarks(
        self,
        smallest: int,
        ended: Mapping[str, Set[int]],
        known: KnownObjects = _NOTHING_KNOWN,
        *,
        is_certain: bool = False,
    ) -> dict[str, str]:
        """Return the remark on each line that drops older data, or at least ``smallest`` bytes of
        other data: ``also drops 8 MiB of other data``.

        Nothing else of ours may refer to these objects now: it would count as their holder.

        Args:
            smallest: the bytes.
            ended: the arrays in the cycles that each line ends, by identity.
            known: the objects whose age is known.
            is_certain: True to leave out the objects that the line names, and memory of libraries
                that may have other owners, such as a cache that two connections of sqlite3 share.
        """
        removed_objects = self.objects
        region = Region(
            [*removed_objects, *known.older, *known.left_over], namespaces=self._namespaces
        )
        own_references = Counter(map(id, removed_objects))
        # A second time, because the ``RemovedObjects`` of a line have a list of their own.
        own_references.update(map(id, removed_objects))
        own_references.update(map(id, [*known.older, *known.left_over]))
        remarks = dict[str, str]()
        for line, removed in self._removed_by_line.items():
            dropped = nodes_dropped(region, removed, own_references, ended.get(line, set()))
            if is_certain:
                dropped_bytes = _certain_bytes(region, removed, dropped)
            else:
                dropped_bytes = region.bytes_of(dropped).total()
            other_bytes = dropped_bytes - self._sizes[line]
            older_bytes = known.bytes_of_older(region, removed, dropped)
            # The row was measured in another way, so that a small difference means nothing.
            least_bytes = max(smallest, self._sizes[line] * _MEASURING_ERROR)
            if other_bytes - older_bytes >= least_bytes:
                remarks[line] = f"also drops {format_bytes(other_bytes)} of other data"
            elif older_bytes:
                remarks[line] = also_drops_older(older_bytes)
        return remarks


def _certain_bytes(region: Region, removed: RemovedObjects, dropped: Set[NodeKey]) -> int:
    """Return the bytes of dropped nodes that surely belong to other data: neither to objects that
    the line names, nor to a library whose memory may have other owners.
    """
    counted = {key for key in dropped if isinstance(key, int) or key[0] == "torch"}
    dropped_ids = removed.certain & dropped
    named = [item for item in removed.objects if id(item) in dropped_ids]
    return region.bytes_of(counted).total() - region.reader.types.own_bytes.of(named)
