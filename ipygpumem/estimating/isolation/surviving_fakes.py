"""Finds the fake tensors that are alive after an estimate, and the objects that hold them."""

from __future__ import annotations

import functools
import gc
import sys
import types
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ipygpumem.introspect import instance_dict, is_instance, module_dict, name_of, type_name

_CACHE: Any = type(functools.lru_cache(len))
_MOST_NAMED = 3
"""Maximum number of holders that are named."""


def fakes_of(mode: FakeTensorMode) -> list[Any]:
    """Return the fake tensors of ``mode`` that are alive.

    Those of an earlier estimate do not count: its error's traceback may keep them alive.
    """
    fakes = [value for value in gc.get_objects() if type(value) is FakeTensor]
    alive = []
    for fake in fakes:
        attributes = instance_dict(fake) or {}  # empty while another thread makes it
        if attributes.get("fake_mode") is mode:
            alive.append(fake)
    return alive


def names_of_holders(mode: FakeTensorMode) -> list[str]:
    """Return the names of objects that hold fake tensors of ``mode``; at most three."""
    fakes = fakes_of(mode)
    if not fakes:
        return []
    names: dict[str, None] = {}
    for holder in gc.get_referrers(*fakes):
        if holder is fakes or type(holder) is types.FrameType:
            continue
        if not is_instance(holder, FakeTensor):
            names[_name_of_holder(holder)] = None
    return list(names)[:_MOST_NAMED]


def _name_of_holder(holder: Any) -> str:
    """Return a text for an object that holds fake tensors.

    It is the object's name in a module, such as ``cache.entries``; or the type of the object whose
    ``__dict__`` it is; or its own type.
    """
    for module_name, module in list(sys.modules.items()):
        if not is_instance(module, types.ModuleType):
            continue
        space = module_dict(module)
        for name, value in list(space.items()):
            if value is holder:
                return f"{module_name}.{name}"
            if space is holder and is_instance(value, FakeTensor):  # the module itself holds it
                return f"{module_name}.{name}"
    for owner in gc.get_referrers(holder):
        if instance_dict(owner) is holder:
            return f"a {type_name(owner)}"
    return f"a {name_of(type(holder))}"


def empty_caches() -> None:
    """Empty each cache of ``functools.lru_cache`` that holds a fake tensor."""
    for cache in _caches():
        if _holds_fakes(cache):
            _CACHE.cache_clear(cache)


def _caches() -> list[Any]:
    """Return all caches of ``functools.lru_cache``."""
    return [value for value in gc.get_objects() if type(value) is _CACHE]


def _holds_fakes(cache: Any) -> bool:
    """Return True if a fake tensor is in a cache, or directly in one of its items."""
    items = gc.get_referents(cache)
    containers = filter(gc.is_tracked, items)
    items += gc.get_referents(*containers)
    return any(is_instance(item, FakeTensor) for item in items)
