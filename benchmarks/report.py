"""Figures as a Markdown page: the same text goes to the terminal and to
docs/measured/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOT_INSTALLED = "not installed"


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
    return None if theirs is None else ours < theirs


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
    """Return a section as Markdown, its columns aligned."""
    heads = ["figure", "target", ours, section.peer or peer, section.control, "reached"]
    met = {None: "too noisy", True: "yes", False: "**no**"}
    lines = [
        [r.figure, r.target, r.ours, r.peer, r.control, met[r.met] if r.target else ""]
        for r in section.rows
    ]
    if any(row.better is not None for row in section.rows):
        heads.append("beats the peer")
        for row, line in zip(section.rows, lines, strict=True):
            line.append("" if row.better is None else met[row.better])
    return "\n".join([f"## {section.title}", "", section.method, "", table(heads, lines), ""])


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([_line(heads, widths), rule, *(_line(line, widths) for line in lines)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return (
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        + " |"
    )
