"""Keeps the budgets in force in one shell: their limits, refusals and crossings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.notebook.tools import Tools
from ipygpumem.reports.layout import note
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.fitting.budgets import Budget


class Budgets(Part):
    """The budgets in force in one shell.

    Args:
        tools: the shell's.
        recovery: reports errors that leave a budget's block.
    """

    def __init__(self, tools: Tools, recovery: Recovery) -> None:
        self.tools = tools
        self.recovery = recovery
        self.in_force: list[Budget] = []
        """Innermost last."""

    def limits(self) -> dict[str, int]:
        """Return the limits in force, by device: the tightest of all budgets."""
        found: dict[str, int] = {}
        for budget in self.in_force:
            for device, limit in budget.limits.items():
                found[device] = min(limit, found.get(device, limit))
        return found

    def who_refused(self, message: str) -> str:
        """Return which budget or other limit an out-of-memory error speaks of, in words; empty if it is none."""
        from ipygpumem.fitting.refusals import refusal  # loading the extension must stay fast

        refused = refusal(message)
        if refused is None:
            return ""
        by = [text for budget in self.in_force if (text := budget.note_refusal(refused))]
        return by[-1] if by else refused.text(f"the limit of {format_bytes(refused.limit_bytes)} on torch's allocator")

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
