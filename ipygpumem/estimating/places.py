"""Whose code is it: the user's, or a library's; and where the user's code is now."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
import types
from pathlib import Path

_OURS = str(Path(__file__).parent.parent)


@functools.cache
def _libraries() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    paths: list[str | None] = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths.append(str(Path(torch).parent) if torch else None)
    return (*(path for path in paths if path), _OURS, "<frozen", "<string", "<__array_function__")


def is_users(filename: str) -> bool:
    """Whether a file is neither the standard library's, nor installed, nor ours."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return bool(filename) and not installed and not filename.startswith(_libraries())


def is_ours(filename: str) -> bool:
    """Whether a file is one of this package."""
    return filename.startswith(_OURS)


def users_line(frame: types.FrameType | None = None) -> str:
    """Return where the user's code is now: the innermost line that is no library's, if there is one."""
    first = found = frame or sys._getframe(1)
    while not is_users(found.f_code.co_filename):
        if found.f_back is None:
            found = first
            break
        found = found.f_back
    return line_text(found.f_code.co_filename, found.f_lineno)


def line_text(name: str, number: int) -> str:
    """Return how a line is named: its file, if it has one, its number and what stands there."""
    source = linecache.getline(name, number).strip()
    # A cell's file, where it has one, has a name that says nothing.
    has_file = Path(name).is_file() and "ipykernel" not in Path(name).parent.name
    place = f"{Path(name).name}, line {number}" if has_file else f"line {number}"
    return f"{place}: {source}" if source else place
