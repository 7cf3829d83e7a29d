"""The flight recorder of a shell: what it writes at the start and the end of cells, and while long ones run.

Off, it is not there: no event, no thread, no file. On, a failure stops it with one line.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ipygpumem.errors import RecordingError, short
from ipygpumem.flight_recorder import archive, files
from ipygpumem.flight_recorder.entries import CellEnd, CellStart, End, Entry, Figures, Header, Sample, first_lines
from ipygpumem.flight_recorder.machine import process_started, this_machine
from ipygpumem.flight_recorder.writer import Writer
from ipygpumem.introspect import text_of
from ipygpumem.model import CellRecord, Reading, Usage
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.ipython.sources import running_cell
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.ticker import Tick
from ipygpumem.notebook.tools import Tools
from ipygpumem.probes import cgroup, own_limits, pressure
from ipygpumem.reports.layout import Report, clean, note

_TICK_SECONDS = 0.25


class Recorder(Part):
    """Records one shell's cells to a file while it is on.

    Args:
        tools: the shell's.
        innermost: returns the name of the innermost experiment that is open.
    """

    def __init__(self, tools: Tools, innermost: Callable[[], str | None]) -> None:
        self._tools = tools
        self._innermost = innermost
        self._writer: Writer | None = None
        self._counter: pressure.KillCounter | None = None
        self._undo: list[Callable[[], object]] = []
        self._cell: CellStart | None = None
        self._messages: list[str] = []
        """What is shown at the end of the next cell: loading may happen before there is one."""

    @property
    def folder(self) -> Path:
        """Where this profile's recordings are."""
        return Path(self._tools.shell.profile_dir.location) / "ipygpumem"

    @property
    def segments(self) -> files.Segments | None:
        """The recording that is written now, if it is on."""
        return None if self._writer is None else self._writer.segments

    def names(self) -> list[str]:
        """Return the names of this profile's recordings, the newest first."""
        return [segments.name for segments in files.listed(self.folder)]

    # -- on and off ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a recording; nothing happens if it is on.

        Raises:
            RecordingError: its file cannot be written.
        """
        if self._writer is not None:
            return
        self._counter = pressure.KillCounter()
        try:
            segments = files.new(self.folder)
            self._writer = Writer(segments, self._header(), self._tools.config.record_max_bytes)
            archive.prune(self.folder, segments, this_machine())
        except OSError as error:
            self._counter.close()
            raise RecordingError(
                f"recording is off: {short(self.folder)} cannot be written ({_reason(error)})"
            ) from None
        self._listen()
        running = self._tools.cells.running()
        if running:
            self._write(lambda: self._cell_start(running[0], running_cell(self._tools.shell)))

    def _listen(self) -> None:
        shell = self._tools.shell
        self._undo.append(
            self._tools.ticker.listen(self._tick, after_seconds=_TICK_SECONDS, every_seconds=_TICK_SECONDS)
        )
        if shell.has_trait("exit_now"):  # a kernel's: set when the front-end asks it to end, even while a cell runs
            shell.observe(self._asked_to_end, "exit_now")
            self._undo.append(lambda: shell.unobserve(self._asked_to_end, "exit_now"))
        atexit.register(self._exit)
        self._undo.append(lambda: atexit.unregister(self._exit))

    def load(self) -> None:
        """Begin as configured when the extension loads, and say so if the kernel before died in a cell."""
        dead = archive.latest_death(self.folder, notebook=_notebook(), here=this_machine())
        if dead is not None and dead.running is not None:
            self.say(f"the previous kernel died in cell {dead.running.cell}: see %gpumem postmortem")
        self._start_if_it_can()

    def close(self) -> None:
        """Stop, as the extension is unloaded."""
        self.stop("the extension was unloaded")

    def stop(self, reason: str) -> None:
        """End the recording on purpose; nothing happens if it is off."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close(End(time.time(), reason))
            except OSError as error:
                writer.give_up(End(time.time(), f"recording ended: {_reason(error)}"))
        while self._undo:
            self._undo.pop()()
        if self._counter is not None:
            self._counter.close()

    def switched(self, change: Any) -> None:
        """Follow the option ``record``."""
        if change["new"]:
            self._start_if_it_can()
        else:
            self.stop("recording was switched off")

    def _start_if_it_can(self) -> None:
        try:
            self.start()
        except RecordingError as error:
            self._tools.config.record = False
            self.say(str(error))

    def say(self, message: str) -> None:
        """Show ``message`` at the end of the running or the next cell."""
        self._messages.append(message)

    def shown(self) -> None:
        """Show the messages that wait, but not inside a cell: a magic may capture its output."""
        if self._messages and not self._tools.cells.running():
            messages, self._messages = self._messages, []
            self._tools.screen.show([note(message) for message in messages])

    def _exit(self) -> None:
        self.stop("the kernel's process ended by itself")

    def _asked_to_end(self, change: Any) -> None:
        if change["new"]:
            self._write(lambda: End(time.time(), "it was asked to end: a restart, a shutdown, or exit"))

    def _aside(self, error: BaseException) -> None:
        """Stop for good after a failure; the cell goes on."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.give_up(End(time.time(), f"recording stopped: {_reason(error)}"))
        self._tools.config.record = False
        self.say(f"recording stopped ({_reason(error)}): your code is not affected; %gpumem record on tries again")

    # -- entries ------------------------------------------------------------------------------------------------

    def _write(self, entry: Callable[[], Entry]) -> None:
        """Write what ``entry`` returns; whatever fails, the cell goes on."""
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write(entry())
        except MemoryError:  # the cell is about to use all of it: this entry is lost, the next may not be
            pass
        except Exception as error:
            self._aside(error)

    def cell_begins(self, cell: Cell) -> None:
        """Write down that a cell begins."""
        if not cell.nested:
            number = running_cell(self._tools.shell) + 1
            self._write(lambda: self._cell_start(cell, number))

    def _cell_start(self, cell: Cell, number: int) -> CellStart:
        source = text_of(getattr(cell.info, "raw_cell", None))
        self._cell = CellStart(
            time=time.time(),
            cell=number,
            source=first_lines(source),
            lines=source.count("\n") + (not source.endswith("\n")),
            cell_id=text_of(getattr(cell.info, "cell_id", None)) or None,
            experiment=self._innermost(),
            oom_kills=self._oom_kills(),
            devices=_figures(cell.measurement.before.values()),
        )
        return self._cell

    def _tick(self, tick: Tick) -> None:
        cell = self._cell
        if cell is not None and not tick.cell.over:
            self._write(lambda: self._sample(cell, tick.readings))

    def _sample(self, cell: CellStart, readings: dict[str, Reading]) -> Sample:
        group, own = cgroup.tightest(), {limit.name: limit for limit in own_limits.limits()}
        space, data = own.get("RLIMIT_AS"), own.get("RLIMIT_DATA")
        return Sample(
            time=time.time(),
            cell=cell.cell,
            available_bytes=pressure.available_bytes(),
            group_used_bytes=None if group is None else group.used_bytes,
            group_available_bytes=None if group is None else group.available_bytes,
            group_limit_bytes=None if group is None else group.limit_bytes,
            address_space_bytes=None if space is None else space.used_bytes,
            oom_kills=self._oom_kills(),
            devices=_figures(readings.values()),
            address_space_limit_bytes=None if space is None else space.limit_bytes,
            data_bytes=None if data is None else data.used_bytes,
            data_limit_bytes=None if data is None else data.limit_bytes,
        )

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Write down that a cell has ended."""
        begun = self._cell
        if begun is not None and not cell.nested:
            self._cell = None
            self._write(lambda: self._cell_end(begun, record))
        return ()

    def _cell_end(self, cell: CellStart, record: CellRecord | None) -> CellEnd:
        now = time.time()
        return CellEnd(
            time=now,
            cell=cell.cell,
            seconds=now - cell.time if record is None else record.duration_seconds,
            success=record is None or record.success,
            error=None if record is None or record.error is None else clean(record.error),
            oom_kills=self._oom_kills() if now - cell.time > _TICK_SECONDS else None,
            devices=_figures(() if record is None else record.usages),
        )

    def _oom_kills(self) -> int | None:
        return None if self._counter is None else self._counter.read()

    def _header(self) -> Header:
        machine, parent = this_machine(), os.getppid()
        group, counter = cgroup.tightest(), self._counter
        return Header(
            time=time.time(),
            pid=os.getpid(),
            process_started=process_started(os.getpid()) or 0.0,
            boot=machine.boot,
            namespace=machine.namespace,
            host=machine.host,
            python=platform.python_version(),
            torch=_version("torch"),
            notebook=_notebook(),
            parent_pid=parent,
            parent_started=process_started(parent),
            ram_bytes=pressure.ram_bytes(),
            group_limit_bytes=None if group is None else group.limit_bytes,
            limits={limit.name: limit.limit_bytes for limit in own_limits.limits()} or None,
            counter=None if counter is None else counter.name,
            oom_kills=self._oom_kills(),
            available_bytes=pressure.available_bytes(),
        )


def _figures(found: Iterable[Reading | Usage]) -> tuple[Figures, ...]:
    return tuple(map(_figures_of, found))


def _figures_of(found: Reading | Usage) -> Figures:
    now, peak = (found.after_bytes, found.peak_bytes) if isinstance(found, Usage) else (found.current_bytes, None)
    return Figures(found.device, now, peak, found.reserved_bytes, found.used_bytes, found.total_bytes)


def _notebook() -> str | None:
    return os.environ.get("JPY_SESSION_NAME")  # set by Jupyter's server: the notebook's path


def _version(package: str) -> str | None:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return clean(f"{type(error).__name__}: {text}")
