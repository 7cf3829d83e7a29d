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


# -- the libraries' pools -----------------------------------------------------------------------
#
# Each of these functions gets a library's module, and yields its memory on each device. The
# reading's peak is the highest use ever; 0 if the library does not record it.


def _read_jax(jax: Any) -> Iterator[Reading]:
    """Yield the pool of each device of JAX, once the user's code has initialised its backend:
    ``jax.local_devices()`` would do so itself, and reserve memory.
    """
    is_initialized = loaded_object("jax._src.xla_bridge", "backends_are_initialized")
    if is_initialized is None or not is_initialized():
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
    """Return the name of a device of JAX in records, such as ``jax:0``; ``cpu`` for the host."""
    if device.platform == "cpu":
        return "cpu"
    number = getattr(device, "local_hardware_id", None)
    if number is None:
        number = device.id
    return f"jax:{number}"


def _read_cupy(cupy: Any) -> Iterator[Reading]:
    """Yield CuPy's pool on its current device: asking for another device would create a context
    there.
    """
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
    """Yield the counts of RMM's statistics adaptor, if the user has set one. RMM does not report
    its device.
    """
    counts = getattr(rmm.mr.get_current_device_resource(), "allocation_counts", None)
    if counts is not None:
        yield Reading("rmm", counts.current_bytes, counts.peak_bytes, "sampled")


def _read_tensorflow(tensorflow: Any) -> Iterator[Reading]:
    """Yield TensorFlow's pool on each GPU, once the user's code has initialised it: an earlier call
    would do so, and reserve whole devices.
    """
    context = loaded_object("tensorflow.python.eager.context", "_context")
    if not getattr(context, "_initialized", False):
        return
    for index in range(len(tensorflow.config.list_logical_devices("GPU"))):
        info = tensorflow.config.experimental.get_memory_info(f"GPU:{index}")
        yield Reading(f"tensorflow:{index}", info["current"], info["peak"], "sampled")


def _read_torch(torch: Any) -> Iterator[Reading]:
    """Yield torch's memory on Apple's GPU, if there is one; ``accelerators.py`` reads the rest."""
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


# -- probes -------------------------------------------------------------------------------------


class PoolProbe(Probe):
    """One library's pools. Their peaks are the user's and never reset.

    A span in which the library uses more than ever before has an exact peak; other peaks are
    sampled.

    Args:
        name: the library's module, one of ``_READERS``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._highest_ever: dict[str, int] = {}
        """Each device's highest use, by the library itself; empty until a device is in use."""
        self._highest_at_rearm: dict[str, int] = {}
        """Each device's highest use when the peak was rearmed."""

    @property
    def sampled(self) -> bool:
        """True once a device is in use: a pool's high-water mark cannot be reset, so that a peak
        below an earlier one is only seen by sampling.
        """
        return bool(self._highest_ever)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return the pool's readings on each device, as in ``Probe``.

        The peak since ``rearm`` is known if the library's highest use ever has risen since: it was
        reached in that time. Else the peak is the current value, and sampling finds a higher one.
        """
        readings = list[Reading]()
        for reading in _READERS[self.name](sys.modules[self.name]):
            highest = self._highest_ever[reading.device] = reading.peak_bytes
            peak_bytes = reading.current_bytes
            if highest > self._highest_at_rearm.get(reading.device, 0):
                peak_bytes = max(peak_bytes, highest)
            readings.append(reading._replace(peak_bytes=peak_bytes))
        return tuple(readings)

    def rearm(self) -> None:
        """Begin a new peak, without a reset of the library's own."""
        self._highest_at_rearm = dict(self._highest_ever)


def finder_of_probes() -> Callable[[], list[Probe]]:
    """Return a function that returns the probes of libraries loaded since its last call."""
    unloaded_libraries = list(_READERS)  # as of the last call

    def find_new_probes() -> list[Probe]:
        probes: list[Probe] = []
        for name in unloaded_libraries.copy():
            if name not in sys.modules or loaded(name) is None:
                continue
            unloaded_libraries.remove(name)
            if name == "torch":
                probes += _probes_of_torch(sys.modules[name])
            else:
                probes.append(PoolProbe(name))
        return probes

    return find_new_probes


def _probes_of_torch(torch: Any) -> Iterator[Probe]:
    """Yield the probes of torch's devices.

    Each probe is read twice per cell, so there are none for kinds of devices that this build of
    torch does not support.
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
    """Wraps a user's probe, so that its errors, invalid figures and slowness harm no cell.

    Args:
        name: the name of its devices (``tpu``), to which they may add a colon and more (``tpu:0``).
        probe: the user's object, with a method ``read``, and maybe ``rearm``, ``close`` and
            ``sampled``, as in ``Probe``.

    Raises:
        ProbeError: the name is reserved for our own devices, or has other characters.
    """

    sampled = False
    """True if the user's probe says so, as of its last reading."""

    def __init__(self, name: str, probe: Any) -> None:
        reserved_names = sorted(TORCH_DEVICES | POOLS.keys() | {"cpu", *OUTSIDE})
        is_valid = type(name) is str and re.fullmatch(r"[A-Za-z][\w-]*", name)
        if not is_valid or name in reserved_names:
            raise ProbeError(
                f"a probe needs a name of letters and digits for its devices, other than "
                f"{', '.join(reserved_names)}"
            )
        self.name = name
        self._probe = probe
        self._too_slow = ""
        """Why the probe is no longer used; empty as long as it is."""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return the readings of the user's probe, as in ``Probe``.

        A probe that takes too long is read only this last time, and a warning says so; with
        ``detail``, it may take long.

        Raises:
            ProbeError: the user's code failed, returned invalid readings, or was too slow before.
        """
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
        """Return the result of ``call``, which runs the user's code; an error of it is raised as
        ``ProbeError``, because it may be of any class, such as ``SystemExit``.
        """
        try:
            return call()
        except (Exception, SystemExit) as error:
            text = type(error).__name__
            with contextlib.suppress(Exception):  # raised by its own __str__
                text = describe_error(error)
            raise ProbeError(text) from None

    def _checked_readings(self, *, detail: bool, peak: bool) -> tuple[Reading, ...]:
        """Return the readings of the user's probe; ``ProbeError`` if one of them is invalid."""
        readings = self._probe.read(detail=detail, peak=peak)
        return tuple(map(self._checked_reading, readings))

    def _checked_reading(self, reading: Any) -> Reading:
        """Return ``reading`` if it is valid; else ``ProbeError`` says why it is not.

        No method of a class of the user's is called: the types are checked exactly.
        """
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
        exceeds_peak = reading.current_bytes > reading.peak_bytes
        total_bytes = reading.total_bytes
        exceeds_total = total_bytes is not None and reading.current_bytes > total_bytes
        if exceeds_peak or exceeds_total:
            raise ProbeError(
                "the peak must be at least the current bytes, and those at most the total"
            )
        return reading

    def glance(self) -> tuple[Reading, ...]:
        """Return nothing: the user's probe may not be thread-safe."""
        return ()

    def rearm(self) -> None:
        """Call the user's ``rearm``, if there is one (``bool()`` does nothing)."""
        self._call_users_code(lambda: getattr(self._probe, "rearm", bool)())

    def close(self) -> None:
        """Call the user's ``close``, if there is one."""
        self._call_users_code(lambda: getattr(self._probe, "close", bool)())


def _sizes_in(reading: Reading) -> list[object]:
    """Return all figures of a reading that must be sizes: the optional ones may also be None, and
    are then left out.
    """
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
    """Return True for an ``int`` from 0 on: no subclass, whose comparison is the user's code."""
    return type(size) is int and size >= 0
