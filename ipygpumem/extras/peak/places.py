"""Finds where the user's code allocates: the running module, the operation and the line."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.storages import StorageLife
from ipygpumem.estimating.transients import operator_name
from ipygpumem.heap.holders.frames import peek, stack
from ipygpumem.introspect import instance_dict, is_users, type_name

Names = Callable[[], Iterable[tuple[str, object]]]
"""Returns the names that the user's code sees now."""
Line = tuple[str, int]
"""File and number of a line."""
operation_name = functools.lru_cache(4096)(operator_name)
_MODULE_CALL = torch.nn.Module._call_impl.__code__
_FUNCTION_CALL = torch.autograd.Function.apply.__func__.__code__


class Place(NamedTuple):
    """Where the memory of a storage comes from."""

    name: str = ""
    """The user's name."""
    module: str = ""
    """The path of a module."""
    operation: str = ""
    line: Line | None = None


BEFORE = Place(operation="existed before")


def is_owned(life: StorageLife) -> bool:
    """Return True for memory that belongs to a module, in contrast to results of its operations."""
    return bool(life.place and life.place.module and not life.place.operation)


class Modules:
    """The user's modules that ran, and those inside them, by their paths.

    ``know`` is called with the path and the module, once the path is known.
    """

    def __init__(self, names: Names, know: Callable[[str, Any], None]) -> None:
        self.names = names
        self._know = know
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        """Modules and their paths, by identity."""

    def know_all(self, whole: Any, label: str) -> None:
        """Note a module and those inside it; of several paths to one, the first counts."""
        for path, module in reversed(_modules_in(whole, label)):
            self._paths[id(module)] = weakref.ref(module), path
            self._know(path, module)

    def path(self, module: Any, whole: Any) -> str:
        """Return the path of a running module; the outermost one is searched if it is new.

        Hooks of modules would tell it too, but torch's compiler cannot compile them.
        """
        reference, path = self._paths.get(id(module), (None, ""))
        if reference is not None and reference() is module:
            return path
        self._paths[id(module)] = weakref.ref(module), type_name(module)
        self.know_all(whole, self._name_of(whole))
        return self._paths[id(module)][1]

    def _name_of(self, module: Any) -> str:
        for name, value in self.names():
            if value is module:
                return name
        return type_name(module)

    def place(self, frame: FrameType, func: Any) -> tuple[Place, Any]:
        """Return the place of an operation that runs now, and a custom function's arguments.

        Args:
            frame: the innermost frame to look at.
            func: the operation.
        """
        line: Line | None = None
        innermost_call: FrameType | None = None
        outermost_call: FrameType | None = None
        arguments = None
        for caller in stack(frame):
            code = caller.f_code
            if code is _MODULE_CALL:
                innermost_call = innermost_call or caller
                outermost_call = caller
            elif code is _FUNCTION_CALL:
                arguments = peek(caller)["args"]
            elif line is None and is_users(code.co_filename):
                line = code.co_filename, caller.f_lineno
            if not code.co_flags & inspect.CO_OPTIMIZED:  # the cell or script
                break
        path = ""
        if innermost_call is not None and outermost_call is not None:
            path = self.path(peek(innermost_call)["self"], peek(outermost_call)["self"])
        return Place("", path, operation_name(func), line), arguments


def _modules_in(whole: Any, label: str) -> list[tuple[str, Any]]:
    """Return a module and those inside it with their paths.

    torch's own method would hash the modules, which not all of them allow.
    """
    paths: list[tuple[str, Any]] = []
    visited = set[int]()
    waiting = [(label, whole)]
    while waiting:
        path, module = waiting.pop()
        if module is None or id(module) in visited:
            continue
        visited.add(id(module))
        paths.append((path, module))
        children = (instance_dict(module) or {}).get("_modules", {})
        waiting += [(f"{path}.{name}", child) for name, child in reversed(children.items())]
    return paths
