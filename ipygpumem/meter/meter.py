"""Measures spans of time: memory before and after, and the exact peak in between, on every device.

Spans nest, or overlap in any order, over counters that can only be reset: at every start, each
counter is read, folded into every open span, and reset. A stop or a reading only folds, because the
counter's peak was reached inside every span that is still open. The meter owns the only thread,
which samples while a span is open and a probe has no counter of its own, and runs jobs that other
components submit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter

from ipygpumem.errors import describe_error
from ipygpumem.interrupts import is_from_signal
from ipygpumem.meter.worker import Worker
from ipygpumem.probes import Probe
from ipygpumem.records import Reading, Usage


class Measurement:
    """An open span, made by ``Meter.start``."""

    def __init__(self, before: dict[str, Reading], *, is_whole: bool) -> None:
        self.begin(before, is_whole=is_whole)

    def begin(self, before: dict[str, Reading], *, is_whole: bool) -> None:
        """Start the span with the readings ``before``, which are whole if no probe failed."""
        self.before, self._is_whole = before, is_whole
        self.peaks = {device: reading.current_bytes for device, reading in before.items()}
        self.is_settled = False

    def fold(self, readings: Sequence[Reading]) -> None:
        """Raise the peaks of this span to those of ``readings``, unless they are final."""
        for reading in () if self.is_settled else readings:
            if reading.peak_bytes > self.peaks.get(reading.device, 0):
                self.peaks[reading.device] = reading.peak_bytes

    def usages(self, readings: dict[str, Reading]) -> tuple[Usage, ...]:
        """Return each device's usage from the start of the span until ``readings``."""
        found = []
        for device, now in readings.items():
            before = self.before.get(device)
            if (
                before is None and not self._is_whole
            ):  # else it was empty: it was first used inside the span
                continue
            start, peak = (
                before.current_bytes if before else 0,
                max(self.peaks.get(device, 0), now.current_bytes),
            )
            # By position, which is twice as fast: every cell makes one per device.
            found.append(
                Usage(
                    device, start, now.current_bytes, peak, now.total_bytes, now.method, *now[5:9]
                )
            )
        return tuple(found)


class Meter:
    """Measures overlapping spans with a set of probes; thread-safe.

    Args:
        probes: probes to read; the meter closes them.
        find_more: called at every boundary; returns the probes found since the last call.
        sample_seconds: time between two samples of a probe without a high-water mark.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        find_more: Callable[[], Sequence[Probe]] | None = None,
        sample_seconds: float = 0.02,
    ) -> None:
        self._probes = list(probes)
        self._find_more = find_more
        self.failures: dict[str, str] = {}
        self._sample_seconds = sample_seconds
        # Weak: a span lost to a Ctrl-C before its assignment closes itself.
        # A set of references, because a WeakSet is as slow as a probe.
        self._open: set[weakref.ref[Measurement]] = set()
        self._own_lock, self._pid = threading.RLock(), os.getpid()
        self._sampling = self._is_closed = False
        self.worker = Worker()

    @property
    def _lock(self) -> threading.RLock:
        if os.getpid() != self._pid:  # our thread may have held it when the process forked
            self._own_lock, self._pid = threading.RLock(), os.getpid()
        return self._own_lock

    def start(self) -> Measurement:
        """Open a span."""
        with self._lock:
            measurement = Measurement(
                self._readings(peak=bool(self._open), rearm=True), is_whole=not self.failures
            )
            self._open.add(weakref.ref(measurement, self._open.discard))
            self._sample_if_needed()
            return measurement

    def read(self, measurement: Measurement) -> tuple[Usage, ...]:
        """Return the usages of an open span so far."""
        with self._lock:
            return measurement.usages(self._readings())

    def lap(self, measurement: Measurement) -> tuple[Usage, ...]:
        """Return the usages of an open span so far, and restart it."""
        with self._lock:
            readings = self._readings(rearm=True)
            usages = measurement.usages(readings)
            measurement.begin(readings, is_whole=not self.failures)
            return usages

    def settle(self, measurement: Measurement) -> tuple[Usage, ...]:
        """Return the usages of an open span so far, and make its peaks final: the remaining code
        only frees memory.
        """
        with self._lock:
            usages = self.read(measurement)
            measurement.is_settled = True
            return usages

    def stop(self, measurement: Measurement) -> tuple[Usage, ...]:
        """Close a span and return its usages; a closed span is only read."""
        with self._lock:
            usages = measurement.usages(self._readings())
            self._close(measurement)
            return usages

    def drop(self, measurement: Measurement) -> None:
        """Close a span without reading it."""
        with self._lock:
            self._close(measurement)

    def _close(self, measurement: Measurement) -> None:
        self._open.discard(weakref.ref(measurement))
        if self._sampling and not self._open:
            self._sampling = False
            self.worker.remove(self._sample)

    def now(self, *, detail: bool = False) -> dict[str, Reading]:
        """Return each device's reading; open spans keep their peaks."""
        with self._lock:
            return self._readings(detail=detail)

    def glance(self) -> dict[str, Reading]:
        """Return each device's memory now, without affecting open spans; other threads may use the
        devices.
        """
        found: dict[str, Reading] = {}
        with self._lock:
            self._probes += self._find_more() if self._find_more is not None else ()
            for probe in self._probes:
                try:
                    found |= {reading.device: reading for reading in probe.glance()}
                except Exception as error:  # noqa: PERF203  # as in _read
                    if is_from_signal(error):
                        raise
                    self.failures[_name(probe)] = describe_error(error)
        return found

    def change(self, action: Callable[[], None]) -> None:
        """Run ``action``, which changes a probe; open spans keep their peaks so far."""
        with self._lock:
            self._readings()
            action()
            self._sample_if_needed()

    def add(self, probe: Probe) -> None:
        """Measure with ``probe`` from now on, instead of any probe with the same name."""
        with self._lock:
            self._readings()  # open spans keep the peaks of a replaced probe
            dropped = [other for other in self._probes if _name(other) == _name(probe)]
            self._probes = [other for other in self._probes if other not in dropped]
            if self._is_closed:
                dropped.append(probe)
            else:
                self._probes.append(probe)
                self._sample_if_needed()
        for other in dropped:
            other.close()

    def _readings(self, **how: bool) -> dict[str, Reading]:
        """Read all probes into all open spans."""
        self._probes += self._find_more() if self._find_more is not None else ()
        return self._read(self._probes, **how)

    def _read(
        self,
        probes: Sequence[Probe],
        *,
        detail: bool = False,
        peak: bool = True,
        rearm: bool = False,
    ) -> dict[str, Reading]:
        """Read ``probes`` into all open spans; one that fails is left out and named in
        ``failures``.
        """
        found = {}
        spans = [span for reference in tuple(self._open) if (span := reference()) is not None]
        for probe in probes:
            try:
                readings = probe.read(detail=detail, peak=peak)
                for measurement in spans if readings else ():
                    measurement.fold(readings)
                if rearm:
                    probe.rearm()
            except Exception as error:  # a broken driver must not take the host's figures with it
                if is_from_signal(error):
                    raise
                self.failures[_name(probe)] = describe_error(error)
                continue
            if self.failures:
                self.failures.pop(_name(probe), None)
            for reading in readings:
                found[reading.device] = reading
        return found

    def _sample_if_needed(self) -> None:
        if self._open and any(map(attrgetter("sampled"), self._probes)):
            self._sampling = True
            self.worker.add(self._sample)  # even if it is registered: a forked child has no thread

    def _sample(self) -> float | None:
        with self._lock:
            if not self._open:  # the last span was garbage-collected without being closed
                self._sampling = False
                self.worker.remove(self._sample)
                return None
            self._read([probe for probe in self._probes if probe.sampled])
        return self._sample_seconds

    def close(self) -> None:
        """Stop sampling and close the probes; later readings are empty."""
        with self._lock:
            self._is_closed = True
            self._open.clear()
            probes, self._probes, self._find_more = self._probes, [], None
        self.worker.close()
        for probe in probes:
            probe.close()


def _name(probe: Probe) -> str:
    return getattr(probe, "name", "") or type(probe).__name__
