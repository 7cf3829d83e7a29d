"""What a cell costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, ROUNDING, Card, allocated, cuda_usage, ready, run_ok, size_after
from tests.kernel import Kernel

TRAINING = """
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 32 * 32, 512)
).to("cuda")
for step in range(3):
    net(torch.rand(64, 3, 32, 32, device="cuda")).square().mean().backward()
torch.cuda.synchronize()
"""


@pytest.fixture
def second_kernel() -> Iterator[Kernel]:
    """A kernel without the extension, with the CUDA context made."""
    kernel = Kernel()
    ready(kernel)
    yield kernel
    kernel.close()


def test_delta_and_peak_to_the_byte(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """What a cell kept and its peak are those of torch.cuda.memory_stats, to the byte."""
    run_ok(
        gpu_kernel,
        "before = torch.cuda.memory_stats()['allocated_bytes.all.current']\n"
        "kept = torch.empty(48 << 20, dtype=torch.uint8, device='cuda')\n"
        "odd = torch.empty(12_345_678, dtype=torch.uint8, device='cuda')\n"
        "tall = torch.empty(160 << 20, dtype=torch.uint8, device='cuda')\n"
        "high = torch.cuda.memory_stats()['allocated_bytes.all.current']\n"
        "del tall\n"
        "after = torch.cuda.memory_stats()['allocated_bytes.all.current']",
    )
    usage = cuda_usage(gpu_kernel)
    before, high, after = gpu_kernel.value("(before, high, after)")
    assert (usage.before_bytes, usage.peak_bytes, usage.after_bytes) == (before, high, after)
    assert usage.delta_bytes >= 48 * MIB + 12_345_678
    assert usage.peak_delta_bytes == usage.delta_bytes + 160 * MIB
    assert usage.method == "allocator"
    figure(f"kept {usage.delta_bytes:,} B, peak {usage.peak_delta_bytes:,} B: no byte off")


def test_a_short_peak_is_not_missed(gpu_kernel: Kernel) -> None:
    """A tensor that is freed at once, in the middle of a cell, still counts in the cell's peak."""
    run_ok(gpu_kernel, "torch.empty(200 << 20, dtype=torch.uint8, device='cuda').shape")
    usage = cuda_usage(gpu_kernel)
    assert usage.delta_bytes == 0
    assert usage.peak_delta_bytes == 200 * MIB


def test_a_peak_ends_with_its_cell(gpu_kernel: Kernel) -> None:
    """The peak of one cell is not seen in the next."""
    run_ok(gpu_kernel, "big = torch.empty(300 << 20, dtype=torch.uint8, device='cuda'); del big")
    run_ok(gpu_kernel, "1 + 1")
    usage = cuda_usage(gpu_kernel)
    assert usage.peak_bytes == usage.before_bytes == usage.after_bytes


def test_a_failed_cell_is_measured(gpu_kernel: Kernel) -> None:
    """A cell that raises is measured like any other."""
    reply = gpu_kernel.run("left = torch.empty(32 << 20, dtype=torch.uint8, device='cuda')\n1 / 0")
    assert reply.error == "ZeroDivisionError"
    assert cuda_usage(gpu_kernel).delta_bytes == 32 * MIB
    run_ok(gpu_kernel, "del left")


def test_a_cell_that_frees(gpu_kernel: Kernel) -> None:
    """A cell that deletes tensors shows what it gave back as a negative change."""
    run_ok(gpu_kernel, "doomed = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    run_ok(gpu_kernel, "del doomed")
    usage = cuda_usage(gpu_kernel)
    assert usage.delta_bytes == -64 * MIB
    assert usage.peak_delta_bytes == 0


def test_training_costs_what_it_costs_without_us(
    kernel: Kernel, second_kernel: Kernel, figure: Callable[[str], None]
) -> None:
    """A convolutional network's training has the same peak and remainder as in a kernel without the extension."""
    ready(kernel)
    for each in (kernel, second_kernel):
        run_ok(each, "before = torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats()")
        run_ok(each, TRAINING)
    usage = cuda_usage(kernel)
    cost = "(gc.collect(), torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)[1:]"
    assert (usage.delta_bytes, usage.peak_delta_bytes) == kernel.value(cost) == second_kernel.value(cost)
    figure(f"kept {usage.delta_bytes:,} B, peak {usage.peak_delta_bytes:,} B in both kernels")


def test_the_line_after_the_cell(gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """The line after a cell shows the device's change, peak, and the whole device's use as NVML tells it."""
    reply = run_ok(
        gpu_kernel,
        "shown = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
        "tall = torch.empty(128 << 20, dtype=torch.uint8, device='cuda'); del tall",
    )
    (line,) = reply.reports("cell")
    assert f"{DEVICE} +64 MiB, peak +192 MiB, " in line
    usage = cuda_usage(gpu_kernel)
    assert usage.total_bytes == card.total_bytes
    assert usage.used_bytes is not None
    assert abs(usage.used_bytes - card.used_bytes) <= ROUNDING
    figure(line.split(" · ", 2)[2])


def test_a_first_use_inside_a_cell(kernel: Kernel) -> None:
    """The cell in which CUDA is first used is measured from zero, to the byte."""
    run_ok(
        kernel,
        "import torch\n"
        "kept = torch.empty(40 << 20, dtype=torch.uint8, device='cuda')\n"
        "tall = torch.empty(80 << 20, dtype=torch.uint8, device='cuda'); del tall",
    )
    usage = cuda_usage(kernel)
    assert (usage.before_bytes, usage.after_bytes, usage.peak_bytes) == (0, 40 * MIB, 120 * MIB)


def test_loading_after_the_first_use(second_kernel: Kernel) -> None:
    """Where the extension is loaded after CUDA was used, earlier peaks are not put on the first cell."""
    run_ok(second_kernel, "old = torch.empty(100 << 20, dtype=torch.uint8, device='cuda'); del old")
    run_ok(second_kernel, "held = torch.empty(20 << 20, dtype=torch.uint8, device='cuda')")
    run_ok(second_kernel, "%load_ext ipygpumem")
    run_ok(second_kernel, "more = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')")
    usage = cuda_usage(second_kernel)
    assert (usage.delta_bytes, usage.peak_delta_bytes) == (30 * MIB, 30 * MIB)


def test_free_by_hand(gpu_kernel: Kernel, card: Card) -> None:
    """%gpumem free gives the allocator's cache back to the device, as NVML sees it, and leaves live tensors alone."""
    run_ok(gpu_kernel, "live = torch.ones(8 << 20, dtype=torch.uint8).cuda()")
    run_ok(gpu_kernel, "cached = torch.empty(512 << 20, dtype=torch.uint8, device='cuda'); del cached")
    live, used = allocated(gpu_kernel), card.used_bytes
    reply = run_ok(gpu_kernel, "%gpumem free")
    assert used - card.used_bytes >= 512 * MIB
    assert gpu_kernel.value("int(live.cpu().sum())") == 8 << 20
    assert allocated(gpu_kernel) <= live
    (note,) = reply.reports("note")
    assert size_after(f"{DEVICE} reserved", note) >= 512 * MIB
