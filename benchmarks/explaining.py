"""What it costs to explain where memory went, each time in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from statistics import median

from benchmarks.report import NOT_INSTALLED, Row, Section

_TARGET_SECONDS = 2.0

_SCRIPT = """
import json, sys, time, torch, ipygpumem
tensors = [torch.zeros(4) for _ in range({count})]
started = time.perf_counter()
found = ipygpumem.tensors()
sys.stdout.write(json.dumps([time.perf_counter() - started, len(found.tensors)]))
"""

_METHOD = """\
A new process makes {count:,} tensors of 16 bytes in one list and takes an inventory of them (`ipygpumem.tensors()`),
names and records included; median of {repeats} processes (least to most)."""


def run(*, quick: bool) -> Section:
    """Return the seconds that an inventory of very many small tensors takes."""
    count, repeats = (100_000, 1) if quick else (1_000_000, 5)
    figure = f"inventory of {count:,} tensors"
    target = f"under {_TARGET_SECONDS:.0f} s"
    if util.find_spec("torch") is None:
        rows: tuple[Row, ...] = (Row(figure, target, "needs torch", NOT_INSTALLED, "", None),)
        return Section("Explaining", _METHOD.format(count=count, repeats=repeats), rows, control="")
    times = [_take(count) for _ in range(repeats)]
    ours = f"{median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
    rows = (Row(figure, target, ours, "has none", "", met=median(times) < _TARGET_SECONDS),)
    return Section("Explaining", _METHOD.format(count=count, repeats=repeats), rows, control="")


def _take(count: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(count=count)], capture_output=True, text=True, check=True
    )
    seconds, found = json.loads(done.stdout)
    assert found >= count
    return float(seconds)
