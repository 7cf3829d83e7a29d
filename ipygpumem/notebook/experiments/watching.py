"""What is there when an experiment starts, and whether what its names held is still alive, without keeping it so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ipygpumem.errors import said
from ipygpumem.freeing.name_snapshot import NameSnapshot
from ipygpumem.model import Held
from ipygpumem.objects.alive import WatchedArray, watch
from ipygpumem.objects.arrays import Array, ArraySearch, describe
from ipygpumem.objects.garbage import Garbage, Mark
from ipygpumem.objects.inventory.before import Before


@dataclass(frozen=True)
class Watched:
    """What a name held, and for each of its arrays a function that says whether its memory is still alive."""

    held: Held
    arrays: tuple[tuple[Callable[[], bool], Array], ...]
    is_old_perhaps: bool = False
    """Whether its memory may be older than the experiment: the notebook held too much to look through at the start."""

    @property
    def of_numpy(self) -> list[WatchedArray]:
        """Those that cannot be watched while the user's code runs."""
        return [is_alive for is_alive, _ in self.arrays if isinstance(is_alive, WatchedArray)]

    def alive(self) -> list[Array]:
        """Return the arrays that are still alive, largest first."""
        return sorted((array for is_alive, array in self.arrays if is_alive()), key=lambda array: -array.size_bytes)


class Start:
    """The moment at which an experiment starts, and what is there.

    Args:
        namespace: the notebook's names.
        garbage: knows what is made from now on.
        note: takes a line for the report where not all of that can be seen.
    """

    def __init__(self, namespace: dict[str, Any], garbage: Garbage, note: Callable[[str], None]) -> None:
        self._before: Before | None = None
        self._failed = False
        if {"torch", "numpy"} & sys.modules.keys():
            self._look(namespace, garbage, note)
        self._names_before = NameSnapshot(namespace)
        self._mark = garbage.mark()

    def _look(self, namespace: dict[str, Any], garbage: Garbage, note: Callable[[str], None]) -> None:
        try:
            self._before = Before(namespace, garbage)
        except Exception as error:  # it only serves the report
            note(f"what is still alive cannot be listed at the end, since the look at the start failed: {said(error)}")
            self._failed = True

    @property
    def is_complete(self) -> bool:
        """Whether all arrays were seen."""
        return self._before is None or self._before.complete

    def was_there(self, item: object, array: Array) -> bool:
        """Whether the memory of a tensor or array, which ``array`` describes, was there, or nobody can tell."""
        return self._failed or (self._before is not None and self._before.has(item, array))

    def mark_if_nothing_lingers(self, namespace: dict[str, Any]) -> Mark | None:
        """Return the moment, unless something that had a name then may be garbage by now."""
        return None if self._names_before.some_may_live_on(namespace) else self._mark

    def forget(self) -> None:
        """Let go of all that is known."""
        if self._before is not None:
            self._before.close()


def watch_names(named: Iterable[tuple[str, object]], search: ArraySearch) -> list[Watched]:
    """Return what each name holds beside the earlier ones, to be watched without keeping it alive."""
    entries = [search.held(name, value) for name, value in named]
    found = [entry for entry in entries if entry is not None]
    described = [(held, [(item, describe(item)) for item in items]) for held, items in found]
    return [
        Watched(held, tuple((watch(item), array) for item, array in pairs if array is not None))
        for held, pairs in described
    ]
