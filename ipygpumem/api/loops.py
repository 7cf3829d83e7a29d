"""``ipygpumem.track``: measures each iteration of a loop, and shows what grows in it."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

from ipygpumem.api.inventories import names_at, roots
from ipygpumem.api.shell import current_traces, loaded_app, show
from ipygpumem.errors import TraceError
from ipygpumem.failures import failures_told, is_own_failure, tell_failure
from ipygpumem.heap.bulk import Progress, no_progress
from ipygpumem.introspect import type_name
from ipygpumem.inventory.leaks.trends import Growing
from ipygpumem.meter.meter import Meter
from ipygpumem.records import TraceRecord
from ipygpumem.report.growth_lines import loop_growth_line
from ipygpumem.report.history import iteration_report, loop_report
from ipygpumem.report.layout import note
from ipygpumem.report.words import clean_name, count
from ipygpumem.shell.searches.growth_search import find_grown_processes, look_for_growth

T = TypeVar("T")

_MOST_RECORDS = 10_000
_ROWS_SHOWN = 20
_UPDATE_SECONDS = 0.25
_LINE_SECONDS = 1.0
"""Minimum seconds between two printed lines of a loop."""


def track(items: Iterable[T], label: str = "iteration", *, silent: bool = False) -> Tracked[T]:
    """Return an iterator over ``items`` that measures each iteration and shows a table, one row per
    iteration.

    Use it to find an iteration that needs most memory, or a loop that grows. A row has the memory
    kept, the peak, the time, and the growth of each device since the first iteration. If every
    iteration grows a device, a line says so, with the names that hold the new memory. An iteration
    begins when its item is requested. Works with ``tqdm`` inside or outside, with ``break`` and
    errors, and in scripts, where each row is printed, at most one a second.

    Args:
        items: an iterable.
        label: the name of an iteration.
        silent: show nothing.

    Raises:
        TraceError: ``items`` is not iterable, or ``label`` not a string.

    >>> loop = ipygpumem.track([1, 2, 3], "batch", silent=True)
    >>> sum(loop), len(loop.records)
    (6, 3)
    """
    if type(label) is not str:
        raise TraceError(f"the label of a loop must be a string, not {type_name(label)}")
    if not hasattr(type(items), "__iter__") and not hasattr(type(items), "__getitem__"):
        raise TraceError(f"track needs an iterable, such as range(10), not {type_name(items)}")
    return Tracked(items, label, silent)


@dataclass(eq=False, repr=False)
class Tracked(Generic[T]):
    """A measured loop; made by ``track``."""

    _items: Iterable[T]
    _label: str
    _silent: bool
    records: deque[TraceRecord] = field(
        default_factory=lambda: deque(maxlen=_MOST_RECORDS), init=False
    )
    """Records of the finished iterations of the last loop started over it: the last 10,000."""

    def __repr__(self) -> str:
        label = f" {clean_name(self._label)}" if self._label else ""
        return f"<loop{label}: {count(len(self.records), 'iteration')} measured>"

    def __bool__(self) -> bool:
        return bool(self._items)  # otherwise Python calls __len__, which a generator lacks

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # without a length, the items' own TypeError

    def __iter__(self) -> Iterator[T]:
        # a nested loop over the same object may run
        records = self.records = deque(maxlen=_MOST_RECORDS)
        iterator = iter(self._items)
        loop = None
        with failures_told("track", "this loop is not measured"):
            loop = _Loop(self, records)
        if loop is None:
            yield from iterator
            return
        try:
            while True:
                loop.iteration_begins()
                try:
                    item = [next(iterator)]
                except StopIteration:
                    return
                try:
                    # Popped, so that nothing here refers to the item: the loop's own variable may
                    # drop a batch before the next one is allocated.
                    yield item.pop()
                finally:  # also after a break or an error
                    loop.iteration_ended()
                loop.show(sys._getframe(1))
        finally:
            loop.close()

    def _length(self) -> int | None:
        """Return the number of iterations; None if the items have no length."""
        try:
            return len(self)
        except Exception:  # any error of the items' own __len__
            return None


class _Loop:
    """Measures one run of a loop; a method that fails says so once, and ends the measuring."""

    def __init__(self, tracked: Tracked[Any], records: deque[TraceRecord]) -> None:
        self._label = tracked._label
        self._is_silent = tracked._silent
        self._records = records
        self._traces, self._growing = current_traces(), Growing()
        self._display = _LoopDisplay(tracked._length())
        self._span = self._traces.meter.span()
        self._number = 0
        self._is_measured = True

    def iteration_begins(self) -> None:
        """Note that an iteration begins."""
        self._number += 1
        self._started_at = time.time()
        self._started = time.perf_counter()

    def iteration_ended(self) -> None:
        """Record an iteration."""
        if not self._is_measured:
            return
        try:
            usages = self._span.lap()
            seconds = time.perf_counter() - self._started
            record = TraceRecord(
                self._label,
                self._started_at,
                seconds,
                error=None,
                usages=usages,
                iteration=self._number,
            )
            self._records.append(record)
            self._traces.finished.append(record)
            self._growing.add(usages)
        except Exception as error:
            self._end_measuring(error)

    def show(self, frame: FrameType) -> None:
        """Show the iterations so far, and look for what grows in the loop at ``frame``."""
        if not self._is_measured:
            return
        try:
            users_frame = _outside_tqdm(frame)
            if self._growing.wants_look:
                _search_growth_in_names(self._growing, users_frame, self._traces.meter)
                self._span.lap()  # exclude the memory of our own search
            # The names are those with which a line ends a process: ``pool.terminate()``.
            find_grown_processes(self._growing, lambda: names_at(users_frame), "iteration")
            if not self._is_silent:
                self._display.show(self._records, _lines_on_growth(self._growing))
        except Exception as error:
            self._end_measuring(error)

    def close(self) -> None:
        """Stop measuring, and show the last iteration."""
        try:
            self._span.close()
            if self._records and not self._is_silent:
                self._display.show(self._records, _lines_on_growth(self._growing), at_end=True)
        except Exception as error:
            self._end_measuring(error)

    def _end_measuring(self, error: Exception) -> None:
        """Tell our own failure, and measure no further iterations; raise any other error."""
        if not is_own_failure(error):
            raise error
        self._is_measured = False
        tell_failure("track", error, "this loop is not measured further")


def _lines_on_growth(growing: Growing) -> list[str]:
    """Return the lines about growth below the table of a loop; none if nothing grows."""
    if not growing.growths:
        return []
    return [*map(loop_growth_line, growing.growths), *growing.process_lines, *growing.holder_lines]


def _search_growth_in_names(growing: Growing, frame: FrameType, meter: Meter) -> None:
    """Look at the memory of all names after an iteration of the loop at ``frame``. The first look
    remembers it in ``growing``, the second one sets the lines on what has grown.
    """
    app = loaded_app()
    working: AbstractContextManager[Progress] = contextlib.nullcontext(no_progress)
    if app is not None:
        working = app.context.display.working("names")
    with working as progress:
        look_for_growth(growing, lambda: names_at(frame), "iteration", roots, progress, meter)


def _outside_tqdm(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not tqdm's, which calls us in ``for x in tqdm(loop)``."""
    while frame.f_back is not None:
        module_name = str(frame.f_globals.get("__name__", ""))
        if not module_name.startswith("tqdm."):
            break
        frame = frame.f_back
    return frame


class _LoopDisplay:
    """Display of a loop: in a notebook a table that is updated, elsewhere a line per iteration."""

    def __init__(self, total: int | None) -> None:
        app = loaded_app()
        self._has_table = app is not None and app.context.display.has_images
        self._total = total
        self._display_id = ""
        self._due = 0.0
        """The time from which on the next iteration may be shown."""
        self._remarks_shown = 0
        """Number of remarks that were printed; the next time, only further ones are."""
        self._first: TraceRecord | None = None
        """The record of the first iteration."""
        self._last: TraceRecord | None = None
        """The record of the last iteration that was shown."""

    def show(
        self, records: Sequence[TraceRecord], remarks: Sequence[str], *, at_end: bool = False
    ) -> None:
        """Show one more iteration, unless the last display is recent.

        Args:
            records: the records of the last iterations.
            remarks: the lines below the table.
            at_end: True for the last call: the last iteration is shown in any case, once.
        """
        is_shown = self._last is records[-1]
        is_too_early = not at_end and time.monotonic() < self._due
        if is_too_early or (at_end and is_shown):
            return
        self._last = records[-1]
        self._first = self._first or records[0]  # the deque of records drops it after 10,000
        if self._has_table:
            self._show_table(records, remarks)
            self._due = time.monotonic() + _UPDATE_SECONDS
        else:
            show(iteration_report(self._last))
            for remark in remarks[self._remarks_shown :]:
                show(note(remark))
            self._remarks_shown = len(remarks)
            self._due = time.monotonic() + _LINE_SECONDS

    def _show_table(self, records: Sequence[TraceRecord], remarks: Sequence[str]) -> None:
        """Show the first iteration and the last ones, in place of the last table."""
        is_new = not self._display_id
        if is_new:
            self._display_id = f"ipygpumem-{secrets.token_hex(8)}"
        start = max(1, len(records) - _ROWS_SHOWN + 1)
        rows = [self._first or records[0], *itertools.islice(records, start, None)]
        report = loop_report(rows, self._total, remarks)
        show(report, display_id=self._display_id, is_new=is_new)
