"""Plain data: the objects that a line removes so that the memory of a row is freed, and the ways
to them through each of their holders.

For an array that is at ``runs[0]`` and ``runs[7]``, a ``Removal`` has the array and the way to the
nearest place. ``HolderWays`` has the list and both ways, from which it makes one line.
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
    """The object to remove as a whole, such as a record or a model; None if the line removes the
    ``objects`` themselves, ``runs[2:] = []``.
    """
    objects: Sequence[object]
    """The objects that must die, such as the arrays in ``item``."""
    way: Way
    """The way to ``item``, or the way whose line frees ``objects``."""

    @classmethod
    def of(cls, item: object, objects: Sequence[object], way: Way) -> Removal:
        """Return the removal of an object, which may be one of ``objects``."""
        is_one_of_them = any(other is item for other in objects)
        return cls(None if is_one_of_them else item, objects, way)

    @classmethod
    def of_objects(cls, objects: Sequence[object], way: Way) -> Removal:
        """Return the removal of objects by a way whose line frees them."""
        return cls(None, objects, way)

    @property
    def targets(self) -> list[object]:
        """All objects that must die, the one to remove first."""
        if self.item is None:
            return list(self.objects)
        return [self.item, *self.objects]


class HolderWays(NamedTuple):
    """A holder from which an object must be removed, and the ways through it: two for an object
    that is at ``runs[0]`` and ``runs[7]``.
    """

    item: object
    """The holder itself, such as the list ``runs``; None if it has one reference to the object."""
    ways: list[Way]
    items: list[object]
    """The holder's item on each way; empty if it has one reference to the object."""

    @classmethod
    def of_one(cls, way: Way) -> HolderWays:
        """Return the holder with one reference to the object, to which a way leads."""
        return cls(item=None, ways=[way], items=[])

    def without_ended_ways(self, removed_references: Set[tuple[int, int]]) -> HolderWays:
        """Return the holder without the ways that are ended, because an earlier line removes a
        reference on them.

        Many ways may lead through one attribute of a library's object, which refers to itself. The
        line that removes this attribute ends all of them.

        Args:
            removed_references: the identities of the two objects of each reference that a line
                removes.
        """
        ways, items = list[Way](), list[object]()
        # A holder with one reference has no items.
        for way, item in itertools.zip_longest(self.ways, self.items):
            if not way.is_ended_by(removed_references):
                ways.append(way)
                items.append(item)
        return HolderWays(self.item, ways, items)

    def one_way_if_possible(self) -> list[Way]:
        """Return one way whose line removes all references of the holder to the object; the
        separate ``ways`` if there is no such line.

        The line is ``del runs[7]; del runs[0]`` for an object that is twice in a list.
        """
        cuts_of_items = list[list[Cut]]()
        for way, item in zip(self.ways, self.items, strict=True):
            is_cut_at_holder = way.cut is not None and way.cut.owner_id == id(self.item)
            if self.item is None or way.cut is None or not is_cut_at_holder:
                return self.ways  # a line removes something else, such as an object around it
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
    """Return holders in the same order, but first the one through which the nearest way leads.

    If it leads through none of them, it comes first as a holder of its own.
    """
    for position, holder in enumerate(holders):
        for number, way in enumerate(holder.ways):
            # The way to an array may lead through a part, such as a proxy that is several times in
            # a dict. The line for the proxy removes all of its entries, one of which is nearest.
            if nearest.removed_references and nearest.removed_references < way.removed_references:
                return [holder, *holders[:position], *holders[position + 1 :]]
            has_same_line = bool(way.cuts) and way.cuts == nearest.cuts
            if way == nearest or has_same_line:
                ways = [*holder.ways[:number], nearest, *holder.ways[number + 1 :]]
                with_nearest = holder._replace(ways=ways)
                return [with_nearest, *holders[:position], *holders[position + 1 :]]
    return [HolderWays.of_one(nearest), *holders]
