"""Other allocators of torch: expandable segments, and CUDA's own stream-ordered one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, Card, allocated, cuda_usage, ready, recovery, run_ok, size_after, started_kernel
from tests.kernel import Kernel

SETTINGS = {"expandable segments": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}

FAIL = """
def fail():
    kept = torch.empty(1, 1 << 30, dtype=torch.uint8, device="cuda")
    return kept.expand(4096, -1).contiguous()
"""


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def other_allocator(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel whose torch allocates in another way."""
    with started_kernel(PYTORCH_CUDA_ALLOC_CONF=request.param) as kernel:
        ready(kernel)
        yield kernel


def test_a_cell_an_oom_and_an_experiment(other_allocator: Kernel, card: Card) -> None:
    """A cell's figures are torch's, an OOM's memory comes back, and an experiment's end gives the card its memory."""
    kernel = other_allocator
    run_ok(kernel, "x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); y = torch.empty_like(x); del y")
    assert (cuda_usage(kernel).delta_bytes, cuda_usage(kernel).peak_delta_bytes) == (64 * MIB, 128 * MIB)
    live, used = allocated(kernel), card.settle()
    run_ok(kernel, FAIL)
    reply = kernel.run("fail()")
    assert reply.error == "OutOfMemoryError"
    assert size_after(rf"came back: [^·\n]*{DEVICE}", recovery(reply)) == 1024 * MIB
    run_ok(
        kernel, "%%experiment some\nz = [torch.empty(100 << 20, dtype=torch.uint8, device='cuda') for _ in range(9)]"
    )
    assert allocated(kernel) == live
    assert card.settle() - used <= 0


def test_the_end_of_a_budget(other_allocator: Kernel) -> None:
    """After a budget torch may have as much again as before it."""
    run_ok(other_allocator, "%%experiment small --budget gpu=1GiB\n1")
    run_ok(other_allocator, "x = torch.empty(3 << 29, dtype=torch.uint8, device='cuda')")


def test_no_caching(machine: Callable[..., None]) -> None:
    """With PYTORCH_NO_CUDA_MEMORY_CACHING torch counts nothing: %gpumem status and a budget say so."""
    machine(gib=8)
    with started_kernel(PYTORCH_NO_CUDA_MEMORY_CACHING="1") as kernel:
        ready(kernel)
        run_ok(kernel, "x = torch.zeros(100 << 20, dtype=torch.uint8, device='cuda')")
        said = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts and limits nothing on CUDA devices"
        assert said in run_ok(kernel, "%gpumem status").reports("status")[0]
        reply = run_ok(kernel, "%%experiment small --budget gpu=1GiB\n1")
        assert f"budget: {said}" in reply.reports("experiment")[0]


def test_status(other_allocator: Kernel) -> None:
    """%gpumem status answers, and what it cannot tell apart stands in one part with the reason."""
    run_ok(other_allocator, "x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    (status,) = run_ok(other_allocator, "%gpumem status").reports("status")
    assert "tensors: other" in status
    assert "restart with expandable_segments" not in status
