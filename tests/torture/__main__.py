"""``python -m tests.torture``: run every scenario on every Python found here, print the table, write docs/leaks.md.

    python -m tests.torture [--python X.Y] [--only NAME] [--fresh]

The exit code is 0 only if every figure of ours is met.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from tests.matrix.run import Python
from tests.torture.catalogue import SCENARIOS
from tests.torture.environments import ROOT, chosen_pythons, interpreter_for
from tests.torture.page import PAGE, Run, page, text_table
from tests.torture.runner import OURS, WAYS, Result, run_all
from tests.torture.scenario import Scenario

_PACKAGES = ("ipython", "ipykernel", "numpy", "torch", "matplotlib", "pandas", "ipyexperiments")
_AT_ONCE = 2


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    options = _options()
    scenarios = [scenario for scenario in SCENARIOS if (options.only or "") in scenario.name]
    if not scenarios:
        sys.exit(f"no scenario's name contains {options.only!r}")
    if options.here:
        Path(options.here).write_text(json.dumps(_run_here(scenarios, fresh=options.fresh)))
        return 0
    pythons = chosen_pythons(options.python)
    print("Pythons:", ", ".join(python.name for python in pythons), flush=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = list(pool.map(lambda python: _run_with(python, options), pythons))
    for run in runs:
        print(f"\nPython {run.python}\n{text_table(run, scenarios)}")
    print()
    for run in runs:
        print(run.summary())
        for result in run.missed():
            print(f"    {result.scenario}, {result.way}: {result.share:.1%} {result.trouble}")
    if not (options.python or options.only):
        PAGE.write_text(page(runs, datetime.datetime.now(datetime.timezone.utc).date().isoformat()))
        print(f"written: {PAGE.relative_to(ROOT)}")
    good = all(run.results and not run.missed() and not run.broken for run in runs)
    print("all figures are met" if good else "FAILED")
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", metavar="X.Y", help="only this Python, and no page")
    parser.add_argument("--only", metavar="NAME", help="only scenarios whose name contains this, and no page")
    parser.add_argument("--fresh", action="store_true", help="a fresh kernel for each scenario: slower, same figures")
    parser.add_argument("--here", metavar="FILE", help="run with this interpreter and write the results to FILE")
    return parser.parse_args()


def _run_with(python: Python, options: argparse.Namespace) -> Run:
    """Run the scenarios with one Python, in its own environment and process."""
    run = Run(python.name)
    try:
        interpreter = interpreter_for(python)
    except RuntimeError as problem:
        run.broken = str(problem)
        return run
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [str(interpreter), "-m", "tests.torture", "--here", str(file)]
        command += ["--only", options.only] if options.only else []
        command += ["--fresh"] if options.fresh else []
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        done = subprocess.run(command, cwd=ROOT, env=clean, check=False)
        if not file.exists():
            run.broken = f"the process ended with {done.returncode}"
            return run
        found = json.loads(file.read_text())
    run.versions, run.skipped = found["versions"], found["skipped"]
    run.results = [Result(**result) for result in found["results"]]
    return run


def _run_here(scenarios: list[Scenario], *, fresh: bool) -> dict[str, object]:
    ways = [way for way in WAYS if way.installed]
    shares = {scenario.name: scenario.share for scenario in scenarios}
    results = []
    for result in run_all(scenarios, ways, fresh=fresh):
        results.append(vars(result))
        missed = " MISSED" if way_is_ours(result) and not result.meets(shares[result.scenario]) else ""
        trouble = f" {result.trouble}" if result.trouble and missed else ""
        head = f"Python {platform.python_version()}, {result.way}, {result.scenario}"
        print(f"{head}: {result.share:.0%}{missed}{trouble}", flush=True)
    return {
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "skipped": {s.name: s.missing() for s in scenarios if s.missing()},
        "results": results,
    }


def way_is_ours(result: Result) -> bool:
    """Whether a result is one of ipygpumem's."""
    return result.way in {way.name for way in OURS}


if __name__ == "__main__":
    sys.exit(main())
