"""``%gpumem record`` and ``postmortem``: a recording that outlives the kernel, and how the last one died."""

from __future__ import annotations

import os
from pathlib import Path

from ipygpumem import flight_recorder
from ipygpumem.errors import RecordingError, short
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.layout import Report, clean, count, note
from ipygpumem.reports.postmortem import postmortem_report
from ipygpumem.units import format_bytes


def record_on(notebook: Notebook, options: Options) -> list[Report]:
    """Begin to record."""
    notebook.recorder.start()
    notebook.context.config.record = True
    return record_status(notebook, options)


def record_off(notebook: Notebook, options: Options) -> list[Report]:
    """End the recording."""
    notebook.context.config.record = False
    return record_status(notebook, options)


def record_status(notebook: Notebook, options: Options) -> list[Report]:
    """Return whether it records, and where recordings are."""
    path, folder = notebook.recorder.path, notebook.recorder.folder
    sizes = [found.stat().st_size for found in flight_recorder.listed(folder)]
    kept = f"{count(len(sizes), 'recording')}, {format_bytes(sum(sizes))}, in {folder}"
    return [note(f"recording is {'off' if path is None else f'on: {path.name}'} · {kept}")]


def postmortem(notebook: Notebook, options: Options) -> list[Report]:
    """Return the report on a recording, by default the last one whose kernel died."""
    folder = notebook.recorder.folder
    gone = [one for one in flight_recorder.ended(folder) if one.kernel and not one.end]
    gone.sort(key=lambda one: flight_recorder.state(one.kernel))  # "dead" before "unknown": that may run elsewhere
    if not (options.file or gone):
        recordings = count(len(flight_recorder.listed(folder)), "recording")
        text = f"no kernel is known to have died while it was recorded ({recordings} in {folder})"
        return [Report("postmortem", text if folder.exists() else "nothing was recorded: %gpumem record on starts it")]
    found = _named(folder, options.file) if options.file else flight_recorder.read(gone[0].path)
    return [postmortem_report(found, flight_recorder.judge(found))]


def _named(folder: Path, name: str) -> flight_recorder.Recording:
    """Return the recording that a user names: by its file's name in the folder, or by a path."""
    for path in (folder / name, Path(os.path.expanduser(name))):  # noqa: PTH111  # that of Path fails on some names
        found = flight_recorder.read(path)
        if found.kernel or found.cell:
            return found
    raise RecordingError(f"{clean(short(name))}: there is no such recording; %gpumem record status says where they are")
