"""Reads recordings, also while they are written: torn and strange lines are left out and counted."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ipygpumem.flight_recorder.entries import CellEnd, CellStart, End, Entry, Figures, Header, Sample, decode
from ipygpumem.flight_recorder.files import Segments

_MOST_BYTES = 64 * 2**20
_ATTEMPTS = 5
_TAIL_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Recording:
    """What a recording says."""

    segments: Segments
    header: Header | None
    """None for a file that is no recording, or whose beginning is damaged."""
    entries: tuple[Entry, ...]
    """All others, in the order in which they were written."""
    skipped: int = 0
    """Lines that are no entries; a torn last line is not counted."""

    @functools.cached_property
    def end(self) -> End | None:
        """Why the recording ended on purpose, if it did."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, End)), None)

    @functools.cached_property
    def last_cell(self) -> CellStart | None:
        """The start of the last cell that is known."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, CellStart)), None)

    @functools.cached_property
    def last_cell_entries(self) -> tuple[Entry, ...]:
        """The last cell's start and all after it."""
        positions = range(len(self.entries) - 1, -1, -1)
        return self.entries[next((at for at in positions if isinstance(self.entries[at], CellStart)), 0) :]

    @functools.cached_property
    def last_cell_figures(self) -> dict[str, list[tuple[float, Figures]]]:
        """What each device went through in the last cell, with the times: the host first, the oldest figures first."""
        found: dict[str, list[tuple[float, Figures]]] = {}
        for entry in self.last_cell_entries:
            if isinstance(entry, (CellStart, Sample, CellEnd)):
                for item in entry.devices:
                    found.setdefault(item.device, []).append((entry.time, item))
        return dict(sorted(found.items(), key=lambda pair: pair[0] != "cpu"))

    @functools.cached_property
    def running(self) -> CellStart | Sample | None:
        """The last entry of the cell that ran when the recording stops; None if none did."""
        moments = (entry for entry in reversed(self.entries) if isinstance(entry, (CellStart, Sample, CellEnd)))
        last = next(moments, None)
        return None if isinstance(last, CellEnd) else last

    @functools.cached_property
    def last_time(self) -> float:
        """Unix time of the last sign of life."""
        times = [getattr(entry, "time", 0.0) for entry in (self.header, *self.entries) if entry is not None]
        return max(times, default=0.0)


def read(segments: Segments) -> Recording:
    """Return what a recording says, from both of its segments; a file that is gone is an empty one."""
    for _ in range(_ATTEMPTS):
        before = segments.current_number
        # The current one first: a rotation in between then shows it a second time.
        contents = [_content(segments.current), _content(segments.older)]
        if segments.current_number == before:  # more than one could have hidden something
            break
    return _recording(segments, contents)


def read_tail(segments: Segments) -> Recording:
    """Return the last part of a recording with its header: quick, however long it is."""
    contents = [_content(segments.current, first=4096), _content(segments.current, last=_TAIL_BYTES)]
    found = _recording(segments, contents)
    # Where its beginning is damaged, that of the segment before it says the same.
    return found if found.header else _recording(segments, [*contents, _content(segments.older, first=4096)])


def _recording(segments: Segments, contents: Iterable[bytes]) -> Recording:
    found: dict[int, Entry] = {}
    skipped = 0
    for content in contents:
        lines = content.split(b"\n")[:-1]  # the last one is empty, or torn
        for line in lines:
            entry = decode(line)
            if entry is None:
                skipped += bool(line)
            else:
                found.setdefault(*entry)
    entries = [found[number] for number in sorted(found)]
    header = next((entry for entry in entries if isinstance(entry, Header)), None)
    others = tuple(entry for entry in entries if not isinstance(entry, Header))
    return Recording(segments, header, others, skipped)


def _content(path: Path, *, first: int = _MOST_BYTES, last: int | None = None) -> bytes:
    """Return the first or last bytes of a plain file; nothing for what is none, or cannot be read."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return b""
            if last is not None and found.st_size > last:
                file.seek(found.st_size - last)
                file.readline()  # begins in the middle
            return file.read(first)
    return b""
