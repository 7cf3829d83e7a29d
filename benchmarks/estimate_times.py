"""Measures the CPU seconds of an estimate of a public model's step.

It writes ``docs/measured/estimate-times.md``. Run it with the simulated card's Python and the
packages of `make bench-estimates`:

    build/simgpu/python -m benchmarks.estimate_times
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ipygpumem
from benchmarks import cuda_figures, environment
from benchmarks.cuda_steps import STEPS
from benchmarks.report import table

_PAGE = Path(__file__).parent.parent / "docs" / "measured" / "estimate-times.md"
_HEAD = """\
# CPU time of estimates

Written by `python -m benchmarks.estimate_times`.

{where}

Two steps of each model of [estimates.md](estimates.md), estimated where a
[simulated card](../../tests/simulated_gpu/README.md) is visible: seconds of CPU that the first estimate of a process
takes, after torch and the models' libraries are imported and the model is made. The steps run one after the other; the
machine was shared with other work, which lengthens CPU time, too: a loop of three million additions took between
{least_loop:.2f} and {most_loop:.2f} s next to the estimates.

{median:.1f} s in the median of {count} steps, {least:.1f} to {most:.1f} s. Steps without a row were not measured.

"""  # noqa: E501
_LOOP = 3_000_000


def _loop_seconds() -> float:
    """Return the CPU seconds of a fixed loop, which show how busy the machine is."""
    began = time.process_time()
    total = 0
    for number in range(_LOOP):
        total += number
    return time.process_time() - began


def _measured(name: str) -> dict[str, Any]:
    """Return the CPU seconds of an estimate (``seconds``), and of the loop before it (``loop``)."""
    step = cuda_figures._build(name)
    gc.collect()
    loop_seconds = _loop_seconds()
    began = time.process_time()
    ipygpumem.estimate(step)
    return {"seconds": time.process_time() - began, "loop": loop_seconds}


def _row(name: str, figures: dict[str, Any]) -> tuple[str, str]:
    if "seconds" not in figures:
        return name, "fails"
    return name, f"{figures['seconds']:.1f} s"


def page(figures_by_step: dict[str, dict[str, Any]]) -> str:
    """Return the page of the steps measured so far, of which at least one did not fail."""
    measured = [figures for figures in figures_by_step.values() if "seconds" in figures]
    seconds = [figures["seconds"] for figures in measured]
    loops = [figures["loop"] for figures in measured]
    head = _HEAD.format(
        where=environment.describe_as_list(),
        least_loop=min(loops),
        most_loop=max(loops),
        median=median(seconds),
        least=min(seconds),
        most=max(seconds),
        count=len(seconds),
    )
    rows = [_row(name, figures) for name, figures in figures_by_step.items()]
    return f"{head}{table(('step', 'CPU time'), rows)}\n"


def main() -> None:
    """Measure each step in a process of its own, and write the page after each."""
    logging.disable(logging.WARNING)
    figures_by_step: dict[str, dict[str, Any]] = {}
    for name in STEPS:
        work: Callable[[], dict[str, Any]] = partial(_measured, name)
        figures = cuda_figures._apart(work)
        print(name, figures, file=sys.stderr, flush=True)
        figures_by_step[name] = figures
        _PAGE.write_text(page(figures_by_step), encoding="utf-8")


if __name__ == "__main__":
    main()
