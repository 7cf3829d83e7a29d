"""``%gpumem recorder`` and ``%gpumem postmortem``."""

from __future__ import annotations

import os
from pathlib import Path

from ipygpumem.errors import RecordingError, ellipsize
from ipygpumem.extras.recorder import recordings
from ipygpumem.extras.recorder.postmortem_report import postmortem_report
from ipygpumem.magics.parsing import Options
from ipygpumem.report.layout import Report, clean, count, note
from ipygpumem.shell.app import App
from ipygpumem.units import format_bytes


def recorder_on(app: App, options: Options) -> list[Report]:
    """Start the flight recorder."""
    app.recorder.start()
    app.context.config.recorder = True
    return recorder_status(app, options)


def recorder_off(app: App, options: Options) -> list[Report]:
    """End the recording."""
    app.context.config.recorder = False
    return recorder_status(app, options)


def recorder_status(app: App, options: Options) -> list[Report]:
    """Return the state of the recorder, and the folder of recordings."""
    path, folder = app.recorder.path, app.recorder.folder
    sizes = [found.stat().st_size for found in recordings.listed(folder)]
    kept = f"{count(len(sizes), 'recording')}, {format_bytes(sum(sizes))}, in {folder}"
    return [note(f"recording is {'off' if path is None else f'on: {path.name}'} · {kept}")]


def postmortem(app: App, options: Options) -> list[Report]:
    """Return the report on a recording, by default the last one whose kernel died."""
    folder = app.recorder.folder
    gone = [one for one in recordings.ended(folder) if one.kernel and not one.end]
    gone.sort(key=lambda one: recordings.state(one.kernel))  # "dead" before "unknown": that may run elsewhere
    if not (options.file or gone):
        known = count(len(recordings.listed(folder)), "recording")
        text = f"no kernel is known to have died while it was recorded ({known} in {folder})"
        return [Report("postmortem", text if folder.exists() else "no recordings: %gpumem recorder on starts one")]
    found = _named(folder, options.file) if options.file else recordings.read(gone[0].path)
    return [postmortem_report(found, recordings.judge(found))]


def _named(folder: Path, name: str) -> recordings.Recording:
    """Return the recording with a file name in the folder, or a path."""
    for path in (folder / name, Path(os.path.expanduser(name))):  # noqa: PTH111  # that of Path fails on some names
        found = recordings.read(path)
        if found.kernel or found.cell:
            return found
    raise RecordingError(
        f"{clean(ellipsize(name))}: there is no such recording; %gpumem recorder status says where they are"
    )
