"""Reports how much of a piece of work is done, as a share from 0 to 1, by counts that are known before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[float], None]
"""Takes the share of the work that is done by now."""


def unseen(share: float) -> None:
    """Stand for a ``Progress`` where nobody looks."""


def part(progress: Progress, start: float, end: float) -> Progress:
    """Return the ``Progress`` of a part of the work: its share of 1 is the whole's share from ``start`` to ``end``."""
    return lambda share: progress(start + (end - start) * min(share, 1.0))


def parts(progress: Progress, weights: Iterable[float]) -> list[Progress]:
    """Return the ``Progress`` of each part; ``weights`` says how long they are."""
    weights = list(weights)
    whole = sum(weights) or 1.0
    starts = [sum(weights[:place]) / whole for place in range(len(weights) + 1)]
    return [part(progress, start, end) for start, end in pairwise(starts)]


def counted(items: Iterable[T], count: int, progress: Progress) -> Iterator[T]:
    """Yield ``items``, of which there are ``count``, and report after each."""
    for done, item in enumerate(items, 1):
        yield item
        progress(done / count)
