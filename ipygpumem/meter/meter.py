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

    Args:
        meter: the meter, which adds the peaks of all readings to its open spans.
        before: each device's reading at the start.
        all_were_read: True if no probe failed, so that a device without a reading was not in use.
    """

    def __init__(self, meter: Meter, before: dict[str, Reading], *, all_were_read: bool) -> None:
        self._meter = meter
        self._start_from(before, all_were_read=all_were_read)

    def _start_from(self, before: dict[str, Reading], *, all_were_read: bool) -> None:
        """Start with the readings ``before``; ``all_were_read`` means that no probe failed, so that
        a device without a reading was not in use.
        """
        self.before = before
        """Each device's reading at the start."""
        self._all_were_read = all_were_read
        self.peaks = {device: reading.current_bytes for device, reading in before.items()}
        """Each device's highest memory in the span so far."""
        self._are_peaks_fixed = False
        """True once the peaks are final; see ``fix_peaks``."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self) -> tuple[Usage, ...]:
        """Return each device's usage so far; the span stays open."""
        with self._meter.lock:
            return self._usages(self._meter.readings())

    def lap(self) -> tuple[Usage, ...]:
        """Return each device's usage so far, and start again: the next usages count from here."""
        meter = self._meter
        with meter.lock:
            readings = meter.readings(rearm=True)
            usages = self._usages(readings)
            self._start_from(readings, all_were_read=not meter.failures)
            return usages

    def fix_peaks(self) -> tuple[Usage, ...]:
        """Return each device's usage so far, and make its peaks final, because the user's code has
        ended.

        The span stays open for our own code, which frees memory, so that the memory after it
        counts: a later ``stop`` reports these peaks.
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
        """Close the span without reading it; a second call does nothing."""
        with self._meter.lock:
            self._meter.forget(self)

    def raise_peaks(self, readings: Sequence[Reading]) -> None:
        """Take over the peaks of ``readings`` that are higher than the span's own, unless these are
        final; the meter calls it with each reading of a probe.
        """
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
            if before is not None:
                start = before.current_bytes
            elif self._all_were_read:
                start = 0  # the device was first used inside the span
            else:
                continue  # its probe may have failed at the start, so the growth is unknown
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
        self._open: set[weakref.ref[Span]] = set()
        """The open spans. The references are weak, so that a span lost to a Ctrl-C before its
        assignment closes itself; in a plain set, because a WeakSet is as slow as a probe.
        """
        self._own_lock = threading.RLock()
        self._pid = os.getpid()
        """The process in which ``_own_lock`` was made."""
        self._is_sampling = False
        """True while ``_sample`` is a job of the worker."""
        self._is_closed = False
        """True after ``close``."""
        self.worker = Worker()
        """Runs the sampling, and jobs of other components, in our only thread."""

    @property
    def lock(self) -> threading.RLock:
        """The lock to hold while spans are read or changed; a thread may acquire it again."""
        # In a forked child, our thread does not exist, but may have held the lock at the fork.
        if os.getpid() != self._pid:
            self._own_lock = threading.RLock()
            self._pid = os.getpid()
        return self._own_lock

    def span(self) -> Span:
        """Open a span, and begin new peaks on all devices.

        >>> with meter.span() as span:
        ...     data = bytes(1_000_000)
        ...     usages = span.stop()
        """
        with self.lock:
            # Without an open span, no span needs the peak until now.
            before = self.readings(peak=bool(self._open), rearm=True)
            span = Span(self, before, all_were_read=not self.failures)
            self._open.add(weakref.ref(span, self._open.discard))
            self._sample_if_needed()
            return span

    def forget(self, span: Span) -> None:
        """Read a span no longer, and stop sampling after the last one; ``Span.close`` calls it."""
        self._open.discard(weakref.ref(span))  # references to one object are equal
        if self._is_sampling and not self._open:
            self._is_sampling = False
            self.worker.remove(self._sample)

    def now(self, *, detail: bool = False) -> dict[str, Reading]:
        """Return each device's reading now, which also goes into the open spans.

        Args:
            detail: add figures that take longer, as for ``Probe.read``.
        """
        with self.lock:
            return self.readings(detail=detail)

    def glance(self) -> dict[str, Reading]:
        """Return each device's memory now, without affecting open spans.

        For calls while the user's code runs in another thread and may use the devices. Their peaks
        are not read.
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
        """Run ``action``, which changes a probe, such as a switch of the host's probe to sampling.

        Open spans keep their peaks so far.
        """
        with self.lock:
            self.readings()  # the action may reset the peaks
            action()
            self._sample_if_needed()  # the changed probe may need it

    def add(self, probe: Probe) -> None:
        """Measure with ``probe`` from now on, instead of any probe with the same name, which is
        closed; a closed meter closes ``probe`` itself.
        """
        name = _probe_name(probe)
        with self.lock:
            self.readings()  # open spans keep the peaks of a replaced probe
            probes_to_close = [other for other in self._probes if _probe_name(other) == name]
            self._probes = [other for other in self._probes if other not in probes_to_close]
            if self._is_closed:
                probes_to_close.append(probe)
            else:
                self._probes.append(probe)
                self._sample_if_needed()
        for unused_probe in probes_to_close:
            unused_probe.close()

    def readings(
        self, *, detail: bool = False, peak: bool = True, rearm: bool = False
    ) -> dict[str, Reading]:
        """Return each device's reading, and raise the peaks of all open spans to it.

        A probe that fails is left out and named in ``failures``. The caller holds ``lock``.

        Args:
            detail: add figures that take longer, as for ``Probe.read``.
            peak: False if no span is open, so that no peak is needed.
            rearm: begin new peaks.
        """
        if self._find_more is not None:  # probes of libraries that were imported since
            self._probes += self._find_more()
        return self._read_probes(self._probes, detail=detail, peak=peak, rearm=rearm)

    def _open_spans(self) -> list[Span]:
        """Return the open spans that are still referenced."""
        spans = list[Span]()
        # A copy: a span that another thread loses while we iterate removes its reference.
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
        """Return the readings of some probes, add their peaks to the open spans, and note in
        ``failures`` which of the probes have failed.

        The arguments are those of ``readings``.
        """
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
            if self.failures:  # rarely: then the name, which takes time, is not needed
                self.failures.pop(_probe_name(probe), None)
            for reading in readings:
                by_device[reading.device] = reading
        return by_device

    def _sample_if_needed(self) -> None:
        """Begin to sample if a span is open and a probe has no high-water mark."""
        if self._open and any(map(attrgetter("sampled"), self._probes)):
            # Even if ``_is_sampling`` is True: in a forked child, the thread does not exist.
            self._is_sampling = True
            self.worker.add(self._sample)

    def _sample(self) -> float | None:
        """Read the probes without a high-water mark into the open spans.

        The worker's job: it returns the seconds until the next run, or None after the last span.
        """
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
    """Return a probe's name; the name of its class if it has none, as the host's."""
    return getattr(probe, "name", "") or type(probe).__name__
