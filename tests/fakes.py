"""Stand-ins with exact figures: a probe to script, and torch's CUDA allocator with its one
resettable peak.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

from ipygpumem.records import Reading

SCRIPT_BYTES = 100
"""The memory of the fixture ``script_memory`` until a test sets something else."""


class FakeProbe:
    """A device whose memory the test sets; its high-water mark behaves like the kernel's."""

    def __init__(self, device: str = "cpu", *, sampled: bool = False) -> None:
        self.device = device
        self.sampled = sampled
        self.closed = False
        self._current = 0
        self._peak = 0

    def set(self, current: int) -> None:
        """Let the memory become ``current``."""
        self._current = current
        self._peak = max(self._peak, current)

    def spike(self, height: int) -> None:
        """Let the memory rise to ``height`` and fall back at once."""
        self._peak = max(self._peak, height)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        peak = self._current if self.sampled else self._peak
        return (
            Reading(
                self.device, self._current, peak, "sampled" if self.sampled else "kernel", 1000
            ),
        )

    def glance(self) -> tuple[Reading, ...]:
        return self.read(peak=False)

    def rearm(self) -> None:
        self._peak = self._current

    def close(self) -> None:
        self.closed = True


class FakeAllocator:
    """The functions of ``torch._C`` that torch's memory API calls, for CUDA devices with scripted
    memory.
    """

    def __init__(self, devices: int = 1) -> None:
        self.current = [0] * devices
        self.peak = [0] * devices
        self.reserved = [0] * devices

    def allocate(self, size: int, device: int = 0) -> None:
        """Allocate ``size`` bytes; free them if it is negative. Freed bytes stay reserved."""
        self.current[device] += size
        self.peak[device] = max(self.peak[device], self.current[device])
        self.reserved[device] = max(self.reserved[device], self.current[device])

    def _cuda_memoryStats(self, device: int) -> dict[str, Any]:
        used = {
            "current": self.current[device],
            "peak": self.peak[device],
            "allocated": 0,
            "freed": 0,
        }
        reserved = {
            "current": self.reserved[device],
            "peak": self.reserved[device],
            "allocated": 0,
            "freed": 0,
        }
        return {
            "allocated_bytes": {"all": used},
            "reserved_bytes": {"all": reserved},
            "oversize": used,
            "num_ooms": 0,
        }

    def _cuda_resetPeakMemoryStats(self, device: int) -> None:
        self.peak[device] = self.current[device]


class FakeCuda:
    """``torch.cuda`` as the user calls it."""

    def __init__(
        self, library: FakeAllocator, *, initialized: bool = True, total: int = 1000
    ) -> None:
        self._library = library
        self.initialized = initialized
        self._total = total

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self._library.current)

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(total_memory=self._total, uuid=f"uuid-{device}")

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return self._total - self._library.reserved[device] - 50, self._total

    def max_memory_allocated(self, device: int = 0) -> int:
        return int(self._library._cuda_memoryStats(device)["allocated_bytes"]["all"]["peak"])

    def reset_peak_memory_stats(self, device: int = 0) -> None:
        self._library._cuda_resetPeakMemoryStats(device)


def fake_torch(allocator: FakeAllocator, **options: Any) -> Any:
    """Return a module-like torch whose CUDA devices are ``allocator``'s."""
    return fake_module(_C=allocator, cuda=FakeCuda(allocator, **options))


def fake_module(**contents: Any) -> Any:
    module = ModuleType("torch")
    vars(module).update(contents)
    return module
