"""What a cell costs, with each of torch's allocators."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ipygpumem.units import MIB
from tests.gpu.support import (
    DEVICE,
    ROUNDING,
    Card,
    allocated,
    cuda_usage,
    ready,
    recovery,
    run_ok,
    size_after,
    started_kernel,
)
from tests.kernel import Kernel

MAKE = "def mib(n): return torch.empty(n << 20, dtype=torch.uint8, device='cuda')\n"


def test_delta_and_peak_to_the_byte(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """What a cell kept and its peak are those of torch.cuda.memory_stats, to the byte, if the cell fails, too."""
    now = "torch.cuda.memory_stats()['allocated_bytes.all.current']"
    reply = gpu_kernel.run(
        f"{MAKE}before = {now}\n"
        "kept, odd, tall = mib(48), torch.empty(12_345_678, dtype=torch.uint8, device='cuda'), mib(160)\n"
        f"high = {now}\ndel tall\nafter = {now}\n1 / 0",
    )
    assert reply.error == "ZeroDivisionError"
    usage = cuda_usage(gpu_kernel)
    before, high, after = gpu_kernel.value("(before, high, after)")
    assert (usage.before_bytes, usage.peak_bytes, usage.after_bytes) == (before, high, after)
    assert usage.delta_bytes >= 48 * MIB + 12_345_678
    assert usage.peak_delta_bytes == usage.delta_bytes + 160 * MIB
    assert usage.method == "allocator"
    figure(f"kept {usage.delta_bytes:,} B, peak {usage.peak_delta_bytes:,} B: no byte off")


@pytest.mark.parametrize(
    ("cell", "kept", "peak"), [("mib(200); None", 0, 200), ("big = mib(64)", 64, 64), ("del big", -64, 0), ("1", 0, 0)]
)
def test_each_cell_has_its_own_peak(gpu_kernel: Kernel, cell: str, kept: int, peak: int) -> None:
    """A tensor that is freed at once counts in its cell's peak, and in no later cell's."""
    run_ok(gpu_kernel, MAKE + cell)
    usage = cuda_usage(gpu_kernel)
    assert (usage.delta_bytes, usage.peak_delta_bytes) == (kept * MIB, peak * MIB)


def test_the_line_after_the_cell(gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """The line after a cell shows the device's change, peak, and the whole device's use as NVML tells it."""
    reply = run_ok(gpu_kernel, f"{MAKE}shown, _ = mib(64), mib(128); del _")
    (line,) = reply.reports("cell")
    assert f"{DEVICE} +64 MiB, peak +192 MiB, " in line
    usage = cuda_usage(gpu_kernel)
    assert usage.total_bytes == card.total_bytes
    assert usage.used_bytes is not None
    assert abs(usage.used_bytes - card.used_bytes) <= ROUNDING
    figure(line.split(" · ", 2)[2])


def test_a_first_use_inside_a_cell(kernel: Kernel) -> None:
    """The cell in which CUDA is first used is measured from zero, to the byte."""
    run_ok(kernel, f"import torch\n{MAKE}kept, tall = mib(40), mib(80); del tall")
    usage = cuda_usage(kernel)
    assert (usage.before_bytes, usage.after_bytes, usage.peak_bytes) == (0, 40 * MIB, 120 * MIB)


def test_loading_after_the_first_use(bare_kernel: Kernel) -> None:
    """Where the extension is loaded after CUDA was used, earlier peaks are not put on the first cell."""
    ready(bare_kernel)
    run_ok(bare_kernel, f"{MAKE}mib(100); held = mib(20)")
    run_ok(bare_kernel, "%load_ext ipygpumem")
    run_ok(bare_kernel, "more = mib(30)")
    usage = cuda_usage(bare_kernel)
    assert (usage.delta_bytes, usage.peak_delta_bytes) == (30 * MIB, 30 * MIB)


def test_free_by_hand(gpu_kernel: Kernel, card: Card) -> None:
    """%gpumem free gives the allocator's cache back to the device, as NVML sees it, and leaves live tensors alone."""
    run_ok(gpu_kernel, f"{MAKE}live = torch.ones(8 << 20, dtype=torch.uint8).cuda(); mib(512); None")
    live, used = allocated(gpu_kernel), card.used_bytes
    reply = run_ok(gpu_kernel, "%gpumem free")
    assert used - card.used_bytes >= 512 * MIB
    assert gpu_kernel.value("int(live.cpu().sum())") == 8 << 20
    assert allocated(gpu_kernel) <= live
    (note,) = reply.reports("note")
    assert size_after(f"{DEVICE} reserved", note) >= 512 * MIB


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(setting: str, card: Card) -> None:
    """With expandable segments and with cudaMallocAsync a cell's figures are torch's, an OOM's memory comes back, an
    experiment's end gives the card its memory, a budget ends with its experiment, and %gpumem status answers."""
    with started_kernel(PYTORCH_CUDA_ALLOC_CONF=setting) as kernel:
        ready(kernel)
        run_ok(kernel, f"{MAKE}x = mib(64); mib(64); None")
        assert (cuda_usage(kernel).delta_bytes, cuda_usage(kernel).peak_delta_bytes) == (64 * MIB, 128 * MIB)
        live, used = allocated(kernel), card.settle()
        reply = kernel.run("def fail():\n    kept = mib(1024)\n    return mib(1 << 22)\nfail()")
        assert reply.error == "OutOfMemoryError"
        assert size_after(rf"came back: [^·\n]*{DEVICE}", recovery(reply)) == 1024 * MIB
        run_ok(kernel, "%%experiment some --budget gpu=1GiB\nz = [mib(100) for _ in range(9)]")
        assert allocated(kernel) == live
        assert card.settle() <= used
        run_ok(kernel, "y = mib(1536)")
        (status,) = run_ok(kernel, "%gpumem status").reports("status")
        assert "tensors: other" in status
        assert "restart with expandable_segments" not in status


def test_no_caching(machine: Callable[..., None]) -> None:
    """With PYTORCH_NO_CUDA_MEMORY_CACHING torch counts nothing: %gpumem status and a budget say so."""
    machine(gib=8)
    with started_kernel(PYTORCH_NO_CUDA_MEMORY_CACHING="1") as kernel:
        ready(kernel)
        run_ok(kernel, f"{MAKE}x = mib(100)")
        said = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts and limits nothing on CUDA devices"
        assert said in run_ok(kernel, "%gpumem status").reports("status")[0]
        reply = run_ok(kernel, "%%experiment small --budget gpu=1GiB\n1")
        assert f"budget: {said}" in reply.reports("experiment")[0]
