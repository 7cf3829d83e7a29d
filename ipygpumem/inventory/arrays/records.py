"""Inventories of tensors and arrays as plain data, and how they are selected, grouped and
compared.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from ipygpumem.heap.bulk import ROWS
from ipygpumem.probes.device_memory import device_here
from ipygpumem.records import Record
from ipygpumem.units import format_bytes, format_change, format_shape

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
    """The live tensors and arrays of one moment, the largest first; each storage is listed once,
    with the number of further tensors on it.
    """

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
        bytes_by_device = {}
        for device in dict.fromkeys(devices):
            is_there = map(device.__eq__, devices)
            bytes_by_device[device] = sum(compress(sizes, is_there))
        return bytes_by_device

    @property
    def place(self) -> str:
        """Source of the inventory: ``train.py:12``, ``cell 3``, or an empty text if unknown."""
        if self.file is not None:
            return f"{self.file}:{self.line}"
        if self.cell is not None:
            return f"cell {self.cell}"
        return ""

    def __repr__(self) -> str:
        """Return one line: there may be very many tensors."""
        sizes = _listed(self.device_bytes, format_bytes) or "no memory"
        return f"<Inventory of {len(self.tensors)} tensors and arrays: {sizes}>"

    __str__ = __repr__


def _listed(bytes_by_device: Mapping[str, int], form: Callable[[int], str]) -> str:
    """Return devices with their bytes, such as ``cpu 1 MiB, cuda:0 2 MiB``.

    Args:
        bytes_by_device: the bytes.
        form: writes the bytes of one device.
    """
    texts = [f"{device} {form(size)}" for device, size in bytes_by_device.items()]
    return ", ".join(texts)


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
        changes = Counter[str]()
        for tensor in self.added:
            changes[tensor.device] += tensor.size_bytes
        for tensor in self.removed:
            changes[tensor.device] -= tensor.size_bytes
        return dict(changes)

    def __repr__(self) -> str:
        """Return one line."""
        name = type(self).__name__
        changes = f"{len(self.added)} added, {len(self.removed)} removed"
        sizes = _listed(self.changed_bytes, format_change) or "no change"
        return f"<{name}: {changes}: {sizes}>"

    __str__ = __repr__


ROLES: tuple[str, ...] = get_args(Role)


def matcher(patterns: Sequence[str]) -> Callable[[str], object]:
    """Return a function that is true for a name which one of the globs matches.

    Brackets are part of names, such as ``Out[3]``, and no set of letters.
    """
    expressions = [fnmatch.translate(pattern.replace("[", "[[]")) for pattern in patterns]
    return re.compile("|".join(expressions)).match


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
    matches = matcher(patterns)
    tensors = list[TensorRecord]()
    for row in inventory.tensors:
        if row.size_bytes < min_bytes or kind not in (None, row.kind):
            continue
        if device not in (None, row.device, row.device.partition(":")[0]):
            continue
        if patterns and not _is_named(row, matches):
            continue
        tensors.append(row)
    return dataclasses.replace(inventory, tensors=tuple(tensors))


def _is_named(row: TensorRecord, matches: Callable[[str], object]) -> bool:
    """Return True if a tensor's name matches, or the variable with which it begins: ``model``
    matches ``model[0].weight``, too.
    """
    if row.name is None:
        return False
    return bool(matches(row.name) or matches(first_part(row.name)))


def group(tensors: Iterable[TensorRecord], by: str) -> tuple[TensorGroup, ...]:
    """Return the sums of tensors that have a property in common, the largest first: by ``"name"``,
    those below ``model``.

    Args:
        tensors: the tensors.
        by: the property, one of ``GROUPS``.
    """
    label_of = _LABELS[by]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        label = label_of(tensor)
        counts[label] += 1
        sizes[label] += tensor.size_bytes
    groups = [TensorGroup(label, counts[label], size) for label, size in sizes.items()]
    return tuple(sorted(groups, key=attrgetter("size_bytes"), reverse=True))


UNNAMED = "(no name)"
"""Label of the tensors to which no name leads."""


def first_part(path: str | None) -> str:
    """Return the first part of a tensor's name, which the user has chosen: ``model`` of
    ``model.fc.weight``.
    """
    if path is None:
        return UNNAMED
    return _FIRST_PART.split(path, maxsplit=1)[0]


def _cell_label(tensor: TensorRecord) -> str:
    """Return the label of the cell that bound the tensor's name."""
    if tensor.cell is None:
        return "(unknown)"
    return f"cell {tensor.cell}"


def _name_label(tensor: TensorRecord) -> str:
    """Return the variable with which the tensor's name begins."""
    return first_part(tensor.name)


def _shape_label(tensor: TensorRecord) -> str:
    """Return the shape and the dtype, such as ``64x3 float32``."""
    if tensor.shape is None:
        return f"no single shape {tensor.dtype}".strip()
    sizes = format_shape(tensor.shape) or "scalar"
    return f"{sizes} {tensor.dtype}".strip()


_FIRST_PART = re.compile(r"(?<!^Out)[.\[]")
"""Matches the end of a name's first part: ``model`` in ``model[0]``, ``Out[3]`` in ``Out[3].x``."""

_LABELS: dict[str, Callable[[TensorRecord], str]] = {
    "name": _name_label,
    "shape": _shape_label,
    "kind": attrgetter("kind"),
    "cell": _cell_label,
    "device": attrgetter("device"),
}
"""The function that returns the label of a tensor's group, by the property to group by."""
GROUPS = tuple(_LABELS)


def difference(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return the tensors that were added and removed between two inventories, the largest first.

    Storages with the same address, size and device are the same: a new one of the same size at the
    address of a freed one is not detected.
    """
    added = _not_in(before, after.tensors)
    removed = _not_in(after, before.tensors)
    return InventoryDiff(added, removed, before.place, after.place)


def _not_in(inventory: Inventory, tensors: Sequence[TensorRecord]) -> tuple[TensorRecord, ...]:
    """Return the tensors whose storages are in no tensor of an inventory."""
    storage_of = attrgetter("library", "storage", "size_bytes", "device")
    storages = set(map(storage_of, inventory.tensors))
    return tuple(tensor for tensor in tensors if storage_of(tensor) not in storages)
