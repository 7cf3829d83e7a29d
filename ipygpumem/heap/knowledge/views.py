"""Recognises small views that keep a large block of memory alive, such as ``big[:10]``, and names
the call that copies them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.kinds.arrays import (
    describe,
    inside_pandas,
    is_array,
    is_of_library,
    is_of_pandas,
    memory_of,
    owner_of,
    read_array,
)
from ipygpumem.heap.kinds.mapped import MappedFiles
from ipygpumem.heap.kinds.tensors import answers_itself
from ipygpumem.units import MIB, format_bytes, format_shape

_SMALLEST_UNUSED_BYTES = MIB
"""A view is worth a note from this number of bytes that it keeps and does not show."""
_SMALL_SHARE = 10
"""A small view shows at most one part in so many of the block."""
_OF_ARROW = ("Table", "RecordBatch", "ChunkedArray", "Array")
"""Arrow's classes, whose slices keep all buffers alive."""


def small_view(value: object) -> str:
    """Return a note on a small view of a large block, with the call that copies it; empty for any
    other object.

    No code of the user runs.

    >>> import numpy
    >>> big = numpy.ones((1_000_000, 4))
    >>> small_view(big[:10])
    '10 × 4 of an array of 30.5 MiB: .copy()'
    >>> small_view(big)
    ''
    """
    if is_of_library(value, "torch", "Tensor"):
        return _note_on_tensor(value)
    if is_array(value):
        return _note_on_array(value)
    if is_of_pandas(value):
        return _note_on_pandas(value)
    if is_of_library(value, "xarray", "DataArray"):
        return _note_on_xarray(value)
    if any(is_of_library(value, "pyarrow", name) for name in _OF_ARROW):
        return _note_on_arrow(value)
    return ""


def _note_on_tensor(tensor: Any) -> str:
    """Return the note on a tensor that shows a small part of its storage; else an empty text."""
    torch: Any = sys.modules["torch"]
    if answers_itself(torch, type(tensor)):
        return ""
    described = describe(tensor)
    if described is None or described.storage[0] != "torch":  # sparse, or without memory
        return ""
    with torch._C.DisableTorchFunction():
        shown_bytes = torch.Tensor.numel(tensor) * torch.Tensor.element_size(tensor)
    if not _is_small(shown_bytes, described.size_bytes):
        return ""
    return (
        f"{_shape(described.shape)} of a storage of {format_bytes(described.size_bytes)}: .clone()"
    )


def _note_on_array(array: Any) -> str:
    """Return the note on an array that shows a small part of its owner's memory; else an empty
    text.
    """
    described = describe(array)
    if described is None or _is_mapped(array):
        return ""
    shown_bytes = read_array("nbytes", array)
    owner = owner_of(array)
    if is_array(owner) and read_array("nbytes", owner) > shown_bytes:
        # In an array of texts, the view also shows its share of these, which ``nbytes`` lacks.
        shown_bytes = described.size_bytes * shown_bytes // read_array("nbytes", owner)
    elif is_array(owner):
        return ""
    if not _is_small(shown_bytes, described.size_bytes):
        return ""
    return f"{_shape(described.shape)} of an array of {format_bytes(described.size_bytes)}: .copy()"


def _note_on_pandas(value: object) -> str:
    """Return the note on a data frame, series or index whose arrays are views of larger ones; else
    an empty text.
    """
    arrays: Sequence[Any] = inside_pandas(value)
    if any(map(_is_mapped, arrays)):
        return ""
    shown_bytes = sum(read_array("nbytes", array) for array in arrays)
    owners = by_identity([owner for owner in map(owner_of, arrays) if is_array(owner)])
    kept_bytes = sum(read_array("nbytes", owner) for owner in owners.values())
    if not _is_small(shown_bytes, kept_bytes):
        return ""
    views = [array for array in arrays if id(array) not in owners]
    rows = max(read_array("shape", view)[-1] for view in views)  # a block has a row per column
    noun = "row" if rows == 1 else "rows"
    return f"{rows:,} {noun} of a block of {format_bytes(kept_bytes)}: .copy()"


def _note_on_xarray(value: object) -> str:
    """Return the note on a labelled array that shows a small part of a larger one; else an empty
    text.
    """
    variable = slots(value).get("_variable")
    data = slots(variable).get("_data")
    return _note_on_array(data) if is_array(data) else ""


def _note_on_arrow(value: Any) -> str:
    """Return the note on a table, batch or array of Arrow that is a small slice of a larger one;
    else an empty text.
    """
    kept_bytes = value.get_total_buffer_size()
    if not _is_small(value.nbytes, kept_bytes):
        return ""
    columns = getattr(value, "columns", [value])
    mapped = MappedFiles()
    for column in columns:
        for chunk in getattr(column, "chunks", [column]):
            buffers = [buffer for buffer in chunk.buffers() if buffer is not None]
            if any(mapped.contain(buffer.address, buffer.size) for buffer in buffers):
                return ""
    rows = len(value)
    noun = "row" if rows == 1 else "rows"
    return f"{rows:,} {noun} of buffers of {format_bytes(kept_bytes)}: .take([*range({rows})])"


def _is_small(shown_bytes: int, kept_bytes: int) -> bool:
    """Return True if a view shows a small part of the bytes that it keeps, and the rest is worth a
    note.
    """
    shows_little = shown_bytes * _SMALL_SHARE <= kept_bytes
    return shows_little and kept_bytes - shown_bytes >= _SMALLEST_UNUSED_BYTES


def _is_mapped(array: Any) -> bool:
    """Return True for an array on a memory map: only its pages that were read are in RAM, so that a
    view of it keeps no large block there.
    """
    return is_of_library(memory_of(array), "mmap", "mmap")


def _shape(shape: Sequence[int]) -> str:
    """Return the shape of a view in words: ``10 × 4`` or ``3 values``."""
    if not shape:
        return "1 value"
    if len(shape) == 1:
        if shape[0] != 1:
            return f"{shape[0]:,} values"
        return "1 value"
    return format_shape(shape)
