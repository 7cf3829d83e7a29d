"""One card and two: each figure is that card's, wherever it is shown, and a card that is not used
gets no context.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB
from tests.steps import run_quietly

pytestmark = pytest.mark.simulated

SETUP = """
import os, pynvml, torch, ipygpumem
pynvml.nvmlInit()
visible = [int(word) for word in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
cards = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in visible]
def used(index):
    return pynvml.nvmlDeviceGetMemoryInfo(cards[index]).used
def with_context():
    processes = map(pynvml.nvmlDeviceGetComputeRunningProcesses, cards)
    return [index for index, found in enumerate(processes) if os.getpid() in {item.pid for item in found}]
kept = {}
"""  # noqa: E501
CASES = {
    "one card": ("0", {0: 64}),
    "the second of two": ("0,1", {1: 96}),
    "two cards": ("0,1", {0: 64, 1: 96}),
    "two cards, the second first": ("1,0", {0: 64, 1: 96}),
}
"""CUDA_VISIBLE_DEVICES, and how many MiB a cell keeps on which of torch's devices; its peak is
three times that.
"""


@pytest.mark.parametrize(("visible", "kept"), CASES.values(), ids=CASES)
def test_each_cards_figures_are_its_own(
    visible: str,
    kept: dict[int, int],
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Line and recorder have each card's figures, to the byte; no other card gets a context."""
    machine(cards=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with Kernel() as kernel:
        run_quietly(kernel, "%load_ext ipygpumem", SETUP, "%gpumem recorder on")
        _line(kernel, kept)
        recorded = _recorded(tmp_path)
        assert [recorded[f"cuda:{index}"] for index in kept] == [
            size * MIB for size in kept.values()
        ]
        assert kernel.value("with_context()") == list(kept)


def _line(kernel: Kernel, kept: dict[int, int]) -> None:
    """The line after the cell, and its record: to the byte, and the device's use by NVML."""
    parts = [
        f"kept[{index}] = torch.empty({size} << 20, dtype=torch.uint8, device='cuda:{index}')\n"
        f"torch.empty({2 * size} << 20, dtype=torch.uint8, device='cuda:{index}')\nNone"
        for index, size in kept.items()
    ]
    (line,) = run_quietly(kernel, "\n".join(parts)).reports("cell")
    usages = kernel.value("{usage.device: usage.to_dict() for usage in ipygpumem.last().usages}")
    for index, size in kept.items():
        usage = usages[f"cuda:{index}"]
        assert (usage["after_bytes"], usage["peak_bytes"]) == (size * MIB, 3 * size * MIB)
        assert usage["used_bytes"] == kernel.value(f"used({index})")
        assert f"cuda:{index} +{size} MiB, peak +{3 * size} MiB" in line
    assert re.findall(r"cuda:\d", line) == [f"cuda:{index}" for index in kept]


def _recorded(folder: Path) -> dict[str, int]:
    """Return the memory in the last entry of the flight recorder that has some."""
    lines = [
        line
        for path in folder.glob("ipython/**/*.jsonl")
        for line in path.read_text().splitlines()
        if line
    ]
    memory: dict[str, int] = [
        entry["memory"] for entry in map(json.loads, lines) if entry.get("memory")
    ][-1]
    return memory
