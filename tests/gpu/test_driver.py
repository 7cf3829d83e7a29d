"""Figures of the driver, and the card that they are of: CUDA_VISIBLE_DEVICES in every form, MIG,
processes that are hidden.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ipygpumem.units import GIB, MIB, parse_bytes
from tests.gpu.support import DEVICE, Card, other_process, ready, script, started_kernel
from tests.steps import run_quietly

READ_CARDS = """
import json, torch
from ipygpumem.probes.accelerators import CachingAllocatorProbe
from ipygpumem.probes.nvml import Nvml
probe = CachingAllocatorProbe("cuda", Nvml())
if torch.cuda.is_available():
    x = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
print(json.dumps([reading._asdict() for reading in probe.read(detail=True)]))
"""


def readings(visible: str) -> list[dict[str, Any]]:
    """Return the readings in a process that sees only ``visible`` and holds 512 MiB on its first
    device.
    """
    return script(
        READ_CARDS, env={"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    )


def _is_that_of(card: Card, visible: str) -> None:
    (reading,) = readings(visible)
    assert (reading["device"], reading["current_bytes"]) == (DEVICE, 512 * MIB)
    assert reading["total_bytes"] == card.memory.total
    # The process itself is over: what it used beyond the rest is its tensor and its context.
    assert 512 * MIB <= reading["used_bytes"] - card.settle() < 4 * GIB


def test_visible(card: Card) -> None:
    """With CUDA_VISIBLE_DEVICES as an index, a UUID or its beginning, the figures are that card's;
    empty: none.
    """
    for form in (str(card.index), card.uuid, card.uuid[:12]):
        _is_that_of(card, form)
    assert readings("") == []


SLICE = "MIG-50505050-5050-5050-5050-50505050000{}"


@pytest.mark.simulated
def test_a_slice_of_a_card(machine: Callable[..., None]) -> None:
    """A MIG slice that CUDA_VISIBLE_DEVICES names has its own total and use, not those of the card
    or its neighbour.
    """
    machine(gib=16, mig=1)
    with other_process(700, visible=SLICE.format(0)):
        (beside,) = readings(SLICE.format(1))
        (same,) = readings(SLICE.format(0))
    assert beside["total_bytes"] == same["total_bytes"] == 8 * GIB
    # The neighbour has its own context only; the process has 700 MiB and another context.
    assert 512 * MIB <= beside["used_bytes"] < 700 * MIB + GIB
    assert 700 * MIB <= same["used_bytes"] - beside["used_bytes"] < 2 * GIB


@pytest.mark.simulated
def test_a_slice_without_a_name(machine: Callable[..., None]) -> None:
    """If CUDA_VISIBLE_DEVICES does not name the MIG slice, no figure of the whole card is given for
    it.
    """
    machine(gib=16, mig=1)
    (reading,) = readings("0")
    assert "split by MIG" in reading["note"]
    assert reading["total_bytes"] == 8 * GIB
    assert reading["other_bytes"] is None


HOLD_MEMORY_IN_CHILD = """
import os, subprocess, sys
code = "import torch; x = torch.zeros(700 << 20, dtype=torch.uint8, device='cuda'); print('holding', flush=1); input()"
job = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert job.stdout.readline().strip() == "holding"
"""  # noqa: E501


@pytest.mark.simulated
@pytest.mark.parametrize("processes", ["listed", "hidden"])
def test_memory_of_a_child_process_on_a_card_is_listed(
    machine: Callable[..., None], processes: str
) -> None:
    """Beside a process that a cell has started stands what it has on each card, where the driver
    tells that.
    """
    machine(cards=2, **({} if processes == "listed" else {"processes": processes}))
    with started_kernel() as kernel:
        run_quietly(kernel, HOLD_MEMORY_IN_CHILD)
        pid = kernel.value("job.pid")
        for device in ("nvml:1", DEVICE[:-1] + "1"):  # the kernel uses no card yet; then it does
            (status,) = run_quietly(kernel, "%gpumem status").reports("status")
            (row,) = [
                line
                for line in status[status.index("child processes, by") :].splitlines()
                if f" {pid} " in line
            ]
            # Only a driver that lists processes can tell.
            if processes == "listed":
                size = re.search(rf"{device} ([\d.]+ [MG]iB)", row)
                assert size is not None, row
                assert 700 * MIB <= parse_bytes(size[1]) < 2 * GIB
            else:
                assert device not in row
            ready(kernel)
        run_quietly(kernel, "job.communicate('go')")
