"""Measures the memory that names hold: the parts of each object, the bytes that deleting its names
frees, and other names that hold it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Progress, chunks, instances_among, no_progress
from ipygpumem.heap.holders.explanation import HIDDEN_CYCLE
from ipygpumem.heap.kinds.arrays import is_of_library, library_type
from ipygpumem.heap.kinds.libraries import OUTLIVES, is_segment, segments
from ipygpumem.heap.knowledge.tasks import is_pending, pending_tasks
from ipygpumem.heap.knowledge.views import small_view
from ipygpumem.heap.live.heap import refuse_while_traced, undisturbed
from ipygpumem.heap.paths.hidden_cycles import lines_that_end_cycles
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sizes import MeasuredSize, Share, Sizes, sizeable
from ipygpumem.heap.walks.parts import CACHED
from ipygpumem.introspect import is_instance, target_of, type_name
from ipygpumem.inventory.arrays.records import matcher
from ipygpumem.probes.device_memory import device_here
from ipygpumem.records import Record, uncounted_note
from ipygpumem.units import format_bytes

_NAMES_ALWAYS_MEASURED = 300
"""Maximum number of names that are all measured one by one; of more names, groups that hold little
memory are skipped.
"""
_NAMES_OF_GROUP = 1000
"""Number of names in such a group."""
_LEAST_BYTES_OF_GROUP = 1 << 20
"""Bytes of a group from which its names are measured one by one."""
SMALLEST = 1 << 10
"""Smallest size in bytes of a listed name."""
_SMALLEST_OF_CODE = 1 << 16
"""The same of a class, which takes some KiB for its methods, and of a function."""
_CONTAINERS_OF_TASKS = (list, tuple, set)
"""Types of containers of which pending tasks are cancelled, besides dicts' values."""
_MOST_TASKS = 1000
"""Maximum number of items of a container that are asked whether they are asyncio tasks."""
_LEAST_SHARE_OF_RESULTS = 0.9
"""Smallest share of a cached function's memory that its cached results have if the line frees only
these: ``embed.cache_clear()`` instead of ``del embed``.
"""
_INCOMPLETE = "there are too many objects to examine: some names hold more"
_MOST_PARTS = 10
"""Maximum number of parts in a record."""


class NamedSize(NamedTuple):
    """The memory of one named object."""

    name: str
    """A name of the notebook or script, or an output: ``Out[5]``."""
    type_name: str
    device_bytes: dict[str, int]
    """Bytes by device; ``cpu`` is RAM. Memory that several names share is counted for one of them.
    """
    parts: tuple[Share, ...] = ()
    """The largest columns, keys, attributes or kinds of items."""
    part_count: int = 0
    same: tuple[str, ...] = ()
    """Other names of the same object."""
    held_by: tuple[str, ...] = ()
    """Names of other objects that hold it, or some of its memory."""
    holds: tuple[str, ...] = ()
    """Names of other objects that it holds, or shares memory with; the bytes are counted there."""
    cell: int | None = None
    """Execution count of the last cell that bound the name."""
    remedy: str = ""
    """Line that deletes all names of the object."""
    notes: tuple[str, ...] = ()
    """Reasons why the size is an estimate, or not all in RAM."""
    freed_bytes: dict[str, int] | None = None
    """Bytes by device that are freed if all names of the object are deleted; None if unknown."""
    is_at_least: bool = False
    """True if ``device_bytes`` is a lower bound: an object leads to more objects than a look
    examines, or a library keeps memory that nothing counts.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())


@dataclass(frozen=True, repr=False)
class LargestNames(Record):
    """Names and the memory that their objects hold, the largest first."""

    names: tuple[NamedSize, ...]
    used_bytes: dict[str, int]
    """The process's memory by device."""
    taken_at: float
    small_names: int = 0
    """Number of names whose objects hold so little that they are not listed."""
    notes: tuple[str, ...] = ()
    unnamed_bytes: dict[str, int] = field(default_factory=dict)
    """The process's memory by device that no name leads to; empty if only some names were asked
    for.
    """
    free_heap_bytes: int = 0
    """RAM of these that malloc's heap keeps free; ``%gpumem free`` returns it."""

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of the listed names on each device."""
        return dict(_total(self.names))

    def __repr__(self) -> str:
        """Return one line: there may be many names."""
        sizes = [f"{device} {format_bytes(size)}" for device, size in self.device_bytes.items()]
        memory = ", ".join(sizes) or "no memory"
        return f"<LargestNames: {len(self.names)} names: {memory}>"

    __str__ = __repr__


def _total(rows: Iterable[NamedSize]) -> Counter[str]:
    """Return the bytes of rows by device."""
    total = Counter[str]()
    for row in rows:
        total.update(row.device_bytes)
    return total


def _deletion(names: Sequence[str]) -> str:
    """Return the line that deletes all of an object's names, such as ``del x, y``."""
    return f"del {', '.join(map(target_of, names))}"


def measure_names(
    named: Mapping[str, object],
    used_bytes: Mapping[str, int],
    *,
    references: Mapping[int, int] | None = None,
    namespaces: Iterable[int] = (),
    outputs: Collection[str] = (),
    elsewhere: Sequence[object] = (),
    remedy_of: Callable[[Sequence[str]], str] = _deletion,
    progress: Progress = no_progress,
) -> LargestNames:
    """Return the memory that named objects hold, and the bytes that deleting each of them frees.

    Args:
        named: the objects by name; no other object of our callers refers to them.
        used_bytes: the process's memory by device.
        references: number of references to each object, by identity, that end with its names. If it
            is missing, the freed bytes are unknown.
        namespaces: identities of dicts that contain the names.
        outputs: names of outputs, for which only memory counts that no other name leads to: after a
            cell that ends with ``model.layer``, the layer counts for ``model``, not for ``Out[5]``.
        elsewhere: objects whose memory counts for none of the names.
        remedy_of: returns the line that deletes all of an object's names.
        progress: called with the finished share.

    Raises:
        GpuMemError: torch traces the calling code.
    """
    refuse_while_traced("measure objects")
    with undisturbed():
        measured = _measure(named, namespaces, outputs, elsewhere, progress)
        if references is not None and measured.complete:
            measured = _with_freed(measured, named, references)
        measured.sizes.drop()
    rows = _with_remedies(measured, named, remedy_of)
    return LargestNames(
        names=tuple(rows),
        used_bytes=dict(used_bytes),
        taken_at=time.time(),
        small_names=measured.small_names,
        notes=() if measured.complete else (_INCOMPLETE,),
        unnamed_bytes=dict(Counter(used_bytes) - _total(rows)),
    )


# -- the lines that free memory -------------------------------------------------------------------


def _with_remedies(
    measured: _Measured, named: Mapping[str, object], remedy_of: Callable[[Sequence[str]], str]
) -> list[NamedSize]:
    """Return the measured rows, the largest first, each with the line that frees its memory.

    Args:
        measured: the rows, and the cycles that keep their objects.
        named: the objects by name.
        remedy_of: returns the line that deletes all of an object's names.
    """
    rows = list[NamedSize]()
    for row in sorted(measured.rows, key=lambda row: -row.size_bytes):
        deletion = remedy_of((row.name, *row.same))
        lines_before = measured.ends_of_cycles.get(row.name)
        if lines_before is not None:
            deletion = _deletion_after(lines_before, deletion)
        rows.append(_with_remedy(row, named, deletion))
    return rows


def _deletion_after(lines_before: Sequence[str], deletion: str) -> str:
    """Return the line that deletes an object after the lines that end its cycles:
    ``box.rows = None; del box``. Return advice in words if no line can end them.
    """
    if not lines_before:
        return HIDDEN_CYCLE.advice
    return "; ".join([*lines_before, deletion])


def _with_remedy(row: NamedSize, named: Mapping[str, object], deletion: str) -> NamedSize:
    """Return a row with the line that frees its memory: usually the one that deletes its names. A
    task is cancelled before, a widget is closed, shared memory is unlinked, and only the results of
    a cached function are dropped.

    Args:
        row: the row.
        named: the objects by name.
        deletion: the line that deletes all names of the object.
    """
    value = named[row.name]
    target = target_of(row.name)
    ending = ending_of(value)
    if ending and deletion.startswith("del "):
        return row._replace(remedy=f"{target}.{ending}; {deletion}")
    if is_pending(value) or _has_pending_tasks(value):  # the event loop keeps them
        return row._replace(remedy=f"cancel its tasks, then {deletion}")
    if is_segment(value):
        return _with_remedy_of_segment(row, named)
    if _is_filled_cache(row):  # the function may be needed later
        return row._replace(remedy=f"{target}.cache_clear()")
    if OUTLIVES in row.notes:
        deletion = f"close() and unlink() its shared memory, then {deletion}"
    return row._replace(remedy=deletion)


def _with_remedy_of_segment(row: NamedSize, named: Mapping[str, object]) -> NamedSize:
    """Return the row of a ``SharedMemory`` object with the line that frees it.

    Arrays on this memory are deleted before, because they would refer to memory that is gone: ``del
    view; segment.close(); segment.unlink()``.
    """
    target = target_of(row.name)
    remedy = f"{target}.close(); {target}.unlink()"
    arrays = [name for name in row.held_by if is_of_library(named[name], "numpy", "ndarray")]
    if arrays:
        remedy = f"{_deletion(arrays)}; {remedy}"
    other_holders = tuple(name for name in row.held_by if name not in arrays)
    return row._replace(remedy=remedy, held_by=other_holders)


def _is_filled_cache(row: NamedSize) -> bool:
    """Return True for a cached function whose memory is nearly all in its cached results."""
    if not row.parts or row.parts[0].name != CACHED:
        return False
    return row.parts[0].size_bytes >= _LEAST_SHARE_OF_RESULTS * row.size_bytes


def _has_pending_tasks(value: Any) -> bool:
    """Return True for a container of asyncio tasks that are not done."""
    if type(value) is dict:
        value = value.values()
    elif not any(
        type(value) is kind for kind in _CONTAINERS_OF_TASKS
    ):  # ``in`` compares metaclasses
        return False
    return bool(pending_tasks(list(islice(value, _MOST_TASKS))))


# -- measuring ------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """The rows of named objects, and the measurements that they are made from."""

    rows: list[NamedSize]
    small_names: int
    """Number of names whose objects have no row."""
    complete: bool
    """False if there were too many objects to follow."""
    sizes: Sizes
    """The measurements. Besides our callers, only its region refers to the objects."""
    ends_of_cycles: Mapping[str, Sequence[str]] = {}
    """The lines to run before the deletion of an object that a cycle keeps, by its name; no lines
    if the cycle is further inside, where no line can end it.
    """


def _measure(
    named: Mapping[str, object],
    namespaces: Iterable[int],
    outputs: Collection[str],
    elsewhere: Sequence[object],
    progress: Progress,
) -> _Measured:
    """Measure named objects one after the other. Memory counts for the first object that leads to
    it. The arguments are those of ``measure_names``.
    """
    names_by_object = _names_by_object(named)
    objects = _sizeable_objects(named, names_by_object)
    namespaces = [*namespaces, id(named)]
    to_measure = _without_small_groups(objects, namespaces, progress)
    rows = list[NamedSize]()
    number_of_names = max(1, len(to_measure))
    region = Region(namespaces=namespaces, progress=lambda: progress(len(rows) / number_of_names))
    variables = {name: value for name, value in to_measure.items() if name not in outputs}
    sizes = Sizes(variables, region=region)
    if elsewhere:  # first, because memory counts for the first object that leads to it
        sizes.measure(list(elsewhere))
    is_complete = True
    for name in _in_order_of_counting(variables, to_measure):
        value = to_measure[name]
        size = sizes.measure(value, name)
        is_complete &= size.complete
        _, *other_names = names_by_object[id(value)]
        rows.append(_named_row(name, value, size, other_names))
    rows_listed = [row for row in _with_holders(rows) if _is_listed(row, to_measure[row.name])]
    return _Measured(rows_listed, len(objects) - len(rows_listed), is_complete, sizes)


def _sizeable_objects(
    named: Mapping[str, object], names_by_object: Mapping[int, list[str]]
) -> dict[str, object]:
    """Return the objects that may hold much memory, each by the first of its names; numbers and
    short texts cannot.
    """
    objects = {names[0]: named[names[0]] for names in names_by_object.values()}
    sizeable_ids = set(map(id, sizeable(list(objects.values()))))
    return {name: value for name, value in objects.items() if id(value) in sizeable_ids}


def _with_holders(rows: Sequence[NamedSize]) -> list[NamedSize]:
    """Return the rows with ``held_by`` filled in: the names of the other objects that hold each
    object's memory, too. The measurement has found the opposite, ``holds``.
    """
    holders_by_name: dict[str, list[str]] = {}
    for row in rows:
        for name in row.holds:
            holders_by_name.setdefault(name, []).append(row.name)
    rows_with_holders = list[NamedSize]()
    for row in rows:
        holders = holders_by_name.get(row.name, ())
        rows_with_holders.append(row._replace(held_by=tuple(holders)))
    return rows_with_holders


def _is_listed(row: NamedSize, value: object) -> bool:
    """Return True if an object has enough memory for a row, or an unknown amount."""
    is_code = is_instance(value, type) or type(value) is FunctionType
    smallest = _SMALLEST_OF_CODE if is_code else SMALLEST
    return row.is_at_least or row.size_bytes >= smallest


def _names_by_object(named: Mapping[str, object]) -> dict[int, list[str]]:
    """Return the names of each object by its identity."""
    names: dict[int, list[str]] = {}
    for name, value in named.items():
        names.setdefault(id(value), []).append(name)
    return names


def _named_row(
    name: str, value: object, size: MeasuredSize, other_names: Sequence[str]
) -> NamedSize:
    """Return the row of a named object, given its measured size."""
    return NamedSize(
        name,
        type_name(value),
        size.device_bytes,
        size.parts[:_MOST_PARTS],
        part_count=sum(part.kind != "index" for part in size.parts),
        same=tuple(other_names),
        holds=size.also_in,
        notes=notes_on(value, size),
        is_at_least=size.is_at_least,
    )


def notes_on(value: object, size: MeasuredSize) -> tuple[str, ...]:
    """Return the notes on an object's size: that a part is an estimate, that a library's memory is
    not counted, or that the object is a small view of a large block.
    """
    notes = list(size.notes)
    if size.uncounted:
        notes.append(uncounted_note(size.uncounted))
    view = small_view(value)
    if view:
        notes.append(view)
    return tuple(notes)


def _with_freed(
    measured: _Measured, named: Mapping[str, object], references: Mapping[int, int]
) -> _Measured:
    """Return the rows with the bytes that are freed with each object if all of its names are
    deleted.
    """
    object_ids = [id(named[row.name]) for row in measured.rows]
    # The references that do not count: those of ``named``, and those that end with the names.
    own_references = Counter(map(id, named.values()))
    own_references.update({key: references.get(key, 0) for key in object_ids})
    freed_sizes = measured.sizes.region.freed_by(object_ids, own_references)
    rows = [
        row._replace(freed_bytes=dict(size))
        for row, size in zip(measured.rows, freed_sizes, strict=True)
    ]
    ends = _ends_of_cycles(rows, named, measured.sizes.region)
    return measured._replace(rows=rows, ends_of_cycles=ends)


def _ends_of_cycles(
    rows: Iterable[NamedSize], named: Mapping[str, object], region: Region
) -> dict[str, list[str]]:
    """Return the lines that end cycles through arrays of objects, by the name that leads to them;
    no lines if one of them is further inside.

    Nothing ever frees such a cycle: after ``box.rows = numpy.array([box])``, ``del box`` frees
    nothing.
    """
    ends = dict[str, list[str]]()
    in_cycles = region.in_hidden_cycles()
    if not in_cycles:
        return ends
    for row in rows:
        item = named[row.name]
        arrays = [region.objects[key] for key in in_cycles & region.reach([id(item)])]
        if arrays:
            ends[row.name] = lines_that_end_cycles(
                [(target_of(row.name), item)], arrays, region.reader.barriers
            )
    return ends


def _without_small_groups(
    named: Mapping[str, object], namespaces: Iterable[int], progress: Progress
) -> dict[str, object]:
    """Return the objects to measure one by one, by name. Of more than ``_NAMES_ALWAYS_MEASURED``
    names, groups that hold little memory together are left out: 100,000 names of numbers would take
    seconds.
    """
    if len(named) <= _NAMES_ALWAYS_MEASURED:
        return dict(named)
    region = Region(namespaces=namespaces, progress=lambda: progress(0))
    sizes = Sizes(named, region=region)
    remaining = dict[str, object]()
    for names in chunks(list(named), _NAMES_OF_GROUP):
        values = [named[name] for name in names]
        if sizes.together(values) >= _LEAST_BYTES_OF_GROUP:
            remaining.update(zip(names, values, strict=True))
    sizes.drop()
    return remaining


def _in_order_of_counting(
    variables: Mapping[str, object], named: Mapping[str, object]
) -> list[str]:
    """Return the names in the order in which memory counts for them. Shared memory comes before the
    views of it, torch's modules before their optimizers, which refer to the same parameters, and
    outputs last.

    Args:
        variables: the objects by name, without outputs.
        named: all objects by name.
    """
    values = list(variables.values())
    module_type = library_type("torch.nn", "Module")
    modules = list[object]()
    if module_type is not None:
        modules = instances_among(values, module_type)
    ids_at_front = set(map(id, [*segments(values), *modules]))
    in_order = sorted(variables, key=lambda name: id(variables[name]) not in ids_at_front)
    in_order += [name for name in named if name not in variables]
    return in_order


def select(
    largest: LargestNames,
    patterns: Sequence[str] = (),
    *,
    device: str | None = None,
    min_bytes: int = 0,
) -> LargestNames:
    """Return the names that match one of the globs and hold enough memory; with a device, only the
    memory on that device counts.
    """
    if device is not None:
        existing = set[str]()
        for row in largest.names:
            existing.update(row.device_bytes)
        device = device_here(device, existing)
        largest = replace(
            largest,
            names=tuple(_rows_on(device, largest.names)),
            used_bytes=_bytes_on(device, largest.used_bytes),
            unnamed_bytes=_bytes_on(device, largest.unnamed_bytes),
        )
    rows = [row for row in largest.names if row.size_bytes >= min_bytes]
    if patterns:
        matches = matcher(patterns)
        rows = [row for row in rows if any(map(matches, (row.name, *row.same)))]
        largest = replace(largest, unnamed_bytes={})
    return replace(largest, names=tuple(sorted(rows, key=lambda row: -row.size_bytes)))


def _rows_on(device: str, rows: Iterable[NamedSize]) -> Iterator[NamedSize]:
    """Yield the rows that hold memory on a device, with the bytes there."""
    for row in rows:
        sizes = _bytes_on(device, row.device_bytes)
        if sizes:
            yield row._replace(device_bytes=sizes)


def _bytes_on(device: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes on a device; for the name of a kind, such as ``cuda``, on each device
    of it.
    """
    return {name: size for name, size in sizes.items() if device in (name, name.partition(":")[0])}
