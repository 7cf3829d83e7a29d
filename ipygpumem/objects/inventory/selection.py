"""What one does with an inventory: choose from it, add it up, compare it with another."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from ipygpumem.objects.columns import Rows
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff, TensorGroup, TensorRecord

KINDS = ("parameter", "gradient", "optimizer state", "buffer", "other")
GROUPS = ("name", "shape", "kind", "cell", "device")


def select(
    inventory: Inventory,
    patterns: Sequence[str] = (),
    *,
    device: str | None = None,
    kind: str | None = None,
    min_bytes: int = 0,
) -> Inventory:
    """Return the part of an inventory that all conditions hold for.

    Args:
        inventory: what to choose from.
        patterns: globs, of which one must fit the name; ``model.*``. A bracket is taken for itself: ``losses[0]``.
        device: ``cpu``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: one of ``KINDS``.
        min_bytes: the smallest size.
    """
    rows = Rows.of(TensorRecord, inventory.tensors)
    if min_bytes:
        rows = rows.where(size >= min_bytes for size in rows.column("size_bytes"))
    if device is not None:
        rows = rows.where(name == device or name.partition(":")[0] == device for name in rows.column("device"))
    if kind is not None:
        rows = rows.where(name == kind for name in rows.column("kind"))
    if patterns:
        matches = re.compile("|".join(fnmatch.translate(pattern.replace("[", "[[]")) for pattern in patterns)).match
        rows = rows.where(name is not None and matches(name) for name in rows.column("name"))
    return dataclasses.replace(inventory, tensors=rows)


def group(tensors: Iterable[TensorRecord], by: str) -> tuple[TensorGroup, ...]:
    """Return tensors added up by one of ``GROUPS``, the largest first; by name, by the name's first part."""
    fields, label = _LABELS[by]
    rows = Rows.of(TensorRecord, tensors)
    values = list(zip(*map(rows.column, fields), strict=True))
    texts = {value: label(*value) for value in set(values)}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for value, size in zip(values, rows.column("size_bytes"), strict=True):
        text = texts[value]
        counts[text] += 1
        sizes[text] += size
    groups = [TensorGroup(text, counts[text], size) for text, size in sizes.items()]
    return tuple(sorted(groups, key=attrgetter("size_bytes"), reverse=True))


def _shape(shape: tuple[int, ...] | None, dtype: str) -> str:
    sizes = "no single shape" if shape is None else " × ".join(map(str, shape)) or "scalar"
    return f"{sizes} {dtype}".strip()


_FIRST_PART = re.compile(r"(?<!^Out)[.\[]")

_LABELS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "name": (("name",), lambda name: "(no name)" if name is None else _FIRST_PART.split(name, maxsplit=1)[0]),
    "shape": (("shape", "dtype"), _shape),
    "kind": (("kind",), str),
    "cell": (("cell",), lambda cell: "(unknown)" if cell is None else f"cell {cell}"),
    "device": (("device",), str),
}
"""The fields that make a group, and what it is called."""


def difference(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories, the largest first.

    A storage is the same if its place in memory, its size and its device are: one that was freed and another of the
    same size that took its place cannot be told apart, and change nothing.
    """
    rows = [Rows.of(TensorRecord, inventory.tensors) for inventory in (before, after)]
    old, new = (set(_identities(part)) for part in rows)
    return InventoryDiff(
        came=tuple(rows[1].where(key not in old for key in _identities(rows[1]))),
        went=tuple(rows[0].where(key not in new for key in _identities(rows[0]))),
        before=before.place,
        after=after.place,
    )


def _identities(rows: Rows[TensorRecord]) -> Iterator[tuple[object, ...]]:
    return zip(*map(rows.column, ("library", "storage", "size_bytes", "device")), strict=True)
