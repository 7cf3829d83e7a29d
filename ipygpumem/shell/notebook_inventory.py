"""Measures the memory of the notebook's names and outputs, for ``%gpumem top`` and ``tensors``.

Each name gets the cell that bound it, and the line that deletes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import compress, repeat
from types import FrameType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Progress, no_progress
from ipygpumem.heap.kinds.tensors import Storages
from ipygpumem.introspect import is_name, target_of
from ipygpumem.inventory.arrays import survey
from ipygpumem.inventory.arrays.records import Inventory
from ipygpumem.inventory.names.top import LargestNames, NamedSize, measure_names
from ipygpumem.notebook import OUTPUT_PREFIX, cell_of_file, cell_of_output, running_cell
from ipygpumem.probes.host import rss_bytes
from ipygpumem.probes.mappings import own_pages
from ipygpumem.reclaim.reclaim import bytes_in_use
from ipygpumem.shell.app import App, find_app
from ipygpumem.shell.ipython.caches import (
    kept_by_run,
    names_and_outputs,
    namespaces_of_run,
    references_of_names,
)
from ipygpumem.shell.ipython.sources import cell_that_bound
from ipygpumem.shell.searches import other_places
from ipygpumem.shell.searches.other_places import OtherPlace

_SMALLEST_PLACE_BYTES = 1 << 16
"""Smallest size in bytes of a listed place that is no name, such as that of the last error."""


def largest_names(
    shell: Any, frame: FrameType | None = None, progress: Progress | None = None
) -> LargestNames:
    """Return the memory that names, outputs and other places hold.

    Args:
        shell: IPython's shell.
        frame: a running function, whose local names are measured too; None outside of functions.
        progress: called instead of a progress bar; it may raise to stop.
    """
    free_heap_bytes = own_pages().free_heap_bytes  # before the search uses some of it
    named = _ObjectsOfShell.of(shell, frame)
    namespaces = {id(shell.user_ns), id(shell.user_ns_hidden), id(shell.user_ns.get("_oh"))}
    namespaces |= namespaces_of_run(shell)
    app = find_app(shell)
    bytes_used = {"cpu": rss_bytes()} if app is None else bytes_in_use(app.context.meter.now())
    working = _working(app, "names") if progress is None else contextlib.nullcontext(progress)
    with working as report:
        result = measure_names(
            named.objects,
            bytes_used,
            references=named.references,
            namespaces=namespaces,
            outputs=_outputs_in(named.objects),
            remedy_of=functools.partial(_remedy_of, shell, named.remedies),
            progress=report,
        )
    cell_of = _cell_finder(shell, named.elsewhere)
    rows_with_cells = [row._replace(cell=cell_of(row.name)) for row in result.names]
    rows = _with_places(rows_with_cells, named.places)
    return replace(result, names=tuple(rows), free_heap_bytes=free_heap_bytes)


def _with_places(rows: Iterable[NamedSize], places: Mapping[str, OtherPlace]) -> list[NamedSize]:
    """Return the rows, with the rows of ``places`` as tables show them; small places have no row.

    Args:
        rows: the rows of names and places.
        places: the places that are no names, by their text.
    """
    adapted = list[NamedSize]()
    for row in rows:
        place = places.get(row.name)
        if place is None and not places.keys().isdisjoint(row.same):
            # A place keeps the object, too, so that ``del`` of its names frees nothing.
            adapted.append(row._replace(freed_bytes=None))
        elif place is None:
            adapted.append(row)
        elif row.is_at_least or row.size_bytes >= _SMALLEST_PLACE_BYTES:
            adapted.append(_row_of_place(row, place))
    return adapted


def _outputs_in(names: Iterable[str]) -> set[str]:
    """Return the names that are outputs, such as ``Out[5]``."""
    names = list(names)
    # In C: there may be 100,000 names.
    are_outputs = map(str.startswith, names, repeat(OUTPUT_PREFIX))
    return set(compress(names, are_outputs))


class _ObjectsOfShell(NamedTuple):
    """The objects of names, outputs and other places.

    No other container of ours refers to them: it would be a holder that no user has.
    """

    objects: dict[str, object]
    references: Counter[int]
    """Number of references to each object, by its identity, that deleting its names removes."""
    places: dict[str, OtherPlace]
    """The places that are no names, without their objects, by their text."""
    elsewhere: set[str]
    """Keys of ``objects`` that are no names of the notebook."""

    @classmethod
    def of(cls, shell: Any, frame: FrameType | None) -> _ObjectsOfShell:
        """Return the objects of a shell, with those of a frame's local names if there is one."""
        named = names_and_outputs(shell)
        local = {} if frame is None else survey.function_locals(frame)
        items = dict[str, object]()
        places = dict[str, OtherPlace]()
        for place in other_places.places(shell, named):
            items[place.text] = place.item
            places[place.text] = place._replace(item=None)
        references = references_of_names(shell)
        references.update(map(id, [*local.values(), *items.values()]))
        return cls({**named, **local, **items}, references, places, {*local, *items})

    @property
    def remedies(self) -> dict[str, str]:
        """The lines that free the places' objects."""
        return {text: place.remedy for text, place in self.places.items()}


def _row_of_place(row: NamedSize, place: OtherPlace) -> NamedSize:
    """Return the row of a place: with its words instead of a type, if it has any, and without freed
    bytes, because other contexts or functions may refer to its object, too.
    """
    type_name = place.type_name or row.type_name
    return row._replace(freed_bytes=None, type_name=type_name)


def _working(app: App | None, what: str) -> AbstractContextManager[Progress]:
    """Return a block that shows a progress bar if it takes long and the extension is loaded."""
    if app is None:
        return contextlib.nullcontext(no_progress)
    return app.context.display.working(what)


def _remedy_of(shell: Any, elsewhere: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the line that deletes all names of an object, with the advice for each other place
    that refers to it, such as an open figure.

    Args:
        shell: IPython's shell.
        elsewhere: the advice for places that are no names, by their text.
        names: the names and places of the object.
    """
    names_to_delete = [name for name in names if name not in elsewhere]
    steps = [_deletion_of(shell, names_to_delete)] if names_to_delete else []
    steps += [elsewhere[name] for name in names if name in elsewhere]
    return "; ".join(step for step in dict.fromkeys(steps) if step)


def _deletion_of(shell: Any, names: Sequence[str]) -> str:
    """Return the line that deletes all names of one object, such as ``del x, y``; with an output
    among them ``%xdel x``, because ``del`` would leave IPython's copies of an output.
    """
    output_numbers = list[int]()
    variables = list[str]()
    for name in names:
        number = cell_of_output(name)
        if number is None:
            variables.append(name)
        else:
            output_numbers.append(number)
    if output_numbers:
        name = next(filter(is_name, variables), f"_{output_numbers[0]}")
        return f"%xdel {name}"
    targets = ", ".join(target_of(name) for name in variables)
    # A script's names are also in the module that IPython keeps of it.
    return "; ".join([f"del {targets}", *kept_by_run(shell, variables)])


def inventory_of_notebook(
    shell: Any,
    frame: FrameType | None = None,
    storages: Storages | None = None,
    *,
    has_arrays: bool = True,
    has_unnamed: bool = True,
) -> Inventory:
    """Return an inventory of all tensors and arrays, with the notebook's names.

    Args:
        shell: IPython's shell.
        frame: a running function, whose local names are used too; None outside of functions.
        storages: see ``survey.take_inventory``.
        has_arrays: see ``survey.take_inventory``.
        has_unnamed: see ``survey.take_inventory``.
    """
    local: dict[str, object] = {}
    file: str | None = None
    line: int | None = None
    cell: int | None
    if frame is None:
        cell = running_cell(shell)
    else:
        local = survey.function_locals(frame)
        filename = frame.f_code.co_filename
        cell = cell_of_file(shell, filename)
        if cell is None and not filename.startswith("<"):  # a script
            file = filename
            line = frame.f_lineno
    with _working(find_app(shell), "tensors and arrays") as progress:
        named = names_and_outputs(shell)
        outputs = {name: named.pop(name) for name in _outputs_in(named)}
        return survey.take_inventory(
            [*local.items(), *named.items()],
            outputs.items(),
            cell_of=_cell_finder(shell, local),
            file=file,
            line=line,
            cell=cell,
            storages=storages,
            progress=progress,
            has_arrays=has_arrays,
            has_unnamed=has_unnamed,
        )


def _cell_finder(shell: Any, local: Container[str]) -> Callable[[str], int | None]:
    """Return a function that finds the last cell that bound a name, ignoring cells of experiments
    that have restored it.

    Args:
        shell: IPython's shell.
        local: names that no cell has bound, such as those of a function.
    """
    app = find_app(shell)
    cells_undone: dict[str, set[int | None]] = {}
    if app is not None:
        for experiment in app.experiments.finished:
            numbers = [cell.execution_count for cell in experiment.cells]
            for name in experiment.restored:
                cells_undone.setdefault(name, set()).update(numbers)

    def cell_of(name: str) -> int | None:
        """Return the number of the last cell that bound a name; None if it is unknown."""
        if name in local:
            return None
        failed_at = {} if app is None else app.context.cells.failed_at
        undone = cells_undone.get(name, ())
        return cell_of_output(name) or cell_that_bound(shell, name, undone, failed_at)

    return cell_of
