"""Records the cells, times and errors of an open experiment."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter, time

from ipygpumem.records import CellRecord, ExperimentRecord
from ipygpumem.shell.ipython.last_errors import last_error_id


class ExperimentLog:
    """The cells, times and errors of an experiment so far."""

    def __init__(self) -> None:
        self.started = perf_counter()
        """The start by the clock that durations are measured with."""
        self.started_at = time()
        """The start as seconds since 1970."""
        self.cells: list[CellRecord] = []
        self.span_seconds = 0.0
        """Seconds from the start to the end of the last cell so far."""
        self._seconds_in_last_cell = 0.0
        """Seconds in the cell that ends it, which is not among the cells until it ends."""
        self.failed = False
        """True if an error was shown in it."""
        self._last_error_id = 0
        """Identity of the last error that was shown."""
        self.ooms = 0
        """Number of out-of-memory errors."""
        self.remarks: list[str] = []
        """Notes for its report."""

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self.started

    def begin(self) -> None:
        """Start the clock; errors that were shown before are not the experiment's."""
        self.started = perf_counter()
        self.started_at = time()
        self._last_error_id = last_error_id()

    def note_last_error(self, identity: int) -> None:
        """Record the identity of the last error shown; a new one marks the experiment as failed.

        Call it often enough that at most one error is shown between two calls: an error is created
        while the previous one is alive, but a later one may reuse that identity.
        """
        if identity != self._last_error_id:
            self.failed = True
        self._last_error_id = identity

    def ran_out_of_memory(self) -> None:
        """Count an out-of-memory error."""
        self.ooms += 1

    def code_ended(self, *, failed: bool) -> None:
        """Record that the code of one of its cells has ended."""
        if failed:
            self.failed = True
        self.span_seconds = self.elapsed_seconds

    def end_requested(self, seconds_in_cell: float) -> None:
        """Record that its end was requested, so many seconds after it or its running cell began."""
        self._seconds_in_last_cell = seconds_in_cell
        if seconds_in_cell or not self.span_seconds:
            self.span_seconds = self.elapsed_seconds

    def seconds(self, in_running_cell: float | None = None) -> float:
        """Return the seconds in its finished cells, and in the one that is not among them yet: the
        running cell, given by the caller, or the cell that ends the experiment.
        """
        if in_running_cell is None:
            in_running_cell = self._seconds_in_last_cell
        return sum(cell.duration_seconds for cell in self.cells) + in_running_cell

    def completed(self, record: ExperimentRecord) -> ExperimentRecord:
        """Return the record of the ended experiment with all cells so far: its last cell has ended
        after it.
        """
        seconds = self.seconds()
        return replace(
            record,
            cells=tuple(self.cells),
            duration_seconds=seconds,
            # Its first cell may have begun before it.
            span_seconds=max(seconds, self.span_seconds),
        )
