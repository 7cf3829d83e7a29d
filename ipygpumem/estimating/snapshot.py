"""What code can reach that has no twin, kept and put back: for an estimate in the notebook's own process.

Modules of the user's, their classes and objects, what these hold, and what twins share with their originals.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

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
from ipygpumem.units import MIB

_MOST_OBJECTS, _LARGEST_ARRAY, _MOST_NAMED = 1_000_000, 256 * MIB, 3
_FOREIGN = {"IPython", "ipykernel", "ipygpumem", "traitlets", "zmq", "logging", "threading", "asyncio", "matplotlib"}
"""Modules whose objects have a life of their own: an estimate does not put them back."""
_CACHE: Any = type(functools.lru_cache(len))


class Snapshot:
    """Keeps what objects hold, shallowly, each once, when they are met; ``put_back`` gives it back to them."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
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
        numpys = sys.modules.get("numpy")
        if numpys is not None and is_instance(value, numpys.ndarray):
            return self._array(value)
        if numpys is not None and is_instance(value, (numpys.random.Generator)):
            return self._state(value.bit_generator, "state")
        if numpys is not None and is_instance(value, numpys.random.BitGenerator):
            return self._state(value, "state")
        if module_of(value).partition(".")[0] in _FOREIGN:
            return []
        return self._attributes(value)

    # -- kinds of objects -----------------------------------------------------------------------------------------

    def _dict(self, value: Any) -> list[Any]:
        base: Any = OrderedDict if is_instance(value, OrderedDict) else dict
        kept = list(base.items(value))

        def undo() -> None:
            now = list(base.items(value))
            if len(now) != len(kept) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, kept, strict=True)):
                base.clear(value)
                for key, item in kept:
                    base.__setitem__(value, key, item)

        self._undo.append(undo)
        return [*(item for pair in kept for item in pair), *self._attributes(value)]

    def _sequence(self, value: Any) -> list[Any]:
        base: Any = next(kind for kind in (deque, list, bytearray, set) if is_instance(value, kind))
        kept = list(base.__iter__(value))

        def undo() -> None:
            now = list(base.__iter__(value))
            if len(now) != len(kept) or any(a is not b for a, b in zip(now, kept, strict=True)):
                base.clear(value)
                (base.update if base is set else base.extend)(value, kept)

        self._undo.append(undo)
        return [*kept, *self._attributes(value)]

    def _items(self, value: Any) -> list[Any]:
        base: Any = next(kind for kind in (tuple, frozenset) if is_instance(value, kind))
        return list(base.__iter__(value))

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

    def _method(self, value: Any) -> list[Any]:
        return [value.__func__, value.__self__]

    def _module(self, value: Any) -> list[Any]:
        return [module_dict(value)] if _is_users_module(value) else []

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

    def _generator(self, value: Any) -> list[Any]:
        state = value.get_state()
        self._undo.append(lambda: value.set_state(state))
        return []

    def _dice(self, value: Any) -> list[Any]:
        state = random.Random.getstate(value)
        self._undo.append(lambda: random.Random.setstate(value, state))
        return []

    def _state(self, value: Any, name: str) -> list[Any]:
        state = getattr(value, name)
        self._undo.append(lambda: setattr(value, name, state))
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
            state = numpys.get_state()
            self._undo.append(lambda: numpys.set_state(state))
        host = torch.get_rng_state()
        self._undo.append(lambda: torch.set_rng_state(host))
        if torch.cuda.is_initialized():
            cards = torch.cuda.get_rng_state_all()
            self._undo.append(lambda: torch.cuda.set_rng_state_all(cards))
        dtype, recorded = torch.get_default_dtype(), torch.is_grad_enabled()
        self._undo.append(lambda: torch.set_default_dtype(dtype))
        self._undo.append(lambda: torch._C._set_grad_enabled(recorded))

    def _do(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except Exception as error:  # the others get theirs back
            self._failed[str(error).partition("\n")[0]] = None

    def put_back(self) -> list[str]:
        """Give everything what it held, and return what still holds a fake tensor and what to do about it."""
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
        return [*(f"this was not put back as it was: {what}" for what in self._failed), *named_holders()]


def _emptied(value: Any, slot: Any) -> None:
    try:
        slot.__delete__(value)
    except AttributeError:  # it is empty
        return


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


def named_holders() -> list[str]:
    """Return, for what holds a fake tensor, what it is and what to do about it."""
    fakes = [value for value in gc.get_objects() if is_instance(value, FakeTensor)]
    if not fakes:
        return []
    ours = {id(fakes)}
    holders = [
        holder for holder in gc.get_referrers(*fakes) if id(holder) not in ours and type(holder) is not types.FrameType
    ]
    names = dict.fromkeys(_name_of_holder(holder) for holder in holders if not is_instance(holder, FakeTensor))
    said = [f"{name} still holds a fake tensor of this estimate: delete or empty it" for name in names]
    return said[:_MOST_NAMED]


def _name_of_holder(holder: Any) -> str:
    for module_name, module in list(sys.modules.items()):
        if not is_instance(module, types.ModuleType):
            continue
        space = module_dict(module)
        if space is holder:
            found = [name for name, value in list(space.items()) if is_instance(value, FakeTensor)]
            return f"{module_name}.{found[0]}" if found else module_name
        for name, value in list(space.items()):
            if value is holder:
                return f"{module_name}.{name}"
    for owner in gc.get_referrers(holder):
        if instance_dict(owner) is holder:
            return f"a {type_name(owner)}"
    return f"a {name_of(type(holder))}"


_KEEPERS: tuple[tuple[Any, Callable[[Snapshot, Any], list[Any]]], ...] = (
    (dict, Snapshot._dict),
    (list, Snapshot._sequence),
    (deque, Snapshot._sequence),
    (set, Snapshot._sequence),
    (tuple, Snapshot._items),
    (frozenset, Snapshot._items),
    (type, Snapshot._class),
    (types.FunctionType, Snapshot._function),
    (types.CellType, Snapshot._cell),
    (types.MethodType, Snapshot._method),
    (threading.local, lambda _, value: [threading.local.__getattribute__(value, "__dict__")]),
    (types.ModuleType, Snapshot._module),
    (_CACHE, Snapshot._cached),
    (torch.Tensor, Snapshot._tensor),
    (torch.Generator, Snapshot._generator),
    (random.Random, Snapshot._dice),
    (staticmethod, lambda _, value: [value.__func__]),
    (classmethod, lambda _, value: [value.__func__]),
)
