"""Measures how much memory any object holds, and what it consists of: queries over a region."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import compress, islice
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.allowance import Allowance, AllowanceError
from ipygpumem.heap.bulk import container_base, of_types, one_of_each
from ipygpumem.heap.kinds.arrays import describe, holding_objects, library_type
from ipygpumem.heap.kinds.libraries import AT_LEAST, MemoryPiece
from ipygpumem.heap.knowledge.barriers import is_never_followed
from ipygpumem.heap.sizes.graph import GraphReading, NodeKey
from ipygpumem.heap.sizes.reading import MOST_NODES
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.walks.parts import ObjectPart, parts_of
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import ATOMS, is_instance, name_of, type_name
from ipygpumem.records import SEVERAL_TYPES, RetainedArray

MOST_SIZED = 4_000_000
"""Maximum number of objects to examine while something waits for the result."""
_MOST_SORTED = 200_000
"""Maximum number of items that are sorted by type if there is an allowance."""
_SAMPLED_IN_HASTE = 1_000_000
"""Number of items from which a container is measured by a sample if there is an allowance."""
_LARGE_BYTES = 1 << 16
"""Minimum bytes of shared memory to mention; also of a text that is measured."""
_NODES_MEASURED_FIRST = 10_000
"""Number of shared nodes to measure before those to which they lead."""


class Share(NamedTuple):
    """The memory of some of an object's content."""

    name: str
    """The name of a column, variable, key, attribute, or type of items."""
    kind: str
    """``columns``, ``index``, ``variables``, ``keys``, ``attributes`` or ``items``."""
    type_name: str
    """Empty for columns, an index and variables."""
    items: int
    size_bytes: int


class MeasuredSize(NamedTuple):
    """The memory that an object holds, as far as no earlier measurement counted it."""

    device_bytes: dict[str, int]
    """Bytes by device; ``cpu`` is RAM."""
    parts: tuple[Share, ...] = ()
    """The largest first."""
    also_in: tuple[str, ...] = ()
    """Labels of other objects that hold memory of this object, too, which is counted there."""
    notes: tuple[str, ...] = ()
    """Reasons why the size is an estimate, or need not be in RAM."""
    complete: bool = True
    """False if a limit was reached: there is more."""
    uncounted: tuple[str, ...] = ()
    """Libraries that keep memory of the object which nothing counts, so that there is more."""

    @property
    def is_at_least(self) -> bool:
        """Return True if the size is a lower bound."""
        if not self.complete or self.uncounted:
            return True
        return not AT_LEAST.isdisjoint(self.notes)

    @property
    def size_bytes(self) -> int:
        """Return the bytes on all devices."""
        return sum(self.device_bytes.values())


class Sizes:
    """Measures objects one after the other; memory that several share is counted once.

    It keeps shared objects alive: use it inside ``undisturbed``, then drop it.

    Args:
        named: objects by label. Each of these objects is counted only when it is measured itself.
        region: a region to which the measurements add objects; by default an empty one.
        limit: maximum number of objects to examine in one measurement.
        allowance: time and memory for all measurements; without it they are not limited.

    Attributes:
        complete: False if the last measurement reached a limit.

    >>> Sizes().measure([bytes(1_000_000)]).size_bytes > 1_000_000
    True
    """

    def __init__(
        self,
        named: Mapping[str, object] | None = None,
        *,
        region: Region | None = None,
        limit: int = MOST_NODES,
        allowance: Allowance | None = None,
    ) -> None:
        self.complete = True
        if region is None and allowance is None:
            region = Region(most=limit)
        elif region is None:
            region = Region((), allowance, most=limit, sampled_from=_SAMPLED_IN_HASTE)
        self.region = region
        objects = dict(named or {})
        measured = sizeable(list(objects.values()))
        self.region.reader.reserve(measured)
        measured_ids = set(map(id, measured))
        self._labels = dict[int, str]()
        """Labels of the named objects, by identity: the first label of each."""
        for label, item in objects.items():
            if id(item) in measured_ids:
                self._labels.setdefault(id(item), label)
        self._waiting = set(self._labels)
        """The named objects that have not been measured yet."""
        self._measured: list[tuple[str, set[NodeKey]]] = []
        """The nodes that each labelled measurement counted."""

    @property
    def allowance(self) -> Allowance | None:
        """The time and memory for the following measurements."""
        return self.region.reader.limits.allowance

    @allowance.setter
    def allowance(self, allowance: Allowance | None) -> None:
        self.region.reader.limits.allowance = allowance

    def drop(self) -> None:
        """Drop all references to the objects that were measured."""
        self.region = Region()

    def pass_over(self, identities: Iterable[int]) -> None:
        """Never enter the objects with these identities; the caller keeps them alive."""
        self.region.reader.barriers.passed_over.update(identities)

    @contextmanager
    def passing_over(self, identities: Set[int]) -> Iterator[None]:
        """Do not enter the objects with these identities in the block."""
        passed_over = self.region.reader.barriers.passed_over
        added = identities - passed_over
        passed_over |= added
        try:
            yield
        finally:
            passed_over -= added

    def pass_through(self, values: Sequence[object]) -> None:
        """Let later measurements count neither some objects nor anything to which they lead; the
        caller keeps these alive. Three times as fast as ``exclude``, because their bytes are not
        read.
        """
        if not self._begin():
            return
        reader = self.region.reader
        try:
            reader.pass_through(reader.barriers.enterable(values))
        except AllowanceError:
            reader.limits.is_complete = False
        self.complete = reader.limits.is_complete

    def exclude_data(self, arrays: Iterable[Any]) -> None:
        """Do not count the data of ``arrays``, which the caller counts; the array objects, and the
        elements of arrays of objects, still count when measured.
        """
        self.region.reader.memory.exclude_data(arrays)

    def has_counted(self, item: object) -> bool:
        """Return True if an object has been counted, or is passed over.

        That is known only of an object to which several objects refer: one with a single reference
        is counted as a part of its holder, without a record.
        """
        key = id(item)
        if key in self.region.reader.barriers.passed_over:
            return True
        return key in self.region.objects and key not in self._waiting

    def label_of(self, item: object) -> str:
        """Return the label of the measurement that has counted an object; empty if none has, or if
        only one object refers to it, as in ``has_counted``.
        """
        key = id(item)
        for label, nodes in self._measured:
            if key in nodes:
                return label
        return ""

    def not_counted(self, identities: Set[int]) -> set[int]:
        """Return the identities without those of counted objects.

        An object to which only one object refers stays among them, even if it was counted with that
        object, as in ``has_counted``.
        """
        counted = self.region.objects.keys() - self._waiting
        return set(identities - counted)

    def measure(self, value: object, label: str = "") -> MeasuredSize:
        """Return the memory that ``value`` holds and that no earlier call counted.

        With a ``label``, later measurements of objects that share memory with ``value`` name it in
        ``also_in``. Its nodes count as measured from now on, and ``complete`` tells if a limit was
        reached.
        """
        if not self._begin():
            return MeasuredSize({}, complete=False)
        if self._is_counted(value, label):
            label_of_other = self._labels.get(id(value)) or self.label_of(value)
            if label_of_other in ("", label):
                return MeasuredSize({})
            return MeasuredSize({}, also_in=(label_of_other,))
        self._waiting.discard(id(value))
        measurement = _Measurement(self.region)
        shares = self._measure_parts(value, measurement)
        also_in = self._labels_sharing_with(measurement, label)
        if label:
            self._measured.append((label, measurement.nodes))
        self.complete = self.region.reader.limits.is_complete
        contents = list(filter(_is_content, shares))
        contents.sort(key=_bytes_of_share, reverse=True)
        uncounted = sorted(self.region.uncounted_by(measurement.nodes))
        return MeasuredSize(
            device_bytes=dict(measurement.size()),
            parts=tuple(contents),
            also_in=tuple(also_in),
            notes=tuple(measurement.notes),
            complete=self.complete,
            uncounted=tuple(uncounted),
        )

    def _measure_parts(self, value: object, measurement: _Measurement) -> list[Share]:
        """Measure an object's parts one after the other, then the object itself; return the shares
        of the parts.
        """
        reader = self.region.reader
        # A part may lead back to the object: a trainer's callback refers to the trainer, and does
        # not own its data.
        reader.reserve([value])
        reader.barriers.open([value])
        shares = list[Share]()
        unread_parts = list[ObjectPart]()
        is_container = container_base(type(value)) is not None
        for part in self._parts_unless_long(value):
            if part.objects is None:
                unread_parts.append(part)
            elif is_container and part.kind == "items":
                name = part.names[0]
                size = measurement.add_items(value, part.objects)
                shares.append(Share(name, part.kind, name, part.items, size))
            else:
                shares += self._shares_of_part(part, measurement)
        reader.release([value])
        size = measurement.add(reader.barriers.enterable([value]))
        for part in unread_parts:
            for name in part.names:
                shares.append(Share(name, part.kind, name, part.items, size))
        return shares

    def _begin(self) -> bool:
        """Begin a measurement, and return True; False if the allowance is spent, so that there is
        none.
        """
        is_spent = self.allowance is not None and self.allowance.is_spent()
        self.complete = not is_spent
        self.region.reader.limits.is_complete = self.complete
        return self.complete

    def _is_counted(self, value: object, label: str) -> bool:
        """Return True if an object was counted by an earlier measurement, counts under another
        label, or does not count at all.
        """
        key = id(value)
        is_expected = key in self._waiting and self._labels.get(key) == label
        if key in self.region.objects and not is_expected:
            return True
        if key in self.region.reader.barriers.passed_over:
            return True
        return is_never_followed(value)

    def together(self, values: Sequence[object]) -> int:
        """Measure several objects at once, and return the bytes that they hold and that no earlier
        call counted, on all devices. Faster than one after the other.
        """
        if not self._begin():
            return 0
        reader = self.region.reader
        reader.release([value for value in values if id(value) in self._waiting])
        self._waiting.difference_update(map(id, values))
        measurement = _Measurement(self.region)
        size = measurement.add(reader.barriers.enterable(values))
        self.complete = reader.limits.is_complete
        return size

    def exclude(self, values: Sequence[object]) -> None:
        """Let later measurements leave out the memory of some objects, by counting it now.

        ``complete`` says afterwards whether all of it was counted.
        """
        self.together(values)

    def _labels_sharing_with(self, measurement: _Measurement, label: str) -> dict[str, None]:
        """Return the labels of other objects with which the object of a measurement shares more
        than a little memory, as the keys of a dict. A named object to which it leads is always
        among them.

        Args:
            measurement: the measurement.
            label: the label of its object, which is left out.
        """
        named_objects = self._labels.keys() & measurement.revisited
        sharers = dict.fromkeys(self._labels[key] for key in named_objects)
        sharers.pop(label, None)
        for label_of_other, nodes in self._measured:
            if nodes.isdisjoint(measurement.revisited):
                continue
            common = nodes & measurement.revisited
            # A piece is memory of a library, such as a buffer of pyarrow. Two frames that show
            # different rows of one buffer share all of it.
            shows_piece = not common.isdisjoint(self.region.graph.pieces)
            if shows_piece or self._is_large(common, nodes):
                sharers[label_of_other] = None
        return sharers

    def _is_large(self, common: set[NodeKey], nodes: set[NodeKey]) -> bool:
        """Return True if the memory that two objects share is worth a mention.

        Args:
            common: the nodes at which both have arrived.
            nodes: the nodes of the one that was measured first: some of them may be behind the
                common ones, and then are shared, too.
        """
        # Of a million common numbers, some tell enough, without a search for nodes behind them.
        some_common = list(islice(common, _NODES_MEASURED_FIRST))
        if self.region.bytes_of(some_common).total() >= _LARGE_BYTES:
            return True
        reached = self.region.reach(common) & nodes
        return self.region.bytes_of(reached).total() >= _LARGE_BYTES

    def _parts_unless_long(self, value: object) -> list[ObjectPart]:
        """Return the parts of an object; none if it is too long to sort, or cannot be read."""
        base = container_base(type(value))
        if self.allowance is not None and base is not None:
            is_long = base.__len__(value) > _MOST_SORTED
            if is_long:  # sorting a million items takes as long as measuring them
                return []
        try:
            return list(parts_of(value))
        except Exception as error:  # a thread changes it, or an unknown version of a library
            if is_from_signal(error):
                raise
            return []

    def _shares_of_part(self, part: ObjectPart, measurement: _Measurement) -> list[Share]:
        """Measure a part, and return a share of its memory for each of its names.

        The part may be a block of pandas, an array with a row for each of some columns. Its names
        get equal shares; but of an array of objects, such as text, each name gets the elements of
        its own row.

        Args:
            part: the part.
            measurement: receives the nodes.
        """
        objects = part.objects or ()
        # A column of polars has memory, and no Python object.
        pieces = [item for item in objects if type(item) is MemoryPiece]
        python_objects = [item for item in objects if type(item) is not MemoryPiece]
        values = self.region.reader.owned(python_objects)
        number = len(part.names)
        row_bytes = [0] * number
        if number > 1:
            row_bytes = _bytes_of_rows(values, number)
        size = measurement.add(values) + measurement.add_pieces(pieces)
        common_bytes = max(0, size - sum(row_bytes))
        bytes_of_each = common_bytes // number
        kind = ""
        if objects and part.kind in ("keys", "attributes", "items"):
            kind = type_name(objects[0])
        shares = list[Share]()
        for name, bytes_of_row in zip(part.names, row_bytes, strict=True):
            share_bytes = min(size, bytes_of_row + bytes_of_each)
            shares.append(Share(name, part.kind, kind, part.items, share_bytes))
        return shares


_bytes_of_share = attrgetter("size_bytes")


def _is_content(share: Share) -> bool:
    """Return True if a share is shown: an attribute only if it has memory of its own."""
    return share.size_bytes > 0 or share.kind != "attributes"


class _Measurement:
    """The nodes that one measurement adds to a region.

    Attributes:
        nodes: the nodes that no earlier measurement has read.
        revisited: nodes that were in the region when the measurement came to them, and some of
            ``nodes``.
        notes: the reasons why the size is an estimate.
    """

    def __init__(self, region: Region) -> None:
        self.nodes: set[NodeKey] = set()
        self.revisited: set[NodeKey] = set()
        self.notes: dict[str, None] = {}
        self._leaf_bytes = 0
        """Bytes of numbers and text that the nodes refer to, which are no nodes themselves."""
        self._region = region
        self._has_items = False
        """True once ``add_items`` has read items of the container."""

    def size(self) -> Counter[str]:
        """Return the bytes of the nodes by device."""
        size = self._region.read_bytes(self.nodes)
        size["cpu"] += self._leaf_bytes
        return +size

    def add(self, values: Sequence[object]) -> int:
        """Read objects; return the bytes of the nodes that this adds, on all devices."""
        return self._added(lambda: self._region.reader.read(values))

    def add_pieces(self, pieces: Sequence[MemoryPiece]) -> int:
        """Read memory of libraries; return the bytes of the pieces added, on all devices."""
        if not pieces:
            return 0
        return self._added(lambda: self._region.reader.read_pieces(pieces))

    def add_items(self, container: object, items: Sequence[object]) -> int:
        """Read items of a container before the container itself; return the bytes that this adds,
        on all devices.

        The bytes of numbers and text among the items are recorded at the container's node, which
        exists after the first call: so its growth counts, too.
        """
        key = id(container)
        before_bytes = 0
        if self._has_items:
            before_bytes = self._region.bytes_of([key]).total()
        size = self._added(lambda: self._region.reader.read_items(container, items))
        self._has_items = True
        after_bytes = self._region.bytes_of([key]).total()
        return size + after_bytes - before_bytes

    def _added(self, read: Callable[[], GraphReading]) -> int:
        """Call ``read``, which adds nodes to the region; add these nodes to the measurement, and
        return their bytes on all devices.
        """
        region = self._region
        region.graph.notes.clear()
        try:
            reading = read()
        except AllowanceError:
            reading = region.reader.reading
            region.reader.limits.is_complete = False
        nodes = set(reading.added)
        leaf_bytes = region.leaf_bytes(nodes)
        self._leaf_bytes += leaf_bytes
        self.nodes |= nodes
        self.revisited |= reading.revisited
        self.notes.update(region.graph.notes)
        return region.read_bytes(nodes).total() + leaf_bytes


def _bytes_of_rows(values: Sequence[object], number: int) -> list[int]:
    """Return the bytes of the objects in each of ``number`` rows, added over all arrays of objects
    among the ``values``; each array has a row for each name of a part.
    """
    row_bytes = [0] * number
    arrays: Iterable[Any] = filter(_is_rows_of_objects, values)
    for array in arrays:
        for position, row in enumerate(array):
            row_bytes[position] += _bytes_of_row(row)
    return row_bytes


def _bytes_of_row(row: Any) -> int:
    """Return the bytes of the objects in a row of an array, and of all objects behind them."""
    elements = row.tolist()
    region = Region([elements])
    size_with_list = region.bytes_of(region.reach([id(elements)]))
    size = size_with_list - region.bytes_of([id(elements)])
    return size.total()


def sizeable(values: Sequence[object]) -> list[object]:
    """Return the values without plain numbers, short text, modules, and classes of libraries."""
    texts = of_types(ATOMS, values)
    are_long = map(_LARGE_BYTES.__le__, map(sys.getsizeof, texts))
    wanted = set(map(id, compress(texts, are_long)))
    # Types of classes and modules, of which only the user's are measured.
    types_of_code = set[int]()
    for type_id, example in one_of_each(values).items():
        if is_instance(example, type) or is_instance(example, ModuleType):
            types_of_code.add(type_id)
    for item in of_types(types_of_code, values):
        if not is_never_followed(item):
            wanted.add(id(item))
    chosen_by_identity = types_of_code | ATOMS
    return [
        item for item in values if id(type(item)) not in chosen_by_identity or id(item) in wanted
    ]


def _is_rows_of_objects(value: Any) -> bool:
    """Return True for an array of objects that has rows: a plain array with at least two
    dimensions, or a view that shows all of a plain one, as a transposed array.
    """
    array_type: Any = library_type("numpy", "ndarray")
    if array_type is None or type(value) is not array_type:
        return False
    viewed = value.base
    if viewed is not None and type(viewed) is not array_type:
        return False
    if viewed is not None and viewed.size != value.size:
        return False
    return value.ndim > 1 and all(holding_objects([value]))


_MOST_SHOWN = 3
"""Maximum number of parts in a row."""


def row_of(items: Sequence[object], size: MeasuredSize) -> RetainedArray:
    """Return the row of a report for one object, or for several that are reported together.

    Args:
        items: the objects.
        size: the memory that they hold.
    """
    examples = one_of_each(items).values()
    kinds = {name_of(type(example)) for example in examples}
    is_single = len(items) == 1
    array = None
    if is_single:
        array = describe(items[0])
    shape: tuple[int, ...] | None = None
    dtype = ""
    parts = dict[str, int]()
    if array is not None:
        shape = array.shape
        dtype = array.dtype
    elif is_single or len(kinds) > 1:
        parts = {share.name: share.size_bytes for share in size.parts[:_MOST_SHOWN]}
    kind = SEVERAL_TYPES
    if len(kinds) == 1:
        kind = kinds.pop()
    devices = ", ".join(sorted(size.device_bytes)) or "cpu"
    return RetainedArray(
        "",
        kind,
        shape,
        dtype,
        devices,
        size.size_bytes,
        arrays=0,
        objects=len(items),
        parts=parts,
        is_at_least=size.is_at_least,
        uncounted=size.uncounted,
    )
