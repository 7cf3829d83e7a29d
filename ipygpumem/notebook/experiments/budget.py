"""Budgets over a notebook's cells: of an experiment, or over a ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from types import TracebackType

from ipygpumem.fitting.budgets import Budget, BudgetRecord
from ipygpumem.fitting.refusals import refusal
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.notebook.ticker import Tick
from ipygpumem.notebook.tools import Tools
from ipygpumem.reports.content import note
from ipygpumem.units import format_bytes


class Budgets(Part):
    """The budgets in force in one shell.

    Args:
        tools: the shell's.
        recovery: tells of errors that leave a budget's block.
    """

    def __init__(self, tools: Tools, recovery: Recovery) -> None:
        self.tools = tools
        self.recovery = recovery
        self.in_force: list[NotebookBudget] = []
        """Innermost last."""

    def make(self, sizes: Mapping[str, int], of: str = "the with block") -> NotebookBudget:
        """Return a budget of ``sizes``; ``of`` says whose it is."""
        return NotebookBudget(self, sizes, of)

    def limits(self) -> dict[str, int]:
        """Return the limits in force, by device: the tightest of all budgets."""
        found: dict[str, int] = {}
        for budget in self.in_force:
            for device, limit in budget.limits.items():
                found[device] = min(limit, found.get(device, limit))
        return found

    def who_refused(self, message: str) -> str:
        """Return which budget or other limit an out-of-memory error tells of, in words; empty if it is none."""
        refused = refusal(message)
        if refused is None:
            return ""
        by = [text for budget in self.in_force if (text := budget.note_refusal(refused))]
        return by[-1] if by else refused.told(f"the limit of {format_bytes(refused.limit_bytes)} on torch's allocator")

    def code_ended(self, cell: Cell, *, failed: bool) -> None:
        """Say which budgets the cell has crossed; an experiment that ends with it says so, too."""
        if not self.in_force or cell.nested:
            return
        usages = self.tools.meter.read(cell.measurement)
        peak = max((usage.peak_bytes for usage in usages if usage.device == "cpu"), default=0)
        where = "a cell" if cell.number is None else f"cell {cell.number}"
        cell.below += [note(item.note_crossing(where, peak)) for item in self.in_force if item.crossed(peak)]

    def close(self) -> None:
        """Put back what was there before."""
        for budget in list(self.in_force):
            budget.abandon()


class NotebookBudget(Budget):
    """A budget whose crossing is told while the cell runs, once it is noticed, and at the cell's end for sure."""

    def __init__(self, budgets: Budgets, sizes: Mapping[str, int], of: str) -> None:
        super().__init__(sizes, budgets.tools.meter, budgets.limits, of)
        self._budgets = budgets
        self._told: Cell | None = None
        self._stop_watching: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Set the limits, start measuring and watch."""
        super().start()
        self._budgets.in_force.append(self)
        if "ram" in self.sizes:
            self._stop_watching = self._budgets.tools.ticker.listen(self._watch, after_seconds=0.25)

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
        return f"cell {len(self._budgets.tools.shell.history_manager.input_hist_raw) - 1}"

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
