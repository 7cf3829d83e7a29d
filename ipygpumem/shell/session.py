"""Runs the cell lifecycle, from the first event to the report.

IPython's events call ``cell_begins``, ``cell_ends`` and ``ensure_cell_ended``. ``_finish`` and
``_after_code`` list the steps at a cell's end in their order.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter, time
from typing import Any

from ipygpumem import interrupts
from ipygpumem.introspect import type_name
from ipygpumem.inventory.devices.free_heap import FreeHeap
from ipygpumem.inventory.leaks.trends import Trends
from ipygpumem.meter import own_growth
from ipygpumem.probes.children import EndedChildren
from ipygpumem.reclaim.frames import cells_line
from ipygpumem.reclaim.reclaim import decrease
from ipygpumem.records import CellRecord, Usage
from ipygpumem.report.cells import begins_with_our_command, cell_report, is_quiet
from ipygpumem.report.layout import Report, note
from ipygpumem.shell.cell import HISTORY_LENGTH, Cell, CellObserver
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.shell.ipython.last_errors import error_of, last_error_id, shown_since
from ipygpumem.shell.ipython.sources import (
    MAY_RUN_NO_CODE,
    has_only_comments,
    has_only_our_commands,
)
from ipygpumem.shell.recovery import Recovery
from ipygpumem.shell.subscribers import Subscribers
from ipygpumem.units import MIB, format_bytes

_MOST_GARBAGE_SHARE = 0.05
"""Maximum predicted cost of collecting all garbage after a cell, as a share of the cell's CPU time.
"""
_MUCH_TOUCHED_BYTES = 64 * MIB
"""Bytes that ended child processes must have touched to be mentioned: a Python that imports NumPy
touches 30 MiB.
"""
_LINE_LENGTH = 80
_HEAD_LENGTH = 4000
"""Number of characters searched for a describing line."""
_NO_CODE = re.compile(r"^[ \t]*(?:[#%!]|(?:import|from) [^(\n]*(?:\([^)]*)?).*", re.MULTILINE)
"""Matches comments, magics and imports, also those in parentheses over several lines."""


class Session:
    """Runs the lifecycle of each cell of one shell: measure, free, record, report."""

    def __init__(
        self,
        context: ShellContext,
        recovery: Recovery,
        experiments: ExperimentManager,
        subscribers: Subscribers,
    ) -> None:
        self._context = context
        self._recovery = recovery
        self._experiments = experiments
        self._subscribers = subscribers
        self.trends = Trends()
        self._free_heap = FreeHeap()
        self.observers: tuple[CellObserver, ...] = (experiments,)
        """Replaced, not changed, because an observer may join during a hook."""
        self._waits_to_be_shown = False
        """True until the observers are notified that the last cell's reports were shown."""
        self.history: deque[CellRecord] = deque(maxlen=HISTORY_LENGTH)

    def cell_begins(self, info: Any) -> None:
        """Start measuring a cell, and call the observers.

        Args:
            info: IPython's ``ExecutionInfo`` of the cell.
        """
        context = self._context
        cell = context.cells.push(info)

        def measure() -> None:
            cell.errors.last_id_before = last_error_id()
            cell.children.ended_before = EndedChildren.now()
            cell.measurement.span = context.meter.span()

        steps: list[HookStep] = [(measure, "this cell's memory was not measured")]
        if "del" in cell.source or "reset" in cell.source:
            # Before the guard, an observer, limits the memory.
            watch = partial(self._experiments.survivors.deleted.watch, cell.source)
            steps.append((watch, "what stays alive of deleted objects will not be found"))
        for observer in self.observers:
            lost = f"{_feature(observer)} missed this cell's start"
            steps.append((partial(observer.cell_begins, cell), lost))
        context.isolation.run_all("pre_run_cell", *steps)
        # Our own work may have taken long.
        cell.measurement.started_at = time()
        cell.measurement.started = perf_counter()

    def cell_ends(self, result: Any) -> None:
        """Free, record and report the cell that ``result`` ends.

        Args:
            result: IPython's ``ExecutionResult`` of the cell; None if it has none.
        """
        ended_at = perf_counter()
        self._waits_to_be_shown = True
        cell, cells_without_end = self._context.cells.pop(result)
        for nested_cell in cells_without_end:
            self._forget_cell(nested_cell)
        if cell is None:
            leave_names = self._experiments.code.unseen_cell_ended
            self._context.isolation.run_all(
                "post_run_cell", (leave_names, "open experiments missed this cell's end")
            )
            self._notify_shown()
            return
        cell.measurement.number = getattr(result, "execution_count", None)
        try:
            self._finish(cell, result, ended_at - cell.measurement.started)
        except BaseException:
            self._forget_cell(cell)  # an interrupt may come at any point
            raise

    def ensure_cell_ended(self, result: Any) -> None:
        """End the cell if ``cell_ends`` was interrupted before removing it; later cells would nest
        in it.

        IPython prints an exception raised in a callback, even a Ctrl-C, and calls the next
        callback.
        """
        if self._context.cells.has(result):
            self.cell_ends(result)
        elif self._waits_to_be_shown:
            self._notify_shown()

    def fail_cell(self, error: BaseException, result: Any) -> None:
        """Pass on the exception of a signal that arrived in our hooks at a cell's end."""
        self._context.display.show(self._fail_with_signal(error, result))

    def _finish(self, cell: Cell, result: Any, seconds: float) -> None:
        """Free the memory that ends with the cell, then make the records, then show the reports.

        Everything is freed before a record is made, so that line, report and history agree.

        Args:
            cell: the cell.
            result: IPython's result of it.
            seconds: the time since its start.
        """
        isolation = self._context.isolation
        reports = cell.above
        steps: list[HookStep] = [
            (partial(self._after_code, cell), "memory that ends with this cell was not freed"),
            (partial(self._add_record, cell, seconds), "this cell's memory was not measured"),
            (lambda _: reports.extend(cell.below), "this cell's reports were not shown"),
        ]
        for observer in self.observers:
            end = partial(self._end_for_observer, cell, observer)
            steps.append((end, f"{_feature(observer)} missed this cell's end"))
        try:
            with interrupts.reraise_swallowed():
                isolation.run_all_with((result,), "post_run_cell", steps)
        except BaseException as error:
            if not interrupts.is_from_signal(error):
                raise
            interrupts.stop_listening()
            cell.errors.signal_after_code = error
            self._forget_cell(cell)
        steps = [
            (partial(self._show, cell, reports), "this cell's reports were not shown"),
            (self._notify_shown, "this cell's records were not passed on"),
            (partial(self._forget_cell, cell), "the measurement of this cell was not ended"),
        ]
        isolation.run_all_with((result,), "post_run_cell", steps)

    def _add_record(self, cell: Cell, seconds: float, result: Any) -> None:
        """Set the cell's record, and add it to the history and its line to the reports; a nested
        cell, or one that has only our commands, gets no line and no place in the history.
        """
        record = self._finish_measurement(cell, result, seconds)
        cell.measurement.record = record
        if record is not None and not cell.is_nested:
            cell.measurement.is_ours = _is_ours(cell, record)
            if cell.measurement.is_ours:
                own_growth.unreported_bytes.clear()
                return
            self.history.append(record)
            self._subscribers.add(record)
            cell.above += self._reports_with_line(cell, record, result)

    def _end_for_observer(self, cell: Cell, observer: CellObserver, _: Any) -> None:
        """Call an observer's hook for the end of a cell, and add its reports."""
        cell.above += observer.cell_ended(cell)

    def _after_code(self, cell: Cell, result: Any) -> None:
        """Free the memory of the cell's error, end its magics and its experiments, in this order:
        an experiment's report must not contain what its error still held.
        """
        error = error_of(result)
        cell.errors.failed = error is not None or last_error_id() != cell.errors.last_id_before
        if error is not None:
            line = cells_line(error)
            if line is not None:
                self._context.cells.failed_at[cell.measurement.number] = line
        experiments = self._experiments
        place = len(cell.below)  # above the reports of experiments
        steps: list[HookStep] = [
            (
                lambda cell, _: experiments.code_ended(cell),
                "the open experiments missed this cell's end",
            ),
            (self._fix_usage_at_end, "the memory freed after this cell was not measured"),
            (self._recover, "the memory held by this cell's error was not freed"),
            (
                lambda cell, _: cell.run_after_recovery(),
                "this cell's magic could not finish its report",
            ),
            (
                lambda cell, _: experiments.end_experiments_of(cell),
                "the names of this cell's experiment are kept",
            ),
            (
                lambda cell, _: self._report_recovery(cell, place),
                "the report of the recovery is missing",
            ),
        ]
        self._context.isolation.run_all_with((cell, result), "post_run_cell", steps)

    def _fix_usage_at_end(self, cell: Cell, result: Any) -> None:
        """Note the usage at the code's end, with its final peaks, if memory is freed after that."""
        if cell.measurement.span and (cell.scopes.ending or cell.errors.failed):
            cell.measurement.at_end = cell.measurement.span.fix_peaks()

    def _recover(self, cell: Cell, result: Any) -> None:
        """Free the memory of the cell's error, if it has one."""
        # no variable: this frame must not keep the error while its memory is freed
        self._recovery.cell_ended(cell, _error_of(cell, result) if cell.errors.failed else None)

    def _report_recovery(self, cell: Cell, place: int) -> None:
        """Insert the report of the recovery, which needs the memory left by ended experiments."""
        cell.below[place:place] = self._recovery.reports(cell)

    def _forget_cell(self, cell: Cell, _: Any = None) -> None:
        """End a cell's measurement, if it was not ended, and forget its experiments."""
        if cell.measurement.span is not None:
            cell.measurement.span.close()
        # Experiments refer to their cell: a cycle would keep them until the next collection.
        cell.scopes.forget()

    def _finish_measurement(self, cell: Cell, result: Any, seconds: float) -> CellRecord | None:
        """Collect garbage if that is cheap, stop measuring, and return the cell's record; None if
        the cell was not measured.
        """
        measurement = cell.measurement
        if measurement.span is None:
            return None
        # The end of an experiment, or a recovery, has collected already; after a nested cell, the
        # one around it will.
        is_collected = bool(measurement.at_end)
        if not (is_collected or cell.is_nested):
            self._collect(cell, seconds)
        usages, measurement.span = measurement.span.stop(), None
        bytes_now = {usage.device: usage.after_bytes for usage in usages}
        if cell.children.peak_bytes is None:
            _note_ended_children(cell, usages)
        error = error_of(result) if cell.errors.failed else None
        source = cell.source
        recovery = cell.errors.recovery
        if recovery is not None:
            recovery = replace(recovery, now=bytes_now)
        freed = dict[str, int]()
        if measurement.at_end:
            bytes_at_end = {usage.device: usage.after_bytes for usage in measurement.at_end}
            freed = decrease(bytes_at_end, bytes_now)
        return CellRecord(
            execution_count=measurement.number,
            cell_id=getattr(cell.info, "cell_id", None),
            experiment=cell.scopes.innermost,
            started_at=measurement.started_at,
            duration_seconds=seconds,
            success=error is None,
            error=None if error is None else type_name(error),
            usages=usages,
            source_digest=digest_of(source),
            source_line=describing_line(_code_that_ran(source, error)),
            recovery=recovery,
            freed=freed,
            child_peak_bytes=cell.children.peak_bytes,
        )

    def _collect(self, cell: Cell, seconds: float) -> None:
        """Collect garbage if that is cheap, or all of it after a line of a report.

        A signal's exception waits until the cell's record is made.
        """
        context = self._context
        if not context.config.collect_garbage:
            return
        try:
            context.garbage.cell_ended(
                seconds,
                _MOST_GARBAGE_SHARE,
                in_scope=cell.scopes.any_open,
                of_all_objects=self._has_advised_line(cell),
            )
        except BaseException as error:
            if not interrupts.is_from_signal(error):
                raise
            cell.errors.signal_after_code = error

    def _has_advised_line(self, cell: Cell) -> bool:
        """Return True if a cell has a line of a report, which said how much it frees."""
        advised = self._context.display.advised
        return bool(advised.texts) and advised.are_in(cell.source)

    def _reports_with_line(self, cell: Cell, record: CellRecord, result: Any) -> list[Report]:
        """Return the report with the line of a cell and its remarks; none if it is hidden."""
        context = self._context
        remarks = self._remarks(cell, record, result)
        context.display.scales.lengthen_for(record.usages)
        may_hide = context.config.quiet or begins_with_our_command(record)
        is_hidden = not remarks and may_hide and is_quiet(record)
        own_growth_text = ""
        if own_growth.unreported_bytes:  # taken even if the line is hidden
            own_growth_text = own_growth.take_growth_text(record.usages)
        if is_hidden or not context.config.report:
            return []
        if own_growth_text:
            remarks = [own_growth_text, *remarks]
        report = cell_report(record, context.display.scales)
        if remarks:
            report = replace(report, lines=(*report.lines, *remarks))
        return [report]

    def _remarks(self, cell: Cell, record: CellRecord, result: Any) -> list[str]:
        """Return the remarks below a cell's line. The record of free pages in the heap and the
        trends get the cell's figures.
        """
        error = _error_of(cell, result) if cell.errors.failed else None
        remarks = self._recovery.remarks(cell, error)
        if type(error) is NameError:
            from ipygpumem.shell.experiments import ended_names  # loading must stay fast

            remarks += ended_names.remarks_on_missing_name(error, self._context, self._experiments)
        remarks += self._free_heap.remark(record, cell.source)
        if cell.children.touched_bytes >= _MUCH_TOUCHED_BYTES:
            touched = format_bytes(cell.children.touched_bytes)
            remarks.append(
                f"child processes that ended in it touched {touched}; their peak is not known"
            )
        growing = self.trends.add(record)
        if growing.wants_look or growing.growths:
            from ipygpumem.shell.searches import growth_search  # loading must stay fast

            remarks += growth_search.remarks_on_growth(
                growing, self._context, self._experiments.survivors.roots
            )
        return remarks

    def _show(self, cell: Cell, reports: list[Report], result: Any) -> None:
        """Show a cell's reports. If a Ctrl-C stops that, because flushing the cell's output takes
        long, show them once more, with a note on the Ctrl-C.
        """
        for _ in range(2):
            if cell.errors.signal_after_code is not None:
                reports += self._fail_with_signal(cell.errors.signal_after_code, result)
            try:
                is_shown = not (cell.is_nested or cell.measurement.is_ours)
                record = cell.measurement.record if is_shown else None
                self._context.display.show(reports, record)
                break
            except BaseException as error:
                if not interrupts.is_from_signal(error):
                    raise
                cell.errors.signal_after_code = error

    def _fail_with_signal(self, error: BaseException, result: Any) -> list[Report]:
        """Make a signal's exception the cell's error, so that "Run all" stops; return the note on
        it, if there is one to show.

        It could not be raised in the cell's code, which had ended, and IPython would only print it.
        """
        for outer in self._context.cells.running():
            outer.errors.interrupted_inside = True
        is_interrupt = type(error) is KeyboardInterrupt
        name = "Ctrl-C" if is_interrupt else f"{type_name(error)} of a signal handler"
        reports = [note(f"{name} arrived after the cell's code had ended")]
        has_error_or_no_result = getattr(result, "error_in_exec", self) is not None
        if has_error_or_no_result:  # the next cells are stopped in any case
            return [] if is_interrupt else reports
        if is_interrupt:
            error = KeyboardInterrupt("the cell's code had ended")
        result.error_in_exec = error
        return reports

    def _notify_shown(self, _: Any = None) -> None:
        """Notify subscribers and observers that the last cell's reports were shown."""
        self._waits_to_be_shown = False
        steps: list[HookStep] = [
            (self._subscribers.deliver, "this cell's record was not passed to its subscribers")
        ]
        for observer in self.observers:
            lost = f"{_feature(observer)} missed that this cell was shown"
            steps.append((observer.cell_shown, lost))
        self._context.isolation.run_all("post_run_cell", *steps)


def _note_ended_children(cell: Cell, usages: Sequence[Usage]) -> None:
    """Set the peak of the largest child process that has ended in a cell; if it is unknown, the
    bytes that those processes have touched.

    Args:
        cell: the cell.
        usages: its usage; the peak of this process hides lower ones of children.
    """
    ended_before = cell.children.ended_before
    ended_now = EndedChildren.now()
    if ended_before is None or ended_now is None or ended_now == ended_before:
        return
    own_peak_bytes = 0
    for usage in usages:
        if usage.device == "cpu":
            own_peak_bytes = usage.before_bytes + usage.peak_delta_bytes
    cell.children.peak_bytes = ended_now.peak_since(ended_before, own_peak_bytes)
    if cell.children.peak_bytes is None:
        cell.children.touched_bytes = ended_now.touched_bytes - ended_before.touched_bytes


def _feature(observer: CellObserver) -> str:
    """Return the feature that observes cells, in words for the user."""
    return getattr(observer, "observed_for", "a part of ipygpumem")


def _error_of(cell: Cell, result: Any) -> BaseException | None:
    """Return the error that ended a cell, or that was shown in it."""
    return error_of(result) or shown_since(cell.errors.last_id_before)


_ERRORS_OF_COMMANDS = ("UsageError", "MissingPackageError")
"""Errors by which a command refuses a cell: none of its code has run."""


def _is_ours(cell: Cell, record: CellRecord) -> bool:
    """Return True if a cell has only our commands, which have reports of their own, or only
    comments.

    Its line would be noise, and so would its row in the history. An error of other code is worth a
    line.
    """
    if record.error not in (None, *_ERRORS_OF_COMMANDS) or record.recovery is not None:
        return False
    if cell.measurement.is_rejected:
        return True
    if MAY_RUN_NO_CODE.search(cell.source) is None:  # as in most cells
        return False
    return has_only_comments(cell.source) or has_only_our_commands(cell.source)


def _code_that_ran(source: str, error: BaseException | None) -> str:
    """Return the source of a cell that its record describes: of a cell that a magic in its first
    line has rejected, only this line, because the code below has not run.
    """
    if source.startswith("%%") and type_name(error) in _ERRORS_OF_COMMANDS:
        return source.partition("\n")[0]
    return source


def digest_of(source: str) -> str:
    """Return a digest of 16 hexadecimal digits that ignores surrounding white space."""
    text = source.strip().encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def describing_line(source: str) -> str:
    """Return the line that stands for a cell in a table, cut to 80 characters: the first line that
    is no import, magic or comment, or else the cell's first line.
    """
    head = source[:_HEAD_LENGTH]
    code = _NO_CODE.sub("", head)
    for line in f"{code}\n{head}".splitlines():
        text = line.strip()
        if len(text) > _LINE_LENGTH:
            return text[: _LINE_LENGTH - 1] + "…"
        if text:
            return text
    return ""
