"""A cell's way from its first event to its report. What features add to it are the parts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ipygpumem.freeing.reclaim import fallen
from ipygpumem.introspect import text_of, type_name
from ipygpumem.model import CellRecord
from ipygpumem.notebook.cell import Cell, Part
from ipygpumem.notebook.context import Context
from ipygpumem.notebook.ipython.sources import describing_line, digest_of
from ipygpumem.notebook.ipython.stored_errors import error_of, last_error, shown_since
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.reports import content
from ipygpumem.reports.layout import Report, note


class Session:
    """Takes each cell of one shell on its way: measure, give back, record, report."""

    def __init__(self, context: Context, recovery: Recovery, parts: Sequence[Part]) -> None:
        self._context = context
        self._recovery = recovery
        self.parts = tuple(parts)  # replaced as a whole: one may join or leave while they have their turn
        self.history: deque[CellRecord] = deque(maxlen=context.config.history_length)

    def cell_begins(self, info: Any) -> None:
        """Start measuring a cell."""
        context = self._context
        cell = context.cells.push(info, context.meter.start())
        cell.last_error = last_error()
        for part in self.parts:
            part.cell_begins(cell)
        cell.started = time.perf_counter()

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Note code that runs next in a cell."""
        for part in self.parts:
            part.code_seen(tree, may_change=may_change, is_timed=is_timed)

    def cell_ends(self, result: Any) -> None:
        """Take the cell that ``result`` ends on the rest of its way."""
        ended_at = time.perf_counter()
        cell, lost = self._context.cells.pop(result)
        for other in lost:  # as after an error
            self._context.meter.drop(other.measurement)
        if cell is None:
            self._shown()
            return
        cell.number = getattr(result, "execution_count", None)
        try:
            self._finish(cell, result, ended_at - cell.started)
        except BaseException:
            self._context.meter.drop(cell.measurement)  # an interrupt may come at any point
            raise

    def cell_has_ended(self, result: Any) -> None:
        """End the cell after all if something struck before it had left the stack; else all others would nest in it.

        IPython prints what strikes in a callback, even a Ctrl-C, and calls the next.
        """
        if self._context.cells.has(result):
            self.cell_ends(result)

    def _finish(self, cell: Cell, result: Any, seconds: float) -> None:
        """Give back what ends with the cell; only then make the records, so that they agree."""
        error, reports, record = error_of(result), cell.above, None
        try:
            try:
                self._give_back(cell, error)
            finally:
                try:
                    measured = self._measure(cell, error, seconds)
                    if not cell.nested:
                        record = measured
                        self.history.append(record)
                        reports += self._line(cell, record, error)
                finally:
                    reports += cell.below
                    self._all(lambda part: reports.extend(part.cell_ended(cell, record)))
        except KeyboardInterrupt:
            cell.interrupted = True
            self._context.meter.drop(cell.measurement)
        finally:
            self._show(cell, result, reports)
            self._shown()

    def _give_back(self, cell: Cell, error: BaseException | None) -> None:
        """Release what the cell's error holds, and let the parts give back what ends with the cell."""
        shown = error or shown_since(cell.last_error)
        failed = error is not None or last_error() != cell.last_error
        # Where memory has run out, anything may fail until recovery has given it back: each goes on after the other.
        try:
            self._all(lambda part: part.code_ended(cell, failed=failed))
        finally:
            try:
                if shown is not None or cell.ending:
                    cell.at_end = self._context.meter.settle(cell.measurement)
            finally:
                try:
                    cell.below += self._recovery.cell_ended(cell, shown)
                    cell.end()
                finally:
                    self._all(lambda part: part.give_back(cell))

    def _all(self, call: Callable[[Part], object]) -> None:
        """Call all parts in their order, even if one fails or is interrupted; then that is raised."""
        failed: BaseException | None = None
        for part in self.parts:
            try:
                call(part)
            except BaseException as error:  # noqa: PERF203  # each part has its turn
                failed = failed if isinstance(failed, KeyboardInterrupt) else error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # else it would refer to this frame, and the frame to it

    def _measure(self, cell: Cell, error: BaseException | None, seconds: float) -> CellRecord:
        """Collect garbage where that is cheap, and return what the cell has cost."""
        context = self._context
        if not (cell.at_end or cell.nested) and context.config.collect_garbage:  # else it was done, or is done after it
            try:
                context.garbage.cell_ended(seconds, context.config.garbage_share, in_scope=cell.in_scope)
            except KeyboardInterrupt:  # what the cell cost is known all the same
                cell.interrupted = True
        usages = context.meter.stop(cell.measurement)
        now = {usage.device: usage.after_bytes for usage in usages}
        source = text_of(getattr(cell.info, "raw_cell", None))
        return CellRecord(
            execution_count=cell.number,
            cell_id=getattr(cell.info, "cell_id", None),
            experiment=cell.experiment,
            started_at=cell.started_at,
            duration_seconds=seconds,
            success=error is None,
            error=None if error is None else type_name(error),
            usages=usages,
            source_digest=digest_of(source),
            source_line=describing_line(source.partition("\n")[0] if _never_ran(source, error) else source),
            recovery=None if cell.recovery is None else replace(cell.recovery, now=now),
            reclaimed=fallen({usage.device: usage.after_bytes for usage in cell.at_end}, now),
        )

    def _line(self, cell: Cell, record: CellRecord, error: BaseException | None) -> list[Report]:
        """Return the line of a cell, if it is to be shown."""
        context = self._context
        remarks = self._recovery.remarks(cell, error or shown_since(cell.last_error))
        remarks += [line for part in self.parts for line in part.remarks(record)]
        context.screen.scales.note(record.usages)
        if not (context.config.report and (remarks or self._is_shown(record))):
            return []
        report = content.cell_report(record, context.screen.scales)
        return [replace(report, lines=(*report.lines, *remarks)) if remarks else report]

    def _is_shown(self, record: CellRecord) -> bool:
        """Whether a cell's line is shown, as far as the cell decides that."""
        long_enough = record.duration_seconds >= self._context.config.min_cell_seconds
        return long_enough and not (self._context.config.quiet and content.is_quiet(record))

    def _show(self, cell: Cell, result: Any, reports: list[Report]) -> None:
        """Show what there is to say of a cell, in spite of a Ctrl-C: it may wait long for much output of the cell's."""
        for _ in range(2):
            if cell.interrupted:
                reports += self._interrupted(result)
            try:
                self._context.screen.show(reports)
                break
            except KeyboardInterrupt:
                cell.interrupted = True

    def _interrupted(self, result: Any) -> list[Report]:
        """Let a late Ctrl-C, after the cell's code, stop what comes next; IPython would lose it."""
        for outer in self._context.cells.running():
            outer.interrupted_inside = True
        if getattr(result, "error_in_exec", self) is not None:
            return []
        result.error_in_exec = KeyboardInterrupt("the cell's code had ended")
        return [note("Ctrl-C came when the cell's code had ended")]

    def _shown(self) -> None:
        for part in self.parts:
            part.shown()


def _never_ran(source: str, error: BaseException | None) -> bool:
    """Whether the line of a cell magic was wrong, so that none of the cell's code has run."""
    return source.startswith("%%") and error is not None and type_name(error) == "UsageError"
