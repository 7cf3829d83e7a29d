"""Cost of following lines: how many times longer code takes under ``%%memlines``, and the time that
each line adds.
"""

from __future__ import annotations

from statistics import median

from benchmarks.kernel import Kernel
from benchmarks.report import Row, Section
from benchmarks.tools import OURS

_MOST_TIMES = 3.0
_MOST_ADDED_US = 300.0
_METHOD = """\
The thread's CPU time of a function called plainly and under `%%memlines -f`, {pairs} pairs in turn, first one to warm
up: median (least to most) of with / without, or of the difference for each line; control: a second plain call against
the first. torch with one thread."""  # noqa: E501

_SETUP = """
import time, torch
torch.set_num_threads(1)
_left = torch.ones(320, 320)
def torch_lines(count):
    for _ in range(count):
        first = _left @ _left
        second = first @ _left
        third = second.softmax(1) @ first
def short_lines(count):
    total = 0
    for number in range(count):
        total += number
def timed(work, count):
    global _seconds
    started = time.thread_time()
    work(count)
    _seconds = time.thread_time() - started
"""

_SHORT_LINES = 2000


def run(*, quick: bool) -> Section:
    """Return the factor by which following slows torch's lines, and the cost of one line."""
    pairs = 3 if quick else 9
    with Kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run(OURS.on)
        off, on, again = _times(kernel, "torch_lines", 100, pairs)
        ratios = [one / other for one, other in zip(on, off, strict=True)]
        control = [one / other for one, other in zip(again, off, strict=True)]
        off, on, again = _times(kernel, "short_lines", _SHORT_LINES, pairs)
        added = [
            1e6 * (one - other) / (2 * _SHORT_LINES) for one, other in zip(on, off, strict=True)
        ]
        noise = [
            1e6 * (one - other) / (2 * _SHORT_LINES) for one, other in zip(again, off, strict=True)
        ]
    rows = (
        Row(
            "lines of torch, about 1 ms each: times longer",
            f"< {_MOST_TIMES:g}",
            _spread(ratios),
            "",
            _spread(control),
            median(ratios) < _MOST_TIMES,
        ),
        Row(
            "a line that does next to nothing: added µs",
            f"< {_MOST_ADDED_US:g}",
            _spread(added),
            "",
            _spread(noise),
            median(added) < _MOST_ADDED_US,
        ),
    )
    return Section("Line by line", _METHOD.format(pairs=pairs), rows, control="control")


def _times(
    kernel: Kernel, work: str, count: int, pairs: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each round: a plain call, one whose lines are followed, a plain one
    again.
    """
    call = f"timed({work}, {count})"
    kernel.run(call)
    rounds = [
        (
            _seconds(kernel, call),
            _seconds(kernel, f"%%memlines -f {work}\n{call}"),
            _seconds(kernel, call),
        )
        for _ in range(pairs)
    ]
    off, on, again = (list(times) for times in zip(*rounds, strict=True))
    return off, on, again


def _seconds(kernel: Kernel, cell: str) -> float:
    kernel.run(cell)
    return float(kernel.ask("_seconds"))


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
