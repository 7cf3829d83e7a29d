"""Advice on pandas' DataFrames: columns that a narrower dtype holds without loss."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.narrowing import LOSSLESS, narrower
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import is_instance
from ipygpumem.objects.arrays import StorageKey, inside_pandas, library_type, owner_of, parts_of_pandas
from ipygpumem.objects.heap import live_instances

_MOST_COLUMNS = 1000
_MOST_ROWS = 1_000_000
"""Of a column of text that is looked at."""


class Column(NamedTuple):
    """One column of a DataFrame."""

    name: str
    key: StorageKey
    dtype: str
    """The narrower one; empty where it stays as it is."""
    bytes_after: int
    text_bytes: int = 0
    """Of strings that go."""


def frames(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield DataFrames of which narrower dtypes hold each value."""
    kind = library_type("pandas", "DataFrame")
    found = [item for item in live_instances(kind) if type(item) is kind] if kind is not None else []
    held = {id(item): referrers for item, referrers in _referrers(look, found)}
    for frame, path in look.named(found):
        place = look.spot(path)
        if place is None or not place.takes or any(id(one) not in place.holders for one in held.get(id(frame), ())):
            continue
        if sum(value is frame for value in list(look.names.values())) + look.is_in_frames(frame) > 1:
            continue
        parts = parts_of_pandas(tuple(vars(frame).values()))
        dropped = set(map(id, parts))
        columns = _columns(look, frame) if len(frame.columns) <= _MOST_COLUMNS else None
        narrow = {column.name: column.dtype for column in columns or () if column.dtype}
        keys = {key for part in parts if (key := look.key(part)) is not None}
        if not narrow or columns is None or not all(look.dies(key, dropped) for key in keys):
            continue
        if _are_shared(look, parts, {*dropped, id(frame), id(vars(frame))}):
            continue
        shares = {column.key: look.sizes[column.key] for column in columns}
        for column in columns:
            shares[column.key] -= column.bytes_after
        shares["object", id(frame)] = sum(column.text_bytes for column in columns)
        yield from look.by_device(
            "narrower dtype",
            shares,
            f"{path} has {'a column' if len(narrow) == 1 else f'{len(narrow)} columns'} of wider dtypes than needed",
            f"{place.code} = {place.code}.astype({narrow!r}).copy()",
            LOSSLESS,
        )


def _are_shared(look: Look, parts: list[object], inside: set[int]) -> bool:
    """Whether anything but its DataFrame has a column of pandas' own dtypes: a copy would not take its place."""
    own: Any = library_type("pandas.core.arrays.base", "ExtensionArray")
    columns = [part for part in parts if own is not None and is_instance(part, own)]
    arrays = [item for column in columns for item in inside_pandas(column)]
    return any(
        look.is_in_frames(part) or any(id(referrer) not in inside for referrer in referrers)
        for part, referrers in (*_referrers(look, columns), *((item, look.referrers(item)) for item in arrays))
    )


def _referrers(look: Look, found: list[Any]) -> Iterator[tuple[Any, list[object]]]:
    by_item: dict[int, list[object]] = {}
    for referrer, children in look.heap.referrers({id(item): item for item in found}) if found else ():
        for child in children:
            by_item.setdefault(child, []).append(referrer)
    for item in found:
        yield item, by_item.get(id(item), [])


def _columns(look: Look, frame: Any) -> list[Column] | None:
    """Return the columns that are plain arrays; None if one has no plain name. Others are copied as they are."""
    kind: Any = library_type("numpy", "ndarray")
    names = list(frame.columns)
    if any(type(name) is not str for name in names) or len(set(names)) != len(names) or not len(frame):
        return None
    columns = []
    for place, name in enumerate(names):
        series = frame.iloc[:, place]
        if type(series.dtype).__module__.partition(".")[0] != "numpy":
            continue
        values = series.to_numpy(copy=False)
        key = ("numpy", id(owner_of(kind, values)))
        if key not in look.sizes:
            return None
        columns.append(_column(look, name, key, values))
    return columns


def _column(look: Look, name: str, key: StorageKey, values: Any) -> Column:
    if values.dtype.kind == "O":
        return _of_text(look, name, key, values) or Column(name, key, "", values.nbytes)
    narrow = narrower(look, values)
    return Column(name, key, str(narrow or ""), len(values) * (narrow or values.dtype).itemsize)


def _of_text(look: Look, name: str, key: StorageKey, values: Any) -> Column | None:
    """Return a column of few different strings as a category's."""
    if len(values) > _MOST_ROWS or not look.may_read(int(values.nbytes)):
        return None
    items = values.tolist()
    if any(kind is not str for kind in map(type, items)):
        return None
    places = dict(zip(reversed(items), reversed(range(len(items))), strict=True))
    """Where each text comes first: a category keeps that object."""
    width = next((width for width in (1, 2, 4) if len(places) < 1 << 8 * width - 1), 8)
    if len(places) > len(items) // 4:
        return None
    return Column(
        name, key, "category", len(items) * width + 8 * len(places), _freed_text(items, list(places.values()))
    )


def _freed_text(items: list[Any], kept: list[int]) -> int:
    """Return the bytes of the strings that only a column refers to, and ``items``, but for those ``kept``."""
    numpy: Any = sys.modules["numpy"]
    read = functools.partial(numpy.fromiter, dtype="int64", count=len(items))
    texts, references, sizes = (read(map(get, items)) for get in (id, sys.getrefcount, sys.getsizeof))
    texts[kept] = -1
    _, first, times = numpy.unique(texts, return_index=True, return_counts=True)
    ours = next(map(sys.getrefcount, ["".join(["a", "text"])])) - 1
    """References that looking takes, besides the list's."""
    goes = (texts[first] != -1) & (references[first] - ours == 2 * times)
    return int(sizes[first][goes].sum())
