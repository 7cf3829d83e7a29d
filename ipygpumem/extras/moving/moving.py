"""``ipygpumem.purge`` and ``offload``: move models and optimizers' states off devices and back,
storage by storage.

A storage keeps its identity: it is emptied while its bytes are on the host, and filled again. So
views, tied weights, an RNN's flattened weights and tensors saved by a graph continue to share
memory. Until then the tensors point to the bytes on the host, as after ``module.to()``.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ipygpumem import interrupts
from ipygpumem.api.shell import current_traces, garbage_here
from ipygpumem.errors import DeviceError, GpuMemError
from ipygpumem.heap.arrays import Reader, is_of_library
from ipygpumem.heap.heap import refuse_while_traced
from ipygpumem.heap.holders.graphs import live_tensors
from ipygpumem.heap.walk import ArraySearch
from ipygpumem.introspect import instance_dict, is_exactly, is_instance, type_name
from ipygpumem.probes.host import available_bytes
from ipygpumem.reclaim.reclaim import free_now, private_pools, reserved
from ipygpumem.records import Record
from ipygpumem.report.layout import Report, Table, clean, device_label
from ipygpumem.report.showing import shows
from ipygpumem.units import format_bytes

DEVICES = ("cuda", "xpu")
"""Devices on which torch can empty a storage and fill it again."""
_BOUND = ("DistributedDataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True)
class PurgeRecord(Record):
    """Result of a purge: the memory moved off a device and back, and the memory freed."""

    moved_bytes: int
    is_on_host: bool
    """True if it no longer fitted, and so has stayed on the host."""
    before: dict[str, int]
    """Bytes reserved by torch's allocator, per device."""
    after: dict[str, int]
    notes: tuple[str, ...] = ()


def purge(model: object, optimizer: object = None) -> PurgeRecord:
    """Defragment a device: move a model off it, empty the caches, and move it back in place.

    Use it when an allocation fails although much memory is free in fragments. Parameters, buffers,
    gradients and the optimizer's state keep their values and identities, including views and tied
    weights. Tensors that do not fit back stay on the host, with a warning. Only CUDA, ROCm and XPU
    devices are supported.

    Args:
        model: a torch module; its tensors on the host are not moved.
        optimizer: its optimizer.

    Raises:
        GpuMemError: they cannot be moved, or the host has too little memory; then nothing was
            moved.

    >>> ipygpumem.purge(torch.nn.Linear(2, 2)).moved_bytes  # it is on the host
    0
    """
    away, meter = (
        Offload([model, *([] if optimizer is None else [optimizer])], "purge"),
        current_traces().meter,
    )
    before, notes, stays = reserved(meter.now()), [away.leave()], ""
    try:
        free_now(meter, garbage_here())
    finally:
        stays = away.come_back()
        _warn(stays)
    notes += (
        [stays] if away.size_bytes else ["no parameter, buffer or gradient of it is on a device"]
    )
    after = reserved(meter.now())
    return PurgeRecord(away.size_bytes, bool(stays), before, after, tuple(filter(None, notes)))


@shows(PurgeRecord)
def purge_report(record: PurgeRecord) -> Report:
    """Return the report of a purge: the decrease of each allocator's reserved memory."""
    moved = (
        f"{format_bytes(record.moved_bytes)} moved off"
        if record.moved_bytes
        else "nothing was moved"
    )
    end = (
        ", and still on the host"
        if record.is_on_host
        else " and back"
        if record.moved_bytes
        else ""
    )
    rows = [
        {
            "device": device_label(device),
            "reserved before": format_bytes(size),
            "after": format_bytes(record.after[device]),
        }
        for device, size in record.before.items()
        if device in record.after
    ]
    tables = [Table.of(rows, {"reserved before", "after"})]
    head, notes = f"purge: {moved}{end}", list(map(clean, record.notes))
    return Report("purge", head, notes, tables, is_trouble=record.is_on_host, records=[record])


def offload(*given: object) -> Offload:
    """Return a ``with`` block during which a model is on the host; at its end, also after an error,
    it is moved back.

    Use it to give another model the device for a while. Tensors that do not fit back stay on the
    host, with a warning.

    Args:
        given: modules, and optimizers whose state is moved with them.

    Raises:
        GpuMemError: one of them cannot be moved.

    >>> model = torch.nn.Linear(2, 2)
    >>> with ipygpumem.offload(model):
    ...     model.weight.device
    device(type='cpu')
    """
    return Offload(given)


class Offload:
    """A ``with`` block during which modules, and the states of optimizers, are on the host.

    Raises:
        GpuMemError: one of them cannot be moved.
    """

    def __init__(self, given: Sequence[Any], what: str = "offload") -> None:
        refuse_while_traced(what)
        if sys.modules.get("torch") is None:
            raise GpuMemError(f"{what} moves torch modules, but torch is not loaded")
        self._modules = [item for item in given if is_of_library(item, "torch.nn", "Module")]
        self._optimizers = [
            item for item in given if is_of_library(item, "torch.optim", "Optimizer")
        ]
        wrong_items = [
            item
            for item in given
            if all(item is not one for one in (*self._modules, *self._optimizers))
        ]
        if wrong_items or not self._modules:
            wrong = f", and not {type_name(wrong_items[0])}" if wrong_items else ""
            example = f"{what}(learner.model, learner.optimizer)"
            raise GpuMemError(f"{what} takes a torch module and its optimizer{wrong}: {example}")
        for module in (inner for model in self._modules for inner in model.modules()):
            if type_name(module) in _BOUND:
                raise GpuMemError(
                    f"{what} cannot move the modules of {type_name(module)}: it stores their "
                    f"addresses"
                )
        self._what = what
        self._pieces: list[_Piece] | None = None
        self._ended: list[weakref.ref[Any]] = []
        """Weak references to the given modules and optimizers while they are back on the device."""
        self.size_bytes = 0
        """Bytes moved."""

    def __enter__(self) -> Offload:
        """Move everything to the host; after an error nothing has been moved."""
        _warn(self.leave())
        return self

    def __exit__(self, *error: object) -> None:
        """Move everything back; if it does not fit, it stays on the host with a warning."""
        _warn(self.come_back())

    def leave(self) -> str:
        """Move everything to the host, and return a note for the user; after an error nothing has
        been moved.
        """
        refuse_while_traced(self._what)
        if self._pieces is not None:
            raise GpuMemError(
                "this offload is open already: call ipygpumem.offload(model) for another"
            )
        if self._ended:
            given = [reference() for reference in self._ended]
            if any(item is None for item in given):
                raise GpuMemError(
                    "the model of this offload was deleted: call ipygpumem.offload(model) for "
                    "another"
                )
            self._modules = [item for item in given if is_of_library(item, "torch.nn", "Module")]
            self._optimizers, self._ended = given[len(self._modules) :], []
        with interrupts.deferred() as struck, _quiet():
            pieces = self._found()
            self.size_bytes = sum(piece.size_bytes for piece in pieces)
            _copy_out(pieces)
            if not struck:
                try:
                    for piece in pieces:
                        piece.point_to(piece.host)
                except Exception:
                    for piece in pieces:
                        piece.point_to(piece.storage)
                    raise
                self._pieces = pieces
                for piece in pieces:
                    piece.empty()
        if struck:
            _warn(self.come_back())
            raise KeyboardInterrupt
        shared = sum(piece.size_bytes for piece in pieces if piece.is_shared)
        what = "stay on the device as well: a graph or another library uses that memory"
        return f"{format_bytes(shared)} {what}" if shared else ""

    def come_back(self) -> str:
        """Move everything back, and return why some of it is still on the host."""
        pieces, self._pieces = self._pieces or [], None
        left, why = 0, ""
        with interrupts.deferred() as struck, _quiet():
            strays = self._strays(pieces)
            self._ended = [weakref.ref(item) for item in (*self._modules, *self._optimizers)]
            self._modules, self._optimizers = [], []
            try:
                for piece in pieces:
                    piece.fill()
                copies = [(tensor, tensor.data.to(home)) for tensor, home in strays]
                _synchronize(pieces)
            except RuntimeError as error:  # out of memory, most likely
                left, why = sum(piece.size_bytes for piece in pieces), _first_words(error)
                for piece in pieces:
                    piece.empty()
            else:
                for piece in pieces:
                    piece.point_home()
                for tensor, copy in copies:
                    tensor.data = copy
        hint = "To move them, call model.to(device)"
        text = (
            f"{format_bytes(left)} stay on the host: they did not fit back ({why}). {hint}"
            if left
            else ""
        )
        if struck:
            _warn(text)
            raise KeyboardInterrupt
        return text

    def _found(self) -> list[_Piece]:
        """Return the pieces of memory on devices, the largest first, which fit best
        in that order.
        """
        torch: Any = sys.modules["torch"]
        base, reader = torch.Tensor, Reader(torch)
        references = getattr(torch._C, "_storage_Use_Count", None)
        if references is None:
            raise GpuMemError(f"{self._what} needs torch 2.1 or newer")

        def is_plain(tensor: Any) -> bool:
            is_strange = (
                base.is_nested.__get__(tensor) or base.is_conj(tensor) or base.is_neg(tensor)
            )
            return reader.memory(tensor).is_plain and not is_strange

        roots = list(_tensors_of(self._modules))
        roots += _gradients(roots)
        states = [list(optimizer.state.values()) for optimizer in self._optimizers]
        roots += [item for item, _ in ArraySearch().find(states) if is_instance(item, base)]
        odd = {
            id(item)
            for item in roots
            if not is_plain(item) and reader.memory(item).device not in ("cpu", "meta")
        }
        storages = {
            storage._cdata: storage
            for storage in map(base.untyped_storage, filter(is_plain, roots))
        }
        kinds = {storage.device.type for storage in storages.values()}
        if wrong := sorted(kinds - {"cpu", "meta", *DEVICES}):
            raise DeviceError(
                f"memory on {wrong[0]} cannot be moved this way, only memory on cuda or xpu"
            )
        wanted = {
            key for key, item in storages.items() if item.device.type in DEVICES and item.nbytes()
        }
        known = {
            id(tensor): tensor
            for tensor in (*roots, *(live_tensors(garbage_here()) if wanted else ()))
        }
        shown_by: dict[int, list[Any]] = defaultdict(list)
        for tensor in known.values():
            for key in reader.memory(tensor).storages.keys() & wanted:
                shown_by[key].append(tensor)
                odd |= {id(tensor)} if not is_plain(tensor) else set()
        if odd:
            odd_kinds = "sparse, quantized, nested, conjugated or wrapped"
            raise GpuMemError(
                f"{self._what} cannot move {len(odd)} of its tensors ({odd_kinds}): nothing was "
                f"moved"
            )
        if any(private_pools(kind) for kind in kinds & set(DEVICES) - {"cpu"}):
            raise GpuMemError("a captured CUDA graph may use these addresses: nothing was moved")
        # The bases of views, which refer to them in C++.
        bases = [
            item
            for item in (reader.read("_base", tensor) for tensor in known.values())
            if item is not None
        ]
        explained = Counter(map(id, [*_gradients(known.values()), *bases]))
        sample = torch.empty(1, device="cpu")
        # references of Python's object for a storage
        own = references(sample.untyped_storage()._cdata) - 1

        def is_shared(key: int) -> bool:
            """Return True if a graph or a DLPack capsule, not visible from Python,
            uses a storage.
            """
            if not storages[key].resizable() or references(key) - own != len(shown_by[key]):
                return True
            # C++ references, of which Python's object is one
            count = getattr(base, "_use_count", lambda tensor: 1)
            free = [item for item in shown_by[key] if not base.requires_grad.__get__(item)]
            return any(count(tensor) - 1 > explained[id(tensor)] for tensor in free)

        pieces = [
            _Piece(storages[key], storages[key].nbytes(), shown_by[key], is_shared(key))
            for key in wanted
        ]
        return sorted(pieces, key=lambda piece: -piece.size_bytes)

    def _strays(self, pieces: list[_Piece]) -> list[tuple[Any, Any]]:
        """Return tensors that were made or replaced on the host during the block, with their
        devices.

        Removes replaced tensors from ``pieces``.
        """
        base: Any = sys.modules["torch"].Tensor
        homes = {id(tensor): piece.storage.device for piece in pieces for tensor in piece.tensors}
        made = [(id(tensor), tensor) for piece in pieces for tensor in piece.tensors]
        made += [(owner, gradient) for owner, tensor in made for gradient in _gradients([tensor])]
        for optimizer in self._optimizers:
            for owner, state in optimizer.state.items():
                if type(state) is dict:  # torch keeps a "step" on the host by design
                    made += [(id(owner), value) for key, value in state.items() if key != "step"]
        for piece in pieces:
            host = piece.host._cdata
            piece.tensors = [
                item for item in piece.tensors if base.untyped_storage(item)._cdata == host
            ]
        pieces[:] = [piece for piece in pieces if piece.tensors]
        moved = {id(tensor) for piece in pieces for tensor in piece.tensors}
        strays = {
            id(item): (item, homes[owner])
            for owner, item in made
            if owner in homes
            and id(item) not in moved
            and is_instance(item, base)
            and item.device.type == "cpu"
        }
        return list(strays.values())


@dataclass
class _Piece:
    """One storage, and the tensors on it."""

    storage: Any
    size_bytes: int
    tensors: list[Any]
    is_shared: bool
    """True if code that is not visible from Python uses it: then it is never emptied."""
    host: Any = None
    """Its bytes on the host, as a storage."""

    def copy_out(self) -> None:
        torch: Any = sys.modules["torch"]
        self.host = torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        _as_bytes(self.host).copy_(_as_bytes(self.storage))

    def fill(self) -> None:
        """Copy the bytes back to the device (RuntimeError if they do not fit)."""
        if self.storage.nbytes() < self.size_bytes:
            self.storage.resize_(self.size_bytes)
        _as_bytes(self.storage).copy_(_as_bytes(self.host))

    def empty(self) -> None:
        if not self.is_shared:
            self.storage.resize_(0)

    def point_to(self, storage: Any) -> None:
        for tensor in self.tensors:
            _point(tensor, storage)

    def point_home(self) -> None:
        self.point_to(self.storage)
        if (
            not self.host.resizable()
        ):  # a NumPy array may view it, which keeps only the tensor alive
            for tensor in self.tensors:
                weakref.finalize(tensor, id, self.host).atexit = False


def _warn(note: str) -> None:
    if note:
        warnings.warn(f"ipygpumem: {note}", RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Open a block in which tensors are read and moved without user code and without autograd."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _tensors_of(modules: Iterable[Any]) -> Iterator[Any]:
    """Yield parameters, buffers, and tensors in plain attributes, directly or in a container."""
    base: Any = sys.modules["torch"].Tensor
    for model in modules:
        yield from model.parameters()
        yield from model.buffers()
        for module in model.modules():
            for value in list((instance_dict(module) or {}).values()):
                parts = (
                    list(value.values())
                    if type(value) is dict
                    else value
                    if is_exactly(value, list, tuple)
                    else ()
                )
                yield from (item for item in (value, *parts) if is_instance(item, base))


def _gradients(tensors: Iterable[Any]) -> list[Any]:
    base: Any = sys.modules["torch"].Tensor
    leaves = [
        item for item in tensors if base.requires_grad.__get__(item) and base.is_leaf.__get__(item)
    ]
    return [gradient for gradient in map(base.grad.__get__, leaves) if gradient is not None]


def _copy_out(pieces: Sequence[_Piece]) -> None:
    size, free = sum(piece.size_bytes for piece in pieces), available_bytes()
    if size > free:
        text = (
            f"{format_bytes(size)} would be moved to the host, which has {format_bytes(free)} free"
        )
        raise GpuMemError(f"{text}: nothing was moved")
    _synchronize(pieces)
    try:
        for piece in pieces:
            piece.copy_out()
    except (RuntimeError, MemoryError) as error:  # a limit of this process, or a broken device
        raise GpuMemError(f"nothing was moved: {_first_words(error)}") from None


def _synchronize(pieces: Iterable[_Piece]) -> None:
    torch: Any = sys.modules["torch"]
    for device in {piece.storage.device for piece in pieces if piece.storage.device.type != "cpu"}:
        getattr(torch, device.type).synchronize(device)


def _first_words(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def _as_bytes(storage: Any) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def _point(tensor: Any, storage: Any) -> None:
    """Point a tensor to another storage, with its own shape, strides and offset."""
    torch: Any = sys.modules["torch"]
    base = torch.Tensor
    place = base.storage_offset(tensor), base.size(tensor), base.stride(tensor)
    with torch.inference_mode(
        base.is_inference(tensor)
    ):  # otherwise its inference flag would change
        view = torch.empty(0, dtype=base.dtype.__get__(tensor), device=storage.device).set_(
            storage, *place
        )
        base.data.__set__(tensor, view)
