"""Exports a session: JSON, which ``load`` reads back without loss, or CSV for spreadsheets."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from ipygpumem.errors import FileError, describe_error, ellipsize, quoted
from ipygpumem.introspect import type_name
from ipygpumem.probes import host
from ipygpumem.records import MOST_DEVICES, SCHEMA, USAGE_BYTES, SessionRecord, is_kind, open_plain
from ipygpumem.report.words import clean
from ipygpumem.units import format_bytes

_NAME = "ipygpumem"
"""Format of an export, and our key in the metadata of a notebook's outputs."""
_HEAD_BYTES = 4096
"""Bytes of a file that are read to find out if it is an export."""
_MOST_BYTES = 2**29
"""Maximum size of an export to read: enough for about a million cells."""
_STALE_SECONDS = 3600
"""Age of another machine's temporary file from which on it is removed."""
_TEMPORARY = re.compile(r"\.ipygpumem-(?:(\d{1,10})-([0-9a-f]{8})-)?[0-9a-f]+\.tmp")
"""Name of a file that is being written: PID and machine of the process."""

_RUN = (
    "execution_count",
    "cell_id",
    "experiment",
    "started_at",
    "duration_seconds",
    "success",
    "error",
)
_CELL = (*_RUN, "source_line", "source_digest")
_USAGE = ("device", *USAGE_BYTES, "method")
COLUMNS = (*_CELL, "recovery", *_USAGE)

# Spreadsheets read text as a formula if it begins with one of these, also after white space.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # the last four are full-width


# -- formats ------------------------------------------------------------------------------------


def to_json(record: SessionRecord) -> str:
    """Return the record as JSON. It is in ASCII, so that even broken text in it survives."""
    return json.dumps({"format": _NAME, "schema": SCHEMA, **record.to_dict()}, allow_nan=False)


_LAST_TIME = 9e9
"""Largest Unix time in seconds that pandas can hold, rounded down: the year 2255."""


Modules = Mapping[str, Callable[[], object]]
"""Functions that import the class of a kind of record, by kind."""


def from_json(text: str, name: str, saved_at: float, modules: Modules) -> SessionRecord:
    """Return the record that ``to_json`` wrote, or the records in the outputs of a notebook.

    Args:
        text: the content of the file.
        name: the file's name, for errors.
        saved_at: the time at which it was saved.
        modules: the functions that import further classes of records.

    Raises:
        FileError: the text is neither an export nor a notebook, or it is damaged.
    """
    data = _data_of(text, name, saved_at, modules)
    if not _is_export(data):
        raise FileError(
            f"{name} is neither an export of ipygpumem (%gpumem export writes one) nor a notebook"
        )
    schema = data["schema"]
    if schema > SCHEMA:
        raise FileError(
            f"{name} has schema {quoted(schema)} and this ipygpumem reads up to {SCHEMA}: "
            f"upgrade it"
        )
    try:
        record = SessionRecord.from_dict(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{name} is damaged: {ellipsize(error)}") from None
    fault = _fault_of(record)
    if fault:
        raise FileError(f"{name} is damaged: {fault}")
    return record


def _is_export(data: Any) -> bool:
    """Return True if plain values have the format and the schema of an export."""
    if type(data) is not dict or data.get("format") != _NAME:
        return False
    return type(data.get("schema")) is int


def _data_of(text: str, name: str, saved_at: float, modules: Modules) -> Any:
    """Return the plain values of an export; those of a notebook are collected from its outputs. The
    arguments are those of ``from_json``.
    """
    constants: list[str] = []

    def text_of_constant(word: str) -> str:
        # JSON has no NaN or Infinity, so an export with one is damaged. A notebook may have it in
        # the output of another program, where it does not matter.
        constants.append(word)
        return word

    try:
        data = json.loads(text, parse_constant=text_of_constant)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name} is not JSON, or only a part of it ({ellipsize(error)})") from None
    if type(data) is dict and "nbformat" in data:
        return _data_of_notebook(data, name, saved_at, modules)
    if constants:
        raise FileError(f"{name} is not JSON (which has no number {constants[0]})")
    return data


def _fault_of(record: SessionRecord) -> str:
    """Return the fault of a record, in words; empty if it has none. Such a record was not written
    by us, and would break pictures and tables.
    """
    runs: list[Any] = [*record.cells, *record.experiments, *record.traces]
    devices = set[str]()
    for run in runs:
        if abs(run.started_at) > _LAST_TIME:
            return "it contains an invalid time"
        devices.update(usage.device for usage in run.usages)
    if len(devices) > MOST_DEVICES:
        return f"it has {len(devices)} devices"
    return ""


def _data_of_notebook(
    notebook: dict[str, Any], name: str, saved_at: float, modules: Modules
) -> dict[str, Any]:
    """Return the records in a notebook's outputs as the plain values of an export. Metadata of
    other programs is ignored.
    """
    data: dict[str, Any] = {"format": _NAME, "schema": 0, "saved_at": saved_at}
    data |= {"results": [], "left_out": {}}
    for records in _LISTS.values():
        data[records] = []
    try:
        for cell in notebook["cells"]:
            for output in cell.get("outputs", ()):
                metadata = output.get("metadata", {})
                _add_records(data, metadata.get(_NAME, {}), modules)
        for records in _LISTS.values():
            # cells may have run in any order
            data[records].sort(key=itemgetter("started_at"))
    except (AttributeError, KeyError, TypeError) as error:
        raise FileError(f"{name} is damaged, or not a notebook ({describe_error(error)})") from None
    return data


def _add_records(data: dict[str, Any], metadata: Any, modules: Modules) -> None:
    """Add the records in our metadata of one output to the plain values of an export; also the
    newest schema, and the numbers of records that were left out of the notebook.
    """
    data["schema"] = max(data["schema"], metadata.get("schema", 0))
    for record in metadata.get("records", ()):
        kind = record["kind"]
        if _has_class(kind, modules):  # else of a newer version
            data[_LISTS.get(kind, "results")].append(record)
    left_out = data["left_out"]
    for kind, number in metadata.get("left_out", {}).items():
        left_out[kind] = left_out.get(kind, 0) + number


def _has_class(kind: object, modules: Modules) -> bool:
    """Return True if there is a class for a kind of record. An optional feature's class is imported
    for this.
    """
    if type(kind) is str and not is_kind(kind) and kind in modules:
        modules[kind]()
    return is_kind(kind)


def to_csv(record: SessionRecord) -> str:
    """Return the cells as CSV, with one row for each device of a cell; a cell without figures has
    one row.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in record.cells:
        values_of_cell = [getattr(cell, name) for name in _CELL]
        recovery = None if cell.recovery is None else cell.recovery.kind
        values_of_cell.append(recovery)
        for usage in cell.usages or (None,):
            values_of_usage = [getattr(usage, name, None) for name in _USAGE]
            writer.writerow(map(_no_formula, values_of_cell + values_of_usage))
    return buffer.getvalue()


def _no_formula(value: object) -> object:
    """Return a text in a form that no spreadsheet runs as a formula; anything but text is returned
    unchanged.
    """
    if type(value) is not str:
        return value
    text = clean(value)
    if text.lstrip().startswith(_FORMULA):
        return f"'{text}"
    return text


_FORMATS: dict[str, tuple[Callable[[SessionRecord], str], str]] = {
    ".json": (to_json, f'{{"format": "{_NAME}", "schema": '),
    ".csv": (to_csv, ",".join(COLUMNS)),
}
"""Renderers of a session by suffix, with the beginning of every file that they write."""
_LISTS = {"CellRecord": "cells", "ExperimentRecord": "experiments", "TraceRecord": "traces"}
"""Lists of an export by the kind of their records."""
SUFFIXES = tuple(_FORMATS)


# -- files --------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str], record: SessionRecord, *, force: bool = False
) -> tuple[Path, int]:
    """Write a session to a file, in the format of its suffix. Return the resolved path and the
    file's size in bytes.

    Args:
        path: the file.
        record: the session.
        force: True to replace a file that is no export.
    """
    place = place_of(path)
    suffix = Path(os.fsdecode(path)).suffix.lower()
    if suffix not in _FORMATS:
        name = clean(ellipsize(os.fsdecode(path)))
        raise FileError(f"{name}: the suffix selects the format: {' or '.join(SUFFIXES)}")
    render, head = _FORMATS[suffix]

    def is_ours(beginning: str) -> bool:
        """Return True if a file begins like an export in this format."""
        return beginning.startswith(head)

    return place, write(place, render(record), is_ours=is_ours, force=force)


def load(path: str | os.PathLike[str], modules: Modules) -> SessionRecord:
    """Return the session stored in a .json file, or the records in a notebook.

    Args:
        path: the file.
        modules: the functions that import further classes of records, by kind.
    """
    place = place_of(path)
    name = clean(ellipsize(place))
    try:
        with open_plain(place) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:
                raise FileError(f"{name} has {format_bytes(size)}: too large for an export")
            text = file.read(size).decode("utf-8-sig")
            saved_at = os.fstat(file.fileno()).st_mtime
    except UnicodeDecodeError:
        raise FileError(f"{name} is not text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or ellipsize(error)
        raise FileError(f"{name} cannot be read: {why}") from None
    return from_json(text, clean(ellipsize(os.fsdecode(path))), saved_at, modules)


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file: ``~`` is expanded, and links are followed."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise FileError(f"a file name must be a string or a path, not {type_name(path)}") from None
    try:
        return Path(os.path.realpath(Path(name).expanduser()))
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a null byte
        raise FileError(
            f"{clean(ellipsize(name))!r} cannot be a file name: {ellipsize(error)}"
        ) from None


def write(place: Path, content: str | bytes, *, is_ours: Callable[[str], bool], force: bool) -> int:
    """Write a file completely or not at all. Return its size in bytes.

    Args:
        place: the path, from ``place_of``.
        content: the file's content.
        is_ours: returns True for the beginning of a file that may be replaced.
        force: True to replace any file.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    name = clean(ellipsize(place))
    try:
        mode = None
        if place.exists():
            existing = place.stat()
            mode = stat.S_IMODE(existing.st_mode)
            if not stat.S_ISREG(existing.st_mode):
                what = "a folder" if stat.S_ISDIR(existing.st_mode) else "not a plain file"
                raise FileError(f"{name} is {what}: name a file to write")
            if existing.st_size and not force and not is_ours(_beginning_of(place)):
                raise FileError(
                    f"{name} is a file that ipygpumem did not write: --force (force=True) "
                    f"replaces it"
                )
        _replace_file(place, data, mode)
    except OSError as error:
        raise FileError(f"{name} cannot be written: {error.strerror or ellipsize(error)}") from None
    return len(data)


def _beginning_of(place: Path) -> str:
    """Return the beginning of a file as text."""
    with open_plain(place) as file:
        return file.read(_HEAD_BYTES).decode("utf-8", "replace")


def _replace_file(place: Path, data: bytes, mode: int | None) -> None:
    """Write a temporary file, and then rename it to ``place``: a reader sees the old file or the
    new one, never a part.

    Args:
        place: the path.
        data: the file's content.
        mode: the permissions of the file that it replaces; None if there is none.
    """
    # In the same folder, for an atomic rename; a short name, because the file's own may have the
    # maximum length.
    unique = f"{os.getpid()}-{_machine_id()}-{secrets.token_hex(4)}"
    temporary = place.with_name(f".ipygpumem-{unique}.tmp")
    _remove_stale_files(place.parent)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # unsupported by some file systems
                    temporary.chmod(mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)
    except BaseException:  # including an interrupt
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _machine_id() -> str:
    """Return a short identifier of the machine and PID namespace: a PID means nothing elsewhere."""
    return hashlib.sha256(host.process_space().encode()).hexdigest()[:8]


def _remove_stale_files(folder: Path) -> None:
    """Remove the temporary files that killed processes have left in a folder. Files of another
    machine, which may still be written, are removed only if they are an hour old.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(".ipygpumem-*.tmp"):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None:
                continue
            pid, machine = match.groups()
            with contextlib.suppress(OSError):
                is_dead = machine == _machine_id() and not host.is_running(int(pid))
                if is_dead or time.time() - path.lstat().st_mtime > _STALE_SECONDS:
                    path.unlink()
