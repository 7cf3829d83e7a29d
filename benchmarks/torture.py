"""Measures the share of a leak's bytes that an experiment frees.

The same is measured with ipyexperiments, and with cleaning up by hand.

``python -m benchmarks.torture [--only NAME]`` runs every scenario in every way and prints the
table. Without ``--only`` it writes docs/measured/leaks.md. The exit code is 0 only if every figure
of ours is met.
"""

import argparse
import datetime
import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.harness.runner import OURS, PEER, PLAIN, Result, Runner, Way
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
    """Run the scenarios, print the table, and write the page; return 1 if a figure is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", metavar="NAME", default="", help="only scenarios whose name contains this"
    )
    only = parser.parse_args().only
    scenarios = [
        scenario for scenario in SCENARIOS if only in scenario.name and not scenario.missing()
    ]
    ways = [PLAIN, *OURS]
    if importlib.util.find_spec("ipyexperiments"):
        ways.insert(1, PEER)
    results = {way: _run(way, scenarios) for way in ways}
    table = "\n".join(
        [
            "| scenario | bytes | plain | ipyexperiments | ipygpumem |",
            "| - | -: | -: | -: | -: |",
            *(_row(scenario, results) for scenario in scenarios),
        ]
    )
    print(f"\n{table}")
    if not only:
        PAGE.write_text(_page(table))
    missed = 0
    for way in OURS:
        for result in results[way].values():
            if not result.is_met():
                missed += 1
                print(f"MISSED: {result.scenario.name}: {result.share:.1%} {result.trouble}")
    return 0 if scenarios and not missed else 1


def _run(way: Way, scenarios: list[Scenario]) -> dict[str, Result]:
    """Run the scenarios that a way serves; return the results by the scenario's name."""
    runner = Runner(way)
    results = {}
    for scenario in scenarios:
        if way.serves(scenario):
            result = runner.run(scenario)
            print(f"{way.name}, {scenario.name}: {result.share:.0%}", flush=True)
            results[scenario.name] = result
    runner.close()
    return results


def _row(scenario: Scenario, results: dict[Way, dict[str, Result]]) -> str:
    """Return a scenario's row: the bytes that it made, and the share that each tool freed."""
    result_of_way = {}
    for way, results_by_name in results.items():
        if scenario.name in results_by_name:
            result_of_way[way] = results_by_name[scenario.name]
    made = format_bytes(max(result.made_bytes for result in result_of_way.values()))
    plain = _share(result_of_way, PLAIN)
    peer = _share(result_of_way, PEER)
    ours = _share(result_of_way, *OURS)
    mark = " (held)" if scenario.holder else ""
    return f"| {_code(scenario.name)} | {made} | {plain} | {peer} | {ours}{mark} |"


def _share(result_of_way: dict[Way, Result], *ways: Way) -> str:
    """Return the lowest share that was freed in some ways; empty if there is no result."""
    results = [result_of_way[way] for way in ways if way in result_of_way]
    if any(result.trouble for result in results):
        return "fails"
    if not results:
        return ""
    return f"{min(result.share for result in results):.0%}"


def _page(table: str) -> str:
    """Return the page: each scenario's cause and advice, then the table."""
    installed = [
        name for name in _PACKAGES if importlib.util.find_spec(name.replace("ipython", "IPython"))
    ]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in installed)
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
    """Return a scenario's name, as code if it is the name of a magic or of a special method."""
    if name.startswith("%") or "__" in name:
        return f"`{name}`"
    return name


if __name__ == "__main__":
    sys.exit(main())
