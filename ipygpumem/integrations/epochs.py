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
from ipygpumem.model import TraceRecord
from ipygpumem.notebook.aside import say_failed
from ipygpumem.objects.holders.frames import stack, still_runs
from ipygpumem.units import MIB


class Epochs:
    """The epochs of one training: each is a span, and inside it each run of a phase is one, too."""

    def __init__(self, *, phases: bool = False) -> None:
        self.phases = phases
        self.has_failed = False
        self._traces: Any = None
        self._number = 0
        self._open: dict[str, tuple[Any, float, float]] = {}
        """By label, the epoch and the phase that are measured, and when they began."""
        self._records: dict[str, TraceRecord] = {}
        self.lasts: Callable[[], bool] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make one that measures the same: trainers copy and pickle their callbacks."""
        return functools.partial(Epochs, phases=self.phases), ()

    def begin(self, number: int, loop: str = "") -> None:
        """Begin an epoch, counted from 1; what was open is forgotten.

        What is open ends with the library's function ``loop``: trainers tell callbacks of no error.
        """
        self.close()
        self._traces, self._number = current_traces(), number
        running = next((frame for frame in stack(sys._getframe(1)) if frame.f_code.co_name == loop), None)
        self.lasts = None if running is None else still_runs(running)
        self._start("epoch")

    def enter(self, phase: str = "") -> None:
        """Begin a run of a phase, if phases are measured; one that is open did not end where its phase does."""
        for label in set(self._open) - {"epoch"}:
            self._drop(label)
        if phase and self.phases and self._traces is not None:
            self._start(phase)

    def leave(self, phase: str) -> None:
        """End the run of a phase, if it is the one that is open; each device keeps the highest of an epoch."""
        run, before = self._stop(phase), self._records.get(phase)
        if run is not None and before is not None:
            usages = {usage.device: usage for usage in run.usages}
            for usage in before.usages:
                usages[usage.device] = max(usage, usages.get(usage.device, usage), key=lambda one: one.peak_delta_bytes)
            seconds = before.duration_seconds + run.duration_seconds
            run = replace(before, duration_seconds=seconds, usages=tuple(usages.values()))
        if run is not None:
            self._records[phase] = run

    def end(self) -> dict[str, float]:
        """End the epoch, and take it and its phases."""
        self.enter()
        record = self._stop("epoch")
        if record is not None and record.usages:
            self._records["epoch"] = record
        else:  # none, or the extension was unloaded meanwhile: what its phases have is not all of it
            self._records.clear()
        return dict(figure for label in list(self._records) for figure in self.take(label).items())

    def _start(self, label: str) -> None:
        started_at, started = time.time(), time.perf_counter()
        self._open[label] = self._traces.meter.start(self.lasts), started_at, started

    def _stop(self, label: str) -> TraceRecord | None:
        if label not in self._open:
            return None
        span, started_at, started = self._open.pop(label)
        usages = self._traces.meter.stop(span)
        return TraceRecord(label, started_at, time.perf_counter() - started, None, usages, self._number)

    def _drop(self, label: str) -> None:
        self._traces.meter.drop(self._open.pop(label)[0])

    def take(self, label: str) -> dict[str, float]:
        """Keep the record of an epoch, or of a phase's runs so far, and return its figures by name."""
        record = self._records.pop(label, None)
        if record is None:
            return {}
        self._traces.finished.append(record)
        figures = {}
        for usage in record.usages:
            if usage.peak_bytes:
                kept, peak = names_of(usage.device, label)
                figures.update({kept: usage.delta_bytes / MIB, peak: usage.peak_delta_bytes / MIB})
        return figures

    def close(self) -> None:
        """End what is open, without figures."""
        for label in list(self._open):
            self._drop(label)
        self._traces = self.lasts = None
        self._records.clear()


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
            if epochs.lasts is not None and not epochs.lasts():  # its training has ended without a word
                epochs.close()
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
