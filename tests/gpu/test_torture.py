"""The torture suite's scenarios with tensors on a GPU."""

from collections.abc import Iterator

import pytest

from benchmarks.harness.runner import SPAN, Runner
from benchmarks.harness.scenarios import SCENARIOS, Scenario
from ipygpumem.units import MIB


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner(SPAN, gpu=True)
    yield runner
    runner.close()


ON_DEVICE = [
    each for each in SCENARIOS if "torch" in each.needs or each.on_gpu or "error" in each.name
]
"""Scenarios that differ on a device: torch's own ways, and frames whose tensors must be freed at
once.
"""


@pytest.mark.parametrize("scenario", ON_DEVICE, ids=lambda scenario: scenario.name)
def test_a_row_of_leaks(scenario: Scenario, runner: Runner) -> None:
    """All GPU tensors of each row of docs/measured/leaks.md are freed, or exactly those that
    nothing outside holds.
    """
    if scenario.missing():
        pytest.skip(scenario.missing())
    result = runner.run(scenario)
    assert not result.trouble, result.trouble
    assert result.on_gpu_bytes >= 12 * MIB  # the least are a data loader's batches
    assert result.is_met(), (
        f"{result.share:.1%} came back, due are {scenario.share:.0%}: {result.told}"
    )
    assert result.gpu_left_bytes < MIB or scenario.share < 1.0
    assert scenario.holder in result.told
