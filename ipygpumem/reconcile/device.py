"""What the memory of an accelerator, or of the host, consists of: parts that sum exactly to what there is.

The blocks of torch's allocator are laid against the addresses of the storages that Python holds. What lies in a block
in use without such a storage is held by something else: a graph of autograd, a library in C++.

The kernel counts the host's pages by several measures that overlap. Each byte is given to the first of these that
claims it: free, this process (``RssAnon``, ``RssShmem``, ``RssFile``), the cache that can be taken back
(``MemAvailable`` less what is free, or the group's own statistics), child processes (PSS). The rest is others'.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipygpumem.model import Reading
from ipygpumem.probes import own_limits
from ipygpumem.probes.allocator import Block, Snapshot
from ipygpumem.probes.host import HostFigures
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

_UNHELD = "not a Python object: a loss or output keeps its graph (.detach() it), or cuBLAS a workspace"


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
    parts = _by_counters(reading) if snapshot is None else _by_blocks(snapshot, own, texts)
    return _with_the_rest(reading, [*parts, *pools], wide, texts)


def card_parts(device: str, wide: DeviceWide, pools: Sequence[Part] = (), notes: Sequence[str] = ()) -> Reconciliation:
    """Return what the memory of a card consists of on which torch has nothing."""
    reading = Reading(device, 0, 0, "allocator", wide.total_bytes, 0, wide.used_bytes, wide.other_bytes)
    return _with_the_rest(reading, pools, wide, notes)


# -- what the allocator has reserved --------------------------------------------------------------------------


def _by_blocks(snapshot: Snapshot, storages: list[Storage] | None, texts: list[str]) -> list[Part]:
    if storages is None:
        parts, rounding = [_unsorted(snapshot.requested_bytes)], snapshot.allocated_bytes - snapshot.requested_bytes
    else:
        kinds, unheld, rounding, outside = _cover(snapshot.blocks_in_use, storages)
        parts = [
            *kind_parts("tensors", dict.fromkeys(KINDS, 0) | kinds),
            Part("held by C++ or autograd", unheld, _UNHELD),
        ]
        if outside:
            texts.append(
                f"{format_bytes(outside)} of tensors lie outside torch's allocator (another library's, or "
                "another process's memory): they are counted where that memory belongs"
            )
    largest = format_bytes(max(snapshot.fragments, default=0))
    gaps = f"gaps, the largest of {largest}: they go when the tensors beside them go"
    pending = "freed: comes back by itself when the other stream is done with it"
    cache = "free for this process's next tensors; %gpumem free gives it back"
    private = "free blocks of CUDA graphs or other pools: delete those, then %gpumem free"
    return [
        *parts,
        Part("rounding", rounding, "the allocator rounds sizes up: few large tensors cost less than many"),
        Part("waiting for a stream", snapshot.pending_bytes, pending),
        Part("allocator cache", snapshot.cached_bytes, cache),
        Part("fragmentation", sum(snapshot.fragments), gaps),
        Part("pools' cache", snapshot.private_bytes, private),
    ]


def _cover(blocks: Sequence[Block], storages: Iterable[Storage]) -> tuple[Counter[str], int, int, int]:
    """Lay storages against blocks in use, both sorted by address; bytes that several storages share count once.

    Return the bytes of each kind, and those that no storage covers, that are rounding, and that lie outside of blocks.
    """
    ordered = sorted(storages, key=lambda item: (item.address, item.size_bytes))
    starts = [item.address for item in ordered]
    kinds: Counter[str] = Counter()
    unheld = rounding = 0
    outside = sum(item.size_bytes for item in ordered)
    for block in blocks:
        end = block.address + block.size_bytes
        first, last = bisect.bisect_left(starts, block.address), bisect.bisect_left(starts, end)
        inside, reached = 0, block.address
        for item in ordered[first:last]:
            stop = min(item.address + item.size_bytes, end)
            fresh = max(0, stop - max(item.address, reached))
            kinds[item.kind] += fresh
            outside -= item.size_bytes
            inside += fresh
            reached = max(reached, stop)
        # A block without any storage is held as a whole; else what is beyond the request is the allocator's rounding.
        rounded = block.size_bytes - max(inside, block.requested_bytes) if inside else 0
        rounding += rounded
        unheld += block.size_bytes - inside - rounded
    return kinds, unheld, rounding, outside


def _by_counters(reading: Reading) -> list[Part]:
    """Return the parts without a snapshot: live tensors in one, cache and fragmentation in another."""
    cache = max(0, (reading.reserved_bytes or 0) - reading.current_bytes)
    advice = "free for this process's next tensors; %gpumem free gives back a part"
    return [_unsorted(reading.current_bytes), Part("allocator cache and fragmentation", cache, advice)]


def kind_parts(what: str, kinds: Mapping[str, int]) -> list[Part]:
    """Return a part for each of ``kinds``, in the order of the report; ``what`` begins their names."""
    order = [*(kind for kind in KINDS if kind in kinds), *sorted(kinds.keys() - KINDS)]
    return [Part(f"{what}: {kind}", kinds[kind], KINDS.get(kind, KINDS["other"])) for kind in order]


def _unsorted(size: int) -> Part:
    return Part("live tensors", size, "delete their names, or end the experiment that made them")


# -- what the driver says of the rest -------------------------------------------------------------------------


def _with_the_rest(
    reading: Reading, parts: Sequence[Part], wide: DeviceWide | None, notes: Sequence[str]
) -> Reconciliation:
    """Return the parts that are reserved with those beside them, as far as the driver tells."""
    reserved = sum(part.size_bytes or 0 for part in parts)
    source = reading if wide is None or wide.used_bytes is None else wide
    total, used = source.total_bytes, source.used_bytes
    why = reading.note or (wide.note if wide is not None else "") or "the driver was not asked, or does not say"
    if total is not None and used is not None:
        if reserved <= used <= total:
            rest = [*_beside(used - reserved, reserved, wide, why), Part("free", total - used, "free for any process")]
            return Reconciliation(reading.device, total, "the device's memory", (*parts, *rest), tuple(notes))
        why = "the driver's figures contradict torch's: unified memory, or a busy moment"
    unknown = Part("unknown: context, other processes, free", None, why)
    return Reconciliation(reading.device, reserved, "what torch's allocator reserves", (*parts, unknown), tuple(notes))


def _beside(size: int, reserved: int, wide: DeviceWide | None, why: str) -> list[Part]:
    """Return the parts of what is in use on the device and not reserved here: ``size`` bytes."""
    if wide is not None and wide.own_bytes is not None:
        context = max(0, wide.own_bytes - reserved)
        rest = size - context - sum(used for _, used in wide.others)
        if rest >= 0:
            own = "CUDA's context, kernels, workspaces: given back when the kernel restarts"
            others = sorted(wide.others, key=lambda item: -item[1])
            hidden = "in use, by no process that the driver lists: the driver itself, or hidden processes"
            return [
                Part("context and libraries", context, own),
                *(Part(_process(pid), used, "another process: end it if it is yours") for pid, used in others),
                Part("unknown", rest, hidden),
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
    """Return the parts of the pools on a device, by torch's number; of one that does not say where, if it is alone."""
    is_alone = len({device for device in readings if device.partition(":")[0] == "cuda"}) <= 1
    parts = []
    for device, reading in readings.items():
        name, _, number = device.partition(":")
        if name not in POOLS or not (number == str(index) or (not number and is_alone)):
            continue
        parts.append(Part(f"{POOLS[name]}: in use", reading.current_bytes, "its arrays: delete their names"))
        if reading.reserved_bytes is not None:
            unused = max(0, reading.reserved_bytes - reading.current_bytes)
            parts.append(Part(f"{POOLS[name]}: pool's rest", unused, _UNUSED.get(name, "")))
    return tuple(parts)


# -- the host's memory ------------------------------------------------------------------------------------------

Resident = Callable[[list[tuple[int, int]]], list[int]]
"""Returns how much of each address range is in RAM; raises OSError where the system does not say."""

_OTHERS = "other processes and the system"
_OBJECTS = "Python objects, libraries' own data: delete names, then %gpumem free"


def host_parts(figures: HostFigures, storages: Iterable[Storage] | None, resident: Resident) -> Reconciliation:
    """Return what the host's memory consists of.

    Args:
        figures: what the system says.
        storages: the tensors and arrays that Python holds, on any device; None if nobody has looked.
        resident: returns how much of an address range is in RAM.
    """
    notes: list[str] = []
    group = figures.group
    if group is not None and group.limit_bytes < figures.ram_bytes:
        total, free = group.limit_bytes, max(0, group.limit_bytes - group.used_bytes)
        files = min(figures.file_bytes, group.mapped_bytes)
        cache = group.cache_bytes - files
        withheld = max(0, free - figures.available_bytes)
        basis, beside = "the container's limit (cgroup)", "others in the container"
    else:
        total, free, files, withheld = figures.ram_bytes, figures.free_bytes, figures.file_bytes, 0
        cache = figures.available_bytes - free - files
        basis, beside = "the machine's RAM", _OTHERS
    out_of_reach = "within the container's limit, but in use by the rest of the machine"
    if figures.limit is not None and (beyond := free - figures.limit.available_bytes) > withheld:
        size, what = format_bytes(figures.limit.limit_bytes), own_limits.WHAT[figures.limit.name]
        withheld, out_of_reach = beyond, f"{figures.limit.name} allows this process {size} of {what}: raise it (ulimit)"
    left = total
    taken = []
    own = (free, figures.private_bytes, figures.shared_bytes, files, cache, figures.children_bytes or 0)
    for size_bytes in own:  # the first that claims a byte gets it
        taken.append(max(0, min(size_bytes, left)))
        left -= taken[-1]
    free, private, shared, files, cache, children = taken
    if private + shared + files < figures.rss_bytes:
        missing = figures.rss_bytes - private - shared - files
        notes.append(f"{format_bytes(missing)} of this process's RSS are not charged to it here: shared files, mostly")
    workers = "data loaders and their like, shared pages by share where that is known (PSS): end them"
    parts = [
        *_private(private, storages, resident, notes),
        Part("shared memory", shared, "data loaders' batches, pinned memory, /dev/shm: close what made it"),
        Part("libraries and mapped files", files, "code and mapped data: dropped by the kernel when it needs room"),
        Part("child processes", children, workers),
        Part(beside, left, "end what you do not need, such as other notebooks' kernels"),
        Part("cache", cache, "files kept for later: the system frees them when somebody needs room"),
        Part("out of reach", withheld, out_of_reach),
        Part("free", free - withheld, "free now"),
    ]
    if figures.children_bytes is None:
        notes.append(f"child processes cannot be told apart here: they are among the {_OTHERS}")
    return Reconciliation("cpu", total, basis, tuple(parts), tuple(notes))


def _private(size: int, storages: Iterable[Storage] | None, resident: Resident, notes: list[str]) -> list[Part]:
    """Return the parts of this process's own pages: arrays by kind, as far as they are in RAM, and the rest."""
    whole = [Part("this process", size, _OBJECTS)]
    ranges = _disjoint(item for item in storages or () if item.device == "cpu")
    if not ranges:
        return whole
    try:
        sizes = resident([(item.address, item.size_bytes) for item in ranges])
    except OSError as error:
        notes.append(f"it cannot be found out here which arrays are in RAM ({error.strerror})")
        return whole
    kinds: Counter[str] = Counter()
    for item, found in zip(ranges, sizes, strict=True):
        kinds[item.kind] += found
    rest = size - sum(kinds.values())
    if rest < 0:
        notes.append("the arrays that Python holds are larger than this process's own pages: they cannot be told apart")
        return whole
    return [*kind_parts("arrays", kinds), Part("this process, beside arrays", rest, _OBJECTS)]


def _disjoint(storages: Iterable[Storage]) -> list[Storage]:
    """Return the storages by address, without bytes that another one has already (arrays may share memory)."""
    found, reached = [], 0
    for item in sorted(storages, key=lambda item: item.address):
        start, end = max(item.address, reached), item.address + item.size_bytes
        if start < end:
            found.append(item._replace(address=start, size_bytes=end - start))
            reached = end
    return found
