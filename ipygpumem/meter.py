"""Measures spans of time: memory before, after, and the exact peak between, on every device.

Peaks nest, or overlap in any order, over counters that can only be reset: at every start each counter is read,
folded into every open measurement, and rearmed. A stop or a reading folds and need not rearm: what the counter
shows was reached inside every span that is still open. The meter owns the only sampling thread, which runs only
while a measurement is open and a probe has no counter of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ipygpumem.model import Reading, Usage
from ipygpumem.probes import Probe


class Measurement:
    """An open span; made by ``Meter.start``."""

    def __init__(self, before: dict[str, Reading]) -> None:
        self.before = before
        self.peaks = {device: reading.current_bytes for device, reading in before.items()}

    def fold(self, readings: Sequence[Reading]) -> None:
        """Raise the peaks of this span to those of ``readings``."""
        for reading in readings:
            self.peaks[reading.device] = max(self.peaks.get(reading.device, 0), reading.peak_bytes)

    def usages(self, now: dict[str, Reading]) -> tuple[Usage, ...]:
        """Return what each device went through from the start of the span until ``now``."""
        return tuple(self._usage(reading) for reading in now.values())

    def _usage(self, now: Reading) -> Usage:
        # A device that was first used inside the span held nothing before it.
        before = self.before.get(now.device)
        return Usage(
            device=now.device,
            before_bytes=before.current_bytes if before else 0,
            after_bytes=now.current_bytes,
            peak_bytes=self.peaks.get(now.device, now.current_bytes),
            total_bytes=now.total_bytes,
            method=now.method,
            reserved_bytes=now.reserved_bytes,
            used_bytes=now.used_bytes,
            other_bytes=now.other_bytes,
            children_bytes=now.children_bytes,
            note=now.note,
        )


class Meter:
    """Measures overlapping spans with a set of probes; safe to use from several threads.

    Args:
        probes: what to read; the meter closes them.
        find_more: asked at every boundary until it returns further probes.
        sample_seconds: time between two samples where a probe has no high-water mark.
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
        self._open: list[Measurement] = []
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._sampler: threading.Thread | None = None

    def start(self) -> Measurement:
        """Open a span."""
        with self._lock:
            measurement = Measurement(self._readings(peak=bool(self._open), rearm=True))
            self._open.append(measurement)
            self._sample_if_needed()
            return measurement

    def read(self, measurement: Measurement) -> tuple[Usage, ...]:
        """Return the usages of an open span so far."""
        with self._lock:
            return measurement.usages(self._readings())

    def stop(self, measurement: Measurement) -> tuple[Usage, ...]:
        """Close a span and return its usages; a span that is closed already is only read."""
        with self._lock:
            usages = measurement.usages(self._readings())
            self.drop(measurement)
        return usages

    def drop(self, measurement: Measurement) -> None:
        """Close a span whose figures nobody wants."""
        with self._lock:
            if measurement in self._open:
                self._open.remove(measurement)
            if not self._open and self._sampler is not None:
                self._stop_sampler()

    def now(self, *, detail: bool = False) -> dict[str, Reading]:
        """Return each device's reading; open spans keep their peaks."""
        with self._lock:
            return self._readings(detail=detail)

    def change(self, action: Callable[[], None]) -> None:
        """Run ``action``, which changes a probe, with the peaks so far safe in the open spans."""
        with self._lock:
            self._readings()
            action()
            self._sample_if_needed()

    def _readings(self, **how: bool) -> dict[str, Reading]:
        if self._find_more is not None and (found := self._find_more()):
            self._probes += found
            self._find_more = None
        return {reading.device: reading for probe in self._probes for reading in self._read(probe, **how)}

    def _read(
        self, probe: Probe, *, detail: bool = False, peak: bool = True, rearm: bool = False
    ) -> tuple[Reading, ...]:
        """Read a probe into all open spans; one that fails is left out and named in ``failures``."""
        try:
            readings = probe.read(detail=detail, peak=peak)
            for measurement in self._open:
                measurement.fold(readings)
            if rearm:
                probe.rearm()
        except Exception as error:  # a driver that broke must not take the host's figures with it
            self.failures[type(probe).__name__] = f"{type(error).__name__}: {error}"
            return ()
        self.failures.pop(type(probe).__name__, None)
        return readings

    def _sample_if_needed(self) -> None:
        if self._open and self._sampler is None and any(probe.sampled for probe in self._probes):
            self._start_sampler()

    def _start_sampler(self) -> None:
        self._wake = threading.Event()
        self._sampler = threading.Thread(target=self._sample, args=(self._wake,), name="ipygpumem-sampler", daemon=True)
        self._sampler.start()

    def _stop_sampler(self) -> None:
        self._wake.set()
        self._sampler = None

    def _sample(self, wake: threading.Event) -> None:
        while not wake.wait(self._sample_seconds):
            with self._lock:
                for probe in self._probes:
                    if probe.sampled:
                        self._read(probe)

    def close(self) -> None:
        """Stop sampling and close the probes."""
        with self._lock:
            self._open.clear()
            sampler = self._sampler
            self._stop_sampler()
        if sampler is not None:
            sampler.join()
        for probe in self._probes:
            probe.close()
