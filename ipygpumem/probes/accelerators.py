"""Reads CUDA, ROCm and XPU devices through torch, found in ``sys.modules`` and never imported.

Apple's GPU is read in ``pools.py``. A device counts as used once the user's code has initialised
its backend. Until then it is left out, so that measuring never creates a context, which would take
hundreds of MiB.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.errors import DeviceError, describe_error, quoted
from ipygpumem.introspect import is_instance
from ipygpumem.probes import Probe
from ipygpumem.records import Reading

TORCH_DEVICES = frozenset({"cuda", "xpu", "mps"})
"""Devices managed by torch's allocators."""
_NAMES_OF_HOST = ("ram", "host", "cpu", "cpu:0")


def loaded_torch() -> Any | None:
    """Return the torch module if the user's code has begun to import it, else None.

    Unlike ``introspect.loaded``, it also returns a torch that is still being imported, which may
    lack any attribute: its allocator must be measured from its first use. A stand-in that is no
    module, as tests put into ``sys.modules``, does not count.
    """
    module = sys.modules.get("torch")
    # The first check is for speed: this is called several times at every cell boundary, and
    # ``is_instance`` takes longer than all else.
    if type(module) is ModuleType or is_instance(module, ModuleType):
        return module
    return None


def parse_device(
    given: object, *, kinds: Iterable[str] = TORCH_DEVICES, known: Iterable[str] = ()
) -> str:
    """Return a device's name as in records, such as ``cpu`` or ``cuda:0``; ``cuda`` alone means all
    of its kind.

    Args:
        given: a name (``RAM``, ``host`` and ``cpu:0`` also mean the host), a CUDA device number, or
            a ``torch.device``; ``gpu`` is ``mps`` or ``xpu`` where torch uses that, else ``cuda``.
        kinds: torch device types to accept, in addition to the host.
        known: other accepted devices, such as those of the caller's records.

    Raises:
        DeviceError: it is none of these.
    """
    torch = loaded_torch()
    class_of_devices = getattr(torch, "device", None)
    text = ""  # as the user wrote it; empty for a number
    if type(given) is str:
        text = given
    elif is_instance(class_of_devices, type) and type(given) is class_of_devices:
        text = str(given)
    name = text.strip().lower()
    if not text and type(given) is int and given.bit_length() < 64:  # not True, nor a huge number
        name = f"cuda:{given}"
    if name == "gpu":
        name = _kind_of_gpu(kinds)
    if name in _NAMES_OF_HOST:
        return "cpu"
    known_names = set(known)
    kinds_of_known = {device.partition(":")[0] for device in known_names}
    if text in known_names or text in kinds_of_known:
        return text
    match = re.fullmatch(r"([a-z]\w*)(:(0|[1-9]\d{0,8}))?", name)
    if match is not None and match[1] in kinds:
        return "mps" if match[1] == "mps" else name
    raise DeviceError(
        f"{quoted(text or given)} is not a device: write RAM or a name such as cuda:0"
    )


def _kind_of_gpu(kinds: Iterable[str]) -> str:
    """Return the kind of devices that ``gpu`` means on this machine, of those in ``kinds``."""
    if "mps" in kinds and has_mps(loaded_torch()):
        return "mps"
    if "xpu" in kinds and initialized_backend("xpu") is not None:
        return "xpu"
    return "cuda"


def initialized_backend(backend: str) -> Any | None:
    """Return the module of a backend, such as ``torch.cuda`` for ``cuda``, once the user's code has
    initialised it, else None.
    """
    module = getattr(loaded_torch(), backend, None)
    initialized = getattr(module, "is_initialized", None)  # absent while torch is being imported
    if initialized is None or not initialized():
        return None
    return module


def has_mps(torch: Any) -> bool:
    """Return True if torch can use Apple's GPU, and so has no other accelerator; ``torch`` is the
    module, or None.
    """
    backend = getattr(getattr(torch, "backends", None), "mps", None)
    is_available = getattr(backend, "is_available", None)
    return is_available is not None and bool(is_available())


def current_device(name: str) -> str:
    """Return the name with the index of torch's current device: ``cuda:0`` for ``cuda``.

    A name that has an index, or has no use for one (``cpu``, ``mps``), is returned unchanged.
    """
    if name not in TORCH_DEVICES - {"mps"}:
        return name
    module = initialized_backend(name)
    index = 0 if module is None else module.current_device()
    return f"{name}:{index}"


def has_context(index: int) -> bool:
    """Return True if this process has a context on a CUDA device, even if nothing is allocated
    there.
    """
    cuda = initialized_backend("cuda")
    if cuda is None:
        return False
    has_primary_context = getattr(
        getattr(loaded_torch(), "_C", None), "_cuda_hasPrimaryContext", None
    )
    if has_primary_context is None:  # builds with CUDA have it
        return bool(cuda.memory_reserved(index))
    return bool(has_primary_context(index))


fractions: dict[int, float] = {}
"""The last limit on torch's allocator that we set, by device index; torch before 2.8 cannot report
it.
"""


def memory_fraction(cuda: Any, index: int) -> float:
    """Return the limit on torch's allocator as a share of the device; 1.0 if there is none."""
    fraction_of_torch = getattr(cuda, "get_per_process_memory_fraction", None)  # since torch 2.8
    if fraction_of_torch is None:
        return fractions.get(index, 1.0)
    return float(fraction_of_torch(index))


def limit_bytes(cuda: Any, index: int) -> int:
    """Return torch's limit on its allocator in bytes.

    torch takes its share of the memory that the CUDA runtime can use, which is less than NVML's
    total.
    """
    return int(memory_fraction(cuda, index) * cuda.get_device_properties(index).total_memory)


def why_torch_counts_nothing() -> str:
    """Return the reason why torch counts no memory on CUDA devices; empty if it does count."""
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    if name not in os.environ:  # to torch, any value means yes, also "0"
        return ""
    return f"{name} is set: torch counts and limits nothing on CUDA devices"


class CachingAllocatorProbe(Probe):
    """Every visible device of one backend (``cuda``, ``xpu``), by the counters of torch's caching
    allocator.

    Args:
        name: the backend.
        nvml: the connection (``Nvml``) that reads the figures of whole devices, if any.
    """

    sampled = False

    def __init__(self, name: str, nvml: Any = None) -> None:
        self.name = name
        self._nvml = nvml
        self._library: Any = None
        """Torch's compiled part (``torch._C``) in which the counters were looked up, so that
        missing ones are not looked up again.
        """
        self._peaks: _SharedPeaks | None = None
        """None until torch is loaded, and if it has no such counters."""
        self._totals: dict[int, int] = {}
        """The total bytes of each device, by the CUDA runtime."""
        self._with_context: set[int] = set()
        """Devices on which this process has allocated, so that a context exists even if nothing is
        in use now.
        """

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return the readings of all devices of an initialised backend, as in ``Probe``; the peaks
        are exact even without ``peak``, but then the figures of whole devices are left out.
        """
        if detail:
            return self._readings(DevicesToAsk.ALL)
        if peak:
            return self._readings(DevicesToAsk.USED)
        return self._readings(DevicesToAsk.NONE)

    def glance(self) -> tuple[Reading, ...]:
        """Return the readings by torch's counters and the driver, without a call to the device.

        The counters are on the host. torch holds their lock while it allocates from the device, and
        never waits for the GIL in that time: reading them waits no longer than the running code
        itself does.
        """
        return self._readings(DevicesToAsk.DRIVER)

    def _readings(self, to_ask: DevicesToAsk) -> tuple[Reading, ...]:
        """Return each device's reading; ``to_ask`` are the devices whose figures of all processes
        are read, too.
        """
        library = getattr(loaded_torch(), "_C", None)
        if self._peaks is None and library is not self._library:
            # As soon as torch is loaded: the first cell that uses the device may reset its
            # counters.
            self._library = library
            self._peaks = _SharedPeaks.of(library, self.name)
        if self._peaks is None:
            return ()
        module = initialized_backend(self.name)
        if module is None:
            return ()
        readings = list[Reading]()
        for index in range(module.device_count()):
            stats, peak = self._peaks.read(index)
            allocated = stats["allocated_bytes"]["all"]["current"]
            reserved = stats["reserved_bytes"]["all"]["current"]
            if reserved > 0:
                self._with_context.add(index)
            whole = self._whole_device(module, index, to_ask)
            # By position, which is faster: every cell makes two per device.
            readings.append(
                Reading(
                    f"{self.name}:{index}",
                    allocated,
                    max(peak, allocated),
                    "allocator",
                    whole.total_bytes,
                    reserved,
                    whole.used_bytes,
                    whole.other_bytes,
                    whole.note,
                )
            )
        return tuple(readings)

    def _whole_device(self, module: Any, index: int, to_ask: DevicesToAsk) -> WholeDevice:
        """Return the figures of a device for all processes together, from the driver, else from the
        runtime.

        There is only the total if ``to_ask`` leaves the device out, or if neither reports more.
        """
        total = self._totals.get(index)
        if total is None:
            total = self._totals[index] = module.get_device_properties(index).total_memory
        has_context = index in self._with_context
        if to_ask is DevicesToAsk.NONE:
            return WholeDevice(total)
        if to_ask is not DevicesToAsk.ALL and not has_context:
            return WholeDevice(total)
        by_driver = WholeDevice()
        if self._nvml is not None:
            by_driver = self._nvml.device(
                module, index, processes=to_ask is DevicesToAsk.ALL, has_context=has_context
            )
        if by_driver.used_bytes is not None:
            if by_driver.total_bytes:
                return by_driver
            return by_driver._replace(total_bytes=total)
        # ``mem_get_info`` calls the device, and would create a context where there is none.
        may_call_device = to_ask is not DevicesToAsk.DRIVER and has_context
        if not may_call_device or not hasattr(module, "mem_get_info"):
            return WholeDevice(total, note=by_driver.note)
        by_runtime = WholeDevice.from_runtime(self.name, module, index, total)
        return by_runtime._replace(note=by_runtime.note or by_driver.note)

    def rearm(self) -> None:
        """Reset torch's counters of each device; the user's code still sees its own peaks."""
        if self._peaks is None:
            return
        module = initialized_backend(self.name)
        if module is not None:
            for index in range(module.device_count()):
                self._peaks.rearm(index)

    def close(self) -> None:
        """Restore torch's functions and close the connection to NVML; a later ``read`` wraps them
        again.
        """
        if self._peaks is not None:
            self._peaks.close()
            self._peaks = self._library = None
        if self._nvml is not None:
            self._nvml.close()


Stats = dict[str, Any]
"""torch's nested statistics of one device: ``stats["allocated_bytes"]["all"]["peak"]``.

They are by name, then by pool (``all``, ``small_pool``, ``large_pool``), then ``current``,
``peak``, ``allocated`` and ``freed``. Some have no pools; ``num_ooms`` is a plain number.
"""


class DevicesToAsk(Enum):
    """The devices whose figures are also read for all processes together."""

    ALL = "all devices"
    USED = "devices that this process uses"
    DRIVER = "devices that this process uses, if the driver tells without a call to the device"
    NONE = "no device"


class WholeDevice(NamedTuple):
    """The memory of a whole device; None if unknown, and ``note`` says why."""

    total_bytes: int | None = None
    used_bytes: int | None = None
    """In use by all processes."""
    other_bytes: int | None = None
    """In use by other processes."""
    note: str = ""
    """The reason why a figure is None, for the user."""
    own_bytes: int | None = None
    """Memory of this process, its context included; None if processes were not asked for."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """PID and bytes of each other process."""

    @classmethod
    def from_runtime(cls, backend: str, module: Any, index: int, total_bytes: int) -> WholeDevice:
        """Return the CUDA runtime's figures of a device, by ``torch.cuda.mem_get_info``.

        The call creates a context where there is none. If it fails, the figures are ``total_bytes``
        and a note.
        """
        try:
            free, total = module.mem_get_info(index)
        except RuntimeError as error:  # a broken context fails every call
            return cls(total_bytes, note=f"{backend}: {describe_error(error)}")
        return cls(total, total - free)


class _SharedPeaks:
    """Shares one allocator's peak counters between the user's code and ours.

    torch's caching allocators have one resettable peak per statistic. We must reset it at every
    boundary to measure one cell's peak; the user's ``max_memory_allocated()`` must not notice. So
    the two lowest functions, which all Python-level ones call, are wrapped while we measure. Peaks
    that our resets clear are stored for the user's readings (``_users_peaks``), and the peak that a
    reset by the user clears is stored for ours (``_our_peaks``).

    For example, a cell reaches 8 GiB, and we reset the counter to the 1 GiB that are left. The next
    cell calls ``max_memory_allocated()``: torch reports 1 GiB, and our wrapper returns 8 GiB.
    """

    def __init__(self, library: Any, stats: str, reset: str) -> None:
        """Wrap the functions of ``library`` named ``stats`` and ``reset``."""
        self._library = library
        self._users_peaks: dict[int, dict[tuple[str, ...], int]] = {}
        """Peaks that our resets have cleared and the user's code has not, by device and by the path
        of the statistic.
        """
        self._our_peaks: dict[int, int] = {}
        """Each device's peak of allocated bytes that a reset by the user's code has cleared since
        our last ``rearm``.
        """
        self._last_stats: dict[int, Stats] = {}
        """The statistics of each device that we have read since our last ``rearm``, which the next
        one need not read again.
        """
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        """The original function and ours, by the name in ``library``."""
        self._stats: Callable[[int], Stats] = getattr(library, stats)
        self._reset: Callable[[int], None] = getattr(library, reset)
        self._wrap(stats, self._with_users_peaks)
        # Newer torch's functions of ``torch.accelerator`` have the same counters.
        self._wrap("_accelerator_getDeviceStats", self._with_users_peaks)
        self._wrap(reset, self._with_our_peak_stored)
        self._wrap("_accelerator_resetPeakStats", self._with_our_peak_stored)

    @classmethod
    def of(cls, library: Any, backend: str) -> _SharedPeaks | None:
        """Return the shared peaks of a backend (``cuda``, ``xpu``), with torch's functions wrapped;
        None if this build of torch has no such counters.
        """
        stats = f"_{backend}_memoryStats"
        reset = f"_{backend}_resetPeakMemoryStats"
        if not hasattr(library, stats) or not hasattr(library, reset):
            return None
        return cls(library, stats, reset)

    def _wrap(self, name: str, make: Callable[[Any], Any]) -> None:
        """Replace the function ``name`` of torch by the wrapper that ``make`` returns for it; do
        nothing if this version of torch does not have it.
        """
        original = getattr(self._library, name, None)
        if original is not None:
            wrapper = make(original)
            self._wrapped[name] = original, wrapper
            setattr(self._library, name, wrapper)

    def read(self, device: int) -> tuple[Stats, int]:
        """Return the raw statistics of ``device`` and its peak of allocated bytes since our
        ``rearm``.
        """
        stats = self._last_stats[device] = self._stats(device)
        return stats, max(stats["allocated_bytes"]["all"]["peak"], self._our_peaks.get(device, 0))

    def rearm(self, device: int) -> None:
        """Reset the counters of ``device``, and store the peaks that the user would still have
        seen.
        """
        users_peaks = self._users_peaks.setdefault(device, {})
        stats = self._last_stats.pop(device, {}) or self._stats(device)
        for path, values in _statistics_with_peaks(stats):
            users_peaks[path] = max(users_peaks.get(path, 0), values["peak"])
        self._reset(device)
        self._our_peaks.pop(device, None)

    def _with_users_peaks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``original`` whose statistics have the peaks that the user's code
        would see if we never reset them.
        """

        def stats(device: int) -> Stats:
            statistics: Stats = original(device)
            users_peaks = self._users_peaks.get(device, {})
            for path, values in _statistics_with_peaks(statistics):
                values["peak"] = max(values["peak"], users_peaks.get(path, 0))
            return statistics

        return stats

    def _with_our_peak_stored(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``original``, which the user's code calls to reset the peaks: it
        stores our peak before.
        """

        def reset(device: int) -> None:
            # RuntimeError without an allocator: the original raises it, too.
            with contextlib.suppress(RuntimeError):
                _, self._our_peaks[device] = self.read(device)
            original(device)
            self._users_peaks.pop(device, None)  # the user wants them to begin again, too

        return reset

    def close(self) -> None:
        """Restore the original functions, unless other code has wrapped ours."""
        for name, (original, wrapper) in self._wrapped.items():
            if getattr(self._library, name, None) is wrapper:
                setattr(self._library, name, original)
        self._wrapped.clear()


def _statistics_with_peaks(
    stats: Stats, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
    """Yield every statistic that has a peak, with its path: ``("allocated_bytes", "all")`` and its
    figures, such as ``{"current": 512, "peak": 1024, ...}``.

    ``path`` is the path of ``stats`` itself, if it is a part of the statistics.
    """
    for name, value in stats.items():
        if type(value) is dict:
            if "peak" in value:
                yield (*path, name), value
            else:
                yield from _statistics_with_peaks(value, (*path, name))
