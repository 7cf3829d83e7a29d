"""Writes files whole or not at all, and never over a file of somebody else's."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from ipygpumem.errors import FileError, short
from ipygpumem.reports.layout import clean

_HEAD_BYTES = 4096


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return the path itself: ``~`` is the user's folder, and a link is what it leads to."""
    try:
        return Path(os.path.realpath(Path(path).expanduser()))
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a null byte
        raise FileError(f"{clean(short(path))!r} cannot be a file name: {short(error)}") from None


def write(place: Path, content: str | bytes, *, is_ours: Callable[[str], bool], force: bool) -> int:
    """Write ``content`` to ``place`` and return its size in bytes; what was there before stays if that fails.

    Args:
        place: from ``place_of``.
        content: all of it.
        is_ours: whether a file that begins with this text may be written over.
        force: write over any file.

    Raises:
        FileError: the file is another's, or cannot be written; then nothing has changed and nothing is left behind.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    try:
        mode = _mode_of(place, is_ours, force=force)
        _replace(place, data, mode)
    except OSError as error:
        raise FileError(f"{clean(short(place))} cannot be written: {error.strerror or short(error)}") from None
    return len(data)


def read(place: Path) -> str:
    """Return the text of a file.

    Raises:
        FileError: it cannot be read, or is not text.
    """
    try:
        return place.read_text("utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{clean(short(place))} is not text") from None
    except (OSError, ValueError) as error:
        raise FileError(
            f"{clean(short(place))} cannot be read: {getattr(error, 'strerror', None) or short(error)}"
        ) from None


def _mode_of(place: Path, is_ours: Callable[[str], bool], *, force: bool) -> int | None:
    """Return the permissions of the file that will be written over; None if there is none."""
    try:
        found = place.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "not a plain file"
        raise FileError(f"{clean(short(place))} is {what}: name a file to write")
    if not force and found.st_size and not is_ours(_head(place)):
        raise FileError(
            f"{clean(short(place))} is a file that ipygpumem did not write: --force (force=True) replaces it"
        )
    return stat.S_IMODE(found.st_mode)


def _head(place: Path) -> str:
    with place.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", "replace")


def _replace(place: Path, data: bytes, mode: int | None) -> None:
    # In the same folder, or replacing would not be one step; a short name, since the file's may be as long as can be.
    temporary = place.with_name(f".ipygpumem-{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # some file systems have none
                    temporary.chmod(mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)
    except BaseException:  # an interrupt, too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
