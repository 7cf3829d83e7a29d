"""Reads memory outside torch's caching allocators: other devices and libraries, and probes
registered by users.

Libraries are found in ``sys.modules`` and never imported. Errors, invalid figures and slowness of a
user's probe must not harm a cell.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, get_args

from ipygpumem.errors import ProbeError, describe_error
from ipygpumem.introspect import loaded
from ipygpumem.probes import Probe
from ipygpumem.probes.accelerators import TORCH_DEVICES, CachingAllocatorProbe, has_mps
from ipygpumem.records import OUTSIDE, Method, Reading

POOLS = {"jax": "JAX", "cupy": "CuPy", "rmm": "RMM", "tensorflow": "TensorFlow"}
"""Libraries by imported module. To support another one, add a function here."""
_MOST_SECONDS = 0.5
"""A slower probe is dropped, because every cell would wait for it."""


# Each of these yields a library's memory on a device, and as the peak its highest use ever; 0 if it
# records none.


def _jax(jax: Any) -> Iterator[Reading]:
    """Yield the pool of each device of the backend, if there is one: asking for devices would
    create it.
    """
    has_begun = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    for device in jax.local_devices() if has_begun is not None and has_begun() else ():
        if stats := device.memory_stats():  # none on the CPU
            number = getattr(device, "local_hardware_id", None)
            name = f"jax:{device.id if number is None else number}"
            used, limit, reserved = (
                stats["bytes_in_use"],
                stats.get("bytes_limit"),
                stats.get("pool_bytes"),
            )
            yield Reading(
                name, used, stats.get("peak_bytes_in_use") or 0, "sampled", limit, reserved
            )


def _cupy(cupy: Any) -> Iterator[Reading]:
    """Yield the pool of the current device: asking for another one would create a context there."""
    if cupy.cuda.is_available():
        own, index = cupy.get_default_memory_pool(), cupy.cuda.runtime.getDevice()
        yield Reading(
            f"cupy:{index}",
            own.used_bytes(),
            0,
            "sampled",
            own.get_limit() or None,
            own.total_bytes(),
        )


def _rmm(rmm: Any) -> Iterator[Reading]:
    """Yield the counts of the statistics adaptor, if there is one. RMM does not
    report its device.
    """
    counts = getattr(rmm.mr.get_current_device_resource(), "allocation_counts", None)
    if counts is not None:
        yield Reading("rmm", counts.current_bytes, counts.peak_bytes, "sampled")


def _tensorflow(tensorflow: Any) -> Iterator[Reading]:
    """Yield the pool of each GPU, if TensorFlow is initialised: an earlier call would reserve whole
    devices.
    """
    made = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(made, "_initialized", False):
        for index in range(len(tensorflow.config.list_logical_devices("GPU"))):
            info = tensorflow.config.experimental.get_memory_info(f"GPU:{index}")
            yield Reading(f"tensorflow:{index}", info["current"], info["peak"], "sampled")


def _torch(torch: Any) -> Iterator[Reading]:
    """Yield Apple's GPU."""
    if has_mps(torch):
        most = (
            torch.mps.recommended_max_memory()
            if hasattr(torch.mps, "recommended_max_memory")
            else None
        )
        used, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        yield Reading("mps", used, 0, "sampled", most, reserved)


_READERS = {"torch": _torch, "jax": _jax, "cupy": _cupy, "rmm": _rmm, "tensorflow": _tensorflow}


class PoolProbe(Probe):
    """One library's pools. Their peaks are the user's and never reset.

    A span in which the library uses more than ever before has an exact peak; other peaks are
    sampled.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._highest: dict[str, int] = {}
        self._marks: dict[str, int] = {}
        """Each device's highest use when the peak was rearmed."""

    @property
    def sampled(self) -> bool:
        return bool(self._highest)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        found = []
        for reading in _READERS[self.name](sys.modules[self.name]):
            highest = self._highest[reading.device] = reading.peak_bytes
            is_new = highest > self._marks.get(reading.device, 0)
            found.append(
                reading._replace(peak_bytes=max(reading.current_bytes, highest if is_new else 0))
            )
        return tuple(found)

    def rearm(self) -> None:
        self._marks = dict(self._highest)


def finder() -> Callable[[], list[Probe]]:
    """Return a function that returns the probes of libraries loaded since its last call."""
    waiting = list(_READERS)

    def find() -> list[Probe]:
        found: list[Probe] = []
        for name in [name for name in waiting if name in sys.modules and loaded(name) is not None]:
            waiting.remove(name)
            if name == "torch":
                from ipygpumem.probes.nvml import Nvml  # loading the extension must stay fast

                # Each probe is read twice per cell: there are none for what this build of torch
                # does not have.
                library = getattr(sys.modules[name], "_C", None)
                has = [kind for kind in ("cuda", "xpu") if hasattr(library, f"_{kind}_memoryStats")]
                found += [
                    CachingAllocatorProbe(kind, Nvml() if kind == "cuda" else None) for kind in has
                ]
            if name != "torch" or has_mps(sys.modules[name]):
                found.append(PoolProbe(name))
        return found

    return find


class PluginProbe(Probe):
    """A user's probe: has a method ``read``, and may have ``rearm``, ``close`` and ``sampled``.

    Its devices are its name, alone or followed by a colon and more. ``ProbeError`` if the name is
    reserved or unfit.
    """

    sampled = False

    def __init__(self, name: str, probe: Any) -> None:
        own = sorted(TORCH_DEVICES | POOLS.keys() | {"cpu", *OUTSIDE})
        if type(name) is not str or not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in own:
            raise ProbeError(
                f"a probe needs a name of letters and digits for its devices, other than "
                f"{', '.join(own)}"
            )
        self.name, self._probe, self._too_slow = name, probe, ""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        if self._too_slow:
            raise ProbeError(self._too_slow)
        started = perf_counter()
        readings = self._isolated(
            lambda: tuple([self._checked(r) for r in self._probe.read(detail=detail, peak=peak)])
        )
        self.sampled = self._isolated(lambda: bool(getattr(self._probe, "sampled", False)))
        seconds = perf_counter() - started
        if seconds > _MOST_SECONDS and not detail:
            self._too_slow, self.sampled = f"took {seconds:.2g} s, so it is no longer used", False
            warnings.warn(
                f"ipygpumem: the probe {self.name!r}: {self._too_slow}",
                RuntimeWarning,
                stacklevel=2,
            )
        return readings  # type: ignore[no-any-return]  # they were checked

    def _isolated(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            text = type(error).__name__
            with contextlib.suppress(Exception):  # raised by its own __str__
                text = describe_error(error)
            raise ProbeError(text) from None

    def _checked(self, reading: Any) -> Reading:
        if type(reading) is not Reading:
            raise ProbeError(f"read() must return Readings, not {type(reading).__name__}")
        device, current, peak, method, *more, note, mapped = reading
        if type(device) is not str or device.partition(":")[0] != self.name:
            raise ProbeError(
                f"devices must be named {self.name} or {self.name}:0, {self.name}:1, ..."
            )
        sizes = [current, peak, *(size for size in (*more, mapped) if size is not None)]
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ProbeError("bytes must be non-negative integers, or None where allowed")
        if method not in get_args(Method) or type(note) is not str:
            raise ProbeError(
                f"method must be one of {', '.join(sorted(get_args(Method)))}, and note must be a "
                f"string"
            )
        if not current <= min(peak, current if more[0] is None else more[0]):
            raise ProbeError(
                "the peak must be at least the current bytes, and those at most the total"
            )
        return reading

    def glance(self) -> tuple[Reading, ...]:
        return ()  # it may not be thread-safe

    def rearm(self) -> None:
        self._isolated(getattr(self._probe, "rearm", bool))

    def close(self) -> None:
        self._isolated(getattr(self._probe, "close", bool))
