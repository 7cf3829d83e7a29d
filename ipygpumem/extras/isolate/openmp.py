"""Prepares OpenMP for a fork: the child process would wait forever for threads that it lacks."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

_LIBRARY = re.compile(r"/\S*/libgomp[-.][^/\n]*$", re.MULTILINE)
"""GNU's OpenMP; the one of LLVM and Intel handles forks itself."""
_PAUSE = "omp_pause_resource_all"
"""Function that ends OpenMP's threads, from version 5 on (GCC 9)."""
_PAUSE_HARD = 2
"""Its argument."""


def pause_openmp() -> list[Any]:
    """End OpenMP's idle threads, which start again when needed.

    Return the loaded libraries that cannot do so: in the child process they must use one thread.
    """
    maps = Path("/proc/self/maps").read_text("utf-8", "replace")
    paths = set(_LIBRARY.findall(maps))
    libraries = [ctypes.CDLL(path) for path in paths if Path(path).exists()]
    without_pause = []
    for library in libraries:
        pause = getattr(library, _PAUSE, None)
        if pause is None:
            without_pause.append(library)
        else:
            pause(_PAUSE_HARD)
    return without_pause
