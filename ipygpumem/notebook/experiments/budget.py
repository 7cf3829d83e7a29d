"""A budget over a notebook's cells: of an experiment, or over a ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from types import TracebackType

from ipygpumem.fitting.budgets import Budget, BudgetRecord
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.experiments.budgets import Budgets
from ipygpumem.notebook.ipython.sources import running_cell
from ipygpumem.notebook.ticker import Tick
from ipygpumem.reports.layout import note
from ipygpumem.units import format_bytes


class NotebookBudget(Budget):
    """A budget that always reports a crossing at the cell's end, and while it runs if a tick sees it."""

    def __init__(self, budgets: Budgets, sizes: Mapping[str, int], of: str = "the with block") -> None:
        super().__init__(sizes, budgets.tools.meter, budgets.limits, of)
        self._budgets = budgets
        self._noted: Cell | None = None
        self._stop_watching: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Set the limits, start measuring and watch."""
        super().start()
        self._budgets.in_force.append(self)
        if "ram" in self.sizes:
            self._stop_watching = self._budgets.tools.ticker.listen(self._watch, after_seconds=0.25)

    def _watch(self, tick: Tick) -> None:
        """Report a crossing while the cell runs; called in a thread of ours."""
        reading = tick.readings.get("cpu")
        if reading is None or tick.cell is self._noted or not self.crossed(reading.current_bytes):
            return
        self._noted = tick.cell
        text = f"ipygpumem: {self._here()} has crossed the RAM budget of {format_bytes(self.sizes['ram'])}: "
        text += f"{format_bytes(reading.current_bytes)} are in use\n"
        with contextlib.suppress(Exception):  # whatever stands for stderr now
            tick.cell.context.run(sys.stderr.write, text)

    def _here(self) -> str:
        return f"cell {running_cell(self._budgets.tools.shell)}"

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
        if self in self._budgets.in_force:
            self._budgets.in_force.remove(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        known = len(self.crossings)
        try:
            if error is not None:
                with contextlib.suppress(MemoryError):  # the user's own error matters more
                    self._budgets.recovery.leaves_budget(error)
        finally:
            record = self.stop()
        self._budgets.tools.screen.show([note(text) for text in (*record.notes, *record.crossings[known:])])
