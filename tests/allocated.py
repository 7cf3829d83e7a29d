"""What the C library has handed out: the memory of torch, of NumPy and of large objects. A kernel may run this file."""

from __future__ import annotations

import ctypes
import gc


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def is_known() -> bool:
    """Whether this C library says it: glibc does, from 2.33 on."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def allocated() -> int:
    """Return the bytes, once garbage is collected."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Mallinfo
    gc.collect()
    found = read()
    return int(found.uordblks + found.hblkhd)
