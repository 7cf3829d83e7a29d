"""Reads the heaps of glibc's malloc and of Python's allocator."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from typing import Any, ClassVar, NamedTuple

from ipygpumem.introspect import loaded

BLOCK_BYTES = 48
"""Typical size of a block of Python's allocator."""


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; see mallinfo(3). The first item has seven of its fields."""

    _fields_: ClassVar = [
        ("arena_to_fsmblks", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


@functools.cache  # looking it up takes longer than a call
def _function_of_glibc(name: str) -> Any:
    """Return the function ``name`` of the C library on Linux; None if there is none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)


class HeapFigures(NamedTuple):
    """The heap of glibc's malloc, all arenas together."""

    used_bytes: int
    """Bytes of the blocks in use."""
    free_bytes: int
    """Free bytes, with or without pages in RAM."""
    mapped_bytes: int
    """Large blocks in mappings of their own, which are in neither of the other figures."""


def heap_figures() -> HeapFigures | None:
    """Return the figures of glibc's heap (since 2.33); None elsewhere."""
    mallinfo = _function_of_glibc("mallinfo2")
    if mallinfo is None:
        return None
    mallinfo.restype = _MallInfo
    figures = mallinfo()
    mapped_bytes = figures.arena_to_fsmblks[4]  # ``hblkhd``
    return HeapFigures(figures.uordblks, figures.fordblks, mapped_bytes)


def trim_heap() -> bool | None:
    """Give the free pages of glibc's heap back to the system.

    The result is True if there were any, and None without glibc.
    """
    trim = _function_of_glibc("malloc_trim")
    if trim is None:
        return None
    return bool(trim(0))


def free_heap_bytes() -> int | None:
    """Return the free bytes in the heap of glibc's malloc, with or without pages in RAM; None if
    unknown.
    """
    figures = heap_figures()
    if figures is None:
        return None
    return figures.free_bytes


def free_blocks_bytes() -> int:
    """Return the free bytes in the arenas of Python's allocator; 0 if unknown.

    An arena is freed once all of its blocks are free: a few objects that are still alive, spread
    over many arenas, keep all of them in RAM. Only new objects can use the free blocks.

    CPython reports these bytes only in a text that it writes to a C stream (the one that
    ``sys._debugmallocstats()`` prints), so the stream here is a text in memory.
    """
    libc = _libc_with_streams()
    report = getattr(ctypes.pythonapi, "_PyObject_DebugMallocStats", None)
    if libc is None or report is None:
        return 0
    text = ctypes.c_char_p()
    length = ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(length))
    if not stream:
        return 0
    report(ctypes.c_void_p(stream))
    libc.fclose(ctypes.c_void_p(stream))
    lines = (text.value or b"").decode("ascii", "replace")
    libc.free(text)
    return sum(int(size.replace(",", "")) for size in _FREE_IN_ARENAS.findall(lines))


_FREE_IN_ARENAS = re.compile(
    r"^(?:# bytes in available blocks|\d+ unused pools \* \d+ bytes) +=\s+([\d,]+)$", re.MULTILINE
)
"""The lines about free memory in the report of Python's allocator."""


@functools.cache
def _libc_with_streams() -> Any:
    """Return the C library if it has ``open_memstream``, which writes to a text in memory; else
    None.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "open_memstream"):
        return None
    libc.open_memstream.restype = ctypes.c_void_p
    return libc


def malloc_bytes() -> int:
    """Return the bytes in use from glibc's malloc, large blocks included; 0 without it."""
    figures = heap_figures()
    return 0 if figures is None else figures.mapped_bytes + figures.used_bytes


def allocated_bytes() -> int:
    """Return roughly the bytes in use from Python's allocator, glibc's malloc and pyarrow's pool.

    New objects may fill pages that earlier ones have left, which RSS does not show.
    """
    allocated = sys.getallocatedblocks() * BLOCK_BYTES + malloc_bytes()
    allocated_by_arrow = getattr(loaded("pyarrow"), "total_allocated_bytes", None)
    if allocated_by_arrow is not None:
        allocated += allocated_by_arrow()
    return allocated
