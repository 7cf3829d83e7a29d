"""Lays reports out as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    lines = _headline(report, style)
    for table in report.tables:
        if table.title:
            lines += _hanging(clean(table.title), style.width)
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


def _headline(report: Report, style: Style) -> list[str]:
    """Return the headline in lines, its first part in bold."""
    segments = report.segments
    plain = [clean(segment.text) for segment in segments]
    bars = [segment.bar if style.bars else None for segment in segments]
    lines = _broken(plain, bars, style.width)
    if style.colour and lines[0].startswith(plain[0]):
        lines[0] = f"{_BOLD}{plain[0]}{_RESET}{lines[0][len(plain[0]) :]}"
    return lines


def _broken(plain: list[str], bars: list[Bar | None], width: int | None) -> list[str]:
    """Return the headline in lines: first bars are dropped, then it breaks between parts, then
    between words.
    """
    parts = []
    for text, bar in zip(plain, bars, strict=True):
        parts.append(f"{text} {text_bar(bar)}" if bar else text)
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
    if width is None or columns(text) <= width - len(indent):
        return [indent + text]
    first, *more = fold(text, width - 4)
    return [indent + first, *(f"    {piece}" for piece in more)]


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
    drawn = ""
    for block, number in zip("▒█░", _letters_of(bar), strict=True):
        drawn += block * number
    end = "┃" if bar.is_whole else "▏"
    return f"▕{drawn:{_CELLS}}{end}"


def _letters_of(bar: Bar) -> list[int]:
    """Return the number of characters of each piece of a bar."""
    pieces = bar.pieces
    sums = [0, *itertools.accumulate(bar.pieces)]
    ends = [round(size * _CELLS / bar.length_bytes) for size in sums]
    letters = [end - start for start, end in itertools.pairwise(ends)]
    for index in sorted(range(3), key=lambda index: -pieces[index]):
        if not pieces[index] or letters[index]:
            continue
        letters[index] = 1  # taken from the free part, else from the longest piece
        if sum(letters) > _CELLS:
            letters[letters.index(max(letters))] -= 1
    return letters


def _in_colour(drawn: re.Match[str]) -> str:
    """Return a drawn bar with its pieces in colour."""
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
    if text.startswith(" ") and not text.isspace():
        return _fold_source(text, width)
    lines = [""]
    used = 0
    for word in _TOGETHER.sub(_NO_BREAK, text).split(" "):
        needed = columns(word)
        if used and used + 1 + needed <= width:
            lines[-1] += f" {word}"
            used += 1 + needed
            continue
        pieces = [word] if needed <= width else _pieces(word, width)
        if lines == [""]:
            lines = pieces
        else:
            lines += pieces
        used = columns(pieces[-1])
    return _without_separators([line.replace(_NO_BREAK, " ") for line in lines])


def _fold_source(text: str, width: int) -> list[str]:
    """Return an indented line of source code in lines of the same indentation."""
    bare = text.lstrip(" ")
    indent = " " * min(len(text) - len(bare), width // 2)
    return [indent + line for line in fold(bare, width - len(indent))]


def _without_separators(lines: list[str]) -> list[str]:
    """Return lines that neither begin nor end with a separator where they were broken."""
    begun = [line.removeprefix(SEPARATOR.lstrip()) for line in lines]
    ended = [line.removesuffix(SEPARATOR.rstrip()) for line in begun[:-1]]
    return [*ended, begun[-1]]


def _pieces(word: str, width: int) -> list[str]:
    """Return a word in pieces of at most ``width`` columns, broken between the parts of a path if
    it has any.
    """
    pieces = [""]
    used = 0
    for letter in word:
        needed = columns(letter)
        if used + needed > width:
            place = _place_to_break(pieces[-1], letter)
            pieces[-1:] = [pieces[-1][:place], pieces[-1][place:]]
            used = columns(pieces[-1])
        pieces[-1] += letter
        used += needed
    return pieces


def _place_to_break(piece: str, following: str) -> int:
    """Return the last joint in the second half of a piece, or its end."""
    if following in _BEGINS_PART:
        return len(piece)
    joints = [joint.start() for joint in _JOINT.finditer(piece)]
    late = [joint for joint in joints if joint > len(piece) // 2]
    return max(late, default=len(piece))


_WIDEST_WHOLE = 40
"""Maximum width of a column of code that is broken last."""


def _table(table: Table, style: Style) -> list[str]:
    """Return the lines of ``table`` without its title: headings, a rule, and rows followed by their
    bars.

    Numbers are never broken. If the columns do not fit side by side, texts that are equal in all
    rows follow the table; if that is not enough, each row becomes a line of names and values.
    """
    width = max(_NARROWEST, style.width or _TABLE_WIDTH) - 2
    grid = _Grid(table)
    bars = list[str]()
    if style.bars and any(table.bars):
        bars = [text_bar(bar) if bar else "" for bar in table.bars]
    for layout in grid.layouts(bars):
        widths = grid.fitting(layout, width)
        if widths is not None:
            return _side_by_side(grid, widths, layout, style)
    fewer, equal = table.split()
    if equal:
        return [*_table(fewer, style), *_hanging(clean(equal), style.width)]
    return _one_below_the_other(grid, width)


class _Layout(NamedTuple):
    """A way to place columns side by side."""

    unbroken: Sequence[bool]
    """For each column, True if its texts are not broken."""
    bars: Sequence[str]
    gap: int
    """Blanks between two columns."""

    @property
    def bar_width(self) -> int:
        return self.gap + BAR_COLUMNS if self.bars else 0


class _Grid:
    """The cleaned texts of a table, and the widths of its columns."""

    def __init__(self, table: Table) -> None:
        self.head = [clean(name) for name in table.columns]
        self.body = [[clean(text) for text in row] for row in table.rows]
        texts_by_column = zip(self.head, *self.body, strict=True)
        self.widths = [max(map(columns, texts)) for texts in texts_by_column]
        self.is_number = [name in table.numbers for name in table.columns]
        self._is_whole = []
        """True for columns of numbers, and for short code, which is broken last."""
        for name, width in zip(table.columns, self.widths, strict=True):
            is_code = name in table.whole and width <= _WIDEST_WHOLE
            self._is_whole.append(name in table.numbers or is_code)

    def layouts(self, bars: Sequence[str]) -> Iterator[_Layout]:
        """Yield ways to place the columns, the best first."""
        for unbroken in (self._is_whole, self.is_number):
            for drawn in (bars, ()):
                for gap in _GAPS:
                    yield _Layout(unbroken, drawn, gap)

    def fitting(self, layout: _Layout, width: int) -> list[int] | None:
        """Return the widths of the columns, or None if they do not fit in ``width``."""
        gaps = layout.gap * (len(self.widths) - 1)
        return _fitting(self.widths, layout.unbroken, width - gaps - layout.bar_width)


def _side_by_side(grid: _Grid, widths: Sequence[int], layout: _Layout, style: Style) -> list[str]:
    """Return the lines of a table whose columns fit."""
    gap = layout.gap
    rows = [_row(row, widths, grid.is_number, gap) for row in grid.body]
    for lines, bar in zip(rows, layout.bars, strict=False):
        lines[0] += f"{' ' * gap}{bar}"
    rule = "─" * (sum(widths) + gap * (len(widths) - 1) + layout.bar_width)
    top = [line.rstrip() for line in (*_row(grid.head, widths, grid.is_number, gap), rule)]
    if style.colour:
        top = [f"{_DIM}{line}{_RESET}" for line in top]
    body = [line.rstrip() for lines in rows for line in lines]
    return [f"  {line}" for line in (*top, *body)]


def _one_below_the_other(grid: _Grid, width: int) -> list[str]:
    """Return a line of names and values for each row."""
    lines = []
    for row in grid.body:
        named = []
        for name, text in zip(grid.head, row, strict=True):
            if text:
                named.append(f"{name}{_NO_BREAK}{text}")
        first, *more = fold(SEPARATOR.join(named), width - 2)
        lines += [f"  {first}", *(f"    {line}" for line in more)]
    return lines


def _fitting(widths: Sequence[int], numeric: Sequence[bool], room: int) -> list[int] | None:
    """Return widths that sum to at most ``room``, or None: numbers keep theirs, the widest texts
    shrink first.
    """
    if sum(widths) <= room:
        return list(widths)
    for most in range(min(max(widths), room), _NARROWEST_TEXT - 1, -1):
        narrowed = []
        for width, number in zip(widths, numeric, strict=True):
            narrowed.append(width if number else min(width, most))
        if sum(narrowed) <= room:
            return narrowed
    return None


def _row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], gap: int) -> list[str]:
    """Return the lines of a row, whose texts are folded to the widths of the columns."""
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
