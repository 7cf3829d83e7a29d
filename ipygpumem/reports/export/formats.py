"""Writes a session in the format that a file's suffix asks for, and reads it back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ipygpumem.errors import FileError, short
from ipygpumem.model import SessionRecord
from ipygpumem.reports.export import csv_file, files, html_page, json_file, openmetrics
from ipygpumem.reports.layout import clean

_FORMATS: dict[str, tuple[Callable[[SessionRecord], str], Callable[[str], bool]]] = {
    ".json": (json_file.render, json_file.is_ours),
    ".csv": (csv_file.render, csv_file.is_ours),
    ".html": (html_page.render, html_page.is_ours),
    ".prom": (openmetrics.render, openmetrics.is_ours),
}
"""By suffix, what writes a session as text, and whether it wrote a file that begins with some text."""
SUFFIXES = tuple(_FORMATS)


def save(path: str | os.PathLike[str], record: SessionRecord, *, force: bool = False) -> tuple[Path, int]:
    """Write ``record`` to ``path`` in the format of its suffix; return where it is now and its size in bytes.

    Raises:
        FileError: the suffix is none of ours, the file there is another's, or it cannot be written.
    """
    place = files.place_of(path)
    chosen = _FORMATS.get(Path(path).suffix.lower())
    if chosen is None:
        raise FileError(
            f"{clean(short(path))}: the suffix says the format: {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    render, is_ours = chosen
    return place, files.write(place, render(record), is_ours=is_ours, force=force)


def load(path: str | os.PathLike[str]) -> SessionRecord:
    """Return the session that was written to a .json file.

    Raises:
        FileError: it cannot be read, is not an export, or one of a newer ipygpumem.
    """
    place = files.place_of(path)
    return json_file.parse(files.read(place), clean(short(path)))
