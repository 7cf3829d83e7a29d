"""What the recordings of one job's processes have in common."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ipygpumem.merging.merge import merge
from ipygpumem.merging.records import Member, Merged
from ipygpumem.model import CellRecord, SessionRecord, TraceRecord


def merge_recordings(found: Sequence[SessionRecord], lost: Sequence[str]) -> Merged:
    """Return what the processes of one job have recorded: by label, and by cell where there were cells.

    Args:
        found: their recordings, in any order. Clocks are not compared.
        lost: what could not be read, and why.
    """
    ordered = sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.host, one.pid))
    names = [_name(one) for one in ordered]
    for ends in ([f" of {one.host}" for one in ordered], [f", process {one.pid}" for one in ordered]):
        seen = Counter(names)
        names = [name + end if seen[name] > 1 else name for name, end in zip(names, ends, strict=True)]
    merged = merge([_member(name, one) for name, one in zip(names, ordered, strict=True)])
    return dataclasses.replace(merged, notes=(*lost, *_missing(ordered), *merged.notes))


def _name(one: SessionRecord) -> str:
    return f"process {one.pid} of {one.host}" if one.rank is None else f"rank {one.rank}"


def _member(name: str, one: SessionRecord) -> Member:
    cells = [
        TraceRecord(_label(cell), cell.started_at, cell.duration_seconds, cell.error, cell.usages) for cell in one.cells
    ]
    return Member(name, one.host, one.pid, (*cells, *one.traces))


def _label(cell: CellRecord) -> str:
    number = "cell" if cell.execution_count is None else f"cell {cell.execution_count}"
    return f"{number}: {cell.source_line}" if cell.source_line else number


def _missing(found: Sequence[SessionRecord]) -> list[str]:
    """Return which ranks of the job have no recording."""
    ranks = max((one.ranks or 0 for one in found), default=0)
    lacking = sorted(set(range(ranks)) - {one.rank for one in found if one.rank is not None})
    if not lacking:
        return []
    names = ", ".join(map(str, lacking[:10])) + (f" and {len(lacking) - 10} more" if len(lacking) > 10 else "")
    return [f"no recording of {'rank' if len(lacking) == 1 else 'ranks'} {names}, of {ranks}"]
