"""Time that a tool adds to the shortest of cells."""

from __future__ import annotations

import random
from statistics import median

from benchmarks.kernel import CellError, Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section, lower
from benchmarks.tools import OURS, PEER

_CELL = "1+1"
_WARM_UP = 20
_TARGET_MS = 0.5
_HEAPS = (
    ("a light heap", "heap = []"),
    ("1,000,000 container objects", "heap = [[] for _ in range(1_000_000)]"),
)

_AFTER_EACH_CELL = """
def show(result, shell=get_ipython()):
    {}

get_ipython().events.register("post_run_cell", show)
"""
_PRINT = 'print("x" * 80)'
_DISPLAY = 'shell.display_pub.publish({"text/plain": "x" * 80, "text/html": "x" * 1000})'
_CONTROLS = (None, _AFTER_EACH_CELL.format(_PRINT), _AFTER_EACH_CELL.format(_DISPLAY))

_METHOD = """\
The cell `1+1` from request to `idle`: {count} in each kernel, in turns with a bare one (random order) over {sets} pairs
of fresh ones; median of the difference in a turn. Controls: the same for a second bare kernel, for one that prints a
line of a report's length after each cell, and for one in which IPython displays a ready-made text of a report's size;
nothing else is done there. Each has turns of its own."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the milliseconds that each tool adds to a trivial cell."""
    sets, turns = (1, 60) if quick else (3, 40)
    rows = tuple(_row(name, code, sets, turns) for name, code in _HEAPS)
    return Section(
        "A trivial cell",
        _METHOD.format(count=sets * turns, sets=sets),
        rows,
        control="controls: bare, only a printed line, only a display (bare: total)",
    )


def _row(name: str, heap: str, sets: int, turns: int) -> Row:
    ours, bare = _added_ms(OURS.on, heap, sets, turns)
    theirs = _added_ms(PEER.on, heap, sets, turns)[0] if PEER.installed else None
    controls = [f"{_added_ms(code, heap, sets, turns)[0]:+.2f}" for code in _CONTROLS]
    return Row(
        figure=f"`1+1` with {name}: added",
        target=f"at most {_TARGET_MS} ms",
        ours=f"{ours:+.2f} ms",
        peer=NOT_INSTALLED if theirs is None else f"{theirs:+.2f} ms",
        control=f"{', '.join(controls)} ms ({bare:.2f} ms)",
        met=ours <= _TARGET_MS,
        better=lower(ours, theirs),
    )


def _added_ms(code: str | None, heap: str, sets: int, turns: int) -> tuple[float, float]:
    """Return the time by which a kernel that has run ``code`` is slower than a bare one, and the
    time of ``code`` itself (medians).
    """
    bare: list[float] = []
    added: list[float] = []
    choose = random.Random(0).choice
    for _ in range(sets):  # one kernel may be slower than its twin by as much as a tool costs
        with Kernel() as one, Kernel() as other:
            without, having = choose([(one, other), (other, one)])
            _prepare(without, None, heap)
            _prepare(having, code, heap)
            for _ in range(turns):
                seconds = {
                    kernel: kernel.run(_CELL).seconds
                    for kernel in choose([(one, other), (other, one)])
                }
                bare.append(seconds[without])
                added.append(seconds[having] - seconds[without])
    return 1000 * median(added), 1000 * median(bare)


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
