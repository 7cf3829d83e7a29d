"""Breaks down the RAM that an experiment leaves in use into named bytes, free pages, and the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ipygpumem.heap.live.heap import undisturbed
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.devices.host_parts import MANY_BYTES, MANY_SHARE, UNACCOUNTED
from ipygpumem.probes.host import RamFigures
from ipygpumem.probes.mappings import own_pages
from ipygpumem.units import MIB, format_bytes

_LEAST_BYTES_TO_MENTION = 4 * MIB
"""Less is left by almost every experiment: caches of modules, gaps between objects."""
MANY_MODULES = 50
"""Fewer imported modules are no cause of the RAM that is left: our own work imports some, too."""


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
    """Return a note in a list: ``64 MiB of RAM are still in use: 12 MiB code of libraries, 52 MiB
    not named: ...``. Return nothing if nearly all of it can be named, and Python keeps few free
    blocks.

    Args:
        start: the figures of the start.
        now: the figures of the end.
        kept_bytes: increase of RSS since then.
        named: bytes of known objects, by the words for them.
        knows_new: returns False if new objects without a name were not searched, because they
            cannot be told from old ones.
    """
    sizes = {**named, **_sizes_without_objects(start, now)}
    unnamed_bytes = kept_bytes - sum(max(0, size) for size in sizes.values())
    # Of the free blocks, only those count that nothing else accounts for.
    free_blocks = min(unnamed_bytes, now.free_blocks_bytes - start.free_blocks_bytes)
    unnamed_bytes -= max(0, free_blocks)
    sizes[FREE_BLOCKS] = free_blocks
    least_bytes_to_mention = max(_LEAST_BYTES_TO_MENTION, min(MANY_BYTES, MANY_SHARE * kept_bytes))
    if max(unnamed_bytes, free_blocks) <= least_bytes_to_mention:
        return []
    texts = [f"{format_bytes(size)} {name}" for name, size in sizes.items() if size >= MIB]
    if unnamed_bytes > least_bytes_to_mention:
        facts = _facts_about_unnamed(start, now, unnamed_bytes)
        facts = [UNACCOUNTED, *facts] if knows_new() else [*facts, _NOT_TOLD]
        texts.append(f"{format_bytes(unnamed_bytes)} not named: {'; '.join(facts)}")
    return [f"{format_bytes(kept_bytes)} of RAM are still in use: {', '.join(texts)}"]


def _sizes_without_objects(start: RamFigures, now: RamFigures) -> dict[str, int]:
    """Return the growth of the pages in which there are no objects, in words and bytes; a size may
    be negative.
    """
    free = max(0, now.free_bytes - start.free_bytes)
    if free:  # malloc also counts pages that are not in RAM
        free = min(free, own_pages().free_heap_bytes)
    return {
        "code of libraries": now.file_bytes - start.file_bytes,
        "free heap pages": free,
    }


def ram_of(values: list[object]) -> int:
    """Return the RAM of ``values`` together with everything to which only they lead."""
    if not values:
        return 0
    with undisturbed():
        return Sizes().measure(values).device_bytes.get("cpu", 0)


def _facts_about_unnamed(start: RamFigures, now: RamFigures, unnamed_bytes: int) -> list[str]:
    """Return the measured facts that may explain ``unnamed_bytes`` of RAM, such as
    ``120 modules were imported``.

    pyarrow does not report the free pages in its pool. They are at most the rise of its peak.
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
