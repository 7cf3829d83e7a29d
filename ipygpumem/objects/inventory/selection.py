"""Chooses from an inventory, adds it up, compares it with another."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import get_args

from ipygpumem.objects.inventory.records import Inventory, InventoryDiff, Role, TensorGroup, TensorRecord

KINDS: tuple[str, ...] = get_args(Role)


def select(
    inventory: Inventory,
    patterns: Sequence[str] = (),
    *,
    device: str | None = None,
    kind: str | None = None,
    min_bytes: int = 0,
) -> Inventory:
    """Return the part of an inventory that all conditions hold for."""
    matches = re.compile("|".join(fnmatch.translate(pattern.replace("[", "[[]")) for pattern in patterns)).match
    tensors = tuple(
        row
        for row in inventory.tensors
        if row.size_bytes >= min_bytes
        and device in (None, row.device, row.device.partition(":")[0])
        and kind in (None, row.kind)
        and (not patterns or (row.name is not None and matches(row.name)))
    )
    return dataclasses.replace(inventory, tensors=tensors)


def group(tensors: Iterable[TensorRecord], by: str) -> tuple[TensorGroup, ...]:
    """Return tensors added up by one of ``GROUPS``, the largest first. By name means the name's first part."""
    label = _LABELS[by]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        text = label(tensor)
        counts[text] += 1
        sizes[text] += tensor.size_bytes
    groups = [TensorGroup(text, counts[text], size) for text, size in sizes.items()]
    return tuple(sorted(groups, key=attrgetter("size_bytes"), reverse=True))


def first_part(path: str | None) -> str:
    """Return the first part of a tensor's name, which the user gave."""
    return "(no name)" if path is None else _FIRST_PART.split(path, maxsplit=1)[0]


def _shape(tensor: TensorRecord) -> str:
    sizes = "no single shape" if tensor.shape is None else " × ".join(map(str, tensor.shape)) or "scalar"
    return f"{sizes} {tensor.dtype}".strip()


_FIRST_PART = re.compile(r"(?<!^Out)[.\[]")

_LABELS: dict[str, Callable[[TensorRecord], str]] = {
    "name": lambda tensor: first_part(tensor.name),
    "shape": _shape,
    "kind": attrgetter("kind"),
    "cell": lambda tensor: "(unknown)" if tensor.cell is None else f"cell {tensor.cell}",
    "device": attrgetter("device"),
}
"""What a tensor's group is called."""
GROUPS = tuple(_LABELS)


def difference(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories, the largest first.

    A storage is the same if its place in memory, its size and its device are: one that was freed and another of the
    same size that took its place cannot be told apart, and change nothing.
    """
    identity = attrgetter("library", "storage", "size_bytes", "device")
    old, new = (set(map(identity, inventory.tensors)) for inventory in (before, after))
    return InventoryDiff(
        came=tuple(tensor for tensor in after.tensors if identity(tensor) not in old),
        went=tuple(tensor for tensor in before.tensors if identity(tensor) not in new),
        before=before.place,
        after=after.place,
    )
