"""Remembers the older containers that have grown in experiments, such as a list of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from ipygpumem.heap.arrays import object_key
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.paths.roots import NOTEBOOK, Roots
from ipygpumem.heap.remembered import Remembered
from ipygpumem.inventory.grown_rows import GrownRow
from ipygpumem.inventory.growth import Extents, Grown
from ipygpumem.records import COMMENT
from ipygpumem.units import format_bytes

_MOST_NAMED = 5
"""Maximum number of grown containers to name."""


def notes_on_growth(rows: Iterable[GrownRow]) -> list[str]:
    """Return a note on each of the containers that have grown most, with the line that empties
    it.
    """
    notes = list[str]()
    for row in sorted(rows, key=attrgetter("size_bytes"), reverse=True)[:_MOST_NAMED]:
        text = f"{row.path} grew by {format_bytes(row.size_bytes)}"
        if row.items:
            text += f", {row.items}"
        if row.line:
            text += f" · to free it: {row.line}"
        notes.append(text)
    return notes


@dataclass(frozen=True)
class _Growth:
    """The growth of a container in an experiment."""

    container: Remembered
    earlier: int
    """Its length at the start."""
    now: int
    """Its length at the end."""
    size_bytes: int
    was_empty: bool
    grown_items: int

    @classmethod
    def of(cls, grown: Grown) -> _Growth:
        """Return the growth as the experiment's report has it."""
        return cls(
            Remembered([grown.item]),
            grown.earlier_length,
            grown.length,
            grown.size_bytes,
            grown.was_empty,
            grown.grown_items,
        )

    def row(self, item: Any, path: str) -> GrownRow | None:
        """Return the row of the container now; None if it is no longer than at the start."""
        if self.grown_items:
            grown = Grown(item, self.size_bytes, 0, 0, self.grown_items)
            return GrownRow(path, self.size_bytes, grown.items, "")
        extents = Extents()
        extents.add_length(item, self.earlier)
        for grown in extents.grown([item], 1):
            grown = grown._replace(was_empty=self.was_empty)
            line = grown.line_to_empty(path)
            if grown.length > self.now and line:
                line = f"{line.partition(COMMENT)[0]}{COMMENT}also drops its other items"
            size_bytes = min(grown.size_bytes, self.size_bytes)
            return GrownRow(path, size_bytes, grown.items, line)
        return None


class GrownContainers:
    """Weak records of the containers of one shell that have grown in experiments."""

    def __init__(self) -> None:
        self._growths: list[_Growth] = []

    def add(self, grown: Iterable[Grown]) -> None:
        """Remember containers that an experiment's report names."""
        for each in grown:
            if not any(
                known.container.alive({id(each.item): each.item}) for known in self._growths
            ):
                self._growths.append(_Growth.of(each))

    def identities(self) -> set[int]:
        """Return the identities of the containers, some of which may have died."""
        return set(chain.from_iterable(growth.container.identities for growth in self._growths))

    def rows(
        self, live: Mapping[int, object], heap: Heap, roots: Roots, smallest: int
    ) -> list[GrownRow]:
        """Return the rows of containers that are still longer than before, and forget the rest.

        Args:
            live: the live objects with these identities.
            heap: the live objects.
            roots: the names and objects from which the user can reach objects.
            smallest: minimum bytes of each.
        """
        containers = dict[int, Any]()
        still_alive = list[_Growth]()
        for growth in self._growths:
            for item in growth.container.alive(live):
                if growth.row(item, "") is not None:
                    containers[id(growth)] = item
                    still_alive.append(growth)
        self._growths = still_alive
        rows = list[GrownRow]()
        if not containers:
            return rows
        holders = explain((), heap, roots, more=containers.values())
        for growth in still_alive:
            item = containers[id(growth)]
            row = growth.row(item, holders[object_key(item)].path.removeprefix(NOTEBOOK))
            if row is not None and row.size_bytes >= smallest:
                rows.append(row)
        return rows
