"""The tensors and arrays of one moment, what changed between two, and what one chooses from them, as plain data."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from ipygpumem.model import Usage
from ipygpumem.probes.nvml import device_here
from ipygpumem.record import Record
from ipygpumem.units import format_bytes, format_change

Role = Literal["parameter", "gradient", "optimizer state", "buffer", "other"]
"""What a tensor is for; ``other`` is everything else: data, activations, results, NumPy arrays."""


class TensorRecord(NamedTuple):
    """The memory of one tensor or array.

    Views and other tensors with the same storage are not listed beside it: ``aliases`` counts them.
    """

    name: str | None
    """The shortest path that leads to it, such as ``model.fc.weight``; None if no name of the notebook does."""
    type_name: str
    shape: tuple[int, ...] | None
    """None where there is no single shape, or where only the user's code could tell."""
    dtype: str
    device: str
    size_bytes: int
    """Bytes of the whole storage, or of all tensors inside it; 0 where it could not be read (see ``note``)."""
    kind: Role = "other"
    requires_grad: bool = False
    in_graph: bool = False
    """Whether autograd has recorded how it was computed: then it keeps the graph behind it alive."""
    cell: int | None = None
    """Execution count of the last cell whose code binds the name's first part."""
    aliases: int = 0
    """How many other tensors or arrays share the storage."""
    shared: bool = False
    """Whether the storage is in memory that other processes may share; for the host only."""
    library: str = ""
    """Whose the memory is: ``torch``, ``numpy``, ``jax``, or ``buffer`` for an array on another object's memory."""
    storage: int = 0
    """Identity of the storage among the library's: what stayed between two inventories has the same."""
    note: str = ""
    """Why the size is missing or not that of a storage."""


class TensorGroup(NamedTuple):
    """Tensors that have something in common."""

    label: str
    tensors: int
    size_bytes: int


@dataclass(frozen=True, repr=False)
class Inventory(Record):
    """The tensors and arrays that were alive at one moment, the largest first, each storage once."""

    _report = "tensors.tensors_report"

    tensors: tuple[TensorRecord, ...]
    taken_at: float
    file: str | None = None
    """The script that took it; None where a notebook's cell did."""
    line: int | None = None
    cell: int | None = None
    """Execution count of the cell that took it."""
    notes: tuple[str, ...] = ()
    """What could not be read, in words for the user."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on all devices."""
        return sum(self.device_bytes.values())

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of the tensors on each device."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.size_bytes
        return sizes

    @property
    def place(self) -> str:
        """Where it was taken: ``train.py:12``, ``cell 3``, or nothing where that is unknown."""
        if self.file is not None:
            return f"{self.file}:{self.line}"
        return "" if self.cell is None else f"cell {self.cell}"

    def __repr__(self) -> str:
        """Return one line: there may be very many tensors."""
        sizes = ", ".join(f"{device} {format_bytes(size)}" for device, size in self.device_bytes.items())
        return f"<Inventory of {len(self.tensors)} tensors and arrays: {sizes or 'no memory'}>"

    __str__ = __repr__


@dataclass(frozen=True, repr=False)
class InventoryDiff(Record):
    """What came and what went between two inventories, the largest first."""

    _report = "tensors.difference_report"

    came: tuple[TensorRecord, ...]
    went: tuple[TensorRecord, ...]
    before: str
    """Where the first inventory was taken: a file with its line, or a cell; may be empty."""
    after: str
    """Where the second was taken."""

    @property
    def changed_bytes(self) -> dict[str, int]:
        """How far each device's bytes rose (or fell, if negative)."""
        changes: dict[str, int] = {}
        for sign, tensors in ((1, self.came), (-1, self.went)):
            for tensor in tensors:
                changes[tensor.device] = changes.get(tensor.device, 0) + sign * tensor.size_bytes
        return changes

    def __repr__(self) -> str:
        """Return one line."""
        sizes = ", ".join(f"{device} {format_change(size)}" for device, size in self.changed_bytes.items())
        return f"<{type(self).__name__}: {len(self.came)} came, {len(self.went)} went: {sizes or 'no change'}>"

    __str__ = __repr__


@dataclass(frozen=True, repr=False)
class TrackerRecord(InventoryDiff):
    """What came and what went between two calls of a tracker, and what is there; the first call finds all to come."""

    number: int
    """Which call it was, counted from 1."""
    taken_at: float
    """Unix time."""
    file: str | None
    """The file of the code that called; None for a notebook's cell, and where nothing in Python called."""
    line: int | None
    """In the file, or in the cell."""
    cell: int | None
    """Execution count of the cell whose code called."""
    function: str
    """That called, such as ``Net.forward``; empty at the top level."""
    tensor_bytes: dict[str, int]
    """The bytes of all tensors and arrays on each device, each storage once."""
    usages: tuple[Usage, ...]
    """What each device went through since the last call."""
    notes: tuple[str, ...] = ()
    """What could not be read, in words for the user."""


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
    if device is not None:
        device = device_here(device, {row.device for row in inventory.tensors})
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


UNNAMED = "(no name)"


def first_part(path: str | None) -> str:
    """Return the first part of a tensor's name, which the user gave."""
    return UNNAMED if path is None else _FIRST_PART.split(path, maxsplit=1)[0]


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
