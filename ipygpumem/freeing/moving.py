"""Moves models and optimizers' states between devices and the host, storage by storage, with all tensors that show it.

A storage keeps its identity: it is emptied while its bytes are on the host, and filled again. So views, tied weights,
flattened weights of an RNN and what a graph has saved go on sharing what they shared. The tensors are pointed to the
bytes on the host meanwhile, as ``module.to()`` does it, and back to their storage later.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ipygpumem.errors import DeviceError, GpuMemError
from ipygpumem.freeing.reclaim import run_steps, steps_that_free
from ipygpumem.introspect import instance_dict, is_exactly, is_instance, type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import ReclaimStep
from ipygpumem.objects import interrupts
from ipygpumem.objects.arrays import Reader, is_of_library, library_type
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.holders.graphs import live_tensors
from ipygpumem.objects.traced import refuse_while_transformed
from ipygpumem.objects.walk import ArraySearch
from ipygpumem.probes.allocator import snapshots
from ipygpumem.probes.host import available_bytes
from ipygpumem.record import Record
from ipygpumem.units import format_bytes

DEVICES = ("cuda", "xpu")
"""Where torch can empty a storage and fill it again."""
_BOUND = ("DistributedDataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True)
class Room(Record):
    """What torch's allocator has of a device, and the largest block that it could hand out, at one moment."""

    device: str
    reserved_bytes: int
    largest_bytes: int | None
    """None where the allocator or the driver does not tell."""


@dataclass(frozen=True)
class PurgeRecord(Record):
    """What a purge moved off a device and back, and what was gained by it."""

    moved_bytes: int
    is_on_host: bool
    """Whether it did not fit any more, and so has stayed on the host."""
    before: tuple[Room, ...]
    after: tuple[Room, ...]
    notes: tuple[str, ...] = ()


def purge(
    model: object, optimizer: object | None, meter: Meter, garbage: Garbage, devices: tuple[str, ...] = DEVICES
) -> PurgeRecord:
    """Defragment devices: move a model and its optimizer's state to the host, empty the caches, and move them back.

    Raises:
        GpuMemError: it makes no sense, torch traces or transforms the code that asks, or the host has no room: then
            nothing was moved.
    """
    away = Offload([model, *([] if optimizer is None else [optimizer])], garbage, devices, what="purge")
    with _quiet():
        tensors = list(_of_modules(sys.modules["torch"].Tensor, [model]))
        names = sorted({str(item.device) for item in tensors if item.device.type in devices})
    before = tuple(map(_room, names))
    notes = [away.leave()]
    stays = ""
    try:
        run_steps(meter, steps_that_free(garbage), list[ReclaimStep]())
    finally:
        stays = away.come_back()
    notes += [stays] if away.size_bytes else ["no parameter, buffer or gradient of it is on a device"]
    return PurgeRecord(away.size_bytes, bool(stays), before, tuple(map(_room, names)), tuple(filter(None, notes)))


def _room(name: str) -> Room:
    torch: Any = sys.modules["torch"]
    backend = name.partition(":")[0]
    module = getattr(torch, backend)
    if backend == "cpu":
        return Room(name, 0, None)
    reserved = int(module.memory_reserved(name))
    try:
        snapshot = snapshots(backend)[name]
        free, total = module.mem_get_info(name)
    except (RuntimeError, AttributeError, KeyError):
        return Room(name, reserved, None)
    limit = getattr(module, "get_per_process_memory_fraction", lambda device: 1.0)(name) * total
    new = min(free, limit - reserved) + snapshot.cached_bytes  # cached segments are given back for it if need be
    return Room(name, reserved, max(int(new), snapshot.largest_fragment_bytes, 0))


class Offload:
    """A ``with`` block in which models and optimizers' states are on the host.

    Args:
        given: modules, and optimizers.
        garbage: knows the tensors.
        devices: the kinds of devices from which to move.
        what: what errors call it.

    Raises:
        GpuMemError: one of them cannot be moved.
    """

    def __init__(
        self, given: Sequence[Any], garbage: Garbage, devices: tuple[str, ...] = DEVICES, what: str = "offload"
    ) -> None:
        refuse_while_transformed(what)
        if sys.modules.get("torch") is None:
            raise GpuMemError(f"{what} moves torch's modules, and torch is not loaded")
        self._modules = [item for item in given if is_of_library(item, "torch.nn", "Module")]
        self._optimizers = [item for item in given if is_of_library(item, "torch.optim", "Optimizer")]
        others = [item for item in given if all(item is not one for one in (*self._modules, *self._optimizers))]
        if others or not self._modules:
            wrong = f", and not {type_name(others[0])}" if others else ""
            example = f"{what}(learner.model, learner.optimizer)"
            raise GpuMemError(f"{what} takes a torch module and its optimizer{wrong}: {example}")
        for module in (inner for model in self._modules for inner in model.modules()):
            if type_name(module) in _BOUND:
                raise GpuMemError(f"{what} cannot move what {type_name(module)} works on: it keeps addresses")
        self._garbage, self._devices, self._what = garbage, devices, what
        self._work: _Moving | None = None
        self.size_bytes = 0
        """What was moved."""

    def __enter__(self) -> Offload:
        """Move all of it to the host; after an error nothing has been moved."""
        if note := self.leave():
            warnings.warn(f"ipygpumem: {note}", RuntimeWarning, stacklevel=2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Move all of it back; if it does not fit, it stays on the host, and a warning says so."""
        try:
            note = self.come_back()
        finally:
            self._work = None
        if note:
            warnings.warn(f"ipygpumem: {note}", RuntimeWarning, stacklevel=2)

    def leave(self) -> str:
        """Move all of it to the host, and return what is to be said; after an error nothing has been moved."""
        refuse_while_transformed(self._what)
        if self._work is not None:
            raise GpuMemError("this offload is open already: call ipygpumem.offload(model) for another")
        with interrupts.noted() as struck, _quiet():
            work = _Moving(self._modules, self._optimizers, self._garbage, self._devices)
            if work.odd:
                kinds = "sparse, quantized, nested, conjugated or wrapped"
                raise GpuMemError(
                    f"{self._what} cannot move {len(work.odd)} of its tensors ({kinds}): nothing was moved"
                )
            if bound := [name for name in work.devices if _may_have_graphs(name)]:
                raise GpuMemError(f"a captured CUDA graph may use addresses of {bound[0]}: nothing was moved")
            self._host_bytes, self.size_bytes = _host_bytes(self._modules), work.size_bytes
            work.copy_out()
            if not struck:
                try:
                    work.use_host()
                except Exception:
                    work.use_home()
                    raise
                self._work = work
                work.empty()
        if struck:
            self.__exit__(None, None, None)
            raise KeyboardInterrupt
        shared = sum(piece.size_bytes for piece in work.pieces if piece.is_shared)
        what = "stay on the device as well: a graph or another library uses that memory"
        return f"{format_bytes(shared)} {what}" if shared else ""

    def come_back(self) -> str:
        """Move all of it back, and return why some of it is on the host still."""
        work, self._work = self._work, None
        if work is None:
            return ""
        with interrupts.noted() as struck, _quiet():
            work.add_what_was_made()
            size, error_text = work.size_bytes, work.fill()
            why = f"they did not fit back ({error_text})"
            if not error_text:
                work.use_home()
                size = _host_bytes(self._modules) - self._host_bytes
                why = "they were made or replaced there"
        text = f"{format_bytes(size)} stay on the host: {why}. To move them, call model.to(device)" if size > 0 else ""
        if struck:
            if text:
                warnings.warn(f"ipygpumem: {text}", RuntimeWarning, stacklevel=3)
            raise KeyboardInterrupt
        return text


def _may_have_graphs(name: str) -> bool:
    if name == "cpu":
        return False
    try:
        found = snapshots(name.partition(":")[0]).get(name)
    except RuntimeError:  # an allocator without snapshots
        return False
    return found is not None and any(segment.private for segment in found.segments)


@dataclass
class _Piece:
    """One storage, and the tensors that show it."""

    storage: Any
    size_bytes: int
    tensors: list[Any]
    is_shared: bool = False
    """Whether something shows it that cannot be seen from Python: then it is never emptied."""
    host: Any = None
    """Its bytes on the host, as a storage."""

    def copy_out(self) -> None:
        self.host = sys.modules["torch"].empty(self.size_bytes, dtype=_byte(), device="cpu").untyped_storage()
        _as_bytes(self.host).copy_(_as_bytes(self.storage))

    def fill(self) -> None:
        """Bring the bytes home (RuntimeError if there is no room)."""
        if self.storage.nbytes() < self.size_bytes:
            self.storage.resize_(self.size_bytes)
        _as_bytes(self.storage).copy_(_as_bytes(self.host))

    def empty(self) -> None:
        if not self.is_shared:
            self.storage.resize_(0)

    def point_to(self, storage: Any) -> None:
        for tensor in self.tensors:
            _point(tensor, storage)


class _Moving:
    """The memory of models and optimizers that is on devices; used inside ``_quiet()``."""

    def __init__(
        self, modules: Iterable[Any], optimizers: list[Any], garbage: Garbage, devices: tuple[str, ...]
    ) -> None:
        self._reader = Reader(sys.modules["torch"])
        self._optimizers = optimizers
        roots = list(_of_modules(self._reader.base, modules))
        roots += [grad for grad in map(self._gradient, roots) if grad is not None]
        roots += [tensor for optimizer in optimizers for tensor in _state_tensors(optimizer)]
        odd = [tensor for tensor in roots if not self._is_plain(tensor)]
        odd = [tensor for tensor in odd if self._reader.memory(tensor).device not in ("cpu", "meta")]
        self.odd = {id(tensor) for tensor in odd}
        """What has no storage of its own that could be moved."""
        shown = [self._reader.base.untyped_storage(tensor) for tensor in roots if self._is_plain(tensor)]
        storages = {storage._cdata: storage for storage in shown}
        kinds = {storage.device.type for storage in storages.values()} - {"cpu", "meta"}
        if wrong := [kind for kind in sorted(kinds) if kind not in devices]:
            raise DeviceError(f"what is on {wrong[0]} cannot be moved this way, only what is on cuda or xpu")
        wanted = {key for key, item in storages.items() if item.device.type in devices and item.nbytes()}
        known = {id(tensor): tensor for tensor in (*roots, *(live_tensors(garbage) if wanted else ()))}
        by_storage: dict[int, list[Any]] = defaultdict(list)
        for tensor in known.values():
            for key in self._reader.memory(tensor).storages.keys() & wanted:
                by_storage[key].append(tensor)
                self.odd |= {id(tensor)} if not self._is_plain(tensor) else set()
        count = _references_of_tensors()
        explained = Counter(id(item) for tensor in known.values() for item in self._behind(tensor))
        del known, roots, odd, shown
        self.pieces: list[_Piece] = []
        for key in wanted:
            storage, tensors = storages[key], by_storage[key]
            shared = not storage.resizable() or count(storage) != len(tensors)
            shared = shared or any(self._is_held_by_others(item, explained[id(item)]) for item in tensors)
            self.pieces.append(_Piece(storage, storage.nbytes(), tensors, shared))
        self.pieces.sort(key=lambda piece: -piece.size_bytes)  # the largest first: that is how they fit best

    def _is_plain(self, tensor: Any) -> bool:
        base = self._reader.base
        is_plain = self._reader.memory(tensor).is_plain and not base.is_nested.__get__(tensor)
        return is_plain and not (base.is_conj(tensor) or base.is_neg(tensor))

    def _gradient(self, tensor: Any) -> Any | None:
        read = self._reader.read
        return read("grad", tensor) if read("requires_grad", tensor) and read("is_leaf", tensor) else None

    def _behind(self, tensor: Any) -> Iterator[Any]:
        """Yield the tensors to which a tensor itself refers in C++."""
        behind = self._gradient(tensor), self._reader.read("_base", tensor)
        yield from (item for item in behind if item is not None)

    def _is_held_by_others(self, tensor: Any, explained: int) -> bool:
        """Whether C++ code holds a tensor without a history: a capsule of DLPack's, of which another library reads."""
        count = getattr(self._reader.base, "_use_count", lambda tensor: 1)  # of C++ references: Python's object is one
        return not self._reader.read("requires_grad", tensor) and count(tensor) - 1 > explained

    @property
    def size_bytes(self) -> int:
        """What there is to move."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def devices(self) -> list[str]:
        """The devices on which it is."""
        return sorted({str(piece.storage.device) for piece in self.pieces})

    def copy_out(self) -> None:
        """Copy all of it to the host; nothing else is changed.

        Raises:
            GpuMemError: the host has no room for it.
        """
        free = available_bytes()
        if self.size_bytes > free:
            text = f"{format_bytes(self.size_bytes)} would go to the host, which has {format_bytes(free)} free"
            raise GpuMemError(f"{text}: nothing was moved")
        self._synchronize()
        try:
            for piece in self.pieces:
                piece.copy_out()
        except (RuntimeError, MemoryError) as error:  # a limit of this process, or a broken device
            raise GpuMemError(f"nothing was moved: {_first_words(error)}") from None

    def empty(self) -> None:
        """Give back what it has on devices; its tensors cannot be used until ``fill`` or ``use_host``."""
        for piece in self.pieces:
            piece.empty()

    def use_host(self) -> None:
        """Point the tensors to what is on the host."""
        for piece in self.pieces:
            piece.point_to(piece.host)

    def fill(self) -> str:
        """Bring all of it home; return why that failed, and then none of it is there."""
        try:
            for piece in self.pieces:
                piece.fill()
            self._synchronize()
        except RuntimeError as error:  # out of memory, most likely
            for piece in self.pieces:
                piece.empty()
            return _first_words(error)
        return ""

    def use_home(self) -> None:
        """Point the tensors that still show what is on the host to their storages."""
        for piece in self.pieces:
            piece.point_to(piece.storage)
            if not piece.host.resizable():  # an array of NumPy's may show it, which keeps only the tensor alive
                for tensor in piece.tensors:
                    weakref.finalize(tensor, id, piece.host).atexit = False

    def add_what_was_made(self) -> None:
        """Forget tensors that were moved elsewhere, and take gradients and states along that were made on the host."""
        base, homes = self._reader.base, dict[int, Any]()
        for piece in self.pieces:
            piece.tensors = [item for item in piece.tensors if base.untyped_storage(item)._cdata == piece.host._cdata]
            homes.update((id(tensor), piece.storage.device) for tensor in piece.tensors)
        self.pieces = [piece for piece in self.pieces if piece.tensors]
        owners = [(tensor, [self._gradient(tensor)]) for piece in self.pieces for tensor in piece.tensors]
        for optimizer in self._optimizers:
            states = [(owner, state) for owner, state in optimizer.state.items() if type(state) is dict]
            # torch keeps a "step" on the host by itself.
            owners += [(owner, [item for key, item in state.items() if key != "step"]) for owner, state in states]
        for owner, made in owners:
            self._take_along(homes.get(id(owner)), made)

    def _take_along(self, home: Any | None, tensors: Iterable[Any]) -> None:
        torch: Any = sys.modules["torch"]
        for tensor in tensors if home is not None else ():
            if is_instance(tensor, self._reader.base) and self._is_plain(tensor):
                storage = self._reader.base.untyped_storage(tensor)
                if storage.device.type == "cpu" and all(storage._cdata != piece.host._cdata for piece in self.pieces):
                    new = torch.empty(0, dtype=_byte(), device=home).untyped_storage()
                    self.pieces.append(_Piece(new, storage.nbytes(), [tensor], host=storage))

    def _synchronize(self) -> None:
        torch: Any = sys.modules["torch"]
        for device in {piece.storage.device for piece in self.pieces if piece.storage.device.type != "cpu"}:
            getattr(torch, device.type).synchronize(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Open a block in which tensors are read and moved without code of the user's, and without autograd."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _of_modules(base: Any, modules: Iterable[Any]) -> Iterator[Any]:
    """Yield parameters, buffers, and tensors that are plain attributes, or in a container that is one."""
    for model in modules:
        yield from model.parameters()
        yield from model.buffers()
        for module in model.modules():
            for value in list((instance_dict(module) or {}).values()):
                parts = list(value.values()) if type(value) is dict else value if is_exactly(value, list, tuple) else ()
                yield from (item for item in (value, *parts) if is_instance(item, base))


def _host_bytes(modules: Iterable[Any]) -> int:
    """Return what modules have on the host."""
    reader = Reader(sys.modules["torch"])
    memories = [reader.memory(tensor) for tensor in _of_modules(reader.base, modules)]
    return sum({key: size for one in memories if one.device == "cpu" for key, size in one.storages.items()}.values())


def _state_tensors(optimizer: Any) -> list[Any]:
    """Return the tensors of an optimizer's state, one for each storage."""
    base: Any = library_type("torch", "Tensor")
    return [item for item, _ in ArraySearch().find(list(optimizer.state.values())) if is_instance(item, base)]


def _references_of_tensors() -> Any:
    """Return a function that says how many tensors show a storage, those that Python does not know included.

    torch counts what refers to a storage; what Python's object for it adds shows in one that is known.
    """
    torch: Any = sys.modules["torch"]
    ask = getattr(torch._C, "_storage_Use_Count", None)
    if ask is None:  # torch 2.0: nobody can tell, so that nothing is emptied
        return lambda storage: -1
    sample = torch.empty(1, dtype=_byte(), device="cpu")
    storage = sample.untyped_storage()
    own = ask(storage._cdata) - 1
    return lambda storage: ask(storage._cdata) - own


def _first_words(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def _byte() -> Any:
    return sys.modules["torch"].uint8


def _as_bytes(storage: Any) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.empty(0, dtype=_byte(), device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _point(tensor: Any, storage: Any) -> None:
    """Let a tensor show another storage, in its own shape, strides and offset."""
    torch: Any = sys.modules["torch"]
    base = torch.Tensor
    place = base.storage_offset(tensor), base.size(tensor), base.stride(tensor)
    with torch.inference_mode(base.is_inference(tensor)):  # or the tensor would become one for training, or none
        view = torch.empty(0, dtype=base.dtype.__get__(tensor), device=storage.device).set_(storage, *place)
        base.data.__set__(tensor, view)
