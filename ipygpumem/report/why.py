"""The reports of ``%gpumem why``: the memory that deleting a name frees, and the other holders of
its object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ipygpumem.heap.paths.roots import NOTEBOOK
from ipygpumem.introspect import target_of
from ipygpumem.inventory.names.one_line import lines_for_all
from ipygpumem.inventory.names.ownership import HeldPart, Ownership
from ipygpumem.inventory.names.top import LargestNames
from ipygpumem.records import ReferencePath, RetainedArray
from ipygpumem.report.devices import sizes
from ipygpumem.report.layout import IN_ONE_LINE, Listing, Report, Table
from ipygpumem.report.leaks import leak_table
from ipygpumem.report.registration import shows
from ipygpumem.report.top import top_report
from ipygpumem.report.words import clean, clean_name, count, listed
from ipygpumem.units import MIB, format_bytes

_HOLDERS_SHOWN = 10
"""Maximum number of holders with a row."""
_LEAST_SHARE = 0.01
"""Parts and holders with a smaller share of the object are not shown."""
_SHARING_SHOWN = 2
"""Maximum number of holders to name that share parts of an object."""
_NEARLY_ALL = 0.99
"""Minimum share of an object's memory that a holder keeps as a whole."""
_LIBRARIES = "libraries"
_ATTRIBUTES = re.compile(r"\w+(\.\w+)*")
"""A name with attributes."""


@shows(Ownership)
def why_report(ownership: Ownership) -> Report:
    """Return the report on the memory of a name or an expression: its size, its other holders, and
    the lines that free it.
    """
    if ownership.held and ownership.is_small:
        line = "it is too small to search for what else uses it"
        return Report("why", _head_of_why(ownership), [line], records=[ownership])
    holders, sharing = _holders_shown(ownership)
    least_bytes = _least_shown(ownership)
    rows = [_row_of_holder(part, least_bytes) for part in holders[:_HOLDERS_SHOWN]]
    table = Table.of(rows, {"still held"}, code={"freed by"}, whole={"freed by"})
    lines = _lines_of_holders(holders, sharing)
    code = lines_for_all(ownership)
    listings = []
    if len(code) == 1:
        lines.append(IN_ONE_LINE + clean(code[0]))
    elif code:
        listings.append(Listing("in one cell", code, code=True))
    lines += _lines_of_content(ownership)
    deletion = f"del {target_of(ownership.name)}"
    return Report(
        "why",
        _head_of_why(ownership),
        lines,
        [table],
        listings=listings,
        records=[ownership],
        advised=[deletion],
    )


def _least_shown(ownership: Ownership) -> float:
    """Return the minimum bytes of a part to be shown."""
    return _LEAST_SHARE * ownership.size_bytes


class _HoldersShown(NamedTuple):
    """The other holders of an object, as the report shows them."""

    with_row: list[HeldPart]
    sharing: list[HeldPart]
    """The holders that only share small parts of the object; one line names them."""


def _holders_shown(ownership: Ownership) -> _HoldersShown:
    """Decide which holders have a row. Holders that share nothing, and hold hardly anything, are
    left out.
    """
    least_bytes = _least_shown(ownership)
    # A holder may add no bytes to those of earlier rows, and still keep nearly all of the object.
    nearly_all = _NEARLY_ALL * sum(part.size_bytes for part in ownership.held)
    with_row = []
    sharing = []
    for part in ownership.held:
        keeps_nearly_all = part.is_shared and part.shared_bytes >= nearly_all
        if part.size_bytes >= least_bytes or keeps_nearly_all:
            with_row.append(part)
        elif part.is_shared:
            sharing.append(part)
    return _HoldersShown(with_row, sharing)


def outputs_report(names: LargestNames, number: int) -> Report:
    """Return the report on IPython's ``Out``. Deleting that name frees nothing, because IPython
    keeps the outputs under other names, too.

    Args:
        names: the outputs, with their memory.
        number: the number of outputs.
    """
    report = top_report(names)
    memory = sizes(names.device_bytes) or ["less than 1 KiB"]
    head = ["Out", count(number, "output"), *memory, "del Out frees 0 B"]
    lines = [*report.lines, "to free all outputs: %reset -f out, then %gpumem free"]
    return Report("why", head, lines, report.tables, records=[names])


def of_ipython_report(name: str, type_name: str, description: str) -> Report:
    """Return the report on an object that IPython has made and keeps, with its description."""
    return Report("why", [clean_name(name), clean_name(type_name), description])


def _lines_of_holders(holders: Sequence[HeldPart], sharing: Sequence[HeldPart]) -> list[str]:
    """Return a line with the number of holders beyond those with a row, and a line that names the
    holders which share small parts.
    """
    lines = []
    number_not_shown = len(holders) - _HOLDERS_SHOWN
    if number_not_shown > 0:
        lines.append(f"and {count(number_not_shown, 'more holder')}")
    if sharing:
        names = _first_names([part.holder for part in sharing])
        verb = "shares" if len(names) == 1 and names != [_LIBRARIES] else "share"
        lines.append(f"{listed(names, _SHARING_SHOWN)} {verb} parts of it")
    return lines


def _first_names(holders: Iterable[ReferencePath]) -> list[str]:
    """Return the names at which holders' paths begin, such as ``model.layers``, each once. All
    libraries are one word, because a user can do nothing about them.
    """
    names = dict[str, None]()
    has_libraries = False
    for holder in holders:
        if holder.path.startswith("module ") and not holder.advice:
            has_libraries = True
            continue
        name = holder.path.removeprefix(NOTEBOOK)
        attributes = _ATTRIBUTES.match(name)
        if attributes is not None and holder.path != name:
            name = attributes[0]  # ``ax2.callback`` of ``ax2.callback: bound method draw, ...``
        names[clean(name)] = None
    return [*names, _LIBRARIES] if has_libraries else list(names)


def _lines_of_content(ownership: Ownership) -> list[str]:
    """Return lines about the object's parts, and about limits of the figures."""
    lines = []
    parts = []
    least_bytes = _least_shown(ownership)
    for name, size in ownership.parts:
        if size >= least_bytes:
            parts.append(f"{clean_name(name)} {format_bytes(size)}")
    if parts:
        lines.append(f"consists of {', '.join(parts)}")
    if ownership.in_graphs_bytes >= max(least_bytes, MIB):
        in_graphs = format_bytes(ownership.in_graphs_bytes)
        lines.append(
            f"autograd graphs keep {in_graphs} of it for backward(); detach() leaves them out"
        )
    lines += map(clean, ownership.notes)
    if not ownership.followed and ownership.type_name == "module":
        name = clean_name(ownership.name)
        lines.append(f"its content is not counted: %gpumem why {name}.NAME shows a part of it")
    elif not ownership.followed:
        lines.append("the content of a class, frame or part of IPython is not counted")
    if not ownership.complete:
        lines.append(
            "there are too many objects to follow all: figures are lower bounds, and any of it may "
            "have more holders"
        )
    return lines


def _head_of_why(ownership: Ownership) -> list[str]:
    """Return the headline: the object's name and type, its size, and the bytes that ``del`` of the
    name frees.
    """
    head = [clean_name(ownership.name), clean_name(ownership.type_name)]
    if not ownership.followed:
        return head
    on_devices = sizes(ownership.device_bytes)
    if not on_devices:
        on_devices = [format_bytes(ownership.size_bytes)]
    elif ownership.is_at_least or not ownership.complete:
        on_devices[0] = f"at least {on_devices[0]}"
    head += on_devices
    freed = sum(ownership.freed_bytes.values())
    if ownership.is_name and (freed or ownership.complete):
        target = clean_name(target_of(ownership.name))
        head.append(f"del {target} frees {_freed_text(ownership, freed)}")
    return head


def _row_of_holder(part: HeldPart, least: float) -> dict[str, str]:
    """Return the row of a holder. It says "shared" instead of a size, if the holder adds less than
    ``least`` bytes to those of earlier rows.
    """
    size = "shared"
    if part.size_bytes >= least:
        size = format_bytes(part.size_bytes)
    path = clean(part.holder.path)
    if part.objects > 1:
        path += f", and {count(part.objects - 1, 'more object')}"
    return {"still held": size, "by": path, "freed by": clean(part.holder.advice)}


def _freed_text(ownership: Ownership, freed: int) -> str:
    """Return the bytes that ``del`` frees, in words: ``12 MiB``, ``at least 12 MiB``, or
    ``all of it`` if each byte is known and nothing else holds the object.
    """
    # If it frees no byte, a known holder keeps the object, with the memory that is not counted.
    has_known_holder = bool(ownership.held) and not ownership.is_small
    if ownership.is_at_least and (freed or not has_known_holder):
        return f"at least {format_bytes(freed)}"
    if ownership.held:
        return format_bytes(freed)
    return "all of it"


def undefined_name_report(
    name: str, cell: int | None, still_alive: Sequence[RetainedArray], meant: str = ""
) -> Report:
    """Return the report on a name that is not defined: its object may be alive all the same.

    Args:
        name: the name.
        cell: the cell that has bound it; None if none has.
        still_alive: its object or its arrays, if they are still alive.
        meant: a suggestion of a similar name, or an empty text.
    """
    headline = f"{clean_name(name)} is not defined{clean(meant)}"
    if cell is not None:
        headline += f"; cell {cell} bound it"
    if still_alive:
        table = leak_table(still_alive)
        return Report("why", f"{headline}, but part of it is alive", tables=[table])
    hint = "%gpumem leaks lists memory that no name leads to"
    return Report("why", f"{headline}; none of its memory is known to be alive", [hint])
