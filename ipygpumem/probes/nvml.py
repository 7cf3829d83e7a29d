"""Reads device totals and other processes from the NVIDIA driver, through NVML (``nvidia-ml-py``).

torch's and NVML's device numbers differ under ``CUDA_VISIBLE_DEVICES``, so devices are matched by
UUID. If NVML does not report a figure, it is None and ``note`` says why: never a wrong number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.host import SYSTEMS_PID_NAMESPACE
from ipygpumem.probes.other_kernels import is_kernel, notebook_of
from ipygpumem.units import GIB

T = TypeVar("T")
_MAX_IDLE_BYTES = GIB
"""Maximum memory that the driver itself uses on a card without processes."""


@dataclass(frozen=True)
class DriverCard:
    """A card of the driver, used by this process or not, with its NVML index."""

    index: int
    """Its NVML index, which may differ from CUDA's."""
    model: str
    """The name of its model."""
    whole: WholeDevice
    """Its memory."""


@dataclass(frozen=True)
class CardLoad:
    """The driver's figures of a card visible to CUDA, without other processes."""

    whole: WholeDevice
    """Its memory."""
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
        self._handles_by_index: dict[int, Any] = {}
        """NVML's handle of each device, by torch's index."""
        self._handles_of_visible: list[Any] | None = None
        """The handles of the visible cards, as found before CUDA was initialised."""

    def device(self, module: Any, index: int, *, processes: bool, has_context: bool) -> WholeDevice:
        """Return NVML's figures for a device; on failure there are none, and ``note`` says why.

        Args:
            module: ``torch.cuda``, once it is initialised.
            index: the device's index in torch.
            processes: also read the memory of other processes.
            has_context: True if this process uses the device, so that the driver must list it.
        """
        library = self._load()
        if library is None:
            return WholeDevice(note=self.missing)
        try:
            handle = self._handle(module, index)
            return _whole_device(library, handle, processes=processes, has_context=has_context)
        except (library.NVMLError, LookupError) as error:
            return WholeDevice(note=f"NVML: {error}")

    def cards(self) -> list[DriverCard]:
        """Return every card of the machine; empty without a driver.

        For a process that uses no card itself. Raises NVMLError if the driver lists none.
        """
        library = self._load()
        cards = list[DriverCard]()
        for index, handle in enumerate(_all_handles(library)):
            model = library.nvmlDeviceGetName(handle)
            try:
                whole = _whole_device(library, handle, processes=True, has_context=False)
            except library.NVMLError as error:  # a failing card must not hide the rest
                whole = WholeDevice(note=f"NVML: {error}")
            cards.append(DriverCard(index, model, whole))
        return cards

    def loads(self, cuda: Any | None) -> dict[int, CardLoad]:
        """Return memory and utilization of each card by its CUDA index, without cards that cannot
        be identified.

        ``cuda`` is ``torch.cuda`` once it is initialised, else None.
        """
        loads = dict[int, CardLoad]()
        library = self._load()
        if library is None:
            return loads
        handles = self._handles_before_use() if cuda is None else self._handles_in_use(cuda)
        for index, handle in handles.items():
            with contextlib.suppress(library.NVMLError):
                whole = _whole_device(library, handle, processes=False, has_context=False)
                # It stays if the utilization cannot be read.
                loads[index] = CardLoad(whole, utilization=None)
                utilization = int(library.nvmlDeviceGetUtilizationRates(handle).gpu)
                loads[index] = CardLoad(whole, utilization=utilization)
        return loads

    def _handles_in_use(self, cuda: Any) -> dict[int, Any]:
        """Return the handles of ``torch.cuda``'s devices by their index, without devices that
        cannot be identified.
        """
        handles = dict[int, Any]()
        for index in range(cuda.device_count()):
            with contextlib.suppress(self._library.NVMLError, LookupError):
                handles[index] = self._handle(cuda, index)
        return handles

    def _handles_before_use(self) -> dict[int, Any]:
        """Return the handles of the devices that ``torch.cuda`` will have, by their index; none if
        their order is unknown.
        """
        if self._handles_of_visible is None:
            self._handles_of_visible = []
            with contextlib.suppress(LookupError):
                self._handles_of_visible = self._read_visible(lambda library, card: card)
        return dict(enumerate(self._handles_of_visible))

    def _handle(self, cuda: Any, index: int) -> Any:
        """Return the handle of the device ``index`` of ``torch.cuda``; LookupError if it cannot be
        identified.
        """
        if index not in self._handles_by_index:
            self._handles_by_index[index] = _handle_by_uuid(
                self._library, cuda.get_device_properties(index)
            )
        return self._handles_by_index[index]

    def visible(self) -> list[WholeDevice]:
        """Return NVML's figures for each card visible to CUDA in this process, in CUDA's order;
        empty without a driver.

        For a process that does not use CUDA yet, because asking torch would create a context.

        Raises:
            LookupError: the order is unknown before CUDA is used, or the driver fails.
        """
        return self._read_visible(
            lambda library, card: _whole_device(library, card, processes=False, has_context=False)
        )

    def capabilities(self) -> list[tuple[int, int]]:
        """Return the compute capability of each card, such as ``(8, 0)``, in the order of
        ``visible``; empty if the driver does not report them.
        """
        with contextlib.suppress(LookupError):
            return self._read_visible(
                lambda library, card: tuple(library.nvmlDeviceGetCudaComputeCapability(card))
            )
        return []

    def _read_visible(self, read: Callable[[Any, Any], T]) -> list[T]:
        """Return the result of ``read(library, handle)`` for each visible card; LookupError as in
        ``visible``.
        """
        library = self._load()
        if library is None:
            return []
        try:
            return [read(library, card) for card in _visible_handles(library)]
        except library.NVMLError as error:
            raise LookupError(f"NVML: {error}") from None

    def _load(self) -> Any:
        """Return the library ``pynvml``, connected to the driver; None if that failed, now or at
        an earlier call.
        """
        if self._library is not None or self.missing:
            return self._library
        try:
            with warnings.catch_warnings():  # the deprecated package of the same name warns
                warnings.simplefilter("ignore", FutureWarning)
                import pynvml
        except ImportError:
            self.missing = "NVML: the package nvidia-ml-py is not installed"
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.missing = f"NVML: {error}"
            return None
        self._library = pynvml
        return pynvml

    def close(self) -> None:
        """Disconnect from NVML; a later query connects again."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = self._handles_of_visible = None
        self._handles_by_index.clear()


def has_driver() -> bool:
    """Return True if NVIDIA's driver is installed; creates no context."""
    with contextlib.suppress(OSError):
        name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
        return bool(ctypes.CDLL(name))
    # The driver's library may be where only torch looks for it.
    with contextlib.closing(Nvml()) as nvml:
        return nvml._load() is not None


def _all_handles(library: Any) -> list[Any]:
    """Return the handles of all cards in the driver's order; none without a driver, when
    ``library`` is None.
    """
    if library is None:
        return []
    count = library.nvmlDeviceGetCount()
    return [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]


def _handle_by_uuid(library: Any, properties: Any) -> Any:
    """Return the handle of the device that torch describes in ``properties``; LookupError if it
    cannot be identified.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        raise LookupError("this version of torch cannot report the device's UUID")
    # CUDA gives a MIG slice the UUID of its whole card, whose totals would be wrong for the slice.
    # A process sees one slice, the first that the variable names.
    first_visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first_visible.startswith("MIG-"):
        return library.nvmlDeviceGetHandleByUUID(first_visible)
    handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    if _mig_enabled(library, handle):
        raise LookupError(
            "the card is split by MIG and CUDA_VISIBLE_DEVICES does not name the slice"
        )
    return handle


def _visible_handles(library: Any) -> list[Any]:
    """Return the handles of the cards selected by ``CUDA_VISIBLE_DEVICES``, as CUDA reads it: its
    entries are numbers (``0,2``), beginnings of UUIDs (``GPU-8932f937``), or a MIG slice.

    Raises:
        LookupError: it cannot be known which cards CUDA will use.
    """
    cards = _all_handles(library)
    all_numbers = ",".join(str(number) for number in range(len(cards)))
    text = os.environ.get("CUDA_VISIBLE_DEVICES", all_numbers)
    words = [word.strip() for word in text.split(",")]
    if words[0].startswith("MIG-"):  # a process sees one slice, the first
        return [library.nvmlDeviceGetHandleByUUID(words[0])]
    if any(_mig_enabled(library, card) for card in cards):
        raise LookupError("a card is split by MIG and CUDA_VISIBLE_DEVICES does not name the slice")
    has_numbers = any(word.isdecimal() for word in words)
    if has_numbers and not _has_known_order(library, cards):
        raise LookupError(
            "the order of different cards is unknown before CUDA is used, unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    uuids = [""] * len(cards)
    if "GPU-" in text:
        uuids = [library.nvmlDeviceGetUUID(card) for card in cards]
    numbers: list[int] = []
    for word in words:
        number = _number_of_card(word, uuids)
        if number is None:  # CUDA stops at the first unknown entry
            break
        numbers.append(number)
    if len(set(numbers)) < len(numbers):  # a repeated card: none is visible
        return []
    return [cards[number] for number in numbers]


def _has_known_order(library: Any, cards: list[Any]) -> bool:
    """Return True if CUDA numbers the cards as the driver does.

    By default, CUDA lists the fastest card first, and cards of one model in the driver's order.
    """
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    return len({library.nvmlDeviceGetName(card) for card in cards}) < 2


def _number_of_card(word: str, uuids: list[str]) -> int | None:
    """Return the number of the card that an entry of ``CUDA_VISIBLE_DEVICES`` means; None if it
    means none.

    Args:
        word: the entry: a number, or the beginning of one card's UUID.
        uuids: the UUIDs of all cards, in the order of their numbers.
    """
    if word.isdecimal():
        number = int(word)
        return number if number < len(uuids) else None
    if not word.startswith("GPU-"):
        return None
    numbers = [number for number, uuid in enumerate(uuids) if uuid.startswith(word)]
    if len(numbers) == 1:
        return numbers[0]
    return None  # no card, or an ambiguous beginning


def _mig_enabled(library: Any, handle: Any) -> bool:
    """Return True if a card is split into slices by MIG."""
    try:
        return bool(library.nvmlDeviceGetMigMode(handle)[0])
    except library.NVMLError:  # a card without MIG
        return False


def _whole_device(library: Any, handle: Any, *, processes: bool, has_context: bool) -> WholeDevice:
    """Return the driver's figures of a card.

    Args:
        library: ``pynvml``.
        handle: the card's.
        processes: also read the memory of each process; if it is unknown, ``note`` says why.
        has_context: True if this process uses the card, so that the driver must list it.
    """
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    total = int(memory.total)
    used = int(memory.used)
    if not processes:
        return WholeDevice(total, used)
    # The driver may be older than the package, which raises an error that is no NVMLError.
    mismatch = getattr(library, "NVMLLibraryMismatchError", library.NVMLError)
    try:
        compute = library.nvmlDeviceGetComputeRunningProcesses(handle)
        graphics = library.nvmlDeviceGetGraphicsRunningProcesses(handle)
    # Some sandboxes refuse this query alone; the totals are known all the same.
    except (library.NVMLError, mismatch) as error:
        return WholeDevice(total, used, note=f"other processes: NVML: {error}")
    sizes = {process.pid: process.usedGpuMemory for process in [*compute, *graphics]}
    if None in sizes.values():
        note = "other processes: the driver does not report their memory here (WSL, or a container)"
        return WholeDevice(total, used, note=note)
    is_own_pid_missing = has_context and os.getpid() not in sizes
    is_use_unexplained = not sizes and used > _MAX_IDLE_BYTES
    if is_own_pid_missing or is_use_unexplained:
        note = (
            "other processes: process ids are hidden here (a container with its own PID namespace)"
        )
        return WholeDevice(total, used, note=note)
    own_bytes = sizes.pop(os.getpid(), 0)
    other_bytes = sum(sizes.values())
    return WholeDevice(
        total,
        used,
        other_bytes,
        own_bytes=own_bytes,
        other_processes=tuple(sizes.items()),
    )


def sees_system_processes() -> bool:
    """Return True if this process sees the system's PIDs, as the driver reports them; False in a
    container with its own PID namespace.
    """
    with contextlib.suppress(OSError):  # PID namespaces exist on Linux only
        return str(Path("/proc/self/ns/pid").readlink()) == SYSTEMS_PID_NAMESPACE
    return True


def process_label(pid: int) -> str:
    """Return a text about a process that the driver lists, such as ``process 1234 (python3, started
    by this kernel)``; only the PID where the driver's PIDs are not ours.
    """
    if not sees_system_processes():
        return f"process {pid}"
    import psutil  # takes long

    words = list[str]()
    with contextlib.suppress(psutil.Error, ValueError):  # it has ended, or is not visible to us
        process = psutil.Process(pid)
        words.append(process.name())
        if os.getpid() in [parent.pid for parent in process.parents()]:
            words.append("started by this kernel")
        elif is_kernel(process.cmdline()):
            words_of_kernel = "of another kernel"
            notebook = notebook_of(pid)
            if notebook:
                words_of_kernel += f": {notebook}"
            words.append(words_of_kernel)
    if not words:
        return f"process {pid}"
    return f"process {pid} ({', '.join(words)})"
