"""Breaks an accelerator's or the host's memory down into parts that sum exactly to the total.

The blocks of torch's allocator are compared with the addresses of the storages that Python holds.
Memory in a used block without such a storage is held by an autograd graph or a C++ library.

The kernel counts the host's pages by several overlapping measures. Each byte belongs to the first
of these that claims it: free, this process (``RssAnon``, ``RssShmem``, ``RssFile``), reclaimable
cache (``MemAvailable`` minus free, or the group's own statistics), child processes (PSS). The rest
belongs to other processes.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipygpumem.probes import own_limits
from ipygpumem.probes.allocator import Block, Snapshot
from ipygpumem.probes.host import HostFigures, OwnPages
from ipygpumem.probes.nvml import DeviceWide, process_label
from ipygpumem.probes.pools import POOLS
from ipygpumem.records import Reading, Record
from ipygpumem.units import MIB, format_bytes


@dataclass(frozen=True)
class Part(Record):
    """A part of a device's memory, with advice for the user."""

    name: str
    size_bytes: int | None
    """None if unknown; ``advice`` then says why."""
    advice: str


@dataclass(frozen=True)
class Reconciliation(Record):
    """Breakdown of a device's memory; the parts of known size sum exactly to ``total_bytes``."""

    device: str
    total_bytes: int
    basis: str
    """Meaning of ``total_bytes``: the device's memory, a container's limit, or only reserved
    memory.
    """
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the figures, such as why one is missing."""


class Storage(NamedTuple):
    """The memory of one or more tensors or arrays, each byte once."""

    device: str
    address: int
    size_bytes: int
    kind: str
    """Role of the memory: ``parameter``, ``gradient``, ``optimizer state``, ``buffer``, ``other``,
    ...
    """


KINDS = {
    "parameter": "delete the model, or model.cpu(), or load it in a smaller dtype",
    "gradient": "optimizer.zero_grad() frees it until the next backward pass",
    "optimizer state": "delete the optimizer, or use one that keeps less for each parameter",
    "buffer": "part of a module, and freed with it",
    "other": "inputs, activations, results: delete their names, end their experiment",
}
"""Kinds of tensors in the order of the report, each with its advice."""

_UNHELD = (
    "not a Python object: a loss or output keeps its graph (.detach() it), or cuBLAS a workspace"
)


def device_parts(
    reading: Reading,
    snapshot: Snapshot | None,
    wide: DeviceWide | None,
    storages: Iterable[Storage] | None,
    notes: Sequence[str] = (),
    pools: Sequence[Part] = (),
) -> Reconciliation:
    """Return the breakdown of the memory of ``reading``'s device.

    Args:
        reading: the device's reading by a probe.
        snapshot: its allocator's blocks; None if torch has no snapshot.
        wide: the driver's figures for the device and its processes; None to use those of
            ``reading``.
        storages: the storages that Python holds, on any device; None if unknown.
        notes: further remarks.
        pools: memory reserved there by other libraries than torch.
    """
    names = (reading.device, f"{reading.device}:0")  # tensors have mps:0 for a single device
    own = None if storages is None else [item for item in storages if item.device in names]
    texts = list(notes)
    parts = _by_counters(reading) if snapshot is None else _by_blocks(snapshot, own, texts)
    return _with_the_rest(reading, [*parts, *pools], wide, texts)


def card_parts(
    device: str, wide: DeviceWide, pools: Sequence[Part] = (), notes: Sequence[str] = ()
) -> Reconciliation:
    """Return the breakdown of a card that torch does not use."""
    reading = Reading(
        device, 0, 0, "allocator", wide.total_bytes, 0, wide.used_bytes, wide.other_bytes
    )
    return _with_the_rest(reading, pools, wide, notes)


# -- the allocator's reserved memory ------------------------------------------------------------


def _by_blocks(snapshot: Snapshot, storages: list[Storage] | None, texts: list[str]) -> list[Part]:
    if storages is None:
        parts, rounding = (
            [_unsorted(snapshot.requested_bytes)],
            snapshot.allocated_bytes - snapshot.requested_bytes,
        )
    else:
        kinds, unheld, rounding, outside = _cover(snapshot.blocks_in_use, storages)
        parts = [
            *kind_parts("tensors", dict.fromkeys(KINDS, 0) | kinds),
            Part("held by C++ or autograd", unheld, _UNHELD),
        ]
        if outside:
            texts.append(
                f"{format_bytes(outside)} of tensors lie outside torch's allocator (another "
                f"library's, or "
                "another process's memory): they are counted there"
            )
    largest = format_bytes(max(snapshot.fragments, default=0))
    gaps = f"gaps, the largest of {largest}: freed with the neighbouring tensors"
    pending = "freed, but still in use by another stream"
    cache = "free for this process's next tensors; %gpumem free frees it"
    private = "free blocks of CUDA graphs or other pools: delete those, then %gpumem free"
    return [
        *parts,
        Part(
            "rounding",
            rounding,
            "the allocator rounds sizes up: few large tensors cost less than many",
        ),
        Part("waiting for a stream", snapshot.pending_bytes, pending),
        Part("allocator cache", snapshot.cached_bytes, cache),
        Part("fragmentation", sum(snapshot.fragments), gaps),
        Part("pools' cache", snapshot.private_bytes, private),
    ]


def _cover(
    blocks: Sequence[Block], storages: Iterable[Storage]
) -> tuple[Counter[str], int, int, int]:
    """Match storages with used blocks, both sorted by address; bytes shared by several storages
    count once.

    Return the bytes of each kind, then the bytes without a storage, the rounding, and the bytes
    outside all blocks.
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
        # A block without any storage is held as a whole; otherwise the excess over the request is
        # rounding.
        rounded = block.size_bytes - max(inside, block.requested_bytes) if inside else 0
        rounding += rounded
        unheld += block.size_bytes - inside - rounded
    return kinds, unheld, rounding, outside


def _by_counters(reading: Reading) -> list[Part]:
    """Return the parts without a snapshot: live tensors, and cache with fragmentation."""
    cache = max(0, (reading.reserved_bytes or 0) - reading.current_bytes)
    advice = "free for this process's next tensors; %gpumem free frees a part"
    return [
        _unsorted(reading.current_bytes),
        Part("allocator cache and fragmentation", cache, advice),
    ]


def kind_parts(what: str, kinds: Mapping[str, int]) -> list[Part]:
    """Return a part for each of ``kinds``, in the order of the report, with names prefixed by
    ``what``.
    """
    order = [*(kind for kind in KINDS if kind in kinds), *sorted(kinds.keys() - KINDS)]
    return [Part(f"{what}: {kind}", kinds[kind], KINDS.get(kind, KINDS["other"])) for kind in order]


def _unsorted(size: int) -> Part:
    return Part("live tensors", size, "delete their names, or end the experiment that made them")


# -- the rest, by the driver --------------------------------------------------------------------


def _with_the_rest(
    reading: Reading, parts: Sequence[Part], wide: DeviceWide | None, notes: Sequence[str]
) -> Reconciliation:
    """Return the reserved parts with those outside the allocator, as far as the driver reports
    them.
    """
    reserved = sum(part.size_bytes or 0 for part in parts)
    source = reading if wide is None or wide.used_bytes is None else wide
    total, used = source.total_bytes, source.used_bytes
    why = reading.note or (wide.note if wide is not None else "") or "the driver does not report it"
    if total is not None and used is not None:
        if reserved <= used <= total:
            rest = [
                *_beside(used - reserved, reserved, wide, why),
                Part("free", total - used, "free for any process"),
            ]
            return Reconciliation(
                reading.device, total, "the device's memory", (*parts, *rest), tuple(notes)
            )
        why = "the driver's figures contradict torch's: unified memory, or a busy moment"
    unknown = Part("unknown: context, other processes, free", None, why)
    return Reconciliation(
        reading.device, reserved, "reserved by torch's allocator", (*parts, unknown), tuple(notes)
    )


def _beside(size: int, reserved: int, wide: DeviceWide | None, why: str) -> list[Part]:
    """Return the parts of the ``size`` bytes that are in use on the device but not
    reserved here.
    """
    if wide is not None and wide.own_bytes is not None:
        context = max(0, wide.own_bytes - reserved)
        rest = size - context - sum(used for _, used in wide.other_processes)
        if rest >= 0:
            own = "CUDA's context, kernels, workspaces: freed when the kernel restarts"
            by_size = sorted(wide.other_processes, key=lambda item: -item[1])
            hidden = (
                "in use, by no process that the driver lists: the driver itself, or hidden "
                "processes"
            )
            return [
                Part("context and libraries", context, own),
                *(
                    Part(process_label(pid), used, "another process: end it if it is yours")
                    for pid, used in by_size
                ),
                Part("unknown", rest, hidden),
            ]
        why = "the driver's figures for processes exceed the memory in use: read at a busy moment"
    return [Part("unknown: context, libraries and other processes", size, why)]


# -- pools of other libraries -------------------------------------------------------------------

_UNUSED = {
    "jax": (
        "serves JAX alone, until the kernel ends: XLA_PYTHON_CLIENT_PREALLOCATE=false before its "
        "first use lets it "
        "reserve only what it needs"
    ),
    "cupy": "free for CuPy's next arrays; %gpumem free frees it",
}
"""Advice on the unused memory of a pool."""


def pools_on(index: int, readings: Mapping[str, Reading]) -> tuple[Part, ...]:
    """Return the parts of the pools on a device, by torch's number; a pool without a device counts
    on a single one.
    """
    is_alone = len({device for device in readings if device.partition(":")[0] == "cuda"}) <= 1
    parts = []
    for device, reading in readings.items():
        name, _, number = device.partition(":")
        if name not in POOLS or not (number == str(index) or (not number and is_alone)):
            continue
        parts.append(
            Part(f"{POOLS[name]}: in use", reading.current_bytes, "its arrays: delete their names")
        )
        if reading.reserved_bytes is not None:
            unused = max(0, reading.reserved_bytes - reading.current_bytes)
            parts.append(Part(f"{POOLS[name]}: pool's rest", unused, _UNUSED.get(name, "")))
    return tuple(parts)


# -- the host's memory --------------------------------------------------------------------------

Resident = Callable[[list[tuple[int, int]]], list[int]]
"""Returns the bytes in RAM of each address range; raises OSError if the system does not report
them.
"""

_OTHERS = "other processes and the system"
MANY_BYTES, MANY_SHARE = 64 * MIB, 0.1
"""Bytes, and share of the RSS or of what an experiment keeps, from which a note says how many
cannot be named.
"""
PYTHON, OF = "Python objects", "of "
"""Name of a part, and prefix of the kind of a library's memory that is neither a tensor nor a NumPy
array.
"""
PRINTED = "printed by cells"
"""Name of the part with the text that IPython keeps."""
_OBJECTS = {
    PYTHON: "text, numbers, containers, functions, classes, code of modules",
    PRINTED: "text and displays that IPython keeps for %notebook: %gpumem free drops them",
}
_OF_LIBRARY = "its frames, models, images: delete their names"
_OWN = {
    "data of libraries": "written pages of mapped files: freed when the kernel restarts",
    "stacks": "of all threads",
    "free heap pages": "kept by malloc for later: %gpumem free returns them to the system",
}
"""Parts by the fields of ``OwnPages``, with advice."""
_REST = "libraries' own data and caches: delete names, then %gpumem free"
_NOT_NAMED = "not named"
UNACCOUNTED = "no object and no free page of malloc accounts for them"
"""The measured fact about pages without a name."""


def host_parts(
    figures: HostFigures,
    storages: Iterable[Storage] | None,
    resident: Resident,
    objects: Mapping[str, int] | None = None,
) -> Reconciliation:
    """Return the breakdown of the host's memory.

    Args:
        figures: the system's figures.
        storages: the tensors and arrays that Python holds, on any device; None if unknown.
        resident: returns the bytes in RAM of each address range.
        objects: bytes of objects without arrays' data, by part.
    """
    notes: list[str] = []
    group = figures.group
    if group is not None and group.limit_bytes < figures.ram_bytes:
        total, free = group.limit_bytes, max(0, group.limit_bytes - group.used_bytes)
        files = min(figures.file_bytes, group.mapped_bytes)
        cache = group.cache_bytes - files
        withheld = max(0, free - figures.available_bytes)
        basis, rest_name = "the container's limit (cgroup)", "other processes in the container"
    else:
        total, free, files, withheld = figures.ram_bytes, figures.free_bytes, figures.file_bytes, 0
        cache = figures.available_bytes - free - files
        basis, rest_name = "the machine's RAM", _OTHERS
    out_of_reach = "within the container's limit, but in use by the rest of the machine"
    if figures.limit is not None and (beyond := free - figures.limit.available_bytes) > withheld:
        size, what = format_bytes(figures.limit.limit_bytes), own_limits.WHAT[figures.limit.name]
        withheld, remedy = beyond, "raise it (ulimit, or %gpumem guard off)"
        out_of_reach = f"{figures.limit.name} allows this process {size} of {what}: {remedy}"
    left = total
    taken = []
    own = (
        free,
        figures.private_bytes,
        figures.shared_bytes,
        files,
        cache,
        figures.children_bytes or 0,
    )
    for size_bytes in own:  # the first that claims a byte gets it
        taken.append(max(0, min(size_bytes, left)))
        left -= taken[-1]
    free, private, shared, files, cache, children = taken
    if private + shared + files < figures.rss_bytes:
        missing = figures.rss_bytes - private - shared - files
        notes.append(
            f"{format_bytes(missing)} of this process's RSS are not charged to it here: shared "
            f"files, mostly"
        )
    workers = (
        "such as data loaders; shared pages count by share where that is known (PSS): end them"
    )
    parts = [
        *_private(private, storages, resident, notes, figures.own, objects or {}),
        Part(
            "shared memory",
            shared,
            "data loaders' batches, pinned memory, /dev/shm: close their creator",
        ),
        Part(
            "libraries and mapped files",
            files,
            "code and mapped data: dropped by the kernel when it needs room",
        ),
        Part("child processes", children, workers),
        Part(rest_name, left, "end what you do not need, such as other notebooks' kernels"),
        Part("cache", cache, "cached files: the system frees them when memory is needed"),
        Part("out of reach", withheld, out_of_reach),
        Part("free", free - withheld, "free now"),
    ]
    rest = sum(part.size_bytes or 0 for part in parts if part.name == _NOT_NAMED)
    if rest > min(MANY_BYTES, MANY_SHARE * figures.rss_bytes):
        notes.append(f"{format_bytes(rest)} of this process are not named: {UNACCOUNTED}")
    if figures.children_bytes is None:
        notes.append(f"child processes are not known separately here: they are among the {_OTHERS}")
    return Reconciliation("cpu", total, basis, tuple(parts), tuple(notes))


def _private(
    size: int,
    storages: Iterable[Storage] | None,
    resident: Resident,
    notes: list[str],
    own: OwnPages | None,
    objects: Mapping[str, int],
) -> list[Part]:
    """Return the parts of this process's own pages: arrays in RAM by kind, objects, what malloc
    keeps, the rest.
    """
    whole = [Part("this process", size, _REST)]
    ranges = _disjoint(item for item in storages or () if item.device == "cpu")
    kinds: Counter[str] = Counter()
    try:
        found = resident([(item.address, item.size_bytes) for item in ranges]) if ranges else []
    except OSError as error:
        notes.append(f"the arrays' bytes in RAM are unknown here ({error.strerror})")
        return whole
    for item, size_bytes in zip(ranges, found, strict=True):
        kinds[item.kind] += size_bytes
    left = size - sum(kinds.values())
    if left < 0:
        notes.append(
            "the arrays that Python holds are larger than this process's own pages: they cannot be "
            "separated"
        )
        return whole
    of_libraries = {kind: kinds.pop(kind) for kind in list(kinds) if kind.startswith(OF)}
    parts = kind_parts("arrays", kinds) + [
        Part(f"data {kind}", size, _OF_LIBRARY) for kind, size in of_libraries.items()
    ]
    named = dict(objects) if own is None else {**objects, **dict(zip(_OWN, own, strict=True))}
    for name, size_bytes in named.items():
        parts.append(
            Part(name, min(left, size_bytes), _OWN.get(name) or _OBJECTS.get(name, _OF_LIBRARY))
        )
        left -= min(left, size_bytes)
    if not parts:
        return whole
    return [
        *parts,
        Part(_NOT_NAMED, left, "no object accounts for them: delete names, then %gpumem free"),
    ]


def _disjoint(storages: Iterable[Storage]) -> list[Storage]:
    """Return the storages by address, without bytes that an earlier one covers (arrays may share
    memory).
    """
    found, reached = [], 0
    for item in sorted(storages, key=lambda item: item.address):
        start, end = max(item.address, reached), item.address + item.size_bytes
        if start < end:
            found.append(item._replace(address=start, size_bytes=end - start))
            reached = end
    return found
