"""Reports retained arrays: their table after an error, and words that the reports of leaks use,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ipygpumem.records import RetainedArray
from ipygpumem.report.layout import Table
from ipygpumem.report.words import clean_name, count, shape_label
from ipygpumem.units import format_bytes

ROWS_SHOWN = 20
"""Maximum number of rows of a table; a further row sums up the memory that has none."""
ROWS_OPEN = 8
"""Maximum number of rows of a details table that is shown open."""
_LEAST_SHARE = 0.01
"""Minimum share of an object's memory of a part to show."""


def held_table(
    title: str,
    held: Sequence[RetainedArray],
    smallest: int = 0,
    also_freed: Mapping[str, int] | None = None,
) -> Table:
    """Return a table of the largest arrays held by frames.

    Args:
        title: its title.
        held: the arrays, the largest first.
        smallest: minimum bytes of a row; one row sums up the smaller arrays.
        also_freed: the bytes of garbage and caches that were freed with them, by device.
    """
    large = [item for item in held if item.size_bytes >= smallest]
    arrays_shown = large[:ROWS_SHOWN]
    arrays_not_shown = held[len(arrays_shown) :]
    rows = list(map(_held_row, arrays_shown))
    for device, size in (also_freed or {}).items():
        rows.append({"size": format_bytes(size), "name": "garbage and caches", "device": device})
    if arrays_not_shown and total_bytes(arrays_not_shown) >= smallest:
        rows.append(
            {"size": total_text(arrays_not_shown), "name": f"and {len(arrays_not_shown)} more"}
        )
    is_long = len(arrays_shown) > ROWS_OPEN
    if is_long:
        title = f"{title}: {total_text(held)}"
    numbers = {"line", "size"}
    code = {"function", "name"}
    return Table.of(rows, numbers, title, code=code, is_collapsed=is_long)


def _held_row(item: RetainedArray) -> dict[str, str]:
    """Return the row of an array that a frame or a traceback holds."""
    row = {
        "size": format_bytes(item.size_bytes),
        "function": item.function,
        "line": "",
        "name": item.name,
        "type": item.type_name,
        "shape": shape_text(item),
        "contents": contents_text(item),
        "dtype": item.dtype,
        "device": item.device,
    }
    if item.function:
        row["line"] = str(item.line)
    return {column: clean_name(text) for column, text in row.items()}


def shape_text(item: RetainedArray) -> str:
    """Return the shape of an array; of a container, the number of arrays in it."""
    if item.shape is not None:
        return shape_label(item.shape)
    if item.arrays and not item.parts:
        return count(item.arrays, "array")
    return ""


def contents_text(item: RetainedArray) -> str:
    """Return the parts of an object with their sizes: ``price 12 MiB, name 4 MiB``."""
    parts = [f"{name} {format_bytes(size)}" for name, size in item.parts.items()]
    return ", ".join(parts)


def large_contents_text(item: RetainedArray) -> str:
    """Return an object's parts with their sizes, as ``contents_text`` does; parts of less than a
    hundredth of its memory are left out.
    """
    parts = dict[str, int]()
    for name, size in item.parts.items():
        if size >= _LEAST_SHARE * item.size_bytes:
            parts[name] = size
    return contents_text(replace(item, parts=parts or item.parts))


def total_text(held: Iterable[RetainedArray]) -> str:
    """Return the bytes of all arrays together, in words."""
    return format_bytes(total_bytes(held))


def total_bytes(held: Iterable[RetainedArray]) -> int:
    """Return the bytes of all arrays together."""
    return sum(item.size_bytes for item in held)
