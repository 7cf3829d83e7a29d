"""Collects the figures that ``%gpumem status`` needs, and breaks down each device's memory by them.

``host_parts.py`` and ``device_parts.py`` make the parts. It only reads: nothing is allocated on a
device, no context is created, and no object is kept.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ipygpumem.errors import describe_error
from ipygpumem.heap.kinds.arrays import (
    is_array,
    is_of_library,
    is_on_closed_map,
    owner_of,
    span_of,
)
from ipygpumem.heap.live.total import ObjectCount, Total, total
from ipygpumem.interrupts import is_from_signal
from ipygpumem.inventory.arrays.survey import roles_of_objects
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation, Storage
from ipygpumem.inventory.devices.device_parts import card_parts, device_parts, pools_on
from ipygpumem.inventory.devices.host_parts import DATA_OF, PYTHON_OBJECTS, host_parts
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import (
    TORCH_DEVICES,
    WholeDevice,
    loaded_torch,
    why_torch_counts_nothing,
)
from ipygpumem.probes.allocator import Snapshot, expandable_setting, snapshots
from ipygpumem.probes.children import Child, children
from ipygpumem.probes.host import HostFigures, host_figures
from ipygpumem.probes.nvml import Nvml, sees_system_processes
from ipygpumem.probes.pages import anonymous_bytes
from ipygpumem.records import Reading
from ipygpumem.units import MIB

T = TypeVar("T")
_LEAST_SHARE_OF_GAPS = 0.1
"""Minimum share of reserved memory in gaps for a hint on how to reduce them."""


@dataclass
class Findings:
    """The breakdowns, and the errors of sources that failed: without NVML, all other figures are
    still shown.
    """

    readings: Mapping[str, Reading] = field(default_factory=dict)
    reconciliations: list[Reconciliation] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Names of the failed sources, with the error."""
    children: list[Child] = field(default_factory=list)
    """Child processes of this process."""

    def note_processes(self, device: str, wide: WholeDevice) -> None:
        """Record each child process's memory on a device, as far as the driver reports it. In some
        containers it reports PIDs of another namespace: then nothing is recorded.
        """
        if not sees_system_processes():
            return
        sizes = dict(wide.other_processes)
        for position, child in enumerate(self.children):
            if child.pid in sizes:
                on_devices = (*child.on_devices, (device, sizes[child.pid]))
                self.children[position] = child._replace(on_devices=on_devices)

    def attempt(self, name: str, question: Callable[[], T], otherwise: T) -> T:
        """Return the result of ``question``; ``otherwise`` if it raises an error, which is recorded
        under ``name``.
        """
        try:
            return question()
        except Exception as error:  # a failing source must not hide the rest
            if is_from_signal(error):
                raise
            self.failures[name] = describe_error(error)
            return otherwise


def reconcile(
    read: Callable[[], Mapping[str, Reading]],
    look: Callable[[], Iterable[Storage]] | None = None,
    count: Callable[[], Total] = total,
    of_ipython: Mapping[str, int] | None = None,
) -> Findings:
    """Return each device's breakdown. If a source fails, its error is recorded, and the other ones
    are still used; only an error of ``read`` is raised.

    Args:
        read: reads each device, with detail.
        look: returns the storages of the tensors and arrays that Python holds, each once; None to
            skip them. Called after ``read``, because it takes memory itself.
        count: returns the memory of all objects. Called after ``look``, unless that is None.
        of_ipython: bytes of Python objects that IPython keeps, which have parts of their own.
    """
    findings = Findings(read())
    figures = _host_figures(findings)  # before ``look``, which takes memory
    storages: list[Storage] | None = None
    everything: Total | None = None
    if look is not None:
        storages = findings.attempt("tensors and arrays", lambda: list(look()), storages)
        everything = findings.attempt("all objects", count, everything)
    nvml = Nvml()
    for device, question in _questions(findings, nvml, figures, storages, everything, of_ipython):
        findings.reconciliations += findings.attempt(device, question, [])
    findings.attempt("NVML", nvml.close, otherwise=None)
    return findings


def _questions(
    findings: Findings,
    nvml: Nvml,
    figures: HostFigures | None,
    storages: list[Storage] | None,
    everything: Total | None,
    of_ipython: Mapping[str, int] | None,
) -> Iterator[tuple[str, Callable[[], list[Reconciliation]]]]:
    """Yield the source of each breakdown, such as ``cuda:0``, and the function that makes it.

    Args:
        findings: the readings of the devices.
        nvml: the driver's library.
        figures: the system's figures of the host; None if they cannot be read.
        storages: the storages of tensors and arrays; None if they are unknown.
        everything: the memory of all objects; None if it is unknown.
        of_ipython: bytes of Python objects that IPython keeps, by the name of their part.
    """
    snapshots_of = _allocator_snapshots(findings)
    for device, reading in findings.readings.items():
        if device == "cpu":
            yield (
                device,
                functools.partial(_host_breakdown, figures, storages, everything, of_ipython or {}),
            )
        elif device.partition(":")[0] in TORCH_DEVICES:
            snapshot = snapshots_of.get(device)
            yield (
                device,
                functools.partial(_device_breakdown, nvml, reading, snapshot, storages, findings),
            )
        # Else it is a library's pool, which is a part of its device, or a user's probe.
    if not any(device.startswith("cuda:") for device in findings.readings):
        yield "NVML", functools.partial(_breakdowns_of_other_cards, nvml, findings)


def _host_figures(findings: Findings) -> HostFigures | None:
    """Return the system's figures of the host's memory; None if they cannot be read. Record the
    child processes in the findings.
    """
    not_listed: list[Child] | None = None
    listed_children = findings.attempt("child processes", children, not_listed)
    findings.children = listed_children or []
    children_bytes = None
    if listed_children is not None:
        children_bytes = sum(child.memory_bytes for child in listed_children)
    shm = findings.readings.get("shm")
    shm_bytes = shm.current_bytes if shm else 0
    no_figures: HostFigures | None = None
    return findings.attempt("cpu", lambda: host_figures(children_bytes, shm_bytes), no_figures)


def _allocator_snapshots(findings: Findings) -> dict[str, Snapshot]:
    """Return a snapshot of torch's allocator for each device."""
    by_device: dict[str, Snapshot] = {}
    for backend in ("cuda", "xpu"):
        no_snapshots: dict[str, Snapshot] = {}
        take = functools.partial(snapshots, backend)
        by_device |= findings.attempt(f"allocator of {backend}", take, no_snapshots)
    return by_device


def now(meter: Meter, of_ipython: Mapping[str, int] | None = None) -> Findings:
    """Return the breakdown of each device's memory at this moment, as ``%gpumem status`` shows it.

    Args:
        meter: reads the devices.
        of_ipython: bytes of Python objects that IPython keeps, by the name of their part.
    """
    counted = ObjectCount()

    def look() -> Iterator[Storage]:
        """Return the storages of a pass over the heap, in which ``counted`` sees all objects."""
        return storages_of(roles_of_objects(counted))

    def count() -> Total:
        """Return the count of the look, or count again if that has failed."""
        return counted.total() if counted.is_complete else total()

    return reconcile(functools.partial(meter.now, detail=True), look, count, of_ipython)


def _host_breakdown(
    figures: HostFigures | None,
    storages: list[Storage] | None,
    everything: Total | None,
    of_ipython: Mapping[str, int],
) -> list[Reconciliation]:
    """Return the breakdown of the host's memory; nothing without the system's ``figures``.

    A library's memory with an address, such as a frame of polars, is a storage: only its pages in
    RAM count. Of memory without an address, all bytes count.

    Args:
        figures: the system's figures; None if they cannot be read.
        storages: the storages of tensors and arrays; None if they are unknown.
        everything: the memory of all objects; None if it is unknown.
        of_ipython: bytes of Python objects that IPython keeps, by the name of their part.
    """
    if figures is None:
        return []
    objects = Counter[str]()
    """Bytes of objects and of libraries' memory without an address, by the name of their part."""
    buffers = list(storages or ())
    if everything is not None:
        objects.update(of_ipython)
        without_ipython = everything.objects_bytes - sum(of_ipython.values())
        objects[PYTHON_OBJECTS] = max(0, without_ipython)
        for library, piece in everything.pieces:
            if piece.device == "cpu" and piece.address:
                buffers.append(
                    Storage("cpu", piece.address, piece.size_bytes, f"{DATA_OF}{library}")
                )
            elif piece.device == "cpu":
                objects[f"data of {library}"] += piece.size_bytes
    large = {name: size for name, size in objects.items() if size >= MIB}
    return [host_parts(figures, buffers, anonymous_bytes, large)]


def _breakdowns_of_other_cards(nvml: Nvml, findings: Findings) -> list[Reconciliation]:
    """Return a breakdown of each card that the driver lists, if torch has used none: querying the
    driver creates no context.
    """
    cards = nvml.cards()
    pools: tuple[Part, ...] = ()
    if len(cards) == 1:  # only torch could map a library's device number to one of several cards
        pools = pools_on(0, findings.readings)
    reconciliations = []
    for card in cards:
        use = "not used by this process yet"
        if card.whole.own_bytes is None:
            use = "the driver does not report whether this process uses it"
        elif card.whole.own_bytes:
            use = "used, but not by torch, as torch reports"
        device = f"nvml:{card.index}"
        note = f"{card.model}, by the driver's numbers: {use}"
        findings.note_processes(device, card.whole)
        reconciliations.append(card_parts(device, card.whole, pools, (note,)))
    return reconciliations


def _device_breakdown(
    nvml: Nvml,
    reading: Reading,
    snapshot: Snapshot | None,
    storages: list[Storage] | None,
    findings: Findings,
) -> list[Reconciliation]:
    """Return the breakdown of a device that torch uses, in a list."""
    backend, _, number = reading.device.partition(":")
    index = int(number or 0)
    module: Any = getattr(loaded_torch(), backend, None)
    wide = None
    pools: tuple[Part, ...] = ()
    notes: list[str] = []
    if backend == "cuda":
        if module is not None:
            wide = _device_wide(nvml, module, index, reading)
            findings.note_processes(reading.device, wide)
        pools = pools_on(index, findings.readings)
        why = why_torch_counts_nothing()
        if why:
            notes.append(f"{why}: its tensors are part of the driver's figure for this process")
    if reading.reserved_bytes:  # only then does a context exist
        notes += _note_on_broken_context(module, index)
    if backend == "cuda" and snapshot is not None:
        notes += _note_on_gaps(snapshot, reading.total_bytes or 0)
    return [device_parts(reading, snapshot, wide, storages, notes, pools)]


def _device_wide(nvml: Nvml, module: Any, index: int, reading: Reading) -> WholeDevice:
    """Return the driver's figures of a card; without those of processes if the driver does not list
    this one, although it has used the card.
    """
    has_context = bool(reading.reserved_bytes)
    wide = nvml.device(module, index, processes=True, has_context=has_context)
    if reading.used_bytes is None or reading.other_bytes is not None:
        return wide
    # The probe remembers that this process has used the device, so the driver must list it.
    note = reading.note or wide.note
    return wide._replace(own_bytes=None, other_processes=(), note=note)


def _note_on_broken_context(module: Any, index: int) -> list[str]:
    """Return a note, in a list, if this process can no longer use a card because a kernel on it has
    failed, such as by an index out of range; else nothing.
    """
    if not hasattr(module, "mem_get_info"):
        return []
    try:
        module.mem_get_info(index)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        return [f"this process's context is broken ({first_line}): restart the kernel"]
    return []


def _note_on_gaps(snapshot: Snapshot, total_bytes: int) -> list[str]:
    """Return a note with the setting that reduces gaps, in a list; nothing if there are few gaps or
    this torch has no such setting.
    """
    if not _has_many_gaps(snapshot, total_bytes):
        return []
    setting = expandable_setting()
    if not setting:
        return []
    does = "torch also frees pages between tensors; set it before torch first uses CUDA"
    return [f"many gaps: with {setting} {does}"]


def _has_many_gaps(snapshot: Snapshot, total_bytes: int) -> bool:
    """Return True if the gaps between tensors are many, for the allocator and for the device; False
    if the segments are expandable already.
    """
    if any(segment.page_bytes is not None for segment in snapshot.segments):
        return False
    many_bytes = max(_LEAST_SHARE_OF_GAPS * snapshot.reserved_bytes, total_bytes / 100)
    return sum(snapshot.fragments) >= many_bytes


def storages_of(arrays: Iterable[tuple[object, str]]) -> Iterator[Storage]:
    """Yield the storage of each torch tensor or NumPy array, each address once.

    Objects without memory of their own are left out: meta, fake and sparse tensors, and wrappers
    around other tensors.

    Args:
        arrays: the tensors and arrays with their roles.
    """
    listed: set[tuple[str, int]] = set()
    for array, kind in arrays:
        memory_range = None
        # An exotic or half-made array is skipped, as in ``arrays.describe``.
        with contextlib.suppress(Exception):
            memory_range = _range_of_array(array)
        if memory_range is None or (memory_range.device, memory_range.address) in listed:
            continue
        listed.add((memory_range.device, memory_range.address))
        yield Storage(*memory_range, kind)


class _MemoryRange(NamedTuple):
    """The memory of a tensor or array."""

    device: str
    address: int
    size_bytes: int


def _range_of_array(array: object) -> _MemoryRange | None:
    """Return the memory of a tensor or array; None if it has no memory of its own, as a
    view or an array on a tensor's memory.
    """
    if is_of_library(array, "torch", "Tensor"):
        return _range_of_tensor(sys.modules["torch"], array)
    if not is_array(array):
        return None
    owner = owner_of(array)
    if not is_array(owner) or is_on_closed_map(owner):  # a tensor is listed itself
        return None
    _, start, end = span_of(owner)
    return _MemoryRange("cpu", start, end - start)


def _range_of_tensor(torch: Any, tensor: Any) -> _MemoryRange | None:
    """Return the memory of a tensor's storage; None if it has no memory, as a meta tensor."""
    with torch._C.DisableTorchFunction():  # a subclass's own code must not run
        storage = torch.Tensor.untyped_storage(tensor)
        device = storage.device
        if device.type == "meta":  # also a fake tensor's, which warns when its address is read
            return None
        # A lazy clone shares memory until its pointer is read, which would create the copy here.
        is_lazy = getattr(torch._C, "_is_cow_tensor", None)
        if is_lazy is not None and is_lazy(tensor):
            address = int(torch._C._data_address(tensor))
        else:
            address = int(storage.data_ptr())
        size = int(storage.nbytes())
    if not address:
        return None
    return _MemoryRange(str(device), address, size)
