"""The memory of an experiment before and after its end frees it, and the RAM that it leaves.

``ExperimentEnd`` fills ``MemoryBefore`` and ``MemoryAfter`` of an ``EndingExperiment``; the notes
of its report read both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ipygpumem.probes.host import RamFigures
from ipygpumem.probes.malloc import allocated_bytes, malloc_bytes
from ipygpumem.probes.mappings import own_pages
from ipygpumem.records import FREE_HEAP_PAGES, FreeingStep, KeptObject, RetainedArray, Usage
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.experiments.experiment_log import ExperimentLog
from ipygpumem.shell.experiments.experiment_options import ExperimentOptions
from ipygpumem.shell.experiments.measured_scope import MeasuredScope

if TYPE_CHECKING:
    from ipygpumem.inventory.remaining.watched_names import WatchedName
    from ipygpumem.shell.searches.survivors import Survivors

_BLOCKS_TO_GAPS = 4
"""Smallest ratio, in measurements, of the memory of many small objects to the gaps between them."""


class EndingExperiment(NamedTuple):
    """The parts of an experiment that its end reads and changes."""

    context: ShellContext
    """The shell's services."""
    options: ExperimentOptions
    scope: MeasuredScope
    """Its names, with the measurements since its start."""
    log: ExperimentLog
    """Its cells, errors and remarks."""
    survivors: Survivors
    """Finds the objects that outlive it, and the places from which they can be reached."""


@dataclass
class MemoryBefore:
    """The memory of an experiment before anything is freed."""

    usages: tuple[Usage, ...] = ()
    saved: list[RetainedArray] = field(default_factory=list)
    """The arrays held by the objects that its code has replaced."""
    watched: list[WatchedName] | None = None
    """The arrays of its names; None if memory was too short to list them."""
    names_by_object: dict[int, str] = field(default_factory=dict)
    """Its names by the identities of their objects."""
    malloc_bytes: int = 0
    """The bytes in use from malloc."""
    lists_bytes: int = 0
    """Growth of RSS by the lists that the end itself makes; malloc keeps their free pages."""
    notes_bytes: int = 0
    """Bytes in malloc's blocks of the end's own notes on arrays, which stay until it is over."""


@dataclass
class MemoryAfter:
    """The memory that the end of an experiment has freed, and the memory that is still in use."""

    steps: list[FreeingStep] = field(default_factory=list)
    """The steps that have freed memory."""
    usages: tuple[Usage, ...] = ()
    """Usage once its memory is freed, before our search for survivors takes memory."""
    ram: RamFigures | None = None
    """Figures of RAM at that moment."""
    alive: tuple[RetainedArray, ...] = ()
    """The objects that are still alive."""
    lists_alive: bool = False
    """True if ``alive`` has all objects that are still alive, as far as our search finds them."""
    kept: tuple[KeptObject, ...] = ()
    """The large objects of the names that stay on purpose."""
    kept_in_older_bytes: int = 0
    """RAM of the new arrays in older objects of the names that stay on purpose."""

    def freed_by(self, name: str) -> int:
        """Return the RAM that the steps with this name have freed."""
        freed_bytes = 0
        for step in self.steps:
            if step.name == name:
                freed_bytes += step.freed.get("cpu", 0)
        return freed_bytes

    def freed_by_all_but(self, *names: str) -> int:
        """Return the RAM that all steps have freed, but for the steps with these ``names``."""
        freed_bytes = 0
        for step in self.steps:
            if step.name not in names:
                freed_bytes += step.freed.get("cpu", 0)
        return freed_bytes


def ram_growth(usages: Iterable[Usage]) -> int:
    """Return the growth of this process's RAM; 0 if it was not measured."""
    growth = 0
    for usage in usages:
        if usage.device == "cpu":
            growth += usage.delta_bytes
    return growth


class RamLeft:
    """Computes the RAM that an ended experiment leaves in use.

    The growth of RSS is too large or too small: malloc and Python keep free pages, malloc returns
    pages that were free at the start, and the end itself takes memory for its lists. One method
    returns each of these amounts.

    Args:
        scope: the experiment's scope, with the figures of its start.
        before: its memory before anything was freed.
        after: the steps that freed it, and the usage after them.
        smallest_bytes: the smallest growth for which free pages matter.
    """

    def __init__(
        self, scope: MeasuredScope, before: MemoryBefore, after: MemoryAfter, smallest_bytes: int
    ) -> None:
        self._scope = scope
        self._before = before
        self._after = after
        self._smallest_bytes = smallest_bytes

    def size_bytes(self) -> int:
        """Return the bytes of RAM that it leaves, at least those in the blocks that malloc has
        allocated for it.
        """
        growth = self._rss_growth() - self._own_lists_bytes()
        growth_of_blocks = (
            allocated_bytes() - self._scope.allocated_at_start - self._before.notes_bytes
        )
        if growth >= growth_of_blocks + self._smallest_bytes:
            # Notes between objects that have died keep malloc from returning the pages.
            new_free_bytes = own_pages().free_heap_bytes - self._scope.free_heap_at_start
            growth -= max(0, new_free_bytes)
        return max(growth, growth_of_blocks)

    def _rss_growth(self) -> int:
        """Return the growth of RSS after the end; if it was large before the end, without the free
        pages of Python, and with the older free pages that malloc has returned.
        """
        growth_before = ram_growth(self._before.usages)
        is_large = growth_before >= self._smallest_bytes
        growth = ram_growth(self._after.usages) if is_large else growth_before
        if "polars" in sys.modules:
            # Its allocator reports nothing, and pages that malloc returns may be older.
            return growth + self._after.freed_by_all_but("names", "garbage")
        if is_large:
            return growth + self._older_pages_bytes() - self._free_blocks_bytes()
        return growth

    def _own_lists_bytes(self) -> int:
        """Return the bytes of the pages that the end's own lists and notes keep in use."""
        lists_bytes = self._before.lists_bytes - self._after.freed_by(FREE_HEAP_PAGES)
        # The notes on 300,000 arrays take 150 MiB, with gaps that they leave in pages.
        gaps_bytes = self._before.notes_bytes // _BLOCKS_TO_GAPS
        return max(0, lists_bytes) + gaps_bytes

    def _older_pages_bytes(self) -> int:
        """Return the bytes of the pages that malloc has returned although they were free at the
        start.

        RSS falls by them as well, which hides the growth of memory that malloc does not know, such
        as shared memory.
        """
        returned_bytes = self._after.freed_by(FREE_HEAP_PAGES)
        freed_by_earlier_steps = self._after.freed_by_all_but(FREE_HEAP_PAGES)
        # Malloc keeps the pages of most blocks that the end frees until it returns pages.
        freed_by_end = self._before.malloc_bytes - malloc_bytes() - freed_by_earlier_steps
        older_bytes = returned_bytes - max(0, freed_by_end) - self._before.lists_bytes
        return min(max(0, older_bytes), self._scope.free_heap_at_start)

    def _free_blocks_bytes(self) -> int:
        """Return the growth of Python's free memory. It stays in arenas, because some objects in
        these are still alive.
        """
        at_start = self._scope.ram_at_start
        after = self._after.ram
        if at_start is None or after is None:
            return 0
        return max(0, after.free_blocks_bytes - at_start.free_blocks_bytes)
