"""Keeps the running cells of a shell, and defines what observes them (``Part``).

Events do not come in neat pairs: a magic that runs cells nests them, a blank cell ends without having begun, a
broken one never ends, and subshells interleave. So cells are found again by the identity of their ``info``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter, time
from typing import Any, NamedTuple

from ipygpumem.measuring.meter import Measurement
from ipygpumem.model import CellRecord, RecoveryRecord, Usage
from ipygpumem.reports.layout import Report
from ipygpumem.scopes.bindings import Bindings, bindings_of


class SeenCode(NamedTuple):
    """Code that runs in a cell."""

    tree: ast.AST
    noted: frozenset[str]
    """The names that it notes for the scopes itself."""

    def bindings(self) -> Bindings:
        """Return what it binds."""
        return bindings_of(self.tree)


class Cell:
    """One cell between its first and its last event."""

    def __init__(self, info: Any, *, nested: bool, thread: int) -> None:
        self.info = info
        self.nested = nested
        self.thread = thread
        self.measurement: Measurement | None = None
        """Its measurement; None if that failed."""
        self.number: int | None = None
        """IPython's count of it, once it is over."""
        self.experiment: str | None = None
        """The innermost experiment around it."""
        self.started = perf_counter()
        self.started_at = time()
        self.last_error = 0
        """Identity of the last error that was shown before the cell."""
        self.code: list[SeenCode] = []
        self.has_unseen_code = False
        """Some of its code could not be looked at: it may bind any name."""
        self.closers: list[Callable[[], list[Report]]] = []
        """Called once when its code is over, before anything else; what they return stands above its line."""
        self.enders: list[Callable[[], list[Report]]] = []
        """Called once when what its error held has been released; what they return stands below its line."""
        self.above: list[Report] = []
        self.below: list[Report] = []
        self.in_scope = False
        """An experiment was open when its code ended, in whichever thread."""
        self.ending: list[Any] = []
        """The experiments that end with it, and those that have ended so."""
        self.ended: list[Any] = []
        self.saved_early: list[str] = []
        """Names that the open scope saved before it was known whether the code reports them."""
        self.bound_outside: set[str] = set()
        """Names that its code bound outside of scopes while scopes of other threads were open."""
        self.names_before: set[str] | None = None
        """The notebook's names when it began, or when a scope of another thread did."""
        self.fit: Any = None
        """The ``CellFit`` that the loop around its body calls (see ``loop_over_body``), if there is one."""
        self.recovery: RecoveryRecord | None = None
        """A recovery that was made before the cell was over, or at its end."""
        self.at_end: tuple[Usage, ...] = ()
        """What its code had when it ended, where something may give memory back after that."""
        self.failed = False
        """An error ended it, or was shown in it."""
        self.over = False
        """Its end has been seen; what another thread still has to say about it comes too late."""
        self.interrupted = False
        """A Ctrl-C struck when its code had ended."""
        self.interrupted_inside = False
        """A Ctrl-C struck when the code of a cell inside it had ended, where nothing can be raised."""
        self.refusals: dict[str, str] = {}
        """Messages of its out-of-memory errors, and who refused the memory, in words."""
        self.released_by = 0
        """Identity of an error that ended an experiment inside the cell: its frames belong to that experiment."""

    def close(self) -> None:
        """Call the closers."""
        while self.closers:
            self.above += self.closers.pop()()

    def end(self) -> None:
        """Call the enders."""
        while self.enders:
            self.below += self.enders.pop()()


class Part:
    """Goes along with cells. The session calls the hooks of all parts, in this order, in the cell's own thread."""

    def cell_begins(self, cell: Cell) -> None:
        """Prepare for a cell; it has been measured, and its time is not counted yet."""

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Note code that runs next.

        Args:
            tree: its syntax tree.
            may_change: nobody else changes the tree after us.
            is_timed: %timeit runs it: its names never reach the notebook, and it must not get slower.
        """

    def code_ended(self, cell: Cell, *, failed: bool) -> None:
        """Note that a cell's code is over; nothing has been given back yet."""

    def give_back(self, cell: Cell) -> None:
        """Give back what ends with a cell; what its error held has been released."""

    def remarks(self, record: CellRecord) -> Sequence[str]:
        """Return what to add to the line of a cell that is over; the line is shown if anybody adds to it."""
        return ()

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Return what to show below a cell's line.

        Args:
            cell: what is over.
            record: what it cost; None inside another cell, whose record has it, and after an interrupt.
        """
        return ()

    def shown(self) -> None:
        """Note that a cell's reports have been shown; the cell that loads us has no other hook."""

    def close(self) -> None:
        """Undo what is still in force: the extension is being unloaded."""


class CellStack:
    """The running cells of a shell, innermost last."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        self.missed: Any = None
        """The ``info`` of a running cell whose beginning has failed."""
        self.ended_inside = False
        """Whether the last cell that ended was one inside another, whose code gets its result."""

    def push(self, info: Any) -> Cell:
        """Note that a cell begins."""
        thread = get_ident()
        nested = thread in [cell.thread for cell in self._cells]
        cell = Cell(info, nested=nested, thread=thread)
        self._cells.append(cell)
        return cell

    def pop(self, result: Any) -> tuple[Cell | None, list[Cell]]:
        """Return the cell that ``result`` ends, and those inside it that never got an end.

        The cell is None where it never began. ``result`` may be None; then the innermost cell ends.
        """
        ended, lost = self._ended(result)
        self.missed = None
        self.ended_inside = ended is not None and ended.nested
        for cell in (ended, *lost) if ended is not None else ():
            cell.over = True
            cell.close()
        self._cells = [cell for cell in self._cells if not cell.over]
        return ended, lost

    def forget(self, result: Any) -> None:
        """Remove a cell whose end has failed."""
        info = getattr(result, "info", None)
        for cell in self._cells:
            cell.over |= cell.info is info is not None
        self._cells = [cell for cell in self._cells if not cell.over]

    def has(self, result: Any) -> bool:
        """Whether the cell that ``result`` ends is still here."""
        info = getattr(result, "info", None)
        return info is not None and any(cell.info is info for cell in self._cells)

    def _ended(self, result: Any) -> tuple[Cell | None, list[Cell]]:
        info = getattr(result, "info", None)
        if len(self._cells) == 1 and self._cells[0].info is info is not None:
            return self._cells[0], []
        thread = get_ident()
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
        thread = get_ident() if thread is None else thread
        return [cell for cell in self._cells if cell.thread == thread]

    def of_others(self, thread: int) -> list[Cell]:
        """Return the cells that run in other threads than ``thread``."""
        return [cell for cell in self._cells if cell.thread != thread]

    def close(self) -> None:
        """Call the closers of all cells."""
        for cell in self._cells:
            cell.close()


def _same_source(one: Any, other: Any) -> bool:
    source = getattr(other, "raw_cell", None)
    return type(source) is str and getattr(one, "raw_cell", None) == source
