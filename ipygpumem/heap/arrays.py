"""Describes tensors and arrays: type, shape, device and size. Finds the arrays that an object
holds.

The objects belong to the user. They are recognised by ``type()``, read through the base class's own
descriptors, and never compared, never asked for their ``repr``, and never touched through
``__getattr__``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, not_
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import (
    Kinds,
    chunks,
    kinds_of,
    of_types,
    one_of_each,
    type_names,
    without_types,
)
from ipygpumem.heap.structs import UnknownLayoutError, memory_of_texts
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_atom,
    is_instance,
    module_of,
    text_of,
    type_name,
)

NOT_ENTERED = (types.FrameType, types.CodeType, types.TracebackType)
"""Types that no walk enters, because they lead to objects of every owner."""

TOOLS = {"IPython", "ipykernel", "ipygpumem"}
"""Libraries whose objects lead to the shell, and so to all outputs."""

StorageKey = tuple[str, int]
"""Identity of a storage while it is alive."""

_MOST_ELEMENTS = 10_000_000
"""Maximum number of elements of an object array to list at once."""


class Array(NamedTuple):
    """One tensor or array. Arrays with the same ``storage`` share their memory."""

    type_name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    size_bytes: int
    """Bytes of the whole storage, which a view keeps alive."""
    storage: tuple[str, int]


def describe(value: object) -> Array | None:
    """Return the description of a torch tensor or NumPy array, else None."""
    try:
        if is_of_library(value, "torch", "Tensor"):
            return _describe_tensor(sys.modules["torch"], value)
        if is_array(value):
            return _describe_ndarray(value)
    except Exception as error:  # skip an exotic or half-made array; it must not stop a clean-up
        if is_from_signal(error):
            raise
        return None
    return None


def described(items: Sequence[Any]) -> list[tuple[Any, Array]]:
    """Return the tensors and arrays among ``items`` with their descriptions; plain tensors are read
    in C.
    """
    base, known = library_type("torch", "Tensor"), dict[int, Array]()
    if base is not None and (tensors := of_types(kinds_of(items, base), items)):
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            reader = _reader_of(torch)
            own, _, keys, sizes, devices = reader.plain(tensors)[0]
            dtypes = map(reader.text, each(reader.base.dtype.__get__, own))
            columns = (
                type_names(own),
                reader.shapes(own),
                dtypes,
                devices,
                sizes,
                zip(repeat("torch"), keys),
            )
            arrays = map(partial(tuple.__new__, Array), zip(*columns, strict=True))
            known = dict(zip(map(id, own), arrays, strict=True))
    found = [(item, known.get(id(item)) or describe(item)) for item in items]
    return [(item, array) for item, array in found if array is not None]


def library_type(module: str, name: str) -> type | None:
    """Return a class of a library that the user's code has loaded; None if it is not loaded, or is
    a stand-in.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind if type.__subclasscheck__(type, type(kind)) else None


def is_of_library(value: object, module: str, name: str) -> bool:
    """Return True if ``value`` is an instance of that class of a loaded library."""
    kind = library_type(module, name)
    return kind is not None and is_instance(value, kind)


def is_array(value: object) -> bool:
    """Return True for a NumPy array."""
    return is_of_library(value, "numpy", "ndarray")


def _describe_tensor(torch: Any, tensor: Any) -> Array | None:
    with torch._C.DisableTorchFunction():  # a subclass's own code must not run
        reader = _reader_of(torch)
        own, is_foreign = reader.own(tensor), reader.is_foreign(tensor)
        if is_foreign and (
            own is None or own.device == "meta"
        ):  # a wrapper: the tensors inside it own the memory
            return None
        sizes = reader.memory(tensor).storages if own is None else own.storages
        is_stored = own is not None and sizes and reader.has_storage(tensor)
        key: StorageKey = ("torch", next(iter(sizes))) if is_stored else ("object", id(tensor))
        shape = () if is_foreign else reader.shape(tensor) or ()
        dtype = "" if is_foreign else reader.text(reader.read("dtype", tensor))
        device = own.device if own is not None else reader.device(tensor)
        return Array(type_name(tensor), shape, dtype, device, sum(sizes.values()), key)


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
SPARSE_PARTS = {
    "sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), _COMPRESSED_ROWS),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), _COMPRESSED_COLUMNS),
}
"""Names of the methods that return the component tensors of a sparse tensor, by layout."""


def storage_key(value: Any) -> tuple[str, int] | None:
    """Return the identity of a tensor's or array's storage; None for an object without its own
    storage.
    """
    if is_array(value):
        value = owner_of(value)
        if is_array(value):
            return "numpy", id(value)
    torch: Any = sys.modules["torch"]
    try:
        with torch._C.DisableTorchFunction():
            return "torch", int(torch.Tensor.untyped_storage(value)._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse, or a wrapper
        return None


def answers_itself(torch: Any, kind: type) -> bool:
    """Return True if a tensor class has its own ``__torch_dispatch__``, which may run even to read
    a shape.
    """
    below_tensor = itertools.takewhile(lambda base: base is not torch.Tensor, type.mro(kind))
    return any("__torch_dispatch__" in class_dict(base) for base in below_tensor)


def read_array(name: str, array: Any) -> Any:
    """Return a property of a NumPy array."""
    return library_type("numpy", "ndarray").__dict__[name].__get__(array)


def _describe_ndarray(array: Any) -> Array:
    owner = owner_of(array)
    if not is_array(owner):  # a tensor, whose storage is the memory of both
        behind = describe(owner)
        size, key = (
            (0, ("object", id(owner))) if behind is None else (behind.size_bytes, behind.storage)
        )
    elif read_array("flags", owner).owndata:
        size, key = int(read_array("nbytes", owner)) + _bytes_of_texts(owner), ("numpy", id(owner))
    else:
        size, key = max(_span(owner), _span(array)), ("numpy", id(owner))
    return Array(
        type_name(array),
        tuple(read_array("shape", array)),
        str(read_array("dtype", array)),
        "cpu",
        size,
        key,
    )


def _bytes_of_texts(array: Any) -> int:
    """Return the bytes of the texts that an array's dtype keeps; 0 for an array of
    anything else.
    """
    dtype = read_array("dtype", array)
    if dtype.kind != STRING_KIND:
        return 0
    try:
        _, size = memory_of_texts(dtype)
    except UnknownLayoutError:
        return 0
    return size


def _span(array: Any) -> int:
    """Return the bytes from an array's first element to its last; fewer than its elements' if it is
    broadcast.
    """
    shape = read_array("shape", array)
    steps = zip(shape, read_array("strides", array), strict=True)
    after_first = sum(abs(stride) * (size - 1) for size, stride in steps)
    return 0 if 0 in shape else int(read_array("itemsize", array) + after_first)


def holds_objects(dtype: Any) -> bool:
    """Return True if arrays of a dtype refer to Python objects; NumPy says so of ``StringDType``,
    too.
    """
    return bool(dtype.hasobject) and dtype.kind != STRING_KIND


STRING_KIND = "T"
"""Kind of NumPy's ``StringDType``, whose texts are in memory of the dtype."""


def elements(array: Any) -> list[Any] | None:
    """Return the elements of an array of objects, nested like the array; None for
    any other array.
    """
    if not is_array(array) or not holds_objects(read_array("dtype", array)):
        return None
    if read_array("size", array) > _MOST_ELEMENTS:
        return None
    try:
        items = read_array("tolist", array)()
    except Exception as error:  # a half-made array
        if is_from_signal(error):
            raise
        return None
    return items if type(items) is list else [items]


def holding_objects(arrays: Sequence[Any]) -> list[bool]:
    """Return for each NumPy array whether its elements are objects, or have fields of objects."""
    array_type: Any = library_type("numpy", "ndarray")
    dtypes = list(map(array_type.__dict__["dtype"].__get__, arrays)) if arrays else []
    of_objects = {
        key for key, dtype in {id(dtype): dtype for dtype in dtypes}.items() if holds_objects(dtype)
    }
    return list(map(of_objects.__contains__, map(id, dtypes)))


def flat_elements(array: Any) -> list[Any] | None:
    """Return the objects in an array in one flat list, those of all fields of a structured array.

    None for an array without objects, and for one with too many.
    """
    if not is_array(array):
        return None
    dtype = read_array("dtype", array)
    if dtype.names is None:
        items = elements(array)
        for _ in range(read_array("ndim", array) - 1) if items is not None else ():
            items = list(chain.from_iterable(items or ()))
        return items
    if not holds_objects(dtype):
        return None
    base: Any = library_type("numpy", "ndarray")
    found = list[Any]()
    for name in dtype.names:
        if dtype[name].hasobject:
            items = flat_elements(base.__getitem__(base.view(array, base), name))
            if items is None:
                return None
            found += items
    return found


def parts_of_array(array: Any, number: int, step: int) -> Iterator[list[Any]]:
    """Yield the objects in an array in lists of ``number`` objects that begin ``step`` elements
    apart; those of each field of a structured array.

    A list of all would take 800 MiB for a hundred million objects.
    """
    dtype = read_array("dtype", array)
    base: Any = library_type("numpy", "ndarray")
    plain = base.view(array, base)  # no code of a subclass runs
    if dtype.names is not None:
        for name in dtype.names:
            if dtype[name].hasobject:
                yield from parts_of_array(base.__getitem__(plain, name), number, step)
        return
    for start in range(0, read_array("size", array), step):
        yield plain.flat[start : start + number].tolist()


def inside_row(row: Any) -> list[Any]:
    """Return the objects to which a row of a structured array refers: the array, or its own objects
    if it is a copy.
    """
    numpy: Any = sys.modules["numpy"]
    viewed = numpy.void.base.__get__(row)
    if is_array(viewed):
        return [viewed]
    if not holds_objects(numpy.void.dtype.__get__(row)):
        return []
    return flat_elements(numpy.array(row, ndmin=1)) or []


def slot_descriptors(kind: type) -> dict[str, Any]:
    """Return the slots of a class and its bases by name."""
    descriptors: dict[str, Any] = {}
    for base in reversed(type.mro(kind)):
        members = list(class_dict(base).items())
        descriptors.update(
            (name, member) for name, member in members if type(member) is types.MemberDescriptorType
        )
    descriptors.pop("__dict__", None)  # some C classes list it as a slot; see ``instance_dict``
    return descriptors


def slots(item: object, descriptors: dict[str, Any] | None = None) -> dict[str, object]:
    """Return the attributes of an object that are stored in slots and set."""
    values: dict[str, object] = {}
    for name, slot in (
        slot_descriptors(type(item)) if descriptors is None else descriptors
    ).items():
        with contextlib.suppress(AttributeError, TypeError):
            values[name] = slot.__get__(item)
    return values


def memory_of(array: Any) -> object:
    """Return the owner of an array's memory: an array, or the bytes, memory map or tensor that it
    views.
    """
    owner = owner_of(array)
    behind = _behind(owner) if is_array(owner) else None
    return (
        behind
        if behind is not None and (is_atom(behind) or is_of_library(behind, "mmap", "mmap"))
        else owner
    )


def inside_pandas(item: object) -> list[object]:
    """Return the arrays in a pandas object, or in a tuple of them."""
    seen, arrays, waiting = set[int](), list[object](), [item]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if is_array(part):
            arrays.append(part)
        elif is_of_pandas(part) or type(part) is tuple or type(part) is dict:
            waiting += gc.get_referents(part)
    return arrays


def is_of_pandas(item: object) -> bool:
    """Return True for an instance, not a class, whose class pandas defined."""
    return module_of(item).partition(".")[0] == "pandas" and not is_instance(item, type)


def owner_of(array: Any) -> Any:
    """Return the array or tensor that owns the memory of ``array``: itself, or the base of the
    view.
    """
    while True:
        behind = _behind(array)
        if is_of_library(behind, "torch", "Tensor"):
            return behind
        if not is_array(behind):
            return array
        array = behind


def _behind(array: Any) -> Any:
    behind = read_array("base", array)
    if (
        type_name(behind) == "DummyArray"
    ):  # np.lib.stride_tricks puts one between a view and its array
        behind = (instance_dict(behind) or {}).get("base")
    return behind.obj if type(behind) is memoryview else behind


def watch(item: object) -> Callable[[], bool]:
    """Return a function that tells whether the memory of a tensor or array is still alive, without
    keeping it alive.

    A view that survives keeps its storage alive, so the storage is watched and not the object.
    """
    if is_of_library(item, "torch", "Tensor"):
        torch: Any = sys.modules["torch"]
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
        ):  # modes of the user see nothing
            storages = Storages()
            if not storages.add_of(_reader_of(torch), [item]):  # some have no storage
                return storages.any_alive
    if is_array(item):
        item = owner_of(item)
        return WatchedArray(item) if is_array(item) else watch(item)
    reference = weakref.ref(item)
    return lambda: reference() is not None


Span = tuple[int, int, int]


def place_of(array: Any) -> Span:
    """Return an array's identity, and the start and end of its memory."""
    start = int(read_array("__array_interface__", array)["data"][0])
    return id(array), start, start + int(read_array("nbytes", array))


def places_of(arrays: Iterable[Any]) -> set[Span]:
    """Return the places of the arrays that own the memory of some arrays."""
    return {place_of(owner) for owner in map(owner_of, arrays) if is_array(owner)}


class WatchedArray:
    """Checks if the memory of an array is still alive, without keeping it alive.

    NumPy refuses to resize an array that has weak references. So the weak reference exists only
    until ``detach``, while no user code runs. After that, call ``update`` with the arrays that are
    alive.
    """

    def __init__(self, array: Any) -> None:
        self._reference: weakref.ref[Any] | None = weakref.ref(array)
        self.place = place_of(array)
        self._is_alive = True

    def __call__(self) -> bool:
        """Return True if the memory is still alive."""
        return self._is_alive if self._reference is None else self._reference() is not None

    def detach(self, places: Container[Span]) -> None:
        """Drop the weak reference before user code runs, if ``update`` can find the array at one of
        ``places``.
        """
        if self.place in places:
            self._is_alive, self._reference = self(), None

    def update(self, places: Container[Span]) -> None:
        """Check whether the array is still at one of ``places``; a new array at the same place is
        mistaken for it.
        """
        if self._reference is None:
            self._is_alive = self.place in places


# -- tensor storages ----------------------------------------------------------------------------

_DEEPEST = 4
_INTEGERS = {int}


class Memory(NamedTuple):
    """The storages of one tensor: its own, or those of the tensors inside it."""

    storages: dict[int, int]
    """Bytes by identity; empty if the tensor has no memory, or none that can be read."""
    device: str = ""
    """Device of the first storage."""
    shared: bool = False
    """True if other processes may share host memory."""
    note: str = ""
    is_plain: bool = False
    """True if the only storage is the tensor's own."""


class PlainTensors(NamedTuple):
    """Columns of what is known of tensors that have a storage of their own; several may have the
    same.
    """

    tensors: list[Any]
    storages: list[Any]
    keys: list[int]
    """Identities of the storages."""
    sizes: list[int]
    """Bytes of the storages."""
    devices: list[str]

    def has_sizes(self) -> bool:
        """Return True if all tensors have memory of a known size."""
        return _INTEGERS.issuperset(map(type, self.sizes)) and "meta" not in self.devices

    def of(self, chosen: Iterable[object]) -> PlainTensors:
        """Return the rows for which ``chosen`` is true."""
        chosen = list(chosen)
        return PlainTensors(*(list(compress(column, chosen)) for column in self))


class _Texts(dict[Any, str]):
    """Names of dtypes and devices."""

    def __missing__(self, value: object) -> str:
        text = self[value] = str(value).removeprefix("torch.")
        return text


class Reader:
    """Reads tensors without running a subclass's code; use it inside ``DisableTorchFunction``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.base: Any = torch.Tensor
        self._storage_type: Any = torch.UntypedStorage
        # Cached, because they are called for very many tensors.
        self._strided = torch.strided
        self._layout, self._shape = self.base.layout.__get__, self.base.shape.__get__
        self._storage, self._nbytes = self.base.untyped_storage, self._storage_type.nbytes
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
            get = self._getters[name] = getattr(self.base, name).__get__
        try:
            return get(tensor)
        except Exception as error:  # a sparse or broken tensor
            if is_from_signal(error):
                raise
            return None

    def keys(self, tensor: object) -> tuple[int, ...]:
        """Return the identities of a tensor's storages, or of the object if it has none."""
        return tuple(self.memory(tensor).storages) or (id(tensor),)

    def has_storage(self, tensor: object) -> bool:
        """Return False for a tensor in another layout than strided, such as a sparse one."""
        return self._layout(tensor) is self._strided

    def is_foreign(self, tensor: object) -> bool:
        """Return True if the tensor's class has its own ``__torch_dispatch__``."""
        kind = type(tensor)
        foreign = self._foreign.get(id(kind))
        if foreign is None:
            foreign = answers_itself(self._torch, kind)
            if _is_torchs(kind):  # lives as long as torch
                self._foreign[id(kind)] = foreign
        return foreign

    def address_of_others(self, tensor: object) -> int | None:
        """Return the address of a plain tensor's host storage if another library than torch
        allocated it.
        """
        storage = self._storage(tensor)
        is_foreign = storage.device.type == "cpu" and not self._storage_type.resizable(storage)
        return int(storage.data_ptr()) if is_foreign else None

    def memory(self, tensor: object, depth: int = 0) -> Memory:
        """Return the storages of a tensor of any kind."""
        try:
            foreign = self.is_foreign(tensor)
            if not foreign and self._layout(tensor) is self._strided:
                return self._in_storage(self._storage(tensor), foreign=False)
            inner = list(self.inside(tensor)) if depth < _DEEPEST else []
            own = self.own(tensor)
        except Exception as error:  # a broken device, or an unknown layout
            if is_from_signal(error):
                raise
            return Memory({}, note=_in_words(error))
        found = [
            memory
            for memory in (own, *(self.memory(part, depth + 1) for part in inner))
            if memory is not None
        ]
        storages: dict[int, int] = {}
        for memory in found:
            storages.update(memory.storages)
        device = next((memory.device for memory in found if memory.device), "")
        note = next((memory.note for memory in found if memory.note), "")
        return Memory(storages, device, any(memory.shared for memory in found), note)

    def plain(self, tensors: Sequence[Any]) -> tuple[PlainTensors, list[Any]]:
        """Return the tensors whose only storage is their own, read in C, and the rest."""
        foreign = {key for key, one in Kinds(tensors).examples.items() if self.is_foreign(one)}
        found, rest = PlainTensors([], [], [], [], []), list[Any]()
        for part in chunks(tensors):
            own = without_types(foreign, part)
            columns = self._columns(own)
            # A sparse tensor has no storage, and torch.compile may not have decided a size yet.
            if columns.has_sizes():
                for column, more in zip(list[Any](found), list[Any](columns), strict=True):
                    column.extend(more)
            else:
                is_plain = [
                    type(size) is int and text != "meta"
                    for size, text in zip(columns.sizes, columns.devices, strict=True)
                ]
                for column, more in zip(list[Any](found), list[Any](columns), strict=True):
                    column.extend(compress(more, is_plain))
                rest += compress(own, map(not_, is_plain))
            rest += of_types(foreign, part) if foreign else []
        return found, rest

    def _columns(self, tensors: Sequence[Any]) -> PlainTensors:
        """Return the storages, sizes and devices of tensors, with None where a tensor has none."""
        storages = each(self._storage, tensors)
        if all(each(self._is_cpu, tensors)):  # without an object for each device
            devices = ["cpu"] * len(tensors)
        else:
            devices = list(map(self.text, each(attrgetter("device"), storages)))
        keys, sizes = each(attrgetter("_cdata"), storages), each(self._nbytes, storages)
        return PlainTensors(list(tensors), storages, keys, sizes, devices)

    def are_shared(self, storages: Sequence[Any], devices: Sequence[str]) -> list[bool]:
        """Return for each storage whether other processes may share its host memory."""
        if set(devices) == {"cpu"}:
            return list(map(self._is_shared, storages))
        # An accelerator's storage always says so.
        return [
            device == "cpu" and self._is_shared(one)
            for device, one in zip(devices, storages, strict=True)
        ]

    def resizable(self, storages: Sequence[Any]) -> list[bool]:
        """Return False for each storage whose memory another library has allocated."""
        return each(self._storage_type.resizable, storages)

    def own(self, tensor: object) -> Memory | None:
        """Return the tensor's own storage; None for a wrapper or another layout."""
        foreign = self.is_foreign(tensor)
        if not foreign and not self.has_storage(tensor):
            return Memory({}, "meta") if str(self.base.device.__get__(tensor)) == "meta" else None
        storage = self._storage(tensor)
        is_wrapper = foreign and self.text(storage.device) != "meta" and not _has_memory(storage)
        return None if is_wrapper else self._in_storage(storage, foreign=foreign)

    def _in_storage(self, storage: Any, *, foreign: bool) -> Memory:
        device = self.text(storage.device)
        if device == "meta":
            return Memory({} if foreign else {storage._cdata: 0}, "meta")
        # torch.compile may not have decided a size yet; comparing it would decide it.
        size = storage.nbytes()
        if type(size) is not int:
            return Memory({}, device, note="size not known yet")
        # True for every accelerator storage
        is_shared = device == "cpu" and self._is_shared(storage)
        return Memory({storage._cdata: size}, device, is_shared, "", not foreign)

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
        if layout in SPARSE_PARTS:
            yield from (getattr(self.base, name)(tensor) for name in SPARSE_PARTS[layout])

    def _attributes(self, tensor: object) -> Iterator[object]:
        """Yield the tensors among a wrapper's attributes, including those in a plain container
        attribute.
        """
        for value in [*(instance_dict(tensor) or {}).values(), *slots(tensor).values()]:
            if type(value) is dict:
                parts: list[object] = list(value.values())
            else:
                parts = list(value) if type(value) is list or type(value) is tuple else [value]
            yield from (
                part for part in parts if is_instance(part, self.base) and part is not tensor
            )

    def device(self, tensor: object) -> str:
        """Return a tensor's device; an empty text if reading it might run the class's own code."""
        return "" if self.is_foreign(tensor) else self.text(self.read("device", tensor))

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
        """Return the same for many tensors; if all are plain, read in C."""
        sizes = (
            []
            if any(map(self.is_foreign, one_of_each(tensors).values()))
            else each(self._shape, tensors)
        )
        if (
            None in sizes
            or not sizes
            or not _INTEGERS.issuperset(map(type, chain.from_iterable(sizes)))
        ):
            return list(map(self.shape, tensors))
        if sizes.count(sizes[0]) == len(sizes):  # most are like their neighbours
            return [tuple(sizes[0])] * len(sizes)
        plain = {size: tuple(size) for size in set(sizes)}
        return list(map(plain.__getitem__, sizes))


def _has_memory(storage: Any) -> bool:
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # a wrapper's, from torch 2.1 on
        return False


def each(get: Callable[[Any], Any], items: Sequence[object]) -> list[Any]:
    """Return ``get(item)`` for each item; None where it fails."""
    found: list[Any] = []
    waiting = iter(items)
    while len(found) < len(items):
        try:
            found.extend(map(get, waiting))
        except Exception as error:  # noqa: PERF203  # the results so far stay in the list
            if is_from_signal(error):
                raise
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
    """Weak references to torch storages: 0.1 us each, where a ``StorageWeakRef`` takes 0.6."""

    _free: Callable[[int], object]

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def add_of(self, reader: Reader, tensors: Sequence[Any]) -> list[Any]:
        """Add the storages of tensors, or of their parts for tensors without a storage; return the
        latter tensors.
        """
        storages = each(reader.base.untyped_storage, tensors)
        odd = [tensor for tensor, storage in zip(tensors, storages, strict=True) if storage is None]
        for tensor in odd:  # sparse, or in another layout
            storages += each(reader.base.untyped_storage, reader.parts(tensor))
        kind: Any = sys.modules["torch"].UntypedStorage
        self._free = kind._free_weak_ref
        by_key = {storage._cdata: storage for storage in storages if storage is not None}
        new = by_key.keys() - self._keys
        for key in new:
            kind._weak_ref(by_key[key])
        self._keys |= new
        return odd

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def alive(self, keys: Iterable[int]) -> Iterator[bool]:
        """Return for each of some storages, all of them added before, whether it is alive."""
        return map(not_, map(sys.modules["torch"].UntypedStorage._expired, keys))

    def any_alive(self) -> bool:
        """Return True if one of the storages is alive."""
        return any(self.alive(self._keys))

    def close(self) -> None:
        """Free all references."""
        while self._keys:
            self._free(self._keys.pop())

    def __del__(self) -> None:
        if hasattr(self, "_keys"):  # not if an interrupt came first
            self.close()


_READERS: dict[int, Reader] = {}
"""Cached readers, by the identity of the torch module."""


def _reader_of(torch: Any) -> Reader:
    return _READERS.get(id(torch)) or _READERS.setdefault(id(torch), Reader(torch))
