"""Lays reports out as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipygpumem.records import COMMENT
from ipygpumem.report.layout import SEPARATOR, Bar, Report, Table
from ipygpumem.report.words import clean, listed


@dataclass(frozen=True)
class Style:
    """The form of the text: the width, the colours and the bars that the output stream allows."""

    width: int | None = None
    """Columns of the terminal; None if they are unknown, so that lines are not wrapped."""
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
"""Matches a drawn bar."""
_PIECE = re.compile("▒+|█+|░+")
"""Matches a piece of a drawn bar."""
_BAR_LETTERS = 8
BAR_COLUMNS = _BAR_LETTERS + 2
"""Width of a bar with its two ends."""
_TABLE_WIDTH = 120
"""Maximum width of a table if the width of the terminal is unknown."""
_NARROWEST = 20
"""Width for which tables are laid out in a narrower terminal."""


def encodable(shown: str, encoding: str) -> str:
    """Return a text that a stream can encode: with ASCII characters instead of our own ones, if the
    ``encoding`` does not have these.
    """
    try:
        "".join(map(chr, ASCII)).encode(encoding)
    except UnicodeEncodeError:
        return shown.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return shown


def render(reports: Iterable[Report], style: Style = PLAIN) -> str:
    """Return the reports as text, one below the other."""
    return "\n".join([_text_report(report, style) for report in reports])


def _text_report(report: Report, style: Style) -> str:
    """Return one report as text: its headline, tables, facts, lines and listings."""
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
    parts = []
    parts_with_bars = []
    for text, bar in report.segments:
        part = clean(text)
        parts.append(part)
        if style.bars and bar is not None:
            part += f" {text_bar(bar)}"
        parts_with_bars.append(part)
    lines = _parts_in_lines(parts, parts_with_bars, style.width)
    if style.colour:
        lines[0] = _styled(lines[0], parts[0], _BOLD)
    return lines


def _styled(line: str, start: str, escape: str) -> str:
    """Return a line with its start in a style; unchanged if the line does not have all of the
    start, because that is broken over several lines.

    Args:
        line: the line.
        start: the text at its start.
        escape: the escape sequence of the style.
    """
    if not line.startswith(start):
        return line
    return f"{escape}{start}{_RESET}{line.removeprefix(start)}"


def _parts_in_lines(parts: list[str], parts_with_bars: list[str], width: int | None) -> list[str]:
    """Return a headline in lines of at most ``width`` columns.

    One line is tried first, with the bars and then without them. Otherwise it breaks between its
    parts, which keep their bars if each of them fits in a line; a part that is too long breaks
    between words.

    Args:
        parts: the parts without their bars.
        parts_with_bars: the same parts, each with its bar.
        width: the columns of the terminal; None if they are unknown.
    """
    if width is None:
        return [SEPARATOR.join(parts_with_bars)]
    for shown in (parts_with_bars, parts):
        line = SEPARATOR.join(shown)
        if columns(line) <= width:
            return [line]
    shown = parts_with_bars
    is_a_part_too_long = any(columns(part) > width - 2 for part in shown)
    if is_a_part_too_long:
        shown = parts
    lines = _hanging(shown[0], width, indent="")
    for part in shown[1:]:
        longer = lines[-1] + SEPARATOR + part
        if columns(longer) <= width:
            lines[-1] = longer
        else:
            lines += _hanging(part, width)
    return lines


def _hanging(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Return a text in lines. The first one begins with ``indent``, and further ones with four
    blanks.
    """
    if width is None or columns(text) <= width - len(indent):
        return [indent + text]
    first, *further = wrap(text, width - 4)
    return [indent + first, *_indented(further)]


def _indented(lines: Iterable[str]) -> list[str]:
    """Return lines that continue a text, indented by four blanks."""
    return [f"    {line}" for line in lines]


def _titled(title: str, text: str, style: Style) -> list[str]:
    """Return a text in lines; in a terminal with colours, the title at its start is dim."""
    lines = _hanging(clean(text), style.width)
    if style.colour:
        lines[0] = _styled(lines[0], f"  {title}", _DIM)
    return lines


# -- bars ---------------------------------------------------------------------------------------


def text_bar(bar: Bar) -> str:
    """Return a bar in characters, such as ``▕▒▒█░ ▏``; it ends with ``┃`` if it ends at the
    device's total.

    Memory in use before is ``▒``, kept memory ``█``, and the peak above both ``░``. A piece has at
    least one character, if there is room.
    """
    before, kept, peak = _letters_of(bar)
    drawn = "▒" * before + "█" * kept + "░" * peak
    end = "┃" if bar.is_whole else "▏"
    return f"▕{drawn:{_BAR_LETTERS}}{end}"


def _letters_of(bar: Bar) -> list[int]:
    """Return the number of characters of each of a bar's three pieces."""
    pieces = bar.pieces
    letters = []
    # The ends of pieces are rounded, not their lengths, so that errors do not add up.
    begin = bytes_until_end = 0
    for piece in pieces:
        bytes_until_end += piece
        end = round(bytes_until_end * _BAR_LETTERS / bar.length_bytes)
        letters.append(end - begin)
        begin = end
    # Pieces that are rounded to nothing get one character.
    largest_first = sorted(range(3), key=pieces.__getitem__, reverse=True)
    for index in largest_first:
        if not pieces[index] or letters[index]:
            continue
        letters[index] = 1  # taken from the free part, else from the longest piece
        if sum(letters) > _BAR_LETTERS:
            longest = letters.index(max(letters))
            letters[longest] -= 1
    return letters


def _in_colour(bar: re.Match[str]) -> str:
    """Return a drawn bar with its pieces in colour."""
    return _PIECE.sub(_piece_in_colour, bar[0])


def _piece_in_colour(piece: re.Match[str]) -> str:
    """Return a piece of a drawn bar in its colour."""
    letters = piece[0]
    return _COLOURS[letters[0]] + letters + _RESET


# -- wrapping -----------------------------------------------------------------------------------

_TOGETHER = re.compile(r"(?<=\d) (?=[KMGTP]?i?B\b)| (?=· )")
"""Matches blanks at which no line is broken: before a unit, and before a separator."""
_BEGINS_PART = ".[("
"""Characters with which a part of a path or call begins, as in ``model.layers[3]``."""
_JOINT = re.compile(r"(?<=[_/,=-])|(?=[.\[(])")
"""Matches places to break a long path or call."""
_NO_BREAK = "\N{NO-BREAK SPACE}"  # cleaned text has none
_FIRST_WIDE = "\N{HANGUL CHOSEONG KIYEOK}"  # no character before it takes two columns


def columns(text: str) -> int:
    """Return the number of terminal columns of a text: East Asian characters take two."""
    if text.isascii() or max(text) < _FIRST_WIDE:
        return len(text)
    width = len(text)
    for letter in text:
        if unicodedata.east_asian_width(letter) in "WF":
            width += 1
    return width


def wrap(text: str, width: int) -> list[str]:
    """Return a text in lines of at most ``width`` columns. It is broken between words, but not
    between a number and its unit.
    """
    if columns(text) <= width:
        return [text.replace(_NO_BREAK, " ")]
    if text.startswith(" ") and not text.isspace():
        return _wrap_source(text, width)
    lines = [""]
    columns_used = 0
    for word in _TOGETHER.sub(_NO_BREAK, text).split(" "):
        columns_of_word = columns(word)
        if columns_used and columns_used + 1 + columns_of_word <= width:
            lines[-1] += f" {word}"
            columns_used += 1 + columns_of_word
            continue
        pieces = [word] if columns_of_word <= width else _broken_word(word, width)
        if lines == [""]:
            lines = pieces
        else:
            lines += pieces
        columns_used = columns(pieces[-1])
    return _without_separators([line.replace(_NO_BREAK, " ") for line in lines])


def _wrap_source(text: str, width: int) -> list[str]:
    """Return an indented line of source code in several lines, all of them with its indentation."""
    code = text.lstrip(" ")
    indent = " " * min(len(text) - len(code), width // 2)
    return [indent + line for line in wrap(code, width - len(indent))]


def wrap_code(code: str, width: int) -> list[str]:
    """Return a line of code in lines of at most ``width`` columns. If its comment is broken, each
    line of it begins with ``#``, so that the lines can be pasted.
    """
    lines = wrap(code, width)
    statement, _, comment = code.partition(COMMENT)
    if len(lines) == 1 or not comment:
        return lines
    mark = COMMENT.lstrip()
    return wrap(statement, width) + [mark + line for line in wrap(comment, width - len(mark))]


def _without_separators(lines: list[str]) -> list[str]:
    """Return lines without the separators at which they were broken: none begins or ends with
    one.
    """
    *without_start, last = [line.removeprefix(SEPARATOR.lstrip()) for line in lines]
    without_end = [line.removesuffix(SEPARATOR.rstrip()) for line in without_start]
    return [*without_end, last]


def _broken_word(word: str, width: int) -> list[str]:
    """Return a word in pieces of at most ``width`` columns. A path is broken between its parts:
    ``model.layers`` and ``[3].weight``.
    """
    pieces = []
    piece = ""
    columns_used = 0
    for letter in word:
        columns_of_letter = columns(letter)
        if columns_used + columns_of_letter > width:
            place = _place_to_break(piece, letter)
            pieces.append(piece[:place])
            piece = piece[place:]
            columns_used = columns(piece)
        piece += letter
        columns_used += columns_of_letter
    return [*pieces, piece]


def _place_to_break(piece: str, next_letter: str) -> int:
    """Return the index at which to break a piece of a word: at the last joint in its second half,
    or else at its end.

    Args:
        piece: the piece, which fills a line.
        next_letter: the letter after it.
    """
    if next_letter in _BEGINS_PART:
        return len(piece)
    place = len(piece)
    for joint in _JOINT.finditer(piece, len(piece) // 2 + 1):
        place = joint.start()
    return place


# -- tables -------------------------------------------------------------------------------------

_GAPS = (3, 2)
"""Blanks between two columns, the first choice first."""
_NARROWEST_TEXT = 18
"""Minimum columns of a terminal for a long text next to other columns."""
_WIDEST_CODE = 40
"""Maximum width of a column of code that is broken last."""


def _lines_of_table(table: Table, style: Style) -> list[str]:
    """Return the lines of a table without its title: headings, a rule, and rows, each followed by
    its bar.

    If the columns do not fit side by side, three things are tried in this order: texts that are
    equal in all rows follow the table; expendable columns are left out; each row becomes a line of
    headings and values. Numbers are never broken.
    """
    width = max(_NARROWEST, style.width or _TABLE_WIDTH) - 2
    lines = _lines_if_it_fits(table, style, width)
    if lines is not None:
        return lines
    table, equal_texts = table.without_equal_columns()
    lines_below = _hanging(clean(equal_texts), style.width) if equal_texts else []
    smaller_table = table
    columns_left_out = list[str]()
    lines = _lines_if_it_fits(smaller_table, style, width)
    for name in table.expendable:
        if lines is None and name in table.columns:
            smaller_table = smaller_table.without(name)
            columns_left_out.append(name)
            lines = _lines_if_it_fits(smaller_table, style, width)
    if lines is None:
        return [*_lines_of_rows(_Grid.of(table), width), *lines_below]
    if columns_left_out:
        remark = f"columns left out in this width: {', '.join(columns_left_out)}"
        lines_below += _hanging(remark, style.width)
    return [*lines, *lines_below]


def _lines_if_it_fits(table: Table, style: Style, width: int) -> list[str] | None:
    """Return the lines of a table with its columns side by side; None if they do not fit in
    ``width``.
    """
    grid = _Grid.of(table)
    bars = list[str]()
    if style.bars and any(table.bars):
        bars = [text_bar(bar) if bar else "" for bar in table.bars]
    for layout in grid.layouts(bars):
        widths = grid.widths_in(layout, width)
        if widths is not None:
            return _side_by_side(grid, widths, layout, style)
    return None


class _Column(NamedTuple):
    """A column of a table, with cleaned texts."""

    heading: str
    texts: Sequence[str]
    """The text of each row."""
    width: int
    """Terminal columns of its widest text."""
    is_number: bool
    """True for numbers, which are right-aligned and never broken."""
    is_code: bool
    """True for code to paste, whose comment is a comment in each of its lines."""

    @classmethod
    def of(cls, table: Table, place: int) -> _Column:
        """Return the column at a place in a table."""
        name = table.columns[place]
        heading = clean(name)
        texts = [clean(row[place]) for row in table.rows]
        width = max(map(columns, (heading, *texts)))
        return cls(heading, texts, width, name in table.numbers, name in table.whole)

    @property
    def is_broken_last(self) -> bool:
        """True for numbers and for short code: their width is kept while other columns get
        narrower.
        """
        return self.is_number or (self.is_code and self.width <= _WIDEST_CODE)

    def lines(self, text: str, width: int) -> list[str]:
        """Return one of its texts in lines that are ``width`` columns wide, filled up with
        blanks.
        """
        lines = wrap_code(text, width) if self.is_code else wrap(text, width)
        align = _right if self.is_number else _left
        return [align(line, width) for line in lines]


class _Layout(NamedTuple):
    """A way to place columns side by side."""

    unbroken: Sequence[bool]
    """For each column, True if its texts are not broken."""
    bars: Sequence[str]
    """The bar of each row, or none at all."""
    gap: int
    """Blanks between two columns."""

    @property
    def bar_width(self) -> int:
        """Columns that a bar and the gap before it take; 0 without bars."""
        if self.bars:
            return self.gap + BAR_COLUMNS
        return 0


class _Grid(NamedTuple):
    """The columns of a table, to be placed side by side."""

    columns: Sequence[_Column]

    @classmethod
    def of(cls, table: Table) -> _Grid:
        """Return the columns of a table."""
        return cls([_Column.of(table, place) for place in range(len(table.columns))])

    @property
    def headings(self) -> list[str]:
        """The headings of all columns."""
        return [column.heading for column in self.columns]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The texts of each row."""
        return list(zip(*(column.texts for column in self.columns), strict=True))

    def layouts(self, bars: Sequence[str]) -> Iterator[_Layout]:
        """Yield the ways to place the columns side by side, the best first.

        Short code is broken only if the table does not fit otherwise, neither with narrow gaps nor
        without its bars.
        """
        unbroken_at_first = [column.is_broken_last for column in self.columns]
        never_broken = [column.is_number for column in self.columns]
        for unbroken in (unbroken_at_first, never_broken):
            for bars_shown in (bars, ()):
                for gap in _GAPS:
                    yield _Layout(unbroken, bars_shown, gap)

    def widths_in(self, layout: _Layout, width: int) -> list[int] | None:
        """Return the width of each column in a layout; None if they do not fit in ``width``."""
        widths = [column.width for column in self.columns]
        gaps = layout.gap * (len(widths) - 1)
        return _narrowed(widths, layout.unbroken, width - gaps - layout.bar_width)

    def lines_of_row(self, texts: Sequence[str], widths: Sequence[int], gap: int) -> list[str]:
        """Return the lines of a row: its texts next to each other, each wrapped to the width of its
        column.
        """
        cells = []
        for column, text, width in zip(self.columns, texts, widths, strict=True):
            cells.append(column.lines(text, width))
        # The shorter cells get empty lines.
        height = max(map(len, cells))
        for lines, width in zip(cells, widths, strict=True):
            number_missing = height - len(lines)
            lines += [" " * width] * number_missing
        between = " " * gap
        return [between.join(line_parts) for line_parts in zip(*cells, strict=True)]


def _left(text: str, width: int) -> str:
    """Return a text with blanks after it, ``width`` columns wide; ``str.ljust`` would count
    letters.
    """
    return text + " " * (width - columns(text))


def _right(text: str, width: int) -> str:
    """Return a text with blanks before it, ``width`` columns wide."""
    return " " * (width - columns(text)) + text


def _side_by_side(grid: _Grid, widths: Sequence[int], layout: _Layout, style: Style) -> list[str]:
    """Return the lines of a table whose columns have the given widths: the headings, a rule, and
    the rows.
    """
    gap = layout.gap
    body = []
    for number, texts in enumerate(grid.rows):
        lines = grid.lines_of_row(texts, widths, gap)
        if layout.bars:
            lines[0] += " " * gap + layout.bars[number]
        body += lines
    rule = "─" * (sum(widths) + gap * (len(widths) - 1) + layout.bar_width)
    start = "  "
    end = ""
    if style.colour:
        start = f"  {_DIM}"
        end = _RESET
    top = [*grid.lines_of_row(grid.headings, widths, gap), rule]
    lines_of_top = [f"{start}{line.rstrip()}{end}" for line in top]
    lines_of_body = [f"  {line.rstrip()}" for line in body]
    return lines_of_top + lines_of_body


def _lines_of_rows(grid: _Grid, width: int) -> list[str]:
    """Return each row as a text of headings and values, for a terminal in which the columns do not
    fit side by side.
    """
    lines = []
    for texts in grid.rows:
        values = []
        for heading, text in zip(grid.headings, texts, strict=True):
            if text:
                values.append(f"{heading}{_NO_BREAK}{text}")
        first, *further = wrap(SEPARATOR.join(values), width - 2)
        lines += [f"  {first}", *_indented(further)]
    return lines


def _narrowed(widths: Sequence[int], unbroken: Sequence[bool], room: int) -> list[int] | None:
    """Return widths for columns that sum to at most ``room``; None if the columns cannot be so
    narrow.

    Args:
        widths: the widths of the widest texts.
        unbroken: for each column, True if it keeps its width. The widest of the other columns
            shrink first, down to ``_NARROWEST_TEXT``.
        room: the columns of the terminal.
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
