"""Measures the epochs of a training for the trainers' callbacks, without ever stopping it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import MissingLibraryError, how_to_install
from ipygpumem.failures import tell_failure
from ipygpumem.interrupts import is_from_signal
from ipygpumem.records import TraceRecord
from ipygpumem.units import MIB


class _RunningEpoch(NamedTuple):
    """An epoch that is measured now."""

    number: int
    """Its number, counted from 1."""
    traces: Any
    """The traces that get its record."""
    span: Any
    started_at: float
    """Unix time of its start."""
    started: float
    """Its start, on ``time.perf_counter``."""


class Epochs:
    """The epochs of one training, each measured as a span."""

    def __init__(self) -> None:
        self.has_failed = False
        """True after our own failure: nothing is measured any longer."""
        self._running: _RunningEpoch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a recipe for a new instance: trainers copy and pickle their callbacks."""
        return Epochs, ()

    def begin(self, number: int) -> None:
        """Begin an epoch, counted from 1; drop one left open by an error, which trainers do not
        report to callbacks.
        """
        self.close()
        traces = current_traces()
        started_at = time.time()
        started = time.perf_counter()
        self._running = _RunningEpoch(number, traces, traces.meter.span(), started_at, started)

    def end(self) -> dict[str, float]:
        """End the epoch, store its record, and return its figures by name.

        Without a running epoch there are none.
        """
        epoch = self._running
        if epoch is None:
            return {}
        self._running = None
        usages = epoch.span.stop()
        if not usages:  # the extension was unloaded during the epoch
            return {}
        seconds = time.perf_counter() - epoch.started
        record = TraceRecord(
            "epoch",
            started_at=epoch.started_at,
            duration_seconds=seconds,
            error=None,
            usages=usages,
            iteration=epoch.number,
        )
        epoch.traces.finished.append(record)
        figures = {}
        for usage in usages:
            if usage.peak_bytes:
                name = f"mem/{usage.device.replace(':', '_')}"
                figures[f"{name}/kept_mib"] = usage.delta_bytes / MIB
                figures[f"{name}/peak_mib"] = usage.peak_delta_bytes / MIB
        return figures

    def close(self) -> None:
        """End the running epoch without figures."""
        if self._running is not None:
            self._running.span.close()
        self._running = None


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a callback's hook so that it never raises: our own failure is reported, and ends the
    measuring.
    """

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **options: Any) -> None:
        """Call the hook of a callback, unless one of them has failed before."""
        epochs: Epochs = self.epochs
        if epochs.has_failed:
            return
        try:
            hook(self, *args, **options)
        except Exception as error:
            if is_from_signal(error):
                raise
            epochs.has_failed = True
            tell_failure("the memory callback", error, "it is disabled")
            with contextlib.suppress(Exception):  # a failed object may fail again
                epochs.close()

    return call


@harmless
def close(self: Any, *args: Any, **options: Any) -> None:
    """End the running epoch, as a hook."""
    self.epochs.close()


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Raise MissingLibraryError with the install command if the block cannot import a library."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        line = how_to_install(package)
        raise MissingLibraryError(f"{library} is not installed: {line}") from None
