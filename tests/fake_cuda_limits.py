"""Stand-ins for the limits of torch's allocator, and the error of a refused request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ipygpumem.units import GIB


class LimitedCuda:
    """``torch.cuda`` with two devices of 16 GiB, as far as limits go."""

    def __init__(
        self, *, reserved: tuple[int, ...] = (0, 0), live: int = 0, fixed: int = 0
    ) -> None:
        self.fractions = [1.0, 1.0]
        self.current = 0
        self.emptied = 0
        self._reserved = list(reserved)
        self._live = live
        self._fixed = max(fixed, live)
        """Memory that stays reserved when the cache is emptied."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def memory_reserved(self, device: int | str) -> int:
        return self._reserved[int(str(device)[-1])]

    def memory_allocated(self, device: int | str) -> int:
        return self._live

    def empty_cache(self) -> None:
        self.emptied += 1
        self._reserved = [min(size, self._fixed) for size in self._reserved]

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(total_memory=16 * GIB)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert type(fraction) is float
        assert 0 <= fraction <= 1
        self.fractions[index] = fraction
        self.current = index  # as torch did before it had a guard here


class KnowingCuda(LimitedCuda):
    """``torch.cuda`` of torch 2.8 and later."""

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.fractions[index]


TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of "
    "which 23.00 GiB is "
    "free. Including non-PyTorch memory, this process has 432.00 MiB memory in use. 1024.00 MiB "
    "allowed; Of the "
    "allocated memory 4.00 MiB is allocated by PyTorch, and 16.00 MiB is reserved by PyTorch but "
    "unallocated."
)
