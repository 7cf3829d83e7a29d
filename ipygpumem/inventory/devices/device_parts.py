"""Breaks an accelerator's memory down into parts that sum exactly to the total.

The blocks of torch's allocator are compared with the addresses of the storages that Python holds.
Memory in a used block without such a storage belongs to an autograd graph or to C++ code.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter

from ipygpumem.inventory.devices.breakdown import (
    ADVICE_BY_ROLE,
    Part,
    Reconciliation,
    Storage,
    kind_parts,
)
from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.allocator import Snapshot, SnapshotBlock
from ipygpumem.probes.nvml import process_label
from ipygpumem.probes.pools import POOLS
from ipygpumem.records import Reading
from ipygpumem.units import format_bytes

_UNHELD = (
    "not a Python object: a loss or output keeps its graph (.detach() it), or cuBLAS a workspace"
)


def device_parts(
    reading: Reading,
    snapshot: Snapshot | None,
    wide: WholeDevice | None,
    storages: Iterable[Storage] | None,
    notes: Sequence[str] = (),
    pools: Sequence[Part] = (),
) -> Reconciliation:
    """Return the breakdown of the memory of ``reading``'s device: the more is known, the more parts
    it has.

    ================================  =============================================
    known                             parts
    ================================  =============================================
    allocator's blocks, and storages  tensors by role, graphs, rounding, cache, gaps
    only the allocator's blocks       all tensors, rounding, cache, gaps
    only the reading                  all tensors; everything else that is reserved
    ================================  =============================================

    Args:
        reading: the device's reading by a probe.
        snapshot: its allocator's blocks; None if torch has no snapshot.
        wide: the driver's figures for the device and its processes; None to use those of
            ``reading``.
        storages: the storages that Python holds, on any device; None if unknown.
        notes: further remarks.
        pools: memory reserved there by other libraries than torch.
    """
    device_names = (reading.device, f"{reading.device}:0")  # tensors have mps:0 for a single device
    all_notes = list(notes)
    if snapshot is None:
        parts = _parts_by_counters(reading)
    elif storages is None:
        parts = [_live_tensors(snapshot.requested_bytes)]
        parts += _overhead(snapshot, snapshot.allocated_bytes - snapshot.requested_bytes)
    else:
        cover = _Cover(
            snapshot.blocks_in_use, [item for item in storages if item.device in device_names]
        )
        parts = _parts_by_blocks(snapshot, cover)
        all_notes += _notes_on_outside(cover)
    return _with_parts_outside(reading, [*parts, *pools], wide, all_notes)


def card_parts(
    device: str, wide: WholeDevice, pools: Sequence[Part] = (), notes: Sequence[str] = ()
) -> Reconciliation:
    """Return the breakdown of a card that torch does not use."""
    reading = Reading(
        device,
        current_bytes=0,
        peak_bytes=0,
        method="allocator",
        total_bytes=wide.total_bytes,
        reserved_bytes=0,
        used_bytes=wide.used_bytes,
        other_bytes=wide.other_bytes,
    )
    return _with_parts_outside(reading, pools, wide, notes)


def _notes_on_outside(cover: _Cover) -> list[str]:
    """Return a note on the storages outside torch's allocator, if there are any."""
    if not cover.outside_bytes:
        return []
    return [
        f"{format_bytes(cover.outside_bytes)} of tensors lie outside torch's allocator "
        "(another library's, or another process's memory): they are counted there"
    ]


def _parts_by_blocks(snapshot: Snapshot, cover: _Cover) -> list[Part]:
    """Return the parts of the allocator's memory, given its blocks with the storages in them."""
    kinds = dict.fromkeys(ADVICE_BY_ROLE, 0) | cover.kinds
    return [
        *kind_parts("tensors", kinds),
        Part("autograd or C++ code", cover.unheld_bytes, _UNHELD),
        *_overhead(snapshot, cover.rounding_bytes),
    ]


def _overhead(snapshot: Snapshot, rounding_bytes: int) -> list[Part]:
    """Return the parts of the allocator's memory that hold no tensor: rounded sizes, caches,
    gaps.
    """
    largest = format_bytes(max(snapshot.fragments, default=0))
    gaps = f"gaps, the largest of {largest}: freed with the neighbouring tensors"
    return [
        Part("rounding", rounding_bytes, _ROUNDING),
        Part("waiting for a stream", snapshot.pending_bytes, _PENDING),
        Part("allocator cache", snapshot.cached_bytes, _CACHED),
        Part("fragmentation", sum(snapshot.fragments), gaps),
        Part("cache of private pools", snapshot.private_bytes, _IN_POOLS),
    ]


_ROUNDING = "the allocator rounds sizes up: few large tensors cost less than many"
_PENDING = "freed, but still in use by another stream"
_CACHED = "free for this process's next tensors; %gpumem free frees it"
_IN_POOLS = "free blocks of CUDA graphs or other pools: delete those, then %gpumem free"


class _Cover:
    """Matches storages with the blocks in which they lie, by address. Bytes that several storages
    share count once.

    Attributes:
        kinds: bytes of the storages in blocks, by kind.
        unheld_bytes: bytes of blocks without a storage.
        rounding_bytes: bytes of blocks beyond what was requested.
        outside_bytes: bytes of storages outside all blocks.
    """

    def __init__(self, blocks: Iterable[SnapshotBlock], storages: Iterable[Storage]) -> None:
        self.kinds: Counter[str] = Counter()
        self.unheld_bytes = self.rounding_bytes = 0
        self._storages = sorted(storages, key=attrgetter("address", "size_bytes"))
        self._starts = [item.address for item in self._storages]
        self.outside_bytes = sum(item.size_bytes for item in self._storages)
        for block in blocks:
            self._add(block)

    def _add(self, block: SnapshotBlock) -> None:
        """Add a block: count the bytes that storages cover by kind, and the remaining bytes as held
        by no tensor, or as rounding.
        """
        end = block.address + block.size_bytes
        first = bisect.bisect_left(self._starts, block.address)
        after_last = bisect.bisect_left(self._starts, end)
        covered = 0
        reached = block.address
        """End of the bytes that earlier storages cover."""
        for item in self._storages[first:after_last]:
            item_end = min(item.address + item.size_bytes, end)
            newly_covered = max(0, item_end - max(item.address, reached))
            self.kinds[item.kind] += newly_covered
            self.outside_bytes -= item.size_bytes
            covered += newly_covered
            reached = max(reached, item_end)
        if not covered:
            self.unheld_bytes += block.size_bytes  # held as a whole
            return
        rounding = block.size_bytes - max(covered, block.requested_bytes)
        self.rounding_bytes += rounding
        self.unheld_bytes += block.size_bytes - covered - rounding


def _parts_by_counters(reading: Reading) -> list[Part]:
    """Return the parts of a device whose allocator has no snapshot: live tensors, and all memory
    that it has reserved beyond them.
    """
    cache = max(0, (reading.reserved_bytes or 0) - reading.current_bytes)
    advice = "free for this process's next tensors; %gpumem free frees a part"
    return [
        _live_tensors(reading.current_bytes),
        Part("allocator cache and fragmentation", cache, advice),
    ]


def _live_tensors(size: int) -> Part:
    """Return the part of all live tensors, if their roles are unknown."""
    return Part("live tensors", size, "delete their names, or end the experiment that made them")


def _with_parts_outside(
    reading: Reading, parts: Sequence[Part], wide: WholeDevice | None, notes: Sequence[str]
) -> Reconciliation:
    """Return the breakdown with the parts outside torch's allocator, if the driver reports them:
    context, other processes, free memory. Otherwise they are one part of unknown size.

    Args:
        reading: the device's reading by a probe.
        parts: the parts of reserved memory.
        wide: the driver's figures; None to use those of ``reading``.
        notes: remarks.
    """
    reserved = sum(part.size_bytes or 0 for part in parts)
    total = reading.total_bytes
    used = reading.used_bytes
    if wide is not None and wide.used_bytes is not None:
        total = wide.total_bytes
        used = wide.used_bytes
    why = reading.note
    if not why and wide is not None:
        why = wide.note
    why = why or "the driver does not report it"
    if total is not None and used is not None:
        is_consistent = reserved <= used <= total
        if is_consistent:
            outside = _not_reserved(used - reserved, reserved, wide, why)
            outside.append(Part("free", total - used, "free for any process"))
            basis = "the device's memory"
            return Reconciliation(reading.device, total, basis, (*parts, *outside), tuple(notes))
        why = "the driver's figures contradict torch's: unified memory, or a busy moment"
    unknown = Part("unknown: context, other processes, free", size_bytes=None, advice=why)
    basis = "reserved by torch's allocator"
    return Reconciliation(reading.device, reserved, basis, (*parts, unknown), tuple(notes))


def _not_reserved(size: int, reserved: int, wide: WholeDevice | None, why: str) -> list[Part]:
    """Return the parts of the memory that is in use on a device, but not reserved by torch in this
    process: the context, each other process, and a part that no process accounts for.

    Args:
        size: its bytes.
        reserved: the bytes that torch has reserved.
        wide: the driver's figures; None if there are none.
        why: the reason why a part is unknown.
    """
    if wide is not None and wide.own_bytes is not None:
        context = max(0, wide.own_bytes - reserved)
        parts = [Part("context and libraries", context, _CONTEXT)]
        hidden = size - context
        for pid, used in sorted(wide.other_processes, key=itemgetter(1), reverse=True):
            hidden -= used
            advice = "another process: end it if it is yours"
            parts.append(Part(process_label(pid), used, advice))
        if hidden >= 0:
            return [*parts, Part("unknown", hidden, _HIDDEN)]
        why = "the driver's figures for processes exceed the memory in use: read at a busy moment"
    return [Part("unknown: context, libraries and other processes", size, why)]


_CONTEXT = "CUDA's context, kernels, workspaces: freed when the kernel restarts"
_HIDDEN = "in use, by no process that the driver lists: the driver itself, or hidden processes"
_UNUSED = {
    "jax": (
        "serves JAX alone, until the kernel ends: XLA_PYTHON_CLIENT_PREALLOCATE=false before its "
        "first use lets it reserve only what it needs"
    ),
    "cupy": "free for CuPy's next arrays; %gpumem free frees it",
}
"""Advice on the unused memory of a pool."""


def pools_on(index: int, readings: Mapping[str, Reading]) -> tuple[Part, ...]:
    """Return the parts of the pools on a device: those of JAX and CuPy. A pool whose reading names
    no device counts if there is only one card.

    Args:
        index: torch's number of the device.
        readings: the readings of all devices and pools, by name.
    """
    cards = {device for device in readings if device.partition(":")[0] == "cuda"}
    parts = []
    for device, reading in readings.items():
        name, _, number = device.partition(":")
        is_here = number == str(index) or (not number and len(cards) <= 1)
        if name not in POOLS or not is_here:
            continue
        pool = POOLS[name]
        in_use = reading.current_bytes
        parts.append(Part(f"{pool}: in use", in_use, "its arrays: delete their names"))
        if reading.reserved_bytes is not None:
            unused = max(0, reading.reserved_bytes - in_use)
            parts.append(Part(f"{pool}: pool's rest", unused, _UNUSED.get(name, "")))
    return tuple(parts)
