"""Measures the milliseconds that an experiment, a recovery and a failing try add to a cell.

Measured beside heaps of several sizes, in turns with a bare kernel, and next to ipyexperiments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.kernel import CellError, Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section, lower
from benchmarks.tools import OURS, PEER

_PICTURE = Path(__file__).parent.parent / "docs" / "img" / "experiment-cost.png"
_TRIES = 10
_TIMES = 20
"""Factor by which we want to be faster than the peer."""

_LIBRARIES = """
import numpy, pandas, matplotlib.pyplot, torch, torch.nn.functional
def fail():
    held = torch.zeros(1000)
    raise MemoryError
"""
_DICTS = 'million = [{{"number": number, "list": []}} for number in range({})]'
_NAMES = 'for number in range(100_000): globals()[f"name_{number}"] = number'
HEAPS = (
    ("torch, pandas, matplotlib", "", 10.0),
    ("1,000,000 dicts of a list each", _DICTS.format(1_000_000), 10.0),
    ("100,000 names", _NAMES, 40.0),
)

_THEIRS = "from ipyexperiments import IPyExperimentsCPU"
_SMALL = "tensors = [torch.zeros(10) for _ in range(100)]"
_WITH_100 = 15.0
_RECOVERY = 30.0

_METHOD = f"""\
Cells from request to `idle`, in turns with a bare cell of the same code in another kernel that holds the same: median
of the difference over {{repeats}} turns. `start` and `end` are two cells, so are their twins. ipyexperiments does the
same with `with IPyExperimentsCPU():`, or with `exp = IPyExperimentsCPU()` and `exp.finish()`. A recovery is from a
function that raises `MemoryError`: one that follows another recovery, and the first after other cells, which also
collects what garbage there is from before. A try is one of {_TRIES} that fail in one `%%autofit`. Reached: the target,
and {_TIMES} times faster than ipyexperiments where that does the same."""  # noqa: E501

_GROWTH = """
The same beside 0 to 1,000,000 dicts, {repeats} turns each:

![milliseconds added beside heaps of 0 to 1,000,000 dicts](../img/experiment-cost.png)"""


@dataclass(frozen=True)
class _Case:
    """Case to time: our cells, the peer's if it has an equivalent, and the same code alone."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    bare: tuple[str, ...]
    before: str = "pass"
    """A cell before each turn, which is not timed."""
    share: int = 1
    """Number of measured events in the cells, such as the tries of ``%%autofit``."""


_CASES = (
    _Case(
        "an empty experiment",
        ("%%experiment a\npass",),
        ("with IPyExperimentsCPU(): pass",),
        ("pass",),
    ),
    _Case(
        "`start` and `end`",
        ("%experiment start a", "%experiment end"),
        ("exp = IPyExperimentsCPU()", "exp.finish();"),
        ("pass", "pass"),
    ),
    _Case(
        "with 100 small tensors",
        (f"%%experiment a\n{_SMALL}",),
        (f"with IPyExperimentsCPU(): {_SMALL}",),
        (_SMALL,),
    ),
    _Case("a recovery after another", ("fail()",), (), ("fail()",), before="fail()"),
    _Case("the first recovery", ("fail()",), (), ("fail()",)),
    _Case(
        "a failing try",
        (f"%%autofit size={2**_TRIES} --max-tries 20\nif size > 1: raise MemoryError",),
        (),
        ("pass",),
        share=_TRIES,
    ),
)


def run(*, quick: bool) -> Section:
    """Return the milliseconds that an experiment, a recovery and a failing try add to cells."""
    if util.find_spec("torch") is None:
        return Section("Experiments", "", (Row("all", "", "needs torch", NOT_INSTALLED, "", None),))
    repeats = 5 if quick else 7
    rows: list[Row] = []
    for name, heap, target in HEAPS:
        rows += _rows(name, heap, target, repeats)
    method = _METHOD.format(repeats=repeats)
    if not quick:
        _draw(repeats // 2)
        method += "\n" + _GROWTH.format(repeats=repeats // 2)
    return Section("Experiments", method, tuple(rows))


def _rows(name: str, heap: str, target: float, repeats: int) -> list[Row]:
    """Return a row for each case beside one heap, whose target is ``target`` milliseconds."""
    ours = _added_by_us(heap, _CASES, repeats)
    theirs = _added_by_peer(heap, _CASES, repeats)
    rows = []
    for case in _CASES:
        case_target = _target(case, target)
        rows.append(_row(case, name, case_target, ours[case.name], theirs.get(case.name)))
    return rows


def _target(case: _Case, of_heap: float) -> float | None:
    """Return a case's target in milliseconds beside a heap, or None if it has none."""
    if case.name.startswith("the first"):
        return None
    if "recovery" in case.name or "try" in case.name:
        return _RECOVERY
    if "tensors" in case.name:
        return max(of_heap, _WITH_100)
    return of_heap


def _row(case: _Case, heap: str, target: float | None, ours: float, theirs: float | None) -> Row:
    """Return a case's row beside one heap; the times are milliseconds."""
    is_fast_enough = target is None or ours <= target
    # The peer's figure is compared only where we have a target.
    beats_peer = target is None or theirs is None or theirs >= _TIMES * ours
    peer = "has none"
    if theirs is not None:
        peer = f"{theirs:+.1f} ms"
    elif case.theirs and not PEER.installed:
        peer = NOT_INSTALLED
    shown_target = ""
    if target is not None:
        shown_target = f"at most {target:.0f} ms"
    return Row(
        figure=f"{case.name}, beside {heap}: added",
        target=shown_target,
        ours=f"{ours:+.1f} ms",
        peer=peer,
        control="",
        met=is_fast_enough and beats_peer,
        better=lower(ours, theirs),
    )


def _added_by_us(heap: str, cases: Sequence[_Case], repeats: int) -> dict[str, float]:
    """Return the milliseconds that the extension adds to each case, by the case's name."""
    cells = [(case, case.ours) for case in cases]
    return _added_ms(OURS.on, heap, cells, repeats)


def _added_by_peer(heap: str, cases: Sequence[_Case], repeats: int) -> dict[str, float]:
    """Return the milliseconds that the peer adds to each case that it has; none if it is not
    installed.
    """
    if not PEER.installed:
        return {}
    cells = [(case, case.theirs) for case in cases if case.theirs]
    return _added_ms(_THEIRS, heap, cells, repeats)


def _added_ms(
    load: str, heap: str, cases: Sequence[tuple[_Case, tuple[str, ...]]], repeats: int
) -> dict[str, float]:
    """Return the milliseconds that a tool adds to each case (medians), by the case's name.

    Args:
        load: a cell that loads the tool.
        heap: a cell that makes the objects that the notebook holds.
        cases: each case with its cells for the tool.
        repeats: number of measured turns.
    """
    added_ms = {}
    with Kernel() as with_tool, Kernel() as bare:
        for kernel in (with_tool, bare):
            kernel.run(_LIBRARIES)
            kernel.run(heap)
        with_tool.run(load)
        choose = random.Random(0).choice
        for case, cells in cases:
            tool_first = ((with_tool, cells), (bare, case.bare))
            bare_first = ((bare, case.bare), (with_tool, cells))
            added = []
            for turn in range(repeats + 2):
                for kernel in (with_tool, bare):
                    _seconds(kernel, (case.before,))
                seconds = {}
                for kernel, kernel_cells in choose([tool_first, bare_first]):
                    seconds[kernel] = _seconds(kernel, kernel_cells)
                if turn >= 2:  # the first load what they need
                    added.append(seconds[with_tool] - seconds[bare])
            added_ms[case.name] = 1000 * median(added) / case.share
    return added_ms


def _seconds(kernel: Kernel, cells: tuple[str, ...]) -> float:
    """Return the seconds that cells take together."""
    return sum(_seconds_of(kernel, cell) for cell in cells)


def _seconds_of(kernel: Kernel, cell: str) -> float:
    """Return a cell's seconds; a ``MemoryError`` of the cell is expected."""
    try:
        return kernel.run(cell).seconds
    except CellError as error:
        if "MemoryError" not in str(error) or error.seconds is None:
            raise
        return error.seconds


def _draw(repeats: int) -> None:
    """Draw how the milliseconds that we and the peer add grow with the heap."""
    cases = _CASES[:4]
    sizes = (0, 500_000, 1_000_000)
    heaps = [_DICTS.format(size) for size in sizes]
    ours = [_added_by_us(heap, cases, repeats) for heap in heaps]
    theirs = [_added_by_peer(heap, cases, repeats) for heap in heaps]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        axes = figure.subplots()
        millions = [size / 1e6 for size in sizes]
        for case, color in zip(cases, ("#1f77b4", "#2ca02c", "#9467bd", "#d62728"), strict=True):
            title = case.name.replace("`", "")
            our_line = [added_ms[case.name] for added_ms in ours]
            axes.plot(millions, our_line, "o-", color=color, label=f"{OURS.name}: {title}")
            if PEER.installed and case.theirs:
                peer_line = [added_ms[case.name] for added_ms in theirs]
                peer_label = f"{PEER.name}: {title}"
                axes.plot(millions, peer_line, "o--", color=color, alpha=0.6, label=peer_label)
        _describe(axes, millions)
        figure.savefig(_PICTURE, dpi=120)


def _describe(axes: Axes, millions: Sequence[float]) -> None:
    """Set the scales, the titles and the legend of the picture."""
    axes.set(yscale="log", ylabel="ms added", xticks=millions)
    axes.set_xlabel(
        "million dicts of a list each that the notebook holds, beside torch, pandas and matplotlib"
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend(loc="center", bbox_to_anchor=(0.5, 0.58), ncols=2, frameon=False)
