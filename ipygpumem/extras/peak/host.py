"""Follows the host's memory outside torch's operations with memray's tracker, if it is installed."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from ipygpumem.extras.peak.records import DevicePeak
from ipygpumem.extras.peak.timeline import rows_of
from ipygpumem.introspect import is_ours, is_users
from ipygpumem.probes.accelerators import loaded_torch

_MOST_FRAMES = 100


class HostTracker:
    """memray's tracker, until ``stop``; it keeps sums by stack at the high-water mark, not each allocation.

    Raises:
        ModuleNotFoundError: memray is not installed.
    """

    def __init__(self) -> None:
        self._memray: Any = importlib.import_module("memray")
        self._folder = tempfile.TemporaryDirectory(prefix="ipygpumem-")
        self._file = str(Path(self._folder.name) / "memory.bin")
        destination = self._memray.FileDestination(self._file, overwrite=True, compress_on_exit=False)
        form = self._memray.FileFormat.AGGREGATED_ALLOCATIONS
        self._tracker: Any = self._memray.Tracker(destination=destination, file_format=form)

    def start(self) -> None:
        """Follow the memory of this process."""
        self._tracker.__enter__()

    def stop(self) -> None:
        """Stop following."""
        self._tracker.__exit__(*sys.exc_info())

    def read(self) -> DevicePeak:
        """Return the memory at the high-water mark that torch did not allocate, by the user's line."""
        torch = str(Path(getattr(loaded_torch(), "__file__", None) or "no torch").parent) + "/"
        groups: dict[Any, list[int]] = {}
        with self._folder, self._memray.FileReader(self._file) as reader:
            for record in reader.get_high_watermark_allocation_records(merge_threads=True):
                stack = record.stack_trace(max_stacks=_MOST_FRAMES)
                user = next((at for at, (_, file, _) in enumerate(stack) if is_users(file)), len(stack))
                if any(is_ours(file) for _, file, _ in stack[:user]) or (stack and stack[0][1].startswith(torch)):
                    continue  # allocated by us, or by an operation, whose storages are followed
                line = stack[user][1:] if stack[user:] else None
                row = "outside torch", "", "", stack[0][0] if stack else "", line
                groups.setdefault(row, []).append(record.size)
        return DevicePeak("cpu", "memray", sum(map(sum, groups.values())), rows=rows_of(groups))
