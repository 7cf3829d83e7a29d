"""``python -m benchmarks.torture [--only NAME]``: run every scenario in every way and print the
table.

Without ``--only`` it writes docs/measured/leaks.md. The exit code is 0 only if every figure of ours
is met.
"""

import argparse
import datetime
import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.harness.runner import CELL, OURS, PEER, PLAIN, SPAN, Result, Runner, Way
from benchmarks.harness.scenarios import GROUPS, SCENARIOS, Scenario
from ipygpumem.units import format_bytes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "leaks.md"
_HEAD = """\
# How notebooks leak

`make torture` (`python -m benchmarks.torture`) writes this page. Each entry says what keeps the memory alive, and how
an experiment (`%experiment start` to `end`, or `%%experiment`) frees it. Objects you keep on purpose outside the
experiment are left alone and reported.
"""  # noqa: E501
_MEASURED = """
## Measured

Each scenario makes at least 64 MiB in a real kernel and ends. Weak references then show how many bytes were freed:
after `del` of the new names, `gc.collect()` and `torch.cuda.empty_cache()` (plain), with ipyexperiments, and with
ipygpumem (the worse of both forms). *Held* means that something outside the scope holds the memory, so that none of
it should be freed.
"""  # noqa: E501
_PACKAGES = ("ipython", "ipykernel", "numpy", "torch", "matplotlib", "pandas", "ipyexperiments")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", metavar="NAME", default="", help="only scenarios whose name contains this"
    )
    only = parser.parse_args().only
    scenarios = [
        scenario for scenario in SCENARIOS if only in scenario.name and not scenario.missing()
    ]
    ways = [PLAIN, *([PEER] if importlib.util.find_spec("ipyexperiments") else []), *OURS]
    results = {way: _run(way, scenarios) for way in ways}
    table = "\n".join(
        ["| scenario | bytes | plain | ipyexperiments | ipygpumem |", "| - | -: | -: | -: | -: |"]
    )
    table += "".join(f"\n{_row(scenario, results)}" for scenario in scenarios)
    print(f"\n{table}")
    if not only:
        PAGE.write_text(_page(table))
    missed = [result for way in OURS for result in results[way].values() if not result.is_met()]
    for result in missed:
        print(f"MISSED: {result.scenario.name}: {result.share:.1%} {result.trouble}")
    return 0 if scenarios and not missed else 1


def _run(way: Way, scenarios: list[Scenario]) -> dict[str, Result]:
    runner = Runner(way)
    results = {}
    for scenario in scenarios:
        if way.serves(scenario):
            result = results[scenario.name] = runner.run(scenario)
            print(f"{way.name}, {scenario.name}: {result.share:.0%}", flush=True)
    runner.close()
    return results


def _row(scenario: Scenario, results: dict[Way, dict[str, Result]]) -> str:
    found = {way: of[scenario.name] for way, of in results.items() if scenario.name in of}
    made = format_bytes(max(result.made_bytes for result in found.values()))
    shares = [
        _share(*(found[way] for way in ways if way in found))
        for ways in ((PLAIN,), (PEER,), (SPAN, CELL))
    ]
    held = " (held)" if scenario.holder else ""
    return f"| {_code(scenario.name)} | {made} | {' | '.join(shares)}{held} |"


def _share(*results: Result) -> str:
    if any(result.trouble for result in results):
        return "fails"
    return f"{min(result.share for result in results):.0%}" if results else ""


def _page(table: str) -> str:
    here = [
        name for name in _PACKAGES if importlib.util.find_spec(name.replace("ipython", "IPython"))
    ]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in here)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    lines = [_HEAD.rstrip()]
    for title, group in GROUPS.items():
        lines.append(f"\n## {title}")
        lines += [
            f"\n**{_code(scenario.name)}**: {scenario.pins}\n{scenario.advice}"
            for scenario in group
        ]
    return "\n".join(
        [
            *lines,
            _MEASURED,
            f"{today}, Python {platform.python_version()}, {versions}.\n",
            table,
            "",
        ]
    )


def _code(name: str) -> str:
    return f"`{name}`" if name.startswith("%") or "__" in name else name


if __name__ == "__main__":
    sys.exit(main())
