"""``%gpumem tensors`` lists tensors and arrays, ``%gpumem top`` the names with most memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.errors import quoted
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import StorageKey
from ipygpumem.heap.knowledge.barriers import is_never_followed
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.inventory.arrays import records
from ipygpumem.inventory.arrays.records import Inventory
from ipygpumem.inventory.names.top import LargestNames, NamedSize, select
from ipygpumem.inventory.rows.array_holders import MOST_EXPLAINED
from ipygpumem.magics import completions
from ipygpumem.notebook import cell_of_output
from ipygpumem.report.layout import Report
from ipygpumem.report.tensors import groups_report, tensors_report
from ipygpumem.report.top import top_report
from ipygpumem.report.words import clean
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import (
    Options,
    argument,
    at_least_one,
    byte_size,
    command,
    did_you_mean,
    one_of,
    option,
)
from ipygpumem.shell.commands.parsing import NUMBER_OF_ROWS, device_hint
from ipygpumem.shell.ipython.caches import names_and_outputs
from ipygpumem.shell.notebook_inventory import inventory_of_notebook, largest_names
from ipygpumem.units import KIB

_NAMES = argument(
    "names", "NAME", "only these names, or globs such as 'x*'", offers=completions.names, many=True
)
_DEVICE = option("--device", "D", "only this device: RAM, cuda or cuda:0", offers=("RAM", "cuda"))
_MIN = option("--min", "SIZE", "only memory of at least this size", to=byte_size())


def _kind(text: str) -> object:
    """Return the value of ``--kind``. ``optimizer state``, as reports write it, is accepted for
    ``optimizer``.
    """
    return one_of(*_KINDS)(text.removesuffix(" state"))


_KINDS = tuple(kind.removesuffix(" state") for kind in records.ROLES)
"""The values of ``--kind``: words of one word each."""


@command(
    "%gpumem tensors",
    "list tensors and arrays by storage",
    _NAMES,
    _DEVICE,
    _MIN,
    option("--kind", "", "only this kind", to=_kind, choices=_KINDS),
    option("--by", "", "one row per group", choices=records.GROUPS),
    option("--top", "N", "number of rows", to=at_least_one, default=20, also=("-n",)),
)
def tensors(app: App, options: Options) -> list[Report]:
    """Return the report of ``%gpumem tensors``: its tensors, the largest first, or with ``--by`` a
    row for each group.
    """
    kind = None
    if options.kind:
        kind = next((kind for kind in records.ROLES if kind.startswith(options.kind)), None)
    names, rows = _names_and_rows(options.names, options.top)
    inventory = records.select(
        inventory_of_notebook(app.context.shell),
        names,
        device=options.device,
        kind=kind,
        min_bytes=options.min or 0,
    )
    if not inventory.tensors:
        _check_names(app, "%gpumem tensors", names)
    lists_all = not names and options.min is None
    if lists_all:
        inventory = _without_tiny_tensors(inventory)
    if options.by is None:
        holders = _holders_of_nameless(app, inventory)
        return [tensors_report(inventory, top=rows, holders=holders)]
    groups = records.group(inventory.tensors, options.by)
    return [groups_report(inventory, options.by, groups, top=rows)]


def _without_tiny_tensors(inventory: Inventory) -> Inventory:
    """Return an inventory without empty tensors, and without tiny ones that have no name, such as
    the state of NumPy's generator. Tensors with a note stay: their size may be unknown.
    """
    tensors = []
    for row in inventory.tensors:
        minimum_bytes = 1 if row.name is not None else KIB
        if row.size_bytes >= minimum_bytes or row.note:
            tensors.append(row)
    return replace(inventory, tensors=tuple(tensors))


def _holders_of_nameless(app: App, inventory: Inventory) -> dict[StorageKey, str]:
    """Return the holders of the largest tensors without a name, by storage; none if these tensors
    are small together, because the search takes another pass over the heap.
    """
    nameless = [row for row in inventory.tensors if row.name is None]
    if sum(row.size_bytes for row in nameless) < app.context.config.min_held_bytes:
        return {}
    storages = [(row.library, row.storage) for row in nameless[:MOST_EXPLAINED]]
    with app.context.display.working("holders") as progress, undisturbed():
        heap = Heap()
        progress(0.5)
        holders = explain(storages, heap, app.experiments.survivors.roots())
        heap.drop()
    return {storage: holder.path for storage, holder in holders.items()}


@command(
    "%gpumem top",
    "list the names that hold the most memory, of any kind",
    _NAMES,
    _DEVICE,
    _MIN,
    option("-n", "N", "number of rows", to=at_least_one, default=20),
)
def top(app: App, options: Options) -> list[Report]:
    """Return the report of ``%gpumem top``."""
    names, rows = _names_and_rows(options.names, options.n)
    result = select(
        largest_names(app.context.shell), names, device=options.device, min_bytes=options.min or 0
    )
    if not result.names:
        _check_names(app, "%gpumem top", names)
    small: list[str] = []
    if options.device is None and options.min is None:
        small = _small_names(app, result, names)
    return [top_report(result, top=rows, small=small)]


def _small_names(app: App, result: LargestNames, words: Sequence[str]) -> list[str]:
    """Return the names among the ``words`` of a line that exist, but have no row because their
    objects hold too little memory for one.
    """
    names_with_row = set[str]()
    for row in result.names:
        names_with_row.update((row.name, *row.same))
    objects = names_and_outputs(app.context.shell)
    small = list[str]()
    for word in words:
        has_no_row = word in objects and word not in names_with_row
        if has_no_row and not is_never_followed(objects[word]):
            small.append(word)
    return small


def memory_of_outputs(shell: Any) -> LargestNames:
    """Return the names and outputs whose objects ``Out`` keeps alive, with their memory: the rows
    of ``%gpumem why Out``.
    """
    largest = largest_names(shell)
    rows = list[NamedSize]()
    for row in largest.names:
        names = (row.name, *row.same, *row.held_by)
        if any(cell_of_output(name) is not None for name in names):
            rows.append(row)
    return replace(largest, names=tuple(rows), unnamed_bytes={})


def _names_and_rows(words: Sequence[str], rows: int) -> tuple[list[str], int]:
    """Return the names among the words of a line, and the number of rows: many users type ``top 5``
    for ``top -n 5``, and no name begins with a digit.

    Args:
        words: the words.
        rows: the number of rows if none of them is a number.
    """
    names = list[str]()
    for word in words:
        if NUMBER_OF_ROWS.fullmatch(word):
            rows = int(word)
        else:
            names.append(word)
    return names, rows


def _check_names(app: App, command_name: str, patterns: Sequence[str]) -> None:
    """Raise a UsageError if no name matches one of the ``patterns``: an empty table would mean that
    its object holds no memory.
    """
    names = list(names_and_outputs(app.context.shell))
    for pattern in patterns:
        matches = records.matcher([pattern])
        if not any(map(matches, names)):
            hint = device_hint(pattern) or did_you_mean(pattern, names)
            if pattern == "help":
                hint = f" (did you mean {command_name} -h?)"
            message = f"{command_name}: no name matches {quoted(pattern)}{hint}"
            raise UsageError(clean(message))
