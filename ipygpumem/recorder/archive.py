"""All recordings of a profile: whose kernel died last, and which are old enough to go."""

from __future__ import annotations

import time
from pathlib import Path

from ipygpumem.recorder.files import Segments, listed, state
from ipygpumem.recorder.machine import Machine, State
from ipygpumem.recorder.reader import Recording, read_tail

_KEPT_FILES = 20
_KEPT_SECONDS = 30 * 86400


def state_of(tail: Recording, here: Machine) -> State:
    """Return whether the kernel of a recording still runs; what is no recording is dead."""
    return "dead" if tail.header is None else state(tail.header, tail.segments.current, here)


def prune(folder: Path, own: Segments, here: Machine) -> None:
    """Delete recordings that are old, or too many, but never one whose kernel still runs, or may."""
    now = time.time()
    for position, segments in enumerate(found for found in listed(folder) if found != own):
        old = now - segments.written_at > _KEPT_SECONDS
        if old or position >= _KEPT_FILES - 1:
            found = state_of(read_tail(segments), here)
            if found == "dead" or (old and found == "unknown"):
                segments.delete()


def died(tail: Recording, state: State) -> bool:
    """Whether the kernel of a recording is gone without having ended on purpose."""
    return state == "dead" and tail.header is not None and tail.end is None


def latest_death(folder: Path, *, notebook: str | None, here: Machine) -> Recording | None:
    """Return the end of the last finished recording if its kernel died in a cell, else None.

    Args:
        folder: where to look.
        notebook: whose kernels count, where both know it; None for all.
        here: where this process runs.
    """
    for segments in listed(folder):
        tail = read_tail(segments)
        if tail.header is None or (notebook and tail.header.notebook and notebook != tail.header.notebook):
            continue
        found = state(tail.header, segments.current, here)
        if found != "alive":
            return tail if died(tail, found) and tail.running is not None else None
    return None
