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

_BITS_OF_FORMATS = {
    **dict.fromkeys(("n", "+s", "+w"), 0),
    "b": 1,
    **dict.fromkeys(("d:", "vu", "vz"), 128),
    **dict.fromkeys(("c", "C"), 8),
    **dict.fromkeys(("s", "S", "e"), 16),
    **dict.fromkeys(("i", "I", "f", "tdD", "tts", "ttm"), 32),
    **dict.fromkeys(("l", "L", "g", "tdm", "tt", "ts", "tD", "+L"), 64),
}
"""Bits for each row in the buffer behind the validity bits, by the start of the format."""


class _ArrowArray(Structure):
    """The data of a column."""


class _ArrowSchema(Structure):
    """The type of a column."""


def _last_fields(kind: type[Structure]) -> list[tuple[str, Any]]:
    """Return the fields that end both structures: they lead to more structures of their kind."""
    pointer = POINTER(kind)
    return [
        ("children", POINTER(pointer)),
        ("dictionary", pointer),
        ("release", CFUNCTYPE(None, pointer)),
        ("private_data", c_void_p),
    ]


_ArrowArray._fields_ = [
    ("length", c_int64),
    ("null_count", c_int64),
    ("offset", c_int64),
    ("n_buffers", c_int64),
    ("n_children", c_int64),
    ("buffers", POINTER(c_void_p)),
    *_last_fields(_ArrowArray),
]
_ArrowSchema._fields_ = [
    ("format", c_char_p),
    ("name", c_char_p),
    ("metadata", c_char_p),
    ("flags", c_int64),
    ("n_children", c_int64),
    *_last_fields(_ArrowSchema),
]


def buffers(export: Callable[[int, int], object]) -> list[tuple[int, int]]:
    """Return the address and the bytes of each buffer that a column keeps alive.

    Args:
        export: the column's function that exports it: fills the two structs, an array and a
            schema, whose addresses it gets.

    Raises:
        KeyError: the format is not known.
    """
    array = _ArrowArray()
    schema = _ArrowSchema()
    export(addressof(array), addressof(schema))
    try:
        return list(_inside(array, schema))
    finally:
        array.release(byref(array))
        schema.release(byref(schema))


def _inside(array: Any, schema: Any) -> Iterator[tuple[int, int]]:
    """Yield the address and bytes of each buffer of an exported array, of its children and its
    dictionary. The first buffer has a validity bit for each row, the second one the values.
    """
    format_text = schema.format.decode()
    rows = array.offset + array.length
    count = array.n_buffers
    sizes = [_bytes_of_bits(rows), _bytes_of_bits(rows * _bits(format_text))]
    # A column of texts also has buffers with long texts, and a last one with the lengths of these
    # buffers.
    if format_text in ("vu", "vz"):
        lengths = cast(array.buffers[count - 1], POINTER(c_int64))
        sizes += lengths[: count - 3]
    if count:
        for address, size in zip(array.buffers[:count], sizes, strict=False):
            if address and size:
                yield address, size
    for number in range(array.n_children):
        child = array.children[number].contents
        schema_of_child = schema.children[number].contents
        yield from _inside(child, schema_of_child)
    if array.dictionary:
        yield from _inside(array.dictionary.contents, schema.dictionary.contents)


def _bits(format_text: str) -> int:
    """Return the bits for each row of a format, such as ``l`` for ``int64``; KeyError if it is not
    known.
    """
    for start, bits in _BITS_OF_FORMATS.items():
        if format_text.startswith(start):
            return bits
    raise KeyError(format_text)


def _bytes_of_bits(bits: int) -> int:
    return (bits + 7) // 8
