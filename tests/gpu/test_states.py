"""The parts of a device's memory in 200 random states, against NVML and torch's own counters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.support import other_process, ready, run_ok
from tests.kernel import Kernel

STATES = {"": 100, "expandable_segments:True": 50, "backend:cudaMallocAsync": 50}
"""How many for each way in which torch's allocator can be set up."""
BLOCKS = {
    "tensors:",
    "held",
    "rounding",
    "waiting",
    "allocator",
    "fragmentation",
    "pools'",
    "context",
    "process",
    "free",
}
MANAGED = {"tensors:", "held", "allocator", "context", "process", "free"}
"""Words with which the parts begin that are not empty in all states: the allocator's blocks tell more."""


@pytest.mark.parametrize("allocator", STATES)
def test_the_parts_add_up_in_every_state(
    allocator: str, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    """In 200 random states (gaps, streams, graphs, pinned, other processes) the parts add up to NVML's figure."""
    machine(gib=8)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    with Kernel() as kernel:
        run_ok(kernel, "%load_ext ipygpumem")
        ready(kernel)
        run_ok(kernel, "from tests.gpu.states import States\nstates = States(seed=15)")
        half = STATES[allocator] // 2
        wrong = kernel.value(f"states.run({half})")
        with other_process(700):
            wrong += kernel.value(f"states.run({half})")
        assert wrong == []
        assert kernel.value("states.seen") >= (MANAGED if "Async" in allocator else BLOCKS)
    figure(f"{2 * half} states with the allocator {allocator or 'as it is'}: no byte off")
