"""Finds the holders of the memory that code adds with every run."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ipygpumem.errors import describe_error
from ipygpumem.heap.arrays import object_key
from ipygpumem.heap.bulk import Progress
from ipygpumem.heap.garbage import Garbage
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.libraries import loaded_classes
from ipygpumem.heap.live_tensors import live_tensors
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.paths.roots import NOTEBOOK, Root, Roots
from ipygpumem.heap.sizes import Sizes
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import is_users_module, module_dict, type_name, users_modules
from ipygpumem.inventory import survey, top
from ipygpumem.inventory.children import growth_by_ending, with_endings
from ipygpumem.inventory.contents import Contents
from ipygpumem.inventory.growth_holders import ArrayHolder
from ipygpumem.inventory.records import Inventory, TensorRecord
from ipygpumem.inventory.top import LargestNames, NamedSize
from ipygpumem.inventory.trends import FirstLook, Growing, Processes
from ipygpumem.meter.meter import Meter
from ipygpumem.notebook import OUTPUT_PREFIX
from ipygpumem.probes.children import Child
from ipygpumem.probes.children import children as children_now
from ipygpumem.probes.mappings import own_pages
from ipygpumem.reclaim.emptying import trim_host_heap
from ipygpumem.report.growth_lines import (
    STATUS_LISTS_PROCESSES,
    growth_line,
    holder_lines,
    process_lines,
    unknown_line,
)
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.caches import names_and_outputs
from ipygpumem.shell.ipython.printed import REMEDY, Printed
from ipygpumem.units import MIB

_PRINTED = "printed output"
"""Stands among the names for the text that IPython keeps of cells."""
_MOST = 2000
"""Maximum number of large objects whose holders are searched."""
_T = TypeVar("_T")
_Named = Callable[[], dict[str, object]]


def remarks(growing: Growing, context: ShellContext, roots: Callable[[], Roots]) -> list[str]:
    """Return the remarks on a cell that grows with every run."""

    def named() -> dict[str, object]:
        return names_and_outputs(context.shell) | {_PRINTED: Printed(context.shell).texts()}

    if growing.wants_look:
        with context.display.working("names") as progress:
            look_for_growth(growing, named, "run", roots, progress, context.meter)
    note_processes(growing, named, "run")
    if not growing.growths:
        return []
    return [*map(growth_line, growing.growths), *growing.process_lines, *growing.holder_lines]


def look_for_growth(
    growing: Growing,
    named: _Named,
    run_word: str,
    roots: Callable[[], Roots],
    progress: Progress,
    meter: Meter,
) -> None:
    """Look at the memory of all ``named`` objects; the second look finds the holders of what each
    run adds. A failure becomes a line: the code goes on.
    """
    try:
        _remember_or_compare(growing, named, run_word, roots, progress)
    except Exception as error:
        if is_from_signal(error):
            raise
        growing.holder_lines = [
            f"the memory that it leaves behind could not be found ({describe_error(error)})"
        ]
    try:
        _forget_own_memory(growing, meter)
    except Exception as error:
        if is_from_signal(error):
            raise
        growing.holder_lines = [
            f"the memory after our own search could not be measured ({describe_error(error)})"
        ]


def _remember_or_compare(
    growing: Growing, named: _Named, run_word: str, roots: Callable[[], Roots], progress: Progress
) -> None:
    """Remember the memory of all ``named`` objects at the first look; at the second one, find the
    holders of what has come since.
    """
    free_heap_bytes = own_pages().free_heap_bytes  # of the code: the search has not begun
    live_tensors(Garbage())  # creates the objects of tensors known only in C++
    objects = _grouped(named())
    names = _memory_of_names(objects, progress)
    unnamed = _arrays_without_name(objects)
    before, growing.before = growing.before, None
    if before is None:
        _remember(growing, objects, names, unnamed)
        return
    names = _with_new_memory(names, before, objects, roots())
    grown_free_bytes = free_heap_bytes - before.free_heap_bytes
    growing.holder_lines = _holders_of_growth(
        growing, before, (names, unnamed), grown_free_bytes, run_word, roots
    )


def _arrays_without_name(objects: dict[str, object]) -> Inventory:
    """Return the tensors and arrays to which none of the ``objects`` leads."""
    arrays = survey.take_inventory(objects.items())
    return replace(arrays, tensors=tuple(row for row in arrays.tensors if row.name is None))


def _remember(
    growing: Growing, objects: dict[str, object], names: LargestNames, unnamed: Inventory
) -> None:
    """Remember the memory at the first look, and count the runs from now on."""
    large = _of_large_objects(lambda items, heap: set(map(id, items)))
    growing.before = FirstLook(names, unnamed, Contents(objects), large, 0)
    growing.runs = 0
    growing.processes = Processes(0, _sizes(children_now()))


def _memory_of_names(objects: dict[str, object], progress: Progress) -> LargestNames:
    """Return the memory of ``objects``, with words instead of a type for the output that IPython
    keeps.
    """
    names = top.measure_names(objects, {}, progress=progress)
    rows = list[NamedSize]()
    for row in names.names:
        if row.name == _PRINTED:
            row = row._replace(type_name=f"kept by IPython; to free it: {REMEDY}", parts=())
        rows.append(row)
    return replace(names, names=tuple(rows))


def _with_new_memory(
    names: LargestNames, before: FirstLook, objects: dict[str, object], roots: Roots
) -> LargestNames:
    """Return the names with objects that they received since the first look, and with new objects
    in libraries.
    """
    if names.notes:
        names = _with_received_objects(names, before.names, before.contents, objects)
    printed: Any = objects.get(_PRINTED, ())
    earlier = before.large.union(map(id, printed))
    in_libraries = _of_large_objects(functools.partial(_memory_in_libraries, earlier, roots))
    return replace(names, names=(*names.names, *in_libraries))


def _holders_of_growth(
    growing: Growing,
    before: FirstLook,
    now: tuple[LargestNames, Inventory],
    grown_free_bytes: int,
    run_word: str,
    roots: Callable[[], Roots],
) -> list[str]:
    """Return the lines on the holders of each device's growth.

    Args:
        growing: the runs of the code.
        before: the memory at the first look.
        now: all names, and the arrays without a name, at this look.
        grown_free_bytes: growth of the free pages in malloc's heap since the first look.
        run_word: the word for a run, such as ``iteration``.
        roots: returns the notebook's objects, where paths to holders begin.
    """
    earlier = (before.names, before.arrays)
    array_holders = functools.partial(_array_holders_of, roots=roots)
    holders = list[str]()
    for growth in growing.growths:
        if growth.device == "children":  # ``note_processes`` finds them
            holders.append(STATUS_LISTS_PROCESSES)
            continue
        lines = holder_lines(
            earlier, now, growth, run_word, growing.runs, array_holders, grown_free_bytes
        )
        holders += lines or [unknown_line(growth)]
    return list(dict.fromkeys(holders))  # notes on names are the same for all devices


def _forget_own_memory(growing: Growing, meter: Meter) -> None:
    """Free the memory of our own search, and measure without it: memory that is missing later was
    freed by code.
    """
    trim_host_heap()  # else the next run would reuse freed memory of the search, and not grow
    if growing.before is not None:
        growing.before = growing.before._replace(free_heap_bytes=own_pages().free_heap_bytes)
    growing.note_memory(meter.now())


def note_processes(growing: Growing, named: _Named, run_word: str) -> None:
    """Find the child processes that grew in the last run, with the lines that end them, if child
    processes grow.
    """
    growth = growing.growth_of("children")
    earlier = growing.processes
    if growth is None or earlier is None or earlier.run == growing.runs:
        return
    try:
        children = with_endings(children_now(), named())
        grown = growth_by_ending(earlier.sizes, children)
        growing.process_lines = process_lines(grown, growth, run_word, growing.runs - earlier.run)
        growing.processes = Processes(growing.runs, _sizes(children))
    except Exception as error:  # the code goes on
        if is_from_signal(error):
            raise
        growing.process_lines = [
            f"the child processes could not be listed ({describe_error(error)})"
        ]


def _sizes(children: list[Child]) -> dict[int, int]:
    """Return the bytes of child processes by number."""
    return {child.pid: child.memory_bytes for child in children}


def _grouped(named: dict[str, object]) -> dict[str, object]:
    """Return named objects, all outputs as one, because each run makes another, and those of the
    user's modules.
    """
    objects: dict[str, object] = {}
    outputs = list[object]()
    for name, value in named.items():
        if name.startswith(OUTPUT_PREFIX):
            outputs.append(value)
        else:
            objects[name] = value
    objects["Out"] = outputs
    for place, module in users_modules().items():
        if place != "__main__":
            for name, value in list(module_dict(module).items()):
                objects[f"{place}.{name}"] = value
    return objects


def _with_received_objects(
    names: LargestNames, before: LargestNames, contents: Contents, objects: dict[str, object]
) -> LargestNames:
    """Return names of which some are too large to be measured as a whole: each has at least its
    size at the first look, and that of the objects that it has received since.
    """
    cpu_bytes = Counter({row.name: row.device_bytes.get("cpu", 0) for row in before.names})
    with undisturbed():
        sizes = Sizes()
        for received in contents.received(objects):
            size = sizes.measure(received.items)
            cpu_bytes[received.name] += size.device_bytes.get("cpu", 0)
        sizes.drop()
    rows = list[NamedSize]()
    for row in names.names:
        # The larger figure of each device
        device_bytes = Counter(row.device_bytes) | Counter(cpu=cpu_bytes[row.name])
        rows.append(row._replace(device_bytes=device_bytes))
    return replace(names, names=tuple(rows))


def _of_large_objects(question: Callable[[list[object], Heap], _T]) -> _T:
    """Return the answer to a question about the objects that are large by themselves, and their
    heap.
    """
    with undisturbed():
        heap = Heap(smallest=MIB, of_libraries=loaded_classes())
        answer = question(heap.large_objects(), heap)
        heap.drop()
    return answer


def _memory_in_libraries(
    earlier: set[int], roots: Roots, items: list[object], heap: Heap
) -> list[NamedSize]:
    """Return the memory of the items that are not among the ``earlier`` ones, in attributes of
    libraries' modules, by attribute.
    """
    new = [item for item in items if id(item) not in earlier][:_MOST]
    holders = explain((), heap, roots, more=new)
    rows = dict[str, NamedSize]()
    sizes = Sizes()
    for item in new:
        place = _place_in_library(holders[object_key(item)].roots[0])
        if place:
            row = rows.get(place) or NamedSize(place, type_name(item), {"cpu": 0})
            size = sizes.measure(item).device_bytes.get("cpu", 0) + row.device_bytes["cpu"]
            rows[place] = row._replace(device_bytes={"cpu": size})
    sizes.drop()
    return list(rows.values())


def _place_in_library(root: Root) -> str:
    """Return the words for a root, if it is an attribute of a library's module; else an empty
    text.
    """
    if not root.module or is_users_module(sys.modules.get(root.module)):
        return ""
    return root.text


def _array_holders_of(
    arrays: Sequence[TensorRecord], roots: Callable[[], Roots]
) -> list[ArrayHolder]:
    """Describe the holders of the first arrays, not too many, to which no name refers directly, as
    ``%gpumem leaks`` does.
    """
    notebook = roots()
    keys = [(array.library, array.storage) for array in arrays[:_MOST]]
    with undisturbed():
        heap = Heap()
        holders = explain(keys, heap, notebook)
        heap.drop()
    return [_array_holder(holders[key]) for key in keys]


def _array_holder(holder: Holder) -> ArrayHolder:
    """Return a holder with the name that a look gives to the first object on its path."""
    root = holder.roots[0]
    name = root.name
    if root.module and is_users_module(sys.modules.get(root.module)):
        name = f"{root.module}.{root.name}"
    elif root.module:
        name = root.text
    return ArrayHolder(name, holder.path.removeprefix(NOTEBOOK))
