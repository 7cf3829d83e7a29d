"""What a tool adds to the shortest of cells."""

from __future__ import annotations

import random
from contextlib import ExitStack
from statistics import median

from benchmarks.kernel import CellError, Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section
from benchmarks.tools import OURS, PEER, Tool, installed_tools

_CELL = "1+1"
_WARM_UP = 20
_TARGET_MS = 0.5
_BARE, _CONTROL, _PRINT, _DISPLAY, _TOOL = "bare", "control", "print", "display", "tool"
_HEAPS = (
    ("a light heap", "heap = []"),
    ("1,000,000 container objects", "heap = [[] for _ in range(1_000_000)]"),
)

_AFTER_EACH_CELL = """
def show(result, shell=get_ipython()):
    {}

get_ipython().events.register("post_run_cell", show)
"""
_CONTROLS = {
    _CONTROL: None,
    _PRINT: _AFTER_EACH_CELL.format('print("x" * 80)'),
    _DISPLAY: _AFTER_EACH_CELL.format('shell.display_pub.publish({"text/plain": "x" * 80, "text/html": "x" * 1000})'),
}

_METHOD = """\
The cell `1+1` from request to `idle`: {count} per variant, in turns of random order, over {sets} sets of fresh kernels;
median of the difference to a bare kernel's run in the same turn. Controls: the same for a second bare kernel, for one
that prints a line of a report's length after each cell, and for one in which IPython displays a ready-made text of a
report's size; nothing else is done there. Each tool has turns of its own: a peer that walks the whole heap leaves cold
caches to whoever comes next."""


def run(*, quick: bool) -> Section:
    """Return the milliseconds that each tool adds to a trivial cell."""
    sets, turns = (1, 60) if quick else (12, 25)
    rows = tuple(_row(name, code, sets, turns) for name, code in _HEAPS)
    return Section(
        "A trivial cell",
        _METHOD.format(count=sets * turns, sets=sets),
        rows,
        control="controls: bare, only a printed line, only a display (bare: total)",
    )


def _row(name: str, heap: str, sets: int, turns: int) -> Row:
    seconds = {tool.name: _seconds(tool, heap, sets, turns) for tool in installed_tools()}
    added = {tool: _added_ms(times, _TOOL) for tool, times in seconds.items()}
    beside = seconds[OURS.name]
    return Row(
        figure=f"`1+1` with {name}: added",
        target=f"at most {_TARGET_MS} ms",
        ours=f"{added[OURS.name]:+.2f} ms",
        peer=f"{added[PEER.name]:+.2f} ms" if PEER.name in added else NOT_INSTALLED,
        control=", ".join(f"{_added_ms(beside, name):+.2f}" for name in _CONTROLS)
        + f" ms ({median(beside[_BARE]) * 1000:.2f} ms)",
        met=added[OURS.name] <= _TARGET_MS,
    )


def _added_ms(seconds: dict[str, list[float]], variant: str) -> float:
    """Return the median over all turns of what ``variant`` took longer than the bare kernel."""
    return 1000 * median(one - bare for one, bare in zip(seconds[variant], seconds[_BARE], strict=True))


def _seconds(tool: Tool, heap: str, sets: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of every trivial cell of each variant; equal positions are of one turn."""
    variants: dict[str, str | None] = {_BARE: None, _TOOL: tool.on}
    if tool is OURS:
        variants |= _CONTROLS
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    shuffle = random.Random(0).shuffle
    for _ in range(sets):  # one kernel may be slower than its twin by as much as a tool costs
        shuffle(order)
        with ExitStack() as stack:
            kernels = {name: stack.enter_context(Kernel()) for name in order}
            for name in order:
                _prepare(kernels[name], variants[name], heap)
            for _ in range(turns):
                shuffle(order)
                for name in order:
                    seconds[name].append(kernels[name].run(_CELL).seconds)
    return seconds


def _prepare(kernel: Kernel, code: str | None, heap: str) -> None:
    kernel.run(heap)
    if code is not None:
        kernel.run(code)
    text = ""
    for _ in range(_WARM_UP):
        text = kernel.run(_CELL).text
    # One report beyond the "2" itself, or the benchmark would measure nothing.
    if (len(text) > len("2")) != (code is not None):
        raise CellError(f"expected {'a' if code else 'no'} report after the cell, got {text!r}")
