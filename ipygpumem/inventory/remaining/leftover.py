"""Breaks down the RAM that an experiment leaves in use, with the bytes that cannot be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ipygpumem.heap.live.heap import undisturbed
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.devices.host_parts import MANY_BYTES, MANY_SHARE, UNACCOUNTED
from ipygpumem.probes.host import RamFigures
from ipygpumem.probes.mappings import own_pages
from ipygpumem.units import MIB, format_bytes

_FEW_BYTES = 4 * MIB
"""Less is left by almost every experiment: caches of modules, gaps between objects."""
MANY_MODULES = 50
"""Fewer imported modules are no cause of what an experiment leaves: our own work imports some, too.
"""


FREE_BLOCKS = "free blocks of Python between objects that are alive"
_NOT_TOLD = (
    "after a full garbage collection, new objects cannot be told from old ones; "
    "%gpumem leaks searches all of them"
)


def notes_on_unnamed(
    start: RamFigures,
    now: RamFigures,
    kept_bytes: int,
    named: Mapping[str, int],
    knows_new: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Return a note on what ``kept_bytes`` of RAM consist of, if many of them cannot be named, or
    Python keeps many for new objects.

    Args:
        start: the figures of the start.
        now: the figures of the end.
        kept_bytes: increase of RSS since then.
        named: bytes of known objects, by what these are.
        knows_new: returns False if new objects without a name were not searched, because they
            cannot be told from old ones.
    """
    free = max(0, now.free_bytes - start.free_bytes)
    if free:  # with or without pages in RAM
        free = min(free, own_pages().free_heap_bytes)
    sizes = {
        **named,
        "code of libraries": now.file_bytes - start.file_bytes,
        "free heap pages": free,
    }
    unnamed_bytes = kept_bytes - sum(max(0, size) for size in sizes.values())
    free_blocks = min(unnamed_bytes, now.free_blocks_bytes - start.free_blocks_bytes)
    unnamed_bytes -= max(0, free_blocks)
    sizes[FREE_BLOCKS] = free_blocks
    texts = [f"{format_bytes(size)} {name}" for name, size in sizes.items() if size >= MIB]
    many = max(_FEW_BYTES, min(MANY_BYTES, MANY_SHARE * kept_bytes))
    if max(unnamed_bytes, free_blocks) <= many:
        return []
    if unnamed_bytes > many:
        facts = _facts_about_unnamed(start, now, unnamed_bytes)
        facts = [UNACCOUNTED, *facts] if knows_new() else [*facts, _NOT_TOLD]
        texts.append(f"{format_bytes(unnamed_bytes)} not named: {'; '.join(facts)}")
    return [f"{format_bytes(kept_bytes)} of RAM are still in use: {', '.join(texts)}"]


def ram_of(values: list[object]) -> int:
    """Return the RAM of ``values`` and of all that only they lead to."""
    if not values:
        return 0
    with undisturbed():
        return Sizes().measure(values).device_bytes.get("cpu", 0)


def _facts_about_unnamed(start: RamFigures, now: RamFigures, unnamed_bytes: int) -> list[str]:
    """Return the measured facts about ``unnamed_bytes`` of RAM, such as imported modules.

    pyarrow does not tell the free pages in its pool. New ones are at most the rise of its peak.
    """
    facts = list[str]()
    modules = now.modules - start.modules
    if modules >= MANY_MODULES:
        facts.append(f"{modules:,} modules were imported")
    risen = now.arrow_peak_bytes - start.arrow_peak_bytes
    if risen >= MIB:
        in_pool = format_bytes(min(risen, unnamed_bytes))
        facts.append(f"up to {in_pool} may be free pages of pyarrow's pool")
    return facts
