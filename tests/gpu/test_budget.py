"""Budgets, enforced by torch's allocator on a real device."""

from __future__ import annotations

from tests.gpu.support import allocated, run_ok
from tests.kernel import Kernel


def take(gib: float) -> str:
    return f"x = torch.empty(int({gib} * 2**30), dtype=torch.uint8, device='cuda')"


def test_what_is_above_the_budget_is_refused(gpu_kernel: Kernel) -> None:
    """An experiment with --budget gpu=1GiB runs out of memory at 2 GiB; without it the same cell runs."""
    run_ok(gpu_kernel, "%gpumem free")
    reply = gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(2)}")
    assert reply.error == "OutOfMemoryError"
    assert len(reply.reports("recovery")) == 1
    run_ok(gpu_kernel, f"{take(2)}; del x")


def test_what_is_below_the_budget_is_given(gpu_kernel: Kernel) -> None:
    """Under a budget of 1 GiB half a GiB is allocated as ever, and the record knows the budget."""
    run_ok(gpu_kernel, "%gpumem free")
    run_ok(gpu_kernel, f"%%experiment fits --budget gpu=1GiB\n{take(0.5)}")
    record = gpu_kernel.value("__import__('ipygpumem').experiments()[-1].budget")
    assert 2**30 - 1 <= record["cuda:0"] <= 2**30


def test_the_earlier_limit_is_back(gpu_kernel: Kernel) -> None:
    """After the block the limit that the user had set himself is in force again."""
    run_ok(gpu_kernel, "%gpumem free")
    run_ok(gpu_kernel, "import ipygpumem\ntotal = torch.cuda.get_device_properties(0).total_memory")
    run_ok(gpu_kernel, "torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)")
    try:
        reply = gpu_kernel.run(f"with ipygpumem.budget(gpu='1GiB'):\n    {take(2)}")
        assert reply.error == "OutOfMemoryError"
        if gpu_kernel.value("hasattr(torch.cuda, 'get_per_process_memory_fraction')"):
            run_ok(gpu_kernel, f"{take(2)}; del x")
            assert gpu_kernel.run(take(5)).error == "OutOfMemoryError"
    finally:
        run_ok(gpu_kernel, "torch.cuda.set_per_process_memory_fraction(1.0)")
    assert allocated(gpu_kernel) < 2**30
