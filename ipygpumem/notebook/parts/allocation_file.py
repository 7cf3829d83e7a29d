"""``--record``: torch's own history of CUDA allocations with Python stacks, as a file for its memory viewer."""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

from ipygpumem.errors import FileError, said, short
from ipygpumem.fitting.budgets import torch_cuda
from ipygpumem.record import open_plain
from ipygpumem.reports.export import place_of, write
from ipygpumem.units import format_bytes

MOST_ENTRIES = 100_000  # allocations and frees to remember; each takes some KB


class AllocationFile:
    """Records torch's allocations from ``start`` on; ``file`` must be new, or a snapshot."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._place, name = place_of(file), repr(short(file))
        self._memory: Any = None
        self._is_ours = False
        self.remark = ""  # what the report says of the file
        if self._place.suffix.lower() not in (".pickle", ".pkl"):
            raise FileError(f"--record {name}: name a file that ends in .pickle, for torch's memory viewer")
        if not os.access(self._place.parent, os.W_OK | os.X_OK):
            raise FileError(f"--record: {short(self._place.parent)!r} is not a folder, or cannot be written")
        try:
            with open_plain(self._place) if self._place.exists() else io.BytesIO() as there:
                head = there.read(4096)
        except OSError as error:
            raise FileError(f"--record: {short(error)}") from None
        if head and not (head[:1] == b"\x80" and (b"segments" in head or b"device_traces" in head)):
            raise FileError(f"{name} is not a snapshot of allocations, so it is not replaced: name another")

    def start(self) -> None:
        """Begin to record; a recording of the user's own is used and goes on."""
        cuda = torch_cuda()
        if cuda is None:
            raise FileError("--record needs a CUDA device, and torch sees none here: leave it out")
        cuda.init()  # before that there is no allocator that could record
        self._memory, self._is_ours = cuda.memory, not sys.modules["torch"]._C._cuda_isHistoryEnabled()
        if self._is_ours:
            try:
                self._memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_ENTRIES)
            except (RuntimeError, TypeError) as error:  # another allocator, an old torch
                self._memory = None
                raise FileError(f"--record: torch's allocator keeps no history here ({said(error)})") from None

    def write(self, when: str = "") -> None:
        """Write the records so far; ``when`` that is, in words."""
        shared = "" if self._is_ours else "a recording of your own, which goes on"
        try:
            size = write(self._place, pickle.dumps(self._memory._snapshot()), is_ours=lambda _: True, force=True)
            how = ", ".join(filter(None, (format_bytes(size), when, shared)))
            self.remark = f"allocations: {self._place} ({how}); pytorch.org/memory_viz shows it"
        except Exception as error:  # it only serves the report
            self.remark = f"allocations: {said(error)}"

    def stop(self, *, write: bool) -> None:
        """End the recording; a file that an out-of-memory error has written stays as it is."""
        if write and not self.remark:
            self.write()
        if self._memory is not None and self._is_ours:
            self._memory._record_memory_history(None)
        self._memory = None
