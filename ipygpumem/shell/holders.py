"""Finds the holders of the memory that code adds with every run."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ipygpumem.errors import describe_error
from ipygpumem.heap.bulk import Progress
from ipygpumem.heap.garbage import Garbage
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.graphs import live_tensors
from ipygpumem.heap.holders.search import NOTEBOOK, Roots, explain
from ipygpumem.heap.sizes import Sizes
from ipygpumem.introspect import is_users_module, module_dict, type_name, users_modules
from ipygpumem.inventory import survey, top
from ipygpumem.inventory.contents import Contents
from ipygpumem.inventory.records import TensorRecord
from ipygpumem.inventory.top import LargestNames, NamedSize
from ipygpumem.inventory.unreached import large_objects
from ipygpumem.meter.meter import Meter
from ipygpumem.reclaim.reclaim import trim_host_heap
from ipygpumem.report.history import growth_line, holder_lines
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.caches import named_objects
from ipygpumem.shell.trends import Growing
from ipygpumem.units import MIB

_OF_MODULE = re.compile(r"module ([\w.]+), global \w+")
_MOST = 2000
"""Maximum number of large objects whose holders are searched."""
_T = TypeVar("_T")
_Named = Callable[[], dict[str, object]]


def remarks(growing: Growing, context: ShellContext, roots: Callable[[], Roots]) -> list[str]:
    """Return the remarks on a cell that grows with every run."""
    if growing.wants_look:
        with context.display.working("names") as progress:
            look(growing, lambda: named_objects(context.shell), "run", roots, progress, context.meter)
    return [*map(growth_line, growing.growths), *growing.held] if growing.growths else []


def look(
    growing: Growing, named: _Named, run: str, roots: Callable[[], Roots], progress: Progress, meter: Meter
) -> None:
    """Look at the memory of all ``named`` objects; the second look finds the holders of what each ``run`` adds."""
    try:
        live_tensors(Garbage())  # creates the objects of tensors known only in C++
        objects = _grouped(named())
        names, arrays = top.take(objects, {}, progress=progress), survey.take(objects.items())
        unnamed = replace(arrays, tensors=tuple(row for row in arrays.tensors if row.name is None))
        if growing.before is None:
            large = _large(lambda items, heap: set(map(id, items)))
            growing.before, growing.runs = (names, unnamed, Contents(objects), large), 0
        else:
            (old, known, contents, large), growing.before = growing.before, None
            names = _with_received(names, old, contents, objects) if names.notes else names
            names = replace(names, names=(*names.names, *_large(functools.partial(_in_libraries, large, roots()))))
            now, keeper = (names, unnamed), functools.partial(_keeper_of, roots=roots)
            growing.held = holder_lines((old, known), now, growing.growths, run, growing.runs, keeper)
    except Exception as error:  # the code goes on
        growing.held = [f"the memory that it leaves behind could not be found ({describe_error(error)})"]
    trim_host_heap()  # else the next run would reuse freed memory of the search, and not grow
    growing.measured(meter.now())  # the code has not freed the trimmed memory


def _grouped(named: dict[str, object]) -> dict[str, object]:
    """Return named objects, all outputs as one, because each run makes another, and those of the user's modules."""
    outputs = {name: named.pop(name) for name in list(named) if name.startswith("Out[")}
    modules = [(place, module_dict(module)) for place, module in users_modules().items() if place != "__main__"]
    inside = {f"{place}.{name}": value for place, names in modules for name, value in list(names.items())}
    return {**named, "Out": list(outputs.values()), **inside}


def _with_received(
    names: LargestNames, before: LargestNames, contents: Contents, objects: dict[str, object]
) -> LargestNames:
    """Return names, some too large to be measured as a whole, with their sizes ``before`` and of what they received."""
    more = Counter({row.name: row.device_bytes.get("cpu", 0) for row in before.names})
    with undisturbed():
        sizes = Sizes()
        for found in contents.received(objects):
            more[found.name] += sizes.measure(found.items).device_bytes.get("cpu", 0)
        sizes.drop()
    rows = [row._replace(device_bytes=Counter(row.device_bytes) | Counter(cpu=more[row.name])) for row in names.names]
    return replace(names, names=tuple(rows))


def _large(take: Callable[[list[object], Heap], _T]) -> _T:
    """Return ``take`` of the objects that are large by themselves."""
    with undisturbed():
        heap = Heap()
        found = take(large_objects(heap, MIB), heap)
        heap.drop()
    return found


def _in_libraries(known: set[int], roots: Roots, items: list[object], heap: Heap) -> list[NamedSize]:
    """Return the memory of the items that are not ``known``, in attributes of libraries' modules, by attribute."""
    new, rows, sizes = [item for item in items if id(item) not in known][:_MOST], dict[str, NamedSize](), Sizes()
    holders = explain((), heap, roots, more=new)
    for item in new:
        place = _OF_MODULE.match(holders["object", id(item)].path)
        if place is not None and not is_users_module(sys.modules.get(place[1])):
            row = rows.get(place[0]) or NamedSize(place[0], type_name(item), {"cpu": 0}, 0)
            size = sizes.measure(item).device_bytes.get("cpu", 0) + row.device_bytes["cpu"]
            rows[place[0]] = row._replace(device_bytes={"cpu": size})
    sizes.drop()
    return list(rows.values())


def _keeper_of(array: TensorRecord, roots: Callable[[], Roots]) -> str:
    """Describe the holder of an array that no name refers to directly, as ``%gpumem leaks`` does."""
    known, key = roots(), (array.library, array.storage)
    with undisturbed():
        heap = Heap()
        found = explain([key], heap, known)[key]
        heap.drop()
    return found.path.removeprefix(NOTEBOOK)
