"""Finds the holders of the memory that code adds with every run.

``growing`` (``inventory/leaks/trends.py``) notices that RAM grows with each run of a cell or a
loop. Then there are two looks at the memory of all names, with runs between them: the second one
names what has grown, such as ``log grew by 2 MiB per run``.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ipygpumem.errors import describe_error
from ipygpumem.heap.bulk import Progress
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import object_key
from ipygpumem.heap.kinds.libraries import loaded_classes
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.heap.live.live_tensors import create_hidden_tensors
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.paths.roots import NOTEBOOK, Root, Roots
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import is_users_module, module_dict, type_name, users_modules
from ipygpumem.inventory.arrays import survey
from ipygpumem.inventory.arrays.records import Inventory, TensorRecord
from ipygpumem.inventory.leaks.children import growth_by_ending, with_endings
from ipygpumem.inventory.leaks.trends import FirstLook, Growing, Processes
from ipygpumem.inventory.names import top
from ipygpumem.inventory.names.growth_holders import ArrayHolder
from ipygpumem.inventory.names.top import LargestNames, NamedSize
from ipygpumem.inventory.remaining.contents import Contents
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
_MOST_SEARCHED = 2000
"""Maximum number of large objects whose holders are searched."""
_T = TypeVar("_T")
_Named = Callable[[], dict[str, object]]
"""Function that returns the objects of all names, by name."""


def remarks_on_growth(
    growing: Growing, context: ShellContext, roots: Callable[[], Roots]
) -> list[str]:
    """Return the remarks on a cell that grows with every run; look at the names if it is time.

    Args:
        growing: the cell's runs.
        context: the shell's services.
        roots: returns the notebook's objects, where paths to holders begin.
    """

    def named() -> dict[str, object]:
        return names_and_outputs(context.shell) | {_PRINTED: Printed(context.shell).texts()}

    if growing.wants_look:
        with context.display.working("names") as progress:
            look_for_growth(growing, named, "run", roots, progress, context.meter)
    find_grown_processes(growing, named, "run")
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
    """Look at the memory of all ``named`` objects. The first look remembers it in ``growing``; the
    second one sets the lines on the holders of the memory that each run adds.

    A failure becomes such a line, because the user's code must go on.

    Args:
        growing: the runs of the code.
        named: returns the objects of all names, by name.
        run_word: the word for a run, such as ``iteration``.
        roots: returns the notebook's objects, where paths to holders begin.
        progress: shows how far the look is.
        meter: measures the memory after the look.
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
    holders of the memory that is new since the first one.
    """
    free_heap_bytes = own_pages().free_heap_bytes  # of the code: the search has not begun
    create_hidden_tensors(Garbage())
    objects = _with_outputs_as_one(named())
    names = _memory_of_names(objects, progress)
    unnamed_arrays = _arrays_without_name(objects)
    first_look, growing.first_look = growing.first_look, None
    if first_look is None:
        _remember(growing, objects, names, unnamed_arrays)
        return
    names = _with_new_memory(names, first_look, objects, roots())
    grown_free_bytes = free_heap_bytes - first_look.free_heap_bytes
    growing.holder_lines = _lines_on_holders(
        growing, first_look, (names, unnamed_arrays), grown_free_bytes, run_word, roots
    )


def _arrays_without_name(objects: dict[str, object]) -> Inventory:
    """Return the tensors and arrays to which none of the ``objects`` leads."""
    arrays = survey.take_inventory(objects.items())
    return replace(arrays, tensors=tuple(row for row in arrays.tensors if row.name is None))


def _remember(
    growing: Growing, objects: dict[str, object], names: LargestNames, unnamed_arrays: Inventory
) -> None:
    """Remember the memory at the first look, and count the runs from now on."""
    large_ids = _result_on_large_objects(lambda items, heap: set(map(id, items)))
    growing.first_look = FirstLook(
        names, unnamed_arrays, Contents(objects), large_ids, free_heap_bytes=0
    )
    growing.runs = 0
    growing.processes = Processes(run=0, sizes=_bytes_by_process(children_now()))


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
    names: LargestNames, first_look: FirstLook, objects: dict[str, object], roots: Roots
) -> LargestNames:
    """Return the names with a row for each attribute of a library that has new large objects. Names
    that are too large to be measured get the objects that they have received since the first look.
    """
    if names.notes:
        names = _with_received_objects(names, first_look.names, first_look.contents, objects)
    printed: Any = objects.get(_PRINTED, ())
    earlier_ids = first_look.large.union(map(id, printed))
    find_rows = functools.partial(_memory_in_libraries, earlier_ids, roots)
    in_libraries = _result_on_large_objects(find_rows)
    return replace(names, names=(*names.names, *in_libraries))


def _lines_on_holders(
    growing: Growing,
    first_look: FirstLook,
    now: tuple[LargestNames, Inventory],
    grown_free_bytes: int,
    run_word: str,
    roots: Callable[[], Roots],
) -> list[str]:
    """Return the lines on the holders of each device's growth.

    Args:
        growing: the runs of the code.
        first_look: the memory at the first look.
        now: all names, and the arrays without a name, at this look.
        grown_free_bytes: growth of the free pages in malloc's heap since the first look.
        run_word: the word for a run, such as ``iteration``.
        roots: returns the notebook's objects, where paths to holders begin.
    """
    earlier = (first_look.names, first_look.arrays)
    array_holders = functools.partial(_array_holders_of, roots=roots)
    holders = list[str]()
    for growth in growing.growths:
        if growth.device == "children":  # ``find_grown_processes`` names them
            holders.append(STATUS_LISTS_PROCESSES)
            continue
        lines = holder_lines(
            earlier, now, growth, run_word, growing.runs, array_holders, grown_free_bytes
        )
        holders += lines or [unknown_line(growth)]
    return list(dict.fromkeys(holders))  # notes on names are the same for all devices


def _forget_own_memory(growing: Growing, meter: Meter) -> None:
    """Free the memory of our own search, and measure after that, so that the next run's growth does
    not contain it.
    """
    trim_host_heap()  # else the next run would reuse freed memory of the search, and not grow
    if growing.first_look is not None:
        free_bytes = own_pages().free_heap_bytes
        growing.first_look = growing.first_look._replace(free_heap_bytes=free_bytes)
    growing.note_memory(meter.now())


def find_grown_processes(growing: Growing, named: _Named, run_word: str) -> None:
    """Find the child processes that grew in the last run, if child processes grow, and set
    ``growing.process_lines``: lines on these processes, such as ``pool.terminate()``, which ends
    them. The arguments are those of ``look_for_growth``.
    """
    growth = growing.growth_of("children")
    earlier = growing.processes
    if growth is None or earlier is None or earlier.run == growing.runs:
        return
    try:
        children = with_endings(children_now(), named())
        grown = growth_by_ending(earlier.sizes, children)
        growing.process_lines = process_lines(grown, growth, run_word, growing.runs - earlier.run)
        growing.processes = Processes(growing.runs, _bytes_by_process(children))
    except Exception as error:  # the code goes on
        if is_from_signal(error):
            raise
        growing.process_lines = [
            f"the child processes could not be listed ({describe_error(error)})"
        ]


def _bytes_by_process(children: list[Child]) -> dict[int, int]:
    """Return the bytes of child processes by number."""
    return {child.pid: child.memory_bytes for child in children}


def _with_outputs_as_one(named: dict[str, object]) -> dict[str, object]:
    """Return the named objects, with all outputs as one list named ``Out``, because each run makes
    a further one; and the objects of the user's modules, named ``module.name``.
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
    """Return the names, some of which are too large to be measured as a whole, each with at least
    its size at the first look and that of the objects that it has received since.

    Args:
        names: the names as measured now.
        before: the names at the first look.
        contents: the contents of their containers at the first look.
        objects: the objects of the names.
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
        # ``|`` of two counters takes the larger figure of each device.
        device_bytes = Counter(row.device_bytes) | Counter(cpu=cpu_bytes[row.name])
        rows.append(row._replace(device_bytes=device_bytes))
    return replace(names, names=tuple(rows))


def _result_on_large_objects(read: Callable[[list[object], Heap], _T]) -> _T:
    """Return the result of ``read``, which gets the objects that are large by themselves, and the
    heap. It must keep neither of them alive.
    """
    with undisturbed():
        heap = Heap(smallest=MIB, of_libraries=loaded_classes())
        result = read(heap.large_objects(), heap)
        heap.drop()
    return result


def _memory_in_libraries(
    earlier_ids: set[int], roots: Roots, items: list[object], heap: Heap
) -> list[NamedSize]:
    """Return a row for each attribute of a library's module that has new large objects, such as a
    cache.

    Args:
        earlier_ids: the identities of older objects.
        roots: where paths begin.
        items: the large objects.
        heap: the live objects.
    """
    new_items = [item for item in items if id(item) not in earlier_ids][:_MOST_SEARCHED]
    holders = explain((), heap, roots, objects=new_items)
    rows = dict[str, NamedSize]()
    sizes = Sizes()
    for item in new_items:
        place = _place_in_library(holders[object_key(item)].roots[0])
        if place:
            row = rows.get(place) or NamedSize(place, type_name(item), {"cpu": 0})
            size = sizes.measure(item).device_bytes.get("cpu", 0) + row.device_bytes["cpu"]
            rows[place] = row._replace(device_bytes={"cpu": size})
    sizes.drop()
    return list(rows.values())


def _place_in_library(root: Root) -> str:
    """Return the words for a root that is an attribute of a library's module; empty for any other
    root.
    """
    if not root.module or is_users_module(sys.modules.get(root.module)):
        return ""
    return root.text


def _array_holders_of(
    arrays: Sequence[TensorRecord], roots: Callable[[], Roots]
) -> list[ArrayHolder]:
    """Return the holders of arrays to which no name refers directly, as ``%gpumem leaks`` describes
    them; of the first ones if there are too many.
    """
    roots_now = roots()
    keys = [(array.library, array.storage) for array in arrays[:_MOST_SEARCHED]]
    with undisturbed():
        heap = Heap()
        holders = explain(keys, heap, roots_now)
        heap.drop()
    return [_array_holder(holders[key]) for key in keys]


def _array_holder(holder: Holder) -> ArrayHolder:
    """Return a holder with the name that ``_with_outputs_as_one`` gives to the first object on its
    path.
    """
    root = holder.roots[0]
    name = root.name
    if root.module and is_users_module(sys.modules.get(root.module)):
        name = f"{root.module}.{root.name}"
    elif root.module:
        name = root.text
    return ArrayHolder(name, holder.path.removeprefix(NOTEBOOK))
