"""Measures the factor by which ``%%memlines`` slows code, and the microseconds that a line adds."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

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
        torch_rounds = _rounds(kernel, "torch_lines", 100, pairs)
        short_rounds = _rounds(kernel, "short_lines", _SHORT_LINES, pairs)
    ratios = [seconds.followed / seconds.plain for seconds in torch_rounds]
    control = [seconds.plain_again / seconds.plain for seconds in torch_rounds]
    added = [_us_a_line(seconds.followed - seconds.plain) for seconds in short_rounds]
    noise = [_us_a_line(seconds.plain_again - seconds.plain) for seconds in short_rounds]
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


def _us_a_line(seconds: float) -> float:
    """Return the microseconds of one line of ``short_lines``, whose loop has two lines."""
    return 1e6 * seconds / (2 * _SHORT_LINES)


class _Round(NamedTuple):
    """The seconds of a plain call, of one whose lines are followed, and of a plain one again."""

    plain: float
    followed: float
    plain_again: float


def _rounds(kernel: Kernel, work: str, count: int, pairs: int) -> list[_Round]:
    """Call ``work`` to warm up, then in ``pairs`` rounds; return the seconds of each round."""
    call = f"timed({work}, {count})"
    kernel.run(call)
    rounds = []
    for _ in range(pairs):
        plain = _seconds(kernel, call)
        followed = _seconds(kernel, f"%%memlines -f {work}\n{call}")
        plain_again = _seconds(kernel, call)
        rounds.append(_Round(plain, followed, plain_again))
    return rounds


def _seconds(kernel: Kernel, cell: str) -> float:
    """Run a cell; return the CPU seconds that ``timed`` noted in it."""
    kernel.run(cell)
    return float(kernel.ask("_seconds"))


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
