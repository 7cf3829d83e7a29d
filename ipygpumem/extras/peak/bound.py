"""Bounds the RAM in a ``%%peak`` by the peak that the kernel counted while the code ran.

memray counts the bytes that code asks for. The kernel gives a page of RAM only once the page is
written to or read: ``np.zeros(2**27)`` asks for 1 GiB and uses none of it, and pyarrow's pool
reserves 1 GiB of addresses with its first string. Bytes without a page are "reserved, not used".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ipygpumem.extras.peak.records import DevicePeak, PeakPoint, PeakRow
from ipygpumem.meter.meter import Meter, Span
from ipygpumem.probes.mappings import address_ranges, free_heap_in, unused_in
from ipygpumem.records import Usage, usage_on
from ipygpumem.units import MIB

_INEXACT_BYTES = MIB
"""The kernel's RSS is behind by up to 256 KiB for each thread (``TASK_RSS_EVENTS_THRESH``)."""
_ARENA_BYTES = MIB
"""Bytes that Python maps at once for small objects; only a part of the newest arena is used."""
_OFTEN_UNUSED = ("mmap", "calloc")
"""Functions whose memory is often reserved and not used, the likeliest first: pools of libraries,
``np.zeros``.
"""
OF_TORCH = "of torch"
"""Role of memory outside this list that torch allocated: ``torch.empty`` is often not used, and
counted elsewhere.
"""
OURS = "ours"
"""Role of memory outside this list that was allocated below our own functions, such as the tensors
of the operations that are followed.
"""
_NOT_LISTED = (OURS, OF_TORCH)
"""Roles of the memory outside this list; it takes part in the process's RAM."""

Unused = Mapping[tuple[int, int], int]
"""Bytes without a page in RAM, by the first and last address of their mapping."""


@dataclass(frozen=True)
class HostUse:
    """RAM of this process while the code ran."""

    usage: Usage
    """RSS at the start and the end, and its peak."""
    free_heap_bytes: int
    """Pages of malloc's heap that were in RAM and free at the start: using them again does not
    raise RSS.
    """
    unused_bytes: int
    """Address space that the code has reserved and not used."""
    unused_parts: tuple[int, ...] = ()
    """Bytes of it in each mapping that is new or has grown."""

    def room_bytes(self, kept_bytes: int, freed_bytes: int) -> int:
        """Return the most RAM that allocations of the code can have used at its highest moment.

        That is the growth of RSS at its peak, and pages that held other memory at the start: ``del
        old`` followed by ``np.ones(2**23)`` may use 64 MiB without any growth. Allocations that are
        still alive used at most the pages that they use at the end.

        Args:
            kept_bytes: allocations of the code that are still alive, whether used or not.
            freed_bytes: allocations of the highest moment that may have been freed since then.
        """
        kept_in_ram = max(0, kept_bytes - self.unused_bytes)
        # Kept memory beyond the growth is on pages that held other memory at the start.
        on_earlier_pages = max(0, kept_in_ram - self.usage.delta_bytes)
        by_growth = self.usage.peak_delta_bytes + on_earlier_pages + self.free_heap_bytes
        by_allocations = kept_in_ram + freed_bytes
        return min(by_growth, by_allocations, self.usage.peak_bytes)


class HostSpan:
    """Measures the RAM of this process from ``start`` to ``stop``."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._measurement: Span | None = None
        self._free_heap_bytes = 0
        self._unused: Unused = {}

    def start(self) -> None:
        """Start measuring."""
        ranges = address_ranges()
        self._free_heap_bytes = free_heap_in(ranges)
        self._unused = unused_in(ranges)
        self._measurement = self._meter.span()

    def stop(self) -> HostUse | None:
        """Stop measuring, and return the figures; None if the host's memory cannot be read."""
        if self._measurement is None:
            return None
        usage = usage_on(self._measurement.stop(), "cpu")
        if usage is None:
            return None
        changes = unused_changes(self._unused, unused_in(address_ranges()))
        parts = tuple(change for change in changes if change > 0)
        return HostUse(usage, self._free_heap_bytes, max(0, sum(changes)), parts)

    def drop(self) -> None:
        """Stop measuring; can be called again."""
        if self._measurement is not None:
            self._measurement.close()


def unused_changes(before: Unused, now: Unused) -> list[int]:
    """Return the growth of the unused bytes of each present mapping; negative if they have shrunk.

    Several earlier mappings may be one now, because the kernel joins neighbours.
    """
    changes = list[int]()
    for (first, last), unused in now.items():
        change = unused
        for (start, end), unused_before in before.items():
            if first <= start and end <= last:
                change -= unused_before
        changes.append(change)
    return changes


def bounded(device: DevicePeak, most_bytes: int, unused_parts: Sequence[int] = ()) -> DevicePeak:
    """Return the record of a part of RAM with at most ``most_bytes`` in RAM; further bytes of its
    rows are "reserved, not used".

    The kernel counts the pages of the process, not those of each row. So it is assumed which rows
    are not used: first those as large as ``unused_parts``, then those of mapped memory, then those
    of zeroed memory, then torch's, then all other rows; of each kind, the largest first.

    Args:
        device: the rows, as large as their allocations.
        most_bytes: the bytes that all rows together can have in RAM.
        unused_parts: bytes of new mappings that are not used.
    """
    most_bytes += _unused_arena_bytes(device.rows)
    excess_bytes = device.size_bytes - most_bytes
    if excess_bytes <= _INEXACT_BYTES:
        return device
    sizes = _sizes_of_unused_rows(unused_parts)
    rows = list[PeakRow]()
    for row in sorted(device.rows, key=lambda row: _unused_order(row, sizes)):
        unused = min(row.size_bytes, excess_bytes)
        excess_bytes -= unused
        used_bytes = row.size_bytes - unused
        reserved_bytes = row.reserved_bytes + unused
        rows.append(replace(row, size_bytes=used_bytes, reserved_bytes=reserved_bytes))
    rows.sort(key=lambda row: -row.size_bytes)
    curve = tuple(
        PeakPoint(point.seconds, _bounded_parts(point.parts, most_bytes)) for point in device.curve
    )
    return replace(device, size_bytes=most_bytes, rows=tuple(rows), curve=curve, is_bound=True)


def _unused_arena_bytes(rows: Iterable[PeakRow]) -> int:
    """Return the bytes without a page of the arena that Python has mapped last, if it was mapped
    below our own functions or torch's.

    They are not a reason to call bytes of the user's rows unused.
    """
    mapped = (row.size_bytes for row in rows if row.allocator == "mmap" and row.role in _NOT_LISTED)
    return min(_ARENA_BYTES, sum(mapped))


def _sizes_of_unused_rows(unused_parts: Sequence[int]) -> set[int]:
    """Return the sizes of rows that may consist of unused memory: the bytes of one unused part, or
    of all parts of one size, which a loop may have allocated on one line.
    """
    counts = Counter(unused_parts)
    return {*counts, *(size * count for size, count in counts.items())}


def _unused_order(row: PeakRow, unused_sizes: Collection[int]) -> tuple[bool, int, int]:
    """Return the key by which rows are sorted: the rows that are likeliest unused come first."""
    is_as_large = any(0 <= row.size_bytes - size < _INEXACT_BYTES for size in unused_sizes)
    # memray joins the allocations of a line and names one of their functions. For ours, which
    # include torch's tensors, that is the function of a small one.
    if row.allocator in _OFTEN_UNUSED and row.role not in _NOT_LISTED:
        kind = _OFTEN_UNUSED.index(row.allocator)
    elif row.role == OF_TORCH:
        kind = len(_OFTEN_UNUSED)
    else:
        kind = len(_OFTEN_UNUSED) + 1
    return not is_as_large, kind, -row.size_bytes


def _bounded_parts(parts: Mapping[str, int], most_bytes: int) -> dict[str, int]:
    """Return the bytes by role at one time, whose sum is at most ``most_bytes``; the largest role
    is cut first.
    """
    size_by_role = dict(parts)
    excess_bytes = sum(size_by_role.values()) - most_bytes
    for role in sorted(size_by_role, key=size_by_role.__getitem__, reverse=True):
        if excess_bytes <= 0:
            break
        cut = min(size_by_role[role], excess_bytes)
        size_by_role[role] -= cut
        excess_bytes -= cut
    return size_by_role
