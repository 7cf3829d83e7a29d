"""``ipygpumem.release``: empties objects, and reports the memory that was freed and the memory that
stays.

Only the object itself is emptied. Objects that something else refers to stay alive. Code that still
uses the object gets an error that names the place of its release.
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
from types import GetSetDescriptorType
from typing import Any, NoReturn

from ipygpumem.api.shell import current_shell, current_traces, garbage_here, loaded_app
from ipygpumem.errors import GpuMemError, ReleasedError
from ipygpumem.heap.arrays import TOOLS, Array, describe, is_of_library, library_type, watch
from ipygpumem.heap.heap import Heap, refuse_while_traced, undisturbed
from ipygpumem.heap.holders.roots import Roots
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.walk import ArraySearch, summed
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    module_of,
    solid_base,
    type_name,
)
from ipygpumem.inventory import survey
from ipygpumem.reclaim.reclaim import free_now, trim_host_heap
from ipygpumem.records import FreeingStep, Record, RetainedArray
from ipygpumem.report import content, layout
from ipygpumem.report.layout import Report, clean, clean_name
from ipygpumem.report.showing import shows
from ipygpumem.scope.scope import is_ownable

_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_KINDS = (
    ("torch", "Tensor"),
    ("torch.nn", "Module"),
    ("torch.optim", "Optimizer"),
    ("torch.utils.data", "DataLoader"),
)
"""Types of parts to examine first: a callback leads to everything of a trainer, and would be
credited with it.
"""
_SAYS = "_ipygpumem_says"


@dataclass(frozen=True)
class ReleaseRecord(Record):
    """Result of a release: the memory that was freed, and the rest with its holders."""

    names: tuple[str, ...]
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
        raise ReleasedError(vars(self)[_SAYS])

    def __call__(self, *_: object, **__: object) -> NoReturn:  # noqa: D102
        raise ReleasedError(vars(self)[_SAYS])

    def __repr__(self) -> str:
        return f"<{vars(self)[_SAYS]}>"

    def __dir__(self) -> list[str]:
        return []


def _is_released(item: object) -> bool:
    """Return True if an object was released before; one with another attribute layout has kept its
    class.
    """
    return _SAYS in (instance_dict(item) or {})


def _refuse_if_odd(name: str, item: object) -> None:
    """Raise GpuMemError if an object cannot be emptied."""
    kind, is_named = type(item), name != type_name(item)
    what = f"`{name}` ({type_name(item)})" if is_named else f"the {name}"
    if _is_released(item):
        raise GpuMemError((instance_dict(item) or {})[_SAYS])
    if describe(item) is not None:
        raise GpuMemError(f"{what} has nothing to empty: its memory is freed with its last name")
    library = module_of(item).partition(".")[0]
    if library in TOOLS:
        raise GpuMemError(f"{what} cannot be released: it is a part of {library}")
    is_built_in = (
        library in sys.stdlib_module_names
        or solid_base(kind) is not object
        or is_instance(item, Enum)
    )
    has_end = any("__del__" in class_dict(base) for base in type.mro(kind))
    if is_built_in or has_end or instance_dict(item) is None:
        raise GpuMemError(f"{what} cannot be emptied" + ": delete its name instead" * is_named)


def _empty(item: object, says: str) -> None:
    places = (class_dict(base).get("__dict__") for base in type.mro(type(item)))
    place = next(place for place in places if type(place) is GetSetDescriptorType)
    place.__set__(item, {_SAYS: says})  # a new dict: the old one may be shared with another object
    with contextlib.suppress(
        TypeError
    ):  # a class with another attribute layout, such as a generic one
        object.__dict__["__class__"].__set__(item, Released)


def _parts(name: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield an object's parts, with their names."""
    for key, value in (instance_dict(item) or {}).items():
        if key in _MODULE_PARTS and is_instance(value, dict):
            yield from [(f"{name}.{inner}", part) for inner, part in list(dict.items(value))]
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
    known = {
        id(value): name
        for name, value in reversed(list(survey.names_in(frame)))
        if is_ownable(name)
    }
    named = [(known.get(id(item), type_name(item)), item) for item in objects]
    del objects, known
    shell, app = current_shell(), loaded_app()
    where = f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    if shell is not None:
        from ipygpumem.shell.ipython.sources import running_cell  # no script needs IPython

        where = f"cell {running_cell(shell)}"
    roots = Roots if app is None else app.experiments.survivors.roots
    notes = tuple(f"{name} was released before" for name, item in named if _is_released(item))
    named = [pair for pair in named if not _is_released(pair[1])] or named
    for name, item in named:
        _refuse_if_odd(name, item)
    watched = _watched(named)

    def empty() -> None:
        for name, item in named:
            _empty(item, f"`{name}` was released by ipygpumem at {where}")

    steps, freed = free_now(current_traces().meter, garbage_here(), ("references", empty))
    freed_parts, left = _sorted_out(watched, roots)
    trim_host_heap()  # frees the memory of the search for holders
    return ReleaseRecord(
        tuple(name for name, _ in named), where, freed_parts, left, freed, tuple(steps), notes
    )


@shows(ReleaseRecord)
def release_report(record: ReleaseRecord) -> Report:
    """Return the memory freed with an object, and the memory that other objects still hold."""
    names = layout.listed([clean_name(name) for name in record.names])
    notes = [
        *map(clean, record.notes),
        *(f"left: {line}" for line in content.leak_lines(record.left)),
    ]
    report = content.freed_report(f"released {names}", record.steps, record.freed, notes)
    tables = [content.held_table("freed tensors and arrays", record.freed_parts)]
    return replace(report, kind="release", tables=tables, records=[record])


_Part = tuple[Callable[[list[Array]], RetainedArray], list[tuple[Callable[[], bool], Array]]]
"""A function that describes some arrays as a part of an object; its arrays, each with an is-alive
function.
"""


def _watched(named: Sequence[tuple[str, object]]) -> list[_Part]:
    """Return the objects' parts, with is-alive functions that do not keep them alive."""
    search, found = ArraySearch(), list[_Part]()
    for _, item in named:
        search.pass_over(item)  # parts that lead back to it do not count
    for target in named:
        for name, value in sorted(_parts(*target), key=_rank):
            pairs = [
                pair
                for item, array in search.find(value)
                for pair in ((item, array), *_gradient(item, search))
            ]
            if pairs:
                held = partial(summed, name, type_name(value), alone=describe(value) is not None)
                found.append((held, [(watch(item), array) for item, array in pairs]))
    return found


def _rank(part: tuple[str, object]) -> int:
    return next(
        (place for place, kind in enumerate(_KINDS) if is_of_library(part[1], *kind)), len(_KINDS)
    )


def _gradient(item: Any, search: ArraySearch) -> list[tuple[object, Array]]:
    """Return the gradient of a parameter, which the collector does not see."""
    base: Any = library_type("torch", "Tensor")
    if base is None or not is_instance(item, base):
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        gradient = base.grad.__get__(item) if base.is_leaf.__get__(item) else None
    return [] if gradient is None else list(search.find(gradient))


def _sorted_out(
    watched: Sequence[_Part], roots: Callable[[], Roots]
) -> tuple[tuple[RetainedArray, ...], tuple[RetainedArray, ...]]:
    """Return the freed arrays of each part, and the live ones with their holders, the largest
    first.
    """
    gone, left = list[RetainedArray](), list[tuple[RetainedArray, Array]]()
    for held, arrays in watched:
        alive = [array for is_alive, array in arrays if is_alive()]
        dead = [array for _, array in arrays if all(array is not other for other in alive)]
        if dead:
            gone.append(held(dead))
        if alive:
            left.append((held(alive), max(alive, key=lambda array: array.size_bytes)))
    if left:
        with undisturbed():
            heap = Heap()
            keys = [largest.storage for _, largest in left]
            holders = explain(keys, heap, roots())
            heap.drop()
        left = [(replace(held, holder=holders[largest.storage]), largest) for held, largest in left]
    size = attrgetter("size_bytes")
    return tuple(sorted(gone, key=size, reverse=True)), tuple(
        sorted((item for item, _ in left), key=size, reverse=True)
    )
