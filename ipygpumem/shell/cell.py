"""Keeps the running cells of a shell, and defines the hooks of their observers (``CellObserver``).

Events are not always paired: a magic that runs cells nests them, a blank cell ends without having
begun, a broken one never ends, and subshells interleave. So cells are identified by their ``info``
object.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import get_ident
from time import perf_counter, time
from typing import Any, NamedTuple, Protocol

from ipygpumem.introspect import text_of
from ipygpumem.meter.meter import Span
from ipygpumem.probes.children import EndedChildren
from ipygpumem.records import Cause, CellRecord, RecoveryRecord, Usage
from ipygpumem.report.layout import Report
from ipygpumem.scope.bindings import Bindings, bindings_of

HISTORY_LENGTH = 10_000
"""Maximum number of finished cells, experiments or traces to keep."""


class SeenCode:
    """Code of a cell, analysed before it runs.

    Args:
        tree: its syntax tree.
        is_final: True if the tree runs as it is, apart from the look-ups that we add to it; False
            if a user's transformer may still change it.

    Attributes:
        reported: names whose bindings the instrumented code reports to the scopes; empty if it is
            not instrumented.
    """

    def __init__(self, tree: ast.AST, *, is_final: bool) -> None:
        self._tree = tree
        self._is_final = is_final
        self._bindings: Bindings | None = None
        self.reported = frozenset[str]()

    def bindings(self) -> Bindings:
        """Return the bindings of the code; those of a final tree are computed once."""
        if self._bindings is not None:
            return self._bindings
        bindings = bindings_of(self._tree)
        if self._is_final:
            self._bindings = bindings
        return bindings


class CellCode:
    """The code of a cell, in one or several pieces, and the names that it binds; set by the
    observer of code.
    """

    def __init__(self) -> None:
        self.pieces: list[SeenCode] = []
        """The code that was analysed before it ran; several pieces if the cell runs code itself, or
        if a user's transformer changed the code after the first analysis.
        """
        self.has_unknown = False
        """True if a further piece could not be analysed, which may bind any name."""
        self.names_saved_early: list[str] = []
        """Names that the innermost scope saved when it saw code that a user's transformer may still
        change. Instrumented code reports its bindings, and the scope drops these saves.
        """
        self.objects_before_statement: dict[str, object] = {}
        """The objects, by name, that its running statement may replace; noted while only scopes of
        other threads are open.
        """
        self._names_before: set[str] | None = None

    def note_names(self, namespace: Collection[str]) -> None:
        """Note the notebook's names, with which ``names_added`` compares; only the first call for a
        cell does so, at its start or when a scope of another thread opens.
        """
        if self._names_before is None:
            self._names_before = set(namespace)

    def names_added(self, namespace: Mapping[str, object]) -> set[str]:
        """Return the notebook's names that are new since ``note_names``; none if that was never
        called.
        """
        if self._names_before is None:
            return set()
        return namespace.keys() - self._names_before

    def bound_without_report(self) -> set[str]:
        """Return the names that the code may bind without reporting it to the scopes."""
        names = set[str]()
        for code in self.pieces:
            names |= code.bindings().bound - code.reported
        return names

    def bindings(self) -> Bindings:
        """Return the bindings of the code that runs last."""
        if self.pieces:
            return self.pieces[-1].bindings()
        return Bindings()


class CellScopes:
    """The experiments of a cell; set by the manager of experiments."""

    def __init__(self) -> None:
        self.innermost: str | None = None
        """Name of the innermost experiment around it."""
        self.any_open = False
        """True if an experiment was open in any thread when its code ended."""
        self.ending: list[Any] = []
        """Experiments that the cell's end ends."""
        self.ended: list[Any] = []
        """Experiments that its end has ended, and the ones inside them, innermost first."""

    def forget(self) -> None:
        """Drop the experiments."""
        self.ending, self.ended = [], []


class CellMeasurement:
    """The time and memory of a cell; set by the session."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The cell's execution count, once it has ended."""
        self.started = perf_counter()
        """The start by the clock that durations are measured with."""
        self.started_at = time()
        """The start as seconds since 1970."""
        self.span: Span | None = None
        """None if measuring failed, and once it is read."""
        self.at_end: tuple[Usage, ...] = ()
        """Usage when its code ended, if memory may be freed after that."""
        self.record: CellRecord | None = None
        """Its record, once it has ended and been measured."""
        self.is_ours = False
        """True if it has only our commands: no line, and no row in the history."""
        self.is_rejected = False
        """True if our cell magic in its first line was wrong, so that none of its code has run."""


class GuardAction(NamedTuple):
    """How the memory guard caused an error of a cell."""

    text: str
    """Continues a sentence about the guard: ``stopped the cell: ...``, ``refused 1 GiB: ...``."""
    advice: str = ""
    is_sure: bool = True
    """False if the guard may not have caused the error."""


class CellErrors:
    """The errors of a cell; set by the session, the recovery and the memory guard."""

    def __init__(self) -> None:
        self.last_id_before = 0
        """Identity of the last error that was shown before the cell."""
        self.failed = False
        """True if an error ended the cell, or was shown in it."""
        self.signal_after_code: BaseException | None = None
        """The exception of a signal that arrived after the cell's code had ended.

        A Ctrl-C, or the exception of a user's signal handler.
        """
        self.interrupted_inside = False
        """True if a signal's exception came after the code of a cell nested in it had ended, where
        it could not be raised.
        """
        self.guard_action: GuardAction | None = None
        """How the memory guard caused the cell's last error; None if it did not."""
        self.recovery: RecoveryRecord | None = None
        """A recovery during the cell or at its end."""
        self.refusals: dict[str, Cause | None] = {}
        """The limit that refused the memory of each of its out-of-memory errors, by the error's
        message; None if the device refused it.
        """
        self.error_id_to_release = 0
        """Identity of the error that ended an experiment inside the cell.

        Its frames are released at the cell's end.
        """

    @property
    def is_from_guard(self) -> bool:
        """True if the memory guard has surely caused the cell's last error."""
        return self.guard_action is not None and self.guard_action.is_sure


class CellChildren:
    """The child processes that end in a cell."""

    def __init__(self) -> None:
        self.ended_before: EndedChildren | None = None
        """The child processes that had ended before its code."""
        self.peak_bytes: int | None = None
        """Growth at its peak of the child process in which the cell ran, or of one that ended."""
        self.touched_bytes = 0
        """Bytes that child processes that ended in it have touched, if their peak is not known."""

    def ran_in(self, peak_bytes: int) -> None:
        """Note the peak of a child process that ran a part of the cell."""
        self.peak_bytes = max(self.peak_bytes or 0, peak_bytes)


class Cell:
    """One cell between its first and its last event."""

    def __init__(self, info: Any, *, is_nested: bool, thread: int) -> None:
        self.info = info
        """IPython's ``ExecutionInfo`` of it; None for a stand-in."""
        self.source = text_of(getattr(info, "raw_cell", None))
        """Its text as the user has written it; empty if it is unknown."""
        self.is_nested = is_nested
        """True if a magic in another cell of the thread runs it."""
        self.thread = thread
        self.code = CellCode()
        self.scopes = CellScopes()
        self.measurement = CellMeasurement()
        self.errors = CellErrors()
        self.children = CellChildren()
        self.at_code_end: list[Callable[[], list[Report]]] = []
        """Functions that are called once when its code has ended, before anything else, the last
        one first. Their reports are shown above its line.
        """
        self.after_recovery: list[Callable[[], list[Report]]] = []
        """Functions that are called once after the memory held by its error was freed. Their
        reports are shown below its line.
        """
        self.above: list[Report] = []
        """The reports to show, in their order: at first those above its line. At its end the
        session appends the line, and then the reports ``below``.
        """
        self.below: list[Report] = []
        """Reports to show below its line."""
        self.fit: Any = None
        """The ``CellFit`` called by the loop around its body (see ``loop_over_body``), if any."""
        self.is_over = False
        """True once its end event has arrived; other threads may no longer change it."""

    def run_at_code_end(self) -> None:
        """Call the functions ``at_code_end``."""
        while self.at_code_end:
            self.above += self.at_code_end.pop()()

    def run_after_recovery(self) -> None:
        """Call the functions ``after_recovery``."""
        while self.after_recovery:
            self.below += self.after_recovery.pop()()


class CellObserver(Protocol):
    """Observes cells: the session calls each hook of all observers in the cell's own thread.

    An observer may have a text ``observed_for``, its feature in words for the user.
    """

    def cell_begins(self, cell: Cell) -> None:
        """Prepare for a cell; its measurement has begun, its timer has not."""

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Return reports to show below a cell's line.

        ``cell.measurement.record`` is None if the cell could not be measured.
        """

    def cell_shown(self) -> None:
        """Note that a cell's reports have been shown; the only hook called for the cell that loads
        the extension.
        """

    def close(self) -> None:
        """Undo everything still in force, because the extension is being unloaded."""


class CellStack:
    """The running cells of a shell, innermost last."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        self.failed_at: dict[int | None, int] = {}
        """Lines at which cells have failed, by execution count."""
        self._threads: set[int] = set()
        self.missed: Any = None
        """The ``info`` of a running cell whose start hook failed."""

    def push(self, info: Any) -> Cell:
        """Add a cell that begins, and return it."""
        thread = get_ident()
        is_nested = thread in [cell.thread for cell in self._cells]
        self._threads.add(thread)
        cell = Cell(info, is_nested=is_nested, thread=thread)
        self._cells.append(cell)
        return cell

    @property
    def in_several_threads(self) -> bool:
        """True once cells have begun in more than one thread, as in subshells."""
        return len(self._threads) > 1

    def pop(self, result: Any) -> tuple[Cell | None, list[Cell]]:
        """Remove the cell that ``result`` ends, with the cells nested in it whose ends were not
        reported, and call their functions ``at_code_end``.

        Args:
            result: IPython's result of the cell; None ends the innermost one of this thread.

        Returns:
            The cell, or None if it never began; and the cells nested in it.
        """
        ended, without_end = self._ended_cells(result)
        self.missed = None
        over = [] if ended is None else [ended, *without_end]
        for cell in over:
            cell.is_over = True
            cell.run_at_code_end()
        self._cells = [cell for cell in self._cells if not cell.is_over]
        return ended, without_end

    def forget(self, result: Any) -> None:
        """Remove the cell that ``result`` ends, because its end hook has failed."""
        info = getattr(result, "info", None)
        for cell in self._cells:
            cell.is_over |= cell.info is info is not None
        self._cells = [cell for cell in self._cells if not cell.is_over]

    def has(self, result: Any) -> bool:
        """Return True if the cell that ``result`` ends is still running."""
        info = getattr(result, "info", None)
        return info is not None and any(cell.info is info for cell in self._cells)

    def _ended_cells(self, result: Any) -> tuple[Cell | None, list[Cell]]:
        """Return the cell that ``result`` ends, if it has begun, and the cells nested in it, whose
        ends were not reported.
        """
        info = getattr(result, "info", None)
        if len(self._cells) == 1 and self._cells[0].info is info is not None:
            return self._cells[0], []  # the usual case, without a further call
        cells_here = self.running()
        if result is not None:
            ended = self._cell_of(info, cells_here)
        else:
            ended = cells_here[-1] if cells_here else None
        if ended not in cells_here:
            return ended, []
        return ended, cells_here[cells_here.index(ended) + 1 :]

    def _cell_of(self, info: Any, cells_here: list[Cell]) -> Cell | None:
        """Return the innermost cell with this info; else the one of ``cells_here`` with its source.

        After an exception that escaped the runner, IPython creates a new info for the same cell.
        """
        for cell in reversed(self._cells):
            if cell.info is info:
                return cell
        for cell in reversed(cells_here):
            if _same_source(cell.info, info):
                return cell
        return None

    def outermost(self) -> Cell | None:
        """Return the cell that has been running longest, of all threads; any thread may call it."""
        return next((cell for cell in self._cells if not cell.is_nested), None)

    def running(self, thread: int | None = None) -> list[Cell]:
        """Return the cells running in a thread, by default this one, innermost last."""
        thread = get_ident() if thread is None else thread
        return [cell for cell in self._cells if cell.thread == thread]

    def outside(self, thread: int) -> list[Cell]:
        """Return the cells running in threads other than ``thread``."""
        return [cell for cell in self._cells if cell.thread != thread]

    def close(self) -> None:
        """Call the functions ``at_code_end`` of the running cells: the extension is unloaded."""
        for cell in self._cells:
            cell.run_at_code_end()


def _same_source(info: Any, other_info: Any) -> bool:
    """Return True if two of IPython's infos have the same source."""
    source = getattr(other_info, "raw_cell", None)
    return type(source) is str and getattr(info, "raw_cell", None) == source
