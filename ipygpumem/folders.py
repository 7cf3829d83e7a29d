"""Folders that nobody but their owner shall look into."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make ``folder`` and what is above it, and take everybody's rights to it but its owner's (``OSError``).

    Where the file system knows no such rights, it stays as it is.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # it was there before
        with contextlib.suppress(PermissionError):
            folder.chmod(0o700)
