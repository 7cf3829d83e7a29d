"""Measures lines: each lasts until the next line of its frame begins or the frame is left.

Calls are within the span of their line, so a followed function also counts for the calling line.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ipygpumem.meter.meter import Meter, Span
from ipygpumem.reclaim import emptying

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code whose frames are left and entered again."""
_TRIM_SHARE = 1 / 3
_TRIM_SECONDS = 0.1
"""Maximum time for freeing heap pages: a share of the elapsed time, plus some seconds."""
MOST_RUNS = 1000
"""Maximum number of runs of a short line that are measured one by one. Each takes some 50 us, so
that ``[str(i) for i in range(300_000)]`` took 20 s.
"""
_SHORT_SECONDS = 0.001
"""A line that takes less, on average, is short: measuring would take a large part of its time."""

LineKey = tuple[int, int]
"""The numbers of a line's block and of the line."""


@dataclass
class LineCost:
    """Cost of one line in all its runs."""

    hits: int = 0
    """Number of runs."""
    seconds: float = 0.0
    """Time of all runs."""
    kept_bytes: dict[str, int] = field(default_factory=dict)
    """The growth of memory from the line's start to its end, per device, over all runs."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The highest peak above the line's start, per device, over all runs."""

    def add(self, visit: _Visit, after: dict[str, int], seconds: float) -> None:
        """Add the seconds, the kept bytes and the peak of one run of the line, or of a part of a
        run between two suspensions of its function.

        Args:
            visit: the run's bytes at its start, and its peaks.
            after: bytes by device at its end.
            seconds: its time.
        """
        self.seconds += seconds
        for device, size in after.items():
            start = visit.before.get(device, 0)
            self.kept_bytes[device] = self.kept_bytes.get(device, 0) + size - start
            peak = max(visit.peaks.get(device, 0), size) - start
            peak += visit.kept_before_suspension.get(device, 0)
            self.peak_bytes[device] = max(self.peak_bytes.get(device, 0), peak)


@dataclass(frozen=True)
class CodeBlock:
    """Lines of source that are shown together."""

    title: str
    """``cell``, or the name of the function."""
    first_line: int
    """The number of the first of these lines."""
    source: tuple[str, ...]
    """The lines."""


@dataclass
class LinesRecord:
    """Costs of the lines of a cell, or of functions."""

    blocks: list[CodeBlock]
    costs: dict[LineKey, LineCost] = field(default_factory=dict)
    seconds: float = 0.0
    own_seconds: float = 0.0
    """Time spent on measuring."""
    error: str = ""
    """Why measuring stopped before its end; empty if it did not."""
    untrimmed: int = 0
    """Number of readings before which free heap pages were not freed, because that takes too long
    here.
    """
    measured_together: dict[LineKey, set[LineKey]] = field(default_factory=dict)
    """Lines whose runs after the first ``MOST_RUNS`` were measured as one, by the line that has
    their cost.
    """


class _Suspension(NamedTuple):
    """A line whose frame was left, and may be resumed: ``x = yield``."""

    line: int | None
    """None in a frame that was not suspended."""
    kept_bytes: dict[str, int]
    """Bytes by device that this run of the line has kept so far."""


@dataclass
class _Visit:
    """A followed frame that runs, and the line in which it is."""

    frame_id: int
    block: int
    """The number of the block to which the frame's code belongs."""
    line: int | None = None
    """The line that is measured now; None before the first one, and if the line's run belongs to
    the measurement of another line (see ``Tracer._is_measured_already``)."""
    before: dict[str, int] = field(default_factory=dict)
    """Bytes by device when the line began."""
    peaks: dict[str, int] = field(default_factory=dict)
    """The highest bytes by device since the line began."""
    kept_before_suspension: dict[str, int] = field(default_factory=dict)
    """Bytes that the line kept before its frame was suspended."""
    began: float = 0.0
    """The start of the line, on a clock that stands still while we measure."""

    def raise_peaks(self, peaks: dict[str, int]) -> None:
        """Raise the line's peak on each device to that in ``peaks`` if it is higher."""
        for device, peak in peaks.items():
            self.peaks[device] = max(peak, self.peaks.get(device, 0))


class Tracer:
    """Traces the lines of one thread until its own first error; an earlier trace function is
    suspended.

    The first block is the cell's, known by its file name. Frames are identified by identity, and
    are entered and left like a stack; a frame whose end was missed is removed together with the
    frame below it.

    Args:
        meter: measures the lines.
        cell_file: the file name of the cell's code.
        cell: the cell's lines.
    """

    def __init__(self, meter: Meter, cell_file: str, cell: CodeBlock) -> None:
        self._meter = meter
        self._cell_file = cell_file
        self.record = LinesRecord([cell])
        self._followed: dict[int, tuple[int, CodeType]] = {}
        """Blocks by the identity of a function's code; the code is kept, so that the identity is
        not reused.
        """
        self._visits: list[_Visit] = []
        """The followed frames that run, the innermost last."""
        self._suspensions: dict[int, _Suspension] = {}
        """The frames that were left and may be resumed, by their identity."""
        self._often_run: set[LineKey] = set()
        """Short lines that have run so often that several runs are measured as one."""
        self._span: Span | None = None
        """None before the start."""
        self._began = 0.0
        """The start, on ``time.perf_counter``."""
        self._trim_seconds = 0.0
        """Time spent so far on freeing heap pages."""
        self._thread = threading.get_ident()
        """The thread whose lines are traced."""
        self._is_tracing = False
        """True between the start and the end, or the first error."""

    def add(self, title: str, code: CodeType) -> None:
        """Follow ``code`` and all code defined inside it, unless it is followed already.

        Args:
            title: the title of its block.
            code: a function's code.
        """
        if id(code) in self._followed or code.co_filename == self._cell_file:
            return
        block = len(self.record.blocks)
        for inner_code in _codes_in(code):
            self._followed[id(inner_code)] = (block, inner_code)
        try:
            lines, first = inspect.getsourcelines(code)
        except (OSError, TypeError):  # made by exec, or its file is gone
            lines = []
            first = code.co_firstlineno
        source = tuple(line.rstrip() for line in lines)
        self.record.blocks.append(CodeBlock(title, first, source))

    def start(self) -> None:
        """Trace the calls of this thread."""
        self._began = time.perf_counter()
        self._span = self._meter.span()
        self._earlier_trace_function = sys.gettrace()
        self._is_tracing = True
        sys.settrace(self._trace_call)

    @property
    def has_started(self) -> bool:
        """True once it measures, unless a Ctrl-C came first."""
        return self._span is not None

    def stop(self) -> None:
        """Restore the earlier trace function, unless another one was set since; can be called
        again.
        """
        if not self._is_tracing:
            return
        self._is_tracing = False
        if sys.gettrace() == self._trace_call:
            sys.settrace(self._earlier_trace_function)
        elif threading.get_ident() == self._thread and not self.record.error:
            self.record.error = "the code has set another trace function (sys.settrace)"

    def finish(self) -> LinesRecord:
        """Stop, end running lines, and return the costs."""
        self.stop()
        now = time.perf_counter()
        after = self._read_memory()
        while self._visits:
            self._end_line(after, now)
            self._visits.pop()
        self.drop()
        self.record.seconds = now - self._began
        return self.record

    def drop(self) -> None:
        """Stop measuring; can be called again."""
        self.stop()
        if self._span is not None:
            self._span.close()

    # -- the trace function ----------------------------------------------------------------------

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Enter the frame of a call, and return its own trace function; None if it is not followed.

        Python calls this for each call of the thread.
        """
        if not self._is_tracing or event != "call":
            return None
        code = frame.f_code
        block = self._block_of(code)
        if block is None:
            return None
        # A generator's frame gets a "call" at its start, and again each time that it is resumed.
        is_resumed = code.co_flags & _SUSPENDS and frame.f_lineno > code.co_firstlineno
        line = frame.f_lineno if is_resumed else None
        self._run_timed(self._enter_frame, frame, block, line)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        """End and begin lines; the trace function of a followed frame."""
        if not self._is_tracing:
            return None
        if event == "line":
            self._run_timed(self._next_line, frame, frame.f_lineno)
        elif event == "return":
            self._run_timed(self._leave_frame, frame)
        return self._trace_line

    def _run_timed(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run our own work and count its time; stop measuring if it fails."""
        now = time.perf_counter()
        try:
            action(now, *arguments)
        except Exception as error:  # the user's code goes on
            self.record.error = f"{type(error).__name__}: {error}"
            self.stop()
        self.record.own_seconds += time.perf_counter() - now

    def _block_of(self, code: CodeType) -> int | None:
        """Return the number of the block to which code belongs; None if it is not followed."""
        if id(code) in self._followed:
            block, _ = self._followed[id(code)]
            return block
        return 0 if code.co_filename == self._cell_file else None

    # -- bookkeeping -----------------------------------------------------------------------------

    def _enter_frame(self, now: float, frame: FrameType, block: int, line: int | None) -> None:
        """Enter a frame, or resume a suspended generator or coroutine in ``line``.

        Args:
            now: the time of the event.
            frame: the frame.
            block: the number of its block.
            line: the line in which it goes on; None at its start, whose first line comes next.
        """
        self._visits.append(_Visit(id(frame), block))
        suspension = self._suspensions.pop(id(frame), None)
        if line is None or self._is_measured_already((block, line)):
            return
        self._begin_line(line, self._read_memory(), now)
        if suspension is not None and suspension.line == line:
            self._visits[-1].kept_before_suspension = suspension.kept_bytes

    def _next_line(self, now: float, frame: FrameType, line: int) -> None:
        """End the measurement of the frame's previous line, and begin to measure ``line``."""
        if not self._unwind_to(frame):
            return
        key = self._visits[-1].block, line
        cost = self.record.costs.setdefault(key, LineCost())
        cost.hits += 1
        if cost.hits > MOST_RUNS and cost.seconds < _SHORT_SECONDS * cost.hits:
            self._often_run.add(key)
        if self._is_measured_already(key):
            return
        after = self._read_memory()
        self._end_line(after, now)
        self._begin_line(line, after, now)

    def _is_measured_already(self, key: LineKey) -> bool:
        """Return True if a run of a line belongs to the measurement of the innermost line.

        That is so in a loop whose lines have all run often. Its first line that did so is not ended
        before another line begins, such as the one below the loop:

            for i in range(300_000):  # from its run 1,001 on, it has the cost of the whole loop
                text = str(i)
            print(text)
        """
        if key not in self._often_run:
            return False
        measured: LineKey | None = None
        for visit in reversed(self._visits):
            if visit.line is not None:
                measured = visit.block, visit.line
                break
        if measured is None or measured not in self._often_run:
            return False
        self.record.measured_together.setdefault(measured, set()).add(key)
        return True

    def _leave_frame(self, now: float, frame: FrameType) -> None:
        """Leave the running frame: it returns, is suspended, or raises."""
        if not self._unwind_to(frame):
            return
        visit = self._visits[-1]
        if visit.line is None:  # its lines are measured with one of its caller
            self._visits.pop()
            return
        after = self._read_memory()
        if frame.f_code.co_flags & _SUSPENDS:  # it may have ended: then nothing resumes it
            kept_bytes: dict[str, int] = {}
            for device, size in after.items():
                earlier_bytes = visit.kept_before_suspension.get(device, 0)
                kept_bytes[device] = size - visit.before.get(device, 0) + earlier_bytes
            self._suspensions[id(frame)] = _Suspension(visit.line, kept_bytes)
        self._end_line(after, now)
        self._visits.pop()

    def _unwind_to(self, frame: FrameType) -> bool:
        """Make ``frame`` the innermost frame; return False if it was never entered.

        Frames inside it whose end was missed, because the code has set another trace function for a
        while, are left.
        """
        frame_id = id(frame)
        if self._visits and self._visits[-1].frame_id == frame_id:  # nearly always
            return True
        if all(visit.frame_id != frame_id for visit in self._visits):
            return False
        while self._visits[-1].frame_id != frame_id:
            self._end_line(self._read_memory(), time.perf_counter())
            self._visits.pop()
        return True

    def _read_memory(self) -> dict[str, int]:
        """Return each device's bytes, and count the peak since the last lap for the running line.

        Free heap pages are freed first, mostly in microseconds; else lines that reuse them would
        cost nothing.
        """
        assert self._span is not None
        began = time.perf_counter()
        if self._trim_seconds > _TRIM_SHARE * (began - self._began) + _TRIM_SECONDS:
            self.record.untrimmed += 1
        else:
            emptying.trim_host_heap()
            self._trim_seconds += time.perf_counter() - began
        usages = self._span.lap()
        visits = self._visits_in_a_line()
        if visits:
            visits[-1].raise_peaks({usage.device: usage.peak_bytes for usage in usages})
        return {usage.device: usage.after_bytes for usage in usages}

    def _visits_in_a_line(self) -> list[_Visit]:
        """Return the frames that are in a line, the innermost last."""
        return [visit for visit in self._visits if visit.line is not None]

    def _begin_line(self, line: int, now_bytes: dict[str, int], now: float) -> None:
        """Begin a line of the innermost frame.

        Args:
            line: the line.
            now_bytes: bytes by device.
            now: the time.
        """
        visit = self._visits[-1]
        visit.line = line
        visit.before = now_bytes
        visit.peaks = dict(now_bytes)
        visit.kept_before_suspension = {}
        visit.began = now - self.record.own_seconds  # the clock stops while we measure

    def _end_line(self, after: dict[str, int], now: float) -> None:
        """End the line of the innermost frame, and add its cost."""
        visit = self._visits[-1]
        line = visit.line
        visit.line = None
        if line is None:
            return
        outer_visits = self._visits_in_a_line()
        if outer_visits:  # the calling line had this peak, too
            outer_visits[-1].raise_peaks(visit.peaks)
        # In a recursion, only the outermost call counts.
        if all((outer.block, outer.line) != (visit.block, line) for outer in outer_visits):
            cost = self.record.costs.setdefault((visit.block, line), LineCost())
            cost.add(visit, after, now - self.record.own_seconds - visit.began)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and the code of all functions, classes and comprehensions defined inside
    it.
    """
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _codes_in(constant)


def code_of(value: Any) -> CodeType | None:
    """Return the code of a function or method, unwrapped; None if it is not written in Python."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, functools.partial | functools.partialmethod):
        value = value.func
    code = getattr(inspect.unwrap(value), "__code__", None)
    return code if type(code) is CodeType else None
