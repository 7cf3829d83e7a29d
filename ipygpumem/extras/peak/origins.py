"""Finds where the user's code allocates: the running module, the operation and the line."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, cast

import torch

from ipygpumem.estimating.memory.storages import StorageLife
from ipygpumem.estimating.operators.transients import operator_name
from ipygpumem.heap.knowledge.frames import peek, stack
from ipygpumem.introspect import instance_dict, is_users, name_of, type_name

Names = Callable[[], Iterable[tuple[str, object]]]
"""Returns the names that the user's code sees now."""
Line = tuple[str, int]
"""File and number of a line."""
_MODULE_CALL = torch.nn.Module._call_impl.__code__
_FUNCTION_CALL = torch.autograd.Function.apply.__func__.__code__
_IS_OPTIMIZED = inspect.CO_OPTIMIZED
_BACKWARD_CALL = torch.autograd.backward.__code__
_GRADIENT_CALL = torch.autograd.grad.__code__


class Origin(NamedTuple):
    """Where the memory of a storage comes from."""

    name: str = ""
    """The user's name."""
    module: str = ""
    """The path of a module."""
    operation: str = ""
    """The name of an operation, such as ``mm``; empty if it is unknown."""
    line: Line | None = None
    """The user's line; None if it is unknown."""


class OperationNames:
    """The names of operations, each found once."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[Any, Origin]] = {}
        """Operators and their origins, by the operator's identity: an operator is slow to hash."""

    def origin(self, func: Any) -> Origin:
        """Return the origin of an operation without module and line."""
        entry = self._origins.get(id(func))
        if entry is None:
            entry = func, Origin(operation=operator_name(func))
            self._origins[id(func)] = entry
        _, origin = entry
        return origin

    def name(self, func: Any) -> str:
        """Return the name of an operation."""
        return self.origin(func).operation


BEFORE = Origin(operation="existed before")


@dataclass
class FunctionCall:
    """A running call of a custom function (``torch.autograd.Function``)."""

    name: str
    """The name of the function's class."""
    arguments: Any
    """The arguments of its ``apply``."""
    module: str = ""
    """The path of the module that calls it."""
    line: Line | None = None
    """The user's line that calls it."""


class CallingCode(NamedTuple):
    """The Python code that asks for an operation."""

    module: str = ""
    """The path of the innermost running module."""
    line: Line | None = None
    """The innermost line of the user's code; not one that only started the backward pass."""
    functions: tuple[FunctionCall, ...] = ()
    """The custom functions that run, the innermost first."""
    engine: FrameType | None = None
    """The call in this thread that runs the backward pass which asks for the operation."""

    @property
    def backward_line(self) -> Line | None:
        """The line that started that backward pass."""
        return _users_line(self.engine)


def is_owned(life: StorageLife) -> bool:
    """Return True for memory that belongs to a module, in contrast to results of its operations."""
    return bool(life.origin and life.origin.module and not life.origin.operation)


class Modules:
    """The user's modules that ran, and the modules inside them, by their paths.

    Args:
        names: returns the names that the user's code sees now.
        note_module: is called with each path and its module, once the path is known.
    """

    def __init__(self, names: Names, note_module: Callable[[str, Any], None]) -> None:
        self.names = names
        self._note_module = note_module
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        """Modules and their paths, by identity."""

    def note_modules(self, whole: Any, label: str) -> None:
        """Note a module and the modules inside it by their paths, such as ``model.layers.0``.

        Args:
            whole: the outermost module.
            label: its path.
        """
        # From the last to the first: of several paths of one module, the first one stays.
        for path, module in reversed(_modules_in(whole, label)):
            self._paths[id(module)] = weakref.ref(module), path
            self._note_module(path, module)

    def _known_path(self, module: Any) -> str | None:
        """Return the path of a module that was noted before; None for any other module."""
        entry = self._paths.get(id(module))
        if entry is None:
            return None
        reference, path = entry
        if reference() is not module:  # another one that was at the same address
            return None
        return path

    def _find_path(self, module: Any, whole: Any) -> str:
        """Note the modules inside ``whole``, and return the path of ``module`` among them; its type
        if it is not there.

        Hooks of modules would find it, too, but torch's compiler cannot compile them.
        """
        # Its type stays its path if the search does not find it.
        self._paths[id(module)] = weakref.ref(module), type_name(module)
        self.note_modules(whole, self._label_of(whole))
        return self._paths[id(module)][1]

    def _label_of(self, module: Any) -> str:
        """Return the user's name of a module; its type without one."""
        for name, value in self.names():
            if value is module:
                return name
        return type_name(module)

    def calling_code(self, frame: FrameType) -> CallingCode:
        """Return the code that asks for the operation that runs now.

        Args:
            frame: the innermost frame to look at.
        """
        callers = _Callers(frame)
        functions: tuple[FunctionCall, ...] = ()
        if callers.functions:
            for function, inner_modules in callers.functions:
                # The modules after them are those around the function.
                function.module = self._innermost_path(callers.module_calls[inner_modules:])
            functions = tuple(function for function, _ in callers.functions)
        module = ""
        if callers.module_calls:
            module = self._innermost_path(callers.module_calls)
        return CallingCode(module, callers.line, functions, callers.engine)

    def _innermost_path(self, calls: Sequence[FrameType]) -> str:
        """Return the path of the innermost module of running calls; empty without any.

        Args:
            calls: frames of ``Module._call_impl``, the innermost first.
        """
        if not calls:
            return ""
        module = peek(calls[0])["self"]
        path = self._known_path(module)
        if path is None:
            path = self._find_path(module, peek(calls[-1])["self"])
        return path


class _Callers:
    """Collects the modules, functions and lines of an operation's callers, the innermost first.

    ``frame`` is the innermost frame; the collection ends with ``__init__``.
    """

    def __init__(self, frame: FrameType) -> None:
        self.line: Line | None = None
        """The user's innermost line."""
        self.module_calls: list[FrameType] = []
        """Calls of modules: frames of ``Module._call_impl``."""
        self.functions: list[tuple[FunctionCall, int]] = []
        """The custom functions, each with the number of module calls inside it."""
        self.engine: FrameType | None = None
        """The call that runs a backward pass, if one does."""
        self._collect(frame)

    def _collect(self, frame: FrameType) -> None:
        """Collect from a frame and its callers, up to the cell, the script or a backward pass.

        One loop without calls of our own, because it runs for most operations.
        """
        caller: FrameType | None = frame
        while caller is not None:
            code = caller.f_code
            if code is _MODULE_CALL:
                self.module_calls.append(caller)
            elif code is _BACKWARD_CALL or code is _GRADIENT_CALL:
                self.engine = caller
                break
            elif code is _FUNCTION_CALL:
                self._add_function(caller)
            elif (self.line is None or self.functions) and is_users(code.co_filename):
                self._add_line((code.co_filename, caller.f_lineno))
            if not code.co_flags & _IS_OPTIMIZED:  # the cell or script
                break
            caller = caller.f_back

    def _add_function(self, caller: FrameType) -> None:
        """Add the call of a custom function."""
        values = peek(caller)
        name = name_of(cast(type, values["cls"]))
        self.functions.append((FunctionCall(name, values["args"]), len(self.module_calls)))

    def _add_line(self, line: Line) -> None:
        """Add a line of the user's code: it calls each function that has no line yet."""
        self.line = self.line or line
        for function, _ in self.functions:
            function.line = function.line or line


def line_of_thread(thread: int) -> Line | None:
    """Return the line that the user's code in a thread runs now."""
    return _users_line(sys._current_frames().get(thread))


def _users_line(frame: FrameType | None) -> Line | None:
    """Return the user's innermost line in a frame and its callers."""
    for caller in stack(frame):
        if is_users(caller.f_code.co_filename):
            return caller.f_code.co_filename, caller.f_lineno
    return None


def _modules_in(whole: Any, label: str) -> list[tuple[str, Any]]:
    """Return the paths of a module and of all modules inside it, such as ``model.layers.0``, each
    with its module.

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
