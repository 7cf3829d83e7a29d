"""Finds the ``__sizeof__`` of a class that may be called: one that runs neither the user's code nor
any other Python code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodDescriptorType
from typing import Any, NamedTuple

from ipygpumem.introspect import class_dict, is_users_class, mro_of, name_of

_OF_CYTHON = "cython_function_or_method"


class SizeMethod(NamedTuple):
    """A ``__sizeof__`` that is written in C."""

    measure: Callable[[Any], int]
    """The method: gets an instance and returns its bytes."""
    is_overridden: bool
    """True if ``sys.getsizeof`` would call a ``__sizeof__`` of a class nearer to the object."""

    @property
    def is_of_object(self) -> bool:
        """True if it is that of ``object``, which counts no memory outside of the object."""
        return self.measure is object.__dict__["__sizeof__"]

    @property
    def is_of_cython(self) -> bool:
        """True if Cython has compiled it."""
        return _is_of_cython(self.measure)


def size_method(kind: type) -> SizeMethod:
    """Return the ``__sizeof__`` of the nearest base of a class that has one in C.

    >>> size_method(list).measure([1, 2]) > object.__sizeof__([1, 2])
    True
    """
    is_overridden = False
    for base in mro_of(kind):
        method: Any = class_dict(base).get("__sizeof__")
        if method is None:
            continue
        if _is_written_in_c(base, method):
            return SizeMethod(method, is_overridden)
        is_overridden = True
    return SizeMethod(object.__dict__["__sizeof__"], is_overridden)


def _is_written_in_c(kind: type, method: object) -> bool:
    """Return True for a method of a class that is written in C, or that Cython has compiled for a
    library, such as that of ``pyroaring.BitMap``.
    """
    if type(method) is MethodDescriptorType:
        return True
    return _is_of_cython(method) and not is_users_class(kind)


def _is_of_cython(method: object) -> bool:
    """Return True for a method that Cython has compiled."""
    return name_of(type(method)) == _OF_CYTHON
