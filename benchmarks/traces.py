"""Measures the microseconds of CPU that a trace in a script takes, without a display."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median

from benchmarks.report import Row, Section

_TARGET_US = 50.0
_SCRIPT = """
import json, time
{first}
import ipygpumem

def microseconds(count):
    started = time.process_time()
    for _ in range(count):
        with ipygpumem.trace("step", silent=True):
            pass
    return (time.process_time() - started) / count * 1e6

microseconds(200)
print(json.dumps([microseconds({count}) for _ in range({repeats})]))
"""

_METHOD = """\
CPU time of an empty `with ipygpumem.trace("step", silent=True):`, entering and leaving together; median of {repeats}
runs of {count} (least to most), each row in a process of its own."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the microseconds that a trace takes, without torch and with it."""
    repeats, count = (3, 500) if quick else (21, 2000)
    rows = (
        _row("without torch", "", repeats=repeats, count=count),
        _row("torch is loaded", "import torch", repeats=repeats, count=count),
    )
    return Section("Traces", _METHOD.format(repeats=repeats, count=count), rows, control="")


def _row(figure: str, first: str, *, repeats: int, count: int) -> Row:
    """Measure in a new process whose first line is ``first``."""
    script = _SCRIPT.format(first=first, repeats=repeats, count=count)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    times: list[float] = json.loads(done.stdout)
    return Row(
        figure=figure,
        target=f"under {_TARGET_US:.0f} us",
        ours=f"{median(times):.1f} us ({min(times):.1f} to {max(times):.1f})",
        peer="",
        control="",
        met=median(times) < _TARGET_US,
    )
