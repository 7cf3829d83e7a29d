"""``python -m benchmarks``: print every figure, and write docs/measured/benchmarks.md after a full run."""

from __future__ import annotations

import argparse
import os
import sys
import time
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
    "traces": traces.run,
    "loading": loading.run,
    "explaining": explaining.run,
    "rendering": rendering.run,
    "estimates": estimating.run,
    "real-size": estimates_cuda.run,
    "batches": batches_cuda.run,
    "history": history.run,
    "scale": scale.run,
}

_HEAD = """\
# Benchmarks

Written by `make bench` (`python -m benchmarks`): figures seen in one run on one machine, in real kernels, next to
{peer} in the same run. They are not tests: nothing fails when one of them is missed.
"""


def main() -> None:
    """Run the benchmarks that the command line asks for."""
    options = _options()
    names = [options.only] if options.only else list(_BENCHMARKS)
    started, load = time.perf_counter(), os.getloadavg()[0]
    lines = [*environment.describe(), f"Load average before the run: {load:.2f}"]
    page = [_HEAD.format(peer=PEER.title), *(f"- {line}" for line in lines), ""]
    print("\n".join(page))
    for name in names:
        text = _section(_BENCHMARKS[name](quick=options.quick))
        print(text, flush=True)
        page.append(text)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    if not options.only and not options.quick:
        _PAGE.write_text("\n".join(page), encoding="utf-8")
        print(f"written: {_PAGE.relative_to(_PAGE.parent.parent.parent)}", file=sys.stderr)


def _section(section: Section) -> str:
    return render(section, OURS.name, PEER.title)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=_BENCHMARKS, help="run one benchmark; only real-size writes its page")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
