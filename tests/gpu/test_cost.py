"""What measuring costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from ipygpumem.measuring.meter import Meter
from ipygpumem.probes import Probe
from ipygpumem.probes.accelerators import CachingAllocatorProbe
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.nvml import Nvml
from tests.gpu.support import run_ok
from tests.kernel import Kernel

ROUNDS = 300


def _microseconds(probes: list[Probe]) -> float:
    """Return the median time of a start and a stop, which is what one cell pays."""
    meter = Meter(probes)
    try:
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            meter.stop(meter.start())
            times.append(time.perf_counter() - started)
    finally:
        meter.close()
    return statistics.median(times) * 1e6


@pytest.mark.hardware("time")
def test_cost_per_cell(torch: Any, figure: Callable[[str], None]) -> None:
    """The time that measuring takes per cell, with CUDA initialised, is printed: the median of 300."""
    torch.ones(1, device="cuda")
    host = _microseconds([HostProbe()])
    allocator = _microseconds([CachingAllocatorProbe("cuda")])
    with_nvml = _microseconds([CachingAllocatorProbe("cuda", Nvml())])
    everything = _microseconds([HostProbe(), CachingAllocatorProbe("cuda", Nvml())])
    figure(
        f"{everything:.0f} µs per cell in all; alone: host {host:.0f} µs, allocator with mem_get_info "
        f"{allocator:.0f} µs, allocator with NVML {with_nvml:.0f} µs"
    )


@pytest.mark.hardware("time")
def test_a_glance_does_not_wait_for_queued_kernels(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """A look at the device from another thread is back long before the kernels that are queued have run."""
    run_ok(
        gpu_kernel,
        "import time\nfrom ipygpumem.notebook.notebook import current_notebook\n"
        "square = torch.rand(8192, 8192, device='cuda')\nmeter = current_notebook().context.meter\nmeter.glance()\n"
        "torch.cuda.synchronize()\nstarted = time.perf_counter()\n"
        "for _ in range(100):\n    product = square @ square\n"
        "before = time.perf_counter()\nmeter.glance()\nglance = time.perf_counter() - before\n"
        "torch.cuda.synchronize()\nrest = time.perf_counter() - before",
    )
    glance, rest = gpu_kernel.value("glance"), gpu_kernel.value("rest")
    figure(f"a glance took {1000 * glance:.2f} ms while {1000 * rest:.0f} ms of kernels were queued")
    assert glance < rest / 4
