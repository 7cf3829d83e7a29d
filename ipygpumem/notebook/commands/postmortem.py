"""``%gpumem record`` and ``%gpumem postmortem``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from ipygpumem.errors import RecordingError
from ipygpumem.flight_recorder import archive, files, reader, verdict
from ipygpumem.flight_recorder.machine import this_machine
from ipygpumem.notebook.commands.parsing import Parser
from ipygpumem.reports import postmortem as reports
from ipygpumem.reports.content import Report, clean, count, note
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook


def record(notebook: Notebook, words: list[str]) -> list[Report]:
    """Do what ``%gpumem record`` asks for: on, off (and delete), or status.

    Raises:
        RecordingError: a recording cannot be written.
    """
    parser = Parser(prog="%gpumem record", add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=["on", "off", "status"])
    parser.add_argument("--delete", action="store_true")
    options = parser.parse_args(words)
    if options.delete and options.command != "off":
        raise UsageError("%gpumem record: --delete goes with off: %gpumem record off --delete")
    recorder = notebook.recorder
    if options.command == "on":
        recorder.start()
        notebook.tools.config.record = True
    elif options.command == "off":
        own = recorder.segments
        notebook.tools.config.record = False
        if options.delete:
            return [_delete(recorder.folder, own)]
    return [_status(notebook)]


def _status(notebook: Notebook) -> Report:
    segments, folder = notebook.recorder.segments, notebook.recorder.folder
    sizes = [found.size_bytes for found in files.listed(folder)]
    kept = f"{count(len(sizes), 'recording')}, {format_bytes(sum(sizes))}, in {folder}"
    return note(f"recording is {'off' if segments is None else f'on: {segments.name}'} · {kept}")


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
        text += f" · {count(kept, 'recording')} kept: of kernels that still run, or may"
    if len(left) > kept:
        text += f" · {len(left) - kept} could not be deleted"
    return note(text)


def postmortem(notebook: Notebook, words: list[str]) -> list[Report]:
    """Return the report that ``%gpumem postmortem`` and its options ask for.

    Raises:
        RecordingError: the file that is named is no recording.
    """
    parser = Parser(prog="%gpumem postmortem", add_help=False, allow_abbrev=False)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args(words)
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
    path = folder / name if (folder / name).exists() else Path(name).expanduser()
    path = path.with_name(path.name.removesuffix(".1"))
    found = reader.read(files.Segments(path))
    if found.header is None and not found.entries:
        reason = "it is no recording" if path.exists() else "there is no such file"
        raise RecordingError(f"{clean(name)}: {reason}; %gpumem postmortem --all lists what there is")
    return found


def _report(recording: reader.Recording) -> Report:
    return reports.postmortem_report(recording, verdict.judge(recording, verdict.scene(recording)))
