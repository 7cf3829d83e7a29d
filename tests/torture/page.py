"""The table of a run, and docs/leaks.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ipygpumem.units import format_bytes
from tests.torture.catalogue import GROUPS, SCENARIOS
from tests.torture.runner import CELL, NEEDED_SHARE, OURS, PEER, PLAIN, SPAN, Result
from tests.torture.scenario import Scenario

PAGE = Path(__file__).resolve().parents[2] / "docs" / "leaks.md"
_HEADS = ("scenario", "bytes", "plain", "ipyexperiments", "ipygpumem")


@dataclass
class Run:
    """All results of one Python."""

    python: str
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why scenarios could not run, by name."""
    results: list[Result] = field(default_factory=list)
    broken: str = ""

    def of(self, scenario: Scenario, *ways: str) -> list[Result]:
        """Return the results of one scenario in some ways."""
        return [result for result in self.results if result.scenario == scenario.name and result.way in ways]

    def missed(self) -> list[Result]:
        """Return those of our results that are not what their scenario states."""
        ours = {way.name for way in OURS}
        wanted = {scenario.name: scenario.share for scenario in SCENARIOS}
        return [r for r in self.results if r.way in ours and not r.meets(wanted[r.scenario])]

    def summary(self) -> str:
        """Return one line on what we gave back."""
        if self.broken:
            return f"Python {self.python}: did not run: {self.broken.splitlines()[-1]}"
        ours = {way.name for way in OURS}
        due = {scenario.name for scenario in SCENARIOS if scenario.share == 1.0}
        shares = [result.share for result in self.results if result.way in ours and result.scenario in due]
        ran = len({result.scenario for result in self.results if result.way in ours})
        worst = min(shares, default=0.0)
        return (
            f"Python {self.python}: {ran} scenarios, {len(self.missed())} missed, {len(self.skipped)} skipped; "
            f"of what is due the least that came back is {worst:.1%}"
        )


def rows(run: Run, scenarios: Iterable[Scenario]) -> list[tuple[str, ...]]:
    """Return the table's rows: what came back in each way, for ours the lesser of its two."""
    found = []
    for scenario in scenarios:
        ours = run.of(scenario, SPAN.name, CELL.name)
        made = [result.made_bytes for result in run.of(scenario, PLAIN.name, PEER.name, SPAN.name, CELL.name)]
        if made:
            shares = (_share(run.of(scenario, way.name)) for way in (PLAIN, PEER))
            held = " (held)" if scenario.share < NEEDED_SHARE else ""
            found.append((scenario.name, format_bytes(max(made)), *shares, _share(ours) + held))
        else:
            found.append((scenario.name, "", "", "", f"skipped: {run.skipped.get(scenario.name, 'not run')}"))
    return found


def _share(results: Sequence[Result]) -> str:
    if not results:
        return ""
    if any(result.trouble for result in results):
        return "fails"
    return f"{min(result.share for result in results):.0%}"


def text_table(run: Run, scenarios: Iterable[Scenario]) -> str:
    """Return the table for a terminal."""
    lines = [_HEADS, *rows(run, scenarios)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def page(runs: Sequence[Run], date: str) -> str:
    """Return docs/leaks.md, with the table of the newest Python."""
    shown = [run for run in runs if run.results][-1]
    versions = ", ".join(f"{name} {version}" for name, version in shown.versions.items())
    lines = [
        "# How notebooks leak",
        "",
        "Written by `make torture` (`python -m tests.torture`). Each entry says what keeps the memory alive, and what",
        "an experiment (`%experiment start` to `end`, or `%%experiment`) does about it. What you keep on purpose",
        "outside an experiment is never broken open, but named at its end.",
        "",
        "The exception is a NumPy array that never had a name and that the experiment put into a variable from before",
        "(`cache['x'] = np.ones(...)`): `%gpumem tensors` lists it, its end does not. Python does not list",
        "arrays: an end finds those behind the experiment's own names and outputs.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}"]
        for scenario in group:
            lines += ["", f"**{_code(scenario.name)}**: {scenario.pins}", f"{scenario.advice}"]
    lines += [
        "",
        "## Measured",
        "",
        "Each scenario makes at least 64 MiB in a real kernel, ends, and counts the bytes whose storage has died (weak",
        "references tell): after `del` of the new names, `gc.collect()` and `torch.cuda.empty_cache()` (plain), with",
        "ipyexperiments, and with ipygpumem (the lesser of both forms). *Held* means that something outside the scope",
        "holds it, so that nothing should come back.",
        "",
        f"{date}, Python {shown.python}, {versions}.",
        "",
        "| " + " | ".join(_HEADS) + " |",
        "| --- | ---: | ---: | ---: | ---: |",
        *("| " + " | ".join([_code(row[0]), *row[1:]]) + " |" for row in rows(shown, SCENARIOS)),
        "",
        "On every Python found on that machine:",
        "",
        *(f"- {run.summary()}." for run in runs),
        "",
    ]
    return "\n".join(lines)


def _code(name: str) -> str:
    return f"`{name}`" if name.startswith("%") or "__" in name else name
