"""Measures the factor by which the CPU time of a cell grows under ``%%peak``.

It writes ``docs/measured/peak-times.md``:

    python -m benchmarks.peak_times
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import environment
from benchmarks.kernel import Kernel
from benchmarks.report import table
from benchmarks.tools import OURS

_PAGE = Path(__file__).parent.parent / "docs" / "measured" / "peak-times.md"
_SECONDS = 0.5
_LEAST_CALIBRATED = 0.2
_MOST_TIMES = 1.5
_HEAD = """\
# CPU time under `%%peak`

Written by `python -m benchmarks.peak_times`.

{where}

Each step is repeated until it takes about {seconds:g} s of CPU, in a real kernel, once plainly and once under
`%%peak`, in {pairs} pairs in turn; torch and BLAS have one thread. *Code*: the CPU time of the process while the step
itself runs, under `%%peak` / plainly, median (least to most). *Cell*: the same of the whole cell, with the start and
the report. *Floor*: the same of the code under memray's tracker and, if torch is loaded, one of its dispatch modes that
only calls each operation: `%%peak` needs both, and cannot be below. Control: a second plain run / the first, of the
code: the machine was shared with other work. The aim is at most {most:g} times for the code. Where the floor is above
it, the step consists of operations, or of calls of Python functions, of a few microseconds each.

"""  # noqa: E501
_SETUP = """
import time
def timed(work, count):
    started = time.process_time()
    for _ in range(count):
        work()
    return time.process_time() - started
"""
_FLOOR = """
import contextlib, memray, sys, tempfile
def floor():
    stack = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    destination = memray.FileDestination(folder + "/memory.bin", compress_on_exit=False)
    form = memray.FileFormat.AGGREGATED_ALLOCATIONS
    tracker = memray.Tracker(destination=destination, file_format=form, memory_interval_ms=10_000)
    stack.enter_context(tracker)
    if "torch" in sys.modules:
        from torch.utils._python_dispatch import TorchDispatchMode
        class Empty(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))
        stack.enter_context(Empty())
    return stack
"""
"""Defines a context of the tools that ``%%peak`` needs, with nothing of our own."""


class _Step(NamedTuple):
    """A step to measure: its title, and the code that defines the function ``step``."""

    title: str
    code: str


_TORCH = """
import torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
torch.manual_seed(0)
"""
_TRAIN = """
def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
_LITTLE_MLP = """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
x, y = torch.randn(32, 64), torch.randint(10, (32,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
_MLP = """
model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
x, y = torch.randn(128, 784), torch.randint(10, (128,))
optimizer = torch.optim.Adam(model.parameters())
"""  # noqa: E501
_CONVOLUTIONS = """
def block(inner, outer):
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2))
model = nn.Sequential(block(3, 32), block(32, 64), block(64, 128), nn.Flatten(), nn.Linear(2048, 10))
x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""  # noqa: E501
_TRANSFORMER = """
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
encoder, head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 10)
x, y = torch.randn(16, 64, 128), torch.randint(10, (16,))
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()])
def model(x):
    return head(encoder(x).mean(1))
"""
_PANDAS = """
import numpy, pandas
rng = numpy.random.default_rng(0)
sales = pandas.DataFrame(
    {"shop": rng.integers(0, 500, 200_000), "item": rng.integers(0, 1000, 200_000), "price": rng.random(200_000)}
)
shops = pandas.DataFrame({"shop": range(500), "town": [f"town {number % 40}" for number in range(500)]})
def step():
    merged = sales.merge(shops, on="shop")
    merged["price"] *= 1.19
    by_town = merged.groupby(["town", "item"])["price"].agg(["sum", "mean", "count"]).reset_index()
    return by_town.sort_values("sum", ascending=False).head(100)
"""  # noqa: E501
_APPLIED = """
import numpy, pandas
rng = numpy.random.default_rng(0)
table = pandas.DataFrame({"name": [f"item {number}" for number in range(20_000)], "price": rng.random(20_000)})
def step():
    texts = table["name"].str.upper().str.replace("ITEM", "thing")
    prices = table["price"].map(lambda price: round(price, 2))
    return pandas.DataFrame({"name": texts, "price": prices}).groupby("price").first()
"""  # noqa: E501
_NUMPY = """
import numpy
rng = numpy.random.default_rng(0)
signal = rng.normal(size=(64, 16_384))
def step():
    spectrum = numpy.fft.rfft(signal, axis=1)
    power = numpy.abs(spectrum) ** 2
    logs = numpy.log1p(power / power.mean(axis=1, keepdims=True))
    order = numpy.argsort(logs, axis=1)[:, -100:]
    return numpy.take_along_axis(logs, order, 1).sum()
"""
_LITTLE_ARRAYS = """
import numpy
points = numpy.random.default_rng(0).normal(size=(300, 3))
def step():
    total = 0.0
    for left in points:
        for right in points[:30]:
            total += numpy.sqrt(((left - right) ** 2).sum())
    return total
"""
_SKLEARN = """
import numpy
from sklearn.ensemble import RandomForestClassifier
rng = numpy.random.default_rng(0)
x, y = rng.normal(size=(500, 20)), rng.integers(0, 2, 500)
def step():
    RandomForestClassifier(10, random_state=0).fit(x, y).predict(x)
"""
_LISTS = """
def step():
    rows = [{"id": number, "name": f"row {number}", "tags": [number % 7, number % 11]} for number in range(20_000)]
    by_tag = {}
    for row in rows:
        for tag in row["tags"]:
            by_tag.setdefault(tag, []).append(row["id"])
    return sorted((len(ids), tag) for tag, ids in by_tag.items())
"""  # noqa: E501
_TEXT = """
import json, re
records = [{"id": number, "text": f"word{number % 97} {number % 89}"} for number in range(4000)]
text = json.dumps(records)
def step():
    counts = {}
    for record in json.loads(text):
        for word in re.findall(r"\\w+", record["text"]):
            counts[word] = counts.get(word, 0) + 1
    return counts
"""
_CALLS = """
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def moved(self, by):
        return Point(self.x + by, self.y + by)
def step():
    points = [Point(number, -number) for number in range(20_000)]
    return sum(point.moved(1).x for point in points)
"""
_RECURSION = """
def fibonacci(number):
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)
def step():
    fibonacci(20)
"""
_STEPS = (
    _Step("torch: MLP, 784-512-512-10, batch 128, Adam", _TORCH + _MLP + _TRAIN),
    _Step("torch: little MLP, 64-64-64-10, batch 32, SGD", _TORCH + _LITTLE_MLP + _TRAIN),
    _Step("torch: convolutions, 32 images of 32 px, SGD", _TORCH + _CONVOLUTIONS + _TRAIN),
    _Step("torch: transformer of 4 layers, 16 × 64, AdamW", _TORCH + _TRANSFORMER + _TRAIN),
    _Step("pandas: merge, groupby, sort of 200,000 rows", _PANDAS),
    _Step("pandas: texts and `map` with a lambda, 20,000 rows", _APPLIED),
    _Step("numpy: spectrum of 64 × 16,384", _NUMPY),
    _Step("numpy: arrays of 3 numbers in a loop", _LITTLE_ARRAYS),
    _Step("scikit-learn: random forest", _SKLEARN),
    _Step("Python: lists and dicts", _LISTS),
    _Step("Python: JSON and regular expressions", _TEXT),
    _Step("Python: objects and methods", _CALLS),
    _Step("Python: recursive function", _RECURSION),
)


class _Times(NamedTuple):
    """CPU seconds of a step: of its code, and of the whole cell."""

    code: float
    cell: float


def _calibrated(kernel: Kernel) -> int:
    """Return the number of calls of ``step`` in about half a second of CPU."""
    kernel.ask("timed(step, 1)")
    count = 1
    while True:
        seconds = float(kernel.ask(f"timed(step, {count})"))
        if seconds >= _LEAST_CALIBRATED:
            return max(1, round(count * _SECONDS / seconds))
        count *= 2


def _run(kernel: Kernel, cell: str) -> _Times:
    """Run a cell, and return its times."""
    before = float(kernel.ask("time.process_time()"))
    kernel.run(cell)
    after = float(kernel.ask("time.process_time()"))
    return _Times(float(kernel.ask("_seconds")), after - before)


class _Round(NamedTuple):
    """The times of a step plainly, under ``%%peak``, plainly once more, and of the floor."""

    plain: _Times
    followed: _Times
    plain_again: _Times
    floor: _Times


def _measured(step: _Step, pairs: int) -> list[_Round]:
    """Return the times of a step in ``pairs`` rounds, in a kernel of its own."""
    with Kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run(step.code)
        kernel.run(_FLOOR)
        kernel.run(OURS.on)
        plain_cell = f"_seconds = timed(step, {_calibrated(kernel)})"
        followed_cell = f"%%peak\n{plain_cell}"
        floor_cell = f"with floor():\n    {plain_cell}"
        kernel.run(followed_cell)  # the first one imports what it needs
        kernel.run(floor_cell)
        rounds = []
        for _ in range(pairs):
            plain = _run(kernel, plain_cell)
            followed = _run(kernel, followed_cell)
            plain_again = _run(kernel, plain_cell)
            floor = _run(kernel, floor_cell)
            rounds.append(_Round(plain, followed, plain_again, floor))
        return rounds


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _row(step: _Step, rounds: Sequence[_Round]) -> tuple[str, ...]:
    """Return the row of a step: its title, plain seconds, ratios to the plain run, and verdict."""
    code_ratios = [times.followed.code / times.plain.code for times in rounds]
    floor_ratios = [times.floor.code / times.plain.code for times in rounds]
    cell_ratios = [times.followed.cell / times.plain.cell for times in rounds]
    control_ratios = [times.plain_again.code / times.plain.code for times in rounds]
    plain_seconds = median(times.plain.code for times in rounds)
    return (
        step.title,
        f"{plain_seconds:.2f} s",
        _spread(code_ratios),
        _spread(floor_ratios),
        _spread(cell_ratios),
        _spread(control_ratios),
        "yes" if median(code_ratios) <= _MOST_TIMES else "**no**",
    )


def main() -> None:
    """Measure each step in a kernel of its own, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak_times", description=__doc__)
    parser.add_argument("--only", default="", help="steps whose title has this; writes nothing")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for step in _STEPS:
        if options.only in step.title:
            row = _row(step, _measured(step, options.pairs))
            print(*row, sep=" | ", file=sys.stderr, flush=True)
            rows.append(row)
    if not options.only:
        _PAGE.write_text(_page(rows, options.pairs), encoding="utf-8")


def _page(rows: Sequence[tuple[str, ...]], pairs: int) -> str:
    """Return the page of all steps' rows."""
    head = _HEAD.format(
        where=environment.describe_as_list(),
        seconds=_SECONDS,
        pairs=pairs,
        most=_MOST_TIMES,
    )
    heads = (
        "step",
        "plain",
        "code: times longer",
        "floor",
        "cell: times longer",
        "control",
        "reached",
    )
    return f"{head}{table(heads, rows)}\n"


if __name__ == "__main__":
    main()
