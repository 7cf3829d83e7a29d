"""Measures how cost grows with the number of cells, names, tensors, devices and engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, Section

_ROOT = Path(__file__).parent.parent
_SIMULATED = _ROOT / "build" / "simgpu" / "python"
_PICTURE = _ROOT / "docs" / "img" / "scale.png"

_SESSION = """
import json, sys, time
from types import SimpleNamespace
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.run_line_magic("load_ext", "ipygpumem")
shell.run_line_magic("config", "IPyGpuMem.report = False")
import ipygpumem
from ipygpumem.shell.app import app_of
app = app_of(shell)
def cell(number):
    info = SimpleNamespace(raw_cell=f"x = {{number}}", cell_id=None)
    app.session.cell_begins(info)
    app.session.cell_ends(SimpleNamespace(
        info=info, execution_count=number, error_before_exec=None, error_in_exec=None, result=None))
def cpu(work, times):
    seconds = []
    for _ in range(times):  # without a collection before each: a user's own makes an experiment look at everything
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds) * 1000
"""  # noqa: E501
_OF_CELL = """
def fifty():
    for number in range(50):
        cell(number)
print(json.dumps(cpu(fifty, 5) / 50))
"""
_CELLS = "for number in range({x}):\n    cell(number)\n" + _OF_CELL
_NAMES = (
    "shell.user_ns.update((f'name_{{n}}', [n]) for n in range({x}))\nfor number in range(50):\n    "
    "cell(number)\n"
)
_EXPERIMENT = """
def empty():
    shell.run_cell("%%experiment s --report none\\npass")
empty()
print(json.dumps(cpu(empty, 5)))
"""
_TENSORS = """
import torch
shell.user_ns["held"] = [torch.zeros(4) for _ in range({x})]
ipygpumem.tensors()
print(json.dumps(cpu(ipygpumem.tensors, 3)))
"""
_DEVICES = """
import torch
for device in range({x}):
    shell.user_ns[f"on_{{device}}"] = torch.ones(1, device=device)
for number in range(50):
    cell(number)
"""
_MERGED = """
import json, time
from ipygpumem.records import CellRecord, EngineRecord, ExperimentRecord, Usage
from ipygpumem.report import html, text
from ipygpumem.extras.cluster.engines_report import engines_report, merged_record
usages = (Usage("cpu", 2**30, 2**30, 2**31, None, "kernel"), Usage("cuda:0", 0, 0, 2**30, None, "allocator"))
def best(work):
    seconds = []
    for _ in range(3):
        started = time.process_time()
        report = work()
        text.render([report]), html.render([report], bars=False)
        seconds.append(time.process_time() - started)
    print(json.dumps(min(seconds) * 1000))
"""  # noqa: E501
_ENGINES = """
cells = tuple(CellRecord(n, None, "s", 0.0, 1.0, True, None, usages) for n in range(1000 if {x} <= 64 else 10))
record = ExperimentRecord("s", 0.0, 1.0, cells, usages, {{"cpu": 1}}, {{"cpu": 1}}, ("x",), (), (), ())
engines = [EngineRecord(n, "host", n, {{}}, {{"cpu": 1}}, "v", "", record) for n in range({x})]
best(lambda: engines_report(merged_record("s", 0.0, 1.0, engines)))
"""  # noqa: E501


@dataclass(frozen=True)
class Growth:
    """One thing that there may be more of: milliseconds of CPU at several numbers of it."""

    title: str
    script: str
    numbers: tuple[int, ...]
    target_ms: float | None = None
    """At the largest number."""
    simulated: bool = False


_GROWTHS = (
    Growth("a cell, after so many cells", _SESSION + _CELLS, (100, 1000, 10_000)),
    Growth(
        "a cell, beside so many names of lists",
        _SESSION + _NAMES + _OF_CELL,
        (100, 1000, 10_000, 100_000),
    ),
    Growth(
        "an empty `%%experiment`, beside so many names of lists",
        _SESSION + _NAMES + _EXPERIMENT,
        (100, 1000, 10_000, 100_000),
    ),
    Growth(
        "`ipygpumem.tensors()` of so many tensors",
        _SESSION + _TENSORS,
        (100, 1000, 10_000, 100_000),
    ),
    Growth(
        "a cell, with so many simulated cards in use",
        _SESSION + _DEVICES + _OF_CELL,
        (1, 2, 4, 8),
        simulated=True,
    ),
    Growth(
        "merging and reporting an experiment of so many engines",
        _MERGED + _ENGINES,
        (4, 64, 1000, 10_000),
        5000,
    ),
)

_METHOD = """\
CPU time of one process in milliseconds, the least of 3 or 5 runs, each number in a new process. Engines have 1,000
cells each up to 64 engines, then 10."""  # noqa: E501

_DRAWN = "\n\n![milliseconds of CPU by number](../img/scale.png)"


def run(*, quick: bool) -> Section:
    """Return the milliseconds of each thing at each number, and draw them."""
    rows = []
    points_by_title = {}
    for growth in _GROWTHS:
        numbers = growth.numbers
        if quick:
            numbers = numbers[:2]
        points = measure(growth, numbers)
        points_by_title[growth.title] = points
        for number, milliseconds in points:
            rows.append(_row(growth, number, milliseconds))
    method = _METHOD
    if not quick:
        _draw(points_by_title)
        method += _DRAWN
    return Section("How cost grows", method, tuple(rows), control="")


def _row(growth: Growth, number: int, milliseconds: float) -> Row:
    """Return the row of one number; only the largest one has a target."""
    target = ""
    met = None
    if growth.target_ms is not None and number == growth.numbers[-1]:
        target = f"under {growth.target_ms:,.0f} ms"
        met = milliseconds < growth.target_ms
    figure = f"{growth.title}: {number:,}"
    return Row(figure, target, f"{milliseconds:,.2f} ms", "has none", "", met)


def measure(growth: Growth, numbers: tuple[int, ...]) -> list[tuple[int, float]]:
    """Return each number with its milliseconds; none where there is no simulated card for it."""
    if growth.simulated and not _SIMULATED.exists():
        return []
    return [(number, _milliseconds(growth, number)) for number in numbers]


def _milliseconds(growth: Growth, number: int) -> float:
    """Run a script in a new process; return the CPU milliseconds it prints."""
    python = str(_SIMULATED) if growth.simulated else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        cards = {
            "SIM_DEVICES": str(number),
            "SIM_TABLE": f"{folder}/machine",
            "PYTHONPATH": str(_ROOT),
        }
        done = subprocess.run(
            [python, "-c", growth.script.format(x=number)],
            capture_output=True,
            text=True,
            env={**os.environ, **cards},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout.splitlines()[-1]))


def _draw(points_by_title: dict[str, list[tuple[int, float]]]) -> None:
    """Draw a line for each title: milliseconds by number."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for title, points in points_by_title.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=title.replace("`", ""))
    axes.set(xscale="log", yscale="log", xlabel="how many", ylabel="milliseconds of CPU")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(_PICTURE, dpi=110)
