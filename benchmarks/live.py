"""What the live line costs while a cell runs for long: CPU time, and time taken from the user's code."""

from __future__ import annotations

from statistics import median

from benchmarks.kernel import Kernel
from benchmarks.report import Row, Section
from benchmarks.tools import OURS

_TARGET = 0.005
_METHOD = """\
Cells of a client that can show the line. CPU: time of the whole process during `time.sleep({sleep:g})`, with the line
and without, {pairs} pairs in turn; the median of the differences for each second of the cell. Times longer: a fixed
amount of work of about {work:g} s, {pairs} pairs in turn, median (least to most) of the CPU time that it takes its
thread with the line / without; control: without / without."""

_SETUP = """
import sys, time
def pure_python(count):
    total = 0
    for number in range(count):
        total += number * number % 7
def torch_steps(count):
    import torch
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = torch.nn.Linear(256, 256), torch.ones(64, 256)
    for _ in range(count):
        model(batch).sum().backward()
def timed(work, count):
    started = time.thread_time()
    work(count)
    return time.thread_time() - started
"""

_WORKS = (("pure_python", "a pure-Python loop"), ("torch_steps", "small steps of torch"))


def run(*, quick: bool) -> Section:
    """Return what the line costs per second of a cell, and how many times longer cells take with it."""
    sleep, work, pairs = (3.0, 2.5, 3) if quick else (6.0, 3.0, 5)
    with Kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run(OURS.on)
        rows = [_cpu_row(kernel, sleep, pairs), *(_work_row(kernel, *named, work, pairs) for named in _WORKS)]
    return Section("The live line", _METHOD.format(sleep=sleep, work=work, pairs=pairs), tuple(rows), control="control")


def _switch(kernel: Kernel, *, on: bool) -> None:
    kernel.run(f"%config IPyGpuMem.live = {on}")


def _cpu_row(kernel: Kernel, sleep: float, pairs: int) -> Row:
    code = f"_first = time.process_time(); time.sleep({sleep}); _used = time.process_time() - _first"
    used: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(pairs):
        for on in (True, False):
            _switch(kernel, on=on)
            kernel.run(code, watched=True)
            used[on].append(float(kernel.ask("_used")))
    added = median(one - other for one, other in zip(used[True], used[False], strict=True)) / sleep
    return Row(
        figure="CPU time for each second of a sleeping cell",
        target=f"under {_TARGET:.1%}",
        ours=f"{added:.3%}",
        peer="",
        control=f"{median(used[False]) / sleep:.3%}",
        met=added < _TARGET,
    )


def _work_row(kernel: Kernel, work: str, title: str, seconds: float, pairs: int) -> Row:
    count = 64
    while (took := float(kernel.ask(f"timed({work}, {count})"))) < seconds / 10:
        count *= 2
    code = f"_used = timed({work}, {round(count * seconds / took)})"
    ratios, controls = [], []
    for _ in range(pairs):
        times = []
        for on in (False, True, False):
            _switch(kernel, on=on)
            kernel.run(code, watched=True)
            times.append(float(kernel.ask("_used")))
        ratios.append(2 * times[1] / (times[0] + times[2]))
        controls.append(times[2] / times[0])
    noise = median(abs(ratio - 1) for ratio in controls)
    return Row(
        figure=f"{title}: times longer",
        target=f"at most {1 + _TARGET}",
        ours=_spread(ratios),
        peer="",
        control=_spread(controls),
        met=median(ratios) <= 1 + _TARGET if noise <= _TARGET else None,
    )


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
