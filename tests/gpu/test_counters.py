"""Peaks that overlap, and the user's own counters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ipygpumem.measuring.meter import Measurement, Meter
from ipygpumem.model import Usage
from ipygpumem.probes.accelerators import CachingAllocatorProbe
from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, cuda_usage, ready, run_ok
from tests.kernel import Kernel


@pytest.fixture
def meter(torch: Any) -> Iterator[Meter]:
    """A meter over the allocator of this process, whose context is made."""
    torch.ones(1, device="cuda")
    meter = Meter([CachingAllocatorProbe("cuda")])
    yield meter
    meter.close()
    torch.cuda.empty_cache()


class Tensors:
    """Tensors on the device, and what torch said was allocated and reserved after every change."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.live: dict[int, Any] = {}
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self._note()

    def _note(self) -> None:
        self.allocated.append(self._torch.cuda.memory_allocated())
        self.reserved.append(self._torch.cuda.memory_reserved())

    def take(self, mib: int) -> int:
        key = len(self.allocated)
        self.live[key] = self._torch.empty(mib << 20, dtype=self._torch.uint8, device="cuda")
        self._note()
        return key

    def drop(self, key: int) -> None:
        del self.live[key]
        self._note()

    def empty_cache(self) -> None:
        self._torch.cuda.empty_cache()
        self._note()

    @property
    def mark(self) -> int:
        """The place in the record now."""
        return len(self.allocated) - 1


def on_device(usages: tuple[Usage, ...]) -> Usage:
    return next(usage for usage in usages if usage.device == DEVICE)


def test_random_spans(torch: Any, meter: Meter, figure: Callable[[str], None]) -> None:
    """In 600 random steps (starts, stops, readings, tensors, user resets) every peak, ours and the user's, is exact."""
    choice = random.Random(20)
    tensors = Tensors(torch)
    torch.cuda.reset_peak_memory_stats()
    reset_at = tensors.mark
    spans: list[tuple[Measurement, int]] = []
    checked = 0
    for _ in range(600):
        match choice.choice(["start", "stop", "read", "take", "take", "drop", "reset", "empty"]):
            case "start" if len(spans) < 6:
                spans.append((meter.start(), tensors.mark))
            case "stop" | "read" as action if spans:
                span, mark = choice.choice(spans)
                usage = on_device(meter.read(span) if action == "read" else meter.stop(span))
                assert usage.before_bytes == tensors.allocated[mark]
                assert usage.after_bytes == tensors.allocated[-1]
                assert usage.peak_bytes == max(tensors.allocated[mark:])
                checked += 1
                if action == "stop":
                    spans.remove((span, mark))
            case "take" if len(tensors.live) < 12:
                tensors.take(choice.randint(1, 24))
            case "drop" if tensors.live:
                tensors.drop(choice.choice(list(tensors.live)))
            case "reset":
                torch.cuda.reset_peak_memory_stats()
                reset_at = tensors.mark
            case "empty":
                tensors.empty_cache()
        assert torch.cuda.max_memory_allocated() == max(tensors.allocated[reset_at:])
        assert torch.cuda.max_memory_reserved() == max(tensors.reserved[reset_at:])
    figure(f"{checked} spans' peaks and 1,200 of the user's readings: none off by a byte")


CELLS = [
    "a = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
    "b = torch.empty(96 << 20, dtype=torch.uint8, device='cuda'); del b",
    "1 + 1",
    "torch.cuda.reset_peak_memory_stats()\nc = torch.empty(3000, device='cuda')",
    "d = torch.empty(40 << 20, dtype=torch.uint8, device='cuda')\n"
    "torch.cuda.reset_peak_memory_stats(0)\n"
    "e = torch.empty(8 << 20, dtype=torch.uint8, device='cuda'); del d",
    "if hasattr(torch, 'accelerator') and hasattr(torch.accelerator, 'reset_peak_memory_stats'):\n"
    "    torch.accelerator.reset_peak_memory_stats()\n"
    "f = [torch.empty(5 << 20, dtype=torch.uint8, device='cuda') for _ in range(9)]; del f[::2]",
    "torch.cuda.empty_cache()",
    "torch.cuda.reset_accumulated_memory_stats()",
    "g = torch.empty(33 << 20, dtype=torch.uint8, device='cuda'); del a, g",
    "%%capture\nh = torch.empty(70 << 20, dtype=torch.uint8, device='cuda'); del h",
]
STATISTICS = """
def statistics():
    import json
    found = {'cuda ' + name: value for name, value in torch.cuda.memory_stats().items()}
    found |= {'max allocated': torch.cuda.max_memory_allocated(), 'max reserved': torch.cuda.max_memory_reserved()}
    accelerator = getattr(torch, 'accelerator', None)
    if hasattr(accelerator, 'memory_stats'):
        found |= {'accelerator ' + name: value for name, value in accelerator.memory_stats().items()}
        found |= {'accelerator max': accelerator.max_memory_allocated()}
    return json.dumps(found)
"""


def _statistics(*magic: str, env: dict[str, str] | None = None) -> list[dict[str, int]]:
    """Run ``CELLS`` in a fresh kernel and return all of torch's statistics after each."""
    with Kernel(env=env) as kernel:
        for line in magic:
            run_ok(kernel, line)
        ready(kernel)
        run_ok(kernel, STATISTICS)
        found = []
        for cell in CELLS:
            run_ok(kernel, cell)
            found.append(json.loads(kernel.value("statistics()")))
        return found


@pytest.mark.parametrize("options", ["", "max_split_size_mb:32"], ids=["default", "max_split_size"])
def test_users_counters(options: str, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]) -> None:
    """After every cell all of torch's memory statistics are what they are in a kernel without the extension."""
    if options:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    without, loaded = _statistics(), _statistics("%load_ext ipygpumem")
    assert len(without[0]) > 50
    for cell, expected, found in zip(CELLS, without, loaded, strict=True):
        wrong = {name: (expected[name], found.get(name)) for name in expected if found.get(name) != expected[name]}
        assert not wrong, f"(without, with the extension) after the cell: {cell}"
    figure(f"{len(without[0])} statistics after each of {len(CELLS)} cells: all equal")


def test_a_reset_keeps_the_cells_peak(gpu_kernel: Kernel) -> None:
    """The user's reset in the middle of a cell does not lose the cell's peak, and the user sees the new one."""
    run_ok(
        gpu_kernel,
        "before = torch.cuda.memory_allocated()\n"
        "x = torch.empty(90 << 20, dtype=torch.uint8, device='cuda'); del x\n"
        "torch.cuda.reset_peak_memory_stats()\n"
        "y = torch.empty(10 << 20, dtype=torch.uint8, device='cuda'); del y\n"
        "seen = torch.cuda.max_memory_allocated() - before",
    )
    assert cuda_usage(gpu_kernel).peak_delta_bytes == 90 * MIB
    assert gpu_kernel.value("seen") == 10 * MIB
    assert gpu_kernel.value("torch.cuda.max_memory_allocated() - before") == 10 * MIB


def test_a_reset_in_the_first_cell(kernel: Kernel) -> None:
    """A reset in the very cell that uses CUDA first does not lose that cell's peak."""
    run_ok(kernel, "import torch")
    run_ok(
        kernel,
        "x = torch.empty(90 << 20, dtype=torch.uint8, device='cuda'); del x\ntorch.cuda.reset_peak_memory_stats()",
    )
    assert cuda_usage(kernel).peak_bytes == 90 * MIB
