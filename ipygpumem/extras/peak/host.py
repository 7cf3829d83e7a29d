"""Follows the host's memory outside torch's operations with memray's tracker, if it
is installed.
"""

from __future__ import annotations

import importlib
import io
import sys
import tempfile
from _lsprof import Profiler
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ipygpumem.errors import TraceError
from ipygpumem.estimating.user_lines import line_text
from ipygpumem.extras.peak.bound import OF_TORCH, OURS, HostUse, bounded
from ipygpumem.extras.peak.records import DevicePeak, PeakRow
from ipygpumem.extras.peak.timeline import sorted_rows
from ipygpumem.introspect import is_instance, is_ours, is_users, type_name
from ipygpumem.probes.accelerators import loaded_torch

_MOST_FRAMES = 100
_SELDOM_MS = 10_000
"""Milliseconds between memray's own readings of RSS, which only its flame graph shows. It reads
``/proc/self/status`` for each, by default every 10 ms.
"""
OUTSIDE = "outside torch"
"""Role of the rows to report, if torch is loaded."""
ALLOCATED = "allocated"
"""Role of the rows to report without torch."""


class _Allocations(NamedTuple):
    """The allocations that memray has recorded, also torch's and those without pages in RAM."""

    rows: tuple[PeakRow, ...]
    """The allocations at the high-water mark, the largest row first."""
    kept_bytes: int
    """Bytes of all allocations that were still alive at the end."""
    freed_bytes: int
    """Bytes of the high-water mark that may have been freed since then."""


class HostTracker:
    """memray's tracker, until ``stop``; it keeps sums by stack at the high-water mark, not each
    allocation.

    Args:
        has_flame_graph: ``flame_graph`` will be called: keep RSS over time, too.

    Raises:
        ModuleNotFoundError: memray is not installed.
    """

    def __init__(self, *, has_flame_graph: bool) -> None:
        self._memray: Any = importlib.import_module("memray")
        self._folder = tempfile.TemporaryDirectory(prefix="ipygpumem-")
        self._file = str(Path(self._folder.name) / "memory.bin")
        destination = self._memray.FileDestination(
            self._file, overwrite=True, compress_on_exit=False
        )
        self.note = ""
        """A sentence on rows whose lines may be wrong; empty without any."""
        form = self._memray.FileFormat.AGGREGATED_ALLOCATIONS
        options: dict[str, Any] = {"destination": destination, "file_format": form}
        if not has_flame_graph:
            options["memory_interval_ms"] = _SELDOM_MS
        self._tracker: Any = self._memray.Tracker(**options)

    def start(self) -> None:
        """Follow the memory of this process.

        Raises:
            TraceError: a profiler runs. memray would take its place, and hand a profiler written in
                C back as a function, which fails at the next call.
        """
        profiler = sys.getprofile()
        if profiler is not None:
            raise TraceError(f"{_profiler_name(profiler)} runs, and memray needs its hook")
        self._tracker.__enter__()

    def stop(self) -> None:
        """Stop following; a profiler that the code has started runs on."""
        profiler = sys.getprofile()
        self._tracker.__exit__(*sys.exc_info())
        if profiler is None:
            return
        self.note = f"{_profiler_name(profiler)} was started: lines of RAM may be wrong from there"
        if is_instance(profiler, Profiler):
            Profiler.enable(profiler)  # type: ignore[arg-type]  # typed as a function
        else:
            sys.setprofile(profiler)

    def flame_graph(self) -> str:
        """Return memray's own flame graph of the high-water mark, as a page of HTML that loads
        nothing.
        """
        reporters: Any = importlib.import_module("memray.reporters.flamegraph")
        with self._memray.FileReader(self._file) as reader:
            graph = reporters.FlameGraphReporter.from_snapshot(
                reader.get_high_watermark_allocation_records(merge_threads=True),
                memory_records=tuple(reader.get_memory_snapshots()),
                native_traces=False,
            )
            page = io.StringIO()
            graph.render(
                page,
                reader.metadata,
                show_memory_leaks=False,
                merge_threads=True,
                inverted=False,
                no_web=True,  # with its scripts in the page
            )
        return page.getvalue()

    def read(self, use: HostUse | None) -> DevicePeak:
        """Return the memory at the high-water mark that torch did not allocate, by the user's line.

        Call it once: it removes memray's file.

        Args:
            use: the RAM that the process used, which bounds the figures: further bytes are
                "reserved, not used". Torch's memory and our own take part in that, because the
                process's RAM includes them. None if it is not known exactly.
        """
        allocations = self._read_allocations()
        size_bytes = sum(row.size_bytes for row in allocations.rows)
        whole = DevicePeak("cpu", "memray", size_bytes, rows=allocations.rows)
        missed_bytes = 0
        if use is not None:
            room_bytes = use.room_bytes(allocations.kept_bytes, allocations.freed_bytes)
            whole = bounded(whole, room_bytes, use.unused_parts)
            if whole.is_bound:
                missed_bytes = max(0, use.usage.peak_delta_bytes - whole.size_bytes)
        role = _role_outside_torch()
        rows_outside = tuple(row for row in whole.rows if row.role == role)
        return replace(
            whole,
            size_bytes=sum(row.size_bytes for row in rows_outside),
            rows=rows_outside,
            is_bound=any(row.reserved_bytes for row in rows_outside),
            missed_bytes=missed_bytes,
        )

    def _read_allocations(self) -> _Allocations:
        """Read memray's file, and remove it."""
        rows = list[PeakRow]()
        freed_bytes = 0
        with self._folder, self._memray.FileReader(self._file) as reader:
            at_end = reader.get_leaked_allocation_records(merge_threads=True)
            kept = {record.stack_id: record for record in at_end}
            kept_bytes = sum(record.size for record in kept.values())
            for record in reader.get_high_watermark_allocation_records(merge_threads=True):
                freed_bytes += self._freed_bytes(record, kept.get(record.stack_id))
                rows.append(self._row(record))
        return _Allocations(_one_row_for_alike(rows), kept_bytes, freed_bytes)

    def _freed_bytes(self, at_peak: Any, at_end: Any) -> int:
        """Return the bytes of memray's record of the high-water mark that may have been freed.

        Args:
            at_peak: the record of a stack at the high-water mark.
            at_end: that stack's record at the end; None if it has freed everything.
        """
        if at_end is None:
            return int(at_peak.size)
        # A library's pool may have given the pages back to the system (madvise). memray joins the
        # allocations of a stack and names one of their functions, here and there another one.
        if self._memray.AllocatorType.MMAP in (at_peak.allocator, at_end.allocator):
            return int(at_peak.size)
        return max(0, int(at_peak.size - at_end.size))

    def _row(self, record: Any) -> PeakRow:
        """Return the row of one of memray's records: the allocations of one stack."""
        allocator = self._memray.AllocatorType(record.allocator).name.lower()
        # Each entry is a function, its file and a line; the innermost one comes first.
        stack = record.stack_trace(max_stacks=_MOST_FRAMES)
        users_index = len(stack)
        for index, (_, file, _) in enumerate(stack):
            if is_users(file):
                users_index = index
                break
        if any(is_ours(file) for _, file, _ in stack[:users_index]):
            return PeakRow(record.size, OURS, allocator=allocator)
        if stack and stack[0][1].startswith(_torch_folder()):
            # by an operation, whose storages are followed
            return PeakRow(record.size, OF_TORCH, allocator=allocator)
        operation = stack[0][0] if stack else "a thread without Python code"
        if operation == "<module>":
            operation = "top level"
        line = ""
        if users_index < len(stack):
            _, file, line_number = stack[users_index]
            line = line_text(file, line_number)
        return PeakRow(
            record.size, _role_outside_torch(), operation=operation, line=line, allocator=allocator
        )


def _profiler_name(profiler: object) -> str:
    """Return a profiler of ``sys.setprofile`` in words."""
    if is_instance(profiler, Profiler):
        return "cProfile"
    return f"a profiler ({type_name(profiler)}, sys.setprofile)"


def _role_outside_torch() -> str:
    """Return the role of memory that is neither torch's nor our own: the only one to report."""
    return ALLOCATED if loaded_torch() is None else OUTSIDE


def _torch_folder() -> str:
    """Return the folder of torch's package; a text that no path begins with if torch
    is not loaded.
    """
    return str(Path(getattr(loaded_torch(), "__file__", None) or "no torch").parent) + "/"


def _one_row_for_alike(rows: Iterable[PeakRow]) -> tuple[PeakRow, ...]:
    """Return one row for all rows with the same role, operation, line and allocator, the largest
    first.
    """
    joined: dict[tuple[str, str, str, str], PeakRow] = {}
    for row in rows:
        origin = row.role, row.operation, row.line, row.allocator
        earlier = joined.get(origin)
        if earlier is None:
            joined[origin] = row
        else:
            size = earlier.size_bytes + row.size_bytes
            joined[origin] = replace(earlier, size_bytes=size, count=earlier.count + 1)
    return sorted_rows(joined.values())
