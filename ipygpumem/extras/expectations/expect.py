"""``ipygpumem.expect``: fails code that uses more memory than expected."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ipygpumem.api.inventories import diff, tensors
from ipygpumem.api.traces import Trace, apply_decorator, can_decorate, run_inside
from ipygpumem.errors import MemoryExpectationError, TraceError
from ipygpumem.failures import GuardedBlock, failures_told
from ipygpumem.records import OUTSIDE, TraceRecord
from ipygpumem.report.cells import trace_report
from ipygpumem.report.devices import device_label
from ipygpumem.report.tensors import difference_report
from ipygpumem.report.text import render
from ipygpumem.units import checked_bytes, format_bytes

F = TypeVar("F", bound=Callable[..., Any])


class Expectation(GuardedBlock):
    """A ``with`` block, or a decorator of functions, that may use so much memory at its peak."""

    _block_name = "expect"
    _lost_at_start = _lost_at_end = "the memory of this block was not checked"

    def __init__(self, ram: float | str | None, gpu: float | str | None) -> None:
        if ram is None and gpu is None:
            raise TraceError(
                'expect needs a limit: expect(ram="200MiB"), expect(gpu="8GiB") or both'
            )
        self._limits = ram, gpu
        """The limits as the user gave them."""
        self._ram_bytes = None if ram is None else checked_bytes(ram)
        self._gpu_bytes = None if gpu is None else checked_bytes(gpu)
        self._trace = Trace("expected", silent=True)

    def _record_to_show(self) -> TraceRecord | None:
        """Return the record of the trace, once the block has ended."""
        return self._trace.record

    def _open_block(self) -> Trace:
        """Start measuring; return the trace."""
        return self._trace.start()

    def _after_failed_start(self) -> Trace:
        """Return the trace that could not be started."""
        return self._trace

    def _close_block(self, error: BaseException | None) -> None:
        """Check the peak, unless an error leaves the block.

        Raises:
            MemoryExpectationError: the peak was higher than a limit.
        """
        if not (self._trace.record or self._trace.is_running):
            return  # its start failed
        record = self._trace.record or self._trace.stop()
        if error is not None:
            return
        exceeded_limits = list(self._lines_on_exceeded_limits(record))
        if exceeded_limits:
            lines = [*exceeded_limits, render([trace_report(record)])]
            raise MemoryExpectationError("\n".join(lines))

    def _after_failed_end(self) -> None:
        """Stop measuring after a failed end."""
        self._trace._after_failed_end()

    def __call__(self, function: F) -> F:
        """Return ``function`` with each call in a block of its own."""
        return apply_decorator(function, lambda: self._decorate(function), "expect")

    def _decorate(self, function: F) -> F:
        """Return ``function`` with each call in a block of its own; TraceError if that fails."""
        if not can_decorate(function):
            raise TraceError(
                "expect cannot decorate classes or async generators: write with "
                "ipygpumem.expect(...):"
            )
        return run_inside(function, lambda: Expectation(*self._limits))

    def _lines_on_exceeded_limits(self, record: TraceRecord) -> Iterator[str]:
        """Yield a line for each device with a peak above its limit."""
        for usage in record.usages:
            if usage.device == "cpu":
                limit = self._ram_bytes
            elif usage.device in OUTSIDE:
                limit = None
            else:
                limit = self._gpu_bytes
            if limit is not None and usage.peak_delta_bytes > limit:
                used = format_bytes(usage.peak_delta_bytes)
                expected = format_bytes(limit)
                yield (
                    f"{device_label(usage.device)}: the peak was {used} above the start, expected "
                    f"{expected}"
                )


class Unchecked(Expectation):
    """Stands for an expectation that could not be created: it checks nothing."""

    def __init__(self) -> None:
        self._ram_bytes = self._gpu_bytes = None
        self._trace = Trace("expected", silent=True)

    def __call__(self, function: F) -> F:
        """Return the function itself."""
        return function


def expect(*, ram: float | str | None = None, gpu: float | str | None = None) -> Expectation:
    """Raise an error if a block, or a call of a function, uses more memory than expected.

    Use it in tests and pipelines, to notice when code begins to need more: ``with
    expect(ram="200MiB"):``, or ``@expect(gpu="8GiB")`` above a function. What counts is how far the
    peak rises above the start. The error has the figures of every device. An error of the code
    itself is raised as it is. The limit stops nothing: the code has run.

    Args:
        ram: the most RAM of this process, as bytes or text such as ``"200MiB"``.
        gpu: the most memory on each accelerator, where torch's tensors count.

    Raises:
        MemoryExpectationError: the peak was higher; it is an ``AssertionError``, too.
        TraceError: there is no limit, or what is decorated is neither a function nor a method.
        UnitError: a limit is not a size.

    >>> with ipygpumem.expect(ram="64MiB"):
    ...     data = bytes(2**20)
    """
    with failures_told("expect", Expectation._lost_at_start, asked=True):
        return Expectation(ram, gpu)
    return Unchecked()


def measured(function: F, **limits: Any) -> F:
    """Return a test's function with each call in a block that checks its memory.

    Args:
        function: the function.
        limits: ``ram`` and ``gpu`` as in ``expect``, and ``leaks``: the number of tensors and
            arrays that may stay alive.
    """
    return run_inside(function, functools.partial(_checked_block, **limits))


@contextlib.contextmanager
def _checked_block(leaks: int | None = None, **limits: Any) -> Iterator[None]:
    """Check the peak of a block and, if ``leaks`` is given, the number of tensors and arrays that
    stay alive after it.

    Raises:
        MemoryExpectationError: one of them is higher.
    """
    before = None if leaks is None else tensors()
    expectation = expect(**limits) if limits else contextlib.nullcontext()
    with expectation:
        yield
    if before is None or leaks is None:
        return
    gc.collect()
    change = diff(before, tensors())
    number = len(change.added)
    if number > leaks:
        listed = render([difference_report(change)])
        raise MemoryExpectationError(
            f"tensors and arrays that stay alive: {number}, expected {leaks}\n{listed}"
        )
