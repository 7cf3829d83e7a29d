"""The flight recorder: a file of JSON lines that outlives its kernel, and evidence of how the
kernel ended.

The first line describes the kernel. Each other line is the start, a tick or the end of a cell, or
the end of the recording. A file is not trusted: lines that do not decode are counted and skipped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from ipygpumem.probes import host, oom_kills
from ipygpumem.records import Record, open_plain

_KEPT_FILES = 20
"""Number of recordings that are kept; older ones of dead kernels are deleted."""
_KEPT_SECONDS = 30 * 86400
"""Age at which a recording is deleted."""
MOST_WRITTEN_BYTES = 8 * 2**20
"""Maximum size of a recording."""
_MOST_READ_BYTES = 16 * 2**20
"""Maximum number of bytes to read of a recording."""
TAIL_BYTES = 64 * 2**10
"""Bytes to read to learn how a recording ends."""
_HEAD_BYTES = 8192
"""Maximum length of the first line, which describes the kernel."""
_LATEST_TIME = 1e11
"""Maximum time in a recording, in Unix seconds: a larger one is damaged."""
_LINES_KEPT = 12
_LETTERS_KEPT = 160
_CLOCK_SECONDS = 2.0
"""Maximum difference of the system log's clock."""


@dataclass(frozen=True)
class RecordedKernel(Record):
    """The kernel of a recording."""

    time: float
    """Unix time of the recording's start."""
    pid: int
    """The number of its process."""
    started: float
    """Unix time of the process's start, by which a later process with this number is recognised."""
    place: str
    """The boot and the process namespace in which ``pid`` is valid."""
    notebook: str = ""
    """The path of its notebook; empty if it is unknown."""
    counter: str = ""
    """Name of the counter of OOM kills."""


@dataclass(frozen=True)
class Moment(Record):
    """A cell's start, a tick or its end, or the end of the recording."""

    kind: Literal["cell", "tick", "cell end", "end"]
    time: float
    """Unix time."""
    cell: int | None = None
    """The number of the cell."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes in use by device (RSS for ``cpu``), and of the machine and the control group."""
    totals: dict[str, int] = field(default_factory=dict)
    """The total or the limit of each entry of ``memory``, if it is known."""
    kills: int | None = None
    """Value of the counter of OOM kills."""
    source: str = ""
    """The cell's first lines, each cut; at a start."""
    error: str = ""
    """The cell's error; at a cell's end."""
    reason: str = ""
    """The reason of a regular end; at the end of the recording."""


def first_lines(source: str) -> str:
    """Return the beginning of a cell's source, bounded in lines and in letters of a line."""
    lines = source.strip("\n")[: 2 * _LINES_KEPT * _LETTERS_KEPT].split("\n")
    return "\n".join(line[:_LETTERS_KEPT] for line in lines[:_LINES_KEPT])


def encode(entry: RecordedKernel | Moment) -> bytes:
    """Return an entry's line, without the fields that have no value."""
    filled = {name: value for name, value in entry.to_dict().items() if value not in (None, "", {})}
    values = {"kind": "kernel"} | filled  # a moment has a kind of its own
    return f"{json.dumps(values, separators=(',', ':'))}\n".encode("ascii")


def decode(line: bytes) -> RecordedKernel | Moment | None:
    """Return the entry of a line; None if it is foreign or damaged."""
    try:
        data = json.loads(line)
        kind = RecordedKernel if data["kind"] == "kernel" else Moment
        entry = kind.from_dict(data)
    except (TypeError, ValueError, LookupError, RecursionError, OverflowError):
        return None
    if isinstance(entry, RecordedKernel) and entry.pid <= 0:
        return None
    times = [value for value in vars(entry).values() if type(value) is float]
    if not all(0 <= value < _LATEST_TIME for value in times):
        return None
    return entry


class Recording(NamedTuple):
    """The end of a recording."""

    path: Path
    kernel: RecordedKernel | None
    """None for a file that is not a recording, or with a damaged beginning."""
    cell: tuple[Moment, ...]
    """The known moments of the last cell."""
    end: Moment | None
    """The regular end of the recording, if any."""
    skipped: int
    """Number of unreadable lines, except a torn last one."""

    @property
    def last_time(self) -> float:
        """Unix time of the last line."""
        if self.cell:
            return self.cell[-1].time
        return self.kernel.time if self.kernel else 0.0

    @property
    def running(self) -> Moment | None:
        """The last moment of the cell that was running when the recording stopped, if any."""
        if not self.cell or self.cell[-1].kind == "cell end":
            return None
        return self.cell[-1]


def read(path: Path, most_bytes: int = _MOST_READ_BYTES) -> Recording:
    """Return a recording; of a file with more than ``most_bytes`` the middle is skipped.

    A file that cannot be read, or is no recording, has neither a kernel nor a cell.
    """
    # after the last newline there is nothing, or a torn line
    lines = [line for line in _first_and_last_lines(path, most_bytes).split(b"\n")[:-1] if line]
    kernel: RecordedKernel | None = None
    end: Moment | None = None
    last_cell: list[Moment] = []
    skipped = 0
    for line in lines:
        entry = decode(line)
        if entry is None:
            skipped += 1
        elif isinstance(entry, RecordedKernel):
            kernel = kernel or entry
        elif entry.kind == "end":
            end = end or entry  # a request to end has its reason before the end itself
        else:
            if entry.kind == "cell":
                last_cell = []
            last_cell.append(entry)
    return Recording(path, kernel, tuple(last_cell), end, skipped)


def _first_and_last_lines(path: Path, most_bytes: int) -> bytes:
    """Return a file's first line and its last ``most_bytes``, from a line's beginning; as much as
    can be read.
    """
    text = b""
    # ValueError: an invalid file name
    with contextlib.suppress(OSError, ValueError), open_plain(path) as file:
        text = file.readline(_HEAD_BYTES)
        if path.stat().st_size - most_bytes > len(text):
            file.seek(-most_bytes, os.SEEK_END)
            file.readline(most_bytes)  # the second part of a line
        text += file.read(most_bytes)
    return text


def listed(folder: Path) -> list[Path]:
    """Return the recordings of a folder, the newest first; none if there is no such folder."""
    with contextlib.suppress(OSError):
        return sorted((path for path in folder.glob("*.jsonl") if path.is_file()), reverse=True)
    return []


def prune(folder: Path, present: Path) -> None:
    """Delete old or excess recordings, except those of running kernels.

    Args:
        folder: the folder of recordings.
        present: the recording of this kernel, which stays.
    """
    earlier = [path for path in listed(folder) if path != present]
    for position, path in enumerate(earlier):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _KEPT_SECONDS
            is_in_excess = position >= _KEPT_FILES - 1
            if not is_old and not is_in_excess:
                continue
            kernel_state = state(read(path, TAIL_BYTES).kernel)
            if kernel_state == "dead" or (is_old and kernel_state == "unknown"):
                path.unlink()


class RecordingWriter:
    """The open recording of this process; thread-safe.

    Each entry is one ``write`` to a file opened for appending, so a killed process loses none.
    Nothing is synced to the disk: a power loss can lose entries that the system has not written
    yet.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, kernel: RecordedKernel) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.path = folder / f"{started}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._line_of_kernel = encode(kernel)
        """The kernel's line, which stays when the file is cut."""
        self._line_of_running_cell = b""
        """The line of the running cell's start, which stays, too."""
        self._file = open(self.path, "xb", buffering=0, opener=_open_private_file)  # noqa: SIM115  # it stays open
        self._append(self._line_of_kernel)

    def write(self, moment: Moment) -> None:
        """Append a moment (``OSError`` on failure); does nothing in a forked process."""
        with self._lock:
            if os.getpid() != self._pid or self._file.closed:
                return
            line = encode(moment)
            if self._file.tell() + len(line) > MOST_WRITTEN_BYTES:
                self._drop_older_half()
            self._append(line)
            if moment.kind != "tick":
                self._line_of_running_cell = line if moment.kind == "cell" else b""

    def _drop_older_half(self) -> None:
        """Remove the older half of the moments, without the start of the running cell."""
        half = self.path.read_bytes()[-MOST_WRITTEN_BYTES // 2 :]
        _, _, newer = half.partition(b"\n")  # from a line's beginning
        if self._line_of_running_cell not in newer:
            newer = self._line_of_running_cell + newer
        self._file.truncate(0)
        self._append(self._line_of_kernel + newer)

    def _append(self, line: bytes) -> None:
        """Write lines in one call (``OSError`` if only a part of them fits on the disk)."""
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self, reason: str) -> None:
        """End the recording regularly; if that fails, delete it, or a later kernel would see a
        crash.
        """
        with self._lock:
            if os.getpid() != self._pid or self._file.closed:
                return
            with self._file:
                try:
                    self._append(b"\n" + encode(Moment("end", time.time(), reason=reason)))
                except OSError:
                    self.path.unlink(missing_ok=True)


def _open_private_file(path: str, flags: int) -> int:
    """Open a file for appending, which other users cannot read."""
    return os.open(path, flags | os.O_APPEND, 0o600)


def state(kernel: RecordedKernel | None) -> Literal["alive", "dead", "unknown"]:
    """Return the state of a recording's kernel; unknown in another container or on
    another machine.
    """
    if kernel is None or kernel.place != host.process_space():
        return "unknown"
    if host.is_running(kernel.pid, kernel.started):
        return "alive"
    return "dead"


def ended(folder: Path, notebook: str = "") -> list[Recording]:
    """Return the ends of the recordings whose kernels do not run, or run elsewhere, the newest
    first.

    Args:
        folder: the folder of recordings.
        notebook: the notebook whose kernels are wanted; empty for all. Recordings without the name
            of a notebook count for each.
    """
    recordings = []
    for path in listed(folder):
        tail = read(path, TAIL_BYTES)
        if state(tail.kernel) == "alive":
            continue
        if not tail.kernel or not notebook or tail.kernel.notebook in ("", notebook):
            recordings.append(tail)
    return recordings


class Verdict(NamedTuple):
    """Why a kernel ended, or that its end is unknown."""

    text: str
    """The reason in words."""
    grade: Literal["certain", "likely", "unknown", ""] = ""
    """Certainty of the reason; empty if the end is unknown."""
    evidence: str = ""
    """The proof in words, or the reason why there is none; empty without either."""


def judge(recording: Recording) -> Verdict:
    """Return why a recording's kernel ended, as far as the system's own records prove it."""
    kernel = recording.kernel
    if kernel is None:
        return Verdict(
            "its beginning is damaged, so the kernel and the reason of its end are unknown"
        )
    if recording.end is not None:
        return Verdict(recording.end.reason)
    kernel_state = state(kernel)
    if kernel_state == "alive":
        return Verdict("the kernel still runs")
    if kernel_state == "unknown":
        return Verdict(
            "it may still run: it is in another container or on another machine, or that was "
            "restarted"
        )
    by_log = _verdict_by_system_log(kernel, recording.last_time)
    return by_log or _verdict_by_counter(kernel, recording.cell)


def _verdict_by_system_log(kernel: RecordedKernel, last_time: float) -> Verdict | None:
    """Return why a kernel ended after its last entry, if the system's log says so; None if it says
    nothing.
    """
    if not kernel.place.endswith(host.SYSTEMS_PID_NAMESPACE):
        return None  # in a container: the log's process numbers are the machine's
    for death in oom_kills.deaths():
        if death.pid != kernel.pid or death.time < last_time - _CLOCK_SECONDS:
            continue
        text = "it crashed: a fault in native code"
        if death.oom:
            cause = "the machine's memory was used up"
            if "cgroup" in death.text:
                cause = "its control group's limit was reached"
            text = f"the OOM killer ended it: {cause}"
        return Verdict(text, "certain", f"the system's log: {death.text}")
    return None


def _verdict_by_counter(kernel: RecordedKernel, moments: Sequence[Moment]) -> Verdict:
    """Return why a kernel ended, from the number of OOM kills since its last entry.

    The counter of a control group may have counted another process of the same container, so the
    OOM killer is only likely; that of the whole machine says even less.
    """
    before = None
    for moment in moments:
        if moment.kills is not None:
            before = moment.kills
    after = oom_kills.kill_count_in_recording(kernel.counter)
    if before is None or after is None:
        return Verdict(
            "it was killed, or it crashed", "unknown", "OOM kills cannot be counted from here"
        )
    if after <= before:
        none = "the OOM killer has killed no process here since the kernel's last entry"
        return Verdict("not the OOM killer: it was killed, or it crashed", "unknown", none)
    number = "one process" if after - before == 1 else f"{after - before} processes"
    counted = f"the OOM killer has killed {number} here since the kernel's last entry"
    if kernel.counter.startswith("/proc/"):  # counter of the whole machine
        return Verdict("perhaps the OOM killer", "unknown", counted)
    return Verdict("the OOM killer ended it", "likely", counted)
