"""Measures the milliseconds that it takes to load a tool and to run the first cell with it.

Next to the time that IPython itself takes, each time in a new process.
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
    runs_by_tool: dict[str, list[dict[str, Any]]] = {tool.name: [] for tool in installed_tools()}
    for number in range(1 + repeats):
        for tool in installed_tools():
            answer = _load(tool)
            if number > 0:  # the first may compile, and fills the file cache
                runs_by_tool[tool.name].append(answer)
    ours = runs_by_tool[OURS.name]
    theirs = runs_by_tool.get(PEER.name, [])
    rows = (_time_row(ours, theirs), _imports_row(ours, theirs))
    return Section("Loading", _METHOD.format(repeats=repeats), rows, control="IPython itself")


def _time_row(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Row:
    """Return the row of the loading times; the peer has no runs if it is not installed."""
    our_seconds = [answer["tool"] for answer in ours]
    peer = NOT_INSTALLED
    better = None
    if theirs:
        their_seconds = [answer["tool"] for answer in theirs]
        peer = _spread(their_seconds)
        better = lower(median(our_seconds), median(their_seconds))
    return Row(
        figure="time to load, with the first cell",
        target=f"under {_TARGET_MS:.0f} ms",
        ours=_spread(our_seconds),
        peer=peer,
        control=_spread([answer["ipython"] for answer in ours]),
        met=median(our_seconds) * 1000 < _TARGET_MS,
        better=better,
    )


def _imports_row(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Row:
    """Return the row of the heavy modules that are imported."""
    our_imports = _heavy(ours)
    return Row(
        figure=f"imports {' or '.join(_HEAVY)}",
        target="no",
        ours=our_imports,
        peer=_heavy(theirs) if theirs else NOT_INSTALLED,
        control="",
        met=our_imports == "no",
    )


def _load(tool: Tool) -> dict[str, Any]:
    """Load a tool in a new process; return the seconds of IPython (``ipython``) and of the tool
    (``tool``), and the heavy modules that it imports (``heavy``).
    """
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
    """Return the median of times, and the least and the most, in milliseconds."""
    times = [value * 1000 for value in seconds]
    return f"{median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})"


def _heavy(runs: list[dict[str, Any]]) -> str:
    """Return the heavy modules that any of the runs imported, or ``no``."""
    names: set[str] = set()
    for answer in runs:
        names.update(answer["heavy"])
    return ", ".join(sorted(names)) or "no"
