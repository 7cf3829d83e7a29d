"""``ipygpumem.export`` and ``load``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

from ipygpumem.api.shell import current_shell, current_traces, loaded_notebook
from ipygpumem.errors import FileError, NotLoadedError, short
from ipygpumem.merging.own import recorded
from ipygpumem.merging.recordings import merge_recordings
from ipygpumem.merging.records import Merged
from ipygpumem.model import SessionRecord
from ipygpumem.reports.export import formats
from ipygpumem.reports.layout import clean
from ipygpumem.reports.merged import ShownMerged

Place = str | os.PathLike[str]
_WILD = frozenset("*?[")


def export(path: Place, *, force: bool = False) -> None:
    """Write the finished cells and experiments to a file, whole or not at all; its suffix says the format.

    In a script, without IPython, it writes the finished traces.

    Args:
        path: ends in ``.json`` (all of it, for ``load``), ``.csv``, ``.html`` or ``.prom`` (OpenMetrics).
        force: replace a file that ipygpumem did not write.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython.
        FileError: the suffix is none of these, the file there is another's, or it cannot be written.
    """
    notebook = loaded_notebook()
    if notebook is None and current_shell() is not None:
        raise NotLoadedError("ipygpumem is not loaded here: run %load_ext ipygpumem first")
    record = recorded((), (), current_traces().finished) if notebook is None else notebook.records()
    formats.save(path, record, force=force)


@overload
def load(path: Iterable[Place]) -> Merged: ...


@overload
def load(path: Place) -> Any: ...  # a SessionRecord; of a folder or a pattern Merged


def load(path: Place | Iterable[Place]) -> SessionRecord | Merged:
    """Return what was exported to a .json file; it needs neither IPython nor the extension.

    The files of several processes of one job become one record, which shows itself as one report.

    Args:
        path: one file; or several files, a folder with them, or a pattern such as ``run/*.json``.

    Raises:
        FileError: the file cannot be read, was not exported by ipygpumem, or was written by a newer ipygpumem; of
            several, none could be read.
    """
    places = _several(path)
    if places is None:
        return formats.load(path)  # type: ignore[arg-type]  # _several says that it is one
    read = list(map(_read, places))
    found = [one for one in read if isinstance(one, SessionRecord)]
    lost = [why for why in read if isinstance(why, str)]
    if not found:
        raise FileError(lost[0] if lost else f"there is no .json file in {clean(short(path))}")
    return ShownMerged(**vars(merge_recordings(found, lost)))


def _read(place: Place) -> SessionRecord | str:
    """Return a recording, or why it cannot be read."""
    try:
        return formats.load(place)
    except FileError as error:
        return str(error)


def _several(path: Place | Iterable[Place]) -> list[Place] | None:
    """Return the files that are meant; None for one file."""
    if not isinstance(path, (str, os.PathLike)):
        return list(path)
    try:
        place = Path(path).expanduser()
        if place.is_dir():
            return list[Place](sorted(place.glob("*.json")))
        is_there = place.exists()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # no such user, or a name that no file can have: whoever opens it says so
        return None
    if is_there or not _WILD & set(str(place)):
        return None
    return list[Place](sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor)))))
