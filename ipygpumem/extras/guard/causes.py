"""Finds out whether the guard caused an error of a cell, and why."""

from __future__ import annotations

from ipygpumem.extras.guard.counting import stop_of_cell
from ipygpumem.extras.guard.interrupt import CellInterrupt, MemoryGuardError
from ipygpumem.extras.guard.memory import GuardedMemory
from ipygpumem.extras.guard.refusal import Refusal, refusal_in
from ipygpumem.introspect import is_instance
from ipygpumem.reclaim.exceptions import chain
from ipygpumem.shell.cell import GuardAction


class Causes:
    """Explains errors of a cell, and keeps the last explanation for the report after the cell."""

    def __init__(self, memory: GuardedMemory, interrupt: CellInterrupt) -> None:
        self._memory = memory
        self._interrupt = interrupt
        self._last: GuardAction | None = None

    def forget(self) -> None:
        """Forget the explanation of the last cell."""
        self._last = None

    def note(self, action: GuardAction | None) -> None:
        """Keep an explanation of the cell's last error; None leaves an earlier one in place."""
        if action is not None:
            self._last = action

    def take(self) -> GuardAction | None:
        """Return the last explanation, once; None if the guard caused no error."""
        action, self._last = self._last, None
        return action

    def explain(self, error: BaseException | None) -> GuardAction | None:
        """Return how the guard caused an error, or an error in its chain of causes; None if it did
        not.
        """
        if error is None:
            return None
        errors = list(chain(error))
        if any(is_instance(item, MemoryGuardError) for item in errors):
            return stop_of_cell(self._interrupt.left_bytes, self._memory.shares.whose)
        if self._memory.limit.is_set_by_user():
            return None  # the user's limit is in force instead of the guard's
        for item in errors:
            refusal = refusal_in(item)
            if refusal is None:
                continue
            action = self._explain_refusal(refusal)
            if action is not None:
                return action
        return None

    def _explain_refusal(self, refusal: Refusal) -> GuardAction | None:
        """Return how the guard refused an allocation; None if something else refused it."""
        data_bytes = self._memory.now().data_bytes
        if data_bytes is None:  # allocations cannot be limited here
            return None
        if (
            refusal.asked_bytes is not None
            and refusal.asked_bytes > self._memory.left.machine_bytes
        ):
            return None  # the request cannot be met without the limit either
        return self._memory.counting.explain(refusal, data_bytes)
