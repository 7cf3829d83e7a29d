"""Plain data: the objects to remove so that the memory of a row is freed, and the ways through
their holders.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from ipygpumem.heap.paths.container_steps import cuts_of_repeated, removal_of_repeated
from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.remedies import Remedy, comments_of
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way


class Removal(NamedTuple):
    """Objects to remove so that the memory of a row is freed."""

    item: object
    """The object to remove as a whole; None if only ``objects`` are removed."""
    objects: Sequence[object]
    """The objects that must die, such as arrays in ``item``."""
    way: Way
    """The best way to the object, or the one that frees ``objects``."""

    @classmethod
    def of(cls, item: object, objects: Sequence[object], way: Way) -> Removal:
        """Return the removal of an object, which may be one of ``objects``."""
        is_one_of_them = any(other is item for other in objects)
        return cls(None if is_one_of_them else item, objects, way)

    @property
    def targets(self) -> list[object]:
        """All objects that must die, the one to remove first."""
        if self.item is None:
            return list(self.objects)
        return [self.item, *self.objects]


class HolderWays(NamedTuple):
    """An object from which an object of a row must be removed, and the ways through it."""

    item: object
    """The holder itself; None if it holds the object once."""
    ways: list[Way]
    items: list[object]
    """The holder's item on each way."""

    def without(self, removed_references: Set[tuple[int, int]]) -> HolderWays:
        """Return the holder without the ways on which an earlier line removes a reference.

        A library's object may refer to itself by many paths: all of them lead through the attribute
        that the first line removes.

        Args:
            removed_references: the identities of the two objects of each reference that a line
                removes.
        """
        ways, items = list[Way](), list[object]()
        for way, item in itertools.zip_longest(self.ways, self.items):
            if not way.is_ended_by(removed_references):
                ways.append(way)
                items.append(item)
        return HolderWays(self.item, ways, items)

    def together(self) -> list[Way]:
        """Return one way that removes all references of the holder; ``ways`` if one line cannot do
        so. An example is ``del runs[1], runs[0]`` for an object that is twice in a list.
        """
        cuts_of_items = list[list[Cut]]()
        for way, item in zip(self.ways, self.items, strict=True):
            if self.item is None or way.cut is None or way.cut.owner_id != id(self.item):
                return self.ways
            cuts_of_items.append(cuts_of_repeated(way.cut, self.item, item))
        cuts = list(itertools.chain.from_iterable(cuts_of_items))
        if len(cuts) < 2:
            return self.ways
        if len(cuts_of_items) == 1:
            statement = removal_of_repeated(cuts, self.item)
        else:
            statement = statement_of(cuts)
        if not statement:
            return self.ways
        comment = comments_of([way.holder.remedy for way in self.ways])
        remedy = Remedy(statement, comment, tuple(cuts))
        holder = self.ways[0].holder.with_more(str(len(cuts) - 1))
        return [Way(replace(holder, remedy=remedy))]


def nearest_first(holders: Sequence[HolderWays], nearest: Way) -> list[HolderWays]:
    """Return holders, the one with the nearest way first; a nearest way that leads through none of
    them gets a holder of its own.

    The nearest way may have been found as the way to a part: a proxy in a dict, of which one line
    removes all entries, leads to an array.
    """
    for position, holder in enumerate(holders):
        for number, way in enumerate(holder.ways):
            if nearest.removed_references and nearest.removed_references < way.removed_references:
                return [holder, *holders[:position], *holders[position + 1 :]]
            if way == nearest or (way.cuts and way.cuts == nearest.cuts):
                ways = [*holder.ways[:number], nearest, *holder.ways[number + 1 :]]
                with_nearest = holder._replace(ways=ways)
                return [with_nearest, *holders[:position], *holders[position + 1 :]]
    return [HolderWays(None, [nearest], []), *holders]
