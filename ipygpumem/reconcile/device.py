"""What the memory of one accelerator consists of: parts that sum exactly to what the driver says there is.

The allocator's blocks are laid against the addresses of the storages that Python holds. What lies in a block in use
without such a storage is held by something else: a graph of autograd, a library in C++.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ipygpumem.model import Reading
from ipygpumem.probes.allocator import Block, Snapshot
from ipygpumem.probes.nvml import DeviceWide, process_name
from ipygpumem.probes.pools import POOLS
from ipygpumem.record import Record
from ipygpumem.units import format_bytes


@dataclass(frozen=True)
class Part(Record):
    """One of the parts that a device's memory consists of, and what the user can do about it."""

    name: str
    size_bytes: int | None
    """None where nobody knows it; then ``advice`` says why."""
    advice: str


@dataclass(frozen=True)
class Reconciliation(Record):
    """What a device's memory consists of: the parts whose size is known sum to ``total_bytes`` exactly."""

    device: str
    total_bytes: int
    basis: str
    """What ``total_bytes`` is, in words: the device's memory, a container's limit, or only what is reserved."""
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """What the figures do not say by themselves, such as why one is missing."""


class Storage(NamedTuple):
    """The memory of one or more tensors or arrays, each byte once."""

    device: str
    address: int
    size_bytes: int
    kind: str
    """What it is to the user: ``parameter``, ``gradient``, ``optimizer state``, ``buffer``, ``other``, ..."""


KINDS = {
    "parameter": "delete the model, or model.cpu(), or load it in a smaller dtype",
    "gradient": "optimizer.zero_grad() frees it until the next backward pass",
    "optimizer state": "delete the optimizer, or use one that keeps less for each parameter",
    "buffer": "part of a module: goes when the module goes",
    "other": "inputs, activations, results: delete their names, end their experiment",
}
"""Kinds of tensors in the order of the report, each with its advice."""

_CONTEXT = "CUDA's context, kernels, workspaces: given back when the kernel restarts"
_FREE = "free for any process"
_UNHELD = "not a Python object: a loss or output keeps its graph (.detach() it), or cuBLAS a workspace"
_ROUNDING = "the allocator rounds sizes up: few large tensors cost less than many"
_PENDING = "freed: comes back by itself when the other stream is done with it"
_CACHE = "free for this process's next tensors; %gpumem free gives it back"
_PRIVATE = "free blocks of CUDA graphs or other pools: delete those, then %gpumem free"
_MIXED_CACHE = "free for this process's next tensors; %gpumem free gives back a part"
_REST = "in use, by no process that the driver lists: the driver itself, or hidden processes"


def device_parts(
    reading: Reading,
    snapshot: Snapshot | None,
    wide: DeviceWide | None,
    storages: Iterable[Storage] | None,
    notes: Sequence[str] = (),
    pools: Sequence[Part] = (),
) -> Reconciliation:
    """Return what the memory of ``reading``'s device consists of.

    Args:
        reading: the device as a probe saw it.
        snapshot: its allocator's blocks; None where torch has no snapshot.
        wide: what the driver says of the device and its processes; None to take ``reading``'s word.
        storages: the storages that Python holds, on any device; None if nobody has looked.
        notes: what else there is to say.
        pools: what other libraries than torch have reserved there.
    """
    names = (reading.device, f"{reading.device}:0")  # tensors say mps:0 where there is only one
    own = None if storages is None else [item for item in storages if item.device in names]
    texts = list(notes)
    parts = _by_counters(reading, own, texts) if snapshot is None else _by_blocks(snapshot, own, texts)
    parts += pools
    reserved = sum(part.size_bytes or 0 for part in parts)
    around, total, basis = _around(reading, reserved, wide)
    return Reconciliation(reading.device, total, basis, (*parts, *around), tuple(texts))


def card_parts(device: str, wide: DeviceWide, pools: Sequence[Part] = ()) -> Reconciliation:
    """Return what the memory of a card consists of on which torch has nothing."""
    reading = Reading(device, 0, 0, "allocator", wide.total_bytes, 0, wide.used_bytes, wide.other_bytes)
    around, total, basis = _around(reading, sum(part.size_bytes or 0 for part in pools), wide)
    return Reconciliation(device, total, basis, (*pools, *around))


# -- what the allocator has reserved --------------------------------------------------------------------------


@dataclass
class _Cover:
    """How storages fill the blocks in use."""

    kinds: Counter[str] = field(default_factory=Counter)
    unheld_bytes: int = 0
    rounding_bytes: int = 0
    outside_bytes: int = 0


def _by_blocks(snapshot: Snapshot, storages: list[Storage] | None, texts: list[str]) -> list[Part]:
    if storages is None:
        rounding = snapshot.allocated_bytes - snapshot.requested_bytes
        parts = [_unsorted(snapshot.requested_bytes), Part("rounding", rounding, _ROUNDING)]
    else:
        cover = _cover(snapshot.blocks_in_use(), storages)
        parts = kind_parts("tensors", dict.fromkeys(KINDS, 0) | cover.kinds)
        parts.append(Part("held by C++ or autograd", cover.unheld_bytes, _UNHELD))
        parts.append(Part("rounding", cover.rounding_bytes, _ROUNDING))
        if cover.outside_bytes:
            texts.append(
                f"{format_bytes(cover.outside_bytes)} of tensors lie outside torch's allocator (another library's, or "
                "another process's memory): they are counted where that memory belongs"
            )
    largest = format_bytes(snapshot.largest_fragment_bytes)
    return [
        *parts,
        Part("waiting for a stream", snapshot.pending_bytes, _PENDING),
        Part("allocator cache", snapshot.cached_bytes, _CACHE),
        Part(
            "fragmentation",
            snapshot.fragmented_bytes,
            f"gaps, the largest of {largest}: they go when the tensors beside them go",
        ),
        Part("pools' cache", snapshot.private_bytes, _PRIVATE),
    ]


def _cover(blocks: Sequence[Block], storages: Iterable[Storage]) -> _Cover:
    """Lay storages against blocks in use, both sorted by address; bytes that several storages share count once."""
    ordered = sorted(storages, key=lambda item: (item.address, item.size_bytes))
    starts = [item.address for item in ordered]
    cover = _Cover(outside_bytes=sum(item.size_bytes for item in ordered))
    for block in blocks:
        end = block.address + block.size_bytes
        first, last = bisect.bisect_left(starts, block.address), bisect.bisect_left(starts, end)
        inside, reached = 0, block.address
        for item in ordered[first:last]:
            stop = min(item.address + item.size_bytes, end)
            fresh = max(0, stop - max(item.address, reached))
            cover.kinds[item.kind] += fresh
            cover.outside_bytes -= item.size_bytes
            inside += fresh
            reached = max(reached, stop)
        # A block without any storage is held as a whole; else what is beyond the request is the allocator's rounding.
        rounding = block.size_bytes - max(inside, block.requested_bytes) if inside else 0
        cover.rounding_bytes += rounding
        cover.unheld_bytes += block.size_bytes - inside - rounding
    return cover


def _by_counters(reading: Reading, storages: list[Storage] | None, texts: list[str]) -> list[Part]:
    """Return the parts without a snapshot: kinds only if they fit, cache and fragmentation in one."""
    allocated = reading.current_bytes
    cache = max(0, (reading.reserved_bytes or 0) - allocated)
    parts = [_unsorted(allocated)]
    if storages is not None:
        largest = {item.address: item for item in sorted(storages, key=lambda item: item.size_bytes)}
        kinds = dict.fromkeys(KINDS, 0)
        for item in largest.values():
            kinds[item.kind] = kinds.get(item.kind, 0) + item.size_bytes
        rest = allocated - sum(kinds.values())
        if rest >= 0:
            parts = [*kind_parts("tensors", kinds), Part("held by C++ or autograd, and rounding", rest, _UNHELD)]
        else:
            texts.append("the tensors that Python holds take more than the allocator counts: they cannot be told apart")
    return [*parts, Part("allocator cache and fragmentation", cache, _MIXED_CACHE)]


def kind_parts(what: str, kinds: Mapping[str, int]) -> list[Part]:
    """Return a part for each of ``kinds``, in the order of the report; ``what`` begins their names."""
    order = [*(kind for kind in KINDS if kind in kinds), *sorted(kinds.keys() - KINDS)]
    return [Part(f"{what}: {kind}", kinds[kind], KINDS.get(kind, KINDS["other"])) for kind in order]


def _unsorted(size: int) -> Part:
    return Part("live tensors", size, "delete their names, or end the experiment that made them")


# -- what the driver says of the rest -------------------------------------------------------------------------


def _around(reading: Reading, reserved: int, wide: DeviceWide | None) -> tuple[list[Part], int, str]:
    """Return the parts beside what is reserved, the total of all parts, and what that total is."""
    source = reading if wide is None or wide.used_bytes is None else wide
    total, used = source.total_bytes, source.used_bytes
    why = reading.note or (wide.note if wide is not None else "") or "the driver was not asked, or does not say"
    if total is None or used is None:
        return _reserved_only(reserved, why)
    if not reserved <= used <= total:
        return _reserved_only(reserved, "the driver's figures contradict torch's: unified memory, or a busy moment")
    parts = _beside(used - reserved, reserved, wide, why)
    return [*parts, Part("free", total - used, _FREE)], total, "the device's memory"


def _reserved_only(reserved: int, why: str) -> tuple[list[Part], int, str]:
    unknown = Part("unknown: context, other processes, free", None, why)
    return [unknown], reserved, "what torch's allocator reserves"


def _beside(size: int, reserved: int, wide: DeviceWide | None, why: str) -> list[Part]:
    """Return the parts of what is in use on the device and not reserved here: ``size`` bytes."""
    if wide is not None and wide.own_bytes is not None:
        context = max(0, wide.own_bytes - reserved)
        rest = size - context - sum(used for _, used in wide.others)
        if rest >= 0:
            others = sorted(wide.others, key=lambda item: -item[1])
            return [
                Part("context and libraries", context, _CONTEXT),
                *(Part(_process(pid), used, "another process: end it if it is yours") for pid, used in others),
                Part("unknown", rest, _REST),
            ]
        why = "the driver's figures for processes exceed what it says is in use: asked at a busy moment"
    return [Part("unknown: context, libraries and other processes", size, why)]


def _process(pid: int) -> str:
    name = process_name(pid)
    return f"process {pid} ({name})" if name else f"process {pid}"


# -- what other libraries than torch have -----------------------------------------------------------------------

_UNUSED = {
    "jax": (
        "serves JAX alone, until the kernel ends: XLA_PYTHON_CLIENT_PREALLOCATE=false before its first use lets it "
        "reserve only what it needs"
    ),
    "cupy": "free for CuPy's next arrays; %gpumem free gives it back",
}
"""What is to be said of what a pool holds and does not use."""


def pools_on(index: int, readings: Mapping[str, Reading]) -> tuple[Part, ...]:
    """Return the parts of the pools on a device, by torch's number of it."""
    devices = {device for device in readings if device.partition(":")[0] == "cuda"}
    return tuple(parts_of(readings, index, is_only=len(devices) == 1))


def parts_of(readings: Mapping[str, Reading], index: int, *, is_only: bool) -> Iterator[Part]:
    """Yield the parts of the pools on a device, and if it ``is_only``, also of those that do not say where they are."""
    for device, reading in readings.items():
        name, _, number = device.partition(":")
        if name not in POOLS or not (number == str(index) or (not number and is_only)):
            continue
        yield Part(f"{POOLS[name]}: in use", reading.current_bytes, "its arrays: delete their names")
        if reading.reserved_bytes is not None:
            unused = max(0, reading.reserved_bytes - reading.current_bytes)
            yield Part(f"{POOLS[name]}: pool's rest", unused, _UNUSED.get(name, ""))
