"""``ipygpumem.trace``, ``Trace``, ``traces``, ``preload``, ``register_probe`` and ``export``."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

from ipygpumem.api.shell import current_traces, loaded_app, show
from ipygpumem.errors import NOT_LOADED, NotLoadedError, ProbeError, TraceError
from ipygpumem.failures import CallBlock, GuardedBlock, failures_told
from ipygpumem.introspect import is_instance, text_of, type_name
from ipygpumem.meter.contexts import create_context
from ipygpumem.meter.meter import Span
from ipygpumem.meter.traces import Traces
from ipygpumem.notebook import current_shell
from ipygpumem.probes import Probe
from ipygpumem.probes.pools import PluginProbe
from ipygpumem.records import SessionRecord, TraceRecord, Usage
from ipygpumem.report import export as formats
from ipygpumem.report import printed_records as _printed  # noqa: F401  # registers them
from ipygpumem.report.cells import trace_report
from ipygpumem.report.words import clean_name

F = TypeVar("F", bound=Callable[..., Any])


class Trace(GuardedBlock):
    """Measures a section of code on every device: memory kept, peak, time. It works in scripts,
    too.

    Use it instead of ``trace`` where the start and the end are in different places. Traces nest,
    overlap in any order, and run inside cells and experiments: each has its own exact peak. A
    stopped trace can be started again. Starting a running trace, or reading one that is not
    running, raises ``TraceError``.

    Args:
        label: its name in reports.
        silent: show nothing; ``usage`` and ``record`` have the figures.

    >>> trace = ipygpumem.Trace("step").start()
    >>> trace.usage()[0].device
    'cpu'
    >>> trace.stop().label
    'step'
    """

    _block_name = "a trace"
    _lost_at_start = _lost_at_end = "this block was not measured"

    def __init__(self, label: str = "", *, silent: bool = False) -> None:
        if type(label) is not str:
            raise TraceError(f"the label of a trace must be a string, not {type_name(label)}")
        self.label = label
        self.silent = silent
        self.record: TraceRecord | None = None
        """Its record, once it is stopped."""
        self._traces: Traces | None = None
        self._span: Span | None = None
        self._started_at = self._started = 0.0

    @property
    def is_running(self) -> bool:
        """True from its start to its stop."""
        return self._span is not None

    def start(self) -> Trace:
        """Start measuring."""
        if self._span is not None:
            raise TraceError("this trace is already running: stop() it first, or make a new one")
        self.record = None
        self._traces = current_traces()
        self._started_at = time.time()
        self._started = time.perf_counter()
        self._span = self._traces.meter.span()
        return self

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage since the start or the last reset; of a stopped trace, until
        the stop.
        """
        if self.record is not None:
            return self.record.usages
        _, span = self._traces_and_span()
        return span.read()

    def report(self, note: str = "") -> None:
        """Show the usage since the start or the last reset, and continue measuring."""
        self._show(self.record or self._record(self.usage()), note)

    def reset(self) -> None:
        """Restart the measurement."""
        self._record_and_reset()

    def report_and_reset(self, note: str = "") -> None:
        """Show and store the usage since the start or the last reset, and restart
        the measurement.
        """
        record = self._record_and_reset()
        self._traces_and_span()[0].finished.append(record)
        self._show(record, note)

    def stop(self) -> TraceRecord:
        """Stop measuring and return the record, without a report."""
        return self._stop(None)

    def _record_to_show(self) -> TraceRecord | None:
        """Return the record of a running trace so far, or that of a stopped one; None before the
        start.
        """
        if self._span is None:
            return self.record
        return self._record(self.usage())

    def __repr__(self) -> str:
        state = "not started"
        if self.is_running:
            state = "running"
        elif self.record is not None:
            state = "stopped"
        return f"<trace {clean_name(self.label)}: {state}>".replace(" :", ":")

    def _stop(self, error: BaseException | None) -> TraceRecord:
        """Stop measuring, store the record and return it; ``error`` is the one that has ended the
        code, or None.
        """
        traces, span = self._traces_and_span()
        error_type = None if error is None else type_name(error)
        self.record = self._record(span.stop(), error_type)
        self._span = self._traces = None
        traces.finished.append(self.record)
        return self.record

    def _record_and_reset(self) -> TraceRecord:
        """Return the usage since the start or the last reset, and restart the measurement."""
        _, span = self._traces_and_span()
        record = self._record(span.lap())
        self._started_at = time.time()
        self._started = time.perf_counter()
        return record

    def _traces_and_span(self) -> tuple[Traces, Span]:
        """Return the traces that will get the record of this running trace, and its span."""
        if self._traces is None or self._span is None:
            raise TraceError("this trace is not running: start() it first")
        return self._traces, self._span

    def _record(self, usages: tuple[Usage, ...], error: str | None = None) -> TraceRecord:
        """Return the record of what was used since the start or the last reset."""
        return TraceRecord(
            self.label, self._started_at, time.perf_counter() - self._started, error, usages
        )

    def _show(self, record: TraceRecord, note: str) -> None:
        """Show a record, with a note of the user, unless the trace is silent."""
        if not self.silent:
            show(trace_report(record, text_of(note)))

    def _open_block(self) -> Trace:
        """Start measuring at the start of a ``with`` block."""
        return self.start()

    def _close_block(self, error: BaseException | None) -> None:
        """Stop measuring at the end of a ``with`` block, and show the report."""
        if self._span is not None:  # else it was stopped inside
            if isinstance(error, GeneratorExit):
                error = None  # no error: the loop over a generator with this block was left
            self._stop(error)
            self.report()

    def _after_failed_end(self) -> None:
        """Stop measuring after a failed end."""
        if self._traces is not None and self._span is not None:
            self._span.close()
        self._span = self._traces = None

    def __call__(self, function: F) -> F:
        """Return ``function`` with each call measured in its own trace."""
        return apply_decorator(
            function, lambda: _with_trace(function, self.label, silent=self.silent), "trace"
        )


@overload
def trace(what: str = "", /, *, silent: bool = False) -> Trace: ...


@overload
def trace(what: F, /) -> F: ...


def trace(what: str | F = "", /, *, silent: bool = False) -> Trace | F:
    """Measure a block, or each call of a function.

    Use it for a part of a cell, or for a function. Write ``with trace("label"):`` or, above a
    function, ``@trace`` or ``@trace("label")``. One line shows the memory kept, the peak and the
    time on every device; ``traces()`` has the record. Classes and async generators cannot be
    decorated.

    Args:
        what: the label; a decorated function is labelled by its own name.
        silent: show nothing.

    Raises:
        TraceError: ``what`` is neither a string nor a function.

    >>> with ipygpumem.trace("load", silent=True):
    ...     data = bytes(2**20)
    >>> ipygpumem.traces()[-1].label
    'load'
    """
    if callable(what) or isinstance(what, classmethod):
        return apply_decorator(what, lambda: _with_trace(what, label="", silent=False), "trace")
    return Trace(what, silent=silent)


def traces() -> list[TraceRecord]:
    """Return the records of the finished traces, oldest first, up to a limit.

    >>> with ipygpumem.trace("train", silent=True) as trace:
    ...     step = 1
    >>> trace.record in ipygpumem.traces()
    True
    """
    return list(current_traces().finished)


def _with_trace(function: F, label: str, *, silent: bool) -> F:
    """Return ``function`` with each call in a trace of its own, labelled ``label`` or, if that is
    empty, with the function's name.

    Raises:
        TraceError: it is a class or an async generator.
    """
    if not can_decorate(function):
        raise TraceError(
            "trace cannot decorate classes or async generators: write with ipygpumem.trace(...): "
            "inside"
        )
    qualified_name = text_of(getattr(function, "__qualname__", "")).replace(".<locals>", "")
    name = label or qualified_name or type_name(function)
    return run_inside(function, lambda: Trace(name, silent=silent))


# -- functions that run in a block --------------------------------------------------------------


def apply_decorator(function: F, decorate: Callable[[], F], name: str) -> F:
    """Return the result of one of our decorators, or the function itself if the decorator fails.

    Args:
        function: the user's function.
        decorate: returns it decorated.
        name: the decorator, for the line about a failure.
    """
    with failures_told(f"the decorator {name}", "the function runs without it"):
        return decorate()
    return function


def can_decorate(function: object) -> bool:
    """Return True for a function or a static or class method, but not for a class or an async
    generator.
    """
    if isinstance(function, staticmethod | classmethod):
        return can_decorate(function.__func__)
    return (
        callable(function)
        and not inspect.isclass(function)
        and not inspect.isasyncgenfunction(_function_called(function))
    )


def _function_called(function: Any) -> Any:
    """Return the function that runs when ``function`` is called: of ``functools.partial(f, 1)``,
    ``f``; of an object whose class has a ``__call__``, that one.
    """
    while is_instance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        call = function
    else:
        call = inspect.getattr_static(type(function), "__call__", function)
    return getattr(call, "__func__", call)  # of a method, also a static one


def run_inside(function: F, new: Callable[[], AbstractContextManager[object]]) -> F:
    """Return ``function`` with each call running in a block of its own.

    The block is open until the call has returned; of a coroutine, until it has ended, and of a
    generator, until it is exhausted.

    Args:
        function: the user's function, or a static or class method.
        new: returns a new block.
    """
    method: Any = function
    if isinstance(function, staticmethod | classmethod):
        return type(method)(run_inside(method.__func__, new))  # type: ignore[no-any-return]  # of the same type

    # The traceback of an error that leaves one of these functions keeps its frame: ``del``, so that
    # it does not keep the arguments alive, too.
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        try:
            with CallBlock(new):
                return await function(*args, **kwargs)
        finally:
            del args, kwargs

    def generated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        try:
            with CallBlock(new):
                return (yield from function(*args, **kwargs))
        finally:
            del args, kwargs

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            with CallBlock(new):
                return function(*args, **kwargs)
        finally:
            del args, kwargs

    code = _function_called(function)
    is_awaited = any(map(inspect.iscoroutinefunction, (function, code)))  # the object may be marked
    wrapper: Callable[..., Any]
    if is_awaited:
        wrapper = awaited
    elif inspect.isgeneratorfunction(code):
        wrapper = generated
    else:
        wrapper = called
    return functools.wraps(function)(wrapper)  # type: ignore[return-value]  # it takes and gives the same


# -- devices ------------------------------------------------------------------------------------


def preload() -> TraceRecord | None:
    """Create the context of torch's accelerator now, and return its cost; None if torch has no
    accelerator.

    Use it before measuring, so that the first cell that uses the device does not include the
    context. It raises ``DeviceError`` if torch is not installed, or its accelerator does not work.

    >>> if torch.cuda.is_available():
    ...     record = ipygpumem.preload()
    """
    return create_context(current_traces().meter)


def register_probe(name: str, probe: Probe) -> None:
    """Measure with ``probe``, too, from now on: in this notebook, or in this script's traces.

    Use it for devices that ipygpumem does not know. The probe needs a method ``read(*, detail,
    peak)`` that returns ``ipygpumem.records.Reading`` tuples, and may have ``rearm()``, ``close()``
    and ``sampled``. It is read at the start and end of each cell, and dropped with a warning if
    that takes more than half a second. It replaces a probe that was registered with the same name.
    ``ProbeError`` is raised if its first reading fails or is invalid.

    Args:
        name: the name of its devices: ``tpu``, or ``tpu:0`` and so on.
        probe: the probe.

    >>> from ipygpumem.records import Reading
    >>> class TpuProbe:
    ...     def read(self, *, detail, peak):
    ...         return [Reading("tpu", 100, 120, "sampled")]
    >>> ipygpumem.register_probe("tpu", TpuProbe())
    """
    if not callable(getattr(probe, "read", None)):
        raise ProbeError(
            f"a probe needs a method read(*, detail, peak), which {type_name(probe)} lacks"
        )
    plugin = PluginProbe(name, probe)
    plugin.read(detail=True)
    current_traces().meter.add(plugin)


# -- files --------------------------------------------------------------------------------------


def export(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the finished cells and experiments to a file, completely or not at all; the suffix
    selects the format.

    Use it to compare sessions, or to keep them. Without IPython, in a script, it writes the
    finished traces.

    Args:
        path: ends in ``.json`` (complete, for ``load``) or ``.csv``.
        force: replace a file that ipygpumem did not write.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython.
        FileError: the suffix is unknown, another program wrote the file, or it cannot be written.

    >>> ipygpumem.export("session.json")
    """
    app = loaded_app()
    if app is None and current_shell() is not None:
        raise NotLoadedError(NOT_LOADED)
    record = SessionRecord.of((), (), current_traces().finished) if app is None else app.records()
    formats.save(path, record, force=force)
