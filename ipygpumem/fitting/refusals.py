"""Reads torch's out-of-memory errors: was it a limit that refused the memory, or the device?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ipygpumem.units import format_bytes, parse_bytes

# What torch says when memory runs out: the caching allocator since 2.1 and before, and cudaMallocAsync.
_BYTES = r"([\d.]+ (?:bytes|[KMGT]iB))"
_OF_CUDA = re.compile(r"\b(?:CUDA|HIP) out of memory\b.*?\bGPU (\d+)|Allocation on device (\d+) would", re.DOTALL)
_ALLOWED = re.compile(rf"{_BYTES} allowed; |PyTorch limit[^:]*: {_BYTES}")
_REQUESTED = re.compile(rf"Tried to allocate {_BYTES}|Requested\s*: {_BYTES}")
_FREE = re.compile(rf"of which {_BYTES} is free|; {_BYTES} free; |Free \(according to CUDA\): {_BYTES}")
_TAKEN = re.compile(
    rf"{_BYTES} is allocated by PyTorch|{_BYTES} is reserved by PyTorch but|{_BYTES} reserved in total by PyTorch"
    rf"|Currently allocated\s*: {_BYTES}"
)


@dataclass(frozen=True)
class Refusal:
    """A request that a limit on torch's allocator refused, whoever has set it."""

    device: str
    limit_bytes: int
    requested_bytes: int
    free_bytes: int
    """What the device itself had free then."""

    def is_by(self, limit_bytes: int) -> bool:
        """Whether ``limit_bytes`` is that limit, as far as torch's text tells: it has two decimals."""
        return abs(limit_bytes - self.limit_bytes) <= self.limit_bytes // 100

    def text(self, who: str) -> str:
        """Return in words what ``who`` refused."""
        asked, free = format_bytes(self.requested_bytes), format_bytes(self.free_bytes)
        if self.free_bytes >= self.requested_bytes:
            return f"{who} refused {asked} of {self.device}, although {free} of it were free"
        return f"{who} refused {asked} of {self.device}; the device itself had only {free} free"


def refusal(message: str) -> Refusal | None:
    """Return what torch's out-of-memory error says of the limit that refused; None if the device did.

    torch asks its limit first, and counts what it has reserved (``cudaMallocAsync``: what is in use).
    """
    device, limit = _OF_CUDA.search(message), _first_size(_ALLOWED, message)
    requested, free = _first_size(_REQUESTED, message), _first_size(_FREE, message)
    if device is None or limit is None or requested is None or free is None:
        return None
    taken = sum(parse_bytes(size) for sizes in _TAKEN.findall(message) for size in sizes if size)
    if free < requested and taken + requested <= limit:
        return None
    return Refusal(f"cuda:{device[1] or device[2]}", limit, requested, free)


def _first_size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return None if match is None else parse_bytes(next(filter(None, match.groups())))
