"""``%gpumem recorder`` and ``%gpumem postmortem``, with the report on the end of a dead kernel."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ipygpumem.errors import RecordingError, ellipsize
from ipygpumem.extras.recorder import recordings
from ipygpumem.extras.recorder.recordings import Moment, Recording, Verdict
from ipygpumem.report.layout import Fact, Listing, Report, Table, clean, count, device_label, note
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Group, Options, Part, argument, command
from ipygpumem.units import format_bytes, format_seconds


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
    path, folder = app.recorder.path, app.recorder.folder
    sizes = [found.stat().st_size for found in recordings.listed(folder)]
    kept = f"{count(len(sizes), 'recording')}, {format_bytes(sum(sizes))}, in {folder}"
    return [note(f"recording is {'off' if path is None else f'on: {path.name}'} · {kept}")]


RECORDER = Group(
    "%gpumem recorder",
    "write a recording that outlives the kernel",
    (Part(("on", "off", "status"), lambda: (recorder_on, recorder_off, recorder_status)),),
)


def _recordings(app: App, begun: str) -> list[str]:
    """Return the names of recordings, for Tab."""
    names: list[str] = app.recorder.names()
    return names


@command(
    "%gpumem postmortem",
    "show how the last recorded kernel died",
    argument("file", "FILE", "one of the recordings", offers=_recordings),
)
def postmortem(app: App, options: Options) -> list[Report]:
    """Return the report on a recording, by default the last one whose kernel died."""
    folder = app.recorder.folder
    gone = [one for one in recordings.ended(folder) if one.kernel and not one.end]
    # "dead" before "unknown": that may run elsewhere
    gone.sort(key=lambda one: recordings.state(one.kernel))
    if not (options.file or gone):
        known = count(len(recordings.listed(folder)), "recording")
        text = f"no kernel is known to have died while it was recorded ({known} in {folder})"
        return [
            Report(
                "postmortem",
                text if folder.exists() else "no recordings: %gpumem recorder on starts one",
            )
        ]
    found = _named(folder, options.file) if options.file else recordings.read(gone[0].path)
    return [postmortem_report(found, recordings.judge(found))]


def _named(folder: Path, name: str) -> recordings.Recording:
    """Return the recording with a file name in the folder, or a path."""
    for path in (folder / name, Path(os.path.expanduser(name))):  # noqa: PTH111  # that of Path fails on some names
        found = recordings.read(path)
        if found.kernel or found.cell:
            return found
    raise RecordingError(
        f"{clean(ellipsize(name))}: there is no such recording; %gpumem recorder status says where "
        f"they are"
    )


def postmortem_report(recording: Recording, verdict: Verdict) -> Report:
    """Return a kernel's last cell, its memory, and why the kernel ended."""
    lines = list[str]()
    if recording.skipped:
        unread = f"{count(recording.skipped, 'line')} of the recording could not be read"
        lines.append(f"{unread}: its end may be among them" if verdict.grade else unread)
    moments = recording.cell
    listings = []
    if moments and moments[0].kind == "cell":
        cell, last = moments[0], moments[-1]
        ran = f"ran {format_seconds(max(0.0, last.time - cell.time))}"
        ran += f" {clean(last.error)}" if last.kind == "cell end" else " until its last entry"
        source = [clean(f"  {line.expandtabs(4)}") for line in cell.source.split("\n")[:20]]
        listings.append(Listing(f"cell {cell.cell}, {ran}", source, code=True))
    return Report(
        "postmortem",
        _headline(recording, verdict),
        lines,
        [_memory_table(moments)],
        [Fact("evidence", [clean(verdict.evidence)] * bool(verdict.evidence))],
        listings,
        is_trouble=bool(verdict.grade),
    )


def _headline(recording: Recording, verdict: Verdict) -> list[str]:
    kernel, running, why = recording.kernel, recording.running, clean(verdict.text)
    notebook = (
        f"of {clean(kernel.notebook.rpartition('/')[2])}, " if kernel and kernel.notebook else ""
    )
    name = f"kernel {notebook}process {kernel.pid}" if kernel else "unknown kernel"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recording.last_time))
    if not verdict.grade:
        return [name, why, f"last entry {when}"]
    where = "while no cell ran" if running is None else f"in cell {running.cell}"
    return [f"{name} died {where}", when, f"{why} ({verdict.grade})"]


def _memory_table(moments: Sequence[Moment]) -> Table:
    sizes, totals = defaultdict[str, list[int]](list), dict[str, int]()
    for moment in moments:
        totals |= moment.totals
        for name, size in moment.memory.items():
            sizes[name].append(size)
    rows = [
        {
            "memory": clean(device_label(name)),
            "first": format_bytes(found[0]),
            "lowest": format_bytes(min(found)),
            "highest": format_bytes(max(found)),
            "last": format_bytes(found[-1]),
            "of": format_bytes(totals[name]) if name in totals else "",
        }
        for name, found in sizes.items()
    ]
    return Table.of(rows, {"first", "lowest", "highest", "last", "of"})
