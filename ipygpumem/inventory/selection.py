"""What one does with an inventory: choose from it, add it up, compare it with another."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from ipygpumem.model import Inventory, InventoryDiff, TensorGroup, TensorRecord

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
    rows: Iterable[TensorRecord] = inventory.tensors
    if min_bytes:
        rows = (row for row in rows if row.size_bytes >= min_bytes)
    if device is not None:
        rows = (row for row in rows if row.device == device or row.device.partition(":")[0] == device)
    if kind is not None:
        rows = (row for row in rows if row.kind == kind)
    if patterns:
        matches = re.compile("|".join(fnmatch.translate(pattern.replace("[", "[[]")) for pattern in patterns)).match
        rows = (row for row in rows if row.name is not None and matches(row.name))
    return dataclasses.replace(inventory, tensors=tuple(rows))


def group(tensors: Iterable[TensorRecord], by: str) -> tuple[TensorGroup, ...]:
    """Return tensors added up by one of ``GROUPS``, the largest first; by name, by the name's first part."""
    label = _LABELS[by]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for row in tensors:
        text = label(row)
        counts[text] += 1
        sizes[text] += row.size_bytes
    groups = [TensorGroup(text, counts[text], size) for text, size in sizes.items()]
    return tuple(sorted(groups, key=attrgetter("size_bytes"), reverse=True))


def _shape(row: TensorRecord) -> str:
    sizes = "no single shape" if row.shape is None else " × ".join(map(str, row.shape)) or "scalar"
    return f"{sizes} {row.dtype}".strip()


_FIRST_PART = re.compile(r"(?<!^Out)[.\[]")

_LABELS: dict[str, Callable[[TensorRecord], str]] = {
    "name": lambda row: "(no name)" if row.name is None else _FIRST_PART.split(row.name, maxsplit=1)[0],
    "shape": _shape,
    "kind": lambda row: row.kind,
    "cell": lambda row: "(unknown)" if row.cell is None else f"cell {row.cell}",
    "device": lambda row: row.device,
}


def difference(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories, the largest first.

    A storage is the same if its place in memory, its size and its device are: one that was freed and another of the
    same size that took its place cannot be told apart, and change nothing.
    """
    old = {_identity(row): row for row in before.tensors}
    new = {_identity(row): row for row in after.tensors}
    return InventoryDiff(
        came=tuple(row for key, row in new.items() if key not in old),
        went=tuple(row for key, row in old.items() if key not in new),
        before=before.place,
        after=after.place,
    )


def _identity(row: TensorRecord) -> tuple[object, ...]:
    return row.library, row.storage, row.size_bytes, row.device
