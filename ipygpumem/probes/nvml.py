"""Reads device totals and other processes from the NVIDIA driver, through NVML (``nvidia-ml-py``).

torch's and NVML's device numbers differ under ``CUDA_VISIBLE_DEVICES``, so devices are matched by
UUID. If NVML does not report a figure, it is None and ``note`` says why: never a wrong number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ipygpumem.errors import DeviceError, describe_error
from ipygpumem.probes import host
from ipygpumem.probes.accelerators import (
    current_device,
    has_context,
    in_use,
    loaded_torch,
    parse_device,
    uncounted,
)
from ipygpumem.probes.outside import is_kernel, notebook_of
from ipygpumem.records import Record
from ipygpumem.units import GIB

T = TypeVar("T")
_IDLE_BYTES = GIB
"""Maximum memory that the driver itself may use on a card without processes."""

_FIRST_NAMESPACE = "pid:[4026531836]"
"""The system's own PID namespace (PROC_PID_INIT_INO in Linux's proc_ns.h)."""


@dataclass(frozen=True)
class DeviceWide:
    """The driver's figures of a whole device; None if unknown, and ``note`` says why."""

    total_bytes: int | None = None
    used_bytes: int | None = None
    other_bytes: int | None = None
    note: str = ""
    own_bytes: int | None = None
    """Memory of this process, its context included; None if processes were not asked for."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """PID and bytes of each other process."""


@dataclass(frozen=True)
class Card:
    """A card of the driver, used by this process or not, with its NVML index."""

    index: int
    model: str
    wide: DeviceWide


@dataclass(frozen=True)
class CardLoad:
    """The driver's figures of a card visible to CUDA, without other processes."""

    wide: DeviceWide
    utilization: int | None
    """Percentage of the driver's last sampling period in which a kernel ran; None if unknown, as on
    a MIG slice.
    """


class Nvml:
    """A lazy connection to NVML; the library is loaded by the first query."""

    def __init__(self) -> None:
        self._library: Any = None
        self.missing = ""
        """Why there is no connection, after a failed attempt."""
        self._handles: dict[int, Any] = {}
        self._before_use: list[Any] | None = None
        """The handles of the visible cards, as found before CUDA was initialised."""

    def device(self, module: Any, index: int, *, processes: bool, has_context: bool) -> DeviceWide:
        """Return NVML's figures for the device ``index`` of ``torch.cuda``; other processes only on
        request.

        ``has_context`` means that this process uses the device, so that the driver must list it.
        """
        library = self._load()
        if library is None:
            return DeviceWide(note=self.missing)
        try:
            if index not in self._handles:
                self._handles[index] = _find(library, module.get_device_properties(index))
            return _wide(
                library, self._handles[index], processes=processes, has_context=has_context
            )
        except (library.NVMLError, LookupError) as error:
            return DeviceWide(note=f"NVML: {error}")

    def cards(self) -> list[Card]:
        """Return every card for a process that uses none; empty without a driver. May raise
        NVMLError.
        """
        library, cards = self._load(), []
        for index, handle in enumerate(_handles(library)):
            model = library.nvmlDeviceGetName(handle)
            try:
                cards.append(
                    Card(index, model, _wide(library, handle, processes=True, has_context=False))
                )
            except library.NVMLError as error:  # a failing card must not hide the rest
                cards.append(Card(index, model, DeviceWide(note=f"NVML: {error}")))
        return cards

    def loads(self, cuda: Any | None) -> dict[int, CardLoad]:
        """Return memory and utilization of each card by its CUDA index, without those that cannot
        be identified.

        ``cuda`` is ``torch.cuda`` once it is initialised, else None.
        """
        library, found = self._load(), dict[int, CardLoad]()
        for index in () if library is None else range(self._count(cuda)):
            with contextlib.suppress(library.NVMLError, LookupError):
                if cuda is not None and index not in self._handles:
                    self._handles[index] = _find(library, cuda.get_device_properties(index))
                handle = (self._before_use or [])[index] if cuda is None else self._handles[index]
                found[index] = CardLoad(
                    _wide(library, handle, processes=False, has_context=False), None
                )
                utilization = int(library.nvmlDeviceGetUtilizationRates(handle).gpu)
                found[index] = CardLoad(found[index].wide, utilization)
        return found

    def _count(self, cuda: Any | None) -> int:
        if cuda is not None:
            return int(cuda.device_count())
        if self._before_use is None:
            self._before_use = []
            with contextlib.suppress(LookupError):
                self._before_use = self._of_visible(lambda library, card: card)
        return len(self._before_use)

    def visible(self) -> list[DeviceWide]:
        """Return NVML's figures for each card visible to CUDA in this process, in CUDA's order;
        empty without a driver.

        For a process that does not use CUDA yet, because asking torch would create a context.
        Raises LookupError if the order is unknown before CUDA is used, or if the driver fails.
        """
        return self._of_visible(
            lambda library, card: _wide(library, card, processes=False, has_context=False)
        )

    def capabilities(self) -> list[tuple[int, int]]:
        """Return the compute capability of each card as in ``visible``; empty if the driver does
        not report them.
        """
        with contextlib.suppress(LookupError):
            return self._of_visible(
                lambda library, card: tuple(library.nvmlDeviceGetCudaComputeCapability(card))
            )
        return []

    def _of_visible(self, read: Callable[[Any, Any], T]) -> list[T]:
        library = self._load()
        try:
            return [] if library is None else [read(library, card) for card in _visible(library)]
        except library.NVMLError as error:
            raise LookupError(f"NVML: {error}") from None

    def _load(self) -> Any:
        if self._library is None and not self.missing:
            try:
                with warnings.catch_warnings():  # the deprecated package of the same name warns
                    warnings.simplefilter("ignore", FutureWarning)
                    import pynvml
            except ImportError:
                self.missing = "NVML: the package nvidia-ml-py is not installed"
                return None
            try:
                pynvml.nvmlInit()
                self._library = pynvml
            except pynvml.NVMLError as error:
                self.missing = f"NVML: {error}"
        return self._library

    def close(self) -> None:
        """Disconnect from NVML."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = self._before_use = None
        self._handles.clear()


def has_driver() -> bool:
    """Return True if NVIDIA's driver is installed; creates no context."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))
    with contextlib.closing(Nvml()) as nvml:  # libcuda may be where only torch looks for it
        return nvml._load() is not None


def _handles(library: Any) -> list[Any]:
    count = 0 if library is None else library.nvmlDeviceGetCount()
    return [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]


def _find(library: Any, properties: Any) -> Any:
    """Return the handle of the device that torch describes; LookupError if it cannot
    be identified.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        raise LookupError("this version of torch cannot report the device's UUID")
    # A MIG slice has the UUID of its whole card in CUDA, whose totals would be wrong for it.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if visible.startswith("MIG-"):
        return library.nvmlDeviceGetHandleByUUID(visible)  # a process sees one MIG slice, the first
    handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    if _mig_enabled(library, handle):
        raise LookupError(
            "the card is split by MIG and CUDA_VISIBLE_DEVICES does not name the slice"
        )
    return handle


def _visible(library: Any) -> list[Any]:
    """Return the handles of the cards selected by ``CUDA_VISIBLE_DEVICES``, as CUDA reads it."""
    cards = _handles(library)
    text = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(cards)))))
    words = [word.strip() for word in text.split(",")]
    if words[0].startswith("MIG-"):
        return [library.nvmlDeviceGetHandleByUUID(words[0])]  # as in _find
    if any(_mig_enabled(library, card) for card in cards):
        raise LookupError("a card is split by MIG and CUDA_VISIBLE_DEVICES does not name the slice")
    # CUDA lists the fastest card first; cards of one model keep the driver's order.
    differ = len({library.nvmlDeviceGetName(card) for card in cards}) > 1
    if (
        differ
        and any(word.isdecimal() for word in words)
        and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        raise LookupError(
            "the order of different cards is unknown before CUDA is used, unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    uuids = [library.nvmlDeviceGetUUID(card) if "GPU-" in text else "" for card in cards]
    found: list[int] = []
    for word in words:  # a number, or the beginning of a UUID
        fitting = [
            place
            for place, uuid in enumerate(uuids)
            if (word.isdecimal() and int(word) == place)
            or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if len(fitting) != 1:  # CUDA stops at the first unknown entry
            break
        found += fitting
    # repeated card: none visible
    return [cards[place] for place in found] if len(set(found)) == len(found) else []


def _mig_enabled(library: Any, handle: Any) -> bool:
    try:
        return bool(library.nvmlDeviceGetMigMode(handle)[0])
    except library.NVMLError:  # a card without MIG
        return False


def _wide(library: Any, handle: Any, *, processes: bool, has_context: bool) -> DeviceWide:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    total, used = int(memory.total), int(memory.used)
    if not processes:
        return DeviceWide(total, used)
    try:
        compute = library.nvmlDeviceGetComputeRunningProcesses(handle)
        listed = [*compute, *library.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    # Some sandboxes refuse this query alone; the totals are known all the same.
    # NVMLLibraryMismatchError, which is no NVMLError, means that the driver is older than the
    # package.
    except (
        library.NVMLError,
        getattr(library, "NVMLLibraryMismatchError", library.NVMLError),
    ) as error:
        return DeviceWide(total, used, None, f"other processes: NVML: {error}")
    sizes = {process.pid: process.usedGpuMemory for process in listed}
    if any(size is None for size in sizes.values()):
        note = "other processes: the driver does not report their memory here (WSL, or a container)"
        return DeviceWide(total, used, None, note)
    if (has_context and os.getpid() not in sizes) or (not sizes and used > _IDLE_BYTES):
        note = (
            "other processes: process ids are hidden here (a container with its own PID namespace)"
        )
        return DeviceWide(total, used, None, note)
    own = sizes.pop(os.getpid(), 0)
    return DeviceWide(total, used, sum(sizes.values()), "", own, tuple(sizes.items()))


def sees_system_processes() -> bool:
    """Return True if PIDs here are the system's, as the driver reports them: not in a container
    with its own.
    """
    with contextlib.suppress(OSError):  # PID namespaces exist on Linux only
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    return True


def process_label(pid: int) -> str:
    """Return the PID and name of a process that the driver lists, and the kernel to which it
    belongs, if any.
    """
    import psutil  # takes long

    words = []
    if sees_system_processes():
        with contextlib.suppress(psutil.Error, ValueError):  # it has ended, or is not visible to us
            process = psutil.Process(pid)
            words = [process.name()]
            if os.getpid() in [parent.pid for parent in process.parents()]:
                words.append("started by this kernel")
            elif is_kernel(process.cmdline()):
                notebook = notebook_of(pid)
                words.append(f"of another kernel: {notebook}" if notebook else "of another kernel")
    return f"process {pid}" + f" ({', '.join(words)})" * bool(words)


# -- memory of one device -----------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceMemory(Record):
    """The memory of one device at one moment; None where unknown, and ``note`` says why."""

    device: str
    total_bytes: int | None = None
    """Bytes of the whole device; on the host at most a container's limit."""
    free_bytes: int | None = None
    """Free bytes for any process; on the host those that this process could allocate."""
    used_bytes: int | None = None
    """Bytes in use by all processes: total minus free."""
    allocated_bytes: int | None = None
    """Live tensors of this process; on the host its RSS."""
    reserved_bytes: int | None = None
    """Bytes that torch's allocator has reserved; None on the host, which has no such cache."""
    note: str = ""

    @property
    def free_with_cache_bytes(self) -> int | None:
        """Bytes that this process could still use: free ones, and those cached by torch's
        allocator.
        """
        if self.free_bytes is None or self.device == "cpu":
            return self.free_bytes
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes - self.allocated_bytes


def checked_device(device: object) -> str:
    """Return the name of the host or of one CUDA device, as ``parse_device`` reads it."""
    return current_device(parse_device(device, kinds=("cuda",)))


def device_here(device: object, known: Collection[str]) -> str:
    """Return the name of a device, as ``parse_device`` reads it; DeviceError if it is neither
    present nor ``known``.
    """
    name = parse_device(device, known=known)
    kind, _, index = name.partition(":")
    if name == "cpu" or any(name in (one, one.partition(":")[0]) for one in known):
        return name
    if kind == "cuda" and loaded_torch() is None:
        memory(name)  # asks the driver
    elif int(index or 0) >= getattr(getattr(loaded_torch(), kind, None), "device_count", int)():
        raise DeviceError(f"there is no {name} here")
    return name


def memory(device: object = "cpu") -> DeviceMemory:
    """Return the total, free and used memory of a device, without creating a CUDA context.

    Use it before loading a model. Only NVIDIA devices and the host are supported, and the driver
    does not report every figure in a container or under MIG: those are None.

    Args:
        device: ``RAM``, ``cuda:0``, a number, or a ``torch.device``.

    Raises:
        DeviceError: there is no such device.

    >>> ram = ipygpumem.memory("RAM")
    >>> ram.total_bytes == ram.free_bytes + ram.used_bytes
    True
    """
    name = checked_device(device)
    if name == "cpu":
        total, available = host.total_bytes(), host.available_bytes()
        with contextlib.closing(host.HostProbe(exact=False)) as probe:
            rss = probe.read(peak=False)[0].current_bytes
        return DeviceMemory("cpu", total, available, max(0, total - available), rss)
    index, cuda = int(name[5:]), in_use("cuda")
    with contextlib.closing(Nvml()) as nvml:
        wide = _unused(nvml, index) if cuda is None else _used(nvml, cuda, index)
    free = (
        None
        if wide.total_bytes is None or wide.used_bytes is None
        else wide.total_bytes - wide.used_bytes
    )
    note = wide.note
    allocated: tuple[int | None, int | None] = (0, 0)
    if cuda is not None and uncounted():
        note, allocated = "; ".join(filter(None, (note, uncounted()))), (None, None)
    elif cuda is not None:
        allocated = cuda.memory_allocated(index), cuda.memory_reserved(index)
    return DeviceMemory(name, wide.total_bytes, free, wide.used_bytes, *allocated, note)


def _used(nvml: Nvml, cuda: Any, index: int) -> DeviceWide:
    """Return the figures of a device once torch has initialised CUDA, though perhaps not on this
    device.
    """
    if index >= cuda.device_count():
        raise DeviceError(f"there is no cuda:{index} here")
    wide = nvml.device(cuda, index, processes=False, has_context=False)
    if wide.used_bytes is not None:
        return wide
    if uncounted() or not has_context(index):  # calling it would create one
        return DeviceWide(cuda.get_device_properties(index).total_memory, note=wide.note)
    try:
        free, total = cuda.mem_get_info(index)
    except RuntimeError as error:  # a broken context fails every call
        return DeviceWide(
            cuda.get_device_properties(index).total_memory, note=f"cuda: {describe_error(error)}"
        )
    return DeviceWide(total, total - free)


def _unused(nvml: Nvml, index: int) -> DeviceWide:
    """Return the driver's figures of a device on which this process does not use CUDA."""
    try:
        cards = nvml.visible()
    except LookupError as error:
        return DeviceWide(note=str(error))
    if index >= len(cards):
        raise DeviceError(
            f"there is no cuda:{index} here" + (f" ({nvml.missing})" if nvml.missing else "")
        )
    return cards[index]
