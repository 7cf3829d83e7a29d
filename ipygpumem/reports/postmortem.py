"""Reports the end of a kernel that is gone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ipygpumem.flight_recorder.archive import Counts
from ipygpumem.flight_recorder.entries import CellEnd, CellStart, Figures, Header, Sample
from ipygpumem.flight_recorder.reader import Recording
from ipygpumem.flight_recorder.verdict import NO_DEATHS, Verdict
from ipygpumem.reports.bars import curve_of, text_spark
from ipygpumem.reports.layout import (
    Curve,
    Fact,
    Listing,
    Report,
    Segment,
    Table,
    clean,
    count,
    device_label,
    shorten,
)
from ipygpumem.units import format_bytes, format_seconds

_COLUMNS = 24
"""Width of a curve in characters."""
_CELLS_BEFORE = 5
_SOURCE_LINES = 20


def nothing_report(counts: Counts, *, on: bool) -> Report:
    """Return the answer where no kernel is known to have died."""
    if not counts.found:
        text = "nothing was recorded yet" + ("" if on else ": %gpumem record on starts it")
        return Report("postmortem", text)
    parts = [count(counts.found, "recording"), f"{counts.alive} of kernels that run"]
    if counts.unknown:
        parts.append(f"{counts.unknown} of kernels elsewhere, which may run")
    if counts.unreadable:
        them = "it" if counts.unreadable == 1 else "them"
        parts.append(f"{counts.unreadable} that cannot be read: %gpumem postmortem --all lists {them}")
    died = "is known to have died" if len(parts) > 2 else "died"
    return Report("postmortem", f"no kernel {died} while it was recorded ({', '.join(parts)})")


def list_report(found: Sequence[tuple[Recording, Verdict]], folder: str) -> Report:
    """Return one row for each recording, in the order given."""
    headline = f"{count(len(found), 'recording')} in {clean(folder)}"
    if not found:
        return Report("postmortem", headline)
    rows = tuple(_list_row(recording, verdict) for recording, verdict in found)
    return Report("postmortem", headline, (), (Table("", ("file", "kernel", "last entry", "how"), rows),))


def _list_row(recording: Recording, verdict: Verdict) -> tuple[str, ...]:
    last = recording.running
    died = verdict.cause not in NO_DEATHS
    where = "" if last is None or not died else f"died in cell {last.cell}: "
    grade = f" ({verdict.grade})" if died else ""
    return (
        clean(recording.segments.name),
        _kernel(recording.header),
        _when(recording.last_time) if recording.last_time else "",
        f"{where}{clean(verdict.text)}{grade}",
    )


def postmortem_report(recording: Recording, verdict: Verdict) -> Report:
    """Return the last that is known of one kernel: its cell, its memory, and what ended it."""
    last = recording.running
    kernel = f"kernel {_kernel(recording.header)}"
    when, why = _when(recording.last_time), clean(verdict.text)
    where = "while no cell ran" if last is None else f"in cell {last.cell}"
    headlines = {
        "alive": [f"{kernel} still runs", f"last entry {when}"],
        "ended": [f"{kernel} ended on purpose", why, when],
        "unrecorded": [f"the recording of {kernel} ended", why, when],
        "unreadable": [why, f"last entry {when}"],
    }
    headline = headlines.get(verdict.cause, [f"{kernel} died {where}", when, f"{why} ({verdict.grade})"])
    died = verdict.cause not in NO_DEATHS
    lines = [f"{count(recording.skipped, 'line')} of the recording could not be read"] * bool(recording.skipped)
    if lines and died:
        lines[0] += ": its end may be among them"
    tables = [table for table in (_memory_table(recording), _before_table(recording)) if table.rows]
    facts = tuple(Fact("evidence", (clean(text),)) for text in verdict.evidence)
    return Report.of("postmortem", map(Segment, headline), lines, tables, facts, _source(recording), is_trouble=died)


def _kernel(header: Header | None) -> str:
    if header is None:
        return "unknown"
    name = f"process {header.pid}"
    return f"of {clean(header.notebook.rpartition('/')[2])}, {name}" if header.notebook else name


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _source(recording: Recording) -> tuple[Listing, ...]:
    """Return what the last cell was: how long it ran, and its first lines."""
    cell = recording.last_cell
    if cell is None:
        return ()
    end = next((entry for entry in recording.last_cell_entries if isinstance(entry, CellEnd)), None)
    if end is not None:
        ran = format_seconds(end.seconds) + (f", {clean(end.error)}" if end.error else "")
    else:
        ran = f"{format_seconds(max(0.0, recording.last_time - cell.time))} until its last entry"
    scope = f" of experiment {clean(cell.experiment)}" if cell.experiment else ""
    lines = [clean(f"  {line.expandtabs(4)}") for line in cell.source.split("\n")[:_SOURCE_LINES]]
    if cell.lines > len(lines):
        lines.append(f"  … {count(cell.lines - len(lines), 'line')} more")
    return (Listing(f"cell {cell.cell}{scope} began {_when(cell.time)}, ran {ran}", tuple(lines), code=True),)


def _memory_table(recording: Recording) -> Table:
    found = [_of_device(device, moments) for device, moments in recording.last_cell_figures.items()]
    samples = [entry for entry in recording.last_cell_entries if isinstance(entry, Sample)]
    ram = recording.header.ram_bytes if recording.header else None
    limit = next((item.group_limit_bytes for item in reversed(samples) if item.group_limit_bytes), None)
    available = [(item.time, item.available_bytes) for item in samples if item.available_bytes is not None]
    group = [(item.time, item.group_used_bytes) for item in samples if item.group_used_bytes is not None]
    found += [_Memory("machine: available", available, ram), _Memory("control group", group, limit)]
    for what, bound in ("address space", "address_space"), ("data", "data"):
        sizes = [(item.time, getattr(item, f"{bound}_bytes")) for item in samples]
        limits = [getattr(item, f"{bound}_limit_bytes") for item in samples]
        found.append(_Memory(what, [point for point in sizes if point[1] is not None], limits[-1] if limits else None))
    found = [item for item in found if item.points]
    columns = ("memory", "curve", "first", "lowest", "highest", "last", "of")
    rows, curves = tuple(item.row for item in found), tuple(item.curve for item in found)
    return Table("", columns, rows, frozenset(columns[2:]), frozenset({"curve"}), curves=curves)


def _of_device(device: str, moments: Sequence[tuple[float, Figures]]) -> _Memory:
    points = [(moment, item.current_bytes) for moment, item in moments]
    peak = max(item.peak_bytes or 0 for _, item in moments)
    return _Memory(clean(device_label(device)), points, moments[-1][1].total_bytes, peak)


class _Memory(NamedTuple):
    """One kind of memory while the last cell ran."""

    name: str
    points: Sequence[tuple[float, int]]
    """Moments and sizes."""
    total_bytes: int | None
    peak_bytes: int = 0

    @property
    def curve(self) -> Curve:
        """The highest value in each of some equal spans of time."""
        return curve_of(f"{self.name}, the last cell", _binned(self.points), self.total_bytes)

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        sizes = [size for _, size in self.points]
        return (
            self.name,
            text_spark(self.curve),
            format_bytes(sizes[0]),
            format_bytes(min(sizes)),
            format_bytes(max(self.peak_bytes, *sizes)),
            format_bytes(sizes[-1]),
            "" if self.total_bytes is None else format_bytes(self.total_bytes),
        )


def _binned(points: Sequence[tuple[float, int]]) -> list[int]:
    """Return the highest value of each of some equal spans of time; a span without one continues the last."""
    first, length = points[0][0], points[-1][0] - points[0][0]
    columns = min(_COLUMNS, len(points))
    bins: dict[int, int] = {}
    for moment, size in points:
        place = min(columns - 1, max(0, int(columns * (moment - first) / length))) if length > 0 else 0
        bins[place] = max(bins.get(place, 0), size)
    values = [points[0][1]]
    for place in range(columns):
        values.append(bins.get(place, values[-1]))
    return values[1:]


def _before_table(recording: Recording) -> Table:
    """Return the cells before the last, oldest first."""
    rows = []
    for start, end in list(_finished(recording))[-_CELLS_BEFORE:]:
        rss = next((item for item in end.devices if item.device == "cpu"), None)
        sizes = (None, None) if rss is None else (rss.current_bytes, rss.peak_bytes)
        memory = ["" if size is None else format_bytes(size) for size in sizes]
        first_line = next((line for line in start.source.split("\n") if line.strip()), "")
        before = (str(start.cell), format_seconds(end.seconds), clean(end.error or ""))
        rows.append((*before, *memory, shorten(first_line, 60)))
    columns = ("cell", "time", "error", "RAM after", "peak", "source")
    return Table("cells before", columns, tuple(rows), frozenset({"cell", "RAM after", "peak"}), frozenset({"source"}))


def _finished(recording: Recording) -> Iterable[tuple[CellStart, CellEnd]]:
    starts: dict[int | None, CellStart] = {}
    last = recording.last_cell
    for entry in recording.entries:
        if isinstance(entry, CellStart):
            starts[entry.cell] = entry
        elif isinstance(entry, CellEnd) and entry.cell in starts:
            start = starts.pop(entry.cell)
            if start is not last:
                yield start, entry
