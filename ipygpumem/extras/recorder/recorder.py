"""The flight recorder of a shell: writes the start, ticks and the end of each cell while it is on.

Off, there is no event, thread or file. On, a failure stops it with one line.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from ipygpumem.errors import RecordingError, ellipsize
from ipygpumem.extras.recorder import recordings
from ipygpumem.extras.recorder.recordings import Moment, RecordedKernel, RecordingWriter
from ipygpumem.notebook import running_cell
from ipygpumem.probes import cgroup, host, oom_kills
from ipygpumem.records import Reading, Usage
from ipygpumem.report.layout import Report, note
from ipygpumem.report.words import clean
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.context import ShellContext

_TICK_SECONDS = 0.25
"""Time between two entries while a cell runs."""


class Recorder:
    """Records one shell's cells to a file while it is on.

    It observes cells: each begins with an entry, has a tick four times a second in the meter's
    thread, and ends with an entry. If the kernel dies in a cell, its last ticks show the memory.
    """

    observed_for = "the recorder"

    def __init__(self, context: ShellContext) -> None:
        self._context = context
        self._writer: RecordingWriter | None = None
        """The open recording; None while the recorder is off."""
        self._kill_counter = ""
        """The system's counter of OOM kills."""
        self._undo = contextlib.ExitStack()
        self._start_of_cell: Moment | None = None
        """The start of the running cell; None between cells."""
        self._messages: list[str] = []
        """Messages to show after the next cell, because the extension may be loaded before the
        first one.
        """

    @property
    def folder(self) -> Path:
        """This profile's folder of recordings."""
        return Path(self._context.shell.profile_dir.location) / "ipygpumem"

    @property
    def path(self) -> Path | None:
        """The recording that is written now, if it is on."""
        if self._writer is None:
            return None
        return self._writer.path

    def names(self) -> list[str]:
        """Return the names of this profile's recordings, the newest first."""
        return [path.name for path in recordings.listed(self.folder)]

    def start(self) -> None:
        """Begin a recording; nothing happens if it is on.

        Raises:
            RecordingError: the file cannot be written.
        """
        if self._writer is not None:
            return
        self._writer = self._new_writer()
        recordings.prune(self.folder, self._writer.path)
        self._observe_the_kernel()
        running = self._context.cells.running()
        if running:  # the cell that has switched the recorder on
            number = running_cell(self._context.shell)
            self._write(lambda: self._cell_start(running[0], number))

    def _new_writer(self) -> RecordingWriter:
        """Return a new recording of this kernel.

        Raises:
            RecordingError: the file cannot be written.
        """
        self._kill_counter = oom_kills.kill_counter_name()
        kernel = RecordedKernel(
            time.time(),
            os.getpid(),
            started=psutil.Process().create_time(),
            place=host.process_space(),
            notebook=_notebook(),
            counter=self._kill_counter,
        )
        try:
            return RecordingWriter(self.folder, kernel)
        except OSError as error:
            reason = _error_text(error)
            raise RecordingError(
                f"recording is off: {ellipsize(self.folder)} cannot be written ({reason})"
            ) from None

    def _observe_the_kernel(self) -> None:
        """Until ``stop``, write ticks in the meter's thread, and note a regular end."""
        worker = self._context.meter.worker
        worker.add(self._tick)
        self._undo.callback(worker.remove, self._tick)
        shell = self._context.shell
        if shell.has_trait("exit_now"):
            # a kernel's: set when the front-end asks it to end, even while a cell runs
            shell.observe(self._note_request_to_end, "exit_now")
            self._undo.callback(shell.unobserve, self._note_request_to_end, "exit_now")
        atexit.register(self.stop, "the kernel's process ended by itself")
        self._undo.callback(atexit.unregister, self.stop)

    def start_if_it_can(self, *, tell: bool = False) -> None:
        """Start, or note why that fails. Notes are shown after the next cell.

        Args:
            tell: also note if this notebook's previous kernel died in a cell.
        """
        if tell:
            self._note_death_of_previous_kernel()
        try:
            self.start()
        except Exception as error:
            self.stop("recording could not begin")
            self._context.config.recorder = False
            if isinstance(error, RecordingError):
                message = str(error)
            else:
                message = f"recording is off ({_error_text(error)})"
            self._messages.append(message)

    def _note_death_of_previous_kernel(self) -> None:
        """Leave a message if this notebook's previous kernel died in a cell."""
        try:
            ended = recordings.ended(self.folder, _notebook())
            if ended and ended[0].running and recordings.judge(ended[0]).grade:
                cell = ended[0].running.cell
                self._messages.append(
                    f"the previous kernel died in cell {cell}: see %gpumem postmortem"
                )
        except Exception as error:  # another kernel's file must not keep this one from recording
            self._messages.append(
                f"the end of the previous kernel is unknown ({_error_text(error)})"
            )

    def close(self) -> None:
        """Stop, as the extension is unloaded."""
        self.stop("the extension was unloaded")

    def stop(self, reason: str) -> None:
        """End the recording regularly; does nothing if it is off."""
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close(reason)
        self._undo.close()

    def switched(self, change: Any) -> None:
        """Follow the configuration's option ``recorder``.

        Args:
            change: traitlets' description of the change; ``new`` is the new value.
        """
        if change["new"]:
            self.start_if_it_can()
        else:
            self.stop("recording was switched off")

    def cell_shown(self) -> None:
        """Show the pending messages, but not inside a cell, where a magic may
        capture the output.
        """
        if self._messages and not self._context.cells.running():
            messages, self._messages = self._messages, []
            self._context.display.show([note(message) for message in messages])

    def _note_request_to_end(self, change: Any) -> None:
        """Write that the front-end has asked the kernel to end, when the shell's ``exit_now`` is
        set.
        """
        reason = "it was asked to end: a restart, a shutdown, or exit"
        if change["new"]:
            self._write(lambda: Moment("end", time.time(), reason=reason))

    def _write(self, moment: Callable[[], Moment]) -> None:
        """Write the moment that ``moment`` returns; a failure ends the recording, not the cell.

        ``moment`` is a function, because making the moment may fail, too.
        """
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write(moment())
        except MemoryError:
            pass  # the cell is about to use all of it: this line is lost, the next may not be
        except Exception as error:
            self._writer = None
            writer.close(f"recording stopped: {_error_text(error)}")
            self._context.config.recorder = False
            self._messages.append(
                f"recording stopped ({_error_text(error)}): your code is not affected; %gpumem "
                f"recorder on tries again"
            )

    def cell_begins(self, cell: Cell) -> None:
        """Write the start of a cell."""
        if not cell.is_nested:
            number = running_cell(self._context.shell) + 1
            self._write(lambda: self._cell_start(cell, number))
            self._context.meter.worker.wake(self._tick)

    def _cell_start(self, cell: Cell, number: int) -> Moment:
        """Return the entry for the start of a cell, and keep it: a cell runs from now on."""
        source = recordings.first_lines(cell.source)
        span = cell.measurement.span
        readings = span.before.values() if span else ()
        self._start_of_cell = self._moment_with_memory("cell", number, readings, source=source)
        return self._start_of_cell

    def _tick(self) -> float | None:
        """Write the memory of a long-running cell; called in the meter's thread, which sleeps
        between cells.
        """
        running = self._context.cells.outermost()
        start = self._start_of_cell
        if running is None:
            return None
        waited_seconds = time.perf_counter() - running.measurement.started
        if waited_seconds < _TICK_SECONDS:
            return _TICK_SECONDS - waited_seconds
        readings = self._context.meter.glance()
        # The cell may have ended, and another one begun, while this thread has read the memory.
        still_runs = start is self._start_of_cell and not running.is_over
        if start is not None and still_runs:
            self._write(lambda: self._moment_with_memory("tick", start.cell, readings.values()))
        return _TICK_SECONDS

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Write the end of a cell; it has no report."""
        start = self._start_of_cell
        if start is None or cell.is_nested:
            return ()
        self._start_of_cell = None
        record = cell.measurement.record
        usages = () if record is None else record.usages
        error = "" if record is None else clean(record.error or "")
        self._write(lambda: self._moment_with_memory("cell end", start.cell, usages, error=error))
        return ()

    def _moment_with_memory(
        self,
        kind: Literal["cell", "tick", "cell end"],
        cell: int | None,
        figures: Iterable[Reading | Usage],
        **more: Any,
    ) -> Moment:
        """Return a moment with the memory of each device; a tick has the machine's memory, too.

        Args:
            kind: the kind of the moment.
            cell: the number of the cell.
            figures: the memory of the devices.
            more: further fields of the moment.
        """
        memory: dict[str, int] = {}
        totals: dict[str, int] = {}
        for item in figures:
            if item.total_bytes is not None:
                totals[item.device] = item.total_bytes
            if isinstance(item, Usage):
                memory[item.device] = item.after_bytes
            else:
                memory[item.device] = item.current_bytes
        if kind == "tick":
            machine = psutil.virtual_memory()
            memory["machine: available"] = machine.available
            totals["machine: available"] = machine.total
            group = cgroup.tightest()
            if group is not None:
                memory["control group"] = group.used_bytes
                totals["control group"] = group.limit_bytes
        kills = oom_kills.kill_count(self._kill_counter)
        return Moment(kind, time.time(), cell, memory, totals, kills, **more)


def _notebook() -> str:
    """Return the path of this kernel's notebook; empty if it is unknown."""
    return os.environ.get("JPY_SESSION_NAME", "")  # set by Jupyter's server: the notebook's path


def _error_text(error: BaseException) -> str:
    """Return the type and the text of an error, for one line."""
    text = getattr(error, "strerror", None) or str(error)
    return clean(f"{type(error).__name__}: {text}")
