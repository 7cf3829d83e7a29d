"""Figures as a Markdown page: the same text goes to the terminal and to
docs/measured/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOT_INSTALLED = "not installed"
_VERDICTS = {None: "too noisy", True: "yes", False: "**no**"}


@dataclass(frozen=True)
class Row:
    """One figure. ``met`` says whether ours reached the target; None where the noise is too high to
    tell.
    """

    figure: str
    target: str
    ours: str
    peer: str
    control: str
    met: bool | None
    better: bool | None = None
    """True if ours beat the peer in this run; None where one of them has no such figure, or they
    are even.
    """


def lower(ours: float, theirs: float | None) -> bool | None:
    """Return True if the lower figure is ours; None if the peer has none."""
    if theirs is None:
        return None
    return ours < theirs


@dataclass(frozen=True)
class Section:
    """The figures of one benchmark, and how they were got."""

    title: str
    method: str
    rows: tuple[Row, ...]
    control: str = "bare kernel"
    """Heading of the column beside the tools."""
    peer: str = ""
    """Heading of the peer's column, where that is not the usual one."""


def render(section: Section, ours: str, peer: str) -> str:
    """Return a section as Markdown, its columns aligned.

    Args:
        section: the figures.
        ours: heading of our column.
        peer: heading of the peer's column, where the section has no other one.
    """
    heads = ["figure", "target", ours, section.peer or peer, section.control, "reached"]
    shows_better = any(row.better is not None for row in section.rows)
    if shows_better:
        heads.append("beats the peer")
    lines = []
    for row in section.rows:
        reached = _VERDICTS[row.met] if row.target else ""
        line = [row.figure, row.target, row.ours, row.peer, row.control, reached]
        if shows_better:
            line.append("" if row.better is None else _VERDICTS[row.better])
        lines.append(line)
    return "\n".join([f"## {section.title}", "", section.method, "", table(heads, lines), ""])


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(cells, widths) for cells in (heads, rule, *lines))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |"
