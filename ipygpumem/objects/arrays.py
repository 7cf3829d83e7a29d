"""Describes tensors and arrays: what they are, and how many bytes they take. Finds those that an object holds.

The objects belong to the user. They are recognised by ``type()``, read through their base class's own
descriptors, and never asked for their ``repr``, compared, or touched through ``__getattr__``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from ipygpumem.introspect import class_dict, instance_dict, is_atom, is_instance, module_of, type_name

NOT_ENTERED = (types.FrameType, types.CodeType, types.TracebackType, types.BuiltinFunctionType)
"""No walk goes on here: what lies behind belongs to everybody."""

TOOLS = {"IPython", "ipykernel", "ipygpumem"}
"""Objects of these lead to the shell, and so to all outputs."""

StorageKey = tuple[str, int]
"""Identity of a storage while it lives."""

_MOST_ELEMENTS = 1_000_000
"""How many elements of an array of objects are looked at."""


@dataclass(frozen=True)
class Array:
    """One tensor or array. Those with the same ``storage`` share their bytes."""

    type_name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    size_bytes: int
    """Bytes of the whole storage, which a view keeps alive."""
    storage: tuple[str, int]


def describe(value: object) -> Array | None:
    """Return what ``value`` is if it is a torch tensor or a NumPy array, else None."""
    try:
        if is_of_library(value, "torch", "Tensor"):
            return _describe_tensor(sys.modules["torch"], value)
        array_type = library_type("numpy", "ndarray")
        if array_type is not None and is_instance(value, array_type):
            return _describe_ndarray(array_type, value)
    except Exception:  # an exotic or half-made array is left out; it must not stop a clean-up
        return None
    return None


def library_type(module: str, name: str) -> type | None:
    """Return a class of a library that the user's code has loaded; None if it has not, or loaded a stand-in."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if is_instance(kind, type) else None


def is_of_library(value: object, module: str, name: str) -> bool:
    """Whether the type of ``value`` is that class of a loaded library, or derives from it."""
    kind = library_type(module, name)
    return kind is not None and is_instance(value, kind)


def _describe_tensor(torch: Any, tensor: Any) -> Array | None:
    base = torch.Tensor
    with torch._C.DisableTorchFunction():  # a subclass's own code must not run
        if answers_itself(torch, type(tensor)):
            return _describe_storage(base, tensor)
        dtype, device = base.dtype.__get__(tensor), base.device.__get__(tensor)
        try:
            shape = tuple(int(size) for size in base.shape.__get__(tensor))
        except (RuntimeError, AttributeError):  # nested tensors have no single shape
            shape = ()
        try:
            storage = base.untyped_storage(tensor)
            size, key = storage.nbytes(), ("torch", int(storage._cdata))
        except (RuntimeError, NotImplementedError):  # sparse tensors have no storage of their own
            size, key = _sparse_bytes(base, tensor), ("object", id(tensor))
    if device.type == "meta":
        size = 0
    return Array(type_name(tensor), shape, str(dtype).removeprefix("torch."), str(device), size, key)


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
SPARSE_PARTS = {
    "sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), _COMPRESSED_ROWS),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), _COMPRESSED_COLUMNS),
}
"""The methods that give the tensors of which a sparse one is made, by its layout."""


def _sparse_bytes(base: Any, tensor: Any) -> int:
    """Return what a sparse tensor's parts take; of another layout without a storage, its elements times their size."""
    names = SPARSE_PARTS.get(str(base.layout.__get__(tensor)).removeprefix("torch."))
    if names is None:
        return int(base.numel(tensor) * base.element_size(tensor))
    return sum(int(base.untyped_storage(getattr(base, name)(tensor)).nbytes()) for name in names)


def storage_key(value: Any) -> tuple[str, int] | None:
    """Return the identity of a tensor's or array's storage; None for an object that has none of its own."""
    array_type = library_type("numpy", "ndarray")
    if array_type is not None and is_instance(value, array_type):
        value = owner_of(array_type, value)
        if is_instance(value, array_type):
            return "numpy", id(value)
    torch: Any = sys.modules["torch"]
    try:
        with torch._C.DisableTorchFunction():
            return "torch", int(torch.Tensor.untyped_storage(value)._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse, or a wrapper
        return None


def answers_itself(torch: Any, kind: type) -> bool:
    """Whether a tensor class has its own ``__torch_dispatch__``, which may be asked even for a shape."""
    below_tensor = itertools.takewhile(lambda base: base is not torch.Tensor, type.mro(kind))
    return any("__torch_dispatch__" in class_dict(base) for base in below_tensor)


def _describe_storage(base: Any, tensor: Any) -> Array | None:
    """Return a tensor by its storage alone; None for a wrapper, whose memory is that of the tensors inside it."""
    storage = base.untyped_storage(tensor)
    if storage.device.type == "meta" or storage.data_ptr() == 0:
        return None
    return Array(type_name(tensor), (), "", str(storage.device), storage.nbytes(), ("torch", int(storage._cdata)))


def _describe_ndarray(array_type: type, array: Any) -> Array:
    def read(name: str, owner: Any) -> Any:
        return array_type.__dict__[name].__get__(owner)

    owner = owner_of(array_type, array)
    if not is_instance(owner, array_type):  # a tensor: its storage is the memory of both
        behind = describe(owner)
        size, key = (0, ("object", id(owner))) if behind is None else (behind.size_bytes, behind.storage)
    elif read("flags", owner).owndata:
        size, key = int(read("nbytes", owner)), ("numpy", id(owner))
    else:
        size, key = max(_span(read, owner), _span(read, array)), ("numpy", id(owner))
    return Array(type_name(array), tuple(read("shape", array)), str(read("dtype", array)), "cpu", size, key)


def _span(read: Callable[[str, Any], Any], array: Any) -> int:
    """Return the bytes from an array's first element to its last; a broadcast one has fewer than its elements."""
    shape = read("shape", array)
    if 0 in shape:
        return 0
    strides = read("strides", array)
    return int(
        read("itemsize", array) + sum(abs(stride) * (size - 1) for size, stride in zip(shape, strides, strict=True))
    )


def elements(array: Any) -> list[Any] | None:
    """Return the objects in a NumPy array of objects, nested as the array is; None for any other array."""
    array_type = library_type("numpy", "ndarray")
    if array_type is None or not is_instance(array, array_type):
        return None
    read = array_type.__dict__
    if not read["dtype"].__get__(array).hasobject or read["size"].__get__(array) > _MOST_ELEMENTS:
        return None
    try:
        items = read["tolist"](array)
    except Exception:  # a half-made array
        return None
    return items if type(items) is list else [items]


def holding_objects(arrays: Sequence[Any]) -> list[bool]:
    """Say of each NumPy array whether its elements are objects."""
    array_type: Any = library_type("numpy", "ndarray")
    dtypes = list(map(array_type.__dict__["dtype"].__get__, arrays)) if arrays else []
    of_objects = {key for key, dtype in {id(dtype): dtype for dtype in dtypes}.items() if dtype.hasobject}
    return list(map(of_objects.__contains__, map(id, dtypes)))


def flat_elements(array: Any) -> list[Any] | None:
    """Return the objects in a NumPy array of objects in one list, whatever its shape; None for any other array."""
    items = elements(array)
    if items is not None:
        array_type: Any = library_type("numpy", "ndarray")
        for _ in range(array_type.__dict__["ndim"].__get__(array) - 1):
            items = list(itertools.chain.from_iterable(items))
    return items


def slot_descriptors(kind: type) -> dict[str, Any]:
    """Return the slots of a class and its bases by their names."""
    descriptors: dict[str, Any] = {}
    for base in reversed(type.mro(kind)):
        members = list(class_dict(base).items())
        descriptors.update((name, member) for name, member in members if type(member) is types.MemberDescriptorType)
    descriptors.pop("__dict__", None)  # some classes in C show it so; see ``instance_dict``
    return descriptors


def slots(item: object, descriptors: dict[str, Any] | None = None) -> dict[str, object]:
    """Return the attributes of an object that live in slots and are not empty."""
    values: dict[str, object] = {}
    for name, slot in (slot_descriptors(type(item)) if descriptors is None else descriptors).items():
        with contextlib.suppress(AttributeError, TypeError):
            values[name] = slot.__get__(item)
    return values


def memory_of(array_type: type, array: Any) -> object:
    """Return what owns an array's memory: an array, or the bytes, the memory map or the tensor that it shows."""
    owner = owner_of(array_type, array)
    behind = _behind(array_type, owner) if is_instance(owner, array_type) else None
    return behind if behind is not None and (is_atom(behind) or is_map(behind)) else owner


def inside_pandas(item: object) -> list[object]:
    """Return the arrays in one of pandas' own objects, or in a tuple of them."""
    array_type = library_type("numpy", "ndarray")
    seen, arrays, waiting = set[int](), list[object](), [item]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if array_type is not None and is_instance(part, array_type):
            arrays.append(part)
        elif is_of_pandas(part) or type(part) is tuple or type(part) is dict:
            waiting += gc.get_referents(part)
    return arrays


def is_of_pandas(item: object) -> bool:
    """Whether pandas has made the class of an object, which is no class itself."""
    return module_of(item).partition(".")[0] == "pandas" and not is_instance(item, type)


def is_map(owner: object) -> bool:
    """Whether an object is a memory map."""
    return is_of_library(owner, "mmap", "mmap")


def owner_of(array_type: type, array: Any) -> Any:
    """Return the array or tensor whose memory ``array`` shows: itself, or what it is a view of."""
    while True:
        behind = _behind(array_type, array)
        if is_of_library(behind, "torch", "Tensor"):
            return behind
        if not is_instance(behind, array_type):
            return array
        array = behind


def _behind(array_type: type, array: Any) -> Any:
    behind = array_type.__dict__["base"].__get__(array)
    if type_name(behind) == "DummyArray":  # np.lib.stride_tricks puts one between a view and its array
        behind = (instance_dict(behind) or {}).get("base")
    return behind.obj if type(behind) is memoryview else behind


def watch(item: object) -> Callable[[], bool]:
    """Return a function that says whether the memory of a tensor or array is still alive; it keeps nothing alive.

    A view that survives keeps its storage, so the storage is watched and not the object.
    """
    if is_of_library(item, "torch", "Tensor"):
        torch: Any = sys.modules["torch"]
        with contextlib.suppress(Exception), torch._C.DisableTorchFunction():  # some have no storage
            return _WeakStorage(torch.Tensor.untyped_storage(item)).is_alive
    array_type = library_type("numpy", "ndarray")
    if array_type is not None and is_instance(item, array_type):
        item = owner_of(array_type, item)
        return watch(item) if not is_instance(item, array_type) else WatchedArray(item)
    reference = weakref.ref(item)
    return lambda: reference() is not None


Span = tuple[int, int, int]


def place_of(array: Any) -> Span:
    """Return what tells an array from others that are alive: its identity, and where its memory begins and ends."""
    read = library_type("numpy", "ndarray").__dict__
    start = int(read["__array_interface__"].__get__(array)["data"][0])
    return id(array), start, start + int(read["nbytes"].__get__(array))


class WatchedArray:
    """Says whether the memory of an array is still alive, without keeping it so.

    NumPy resizes no array that somebody refers to weakly. So we do that only until ``let_go``, while none of the user's
    code runs. From then on ``look`` has to be told which arrays there are.
    """

    def __init__(self, array: Any) -> None:
        self._reference: weakref.ref[Any] | None = weakref.ref(array)
        self._place = place_of(array)
        self._is_alive = True

    def __call__(self) -> bool:
        """Whether it is."""
        return self._is_alive if self._reference is None else self._reference() is not None

    def let_go(self, places: Container[Span]) -> None:
        """Refer to it no more if it is at one of ``places``, where ``look`` finds it again: the user's code goes on."""
        if self._place in places:
            self._is_alive, self._reference = self(), None

    def look(self, places: Container[Span]) -> None:
        """See whether it is among the arrays at ``places``; another one that took its place is not told from it."""
        if self._reference is None:
            self._is_alive = self._place in places


class _WeakStorage:
    """A weak reference to a storage of torch. torch's own has a finaliser, and cannot itself be referred to weakly."""

    def __init__(self, storage: Any) -> None:
        self._kind: Any = type(storage)
        self._key = storage._weak_ref()

    def is_alive(self) -> bool:
        return not self._kind._expired(self._key)

    def __del__(self) -> None:
        if hasattr(self, "_key"):
            self._kind._free_weak_ref(self._key)
