"""Remembers the older containers that have grown in experiments.

An experiment that runs ``log.extend(range(10**6))`` leaves a million numbers, which no row of
objects lists. A note names the list ``log``, its growth, and the line that removes the new items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import object_key
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.live.remembered import Remembered
from ipygpumem.heap.paths.roots import NOTEBOOK, Roots
from ipygpumem.inventory.remaining.grown_rows import GrownRow
from ipygpumem.inventory.remaining.growth import Extents, GrownContainer
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
class _RecordedGrowth:
    """The growth of a container in an experiment."""

    container: Remembered
    length_at_start: int
    length_at_end: int
    size_bytes: int
    """Bytes by which it has grown."""
    was_empty: bool
    """True if it was empty at the start."""
    grown_items: int
    """Number of its items that have grown themselves; 0 if the container itself has grown."""

    @classmethod
    def of(cls, grown: GrownContainer) -> _RecordedGrowth:
        """Return a record of a container's growth that does not keep the container alive."""
        return cls(
            Remembered([grown.item]),
            grown.earlier_length,
            grown.length,
            grown.size_bytes,
            grown.was_empty,
            grown.grown_items,
        )

    def row(self, container: Any, path: str) -> GrownRow | None:
        """Return the row of the container now; None if it is not longer than at the start.

        Args:
            container: the live container.
            path: code for it, such as ``log``, or words.
        """
        if self.grown_items:
            grown = GrownContainer(
                container,
                self.size_bytes,
                earlier_length=0,
                length=0,
                grown_items=self.grown_items,
            )
            return GrownRow(path, self.size_bytes, grown.items, line="")
        extents = Extents()
        extents.add_length(container, self.length_at_start)
        for grown in extents.grown_containers([container], smallest=1):
            grown = grown._replace(was_empty=self.was_empty)
            line = grown.line_to_empty(path)
            if grown.length > self.length_at_end and line:
                # Later cells have added items, which the line that removes the new ones drops, too.
                line = f"{line.partition(COMMENT)[0]}{COMMENT}also drops its other items"
            size_bytes = min(grown.size_bytes, self.size_bytes)
            return GrownRow(path, size_bytes, grown.items, line)
        return None


class GrownContainers:
    """Weak records of the containers of one shell that have grown in experiments."""

    def __init__(self) -> None:
        self._growths: list[_RecordedGrowth] = []

    def add(self, grown_containers: Iterable[GrownContainer]) -> None:
        """Remember containers that an experiment's report names, unless they are remembered."""
        for grown in grown_containers:
            live = {id(grown.item): grown.item}
            if not any(growth.container.alive(live) for growth in self._growths):
                self._growths.append(_RecordedGrowth.of(grown))

    def identities(self) -> set[int]:
        """Return the identities of the containers, some of which may have died."""
        return set(chain.from_iterable(growth.container.identities for growth in self._growths))

    def rows(
        self, live: Mapping[int, object], heap: Heap, roots: Roots, smallest: int
    ) -> list[GrownRow]:
        """Return the rows of the containers that are still longer than at the start of their
        experiment, and forget the shorter and the dead ones.

        Args:
            live: the live objects among those with ``identities``, by identity.
            heap: the live objects.
            roots: the names and objects from which the user can reach objects.
            smallest: minimum bytes of a row.
        """
        containers = dict[int, Any]()
        still_alive = list[_RecordedGrowth]()
        for growth in self._growths:
            for container in growth.container.alive(live):
                is_longer = growth.row(container, path="") is not None  # the path is not known yet
                if is_longer:
                    containers[id(growth)] = container
                    still_alive.append(growth)
        self._growths = still_alive
        rows = list[GrownRow]()
        if not containers:
            return rows
        holders = explain((), heap, roots, objects=containers.values())
        for growth in still_alive:
            container = containers[id(growth)]
            path = holders[object_key(container)].path.removeprefix(NOTEBOOK)
            row = growth.row(container, path)
            if row is not None and row.size_bytes >= smallest:
                rows.append(row)
        return rows
