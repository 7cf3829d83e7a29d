"""``%gpumem record``: the recording that outlives the kernel."""

from __future__ import annotations

from pathlib import Path

from ipygpumem.flight_recorder import archive, files, reader
from ipygpumem.flight_recorder.machine import this_machine
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.layout import Report, count, note
from ipygpumem.units import format_bytes


def record_on(notebook: Notebook, options: Options) -> list[Report]:
    """Begin to record.

    Raises:
        RecordingError: a recording cannot be written.
    """
    notebook.recorder.start()
    notebook.tools.config.record = True
    return record_status(notebook, options)


def record_off(notebook: Notebook, options: Options) -> list[Report]:
    """End the recording, and with ``--delete`` delete what has been recorded."""
    own = notebook.recorder.segments
    notebook.tools.config.record = False
    return [_delete(notebook.recorder.folder, own)] if options.delete else record_status(notebook, options)


def record_status(notebook: Notebook, options: Options) -> list[Report]:
    """Return whether it records, and where recordings are."""
    segments, folder = notebook.recorder.segments, notebook.recorder.folder
    sizes = [found.size_bytes for found in files.listed(folder)]
    kept = f"{count(len(sizes), 'recording')}, {format_bytes(sum(sizes))}, in {folder}"
    return [note(f"recording is {'off' if segments is None else f'on: {segments.name}'} · {kept}")]


def _delete(folder: Path, own: files.Segments | None) -> Report:
    """Delete the recordings of this kernel and of those that have ended."""
    here, kept = this_machine(), 0
    found = files.listed(folder)
    for segments in found:
        if segments != own and archive.state_of(reader.read_tail(segments), here) != "dead":
            kept += 1
        else:
            segments.delete()
    left = files.listed(folder)
    text = f"recording is off · {count(len(found) - len(left), 'recording')} deleted"
    if kept:
        text += f" · {count(kept, 'recording')} kept: their kernels still run, or may"
    if len(left) > kept:
        text += f" · {len(left) - kept} could not be deleted"
    return note(text)
