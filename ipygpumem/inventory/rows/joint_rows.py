"""Makes one row of memory for several rows: its name, its size, its types, and what it shows of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.remedies import Holder, comments_of
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.records import SEVERAL_TYPES, RetainedArray

MOST_NAMES = 3
"""Maximum number of names to show of a row of several."""


def comment_of(rows: Iterable[HeldRow]) -> str:
    """Return the comments on the lines of rows, joined into one."""
    return comments_of(row.holder.remedy for row in rows if row.holder is not None)


def cuts_of(rows: Iterable[HeldRow]) -> list[Cut]:
    """Return the references that the lines of rows remove, as far as they are known."""
    return list(chain.from_iterable(row.cuts for row in rows))


def row_of_several(rows: Sequence[HeldRow], holder: Holder) -> HeldRow:
    """Return one row for several, with one holder for all of them: ``3 × Tensor float32 64×64`` if
    they look alike, else ``several types`` with the bytes of each type.
    """
    records = records_of(rows)
    first = records[0]
    whole = replace(
        sum_of(records, first),
        name=_names_of(records),
        arrays=sum(row.arrays for row in records),
        objects=sum(row.objects for row in records),
        cell=first.cell if are_equal(row.cell for row in records) else None,
    )
    if are_equal(map(_fields_of_equal_rows, records)):
        whole = replace(whole, parts=largest_parts(records))
    else:
        whole = _row_of_different_objects(whole, records)
    return HeldRow(whole, holder)


def rows_largest_first(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows sorted by size."""
    return sorted(rows, key=attrgetter("row.size_bytes"), reverse=True)


def text_of_several(first: Holder, number: int) -> str:
    """Return the words for several references, given the holder of the first:
    ``4 matplotlib figures``, or the path and ``3 more``.

    Args:
        first: the holder of the first one.
        number: the number of references.
    """
    if number == 1:
        return first.path
    if first.roots[0].plural:
        return f"{number} {first.roots[0].plural}"
    return first.with_more(str(number - 1)).path


def records_of(rows: Iterable[HeldRow]) -> list[RetainedArray]:
    """Return the rows without their holders."""
    return [row.row for row in rows]


def largest_parts(rows: Iterable[RetainedArray]) -> dict[str, int]:
    """Return the largest parts of all rows together, by name: parts of the same name are summed."""
    parts = Counter[str]()
    for row in rows:
        parts.update(row.parts)
    return dict((+parts).most_common(MOST_NAMES))


def sum_of(rows: Sequence[RetainedArray], shown: RetainedArray) -> RetainedArray:
    """Return a row with the fields of ``shown``, but with the bytes and the certainty of all rows
    together.
    """
    size_bytes = 0
    libraries = set[str]()
    for row in rows:
        size_bytes += row.size_bytes
        libraries.update(row.uncounted)
    return replace(
        shown,
        size_bytes=size_bytes,
        is_at_least=any(row.is_at_least for row in rows),
        uncounted=tuple(sorted(libraries)),
    )


def devices_of(rows: Sequence[RetainedArray]) -> str:
    """Return the devices of rows, such as ``cpu, cuda:0``."""
    return ", ".join(dict.fromkeys(row.device for row in rows))


def are_equal(values: Iterable[object]) -> bool:
    """Return True if all values, of which there is at least one, are equal."""
    return len(set(values)) == 1


def _row_of_different_objects(whole: RetainedArray, rows: Sequence[RetainedArray]) -> RetainedArray:
    """Return the row of objects that do not look alike: it shows the bytes of each type, and no
    shape.

    Args:
        whole: the row of all, which looks like the first of ``rows``.
        rows: the rows of the objects.
    """
    sizes = Counter[str]()
    for row in rows:
        if row.type_name == SEVERAL_TYPES and row.parts:
            sizes.update(row.parts)
        else:
            sizes[row.type_name] += row.size_bytes
    whole = replace(whole, shape=None, dtype="", device=devices_of(rows), arrays=0, parts={})
    if len(sizes) == 1:
        if all(row.parts for row in rows):
            return replace(whole, parts=largest_parts(rows))
        return whole
    return replace(whole, type_name=SEVERAL_TYPES, parts=dict(sizes.most_common(MOST_NAMES)))


def _names_of(rows: Sequence[RetainedArray]) -> str:
    """Return the names of rows, each once: ``x, y``. Of more than ``MOST_NAMES``, the first ones
    and an ellipsis.
    """
    names = list(dict.fromkeys(row.name for row in rows if row.name))
    if len(names) > MOST_NAMES:
        names = [*names[:MOST_NAMES], "…"]
    return ", ".join(names)


def _fields_of_equal_rows(row: RetainedArray) -> tuple[object, ...]:
    """Return the fields by which rows look alike: the type, dtype, shape and device."""
    return row.type_name, row.dtype, row.shape, row.device
