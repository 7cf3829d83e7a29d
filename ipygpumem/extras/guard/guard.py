"""Raises ``MemoryError`` in a cell before the system ends the kernel's process.

While a cell runs, a soft ``RLIMIT_DATA`` refuses allocations beyond the memory left (``memory``).
It counts memory from its allocation. A job in the meter's thread watches all other use: pages
allocated earlier and used now, child processes, other programs (``watch``). It interrupts the
cell's Python code, but no long call into C (``interrupt``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from ipygpumem.extras.guard.causes import Causes
from ipygpumem.extras.guard.limit_raising import RaisedCalls
from ipygpumem.extras.guard.memory import GuardedMemory
from ipygpumem.extras.guard.openblas_buffers import OpenBlasBuffers
from ipygpumem.extras.guard.replacing import replace
from ipygpumem.extras.guard.report import guard_report
from ipygpumem.extras.guard.room_for_errors import ErrorRoom
from ipygpumem.extras.guard.watch import Watch
from ipygpumem.heap.bulk import OBSERVERS
from ipygpumem.inventory.names.top import select
from ipygpumem.report.layout import Report
from ipygpumem.shell.cell import Cell, GuardAction
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.sources import has_only_our_commands
from ipygpumem.shell.notebook_inventory import largest_names
from ipygpumem.units import MIB

_WITHOUT_LIMIT = (
    ("_posixsubprocess", "fork_exec"),
    ("subprocess", "_fork_exec"),
    ("os", "posix_spawn"),
    ("os", "system"),
    ("_imp", "create_dynamic"),
    ("ctypes", "_dlopen"),
)
"""Functions that start processes without ``os.fork``, or load libraries: OpenBLAS ends the process
where its large buffers, hardly used, are refused. An audit hook could not be removed, and misses
some of them."""

_EVALUATES = re.compile(r"^\s*%?(?:ipy)?gpumem\s+why\b.*[(:]", re.MULTILINE)
"""Matches a line that evaluates a call or a slice of the user."""


class MemoryGuard:
    """Guards the cells of one shell until ``close``.

    Args:
        context: the shell's services.
        user_limit_bytes: the user's ``--limit``; None without one.
        touched: count only memory in use (``--touched``).
    """

    observed_for = "the memory guard"
    """Names the guard in the message that it has failed."""

    _in_force: ClassVar[weakref.WeakSet[MemoryGuard]] = weakref.WeakSet()
    """Guards of this process, whose limit its forked children must not keep."""

    def __init__(
        self, context: ShellContext, user_limit_bytes: int | None, *, touched: bool
    ) -> None:
        self._shell = context.shell
        config = context.config
        self._memory = GuardedMemory(
            user_limit_bytes, touched=touched, knows_peak=lambda: config.host_peak == "kernel"
        )
        """The memory left, its shares, and the limit on allocations."""
        self._watch = Watch(self._memory, context.meter.worker, context.isolation)
        """Interrupts the cell for memory in use that the limit does not count."""
        self._causes = Causes(self._memory, self._watch.interrupt)
        """Knows whether the guard caused the cell's error: by its limit or an interrupt."""
        self._errors = ErrorRoom(self._memory, self._watch, self._causes, context.isolation)
        """Raises the limit while an error of the cell is shown."""
        self._raised_calls = RaisedCalls(self._memory.limit)
        """Raises the limit around output, sockets and the start of threads."""
        self._buffers = OpenBlasBuffers()
        """Allocates the buffers whose refusal would end the process."""
        self._undo = contextlib.ExitStack()
        """Undoes all changes to IPython and Python."""
        self._undo.callback(self._memory.left.close)
        self._buffers.allocate()
        try:
            self._switch_on()
        except Exception:  # half a guard could not be switched off
            self.close()
            raise

    def _switch_on(self) -> None:
        """Watch and limit from now on, until ``close``."""
        _observe_forks()
        self._in_force.add(self)
        self._watch.start()
        OBSERVERS.append(self._watch.check_search)
        self._undo.callback(OBSERVERS.remove, self._watch.check_search)
        for undo in self._errors.install(self._shell):
            self._undo.callback(undo)
        self._undo.callback(self._raised_calls.undo)
        self._raised_calls.install()
        self._lift_the_limit_around_processes()
        stop_listening = self._watch.interrupt.listen()
        if stop_listening is not None:
            self._undo.callback(stop_listening)

    def _lift_the_limit_around_processes(self) -> None:
        """Let functions that start processes or load libraries run without the limit."""
        history = getattr(self._shell, "history_manager", None)
        if history is not None:  # it starts its thread again after a fork
            self._undo.callback(replace(history, "store_inputs", self._without_limit))
        for module_name, name in _WITHOUT_LIMIT:
            module = sys.modules.get(module_name)
            if hasattr(module, name):
                self._undo.callback(replace(module, name, self._without_limit))

    def _without_limit(self, arguments: object, options: object) -> AbstractContextManager[None]:
        """Return the context in which a replaced function runs; its arguments do not matter."""
        return self._memory.limit.without_limit()

    def close(self) -> None:
        """Switch the guard off, and undo all its changes to IPython and Python."""
        self._code_ended()
        self._watch.stop()
        self._in_force.discard(self)
        self._memory.limit.switch_off()
        self._undo.close()

    def abandon(self) -> None:
        """End the guard in a forked child, whose thread and locks are not those of the parent."""
        self._watch.abandon()
        self._memory.limit.reset_in_child()

    @property
    def state(self) -> str:
        """The memory left, and how it is guarded."""
        return self._memory.state

    def cell_begins(self, cell: Cell) -> None:
        """Guard the cell."""
        if not self._guards(cell):
            return
        self._raised_calls.install()
        self._memory.reserve.fill()
        figures = self._memory.trimmed()
        self._causes.forget()
        self._memory.share(figures)  # before the thread sees the cell
        self._watch.begin_cell(cell)
        cell.at_code_end.append(self._code_ended)
        self._memory.limit_cell(figures)  # after that: the thread ends a limit without a cell
        self._watch.wake()

    def _guards(self, cell: Cell) -> bool:
        """Return True for a cell to guard: it has more than our commands, no cell around it, and no
        other guarded cell is running.
        """
        if cell.is_nested or not self._watch.is_on:
            return False
        if self._watch.cell is not None and not self._watch.cell.is_over:
            return False
        return _has_code_of_user(cell.source)

    def _code_ended(self) -> list[Report]:
        """Restore the user's limit, unless threads of the cell go on.

        Our own work after the cell and callbacks between cells are not limited. The session calls
        this when the cell's code has ended, and adds the reports, of which there are none.
        """
        self._watch.end_cell()
        return []

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Return the report of an error that the guard caused; none without such an error."""
        self._memory.limit.end_error()
        if cell.is_nested or self._watch.cell is not None:
            return ()  # the cell around it still runs under the limit, and reports at its end
        self._buffers.allocate()  # for libraries that this cell has imported
        action = self._causes.take()
        if action is None:
            return ()
        return [self._report(action)]

    def _report(self, action: GuardAction) -> Report:
        """Return why the guard acted, what is free now, and the largest names with the lines that
        free them.
        """
        figures = self._memory.now()
        remarks = [action.advice] if action.advice else []
        names = None
        # The search for the names needs memory itself: it may use half of what is left.
        limit_bytes = (figures.data_bytes or 0) + figures.available_bytes // 2
        try:
            with self._memory.limit.limited_to(limit_bytes):
                names = select(largest_names(self._shell), min_bytes=MIB)
        except MemoryError:
            remarks.append("Too little memory is left to measure the names")
        room_bytes = self._memory.shares.room_bytes(self._memory.trimmed())
        return guard_report(action.text, remarks, room_bytes, names)

    def cell_shown(self) -> None:
        """Do nothing: the guard's work ends before the cell's report is shown."""


def _has_code_of_user(source: str) -> bool:
    """Return True for a cell that runs code of the user, which is limited.

    A cell of our commands alone is not: the limit must stop neither the commands that free memory
    nor those that say where it is, and threads of the user, or pages that malloc keeps, may have
    reached it already. Our own searches end before they use up the memory (see
    ``Watch.check_search``). But ``%gpumem why make()`` calls the user's function.
    """
    return not has_only_our_commands(source) or _EVALUATES.search(source) is not None


@functools.cache
def _observe_forks() -> None:
    """Register a hook for forked children, once for all guards: it cannot be removed."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_abandon_guards)


def _abandon_guards() -> None:
    """End all guards in a forked child, which a parent's limit must not stop."""
    guards = list(MemoryGuard._in_force)
    MemoryGuard._in_force.clear()
    for guard in guards:
        guard.abandon()
