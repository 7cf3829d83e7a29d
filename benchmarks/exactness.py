"""Measures the errors of the reported sizes of short peaks, and of the memory that a cell keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from benchmarks.kernel import Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section
from benchmarks.tools import OURS, PEER, Tool, installed_tools

_MIB = 2**20
_SIZES_MIB = (64, 512)
_LIVES_MS = (0, 1, 5, 20, 100)
_PEAK_TOLERANCE = 0.02
_KEPT_MIB = 256
_KEPT_TOLERANCE = 0.01

_SETUP = """
import time, numpy
size = {size}
def numpy_ones(milliseconds):
    block = numpy.ones(size, numpy.uint8)
    if milliseconds:
        time.sleep(milliseconds / 1000)
def touched_bytearray(milliseconds):
    block = bytearray(size)
    if milliseconds:
        time.sleep(milliseconds / 1000)
"""

_ONE_CALL = ("len(b'x' * size)", "len(bytearray(size))", "hash(b'x' * size)")

_METHOD = """\
Cells that allocate and touch a block, hold it for a time and drop it, {repeats} of each: how many reported peaks lie
within 2 % of the size, and the worst error. `one call`: the block lives and dies inside C code that holds the GIL."""  # noqa: E501

_KEPT_METHOD = """\
A cell `kept = numpy.ones(256 MiB)`, {repeats} times (deleted between): what the tool reports as kept, against the size.
Shown are the median of the reports and the worst error."""  # noqa: E501


def run_peaks(*, quick: bool) -> Section:
    """Return the number of short peaks that each tool catches."""
    repeats = 1 if quick else 3
    rows = []
    with ExitStack() as stack:
        kernels = _kernels(stack)
        for size in _SIZES_MIB:
            for kernel in kernels.values():
                kernel.run(_SETUP.format(size=size * _MIB))
            for life in _LIVES_MS:
                cells = (f"numpy_ones({life})", f"touched_bytearray({life})")
                title = f"{size} MiB for {life} ms (`numpy.ones`, `bytearray`)"
                rows.append(_peak_row(kernels, title, cells, size * _MIB, repeats))
            for cell in _ONE_CALL:
                title = f"{size} MiB in one call: `{cell}`"
                rows.append(_peak_row(kernels, title, (cell,), size * _MIB, repeats))
    return Section("Short peaks", _METHOD.format(repeats=repeats), tuple(rows), control="")


def _kernels(stack: ExitStack) -> dict[str, Kernel]:
    """Return a kernel for each tool, with the tool on."""
    kernels = {}
    for tool in installed_tools():
        kernel = stack.enter_context(Kernel())
        kernel.run("import numpy")
        kernel.run(tool.on)
        kernels[tool.name] = kernel
    return kernels


def _peak_row(
    kernels: dict[str, Kernel], title: str, cells: tuple[str, ...], size: int, repeats: int
) -> Row:
    """Run cells with each tool; return the row of the reported peaks' errors."""
    errors: dict[str, list[float]] = {}
    for tool in installed_tools():
        errors[tool.name] = []
        for cell in cells:
            for _ in range(repeats):
                errors[tool.name].append(_error(kernels[tool.name], cell, tool, size))
    better = _has_more_exact(errors, _PEAK_TOLERANCE)
    met = max(errors[OURS.name]) <= _PEAK_TOLERANCE
    return _row(title, "all within 2 %", errors, _caught, met=met, better=better)


def _error(kernel: Kernel, cell: str, tool: Tool, size: int) -> float:
    """Run a cell; return the difference of the reported peak from ``size``, as a share of it."""
    kernel.run(cell)
    return abs(float(kernel.ask(tool.peak)) - size) / size


def _caught(errors: list[float]) -> str:
    """Return the number of exact peaks, and the worst error."""
    caught = sum(error <= _PEAK_TOLERANCE for error in errors)
    return f"{caught}/{len(errors)}, worst {max(errors):.2%}"


def run_kept(*, quick: bool) -> Section:
    """Return each tool's exactness for memory that a cell keeps."""
    repeats = 2 if quick else 10
    size = _KEPT_MIB * _MIB
    reported: dict[str, list[float]] = {}
    with ExitStack() as stack:
        kernels = _kernels(stack)
        for tool in installed_tools():
            kernel = kernels[tool.name]
            reported[tool.name] = [_reported_size(kernel, tool, size) for _ in range(repeats)]

    def show(sizes: list[float]) -> str:
        return f"{median(sizes) / _MIB:.2f} MiB, worst {max(_errors(sizes, size)):.3%}"

    errors = {name: _errors(sizes, size) for name, sizes in reported.items()}
    met = max(errors[OURS.name]) <= _KEPT_TOLERANCE
    better = _has_more_exact(errors, _KEPT_TOLERANCE)
    row = _row(f"{_KEPT_MIB} MiB kept", "within 1 %", reported, show, met=met, better=better)
    return Section("What a cell keeps", _KEPT_METHOD.format(repeats=repeats), (row,), control="")


def _reported_size(kernel: Kernel, tool: Tool, size: int) -> float:
    """Run a cell that keeps ``size`` bytes; return the bytes that the tool reports as kept."""
    kernel.run(f"kept = numpy.ones({size}, numpy.uint8)")
    reported = float(kernel.ask(tool.kept))
    kernel.run("del kept")
    return reported


def _errors(sizes: list[float], true_size: int) -> list[float]:
    """Return the differences of sizes from the true one, as shares of it."""
    return [abs(size - true_size) / true_size for size in sizes]


def _has_more_exact(errors: dict[str, list[float]], tolerance: float) -> bool | None:
    """Return True if more of our figures than of the peer's lie within the tolerance; None if as
    many.

    Args:
        errors: each tool's errors, by its name.
        tolerance: the largest error of an exact figure.
    """
    if PEER.name not in errors:
        return None
    ours = sum(error <= tolerance for error in errors[OURS.name])
    theirs = sum(error <= tolerance for error in errors[PEER.name])
    if ours == theirs:
        return None
    return ours > theirs


def _row(
    figure: str,
    target: str,
    values: dict[str, list[float]],
    show: Callable[[list[float]], str],
    *,
    met: bool,
    better: bool | None,
) -> Row:
    peer = NOT_INSTALLED
    if PEER.name in values:
        peer = show(values[PEER.name])
    return Row(figure, target, show(values[OURS.name]), peer, control="", met=met, better=better)
