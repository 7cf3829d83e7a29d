"""Peaks that overlap, and the user's own counters: torch's statistics are those of a kernel without
us.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.meter.meter import Meter, Span
from ipygpumem.probes.accelerators import CachingAllocatorProbe
from ipygpumem.records import Usage
from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, cuda_usage
from tests.steps import run, run_quietly


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
        return len(self.allocated) - 1


def on_device(usages: tuple[Usage, ...]) -> Usage:
    return next(usage for usage in usages if usage.device == DEVICE)


def test_random_spans(torch: Any, meter: Meter, figure: Callable[[str], None]) -> None:
    """In 600 random steps (starts, stops, readings, tensors, user resets) every peak, ours and the
    user's, is exact.
    """
    choice = random.Random(20)
    tensors = Tensors(torch)
    torch.cuda.reset_peak_memory_stats()
    reset_at = tensors.mark
    spans: list[tuple[Span, int]] = []
    checked = 0
    for _ in range(600):
        match choice.choice(["start", "stop", "read", "take", "take", "drop", "reset", "empty"]):
            case "start" if len(spans) < 6:
                spans.append((meter.span(), tensors.mark))
            case "stop" | "read" as action if spans:
                span, mark = choice.choice(spans)
                usage = on_device(span.read() if action == "read" else span.stop())
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

        # The user's own marks.
        assert torch.cuda.max_memory_allocated() == max(tensors.allocated[reset_at:])
        assert torch.cuda.max_memory_reserved() == max(tensors.reserved[reset_at:])
    figure(f"{checked} spans' peaks and 1,200 of the user's readings: none off by a byte")


def test_a_reset_in_the_first_cell(kernel: Kernel) -> None:
    """A reset in the very cell that uses CUDA first does not lose that cell's peak."""
    run_quietly(kernel, "import torch")
    run_quietly(
        kernel,
        "x = torch.zeros(90 << 18, device='cuda'); del x\ntorch.cuda.reset_peak_memory_stats()",
    )
    assert cuda_usage(kernel).peak_bytes == 90 * MIB


OOM = "train(torch.cuda.get_device_properties(0).total_memory >> 16)"
BY_HAND = """
import sys
for name in ("last_value", "last_traceback", "last_exc"):
    vars(sys).pop(name, None)
get_ipython().InteractiveTB.tb = get_ipython().InteractiveTB.etb = None
gc.collect(); torch._C._cuda_clearCublasWorkspaces(); torch.cuda.empty_cache()
"""
"""Usual clean-up after an OOM; with the extension it finds nothing left to do."""
CELLS = (
    """
import gc, torch
from torch import nn
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(),
    nn.Linear(4096, 1024), nn.GELU(), nn.Linear(1024, 10),
).cuda()
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
""",  # noqa: E501
    """
def loss_of(batch_size):
    images = torch.zeros(batch_size, 3, 64, 64, device="cuda")
    return nn.functional.cross_entropy(model(images), torch.zeros(batch_size, dtype=torch.long, device="cuda"))
def train(batch_size, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(batch_size)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
""",  # noqa: E501
    "train(256)",
    """
model.eval()
with torch.no_grad():
    scores = model(torch.zeros(512, 3, 64, 64, device='cuda'))
scores.shape
""",
    "torch.cuda.reset_peak_memory_stats()",
    """
for number in range(8):
    (loss_of(64) / 8).backward()
optimizer.step()
optimizer.zero_grad()
""",
    """
def fail(images):
    hidden = images * 2
    return model(hidden.flatten(1))
fail(torch.zeros(64, 3, 64, 64, device='cuda'))
""",
    "torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), "
    "len(torch.cuda.memory_summary())",
    """
del scores
torch.cuda.empty_cache()
""",
    OOM,
    BY_HAND,
    "train(128)",
    """
torch.cuda.reset_accumulated_memory_stats()
torch.cuda.reset_peak_memory_stats()
x = torch.zeros(1 << 20, device='cuda')
""",
)
_EMPTIED = "num_sync_all_streams"
"""Counts how often the cache was emptied, too: after the OOM the extension has done it once more.
"""


def test_torchs_statistics_are_the_same_after_every_cell(machine: Callable[..., None]) -> None:
    """In 13 cells of training memory_stats() is the same as without the extension, but for what an
    OOM gives back.
    """
    machine(gib=8)
    bare = _statistics("")
    ours = _statistics("%load_ext ipygpumem")
    failed = CELLS.index(OOM)
    assert len(bare[2]) == len(ours[2]) > 0
    for number, (cell, without, with_us) in enumerate(zip(CELLS, bare, ours, strict=True)):
        keys = {*without, *with_us} - ({_EMPTIED} if number >= failed else set())
        # How many gaps there were differs by itself: torch's thread for backward passes frees at
        # moments of its own. From the error on, gaps differ between runs without the extension,
        # too.
        varies = (
            ("allocated", "freed") if number < failed else ("allocated", "freed", "current", "peak")
        )
        keys = {
            key for key in keys if not (key.startswith("inactive_split") and key.endswith(varies))
        }
        keys = {key for key in keys if number != failed or _is_before_the_error(key)}
        differing = {
            key: (without.get(key), with_us.get(key))
            for key in keys
            if without.get(key) != with_us.get(key)
        }
        assert differing == {}, cell
    left = [
        statistics["allocated_bytes.all.current"]
        for statistics in (ours[failed], ours[failed + 1], bare[failed])
    ]
    assert left[0] == left[1] < left[2]


def _is_before_the_error(key: str) -> bool:
    """Return True if a statistic has the allocations and peaks of a cell until it failed."""
    gap = key.startswith("inactive_split")  # a block that comes back may leave one
    return (
        key.endswith(".peak")
        or (key.endswith(".allocated") and not gap)
        or key in ("num_ooms", "num_alloc_retries")
    )


def _statistics(load: str) -> list[dict[str, int]]:
    with Kernel() as kernel:
        run_quietly(kernel, load)
        statistics = []
        for cell in CELLS:
            run(kernel, cell)
            statistics.append(kernel.value("dict(__import__('torch').cuda.memory_stats())"))
        return statistics
