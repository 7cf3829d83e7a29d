"""Lays reports out as HTML for notebooks, with every text escaped. It stays readable without its
styles.

Text has the page's own colour, so that it is legible in every theme; only borders and bars are
coloured. There is no script, style sheet, id or external resource. If a sanitizer drops the styles
(GitHub) or the theme variables (untrusted notebooks), words and collapsible tables remain. The
bars' middle tones have equal contrast to light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from ipygpumem.report import text
from ipygpumem.report.colours import IN_USE, PEAK
from ipygpumem.report.layout import SEPARATOR, Bar, Fact, Listing, Report, Table
from ipygpumem.report.words import clean, listed

_TOGETHER = re.compile(
    r"(?<=\d) (?=(?:[KMGTP]?i?B|[mnµ]?s|min|h)\b)|(?<=\d) (?=× \d)|(?<=\d ×) (?=\d)"
)
_OPEN_LINES = 5
"""Maximum number of lines of a listing that is shown open."""

# Each theme variable follows a plain value: JupyterLab's sanitizer drops one and keeps the other.
_CODE = (
    "font-family: monospace; font-family: var(--jp-code-font-family, "
    "var(--vscode-editor-font-family, monospace))"
)
_SANS = (
    "font-family: sans-serif; font-family: var(--jp-ui-font-family, var(--vscode-font-family, "
    "sans-serif))"
)
_LINE = (
    f'<div style="{_CODE}; font-size: 0.85em; line-height: 1.6; '
    'margin-left: 5px; margin-left: var(--jp-code-padding, 5px)">{}</div>'
)
# A text in parts breaks between them. A separator stands in a margin to the left of its part; at
# the start of a line this margin lies outside the frame, which hides it.
_PARTS = (
    '<span style="display: inline-flex; flex-wrap: wrap; align-items: baseline; overflow: hidden; '
    "max-width: {}%; "
    'vertical-align: top">{}</span>'
)
_PART = (
    '<span style="display: flex; max-width: 100%; margin: 0 1.3em 0 -1.3em">'
    '<span style="flex: 0 0 1.3em; text-align: center; opacity: 0.75">· </span>'
    '<span style="min-width: 0; overflow-wrap: anywhere; opacity: {}">{}</span></span>'
)
_FIRST = '<{0} style="min-width: 0; overflow-wrap: anywhere; margin-right: 1.3em{1}">{2}</{0}>'

_ACCENT = (IN_USE, f"var(--jp-brand-color1, var(--vscode-focusBorder, {IN_USE}))")
_TROUBLE = ("#e67e22", "var(--jp-warn-color1, var(--vscode-editorWarning-foreground, #e67e22))")
_FRAME = (
    f'<details open style="{_SANS}; font-size: 0.9em; line-height: 1.5; border-left: 3px solid '
    f"{{}}; "
    "border-left-color: {}; padding: 0.2em 0 0.2em 0.8em; margin: 0.4em 0 0.4em 5px; "
    'margin-left: var(--jp-code-padding, 5px)">\n<summary style="cursor: pointer">{}</summary>\n'
    "{}\n</details>"
)
_COLLAPSIBLE = (
    '<details{} style="margin: 0.3em 0">\n<summary style="cursor: pointer; opacity: '
    '0.85">{}</summary>\n{}\n</details>'
)
# Rows wrap on a narrow page, each at the same places, because a column has one width in all of
# them. The second line of a row starts under the second column. Without the styles it is a plain
# table.
_TABLE = (
    '<table style="display: block; width: {}; max-width: 100%; margin: 0.2em 0; font-size: '
    "inherit; "
    'font-variant-numeric: tabular-nums; border: none">\n<thead style="display: block; border: '
    'none">\n{}\n</thead>\n'
    '<tbody style="display: block">\n{}\n</tbody>\n</table>'
)
_ROW = (
    '<tr style="display: flex; flex-wrap: wrap; align-items: baseline; padding: 0 0 0 {indent}; '
    "background: transparent; border: none; border-bottom: 1px solid rgba(128, 128, 128, "
    '{line})">{cells}</tr>'
)
_CELL = (
    '<{kind} style="flex: {width}; box-sizing: content-box; text-align: {side}; line-height: 1.4; '
    'padding: 0.1em {gap}em 0.1em 0; border: none{more}">{content}</{kind}>'
)
_HEADING = "; font-weight: 500; font-family: inherit; opacity: 0.75"
_LETTER = 0.64
"""Upper bound of a digit's width, in em, because JupyterLab's sanitizer does not accept ch;
DejaVu's is 0.636.
"""
_GAP = 1.1
"""Gap between columns, in em."""
_LONGEST_TABLE = 64
"""Maximum letters of a table's columns together; in a wider table, texts that are equal in all rows
follow the table.
"""
_WIDEST_TEXT = 24
"""Maximum letters that a column of text claims; it grows into the free part of a line, and wraps.
"""
_WIDEST_SECOND_TEXT = 11
"""The same for the second column, which wraps next to the first one."""
_DEEPEST_INDENT = 14
"""Maximum letters of a first column below which the next line of a row begins; after a longer one
it is indented slightly.
"""
_NAME = (
    f'<code style="{_CODE}; background: transparent; padding: 0; overflow-wrap: '
    f'break-word">{{}}</code>'
)

_TRACK = (
    '<span role="img" title="{label}" aria-label="{label}" style="display: inline-block; width: '
    "64px; height: 8px; "
    "line-height: 8px; font-size: 0; text-align: left; white-space: nowrap; overflow: hidden; "
    'background: rgba(128, 128, 128, 0.22); border-radius: 2px{tick}">{pieces}</span>'
)
_PIECE = (
    '<span style="display: inline-block; height: {}px; min-width: 2px; width: {:.1f}%; background: '
    '{}"></span>'
)
# The peak is past, so it is half as high. The shades of "in use before" and "kept" differ in grey,
# too.
_PIECES = ((8, "rgba(128, 128, 128, 0.6)"), (8, IN_USE), (4, PEAK))


def with_text(reports: Sequence[Report], *, bars: bool) -> dict[str, str]:
    """Return the reports in two forms by MIME type, HTML and text; a front-end shows one of
    them.
    """
    return {"text/plain": text.render(reports), "text/html": render(reports, bars=bars)}


def render(reports: Iterable[Report], *, bars: bool = True) -> str:
    """Return the reports as HTML, one below the other."""
    return "\n".join([_html_report(report, bars=bars) for report in reports])


def _escaped(text: str) -> str:
    """Return a text as HTML, in which no line breaks between a number and its unit."""
    return _TOGETHER.sub("\N{NO-BREAK SPACE}", escape(clean(text)))


def _html_parts(first: str, *further: str) -> str:
    """Return the parts of a line, which are HTML, in a row with separators between them."""
    return _parts_in_a_row("span", first, further, style="", opacity=1, width=100)


def _html_headline(first: str, *further: str) -> str:
    """Return the parts of a headline, which are HTML, in a row; the first one is bold."""
    return _parts_in_a_row("b", first, further, style="; font-weight: 600", opacity=0.85, width=95)


def _parts_in_a_row(
    element: str, first: str, further: Sequence[str], *, style: str, opacity: float, width: int
) -> str:
    """Return parts next to each other, with separators.

    Args:
        element: the HTML element of the first part.
        first: the first part, as HTML.
        further: the further parts, as HTML.
        style: the further style of the first part.
        opacity: the opacity of the further parts.
        width: the maximum width of all parts, in percent of the page.
    """
    parts = [_FIRST.format(element, style, first)]
    parts += [_PART.format(opacity, part) for part in further]
    return _PARTS.format(width, " ".join(parts))


def _line(line: str) -> str:
    """Return a line as HTML. If it has several parts, it breaks between them."""
    if SEPARATOR not in line:
        return _escaped(line)
    return _html_parts(*map(_escaped, line.split(SEPARATOR)))


def _html_report(report: Report, *, bars: bool) -> str:
    """Return one report: in a frame that collapses if it has more than a headline, else as a line.
    The lines of a cell's report stand below its headline without a frame.
    """
    parts: list[str] = []
    for line, bar in report.segments:
        first, *further = map(_escaped, line.split(SEPARATOR))
        if bars and bar is not None:
            first = f"{html_bar(bar)} {first}"
        parts += [first, *further]
    has_lines = bool(report.lines) and report.kind != "cell"
    if report.tables or report.facts or report.listings or has_lines:
        plain, themed = _TROUBLE if report.is_trouble else _ACCENT
        body = "\n".join(_body(report, bars=bars))
        return _FRAME.format(plain, themed, _html_headline(*parts), body)
    is_more_than_a_word = len(parts) > 1 or report.lines
    head = _html_headline(*parts) if is_more_than_a_word else parts[0]
    lines = [head, *map(_line, report.lines)]
    return _LINE.format("<br>".join(lines))


def _body(report: Report, *, bars: bool) -> Iterator[str]:
    """Yield the HTML of the parts below the headline."""
    for table in report.tables:
        html_table = _html_table(table, bars=bars)
        if table.title:
            html_table = _collapsible(table.title, html_table, shown=not table.is_collapsed)
        yield html_table
    for fact in report.facts:
        yield _fact(fact)
    for line in report.lines:
        yield f'<div style="overflow-wrap: break-word">{_line(line)}</div>'
    for listing in report.listings:
        yield _listing(listing)


def _fact(fact: Fact) -> str:
    """Return a fact in a line: its title and its values."""
    values = [_escaped(value) for value in fact.values]
    if fact.code:
        values = [_NAME.format(value) for value in values]
    title = f'<span style="opacity: 0.75">{_escaped(fact.title)}:</span>'
    return f"<div>{title} {listed(values, fact.most)}</div>"


def _listing(listing: Listing) -> str:
    """Return a listing, which the front-end can collapse: its title, and its lines."""
    look = "overflow-wrap: break-word; padding-left: 1em"
    draw: Callable[[str], str] = _line
    title = f"{listing.title}: {len(listing.lines)}"
    is_short = len(listing.lines) <= _OPEN_LINES
    if listing.code:
        look += f"; white-space: pre-wrap; {_CODE}"
        draw = _escaped
        title = listing.title
        is_short = True
    lines = [f'<div style="{look}">{draw(line)}</div>' for line in listing.lines]
    return _collapsible(title, "\n".join(lines), shown=is_short and not listing.is_collapsed)


def _collapsible(title: str, content: str, *, shown: bool) -> str:
    """Return content below a title that collapses it.

    Args:
        title: the title, as text.
        content: the content, as HTML.
        shown: True if it is open at first.
    """
    state = " open" if shown else ""
    return _COLLAPSIBLE.format(state, _escaped(title), content)


class _Look(NamedTuple):
    """The style of a column's cells."""

    width: str
    """The value of ``flex``."""
    side: str
    """The value of ``text-align``."""
    style: str
    """Further style, which begins with a semicolon; may be empty."""


def _html_table(table: Table, *, bars: bool) -> str:
    """Return a table. A wide one leaves out the columns whose text is the same in all rows, which
    follow as a line. The bars come after the last column of numbers.
    """
    grid = [list(map(clean, row)) for row in (table.columns, *table.rows)]
    letters = []
    for texts in zip(*grid, strict=True):
        widths = map(text.columns, texts)
        letters.append(max(widths))
    if sum(letters) > _LONGEST_TABLE:  # without some columns it may fit
        smaller_table, equal_texts = table.without_equal_columns()
        if equal_texts:
            html_table = _html_table(smaller_table, bars=bars)
            return f'{html_table}\n<div style="opacity: 0.75">{_escaped(equal_texts)}</div>'
    letters = _room_for_wide_letters(table, letters)
    looks = _looks(table, letters)
    rows = [list(map(escape, row)) for row in grid]
    width_of_bars = 0
    if bars and any(table.bars):
        _insert_bars(table, rows, looks)
        width_of_bars = 7
    gaps = _GAP * (len(looks) + 1)
    whole_width = _em(sum(letters), gaps + width_of_bars)
    return _table_of(rows, looks, letters[0], whole_width)


def _table_of(
    rows: Sequence[Sequence[str]], looks: Sequence[_Look], first_letters: int, width: str
) -> str:
    """Return the HTML of a table.

    Args:
        rows: the headings, and then the rows, as HTML.
        looks: the look of each column.
        first_letters: the letters of the first column. Further lines of a row are indented by as
            much, if this is not too far.
        width: the width of the whole table.
    """
    indent = f"{_GAP}em"
    if first_letters <= _DEEPEST_INDENT:
        indent = _em(first_letters, _GAP)
    first_look = looks[0]
    # The first cell begins at the left margin, although the row is indented.
    hanging = first_look._replace(style=f"{first_look.style}; margin-left: -{indent}")
    looks = [hanging, *looks[1:]]
    head = _html_row(rows[0], looks, indent, is_head=True)
    body = [_html_row(row, looks, indent, is_head=False) for row in rows[1:]]
    return _TABLE.format(width, head, "\n".join(body))


def _room_for_wide_letters(table: Table, letters: Sequence[int]) -> list[int]:
    """Return the width of each column in letters, a little more than its texts have: a number has
    room for its heading, and a short word for wide letters such as ``W``.
    """
    wider = []
    for name, size in zip(table.columns, letters, strict=True):
        room = size
        if name in table.numbers:
            room = max(size, text.columns(name) + 1)
        elif size < 9:
            room = size + 1
        wider.append(room)
    return wider


def _looks(table: Table, letters: Sequence[int]) -> list[_Look]:
    """Return the look of each column, given its letters."""
    looks = []
    for place, (name, size) in enumerate(zip(table.columns, letters, strict=True)):
        is_number = name in table.numbers
        is_code = name in table.code
        looks.append(_look_of_column(size, number=is_number, code=is_code, is_second=place == 1))
    return looks


def _insert_bars(table: Table, rows: list[list[str]], looks: list[_Look]) -> None:
    """Insert a column of bars after the last column of numbers."""
    place = 0
    for number, name in enumerate(table.columns, 1):
        if name in table.numbers:
            place = number
    looks.insert(place, _Look("0 0 auto", "left", "; min-width: 66px"))
    for row, bar in zip(rows, (None, *table.bars), strict=True):
        cell = "" if bar is None else html_bar(bar)
        row.insert(place, cell)


def _em(letters: float, more: float = 0) -> str:
    """Return the width of some letters for a style, and ``more`` em in addition."""
    return f"{letters * _LETTER + more:.4g}em"


def _look_of_column(letters: int, *, number: bool, code: bool, is_second: bool) -> _Look:
    """Return the look of a column.

    Args:
        letters: the letters of its longest text.
        number: True for numbers, which are right-aligned and do not wrap.
        code: True for code, which is monospaced.
        is_second: True for the second column, which gets most of the free width.
    """
    font = f"; white-space: pre-wrap; {_CODE}" if code else ""
    if number:
        return _Look(f"0 0 {_em(letters)}", "right", f"; white-space: nowrap{font}")
    wanted_letters: float = letters
    if not code:
        # Letters are narrower than digits, by a factor that depends on the font.
        wanted_letters *= 0.9
    growth = 1
    most_letters = _WIDEST_TEXT
    if is_second:
        growth = 9
        most_letters = _WIDEST_SECOND_TEXT
    width = f"{growth} 1 {_em(min(wanted_letters, most_letters))}"
    style = f"; max-width: {_em(letters)}; min-width: 0; overflow-wrap: anywhere{font}"
    return _Look(width, "left", style)


def _html_row(row: Sequence[str], looks: Sequence[_Look], indent: str, *, is_head: bool) -> str:
    """Return a row of cells, or the headings."""
    kind = "td"
    heading = ""
    line = 0.12
    if is_head:
        kind = "th"
        heading = _HEADING
        line = 0.4
    cells = []
    for content, look in zip(row, looks, strict=True):
        cell = _CELL.format(
            kind=kind,
            gap=_GAP,
            width=look.width,
            side=look.side,
            more=look.style + heading,
            content=content,
        )
        cells.append(cell)
    return _ROW.format(indent=indent, line=line, cells="".join(cells))


def html_bar(bar: Bar) -> str:
    """Return a bar as HTML. Its label is the tooltip, and the text for screen readers."""
    pieces = []
    for size, (height, colour) in zip(bar.pieces, _PIECES, strict=True):
        if size:
            percent = 100 * size / bar.length_bytes
            pieces.append(_PIECE.format(height, percent, colour))
    tick = ""
    if bar.is_whole:
        tick = "; border-right: 2px solid rgba(128, 128, 128, 0.9)"
    label = escape(clean(bar.label))
    return _TRACK.format(label=label, pieces="".join(pieces), tick=tick)
