"""Frees memory held by the traceback's frames after an out-of-memory error or an interrupt, and
makes a ``RecoveryRecord``.

``cell_ended`` handles the error of a cell, ``recover_in_block`` an error that leaves the ``with``
block of an experiment. Both call ``_free_and_record``, whose steps are measured.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ipygpumem.fitting.budgets import Budget, note_refusal
from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.live.garbage import GcMark
from ipygpumem.interrupts import is_from_signal
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.notebook import running_cell
from ipygpumem.probes.allocator import failed_allocation
from ipygpumem.probes.host import available_bytes
from ipygpumem.probes.oom_kills import Kills
from ipygpumem.reclaim import kept_errors, listing, reclaim
from ipygpumem.reclaim.failure import Failure, classify
from ipygpumem.reclaim.frames import find_incomplete_optimizer
from ipygpumem.reclaim.name_snapshot import NameSnapshot
from ipygpumem.reclaim.plain_locals import plain_locals
from ipygpumem.reclaim.reclaim import steps_that_free
from ipygpumem.records import Cause, FreeingStep, Reading, RecoveryRecord
from ipygpumem.report.layout import Report, note
from ipygpumem.report.recovery import recovery_reports
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.ipython.caches import names_and_outputs
from ipygpumem.shell.ipython.last_errors import (
    forget_older_shown,
    release_stored,
    stored_error,
    stored_errors,
)
from ipygpumem.shell.ipython.sources import cell_that_bound
from ipygpumem.units import MIB, format_bytes

MUCH_BYTES = 32 * MIB
"""Minimum size to mention memory held by an error's frames, and unnamed arrays that outlive an
experiment.
"""
_SPARE_BYTES = 8 * MIB
"""Size of the address space that is reserved for our own work after an error."""


@dataclass(eq=False, repr=False)  # generating these methods would slow down loading
class _HandledError:
    """An error whose memory is freed, with the figures from before and after that."""

    error: BaseException
    failure: Failure
    cell: Cell | None
    """The cell that gets the record; None outside of cells."""
    releases: bool
    """True if its frames shall be released."""
    cause: Cause | None = None
    """The reason why memory ran out, if it is clear."""
    readings: dict[str, Reading] = field(default_factory=dict)
    """Each device's memory before anything is freed."""
    memory: listing.HeldMemory = field(default_factory=listing.HeldMemory)
    """The memory held by its frames."""
    plain: tuple[str, ...] = ()
    """The numbers and texts among their locals."""
    optimizer: tuple[str, weakref.ref[Any]] | None = None
    """The type of the optimizer that it left incomplete, and a reference to it."""
    frames: int | None = None
    """The number of its frames that were released; None if they were not."""
    steps: list[FreeingStep] = field(default_factory=list)
    """The steps that have freed memory."""


class Recovery:
    """Frees the memory that errors hold in one shell."""

    def __init__(self, context: ShellContext) -> None:
        self._context = context
        self._shell = context.shell
        self._config = context.config
        self._meter = context.meter
        self._garbage = context.garbage
        self._cells = context.cells
        self._kills = Kills()
        self.on_oom: Callable[[BaseException, object], None] = lambda error, leaving: None
        """Called with each out-of-memory error before anything is freed, and with the experiment
        that it leaves.
        """
        # not on Windows
        private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._spare = mmap.mmap(-1, _SPARE_BYTES, **private)
        """Address space, which takes no RAM, for our own work after an error: a limit may have left
        none.
        """
        self._names_after_recovery: NameSnapshot | None = None
        """The names after the last recovery; None once a cell has run without one."""
        self._mark_of_recovery: GcMark | None = None
        """The collector's mark of that recovery."""

    def cell_ended(self, cell: Cell, error: BaseException | None) -> None:
        """Free memory held by the cell's error, if ``release_frames`` says so."""
        if error is not None:
            self._resize_spare(1)
            try:
                self._recover(cell, error)
            finally:
                self._resize_spare(_SPARE_BYTES)
        if cell.errors.recovery is None:
            self._names_after_recovery = None  # the cell may have left garbage

    def _resize_spare(self, size: int) -> None:
        """Change the size of the reserved address space: at 1 byte, our own work may use all that
        was reserved.
        """
        with contextlib.suppress(OSError, MemoryError, SystemError):  # only Linux resizes it
            self._spare.resize(size)

    def _recover(self, cell: Cell, error: BaseException) -> None:
        """Free the memory of an error that ended a cell, if ``release_frames`` says so or if an
        experiment inside the cell has left it to the cell's end.
        """
        failure = self.note_error(error)
        if failure.kind == "error" and cell.errors.is_from_guard:
            # CPython's SystemError for a deep recursion without memory
            failure = replace(failure, kind="oom")
        is_left_by_experiment = cell.errors.error_id_to_release == id(error)
        must_release = is_left_by_experiment or self._must_release(failure)
        if cell.errors.recovery is None and (must_release or failure.poisoned):
            self._free_and_record(error, failure, cell, release=must_release)
        elif must_release:
            # The end of an experiment in the cell has made the record, and could not release the
            # frames that still ran.
            release_stored(error, self._shell)

    def reports(self, cell: Cell) -> list[Report]:
        """Return the report of a cell's recovery, if there was one, and complete its record; call
        it once the experiments that end with the cell have ended.

        A nested cell passes its recovery on to the cell around it, because a magic such as
        ``%%capture`` may hide the output of the inner one.
        """
        if cell.errors.recovery is None:
            return []
        running = self._cells.running()
        if cell.is_nested and running:
            running[-1].errors.recovery = cell.errors.recovery
            return []
        has_survivors = bool(cell.scopes.ending)
        recovery = self._with_kept_errors(cell.errors.recovery, has_survivors=has_survivors)
        cell.errors.recovery = recovery
        return recovery_reports(recovery, self._config.min_held_bytes)

    def _with_kept_errors(self, record: RecoveryRecord, *, has_survivors: bool) -> RecoveryRecord:
        """Return the record with the memory that errors still hold, after all steps that free it.

        Args:
            record: the record.
            has_survivors: True if an experiment's report has listed the objects that the last error
                holds.
        """
        last_errors = list[BaseException]()
        if not has_survivors:
            stored = stored_error("last_exc"), stored_error("last_value")
            last_errors += [error for error in stored if error is not None]
        names = self._shell.user_ns
        try:
            errors = kept_errors.find(
                last_errors, names_and_outputs(self._shell), names, Allowance()
            )
        except MemoryError:  # only needed for the report
            return record
        except Exception as problem:
            if is_from_signal(problem):
                raise
            lost = "the report does not name the memory that errors still hold"
            self._context.isolation.failed("the list of memory that errors hold", problem, lost)
            return record
        return replace(record, kept_errors=errors)

    def _must_release(self, failure: Failure) -> bool:
        """Return True if the option ``release_frames``, such as ``oom+interrupt``, says that frames
        are released after this kind of failure.
        """
        option = self._config.release_frames
        return option == "always" or failure.kind in option.split("+")

    def _free_and_record(
        self, error: BaseException, failure: Failure, cell: Cell | None, *, release: bool
    ) -> None:
        """Free the memory held by the frames of ``error``, and add the record to ``cell``.

        An interrupt of the search for figures, or our own failure there, only shortens the record:
        the memory is freed all the same.

        Args:
            error: the error.
            failure: its kind and its figures.
            cell: the cell that gets the record; None outside of cells.
            release: True if its frames shall be released.
        """
        handled = _HandledError(error, failure, cell, releases=release)
        steps: list[HookStep] = [
            (self._measure_before, "the report of the error is not complete"),
            (self._release_and_free, "the memory held by this error was not freed"),
            (self._ensure_released, "the memory held by this error was not freed"),
            (self._add_record, "the report of the error is missing"),
        ]
        self._context.isolation.run_all_with((handled,), "the recovery after an error", steps)

    def _measure_before(self, handled: _HandledError) -> None:
        """Find the figures of an error before it is released, as far as memory suffices to get
        them.
        """
        allowance = Allowance()
        is_oom = handled.failure.kind == "oom"
        if is_oom:
            handled.cause = self._cause(
                handled.error, handled.failure, handled.cell, allowance.share(2)
            )
        with contextlib.suppress(MemoryError):  # only needed for the report
            handled.readings = self._meter.now(detail=True)
            handled.memory = listing.held_by_frames(handled.error, self._shell.user_ns, allowance)
            if handled.releases:
                handled.plain = plain_locals(handled.error)
            if is_oom:
                handled.optimizer = find_incomplete_optimizer(handled.error)

    def _release_and_free(self, handled: _HandledError) -> None:
        """Release an error's frames, if they shall be released, then free garbage and caches."""
        if not handled.releases:
            return
        release = partial(self._ensure_released, handled)
        devices = not handled.failure.poisoned
        freeing = steps_that_free(self._garbage, self._mark_before_garbage, devices=devices)
        reclaim.run_steps(self._meter, [("frames", release), *freeing], handled.steps)
        self._names_after_recovery = None
        self._mark_of_recovery = self._garbage.last
        with contextlib.suppress(MemoryError):
            self._names_after_recovery = NameSnapshot(self._shell.user_ns)

    def _ensure_released(self, handled: _HandledError) -> None:
        """Release an error's frames, if they shall be released and are not yet: an interrupt may
        have stopped the step that does so.
        """
        if handled.releases and handled.frames is None:
            handled.frames = release_stored(handled.error, self._shell)

    def _add_record(self, handled: _HandledError) -> None:
        """Add the record of a recovery to its cell, if there is one."""
        if handled.cell is None:
            return
        incomplete_optimizer = ""
        if handled.optimizer is not None:
            name, reference = handled.optimizer
            if reference() is not None:
                incomplete_optimizer = name
        failure = handled.failure
        now = reclaim.bytes_in_use(self._meter.now())
        handled.cell.errors.recovery = RecoveryRecord(
            kind=failure.kind,
            error=failure.error,
            message=failure.message,
            requested_bytes=failure.requested_bytes,
            free=free_on_devices(handled.readings),
            held=handled.memory.rows,
            cut=handled.memory.cut,
            frames=handled.frames or 0,
            freed=reclaim.decrease(reclaim.bytes_in_use(handled.readings), now),
            now=now,
            steps=tuple(handled.steps),
            poisoned=failure.poisoned,
            plain=handled.plain,
            cause=handled.cause,
            incomplete_optimizer=incomplete_optimizer,
        )

    def remarks(self, cell: Cell, error: BaseException | None) -> list[str]:
        """Return remarks for a cell's line: on processes that the OOM killer has ended since the
        last call, and on memory that the frames of its error keep.
        """
        lines = list[str]()
        killed = self._kills.since_last_call()
        if killed:
            place = "on this machine" if self._kills.of_machine else "of this control group"
            processes = "1 process" if killed == 1 else f"{killed} processes"
            lines.append(
                f"the OOM killer ended {processes} {place}, such as a data loader's worker or a "
                f"forked child"
            )
        if error is not None and cell.errors.recovery is None:
            with contextlib.suppress(MemoryError):
                lines += self._remarks_on_frames(error)
        return lines

    def _remarks_on_frames(self, error: BaseException) -> list[str]:
        """Return a remark on the memory that an error's frames keep, if it is much."""
        memory = listing.held_by_frames(error, self._shell.user_ns, Allowance())
        if memory.size_bytes <= MUCH_BYTES:
            return []
        size = format_bytes(memory.size_bytes)
        if memory.cut is not None:
            size = f"at least {size}"
        return [f"the traceback's frames still hold {size}: %gpumem free frees it"]

    def _mark_before_garbage(self) -> GcMark | None:
        """Return the mark of the last recovery if all garbage must be newer than it, else None.

        That is so if only code with recoveries has run since, and no object was deleted or replaced
        that had a name then. So only the first of several recoveries in a row pays for a full
        collection.
        """
        names = self._names_after_recovery
        if names is None or names.some_may_live_on(self._shell.user_ns):
            return None
        return self._mark_of_recovery

    def recover_in_block(self, error: BaseException, leaving: object) -> str:
        """Free memory held by an error that leaves a ``with`` block, if ``release_frames`` says so;
        the memory of other errors is freed at the end of the running cell.

        Args:
            error: the error.
            leaving: the experiment of the block.

        Returns:
            A remark for the experiment's report, or an empty text.
        """
        running = self._cells.running()
        failure = self.note_error(error, leaving)
        cell = running[-1] if running else None
        if self._must_release(failure):
            if cell is not None and cell.errors.recovery is not None:
                # announced already, by an experiment inside this one
                release_stored(error, self._shell)
                return ""
            self._free_and_record(error, failure, cell, release=True)
        elif cell is not None and self._config.release_frames != "never":
            cell.errors.error_id_to_release = id(error)
            return "memory held by the traceback's frames is freed when the cell ends"
        return ""

    def end_budget(self, budget: Budget, error: BaseException | None) -> None:
        """Record the limit that refused memory when an error leaves a budget's block, and show the
        budget's notes.
        """
        running = self._cells.running()
        try:
            if error is not None:
                innermost = running[-1] if running else None
                self._note_refusing_limit(classify(error), innermost)
        finally:
            budget.stop()  # it may add notes
        self._context.display.show([note(text) for text in budget.notes])

    def note_error(self, error: BaseException, leaving: object = None) -> Failure:
        """Classify an error, and call ``on_oom`` if it is an out-of-memory error.

        Args:
            error: the error.
            leaving: the experiment whose ``with`` block it leaves; None at the end of a cell.
        """
        failure = classify(error)
        if failure.kind == "oom":
            self.on_oom(error, leaving)
        return failure

    def _cause(
        self,
        error: BaseException,
        failure: Failure,
        cell: Cell | None,
        allowance: Allowance,
    ) -> Cause | None:
        """Return the reason why memory ran out, if it is clear: the memory guard, a limit, or the
        one to which the figures point.
        """
        guard_action = None if cell is None else cell.errors.guard_action
        if guard_action is not None:
            if not guard_action.is_sure:
                return None
            text = f"the memory guard {guard_action.text}"
            return Cause("guard", "cpu", text, guard_action.advice)
        try:
            refused = self._note_refusing_limit(failure, cell)
            if refused is not None:
                return refused
            return self._cause_by_figures(error, failure, cell, allowance)
        except MemoryError:  # only needed for the report
            return None
        except Exception as problem:
            if is_from_signal(problem):
                raise
            lost = "the cause is not in the report"
            self._context.isolation.failed("the cause of an out-of-memory error", problem, lost)
            return None

    def _cause_by_figures(
        self,
        error: BaseException,
        failure: Failure,
        cell: Cell | None,
        allowance: Allowance,
    ) -> Cause | None:
        """Return the cause to which the figures of an error point; None if it has none."""
        figures = failed_allocation(failure.message)
        if figures is None and not failure.place:
            return None
        with growth_for("the cause of the error"):
            from ipygpumem.inventory.out_of_memory import (  # loading stays fast
                cause_search,
                unused_names,
            )

            cells = self._cells.running()
            if cell is not None:
                cells = [*cells, cell]
            sources = [item.source for item in cells]
            code = unused_names.FailedCode(
                error,
                source="\n".join(sources),
                namespace=self._shell.user_ns,
                named=partial(names_and_outputs, self._shell),
                cell_of=self._earlier_cell,
            )
            return cause_search.find_cause(code, failure, figures, allowance)

    def _earlier_cell(self, name: str) -> str | None:
        """Return words on the earlier cell that bound a name, such as `` from cell 3``; empty if
        that cell is unknown, None if it is the running one.
        """
        number = cell_that_bound(self._shell, name)
        if number == running_cell(self._shell):
            return None
        return f" from cell {number}" if number else ""

    def _note_refusing_limit(self, failure: Failure, cell: Cell | None) -> Cause | None:
        """Return the budget or other limit on torch's allocator that refused the memory; None if
        the device did. The budget gets a sentence about it, and the cell remembers the answer for
        each message.
        """
        message = failure.message
        refusals = cell.errors.refusals if cell is not None else {}
        if message in refusals:
            return refusals[message]
        # Most such errors name no limit, and with the host out of memory there may be none left for
        # the search.
        if failure.kind != "oom" or " allowed" not in message:
            return None
        with contextlib.suppress(MemoryError):  # only needed for the report
            refused = note_refusal(message)
            cause = None
            if refused is not None:
                cause = Cause("limit", refused.device, refused.text, refused.remedy)
            refusals[message] = cause
        return refusals.get(message)

    def release_stored_tracebacks(self) -> int:
        """Release the last error, kept for %debug and %tb; return the number of errors."""
        errors = stored_errors(self._shell)
        for error in errors:
            release_stored(error, self._shell)
        forget_older_shown(self._shell)
        return len(errors)


def free_on_devices(readings: dict[str, Reading]) -> dict[str, int]:
    """Return the free bytes of each device on which they are known."""
    free_bytes = {"cpu": available_bytes()}
    for device, reading in readings.items():
        if reading.total_bytes is not None and reading.used_bytes is not None:
            free_bytes[device] = reading.total_bytes - reading.used_bytes
    return free_bytes
