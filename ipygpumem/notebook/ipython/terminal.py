"""The lowest row of a terminal, kept for one line while a cell's output scrolls above it.

As apt does: a scroll region (DECSTBM) without the last row, so that nothing that the user's code prints, from Python
or from C, is written over. Each write saves the cursor and puts it back.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_DOWN = "\x1bD"
"""Index: a row down, scrolling at the bottom. Unlike a newline it keeps the column."""
_UP = "\x1b[A"
_ALL_ROWS = "\x1b[r"
_ERASE_ROW = "\x1b[2K"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_FEWEST_ROWS, _FEWEST_COLUMNS = 5, 20


def terminal_of(shell: Any) -> int | None:
    """Return the descriptor of the terminal that a terminal IPython writes to; None without a capable one."""
    terminal = getattr(sys.modules.get("IPython.terminal.interactiveshell"), "TerminalInteractiveShell", None)
    if terminal is None or not isinstance(shell, terminal) or os.name != "posix":
        return None
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return None
    try:
        descriptor = int(sys.__stdout__.fileno())  # type: ignore[union-attr]  # None under pythonw: no POSIX
    except (AttributeError, OSError, ValueError):
        return None
    return descriptor if os.isatty(descriptor) else None


def to_empty_row(descriptor: int) -> str:
    """Return text that moves the cursor to an empty row: its own, or the next if that has text.

    Nobody need know what was written, and by whom: as many blanks as the terminal has columns end in the last column
    of the cursor's row if they began in its first, and in the next row otherwise. Shells do so before their prompt
    (zsh's PROMPT_SP).
    """
    return " " * os.get_terminal_size(descriptor).columns + "\r"


class TerminalLine:
    """A line in the lowest row of the terminal ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reserved: os.terminal_size | None = None
        encoding = getattr(sys.__stdout__, "encoding", None) or "ascii"
        self.unicode = encoding.lower().replace("-", "") == "utf8"

    def draw(self, line: Callable[[int], str]) -> None:
        """Draw what ``line`` returns for the number of columns; nothing while another program has the terminal."""
        if not self._is_ours():
            self._reserved = None  # who takes a terminal over sets the scroll region, too
            return
        size = os.get_terminal_size(self._descriptor)
        if size.lines < _FEWEST_ROWS or size.columns < _FEWEST_COLUMNS:
            self.close()
            return
        text = self._reserve(size) if size != self._reserved else ""
        # Not into the last column: some terminals wrap there.
        shown = f"{_DIM}{line(size.columns - 1)}{_PLAIN}"
        self._write(f"{text}{_SAVE}\x1b[{size.lines};1H{_ERASE_ROW}{shown}{_RESTORE}")

    def _is_ours(self) -> bool:
        """Whether the terminal is in the mode in which cells run: no editor, no pager, no prompt, no other job."""
        import termios  # POSIX only

        local_flags = termios.tcgetattr(self._descriptor)[3]
        return bool(local_flags & termios.ICANON) and os.tcgetpgrp(self._descriptor) == os.getpgrp()

    def _reserve(self, size: os.terminal_size) -> str:
        """Return what sets the scroll region, with the cursor's row scrolled up where it was the last one."""
        all_rows = f"{_SAVE}{_ALL_ROWS}{_RESTORE}" if self._reserved is not None else ""
        self._reserved = size
        return f"{all_rows}{_DOWN}{_UP}{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}"

    def close(self) -> None:
        """Give the row back, empty."""
        if self._reserved is None:
            return
        with contextlib.suppress(OSError):  # the terminal is gone
            rows = os.get_terminal_size(self._descriptor).lines
            self._write(f"{_SAVE}{_ALL_ROWS}\x1b[{rows};1H{_ERASE_ROW}{_RESTORE}")
        self._reserved = None

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
