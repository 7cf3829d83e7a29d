"""Draws tables as text: columns side by side, narrowed where they must be; where that is not enough, rows as lines."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

from ipygpumem.reports.bars import BAR_COLUMNS, text_bar
from ipygpumem.reports.layout import SEPARATOR, Table, clean

_GAPS = (3, 2)
_NARROWEST = 18
"""Columns of a terminal that a long text needs at least to stand beside others."""
_TOGETHER = re.compile(r"(?<=\d) (?=[KMGTP]?i?B\b)| (?=· )")
_BEGINS_PART = ".[("
_JOINT = re.compile(r"(?<=[_/,=-])|(?=[.\[(])")
"""Where a long path or call is broken rather than inside a word."""
_NO_BREAK = "\N{NO-BREAK SPACE}"  # cleaned text has none
_FIRST_WIDE = "\N{HANGUL CHOSEONG KIYEOK}"  # no character before it takes two columns


def columns(text: str) -> int:
    """Return how many columns of a terminal ``text`` takes: East Asian characters take two."""
    if text.isascii() or max(text) < _FIRST_WIDE:
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def fold(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns, broken between words, and not between number and unit."""
    if columns(text) <= width:
        return [text.replace(_NO_BREAK, " ")]
    if text.startswith(" ") and not text.isspace():  # source: its indentation says where it belongs
        bare = text.lstrip(" ")
        indent = " " * min(len(text) - len(bare), width // 2)
        return [indent + line for line in fold(bare, width - len(indent))]
    lines, used = [""], 0
    for word in _TOGETHER.sub(_NO_BREAK, text).split(" "):
        needed = columns(word)
        if used and used + 1 + needed <= width:
            lines[-1] += f" {word}"
            used += 1 + needed
            continue
        pieces = [word] if needed <= width else _pieces(word, width)
        lines += pieces if lines != [""] else pieces[1:]
        lines[-len(pieces)] = pieces[0]
        used = columns(pieces[-1])
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _pieces(word: str, width: int) -> list[str]:
    """Return a word in pieces of at most ``width`` columns, broken between the parts of a path where it has some."""
    pieces, used = [""], 0
    for letter in word:
        needed = columns(letter)
        if used + needed > width:
            last = pieces[-1]
            joints = [] if letter in _BEGINS_PART else [joint.start() for joint in _JOINT.finditer(last)]
            place = max((joint for joint in joints if joint > len(last) // 2), default=len(last))
            pieces[-1:] = [last[:place], last[place:]]
            used = columns(pieces[-1])
        pieces[-1] += letter
        used += needed
    return pieces


def draw(table: Table, width: int, *, bars: bool, colour: bool) -> list[str]:
    """Return the lines of ``table`` in ``width`` columns, without its title; the second line is a rule.

    Numbers are never broken. Where the columns cannot stand side by side, each row is a line of names and values.
    """
    head, *body = [tuple(map(clean, row)) for row in (table.columns, *table.rows)]
    widths = [max(map(columns, column)) for column in zip(head, *body, strict=True)]
    numeric = [name in table.numbers for name in table.columns]
    drawn = [text_bar(bar, colour=colour) if bar else "" for bar in table.bars] if bars and any(table.bars) else []
    for behind, gap in itertools.product((drawn, []), _GAPS):
        beside = gap + BAR_COLUMNS if behind else 0
        fitting = _fitting(widths, numeric, width - gap * (len(widths) - 1) - beside)
        if fitting is not None:
            break
    else:
        return [line for row in body for line in _named(head, row, width)]
    rows = [_row(row, fitting, numeric, gap) for row in body]
    for lines, bar in zip(rows, behind, strict=False):
        lines[0] += f"{' ' * gap}{bar}"
    rule = "─" * (sum(fitting) + gap * (len(fitting) - 1) + beside)
    return [line.rstrip() for lines in (_row(head, fitting, numeric, gap), [rule], *rows) for line in lines]


def _named(head: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    named = [f"{name}{_NO_BREAK}{text}" for name, text in zip(head, row, strict=True) if text]
    first, *rest = fold(SEPARATOR.join(named), width - 2)
    return [first, *(f"  {line}" for line in rest)]


def _fitting(widths: Sequence[int], numeric: Sequence[bool], room: int) -> list[int] | None:
    """Return widths that sum to at most ``room``, or None: numbers keep theirs, the widest texts give way first."""
    if sum(widths) <= room:
        return list(widths)
    for most in range(min(max(widths), room), _NARROWEST - 1, -1):
        found = [width if number else min(width, most) for width, number in zip(widths, numeric, strict=True)]
        if sum(found) <= room:
            return found
    return None


def _row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], gap: int) -> list[str]:
    folded = [fold(text, width) for text, width in zip(row, widths, strict=True)]
    return [
        (" " * gap).join(
            _padded(parts[number] if number < len(parts) else "", width, right=right)
            for parts, width, right in zip(folded, widths, numeric, strict=True)
        )
        for number in range(max(map(len, folded)))
    ]


def _padded(text: str, width: int, *, right: bool) -> str:
    spaces = " " * (width - columns(text))
    return spaces + text if right else text + spaces
