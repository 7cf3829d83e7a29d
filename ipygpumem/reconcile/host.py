"""What the host's memory consists of: parts that sum exactly to its RAM, or to its container's limit.

The kernel counts pages by several measures that overlap. Each byte is given to the first of these that claims it:
free, this process (``RssAnon``, ``RssShmem``, ``RssFile``), the cache that can be taken back (``MemAvailable`` less
what is free, or the group's own statistics), child processes (PSS). What is left is in use by others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ipygpumem.probes import own_limits
from ipygpumem.probes.host import HostFigures
from ipygpumem.reconcile.device import Part, Reconciliation, Storage, kind_parts
from ipygpumem.units import format_bytes

Resident = Callable[[list[tuple[int, int]]], list[int]]
"""Returns how much of each address range is in RAM; raises OSError where the system does not say."""

_OBJECTS = "Python objects, libraries' own data: delete names, then %gpumem free"
_SHARED = "data loaders' batches, pinned memory, /dev/shm: close what made it"
_FILES = "code and mapped data: dropped by the kernel when it needs room"
_CHILDREN = "data loaders and their like, shared pages by share where that is known (PSS): end them"
_OTHERS = "end what you do not need, such as other notebooks' kernels"
_CACHE = "files kept for later: the system frees them when somebody needs room"
_WITHHELD = "within the container's limit, but in use by the rest of the machine"
_FREE = "free now"


class _Budget:
    """Bytes that are left to give to parts."""

    def __init__(self, total: int) -> None:
        self.left = total

    def take(self, size: int) -> int:
        """Return ``size``, or what is left of it."""
        taken = max(0, min(size, self.left))
        self.left -= taken
        return taken


def host_parts(figures: HostFigures, storages: Iterable[Storage] | None, resident: Resident) -> Reconciliation:
    """Return what the host's memory consists of.

    Args:
        figures: what the system says.
        storages: the tensors and arrays that Python holds, on any device; None if nobody has looked.
        resident: returns how much of an address range is in RAM.
    """
    notes: list[str] = []
    group = figures.group
    limited = group is not None and group.limit_bytes < figures.ram_bytes
    if limited and group is not None:
        total, free = group.limit_bytes, max(0, group.limit_bytes - group.used_bytes)
        files = min(figures.file_bytes, group.mapped_bytes)
        cache = group.cache_bytes - files
        withheld = max(0, free - figures.available_bytes)
    else:
        total, free, files = figures.ram_bytes, figures.free_bytes, figures.file_bytes
        cache = figures.available_bytes - free - files
        withheld = 0
    out_of_reach = _WITHHELD
    if figures.limit is not None and (beyond := free - figures.limit.available_bytes) > withheld:
        size, what = format_bytes(figures.limit.limit_bytes), own_limits.WHAT[figures.limit.name]
        withheld, out_of_reach = beyond, f"{figures.limit.name} allows this process {size} of {what}: raise it (ulimit)"
    budget = _Budget(total)
    free = budget.take(free)
    private, shared, files = (budget.take(size) for size in (figures.private_bytes, figures.shared_bytes, files))
    if private + shared + files < figures.rss_bytes:
        missing = figures.rss_bytes - private - shared - files
        notes.append(f"{format_bytes(missing)} of this process's RSS are not charged to it here: shared files, mostly")
    cache, children = budget.take(cache), budget.take(figures.children_bytes or 0)
    others = "other processes and the system"
    parts = [
        *_private(private, storages, resident, notes),
        Part("shared memory", shared, _SHARED),
        Part("libraries and mapped files", files, _FILES),
        Part("child processes", children, _CHILDREN),
        Part(others if not limited else "others in the container", budget.left, _OTHERS),
        Part("cache", cache, _CACHE),
        Part("out of reach", withheld, out_of_reach),
        Part("free", free - withheld, _FREE),
    ]
    if figures.children_bytes is None:
        notes.append(f"child processes cannot be told apart here: they are among the {others}")
    basis = "the container's limit (cgroup)" if limited else "the machine's RAM"
    return Reconciliation("cpu", total, basis, tuple(parts), tuple(notes))


def _private(size: int, storages: Iterable[Storage] | None, resident: Resident, notes: list[str]) -> list[Part]:
    """Return the parts of this process's own pages: arrays by kind, as far as they are in RAM, and the rest."""
    whole = [Part("this process", size, _OBJECTS)]
    ranges = _disjoint(item for item in storages or () if item.device == "cpu")
    if not ranges:
        return whole
    try:
        sizes = resident([(item.address, item.size_bytes) for item in ranges])
    except OSError as error:
        notes.append(f"it cannot be found out here which arrays are in RAM ({error.strerror})")
        return whole
    kinds: Counter[str] = Counter()
    for item, found in zip(ranges, sizes, strict=True):
        kinds[item.kind] += found
    rest = size - sum(kinds.values())
    if rest < 0:
        notes.append("the arrays that Python holds are larger than this process's own pages: they cannot be told apart")
        return whole
    return [*kind_parts("arrays", kinds), Part("this process, beside arrays", rest, _OBJECTS)]


def _disjoint(storages: Iterable[Storage]) -> list[Storage]:
    """Return the storages by address, without bytes that another one has already (arrays may share memory)."""
    found, reached = [], 0
    for item in sorted(storages, key=lambda item: item.address):
        start, end = max(item.address, reached), item.address + item.size_bytes
        if start < end:
            found.append(item._replace(address=start, size_bytes=end - start))
            reached = end
    return found
