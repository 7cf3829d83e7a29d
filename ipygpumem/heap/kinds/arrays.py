"""Describes tensors and arrays: type, shape, device and size. Finds the arrays that an object
holds.

The objects belong to the user. They are recognised by ``type()``, read through the base class's own
descriptors, and never compared, never asked for their ``repr``, and never touched through
``__getattr__``.
"""

from __future__ import annotations

import gc
import mmap
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import instances_among, of_types, type_names
from ipygpumem.heap.kinds.structs import UnknownLayoutError, memory_of_texts
from ipygpumem.heap.kinds.tensors import each, reader_of
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import (
    instance_dict,
    is_atom,
    is_instance,
    module_dict,
    module_of,
    type_name,
)

StorageKey = tuple[str, int]
"""Identity of a storage while it is alive: ``("torch", address)``, ``("numpy", id(owner))``, or
``("object", id(item))`` for an object that stands for itself.
"""

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
    storage: StorageKey
    """The identity of the storage."""


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
    """Return the tensors and arrays among ``items`` with their descriptions, in their order. Plain
    tensors and arrays are read many at once.
    """
    tensor_type = library_type("torch", "Tensor")
    tensors = list[Any]()
    if tensor_type is not None:
        tensors = instances_among(items, tensor_type)
    plain = _described_arrays(items)
    if tensors:
        plain.update(_described_in_bulk(tensors))
    pairs = list[tuple[Any, Array]]()
    for item in items:
        array = plain.get(id(item)) or describe(item)
        if array is not None:
            pairs.append((item, array))
    return pairs


def _described_in_bulk(tensors: Sequence[Any]) -> dict[int, Array]:
    """Return the descriptions of plain tensors by identity; tensors of other kinds are left out.

    Each property is read in C of all tensors, because there may be a million.
    """
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        reader = reader_of(torch)
        plain, _ = reader.plain(tensors)
        dtypes = each(reader.base.dtype.__get__, plain.tensors)
        columns = (
            type_names(plain.tensors),
            reader.shapes(plain.tensors),
            map(reader.text, dtypes),
            plain.devices,
            plain.sizes,
            zip(repeat("torch"), plain.keys),
        )
        arrays = map(partial(tuple.__new__, Array), zip(*columns, strict=True))
        return dict(zip(map(id, plain.tensors), arrays, strict=True))


def _described_arrays(items: Sequence[Any]) -> dict[int, Array]:
    """Return the descriptions of plain NumPy arrays among some objects, by identity: arrays that
    own their memory, and views of such arrays. It takes 2 µs an array, where ``describe`` takes 40.
    """
    array_type: Any = library_type("numpy", "ndarray")
    if array_type is None:
        return {}
    read = {name: array_type.__dict__[name].__get__ for name in _READ_IN_BULK}
    dtype_texts: dict[int, str] = {}
    descriptions: dict[int, Array] = {}
    for array in of_types({id(array_type)}, items):
        viewed = read["base"](array)
        owner = array if viewed is None else viewed
        if type(owner) is not array_type or not read["flags"](owner).owndata:
            continue
        dtype = read["dtype"](array)
        if STRING_KIND in (dtype.kind, read["dtype"](owner).kind):
            continue
        if id(dtype) not in dtype_texts:
            dtype_texts[id(dtype)] = str(dtype)
        descriptions[id(array)] = Array(
            type_name(array),
            read["shape"](array),
            dtype_texts[id(dtype)],
            "cpu",
            read["nbytes"](owner),
            ("numpy", id(owner)),
        )
    return descriptions


_READ_IN_BULK = ("base", "flags", "dtype", "shape", "nbytes")
"""Properties of an array that its description needs."""


def library_type(module: str, name: str) -> type | None:
    """Return the class ``name`` of a library's module, such as ``torch`` and ``Tensor``; None if
    the user's code has not loaded the module, or if it is a stand-in.
    """
    loaded_module: Any = sys.modules.get(module)
    # The same as ``introspect.loaded_object``, without further calls, because this is called for
    # each of many tensors.
    if not type.__subclasscheck__(types.ModuleType, type(loaded_module)):
        return None
    kind = module_dict(loaded_module).get(name)
    if type.__subclasscheck__(type, type(kind)):
        return kind
    return None


def is_of_library(value: object, module: str, name: str) -> bool:
    """Return True if ``value`` is an instance of a class as in ``library_type``."""
    kind = library_type(module, name)
    return kind is not None and is_instance(value, kind)


def is_array(value: object) -> bool:
    """Return True for a NumPy array."""
    return is_of_library(value, "numpy", "ndarray")


def _describe_tensor(torch: Any, tensor: Any) -> Array | None:
    """Return the description of a tensor; None for a wrapper, whose memory belongs to the tensors
    inside it.
    """
    with torch._C.DisableTorchFunction():  # a subclass's own code must not run
        reader = reader_of(torch)
        memory = reader.own(tensor)
        is_foreign = reader.is_foreign(tensor)
        if is_foreign and (memory is None or memory.device == "meta"):
            return None  # a wrapper: the tensors inside it own the memory
        key: StorageKey = object_key(tensor)
        if memory is None:
            device = reader.device(tensor)
            sizes = reader.memory(tensor).storages
        else:
            device = memory.device
            sizes = memory.storages
            if sizes and reader.has_storage(tensor):
                key = ("torch", next(iter(sizes)))
        shape: tuple[int, ...] = ()
        dtype = ""
        if not is_foreign:
            shape = reader.shape(tensor) or ()
            dtype = reader.text(reader.read("dtype", tensor))
        return Array(type_name(tensor), shape, dtype, device, sum(sizes.values()), key)


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


def object_key(item: object) -> StorageKey:
    """Return the key of an object that stands for itself, among keys of storages."""
    return "object", id(item)


def memory_key(value: Any) -> StorageKey:
    """Return the key of a tensor's or array's storage; the key of the object itself if it has no
    storage, such as a sparse tensor.
    """
    return storage_key(value) or object_key(value)


def read_array(name: str, array: Any) -> Any:
    """Return a property of a NumPy array, such as ``nbytes``, by the base class's own descriptor: a
    subclass of the user may define another one.
    """
    return library_type("numpy", "ndarray").__dict__[name].__get__(array)


def _describe_ndarray(array: Any) -> Array:
    """Return the description of an array; a tensor's memory has the key of the tensor's storage."""
    owner = owner_of(array)
    size = 0
    if is_array(owner):
        key: StorageKey = ("numpy", id(owner))
        if read_array("flags", owner).owndata:
            size = int(read_array("nbytes", owner)) + _bytes_of_texts(owner)
        elif not is_on_closed_map(owner):
            size = max(_span(owner), _span(array))
    else:  # a tensor, whose storage is the memory of both
        key = object_key(owner)
        tensor = describe(owner)
        if tensor is not None:
            size = tensor.size_bytes
            key = tensor.storage
    return Array(
        type_name(array),
        tuple(read_array("shape", array)),
        str(read_array("dtype", array)),
        "cpu",
        size,
        key,
    )


def is_on_closed_map(array: Any) -> bool:
    """Return True for an array of a segment of shared memory that is closed: its addresses are not
    mapped, and nothing may read it.
    """
    mapped: Any = _viewed_by(array)
    return is_of_library(mapped, "mmap", "mmap") and not map_bytes(mapped)


def map_bytes(mapped: Any) -> int:
    """Return the bytes of an ``mmap``; 0 if it is closed."""
    if mmap.mmap.closed.__get__(mapped):  # type: ignore[attr-defined]  # typeshed has a property
        return 0
    return mmap.mmap.__len__(mapped)


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
    """Return the bytes of memory from an array's first element to its last.

    They are fewer than ``nbytes`` if it is broadcast, as ``np.broadcast_to(0.0, (1000, 1000))``,
    whose elements are one.
    """
    shape = read_array("shape", array)
    if 0 in shape:
        return 0
    span = int(read_array("itemsize", array))
    for size, stride in zip(shape, read_array("strides", array), strict=True):
        span += abs(stride) * (size - 1)
    return span


def holds_objects(dtype: Any) -> bool:
    """Return True if arrays of a dtype refer to Python objects.

    NumPy's ``hasobject`` is also True for ``StringDType``, whose texts are no objects.
    """
    return bool(dtype.hasobject) and dtype.kind != STRING_KIND


STRING_KIND = "T"
"""Kind of NumPy's ``StringDType``, whose texts are in memory of the dtype."""


def has_objects(value: object) -> bool:
    """Return True for an array whose elements are objects, or have fields of objects."""
    return is_array(value) and holds_objects(read_array("dtype", value))


def elements(array: Any) -> list[Any] | None:
    """Return the elements of an array of objects, in lists nested like the array; None for any
    other array, and for one with too many elements.
    """
    if not has_objects(array) or read_array("size", array) > _MOST_ELEMENTS:
        return None
    try:
        items = read_array("tolist", array)()
    except Exception as error:  # a half-made array
        if is_from_signal(error):
            raise
        return None
    if type(items) is list:
        return items
    return [items]


def holding_objects(arrays: Sequence[Any]) -> list[bool]:
    """Return for each NumPy array whether its elements are objects, or have fields of objects."""
    if not arrays:
        return []
    array_type: Any = library_type("numpy", "ndarray")
    dtypes = list(map(array_type.__dict__["dtype"].__get__, arrays))
    dtypes_by_id = {id(dtype): dtype for dtype in dtypes}
    of_objects = {key for key, dtype in dtypes_by_id.items() if holds_objects(dtype)}
    return list(map(of_objects.__contains__, map(id, dtypes)))


def object_arrays(arrays: Sequence[Any]) -> list[Any]:
    """Return the NumPy arrays whose elements are objects, or have fields of objects."""
    return list(compress(arrays, holding_objects(arrays)))


def plain_arrays(items: Sequence[object]) -> set[int]:
    """Return the identities of the plain NumPy arrays among objects: without objects and texts, and
    of no subclass. Such an array refers to nothing, or only to the array of which it is a view.
    """
    array_type: Any = library_type("numpy", "ndarray")
    if array_type is None:
        return set()
    read_dtype = array_type.__dict__["dtype"].__get__
    plain = set[int]()
    for array in of_types({id(array_type)}, items):
        dtype = read_dtype(array)
        has_references = dtype.hasobject or dtype.kind == STRING_KIND
        if not has_references and _views_nothing_else(array, array_type):
            plain.add(id(array))
    return plain


def _views_nothing_else(array: Any, array_type: Any) -> bool:
    """Return True if an array owns its memory, or is a view of a NumPy array of no subclass."""
    viewed = array_type.__dict__["base"].__get__(array)
    return viewed is None or type(viewed) is array_type


def flat_elements(array: Any) -> list[Any] | None:
    """Return the objects in an array in one flat list; of a structured array, the objects in all of
    its fields. None for an array without objects, and for one with too many.
    """
    if not is_array(array):
        return None
    dtype = read_array("dtype", array)
    if dtype.names is None:
        return _flattened(elements(array), read_array("ndim", array))
    if not holds_objects(dtype):
        return None
    base: Any = library_type("numpy", "ndarray")
    objects = list[Any]()
    for name in dtype.names:
        if dtype[name].hasobject:
            field = base.__getitem__(base.view(array, base), name)
            objects_of_field = flat_elements(field)
            if objects_of_field is None:
                return None
            objects += objects_of_field
    return objects


def _flattened(items: list[Any] | None, dimensions: int) -> list[Any] | None:
    """Return the elements of nested lists in one list."""
    if items is not None:
        for _ in range(dimensions - 1):
            items = list(chain.from_iterable(items))
    return items


def parts_of_array(array: Any, number: int, step: int) -> Iterator[list[Any]]:
    """Yield the objects in an array in lists, field by field if it is a structured array. One list
    of a hundred million objects would take 800 MiB.

    Args:
        array: the array.
        number: number of objects in each list.
        step: number of elements from the start of one list to the start of the next one.
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


def memory_of(array: Any) -> object:
    """Return the owner of an array's memory: an array, or the bytes, memory map or tensor that it
    views.
    """
    owner = owner_of(array)
    if not is_array(owner):
        return owner
    viewed = other_owner_of(owner)
    is_memory = is_atom(viewed) or is_of_library(viewed, "mmap", "mmap")
    if viewed is not None and is_memory:
        return viewed
    return owner


def inside_pandas(item: object) -> list[object]:
    """Return the arrays in a pandas object, such as a frame, or in a tuple of pandas objects."""
    arrays = list[object]()
    visited_ids = set[int]()
    to_visit = [item]
    while to_visit:
        part = to_visit.pop()
        if id(part) in visited_ids:
            continue
        visited_ids.add(id(part))
        if is_array(part):
            arrays.append(part)
        elif is_of_pandas(part) or type(part) is tuple or type(part) is dict:
            to_visit += gc.get_referents(part)
    return arrays


def is_of_pandas(item: object) -> bool:
    """Return True for an instance, not a class, whose class pandas defined."""
    return module_of(item).partition(".")[0] == "pandas" and not is_instance(item, type)


def owner_of(array: Any) -> Any:
    """Return the array or tensor that owns the memory of ``array``: itself, or the base of the
    view.
    """
    while read_array("base", array) is not None:
        viewed = _viewed_by(array)
        if is_of_library(viewed, "torch", "Tensor"):
            return viewed
        if not is_array(viewed):
            return array
        array = viewed
    return array


def other_owner_of(array: Any) -> object:
    """Return the object that owns the memory of ``array``, such as the ``bytearray`` behind
    ``np.frombuffer``; None if an array or a tensor owns it.
    """
    owner = owner_of(array)
    return _viewed_by(owner) if is_array(owner) else None


def bases_of(array: Any) -> list[object]:
    """Return the objects whose data an array shows: the arrays of which it is a view, and the bytes
    or other object at the end.
    """
    read_base: Any = library_type("numpy", "ndarray").__dict__["base"].__get__
    bases = list[object]()
    viewed = read_base(array)
    while viewed is not None:
        bases.append(viewed)
        if not is_array(viewed):
            break
        viewed = read_base(viewed)
    return bases


def _viewed_by(array: Any) -> Any:
    """Return the object whose memory an array shows; None if it is the array's own."""
    viewed = read_array("base", array)
    if type_name(viewed) == "DummyArray":  # between an array of ``as_strided`` and its base
        attributes = instance_dict(viewed) or {}
        viewed = attributes.get("base")
    if type(viewed) is memoryview:
        return viewed.obj
    return viewed


ArraySpan = tuple[int, int, int]
"""An array's identity, and the addresses where its memory starts and ends."""


def span_of(array: Any) -> ArraySpan:
    """Return an array's identity, and the start and end of its memory."""
    start = int(read_array("__array_interface__", array)["data"][0])
    return id(array), start, start + int(read_array("nbytes", array))


def spans_of(arrays: Iterable[Any]) -> set[ArraySpan]:
    """Return the addresses of the arrays that own the memory of some arrays. Those of closed shared
    memory are left out: their addresses are no longer mapped.
    """
    owners = filter(is_array, map(owner_of, arrays))
    return {span_of(owner) for owner in owners if not is_on_closed_map(owner)}
