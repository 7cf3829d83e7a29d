"""Whether what names held is still alive, without keeping it so; and the steps after which it should not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ipygpumem.arrays import Array, ArraySearch, describe, watch
from ipygpumem.model import Held


@dataclass(frozen=True)
class Watched:
    """What a name held, and for each of its arrays a function that says whether its memory is still alive."""

    held: Held
    arrays: tuple[tuple[Callable[[], bool], Array], ...]
    is_old_perhaps: bool = False
    """Whether its memory may be older than the experiment: the notebook held too much to look through at the start."""

    def alive(self) -> list[Array]:
        """Return the arrays that are still alive, largest first."""
        return sorted((array for is_alive, array in self.arrays if is_alive()), key=lambda array: -array.size_bytes)


def watch_names(named: Iterable[tuple[str, object]], search: ArraySearch) -> list[Watched]:
    """Return what each name holds that no earlier one does, to be watched without keeping it alive."""
    entries = [search.held(name, value) for name, value in named]
    found = [entry for entry in entries if entry is not None]
    described = [(held, [(item, describe(item)) for item in items]) for held, items in found]
    return [
        Watched(held, tuple((watch(item), array) for item, array in pairs if array is not None))
        for held, pairs in described
    ]
