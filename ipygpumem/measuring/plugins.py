"""Measures with probes of other packages, whose errors, nonsense and slowness must not harm a cell.

Packages offer probes as entry points of the group ``ipygpumem.probes``
(https://packaging.python.org/specifications/entry-points).
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from typing import Any, get_args

from ipygpumem.errors import ProbeError, said
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import Method, Reading
from ipygpumem.probes.accelerators import TORCH_DEVICES
from ipygpumem.probes.pools import POOLS

GROUP = "ipygpumem.probes"
_OWN = TORCH_DEVICES | POOLS.keys() | {"cpu"}
_NAME = re.compile(r"[A-Za-z][\w-]*")
_MOST_SECONDS = 0.5
"""A probe that takes longer is dropped, because every cell would wait for it."""


class PluginProbe:
    """A probe of another package, behind the protocol of ours.

    Args:
        name: its devices have this name, or begin with it and a colon.
        probe: has a method ``read``, and may have ``rearm``, ``close`` and ``sampled``.

    Raises:
        ProbeError: the name is none for a device, or is one of ours.
    """

    def __init__(self, name: str, probe: Any) -> None:
        if type(name) is not str or not _NAME.fullmatch(name) or name in _OWN:
            own = ", ".join(sorted(_OWN))
            raise ProbeError(f"a probe needs a name of letters and digits for its devices, other than {own}")
        self.name = name
        self.sampled = False
        self._probe = probe
        self._too_slow = ""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return what the probe reads (``ProbeError`` if that fails or makes no sense)."""
        if self._too_slow:
            raise ProbeError(self._too_slow)
        started = time.perf_counter()
        readings = self._isolated(lambda: tuple([self._checked(r) for r in self._probe.read(detail=detail, peak=peak)]))
        self.sampled = self._isolated(lambda: bool(getattr(self._probe, "sampled", False)))
        seconds = time.perf_counter() - started
        if seconds > _MOST_SECONDS and not detail:
            self._too_slow, self.sampled = f"it took {seconds:.2g} s and is not used any more", False
            warnings.warn(f"ipygpumem: the probe {self.name!r}: {self._too_slow}", RuntimeWarning, stacklevel=2)
        return readings  # type: ignore[no-any-return]  # they were checked

    def _isolated(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            try:
                text = said(error)  # type: ignore[arg-type]
            except Exception:  # raised by its own __str__
                text = type(error).__name__
            raise ProbeError(text) from None

    def _checked(self, reading: Any) -> Reading:
        """Return ``reading`` if it may be true (``ProbeError`` if it may not)."""
        if type(reading) is not Reading:
            raise ProbeError(f"read() must return Readings, not {type(reading).__name__}")
        device, current, peak, method, total, *more, note = reading
        if type(device) is not str or not (device == self.name or device.startswith(f"{self.name}:")):
            raise ProbeError(f"its devices must be called {self.name}, or {self.name}:0 and so on")
        if any(type(size) is not int or size < 0 for size in (current, peak)):
            raise ProbeError("bytes must be whole numbers from 0 on")
        if any(size is not None and (type(size) is not int or size < 0) for size in (total, *more)):
            raise ProbeError("bytes must be None or whole numbers from 0 on")
        if method not in get_args(Method) or type(note) is not str:
            raise ProbeError(f"method must be one of {', '.join(sorted(get_args(Method)))}, and note a text")
        if peak < current or (total is not None and current > total):
            raise ProbeError("a peak cannot be below what is in use, nor that above the total")
        return reading

    def glance(self) -> tuple[Reading, ...]:
        """Return nothing: a probe of another package may not be safe to call from another thread."""
        return ()

    def rearm(self) -> None:
        """Let the probe begin a new peak."""
        self._isolated(getattr(self._probe, "rearm", bool))

    def close(self) -> None:
        """Let the probe release what it holds."""
        self._isolated(getattr(self._probe, "close", bool))


def add_installed(meter: Meter) -> None:
    """Measure with all installed probes; one that cannot be used is named among the meter's failures."""
    try:
        from importlib.metadata import entry_points

        found = tuple(entry_points(group=GROUP))
    except Exception as error:  # a package whose files are broken
        meter.failures[GROUP] = said(error)
        return
    for entry in found:
        try:
            meter.add(PluginProbe(entry.name, entry.load()()))
        except (Exception, SystemExit) as error:  # noqa: PERF203  # one must not take the others with it
            meter.failures[entry.name] = said(error)  # type: ignore[arg-type]
