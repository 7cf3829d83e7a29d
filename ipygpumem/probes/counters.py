"""Shares one allocator's peak counters between the user's code and ours.

torch's caching allocators have one resettable peak per statistic. We must reset it at every boundary to tell
one cell's peak from another's; the user's ``max_memory_allocated()`` must not notice. So the two lowest
functions (those that every Python-level one calls) are wrapped while we measure: what our resets took away is
kept in ``_hidden`` and added to what the user reads, and a reset by the user is first read for ourselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Stats = dict[str, Any]
"""Nested statistics: name -> pool -> ``current`` / ``peak`` / ``allocated`` / ``freed``; some lack the pool."""

Path = tuple[Any, ...]


class SharedPeaks:
    """The peak counters of one kind of device.

    Args:
        library: the module that holds the functions, ``torch._C``.
        stats_names: functions that return a device's statistics, the one that we read first.
        reset_names: functions that reset a device's peaks, the one that we call first.
    """

    def __init__(self, library: Any, stats_names: tuple[str, ...], reset_names: tuple[str, ...]) -> None:
        self._library = library
        self._hidden: dict[int, dict[Path, int]] = {}
        self._pending: dict[int, int] = {}
        self._latest: dict[int, Stats] = {}
        self._wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._stats: Callable[[int], Stats] = getattr(library, stats_names[0])
        self._reset: Callable[[int], None] = getattr(library, reset_names[0])
        for name in stats_names:
            self._wrap(name, self._stats_for_user)
        for name in reset_names:
            self._wrap(name, self._reset_by_user)

    def _wrap(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(self._library, name, None)
        if original is None:  # older torch has no device-independent functions
            return
        wrapper = make(original)
        self._wrapped[name] = (original, wrapper)
        setattr(self._library, name, wrapper)

    def read(self, device: int) -> tuple[Stats, int]:
        """Return the raw statistics of ``device`` and its peak of allocated bytes since our ``rearm``."""
        stats = self._latest[device] = self._stats(device)
        return stats, max(stats["allocated_bytes"]["all"]["peak"], self._pending.get(device, 0))

    def rearm(self, device: int) -> None:
        """Reset the counters of ``device`` and remember what the user would still have seen."""
        hidden = self._hidden.setdefault(device, {})
        for path, values in _with_peaks(self._latest.pop(device, {}) or self._stats(device)):
            hidden[path] = max(hidden.get(path, 0), values["peak"])
        self._reset(device)
        self._pending.pop(device, None)

    def _stats_for_user(self, original: Callable[..., Stats]) -> Callable[..., Stats]:
        def stats(device: int) -> Stats:
            statistics = original(device)
            hidden = self._hidden.get(device, {})
            for path, values in _with_peaks(statistics):
                values["peak"] = max(values["peak"], hidden.get(path, 0))
            return statistics

        return stats

    def _reset_by_user(self, original: Callable[..., None]) -> Callable[..., None]:
        def reset(device: int) -> None:
            with contextlib.suppress(RuntimeError):  # no allocator yet; the original says what it has to say
                self._pending[device] = self.read(device)[1]
            original(device)
            self._hidden.pop(device, None)

        return reset

    def close(self) -> None:
        """Put the original functions back, unless somebody wrapped ours meanwhile."""
        for name, (original, wrapper) in self._wrapped.items():
            if getattr(self._library, name, None) is wrapper:
                setattr(self._library, name, original)
        self._wrapped.clear()


def _with_peaks(stats: Stats, path: Path = ()) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yield every statistic that has a peak, at any depth, with its path."""
    for name, value in stats.items():
        if type(value) is dict:
            if "peak" in value:
                yield (*path, name), value
            else:
                yield from _with_peaks(value, (*path, name))
