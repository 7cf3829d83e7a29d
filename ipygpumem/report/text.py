"""Lays reports out as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipygpumem.records import COMMENT
from ipygpumem.report.layout import SEPARATOR, Bar, Report, Table
from ipygpumem.report.words import clean, listed


@dataclass(frozen=True)
class Style:
    """Capabilities of the output stream; lines are not wrapped if its ``width`` in columns is
    unknown.
    """

    width: int | None = None
    colour: bool = False
    bars: bool = False


PLAIN = Style()
ASCII = str.maketrans("·×─▒█░▕▏┃", "-x-=#-[]|") | str.maketrans({"…": "...", "→": "->"})
"""Replacements for our own characters on streams that cannot encode them."""

_BOLD = "\x1b[1m"
_DIM = "\x1b[2m"
_RESET = "\x1b[0m"
_COLOURS = {"▒": _DIM, "█": "\x1b[36m", "░": "\x1b[33m"}
_BAR = re.compile("▕[▒█░ ]{8}[▏┃]")
_PIECE = re.compile("▒+|█+|░+")
_CELLS = 8
BAR_COLUMNS = _CELLS + 2
"""Width of a bar with its two ends."""
_TABLE_WIDTH = 120
_NARROWEST = 20


def encodable(shown: str, encoding: str) -> str:
    """Return text that a stream of ``encoding`` can encode."""
    try:
        "".join(map(chr, ASCII)).encode(encoding)
    except UnicodeEncodeError:
        return shown.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return shown


def render(reports: Iterable[Report], style: Style = PLAIN) -> str:
    """Return the reports one below the other."""
    return "\n".join([_text_report(report, style) for report in reports])


def _text_report(report: Report, style: Style) -> str:
    """Return the lines of one report."""
    lines = _headline_in_lines(report, style)
    for table in report.tables:
        if table.title:
            lines += _hanging(clean(table.title), style.width)
        lines += _lines_of_table(table, style)
    for fact in report.facts:
        values = listed(fact.values, fact.most)
        lines += _titled(fact.title, f"{fact.title}: {values}", style)
    for line in report.lines:
        lines += _hanging(clean(line), style.width)
    for listing in report.listings:
        lines += _titled(listing.title, f"{listing.title}:", style)
        for line in listing.lines:
            lines += _hanging(clean(line), style.width)
    text = "\n".join(lines)
    if style.colour:
        return _BAR.sub(_in_colour, text)
    return text


def _headline_in_lines(report: Report, style: Style) -> list[str]:
    """Return the headline in lines, its first part in bold."""
    plain = []
    drawn = []
    for text, bar in report.segments:
        part = clean(text)
        plain.append(part)
        if style.bars and bar is not None:
            part += f" {text_bar(bar)}"
        drawn.append(part)
    lines = _broken(plain, drawn, style.width)
    if style.colour:
        lines[0] = _styled(lines[0], plain[0], _BOLD)
    return lines


def _styled(line: str, start: str, style: str) -> str:
    """Return a line with its start in a style, unless that is broken over several lines."""
    if not line.startswith(start):
        return line
    return f"{style}{start}{_RESET}{line.removeprefix(start)}"


def _broken(plain: list[str], drawn: list[str], width: int | None) -> list[str]:
    """Return the headline, whose parts are ``drawn`` with bars, in lines: first bars are dropped,
    then it breaks between parts, then between words.
    """
    if width is None:
        return [SEPARATOR.join(drawn)]
    for parts in (drawn, plain):
        line = SEPARATOR.join(parts)
        if columns(line) <= width:
            return [line]
    parts = drawn
    if any(columns(part) > width - 2 for part in drawn):
        parts = plain
    lines = _hanging(parts[0], width, "")
    for part in parts[1:]:
        longer = lines[-1] + SEPARATOR + part
        if columns(longer) <= width:
            lines[-1] = longer
        else:
            lines += _hanging(part, width)
    return lines


def _hanging(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Return a text in lines, indented after the first."""
    if width is None or columns(text) <= width - len(indent):
        return [indent + text]
    first, *more = wrap(text, width - 4)
    return [indent + first, *_indented(more)]


def _indented(lines: Iterable[str]) -> list[str]:
    """Return the further lines of a text, below its first one."""
    return [f"    {line}" for line in lines]


def _titled(title: str, text: str, style: Style) -> list[str]:
    """Return a line that begins with a coloured title."""
    lines = _hanging(clean(text), style.width)
    if style.colour:
        lines[0] = _styled(lines[0], f"  {title}", _DIM)
    return lines


# -- bars ---------------------------------------------------------------------------------------


def text_bar(bar: Bar) -> str:
    """Return ``bar`` in characters, such as ``▕▒▒█░ ▏``, or ``▕▒▒█░ ┃`` up to the total.

    In use before is ``▒``, kept ``█``, the peak above ``░``; a piece has at least one character, if
    there is room.
    """
    before, more, peak = _letters_of(bar)
    drawn = "▒" * before + "█" * more + "░" * peak
    end = "┃" if bar.is_whole else "▏"
    return f"▕{drawn:{_CELLS}}{end}"


def _letters_of(bar: Bar) -> list[int]:
    """Return the number of characters of each piece of a bar."""
    pieces = bar.pieces
    letters = []
    begin = size = 0
    for piece in pieces:
        size += piece
        end = round(size * _CELLS / bar.length_bytes)
        letters.append(end - begin)
        begin = end
    largest_first = sorted(range(3), key=pieces.__getitem__, reverse=True)
    for index in largest_first:
        if not pieces[index] or letters[index]:
            continue
        letters[index] = 1  # taken from the free part, else from the longest piece
        if sum(letters) > _CELLS:
            longest = letters.index(max(letters))
            letters[longest] -= 1
    return letters


def _in_colour(bar: re.Match[str]) -> str:
    """Return a drawn bar with its pieces in colour."""
    return _PIECE.sub(_piece_in_colour, bar[0])


def _piece_in_colour(piece: re.Match[str]) -> str:
    letters = piece[0]
    return _COLOURS[letters[0]] + letters + _RESET


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
    width = len(text)
    for letter in text:
        if unicodedata.east_asian_width(letter) in "WF":
            width += 1
    return width


def wrap(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns, broken between words, but not between
    number and unit.
    """
    if columns(text) <= width:
        return [text.replace(_NO_BREAK, " ")]
    if text.startswith(" ") and not text.isspace():
        return _wrap_source(text, width)
    lines = [""]
    used = 0
    for word in _TOGETHER.sub(_NO_BREAK, text).split(" "):
        needed = columns(word)
        if used and used + 1 + needed <= width:
            lines[-1] += f" {word}"
            used += 1 + needed
            continue
        pieces = [word] if needed <= width else _broken_word(word, width)
        if lines == [""]:
            lines = pieces
        else:
            lines += pieces
        used = columns(pieces[-1])
    return _without_separators([line.replace(_NO_BREAK, " ") for line in lines])


def _wrap_source(text: str, width: int) -> list[str]:
    """Return an indented line of source code in lines of the same indentation."""
    bare = text.lstrip(" ")
    indent = " " * min(len(text) - len(bare), width // 2)
    return [indent + line for line in wrap(bare, width - len(indent))]


def wrap_code(code: str, width: int) -> list[str]:
    """Return a line of code in lines of at most ``width`` columns, each line of its comment with
    the sign of a comment: a pasted line must be no code if it is none.
    """
    lines = wrap(code, width)
    statement, _, comment = code.partition(COMMENT)
    if len(lines) == 1 or not comment:
        return lines
    mark = COMMENT.lstrip()
    return wrap(statement, width) + [mark + line for line in wrap(comment, width - len(mark))]


def _without_separators(lines: list[str]) -> list[str]:
    """Return lines that neither begin nor end with a separator where they were broken."""
    begun = [line.removeprefix(SEPARATOR.lstrip()) for line in lines]
    ended = [line.removesuffix(SEPARATOR.rstrip()) for line in begun[:-1]]
    return [*ended, begun[-1]]


def _broken_word(word: str, width: int) -> list[str]:
    """Return a word in pieces of at most ``width`` columns, broken between the parts of a path if
    it has any.
    """
    pieces = []
    piece = ""
    used = 0
    for letter in word:
        needed = columns(letter)
        if used + needed > width:
            place = _place_to_break(piece, letter)
            pieces.append(piece[:place])
            piece = piece[place:]
            used = columns(piece)
        piece += letter
        used += needed
    return [*pieces, piece]


def _place_to_break(piece: str, following: str) -> int:
    """Return the last joint in the second half of a piece, or its end."""
    if following in _BEGINS_PART:
        return len(piece)
    place = len(piece)
    for joint in _JOINT.finditer(piece, len(piece) // 2 + 1):
        place = joint.start()
    return place


_WIDEST_WHOLE = 40
"""Maximum width of a column of code that is broken last."""


def _lines_of_table(table: Table, style: Style) -> list[str]:
    """Return the lines of ``table`` without its title: headings, a rule, and rows followed by their
    bars.

    Numbers are never broken. If the columns do not fit side by side, texts that are equal in all
    rows follow the table, and expendable columns are left out; if that is not enough, each row
    becomes a line of names and values.
    """
    width = max(_NARROWEST, style.width or _TABLE_WIDTH) - 2
    lines = _if_it_fits(table, style, width)
    if lines is not None:
        return lines
    table, equal = table.without_equal_columns()
    below = _hanging(clean(equal), style.width) if equal else []
    shorter = table
    left_out = list[str]()
    lines = _if_it_fits(shorter, style, width)
    for name in table.expendable:
        if lines is None and name in table.columns:
            shorter = shorter.without(name)
            left_out.append(name)
            lines = _if_it_fits(shorter, style, width)
    if lines is None:
        return [*_one_below_the_other(_Grid(table), width), *below]
    if left_out:
        below += _hanging(f"columns left out in this width: {', '.join(left_out)}", style.width)
    return [*lines, *below]


def _if_it_fits(table: Table, style: Style, width: int) -> list[str] | None:
    """Return the lines of a table, or None if its columns do not fit side by side."""
    grid = _Grid(table)
    bars = list[str]()
    if style.bars and any(table.bars):
        bars = [text_bar(bar) if bar else "" for bar in table.bars]
    for layout in grid.layouts(bars):
        widths = grid.fitting(layout, width)
        if widths is not None:
            return _side_by_side(grid, widths, layout, style)
    return None


class _Layout(NamedTuple):
    """A way to place columns side by side."""

    unbroken: Sequence[bool]
    """For each column, True if its texts are not broken."""
    bars: Sequence[str]
    gap: int
    """Blanks between two columns."""

    @property
    def bar_width(self) -> int:
        """Columns of a bar and of the gap before it."""
        if self.bars:
            return self.gap + BAR_COLUMNS
        return 0


class _Grid:
    """The cleaned texts of a table, and the widths of its columns."""

    def __init__(self, table: Table) -> None:
        self.head = list(map(clean, table.columns))
        self.body = [list(map(clean, row)) for row in table.rows]
        self.widths: list[int] = []
        for texts in zip(self.head, *self.body, strict=True):
            self.widths.append(max(map(columns, texts)))
        self.is_number: list[bool] = []
        self._wrap: list[Callable[[str, int], list[str]]] = []
        self._is_whole: list[bool] = []
        """True for columns of numbers, and for short code, which is broken last."""
        for name, width in zip(table.columns, self.widths, strict=True):
            is_number = name in table.numbers
            is_code = name in table.whole and width <= _WIDEST_WHOLE
            self.is_number.append(is_number)
            self._wrap.append(wrap_code if name in table.whole else wrap)
            self._is_whole.append(is_number or is_code)

    def layouts(self, bars: Sequence[str]) -> Iterator[_Layout]:
        """Yield ways to place the columns, the best first.

        Short code is broken only if the table fits neither with narrow gaps nor without its bars.
        """
        for unbroken in (self._is_whole, self.is_number):
            for bars_shown in (bars, ()):
                for gap in _GAPS:
                    yield _Layout(unbroken, bars_shown, gap)

    def fitting(self, layout: _Layout, width: int) -> list[int] | None:
        """Return the widths of the columns, or None if they do not fit in ``width``."""
        gaps = layout.gap * (len(self.widths) - 1)
        return _fitting(self.widths, layout.unbroken, width - gaps - layout.bar_width)

    def wrapped(self, row: Sequence[str], widths: Sequence[int], gap: int) -> list[str]:
        """Return the lines of a row, whose texts are wrapped to the widths of the columns."""
        columns_of_lines = []
        looks = zip(widths, self.is_number, self._wrap, strict=True)
        for text, (width, is_number, wrapped) in zip(row, looks, strict=True):
            align = _right if is_number else _left
            lines = [align(line, width) for line in wrapped(text, width)]
            columns_of_lines.append(lines)
        height = max(map(len, columns_of_lines))
        for lines, width in zip(columns_of_lines, widths, strict=True):
            missing = height - len(lines)
            lines += [" " * width] * missing
        between = " " * gap
        return [between.join(cells) for cells in zip(*columns_of_lines, strict=True)]


def _left(text: str, width: int) -> str:
    """Return a text with blanks after it; ``str.ljust`` counts letters instead of columns."""
    return text + " " * (width - columns(text))


def _right(text: str, width: int) -> str:
    """Return a text with blanks before it."""
    return " " * (width - columns(text)) + text


def _side_by_side(grid: _Grid, widths: Sequence[int], layout: _Layout, style: Style) -> list[str]:
    """Return the lines of a table whose columns fit."""
    gap = layout.gap
    body = []
    for number, row in enumerate(grid.body):
        lines = grid.wrapped(row, widths, gap)
        if layout.bars:
            lines[0] += " " * gap + layout.bars[number]
        body += lines
    rule = "─" * (sum(widths) + gap * (len(widths) - 1) + layout.bar_width)
    start = "  "
    end = ""
    if style.colour:
        start = f"  {_DIM}"
        end = _RESET
    top = [*grid.wrapped(grid.head, widths, gap), rule]
    lines_of_top = [f"{start}{line.rstrip()}{end}" for line in top]
    lines_of_body = [f"  {line.rstrip()}" for line in body]
    return lines_of_top + lines_of_body


def _one_below_the_other(grid: _Grid, width: int) -> list[str]:
    """Return a line of names and values for each row."""
    lines = []
    for row in grid.body:
        named = []
        for name, text in zip(grid.head, row, strict=True):
            if text:
                named.append(f"{name}{_NO_BREAK}{text}")
        first, *more = wrap(SEPARATOR.join(named), width - 2)
        lines += [f"  {first}", *_indented(more)]
    return lines


def _fitting(widths: Sequence[int], unbroken: Sequence[bool], room: int) -> list[int] | None:
    """Return widths that sum to at most ``room``, or None: unbroken columns keep theirs, the
    widest of the rest shrink first.
    """
    if sum(widths) <= room:
        return list(widths)
    for most in range(min(max(widths), room), _NARROWEST_TEXT - 1, -1):
        narrowed = []
        for width, is_unbroken in zip(widths, unbroken, strict=True):
            if not is_unbroken:
                width = min(width, most)
            narrowed.append(width)
        if sum(narrowed) <= room:
            return narrowed
    return None
