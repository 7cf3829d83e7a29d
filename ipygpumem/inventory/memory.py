"""The memory of torch tensors, many at a time: their storages, and what is inside those that have none.

A loop in C over a million tensors takes 0.1 s for each question, one in Python ten times that. So the questions are
asked one by one of all strided tensors; sparse, quantized and wrapper tensors are looked at singly.

torch makes a small object in Python for each storage it is asked for, and keeps it as long as the storage lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_not
from typing import Any

from ipygpumem.arrays import answers_itself, samples, slots
from ipygpumem.kinds import instance_dict, is_kind, text_of

_DEEPEST = 4
_QUANTIZED = ("qint", "quint")


@dataclass(frozen=True)
class Memory:
    """The storages of one tensor: its own, or those inside it."""

    storages: dict[int, int]
    """Bytes by identity; empty if it has no memory, or none that can be read."""
    device: str = ""
    """Of the first storage."""
    shared: bool = False
    note: str = ""


class Reader:
    """Reads tensors without running a subclass's code; use it inside ``DisableTorchFunctionSubclass``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.base: Any = torch.Tensor
        self._storage_type: Any = torch.UntypedStorage
        self._answering: dict[int, bool] = {}

    def column(self, name: str, tensors: Sequence[object]) -> list[Any]:
        """Return one property of each tensor; None where it cannot be read."""
        get = getattr(self.base, name).__get__
        return _each(get, tensors)

    def odd(self, tensors: Sequence[object]) -> list[bool]:
        """Return which of ``tensors`` are no plain strided ones, and must be looked at singly."""
        kinds = list(map(id, map(type, tensors)))
        foreign_kinds = {kind for kind, tensor in samples(kinds, tensors).items() if self._is_foreign(tensor)}
        foreign = list(map(foreign_kinds.__contains__, kinds))
        own = (
            [tensor for tensor, other in zip(tensors, foreign, strict=True) if not other] if foreign_kinds else tensors
        )
        odd = list(map(is_not, self.column("layout", own), repeat(self._torch.strided)))
        dtypes = self.column("dtype", own)
        quantized = {dtype for dtype in set(dtypes) if self.text(dtype).startswith(_QUANTIZED)}
        if quantized:
            odd = [is_odd or dtype in quantized for is_odd, dtype in zip(odd, dtypes, strict=True)]
        if not foreign_kinds:
            return odd
        rest = iter(odd)
        return [other or next(rest) for other in foreign]

    def _is_foreign(self, tensor: object) -> bool:
        kind = id(type(tensor))
        if kind not in self._answering:
            self._answering[kind] = answers_itself(self._torch, type(tensor))
        return self._answering[kind]

    def text(self, value: object) -> str:
        """Return the name of a dtype or device."""
        return "" if value is None else str(value).removeprefix("torch.")

    def storages(self, tensors: Sequence[object]) -> list[Any]:
        """Return the storage of each plain tensor; None where it cannot be read."""
        return _each(self.base.untyped_storage, tensors)

    def ask(self, question: str, storages: Sequence[Any]) -> list[Any]:
        """Return a property of each storage, or what a method gives; None where it cannot be read."""
        found = getattr(self._storage_type, question)
        return _each(found if callable(found) else found.__get__, storages)

    def shapes(self, tensors: Sequence[object]) -> list[Any]:
        """Return the shape of each plain tensor; None for one that has no single shape."""
        shapes = self.column("shape", tensors)
        plain = {shape: None if shape is None else tuple(shape) for shape in set(shapes)}  # few are different
        return list(map(plain.__getitem__, shapes))

    def shared(self, storages: Sequence[Any], devices: Sequence[str]) -> list[bool]:
        """Return whether each storage is in memory that other processes may share; it is asked of the host's only."""
        if all(device == "cpu" for device in set(devices)):
            return self.ask("is_shared", storages)
        return [device == "cpu" and storage.is_shared() for device, storage in zip(devices, storages, strict=True)]

    # -- one at a time ----------------------------------------------------------------------------------------

    def memory(self, tensor: object, depth: int = 0) -> Memory:
        """Return the storages of one tensor, whatever it is."""
        try:
            inner = list(self.inside(tensor)) if depth < _DEEPEST else []
            own = self._own(tensor)
        except Exception as error:  # a broken device, or a layout that nobody knows
            return Memory({}, note=_in_words(error))
        found = [memory for memory in (own, *(self.memory(part, depth + 1) for part in inner)) if memory is not None]
        storages: dict[int, int] = {}
        for memory in found:
            storages.update(memory.storages)
        device = next((memory.device for memory in found if memory.device), "")
        note = next((memory.note for memory in found if memory.note), "")
        return Memory(storages, device, any(memory.shared for memory in found), note)

    def _own(self, tensor: object) -> Memory | None:
        """Return the storage of the tensor itself; None if it is a wrapper or in another layout."""
        foreign = self._is_foreign(tensor)
        if not foreign and self.base.layout.__get__(tensor) is not self._torch.strided:
            return self._opaque(tensor)
        storage = self.base.untyped_storage(tensor)
        device = str(storage.device)
        if device == "meta":
            return Memory({}, "meta")
        if foreign and not _has_memory(storage):
            return None
        return Memory({int(storage._cdata): int(storage.nbytes())}, device, device == "cpu" and storage.is_shared())

    def _opaque(self, tensor: object) -> Memory | None:
        layout = str(self.base.layout.__get__(tensor)).removeprefix("torch.")
        device = str(self.base.device.__get__(tensor))
        if layout.startswith("sparse"):
            return None if device != "meta" else Memory({}, "meta")
        size = self.base.numel(tensor) * self.base.element_size(tensor)
        return Memory({id(tensor): int(size)}, device, note=f"elements × their size: layout {layout.strip('_')}")

    def inside(self, tensor: Any) -> Iterator[object]:
        """Yield the tensors of which a sparse, quantized or wrapper tensor is made."""
        if self._is_foreign(tensor):
            yield from self._attributes(tensor)
            return
        layout = str(self.base.layout.__get__(tensor)).removeprefix("torch.")
        if layout == "sparse_coo":
            yield from (self.base._indices(tensor), self.base._values(tensor))
        elif layout in ("sparse_csr", "sparse_bsr"):
            yield from (self.base.crow_indices(tensor), self.base.col_indices(tensor), self.base.values(tensor))
        elif layout in ("sparse_csc", "sparse_bsc"):
            yield from (self.base.ccol_indices(tensor), self.base.row_indices(tensor), self.base.values(tensor))
        elif self._is_quantized(tensor) and "per_channel" in str(self.base.qscheme(tensor)):
            yield from (self.base.q_per_channel_scales(tensor), self.base.q_per_channel_zero_points(tensor))

    def _is_quantized(self, tensor: object) -> bool:
        return self.text(self.base.dtype.__get__(tensor)).startswith(_QUANTIZED)

    def _attributes(self, tensor: object) -> Iterator[object]:
        """Yield the tensors among a wrapper's attributes, also those in a plain container of its own."""
        for value in [*(instance_dict(tensor) or {}).values(), *slots(tensor).values()]:
            if type(value) is dict:
                parts: list[object] = list(value.values())
            else:
                parts = list(value) if type(value) is list or type(value) is tuple else [value]
            yield from (part for part in parts if is_kind(part, self.base) and part is not tensor)

    def shape(self, tensor: object) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it has no single one, or if only the user's own code could tell."""
        if self._is_foreign(tensor) and not _is_torchs(type(tensor)):
            return None
        try:
            sizes = tuple(self.base.shape.__get__(tensor))
        except Exception:  # nested tensors have no single shape
            return None
        return sizes if all(type(size) is int for size in sizes) else None


def _has_memory(storage: Any) -> bool:
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # a wrapper's, from torch 2.1 on
        return False


def _each(get: Callable[[Any], Any], items: Sequence[object]) -> list[Any]:
    try:
        return list(map(get, items))
    except Exception:  # one of them fails: ask each
        return [_or_none(get, item) for item in items]


def _or_none(get: Callable[[Any], Any], item: object) -> Any:
    try:
        return get(item)
    except Exception:  # left out, and the record says so
        return None


def _is_torchs(kind: type) -> bool:
    module = text_of(type.__dict__["__dict__"].__get__(kind).get("__module__"))
    return module == "torch" or module.startswith("torch.")


def _in_words(error: Exception) -> str:
    text = error.args[0] if len(error.args) == 1 else ""
    lines = text_of(text).splitlines()
    return f"could not be read: {lines[0] if lines else type(error).__name__}"
