"""``ipygpumem.purge`` and ``offload``: move models and optimizers' states off devices and back,
storage by storage.

A storage keeps its identity: it is emptied while its bytes are on the host, and filled again. So
views, tied weights, an RNN's flattened weights and tensors saved by a graph continue to share
memory. Until then the tensors point to the bytes on the host, as after ``module.to()``.
"""

from __future__ import annotations

import contextlib
import itertools
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
from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.kinds.tensors import Reader
from ipygpumem.heap.live.heap import refuse_while_traced
from ipygpumem.heap.live.live_tensors import live_tensors
from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.introspect import instance_dict, is_instance, type_name
from ipygpumem.probes.host import available_bytes
from ipygpumem.reclaim.emptying import private_pools
from ipygpumem.reclaim.reclaim import bytes_reserved, free_now
from ipygpumem.records import Record
from ipygpumem.report.devices import device_label
from ipygpumem.report.layout import Report, Table
from ipygpumem.report.registration import shows
from ipygpumem.report.words import clean
from ipygpumem.units import format_bytes

DEVICES = ("cuda", "xpu")
"""Devices on which torch can empty a storage and fill it again."""
_STORES_ADDRESSES = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Types of modules that cannot be moved, because they store the addresses of their parameters."""


@dataclass(frozen=True)
class PurgeRecord(Record):
    """Result of a purge: the memory moved off a device and back, and the memory freed."""

    moved_bytes: int
    """Bytes of the tensors that were moved."""
    is_on_host: bool
    """True if it no longer fitted, and so has stayed on the host."""
    before: dict[str, int]
    """Bytes reserved by torch's allocator, per device."""
    after: dict[str, int]
    """The same after the purge."""
    notes: tuple[str, ...] = ()
    """Messages for the user, such as on tensors that have stayed on the host."""


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
    given = [model] if optimizer is None else [model, optimizer]
    offload = Offload(given, "purge")
    meter = current_traces().meter
    before = bytes_reserved(meter.now())
    note_on_shared = offload.move_to_host()
    note_on_staying = ""
    try:
        free_now(meter, garbage_here())
    finally:
        note_on_staying = offload.move_back()
        _warn_if_any(note_on_staying)
    notes = [note_on_shared, note_on_staying]
    if not offload.size_bytes:
        notes = [note_on_shared, "no parameter, buffer or gradient of it is on a device"]
    after = bytes_reserved(meter.now())
    return PurgeRecord(
        offload.size_bytes,
        is_on_host=bool(note_on_staying),
        before=before,
        after=after,
        notes=tuple(note for note in notes if note),
    )


@shows(PurgeRecord)
def purge_report(record: PurgeRecord) -> Report:
    """Return the report of a purge: the decrease of each allocator's reserved memory."""
    rows = []
    for device, size in record.before.items():
        if device in record.after:
            row = {
                "device": device_label(device),
                "reserved before": format_bytes(size),
                "after": format_bytes(record.after[device]),
            }
            rows.append(row)
    return Report(
        "purge",
        f"purge: {_moved_text(record)}",
        [*map(clean, record.notes)],
        [Table.of(rows, {"reserved before", "after"})],
        is_trouble=record.is_on_host,
        records=[record],
    )


def _moved_text(record: PurgeRecord) -> str:
    """Return the bytes moved, and if they are back: ``4 GiB moved off and back``."""
    moved = "nothing was moved"
    if record.moved_bytes:
        moved = f"{format_bytes(record.moved_bytes)} moved off"
    if record.is_on_host:
        return f"{moved}, and still on the host"
    if record.moved_bytes:
        return f"{moved} and back"
    return moved


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

    Args:
        given: the modules and optimizers, in any order.
        function_name: the function that the user has called, for errors.

    Raises:
        GpuMemError: one of them cannot be moved.
    """

    def __init__(self, given: Sequence[Any], function_name: str = "offload") -> None:
        refuse_while_traced(function_name)
        if sys.modules.get("torch") is None:
            raise GpuMemError(f"{function_name} moves torch modules, but torch is not loaded")
        self._modules = list[Any]()
        self._optimizers = list[Any]()
        self._set_modules_and_optimizers(given)
        number = len(self._modules) + len(self._optimizers)
        if number < len(given) or not self._modules:
            raise GpuMemError(_refusal(given, function_name))
        for model in self._modules:
            for module in model.modules():
                kind = type_name(module)
                if kind in _STORES_ADDRESSES:
                    problem = f"{function_name} cannot move the modules of {kind}"
                    raise GpuMemError(f"{problem}: it stores their addresses")
        self._function_name = function_name
        self._pieces: list[_MovedPiece] | None = None
        """The memory that is on the host; None outside the block."""
        self._references_after_block: list[weakref.ref[Any]] = []
        """Weak references to the given modules and optimizers after the block, when ``_modules``
        and ``_optimizers`` are empty: the object keeps them alive only while they are on the host.
        """
        self.size_bytes = 0
        """Bytes moved."""

    def _set_modules_and_optimizers(self, given: Sequence[Any]) -> None:
        """Set the modules and optimizers to move, from both in any order."""
        self._modules = [item for item in given if _is_module(item)]
        self._optimizers = [item for item in given if _is_optimizer(item)]

    def __enter__(self) -> Offload:
        """Move everything to the host; after an error nothing has been moved."""
        _warn_if_any(self.move_to_host())
        return self

    def __exit__(self, *error: object) -> None:
        """Move everything back to its device. If that has too little memory, leave the rest on the
        host and warn.
        """
        _warn_if_any(self.move_back())

    def move_to_host(self) -> str:
        """Move everything to the host, and return a note on memory that stays on the device as
        well; empty if there is none.

        Raises:
            GpuMemError: something cannot be moved; then nothing has been moved.
        """
        refuse_while_traced(self._function_name)
        if self._pieces is not None:
            raise GpuMemError(
                "this offload is open already: call ipygpumem.offload(model) for another"
            )
        if self._references_after_block:  # a second block with the same object
            self._set_modules_and_optimizers(self._modules_and_optimizers_of_earlier_block())
            self._references_after_block = []
        with interrupts.deferred() as struck, _without_users_code():
            pieces = self._pieces_on_devices()
            self.size_bytes = sum(piece.size_bytes for piece in pieces)
            _copy_out(pieces)
            if not struck:
                self._pieces = pieces
                try:
                    _point_to_host(pieces)
                    for piece in pieces:
                        piece.empty()
                except BaseException:  # such as an exception from the user's handler of a signal
                    _warn_if_any(self.move_back())
                    raise
        if struck:  # also where the copies were made only: then this moves nothing back
            _warn_if_any(self.move_back())
            raise KeyboardInterrupt
        shared_bytes = sum(piece.size_bytes for piece in pieces if piece.is_shared)
        if not shared_bytes:
            return ""
        why = "a graph or another library uses that memory"
        return f"{format_bytes(shared_bytes)} stay on the device as well: {why}"

    def _modules_and_optimizers_of_earlier_block(self) -> list[Any]:
        """Return the modules and optimizers of an earlier block.

        Raises:
            GpuMemError: one of them is not alive any longer.
        """
        given = [reference() for reference in self._references_after_block]
        if any(item is None for item in given):
            raise GpuMemError(
                "the model of this offload was deleted: call ipygpumem.offload(model) for another"
            )
        return given

    def move_back(self) -> str:
        """Move everything back, and return why some of it is still on the host; empty if all is
        back.

        Tensors that the block has made on the host, such as new gradients, are moved, too.
        """
        pieces = self._pieces or []
        self._pieces = None
        note = ""
        with interrupts.deferred() as struck, _without_users_code():
            candidates = self._tensors_by_owner(pieces)
            homes = _homes_of(pieces)
            pieces = _without_replaced(pieces)
            made_on_host = _tensors_made_on_host(candidates, homes, pieces)
            self._references_after_block = [
                weakref.ref(item) for item in (*self._modules, *self._optimizers)
            ]
            self._modules = []
            self._optimizers = []
            try:
                for piece in pieces:
                    piece.fill()
                copies = [(tensor, tensor.data.to(home)) for tensor, home in made_on_host]
                _synchronize(pieces)
            except RuntimeError as error:  # out of memory, most likely
                note = _note_on_staying(pieces, error)
                for piece in pieces:
                    piece.empty()
            else:
                for piece in pieces:
                    piece.point_home()
                for tensor, copy in copies:
                    tensor.data = copy
        if struck:
            _warn_if_any(note)
            raise KeyboardInterrupt
        return note

    def _pieces_on_devices(self) -> list[_MovedPiece]:
        """Return the pieces of memory on devices, the largest first, which fit best
        in that order.

        Raises:
            GpuMemError: some of it cannot be moved.
        """
        torch: Any = sys.modules["torch"]
        if not hasattr(torch._C, "_storage_Use_Count"):
            raise GpuMemError(f"{self._function_name} needs torch 2.1 or newer")
        reader = Reader(torch)
        own_tensors = self._own_tensors()
        storages = _storages_on_devices(own_tensors, reader)
        tensors = by_identity(own_tensors)
        if storages:  # other tensors may share their memory
            tensors |= by_identity(live_tensors(garbage_here()))
        tensors_by_storage = _tensors_by_storage(tensors.values(), storages, reader)
        self._refuse_unmovable(own_tensors, tensors_by_storage, reader)
        if any(map(private_pools, {storage.device.type for storage in storages.values()})):
            raise GpuMemError("a captured CUDA graph may use these addresses: nothing was moved")
        hidden_users = _HiddenUsers(list(tensors.values()), reader)
        pieces = []
        for key, storage in storages.items():
            sharers = tensors_by_storage[key]
            is_shared = hidden_users.may_use(storage, sharers)
            pieces.append(_MovedPiece(storage, storage.nbytes(), sharers, is_shared))
        return sorted(pieces, key=lambda piece: -piece.size_bytes)

    def _refuse_unmovable(
        self, own_tensors: list[Any], tensors_by_storage: dict[int, list[Any]], reader: Reader
    ) -> None:
        """Raise GpuMemError if a tensor to move, or one that shares its storage, is of a kind that
        cannot be pointed to other memory, such as a sparse one.
        """
        on_accelerators = [
            tensor for tensor in own_tensors if reader.memory(tensor).device not in ("cpu", "meta")
        ]
        unmovable_ids = set[int]()
        for tensor in itertools.chain(on_accelerators, *tensors_by_storage.values()):
            if not _is_plain(tensor, reader):
                unmovable_ids.add(id(tensor))
        if unmovable_ids:
            raise GpuMemError(
                f"{self._function_name} cannot move {len(unmovable_ids)} of its tensors (sparse, "
                "quantized, nested, conjugated or wrapped): nothing was moved"
            )

    def _own_tensors(self) -> list[Any]:
        """Return the tensors of the modules and of the optimizers' states, and the gradients."""
        base: Any = sys.modules["torch"].Tensor
        tensors = list(_tensors_of(self._modules))
        tensors += _gradients(tensors)
        states = [list(optimizer.state.values()) for optimizer in self._optimizers]
        for item, _ in ArraySearch().find(states):
            if is_instance(item, base):
                tensors.append(item)
        return tensors

    def _tensors_by_owner(self, pieces: Iterable[_MovedPiece]) -> list[tuple[int, Any]]:
        """Return the tensors that may have to move back, each after the id of its owner.

        The owner is a tensor of ``pieces``: the tensor itself, or the parameter to which a gradient
        or a part of an optimizer's state belongs. A tensor moves to its owner's device.
        """
        pairs: list[tuple[int, Any]] = []
        for piece in pieces:
            for tensor in piece.tensors:
                pairs.append((id(tensor), tensor))
                pairs += [(id(tensor), gradient) for gradient in _gradients([tensor])]
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if type(state) is dict:  # torch keeps a "step" on the host by design
                    values = [value for key, value in state.items() if key != "step"]
                    pairs += [(id(parameter), value) for value in values]
        return pairs


class _HiddenUsers:
    """Finds storages that are used by code that is not visible from Python, such as a graph, a
    DLPack capsule or another library: torch counts more references than Python has.

    Args:
        tensors: all tensors on the storages.
        reader: reads tensors.
    """

    def __init__(self, tensors: Sequence[Any], reader: Reader) -> None:
        torch: Any = sys.modules["torch"]
        self._base = torch.Tensor
        self._storage_count = torch._C._storage_Use_Count
        sample = torch.empty(1, device="cpu")
        self._uses_by_storage_object = self._storage_count(sample.untyped_storage()._cdata) - 1
        """Number of references that Python's object for a storage has to it."""
        self._known_uses = Counter(map(id, _gradients(tensors)))
        """Number of references to a tensor from other tensors, by its id: as the gradient of a
        parameter, and as the base of views.
        """
        for tensor in tensors:
            viewed = reader.read("_base", tensor)
            if viewed is not None:
                self._known_uses[id(viewed)] += 1

    def may_use(self, storage: Any, sharers: Sequence[Any]) -> bool:
        """Return True if hidden code may use a storage or one of its tensors.

        Args:
            storage: the storage.
            sharers: all of its tensors that Python sees.
        """
        uses_of_storage = self._storage_count(storage._cdata) - self._uses_by_storage_object
        if not storage.resizable() or uses_of_storage != len(sharers):
            return True
        if not hasattr(self._base, "_use_count"):  # an older torch
            return False
        for tensor in sharers:
            if self._base.requires_grad.__get__(tensor):
                continue  # its graph may refer to it
            uses_in_cpp = self._base._use_count(tensor) - 1  # Python's object is one of them
            if uses_in_cpp > self._known_uses[id(tensor)]:
                return True
        return False


@dataclass
class _MovedPiece:
    """One storage, and the tensors on it."""

    storage: Any
    size_bytes: int
    tensors: list[Any]
    """The tensors that use it."""
    is_shared: bool
    """True if code that is not visible from Python uses it: then it is never emptied."""
    host: Any = None
    """Its bytes on the host, as a storage."""

    def copy_out(self) -> None:
        """Copy the bytes to the host."""
        torch: Any = sys.modules["torch"]
        self.host = torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        _as_bytes(self.host).copy_(_as_bytes(self.storage))

    def fill(self) -> None:
        """Copy the bytes back to the device.

        Raises:
            RuntimeError: they do not fit.
        """
        if self.storage.nbytes() < self.size_bytes:
            self.storage.resize_(self.size_bytes)
        _as_bytes(self.storage).copy_(_as_bytes(self.host))

    def empty(self) -> None:
        """Free the memory on the device, unless code outside the moved objects uses the storage."""
        if not self.is_shared:
            self.storage.resize_(0)

    def point_to(self, storage: Any) -> None:
        """Point all tensors to a storage."""
        for tensor in self.tensors:
            _point_tensor(tensor, storage)

    def point_home(self) -> None:
        """Point the tensors to the device again.

        The bytes on the host live as long as a NumPy array may view them.
        """
        self.point_to(self.storage)
        if not self.host.resizable():
            # a NumPy array may view the bytes, and it keeps only the tensor alive
            for tensor in self.tensors:
                weakref.finalize(tensor, id, self.host).atexit = False

    def drop_replaced(self) -> None:
        """Drop the tensors that got another storage while the bytes were on the host, as by
        ``x.data = y``.
        """
        base: Any = sys.modules["torch"].Tensor
        key = self.host._cdata
        self.tensors = [item for item in self.tensors if base.untyped_storage(item)._cdata == key]


def _homes_of(pieces: Iterable[_MovedPiece]) -> dict[int, Any]:
    """Return the device to which each tensor of ``pieces`` moves back, by the tensor's id."""
    homes: dict[int, Any] = {}
    for piece in pieces:
        homes |= {id(tensor): piece.storage.device for tensor in piece.tensors}
    return homes


def _without_replaced(pieces: Sequence[_MovedPiece]) -> list[_MovedPiece]:
    """Return the pieces with the tensors that still use their bytes on the host, without pieces
    that no tensor uses.
    """
    for piece in pieces:
        piece.drop_replaced()
    return [piece for piece in pieces if piece.tensors]


def _tensors_made_on_host(
    candidates: Iterable[tuple[int, Any]], homes: dict[int, Any], pieces: Iterable[_MovedPiece]
) -> list[tuple[Any, Any]]:
    """Return the tensors that a block has made on the host, or given other memory there, each with
    the device to which it is to move.

    Args:
        candidates: values, each after the id of its owner (see ``_tensors_by_owner``).
        homes: the devices of the tensors that were moved, by id.
        pieces: the pieces that are moved back.
    """
    base: Any = sys.modules["torch"].Tensor
    moved_back = set[int]()
    for piece in pieces:
        moved_back.update(map(id, piece.tensors))
    made_on_host: dict[int, tuple[Any, Any]] = {}
    for owner_id, item in candidates:
        if owner_id not in homes or id(item) in moved_back or not is_instance(item, base):
            continue
        if item.device.type == "cpu":
            made_on_host[id(item)] = (item, homes[owner_id])
    return list(made_on_host.values())


def _is_module(item: object) -> bool:
    """Return True for a module of torch."""
    return is_of_library(item, "torch.nn", "Module")


def _is_optimizer(item: object) -> bool:
    """Return True for an optimizer of torch."""
    return is_of_library(item, "torch.optim", "Optimizer")


def _refusal(given: Sequence[Any], function_name: str) -> str:
    """Return the text of the error about arguments of the wrong type, or without a module."""
    without_modules = [item for item in given if not _is_module(item)]
    wrong = [item for item in without_modules if not _is_optimizer(item)]
    but = f", and not {type_name(wrong[0])}" if wrong else ""
    example = f"{function_name}(learner.model, learner.optimizer)"
    return f"{function_name} takes a torch module and its optimizer{but}: {example}"


def _tensors_by_storage(
    tensors: Iterable[Any], storages: dict[int, Any], reader: Reader
) -> dict[int, list[Any]]:
    """Return the tensors on each of ``storages``, by the storage's address."""
    tensors_by_storage: dict[int, list[Any]] = defaultdict(list)
    for tensor in tensors:
        for key in reader.memory(tensor).storages.keys() & storages.keys():
            tensors_by_storage[key].append(tensor)
    return tensors_by_storage


def _storages_on_devices(tensors: Sequence[Any], reader: Reader) -> dict[int, Any]:
    """Return the storages of tensors that take memory of a device that is not the host, by their
    address.

    Raises:
        DeviceError: some are on a device whose storages cannot be emptied.
    """
    storages = _storages_of(tensors, reader)
    _refuse_other_devices({storage.device.type for storage in storages.values()})
    on_devices = dict[int, Any]()
    for key, storage in storages.items():
        if storage.device.type in DEVICES and storage.nbytes():
            on_devices[key] = storage
    return on_devices


def _refuse_other_devices(kinds: set[str]) -> None:
    """Raise DeviceError if there is memory on devices whose storages cannot be emptied."""
    wrong = sorted(kinds - {"cpu", "meta", *DEVICES})
    if wrong:
        raise DeviceError(
            f"memory on {wrong[0]} cannot be moved this way, only memory on cuda or xpu"
        )


def _storages_of(tensors: Iterable[Any], reader: Reader) -> dict[int, Any]:
    """Return the storages of plain tensors, by their address."""
    base: Any = sys.modules["torch"].Tensor
    storages: dict[int, Any] = {}
    for tensor in tensors:
        if _is_plain(tensor, reader):
            storage = base.untyped_storage(tensor)
            storages[storage._cdata] = storage
    return storages


def _is_plain(tensor: Any, reader: Reader) -> bool:
    """Return True if a tensor is nothing but a view of its storage, so that it can be pointed to
    other memory.
    """
    base: Any = sys.modules["torch"].Tensor
    if base.is_nested.__get__(tensor) or base.is_conj(tensor) or base.is_neg(tensor):
        return False
    return reader.memory(tensor).is_plain


def _warn_if_any(note: str) -> None:
    """Warn the user, unless the note is empty."""
    if note:
        warnings.warn(f"ipygpumem: {note}", RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def _without_users_code() -> Iterator[None]:
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
                for item in (value, *_items_of_container(value)):
                    if is_instance(item, base):
                        yield item


def _items_of_container(value: object) -> Iterable[object]:
    """Return the items of a dict, list or tuple; nothing for any other value."""
    if type(value) is dict:
        return list(value.values())
    if type(value) is list or type(value) is tuple:
        return value
    return ()


def _gradients(tensors: Iterable[Any]) -> list[Any]:
    """Return the gradients of tensors that have one."""
    base: Any = sys.modules["torch"].Tensor
    gradients = []
    for tensor in tensors:
        if base.requires_grad.__get__(tensor) and base.is_leaf.__get__(tensor):
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                gradients.append(gradient)
    return gradients


def _copy_out(pieces: Sequence[_MovedPiece]) -> None:
    """Copy all pieces to the host.

    Raises:
        GpuMemError: it has too little memory.
    """
    size = sum(piece.size_bytes for piece in pieces)
    free = available_bytes()
    if size > free:
        moved = f"{format_bytes(size)} would be moved to the host"
        raise GpuMemError(f"{moved}, which has {format_bytes(free)} free: nothing was moved")
    _synchronize(pieces)
    try:
        for piece in pieces:
            piece.copy_out()
    except (RuntimeError, MemoryError) as error:  # a limit of this process, or a broken device
        raise GpuMemError(f"nothing was moved: {_first_words(error)}") from None


def _point_to_host(pieces: Sequence[_MovedPiece]) -> None:
    """Point the tensors to the bytes on the host; after an error they are as before."""
    try:
        for piece in pieces:
            piece.point_to(piece.host)
    except Exception:
        for piece in pieces:
            piece.point_to(piece.storage)
        raise


def _note_on_staying(pieces: Iterable[_MovedPiece], error: RuntimeError) -> str:
    """Return a note about bytes that did not fit back; empty if there are none."""
    size = sum(piece.size_bytes for piece in pieces)
    if not size:
        return ""
    return (
        f"{format_bytes(size)} stay on the host: they did not fit back ({_first_words(error)}). "
        "To move them, call model.to(device)"
    )


def _synchronize(pieces: Iterable[_MovedPiece]) -> None:
    """Wait until the pieces' devices have finished all copies."""
    torch: Any = sys.modules["torch"]
    for device in {piece.storage.device for piece in pieces}:
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)


def _first_words(error: Exception) -> str:
    """Return the first sentence of an error, or its type."""
    first_line, _, _ = str(error).partition("\n")
    sentence, _, _ = first_line.partition(". ")
    return sentence or type(error).__name__


def _as_bytes(storage: Any) -> Any:
    """Return a tensor of bytes that views a storage."""
    torch: Any = sys.modules["torch"]
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))


def _point_tensor(tensor: Any, storage: Any) -> None:
    """Point a tensor to another storage, with its own shape, strides and offset."""
    torch: Any = sys.modules["torch"]
    base = torch.Tensor
    dtype = base.dtype.__get__(tensor)
    offset = base.storage_offset(tensor)
    size = base.size(tensor)
    strides = base.stride(tensor)
    with torch.inference_mode(base.is_inference(tensor)):  # else its inference flag would change
        view = torch.empty(0, dtype=dtype, device=storage.device)
        base.data.__set__(tensor, view.set_(storage, offset, size, strides))
