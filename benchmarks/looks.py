"""Measures the time of each look at the heap, in full collections of the same heap.

A look is a cell such as ``%gpumem leaks``. Three more costs, which must not grow, are in µs, ms and
seconds of CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import NOT_INSTALLED, Row, Section

_ROOT = Path(__file__).parent.parent
_MANY = 1_000_000
_NAMES = 100_000
_MOST_BESIDE_DICTS = 2
"""Factor by which a look may miss its goal beside a million dicts."""

_SESSION = """
import contextlib, gc, io, json, sys, time
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.run_line_magic("load_ext", "ipygpumem")
shell.run_line_magic("config", "IPyGpuMem.report = False")
numbers = iter(range(1_000_000))

# One for all cells: IPython makes a cycle of each that it prints to, which a look would collect.
output = io.StringIO()

def cpu(code, times, before=None):
    seconds = []
    for _ in range(times):
        if before is not None:
            shell.run_cell(before)
        # Each run has its own source: growth of a cell that is rerun would start a look of its own.
        cell = f"{code}\\n# {next(numbers)}"
        with contextlib.redirect_stdout(output):
            started = time.process_time()
            shell.run_cell(cell)
            seconds.append(time.process_time() - started)
    return seconds

def shown(code):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert shell.run_cell(code).success
    return output.getvalue()

def collections(times):
    gc.collect()
    seconds = []
    for _ in range(times):
        started = time.process_time()
        gc.collect()
        seconds.append(time.process_time() - started)
    return seconds
"""

_LIBRARIES = """
import importlib, json
loaded = []
for library in ("torch", "transformers", "pandas", "matplotlib.pyplot", "sklearn.ensemble", "sklearn.pipeline"):
    try:
        importlib.import_module(library)
    except ImportError:
        continue
    loaded.append(library.partition(".")[0])
if "transformers" in loaded:
    from transformers import BertConfig, BertModel, Trainer
"""  # noqa: E501

_OBJECTS = """
import numpy, pandas, torch

array = numpy.ones(1 << 22)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4), 6)
frame = pandas.DataFrame({f"column_{number}": numpy.arange(100_000.0) for number in range(10)})
frame["text"] = [f"row {number}" for number in range(100_000)]
keeper = {}
"""

_LEAK = """%%experiment leaky --report none
keeper["run"] = [numpy.ones(1 << 20) for _ in range(4)]"""
_EMPTY = "%%experiment empty --report none\npass"
_LEAVES = """%%experiment leaves --report none
left = numpy.ones(1 << 20)
keeper["left"] = left"""

_DICTS = 'million = [{"number": number, "list": []} for number in range(1_000_000)]'

_LOOKS = f"""
looks = {{
    "status": "%gpumem status",
    "leaks": "%gpumem leaks",
    "top": "%gpumem top",
    "why array": "%gpumem why array",
    "why model": "%gpumem why model",
    "why frame": "%gpumem why frame",
    "tensors": "%gpumem tensors",
    "free": "%gpumem free",
    "empty experiment": {_EMPTY!r},
    "experiment": {_LEAVES!r},
}}
texts = {{"leaks": 'keeper["run"]', "top": "frame", "why array": "array", "why model": "model", "why frame": "frame"}}
for cell in ({_OBJECTS!r}, beside, {_LEAK!r}):
    assert shell.run_cell(cell).success
answer = {{"tracked": len(gc.get_objects()), "loaded": loaded, "collection": collections(times)}}
for name, code in looks.items():
    cpu(code, 1)  # imports
    if name in texts:
        assert texts[name] in shown(code), name
    answer[name] = cpu(code, times)
print(json.dumps(answer))
"""  # noqa: E501

_EMPTY_BESIDE_NAMES = f"""
few = cpu({_EMPTY!r}, 2) and cpu({_EMPTY!r}, times)
shell.user_ns.update((f"name_{{number}}", [number]) for number in range(count))
cpu({_EMPTY!r}, 1)
print(json.dumps({{"few": few, "many": cpu({_EMPTY!r}, times)}}))
"""

_RECOVERY = """
shell.user_ns["million"] = [{"number": number, "list": []} for number in range(count)]
shell.run_cell('''
def fail():
    held = [bytearray(1000) for _ in range(100)]
    raise MemoryError
''')
cpu("fail()", 2)
shell.run_line_magic("config", "IPyGpuMem.release_frames = 'never'")
cpu("fail()", 2)
bare = cpu("fail()", times, before="pass")
shell.run_line_magic("config", "IPyGpuMem.release_frames = 'oom+interrupt'")
answer = {"bare": bare, "first": cpu("fail()", times, before="pass"), "after another": cpu("fail()", times)}
print(json.dumps(answer))
"""  # noqa: E501

_INVENTORY = """
import torch, ipygpumem
tensors = [torch.zeros(4) for _ in range(count)]
seconds, kept = [], []
for _ in range(times):
    started = time.process_time()
    kept = [ipygpumem.tensors()]
    seconds.append(time.process_time() - started)
print(json.dumps({"seconds": seconds}))
"""


@dataclass(frozen=True)
class Look:
    """One look, and its goal in full collections of the same heap."""

    key: str
    """The look's name in the script's answer."""
    title: str
    goal: float


_GOALS = (
    Look("status", "`%gpumem status`", 4),
    Look("leaks", "`%gpumem leaks`", 4),
    Look("top", "`%gpumem top`", 4),
    Look("why array", "`%gpumem why` of an array", 2),
    Look("why model", "`%gpumem why` of a torch model", 3),
    Look("why frame", "`%gpumem why` of a pandas frame", 3),
    Look("tensors", "`%gpumem tensors`", 3),
    Look("free", "`%gpumem free`", 3),
    Look("experiment", "an experiment that leaves an array, minus an empty one", 3),
)

_METHOD = """\
One process with {libraries} ({tracked:,} tracked objects), then one that also has a million dicts of a list each.
A look is a cell; its CPU time, the median of {times}, is divided by that of a full collection of the same heap without
garbage ({collection:.0f} ms and {collection_beside:.0f} ms). Beside the dicts a look may cost twice its goal. The three
absolute costs are CPU time, the least of {times} runs."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the ratios of all looks, and the three absolute costs."""
    times = 3 if quick else 7
    script = _SESSION + _LIBRARIES + _LOOKS
    try:
        alone = _measured(f"beside = 'pass'{script}", times)
        beside = _measured(f"beside = {_DICTS!r}{script}", times)
    except ModuleNotFoundError:
        rows = (Row("all looks", "", "needs torch and pandas", NOT_INSTALLED, "", None),)
        return Section("Looks at the heap", "", rows, control="")
    rows = (
        *_ratios(alone, ""),
        *_ratios(beside, ", beside a million dicts"),
        *_absolute(times, quick=quick),
    )
    method = _METHOD.format(
        libraries=", ".join(dict.fromkeys(alone["loaded"])),
        tracked=alone["tracked"],
        times=times,
        collection=median(alone["collection"]) * 1000,
        collection_beside=median(beside["collection"]) * 1000,
    )
    return Section("Looks at the heap", method, rows, control="")


def _ratios(answer: dict[str, Any], where: str) -> list[Row]:
    """Return a row for each look, in full collections.

    Args:
        answer: lists of seconds, by the look and for ``collection``.
        where: words for the heap's other objects; empty if there are none.
    """
    collection_seconds = median(answer["collection"])
    rows = []
    for look in _GOALS:
        seconds = median(answer[look.key])
        if look.key == "experiment":
            seconds -= median(answer["empty experiment"])
        goal = look.goal
        if where:
            goal *= _MOST_BESIDE_DICTS
        ratio = seconds / collection_seconds
        target = f"at most {goal:.0f} collections"
        ours = f"{ratio:.1f} ({seconds * 1000:.0f} ms)"
        rows.append(Row(look.title + where, target, ours, "has none", "", ratio <= goal))
    return rows


def _absolute(times: int, *, quick: bool) -> list[Row]:
    """Return the rows of the costs that have a goal of their own."""
    names = _NAMES
    many = _MANY
    if quick:
        names //= 10
        many //= 10
    empty = _measured(_SESSION + _EMPTY_BESIDE_NAMES, times, names)
    each_us = (min(empty["many"]) - min(empty["few"])) / names * 1e6
    recovery = _measured(_SESSION + _RECOVERY, times, many)
    bare = min(recovery["bare"])
    tensors = min(_measured(_SESSION + _INVENTORY, 3, many)["seconds"])
    rows = [
        _row(f"an empty experiment, for each of {names:,} names", each_us, 0.25, "µs", digits=2),
        _row(f"an inventory of {many:,} tensors", tensors, 2, "s", digits=2),
    ]
    for key, title in (
        ("first", "the first recovery"),
        ("after another", "a recovery after another"),
    ):
        added_ms = (min(recovery[key]) - bare) * 1000
        rows.append(
            _row(f"{title} beside {many:,} dicts of lists: added", added_ms, 6, "ms", digits=1)
        )
    return rows


def _row(figure: str, cost: float, goal: float, unit: str, *, digits: int) -> Row:
    """Return the row of an absolute cost, in ``unit``."""
    target = f"at most {goal:g} {unit}"
    return Row(figure, target, f"{cost:.{digits}f} {unit}", "has none", "", cost <= goal)


def _measured(script: str, times: int, count: int = 0) -> dict[str, Any]:
    """Run a script in a new process, and return the object that it prints last.

    Raises:
        ModuleNotFoundError: a library is not installed.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"times, count = {times}, {count}\n{script}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr:
        raise ModuleNotFoundError(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
