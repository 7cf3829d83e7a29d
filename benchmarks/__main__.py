"""``python -m benchmarks``: print every figure; a full run writes docs/measured/benchmarks.md.

Estimates at real size take longer than all else: ``--estimates`` runs them alone and writes
docs/measured/estimates.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    batches_cuda,
    environment,
    estimates_cuda,
    estimating,
    exactness,
    experiments,
    explaining,
    history,
    lines,
    loading,
    looks,
    profilers,
    rendering,
    scale,
    slowdown,
    traces,
    trivial,
)
from benchmarks.report import Section, render
from benchmarks.tools import OURS, PEER

_PAGE = Path(__file__).parent.parent / "docs" / "measured" / "benchmarks.md"

_BENCHMARKS = {
    "trivial": trivial.run,
    "slowdown": slowdown.run,
    "experiments": experiments.run,
    "sleep": slowdown.run_sleep,
    "lines": lines.run,
    "peaks": exactness.run_peaks,
    "kept": exactness.run_kept,
    "profilers": profilers.run,
    "traces": traces.run,
    "loading": loading.run,
    "explaining": explaining.run,
    "looks": looks.run,
    "rendering": rendering.run,
    "estimates": estimating.run,
    "history": history.run,
    "scale": scale.run,
}

_ESTIMATES = {"real-size": estimates_cuda.run, "batches": batches_cuda.run}

_HEAD = """\
# Benchmarks

Written by `make bench` (`python -m benchmarks`): figures seen in one run on one machine, in real kernels, next to
{peer} in the same run. They are not tests: nothing fails when one of them is missed. "Beats the peer" compares the two
figures of this run, and is empty where there is one, or where both are exact. The whole took {minutes} minutes.
[Estimates at real size](estimates.md) have a run of their own.
"""  # noqa: E501


def main() -> None:
    """Run the benchmarks that the command line asks for."""
    options = _options()
    runs_estimates = options.only in _ESTIMATES if options.only else options.estimates
    names = list(_ESTIMATES if runs_estimates else _BENCHMARKS)
    if options.only:
        names = [options.only]
    if runs_estimates:
        _run_estimates(names, quick=options.quick)
        return
    page = _page(names, quick=options.quick)
    if not options.only and not options.quick:
        _PAGE.write_text(page, encoding="utf-8")
        print(f"written: {_PAGE.relative_to(_PAGE.parent.parent.parent)}", file=sys.stderr)


def _page(names: list[str], *, quick: bool) -> str:
    """Run and print benchmarks; return the page of their figures."""
    started = time.perf_counter()
    load = os.getloadavg()[0]
    facts = [*environment.describe(), f"Load average before the run: {load:.2f}"]
    fact_lines = [f"- {fact}" for fact in facts]
    sections = [_timed(name, _BENCHMARKS[name], quick=quick) for name in names]
    minutes = (time.perf_counter() - started) / 60
    print(f"{minutes:.1f} min", file=sys.stderr)
    head = _HEAD.format(peer=PEER.title, minutes=f"{minutes:.1f}")
    return "\n".join([head, *fact_lines, "", *sections])


def _run_estimates(names: list[str], *, quick: bool) -> None:
    """Run the estimates at real size; ``real-size`` writes their page, and a full run adds the
    section of ``batches`` to it.
    """
    for name in names:
        text = _timed(name, _ESTIMATES[name], quick=quick)
        if name == "batches" and not quick and len(names) > 1:
            page = estimates_cuda.PAGE.read_text(encoding="utf-8")
            estimates_cuda.PAGE.write_text(f"{page}\n{text}", encoding="utf-8")


def _timed(name: str, run: Callable[..., Section], *, quick: bool) -> str:
    """Run and print a benchmark; return its section as Markdown."""
    started = time.perf_counter()
    cpu_started = _cpu_seconds()
    text = render(run(quick=quick), OURS.name, PEER.title)
    print(text, flush=True)
    seconds = time.perf_counter() - started
    cpu_seconds = _cpu_seconds() - cpu_started
    print(f"{name}: {seconds:.0f} s, {cpu_seconds:.0f} s of CPU", file=sys.stderr, flush=True)
    return text


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=[*_BENCHMARKS, *_ESTIMATES], help="run one benchmark")
    parser.add_argument(
        "--estimates", action="store_true", help="run the estimates at real size, and no others"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter runs, write nothing"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
