"""Peaks and CPU time next to memory profilers that are used from a notebook's cell."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata, util
from statistics import median

from benchmarks.kernel import CellError, Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section, lower
from benchmarks.tools import OURS

_MIB = 2**20
_SIZE = 64 * _MIB
_TOLERANCE = 0.02
_MOST_TIMES = 1.1

_SETUP = """
import gc, glob, os, re, time, numpy
class Node:
    def __init__(self): self.held = [self]
def arithmetic():
    total = 0
    for number in range(12_000_000):
        total += number * number % 7
def small_objects():
    for _ in range(10):
        nodes = [Node() for _ in range(100_000)]
def arrays():
    for _ in range(20_000):
        block = numpy.ones(100_000, numpy.uint8)
        block.sum()
def numpy_ones():
    block = numpy.ones({size}, numpy.uint8)
def newest(pattern):
    with open(max(glob.glob(pattern), key=os.path.getmtime), encoding="utf-8") as file:
        return file.read()
"""
_PEAKS = (
    ("`numpy.ones`, dropped at once", "numpy_ones()"),
    ("in one call: `len(b'x' * size)`", f"len(b'x' * {_SIZE})"),
)
_WORKS = (
    ("pure Python without objects", "arithmetic()"),
    ("100,000 small objects in cycles, 10 times", "small_objects()"),
    ("20,000 arrays of 100 kB", "arrays()"),
)


@dataclass(frozen=True)
class _Profiler:
    """One way of profiling a cell. The expression gives the last cell's peak in bytes, beyond its
    start.
    """

    name: str
    package: str
    load: str
    before_cell: str
    peak: str
    wrapper: tuple[str, ...] = ()
    """The command that starts the kernel, before the interpreter."""

    @property
    def title(self) -> str:
        return (
            f"{self.name} {metadata.version(self.name)}"
            if util.find_spec(self.package)
            else self.name
        )


_OURS = _Profiler(OURS.name, OURS.package, OURS.on, "", OURS.peak)
_PROFILERS = (
    _Profiler(
        "memray",
        "memray",
        "%load_ext memray",
        "%%memray_flamegraph\n",
        "float(re.search(r'Peak memory usage: ([\\d.]+) MB', "
        "newest('memray-results/*/flamegraph.html'))[1]) * 1e6",
    ),
    _Profiler(
        "filprofiler",
        "filprofiler",
        "%load_ext filprofiler",
        "%%filprofile\n",
        "float(re.search(r'Usage \\(([\\d.]+) MiB\\)', newest('fil-result/*/peak-memory.svg'))[1]) "
        "* 2**20",
        wrapper=("fil-profile",),
    ),
    _Profiler(
        "memory-profiler",
        "memory_profiler",
        "%load_ext memory_profiler",
        "%%memit -o\n",
        "_increment()",
    ),
)
_INCREMENT = """
def _increment():
    return (max(_.mem_usage) - _.baseline) * 2**20
"""

_METHOD = """\
Peaks: a cell that allocates and touches 64 MiB and drops them, {repeats} times: the median of the peaks that the tool
reports, and the worst error. CPU: the kernel process and its children, around a whole cell with its report, times that
in a bare kernel; the kernels take turns, median of {repeats}. memray: `%%memray_flamegraph`; filprofiler:
`%%filprofile` in a kernel that `fil-profile` has started, which follows each allocation outside such cells, too;
memory-profiler: `%%memit`, whose figure is its "increment". Theirs say more than ours: memray and filprofiler draw
which lines allocated the peak. scalene is not compared: its magic shows no memory in a kernel."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the peaks and the CPU time of each profiler, next to ours."""
    repeats = 1 if quick else 3
    rows: list[Row] = []
    with ExitStack() as stack:
        bare = stack.enter_context(Kernel())
        ours = stack.enter_context(Kernel())
        bare.run(_SETUP.format(size=_SIZE))
        _load(ours, _OURS)
        for profiler in _PROFILERS:
            if not util.find_spec(profiler.package):
                rows.append(Row(profiler.name, "", "", NOT_INSTALLED, "", None))
                continue
            with Kernel(wrapper=profiler.wrapper) as theirs:
                _load(theirs, profiler)
                rows += [_peak_row(ours, theirs, profiler, *peak, repeats) for peak in _PEAKS]
                rows += [
                    _cpu_row((bare, ours, theirs), profiler, *work, repeats) for work in _WORKS
                ]
    return Section(
        "Other profilers",
        _METHOD.format(repeats=repeats),
        tuple(rows),
        control="bare kernel",
        peer="other",
    )


def _load(kernel: Kernel, profiler: _Profiler) -> None:
    kernel.run(_SETUP.format(size=_SIZE) + _INCREMENT)
    kernel.run(profiler.load)
    kernel.run(f"{profiler.before_cell}numpy_ones()")  # the first one imports what it needs


def _peak_row(
    ours: Kernel, theirs: Kernel, profiler: _Profiler, title: str, cell: str, repeats: int
) -> Row:
    found = [_peaks(ours, _OURS, cell, repeats), _peaks(theirs, profiler, cell, repeats)]
    worst = [max(abs(peak - _SIZE) / _SIZE for peak in peaks) if peaks else None for peaks in found]
    shown = [
        "no peak" if off is None else f"{median(peaks) / _MIB:.1f} MiB, worst {off:.2%}"
        for peaks, off in zip(found, worst, strict=True)
    ]
    mine = worst[0]
    assert mine is not None
    # Within the tolerance, the rest is what counts as the cell's: frames, or the allocator's own
    # bytes.
    better = worst[1] is None or (worst[1] > _TOLERANCE and mine < worst[1])
    is_even = mine <= _TOLERANCE and not better
    target = f"within {_TOLERANCE:.0%}"
    figure = f"{profiler.title}: peak of 64 MiB, {title}"
    return Row(
        figure, target, shown[0], shown[1], "", mine <= _TOLERANCE, None if is_even else better
    )


def _peaks(kernel: Kernel, profiler: _Profiler, cell: str, repeats: int) -> list[float]:
    peaks = []
    for _ in range(repeats):
        kernel.run(profiler.before_cell + cell)
        try:
            peaks.append(float(kernel.ask(profiler.peak)))
        except CellError:  # it shows none
            return []
    return peaks


def _cpu_row(
    kernels: Sequence[Kernel], profiler: _Profiler, title: str, cell: str, repeats: int
) -> Row:
    cells = (cell, cell, profiler.before_cell + cell)
    times: list[list[float]] = [[] for _ in kernels]
    for _ in range(repeats):
        for seconds, kernel, code in zip(times, kernels, cells, strict=True):
            seconds.append(_cpu(lambda kernel=kernel, code=code: kernel.run(code), kernel))  # type: ignore[misc]
    bare, ours, theirs = map(median, times)
    return Row(
        figure=f"{profiler.title}: CPU, {title}",
        target=f"at most {_MOST_TIMES:g} times",
        ours=f"{ours / bare:.2f} times",
        peer=f"{theirs / bare:.2f} times",
        control=f"{bare:.2f} s",
        met=ours / bare <= _MOST_TIMES,
        better=lower(ours, theirs),
    )


def _cpu(work: Callable[[], object], kernel: Kernel) -> float:
    before = float(kernel.ask("sum(os.times()[:4])"))
    work()
    return float(kernel.ask("sum(os.times()[:4])")) - before
