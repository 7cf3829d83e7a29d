"""The file into which an experiment writes where CUDA memory was allocated, for torch's memory viewer."""

from __future__ import annotations

import os

from ipygpumem.errors import FileError
from ipygpumem.measuring.allocations import AllocationHistory
from ipygpumem.units import format_bytes


class AllocationFile:
    """Records torch's allocations from ``start`` on.

    Args:
        file: where they are written, ``.pickle``.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._history = AllocationHistory(file)
        self._is_written = self._is_over = False
        self.remark = ""
        """What is to be said of the file, once it was written."""

    def start(self) -> None:
        """Begin recording."""
        self._history.start()

    def write(self, when: str = "") -> None:
        """Write what was recorded by now; ``when`` that is, in words."""
        self._is_written = True
        shared = "a recording of your own, which goes on" if self._history.is_shared else ""
        try:
            size = format_bytes(self._history.write())
            how = ", ".join(filter(None, (size, when, shared)))
            self.remark = f"allocations: {self._history.place} ({how}); pytorch.org/memory_viz shows it"
        except (FileError, MemoryError) as error:  # it only serves the report
            self.remark = f"allocations: {error or 'no memory to write them'}"

    def stop(self, *, write: bool) -> None:
        """End recording; what an out-of-memory error has written stays."""
        if write and not self._is_written:
            self.write()
        if not self._is_over:
            self._is_over = True
            self._history.stop()
