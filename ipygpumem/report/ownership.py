"""Reports the memory that deleting a name would free, and the holders of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.inventory.ownership import Ownership
from ipygpumem.records import RetainedArray
from ipygpumem.report.content import leak_lines
from ipygpumem.report.layout import SEPARATOR, Report, Table, clean, clean_name, count, sizes
from ipygpumem.units import format_bytes

_ROWS_SHOWN, _LEAST_SHARE = 10, 0.01


def why_report(found: Ownership) -> Report:
    """Return the report on a name or an expression."""
    total, freed = found.size_bytes, sum(found.freed_bytes.values())
    head = [clean_name(found.name), clean_name(found.type_name), *sizes(found.device_bytes)]
    if found.is_name:
        head.append(f"del {clean_name(found.name)} frees {format_bytes(freed) if found.held else 'all of it'}")
    rows = [
        {
            "still held": format_bytes(part.size_bytes),
            "by": clean(part.holder.path) + f", and {count(part.objects - 1, 'more object')}" * (part.objects > 1),
            "freed by": clean(part.holder.advice),
        }
        for part in found.held[:_ROWS_SHOWN]
        if part.size_bytes >= _LEAST_SHARE * total
    ]
    lines = []
    if found.parts:
        lines.append(
            f"consists of {', '.join(f'{clean_name(name)} {format_bytes(size)}' for name, size in found.parts)}"
        )
    if not found.complete:
        lines.append("there are too many objects to follow all: figures are lower bounds")
    return Report(
        "why", SEPARATOR.join(head), lines, [Table.of(rows, {"still held"}, code={"freed by"})] if rows else ()
    )


def left_report(name: str, cell: int | None, left: Sequence[RetainedArray]) -> Report:
    """Return the report on a deleted name: its objects that are still alive, if an experiment deleted it."""
    bound = "" if cell is None else f"; cell {cell} bound it"
    if left:
        return Report("why", f"{clean_name(name)} is not defined{bound}, but part of it is alive", leak_lines(left))
    hint = "%gpumem leaks lists memory that no name leads to"
    return Report("why", f"{clean_name(name)} is not defined{bound}; it is not known to have left anything", [hint])
