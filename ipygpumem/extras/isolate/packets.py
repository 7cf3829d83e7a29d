"""Passes messages and pickled names between a cell's child process and the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import itertools
import os
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

from IPython import get_ipython

from ipygpumem.errors import describe_error
from ipygpumem.introspect import class_dict, is_instance

_PACKET_BYTES = 1 << 16
"""Bytes of a message in one packet."""
_HEAD_BYTES = 13
"""Bytes before them: the message's number, and 1 if this is its last packet."""
_PROTOCOL = 5
_PIECE_BYTES = 16 << 20
"""Bytes that are read of the names' file at once, and freed."""
_MOST_TRIED_BYTES = 64 << 20
"""Bytes of names up to which they are loaded in the child process first."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Modes of the system's ``fallocate``."""


class Connection:
    """One end of a connection. The system sends each packet whole, so a Ctrl-C can lose a message,
    but tear none.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._message_numbers = itertools.count()
        self._parts_by_number: dict[bytes, list[bytes]] = {}
        """The parts that have arrived of each message, by its number."""

    def send(self, *message: Any) -> None:
        """Send a message, in as many packets as it needs."""
        data = pickle.dumps(message, _PROTOCOL)
        # Processes that the cell has forked send over the same connection.
        number = next(self._message_numbers) << 32 | os.getpid()
        for start in range(0, len(data), _PACKET_BYTES):
            is_last = start + _PACKET_BYTES >= len(data)
            head = number.to_bytes(_HEAD_BYTES - 1, "big") + bytes([is_last])
            self.socket.sendall(head + data[start : start + _PACKET_BYTES])

    def receive(self) -> tuple[Any, ...] | None:
        """Return the next message; ``()`` if only a part of it has arrived, None if the other end
        is closed.
        """
        packet = self.socket.recv(_HEAD_BYTES + _PACKET_BYTES)
        if not packet:
            return None
        number = packet[: _HEAD_BYTES - 1]
        is_last = packet[_HEAD_BYTES - 1]
        part = packet[_HEAD_BYTES:]
        self._parts_by_number.setdefault(number, []).append(part)
        if not is_last:
            return ()
        whole = b"".join(self._parts_by_number.pop(number))
        message: tuple[Any, ...] = pickle.loads(whole)  # noqa: S301  # our own
        return message


def of_notebook(name: str) -> object:
    """Return the notebook's own class or function; pickled values refer to it by this call."""
    return get_ipython().user_ns[name]


def dump(
    file: BinaryIO, values: Mapping[str, object], before: Mapping[str, object]
) -> dict[str, str]:
    """Pickle named values one after the other, with one memo, so that they keep sharing objects.

    Args:
        file: file to write.
        values: the values by name.
        before: the notebook's names before the cell: their classes and functions stay what they
            are.

    Returns:
        The reason by name for each value that cannot be pickled, which the file lacks.
    """
    code_names = {id(value): name for name, value in before.items() if _is_class_or_function(value)}
    failed: dict[str, str] = {}
    try:
        _write_values(file, values, code_names)
    except Exception:  # any of the user's classes may fail: which one is looked for below
        failed = _errors_by_name(values, code_names)
        remaining = {name: value for name, value in values.items() if name not in failed}
        _write_values(file, remaining, code_names)
    file.flush()
    if file.tell() <= _MOST_TRIED_BYTES:  # a value that ends the process must do so here
        file.seek(0)
        with contextlib.suppress(Exception):  # the kernel's process finds it, too
            _load_values(file, {}, len(values) - len(failed))
    return failed


def _write_values(
    file: BinaryIO, values: Mapping[str, object], code_names: Mapping[int, str]
) -> None:
    """Replace the content of a file by named values; ``code_names`` has the names of functions and
    classes by their ids.
    """
    file.seek(0)
    file.truncate()
    pickler = _new_pickler(file, code_names)
    for item in values.items():
        pickler.dump(item)


def _errors_by_name(values: Mapping[str, object], code_names: Mapping[int, str]) -> dict[str, str]:
    """Return the reason by name for each value that cannot be pickled by itself."""
    failed: dict[str, str] = {}
    for item in values.items():
        try:
            with Path(os.devnull).open("wb") as nowhere:
                _new_pickler(nowhere, code_names).dump(item)
        except Exception as error:  # noqa: PERF203  # any of the user's classes may fail
            failed[item[0]] = describe_error(error)
    return failed


def load(file: BinaryIO, values: dict[str, object], count: int) -> None:
    """Add ``count`` named values of a file in memory to ``values``; what was read is freed."""
    consumed = _ConsumedFile(file.fileno(), closefd=False)
    consumed.seek(0)
    _load_values(io.BufferedReader(consumed, _PACKET_BYTES * 16), values, count)


def _load_values(file: Any, values: dict[str, object], count: int) -> None:
    """Add ``count`` named values of a file to ``values``."""
    unpickler = pickle.Unpickler(file)  # noqa: S301  # our own
    for _ in range(count):
        name, value = unpickler.load()
        values[name] = value


class _ConsumedFile(io.FileIO):
    """File whose pages are freed once they are read, so that its content is not in memory twice."""

    def readinto(self, buffer: Any) -> int:
        """Read a piece."""
        size = super().readinto(memoryview(buffer)[:_PIECE_BYTES])
        start = ctypes.c_longlong(0)
        length = ctypes.c_longlong(self.tell())
        ctypes.CDLL(None).fallocate(self.fileno(), _KEEP_SIZE | _PUNCH_HOLE, start, length)
        return size


def _is_class_or_function(value: object) -> bool:
    """Return True for a function or a class."""
    return type(value) is FunctionType or is_instance(value, type)


def _defining_module(value: Any) -> object:
    """Return the name of the module that defines a function or class."""
    if type(value) is FunctionType:
        return value.__module__
    return class_dict(value).get("__module__")


def _new_pickler(file: Any, code_names: Mapping[int, str]) -> Any:
    """Return cloudpickle's pickler where it is installed, else Python's; the notebook's functions
    and classes in ``code_names`` are pickled as references to their names.
    """
    has_cloudpickle = importlib.util.find_spec("cloudpickle") is not None
    base: Any = pickle.Pickler
    if has_cloudpickle:
        base = importlib.import_module("cloudpickle").Pickler

    class Pickler(base):  # type: ignore[misc]  # chosen at run time
        def reducer_override(self, value: Any) -> Any:
            """Return how to pickle a value; NotImplemented for the usual way."""
            if id(value) in code_names:
                return of_notebook, (code_names[id(value)],)
            if has_cloudpickle:
                return super().reducer_override(value)
            if _is_class_or_function(value) and _defining_module(value) == "__main__":
                raise pickle.PicklingError(
                    "its code is defined in this cell: install cloudpickle, or define it before"
                )
            return NotImplemented

    return Pickler(file, _PROTOCOL)
