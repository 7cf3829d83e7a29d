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


class Span:
    """An open span, made by ``Meter.span``.

    ``stop`` closes it, or the end of a ``with`` block.
    """

    def __init__(self, meter: Meter, before: dict[str, Reading], *, is_whole: bool) -> None:
        self._meter = meter
        self._start_from(before, is_whole=is_whole)

    def _start_from(self, before: dict[str, Reading], *, is_whole: bool) -> None:
        """Start with the readings ``before``, which are whole if no probe failed."""
        self.before = before
        self._is_whole = is_whole
        self.peaks = {device: reading.current_bytes for device, reading in before.items()}
        self._are_peaks_fixed = False

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self) -> tuple[Usage, ...]:
        """Return each device's usage so far."""
        with self._meter.lock:
            return self._usages(self._meter.readings())

    def lap(self) -> tuple[Usage, ...]:
        """Return each device's usage so far, and start again."""
        meter = self._meter
        with meter.lock:
            readings = meter.readings(rearm=True)
            usages = self._usages(readings)
            self._start_from(readings, is_whole=not meter.failures)
            return usages

    def fix_peaks(self) -> tuple[Usage, ...]:
        """Return each device's usage so far, and make its peaks final.

        The remaining code only frees memory.
        """
        with self._meter.lock:
            usages = self.read()
            self._are_peaks_fixed = True
            return usages

    def stop(self) -> tuple[Usage, ...]:
        """Close the span and return each device's usage; a closed span is only read."""
        with self._meter.lock:
            usages = self._usages(self._meter.readings())
            self._meter.forget(self)
            return usages

    def close(self) -> None:
        """Close the span without reading it; can be called again."""
        with self._meter.lock:
            self._meter.forget(self)

    def raise_peaks(self, readings: Sequence[Reading]) -> None:
        """Raise the peaks to those of ``readings``, unless they are final."""
        if self._are_peaks_fixed:
            return
        for reading in readings:
            if reading.peak_bytes > self.peaks.get(reading.device, 0):
                self.peaks[reading.device] = reading.peak_bytes

    def _usages(self, readings: dict[str, Reading]) -> tuple[Usage, ...]:
        """Return each device's usage from the start until ``readings``."""
        usages = list[Usage]()
        for device, now in readings.items():
            before = self.before.get(device)
            if before is None and not self._is_whole:
                continue  # else the device was empty: it was first used inside the span
            start = before.current_bytes if before else 0
            current = now.current_bytes
            peak = max(self.peaks.get(device, 0), current)
            # By position, which is twice as fast: every cell makes one per device. The slice has
            # the reserved, used and other bytes, and the note.
            usages.append(
                Usage(device, start, current, peak, now.total_bytes, now.method, *now[5:9])
            )
        return tuple(usages)


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
        """The error of each probe whose last reading failed, by its name."""
        self._sample_seconds = sample_seconds
        # Weak: a span lost to a Ctrl-C before its assignment closes itself. A set of references to
        # the open spans, because a WeakSet is as slow as a probe.
        self._open: set[weakref.ref[Span]] = set()
        self._own_lock = threading.RLock()
        self._pid = os.getpid()
        self._is_sampling = self._is_closed = False
        self.worker = Worker()

    @property
    def lock(self) -> threading.RLock:
        """Held while spans are read or changed."""
        if os.getpid() != self._pid:  # our thread may have held it when the process forked
            self._own_lock = threading.RLock()
            self._pid = os.getpid()
        return self._own_lock

    def span(self) -> Span:
        """Open a span.

        >>> with meter.span() as span:
        ...     data = bytes(1_000_000)
        ...     usages = span.stop()
        """
        with self.lock:
            before = self.readings(peak=bool(self._open), rearm=True)
            span = Span(self, before, is_whole=not self.failures)
            self._open.add(weakref.ref(span, self._open.discard))
            self._sample_if_needed()
            return span

    def forget(self, span: Span) -> None:
        """Close a span; ``Span.close`` calls it."""
        self._open.discard(weakref.ref(span))
        if self._is_sampling and not self._open:
            self._is_sampling = False
            self.worker.remove(self._sample)

    def now(self, *, detail: bool = False) -> dict[str, Reading]:
        """Return each device's reading; open spans keep their peaks."""
        with self.lock:
            return self.readings(detail=detail)

    def glance(self) -> dict[str, Reading]:
        """Return each device's memory now, without affecting open spans; other threads may use the
        devices.
        """
        readings: dict[str, Reading] = {}
        with self.lock:
            if self._find_more is not None:
                self._probes += self._find_more()
            for probe in self._probes:
                try:
                    readings |= {reading.device: reading for reading in probe.glance()}
                except Exception as error:  # noqa: PERF203  # as in _read
                    if is_from_signal(error):
                        raise
                    self.failures[_probe_name(probe)] = describe_error(error)
        return readings

    def change(self, action: Callable[[], None]) -> None:
        """Run ``action``, which changes a probe; open spans keep their peaks so far."""
        with self.lock:
            self.readings()
            action()
            self._sample_if_needed()

    def add(self, probe: Probe) -> None:
        """Measure with ``probe`` from now on, instead of any probe with the same name."""
        name = _probe_name(probe)
        with self.lock:
            self.readings()  # open spans keep the peaks of a replaced probe
            dropped = [other for other in self._probes if _probe_name(other) == name]
            self._probes = [other for other in self._probes if other not in dropped]
            if self._is_closed:
                dropped.append(probe)
            else:
                self._probes.append(probe)
                self._sample_if_needed()
        for other in dropped:
            other.close()

    def readings(
        self, *, detail: bool = False, peak: bool = True, rearm: bool = False
    ) -> dict[str, Reading]:
        """Read all probes into all open spans; one that fails is left out and named in
        ``failures``.

        Args:
            detail: add figures that take longer, as for ``Probe.read``.
            peak: False if no span is open, so that no peak is needed.
            rearm: begin new peaks.
        """
        if self._find_more is not None:  # probes of libraries that were imported since
            self._probes += self._find_more()
        return self._read_probes(self._probes, detail=detail, peak=peak, rearm=rearm)

    def _open_spans(self) -> list[Span]:
        """Return the open spans."""
        spans = list[Span]()
        for reference in tuple(self._open):
            span = reference()
            if span is not None:
                spans.append(span)
        return spans

    def _read_probes(
        self,
        probes: Sequence[Probe],
        *,
        detail: bool = False,
        peak: bool = True,
        rearm: bool = False,
    ) -> dict[str, Reading]:
        """Read some probes into all open spans; ``readings`` describes the arguments."""
        by_device = dict[str, Reading]()
        spans = self._open_spans()
        for probe in probes:
            try:
                readings = probe.read(detail=detail, peak=peak)
                if readings:
                    for span in spans:
                        span.raise_peaks(readings)
                if rearm:
                    probe.rearm()
            except Exception as error:  # a broken driver must not take the host's figures with it
                if is_from_signal(error):
                    raise
                self.failures[_probe_name(probe)] = describe_error(error)
                continue
            if self.failures:
                self.failures.pop(_probe_name(probe), None)
            for reading in readings:
                by_device[reading.device] = reading
        return by_device

    def _sample_if_needed(self) -> None:
        """Sample from now on if a span is open and a probe has no high-water mark."""
        if self._open and any(map(attrgetter("sampled"), self._probes)):
            self._is_sampling = True
            self.worker.add(self._sample)  # even if it is registered: a forked child has no thread

    def _sample(self) -> float | None:
        """Read the probes without a high-water mark; return the seconds until the next time."""
        with self.lock:
            if not self._open:  # the last span was garbage-collected without being closed
                self._is_sampling = False
                self.worker.remove(self._sample)
                return None
            self._read_probes([probe for probe in self._probes if probe.sampled])
        return self._sample_seconds

    def close(self) -> None:
        """Stop sampling and close the probes; later readings are empty."""
        with self.lock:
            self._is_closed = True
            self._open.clear()
            probes, self._probes, self._find_more = self._probes, [], None
        self.worker.close()
        for probe in probes:
            probe.close()


def _probe_name(probe: Probe) -> str:
    """Return a probe's name, or its type's if it has none."""
    return getattr(probe, "name", "") or type(probe).__name__
