"""The names and texts by which libraries say that memory ran out.

Support for another library, or for the new words of a known one, begins here.
"""

from __future__ import annotations

import re

# -- types --------------------------------------------------------------------------------------

OOM_TYPES = frozenset({"MemoryError", "OutOfMemoryError"})
"""Names of exceptions, and of their bases: Python's, torch's and CuPy's. NumPy's derives from
``MemoryError``.
"""
TYPES_IN_RECORDS = OOM_TYPES | {"_ArrayMemoryError"}
"""The same where only the name of the exception itself is known; the last one is NumPy's."""
TEXT_TYPES = frozenset(
    {
        *("RuntimeError", "AcceleratorError", "XlaRuntimeError", "JaxRuntimeError"),
        *("CUDARuntimeError", "CUDNNError", "CUBLASError"),
    }
)
"""Types whose message decides; a ValueError about memory is the user's own."""

# -- messages -----------------------------------------------------------------------------------

OOM_TEXT = re.compile(
    r"out of memory|can't allocate memory|not enough "
    r"memory|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|(DEVICE|HOST)_ALLOCATION_FAILED",
    re.IGNORECASE,
)
"""Part of a message of one of ``TEXT_TYPES`` that memory ran out."""
SHM_REFUSED = re.compile(r"unable to allocate shared memory|unable to write to file </torch_")
"""Part of a message that shared memory ran out."""
NATIVE_HOST_WORDS = ("DefaultCPUAllocator", "bad_alloc")
"""Parts of native code's messages that host memory ran out: torch's, and that of C++."""

KINDS_OF_DEVICES = {
    "cupy": r"CU\w+Error:|OutOfMemoryError: Out of memory allocating",
    "cpu": (
        r"CPUAllocator|CPU memory|not enough memory: you "
        r"tried|HOST_ALLOCATION|\b(?!OutOf)\w*MemoryError: "
    ),
    "cuda": r"\b(CUDA|HIP|cuda|hip)|\b(cuBLAS|cuDNN)|Allocation on device",
    "xpu": r"\bXPU\b|DEVICE_ALLOCATION",
    "mps": r"\bMPS\b",
    "jax": r"RESOURCE_EXHAUSTED",
}
"""Patterns of an error's type and text by the kind of device that ran out; the first match counts.
"""
NUMBERED_DEVICE = re.compile(r"\b(?:GPU|Allocation on device) (\d+)\b")
"""Part of torch's messages with the number of the device that ran out."""

# -- sizes in messages --------------------------------------------------------------------------

_SIZE = r"([\d.,]+ ?(?:[kmgtp]?i?b|bytes))"
REQUESTED = re.compile(
    rf"tried to allocate {_SIZE}|trying to allocate {_SIZE}|unable to allocate {_SIZE}|allocating "
    rf"{_SIZE}"
    rf"|^requested +: {_SIZE}",  # cudaMallocAsync
    re.IGNORECASE | re.MULTILINE,
)
"""Part of a message with the size of the refused allocation."""
_BYTES = r"[\d.]+ (?:bytes|[KMGT]iB)"
TORCHS_FIGURES = (
    rf"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<requested>{_BYTES})\. GPU (?P<index>\d+) "
    rf"has a total \w+ of "
    rf"(?P<total>{_BYTES}) of which (?P<free>{_BYTES}) is free\..*?(?:(?P<limit>{_BYTES}) allowed; "
    rf")?Of the allocated "
    rf"memory (?P<allocated>{_BYTES}) is allocated.*? and (?P<unallocated>{_BYTES}) is reserved by "
    rf"PyTorch but",
    rf"Allocation on device (?P<index>\d+) would exceed allowed memory\..*?\nCurrently allocated "
    rf"+: "
    rf"(?P<allocated>{_BYTES})\nRequested +: (?P<requested>{_BYTES})\nDevice limit +: "
    rf"(?P<total>{_BYTES})\n"
    rf"Free .*?: (?P<free>{_BYTES})\nPyTorch limit .*?: (?P<limit>{_BYTES})",
)
"""Messages of torch's caching allocator, since torch 2.1, and of cudaMallocAsync."""
