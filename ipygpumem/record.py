"""The base of all records: conversion to plain dictionaries and back. Opens files that contain records."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import stat
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar, Literal, TypeVar

T = TypeVar("T", bound="Record")
MOST_DEVICES = 10_000
"""Maximum number of devices, ranks or keys to read of one record."""


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading; OSError for anything else, such as a pipe, which could block or never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # also of a text
        raise OSError(errno.EINVAL, "not a plain file")
    return open(path, "rb", opener=without_waiting)


def without_waiting(path: str, flags: int) -> int:
    """Open a file for reading, even if it has become a pipe by now."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class Record:
    """Base of all records: conversion to and from plain dictionaries; some are shown as a report."""

    __slots__ = ()
    _report = ""
    """Module and function in the package for the notebook display, by name because reports import this module."""
    _most = 0
    """Maximum number of such records to read in one list; 0 for no limit."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, ready for JSON."""
        return {name: _plain(getattr(self, name)) for name in _hints(type(self))}  # type: ignore[arg-type]  # classes are hashable

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """Return the record that ``to_dict`` converted to ``data``; unknown keys are ignored.

        Raises:
            ValueError: a value does not have its field's type, or is too large.
            TypeError: a field is missing.
        """
        return _decoder(cls)(dict(data))  # type: ignore[arg-type, no-any-return]  # classes are hashable, and make instances

    def __str__(self) -> str:
        return self._repr_mimebundle_().get("text/plain", repr(self))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        if not self._report:
            return {}
        module, _dot, name = self._report.rpartition(".")
        report = getattr(importlib.import_module(f"ipygpumem.{module}"), name)(self)
        html: Any = importlib.import_module("ipygpumem.reports.html")
        return {"text/plain": html.text.render([report]), "text/html": html.render([report], bars=False)}


@functools.cache  # of the classes of the model; an export holds thousands of records
def _hints(record: type) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not ClassVar}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_asdict"):  # a NamedTuple
            return {name: _plain(item) for name, item in value._asdict().items()}
        return tuple([_plain(item) for item in value])
    return dict(value) if isinstance(value, Mapping) else value


@functools.cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    """Return the function that converts a plain value to a field declared as ``hint``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        by_type = {one: _decoder(one) for one in inner if type(one) is type}
        decode = _decoder(inner[0])
        return lambda value: by_type.get(type(value), decode)(value)
    if origin in (tuple, Sequence):
        decode, most = _decoder(inner[0]), getattr(inner[0], "_most", 0)
        return lambda value: tuple(map(decode, _bounded(_checked(value, list, tuple), most)))
    if origin in (dict, Mapping):
        decode = _decoder(inner[1])
        return lambda value: {key: decode(item) for key, item in _bounded(_checked(value, dict), MOST_DEVICES).items()}
    if origin is Literal:
        return lambda value: _one_of(value, inner)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return lambda value: float(_number(_checked(value, float, int)))
    if hint is int:
        return lambda value: _number(_checked(value, int))
    if hint in (str, bool, types.NoneType):
        return lambda value: _checked(value, hint)
    return lambda value: _record(hint, _checked(value, dict))


def _record(kind: type, values: dict[str, Any]) -> Any:
    hints = _hints(kind)
    return kind(**{name: _decoder(hints[name])(item) for name, item in values.items() if name in hints})


def _one_of(value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ValueError(f"{value!r} is not one of {known}")
    return value


def _checked(value: Any, *types_: type) -> Any:
    if type(value) not in types_:
        raise ValueError(f"{type(value).__name__} where {types_[0].__name__} belongs")
    return value


def _number(value: Any) -> Any:
    if not abs(value) < (2**63 if type(value) is int else float("inf")):  # also of NaN
        raise ValueError("a number is too large, or NaN")
    return value


def _bounded(values: Any, most: int) -> Any:
    if most and len(values) > most:
        raise ValueError(f"{len(values)} items, more than {most}")
    return values
