"""Measures the MiB that a history of 10,000 cells holds, and the milliseconds of a query."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import NamedTuple

from benchmarks.report import Row, Section

_CELLS = 10_000
_TARGET_MIB = 20.0
_TARGET_MS = 50.0

_SCRIPT = """
import gc, json, sys, time, tracemalloc, uuid
from types import SimpleNamespace
from IPython.core.interactiveshell import InteractiveShell
import ipygpumem
from ipygpumem.shell.app import app_of
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.run_line_magic("load_ext", "ipygpumem")
shell.run_line_magic("config", "IPyGpuMem.report = False")
session = app_of(shell).session
def run(number):
    source = f"batch_{{number}} = load(part={{number}}, shuffle=True)\\nloss = train(model, batch_{{number}})"
    info = SimpleNamespace(raw_cell=source, cell_id=str(uuid.uuid4()))
    session.cell_begins(info)
    session.cell_ends(SimpleNamespace(
        info=info, execution_count=number, error_before_exec=None, error_in_exec=None, result=None))
run(0)
gc.collect()
tracemalloc.start()
before, _ = tracemalloc.get_traced_memory()
for number in range(1, {cells}):
    run(number)
gc.collect()
after, _ = tracemalloc.get_traced_memory()
tracemalloc.stop()
times = []
for _ in range(20):
    started = time.perf_counter()
    records = ipygpumem.history()
    times.append(time.perf_counter() - started)
sys.stderr.write(json.dumps([len(records), after - before, sorted(times)[10]]))
"""  # noqa: E501

_METHOD = """\
A new process lets {cells:,} cells of two lines, each with an id and a source of its own, go through a shell's session;
Python's own memory that they hold (tracemalloc), with what watches for cells that grow, and the time of
`ipygpumem.history()`; median of {repeats} processes. There is one device, the host; each further one adds a `Usage` to
every cell."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the memory that a full history holds, and the time that it takes to ask for it."""
    repeats = 1 if quick else 3
    answers = [_answer() for _ in range(repeats)]
    mebibytes = median(answer.size_bytes for answer in answers) / 2**20
    milliseconds = median(answer.seconds for answer in answers) * 1000
    rows = (
        Row(
            f"memory of {_CELLS:,} cells",
            f"under {_TARGET_MIB:.0f} MiB",
            f"{mebibytes:.1f} MiB",
            "has none",
            "",
            mebibytes < _TARGET_MIB,
        ),
        Row(
            "`ipygpumem.history()`",
            f"under {_TARGET_MS:.0f} ms",
            f"{milliseconds:.2f} ms",
            "has none",
            "",
            milliseconds < _TARGET_MS,
        ),
    )
    return Section(
        "A long history", _METHOD.format(cells=_CELLS, repeats=repeats), rows, control=""
    )


class _Answer(NamedTuple):
    """The memory that a full history holds, and the seconds of ``ipygpumem.history()``."""

    size_bytes: int
    seconds: float


def _answer() -> _Answer:
    """Fill a history in a new process, and measure it there."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(cells=_CELLS)],
        capture_output=True,
        text=True,
        check=True,
    )
    number, size_bytes, seconds = json.loads(done.stderr.splitlines()[-1])
    assert number == _CELLS
    return _Answer(int(size_bytes), float(seconds))
