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
from ipygpumem.introspect import loaded, loaded_object
from ipygpumem.probes import Probe
from ipygpumem.probes.accelerators import TORCH_DEVICES, CachingAllocatorProbe, has_mps
from ipygpumem.records import OUTSIDE, Method, Reading

POOLS = {"jax": "JAX", "cupy": "CuPy", "rmm": "RMM", "tensorflow": "TensorFlow"}
"""Names of the libraries by their modules. Each has a function in ``_READERS``, too."""
_MOST_SECONDS = 0.5
"""A slower probe is dropped, because every cell would wait for it."""


# Each of these yields a library's memory on each device, and as the peak its highest use ever; 0 if
# the library records none.


def _read_jax(jax: Any) -> Iterator[Reading]:
    """Yield the pool of each device of the backend, if there is one: asking for devices would
    create it.
    """
    has_begun = loaded_object("jax._src.xla_bridge", "backends_are_initialized")
    if has_begun is None or not has_begun():
        return
    for device in jax.local_devices():
        stats = device.memory_stats()
        if not stats:  # on the CPU
            continue
        yield Reading(
            name_of_jax_device(device),
            current_bytes=stats["bytes_in_use"],
            peak_bytes=stats.get("peak_bytes_in_use") or 0,
            method="sampled",
            total_bytes=stats.get("bytes_limit"),
            reserved_bytes=stats.get("pool_bytes"),
        )


def name_of_jax_device(device: Any) -> str:
    """Return the name of a device of JAX, such as ``jax:0``."""
    if device.platform == "cpu":
        return "cpu"
    number = getattr(device, "local_hardware_id", None)
    if number is None:
        number = device.id
    return f"jax:{number}"


def _read_cupy(cupy: Any) -> Iterator[Reading]:
    """Yield the pool of the current device: asking for another one would create a context there."""
    if cupy.cuda.is_available():
        pool = cupy.get_default_memory_pool()
        yield Reading(
            f"cupy:{cupy.cuda.runtime.getDevice()}",
            current_bytes=pool.used_bytes(),
            peak_bytes=0,
            method="sampled",
            total_bytes=pool.get_limit() or None,
            reserved_bytes=pool.total_bytes(),
        )


def _read_rmm(rmm: Any) -> Iterator[Reading]:
    """Yield the counts of the statistics adaptor, if there is one. RMM does not
    report its device.
    """
    counts = getattr(rmm.mr.get_current_device_resource(), "allocation_counts", None)
    if counts is not None:
        yield Reading("rmm", counts.current_bytes, counts.peak_bytes, "sampled")


def _read_tensorflow(tensorflow: Any) -> Iterator[Reading]:
    """Yield the pool of each GPU, if TensorFlow is initialised: an earlier call would reserve whole
    devices.
    """
    context = loaded_object("tensorflow.python.eager.context", "_context")
    if not getattr(context, "_initialized", False):
        return
    for index in range(len(tensorflow.config.list_logical_devices("GPU"))):
        info = tensorflow.config.experimental.get_memory_info(f"GPU:{index}")
        yield Reading(f"tensorflow:{index}", info["current"], info["peak"], "sampled")


def _read_torch(torch: Any) -> Iterator[Reading]:
    """Yield Apple's GPU."""
    if not has_mps(torch):
        return
    total_bytes = None
    if hasattr(torch.mps, "recommended_max_memory"):
        total_bytes = torch.mps.recommended_max_memory()
    yield Reading(
        "mps",
        current_bytes=torch.mps.current_allocated_memory(),
        peak_bytes=0,
        method="sampled",
        total_bytes=total_bytes,
        reserved_bytes=torch.mps.driver_allocated_memory(),
    )


_READERS = {
    "torch": _read_torch,
    "jax": _read_jax,
    "cupy": _read_cupy,
    "rmm": _read_rmm,
    "tensorflow": _read_tensorflow,
}


class PoolProbe(Probe):
    """One library's pools. Their peaks are the user's and never reset.

    A span in which the library uses more than ever before has an exact peak; other peaks are
    sampled.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._highest_ever: dict[str, int] = {}
        """Each device's highest use, by the library itself."""
        self._highest_at_rearm: dict[str, int] = {}
        """Each device's highest use when the peak was rearmed."""

    @property
    def sampled(self) -> bool:
        """True once a device is in use: a pool's high-water mark cannot be reset, so that a peak
        below an earlier one is only seen by sampling.
        """
        return bool(self._highest_ever)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        readings = list[Reading]()
        for reading in _READERS[self.name](sys.modules[self.name]):
            highest = self._highest_ever[reading.device] = reading.peak_bytes
            peak_bytes = reading.current_bytes
            if highest > self._highest_at_rearm.get(reading.device, 0):  # a new record
                peak_bytes = max(peak_bytes, highest)
            readings.append(reading._replace(peak_bytes=peak_bytes))
        return tuple(readings)

    def rearm(self) -> None:
        self._highest_at_rearm = dict(self._highest_ever)


def finder_of_probes() -> Callable[[], list[Probe]]:
    """Return a function that returns the probes of libraries loaded since its last call."""
    waiting = list(_READERS)  # the libraries that are not loaded yet

    def find_new_probes() -> list[Probe]:
        probes: list[Probe] = []
        for name in waiting.copy():
            if name not in sys.modules or loaded(name) is None:
                continue
            waiting.remove(name)
            if name == "torch":
                probes += _probes_of_torch(sys.modules[name])
            else:
                probes.append(PoolProbe(name))
        return probes

    return find_new_probes


def _probes_of_torch(torch: Any) -> Iterator[Probe]:
    """Yield the probes of torch's devices. Each is read twice per cell, so there are none for
    devices that this build of torch does not have.
    """
    from ipygpumem.probes.nvml import Nvml  # loading the extension must stay fast

    library = getattr(torch, "_C", None)
    if hasattr(library, "_cuda_memoryStats"):
        yield CachingAllocatorProbe("cuda", Nvml())
    if hasattr(library, "_xpu_memoryStats"):
        yield CachingAllocatorProbe("xpu")
    if has_mps(torch):
        yield PoolProbe("torch")


class PluginProbe(Probe):
    """A user's probe: has a method ``read``, and may have ``rearm``, ``close`` and ``sampled``.

    Its devices are its name, alone or followed by a colon and more. ``ProbeError`` if the name is
    reserved or unfit.
    """

    sampled = False

    def __init__(self, name: str, probe: Any) -> None:
        reserved = sorted(TORCH_DEVICES | POOLS.keys() | {"cpu", *OUTSIDE})
        is_fit = type(name) is str and re.fullmatch(r"[A-Za-z][\w-]*", name)
        if not is_fit or name in reserved:
            raise ProbeError(
                f"a probe needs a name of letters and digits for its devices, other than "
                f"{', '.join(reserved)}"
            )
        self.name = name
        self._probe = probe
        self._too_slow = ""
        """Why it is no longer used; empty if it is."""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        if self._too_slow:
            raise ProbeError(self._too_slow)
        started = perf_counter()
        readings: tuple[Reading, ...] = self._call_users_code(
            lambda: self._checked_readings(detail=detail, peak=peak)
        )
        self.sampled = self._call_users_code(lambda: bool(getattr(self._probe, "sampled", False)))
        seconds = perf_counter() - started
        if seconds > _MOST_SECONDS and not detail:
            self._too_slow = f"took {seconds:.2g} s, so it is no longer used"
            self.sampled = False
            warnings.warn(
                f"ipygpumem: the probe {self.name!r}: {self._too_slow}",
                RuntimeWarning,
                stacklevel=2,
            )
        return readings

    def _call_users_code(self, call: Callable[[], Any]) -> Any:
        """Return the result of the user's code; ``ProbeError`` for any error of it."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            text = type(error).__name__
            with contextlib.suppress(Exception):  # raised by its own __str__
                text = describe_error(error)
            raise ProbeError(text) from None

    def _checked_readings(self, *, detail: bool, peak: bool) -> tuple[Reading, ...]:
        """Return the readings of the user's code; ``ProbeError`` if one of them is invalid."""
        readings = self._probe.read(detail=detail, peak=peak)
        return tuple(map(self._checked_reading, readings))

    def _checked_reading(self, reading: Any) -> Reading:
        """Return a reading of the user's code; ``ProbeError`` says what is wrong with it."""
        if type(reading) is not Reading:
            raise ProbeError(f"read() must return Readings, not {type(reading).__name__}")
        device = reading.device
        if type(device) is not str or device.partition(":")[0] != self.name:
            raise ProbeError(
                f"devices must be named {self.name} or {self.name}:0, {self.name}:1, ..."
            )
        if not all(map(_is_size, _sizes_in(reading))):
            raise ProbeError("bytes must be non-negative integers, or None where allowed")
        if reading.method not in get_args(Method) or type(reading.note) is not str:
            methods = ", ".join(sorted(get_args(Method)))
            raise ProbeError(f"method must be one of {methods}, and note must be a string")
        has_more_than_all = (
            reading.total_bytes is not None and reading.current_bytes > reading.total_bytes
        )
        if reading.current_bytes > reading.peak_bytes or has_more_than_all:
            raise ProbeError(
                "the peak must be at least the current bytes, and those at most the total"
            )
        return reading

    def glance(self) -> tuple[Reading, ...]:
        return ()  # it may not be thread-safe

    def rearm(self) -> None:
        self._call_users_code(getattr(self._probe, "rearm", bool))

    def close(self) -> None:
        self._call_users_code(getattr(self._probe, "close", bool))


def _sizes_in(reading: Reading) -> list[object]:
    """Return all bytes of a reading, without those that are None where that is allowed."""
    optional = (
        reading.total_bytes,
        reading.reserved_bytes,
        reading.used_bytes,
        reading.other_bytes,
        reading.mapped_bytes,
    )
    required = (reading.current_bytes, reading.peak_bytes)
    return [*required, *(size for size in optional if size is not None)]


def _is_size(size: Any) -> bool:
    return type(size) is int and size >= 0
