"""States of objects that the code of an estimate can change: saved once, and restored at the end.

``ObjectStates.save`` saves the state of one object by its kind, and returns the objects inside it,
whose states are saved next.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import io
import itertools
import mmap
import operator
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ipygpumem.estimating.records import Note
from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    is_users,
    is_users_class,
    is_users_module,
    module_dict,
    module_of,
    type_name,
)
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import MIB, format_bytes

_LARGEST_ARRAY_BYTES = 256 * MIB
_SHARE_FOR_ARRAYS = 4
"""Copies of arrays take at most the free host memory divided by this number."""
_LIBRARIES_OF_KERNEL = {
    "IPython",
    "ipykernel",
    "ipygpumem",
    "traitlets",
    "zmq",
    "logging",
    "threading",
    "asyncio",
    "matplotlib",
}
"""Libraries whose objects an estimate does not restore, because other code of the kernel changes
them at the same time.
"""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
CONTAINERS = (OrderedDict, dict, deque, list, set)
"""Containers whose items are restored."""
_CACHE: Any = type(functools.lru_cache(len))
_C_DATA = ctypes.Structure.__mro__[1]
"""Base class in C of all ctypes objects."""
_FILE = io.FileIO.__mro__[-2]
"""Base class in C of all files."""


class ObjectStates:
    """The saved states of objects, each with a function that restores it.

    Args:
        note: gets a line for each array that is too large for a copy.

    Attributes:
        undo: the functions that restore the states, in the order in which these were saved.
        spared: containers that are not restored, by identity.
    """

    def __init__(self, note: Note) -> None:
        self.undo: list[Callable[[], object]] = []
        self.spared: dict[int, object] = {}
        self._note = note
        self._free_bytes = available_bytes() // _SHARE_FOR_ARRAYS
        """Bytes that further copies of arrays may take."""

    def save(self, value: Any) -> list[Any]:
        """Save the state of one object, and return the objects that it holds."""
        for kind, save in _SAVERS:
            if is_instance(value, kind):
                return save(self, value)
        for module, name, save in _LIBRARIES_SAVERS:
            if is_of_library(value, module, name):
                return save(self, value)
        if _is_shared_by_threads(value):
            return []
        return self._save_attributes(value)

    def save_state(
        self,
        get: Callable[[], Any],
        put: Callable[[Any], object],
        same: Callable[[Any, Any], bool] | None = None,
    ) -> Any:
        """Save a state, and return it.

        Args:
            get: reads the state.
            put: restores it at the end.
            same: compares the state at the end with the saved one; if they are the same, ``put`` is
                not called. Without a comparison it is always called.
        """
        saved = get()

        def restore() -> None:
            # Without a comparison the state is not read again: the code may have deleted it.
            if same is None or not same(get(), saved):
                put(saved)

        self.undo.append(restore)
        return saved

    def _save_leaf(self, get: Callable[[], Any], put: Callable[[Any], object]) -> list[Any]:
        """Save a state without objects to save next, such as a position; return an empty list."""
        self.save_state(get, put)
        return []

    # -- containers --------------------------------------------------------------------------------

    def _save_container(self, value: Any) -> list[Any]:
        """Save and return the items and attributes of a dict, list, deque or set."""
        if id(value) in self.spared:
            return []
        # The base class's methods, because a user's class may override them.
        base: Any = next(kind for kind in CONTAINERS if is_instance(value, kind))
        if issubclass(base, dict):
            items = self._save_dictionary(base, value)
        else:
            items = self._save_sequence(base, value)
        return [*items, *self._save_attributes(value)]

    def _save_dictionary(self, base: Any, value: Any) -> list[Any]:
        """Save a dict's items by the methods of ``base``; return keys and values in turn."""

        def contents() -> list[Any]:
            return list(itertools.chain.from_iterable(base.items(value)))

        def fill(saved: list[Any]) -> None:
            base.clear(value)
            for key, item in zip(saved[::2], saved[1::2], strict=True):
                base.__setitem__(value, key, item)

        items: list[Any] = self.save_state(contents, fill, _are_same)
        return items

    def _save_sequence(self, base: Any, value: Any) -> list[Any]:
        """Save and return the items of a list, a deque or a set, by the methods of ``base``."""

        def contents() -> list[Any]:
            return list(base.__iter__(value))

        def fill(saved: list[Any]) -> None:
            base.clear(value)
            if base is set:
                set.update(value, saved)
            else:
                base.extend(value, saved)

        items: list[Any] = self.save_state(contents, fill, _are_same)
        return items

    # -- classes, functions and attributes ---------------------------------------------------------

    def _save_class(self, value: Any) -> list[Any]:
        """Save the attributes of a user's class; return them and its base classes."""
        if not is_users_class(value):
            return []

        def attributes() -> dict[str, Any]:
            return dict(class_dict(value))

        def restore(saved: dict[str, Any]) -> None:
            now = attributes()
            for name in now.keys() - saved.keys():
                type.__delattr__(value, name)
            for name, item in saved.items():
                if name not in now or now[name] is not item:
                    type.__setattr__(value, name, item)

        inner = dict(self.save_state(attributes, restore))
        inner.pop("__dict__", None)  # descriptors
        inner.pop("__weakref__", None)
        return [*inner.values(), *type.mro(value)]

    def _parts_of_function(self, value: Any) -> list[Any]:
        """Return the objects that a function holds: attributes, defaults, cells, and the globals of
        a user's module. Those of the notebook are copied instead.
        """
        items = [value.__dict__, value.__defaults__, value.__kwdefaults__]
        items += value.__closure__ or ()
        space = value.__globals__
        is_of_module = "__file__" in space
        if is_of_module and is_users(value.__code__.co_filename):
            items.append(space)
        return items

    def _save_cell(self, value: Any) -> list[Any]:
        """Save and return the content of a closure's cell."""

        def contents() -> Any:
            return value.cell_contents

        def fill(saved: Any) -> None:
            value.cell_contents = saved

        with contextlib.suppress(ValueError):  # an empty cell
            return [self.save_state(contents, fill)]
        return []

    def _save_attributes(self, value: Any) -> list[Any]:
        """Save an object's attributes, and return the objects in them.

        Those in slots of the user's classes are saved here. The object's dict is returned, to be
        saved next.
        """
        items: list[Any] = []
        for base in type.mro(type(value)):
            if not is_users_class(base):
                continue
            members = class_dict(base).values()
            slots = [member for member in members if type(member) is types.MemberDescriptorType]
            items += [self._save_slot(value, slot) for slot in slots]
        return [*items, type(value), instance_dict(value)]

    def _save_slot(self, value: Any, slot: Any) -> Any:
        """Save and return the value in an object's slot; None if the slot is empty."""

        def get() -> Any:
            return slot.__get__(value)

        def put(saved: Any) -> None:
            slot.__set__(value, saved)

        def empty() -> None:
            with contextlib.suppress(AttributeError):  # it is still empty
                slot.__delete__(value)

        try:
            return self.save_state(get, put)
        except AttributeError:  # it is empty
            self.undo.append(empty)
            return None

    # -- data --------------------------------------------------------------------------------------

    def _save_tensor(self, value: Any) -> list[Any]:
        """Save a tensor's gradient, whether it requires one, and its attributes; return the objects
        in these.
        """
        if is_instance(value, FakeTensor):
            return []
        gradient = None
        with torch._C.DisableTorchFunction():  # a subclass's own code must not run
            required_grad = value.requires_grad
            if value.is_leaf:
                gradient = value.grad

        def undo() -> None:
            if value.is_leaf and value.requires_grad is not required_grad:
                value.requires_grad_(required_grad)
            if value.is_leaf and value.grad is not gradient:
                value.grad = gradient

        self.undo.append(undo)
        return [gradient, *self._save_attributes(value)]

    def _save_array(self, value: Any) -> list[Any]:
        """Save a copy of a NumPy array if there is memory for it; return its objects."""
        if not value.flags.writeable or not self._reserve_for_copy(value, value.nbytes):
            return []
        numpy = sys.modules["numpy"]
        copy = functools.partial(numpy.array, value, copy=True, subok=False)
        put = functools.partial(numpy.copyto, value)
        saved = self.save_state(copy, put)
        if saved.dtype.hasobject:
            return list(saved.flat)
        return []

    def _save_frame(self, value: Any) -> list[Any]:
        """Save a pandas DataFrame or Series, by a shallow copy if pandas copies on write.

        Return the objects in it.
        """
        blocks = value._mgr.blocks
        copies_on_write = _pandas_copies_on_write()
        size_bytes = sum(getattr(block.values, "nbytes", 0) for block in blocks)
        if not copies_on_write and not self._reserve_for_copy(value, size_bytes):
            return []
        saved = value.copy(deep=not copies_on_write)
        attributes = dict(value.__dict__)

        def undo() -> None:
            value.__dict__.clear()
            value.__dict__.update(attributes)
            # Older versions of pandas cache columns, which are those of the changed frame.
            cached_columns = attributes.get("_item_cache", {})
            cached_columns.clear()
            object.__setattr__(value, "_mgr", saved._mgr)

        self.undo.append(undo)
        items = [value.attrs]
        for block in blocks:
            if block.dtype.kind == "O":
                items += getattr(block.values, "flat", ())
        return items

    def _reserve_for_copy(self, value: Any, size_bytes: int) -> bool:
        """Reserve memory for a copy of ``value``.

        If there is too little, note that the object will not be restored, and return False.
        """
        if size_bytes <= min(_LARGEST_ARRAY_BYTES, self._free_bytes):
            self._free_bytes -= size_bytes
            return True
        what = f"{type_name(value)} of {format_bytes(size_bytes)}"
        self._note(f"too large to be put back if the code changes it: {what}")
        return False

    def _save_buffer(self, value: Any) -> list[Any]:
        """Save the contents of a bytearray, an array or a mapped file."""
        itemsize = getattr(value, "itemsize", 1)
        if not self._reserve_for_copy(value, len(value) * itemsize):
            return []

        def contents() -> Any:
            return value[:]

        def fill(saved: Any) -> None:
            value[:] = saved

        return self._save_leaf(contents, fill)

    def _save_c_data(self, value: Any) -> list[Any]:
        """Save the contents of a ctypes object, such as that of a ``multiprocessing.Value``."""
        address = ctypes.addressof(value)
        size_bytes = ctypes.sizeof(value)

        def contents() -> bytes:
            return ctypes.string_at(address, size_bytes)

        def fill(saved: bytes) -> None:
            ctypes.memmove(address, saved, size_bytes)

        return self._save_leaf(contents, fill)

    def _save_file(self, value: Any) -> list[Any]:
        """Save the position of a file that is open for reading only, or the contents of a file in
        memory. Files that can be written are not restored, because what the code writes stays.
        """
        # Suppressed: it is closed, a pipe, or in the middle of a loop over its lines.
        with contextlib.suppress(OSError, ValueError):
            if is_instance(value, io.BytesIO) or is_instance(value, io.StringIO):
                return self._save_leaf(value.__getstate__, value.__setstate__)
            if value.readable() and not value.writable() and value.seekable():
                return self._save_leaf(value.tell, value.seek)
        return []

    # -- random generators -------------------------------------------------------------------------

    def _save_random_state(self, value: Any) -> list[Any]:
        """Save the state of a ``random.Random``."""
        # Not the methods of the user's class.
        get = functools.partial(random.Random.getstate, value)
        put = functools.partial(random.Random.setstate, value)
        return self._save_leaf(get, put)

    def _save_generator(self, value: Any) -> list[Any]:
        """Save the state of one of NumPy's random generators."""
        bits = getattr(value, "bit_generator", value)  # NumPy's Generator, or the one inside it

        def state() -> Any:
            return bits.state

        def set_state(saved: Any) -> None:
            bits.state = saved

        return self._save_leaf(state, set_state)


def _pandas_copies_on_write() -> bool:
    """Return True if a copy of a pandas frame shares memory until one of the two is changed."""
    pandas = sys.modules["pandas"]
    major_version, _, _ = pandas.__version__.partition(".")
    if major_version >= "3":
        return True
    return pandas.options.mode.copy_on_write is True


def _are_same(now: list[Any], saved: list[Any]) -> bool:
    """Return True if two lists have the identical objects in the same order; equal objects are not
    enough.
    """
    if len(now) != len(saved):
        return False
    return all(map(operator.is_, now, saved))


def _is_shared_by_threads(value: Any) -> bool:
    """Return True if other threads may change an object during the estimate: restoring it would
    undo their changes.

    Such objects of libraries, for example a ``queue.Queue``, have a lock. The estimated code works
    on copies of them.
    """
    library, _, _ = module_of(value).partition(".")
    if library == "torch" or is_users_class(type(value)):
        return False
    if library in _LIBRARIES_OF_KERNEL:
        return True
    attributes = instance_dict(value) or {}
    return any(type(item) in _LOCKS for item in list(attributes.values()))


def is_imported_users_module(module: Any) -> bool:
    """Return True for one of the user's modules; the notebook itself does not count."""
    if not is_users_module(module):
        return False
    return module_dict(module).get("__name__") != "__main__"


_Saver = Callable[[ObjectStates, Any], list[Any]]
_Savers = tuple[tuple[Any, _Saver], ...]


# Functions for objects whose own state cannot change: they return the objects inside.


def _items_of_tuple(_: ObjectStates, value: Any) -> list[Any]:
    return list(tuple.__iter__(value))


def _items_of_frozenset(_: ObjectStates, value: Any) -> list[Any]:
    return list(frozenset.__iter__(value))


def _parts_of_method(_: ObjectStates, value: Any) -> list[Any]:
    return [value.__func__, value.__self__]


def _wrapped_function(_: ObjectStates, value: Any) -> list[Any]:
    return [value.__func__]


def _attributes_of_thread(_: ObjectStates, value: Any) -> list[Any]:
    return [threading.local.__getattribute__(value, "__dict__")]


def _namespace_of_module(_: ObjectStates, value: Any) -> list[Any]:
    if not is_imported_users_module(value):
        return []
    return [module_dict(value)]


def _attributes_of_cache(_: ObjectStates, value: Any) -> list[Any]:
    return [instance_dict(value) or {}]


def _save_generator_of_torch(states: ObjectStates, value: Any) -> list[Any]:
    return states._save_leaf(value.get_state, value.set_state)


_CONTAINER_SAVERS: _Savers = (
    (dict, ObjectStates._save_container),
    (list, ObjectStates._save_container),
    (deque, ObjectStates._save_container),
    (set, ObjectStates._save_container),
    (tuple, _items_of_tuple),
    (frozenset, _items_of_frozenset),
)
_CODE_SAVERS: _Savers = (
    (type, ObjectStates._save_class),
    (types.FunctionType, ObjectStates._parts_of_function),
    (types.CellType, ObjectStates._save_cell),
    (types.MethodType, _parts_of_method),
    (threading.local, _attributes_of_thread),
    (types.ModuleType, _namespace_of_module),
    (_CACHE, _attributes_of_cache),
)
_DATA_SAVERS: _Savers = (
    (bytearray, ObjectStates._save_buffer),
    (array.array, ObjectStates._save_buffer),
    (mmap.mmap, ObjectStates._save_buffer),
    (_C_DATA, ObjectStates._save_c_data),
    (_FILE, ObjectStates._save_file),
    (torch.Tensor, ObjectStates._save_tensor),
    (torch.Generator, _save_generator_of_torch),
    (random.Random, ObjectStates._save_random_state),
)
_WRAPPER_SAVERS: _Savers = (
    (staticmethod, _wrapped_function),
    (classmethod, _wrapped_function),
)
_SAVERS: _Savers = (*_CONTAINER_SAVERS, *_CODE_SAVERS, *_DATA_SAVERS, *_WRAPPER_SAVERS)
"""Functions that save an object's state and return the objects inside it, by type.

The first type of which the object is an instance decides.
"""
_LIBRARIES_SAVERS: tuple[tuple[str, str, _Saver], ...] = (
    ("numpy", "ndarray", ObjectStates._save_array),
    ("pandas.core.generic", "NDFrame", ObjectStates._save_frame),
    ("numpy.random", "Generator", ObjectStates._save_generator),
    ("numpy.random", "BitGenerator", ObjectStates._save_generator),
)
"""The same for classes of libraries, which need not be imported: by module and name."""
