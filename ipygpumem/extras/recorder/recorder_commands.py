"""``%gpumem recorder`` and ``%gpumem postmortem``, with the report on the end of a dead kernel."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ipygpumem.errors import RecordingError, ellipsize
from ipygpumem.extras.recorder import recordings
from ipygpumem.extras.recorder.recordings import Moment, RecordedKernel, Recording, Verdict
from ipygpumem.report.devices import device_label
from ipygpumem.report.layout import Fact, Listing, Report, Table, note
from ipygpumem.report.words import clean, count
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import (
    CommandGroup,
    CommandModule,
    Options,
    argument,
    command,
)
from ipygpumem.units import format_bytes, format_seconds

_LINES_SHOWN = 20
"""Maximum number of source lines to show of a cell."""


@command("%gpumem recorder on", "start the recording")
def recorder_on(app: App, options: Options) -> list[Report]:
    """Start the flight recorder."""
    app.recorder.start()
    app.context.config.recorder = True
    return recorder_status(app, options)


@command("%gpumem recorder off", "end the recording")
def recorder_off(app: App, options: Options) -> list[Report]:
    """End the recording."""
    app.context.config.recorder = False
    return recorder_status(app, options)


@command("%gpumem recorder status", "show if it is on, and the folder of the recordings")
def recorder_status(app: App, options: Options) -> list[Report]:
    """Return the state of the recorder, and the folder of recordings."""
    path = app.recorder.path
    state = "off" if path is None else f"on: {path.name}"
    folder = app.recorder.folder
    sizes = [recording.stat().st_size for recording in recordings.listed(folder)]
    number = count(len(sizes), "recording")
    size = format_bytes(sum(sizes))
    return [note(f"recording is {state} · {number}, {size}, in {folder}")]


RECORDER = CommandGroup(
    "%gpumem recorder",
    "write a recording that outlives the kernel",
    (CommandModule(("on", "off", "status"), lambda: (recorder_on, recorder_off, recorder_status)),),
    alone=lambda: recorder_status,
)


def _recording_names(app: App, begun: str) -> list[str]:
    """Return the names of recordings, for completion; IPython selects those that fit ``begun``."""
    names: list[str] = app.recorder.names()
    return names


@command(
    "%gpumem postmortem",
    "show how the last recorded kernel died",
    argument("file", "FILE", "one of the recordings", offers=_recording_names),
)
def postmortem(app: App, options: Options) -> list[Report]:
    """Return the report on a recording, by default the last one whose kernel died."""
    folder = app.recorder.folder
    if options.file:
        recording = _named_recording(folder, options.file)
        return [postmortem_report(recording, recordings.judge(recording))]
    without_end = [tail for tail in recordings.ended(folder) if tail.kernel and not tail.end]
    if without_end:
        # The newest one of this machine: "dead" sorts before "unknown", which may run elsewhere.
        last = min(without_end, key=lambda tail: recordings.state(tail.kernel))
        recording = recordings.read(last.path)
        return [postmortem_report(recording, recordings.judge(recording))]
    if not folder.exists():
        return [Report("postmortem", "no recordings: %gpumem recorder on starts one")]
    number = count(len(recordings.listed(folder)), "recording")
    text = f"no kernel is known to have died while it was recorded ({number} in {folder})"
    return [Report("postmortem", text)]


def _named_recording(folder: Path, name: str) -> Recording:
    """Return the recording that the user names: a file name in the folder, or a path.

    Raises:
        RecordingError: there is none, or it is not a recording.
    """
    for path in (folder / name, Path(os.path.expanduser(name))):  # noqa: PTH111  # that of Path fails on some names
        recording = recordings.read(path)
        if recording.kernel or recording.cell:
            return recording
    raise RecordingError(
        f"{clean(ellipsize(name))}: there is no such recording; %gpumem recorder status says where "
        f"they are"
    )


def postmortem_report(recording: Recording, verdict: Verdict) -> Report:
    """Return a kernel's last cell, its memory, and why the kernel ended."""
    lines = list[str]()
    if recording.skipped:
        unread = f"{count(recording.skipped, 'line')} of the recording could not be read"
        if verdict.grade:
            unread += ": its end may be among them"
        lines.append(unread)
    evidence = [clean(verdict.evidence)] if verdict.evidence else []
    return Report(
        "postmortem",
        _recording_headline(recording, verdict),
        lines,
        [_memory_table(recording.cell)],
        [Fact("evidence", evidence)],
        _listings(recording.cell),
        is_trouble=bool(verdict.grade),
    )


def _listings(moments: Sequence[Moment]) -> list[Listing]:
    """Return the source of the last cell, with its time and its end as the title; nothing if its
    start is not in the recording.
    """
    if not moments or moments[0].kind != "cell":
        return []
    cell = moments[0]
    last = moments[-1]
    end = clean(last.error) if last.kind == "cell end" else "until its last entry"
    seconds = max(0.0, last.time - cell.time)
    title = f"cell {cell.cell}, ran {format_seconds(seconds)} {end}".rstrip()
    lines = cell.source.split("\n")[:_LINES_SHOWN]
    source = [clean(f"  {line.expandtabs(4)}") for line in lines]
    return [Listing(title, source, code=True)]


def _recording_headline(recording: Recording, verdict: Verdict) -> list[str]:
    """Return the kernel, and when, where and why it died, if it did."""
    name = _kernel_name(recording.kernel)
    why = clean(verdict.text)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recording.last_time))
    if not verdict.grade:
        return [name, why, f"last entry {when}"]
    running = recording.running
    where = "while no cell ran" if running is None else f"in cell {running.cell}"
    return [f"{name} died {where}", when, f"{why} ({verdict.grade})"]


def _kernel_name(kernel: RecordedKernel | None) -> str:
    """Return a kernel's notebook and process."""
    if not kernel:
        return "unknown kernel"
    process = f"process {kernel.pid}"
    if not kernel.notebook:
        return f"kernel {process}"
    return f"kernel of {clean(kernel.notebook.rpartition('/')[2])}, {process}"


def _memory_table(moments: Sequence[Moment]) -> Table:
    """Return the course of each memory over the last cell's moments."""
    sizes_by_name: dict[str, list[int]] = defaultdict(list)
    totals: dict[str, int] = {}
    for moment in moments:
        totals |= moment.totals
        for name, size in moment.memory.items():
            sizes_by_name[name].append(size)
    rows = []
    for name, sizes in sizes_by_name.items():
        row = {
            "memory": clean(device_label(name)),
            "first": format_bytes(sizes[0]),
            "lowest": format_bytes(min(sizes)),
            "highest": format_bytes(max(sizes)),
            "last": format_bytes(sizes[-1]),
            "of": "",
        }
        if name in totals:
            row["of"] = format_bytes(totals[name])
        rows.append(row)
    return Table.of(rows, {"first", "lowest", "highest", "last", "of"})
