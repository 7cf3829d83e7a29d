"""The cells that run now, and what each has bound so far.

Events do not come in neat pairs: a magic that runs cells nests them, a blank cell ends without having begun, a
broken one never ends, and subshells interleave. So cells are found again by the identity of their ``info``.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipygpumem.measuring.meter import Measurement
    from ipygpumem.model import RecoveryRecord, Usage
    from ipygpumem.notebook.commands.autofit import CellFit
    from ipygpumem.notebook.experiments.experiment import Experiment
    from ipygpumem.notebook.experiments.names import SeenCode
    from ipygpumem.reports.content import Report


@dataclass(eq=False)
class Cell:
    """One cell between its first and its last event."""

    info: Any
    nested: bool
    thread: int
    measurement: Measurement
    experiment: str | None = None
    started: float = field(default_factory=time.perf_counter)
    started_at: float = field(default_factory=time.time)
    last_error: int = 0
    """Identity of the last error that was shown before the cell."""
    code: list[SeenCode] = field(default_factory=list)
    saved_early: list[str] = field(default_factory=list)
    """Names that the open scope keeps in case that the code does not come to tell of them."""
    names_before: set[str] | None = None
    """The notebook's names when it began, or when a scope of another thread did."""
    ending: list[Experiment] = field(default_factory=list)
    """Experiments that end with this cell."""
    closers: list[Callable[[], list[Report]]] = field(default_factory=list)
    """What else ends with this cell, and first of all: each is called once and returns its reports."""
    reports: list[Report] = field(default_factory=list)
    """What the closers said."""
    recovery: RecoveryRecord | None = None
    """A recovery that an experiment's exit made before the cell was over."""
    at_end: tuple[Usage, ...] = ()
    """What its code had when it ended, where something may give memory back after that."""
    ended: list[Experiment] = field(default_factory=list)
    """Experiments that have ended with it."""
    after: list[Report] = field(default_factory=list)
    """What is said after its own line, but for those experiments."""
    over: bool = False
    """Its end has been seen; what another thread still has to say about it comes too late."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Where the cell runs: the kernel knows from it to which cell an output belongs."""
    fit: CellFit | None = None
    """What %%autofit made of it."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Messages of out-of-memory errors that left a budget's block, and who refused the memory, in words."""
    interrupted: bool = False
    """A Ctrl-C struck when its code had ended."""
    released_by: int = 0
    """Identity of an error that ended an experiment inside the cell: its frames belong to that experiment."""

    def close(self) -> None:
        """Call the closers."""
        while self.closers:
            self.reports += self.closers.pop()()

    def end_fit(self) -> list[Report]:
        """Return the report of its %%autofit, if it has one."""
        return self.fit.end() if self.fit is not None else []


class CellStack:
    """The running cells of a shell, innermost last."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        self.ended_inside = False
        """Whether the last cell that ended was one inside another, whose code gets its result."""

    def push(self, info: Any, measurement: Measurement) -> Cell:
        """Note that a cell begins."""
        thread = threading.get_ident()
        nested = any(cell.thread == thread for cell in self._cells)
        cell = Cell(info, nested=nested, thread=thread, measurement=measurement)
        self._cells.append(cell)
        return cell

    def pop(self, result: Any) -> tuple[Cell | None, list[Cell]]:
        """Return the cell that ``result`` ends, and those inside it that never got an end.

        The cell is None where it never began. ``result`` may be None; then the innermost cell ends.
        """
        ended, lost = self._ended(result)
        self.ended_inside = ended is not None and ended.nested
        for cell in (ended, *lost) if ended is not None else ():
            cell.over = True
            cell.close()
        self._cells = [cell for cell in self._cells if not cell.over]
        return ended, lost

    def _ended(self, result: Any) -> tuple[Cell | None, list[Cell]]:
        info = getattr(result, "info", None)
        if len(self._cells) == 1 and self._cells[0].info is info is not None:
            return self._cells[0], []
        thread = threading.get_ident()
        own = [cell for cell in self._cells if cell.thread == thread]
        if result is None:
            ended = own[-1] if own else None
        else:
            ended = next((cell for cell in reversed(self._cells) if cell.info is info), None)
            # After an exception that escaped the runner, IPython makes a new info for the same cell.
            ended = ended or next((cell for cell in reversed(own) if _same_source(cell.info, info)), None)
        return ended, own[own.index(ended) + 1 :] if ended in own else []

    def outermost(self) -> Cell | None:
        """Return the cell that has run for longest, in whichever thread; asked from any thread."""
        return next((cell for cell in self._cells if not cell.nested), None)

    def running(self, thread: int | None = None) -> list[Cell]:
        """Return the cells that run in a thread, by default in this one, innermost last."""
        thread = threading.get_ident() if thread is None else thread
        return [cell for cell in self._cells if cell.thread == thread]

    def of_others(self, thread: int) -> list[Cell]:
        """Return the cells that run in other threads than ``thread``."""
        return [cell for cell in self._cells if cell.thread != thread]

    def close(self) -> None:
        """Call the closers of all cells."""
        for cell in self._cells:
            cell.close()

    def __len__(self) -> int:
        return len(self._cells)


def _same_source(one: Any, other: Any) -> bool:
    source = getattr(other, "raw_cell", None)
    return type(source) is str and getattr(one, "raw_cell", None) == source
