"""Autofit, with out-of-memory errors of a real device."""

from __future__ import annotations

from collections.abc import Callable

from ipygpumem.units import GIB, MIB, format_bytes
from tests.gpu.support import Card, allocated, run_ok
from tests.kernel import Kernel

SETUP = """
import ipygpumem
def step(batch_size):
    model = torch.nn.Linear(1024, 1024, device="cuda")
    rows = torch.empty(batch_size, 64 << 20, dtype=torch.uint8, device="cuda")
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
    return rows.numel()
"""


def test_a_cell_is_halved_until_it_fits(gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """%%autofit halves a batch that does not fit on the device until it does, and shows no traceback."""
    run_ok(gpu_kernel, SETUP)
    run_ok(gpu_kernel, "%gpumem free")
    live = allocated(gpu_kernel)
    start = 4 * card.total_bytes // (64 * MIB)
    reply = run_ok(gpu_kernel, f"%%autofit batch_size={start}\nsize = step(batch_size)")
    found, size = gpu_kernel.value("batch_size, size")
    assert size == found * 64 * MIB
    assert size < card.total_bytes < 4 * size
    run_ok(gpu_kernel, "torch._C._cuda_clearCublasWorkspaces()")  # one for each thread that multiplied
    assert allocated(gpu_kernel) - live < MIB
    assert reply.traceback == ""
    (report,) = reply.reports("autofit")
    assert "out of memory, asked for" in report
    figure(f"{report.splitlines()[0]}; the device has {format_bytes(card.total_bytes)}")


def test_each_try_finds_the_memory_that_the_first_found(gpu_kernel: Kernel) -> None:
    """What a failed try held on the device is back before the next one, model, graph and cache included."""
    run_ok(gpu_kernel, SETUP)
    run_ok(gpu_kernel, "%gpumem free")
    run_ok(gpu_kernel, "seen = []")
    start = 8 * gpu_kernel.value("torch.cuda.get_device_properties(0).total_memory") // (64 * MIB)
    run_ok(
        gpu_kernel,
        f"%%autofit batch_size={start}\n"
        "seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))\nsize = step(batch_size)",
    )
    seen = gpu_kernel.value("seen")
    assert len(seen) >= 3
    assert {live for live, _ in seen} == {seen[0][0]}
    assert max(reserved for _, reserved in seen) - seen[0][1] <= 32 * MIB


def test_a_search_finds_the_largest_that_fits(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """A search under a budget of 4 GiB finds the largest batch to within one row of 64 MiB."""
    run_ok(gpu_kernel, SETUP)
    run_ok(gpu_kernel, "%gpumem free")
    run_ok(
        gpu_kernel,
        "with ipygpumem.budget(gpu='4GiB'):\n"
        "    found = ipygpumem.autofit(step, batch_size=1024, step='search', headroom=0)",
    )
    value = gpu_kernel.value("found.value")
    assert 4 * GIB - 512 * MIB <= value * 64 * MIB <= 4 * GIB
    figure(f"{value} rows of 64 MiB under 4 GiB, {gpu_kernel.value('len(found.tries)')} tries")


def test_nothing_fits_says_what_would_be_needed(gpu_kernel: Kernel) -> None:
    """If even the minimum does not fit, the error says how much the device would need."""
    run_ok(gpu_kernel, SETUP)
    reply = gpu_kernel.run("%%autofit n=2\nstep(n << 24)")
    assert reply.status == "error"
    assert "even n=1 does not fit (out of memory): it needs at least" in reply.stderr
    assert "of cuda:0, which has" in reply.stderr
    reply = gpu_kernel.run("%%experiment small --budget gpu=1GiB\n%%autofit n=2\nstep(n << 5)")
    assert "even n=1 does not fit (over the budget): it needs at least 2." in reply.stderr
    assert "of cuda:0, of which 1.00 GiB are allowed" in reply.stderr
    run_ok(gpu_kernel, "torch.ones(1, device='cuda')")
