"""The memory of torch tensors: their storages, and what is inside those that have none.

torch makes a small object in Python for each storage it is asked for, and keeps it as long as the storage lives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ipygpumem.introspect import class_dict, instance_dict, is_instance, text_of
from ipygpumem.objects.arrays import SPARSE_PARTS, answers_itself, slots

_DEEPEST = 4
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_INTEGERS = {int}


class Memory(NamedTuple):
    """The storages of one tensor: its own, or those inside it."""

    storages: dict[int, int]
    """Bytes by identity; empty if it has no memory, or none that can be read."""
    device: str = ""
    """Of the first storage."""
    shared: bool = False
    """Whether other processes may have it, too; on the host."""
    note: str = ""
    is_plain: bool = False
    """Whether it is the tensor's own storage alone."""


class Reader:
    """Reads tensors without running a subclass's code; use it inside ``DisableTorchFunction``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.base: Any = torch.Tensor
        self._storage_type: Any = torch.UntypedStorage
        self._quantized = {getattr(torch, name) for name in _QUANTIZED if hasattr(torch, name)}
        # Kept at hand: they are asked for each of very many tensors.
        self._strided = torch.strided
        self._layout, self._dtype = self.base.layout.__get__, self.base.dtype.__get__
        self._storage, self._is_shared = self.base.untyped_storage, self._storage_type.is_shared
        self._getters: dict[str, Callable[[Any], Any]] = {}
        self._foreign: dict[int, bool] = {}
        """By a type's identity, whether its tensors answer for themselves."""
        self._texts: dict[Any, str] = {None: ""}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Each once: there are few different ones."""

    def read(self, name: str, tensor: object) -> Any:
        """Return a property of a tensor; None if it cannot be read."""
        get = self._getters.get(name)
        if get is None:
            get = self._getters[name] = getattr(self.base, name).__get__
        try:
            return get(tensor)
        except Exception:  # a sparse or broken tensor
            return None

    def text(self, value: Any) -> str:
        """Return the name of a dtype or device."""
        text = self._texts.get(value)
        if text is None:
            text = self._texts[value] = str(value).removeprefix("torch.")
        return text

    def keys(self, tensor: object) -> tuple[int, ...]:
        """Return what the memory of a tensor is known by: its storages, or the object if it has none."""
        return tuple(self.memory(tensor).storages) or (id(tensor),)

    def _is_foreign(self, tensor: object) -> bool:
        kind = id(type(tensor))
        foreign = self._foreign.get(kind)
        if foreign is None:
            foreign = self._foreign[kind] = answers_itself(self._torch, type(tensor))
        return foreign

    def address_of_others(self, tensor: object) -> int | None:
        """Return where a plain tensor's storage begins if other code than torch has allocated it on the host."""
        storage = self._storage(tensor)
        is_others = storage.device.type == "cpu" and not self._storage_type.resizable(storage)
        return int(storage.data_ptr()) if is_others else None

    def memory(self, tensor: object, depth: int = 0) -> Memory:
        """Return the storages of one tensor, whatever it is."""
        try:
            foreign = self._is_foreign(tensor)
            if not foreign and self._layout(tensor) is self._strided and self._dtype(tensor) not in self._quantized:
                return self._in_storage(self._storage(tensor), foreign=False)
            inner = list(self.inside(tensor)) if depth < _DEEPEST else []
            own = self._own(tensor, foreign=foreign)
        except Exception as error:  # a broken device, or a layout that nobody knows
            return Memory({}, note=_in_words(error))
        found = [memory for memory in (own, *(self.memory(part, depth + 1) for part in inner)) if memory is not None]
        storages: dict[int, int] = {}
        for memory in found:
            storages.update(memory.storages)
        device = next((memory.device for memory in found if memory.device), "")
        note = next((memory.note for memory in found if memory.note), "")
        return Memory(storages, device, any(memory.shared for memory in found), note)

    def _own(self, tensor: object, *, foreign: bool) -> Memory | None:
        """Return the storage of the tensor itself; None if it is a wrapper or in another layout."""
        if not foreign and self._layout(tensor) is not self._strided:
            return self._opaque(tensor)
        storage = self._storage(tensor)
        is_wrapper = foreign and self.text(storage.device) != "meta" and not _has_memory(storage)
        return None if is_wrapper else self._in_storage(storage, foreign=foreign)

    def _in_storage(self, storage: Any, *, foreign: bool) -> Memory:
        device = self.text(storage.device)
        if device == "meta":
            return Memory({} if foreign else {storage._cdata: 0}, "meta")
        # A size that torch.compile has not decided cannot be looked up; to compare it would decide it.
        size = storage.nbytes()
        if type(size) is not int:
            return Memory({}, device, note="a size that is not known yet")
        is_shared = device == "cpu" and self._is_shared(storage)  # each of an accelerator is said to be
        return Memory({storage._cdata: size}, device, is_shared, "", not foreign)

    def _opaque(self, tensor: object) -> Memory | None:
        layout = str(self._layout(tensor)).removeprefix("torch.")
        device = str(self.base.device.__get__(tensor))
        if layout.startswith("sparse"):
            return None if device != "meta" else Memory({}, "meta")
        size = self.base.numel(tensor) * self.base.element_size(tensor)
        return Memory({id(tensor): int(size)}, device, note=f"elements × their size: layout {layout.strip('_')}")

    def parts(self, tensor: object) -> list[object]:
        """Return the tensors of which a tensor is made; none if that cannot be read."""
        try:
            return list(self.inside(tensor))
        except Exception:  # a layout that nobody knows
            return []

    def inside(self, tensor: Any) -> Iterator[object]:
        """Yield the tensors of which a sparse, quantized or wrapper tensor is made."""
        if self._is_foreign(tensor):
            yield from self._attributes(tensor)
            return
        layout = str(self._layout(tensor)).removeprefix("torch.")
        if layout in SPARSE_PARTS:
            yield from (getattr(self.base, name)(tensor) for name in SPARSE_PARTS[layout])
        elif self._dtype(tensor) in self._quantized and "per_channel" in str(self.base.qscheme(tensor)):
            yield from (self.base.q_per_channel_scales(tensor), self.base.q_per_channel_zero_points(tensor))

    def _attributes(self, tensor: object) -> Iterator[object]:
        """Yield the tensors among a wrapper's attributes, also those in a plain container of its own."""
        for value in [*(instance_dict(tensor) or {}).values(), *slots(tensor).values()]:
            if type(value) is dict:
                parts: list[object] = list(value.values())
            else:
                parts = list(value) if type(value) is list or type(value) is tuple else [value]
            yield from (part for part in parts if is_instance(part, self.base) and part is not tensor)

    def device(self, tensor: object) -> str:
        """Return a tensor's device; an empty text if its class may have code of its own that would be asked."""
        return "" if self._is_foreign(tensor) else self.text(self.read("device", tensor))

    def shape(self, tensor: object) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it has no single one, or if only the user's own code could tell."""
        if self._is_foreign(tensor) and not _is_torchs(type(tensor)):
            return None
        try:
            sizes = tuple(self.base.shape.__get__(tensor))
        except Exception:  # nested tensors have no single shape
            return None
        if not _INTEGERS.issuperset(map(type, sizes)):
            return None
        return self._shapes.setdefault(sizes, sizes)


def _has_memory(storage: Any) -> bool:
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # a wrapper's, from torch 2.1 on
        return False


def each(get: Callable[[Any], Any], items: Sequence[object]) -> list[Any]:
    """Return what ``get`` gives for each item; None where it fails."""
    found: list[Any] = []
    waiting = iter(items)
    while len(found) < len(items):
        try:
            found.extend(map(get, waiting))
        except Exception:  # noqa: PERF203  # what came before it stays in the list
            found.append(None)
    return found


def _is_torchs(kind: type) -> bool:
    module = text_of(class_dict(kind).get("__module__"))
    return module == "torch" or module.startswith("torch.")


def _in_words(error: Exception) -> str:
    text = error.args[0] if len(error.args) == 1 else ""
    lines = text_of(text).splitlines()
    return f"could not be read: {lines[0] if lines else type(error).__name__}"


class Storages:
    """Storages of torch, referred to weakly: 0.1 us each, where a ``StorageWeakRef`` takes 0.6."""

    _free: Callable[[int], object]

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def add(self, storages: Sequence[Any]) -> None:
        """Refer to storages from now on."""
        kind: Any = sys.modules["torch"].UntypedStorage
        self._free = kind._free_weak_ref
        by_key = dict(zip(map(attrgetter("_cdata"), storages), storages, strict=True))
        new = by_key.keys() - self._keys
        for key in new:
            kind._weak_ref(by_key[key])
        self._keys |= new

    def add_of(self, reader: Reader, tensors: Sequence[Any]) -> list[Any]:
        """Add the storages of tensors, and of the parts of those that have none; return the latter."""
        storages = each(reader.base.untyped_storage, tensors)
        odd = [tensor for tensor, storage in zip(tensors, storages, strict=True) if storage is None]
        for tensor in odd:  # sparse, or in another layout
            storages += each(reader.base.untyped_storage, reader.parts(tensor))
        self.add([storage for storage in storages if storage is not None])
        return odd

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def close(self) -> None:
        """Forget all of them."""
        while self._keys:
            self._free(self._keys.pop())

    def __del__(self) -> None:
        if hasattr(self, "_keys"):  # an interrupt may have come before
            self.close()
