"""Cost of loading a tool and of its first cell compared with IPython alone, each time in a new
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

from benchmarks.report import NOT_INSTALLED, Row, Section, lower
from benchmarks.tools import OURS, PEER, Tool, installed_tools

_TARGET_MS = 150.0
_HEAVY = ("torch", "matplotlib")

_SCRIPT = """
import json, sys, time
started = time.perf_counter()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("1+1")
ready = time.perf_counter()
{load}
shell.run_cell("x = 1")
loaded = time.perf_counter()
heavy = [name for name in {heavy!r} if name in sys.modules]
sys.stderr.write(json.dumps(dict(ipython=ready - started, tool=loaded - ready, heavy=heavy)))
"""

_METHOD = """\
A new process makes an IPython shell, runs one cell, then loads the tool and runs one more: ipygpumem imports most of
its modules as the first cell begins. Median of {repeats} processes (least to most), the tools alternating, files cached. The last column is IPython itself, up to that point."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the milliseconds that each tool takes to load, and which heavy modules it imports."""
    repeats = 3 if quick else 9
    answers: dict[str, list[dict[str, Any]]] = {tool.name: [] for tool in installed_tools()}
    for _ in range(1 + repeats):
        for tool in installed_tools():
            answers[tool.name].append(_load(tool))
    # the first may compile, and fills the file cache
    answers = {name: runs[1:] for name, runs in answers.items()}
    ours = answers[OURS.name]
    peer = answers.get(PEER.name)
    times = [run["tool"] for run in ours]
    rows = (
        Row(
            figure="time to load, with the first cell",
            target=f"under {_TARGET_MS:.0f} ms",
            ours=_spread(times),
            peer=_spread([run["tool"] for run in peer]) if peer else NOT_INSTALLED,
            control=_spread([run["ipython"] for run in ours]),
            met=median(times) * 1000 < _TARGET_MS,
            better=lower(median(times), median(run["tool"] for run in peer)) if peer else None,
        ),
        Row(
            figure=f"imports {' or '.join(_HEAVY)}",
            target="no",
            ours=_heavy(ours),
            peer=_heavy(peer) if peer else NOT_INSTALLED,
            control="",
            met=_heavy(ours) == "no",
        ),
    )
    return Section("Loading", _METHOD.format(repeats=repeats), rows, control="IPython itself")


def _load(tool: Tool) -> dict[str, Any]:
    script = _SCRIPT.format(load=tool.load_in_shell, heavy=_HEAVY)
    with tempfile.TemporaryDirectory(prefix="ipygpumem-bench-") as directory:
        # An installed package is compiled; where this is set, a checkout would be compiled in every
        # process.
        environment = {**os.environ, "IPYTHONDIR": directory, "PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    answer: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return answer


def _spread(seconds: list[float]) -> str:
    low, high = (f"{value * 1000:.0f}" for value in (min(seconds), max(seconds)))
    return f"{median(seconds) * 1000:.0f} ms ({low} to {high})"


def _heavy(runs: list[dict[str, Any]]) -> str:
    names = sorted({name for run in runs for name in run["heavy"]})
    return ", ".join(names) or "no"
