"""Looks through all recordings of a profile: whose kernel died last, and which are old enough to go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ipygpumem.flight_recorder.files import Segments, is_locked, listed, state
from ipygpumem.flight_recorder.machine import Machine, State
from ipygpumem.flight_recorder.reader import Recording, read_tail

_KEPT_FILES = 20
_KEPT_SECONDS = 30 * 86400


@dataclass(frozen=True)
class Counts:
    """How many recordings there are, and of how many it is not known how their kernels ended."""

    found: int
    alive: int = 0
    unknown: int = 0
    """Of kernels elsewhere, which may run."""
    unreadable: int = 0


def counts(tails: Sequence[Recording], here: Machine) -> Counts:
    """Count recordings."""
    states = [state_of(tail, here) for tail in tails]
    damaged = [tail.header is None and state == "dead" for tail, state in zip(tails, states, strict=True)]
    return Counts(len(tails), states.count("alive"), states.count("unknown"), sum(damaged))


def state_of(tail: Recording, here: Machine) -> State:
    """Return whether the kernel of a recording still runs; what cannot be read is dead unless it is locked."""
    if tail.header is None:
        return "alive" if is_locked(tail.segments.current) else "dead"
    return state(tail.header, tail.segments.current, here)


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
        if tail.header is None and tail.entries:
            return None  # damaged: it may have been the last one
        if tail.header is None or (notebook and tail.header.notebook and notebook != tail.header.notebook):
            continue
        found = state(tail.header, segments.current, here)
        if found != "alive":
            return tail if died(tail, found) and tail.running is not None else None
    return None
