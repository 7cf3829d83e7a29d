"""Puts back what code has changed without a copy, for an estimate in the notebook's own process.

That is modules of the user's, their classes and objects, what these hold, and what copies share with their originals.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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
from ipygpumem.units import MIB

_MOST_OBJECTS, _LARGEST_ARRAY, _MOST_NAMED = 1_000_000, 256 * MIB, 3
_FOREIGN = {"IPython", "ipykernel", "ipygpumem", "traitlets", "zmq", "logging", "threading", "asyncio", "matplotlib"}
"""Modules whose objects have a life of their own: an estimate does not put them back."""
_CACHE: Any = type(functools.lru_cache(len))


class Restorer:
    """Keeps what objects hold, each once, when they are met; ``put_back`` gives it back to them.

    Args:
        fakes: the estimate's, whose tensors nothing must hold afterwards.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        self._caches: list[Any] = []
        self._failed: dict[str, None] = {}
        self._keep_generators()
        for module in list(sys.modules.values()):
            if _is_users_module(module):
                self.take(module_dict(module))

    def take(self, value: Any) -> None:
        """Keep what ``value`` holds, and what that holds."""
        waiting = [value]
        while waiting and len(self._seen) < _MOST_OBJECTS:
            value = waiting.pop()
            if is_atom(value) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            try:
                waiting += self._held(value)
            except Exception:  # an object that does what no other of its kind does must not end the estimate
                self._failed[type_name(value)] = None

    def _held(self, value: Any) -> list[Any]:
        """Keep one object, and return what it holds."""
        for kind, keep in _KEEPERS:
            if is_instance(value, kind):
                return keep(self, value)
        if is_of_library(value, "numpy", "ndarray"):
            return self._array(value)
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

    def _cached(self, value: Any) -> list[Any]:
        self._caches.append(value)
        return [instance_dict(value) or {}]

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
        if not value.flags.writeable or value.nbytes > _LARGEST_ARRAY:
            return []
        numpys = sys.modules["numpy"]
        kept = numpys.array(value, copy=True, subok=False)
        self._undo.append(lambda: numpys.copyto(value, kept))
        return []

    def _attributes(self, value: Any) -> list[Any]:
        """Keep an object's attributes: those in its dict, and those in slots of classes of the user's."""
        kind = type(value)
        own = instance_dict(value)
        for base in type.mro(kind):
            for name, slot in (instance_dict(base) or {}).items() if _is_users_class(base) else ():
                if type(slot) is types.MemberDescriptorType:
                    self._slot(value, name, slot)
        return [kind, *([own] if own is not None else [])]

    def _slot(self, value: Any, name: str, slot: Any) -> None:
        try:
            kept = slot.__get__(value)
        except AttributeError:
            self._undo.append(lambda: _emptied(value, slot))
            return
        self._undo.append(lambda: slot.__set__(value, kept))
        self.take(kept)

    # -- the end --------------------------------------------------------------------------------------------------

    def _keep_generators(self) -> None:
        """Keep the states of Python's, NumPy's and torch's own generators, and torch's settings."""
        self._dice(random._inst)  # the one behind random.random()
        numpys: Any = getattr(sys.modules.get("numpy"), "random", None)
        if numpys is not None:
            self._state(numpys.get_state, numpys.set_state)
        self._state(torch.get_rng_state, torch.set_rng_state)
        if torch.cuda.is_initialized():
            self._state(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
        self._state(torch.get_default_dtype, torch.set_default_dtype)
        self._state(torch.is_grad_enabled, torch._C._set_grad_enabled)

    def _dice(self, value: random.Random) -> list[Any]:
        return self._state(lambda: random.Random.getstate(value), lambda state: random.Random.setstate(value, state))

    def _do(self, undo: Callable[[], object]) -> None:
        try:
            undo()
        except Exception as error:  # the others get theirs back
            self._failed[str(error).partition("\n")[0]] = None

    def put_back(self) -> list[str]:
        """Give everything what it held, and return notes on what failed and on what still holds a fake tensor."""
        for undo in reversed(self._undo):
            self._do(undo)
        self._undo.clear()
        for cache in self._caches:
            if _holds_fakes(cache):
                _CACHE.cache_clear(cache)
        self._caches.clear()
        self._seen.clear()
        with interrupts.kept():
            gc.collect()
        return [
            *(f"this could not be put back: {what}" for what in self._failed),
            *_named_holders(self._fakes),
        ]


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


def _named_holders(mode: FakeTensorMode) -> list[str]:
    """Return, for what holds a fake tensor of ``mode``, what it is and what to do about it."""
    # Those of an earlier estimate may be held by the traceback of its error.
    fakes = [value for value in gc.get_objects() if is_instance(value, FakeTensor) and value.fake_mode is mode]
    holders = [holder for holder in gc.get_referrers(*fakes) if holder is not fakes] if fakes else []
    others = [item for item in holders if type(item) is not types.FrameType and not is_instance(item, FakeTensor)]
    names = dict.fromkeys(map(_name_of_holder, others))
    return [f"{name} still holds a fake tensor of this estimate: delete or empty it" for name in names][:_MOST_NAMED]


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
    (_CACHE, Restorer._cached),
    (torch.Tensor, Restorer._tensor),
    (torch.Generator, lambda self, value: self._state(value.get_state, value.set_state)),
    (random.Random, lambda self, value: self._dice(value)),
    (staticmethod, lambda _, value: [value.__func__]),
    (classmethod, lambda _, value: [value.__func__]),
)
