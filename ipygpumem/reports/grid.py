"""Tables as text: columns side by side, narrowed where they must be, one below the other where that is not enough."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from ipygpumem.reports.bars import text_bar
from ipygpumem.reports.layout import Table, clean

_GAPS = (3, 2)
_NARROWEST = 18
"""Columns of a terminal that a long text needs at least to stand beside others."""
_DEEP = 14
"""Columns of a first column under which nothing stands any more."""
_TOGETHER = re.compile(r"(?<=\d) (?=[KMGTP]?i?B\b)| (?=· )")
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
        return [text]
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
    """Return a word in pieces of at most ``width`` columns."""
    pieces, used = [""], 0
    for letter in word:
        needed = columns(letter)
        if used + needed > width:
            pieces.append("")
            used = 0
        pieces[-1] += letter
        used += needed
    return pieces


def draw(table: Table, width: int, *, bars: bool, ascii_only: bool, colour: bool) -> list[str]:
    """Return the lines of ``table`` in ``width`` columns, without its title; the second line is a rule.

    Numbers are never broken. Where the columns cannot stand side by side, each row goes on below itself, and so do the
    headings: all at the same places.
    """
    cells = [tuple(map(clean, row)) for row in (table.columns, *table.rows)]
    widths = [max(map(columns, column)) for column in zip(*cells, strict=True)]
    numeric = [name in table.numbers for name in table.columns]
    drawn = _bars(table, ascii_only=ascii_only, colour=colour) if bars else []
    longest = max((len(text_bar(bar)) for bar in table.bars if bar), default=0) if drawn else 0
    for gap in _GAPS:
        room = width - gap * (len(widths) - 1)
        fitting = _fitting(widths, numeric, room - gap - longest) if drawn else _fitting(widths, numeric, room)
        if fitting is not None:
            break
    else:
        if drawn:
            return draw(table, width, bars=False, ascii_only=ascii_only, colour=colour)
        return _stacked(cells, widths, numeric, width, "-" if ascii_only else "─")
    rows = [_row(row, fitting, numeric, gap) for row in cells]
    for lines, bar in zip(rows, drawn, strict=False):
        if bar:
            lines[0] = f"{lines[0]}{' ' * gap}{bar}"
    total = sum(fitting) + gap * (len(fitting) - 1) + (gap + longest if drawn else 0)
    rule = ("-" if ascii_only else "─") * total
    return [*map(str.rstrip, rows[0]), rule, *(line.rstrip() for lines in rows[1:] for line in lines)]


def _bars(table: Table, *, ascii_only: bool, colour: bool) -> list[str]:
    """Return what stands at the right of each row, the heading's included; nothing if there is no bar."""
    if not any(table.bars):
        return []
    return ["", *(text_bar(bar, ascii_only=ascii_only, colour=colour) if bar else "" for bar in table.bars)]


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


def _part(
    row: Sequence[str], part: Sequence[int], widths: Sequence[int], numeric: Sequence[bool], room: int, indent: int
) -> list[str]:
    """Return one line of a row that has several, or more where texts fold."""
    gap = _GAPS[-1]
    own, kinds = [widths[column] for column in part], [numeric[column] for column in part]
    left = room - gap * (len(part) - 1)
    fitting = _fitting(own, kinds, left) or [min(size, left) for size in own]
    lines = _row([row[column] for column in part], fitting, kinds, gap)
    return [f"{' ' * (0 if part[0] == 0 else indent)}{line}".rstrip() for line in lines]


def _stacked(
    cells: Sequence[Sequence[str]], widths: Sequence[int], numeric: Sequence[bool], width: int, rule: str
) -> list[str]:
    """Return rows of several lines each, the second and later ones under the second column."""
    gap = _GAPS[-1]
    indent = widths[0] + gap if widths[0] <= min(_DEEP, width // 3) else gap
    parts, used = [[0]], min(widths[0], width)
    for column in range(1, len(widths)):
        least = widths[column] if numeric[column] else min(widths[column], _NARROWEST)
        if used + gap + least > width:
            parts.append([])
            used = indent - gap
        parts[-1].append(column)
        used += gap + least
    lines = []
    for row in cells:
        for part in parts:
            if part is parts[0] or any(row[column] for column in part):
                lines += _part(row, part, widths, numeric, width - indent * (part is not parts[0]), indent)
        if row is cells[0]:
            lines.append(rule * max(map(columns, lines)))
    return lines
