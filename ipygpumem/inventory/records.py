"""Inventories of tensors and arrays, their differences and selections, as plain data."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from ipygpumem.heap.bulk import ROWS
from ipygpumem.probes.device_memory import device_here
from ipygpumem.records import Record
from ipygpumem.units import format_bytes, format_change

Role = Literal["parameter", "gradient", "optimizer state", "buffer", "other"]
"""Purpose of a tensor; ``other`` is the rest: data, activations, results, NumPy arrays."""


class TensorRecord(NamedTuple):
    """The memory of one tensor or array.

    Views and other tensors on the same storage are not listed; ``aliases`` counts them.
    """

    name: str | None
    """Shortest path to the tensor, such as ``model.fc.weight``; None if no name of the notebook
    leads to it.
    """
    type_name: str
    shape: tuple[int, ...] | None
    """None if there is no single shape, or if reading it might run user code."""
    dtype: str
    device: str
    size_bytes: int
    """Bytes of the whole storage, or of all tensors inside it; 0 if it could not be read (see
    ``note``).
    """
    kind: Role = "other"
    requires_grad: bool = False
    in_graph: bool = False
    """True if autograd has recorded how it was computed; the tensor then keeps the graph alive."""
    cell: int | None = None
    """Execution count of the last cell whose code binds the first part of the name."""
    aliases: int = 0
    """Number of other tensors or arrays on the storage."""
    shared: bool = False
    """True if other processes may share the storage's memory; for the host only."""
    library: str = ""
    """Owner of the memory: ``torch``, ``numpy``, ``jax``, or ``buffer`` for an array on another
    object's memory.
    """
    storage: int = 0
    """Identity of the storage within its library; equal in two inventories if the storage is the
    same.
    """
    note: str = ""
    """Why the size is missing, or not that of a storage."""


ROWS.add(id(TensorRecord))


class TensorGroup(NamedTuple):
    """Tensors with a common property."""

    label: str
    tensors: int
    size_bytes: int


@dataclass(frozen=True, repr=False)
class Inventory(Record):
    """The live tensors and arrays of one moment, the largest first, each storage once."""

    tensors: tuple[TensorRecord, ...]
    taken_at: float
    file: str | None = None
    """The script that took it; None for a notebook cell."""
    line: int | None = None
    cell: int | None = None
    """Execution count of the cell that took it."""
    notes: tuple[str, ...] = ()
    """Messages for the user about tensors that could not be read."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on all devices."""
        return sum(self.device_bytes.values())

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of the tensors on each device."""
        devices = list(map(attrgetter("device"), self.tensors))  # in C: there may be a million
        sizes = list(map(attrgetter("size_bytes"), self.tensors))
        return {
            device: sum(compress(sizes, map(device.__eq__, devices)))
            for device in dict.fromkeys(devices)
        }

    @property
    def place(self) -> str:
        """Source of the inventory: ``train.py:12``, ``cell 3``, or an empty text if unknown."""
        if self.file is not None:
            return f"{self.file}:{self.line}"
        return "" if self.cell is None else f"cell {self.cell}"

    def __repr__(self) -> str:
        """Return one line: there may be very many tensors."""
        sizes = ", ".join(
            f"{device} {format_bytes(size)}" for device, size in self.device_bytes.items()
        )
        return f"<Inventory of {len(self.tensors)} tensors and arrays: {sizes or 'no memory'}>"

    __str__ = __repr__


@dataclass(frozen=True, repr=False)
class InventoryDiff(Record):
    """Tensors and arrays that were added and removed between two inventories, the largest first."""

    added: tuple[TensorRecord, ...]
    removed: tuple[TensorRecord, ...]
    before: str
    """Source of the first inventory: a file with its line, or a cell; may be empty."""
    after: str
    """Source of the second inventory."""

    @property
    def changed_bytes(self) -> dict[str, int]:
        """Change of each device's bytes; negative if they fell."""
        changes: dict[str, int] = {}
        for sign, tensors in ((1, self.added), (-1, self.removed)):
            for tensor in tensors:
                changes[tensor.device] = changes.get(tensor.device, 0) + sign * tensor.size_bytes
        return changes

    def __repr__(self) -> str:
        """Return one line."""
        sizes = ", ".join(
            f"{device} {format_change(size)}" for device, size in self.changed_bytes.items()
        )
        return (
            f"<{type(self).__name__}: {len(self.added)} added, {len(self.removed)} removed: "
            f"{sizes or 'no change'}>"
        )

    __str__ = __repr__


KINDS: tuple[str, ...] = get_args(Role)


def select(
    inventory: Inventory,
    patterns: Sequence[str] = (),
    *,
    device: str | None = None,
    kind: str | None = None,
    min_bytes: int = 0,
) -> Inventory:
    """Return the part of an inventory that meets all conditions."""
    if device is None and kind is None and not patterns and min_bytes <= 0:
        return inventory
    if device is not None:
        device = device_here(device, {row.device for row in inventory.tensors})
    matches = re.compile(
        "|".join(fnmatch.translate(pattern.replace("[", "[[]")) for pattern in patterns)
    ).match
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
    """Return tensors summed by one of ``GROUPS``, the largest first; by name means by the name's
    first part.
    """
    label = _LABELS[by]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        text = label(tensor)
        counts[text] += 1
        sizes[text] += tensor.size_bytes
    groups = [TensorGroup(text, counts[text], size) for text, size in sizes.items()]
    return tuple(sorted(groups, key=attrgetter("size_bytes"), reverse=True))


UNNAMED = "(no name)"


def first_part(path: str | None) -> str:
    """Return the first part of a tensor's name, which the user chose."""
    return UNNAMED if path is None else _FIRST_PART.split(path, maxsplit=1)[0]


def _shape(tensor: TensorRecord) -> str:
    sizes = (
        "no single shape"
        if tensor.shape is None
        else " × ".join(map(str, tensor.shape)) or "scalar"
    )
    return f"{sizes} {tensor.dtype}".strip()


_FIRST_PART = re.compile(r"(?<!^Out)[.\[]")

_LABELS: dict[str, Callable[[TensorRecord], str]] = {
    "name": lambda tensor: first_part(tensor.name),
    "shape": _shape,
    "kind": attrgetter("kind"),
    "cell": lambda tensor: "(unknown)" if tensor.cell is None else f"cell {tensor.cell}",
    "device": attrgetter("device"),
}
"""Name of a tensor's group."""
GROUPS = tuple(_LABELS)


def difference(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return the tensors that were added and removed between two inventories, the largest first.

    Storages with the same address, size and device are the same: a new one of the same size at the
    address of a freed one is not detected.
    """
    identity = attrgetter("library", "storage", "size_bytes", "device")
    old, new = (set(map(identity, inventory.tensors)) for inventory in (before, after))
    return InventoryDiff(
        added=tuple(tensor for tensor in after.tensors if identity(tensor) not in old),
        removed=tuple(tensor for tensor in before.tensors if identity(tensor) not in new),
        before=before.place,
        after=after.place,
    )
