"""Models torch's CUDA caching allocator: how it cuts, joins and places blocks in its segments.

Estimates use ``Allocator``, which places blocks as torch does. ``%%peak`` knows the places from
torch's own history, and needs only ``FreePieces``. The rules follow c10/cuda/CUDACachingAllocator.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from ipygpumem.probes.allocator import Segment, settings
from ipygpumem.units import MIB, rounded_up

STEP_BYTES = 2 * MIB
"""Segments of more than 10 MiB are rounded up to a multiple of this."""
_LEAST_BYTES = 512
"""Size of the smallest block; all sizes are multiples of it."""
_MOST_SMALL_BYTES = MIB
"""Largest size that comes from the segments for small blocks."""
_SMALL_SEGMENT_BYTES = 2 * MIB
"""Size of these segments."""
_LEAST_LARGE_BYTES = 10 * MIB
"""Smallest size that gets a segment of its own size, if no piece is free for it."""
_MIDDLE_SEGMENT_BYTES = 20 * MIB
"""Size of the segments for sizes between these."""
NO_LIMIT = 1 << 62
"""More bytes than any device has."""


def rounded_to_blocks(size_bytes: int) -> int:
    """Return a size as a multiple of the allocator's smallest block."""
    # Without a call of another function, because %%peak asks for each storage.
    return -(-size_bytes // _LEAST_BYTES) * _LEAST_BYTES


def block_bytes(size_bytes: int) -> int:
    """Return the size of the block that serves a request.

    The block may become larger, if the rest of its piece is too small to be split off.
    """
    return max(_LEAST_BYTES, rounded_to_blocks(size_bytes))


def most_split_bytes() -> int:
    """Return the size from which on the allocator does not split blocks; NO_LIMIT if it splits all.

    That is the setting ``max_split_size_mb``, from the environment or a call.
    """
    match = re.search(r"max_split_size_mb *: *(\d+)", settings())
    if match is None:
        return NO_LIMIT
    size_mib = int(match[1])
    if size_mib == 0:
        return NO_LIMIT
    return size_mib * MIB


_UNFOLLOWED_SETTINGS = "|".join(
    (
        r"expandable_segments *: *True",
        r"backend *: *(?!native)\w+",
        r"roundup_power2_divisions *: *(?:\[|\d+)",
    )
)


def unfollowed_settings() -> list[str]:
    """Return the settings that change the reserved memory, and that estimates do not simulate."""
    return re.findall(_UNFOLLOWED_SETTINGS, settings())


class FreePieces:
    """The free pieces of a pool's segments, from which the allocator cuts blocks.

    A segment is memory that the driver has given; a pool has segments for small blocks, or for
    large ones. A piece joins its free neighbours when it is freed, but never across the start of a
    segment.
    """

    def __init__(self, most_split_bytes: int = NO_LIMIT) -> None:
        self._most_split_bytes = most_split_bytes
        self.is_expandable = False
        """True if segments grow in place: then blocks of all sizes are split."""
        self._sizes: dict[int, int] = {}
        """Sizes of the pieces by their addresses."""
        self._starts: dict[int, int] = {}
        """Addresses of the pieces by their ends."""
        self.segments: dict[int, int] = {}
        """Sizes of the segments by their addresses."""
        self._by_size: list[tuple[int, int]] = []
        """Sizes and addresses of the pieces, sorted."""

    def add(self, address: int, size: int) -> None:
        """Add a free piece as it is, without joining it with its neighbours."""
        self._sizes[address] = size
        self._starts[address + size] = address
        insort(self._by_size, (size, address))

    def remove(self, address: int) -> int:
        """Remove a free piece, and return its size."""
        size = self._sizes.pop(address)
        del self._starts[address + size]
        position = bisect_left(self._by_size, (size, address))
        del self._by_size[position]
        return size

    def free(self, address: int, size: int) -> None:
        """Free a piece of memory, and join it with its neighbours."""
        if address not in self.segments and address in self._starts:
            previous = self._starts[address]
            size += self.remove(previous)
            address = previous
        following = address + size
        if following not in self.segments and following in self._sizes:
            size += self.remove(following)
        self.add(address, size)

    def _is_split(self, size: int, rest: int) -> bool:
        """Return True if torch splits a piece into a block of ``size`` and a free ``rest``.

        In segments for large blocks, a rest of 1 MiB or less stays a part of the block.
        """
        if size <= _MOST_SMALL_BYTES or self.is_expandable:
            return rest >= _LEAST_BYTES
        return rest > _MOST_SMALL_BYTES and size < self._most_split_bytes

    def take(self, address: int, size: int) -> int:
        """Take a block from the free piece at ``address``, and return the block's size.

        It is larger than ``size`` if the rest of the piece would be too small to be split off.
        """
        piece = self.remove(address)
        rest = piece - size
        if not self._is_split(size, rest):
            return piece
        self.add(address + size, rest)
        return size

    def take_if_free(self, address: int, size: int) -> int:
        """Take a block as ``take`` does; return ``size`` if no free piece begins at ``address``."""
        if address not in self._sizes:
            return size
        return self.take(address, size)

    def best_fit(self, size: int) -> int | None:
        """Return the address of the piece from which torch takes a block; None if there is none.

        It is the smallest piece that is large enough, and the lowest one of several. Pieces that
        are too large to be split serve large blocks only, with a rest of less than 20 MiB.
        """
        position = bisect_left(self._by_size, (size,))
        if position == len(self._by_size):
            return None
        piece, address = self._by_size[position]
        most_split = self._most_split_bytes
        if size < most_split <= piece:
            return None
        if size >= most_split and piece >= size + _MIDDLE_SEGMENT_BYTES:
            return None
        return address

    def empty(self) -> int:
        """Remove the segments that have no block in use, and return their bytes."""
        freed_bytes = 0
        for address, size in list(self.segments.items()):
            if self._sizes.get(address) == size:
                freed_bytes += self.remove(address)
                del self.segments[address]
        return freed_bytes

    def cut_out(self, address: int, size: int) -> None:
        """Remove a part of a free piece, such as pages that are returned to the driver."""
        start = self._start_of_piece(address, address + size)
        if start is None:
            return
        end = start + self.remove(start)
        following = address + size
        if start < address:
            self.add(start, address - start)
        if following < end:
            self.add(following, end - following)

    def _start_of_piece(self, address: int, end: int) -> int | None:
        """Return the address of the free piece in which a range of addresses lies completely; None
        if there is none.
        """
        if address in self._sizes:
            end_of_piece = address + self._sizes[address]
            if end > end_of_piece:
                return None
            return address
        for start, size in self._sizes.items():
            if start <= address and end <= start + size:
                return start
        return None


class OutOfRoomError(Exception):
    """The device has less memory than the allocator needs."""


class SimulatedBlock(NamedTuple):
    """A block that the simulated allocator has given, and that is not freed yet."""

    address: int
    size: int
    """Its bytes, of which the code may have asked for fewer."""
    is_small: bool
    """True if its segment serves small blocks."""


class Allocator:
    """Simulates the caching allocator: best fit, and the cache is freed before it fails.

    Args:
        most_split_bytes: the size from which on blocks are not split.
        limit_bytes: the most memory that it may reserve.
        segments: the segments that it has at the start.
        downwards: True if new segments get lower addresses than the existing ones, False if they
            get higher ones. That matters because the lower of two free pieces of one size is used.

    Raises:
        OutOfRoomError: the segments take more than the limit.
    """

    def __init__(
        self,
        most_split_bytes: int = NO_LIMIT,
        limit_bytes: int = NO_LIMIT,
        segments: Sequence[Segment] = (),
        *,
        downwards: bool = False,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._downwards = downwards
        self._small = FreePieces(most_split_bytes)
        """Free pieces of the segments that serve small blocks."""
        self._large = FreePieces(most_split_bytes)
        """Free pieces of the segments that serve large blocks."""
        self.in_use: dict[int, SimulatedBlock] = {}
        """Blocks of ``segments`` that are not free, by address."""
        self.reserved_bytes = 0
        """Bytes of all segments now."""
        for segment in segments:
            self._add_existing(segment)
        self.most_reserved_bytes = self.reserved_bytes
        """The highest value of ``reserved_bytes`` so far."""
        self._next_address = _first_new_address(segments, downwards=downwards)
        """The address where the next segment begins or, downwards, ends."""
        if self.reserved_bytes > limit_bytes:
            raise OutOfRoomError

    def _add_existing(self, segment: Segment) -> None:
        """Add a segment that exists: its usable blocks as free pieces, the other ones as in use."""
        pool = self._pool(is_small=segment.small)
        size_bytes = sum(block.size_bytes for block in segment.blocks)
        if segment.blocks:
            first = segment.blocks[0]
            pool.segments[first.address] = size_bytes
        for block in segment.blocks:
            address = block.address
            if segment.is_usable(block):
                pool.add(address, block.size_bytes)
            else:
                self.in_use[address] = SimulatedBlock(address, block.size_bytes, segment.small)
        self.reserved_bytes += size_bytes

    def _pool(self, *, is_small: bool) -> FreePieces:
        """Return the free pieces of the segments for small blocks, or of those for large ones."""
        if is_small:
            return self._small
        return self._large

    def allocate(self, size_bytes: int) -> SimulatedBlock:
        """Allocate a block of ``size_bytes`` or more.

        Raises:
            OutOfRoomError: the device has no memory left.
        """
        size = block_bytes(size_bytes)
        is_small = size <= _MOST_SMALL_BYTES
        pool = self._pool(is_small=is_small)
        address = pool.best_fit(size)
        if address is None:
            address = self._add_segment(pool, _segment_bytes(size))
        taken_bytes = pool.take(address, size)
        return SimulatedBlock(address, taken_bytes, is_small)

    def _add_segment(self, pool: FreePieces, segment_bytes: int) -> int:
        """Reserve a segment for a pool, and return its address; free all unused segments first if
        the limit is reached.
        """
        if self.reserved_bytes + segment_bytes > self._limit_bytes:
            self.reserved_bytes -= self._small.empty() + self._large.empty()
            if self.reserved_bytes + segment_bytes > self._limit_bytes:
                raise OutOfRoomError
        self.reserved_bytes += segment_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        if self._downwards:
            self._next_address -= segment_bytes
            address = self._next_address
        else:
            address = self._next_address
            self._next_address += segment_bytes
        pool.segments[address] = segment_bytes
        pool.add(address, segment_bytes)
        return address

    def free(self, block: SimulatedBlock) -> None:
        """Free a block, and join it with its free neighbours."""
        pool = self._pool(is_small=block.is_small)
        pool.free(block.address, block.size)


def _segment_bytes(size: int) -> int:
    """Return the size of a new segment for a block."""
    if size <= _MOST_SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _LEAST_LARGE_BYTES:
        return _MIDDLE_SEGMENT_BYTES
    return rounded_up(size, STEP_BYTES)


def _first_new_address(segments: Sequence[Segment], *, downwards: bool) -> int:
    """Return the end of all segments; their beginning if new ones go downwards; 0 without any."""
    blocks = [block for segment in segments for block in segment.blocks]
    if not blocks:
        return 0
    if downwards:
        return min(block.address for block in blocks)
    return max(block.address + block.size_bytes for block in blocks)
