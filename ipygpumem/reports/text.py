"""Lays reports out as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ipygpumem.reports.bars import BAR_COLUMNS, text_bar
from ipygpumem.reports.grid import columns, draw, fold
from ipygpumem.reports.layout import SEPARATOR, Report, Segment, Table, clean

_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Style:
    """What the place that shows the text can do."""

    width: int | None = None
    """Columns to keep within; None where nobody knows: then lines are never broken."""
    colour: bool = False
    bars: bool = False


PLAIN = Style()
ASCII = str.maketrans({"…": "...", "→": "->", **dict(zip("·×─▒█░▕▏┃▁▂▃▄▅▆▇", "-x-=#-[]|_.-=+*#", strict=True))})
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
    blocks += [_titled(fact.title, fact.text, style) for fact in report.facts]
    blocks += [_wrapped(line, style) for line in report.lines]
    for listing in report.listings:
        blocks.append(_titled(listing.title, f"{listing.title}:", style))
        blocks += [_wrapped(line, style) for line in listing.lines]
    return "\n".join(blocks)


# -- the headline ---------------------------------------------------------------------------------------------


def _headline(segments: tuple[Segment, ...], style: Style) -> str:
    texts = [clean(segment.text) for segment in segments]
    plain = [(text, columns(text)) for text in texts]
    parts = plain
    if style.bars:
        parts = [_with_bar(part, segment, style) for part, segment in zip(plain, segments, strict=True)]
    lines = _broken(parts, plain, style.width)
    if style.colour and lines[0].startswith(texts[0]):
        lines[0] = f"{_BOLD}{texts[0]}{_RESET}{lines[0][len(texts[0]) :]}"
    return "\n".join(lines)


def _with_bar(part: tuple[str, int], segment: Segment, style: Style) -> tuple[str, int]:
    if segment.bar is None:
        return part
    return f"{part[0]} {text_bar(segment.bar, colour=style.colour)}", part[1] + 1 + BAR_COLUMNS


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
    lines = draw(table, width, bars=style.bars, colour=style.colour)
    if style.colour:
        rule = next((number for number, line in enumerate(lines) if line and not line.strip("─")), -1)
        lines = [f"{_DIM}{line}{_RESET}" if number <= rule else line for number, line in enumerate(lines)]
    return "\n".join([_wrapped(table.title, style)] * bool(table.title) + [f"  {line}" for line in lines])
