"""Logs when each storage is allocated and freed while code runs, and replays that in a simulated
caching allocator.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from psutil import Process

from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.records import DeviceEstimate, Note
from ipygpumem.estimating.transients import HOPPERS_PROCESSORS, is_unknown, transient_sizes
from ipygpumem.introspect import is_exactly
from ipygpumem.probes.accelerators import has_context, in_use, limit_bytes
from ipygpumem.probes.allocator import Segment, expandable_setting, settings, snapshots
from ipygpumem.probes.nvml import memory
from ipygpumem.units import KIB, MIB, format_bytes

_LEAST, _SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _STEP = (
    512,
    MIB,
    2 * MIB,
    10 * MIB,
    20 * MIB,
    2 * MIB,
)
"""Smallest block; largest small allocation and its segment; largest medium one and its segment;
rounding above.
"""
_NO_LIMIT = 1 << 62
_CLOSE, _MOST_LIMITS = 0.005, 40
"""Precision of the search for the minimum memory, as a share of reserved memory; maximum number of
limits to try.
"""

ROLES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "cuBLAS workspaces",
    "other",
)
"""Purposes, in the order of the reports; ``other`` covers existing inputs, buffers and tensors of
the notebook.
"""
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, WORKSPACES, OTHER = ROLES


# -- the log ------------------------------------------------------------------------------------


@dataclass(slots=True)
class StorageLife:
    """One storage: its size as the allocator rounds it, its birth and death on the log's clock, and
    its role.
    """

    device: str
    size_bytes: int
    born: int
    before: bool
    """True if it exists from the start, as a copy of one of the notebook's tensors."""
    recorded: bool = False
    """True if a recorded forward pass allocated it: backward may need it."""
    in_backward: bool = False
    role: str = ""
    died: int | None = None
    address: int = 0
    """Address of the original tensor's storage on a CUDA device, or of a large storage whose pages
    in RAM the owner of the log counts; 0 if there is none.
    """
    place: Any = None
    """Where it was allocated, for the owner of the log."""
    reserved_bytes: int = 0
    """Further bytes, which are reserved and not used, if the owner of the log has counted the pages
    in RAM.
    """


@dataclass
class StorageLog:
    """Storages of a run; the clock counts births and deaths."""

    lives: list[StorageLife] = field(default_factory=list)
    clock: int = 0
    backwards: list[int] = field(default_factory=list)
    """Clock at the start of each backward pass."""
    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    """Bytes alive by device, and their maximum so far."""
    erased: set[int] = field(default_factory=set)
    """Addresses of storages that are to count as freed before the start."""
    _alive: dict[int, tuple[StorageLife, Any]] = field(default_factory=dict)

    def see(
        self,
        tensor: Any,
        device: str,
        *,
        least_bytes: int = 0,
        before: bool = False,
        recorded: bool = False,
        in_backward: bool = False,
    ) -> StorageLife | None:
        """Log the storage of ``tensor``, and return its life if it is new."""
        life = None
        for storage in _storages_of(tensor):
            key = storage._cdata
            if key not in self._alive:
                life = self._born(max(least_bytes, storage.nbytes()), device, before=before)
                life.recorded, life.in_backward = recorded, in_backward
                # The Python object lives as long as the storage, also if only autograd's C++
                # references it.
                self._alive[key] = life, weakref.ref(storage, functools.partial(self._gone, key))
        return life

    def grown(self, tensor: Any, device: str) -> StorageLife | None:
        """Log the storage of ``tensor`` as a new one if it has grown, and return its life; else
        None.
        """
        life = None
        for storage in _storages_of(tensor):
            earlier, reference = self._alive.get(storage._cdata, (None, None))
            if earlier is not None and storage.nbytes() > earlier.size_bytes:
                self._died(earlier)
                life = self._born(storage.nbytes(), device, before=False)
                life.role = earlier.role
                self._alive[storage._cdata] = life, reference
        return life

    def hold(self, size_bytes: int, device: str, role: str, *, before: bool = False) -> StorageLife:
        """Log memory that belongs to no tensor and is not freed."""
        life = self._born(size_bytes, device, before=before)
        life.role = role
        return life

    def pass_by(self, sizes: list[int], device: str) -> None:
        """Log blocks that an operation allocates and frees while it runs."""
        for life in [self.hold(size, device, TEMPORARIES) for size in sizes]:
            self._died(life)

    def _born(self, size_bytes: int, device: str, *, before: bool) -> StorageLife:
        self.clock += not before
        life = StorageLife(
            device, -(-size_bytes // _LEAST) * _LEAST, 0 if before else self.clock, before
        )
        self.lives.append(life)
        self.now[device] = now = self.now.get(device, 0) + life.size_bytes
        self.peak[device] = max(self.peak.get(device, 0), now)
        return life

    def _gone(self, key: int, _: Any) -> None:
        self._died(self._alive.pop(key)[0])

    def _died(self, life: StorageLife) -> None:
        self.clock += 1
        life.died = self.clock
        self.now[life.device] -= life.size_bytes

    def mark(self, tensor: Any, role: str, place: Any = None) -> None:
        """Set role and place of a logged storage, unless it has another role; PARAMETERS replaces
        any.
        """
        for storage in _storages_of(tensor):
            life, _ = self._alive.get(storage._cdata, (None, None))
            if life is not None and (life.role in ("", role) or role == PARAMETERS):
                life.role, life.place = role, place or life.place

    def erase(self, tensors: Iterable[Any]) -> None:
        """Log the storages of tensors as if they had been freed before the start."""
        gone = set[int]()
        for storage in (storage for tensor in tensors for storage in _storages_of(tensor)):
            life = self.life(storage._cdata)
            if life is not None and life.before:
                del self._alive[storage._cdata]
                self.now[life.device] -= life.size_bytes
                gone.add(id(life))
                self.erased.add(life.address)
        self.lives = [life for life in self.lives if id(life) not in gone]

    def life(self, key: int) -> StorageLife | None:
        """Return the life of a storage that is alive, by its identity."""
        return self._alive.get(key, (None,))[0]

    def close(self) -> None:
        """Log no deaths from now on: storages that are alive now are kept by the run."""
        self._alive.clear()

    def role(self, life: StorageLife) -> str:
        """Return a storage's role: marked by a hook, or else derived from its life and the backward
        passes in it.
        """
        if life.role or life.before:
            return life.role or OTHER
        begun = bisect_left(self.backwards, life.born)
        met = begun < len(self.backwards) and (
            life.died is None or self.backwards[begun] < life.died
        )
        if life.recorded and (met or life.in_backward or not self.backwards):
            return ACTIVATIONS
        return OTHER if not life.in_backward and (met or life.died is None) else TEMPORARIES


def _storages_of(tensor: Any) -> list[Any]:
    """Return the storage of a tensor, or the storages of its inner tensors."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [
            storage
            for part in inner
            if isinstance(part, torch.Tensor)
            for storage in _storages_of(part)
        ]
    # none for oneDNN's layout
    return [tensor.untyped_storage()] if tensor.layout is torch.strided else []


# -- memory that operators allocate next to their results ---------------------------------------

_MULTIPLY = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul"),
    *("_addmm_activation", "_scaled_mm", "_int_mm", "_transformer_encoder_layer_fwd"),
    *(
        "_native_multi_head_attention",
        "_linalg_solve_ex",
        "linalg_solve_triangular",
        "linalg_inv_ex",
    ),
    *("_euclidean_dist", "_trilinear", "affine_grid_generator"),
)
_BIASES = {"addmm": 0, "_addmm_activation": 0, "linear": 2}
"""Operators that may add a vector, and its number among the arguments."""
_CONVOLVE = frozenset({"convolution", "convolution_backward"})
_CUDNN = (
    "convolutions: cuDNN's workspaces are not counted. cuDNN chooses them; if memory is short, "
    "torch tries a way that "
    "needs less"
)
_HOPPER, _HOPPER_BYTES, _OTHERS_BYTES = (9, 0), 32 * MIB, 8320 * KIB
"""cuBLAS workspaces on a Hopper and on other GPUs, measured with torch 2.11 on simulated cards."""


def workspace_sizes(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the bytes of a cuBLAS and of a cublasLt workspace for a compute capability; None:
    unknown.

    An unknown one counts as a Hopper, which takes the most, because a too low estimate would be
    worse.
    """
    config = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    usual = _HOPPER_BYTES if capability in (None, _HOPPER) else _OTHERS_BYTES
    full = sum(int(size) * KIB * int(count) for size, count in config) if config else usual
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    light = int(given) * KIB if given.isdigit() else MIB
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return full, 0 if unified == "1" else light if unified == "0" else min(full, light)


class Workspaces:
    """Logs the memory that operators on CUDA devices allocate next to their results."""

    def __init__(
        self, log: StorageLog, devices: Devices, known_properties: Callable[[Any], Any], note: Note
    ) -> None:
        self._log, self._devices, self._known_properties, self._note = (
            log,
            devices,
            known_properties,
            note,
        )
        self._taken = blocks_in_use()
        self._held: set[tuple[object, ...]] = set()
        self.unknown: dict[str, None] = {}
        """Operators that ran on CUDA and whose kernels' memory cannot be derived from shapes, in
        order.
        """

    def see(self, name: str, args: Any, results: list[Any], *, in_backward: bool) -> None:
        """Log the memory of an operation that this thread, or autograd's, has run."""
        there = self._devices.named or str(results[0].device) if results else "cpu"
        if not there.startswith("cuda"):
            return
        if is_unknown(name):
            self.unknown.setdefault(name)
        device, place = torch.device(there), self._devices.name(results[0].device)
        convolves = name in _CONVOLVE
        if convolves and takes_cudnn():
            self._note(_CUDNN)
            return
        if (convolves and not _is_by_depth(name, args)) or name in _MULTIPLY:
            number = _BIASES.get(name)
            biased = (
                number is not None and len(args) > number and getattr(args[number], "ndim", 0) == 1
            )
            thread = "autograd" if in_backward else threading.get_ident()
            for light in (False, True)[: 1 + biased]:
                if (place, thread, light) not in self._held:
                    self._held.add((place, thread, light))
                    self._hold(device, place, light=light)
        known = self._known_properties(device)
        processors = known.multi_processor_count if known else HOPPERS_PROCESSORS
        if convolves:
            for sizes in _in_convolution(name, args, results[0]):  # one after the other
                self._log.pass_by(list(filter(None, sizes)), place)
        else:
            self._log.pass_by(transient_sizes(name, args, results[0], processors), place)

    def _hold(self, device: Any, place: str, *, light: bool) -> None:
        known = self._known_properties(device)
        capability = None if known is None else (known.major, known.minor)
        size = workspace_sizes(capability)[light]
        if capability is None and not light and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            self._note(
                f"{device.type}:{device.index or 0} is assumed to be a Hopper: "
                f"{format_bytes(_HOPPER_BYTES)} of cuBLAS "
                f"workspace for each thread that multiplies ({format_bytes(_OTHERS_BYTES)} on "
                f"other GPUs)"
            )
        taken = self._taken.get(place, {})
        address = next((address for address, there in taken.items() if there == size), 0)
        self._log.hold(size, place, WORKSPACES, before=bool(address)).address = address
        taken.pop(address, None)


def takes_cudnn() -> bool:
    """Return True if convolutions use cuDNN, which is assumed if torch is built without CUDA."""
    cudnn = torch.backends.cudnn
    return bool(cudnn.enabled and (not torch.backends.cuda.is_built() or cudnn.is_available()))


def _is_by_depth(name: str, args: Any) -> bool:
    """Return True if a convolution is depthwise: without cuDNN it has its own kernel."""
    backward = name == "convolution_backward"
    transposed, groups = args[6 + backward], args[8 + backward]
    return bool(not transposed and groups == args[backward].shape[1] > 1)


def _in_convolution(name: str, args: Any, result: Any) -> list[list[int]]:
    """Return the blocks that a convolution allocates without cuDNN, in rounds: copies, and one
    unfolded sample.

    That sample has a column for each position of the kernel. Groups are convolved one by one, and
    joined at the end.
    """
    backward = name == "convolution_backward"
    outer, given, weight = args[:3] if backward else (result, *args[:2])
    stride, padding, _, transposed, _, groups = args[4:10] if backward else args[3:9]
    operands = (outer, given) if backward else (given,)
    copies = [tensor.nbytes for tensor in operands if not tensor.is_contiguous()]
    if _is_by_depth(name, args):  # the weight's gradient comes first
        before_result = given.nbytes if backward and args[10][0] else 0
        return [
            [
                max(
                    sum(copies) - before_result,
                    0 if outer.is_contiguous() or not backward else outer.nbytes,
                )
            ]
        ]
    kernel = weight.shape[2:]
    unfolded = (
        backward or len(kernel) > 2 or any(size > 1 for size in (*kernel, *stride)) or any(padding)
    )
    rows, places = (weight.shape[1], given) if transposed else (given.shape[1] // groups, outer)
    size = (
        rows * math.prod((*kernel, *places.shape[2:])) * given.element_size()
        if unfolded or transposed
        else 0
    )
    if groups > 1:
        parts = sum(tensor.nbytes for tensor in operands) // groups + size
        copies = copies[-1:] if not given.is_contiguous() else []
        size = max(parts, given.nbytes + weight.nbytes if backward else outer.nbytes)
    return [[*copies, size]] * (1 + (backward and transposed))


def blocks_in_use() -> dict[str, dict[int, int]]:
    """Return each CUDA device's blocks that may be workspaces, since no plain tensor uses them:
    sizes by address.
    """
    if not torch.cuda.is_initialized():
        return {}
    try:
        used = {place: snapshot.blocks_in_use for place, snapshot in snapshots("cuda").items()}
    except RuntimeError:  # another allocator
        return {}
    right = {*workspace_sizes(None), *workspace_sizes((0, 0))}
    likely = {
        block.address
        for blocks in used.values()
        for block in blocks
        if block.requested_bytes in right
    }
    for value in gc.get_objects() if likely else ():
        if is_exactly(value, torch.Tensor, torch.nn.Parameter) and value.device.type == "cuda":
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided:
                    likely.discard(tensor.untyped_storage().data_ptr())
    return {
        place: {block.address: block.requested_bytes for block in blocks if block.address in likely}
        for place, blocks in used.items()
    }


# -- the allocator ------------------------------------------------------------------------------


def most_split_bytes() -> int:
    """Return the size from which on the allocator does not split blocks, as set by a call or the
    environment.
    """
    found = re.search(r"max_split_size_mb *: *(\d+)", settings())
    return int(found[1]) * MIB if found and int(found[1]) else _NO_LIMIT


def unfollowed() -> list[str]:
    """Return the allocator settings that change its reserved memory and that estimates do not
    simulate.
    """
    return re.findall(
        r"expandable_segments *: *True|backend *: *(?!native)\w+|roundup_power2_divisions *: "
        r"*(?:\[|\d+)",
        settings(),
    )


class OutOfRoomError(Exception):
    """The device has less memory than the allocator needs."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """Block of a segment; it is merged with free neighbours when it is freed."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: CachedBlock | None = None
    after: CachedBlock | None = None


class Allocator:
    """Simulates the CUDA caching allocator: best fit, large remainders split off, cache freed
    before it fails.

    It starts with ``segments``. New segments get higher addresses, or lower ones (``downwards``);
    that matters because the lower of two free blocks of the same size is used.
    """

    def __init__(
        self,
        most_split_bytes: int = _NO_LIMIT,
        limit_bytes: int = _NO_LIMIT,
        segments: Sequence[Segment] = (),
        *,
        downwards: bool = False,
    ) -> None:
        self._most_split_bytes, self._limit_bytes, self._downwards = (
            most_split_bytes,
            limit_bytes,
            downwards,
        )
        self._free: dict[bool, list[tuple[int, int, CachedBlock]]] = {True: [], False: []}
        self.in_use: dict[int, CachedBlock] = {}
        """Blocks of ``segments`` that are not free, by address."""
        self.reserved_bytes = sum(map(self._load, segments))
        self.most_reserved_bytes = self.reserved_bytes
        blocks = [block for segment in segments for block in segment.blocks]
        lowest = min((block.address for block in blocks), default=0)
        highest = max((block.address + block.size_bytes for block in blocks), default=0)
        self._edge = lowest if downwards else highest
        if self.reserved_bytes > limit_bytes:
            raise OutOfRoomError

    def _load(self, segment: Segment) -> int:
        """Add the blocks of a segment, and return its size."""
        last = None
        for block in segment.blocks:
            free = segment.is_usable(block)
            loaded = CachedBlock(block.address, block.size_bytes, segment.small, free, last)
            if last is not None:
                last.after = loaded
            if free:
                insort(self._free[segment.small], (loaded.size, loaded.address, loaded))
            else:
                self.in_use[loaded.address] = loaded
            last = loaded
        return sum(block.size_bytes for block in segment.blocks)

    def take(self, size_bytes: int) -> CachedBlock:
        """Allocate a block of ``size_bytes`` or more (``OutOfRoomError`` if the device has no
        memory left).
        """
        size = max(_LEAST, -(-size_bytes // _LEAST) * _LEAST)
        block = self._cached(size) or self._from_device(size)
        block.free = False
        rest = block.size - size
        if rest >= _LEAST if block.small else rest > _SMALL and size < self._most_split_bytes:
            split = CachedBlock(block.address + size, rest, block.small, True, block, block.after)
            if block.after is not None:
                block.after.before = split
            block.after, block.size = split, size
            insort(self._free[split.small], (rest, split.address, split))
        return block

    def _cached(self, size: int) -> CachedBlock | None:
        free = self._free[size <= _SMALL]
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        available, most = free[place][0], self._most_split_bytes
        if available >= most > size or (size >= most and available >= size + _MIDDLE_SEGMENT):
            return None
        return free.pop(place)[2]

    def _from_device(self, size: int) -> CachedBlock:
        small = size <= _SMALL
        segment = (
            _SMALL_SEGMENT
            if small
            else _MIDDLE_SEGMENT
            if size < _MIDDLE
            else -(-size // _STEP) * _STEP
        )
        if self.reserved_bytes + segment > self._limit_bytes:
            self._empty()
            if self.reserved_bytes + segment > self._limit_bytes:
                raise OutOfRoomError
        self.reserved_bytes += segment
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self._edge += -segment if self._downwards else segment
        return CachedBlock(self._edge if self._downwards else self._edge - segment, segment, small)

    def _empty(self) -> None:
        """Free the segments that have no block in use."""
        for small, blocks in self._free.items():
            self._free[small] = [entry for entry in blocks if entry[2].before or entry[2].after]
            self.reserved_bytes -= sum(entry[0] for entry in blocks) - sum(
                entry[0] for entry in self._free[small]
            )

    def give(self, block: CachedBlock) -> None:
        """Free a block, and merge it with free neighbours."""
        free = self._free[block.small]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                free.pop(bisect_left(free, (neighbour.size, neighbour.address)))
                first, rest = (
                    (neighbour, block) if neighbour is block.before else (block, neighbour)
                )
                first.size, first.after = first.size + rest.size, rest.after
                if rest.after is not None:
                    rest.after.before = first
                block = first
        block.free = True
        insort(free, (block.size, block.address, block))


@dataclass(frozen=True)
class Replay:
    """Input of a replay: the events, the allocator's settings, and the segments that the device has
    at the start.
    """

    events: Sequence[tuple[int, int]]
    """Number of the storage, and its size when it is allocated, 0 when it is freed."""
    most_split_bytes: int = _NO_LIMIT
    segments: Sequence[Segment] = ()
    addresses: Mapping[int, int] = field(default_factory=dict)
    """Addresses of the storages that exist at the start, by number."""

    @functools.cached_property
    def others_bytes(self) -> int:
        """Bytes of the segments that other tensors occupy, or that only another stream or a private
        pool can use.
        """
        own = {*self.addresses.values()}
        return sum(
            block.size_bytes
            for segment in self.segments
            for block in segment.blocks
            if not segment.is_usable(block) and block.address not in own
        )

    @property
    def there_bytes(self) -> int:
        """Bytes of the segments that the storages occupy or can use."""
        return (
            sum(block.size_bytes for segment in self.segments for block in segment.blocks)
            - self.others_bytes
        )

    def allocator(self, limit_bytes: int = _NO_LIMIT, *, downwards: bool = False) -> Allocator:
        """Return an allocator that may reserve ``limit_bytes`` in addition to ``others_bytes``."""
        return Allocator(
            self.most_split_bytes,
            limit_bytes + self.others_bytes,
            self.segments,
            downwards=downwards,
        )

    def changes(self, allocator: Allocator) -> Iterator[tuple[int, int]]:
        """Yield each event's storage and the change of bytes in use."""
        blocks: dict[int, CachedBlock] = {}
        for number, size in self.events:
            if size:
                block = allocator.in_use.get(self.addresses.get(number, -1)) or allocator.take(size)
                blocks[number] = block
                yield number, block.size
            else:
                block = blocks.pop(number)
                yield number, -block.size
                allocator.give(block)

    def runs(self, limit_bytes: int) -> bool:
        """Return True if the replay completes within a limit, with new segments above or below the
        existing ones.
        """
        try:
            for downwards in (False, True):
                for _ in self.changes(self.allocator(limit_bytes, downwards=downwards)):
                    pass
        except OutOfRoomError:
            return False
        return True

    def least_bytes(self, allocated_bytes: int, reserved_bytes: int) -> int:
        """Return about the lowest limit from which on the replay completes, between peak and
        reserved memory.

        Limits are tried from above, because a higher limit can fail where a lower one suffices: the
        later the cache is freed, the more of its segments are pinned by a small block.
        """
        step = max(
            _STEP, int(reserved_bytes * _CLOSE), (reserved_bytes - allocated_bytes) // _MOST_LIMITS
        )
        enough = reserved_bytes
        while enough - step >= allocated_bytes and self.runs(enough - step):
            enough -= step
        return enough


def read(log: StorageLog, device: str, label: str) -> tuple[DeviceEstimate, int]:
    """Return the figures of one device, named ``label``, and the bytes of existing segments that
    they include.

    RAM is counted without an allocator.
    """
    own = [life for life in log.lives if life.device == device]
    sizes = [life.size_bytes for life in own]
    born = [(life.born, True, number) for number, life in enumerate(own) if life.size_bytes]
    died = [
        (life.died, False, number)
        for number, life in enumerate(own)
        if life.size_bytes and life.died
    ]
    moments = sorted([*born, *died])
    segments, freed_bytes = _segments_in_use(label, log.erased)
    there = {block.address for segment in segments for block in segment.blocks}
    replay = Replay(
        [(number, sizes[number] if is_born else 0) for _, is_born, number in moments],
        most_split_bytes(),
        segments,
        {number: life.address for number, life in enumerate(own) if life.address in there},
    )
    allocator = replay.allocator(downwards=True)
    on_host = ((number, size or -sizes[number]) for number, size in replay.events)
    allocated = peak = peak_at = 0
    changes = on_host if label == "cpu" else replay.changes(allocator)
    for (moment, is_born, _), (number, change) in zip(moments, changes, strict=True):
        allocated += change
        if is_born:
            sizes[number] = change
        if allocated > peak:
            peak, peak_at = allocated, moment
    parts = dict.fromkeys(ROLES, 0)
    for life, size in zip(own, sizes, strict=True):
        if life.born <= peak_at and (life.died is None or life.died > peak_at):
            parts[log.role(life)] += size
    before = sum(size for life, size in zip(own, sizes, strict=True) if life.before)
    reserved = needed = peak
    if label != "cpu":
        reserved = allocator.most_reserved_bytes - replay.others_bytes
        needed = replay.least_bytes(peak, reserved)
    return DeviceEstimate(
        label, before, peak, allocated, reserved, needed, parts
    ), replay.there_bytes + freed_bytes


def _segments_in_use(device: str, erased: set[int]) -> tuple[list[Segment], int]:
    """Return the segments of a CUDA device with a block in use, since the allocator can free the
    rest.

    Blocks at the addresses ``erased`` count as free. The second result is the size of the segments
    that have no other block in use.
    """
    if not torch.cuda.is_initialized():
        return [], 0
    try:
        found = snapshots("cuda").get(device)
    except RuntimeError:  # another allocator
        return [], 0
    segments, freed_bytes = list[Segment](), 0
    for segment in found.segments if found is not None else ():
        if all(block.state == "inactive" for block in segment.blocks):
            continue
        if segment.page_bytes:
            return [], 0
        gone = [
            replace(block, state="inactive") if block.address in erased else block
            for block in segment.blocks
        ]
        if any(block.state != "inactive" for block in gone):
            segments.append(replace(segment, blocks=tuple(gone)))
        else:
            freed_bytes += sum(block.size_bytes for block in gone)
    return segments, freed_bytes


# -- available memory ---------------------------------------------------------------------------

_CONTEXT_BYTES = 768 * MIB
"""Assumed bytes of a process's context, the code of libraries and the driver, next to the
allocator's segments. No call reports them in advance; 400 to 700 MiB are usual for torch's builds
with CUDA 12 and 13.
"""

_SPARE_SHARE = 50
"""The minimum memory, divided by this, is set aside for buffers of kernels. On a simulated card,
training GPT-2 XL with checkpoints ran out of memory with nothing set aside, and ran with 1.3 %
more.
"""


def with_room(figures: DeviceEstimate, there_bytes: int, room_bytes: int | None) -> DeviceEstimate:
    """Return a device's estimate with the memory that it has for the code: the user's figure, or
    its free memory.

    ``there_bytes`` is memory that this process holds there already, and that ``figures`` include.
    """
    name = figures.device
    context = _CONTEXT_BYTES if name.startswith("cuda") else 0
    if room_bytes is None and (free := free_bytes(name)) is not None:
        room_bytes = max(0, free + there_bytes)
        if context and has_context(torch.device(name).index or 0):
            context = 0
    elif room_bytes is None:
        context = 0
    elif name == "cpu":  # the user's figure is for the whole process
        context = max(0, Process().memory_info().rss - there_bytes)
    spare = figures.needed_bytes // _SPARE_SHARE if name != "cpu" else 0
    return replace(figures, room_bytes=room_bytes, context_bytes=context, spare_bytes=spare)


def advice(figures: DeviceEstimate) -> str:
    """Return advice to use expandable segments if only fragmentation keeps the code from fitting;
    else an empty str.
    """
    enough = figures.peak_bytes + figures.spare_bytes + figures.context_bytes
    decides, setting = (
        figures.gaps_decide and enough <= (figures.room_bytes or 0),
        expandable_setting(),
    )
    if not decides or not figures.device.startswith("cuda") or not setting:
        return ""
    return (
        f"fragmentation decides on {figures.device}: start Python with {setting}, which prevents "
        f"most of it; then "
        f"{format_bytes(enough)} should suffice"
    )


def free_bytes(name: str) -> int | None:
    """Return the free memory of a device, cached memory that the allocator can free included,
    within torch's limit.

    None if the device is not available, cannot be queried, or if that would take a context of
    hundreds of MiB.
    """
    try:
        found, cuda, index = (
            memory(torch.device(name)),
            in_use("cuda"),
            torch.device(name).index or 0,
        )
        free, reserved = found.free_bytes, found.reserved_bytes
        if free is not None and reserved is not None and cuda is not None:
            allowed = limit_bytes(cuda, index) - reserved
            # which no limit counts
            free = min(free, allowed + (0 if has_context(index) else _CONTEXT_BYTES))
        if free is None or not reserved:
            return free
        split = snapshots("cuda").get(found.device)  # gaps between blocks in use cannot be freed
        return free + (split.cached_bytes if split else reserved - (found.allocated_bytes or 0))
    except Exception:  # a broken context or driver must not end the estimate
        return None
