"""Rollback of an estimate: saves what its code can change without a copy, and puts it back afterwards.

That is the user's modules, their classes and objects, what these hold, what copies share with their originals, and
settings of torch and of the process.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import io
import mmap
import operator
import os
import random
import sys
import threading
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ipygpumem.estimating.records import Note
from ipygpumem.introspect import (
    instance_dict,
    is_atom,
    is_instance,
    is_users,
    is_users_module,
    module_dict,
    module_of,
    name_of,
    type_name,
)
from ipygpumem.objects import interrupts
from ipygpumem.objects.arrays import is_of_library
from ipygpumem.objects.walk import MOST_KEPT, Group, Walk
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import MIB, format_bytes

_LARGEST_ARRAY, _MOST_NAMED = 256 * MIB, 3
_SHARE_FOR_ARRAYS = 4
"""All copies of arrays take at most one part in so many of the free host memory."""
_FOREIGN = {"IPython", "ipykernel", "ipygpumem", "traitlets", "zmq", "logging", "threading", "asyncio", "matplotlib"}
"""Modules whose objects have a life of their own: an estimate does not put them back."""
_CACHE: Any = type(functools.lru_cache(len))
_C_DATA, _FILE = ctypes.Structure.__mro__[1], io.FileIO.__mro__[-2]
"""The bases in C of all ctypes objects and of all files."""


class Restorer(Walk):
    """Keeps what objects hold, each once, when they are met; ``put_back`` gives it back to them.

    Args:
        fakes: the estimate's, whose tensors nothing must hold afterwards.
        note: takes what could not be put back.
    """

    def __init__(self, fakes: FakeTensorMode, note: Note) -> None:
        super().__init__(MOST_KEPT, find=())
        self._fakes = fakes
        self._note = note
        self._undo: list[Callable[[], object]] = []
        self._free_bytes = available_bytes() // _SHARE_FOR_ARRAYS
        self._modules = set(sys.modules)
        self._keep_settings()
        self.take(*(module_dict(module) for module in list(sys.modules.values()) if _is_users_module(module)))

    def take(self, *values: Any) -> None:
        """Keep what ``values`` hold, and what that holds."""
        for _ in self.run([(values, None)]):
            """None is an array: all is entered."""

    def kind_of(self, item: object) -> str:
        """Return that an object is entered, unless it is a plain number, text or None."""
        return "skip" if is_atom(item) and type(item) is not bytearray else "leading"

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Keep some objects, and yield what they hold."""
        for value in objects:
            try:
                yield self._held(value), None
            except Exception:  # noqa: PERF203  # what no other of its kind does must not end the estimate
                self._fail(type_name(value))

    def _held(self, value: Any) -> list[Any]:
        """Keep one object, and return what it holds."""
        for kind, keep in _KEEPERS:
            if is_instance(value, kind):
                return keep(self, value)
        if is_of_library(value, "numpy", "ndarray"):
            return self._array(value)
        if is_of_library(value, "pandas.core.generic", "NDFrame"):
            return self._frame(value)
        if is_of_library(value, "numpy.random", "Generator"):
            value = value.bit_generator
        if is_of_library(value, "numpy.random", "BitGenerator"):
            return self._state(lambda: value.state, lambda state: setattr(value, "state", state))
        if module_of(value).partition(".")[0] in _FOREIGN:
            return []
        return self._attributes(value)

    # -- kinds of objects -----------------------------------------------------------------------------------------

    def _container(self, value: Any) -> list[Any]:
        base: Any = next(kind for kind in (OrderedDict, dict, deque, list, set) if is_instance(value, kind))
        pairs = issubclass(base, dict)

        def contents() -> list[Any]:
            return [item for pair in base.items(value) for item in pair] if pairs else list(base.__iter__(value))

        def undo() -> None:
            now = contents()
            if len(now) == len(kept) and all(map(operator.is_, now, kept)):
                return
            base.clear(value)
            if pairs:
                for key, item in zip(kept[::2], kept[1::2], strict=True):
                    base.__setitem__(value, key, item)
            else:
                (base.update if base is set else base.extend)(value, kept)

        kept = contents()
        self._undo.append(undo)
        return [*kept, *self._attributes(value)]

    def _class(self, value: Any) -> list[Any]:
        if not _is_users_class(value):
            return []
        kept = instance_dict(value) or {}

        def undo() -> None:
            now = instance_dict(value) or {}
            for name in [*now, *kept]:
                if name in kept and now.get(name) is not kept[name]:
                    type.__setattr__(value, name, kept[name])
                elif name not in kept and name in now:
                    type.__delattr__(value, name)

        self._undo.append(undo)
        return [*(item for name, item in kept.items() if name not in ("__dict__", "__weakref__")), *type.mro(value)]

    def _function(self, value: Any) -> list[Any]:
        space = value.__globals__
        cells = value.__closure__ or ()
        held = [value.__dict__, value.__defaults__, value.__kwdefaults__, *cells]
        return [*held, space] if is_users(value.__code__.co_filename) and "__file__" in space else held

    def _cell(self, value: Any) -> list[Any]:
        try:
            kept = value.cell_contents
        except ValueError:  # an empty one
            return []
        self._undo.append(lambda: setattr(value, "cell_contents", kept))
        return [kept]

    def _tensor(self, value: Any) -> list[Any]:
        if is_instance(value, FakeTensor):
            return []
        with torch._C.DisableTorchFunction():  # a subclass's own code must not run
            gradient, wanted = value.grad if value.is_leaf else None, value.requires_grad

        def undo() -> None:
            if value.is_leaf and value.requires_grad is not wanted:
                value.requires_grad_(wanted)
            if value.is_leaf and value.grad is not gradient:
                value.grad = gradient

        self._undo.append(undo)
        return [gradient, *self._attributes(value)]

    def _state(self, get: Callable[[], Any], put: Callable[[Any], object]) -> list[Any]:
        """Keep a state that is read and set by calls."""
        state = get()
        self._undo.append(lambda: put(state))
        return []

    def _array(self, value: Any) -> list[Any]:
        if not value.flags.writeable or not self._fits(value, value.nbytes):
            return []
        numpys = sys.modules["numpy"]
        kept = numpys.array(value, copy=True, subok=False)
        self._undo.append(lambda: numpys.copyto(value, kept))
        return list(kept.flat) if kept.dtype.hasobject else []

    def _frame(self, value: Any) -> list[Any]:
        """Keep a pandas DataFrame or Series: by a shallow copy where pandas copies on write."""
        pandas = sys.modules["pandas"]
        copies_on_write = pandas.__version__.partition(".")[0] >= "3" or pandas.options.mode.copy_on_write is True
        size_bytes = sum(getattr(block.values, "nbytes", 0) for block in value._mgr.blocks)
        if not copies_on_write and not self._fits(value, size_bytes):
            return []
        kept = value.copy(deep=not copies_on_write)
        attributes = dict(value.__dict__)

        def undo() -> None:
            value.__dict__.clear()
            value.__dict__.update(attributes)
            attributes.get("_item_cache", {}).clear()  # of older ones: columns of the manager that goes
            object.__setattr__(value, "_mgr", kept._mgr)

        self._undo.append(undo)
        cells = [block.values for block in kept._mgr.blocks if block.dtype.kind == "O"]
        return [value.attrs, *(item for values in cells for item in getattr(values, "flat", ()))]

    def _fits(self, value: Any, size_bytes: int) -> bool:
        """Return True if there is room to keep a copy of ``value``."""
        if size_bytes > min(_LARGEST_ARRAY, self._free_bytes):
            self._note(
                f"too large to be put back if the code changes it: {type_name(value)} of {format_bytes(size_bytes)}"
            )
            return False
        self._free_bytes -= size_bytes
        return True

    def _buffer(self, value: Any) -> list[Any]:
        """Keep the contents of a bytearray, an array or a mapped file."""
        kept = value[:] if self._fits(value, len(value) * getattr(value, "itemsize", 1)) else None

        def undo() -> None:
            if value[:] != kept:
                value[:] = kept

        if kept is not None:
            self._undo.append(undo)
        return []

    def _c_data(self, value: Any) -> list[Any]:
        """Keep the contents of a ctypes object, such as a ``multiprocessing.Value``'s."""
        return self._state(
            lambda: ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value)),
            lambda kept: ctypes.memmove(ctypes.addressof(value), kept, len(kept)),
        )

    def _file(self, value: Any) -> list[Any]:
        """Keep the position of a file that is read, or the contents of one in memory."""
        if is_instance(value, io.BytesIO) or is_instance(value, io.StringIO):
            return self._state(value.__getstate__, value.__setstate__)
        with contextlib.suppress(OSError, ValueError):  # closed, a pipe, or in the middle of a loop over its lines
            if value.readable() and not value.writable() and value.seekable():
                return self._state(value.tell, value.seek)
        return []

    def _attributes(self, value: Any) -> list[Any]:
        """Keep an object's attributes: those in its dict, and those in slots of classes of the user's."""
        kind = type(value)
        own = instance_dict(value)
        held = [kind, *([own] if own is not None else [])]
        for base in type.mro(kind):
            for slot in (instance_dict(base) or {}).values() if _is_users_class(base) else ():
                if type(slot) is types.MemberDescriptorType:
                    held += self._slot(value, slot)
        return held

    def _slot(self, value: Any, slot: Any) -> list[Any]:
        try:
            kept = slot.__get__(value)
        except AttributeError:
            self._undo.append(lambda: _emptied(value, slot))
            return []
        self._undo.append(lambda: slot.__set__(value, kept))
        return [kept]

    # -- the end --------------------------------------------------------------------------------------------------

    def _keep_settings(self) -> None:
        """Keep the states of Python's, NumPy's and torch's random generators, and settings of torch and the process."""
        self._dice(random._inst)  # the one behind random.random()
        numpys: Any = getattr(sys.modules.get("numpy"), "random", None)
        if numpys is not None:
            self._state(numpys.get_state, numpys.set_state)
        self._state(torch.get_rng_state, torch.set_rng_state)
        if torch.cuda.is_initialized():
            self._state(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
        for get, put in _SETTINGS:
            self._setting(get, put)
        self.take(sys.path)

    def _setting(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not in this torch; a folder that is gone
            kept = get()
            self._undo.append(lambda: None if get() == kept else put(kept))

    def _dice(self, value: random.Random) -> list[Any]:
        return self._state(lambda: random.Random.getstate(value), lambda state: random.Random.setstate(value, state))

    def _do(self, undo: Callable[[], object]) -> None:
        try:
            undo()
        except Exception as error:  # the others get theirs back
            self._fail(str(error).partition("\n")[0])

    def _fail(self, what: str) -> None:
        self._note(f"this could not be put back: {what}")

    def put_back(self) -> None:
        """Give everything what it held; note what failed, and what still holds a fake tensor."""
        if not self.complete:
            self._fail(f"the last of more than {MOST_KEPT:,} objects")
        for undo in reversed(self._undo):
            self._do(undo)
        self._undo.clear()
        self.drop()
        for name in set(sys.modules) - self._modules:
            if is_users_module(sys.modules[name]):  # it may have made fake tensors while it was imported
                _forget_module(name)
        with interrupts.kept():
            gc.collect()
        if _alive(self._fakes):
            for cache in [value for value in gc.get_objects() if type(value) is _CACHE]:
                if _holds_fakes(cache):
                    _CACHE.cache_clear(cache)
            for holder in _named_holders(self._fakes):
                self._note(f"{holder} still holds a fake tensor of this estimate: delete or empty it")


def _set_environment(kept: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(kept)


def _set_filters(kept: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = kept  # type: ignore[index]  # it is a list


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(os.environ), _set_environment),
    (os.getcwd, os.chdir),
    (lambda: list(warnings.filters), _set_filters),
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda kept: torch.set_default_device(getattr(kept, "device", None)),
    ),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(
        (functools.partial(getattr, torch.backends.cudnn, name), functools.partial(setattr, torch.backends.cudnn, name))
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    ),
)
"""Reads and sets what code may set."""


def _forget_module(name: str) -> None:
    module = sys.modules.pop(name)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules and module_dict(sys.modules[parent]).get(last) is module:
        del module_dict(sys.modules[parent])[last]


def _emptied(value: Any, slot: Any) -> None:
    with contextlib.suppress(AttributeError):  # it is empty
        slot.__delete__(value)


def _holds_fakes(cache: Any) -> bool:
    held = gc.get_referents(cache)
    return any(
        is_instance(item, FakeTensor)
        for value in held
        for item in (value, *(gc.get_referents(value) if gc.is_tracked(value) else ()))
    )


def _is_users_module(module: Any) -> bool:
    return is_users_module(module) and module_dict(module).get("__name__") != "__main__"


def _is_users_class(kind: Any) -> bool:
    name = type.__dict__["__dict__"].__get__(kind).get("__module__")
    module = sys.modules.get(name) if type(name) is str else None
    return module is not None and (name == "__main__" or _is_users_module(module))


def _alive(mode: FakeTensorMode) -> list[Any]:
    """Return the fake tensors of ``mode``: those of an earlier estimate may be held by the traceback of its error."""
    return [value for value in gc.get_objects() if is_instance(value, FakeTensor) and value.fake_mode is mode]


def _named_holders(mode: FakeTensorMode) -> list[str]:
    fakes = _alive(mode)
    holders = [holder for holder in gc.get_referrers(*fakes) if holder is not fakes] if fakes else []
    others = [item for item in holders if type(item) is not types.FrameType and not is_instance(item, FakeTensor)]
    return list(dict.fromkeys(map(_name_of_holder, others)))[:_MOST_NAMED]


def _name_of_holder(holder: Any) -> str:
    for module_name, module in list(sys.modules.items()):
        if not is_instance(module, types.ModuleType):
            continue
        space = module_dict(module)
        if space is holder:
            names = [name for name, value in list(space.items()) if is_instance(value, FakeTensor)]
            return f"{module_name}.{names[0]}" if names else module_name
        for name, value in list(space.items()):
            if value is holder:
                return f"{module_name}.{name}"
    for owner in gc.get_referrers(holder):
        if instance_dict(owner) is holder:
            return f"a {type_name(owner)}"
    return f"a {name_of(type(holder))}"


_KEEPERS: tuple[tuple[Any, Callable[[Restorer, Any], list[Any]]], ...] = (
    *((kind, Restorer._container) for kind in (dict, list, deque, set)),
    (tuple, lambda _, value: list(tuple.__iter__(value))),
    (frozenset, lambda _, value: list(frozenset.__iter__(value))),
    (type, Restorer._class),
    (types.FunctionType, Restorer._function),
    (types.CellType, Restorer._cell),
    (types.MethodType, lambda _, value: [value.__func__, value.__self__]),
    (threading.local, lambda _, value: [threading.local.__getattribute__(value, "__dict__")]),
    (types.ModuleType, lambda _, value: [module_dict(value)] if _is_users_module(value) else []),
    (_CACHE, lambda _, value: [instance_dict(value) or {}]),
    *((kind, Restorer._buffer) for kind in (bytearray, array.array, mmap.mmap)),
    (_C_DATA, Restorer._c_data),
    (_FILE, Restorer._file),
    (torch.Tensor, Restorer._tensor),
    (torch.Generator, lambda self, value: self._state(value.get_state, value.set_state)),
    (random.Random, lambda self, value: self._dice(value)),
    (staticmethod, lambda _, value: [value.__func__]),
    (classmethod, lambda _, value: [value.__func__]),
)
