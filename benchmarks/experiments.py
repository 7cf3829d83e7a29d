"""Cost of an experiment, a recovery and a failing try, by the notebook's memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from statistics import median

import matplotlib as mpl
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
    """Return the milliseconds that each adds to its cells."""
    if util.find_spec("torch") is None:
        return Section("Experiments", "", (Row("all", "", "needs torch", NOT_INSTALLED, "", None),))
    repeats = 5 if quick else 7
    rows = [row for name, heap, target in HEAPS for row in _rows(name, heap, target, repeats)]
    if not quick:
        _draw(repeats // 2)
    return Section(
        "Experiments",
        _METHOD.format(repeats=repeats)
        + ("" if quick else "\n" + _GROWTH.format(repeats=repeats // 2)),
        tuple(rows),
    )


def _rows(name: str, heap: str, target: float, repeats: int) -> list[Row]:
    ours = _added_ms(OURS.on, heap, [(case, case.ours) for case in _CASES], repeats)
    theirs = (
        _added_ms(_THEIRS, heap, [(case, case.theirs) for case in _CASES if case.theirs], repeats)
        if PEER.installed
        else {}
    )
    return [
        _row(case, name, _target(case, target), ours[case.name], theirs.get(case.name))
        for case in _CASES
    ]


def _target(case: _Case, of_heap: float) -> float | None:
    if "recovery" in case.name or "try" in case.name:
        return None if case.name.startswith("the first") else _RECOVERY
    return max(of_heap, _WITH_100) if "tensors" in case.name else of_heap


def _row(case: _Case, heap: str, target: float | None, ours: float, theirs: float | None) -> Row:
    met = target is None or (ours <= target and (theirs is None or theirs >= _TIMES * ours))
    has_one = (
        f"{theirs:+.1f} ms"
        if theirs is not None
        else NOT_INSTALLED
        if not PEER.installed
        else "has none"
    )
    return Row(
        figure=f"{case.name}, beside {heap}: added",
        target="" if target is None else f"at most {target:.0f} ms",
        ours=f"{ours:+.1f} ms",
        peer=has_one if case.theirs else "has none",
        control="",
        met=met,
        better=lower(ours, theirs),
    )


def _added_ms(
    load: str, heap: str, cases: Sequence[tuple[_Case, tuple[str, ...]]], repeats: int
) -> dict[str, float]:
    """Return the time that a tool adds to the cells of each case (medians)."""
    choose = random.Random(0).choice
    found: dict[str, float] = {}
    with Kernel() as having, Kernel() as without:
        for kernel in (having, without):
            kernel.run(_LIBRARIES)
            kernel.run(heap)
        having.run(load)
        for case, cells in cases:
            added = []
            for turn in range(repeats + 2):
                for kernel in (having, without):
                    _seconds(kernel, (case.before,))
                pairs = choose(
                    [
                        ((having, cells), (without, case.bare)),
                        ((without, case.bare), (having, cells)),
                    ]
                )
                seconds = {id(kernel): _seconds(kernel, todo) for kernel, todo in pairs}
                if turn >= 2:  # the first load what they need
                    added.append(seconds[id(having)] - seconds[id(without)])
            found[case.name] = 1000 * median(added) / case.share
    return found


def _seconds(kernel: Kernel, cells: tuple[str, ...]) -> float:
    """Return the durations of cells; an error that a case is about does not fail it."""
    return sum(_seconds_of(kernel, cell) for cell in cells)


def _seconds_of(kernel: Kernel, cell: str) -> float:
    try:
        return kernel.run(cell).seconds
    except CellError as error:
        if "MemoryError" not in str(error) or error.seconds is None:
            raise
        return error.seconds


def _draw(repeats: int) -> None:
    """Draw how ours and the peer grow with the heap."""
    cases = _CASES[:4]
    sizes = (0, 500_000, 1_000_000)
    ours = [
        _added_ms(OURS.on, _DICTS.format(size), [(case, case.ours) for case in cases], repeats)
        for size in sizes
    ]
    theirs = []
    if PEER.installed:
        of_peer = [(case, case.theirs) for case in cases if case.theirs]
        theirs = [_added_ms(_THEIRS, _DICTS.format(size), of_peer, repeats) for size in sizes]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        axes = figure.subplots()
        millions = [size / 1e6 for size in sizes]
        for case, color in zip(cases, ("#1f77b4", "#2ca02c", "#9467bd", "#d62728"), strict=True):
            name = case.name.replace("`", "")
            axes.plot(
                millions,
                [found[case.name] for found in ours],
                "o-",
                color=color,
                label=f"{OURS.name}: {name}",
            )
            if theirs and case.theirs:
                line = [found[case.name] for found in theirs]
                axes.plot(
                    millions, line, "o--", color=color, alpha=0.6, label=f"{PEER.name}: {name}"
                )
        axes.set(yscale="log", ylabel="ms added", xticks=millions)
        axes.set_xlabel(
            "million dicts of a list each that the notebook holds, beside torch, pandas and "
            "matplotlib"
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.legend(loc="center", bbox_to_anchor=(0.5, 0.58), ncols=2, frameon=False)
        figure.savefig(_PICTURE, dpi=120)
