"""Measures the milliseconds that a tool adds to the cell ``1+1``."""

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
    """Return the row of one heap, which the cell ``heap`` makes."""
    ours, bare = _added_ms(OURS.on, heap, sets, turns)
    theirs = None
    peer = NOT_INSTALLED
    if PEER.installed:
        theirs, _ = _added_ms(PEER.on, heap, sets, turns)
        peer = f"{theirs:+.2f} ms"
    controls = []
    for code in _CONTROLS:
        added, _ = _added_ms(code, heap, sets, turns)
        controls.append(f"{added:+.2f}")
    return Row(
        figure=f"`1+1` with {name}: added",
        target=f"at most {_TARGET_MS} ms",
        ours=f"{ours:+.2f} ms",
        peer=peer,
        control=f"{', '.join(controls)} ms ({bare:.2f} ms)",
        met=ours <= _TARGET_MS,
        better=lower(ours, theirs),
    )


def _added_ms(code: str | None, heap: str, sets: int, turns: int) -> tuple[float, float]:
    """Return the milliseconds by which the cell takes longer in a kernel that has run ``code`` than
    in a bare one, and those that it takes in the bare one (medians).
    """
    bare_seconds: list[float] = []
    added_seconds: list[float] = []
    choose = random.Random(0).choice
    for _ in range(sets):  # one kernel may be slower than its twin by as much as a tool costs
        with Kernel() as first, Kernel() as second:
            orders = [(first, second), (second, first)]
            bare, with_code = choose(orders)
            _prepare(bare, None, heap)
            _prepare(with_code, code, heap)
            for _ in range(turns):
                seconds = {kernel: kernel.run(_CELL).seconds for kernel in choose(orders)}
                bare_seconds.append(seconds[bare])
                added_seconds.append(seconds[with_code] - seconds[bare])
    return 1000 * median(added_seconds), 1000 * median(bare_seconds)


def _prepare(kernel: Kernel, code: str | None, heap: str) -> None:
    """Make the heap, run ``code`` if there is any, and warm up with the cell.

    Raises:
        CellError: no report came after the cell with ``code``, or one without it.
    """
    kernel.run(heap)
    if code is not None:
        kernel.run(code)
    text = ""
    for _ in range(_WARM_UP):
        text = kernel.run(_CELL).text
    # One report beyond the "2" itself, or the benchmark would measure nothing.
    has_report = len(text) > len("2")
    if has_report != (code is not None):
        expected = "a" if code else "no"
        raise CellError(f"expected {expected} report after the cell, got {text!r}")
