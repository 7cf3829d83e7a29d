"""Reads where a column's buffers are, by Arrow's C data interface; copies no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    addressof,
    byref,
    c_char_p,
    c_int64,
    c_void_p,
    cast,
)
from typing import Any

_BITS = {"n": 0, "+s": 0, "+w": 0, "b": 1, "d:": 128, "vu": 128, "vz": 128} | {
    **dict.fromkeys("cC", 8),
    **dict.fromkeys("sSe", 16),
    **dict.fromkeys(("i", "I", "f", "tdD", "tts", "ttm"), 32),
    **dict.fromkeys(("l", "L", "g", "tdm", "tt", "ts", "tD", "+L"), 64),
}
"""Bits for each row in the buffer behind the validity bits, by the start of the format."""


class _Array(Structure):
    """The data of a column."""


class _Schema(Structure):
    """The type of a column."""


_INTEGERS = ("length", "null_count", "offset", "n_buffers", "n_children")
for _kind, _fields in (
    (_Array, [*((name, c_int64) for name in _INTEGERS), ("buffers", POINTER(c_void_p))]),
    (
        _Schema,
        [
            *((name, c_char_p) for name in ("format", "name", "metadata")),
            ("flags", c_int64),
            ("n", c_int64),
        ],
    ),
):
    _ends: list[tuple[str, Any]] = [
        ("children", POINTER(POINTER(_kind))),
        ("dictionary", POINTER(_kind)),
    ]
    _kind._fields_ = [
        *_fields,
        *_ends,
        ("release", CFUNCTYPE(None, POINTER(_kind))),
        ("private_data", c_void_p),
    ]


def buffers(export: Callable[[int, int], object]) -> list[tuple[int, int]]:
    """Return the address and the bytes of each buffer that a column keeps alive.

    Args:
        export: fills an array and a schema, whose addresses it gets.

    Raises:
        KeyError: the format is not known.
    """
    array = _Array()
    schema = _Schema()
    export(addressof(array), addressof(schema))
    try:
        return list(_inside(array, schema))
    finally:
        array.release(byref(array))
        schema.release(byref(schema))


def _inside(array: Any, schema: Any) -> Iterator[tuple[int, int]]:
    text = schema.format.decode()
    rows = array.offset + array.length
    count = array.n_buffers
    start_of_format = next((start for start in _BITS if text.startswith(start)), text)
    bits = _BITS[start_of_format]
    sizes = [(rows + 7) // 8, (rows * bits + 7) // 8]
    if text in ("vu", "vz"):  # texts; the last buffer has the lengths of those with long ones
        sizes += cast(array.buffers[count - 1], POINTER(c_int64))[: count - 3]
    places = array.buffers[:count] if count else []
    for address, size in zip(places, sizes, strict=False):
        if address and size:
            yield address, size
    for number in range(array.n_children):
        yield from _inside(array.children[number].contents, schema.children[number].contents)
    if array.dictionary:
        yield from _inside(array.dictionary.contents, schema.dictionary.contents)
