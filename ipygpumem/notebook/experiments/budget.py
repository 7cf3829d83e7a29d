"""Budgets over a notebook's cells: of an experiment, or over a ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from ipygpumem.fitting.budgets import Budget, BudgetRecord
from ipygpumem.model import Usage
from ipygpumem.reports.content import Report, note
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.notebook.cell import Cell
    from ipygpumem.notebook.session import Session
    from ipygpumem.notebook.ticker import Tick


def limits(session: Session) -> dict[str, int]:
    """Return the limits in force, by device: the tightest of all budgets."""
    found: dict[str, int] = {}
    for budget in session.budgets:
        for device, limit in budget.limits.items():
            found[device] = min(limit, found.get(device, limit))
    return found


class NotebookBudget(Budget):
    """A budget whose crossing is told while the cell runs, once it is noticed, and at the cell's end for sure."""

    def __init__(self, session: Session, sizes: Mapping[str, int], of: str = "the with block") -> None:
        super().__init__(sizes, session.meter, lambda: limits(session), of)
        self._session = session
        self._told: Cell | None = None
        self._stop_watching: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Set the limits, start measuring and watch."""
        super().start()
        self._session.budgets.append(self)
        if "ram" in self.sizes:
            self._stop_watching = self._session.ticker.listen(self._watch, after_seconds=0.25)

    def _watch(self, tick: Tick) -> None:
        """Tell of a crossing while the cell runs; called in a thread of ours."""
        reading = tick.readings.get("cpu")
        if reading is None or tick.cell is self._told or not self.crossed(reading.current_bytes):
            return
        self._told = tick.cell
        text = f"ipygpumem: {self._here()} has crossed the RAM budget of {format_bytes(self.sizes['ram'])}: "
        text += f"{format_bytes(reading.current_bytes)} are in use\n"
        with contextlib.suppress(Exception):  # whatever stands for stderr now
            tick.cell.context.run(sys.stderr.write, text)

    def _here(self) -> str:
        """Name the running cell; IPython's versions differ in when they raise ``execution_count``."""
        return f"cell {len(self._session.shell.history_manager.input_hist_raw) - 1}"

    def cell_ended(self, number: int | None, usages: Iterable[Usage]) -> list[Report]:
        """Return a report if the cell of this number crossed the host's limit."""
        peak = max((usage.peak_bytes for usage in usages if usage.device == "cpu"), default=0)
        if not self.crossed(peak):
            return []
        return [note(self.note_crossing("a cell" if number is None else f"cell {number}", peak))]

    def stop(self, where: str = "") -> BudgetRecord:
        """Put back what was there before, and return the record."""
        self._leave()
        return super().stop(where or self._here())

    def abandon(self) -> None:
        """Put back what was there before, and measure no more."""
        self._leave()
        super().abandon()

    def _leave(self) -> None:
        self._stop_watching()
        if self in self._session.budgets:
            self._session.budgets.remove(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        known = len(self.crossings)
        try:
            if error is not None:
                with contextlib.suppress(MemoryError):  # the user's own error matters more
                    self._session.recoveries.leaves_budget(error)
        finally:
            record = self.stop()
        self._session.screen.show([note(text) for text in (*record.notes, *record.crossings[known:])])
