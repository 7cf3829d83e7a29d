"""The flight recorder of a shell: what it writes at the start and the end of cells, and while long ones run.

Off, it is not there: no event, no thread, no file. On, whatever fails makes it step aside with one line.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import RecordingError
from ipygpumem.flight_recorder import archive, files
from ipygpumem.flight_recorder.entries import CellEnd, CellStart, End, Entry, Figures, Header, Sample, first_lines
from ipygpumem.flight_recorder.machine import process_started, this_machine
from ipygpumem.flight_recorder.writer import Writer
from ipygpumem.introspect import text_of
from ipygpumem.model import CellRecord, Reading
from ipygpumem.probes import cgroup, own_limits, pressure
from ipygpumem.reports.content import clean, note

if TYPE_CHECKING:
    from ipygpumem.notebook.session import Session
    from ipygpumem.notebook.ticker import Tick

_TICK_SECONDS = 0.25


class Recorder:
    """Records one shell's cells to a file while it is on.

    Args:
        session: whose cells.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._writer: Writer | None = None
        self._counter: pressure.KillCounter | None = None
        self._undo: list[Callable[[], object]] = []
        self._cell: CellStart | None = None
        self._last_record: CellRecord | None = None
        self._messages: list[str] = []
        """What is told at the end of the next cell: loading may happen before there is one."""

    @property
    def folder(self) -> Path:
        """Where this profile's recordings are."""
        return Path(self._session.shell.profile_dir.location) / "ipygpumem"

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
            self._writer = Writer(segments, self._header(), self._session.config.record_max_bytes)
            archive.prune(self.folder, segments, this_machine())
        except OSError as error:
            self._counter.close()
            raise RecordingError(f"recording is off: {self.folder} cannot be written ({_reason(error)})") from None
        self._listen()
        running = self._session.running()
        if running:
            self._begin(running[0].info, self._inputs() - 1)

    def _listen(self) -> None:
        shell = self._session.shell
        for name, callback in (("pre_run_cell", self._cell_begins), ("post_run_cell", self._cell_ends)):
            shell.events.register(name, callback)
            self._undo.append(functools.partial(self._forget, name, callback))
        self._undo.append(
            self._session.ticker.listen(self._tick, after_seconds=_TICK_SECONDS, every_seconds=_TICK_SECONDS)
        )
        if shell.has_trait(
            "exit_now"
        ):  # a kernel's shell: set when the front-end asks it to end, even while a cell runs
            shell.observe(self._asked_to_end, "exit_now")
            self._undo.append(lambda: shell.unobserve(self._asked_to_end, "exit_now"))
        atexit.register(self._exit)
        self._undo.append(lambda: atexit.unregister(self._exit))

    def load(self) -> None:
        """Begin as configured when the extension loads, and say so if the kernel before died in a cell."""
        try:
            dead = archive.latest_death(self.folder, notebook=_notebook(), here=this_machine())
            if dead is not None and dead.running is not None:
                self.tell(f"the previous kernel died in cell {dead.running.cell}: %gpumem postmortem tells")
            self.start()
        except RecordingError as error:
            self._session.config.record = False
            self.tell(str(error))

    def unload(self) -> None:
        """Stop, as the extension is unloaded."""
        self.stop("the extension was unloaded")
        self._forget("post_run_cell", self._show_messages)

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

    def _forget(self, name: str, callback: Callable[..., None]) -> None:
        if callback in self._session.shell.events.callbacks[name]:  # somebody may have removed it already
            self._session.shell.events.unregister(name, callback)

    def switched(self, change: Any) -> None:
        """Follow the option ``record``."""
        if not change["new"]:
            self.stop("recording was switched off")
            return
        try:
            self.start()
        except RecordingError as error:
            self._session.config.record = False
            self.tell(str(error))

    def tell(self, message: str) -> None:
        """Show ``message`` at the end of the running or the next cell."""
        self._messages.append(message)
        events = self._session.shell.events
        if self._show_messages not in events.callbacks["post_run_cell"]:
            events.register("post_run_cell", self._show_messages)

    def _show_messages(self, result: Any) -> None:
        if self._session.running():
            return  # a magic may capture this cell's output
        self._forget("post_run_cell", self._show_messages)
        messages, self._messages = self._messages, []
        self._session.screen.show([note(message) for message in messages])

    def _exit(self) -> None:
        self.stop("the kernel's process ended by itself")

    def _asked_to_end(self, change: Any) -> None:
        if change["new"]:
            self._write(lambda: End(time.time(), "it was asked to end: a restart, a shutdown, or exit"))

    def _aside(self, error: BaseException) -> None:
        """Stop for good after a failure; the cell goes on."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.give_up(End(time.time(), f"recording stepped aside: {_reason(error)}"))
        self._session.config.record = False
        self.tell(
            f"recording stepped aside ({_reason(error)}): your code is not affected; %gpumem record on tries again"
        )

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

    def _cell_begins(self, info: Any) -> None:
        if len(self._session.running()) < 2:
            self._begin(info, self._inputs())

    def _inputs(self) -> int:
        """Return the number of the next input; IPython's versions differ in when they raise ``execution_count``."""
        return len(self._session.shell.history_manager.input_hist_raw)

    def _begin(self, info: Any, number: int) -> None:
        history = self._session.history
        self._last_record = history[-1] if history else None
        self._write(lambda: self._cell_start(info, number))

    def _cell_start(self, info: Any, number: int) -> CellStart:
        running, experiments = self._session.running(), self._session.open
        source = text_of(getattr(info, "raw_cell", None))
        before = running[0].measurement.before.values() if running else ()
        self._cell = CellStart(
            time=time.time(),
            cell=number,
            source=first_lines(source),
            lines=source.count("\n") + (not source.endswith("\n")),
            cell_id=text_of(getattr(info, "cell_id", None)) or None,
            experiment=experiments[-1].name if experiments else None,
            oom_kills=self._oom_kills(),
            devices=_figures(before),
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

    def _cell_ends(self, result: Any) -> None:
        cell = self._cell
        if cell is None or self._session.running():
            return
        self._cell = None
        history = self._session.history
        record = history[-1] if history and history[-1] is not self._last_record else None
        self._write(lambda: self._cell_end(cell, record))
        if self._messages:
            self._show_messages(result)

    def _cell_end(self, cell: CellStart, record: CellRecord | None) -> CellEnd:
        now = time.time()
        return CellEnd(
            time=now,
            cell=cell.cell,
            seconds=now - cell.time if record is None else record.duration_seconds,
            success=record is None or record.success,
            error=None if record is None or record.error is None else clean(record.error),
            oom_kills=self._oom_kills() if now - cell.time > _TICK_SECONDS else None,
            devices=tuple(
                Figures(
                    usage.device,
                    usage.after_bytes,
                    usage.peak_bytes,
                    usage.reserved_bytes,
                    usage.used_bytes,
                    usage.total_bytes,
                )
                for usage in (() if record is None else record.usages)
            ),
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


def _figures(readings: Iterable[Reading]) -> tuple[Figures, ...]:
    return tuple(
        Figures(
            reading.device,
            reading.current_bytes,
            None,
            reading.reserved_bytes,
            reading.used_bytes,
            reading.total_bytes,
        )
        for reading in readings
    )


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
