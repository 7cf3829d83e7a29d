"""Lays reports out as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ipygpumem.reports.bars import BAR_COLUMNS, text_bar
from ipygpumem.reports.layout import SEPARATOR, Report, Segment, Table, clean, listed

_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Style:
    """What the place that shows the text can do; lines are never broken where its ``width`` in columns is unknown."""

    width: int | None = None
    colour: bool = False
    bars: bool = False


PLAIN = Style()
ASCII = str.maketrans({"…": "...", "→": "->", **dict(zip("·×─▒█░▕▏┃", "-x-=#-[]|", strict=True))})
"""What stands for our own characters where a stream cannot carry them."""
ALL_GLYPHS = "".join(map(chr, ASCII))
"""What a stream must be able to carry for reports as they are."""


def carried(shown: str, encoding: str) -> str:
    """Return text as a stream of ``encoding`` can carry it."""
    try:
        ALL_GLYPHS.encode(encoding)
    except UnicodeEncodeError:
        return shown.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return shown


_TABLE_WIDTH = 120
_NARROWEST = 20


def render(reports: Iterable[Report], style: Style = PLAIN) -> str:
    """Return the reports one below the other."""
    return "\n".join([_report(report, style) for report in reports])


def _report(report: Report, style: Style) -> str:
    # A cell's line goes this way after every cell: nothing to lay out.
    blocks = [clean(report.headline) if style is PLAIN else _headline(report.head, style)]
    blocks += [_table(table, style) for table in report.tables if not table.echo]
    blocks += [_titled(fact.title, f"{fact.title}: {listed(fact.values, fact.most)}", style) for fact in report.facts]
    blocks += [_wrapped(line, style) for line in report.lines]
    for listing in report.listings:
        blocks.append(_titled(listing.title, f"{listing.title}:", style))
        blocks += [_wrapped(line, style) for line in listing.lines]
    return "\n".join(blocks)


# -- the headline ---------------------------------------------------------------------------------------------


def _headline(segments: Sequence[Segment], style: Style) -> str:
    plain = [(text, columns(text)) for text in (clean(segment.text) for segment in segments)]
    parts = [
        (f"{text} {text_bar(segment.bar, colour=style.colour)}", needed + 1 + BAR_COLUMNS)
        if style.bars and segment.bar is not None
        else (text, needed)
        for (text, needed), segment in zip(plain, segments, strict=True)
    ]
    lines = _broken(parts, plain, style.width)
    first = plain[0][0]
    if style.colour and lines[0].startswith(first):
        lines[0] = f"{_BOLD}{first}{_RESET}{lines[0][len(first) :]}"
    return "\n".join(lines)


def _broken(parts: list[tuple[str, int]], plain: list[tuple[str, int]], width: int | None) -> list[str]:
    """Return the headline in lines: the bars give way first, then it breaks between parts, then between words."""
    if width is None:
        return [SEPARATOR.join([text for text, _ in parts])]
    for candidates in (parts, plain):
        if sum(needed for _, needed in candidates) + len(SEPARATOR) * (len(candidates) - 1) <= width:
            return [SEPARATOR.join([text for text, _ in candidates])]
    if any(needed > width - 2 for _, needed in parts):
        parts = plain
    lines: list[str] = []
    used = width
    for text, needed in parts:
        if lines and used + len(SEPARATOR) + needed <= width:
            lines[-1] += SEPARATOR + text
            used += len(SEPARATOR) + needed
            continue
        indent = "  " if lines else ""
        pieces = [text] if needed <= width - len(indent) else fold(text, width - 4)
        lines += [indent + pieces[0], *(f"    {piece}" for piece in pieces[1:])]
        used = len(indent) + needed if len(pieces) == 1 else 4 + columns(pieces[-1])
    return lines


# -- below it -------------------------------------------------------------------------------------------------


def _wrapped(line: str, style: Style) -> str:
    line = clean(line)
    if style.width is None or columns(line) + 2 <= style.width:
        return f"  {line}"
    first, *rest = fold(line, style.width - 4)
    return "\n".join([f"  {first}", *(f"    {piece}" for piece in rest)])


def _titled(title: str, text: str, style: Style) -> str:
    """Return a line that begins with a title, which colour sets apart."""
    line = _wrapped(text, style)
    start = f"  {title}"
    return f"{_DIM}{start}{_RESET}{line[len(start) :]}" if style.colour and line.startswith(start) else line


def _table(table: Table, style: Style) -> str:
    width = max(_NARROWEST, style.width or _TABLE_WIDTH) - 2
    lines = draw_table(table, width, bars=style.bars, colour=style.colour)
    if style.colour:
        rule = next((number for number, line in enumerate(lines) if line and not line.strip("─")), -1)
        lines = [f"{_DIM}{line}{_RESET}" if number <= rule else line for number, line in enumerate(lines)]
    return "\n".join([_wrapped(table.title, style)] * bool(table.title) + [f"  {line}" for line in lines])


# -- tables ---------------------------------------------------------------------------------------------------

_GAPS = (3, 2)
_NARROWEST_TEXT = 18
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


def draw_table(table: Table, width: int, *, bars: bool, colour: bool) -> list[str]:
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
    for most in range(min(max(widths), room), _NARROWEST_TEXT - 1, -1):
        found = [width if number else min(width, most) for width, number in zip(widths, numeric, strict=True)]
        if sum(found) <= room:
            return found
    return None


def _row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], gap: int) -> list[str]:
    folded = [fold(text, width) for text, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(map(len, folded))):
        cells = []
        for parts, width, right in zip(folded, widths, numeric, strict=True):
            text = parts[number] if number < len(parts) else ""
            spaces = " " * (width - columns(text))
            cells.append(spaces + text if right else text + spaces)
        lines.append((" " * gap).join(cells))
    return lines
