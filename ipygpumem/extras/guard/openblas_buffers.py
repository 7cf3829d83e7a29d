"""Lets OpenBLAS allocate its buffers before allocations are limited: it ends the process if they
are refused later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _multiply_with_numpy(numpy: Any) -> None:
    """Multiply matrices that are large enough for OpenBLAS to allocate its buffer."""
    square = numpy.ones((128, 128))
    numpy.dot(square, square)


def _multiply_with_scipy(blas: Any) -> None:
    """Multiply matrices with scipy, whose wheels contain an OpenBLAS of their own."""
    square = sys.modules["numpy"].ones((256, 256))
    blas.dgemm(1.0, square, square)


_ALLOCATIONS: dict[str, Callable[[Any], None]] = {
    "numpy": _multiply_with_numpy,
    "scipy.linalg.blas": _multiply_with_scipy,
}
"""Modules → a call that allocates the buffer of their OpenBLAS. OpenMP's threads end the process,
too, but forked children would hang once they have been started."""


class OpenBlasBuffers:
    """Allocates the buffers of each loaded OpenBLAS, once."""

    def __init__(self) -> None:
        self._modules: set[str] = set()

    def allocate(self) -> None:
        """Allocate the buffers of modules that have been loaded since the last call."""
        for name, allocate in _ALLOCATIONS.items():
            if name in sys.modules and name not in self._modules:
                self._modules.add(name)
                allocate(sys.modules[name])
