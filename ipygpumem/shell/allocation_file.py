"""``--allocations``: writes torch's history of CUDA allocations with Python stacks to a file for its memory viewer."""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

from ipygpumem.errors import FileError, describe_error, ellipsize
from ipygpumem.fitting.budgets import torch_cuda
from ipygpumem.records import open_plain
from ipygpumem.report.export import place_of, write
from ipygpumem.units import format_bytes

MOST_ENTRIES = 100_000  # allocations and frees to remember; each takes some KB


class AllocationFile:
    """Records torch's allocations from ``start`` on; ``file`` must be new, or an earlier snapshot."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._place, name = place_of(file), repr(ellipsize(file))
        self._memory: Any = None
        self._is_ours = False
        self.remark = ""  # the report's line about the file
        if self._place.suffix.lower() not in (".pickle", ".pkl"):
            raise FileError(f"--allocations {name}: name a file that ends in .pickle, for torch's memory viewer")
        if not os.access(self._place.parent, os.W_OK | os.X_OK):
            raise FileError(f"--allocations: {ellipsize(self._place.parent)!r} is not a folder, or cannot be written")
        try:
            with open_plain(self._place) if self._place.exists() else io.BytesIO() as there:
                head = there.read(4096)
        except OSError as error:
            raise FileError(f"--allocations: {ellipsize(error)}") from None
        if head and not (head[:1] == b"\x80" and (b"segments" in head or b"device_traces" in head)):
            raise FileError(f"{name} is not a snapshot of allocations, so it is not replaced: name another")

    def start(self) -> None:
        """Start recording, or use the user's own recording, which continues."""
        cuda = torch_cuda()
        if cuda is None:
            raise FileError("--allocations needs a CUDA device, and torch sees none here: leave it out")
        cuda.init()  # creates the allocator
        self._memory, self._is_ours = cuda.memory, not sys.modules["torch"]._C._cuda_isHistoryEnabled()
        if self._is_ours:
            try:
                self._memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_ENTRIES)
            except (RuntimeError, TypeError) as error:  # another allocator, an old torch
                self._memory = None
                raise FileError(
                    f"--allocations: torch's allocator keeps no history here ({describe_error(error)})"
                ) from None

    def write(self, when: str = "") -> None:
        """Write the history so far; ``when`` describes the moment in the report."""
        shared = "" if self._is_ours else "your own recording, which continues"
        try:
            size = write(self._place, pickle.dumps(self._memory._snapshot()), is_ours=lambda _: True, force=True)
            how = ", ".join(filter(None, (format_bytes(size), when, shared)))
            self.remark = f"allocations: {self._place} ({how}); pytorch.org/memory_viz shows it"
        except Exception as error:  # only needed for the report
            self.remark = f"allocations: {describe_error(error)}"

    def stop(self) -> None:
        """Stop recording."""
        if self._memory is not None and self._is_ours:
            self._memory._record_memory_history(None)
        self._memory = None
