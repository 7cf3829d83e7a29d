"""Measuring and listing by hand: lines, statements, trackers, inventories, and recorded
allocations.
"""

import re
from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB, parse_bytes
from tests.gpu.support import DEVICE, allocated, ready
from tests.steps import run_quietly

_SETUP = """
import gc, ipygpumem, torch
def mib(n, dtype=torch.uint8): return torch.empty((n << 20) // dtype.itemsize, dtype=dtype, device="cuda")
def usage(usages): return next(u for u in usages if u.device == "cuda:0")
def figures(usages): return usage(usages).delta_bytes >> 20, usage(usages).peak_delta_bytes >> 20
"""  # noqa: E501


_LINES = """
import torch.nn.functional as F
x = torch.randn(10000, 10000, device="cuda")
def step(x):
    first = x * 2
    second = first.relu()
    del first
    return second.sum()
"""
SIZE, UNSPLIT = 10**8 * 4 / MIB, 382
"""MiB of the tensor, and of the block that the allocator may leave whole for it."""


def changes(line: str) -> list[float]:
    """Return the last two changes of a report's line, what was kept and the peak, in MiB."""
    signed_sizes = re.findall(r"([+-])([\d.]+(?: (?:[KMG]i)?B)?)", line)
    return [float(f"{sign}{parse_bytes(size) / MIB}") for sign, size in signed_sizes[-2:]]


def test_lines_and_statements(kernel: Kernel) -> None:
    """%%gpumemit: F.relu(x) costs the 381.5 MiB of its result, and F.relu_(x) nothing. %%memlines:
    each line has what it kept and its peak, to the allocator's rounding. The user's
    max_memory_allocated is the whole peak over them.
    """
    ready(kernel)
    (report,) = run_quietly(
        kernel,
        _LINES,
        """
        %%gpumemit -r 3
        F.relu(x)
        F.relu_(x)
        """,
    ).reports("gpumemit")
    copy, in_place = [
        changes(line) for line in report.splitlines() if line.split()[:1] == ["cuda:0"]
    ]
    assert copy[0] == 0
    assert SIZE - 0.1 <= copy[1] <= UNSPLIT
    assert in_place == [0, 0]

    # The lines of a function.
    run_quietly(
        kernel, "torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()"
    )
    (report,) = run_quietly(kernel, "%%memlines -f step\nout = step(x)").reports("memlines")

    def of(source: str) -> list[float]:
        return changes(
            next(line for line in report.splitlines() if line.endswith(source)).removesuffix(source)
        )

    for source in ("first = x * 2", "second = first.relu()"):
        assert all(SIZE - 0.1 <= size <= UNSPLIT for size in of(source))
    assert -UNSPLIT <= of("del first")[0] <= -SIZE + 0.1
    assert 2 * SIZE - 0.1 <= of("out = step(x)")[1] <= 2 * UNSPLIT
    assert kernel.value("torch.cuda.max_memory_allocated() - before") >= 2 * 4 * 10**8


def test_a_tracker_counts_as_the_allocator_does(gpu_kernel: Kernel) -> None:
    """The changes of a tracker and of two inventories are exactly those of torch's allocator: with
    views, every dtype, and a tensor replaced by another of its shape; memory that only a graph
    keeps is in no tensor.
    """

    # Two ways to list tensors: a tracker, and inventories.
    run_quietly(gpu_kernel, _SETUP + "gc.collect(); t = ipygpumem.tracker(); first = t.track()")
    run_quietly(
        gpu_kernel,
        "def rows(all): return sorted((r.name, r.size_bytes >> 20) for r in all if r.device != "
        "'cpu')",
    )
    run_quietly(gpu_kernel, "listed = ipygpumem.tensors(device='cuda')")
    live = allocated(gpu_kernel)

    # New tensors.
    run_quietly(
        gpu_kernel,
        "x = mib(64); view = x[5:]; short = mib(8, torch.int16); wide = mib(16, torch.complex64)",
    )
    run_quietly(gpu_kernel, "second = t.track(); rose = torch.cuda.memory_allocated()")
    expected = [("short", 8), ("wide", 16), ("x", 64)]
    assert gpu_kernel.value("rows(second.added)") == expected
    assert gpu_kernel.value("second.changed_bytes['cuda:0'], usage(second.usages).delta_bytes") == (
        88 * MIB,
        88 * MIB,
    )
    assert gpu_kernel.value("usage(second.usages).after_bytes == rose") is True
    run_quietly(gpu_kernel, "diff = ipygpumem.diff(listed, ipygpumem.tensors(device='cuda'))")
    assert gpu_kernel.value("rows(diff.added), sum(r.aliases for r in diff.added)") == (expected, 1)
    assert gpu_kernel.value("diff.changed_bytes") == {DEVICE: allocated(gpu_kernel) - live}

    # A tensor replaced by another of its shape.
    run_quietly(gpu_kernel, "old, x, view = x, mib(64), None\ndel old; third = t.track()")
    assert gpu_kernel.value("[rows(third.added), rows(third.removed)]") == [[("x", 64)]] * 2
    assert gpu_kernel.value("figures(third.usages)") == (0, 64)

    # Memory that only a graph keeps.
    run_quietly(
        gpu_kernel,
        "leaf = torch.ones(8 << 18, device='cuda', requires_grad=True)\nout = (leaf.exp() * "
        "2).sum()",
    )
    reply = run_quietly(gpu_kernel, "fourth = t.track()")
    gap = "(usage({0}.usages).after_bytes - {0}.tensor_bytes.get('cuda:0', 0))"
    grown = gpu_kernel.value(f"{gap.format('fourth')} - {gap.format('third')}")
    assert grown == 8 * MIB + 508, "what exp() saved, and the rounding of a sum of 4 bytes to 512"
    assert "of it in no Python tensor, or rounding)" in reply.reports("tracker")[0]
    run_quietly(gpu_kernel, "del x, short, wide, leaf, out")


@pytest.mark.hardware("time")
def test_a_glance_does_not_wait_for_queued_kernels(
    gpu_kernel: Kernel, figure: Callable[[str], None]
) -> None:
    """A look at the device from another thread is back long before the kernels that are queued have
    run.
    """
    run_quietly(
        gpu_kernel,
        """
        import time
        from ipygpumem.shell.app import current_app
        square = torch.rand(8192, 8192, device='cuda')
        meter = current_app().context.meter
        meter.glance()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(100):
            product = square @ square
        before = time.perf_counter()
        meter.glance()
        glance = time.perf_counter() - before
        torch.cuda.synchronize()
        rest = time.perf_counter() - before
        """,
    )
    glance, rest = gpu_kernel.value("glance"), gpu_kernel.value("rest")
    figure(
        f"a glance took {1000 * glance:.2f} ms while {1000 * rest:.0f} ms of kernels were queued"
    )
    # It does not wait until the kernels have run.
    assert glance < rest / 4
