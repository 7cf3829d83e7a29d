"""``ipygpumem.track``."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Generic, TypeVar

from ipygpumem.api.inventories import roots
from ipygpumem.api.shell import current_shell, current_traces, loaded_app, show
from ipygpumem.errors import TraceError
from ipygpumem.heap.bulk import no_progress
from ipygpumem.introspect import type_name
from ipygpumem.inventory import survey
from ipygpumem.meter.meter import Meter
from ipygpumem.records import TraceRecord
from ipygpumem.report.history import iteration_report, loop_growth_line, loop_report
from ipygpumem.report.layout import note
from ipygpumem.shell.holders import look, note_processes
from ipygpumem.shell.ipython.caches import named_objects
from ipygpumem.shell.trends import Growing

T = TypeVar("T")

_MOST_RECORDS = 10_000
_ROWS_SHOWN = 20
_UPDATE_SECONDS = 0.25
_LINE_SECONDS = 1.0
"""Minimum seconds between two printed lines of a loop."""


def track(items: Iterable[T], label: str = "iteration", *, silent: bool = False) -> Tracked[T]:
    """Return an iterator over ``items`` that measures each iteration and shows a table, one row per iteration.

    Use it to find an iteration that needs most memory, or a loop that grows. A row has the memory kept, the peak, the
    time, and the growth of each device since the first iteration. If every iteration grows a device, a line says so,
    with the names that hold the new memory. An iteration begins when its item is requested. Works with ``tqdm`` inside
    or outside, with ``break`` and errors, and in scripts, where each row is printed, at most one a second.

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
    return Tracked(items, label, silent=silent)


class Tracked(Generic[T]):
    """A measured loop; made by ``track``."""

    def __init__(self, items: Iterable[T], label: str, *, silent: bool) -> None:
        self._items = items
        self._label = label
        self._silent = silent
        self.records: deque[TraceRecord] = deque(maxlen=_MOST_RECORDS)
        """Records of the finished iterations of the last loop started over it: the last 10,000."""

    def __bool__(self) -> bool:
        return bool(self._items)  # otherwise Python calls __len__, which a generator lacks

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # without a length, the items' own TypeError

    def __iter__(self) -> Iterator[T]:
        records = self.records = deque(maxlen=_MOST_RECORDS)  # a nested loop over the same object may run
        traces, shown, growing = current_traces(), _Shown(self._length()), Growing()
        iterator = iter(self._items)
        span = traces.meter.start()
        try:
            for number in itertools.count(1):
                started_at, started = time.time(), time.perf_counter()
                try:
                    item = [next(iterator)]
                except StopIteration:
                    return
                try:
                    yield item.pop()  # no reference here: the next batch would be allocated next to it
                finally:  # also after a break or an error
                    usages, seconds = traces.meter.lap(span), time.perf_counter() - started
                    record = TraceRecord(self._label, started_at, seconds, None, usages, number)
                    records.append(record)
                    traces.finished.append(record)
                growing.add(usages)
                if growing.wants_look:
                    _look(growing, sys._getframe(1), traces.meter)
                    traces.meter.lap(span)  # exclude the memory of our own search
                if growing.growths:
                    _note_processes(growing, sys._getframe(1))
                if not self._silent:
                    shown.show(records, _remarks(growing))
        finally:
            traces.meter.drop(span)
            if records and not self._silent:
                shown.show(records, _remarks(growing), at_end=True)

    def _length(self) -> int | None:
        try:
            return len(self)
        except Exception:  # any error of the items' own __len__
            return None


def _remarks(growing: Growing) -> list[str]:
    if not growing.growths:
        return []
    return [*map(loop_growth_line, growing.growths), *growing.process_lines, *growing.held]


def _look(growing: Growing, frame: FrameType, meter: Meter) -> None:
    """Look at the memory of all names after an iteration of the loop at ``frame``."""
    frame = _outside_tqdm(frame)
    app = loaded_app()
    with contextlib.nullcontext(no_progress) if app is None else app.context.display.working("names") as progress:
        look(growing, lambda: _names_at(frame), "iteration", roots, progress, meter)


def _note_processes(growing: Growing, frame: FrameType) -> None:
    """Find the child processes that grew in the last iteration of the loop at ``frame``."""
    frame = _outside_tqdm(frame)
    note_processes(growing, lambda: _names_at(frame), "iteration")


def _outside_tqdm(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not tqdm's."""
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("tqdm."):
        frame = frame.f_back
    return frame


def _names_at(frame: FrameType) -> dict[str, object]:
    """Return the objects visible to code at ``frame`` by name, in a notebook also all of its names and outputs."""
    shell = current_shell()
    if shell is None:
        return dict(reversed(list(survey.names_in(frame))))
    return named_objects(shell) | survey.locals_of(frame)


class _Shown:
    """Display of a loop: in a notebook a table that is updated, elsewhere a line per iteration."""

    def __init__(self, total: int | None) -> None:
        app = loaded_app()
        self._has_table = app is not None and app.context.display.has_images
        self._total = total
        self._display_id = ""
        self._due = 0.0
        self._remarks = 0
        self._first: TraceRecord | None = None
        self._last: TraceRecord | None = None

    def show(self, records: Sequence[TraceRecord], remarks: Sequence[str], *, at_end: bool = False) -> None:
        """Show one more iteration, unless the last display is recent; always show the last one."""
        if self._last is records[-1] if at_end else time.monotonic() < self._due:
            return
        self._last = records[-1]
        self._first = self._first or records[0]  # the records may drop it
        if self._has_table:
            is_new, self._display_id = not self._display_id, self._display_id or f"ipygpumem-{secrets.token_hex(8)}"
            rows = [self._first, *itertools.islice(records, max(1, len(records) - _ROWS_SHOWN + 1), None)]
            show(loop_report(rows, self._total, remarks), display_id=self._display_id, is_new=is_new)
        else:
            for report in (iteration_report(self._last), *map(note, remarks[self._remarks :])):
                show(report)
            self._remarks = len(remarks)
        self._due = time.monotonic() + (_UPDATE_SECONDS if self._has_table else _LINE_SECONDS)
