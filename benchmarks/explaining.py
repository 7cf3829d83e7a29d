"""Measures the seconds that it takes to list a million tensors, and to explain leaks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from statistics import median
from typing import NamedTuple

from benchmarks.kernel import Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section
from benchmarks.tools import OURS

_TARGET_SECONDS = 2.0
_LEAKS_TARGET_SECONDS = 3.0
_CONTAINERS = 1_000_000

_SCRIPT = """
import json, sys, time, torch, ipygpumem
tensors = [torch.zeros(4) for _ in range({count})]
seconds, kept = [], []
for _ in range(2):
    started, cpu_started = time.perf_counter(), time.process_time()
    kept.append(ipygpumem.tensors())
    seconds += [time.perf_counter() - started, time.process_time() - cpu_started]
sys.stdout.write(json.dumps([*seconds, len(kept[0].tensors)]))
"""

_METHOD = """\
A new process makes {count:,} tensors of 16 bytes in one list and takes an inventory of them (`ipygpumem.tensors()`),
of which nothing is looked at, and another one while it has the first; median of {repeats} processes (least to most).
`%gpumem leaks` is timed as a cell, in a kernel with {containers:,} lists, after an experiment that left 20 tensors in
a dict, and a loss in a list."""  # noqa: E501

_LEAK = """%%experiment leaky
cache["run"] = [torch.ones(1 << 20) for _ in range(20)]
hidden = torch.ones(1 << 20, requires_grad=True).exp()
losses.append(hidden.square().sum())"""


def run(*, quick: bool) -> Section:
    """Return the seconds that an inventory of many small tensors takes, and those of
    ``%gpumem leaks``.
    """
    count, repeats = (100_000, 1) if quick else (1_000_000, 3)
    if util.find_spec("torch") is None:
        rows = [
            Row("inventory", "", "needs torch", NOT_INSTALLED, "", None),
            Row("`%gpumem leaks`", "", "needs torch", NOT_INSTALLED, "", None),
        ]
    else:
        inventories = [_inventory_seconds(count) for _ in range(repeats)]
        wall = [seconds.wall for seconds in inventories]
        cpu = [seconds.cpu for seconds in inventories]
        second_wall = [seconds.second_wall for seconds in inventories]
        rows = [
            _row(f"inventory of {count:,} tensors", _TARGET_SECONDS, wall),
            _row("its CPU time", _TARGET_SECONDS, cpu),
            _row("another one, the first is kept", _TARGET_SECONDS, second_wall),
            _row("`%gpumem leaks`", _LEAKS_TARGET_SECONDS, _leaks_seconds(repeats)),
        ]
    method = _METHOD.format(count=count, repeats=repeats, containers=_CONTAINERS)
    return Section("Explaining", method, tuple(rows), control="")


def _row(figure: str, target: float, seconds: Sequence[float]) -> Row:
    ours = f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    met = median(seconds) < target
    return Row(figure, f"under {target:.0f} s", ours, "has none", "", met=met)


def _leaks_seconds(repeats: int) -> list[float]:
    """Return the seconds of ``%gpumem leaks`` beside many lists, after an experiment that leaks."""
    with Kernel() as kernel:
        kernel.run(
            f"import torch; heap = [[] for _ in range({_CONTAINERS})]; cache = {{}}; losses = []"
        )
        kernel.run(OURS.on)
        kernel.run(_LEAK)
        runs = [kernel.run("%gpumem leaks") for _ in range(repeats)]
    for cell in runs:
        assert 'cache["run"]' in cell.text
        assert "its autograd graph" in cell.text
    return [cell.seconds for cell in runs]


class _InventorySeconds(NamedTuple):
    """The seconds of an inventory, and of a second one while the first is kept."""

    wall: float
    cpu: float
    second_wall: float
    second_cpu: float


def _inventory_seconds(count: int) -> _InventorySeconds:
    """Take two inventories of ``count`` tensors in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(count=count)],
        capture_output=True,
        text=True,
        check=True,
    )
    *seconds, listed = json.loads(done.stdout)
    assert listed >= count
    return _InventorySeconds(*seconds)
