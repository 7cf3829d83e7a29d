"""Measures what our own work leaves in the process, such as torch's modules, for the line of the
cell that asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ipygpumem.probes.host import rss_bytes
from ipygpumem.probes.malloc import free_heap_bytes, trim_heap
from ipygpumem.probes.mappings import own_pages
from ipygpumem.records import Usage, usage_on
from ipygpumem.units import MIB, format_bytes

_LEAST_BYTES = 2 * MIB
"""Smallest growth that is named: the first experiment of a session has 3 to 4 MiB of modules."""
unreported_bytes: dict[str, int] = {}
"""Bytes of this process's RSS that no line has named yet, by purpose."""


@contextmanager
def growth_for(what: str) -> Iterator[None]:
    """Open a block of our own work, not the user's; its growth, less that of inner blocks, is named
    ``what``.

    Free pages that it leaves in the heap are freed, unless user code has left more of them:
    ``%gpumem status`` would free what it lists as free, and ``%gpumem free`` would then report
    nothing.
    """
    before = _rss_without_unreported()
    try:
        yield
    finally:
        grown = _rss_without_unreported() - before
        if grown >= _LEAST_BYTES:
            _trim_heap_if_ours(grown)
            grown = _rss_without_unreported() - before
        if grown >= _LEAST_BYTES:
            unreported_bytes[what] = unreported_bytes.get(what, 0) + grown


def _trim_heap_if_ours(grown: int) -> None:
    """Free the heap's free pages, if they can all be part of what our work has ``grown``."""
    most = grown + _LEAST_BYTES
    free = free_heap_bytes() or 0
    if free >= most:
        free = own_pages().free_heap_bytes  # without pages that are not in RAM; takes longer
    if free < most:
        trim_heap()


def _rss_without_unreported() -> int:
    """Return the RSS less ``unreported_bytes``: then an inner block does not count twice."""
    return rss_bytes() - sum(unreported_bytes.values())


def take_growth_text(usages: Sequence[Usage]) -> str:
    """Return the text that names our part of what a cell kept, empty if it has none, and forget
    it.
    """
    usage = usage_on(usages, "cpu")
    grown = 0 if usage is None else usage.delta_bytes
    ours = dict(unreported_bytes)
    unreported_bytes.clear()
    if grown < _LEAST_BYTES:
        return ""
    left = grown  # the cell may have freed more than it has allocated
    parts = list[str]()
    for what, size in ours.items():
        at_most = min(size, left)
        left -= at_most
        if at_most:
            parts.append(f"{format_bytes(at_most)} for {what}")
    return f"of it {', '.join(parts)}" if parts else ""
