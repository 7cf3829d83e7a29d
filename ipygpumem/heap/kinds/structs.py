"""Reads how much memory C objects keep from their C structs, where no Python function tells it: of
``io.StringIO``, ``mmap``, SQLite's connections, NumPy's ``StringDType`` and numba's containers.

No code of the user runs, and nothing is copied or locked for longer than the reading takes. A
struct is read only if a trial with a new object has shown that this version of the library lays it
out as expected, because no library promises that. If the trial fails, the memory counts as unknown.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ipygpumem.interrupts import is_from_signal

_BODY = object.__basicsize__
"""Offset of the first field behind an object's header."""


class UnknownLayoutError(Exception):
    """The library's struct is not laid out as expected, or its memory is in use by
    another thread.
    """


def _fields(address: int, count: int) -> Sequence[int]:
    """Return the values of ``count`` fields of 8 bytes each, from an address on."""
    return tuple(_words(count).from_address(address))


@functools.cache
def _words(count: int) -> Any:
    """Return the type of an array of fields; ctypes makes one at each use, which is garbage."""
    return ctypes.c_size_t * count


def fields_of(item: object, count: int) -> Sequence[int]:
    """Return the values of the first fields of an object's struct, behind its header."""
    return _fields(id(item) + _BODY, count)


IS_KNOWN = sys.implementation.name == "cpython" and ctypes.sizeof(ctypes.c_void_p) == 8
"""True if fields of structs have 8 bytes, behind a header that CPython's objects have."""


def _succeeds(trial: Any) -> bool:
    """Return the result of a trial with a new object; False if it raises an error, or if this is
    not CPython on 64 bits.
    """
    if not IS_KNOWN:
        return False
    try:
        return bool(trial())
    except Exception as error:  # a version without the function that the trial calls
        if is_from_signal(error):
            raise
        return False


# -- io.StringIO --------------------------------------------------------------------------------

_REALIZED = 1
"""State in which the text is an array with four bytes for each character. In the other state, as
long as the stream is only written to, it has the texts that were written.
"""
_HAS_WRITER = sys.version_info >= (3, 12)
"""True if the text written is in one string; before that, CPython keeps lists of strings."""
_HEADER_OF_TEXT = 48


def bytes_of_text_stream(stream: Any) -> int:
    """Return the bytes of the text in an ``io.StringIO``.

    Raises:
        UnknownLayoutError: this Python's ``StringIO`` cannot be read.
    """
    if not can_read_text_streams():
        raise UnknownLayoutError
    return _text_bytes(stream)


@functools.cache
def can_read_text_streams() -> bool:
    """Return True if this Python's ``StringIO`` is laid out as expected."""
    return _succeeds(_try_text_streams)


def _try_text_streams() -> bool:
    """Return True if the text of new streams, one in each state, is read with the right size."""
    written = io.StringIO()
    written.write("x" * 3_000)
    written.write("y" * 2_000)
    realized = io.StringIO()
    realized.write("x" * 5_000)
    realized.seek(0)
    realized.read(1)
    return 5_000 <= _text_bytes(written) <= 8_000 and 20_000 <= _text_bytes(realized) <= 25_000


def _text_bytes(stream: Any) -> int:
    """Return the bytes of the text in a stream, in either of its two states."""
    buffer, _, _, characters, state, *written = fields_of(stream, 9)
    size = 4 * characters if buffer else 0
    if state == _REALIZED:
        return size
    if _HAS_WRITER:
        return size + _bytes_of_writer(written)
    joined, waiting = written[:2]
    return size + _bytes_of_texts(joined) + _bytes_of_texts(waiting)


def _bytes_of_writer(fields: Sequence[int]) -> int:
    """Return the bytes of the string in CPython's ``_PyUnicodeWriter``."""
    text, _, kind_and_largest, length = fields
    bytes_of_character = kind_and_largest & 7
    if text:
        return _HEADER_OF_TEXT + bytes_of_character * length
    return 0


def _bytes_of_texts(address: int) -> int:
    """Return the bytes of a list of strings."""
    if not address:
        return 0
    texts: Any = ctypes.cast(address, ctypes.py_object).value
    return sys.getsizeof(texts) + sum(map(sys.getsizeof, texts))


# -- mmap.mmap ----------------------------------------------------------------------------------


def address_of_map(mapped: Any) -> int:
    """Return the address of an open memory map.

    Raises:
        UnknownLayoutError: this Python's memory maps cannot be read.
    """
    if not _can_read_maps():
        raise UnknownLayoutError
    return fields_of(mapped, 1)[0]


@functools.cache
def _can_read_maps() -> bool:
    """Return True if this Python's memory maps are laid out as expected."""
    return _succeeds(_try_maps)


def _try_maps() -> bool:
    """Return True if the address and the length of a new map are read right."""
    with mmap.mmap(-1, mmap.PAGESIZE) as mapped:
        mark = ctypes.c_char.from_buffer(mapped)
        is_there = fields_of(mapped, 2) == (ctypes.addressof(mark), mmap.PAGESIZE)
        del mark
        return is_there


# -- sqlite3.Connection -------------------------------------------------------------------------

_CACHE_USED, _SCHEMA_USED, _STATEMENTS_USED, _CACHE_USED_SHARED = 1, 2, 3, 11
"""Codes of figures of ``sqlite3_db_status``; the last one divides a cache that several connections
share among them.
"""
_FILE = 7
"""Code of ``sqlite3_file_control`` for the address of the open file, which belongs to the cache."""
_NAME_OF_FILE_SYSTEM = 12
"""Code of ``sqlite3_file_control`` for a text in which a deserialized database has its address and
size.
"""
_IN_MEMORY = re.compile(rb"memdb\(([0-9A-Fa-f]+),(\d+)\)")


def memory_of_database(connection: Any) -> Iterator[tuple[int, int]]:
    """Yield an address or 0, and the bytes, of the memory that SQLite keeps for a connection.

    That is its page cache, which is all of a database in ``:memory:``, its schemas and statements,
    and a deserialized database. Only a cache that several connections share, as with
    ``cache=shared``, and a deserialized database have an address. SQLite is asked by its C
    interface: no statement runs, so no transaction begins and no callback is called.

    Raises:
        UnknownLayoutError: the connection cannot be read, or another thread is using it.
    """
    if not can_read_databases():
        raise UnknownLayoutError
    (database,) = fields_of(connection, 1)
    if database:  # not closed
        yield from _memory_of_database(_sqlite(), database)


@functools.cache
def can_read_databases() -> bool:
    """Return True if SQLite's functions are there and this Python's connections are laid out as
    expected.
    """
    return _succeeds(_try_databases)


def _try_databases() -> bool:
    """Return True if the pointer of a new connection is there until the connection is closed."""
    connection = sys.modules["sqlite3"].Connection(":memory:")
    try:
        (before,) = fields_of(connection, 1)
    finally:
        connection.close()
    (after,) = fields_of(connection, 1)
    return before > 0 == after and callable(_sqlite().sqlite3_db_status)


@functools.cache
def _sqlite() -> Any:
    """Return SQLite's C functions, as the module ``_sqlite3`` has loaded them."""
    library = ctypes.CDLL(getattr(sys.modules["_sqlite3"], "__file__", None))
    pointer = ctypes.c_void_p
    integer = ctypes.c_int
    to_integer = ctypes.POINTER(integer)
    library.sqlite3_db_mutex.restype = pointer
    library.sqlite3_db_mutex.argtypes = [pointer]
    library.sqlite3_mutex_try.argtypes = [pointer]
    library.sqlite3_mutex_leave.argtypes = [pointer]
    library.sqlite3_db_status.argtypes = [pointer, integer, to_integer, to_integer, integer]
    library.sqlite3_file_control.argtypes = [pointer, ctypes.c_char_p, integer, pointer]
    library.sqlite3_free.argtypes = [pointer]
    return library


def _memory_of_database(library: Any, database: int) -> Iterator[tuple[int, int]]:
    """Yield the memory of a connection of SQLite: the address of the object that owns it, or 0, and
    the bytes.
    """
    mutex = library.sqlite3_db_mutex(database)
    if not mutex or library.sqlite3_mutex_try(mutex):  # a thread may run a statement for minutes
        raise UnknownLayoutError
    try:
        cache_bytes = _used(library, database, _CACHE_USED)
        is_shared = _used(library, database, _CACHE_USED_SHARED) < cache_bytes
        file = _file_of(library, database) if is_shared else 0
        other_bytes = _used(library, database, _SCHEMA_USED)
        other_bytes += _used(library, database, _STATEMENTS_USED)
        deserialized = _deserialized(library, database)
    finally:
        library.sqlite3_mutex_leave(mutex)
    if file:
        yield file, cache_bytes
    else:
        other_bytes += cache_bytes
    yield 0, other_bytes
    if deserialized is not None:
        yield deserialized


def _used(library: Any, database: int, question: int) -> int:
    """Return one of the figures of a connection in bytes; 0 if this SQLite does not have it."""
    now = ctypes.c_int()
    highest = ctypes.c_int()
    if library.sqlite3_db_status(database, question, now, highest, 0):
        return 0
    # SQLite counts in C's int, which becomes negative from 2 GiB on.
    return now.value & 0xFFFFFFFF


def _file_of(library: Any, database: int) -> int:
    """Return the address of a database's open file: connections that share a cache share it."""
    file = ctypes.c_void_p()
    library.sqlite3_file_control(database, b"main", _FILE, ctypes.byref(file))
    return file.value or 0


def _deserialized(library: Any, database: int) -> tuple[int, int] | None:
    """Return the address and the bytes of a deserialized database; None for any other."""
    name = ctypes.c_void_p()
    library.sqlite3_file_control(database, b"main", _NAME_OF_FILE_SYSTEM, ctypes.byref(name))
    if not name.value:
        return None
    match = _IN_MEMORY.fullmatch(ctypes.string_at(name.value))
    library.sqlite3_free(name)
    if match is None:
        return None
    return int(match[1], 16), int(match[2])


# -- NumPy's StringDType ------------------------------------------------------------------------


def memory_of_texts(dtype: Any) -> tuple[int, int]:
    """Return the address and the bytes of the memory in which a ``StringDType`` keeps texts of over
    15 bytes.

    NumPy gives each array a dtype of its own, and views share that of their array. A text that
    replaced a shorter one is in memory of its own, which is not counted.

    Raises:
        UnknownLayoutError: this NumPy's dtype cannot be read.
    """
    if not can_read_texts():
        raise UnknownLayoutError
    return _arena(dtype)


@functools.cache
def can_read_texts() -> bool:
    """Return True if this NumPy's ``StringDType`` is laid out as expected."""
    return _succeeds(_try_texts)


def _try_texts() -> bool:
    """Return True if the texts of a new array are read with the right size."""
    numpy: Any = sys.modules["numpy"]
    dtype = numpy.dtypes.StringDType()
    array = numpy.array(["x" * 100, "y" * 200], dtype=dtype)
    _, size = _arena(array.dtype)
    _, size_of_empty = _arena(numpy.array([], dtype=dtype).dtype)
    return 300 <= size <= 600 and size_of_empty == 0


def _arena(dtype: Any) -> tuple[int, int]:
    """Return the address and the bytes of the memory in which a dtype keeps long texts."""
    (allocator,) = _fields(id(dtype) + type(dtype).__basicsize__ - 8, 1)
    _, _, _, used, size, address = _fields(allocator, 6)
    if used > size or (address == 0) is not (size == 0):
        raise UnknownLayoutError
    return address, size


# -- numba's typed containers -------------------------------------------------------------------


def bytes_of_typed_list(address: int) -> int:
    """Return the bytes of the items of numba's list.

    Args:
        address: the address of a pointer to the list's struct.

    Raises:
        UnknownLayoutError: the struct is not laid out as in numba 0.49 to 0.68.
    """
    (pointer,) = _fields(address, 1)
    length, item_bytes, allocated = _fields(pointer, 3)
    if length > allocated or item_bytes > _LARGEST_ITEM:
        raise UnknownLayoutError
    return item_bytes * allocated


def bytes_of_typed_dict(address: int) -> int:
    """Return the bytes of the table of numba's dict; the arguments are those of
    ``bytes_of_typed_list``.
    """
    (pointer,) = _fields(address, 1)
    used, keys = _fields(pointer, 2)
    slots, usable, entries, key_bytes, value_bytes, entry_bytes, index_bytes = _fields(
        keys, _FIELDS_OF_KEYS
    )
    number = usable + entries
    if used > entries or number != slots * 2 // 3 or key_bytes + value_bytes > entry_bytes:
        raise UnknownLayoutError
    return 8 * _FIELDS_OF_KEYS + index_bytes + number * entry_bytes


_FIELDS_OF_KEYS = 7
_LARGEST_ITEM = 1 << 20
