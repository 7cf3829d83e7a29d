"""``ipygpumem.trace``, ``Trace`` and ``traces``."""

from __future__ import annotations

import time
from types import TracebackType
from typing import overload

from ipygpumem.api.decorating import F, can_decorate, run_inside
from ipygpumem.api.shell import current_traces, show
from ipygpumem.errors import TraceError
from ipygpumem.introspect import text_of, type_name
from ipygpumem.measuring.meter import Measurement
from ipygpumem.measuring.traces import Traces
from ipygpumem.model import TraceRecord, Usage
from ipygpumem.reports.content import trace_report


class Trace:
    """Measures a stretch of code on every device: what it kept, its peak, its time. It works in scripts, too.

    Traces nest, overlap in any order, and run beside cells and experiments: each has its own exact peak. A trace can
    be started again once it is stopped.

    Args:
        label: what reports call it.
        silent: show nothing; ``usage`` and ``record`` have the figures.
    """

    def __init__(self, label: str = "", *, silent: bool = False) -> None:
        if type(label) is not str:
            raise TraceError(f"the label of a trace must be a text, not {type_name(label)}")
        self.label = label
        self.silent = silent
        self.record: TraceRecord | None = None
        """What it cost, once it is stopped."""
        self._traces: Traces | None = None
        self._span: Measurement | None = None
        self._started_at = self._started = 0.0

    def start(self) -> Trace:
        """Begin to measure.

        Raises:
            TraceError: it runs already.
        """
        if self._span is not None:
            raise TraceError("this trace runs already: stop() it first, or make another")
        self.record = None
        self._traces = current_traces()
        self._started_at, self._started = time.time(), time.perf_counter()
        self._span = self._traces.meter.start()
        return self

    def usage(self) -> tuple[Usage, ...]:
        """Return what each device went through since the start, or the last reset; once it is stopped, until then.

        Raises:
            TraceError: it was never started.
        """
        if self.record is not None:
            return self.record.usages
        traces, span = self._open()
        return traces.meter.read(span)

    def report(self, note: str = "") -> None:
        """Show what was measured since the start, or the last reset; measuring goes on.

        Raises:
            TraceError: it was never started.
        """
        record = self.record or self._record(self.usage())
        if not self.silent:
            show(trace_report(record, text_of(note)))

    def reset(self) -> None:
        """Begin anew, from now.

        Raises:
            TraceError: it does not run.
        """
        self._lap()

    def report_and_reset(self, note: str = "") -> None:
        """Show what was measured since the start, or the last reset, and begin anew; what is shown is remembered.

        Raises:
            TraceError: it does not run.
        """
        record = self._lap()
        self._open()[0].finished.append(record)
        if not self.silent:
            show(trace_report(record, text_of(note)))

    def stop(self) -> TraceRecord:
        """End it and return its record; nothing is shown.

        Raises:
            TraceError: it does not run.
        """
        return self._stop(None)

    def _stop(self, error: BaseException | None) -> TraceRecord:
        traces, span = self._open()
        usages = traces.meter.stop(span)
        self.record = self._record(usages, None if error is None else type_name(error))
        self._span = self._traces = None
        traces.finished.append(self.record)
        return self.record

    def _lap(self) -> TraceRecord:
        traces, span = self._open()
        record = self._record(traces.meter.lap(span))
        self._started_at, self._started = time.time(), time.perf_counter()
        return record

    def _open(self) -> tuple[Traces, Measurement]:
        if self._traces is None or self._span is None:
            raise TraceError("this trace does not run: start() it first")
        return self._traces, self._span

    def _record(self, usages: tuple[Usage, ...], error: str | None = None) -> TraceRecord:
        return TraceRecord(self.label, self._started_at, time.perf_counter() - self._started, error, usages)

    def __getstate__(self) -> dict[str, object]:
        if self._span is not None:
            raise TraceError("a trace that runs cannot be copied: stop() it first")
        return vars(self)

    def __enter__(self) -> Trace:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is not None:  # else it was stopped inside
            self._stop(None if kind is GeneratorExit else error)  # so a generator ends that its loop has left
            self.report()

    def __call__(self, function: F) -> F:
        """Return ``function`` so that each call is measured, in a trace of its own."""
        return _traced(function, self.label, silent=self.silent)


@overload
def trace(what: str = "", /, *, silent: bool = False) -> Trace: ...


@overload
def trace(what: F, /) -> F: ...


def trace(what: str | F = "", /, *, silent: bool = False) -> Trace | F:
    """Measure a block, or each call of a function.

    Write ``with trace("label"):`` or, above a function, ``@trace`` or ``@trace("label")``. One line says what it kept,
    its peak and its time on every device; ``traces()`` remembers it.

    Args:
        what: the label; a function to decorate is called by its own name.
        silent: show nothing.

    Raises:
        TraceError: ``what`` is neither a text nor a function.
    """
    return (
        _traced(what, "", silent=False)
        if callable(what) or isinstance(what, classmethod)
        else Trace(what, silent=silent)
    )


def traces() -> list[TraceRecord]:
    """Return the records of the traces that are over, oldest first; the number kept is bounded."""
    return list(current_traces().finished)


def _traced(function: F, label: str, *, silent: bool) -> F:
    if not can_decorate(function):
        raise TraceError(
            "trace decorates functions, and no classes or async generators: write with ipygpumem.trace(...): inside"
        )
    name = label or text_of(getattr(function, "__qualname__", "")).replace(".<locals>", "") or type_name(function)
    return run_inside(function, lambda: Trace(name, silent=silent))
