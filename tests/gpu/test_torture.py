"""The torture suite's scenarios with tensors on a GPU, and what only a GPU keeps: caches, workspaces, pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ipygpumem.units import MIB, TIB, format_bytes
from tests.gpu.support import ROUNDING, Card, allocated, ready, recovery, run_ok, size_after
from tests.kernel import Kernel
from tests.torture.runner import SPAN, Runner
from tests.torture.scenarios import SCENARIOS, Scenario

_PINNED = "torch.cuda.host_memory_stats()['allocated_bytes.current']"


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Runs scenarios in a kernel that lasts as long as nothing is left in it."""
    runner = Runner(SPAN, gpu=True)
    yield runner
    runner.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_row_of_leaks(scenario: Scenario, runner: Runner) -> None:
    """Of the tensors on the GPU of each row of docs/leaks.md all come back, or exactly what nothing outside holds."""
    if scenario.missing():
        pytest.skip(scenario.missing())
    result = runner.run(scenario)
    assert not result.trouble, result.trouble
    assert result.on_gpu_bytes >= 12 * MIB  # the least are a data loader's batches
    assert result.is_met(), f"{result.share:.1%} came back, due are {scenario.share:.0%}: {result.told}"
    assert result.gpu_left_bytes < MIB or scenario.share < 1.0
    assert scenario.holder in result.told


def test_the_allocators_cache_goes(gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """Blocks of odd sizes that were freed in the scope leave no cache: NVML's figure is where it was."""
    run_ok(gpu_kernel, "%gpumem free")
    reserved, used = gpu_kernel.value("torch.cuda.memory_reserved()"), card.settle()
    run_ok(gpu_kernel, "%experiment start cache")
    run_ok(
        gpu_kernel,
        "for size in range(40, 400, 36):\n    block = torch.empty(size << 20, dtype=torch.uint8, device='cuda')",
    )
    cached = gpu_kernel.value("torch.cuda.memory_reserved()") - reserved
    run_ok(gpu_kernel, "%experiment end")
    assert cached >= 512 * MIB
    assert gpu_kernel.value("torch.cuda.memory_reserved()") - reserved <= cached // 100
    assert card.settle() - used <= ROUNDING
    figure(f"{format_bytes(cached)} were cached, {format_bytes(max(card.used_bytes - used, 0))} are left on the device")


def test_the_workspaces_of_cublas_go(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """A matrix product makes cuBLAS keep a workspace in the allocator; the end of the scope gives it back."""
    run_ok(gpu_kernel, "%gpumem free")
    live = allocated(gpu_kernel)
    run_ok(gpu_kernel, "%experiment start cublas")
    run_ok(gpu_kernel, "a = torch.ones(4096, 4096, device='cuda')\nb = a @ a\ntorch.cuda.synchronize()")
    workspace = allocated(gpu_kernel) - live - 2 * 64 * MIB
    run_ok(gpu_kernel, "%experiment end")
    assert workspace > 0
    assert allocated(gpu_kernel) == live
    figure(f"the workspace was {format_bytes(workspace)}")


def test_pinned_memory_goes(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """Pinned host memory that the scope has used is unpinned: torch's cache for it is emptied too."""
    if not gpu_kernel.value("hasattr(torch._C, '_host_emptyCache') and hasattr(torch.cuda, 'host_memory_stats')"):
        pytest.skip("this torch can neither empty nor count its cache of pinned memory")
    run_ok(gpu_kernel, "%gpumem free")
    before = gpu_kernel.value(_PINNED)
    run_ok(gpu_kernel, "%experiment start pinned")
    run_ok(
        gpu_kernel,
        "batches = [torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]\n"
        "copies = [batch.cuda(non_blocking=True) for batch in batches]\ntorch.cuda.synchronize()",
    )
    pinned = gpu_kernel.value(_PINNED) - before
    run_ok(gpu_kernel, "%experiment end")
    left = gpu_kernel.value(_PINNED) - before
    assert pinned >= 128 * MIB
    assert left <= pinned // 100
    figure(f"{format_bytes(pinned)} were pinned, {format_bytes(max(left, 0))} are left")


def test_a_real_oom_in_a_scope_goes(kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """An OOM in a training step of a scope: model, gradients, graph and the optimizer's state are back at its end."""
    ready(kernel)
    run_ok(
        kernel,
        "def train(gib):\n"
        "    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, device='cuda') for _ in range(4)])\n"
        "    optimizer = torch.optim.Adam(model.parameters())\n"
        "    losses = []\n"
        "    for step in range(3):\n"
        "        batch = torch.rand(1024, 4096, device='cuda')\n"
        "        losses.append(model(batch).square().mean())\n"
        "        losses[-1].backward(retain_graph=True)\n"
        "        optimizer.step()\n"
        "    return torch.empty(gib, 1 << 30, dtype=torch.uint8, device='cuda')",
    )
    run_ok(kernel, "%gpumem free")
    live, used = allocated(kernel), card.settle()
    run_ok(kernel, "%experiment start oom\nkept = torch.ones(16 << 20, device='cuda')")
    reply = kernel.run("train(4096)")
    assert reply.error == "OutOfMemoryError"
    text = recovery(reply)
    assert size_after("asked for", text) == 4 * TIB
    assert allocated(kernel) - live == 64 * MIB
    while kernel.run("", silent=True).status == "aborted":
        continue
    run_ok(kernel, "%experiment end")
    assert allocated(kernel) == live
    assert card.settle() - used <= ROUNDING
    figure(text.splitlines()[0])
