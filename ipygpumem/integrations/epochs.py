"""Measures the epochs of a training and the phases of its steps, for callbacks of trainers, and never stops it."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import MissingLibraryError
from ipygpumem.measuring.meter import Meter
from ipygpumem.measuring.traces import Traces
from ipygpumem.model import TraceRecord, Usage
from ipygpumem.notebook.aside import say_failed
from ipygpumem.objects.holders.frames import stack, still_runs
from ipygpumem.units import MIB

EPOCH = "epoch"
KEPT, PEAK = "kept_mib", "peak_mib"


class Epochs:
    """The epochs of one training: each is a span, and inside it each run of a phase is one, too.

    Args:
        phases: measure phases; without, ``enter`` and ``leave`` do nothing.
    """

    def __init__(self, *, phases: bool = False) -> None:
        self.phases = phases
        self.has_failed = False
        self.left_out: set[str] = set()
        """Names that something else logs: the user's own code, or another one of these callbacks."""
        self._traces: Traces | None = None
        self._number = 0
        self._epoch: _Span | None = None
        self._phase: _Span | None = None
        self._runs: dict[str, _Runs] = {}
        self._lasts: Callable[[], bool] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make one that measures the same: trainers copy and pickle their callbacks."""
        return functools.partial(Epochs, phases=self.phases), ()

    @property
    def is_open(self) -> bool:
        """Whether an epoch is being measured."""
        return self._epoch is not None

    @property
    def phase(self) -> str:
        """The phase of which a run is open; empty if none is."""
        return self._phase.label if self._phase is not None else ""

    def begin(self, number: int, loop: str = "") -> None:
        """Begin epoch ``number``, counted from 1; what was open is forgotten.

        Args:
            number: of the epoch.
            loop: the name of the library's function that runs the training. Once an error has left that, nobody ends
                what is open: trainers do not tell.
        """
        self.close()
        self._traces, self._number = current_traces(), number
        callers = (frame for frame in stack(sys._getframe(1)) if frame.f_code.co_name == loop)
        above = next(callers, None)
        self._lasts = None if above is None else still_runs(above)
        self._epoch = _Span(self._traces.meter, EPOCH, self._lasts)

    def enter(self, phase: str) -> None:
        """Begin a run of a phase; another one that is open does not count."""
        self.skip()
        if self.phases and self._traces is not None:
            self._phase = _Span(self._traces.meter, phase, self._lasts)

    def leave(self, phase: str) -> None:
        """End the run of a phase, if it is the one that is open."""
        if self._phase is not None and self._phase.label == phase:
            runs = self._runs.setdefault(phase, _Runs(self._phase.started_at))
            runs.add(*self._phase.stop())
            self._phase = None

    def skip(self) -> None:
        """Forget the run that is open: it did not end where its phase does."""
        if self._phase is not None:
            self._phase.drop()
            self._phase = None

    def end(self) -> dict[str, float]:
        """End the epoch, remember it and its phases as records, and return their figures by name."""
        self.skip()
        if self._epoch is None or self._traces is None:
            return {}
        usages, seconds = self._epoch.stop()
        if not usages:  # the extension was unloaded meanwhile: what its phases have is not all of it
            self.close()
            return {}
        record = TraceRecord(EPOCH, self._epoch.started_at, seconds, None, usages, self._number)
        self._epoch = None
        of_phases = [self.take(phase) for phase in list(self._runs)]
        self._traces.finished.append(record)
        return dict(item for found in (named(usages), *of_phases) for item in found.items())

    def take(self, phase: str) -> dict[str, float]:
        """Remember the runs of a phase so far as one record, and return its figures by name."""
        runs = self._runs.pop(phase, None)
        if runs is None or self._traces is None:
            return {}
        usages = tuple(runs.usages.values())
        self._traces.finished.append(TraceRecord(phase, runs.started_at, runs.seconds, None, usages, self._number))
        return named(usages, phase)

    def names(self, phases: Iterable[str]) -> list[str]:
        """Return how the figures of an epoch are called, for the devices that hold memory now."""
        devices = [name for name, reading in current_traces().meter.now().items() if reading.current_bytes]
        parts = ["", *(phases if self.phases else ())]
        return [_name(device, part, what) for part in parts for device in devices for what in (KEPT, PEAK)]

    def close(self) -> None:
        """End what is open, without figures."""
        self.skip()
        if self._epoch is not None:
            self._epoch.drop()
        self._epoch = self._traces = self._lasts = None
        self._runs.clear()

    def close_if_lost(self) -> None:
        """End what is open if the training that it is of runs no more."""
        if self._lasts is not None and not self._lasts():
            self.close()

    def leave_to_user(self, names: Iterable[str], *, say: bool = True) -> None:
        """Note names of ours that something else logs: those are left out, which is said once."""
        new = sorted(set(names) - self.left_out)
        self.left_out.update(new)
        if new and say:
            text = f"something else logs {', '.join(new)} already, and so this memory callback does not"
            with contextlib.suppress(Exception):  # whatever stands for stderr now
                sys.stderr.write(f"ipygpumem: {text}; ipygpumem.traces() has its figures\n")

    def step_aside(self, error: Exception) -> None:
        """Report a failure of ours, and measure no more; the training goes on."""
        self.has_failed = True
        say_failed("the memory callback", error, hint="; it measures no more")
        with contextlib.suppress(Exception):  # what has failed may fail again
            self.close()


class _Span:
    """A span that is open."""

    def __init__(self, meter: Meter, label: str, lasts: Callable[[], bool] | None) -> None:
        self.label = label
        self._meter = meter
        self.started_at, self._started = time.time(), time.perf_counter()
        self._measurement = meter.start(lasts)

    def stop(self) -> tuple[tuple[Usage, ...], float]:
        """End it; return what each device went through, and the seconds it took."""
        return self._meter.stop(self._measurement), time.perf_counter() - self._started

    def drop(self) -> None:
        """End it without figures."""
        self._meter.drop(self._measurement)


class _Runs:
    """All runs of one phase in an epoch: the seconds of all, and of each device the run with the highest peak."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.seconds = 0.0
        self.usages: dict[str, Usage] = {}

    def add(self, usages: Iterable[Usage], seconds: float) -> None:
        """Count one more."""
        self.seconds += seconds
        for usage in usages:
            highest = self.usages.get(usage.device)
            if highest is None or usage.peak_delta_bytes > highest.peak_delta_bytes:
                self.usages[usage.device] = usage


def named(usages: Iterable[Usage], phase: str = "") -> dict[str, float]:
    """Return kept memory and the peak above the start, of each device that held any, as a trainer logs them."""
    figures = {}
    for usage in usages:
        if usage.peak_bytes:
            figures[_name(usage.device, phase, KEPT)] = usage.delta_bytes / MIB
            figures[_name(usage.device, phase, PEAK)] = usage.peak_delta_bytes / MIB
    return figures


def _name(device: str, phase: str, what: str) -> str:
    return "/".join(filter(None, ("mem", device.replace(":", "_"), phase, what)))


class Measuring(Protocol):
    """A callback that measures epochs."""

    epochs: Epochs


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's hook that never raises: a failure of ours is reported, and it does nothing from then on."""

    @functools.wraps(hook)
    def call(self: Measuring, *args: Any, **options: Any) -> None:
        if self.epochs.has_failed:
            return
        try:
            self.epochs.close_if_lost()
            hook(self, *args, **options)
        except Exception as error:
            self.epochs.step_aside(error)

    return call


def explain(error: ModuleNotFoundError, library: str, package: str) -> None:
    """Raise an error that says how to install ``library``, as ``package``, if that is what ``error`` misses.

    Raises:
        MissingLibraryError: it is.
    """
    if error.name == library:
        raise MissingLibraryError(f"{library} is not installed: pip install '{package}'") from None
