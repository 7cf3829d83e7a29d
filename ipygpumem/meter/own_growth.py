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

_SMALLEST_GROWTH_BYTES = 2 * MIB
"""Smallest growth that is named: the first experiment of a session has 3 to 4 MiB of modules."""
unreported_bytes: dict[str, int] = {}
"""Growth of this process's RSS by our own work that no line has named yet, by purpose."""
FOR_FAKES = "torch's fake tensors"
"""The purpose of estimates, which import these."""


@contextmanager
def growth_for(purpose: str) -> Iterator[None]:
    """Open a block of our own work, not the user's: what the RSS grows by in it is recorded under
    ``purpose``, such as ``%%peak``, for the line of the cell.

    The growth of an inner block is recorded under the inner purpose only. Free pages that the block
    leaves in the heap are returned to the system, unless user code has left more of them: else
    ``%gpumem status`` would free what it lists as free, and ``%gpumem free`` would then report
    nothing.
    """
    before_bytes = _rss_without_unreported()
    try:
        yield
    finally:
        growth_bytes = _rss_without_unreported() - before_bytes
        if growth_bytes >= _SMALLEST_GROWTH_BYTES:
            _trim_heap_if_ours(growth_bytes)
            growth_bytes = _rss_without_unreported() - before_bytes
        if growth_bytes >= _SMALLEST_GROWTH_BYTES:
            unreported_bytes[purpose] = unreported_bytes.get(purpose, 0) + growth_bytes


def _trim_heap_if_ours(growth_bytes: int) -> None:
    """Return the heap's free pages to the system, unless there are more of them than our work can
    have left, which has grown the RSS by ``growth_bytes``: then some are from the user's code.
    """
    largest_own_bytes = growth_bytes + _SMALLEST_GROWTH_BYTES
    free_bytes = free_heap_bytes() or 0
    if free_bytes >= largest_own_bytes:
        # Without pages that are not in RAM. It takes longer, because it reads all mappings.
        free_bytes = own_pages().free_heap_bytes
    if free_bytes < largest_own_bytes:
        trim_heap()


def _rss_without_unreported() -> int:
    """Return the RSS less ``unreported_bytes``, so that an outer block does not count the growth of
    an inner one again.
    """
    return rss_bytes() - sum(unreported_bytes.values())


def take_growth_text(usages: Sequence[Usage]) -> str:
    """Return the text that names our part of a cell's growth, such as ``of it 12 MiB for %%peak``,
    and forget that part; empty if there is none.

    Args:
        usages: the usages of the cell.
    """
    usage = usage_on(usages, "cpu")
    cell_bytes = 0 if usage is None else usage.delta_bytes
    bytes_by_purpose = dict(unreported_bytes)
    unreported_bytes.clear()
    if cell_bytes < _SMALLEST_GROWTH_BYTES:
        return ""
    # The parts must not exceed the cell's growth, which is less than ours if the cell has freed
    # memory.
    unnamed_bytes = cell_bytes
    parts = list[str]()
    for purpose, size in bytes_by_purpose.items():
        named_bytes = min(size, unnamed_bytes)
        unnamed_bytes -= named_bytes
        if named_bytes:
            parts.append(f"{format_bytes(named_bytes)} for {purpose}")
    return f"of it {', '.join(parts)}" if parts else ""
