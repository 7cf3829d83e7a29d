"""One card and two: each figure is that card's, wherever it is shown, and a card that is not used gets no context."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import run_ok
from tests.kernel import Kernel

pytestmark = pytest.mark.simulated

SETUP = """
import os, time, pynvml, torch
import ipygpumem
from ipygpumem.notebook.notebook import current_notebook
pynvml.nvmlInit()
visible = [int(word) for word in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
cards = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in visible]
def used(index):
    return pynvml.nvmlDeviceGetMemoryInfo(cards[index]).used
def with_context():
    processes = map(pynvml.nvmlDeviceGetComputeRunningProcesses, cards)
    return [index for index, found in enumerate(processes) if os.getpid() in {item.pid for item in found}]
kept = {}
"""
CASES = {
    "one card": ("0", {0: 64}),
    "the second of two": ("0,1", {1: 96}),
    "two cards": ("0,1", {0: 64, 1: 96}),
    "two cards, the second first": ("1,0", {0: 64, 1: 96}),
}
"""CUDA_VISIBLE_DEVICES, and how many MiB a cell keeps on which of torch's devices; its peak is three times that."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[int, int]]:
    return CASES[request.param]


def test_each_cards_figures_are_its_own(
    case: tuple[str, dict[int, int]], machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Line, history, pictures, exports and recorder have each card's figures; no other gets a context."""
    visible, kept = case
    machine(cards=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with Kernel() as kernel:
        run_ok(kernel, "%load_ext ipygpumem")
        run_ok(kernel, SETUP)
        _line(kernel, kept)
        _history(kernel, kept)
        _exports(kernel, kept, tmp_path)
        _pictures(kernel, kept)
        assert kernel.value("with_context()") == list(kept)
        _record_until_killed(kernel, kept, tmp_path)
    _postmortem(kept)


def _line(kernel: Kernel, kept: dict[int, int]) -> None:
    """The line after the cell, and its record: to the byte, and the device's use by NVML."""
    parts = [
        f"kept[{index}] = torch.empty({size} << 20, dtype=torch.uint8, device='cuda:{index}')\n"
        f"torch.empty({2 * size} << 20, dtype=torch.uint8, device='cuda:{index}')\nNone"
        for index, size in kept.items()
    ]
    (line,) = run_ok(kernel, "\n".join(parts)).reports("cell")
    usages = kernel.value("{usage.device: usage.to_dict() for usage in ipygpumem.last().usages}")
    for index, size in kept.items():
        usage = usages[f"cuda:{index}"]
        assert (usage["after_bytes"], usage["peak_bytes"]) == (size * MIB, 3 * size * MIB)
        assert usage["used_bytes"] == kernel.value(f"used({index})")
        assert f"cuda:{index} +{size} MiB, peak +{3 * size} MiB" in line
    assert re.findall(r"cuda:\d", line) == [f"cuda:{index}" for index in kept]


def _history(kernel: Kernel, kept: dict[int, int]) -> None:
    (history,) = run_ok(kernel, "%gpumem history").reports("history")
    for index in (0, 1):
        assert (f"cuda:{index}" in history) == (index in kept)
        assert index not in kept or f"+{kept[index]} MiB" in history


def _exports(kernel: Kernel, kept: dict[int, int], folder: Path) -> None:
    """Each format has the same figures of the same devices."""
    for suffix in ("json", "csv"):
        run_ok(kernel, f"%gpumem export {folder}/session.{suffix} --force")
    cells = json.loads((folder / "session.json").read_text())["cells"]
    rows = list(csv.DictReader((folder / "session.csv").open()))
    for index, size in kept.items():
        device, peak = f"cuda:{index}", 3 * size * MIB
        exported = [usage for cell in cells for usage in cell["usages"] if usage["device"] == device]
        assert max(usage["peak_bytes"] for usage in exported) == peak
        assert max(int(row["peak_bytes"]) for row in rows if row["device"] == device) == peak


def _pictures(kernel: Kernel, kept: dict[int, int]) -> None:
    """The words that each picture carries name the device, with its figure."""
    (devices,) = run_ok(kernel, "%gpumem plot devices").reports("plot")
    for index, size in kept.items():
        assert f"cuda:{index}" in devices
        assert f"tensors: other {size} MiB" in devices
        (words,) = run_ok(kernel, f"%gpumem plot session --device cuda:{index}").reports("plot")
        assert f"cuda:{index}" in words
        assert format_bytes(3 * size * MIB) in words


def _record_until_killed(kernel: Kernel, kept: dict[int, int], folder: Path) -> None:
    """Kill the kernel in a cell, as soon as its recording has a sample of it."""
    run_ok(kernel, "%gpumem record on")
    process = kernel.value("os.getpid()")
    kernel._client.execute("'the last'\nwhile True: time.sleep(0.05)")
    deadline = time.monotonic() + 60
    while not _samples(folder):
        assert time.monotonic() < deadline, "no sample was recorded"
        time.sleep(0.05)
    os.kill(process, 9)
    for index, size in kept.items():
        assert _samples(folder)[0]["memory"][f"cuda:{index}"] == size * MIB


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return what the recording has of the cell that never ends."""
    lines = [line for path in folder.glob("ipython/**/*.jsonl") for line in path.read_text().splitlines() if line]
    entries = [json.loads(line) for line in lines]
    (number, *_) = [entry["cell"] for entry in entries if "the last" in entry.get("source", "")] or [None]
    return [entry for entry in entries if entry["kind"] == "tick" and entry["cell"] == number]


def _postmortem(kept: dict[int, int]) -> None:
    """The next kernel tells what each card held in the cell that was killed."""
    following = Kernel()
    try:
        run_ok(following, "%load_ext ipygpumem")
        (told,) = run_ok(following, "%gpumem postmortem").reports("postmortem")
        for index, size in kept.items():
            (row,) = [line.split() for line in told.splitlines() if line.strip().startswith(f"cuda:{index} ")]
            assert f"{size} MiB" in " ".join(row)
    finally:
        following.close()
