"""Lays reports out as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ipygpumem.report.layout import SEPARATOR, Bar, Report, Table, clean, listed


@dataclass(frozen=True)
class Style:
    """Capabilities of the output stream; lines are not wrapped if its ``width`` in columns is
    unknown.
    """

    width: int | None = None
    colour: bool = False
    bars: bool = False


PLAIN = Style()
ASCII = str.maketrans({"…": "...", "→": "->", **dict(zip("·×─▒█░▕▏┃", "-x-=#-[]|", strict=True))})
"""Replacements for our own characters on streams that cannot encode them."""

_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_COLOURS = {"▒": _DIM, "█": "\x1b[36m", "░": "\x1b[33m"}
_BAR = re.compile("▕[▒█░ ]{8}[▏┃]")
_CELLS = 8
BAR_COLUMNS = _CELLS + 2
"""Width of a bar with its two ends."""
_TABLE_WIDTH = 120
_NARROWEST = 20


def carried(shown: str, encoding: str) -> str:
    """Return text that a stream of ``encoding`` can encode."""
    try:
        "".join(map(chr, ASCII)).encode(encoding)
    except UnicodeEncodeError:
        return shown.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return shown


def render(reports: Iterable[Report], style: Style = PLAIN) -> str:
    """Return the reports one below the other."""
    return "\n".join([_report(report, style) for report in reports])


def _report(report: Report, style: Style) -> str:
    segments = report.segments
    plain = [clean(segment.text) for segment in segments]
    lines = _broken(
        plain, [segment.bar if style.bars else None for segment in segments], style.width
    )
    if style.colour and lines[0].startswith(plain[0]):
        lines[0] = f"{_BOLD}{plain[0]}{_RESET}{lines[0][len(plain[0]) :]}"
    for table in report.tables:
        lines += _hanging(clean(table.title), style.width) if table.title else []
        lines += _table(table, style)
    for fact in report.facts:
        lines += _titled(fact.title, f"{fact.title}: {listed(fact.values, fact.most)}", style)
    for line in report.lines:
        lines += _hanging(clean(line), style.width)
    for listing in report.listings:
        lines += _titled(listing.title, f"{listing.title}:", style)
        for line in listing.lines:
            lines += _hanging(clean(line), style.width)
    shown = "\n".join(lines)
    return _BAR.sub(_in_colour, shown) if style.colour else shown


def _broken(plain: list[str], bars: list[Bar | None], width: int | None) -> list[str]:
    """Return the headline in lines: first bars are dropped, then it breaks between parts, then
    between words.
    """
    parts = [
        f"{text} {text_bar(bar)}" if bar else text for text, bar in zip(plain, bars, strict=True)
    ]
    if width is None:
        return [SEPARATOR.join(parts)]
    for line in (SEPARATOR.join(parts), SEPARATOR.join(plain)):
        if columns(line) <= width:
            return [line]
    if any(columns(part) > width - 2 for part in parts):
        parts = plain
    lines: list[str] = []
    for part in parts:
        if lines and columns(lines[-1] + SEPARATOR + part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines += _hanging(part, width, "  " if lines else "")
    return lines


def _hanging(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Return a text in lines, indented after the first."""
    pieces = (
        [text] if width is None or columns(text) <= width - len(indent) else fold(text, width - 4)
    )
    return [indent + pieces[0], *(f"    {piece}" for piece in pieces[1:])]


def _titled(title: str, text: str, style: Style) -> list[str]:
    """Return a line that begins with a coloured title."""
    lines = _hanging(clean(text), style.width)
    start = f"  {title}"
    if style.colour and lines[0].startswith(start):
        lines[0] = f"{_DIM}{start}{_RESET}{lines[0][len(start) :]}"
    return lines


# -- bars ---------------------------------------------------------------------------------------


def text_bar(bar: Bar) -> str:
    """Return ``bar`` in characters, such as ``▕▒▒█░ ▏``, or ``▕▒▒█░ ┃`` up to the total.

    In use before is ``▒``, kept ``█``, the peak above ``░``; a piece has at least one character, if
    there is room.
    """
    pieces = bar.pieces
    ends = [0, *(round(sum(pieces[:number]) * _CELLS / bar.length_bytes) for number in (1, 2, 3))]
    found = [end - start for start, end in itertools.pairwise(ends)]
    for index in sorted(range(3), key=lambda index: -pieces[index]):
        if (
            pieces[index] and not found[index]
        ):  # taken from the free part, else from the longest piece
            found[index] = 1
            found[found.index(max(found))] -= sum(found) > _CELLS
    drawn = "".join(block * number for block, number in zip("▒█░", found, strict=True))
    return f"▕{drawn:{_CELLS}}{'┃' if bar.is_whole else '▏'}"


def _in_colour(drawn: re.Match[str]) -> str:
    return re.sub("▒+|█+|░+", lambda piece: _COLOURS[piece[0][0]] + piece[0] + _RESET, drawn[0])


# -- tables -------------------------------------------------------------------------------------

_GAPS = (3, 2)
_NARROWEST_TEXT = 18
"""Minimum columns of a terminal for a long text next to other columns."""
_TOGETHER = re.compile(r"(?<=\d) (?=[KMGTP]?i?B\b)| (?=· )")
_BEGINS_PART = ".[("
_JOINT = re.compile(r"(?<=[_/,=-])|(?=[.\[(])")
"""Places to break a long path or call."""
_NO_BREAK = "\N{NO-BREAK SPACE}"  # cleaned text has none
_FIRST_WIDE = "\N{HANGUL CHOSEONG KIYEOK}"  # no character before it takes two columns


def columns(text: str) -> int:
    """Return the terminal columns of ``text``: East Asian characters take two."""
    if text.isascii() or max(text) < _FIRST_WIDE:
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def fold(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns, broken between words, but not between
    number and unit.
    """
    if columns(text) <= width:
        return [text.replace(_NO_BREAK, " ")]
    if text.startswith(" ") and not text.isspace():  # source code: keep its indentation
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
    lines = [line.replace(_NO_BREAK, " ").removeprefix(SEPARATOR.lstrip()) for line in lines]
    return [*(line.removesuffix(SEPARATOR.rstrip()) for line in lines[:-1]), lines[-1]]


def _pieces(word: str, width: int) -> list[str]:
    """Return a word in pieces of at most ``width`` columns, broken between the parts of a path if
    it has any.
    """
    pieces, used = [""], 0
    for letter in word:
        needed = columns(letter)
        if used + needed > width:
            last = pieces[-1]
            joints = (
                [] if letter in _BEGINS_PART else [joint.start() for joint in _JOINT.finditer(last)]
            )
            place = max((joint for joint in joints if joint > len(last) // 2), default=len(last))
            pieces[-1:] = [last[:place], last[place:]]
            used = columns(pieces[-1])
        pieces[-1] += letter
        used += needed
    return pieces


_WIDEST_WHOLE = 40
"""Maximum width of a column of code that is broken last."""


def _table(table: Table, style: Style) -> list[str]:
    """Return the lines of ``table`` without its title: headings, a rule, and rows followed by their
    bars.

    Numbers are never broken. If the columns do not fit side by side, texts that are equal in all
    rows follow the table; if that is not enough, each row becomes a line of names and values.
    """
    width = max(_NARROWEST, style.width or _TABLE_WIDTH) - 2
    head, *body = [tuple(map(clean, row)) for row in (table.columns, *table.rows)]
    widths = [max(map(columns, column)) for column in zip(head, *body, strict=True)]
    numeric = [name in table.numbers for name in table.columns]
    kept = [
        name in table.numbers or (name in table.whole and size <= _WIDEST_WHOLE)
        for name, size in zip(table.columns, widths, strict=True)
    ]
    drawn = (
        [text_bar(bar) if bar else "" for bar in table.bars]
        if style.bars and any(table.bars)
        else []
    )
    for unbroken, behind, gap in itertools.product((kept, numeric), (drawn, []), _GAPS):
        bar_width = gap + BAR_COLUMNS if behind else 0
        fitting = _fitting(widths, unbroken, width - gap * (len(widths) - 1) - bar_width)
        if fitting is not None:
            break
    else:
        fewer, equal = table.split()
        if equal:
            return [*_table(fewer, style), *_hanging(clean(equal), style.width)]
        lines = []
        for row in body:
            named = [
                f"{name}{_NO_BREAK}{text}" for name, text in zip(head, row, strict=True) if text
            ]
            first, *more = fold(SEPARATOR.join(named), width - 2)
            lines += [f"  {first}", *(f"    {line}" for line in more)]
        return lines
    rows = [_row(row, fitting, numeric, gap) for row in body]
    for lines, bar in zip(rows, behind, strict=False):
        lines[0] += f"{' ' * gap}{bar}"
    rule = "─" * (sum(fitting) + gap * (len(fitting) - 1) + bar_width)
    top = [line.rstrip() for line in (*_row(head, fitting, numeric, gap), rule)]
    if style.colour:
        top = [f"{_DIM}{line}{_RESET}" for line in top]
    return [f"  {line}" for line in (*top, *(line.rstrip() for lines in rows for line in lines))]


def _fitting(widths: Sequence[int], numeric: Sequence[bool], room: int) -> list[int] | None:
    """Return widths that sum to at most ``room``, or None: numbers keep theirs, the widest texts
    shrink first.
    """
    if sum(widths) <= room:
        return list(widths)
    for most in range(min(max(widths), room), _NARROWEST_TEXT - 1, -1):
        found = [
            width if number else min(width, most)
            for width, number in zip(widths, numeric, strict=True)
        ]
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
