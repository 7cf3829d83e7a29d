"""``ipygpumem.release``: empties objects, and reports the memory that was freed and the memory that
stays.

Only the object itself is emptied. Objects that something else refers to stay alive. Code that still
uses the object gets an error that names the line of its release.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType, GetSetDescriptorType
from typing import Any, NamedTuple, NoReturn

from ipygpumem.api.shell import current_traces, garbage_here, loaded_app
from ipygpumem.errors import GpuMemError, ReleasedError
from ipygpumem.heap.attributes import MODULE_PARTS
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import Array, describe, is_of_library, library_type
from ipygpumem.heap.kinds.watching import watch
from ipygpumem.heap.knowledge.barriers import TOOLS
from ipygpumem.heap.live.heap import Heap, refuse_while_traced, undisturbed
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.walks.array_search import ArraySearch, summed
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    module_of,
    solid_base,
    type_name,
)
from ipygpumem.inventory.arrays import survey
from ipygpumem.notebook import current_shell, running_cell
from ipygpumem.reclaim.emptying import trim_host_heap
from ipygpumem.reclaim.reclaim import free_now
from ipygpumem.records import FreeingStep, Record, RetainedArray
from ipygpumem.report import words
from ipygpumem.report.freeing import freed_report
from ipygpumem.report.layout import Report
from ipygpumem.report.leaks import leak_table
from ipygpumem.report.registration import shows
from ipygpumem.report.retained_arrays import held_table
from ipygpumem.report.words import clean, clean_name
from ipygpumem.scope.ownable import is_ownable

_EXAMINED_FIRST = (
    ("torch", "Tensor"),
    ("torch.nn", "Module"),
    ("torch.optim", "Optimizer"),
    ("torch.utils.data", "DataLoader"),
)
"""Types of parts to examine first: a callback leads to everything of a trainer, and would be
credited with it.
"""
_MESSAGE = "_ipygpumem_says"
"""Attribute of a released object with the text of its errors."""


@dataclass(frozen=True)
class ReleaseRecord(Record):
    """Result of a release: the memory that was freed, and the memory still alive, with holders."""

    names: tuple[str, ...]
    """The names of the objects."""
    where: str
    """The cell, or the script and its line."""
    freed_parts: tuple[RetainedArray, ...]
    """The freed parts, the largest first; ``size_bytes`` counts the tensors and arrays that died.
    """
    left: tuple[RetainedArray, ...]
    """The parts, or their rests, that other objects keep alive, with the holders."""
    freed: dict[str, int]
    """Decrease per device: RSS for the host, live tensors for an accelerator."""
    steps: tuple[FreeingStep, ...] = ()
    """The lines to run that free the rest."""
    notes: tuple[str, ...] = ()
    """Objects that were skipped, because they had been released before."""

    @property
    def freed_bytes(self) -> int:
        """Memory of all tensors and arrays that were freed."""
        return sum(held.size_bytes for held in self.freed_parts)


class Released:
    """Class of an object after its release; reading an attribute raises an error that says so."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ReleasedError(vars(self)[_MESSAGE])

    def __call__(self, *_: object, **__: object) -> NoReturn:  # noqa: D102
        raise ReleasedError(vars(self)[_MESSAGE])

    def __repr__(self) -> str:
        return f"<{vars(self)[_MESSAGE]}>"

    def __dir__(self) -> list[str]:
        return []


def _is_released(item: object) -> bool:
    """Return True if an object was released before; one with another attribute layout has kept its
    class.
    """
    return _MESSAGE in (instance_dict(item) or {})


def _refuse_if_not_emptiable(name: str, item: object) -> None:
    """Raise GpuMemError if an object cannot be emptied.

    Args:
        name: its name; its type if it has none.
        item: the object.
    """
    is_named = name != type_name(item)
    label = f"`{name}` ({type_name(item)})" if is_named else f"the {name}"
    attributes = instance_dict(item)
    if attributes is not None and _MESSAGE in attributes:
        raise GpuMemError(attributes[_MESSAGE])
    if describe(item) is not None:
        raise GpuMemError(f"{label} has nothing to empty: its memory is freed with its last name")
    library = module_of(item).partition(".")[0]
    if library in TOOLS:
        raise GpuMemError(f"{label} cannot be released: it is a part of {library}")
    if attributes is None or _is_built_in(item, library) or _has_finalizer(item):
        hint = ": delete its name instead" if is_named else ""
        raise GpuMemError(f"{label} cannot be emptied{hint}")


def _is_built_in(item: object, library: str) -> bool:
    """Return True if an object's state is not, or not only, in its ``__dict__``."""
    if library in sys.stdlib_module_names:
        return True
    return solid_base(type(item)) is not object or is_instance(item, Enum)


def _has_finalizer(item: object) -> bool:
    """Return True if an object has a ``__del__``, which would fail once its attributes are gone."""
    return any("__del__" in class_dict(base) for base in type.mro(type(item)))


def _empty(item: object, message: str) -> None:
    """Take an object's attributes away, and let every use of it raise an error with a message.

    It gets a new dict, because the old one may be shared with another object.
    """
    # Not item.__dict__ = ..., which the user's class may define in another way.
    slots = [class_dict(base).get("__dict__") for base in type.mro(type(item))]
    slot = next(slot for slot in slots if type(slot) is GetSetDescriptorType)
    slot.__set__(item, {_MESSAGE: message})
    # TypeError: a class with another attribute layout, such as a generic one
    with contextlib.suppress(TypeError):
        object.__dict__["__class__"].__set__(item, Released)


def _parts_with_names(name: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield the values of an object's attributes, each after its name: ``learner.model``.

    A module's parameters, buffers and inner modules are in dicts, whose items are its parts.
    """
    for key, value in (instance_dict(item) or {}).items():
        if key in MODULE_PARTS and is_instance(value, dict):
            for part_name, part in list(dict.items(value)):
                yield f"{name}.{part_name}", part
        else:
            yield f"{name}.{key}", value


def release(*objects: object) -> ReleaseRecord:
    """Empty objects, such as a model, an optimizer or a trainer, and free the memory that only they
    hold.

    Use it when other names or libraries still refer to an object that you no longer need. Memory
    that something else holds too stays, and the record names the holder. Using an emptied object
    raises an error that says where it was released. It works in scripts, too. Tensors, lists and
    built-in objects have nothing to empty: delete their names.

    Args:
        objects: pass objects that refer to each other, such as a model and its optimizer, together.

    Raises:
        GpuMemError: one of them cannot be released; then none is.

    >>> class Trainer:
    ...     pass
    >>> trainer = Trainer()
    >>> trainer.batch = numpy.ones(2**20)
    >>> ipygpumem.release(trainer).freed_bytes
    8388608
    """
    refuse_while_traced("release")
    if not objects:
        raise GpuMemError("release needs at least one object: release(learner)")
    frame = sys._getframe(1)
    named = _objects_with_names(objects, frame)
    del objects
    app = loaded_app()
    where = _place_of_frame(frame)
    notes = tuple(f"{name} was released before" for name, item in named if _is_released(item))
    # if all of them were released before, the first one's error says where
    named = [(name, item) for name, item in named if not _is_released(item)] or named
    for name, item in named:
        _refuse_if_not_emptiable(name, item)
    parts = _watched_parts(named)

    def empty() -> None:
        """Empty all objects: the first step of freeing."""
        for name, item in named:
            _empty(item, f"`{name}` was released by ipygpumem at {where}")

    steps, freed = free_now(current_traces().meter, garbage_here(), ("references", empty))
    roots = Roots if app is None else app.experiments.survivors.roots
    rows = _rows_of_parts(parts, roots)
    trim_host_heap()  # frees the memory of the search for holders
    names = tuple(name for name, _ in named)
    return ReleaseRecord(names, where, rows.freed, rows.left, freed, tuple(steps), notes)


def _objects_with_names(objects: Sequence[object], frame: FrameType) -> list[tuple[str, object]]:
    """Return objects, each after its name in the caller's frame, or its type if it has none."""
    names: dict[int, str] = {}
    for name, value in survey.visible_names(frame):
        if is_ownable(name):
            names.setdefault(id(value), name)
    return [(names.get(id(item), type_name(item)), item) for item in objects]


def _place_of_frame(frame: FrameType) -> str:
    """Return the running cell, or a script and its line."""
    shell = current_shell()
    if shell is None:
        return f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    return f"cell {running_cell(shell)}"


@shows(ReleaseRecord)
def release_report(record: ReleaseRecord) -> Report:
    """Return the report: memory freed with the objects, and memory that other objects hold."""
    names = words.listed([clean_name(name) for name in record.names])
    notes = [*map(clean, record.notes)]
    report = freed_report(f"released {names}", record.steps, record.freed, notes)
    tables = [
        held_table("freed tensors and arrays", record.freed_parts),
        leak_table(record.left, "left, because something else refers to it"),
    ]
    return replace(report, kind="release", tables=tables, records=[record])


class _ReleasedArray(NamedTuple):
    """An array of a part, whose object this does not keep alive."""

    is_alive: Callable[[], bool]
    """Returns True while the array's object is alive."""
    array: Array


class _WatchedPart(NamedTuple):
    """A part of an object, such as ``learner.model``, which this does not keep alive."""

    row_of: Callable[[list[Array]], RetainedArray]
    """Returns the row of this part with the sum of some of its arrays."""
    arrays: list[_ReleasedArray]


class _Rows(NamedTuple):
    """The parts of objects after their release, the largest first."""

    freed: tuple[RetainedArray, ...]
    """The arrays of each part that died."""
    left: tuple[RetainedArray, ...]
    """The arrays of each part that are alive, with their holder."""


def _watched_parts(named: Sequence[tuple[str, object]]) -> list[_WatchedPart]:
    """Return the parts of objects, without keeping them alive. An array of several parts counts in
    the first.
    """
    search = ArraySearch()
    parts = list[_WatchedPart]()
    for _, item in named:
        search.pass_over(item)  # parts that lead back to it do not count
    for owner_name, owner in named:
        for name, value in sorted(_parts_with_names(owner_name, owner), key=_order_of_examination):
            arrays = list[_ReleasedArray]()
            for item, array in search.find(value):
                arrays.append(_ReleasedArray(watch(item), array))
                for gradient, array_of_gradient in _arrays_of_gradient(item, search):
                    arrays.append(_ReleasedArray(watch(gradient), array_of_gradient))
            if arrays:
                is_array = describe(value) is not None
                row_of = partial(summed, name, type_name(value), alone=is_array)
                parts.append(_WatchedPart(row_of, arrays))
    return parts


def _order_of_examination(part: tuple[str, object]) -> int:
    """Return the position of the type of a part, which is a name and a value, in the order of
    examination.
    """
    _, value = part
    for position, (library, name) in enumerate(_EXAMINED_FIRST):
        if is_of_library(value, library, name):
            return position
    return len(_EXAMINED_FIRST)


def _arrays_of_gradient(item: Any, search: ArraySearch) -> list[tuple[object, Array]]:
    """Return the arrays of a tensor's gradient, each with its object; the collector does not see
    the gradient.
    """
    base: Any = library_type("torch", "Tensor")
    if base is None or not is_instance(item, base):
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        if not base.is_leaf.__get__(item):
            return []
        gradient = base.grad.__get__(item)
    if gradient is None:
        return []
    return list(search.find(gradient))


def _rows_of_parts(parts: Sequence[_WatchedPart], roots: Callable[[], Roots]) -> _Rows:
    """Return the freed arrays of each part, and the live ones with their holders.

    Args:
        parts: the parts.
        roots: returns the roots of the search for holders.
    """
    freed: list[RetainedArray] = []
    left: list[RetainedArray] = []
    largest_left: list[Array] = []
    """The largest live array of each part that is left: its holder is reported."""
    for part in parts:
        alive = [watched.array for watched in part.arrays if watched.is_alive()]
        alive_ids = set(map(id, alive))
        dead = [watched.array for watched in part.arrays if id(watched.array) not in alive_ids]
        if dead:
            freed.append(part.row_of(dead))
        if alive:
            left.append(part.row_of(alive))
            largest_left.append(max(alive, key=attrgetter("size_bytes")))
    if left:
        left = _with_holders(left, largest_left, roots)
    return _Rows(_arrays_largest_first(freed), _arrays_largest_first(left))


def _with_holders(
    rows: Sequence[RetainedArray], arrays: Sequence[Array], roots: Callable[[], Roots]
) -> list[RetainedArray]:
    """Return each row with the holder of its array in ``arrays``; this examines the heap once."""
    with undisturbed():
        heap = Heap()
        roots_now = roots()
        holders = explain([array.storage for array in arrays], heap, roots_now)
        heap.drop()
    rows_with_holders = []
    for row, array in zip(rows, arrays, strict=True):
        holder = holders[array.storage].record(roots_now.names)
        rows_with_holders.append(replace(row, holder=holder))
    return rows_with_holders


def _arrays_largest_first(arrays: Sequence[RetainedArray]) -> tuple[RetainedArray, ...]:
    """Return rows by size."""
    return tuple(sorted(arrays, key=attrgetter("size_bytes"), reverse=True))
