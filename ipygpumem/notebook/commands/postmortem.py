"""``%gpumem postmortem``: how the last kernel died that was recorded."""

from __future__ import annotations

from pathlib import Path

from IPython.core.error import UsageError

from ipygpumem.errors import RecordingError, short
from ipygpumem.flight_recorder import archive, files, reader, verdict
from ipygpumem.flight_recorder.machine import this_machine
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports import postmortem as reports
from ipygpumem.reports.layout import Report, clean


def postmortem(notebook: Notebook, options: Options) -> list[Report]:
    """Return the report that ``%gpumem postmortem`` and its options ask for.

    Raises:
        RecordingError: the file is not a recording.
    """
    if options.all and options.file:
        raise UsageError("%gpumem postmortem: write --all, or a file, and not both")
    folder = notebook.recorder.folder
    if options.file:
        return [_report(_named(folder, options.file))]
    if options.all:
        tails = [reader.read_tail(segments) for segments in files.listed(folder)]
        return [reports.list_report([(tail, verdict.judge(tail, verdict.scene(tail))) for tail in tails], str(folder))]
    here, tails = this_machine(), []
    for segments in files.listed(folder):
        tails.append(reader.read_tail(segments))
        if archive.died(tails[-1], archive.state_of(tails[-1], here)):
            return [_report(reader.read(segments))]
    return [reports.nothing_report(archive.counts(tails, here), on=notebook.recorder.segments is not None)]


def _named(folder: Path, name: str) -> reader.Recording:
    """Return the recording that a user names: by its file's name in the folder, or by a path."""
    try:
        path = folder / name if (folder / name).exists() else Path(name).expanduser()
        path = path.with_name(path.name.removesuffix(".1"))
        found, is_there = reader.read(files.Segments(path)), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, or a name that no file can have
        why = getattr(error, "strerror", None) or short(error)
        raise RecordingError(f"{clean(short(name))} cannot be read: {why}") from None
    if found.header is None and not found.entries:
        reason = "it is not a recording" if is_there else "there is no such file"
        raise RecordingError(f"{clean(short(name))}: {reason}; %gpumem postmortem --all lists what there is")
    return found


def _report(recording: reader.Recording) -> Report:
    return reports.postmortem_report(recording, verdict.judge(recording, verdict.scene(recording)))
