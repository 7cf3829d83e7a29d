"""Breaks an accelerator's or the host's memory down into parts that sum exactly to the total.

The blocks of torch's allocator are compared with the addresses of the storages that Python holds.
Memory in a used block without such a storage belongs to an autograd graph or to C++ code.

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
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ipygpumem.probes import cgroup, own_limits
from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.allocator import Snapshot, SnapshotBlock
from ipygpumem.probes.host import HostFigures
from ipygpumem.probes.mappings import OwnPages
from ipygpumem.probes.nvml import process_label
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


ADVICE_BY_ROLE = {
    "parameter": "delete the model, or model.cpu(), or load it in a smaller dtype",
    "gradient": "optimizer.zero_grad() frees it until the next backward pass",
    "optimizer state": "delete the optimizer, or use one that keeps less for each parameter",
    "buffer": "part of a module, and freed with it",
    "other": "inputs, activations, results: delete their names, end their experiment",
}
"""The advice for the tensors of each role, in the order of the report."""

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
    texts = list(notes)
    if snapshot is None:
        parts = _by_counters(reading)
    elif storages is None:
        parts = [_unsorted(snapshot.requested_bytes)]
        parts += _overhead(snapshot, snapshot.allocated_bytes - snapshot.requested_bytes)
    else:
        on_device = [item for item in storages if item.device in names]
        parts = _by_blocks(snapshot, on_device, texts)
    return _with_the_rest(reading, [*parts, *pools], wide, texts)


def card_parts(
    device: str, wide: WholeDevice, pools: Sequence[Part] = (), notes: Sequence[str] = ()
) -> Reconciliation:
    """Return the breakdown of a card that torch does not use."""
    reading = Reading(
        device, 0, 0, "allocator", wide.total_bytes, 0, wide.used_bytes, wide.other_bytes
    )
    return _with_the_rest(reading, pools, wide, notes)


# -- the allocator's reserved memory ------------------------------------------------------------


def _by_blocks(snapshot: Snapshot, storages: Sequence[Storage], texts: list[str]) -> list[Part]:
    """Return the parts of the allocator's memory, given the storages on the device."""
    cover = _Cover(snapshot.blocks_in_use, storages)
    if cover.outside_bytes:
        texts.append(
            f"{format_bytes(cover.outside_bytes)} of tensors lie outside torch's allocator "
            "(another library's, or another process's memory): they are counted there"
        )
    kinds = dict.fromkeys(ADVICE_BY_ROLE, 0) | cover.kinds
    return [
        *kind_parts("tensors", kinds),
        Part("autograd or C++ code", cover.unheld_bytes, _UNHELD),
        *_overhead(snapshot, cover.rounding_bytes),
    ]


def _overhead(snapshot: Snapshot, rounding_bytes: int) -> list[Part]:
    """Return the parts of the allocator's memory that no tensor needs."""
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
    """Matches storages with used blocks, by address; bytes shared by several storages count once.

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
        """Add a block: the bytes that storages cover, by kind, and the bytes that are left."""
        end = block.address + block.size_bytes
        first = bisect.bisect_left(self._starts, block.address)
        last = bisect.bisect_left(self._starts, end)
        covered = 0
        reached = block.address
        for item in self._storages[first:last]:
            stop = min(item.address + item.size_bytes, end)
            fresh = max(0, stop - max(item.address, reached))
            self.kinds[item.kind] += fresh
            self.outside_bytes -= item.size_bytes
            covered += fresh
            reached = max(reached, stop)
        if not covered:
            self.unheld_bytes += block.size_bytes  # held as a whole
            return
        rounding = block.size_bytes - max(covered, block.requested_bytes)
        self.rounding_bytes += rounding
        self.unheld_bytes += block.size_bytes - covered - rounding


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
    parts = []
    for kind in (*ADVICE_BY_ROLE, *sorted(kinds.keys() - ADVICE_BY_ROLE)):
        if kind in kinds:
            advice = ADVICE_BY_ROLE.get(kind, ADVICE_BY_ROLE["other"])
            parts.append(Part(f"{what}: {kind}", kinds[kind], advice))
    return parts


def _unsorted(size: int) -> Part:
    return Part("live tensors", size, "delete their names, or end the experiment that made them")


# -- the rest, by the driver --------------------------------------------------------------------


def _with_the_rest(
    reading: Reading, parts: Sequence[Part], wide: WholeDevice | None, notes: Sequence[str]
) -> Reconciliation:
    """Add the parts outside torch's allocator, as far as the driver reports them."""
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
        if reserved <= used <= total:
            more = _not_reserved(used - reserved, reserved, wide, why)
            more.append(Part("free", total - used, "free for any process"))
            basis = "the device's memory"
            return Reconciliation(reading.device, total, basis, (*parts, *more), tuple(notes))
        why = "the driver's figures contradict torch's: unified memory, or a busy moment"
    unknown = Part("unknown: context, other processes, free", None, why)
    basis = "reserved by torch's allocator"
    return Reconciliation(reading.device, reserved, basis, (*parts, unknown), tuple(notes))


def _not_reserved(size: int, reserved: int, wide: WholeDevice | None, why: str) -> list[Part]:
    """Return the parts of the ``size`` bytes that are in use on the device but not
    reserved here.
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


# -- pools of other libraries -------------------------------------------------------------------

_UNUSED = {
    "jax": (
        "serves JAX alone, until the kernel ends: XLA_PYTHON_CLIENT_PREALLOCATE=false before its "
        "first use lets it reserve only what it needs"
    ),
    "cupy": "free for CuPy's next arrays; %gpumem free frees it",
}
"""Advice on the unused memory of a pool."""


def pools_on(index: int, readings: Mapping[str, Reading]) -> tuple[Part, ...]:
    """Return the parts of the pools on a device, by torch's number; a pool without a device counts
    on a single one.
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


# -- the host's memory --------------------------------------------------------------------------

Resident = Callable[[list[tuple[int, int]]], list[int]]
"""Returns the bytes in RAM of each address range; raises OSError if the system does not report
them.
"""

_OTHERS = "other processes and the system"
MANY_BYTES = 64 * MIB
"""Unnamed bytes from which a note says how many cannot be named."""
MANY_SHARE = 0.1
"""Share of the memory that an experiment keeps from which a note says so, too."""
PYTHON_OBJECTS = "Python objects"
"""Name of a part."""
DATA_OF = "of "
"""Prefix of the kind of a library's memory that is neither a tensor nor a NumPy array."""
PRINTED = "printed by cells"
"""Name of the part with the text that IPython keeps."""
_OBJECTS = {
    PYTHON_OBJECTS: "text, numbers, containers, functions, classes, code of modules",
    PRINTED: "text and displays that IPython keeps for %notebook: %gpumem free drops them",
}
_OF_LIBRARY = "its frames, models, images: delete their names"
_OWN = {
    "data of libraries": "written pages of mapped files: freed when the kernel restarts",
    "stacks": "of all threads",
    "free heap pages": "kept by malloc for later: %gpumem free returns them to the system",
    "free blocks of Python": "between objects that are alive: kept by Python for new objects",
}
"""Parts by the fields of ``OwnPages``, with advice."""
_REST = "libraries' own data and caches: delete names, then %gpumem free"
_NOT_NAMED = "not named"
_OF_NO_OBJECT = (
    "no object accounts for them: tables of C code, such as those of libraries; gaps in malloc"
)
UNACCOUNTED = "no known object and no free page accounts for them"
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
    basis = _host_basis(figures)
    claims = _claims(basis, figures)
    notes = _host_notes(claims, figures)
    private = _own_pages(claims.private, storages, resident, notes, figures.own, objects or {})
    if figures.children_bytes is None:
        notes.append(f"child processes are not known separately here: they are among the {_OTHERS}")
    shared = claims.shared
    files = claims.files
    if shared < MIB:  # semaphores of libraries, which no user asks about
        shared, files = 0, files + shared
    parts = [
        *private,
        Part("shared memory", shared, _SHARED),
        Part("libraries and mapped files", files, _FILES),
        Part("child processes", claims.children, _WORKERS),
        Part(basis.name_of_others, claims.unclaimed, _OF_OTHERS),
        Part("cache", claims.cache, _CACHE),
        Part("out of reach", basis.withheld_bytes, basis.why_withheld),
        Part("free", claims.free - basis.withheld_bytes, "free now"),
    ]
    return Reconciliation("cpu", basis.total_bytes, basis.name, tuple(parts), tuple(notes))


_SHARED = "data loaders' batches, pinned memory, /dev/shm: close their creator"
_FILES = "code and mapped data: dropped by the kernel when it needs room"
_WORKERS = "such as data loaders; shared pages count by share where that is known (PSS): end them"
_OF_OTHERS = "end what you do not need, such as other notebooks' kernels"
_CACHE = "cached files: the system frees them when memory is needed"


class _HostBasis(NamedTuple):
    """The memory that is broken down: the machine's, or that of a container."""

    name: str
    total_bytes: int
    free_bytes: int
    file_bytes: int
    cache_bytes: int
    name_of_others: str
    withheld_bytes: int
    """Bytes that are free, but not for this process."""
    why_withheld: str


def _host_basis(figures: HostFigures) -> _HostBasis:
    """Return the memory to break down: the container's, if that is less than the machine's."""
    basis = _of_machine(figures)
    group = figures.group
    if group is not None and group.limit_bytes < figures.ram_bytes:
        basis = _of_container(figures, group)
    limit = figures.limit
    if limit is None:
        return basis
    beyond_bytes = basis.free_bytes - limit.available_bytes
    if beyond_bytes <= basis.withheld_bytes:
        return basis
    size = format_bytes(limit.limit_bytes)
    what = own_limits.WHAT[limit.name]
    why = f"{limit.name} allows this process {size} of {what}: {_RAISE_LIMIT}"
    return basis._replace(withheld_bytes=beyond_bytes, why_withheld=why)


_RAISE_LIMIT = "raise it (ulimit, or %gpumem guard off)"
_IN_USE_OUTSIDE = "within the container's limit, but in use by the rest of the machine"


def _of_machine(figures: HostFigures) -> _HostBasis:
    """Return the machine's memory as the one to break down."""
    return _HostBasis(
        name="the machine's RAM",
        total_bytes=figures.ram_bytes,
        free_bytes=figures.free_bytes,
        file_bytes=figures.file_bytes,
        cache_bytes=figures.available_bytes - figures.free_bytes - figures.file_bytes,
        name_of_others=_OTHERS,
        withheld_bytes=0,
        why_withheld=_IN_USE_OUTSIDE,
    )


def _of_container(figures: HostFigures, group: cgroup.Group) -> _HostBasis:
    """Return the memory within a container's limit as the one to break down."""
    free_bytes = max(0, group.limit_bytes - group.used_bytes)
    file_bytes = min(figures.file_bytes, group.mapped_bytes)
    return _HostBasis(
        name="the container's limit (cgroup)",
        total_bytes=group.limit_bytes,
        free_bytes=free_bytes,
        file_bytes=file_bytes,
        cache_bytes=group.cache_bytes - file_bytes,
        name_of_others="other processes in the container",
        withheld_bytes=max(0, free_bytes - figures.available_bytes),
        why_withheld=_IN_USE_OUTSIDE,
    )


class _Claims(NamedTuple):
    """Bytes of each kind of pages, each byte in the first that claims it."""

    free: int
    private: int
    shared: int
    files: int
    cache: int
    children: int
    unclaimed: int


def _claims(basis: _HostBasis, figures: HostFigures) -> _Claims:
    """Divide the host's memory among the kinds of pages, which the kernel counts by overlapping
    measures.
    """
    in_order = (
        basis.free_bytes,
        figures.private_bytes,
        figures.shared_bytes,
        basis.file_bytes,
        basis.cache_bytes,
        figures.children_bytes or 0,
    )
    left = basis.total_bytes
    claimed = []
    for size_bytes in in_order:
        claim = max(0, min(size_bytes, left))
        claimed.append(claim)
        left -= claim
    return _Claims._make([*claimed, left])


def _host_notes(claims: _Claims, figures: HostFigures) -> list[str]:
    """Return a note on the process's pages that are charged elsewhere, if there are any."""
    missing = figures.rss_bytes - claims.private - claims.shared - claims.files
    if missing <= 0:
        return []
    size = format_bytes(missing)
    return [f"{size} of this process's RSS are not charged to it here: shared files, mostly"]


def _own_pages(
    size: int,
    storages: Iterable[Storage] | None,
    resident: Resident,
    notes: list[str],
    own: OwnPages | None,
    objects: Mapping[str, int],
) -> list[Part]:
    """Return the parts of this process's own pages: arrays in RAM by kind, objects, what malloc
    keeps, and pages without a name.
    """
    whole = [Part("this process", size, _REST)]
    try:
        kinds = _resident_by_kind(storages or (), resident)
    except OSError as error:
        notes.append(f"the arrays' bytes in RAM are unknown here ({error.strerror})")
        return whole
    left = size - kinds.total()
    if left < 0:
        notes.append(
            "the arrays that Python holds are larger than this process's own pages: they cannot be "
            "separated"
        )
        return whole
    parts = _parts_of_arrays(kinds)
    named = dict(objects)
    if own is not None:
        named |= zip(_OWN, own, strict=True)
    for name, size_bytes in named.items():
        advice = _OWN.get(name) or _OBJECTS.get(name, _OF_LIBRARY)
        claim = min(left, size_bytes)
        parts.append(Part(name, claim, advice))
        left -= claim
    if not parts:
        return whole
    return [*parts, Part(_NOT_NAMED, left, _OF_NO_OBJECT)]


def _parts_of_arrays(kinds: Mapping[str, int]) -> list[Part]:
    """Return the parts of tensors and arrays, and of other memory that libraries keep, by kind."""
    of_arrays: dict[str, int] = {}
    of_libraries = list[Part]()
    for kind, size_bytes in kinds.items():
        if kind.startswith(DATA_OF):
            of_libraries.append(Part(f"data {kind}", size_bytes, _OF_LIBRARY))
        else:
            of_arrays[kind] = size_bytes
    return kind_parts("arrays", of_arrays) + of_libraries


def _resident_by_kind(storages: Iterable[Storage], resident: Resident) -> Counter[str]:
    """Return the bytes in RAM of the storages on the host, by kind.

    Raises:
        OSError: the system does not report them.
    """
    kinds: Counter[str] = Counter()
    on_host = _disjoint(item for item in storages if item.device == "cpu")
    if not on_host:
        return kinds
    ranges = [(item.address, item.size_bytes) for item in on_host]
    for item, size_bytes in zip(on_host, resident(ranges), strict=True):
        kinds[item.kind] += size_bytes
    return kinds


def _disjoint(storages: Iterable[Storage]) -> list[Storage]:
    """Return the storages by address, without bytes that an earlier one covers (arrays may share
    memory).
    """
    disjoint = []
    reached = 0
    for item in sorted(storages, key=attrgetter("address")):
        start = max(item.address, reached)
        end = item.address + item.size_bytes
        if start < end:
            disjoint.append(item._replace(address=start, size_bytes=end - start))
            reached = end
    return disjoint
