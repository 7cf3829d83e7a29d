"""The memory of torch tensors, many at a time: their storages, and what is inside those that have none.

A loop in C over a million tensors takes 0.1 s for each question, one in Python ten times that. So each question is
asked of many strided tensors at once; sparse, quantized and wrapper tensors are looked at singly.

torch makes a small object in Python for each storage it is asked for, and keeps it as long as the storage lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, repeat
from operator import attrgetter, is_
from typing import Any

from ipygpumem.introspect import instance_dict, is_instance, text_of
from ipygpumem.objects.arrays import SPARSE_PARTS, answers_itself, library_type, samples, slots
from ipygpumem.objects.columns import CHUNK, Column, at, chunks, chunks_of, places_of, type_identities
from ipygpumem.objects.progress import Progress, counted, unseen

_DEEPEST = 4
_PLAIN_ACCESS = object.__getattribute__
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


@dataclass
class Columns:
    """Plain tensors, and the storage of each."""

    sizes: Column[int | None] = field(default_factory=Column)
    """Of the storages; None where there is none, or none that can be read."""
    keys: list[int] = field(default_factory=list)
    """The storages' identities, of those that have a size."""
    shapes: Column[tuple[int, ...] | None] = field(default_factory=Column)
    dtypes: Column[str] = field(default_factory=Column)
    devices: Column[str] = field(default_factory=Column)
    shared: set[int] = field(default_factory=set)
    """The identities of those that other processes may have, too; on the host."""
    addresses: dict[int, int] = field(default_factory=dict)
    """By identity, where storages begin that other code than torch's allocators has made on the host."""

    def keep(self, places: Sequence[int]) -> None:
        """Leave out all but those at ``places``."""
        for name in ("keys", "sizes", "shapes", "dtypes", "devices"):
            setattr(self, name, at(places, getattr(self, name)))


class _Plain(dict[Any, Any]):
    """Plain values instead of torch's, each made once: there are few different ones."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, value: Any) -> Any:
        self[value] = self._make(value)
        return self[value]


class Reader:
    """Reads tensors without running a subclass's code; use it inside ``DisableTorchFunction``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.base: Any = torch.Tensor
        self._storage_type: Any = torch.UntypedStorage
        self._key: Callable[[Any], int] = attrgetter("_cdata")
        self._answering: dict[int, bool] = {}
        own = (self.base, library_type("torch.nn", "Parameter"))
        self._own_types = {id(kind) for kind in own if getattr(kind, "__getattribute__", None) is _PLAIN_ACCESS}

    def column(self, name: str, tensors: Sequence[object], kinds: Column[int] | None = None) -> list[Any]:
        """Return one property of each tensor; None where it cannot be read.

        Args:
            name: the property.
            tensors: all of which are asked.
            kinds: the identities of their types, if there may be many tensors.
        """
        return each(self._getter(kinds)(name), tensors)

    def _getter(self, kinds: Column[int] | None) -> Callable[[str], Callable[[Any], Any]]:
        """Return what makes a function of a property's name: the fastest that runs no code of a user's class."""
        if kinds is not None and self._own_types.issuperset(kinds.different()):
            return attrgetter
        return lambda name: getattr(self.base, name).__get__

    def own(self, kinds: Column[int], several: dict[int, Any]) -> Sequence[int]:
        """Return the places of the tensors that torch's own code answers for.

        Args:
            kinds: the identity of each tensor's type.
            several: one tensor of each type.
        """
        return places_of({kind for kind, one in several.items() if not self._is_foreign(one)}, kinds)

    def read(
        self, tensors: Sequence[object], kinds: Column[int], *, with_addresses: bool, progress: Progress = unseen
    ) -> Columns:
        """Return what there is to know of torch's own tensors (of types ``kinds``) and their storages."""
        shapes, texts = _Plain(lambda shape: None if shape is None else tuple(shape)), _Plain(self.text)
        found = Columns()
        get = self._getter(kinds)
        told = counted(chunks(tensors), chunks_of(tensors), progress)
        for start, part in zip(count(0, CHUNK), told):
            storages = each(self.base.untyped_storage, part)
            found.keys += each(self._key, storages)
            # A size that torch.compile has not decided cannot be looked up; to compare it would decide it.
            sizes = each(self._storage_type.nbytes, storages)
            if not {int, type(None)}.issuperset(map(type, sizes)):
                sizes = [size if type(size) is int else None for size in sizes]
            found.sizes.extend(sizes)
            found.shapes.extend(each(shapes.__getitem__, each(get("shape"), part)))
            found.dtypes.extend(Column(each(get("dtype"), part)).map(texts.__getitem__))
            if all(each(get("is_cpu"), part)):  # to ask for a device makes an object
                found.devices.extend(Column.same("cpu", len(part)))
            else:
                found.devices.extend(Column(each(get("device"), part)).map(texts.__getitem__))
            resizable = each(self._storage_type.resizable, storages) if with_addresses else ()
            for place in () if all(resizable) else compress(count(), map(is_, resizable, repeat(False))):
                if found.devices[start + place] == "cpu":
                    found.addresses[self._key(storages[place])] = storages[place].data_ptr()
            shared = each(self._storage_type.is_shared, storages)
            for place in compress(count(), shared) if any(shared) else ():
                if found.devices[start + place] == "cpu":  # every one of an accelerator is said to be
                    found.shared.add(self._key(storages[place]))
        return found

    def is_odd(self, dtype: str) -> bool:
        """Whether tensors of this type have memory beside their storage."""
        return dtype.startswith(_QUANTIZED)

    def keys(self, tensors: Sequence[object]) -> Iterator[int]:
        """Yield what the memory of ``tensors`` is known by: their storages, or the objects that have none."""
        kinds = type_identities(tensors)
        own = self.own(kinds, samples(kinds, tensors))
        plain = at(own, list(tensors))
        storages = each(self.base.untyped_storage, plain)
        yield from (self._key(storage) for storage in storages if storage is not None)
        odd = set(range(len(tensors))) - set(own) if len(own) < len(tensors) else ()
        without = [tensor for tensor, storage in zip(plain, storages, strict=True) if storage is None]
        for tensor in [*(tensors[place] for place in odd), *without]:
            yield from (id(tensor), *self.memory(tensor).storages)

    def _is_foreign(self, tensor: object) -> bool:
        kind = id(type(tensor))
        if kind not in self._answering:
            self._answering[kind] = answers_itself(self._torch, type(tensor))
        return self._answering[kind]

    def text(self, value: object) -> str:
        """Return the name of a dtype or device."""
        return "" if value is None else str(value).removeprefix("torch.")

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
        size = storage.nbytes()
        if type(size) is not int:
            return Memory({}, device, note="a size that is not known yet")
        return Memory({self._key(storage): size}, device, device == "cpu" and storage.is_shared())

    def _opaque(self, tensor: object) -> Memory | None:
        layout = str(self.base.layout.__get__(tensor)).removeprefix("torch.")
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
        layout = str(self.base.layout.__get__(tensor)).removeprefix("torch.")
        if layout in SPARSE_PARTS:
            yield from (getattr(self.base, name)(tensor) for name in SPARSE_PARTS[layout])
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
            yield from (part for part in parts if is_instance(part, self.base) and part is not tensor)

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
    module = text_of(type.__dict__["__dict__"].__get__(kind).get("__module__"))
    return module == "torch" or module.startswith("torch.")


def _in_words(error: Exception) -> str:
    text = error.args[0] if len(error.args) == 1 else ""
    lines = text_of(text).splitlines()
    return f"could not be read: {lines[0] if lines else type(error).__name__}"
