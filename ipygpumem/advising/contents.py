"""Reads what is in tensors and arrays, in pieces: no second copy of a large one comes into being."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ipygpumem.advising.look import Look
from ipygpumem.objects.arrays import library_type

_PIECE = 1 << 19
"""Elements that are compared at once: 4 MiB of the widest."""


def pieces(items: Any) -> Iterator[Any]:
    """Yield the elements of flat tensors or arrays, in pieces that are views."""
    for start in range(0, len(items), _PIECE):
        yield items[start : start + _PIECE]


def beginning(item: Any) -> tuple[Any, ...]:
    """Return a few elements of a plain tensor or array: where they differ, nothing else need be compared."""
    flat = None if _is_capturing() else _flat(item)
    try:
        return () if flat is None else tuple(_on_host(flat[:16]).tolist())
    except RuntimeError:  # a broken device
        return ()


def are_equal(look: Look, first: Any, second: Any) -> bool:
    """Whether two plain tensors, or two plain arrays, of one shape and dtype have the same content, of several values.

    Buffers full of one value are not alike: they wait to be filled. What is on a device is compared on the host.
    """
    flat = [_flat(item) for item in (first, second)]
    if any(item is None or not len(item) for item in flat) or _is_capturing():
        return False
    several = False
    try:
        if not _same(*(_on_host(item[:1024]) for item in flat)) or not look.may_read(2 * int(first.nbytes)):
            return False
        start = _on_host(flat[0][:1])
        for pair in zip(*map(pieces, flat), strict=True):
            left, right = map(_on_host, pair)
            if not _same(left, right):
                return False
            several = several or not bool((left == start).all())
    except RuntimeError:  # a broken device
        return False
    return several


def _on_host(item: Any) -> Any:
    return item if type(item) is library_type("numpy", "ndarray") else item.cpu()


def _same(left: Any, right: Any) -> bool:
    return bool((left == right).all())


def _flat(item: Any) -> Any:
    """Return all elements in one row, as a view; None where that takes a copy."""
    kind: Any = library_type("numpy", "ndarray")
    if type(item) is kind:
        return item.reshape(-1) if item.flags.c_contiguous and item.dtype.kind in "biufc" else None
    return item.detach().view(-1) if item.is_contiguous() else None


def _is_capturing() -> bool:
    """Whether a CUDA graph is captured: to copy anything to the host would spoil it."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())
