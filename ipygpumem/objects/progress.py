"""How much of a piece of work is done: a share from 0 to 1, from counts that are known before each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Return the ``Progress`` of each part, which are so long beside each other as ``weights`` says."""
    weights = list(weights)
    whole = sum(weights) or 1.0
    starts = [sum(weights[:place]) / whole for place in range(len(weights) + 1)]
    return [part(progress, start, end) for start, end in pairwise(starts)]


def counted(items: Iterable[T], count: int, progress: Progress) -> Iterator[T]:
    """Yield ``items``, of which there are ``count``, and tell after each."""
    for done, item in enumerate(items, 1):
        yield item
        progress(done / count)


def every(number: int, items: Sequence[T], progress: Progress) -> Iterator[T]:
    """Yield ``items``, and tell after each ``number`` of them."""
    for done, item in enumerate(items, 1):
        yield item
        if not done % number:
            progress(done / len(items))
