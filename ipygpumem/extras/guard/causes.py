"""Finds out whether the guard caused an error of a cell, and why."""

from __future__ import annotations

from ipygpumem.extras.guard.counting import stopped_text
from ipygpumem.extras.guard.interrupt import CellInterrupt, MemoryGuardError
from ipygpumem.extras.guard.memory import GuardedMemory
from ipygpumem.extras.guard.refusal import Refusal, refusal_in
from ipygpumem.introspect import is_instance
from ipygpumem.reclaim.exceptions import chain


class Causes:
    """Explains errors of a cell, and keeps the last explanation for the report after the cell."""

    def __init__(self, memory: GuardedMemory, interrupt: CellInterrupt) -> None:
        self._memory = memory
        self._interrupt = interrupt
        self._text = ""

    def forget(self) -> None:
        """Forget the explanation of the last cell."""
        self._text = ""

    def note(self, text: str) -> None:
        """Keep an explanation; an empty one replaces none."""
        if text:
            self._text = text

    def take(self) -> str:
        """Return the last explanation, once; empty if the guard caused no error."""
        text, self._text = self._text, ""
        return text

    def explain(self, error: BaseException | None) -> str:
        """Return how the guard caused an error, or one that led to it; empty if it did not."""
        if error is None:
            return ""
        errors = list(chain(error))
        if any(is_instance(item, MemoryGuardError) for item in errors):
            return stopped_text(self._interrupt.left_bytes, self._memory.shares.whose)
        if self._memory.limit.is_users():
            return ""
        for item in errors:
            refusal = refusal_in(item)
            text = "" if refusal is None else self._refusal_text(refusal)
            if text:
                return text
        return ""

    def _refusal_text(self, refusal: Refusal) -> str:
        data_bytes = self._memory.now().data_bytes
        if data_bytes is None:  # allocations cannot be limited here
            return ""
        if (
            refusal.asked_bytes is not None
            and refusal.asked_bytes > self._memory.left.machine_bytes
        ):
            return ""  # the request cannot be met without the limit either
        return self._memory.counting.refusal_text(refusal, data_bytes)
