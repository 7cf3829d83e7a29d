"""Compares our peaks and CPU times with those of memory profilers that a notebook's cell can use.

The profilers are memray, filprofiler and memory-profiler, whose magics run the cell.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata, util
from statistics import median
from typing import NamedTuple

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
        """The name, with the version if it is installed."""
        if not util.find_spec(self.package):
            return self.name
        return f"{self.name} {metadata.version(self.name)}"


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
                for title, cell in _PEAKS:
                    rows.append(_peak_row(ours, theirs, profiler, title, cell, repeats))
                for title, cell in _WORKS:
                    kernels = _Kernels(bare, ours, theirs)
                    rows.append(_cpu_row(kernels, profiler, title, cell, repeats))
    return Section(
        "Other profilers",
        _METHOD.format(repeats=repeats),
        tuple(rows),
        control="bare kernel",
        peer="other",
    )


def _load(kernel: Kernel, profiler: _Profiler) -> None:
    """Switch a profiler on, and run a cell with it once."""
    kernel.run(_SETUP.format(size=_SIZE) + _INCREMENT)
    kernel.run(profiler.load)
    kernel.run(f"{profiler.before_cell}numpy_ones()")  # the first one imports what it needs


def _peak_row(
    ours: Kernel, theirs: Kernel, profiler: _Profiler, title: str, cell: str, repeats: int
) -> Row:
    our_peaks = _peaks(ours, _OURS, cell, repeats)
    their_peaks = _peaks(theirs, profiler, cell, repeats)
    our_error = _worst_error(our_peaks)
    is_met = our_error <= _TOLERANCE
    return Row(
        f"{profiler.title}: peak of 64 MiB, {title}",
        f"within {_TOLERANCE:.0%}",
        _shown(our_peaks),
        _shown(their_peaks),
        "",
        is_met,
        _is_better(our_error, their_peaks),
    )


def _is_better(our_error: float, their_peaks: list[float]) -> bool | None:
    """Return True if our worst error is lower; None if both are within the tolerance."""
    if not their_peaks:
        return True
    their_error = _worst_error(their_peaks)
    # Within the tolerance, the rest is what counts as the cell's: frames, or the allocator's own
    # bytes.
    if their_error > _TOLERANCE and our_error < their_error:
        return True
    if our_error <= _TOLERANCE:
        return None
    return False


def _peaks(kernel: Kernel, profiler: _Profiler, cell: str, repeats: int) -> list[float]:
    """Return the peaks in bytes that a profiler reports for a cell; none if it shows none."""
    peaks = []
    for _ in range(repeats):
        kernel.run(profiler.before_cell + cell)
        try:
            peaks.append(float(kernel.ask(profiler.peak)))
        except CellError:  # it shows none
            return []
    return peaks


def _worst_error(peaks: list[float]) -> float:
    """Return the largest difference from the true peak, as a share of it."""
    return max(abs(peak - _SIZE) / _SIZE for peak in peaks)


def _shown(peaks: list[float]) -> str:
    """Return the median of peaks and the worst error."""
    if not peaks:
        return "no peak"
    return f"{median(peaks) / _MIB:.1f} MiB, worst {_worst_error(peaks):.2%}"


class _Kernels(NamedTuple):
    """A kernel without a tool, ours, and one with another profiler."""

    bare: Kernel
    ours: Kernel
    theirs: Kernel


def _cpu_row(kernels: _Kernels, profiler: _Profiler, title: str, cell: str, repeats: int) -> Row:
    """Run a cell in each kernel in turns; return the row of the CPU times."""
    bare_times = []
    our_times = []
    their_times = []
    for _ in range(repeats):
        bare_times.append(_cpu_seconds(kernels.bare, cell))
        our_times.append(_cpu_seconds(kernels.ours, cell))
        their_times.append(_cpu_seconds(kernels.theirs, profiler.before_cell + cell))
    bare = median(bare_times)
    ours = median(our_times)
    theirs = median(their_times)
    return Row(
        figure=f"{profiler.title}: CPU, {title}",
        target=f"at most {_MOST_TIMES:g} times",
        ours=f"{ours / bare:.2f} times",
        peer=f"{theirs / bare:.2f} times",
        control=f"{bare:.2f} s",
        met=ours / bare <= _MOST_TIMES,
        better=lower(ours, theirs),
    )


def _cpu_seconds(kernel: Kernel, cell: str) -> float:
    """Return the CPU seconds of a kernel and its children around a cell."""
    before = float(kernel.ask("sum(os.times()[:4])"))
    kernel.run(cell)
    return float(kernel.ask("sum(os.times()[:4])")) - before
