"""What measuring costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from ipygpumem.measuring.meter import Meter
from ipygpumem.probes import Probe
from ipygpumem.probes.accelerators import CUDA, CachingAllocatorProbe
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.nvml import Nvml

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
    allocator = _microseconds([CachingAllocatorProbe(CUDA)])
    with_nvml = _microseconds([CachingAllocatorProbe(CUDA, Nvml())])
    everything = _microseconds([HostProbe(), CachingAllocatorProbe(CUDA, Nvml())])
    figure(
        f"{everything:.0f} µs per cell in all; alone: host {host:.0f} µs, allocator with mem_get_info "
        f"{allocator:.0f} µs, allocator with NVML {with_nvml:.0f} µs"
    )
