"""Measures the epochs of a training and the phases of its steps, for callbacks of trainers, and never stops it."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import MissingLibraryError
from ipygpumem.measuring.meter import Meter
from ipygpumem.measuring.traces import Traces
from ipygpumem.model import TraceRecord
from ipygpumem.notebook.aside import say_failed
from ipygpumem.objects.holders.frames import stack, still_runs
from ipygpumem.units import MIB


class Epochs:
    """The epochs of one training: each is a span, and inside it each run of a phase is one, too."""

    def __init__(self, *, phases: bool = False) -> None:
        self.phases = phases
        self.has_failed = False
        self._traces: Traces | None = None
        self._number = 0
        self._epoch: _Span | None = None
        self._phase: _Span | None = None
        self._records: dict[str, TraceRecord] = {}
        self._lasts: Callable[[], bool] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make one that measures the same: trainers copy and pickle their callbacks."""
        return functools.partial(Epochs, phases=self.phases), ()

    def begin(self, number: int, loop: str = "") -> None:
        """Begin an epoch, counted from 1, inside the library's function ``loop``; what was open is forgotten.

        What is open ends with that function: trainers tell callbacks of no error.
        """
        self.close()
        self._traces, self._number = current_traces(), number
        running = next((frame for frame in stack(sys._getframe(1)) if frame.f_code.co_name == loop), None)
        self._lasts = None if running is None else still_runs(running)
        self._epoch = _Span(self._traces.meter, "epoch", self._lasts)

    def enter(self, phase: str = "") -> None:
        """Begin a run of a phase, if phases are measured; one that is open did not end where its phase does."""
        if self._phase is not None:
            self._phase.drop()
            self._phase = None
        if phase and self.phases and self._traces is not None:
            self._phase = _Span(self._traces.meter, phase, self._lasts)

    def leave(self, phase: str) -> None:
        """End the run of a phase, if it is the one that is open; each device keeps the highest of an epoch."""
        if self._phase is None or self._phase.label != phase:
            return
        run, before = self._phase.stop(self._number), self._records.get(phase)
        self._phase = None
        if before is not None:
            usages = {usage.device: usage for usage in run.usages}
            for usage in before.usages:
                usages[usage.device] = max(usage, usages.get(usage.device, usage), key=lambda one: one.peak_delta_bytes)
            seconds = before.duration_seconds + run.duration_seconds
            run = replace(before, duration_seconds=seconds, usages=tuple(usages.values()))
        self._records[phase] = run

    def end(self) -> dict[str, float]:
        """End the epoch, and take it and its phases."""
        self.enter()
        if self._epoch is None:
            return {}
        record, self._epoch = self._epoch.stop(self._number), None
        if record.usages:  # else the extension was unloaded meanwhile: what its phases have is not all of it
            self._records["epoch"] = record
        else:
            self._records.clear()
        return dict(figure for label in list(self._records) for figure in self.take(label).items())

    def take(self, label: str) -> dict[str, float]:
        """Remember the record of an epoch, or of a phase's runs so far, and return its figures by name.

        They are kept memory and the peak above the start, of each device that held any.
        """
        record = self._records.pop(label, None)
        if record is None or self._traces is None:
            return {}
        self._traces.finished.append(record)
        figures = {}
        for usage in record.usages:
            if usage.peak_bytes:
                kept, peak = names_of(usage.device, label)
                figures.update({kept: usage.delta_bytes / MIB, peak: usage.peak_delta_bytes / MIB})
        return figures

    def close_if_lost(self) -> None:
        """End what is open if its training has ended without a word."""
        if self._lasts is not None and not self._lasts():
            self.close()

    def close(self) -> None:
        """End what is open, without figures."""
        self.enter()
        if self._epoch is not None:
            self._epoch.drop()
        self._epoch = self._traces = self._lasts = None
        self._records.clear()


class _Span:
    """A span that is open."""

    def __init__(self, meter: Meter, label: str, lasts: Callable[[], bool] | None) -> None:
        self.label, self._meter = label, meter
        self._started_at, self._started = time.time(), time.perf_counter()
        self._measurement = meter.start(lasts)

    def stop(self, number: int) -> TraceRecord:
        usages = self._meter.stop(self._measurement)
        return TraceRecord(self.label, self._started_at, time.perf_counter() - self._started, None, usages, number)

    def drop(self) -> None:
        self._meter.drop(self._measurement)


def names_of(device: str, label: str) -> tuple[str, str]:
    """Return how a device's two figures of an epoch or a phase are called."""
    start = "/".join(("mem", device.replace(":", "_"), *([] if label == "epoch" else [label])))
    return f"{start}/kept_mib", f"{start}/peak_mib"


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's hook that never raises: a failure of ours is reported, and nothing measured any more."""

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **options: Any) -> None:
        epochs: Epochs = self.epochs
        if epochs.has_failed:
            return
        try:
            epochs.close_if_lost()
            hook(self, *args, **options)
        except Exception as error:
            epochs.has_failed = True
            say_failed("the memory callback", error, hint="; it measures no more")
            with contextlib.suppress(Exception):  # what has failed may fail again
                epochs.close()

    return call


def phase_hook(*, ends: str = "", begins: str = "") -> Callable[..., None]:
    """Return a hook that ends the run of one phase, and begins one of another."""

    @harmless
    def hook(self: Any, *args: Any, **options: Any) -> None:
        self.epochs.leave(ends)
        self.epochs.enter(begins)

    return hook


@harmless
def close(self: Any, *args: Any, **options: Any) -> None:
    """End what is open, as a hook."""
    self.epochs.close()


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Raise MissingLibraryError, which says how to install a library, if the block cannot import it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingLibraryError(f"{library} is not installed: pip install '{package}'") from None
