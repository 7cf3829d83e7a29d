"""Copies of namespaces, whose values are copied when estimated code looks their names up."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ipygpumem.introspect import is_instance


class Copies(Protocol):
    """Copies of objects, as ``FakeCopies`` makes them."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while an object is copied."""

    def of(self, value: Any) -> Any:
        """Return the copy of an object."""

    def forget_dead_copies(self) -> None:
        """Forget the copies of objects to which nothing else refers."""


class Namespace(dict[str, Any]):
    """Copy of a namespace: a value is copied when code looks its name up, and new bindings stay in
    the copy.
    """

    def __init__(self, original: dict[str, Any], copies: Copies) -> None:
        # CPython reads this name without ``__missing__``, to set ``__module__`` of new classes.
        super().__init__()
        if "__name__" in original:
            super().__setitem__("__name__", original["__name__"])
        self._original = original
        self._copies = copies
        self._deleted: set[str] = set()
        """Names that the code has deleted, although the original has them."""
        self.value_changes: dict[str, Callable[[Any], Any]] = {}
        """Functions that change the values that code binds to a name, by name."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.value_changes:
            value = self.value_changes[name](value)
        super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        """Copy the value of a name that code looks up for the first time."""
        if name in self._deleted:
            raise KeyError(name)
        with self._copies.lock:
            if not super().__contains__(name):  # another thread may have copied it
                self[name] = self._copies.of(self._original[name])
                self._copies.forget_dead_copies()  # counts references: no name here may be one more
            return super().__getitem__(name)

    def __delitem__(self, name: str) -> None:
        self._deleted.add(name)
        super().pop(name, None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the copied value of a name, or ``default``."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return name in self._original and name not in self._deleted


_exec = exec


def run_code(code: types.CodeType, namespace: dict[str, Any]) -> None:
    """Run the user's code in a copied namespace."""
    _exec(code, namespace)


def copying_names_first(run: Any) -> Any:
    """Return a replacement of ``run``, which is ``eval`` or ``exec``, for copied namespaces.

    It copies the values of all names in the source first, because CPython reads the namespace in C,
    and does not call its ``__missing__`` there.
    """

    @functools.wraps(run)
    def call(source: Any, space: Any = None, names: Any = None, /, **more: Any) -> Any:
        if space is None:  # as in ``eval("x + 1")``: the caller's names
            frame = sys._getframe(1)
            space = frame.f_globals
            if names is None:
                names = frame.f_locals
        if type(space) is Namespace:
            _copy_names_in(space, source)
        if names is None:
            return run(source, space, **more)
        return run(source, space, names, **more)

    return call


def _copy_names_in(space: Namespace, source: Any) -> None:
    """Copy the values of all names in a source text, or in a code object."""
    for name in _words_in_code(source):
        if name in space:
            space[name]  # the look-up copies the value


def _words_in_code(source: Any) -> Iterable[str]:
    """Return the words of a source text, among which its names are, or the names in a code object.

    A source may also be bytes.
    """
    if is_instance(source, types.CodeType):
        return _names_in_code(source)
    if not is_instance(source, str):
        source = str(bytes(source), "utf-8", "replace")
    return re.findall(r"\w+", source)


def _names_in_code(code: types.CodeType) -> list[str]:
    """Return the names in a code object, and in the code of functions inside it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if is_instance(constant, types.CodeType):
            names += _names_in_code(constant)
    return names
