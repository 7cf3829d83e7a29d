"""The budgets in force in one shell: of experiments, and over ``with`` blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ipygpumem.fitting.budgets import Budget, who_refused
from ipygpumem.notebook.cell import Part
from ipygpumem.notebook.context import Context
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.reports.layout import note


class Budgets(Part):
    """Keeps the budgets in force in one shell."""

    def __init__(self, context: Context, recovery: Recovery) -> None:
        self.context = context
        self.recovery = recovery
        self.in_force: list[Budget] = []
        """Innermost last."""

    def of_block(self, sizes: Mapping[str, int]) -> Budget:
        """Return a budget for a ``with`` block."""
        return Budget(sizes, around=self.in_force, leaving=self._leaves)

    def limits(self) -> dict[str, int]:
        """Return the limits in force, in bytes by device."""
        return {device: limit for budget in self.in_force for device, limit in budget.limits.items()}

    def who_refused(self, message: str) -> str:
        """Return which budget or other limit an out-of-memory error speaks of, in words; empty if none."""
        return who_refused(message, self.in_force)

    def _leaves(self, budget: Budget, error: BaseException | None) -> None:
        try:
            if error is not None:
                self.recovery.leaves_budget(error)
        finally:
            budget.stop()  # it may add notes
        self.context.screen.show([note(text) for text in budget.notes])

    def close(self) -> None:
        """Restore the limits from before all budgets."""
        for budget in list(self.in_force):
            budget.stop()
