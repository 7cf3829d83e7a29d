"""Reads tensors and their storages, very many at once, without running a subclass's code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, countOf, not_
from typing import Any, NamedTuple

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import Kinds, chunks, of_types, one_of_each, without_types
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import class_dict, instance_dict, is_instance, text_of


def answers_itself(torch: Any, kind: type) -> bool:
    """Return True if a tensor class has its own ``__torch_dispatch__``, which may run even to read
    a shape.

    Args:
        torch: the torch module.
        kind: the class.
    """
    for base in type.mro(kind):
        if base is torch.Tensor:
            return False
        if "__torch_dispatch__" in class_dict(base):
            return True
    return False


_MOST_WRAPPERS = 4
"""Maximum number of wrappers in each other to read."""
_INTEGERS = {int}
"""The type of known sizes; torch.compile has symbols for unknown ones."""
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    "sparse_coo": ("_indices", "_values"),
    "sparse_csr": _COMPRESSED_ROWS,
    "sparse_bsr": _COMPRESSED_ROWS,
    "sparse_csc": _COMPRESSED_COLUMNS,
    "sparse_bsc": _COMPRESSED_COLUMNS,
}
"""Names of the methods that return the component tensors of a sparse tensor, by layout."""


class TensorMemory(NamedTuple):
    """The storages of one tensor: its own, or those of the tensors inside it."""

    storages: dict[int, int]
    """Bytes by identity; empty if the tensor has no memory, or none that can be read."""
    device: str = ""
    """Device of the first storage."""
    shared: bool = False
    """True if other processes may share host memory."""
    note: str = ""
    """The reason why the memory cannot be read; empty if it can."""
    is_plain: bool = False
    """True if the only storage is the tensor's own."""


class PlainTensors(NamedTuple):
    """Tensors that have one storage each, with its properties, as columns of equal length; several
    tensors may have the same storage.
    """

    tensors: list[Any]
    storages: list[Any]
    keys: list[int]
    """Identities of the storages."""
    sizes: list[int]
    """Bytes of the storages."""
    devices: list[str]

    def all_have_sizes(self) -> bool:
        """Return True if all tensors have memory of a known size."""
        if "meta" in self.devices:
            return False
        return _INTEGERS.issuperset(map(type, self.sizes))

    def have_sizes(self) -> list[bool]:
        """Return for each tensor whether it has memory of a known size."""
        sizes_on_devices = zip(self.sizes, self.devices, strict=True)
        return [type(size) is int and device != "meta" for size, device in sizes_on_devices]

    def of(self, chosen: Iterable[object]) -> PlainTensors:
        """Return the tensors for which ``chosen`` has a true value, with their properties."""
        are_chosen = list(chosen)
        columns = [list(compress(column, are_chosen)) for column in self]
        return PlainTensors(*columns)

    def extend(self, rows: PlainTensors) -> None:
        """Add tensors with their properties to the columns."""
        self.tensors.extend(rows.tensors)
        self.storages.extend(rows.storages)
        self.keys.extend(rows.keys)
        self.sizes.extend(rows.sizes)
        self.devices.extend(rows.devices)


class _Texts(dict[Any, str]):
    """Names of dtypes and devices, such as ``float32``, each made once."""

    def __missing__(self, value: object) -> str:
        text = str(value).removeprefix("torch.")
        self[value] = text
        return text


class Reader:
    """Reads tensors without running a subclass's code; use it inside ``DisableTorchFunction``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.base: Any = torch.Tensor
        self._storage_type: Any = torch.UntypedStorage
        # Cached, because they are called for very many tensors.
        self._strided = torch.strided
        self._layout = self.base.layout.__get__
        self._shape = self.base.shape.__get__
        self._storage = self.base.untyped_storage
        self._nbytes = self._storage_type.nbytes
        self._is_cpu = self.base.is_cpu.__get__
        self._is_shared = self._storage_type.is_shared
        self._getters: dict[str, Callable[[Any], Any]] = {}
        self._foreign: dict[int, bool] = {}
        """Results of ``is_foreign``, by the type's identity."""
        self.text: Callable[[Any], str] = _Texts({None: ""}).__getitem__
        """Returns the name of a dtype or device."""
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Interned shapes: few differ."""

    def read(self, name: str, tensor: object) -> Any:
        """Return a property of a tensor; None if it cannot be read."""
        get = self._getters.get(name)
        if get is None:
            get = getattr(self.base, name).__get__
            self._getters[name] = get
        try:
            return get(tensor)
        except Exception as error:  # a sparse or broken tensor
            if is_from_signal(error):
                raise
            return None

    def keys(self, tensor: object) -> tuple[int, ...]:
        """Return the identities of a tensor's storages, or the identity of the tensor if it has
        none.
        """
        storages = self.memory(tensor).storages
        if not storages:
            return (id(tensor),)
        return tuple(storages)

    def has_storage(self, tensor: object) -> bool:
        """Return True for a tensor with one storage (strided); False for one in another layout,
        such as a sparse tensor.
        """
        return self._layout(tensor) is self._strided

    def is_foreign(self, tensor: object) -> bool:
        """Return True if the tensor's class has its own ``__torch_dispatch__``, as a wrapper of
        other tensors does: reading the tensor may then run the class's code.
        """
        kind = type(tensor)
        is_foreign = self._foreign.get(id(kind))
        if is_foreign is None:
            is_foreign = answers_itself(self._torch, kind)
            if _is_torchs(kind):  # lives as long as torch
                self._foreign[id(kind)] = is_foreign
        return is_foreign

    def address_of_others(self, tensor: object) -> int | None:
        """Return the address of a plain tensor's host storage if another library than torch
        allocated it, such as NumPy for ``torch.from_numpy``; else None.
        """
        storage = self._storage(tensor)
        if storage.device.type != "cpu":
            return None
        if self._storage_type.resizable(storage):  # torch has allocated it
            return None
        return int(storage.data_ptr())

    def memory(self, tensor: object, depth: int = 0) -> TensorMemory:
        """Return the storages of a tensor of any kind, with those of the tensors inside it.

        Args:
            tensor: the tensor.
            depth: number of wrappers around it.
        """
        try:
            is_foreign = self.is_foreign(tensor)
            if not is_foreign and self._layout(tensor) is self._strided:
                storage = self._storage(tensor)
                return self._in_storage(storage, foreign=False)
            parts = list[object]()
            if depth < _MOST_WRAPPERS:
                parts += self.inside(tensor)
            own_memory = self.own(tensor)
        except Exception as error:  # a broken device, or an unknown layout
            if is_from_signal(error):
                raise
            return TensorMemory({}, note=_in_words(error))
        memories = [self.memory(part, depth + 1) for part in parts]
        if own_memory is not None:
            memories.insert(0, own_memory)
        return _memory_of_parts(memories)

    def plain(self, tensors: Sequence[Any]) -> tuple[PlainTensors, list[Any]]:
        """Return the tensors whose only storage is their own, read in C, and the other tensors."""
        foreign_types = set[int]()
        for type_id, example in Kinds(tensors).examples.items():
            if self.is_foreign(example):
                foreign_types.add(type_id)
        plain = PlainTensors([], [], [], [], [])
        special_tensors = list[Any]()
        for part in chunks(tensors):
            candidates = without_types(foreign_types, part)
            columns = self._columns(candidates)
            # A sparse tensor has no storage, and torch.compile may not have decided a size yet.
            if columns.all_have_sizes():
                plain.extend(columns)
            else:
                is_plain = columns.have_sizes()
                plain.extend(columns.of(is_plain))
                special_tensors += compress(candidates, map(not_, is_plain))
            if foreign_types:
                special_tensors += of_types(foreign_types, part)
        return plain, special_tensors

    def _columns(self, tensors: Sequence[Any]) -> PlainTensors:
        """Return tensors with the properties of their storages; None where a tensor has none."""
        storages = each(self._storage, tensors)
        if all(each(self._is_cpu, tensors)):  # without an object for each device
            devices = ["cpu"] * len(tensors)
        else:
            devices = list(map(self.text, each(attrgetter("device"), storages)))
        keys = each(attrgetter("_cdata"), storages)
        sizes = each(self._nbytes, storages)
        return PlainTensors(list(tensors), storages, keys, sizes, devices)

    def are_shared(self, storages: Sequence[Any], devices: Sequence[str]) -> list[bool]:
        """Return for each storage whether other processes may share its host memory.

        Args:
            storages: the storages.
            devices: the device of each of them.
        """
        if set(devices) == {"cpu"}:
            return list(map(self._is_shared, storages))
        # ``is_shared`` is always True for a storage on an accelerator.
        return [
            device == "cpu" and self._is_shared(storage)
            for device, storage in zip(devices, storages, strict=True)
        ]

    def resizable(self, storages: Sequence[Any]) -> list[bool]:
        """Return False for each storage whose memory another library has allocated."""
        return each(self._storage_type.resizable, storages)

    def own(self, tensor: object) -> TensorMemory | None:
        """Return the memory of the tensor's own storage; None for a wrapper, and for a tensor in
        another layout: these have their memory in the tensors inside them.
        """
        is_foreign = self.is_foreign(tensor)
        if not is_foreign and not self.has_storage(tensor):
            device = str(self.base.device.__get__(tensor))
            if device != "meta":
                return None
            return TensorMemory({}, "meta")
        storage = self._storage(tensor)
        is_on_meta = self.text(storage.device) == "meta"
        is_wrapper = is_foreign and not is_on_meta and not _has_memory(storage)
        if is_wrapper:
            return None
        return self._in_storage(storage, foreign=is_foreign)

    def _in_storage(self, storage: Any, *, foreign: bool) -> TensorMemory:
        """Return the memory of a tensor with a storage.

        Args:
            storage: the storage.
            foreign: True if the tensor's class has its own ``__torch_dispatch__``: then it owns no
                memory on ``meta``.
        """
        device = self.text(storage.device)
        if device == "meta":
            if foreign:
                return TensorMemory({}, "meta")
            return TensorMemory({storage._cdata: 0}, "meta")
        # torch.compile may not have decided a size yet; comparing it would decide it.
        size = storage.nbytes()
        if type(size) is not int:
            return TensorMemory({}, device, note="size not known yet")
        # ``is_shared`` is always True for a storage on an accelerator.
        is_shared = device == "cpu" and self._is_shared(storage)
        storages = {storage._cdata: size}
        return TensorMemory(storages, device, is_shared, is_plain=not foreign)

    def parts(self, tensor: object) -> list[object]:
        """Return the component tensors of a tensor; none if they cannot be read."""
        try:
            return list(self.inside(tensor))
        except Exception as error:  # an unknown layout
            if is_from_signal(error):
                raise
            return []

    def inside(self, tensor: Any) -> Iterator[object]:
        """Yield the component tensors of a sparse or wrapper tensor."""
        if self.is_foreign(tensor):
            yield from self._attributes(tensor)
            return
        layout = str(self._layout(tensor)).removeprefix("torch.")
        for name in _SPARSE_PARTS.get(layout, ()):
            read_part = getattr(self.base, name)
            yield read_part(tensor)

    def _attributes(self, tensor: object) -> Iterator[object]:
        """Yield the tensors among a wrapper's attributes, including those in a plain container
        attribute.
        """
        attributes = instance_dict(tensor) or {}
        for value in [*attributes.values(), *slots(tensor).values()]:
            kind = type(value)
            if kind is dict:
                parts: list[object] = list(value.values())
            elif kind is list or kind is tuple:
                parts = list(value)
            else:
                parts = [value]
            for part in parts:
                if is_instance(part, self.base) and part is not tensor:
                    yield part

    def device(self, tensor: object) -> str:
        """Return a tensor's device; an empty text if reading it might run the class's own code."""
        if self.is_foreign(tensor):
            return ""
        return self.text(self.read("device", tensor))

    def shape(self, tensor: object) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it has no single one, or if reading it might run user
        code.
        """
        if self.is_foreign(tensor) and not _is_torchs(type(tensor)):
            return None
        try:
            sizes = tuple(self._shape(tensor))
        except Exception as error:  # nested tensors have no single shape
            if is_from_signal(error):
                raise
            return None
        if not _INTEGERS.issuperset(map(type, sizes)):
            return None
        return self._shapes.setdefault(sizes, sizes)

    def shapes(self, tensors: Sequence[Any]) -> list[tuple[int, ...] | None]:
        """Return the result of ``shape`` for each of many tensors; read in C if all are plain."""
        examples = one_of_each(tensors).values()
        if any(map(self.is_foreign, examples)):
            return list(map(self.shape, tensors))
        sizes = each(self._shape, tensors)
        if not sizes or None in sizes:
            return list(map(self.shape, tensors))
        lengths = chain.from_iterable(sizes)
        if not _INTEGERS.issuperset(map(type, lengths)):
            return list(map(self.shape, tensors))
        first = sizes[0]
        if sizes.count(first) == len(sizes):  # as for the tensors of one list, often
            return [tuple(first)] * len(sizes)
        shape_by_size = {size: tuple(size) for size in set(sizes)}
        return list(map(shape_by_size.__getitem__, sizes))


def _memory_of_parts(memories: Sequence[TensorMemory]) -> TensorMemory:
    """Return the memory of all parts of a tensor, with the device and note of the first part that
    has any.
    """
    storages = dict[int, int]()
    device = note = ""
    for memory in memories:
        storages.update(memory.storages)
        device = device or memory.device
        note = note or memory.note
    is_shared = any(memory.shared for memory in memories)
    return TensorMemory(storages, device, is_shared, note)


def _has_memory(storage: Any) -> bool:
    """Return True for a storage with an address; the storage of a wrapper has none."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # a wrapper's, from torch 2.1 on
        return False


def each(get: Callable[[Any], Any], items: Sequence[object]) -> list[Any]:
    """Return ``get(item)`` for each item; None where it fails."""
    results: list[Any] = []
    remaining = iter(items)  # after an error, the loop goes on behind the item that failed
    while len(results) < len(items):
        try:
            results.extend(map(get, remaining))
        except Exception as error:  # noqa: PERF203  # the results so far stay in the list
            if is_from_signal(error):
                raise
            results.append(None)
    return results


def _is_torchs(kind: type) -> bool:
    """Return True for a class that torch has defined."""
    module = text_of(class_dict(kind).get("__module__"))
    return module == "torch" or module.startswith("torch.")


def _in_words(error: Exception) -> str:
    """Return the note of a tensor that cannot be read: the first line of the error."""
    reason = type(error).__name__
    if len(error.args) == 1:
        lines = text_of(error.args[0]).splitlines()
        if lines:
            reason = lines[0]
    return f"could not be read: {reason}"


ENDS_OF_STORAGES: dict[int, weakref.ref[Any]] = {}
"""A weak reference to each of the ``Storages``, by the identity of its keys: its callback frees
the references that are left.
"""


class Storages:
    """Weak references to torch storages: 0.1 us each, where a ``StorageWeakRef`` takes 0.6.

    What ``close`` has not freed is freed with this object, by C code alone: Python drops the
    exception of a signal that arrives in ``__del__``, such as the user's Ctrl-C.
    """

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._sizes: dict[int, int] | None = None
        """Bytes of each storage when it was added; None if they are not recorded."""

    @classmethod
    def with_sizes(cls) -> Storages:
        """Return an object that records the bytes of storages."""
        storages = cls()
        storages._sizes = {}
        return storages

    def size(self, key: int) -> int:
        """Return the bytes that a storage had when it was added; 0 if that is not known."""
        size = (self._sizes or {}).get(key)
        return size if type(size) is int else 0

    def add_of(self, reader: Reader, tensors: Sequence[Any]) -> list[Any]:
        """Add the storages of tensors, and those of the parts of tensors without a storage of their
        own, such as sparse tensors; return the tensors without one.
        """
        storages = each(reader.base.untyped_storage, tensors)
        with_storages = zip(tensors, storages, strict=True)
        without_storage = [tensor for tensor, storage in with_storages if storage is None]
        for tensor in without_storage:  # sparse, or in another layout
            parts = reader.parts(tensor)
            storages += each(reader.base.untyped_storage, parts)
        kind: Any = sys.modules["torch"].UntypedStorage
        self._free_at_end(kind._free_weak_ref)
        by_key = {storage._cdata: storage for storage in storages if storage is not None}
        new_keys = by_key.keys() - self._keys
        for key in new_keys:
            kind._weak_ref(by_key[key])
        if self._sizes is not None:
            sizes = each(kind.nbytes, list(map(by_key.__getitem__, new_keys)))
            self._sizes.update(zip(new_keys, sizes, strict=True))
        self._keys |= new_keys
        return without_storage

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def alive(self, keys: Iterable[int]) -> Iterator[bool]:
        """Yield for each of some storages, all of which were added, whether it is alive."""
        has_expired: Callable[[int], bool] = sys.modules["torch"].UntypedStorage._expired
        # A storage whose reference was freed must not be asked: its memory may be used again.
        return (key in self._keys and not has_expired(key) for key in keys)

    def drop_dead(self) -> int:
        """Free the references to dead storages, each of which keeps 156 bytes; return their
        number.
        """
        kind: Any = sys.modules["torch"].UntypedStorage if self._keys else None
        dead_keys = [key for key in self._keys if kind._expired(key)]
        for key in dead_keys:
            self._keys.remove(key)
            kind._free_weak_ref(key)
        return len(dead_keys)

    def any_alive(self) -> bool:
        """Return True if one of the storages is alive."""
        return any(self.alive(self._keys))

    def _free_at_end(self, free: Callable[[int], object]) -> None:
        """Free all references as soon as this object dies.

        Args:
            free: torch's function that frees the reference with a key.
        """
        key = id(self._keys)
        if key in ENDS_OF_STORAGES:
            return
        # The same as ``for key in self._keys: free(key)``, and then ``ENDS_OF_STORAGES.pop(key)``.
        each_key = chain.from_iterable((self._keys,))  # reads the set when it begins, at the end
        steps = chain(map(free, each_key), map(ENDS_OF_STORAGES.pop, (key,)))
        # The callback gets the dead reference as its second argument. ``countOf`` takes all steps
        # in C; it compares their results with that reference, which has no effect.
        ENDS_OF_STORAGES[key] = weakref.ref(self, partial(countOf, steps))

    def close(self) -> None:
        """Free all references."""
        while self._keys:
            sys.modules["torch"].UntypedStorage._free_weak_ref(self._keys.pop())


_READERS: dict[int, Reader] = {}
"""Cached readers, by the identity of the torch module."""


def reader_of(torch: Any) -> Reader:
    """Return the reader of tensors of a torch module, made once."""
    key = id(torch)
    if key not in _READERS:
        _READERS[key] = Reader(torch)
    return _READERS[key]


def tensors_of_script(module: object) -> Iterator[Any]:
    """Yield the parameters and buffers of a TorchScript module; nothing for a tensor."""
    inner = (instance_dict(module) or {}).get("_c")
    functions: Any = sys.modules["torch"]._C
    if type(inner) is functions.ScriptModule:
        for names in (functions.ParameterDict, functions.BufferDict):
            yield from (value for _, value in names(inner).items())
