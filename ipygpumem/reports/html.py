"""Reports as HTML for notebooks, every text escaped; without its styles it reads well, too.

Text has the page's own colour, so that it is legible in every theme; colours are on borders and bars only. There is
no script, no style sheet, no id and nothing from outside. Where a sanitizer drops the styles (GitHub) or the theme
variables (notebooks that are not trusted), words, tables and folding stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from html import escape

from ipygpumem.reports.bars import html_bar, html_spark
from ipygpumem.reports.cleaning import clean
from ipygpumem.reports.layout import SEPARATOR, Fact, Listing, Report, Segment, Table

_OPEN_LINES = 5
"""Lines of a listing that are shown without asking."""

# Each theme variable follows a plain value: JupyterLab's sanitizer drops the one and keeps the other.
_CODE = "font-family: monospace; font-family: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace))"
_SANS = "font-family: sans-serif; font-family: var(--jp-ui-font-family, var(--vscode-font-family, sans-serif))"
_LINE = (
    f'<div style="{_CODE}; font-size: 0.85em; line-height: 1.6; '
    'margin-left: 5px; margin-left: var(--jp-code-padding, 5px)">{}</div>'
)
_PART = '<span style="display: inline-block; max-width: 100%; overflow-wrap: break-word; opacity: 0.85">{}</span>'
_FIRST = '<b style="font-weight: 600">{}</b>'

_ACCENT = ("#1e88e5", "var(--jp-brand-color1, var(--vscode-focusBorder, #1e88e5))")
_TROUBLE = ("#e67e22", "var(--jp-warn-color1, var(--vscode-editorWarning-foreground, #e67e22))")
_FRAME = (
    f'<details open style="{_SANS}; font-size: 0.9em; line-height: 1.5; border-left: 3px solid {{}}; '
    "border-left-color: {}; padding: 0.2em 0 0.2em 0.8em; margin: 0.4em 0 0.4em 5px; "
    'margin-left: var(--jp-code-padding, 5px)">\n<summary style="cursor: pointer">{}</summary>\n{}\n</details>'
)
_FOLD = (
    '<details{} style="margin: 0.3em 0">\n<summary style="cursor: pointer; opacity: 0.85">{}</summary>\n{}\n</details>'
)
_TABLE = (
    '<div style="overflow-x: auto; max-width: 100%">\n<table style="border-collapse: collapse; margin: 0.2em 0; '
    'font-size: inherit; font-variant-numeric: tabular-nums; border: none">\n<thead>\n{}\n</thead>\n'
    "<tbody>\n{}\n</tbody>\n</table>\n</div>"
)
_HEADS = '<tr style="background: transparent; border-bottom: 1px solid rgba(128, 128, 128, 0.4)">{}</tr>'
_HEAD = (
    '<th style="text-align: {}; padding: 0.15em 1.2em 0.15em 0; font-weight: 500; opacity: 0.75; white-space: nowrap; '
    'border: none">{}</th>'
)
_ROW = '<tr style="background: transparent">{}</tr>'
_CELL = '<td style="text-align: {}; padding: 0.15em 1.2em 0.15em 0; border: none{}">{}</td>'
_NAME = f'<code style="{_CODE}; background: transparent; padding: 0; overflow-wrap: break-word">{{}}</code>'


def render(reports: Iterable[Report], *, bars: bool = True) -> str:
    """Return the reports one below the other."""
    return "\n".join([_report(report, bars=bars) for report in reports])


def _report(report: Report, *, bars: bool) -> str:
    if report.tables or report.facts or report.listings or (report.lines and report.kind != "cell"):
        head = _headline([segment for segment in report.head if not segment.tabled], bars=bars)
        return _FRAME.format(*(_TROUBLE if report.is_trouble else _ACCENT), head, "\n".join(_body(report, bars=bars)))
    alone = len(report.head) == 1 and not report.lines
    head = _escaped(report.headline) if alone else _headline(report.head, bars=bars)
    return _LINE.format("<br>".join([head, *map(_escaped, report.lines)]))


def _escaped(text: str) -> str:
    return escape(clean(text))


def _headline(segments: Iterable[Segment], *, bars: bool) -> str:
    """Return the parts of a headline; it breaks between them, and within one only if that is too long for a line."""
    parts: list[str] = []
    segments = list(segments)
    for segment in segments:
        text = _with_bar(segment) if bars and segment.bar is not None else _escaped(segment.text)
        # The separator is within the part, so that no line begins with it.
        tail = SEPARATOR.rstrip() if segment is not segments[-1] else ""
        parts.append(_PART.format(text + tail) if parts else _FIRST.format(text) + tail)
    return " ".join(parts)


@functools.lru_cache(maxsize=32)  # most short cells change nothing: the same parts come again
def _with_bar(segment: Segment) -> str:
    assert segment.bar is not None
    return f"{html_bar(segment.bar)} {_escaped(segment.text)}"


def _body(report: Report, *, bars: bool) -> Iterator[str]:
    for table in report.tables:
        drawn = _table(table, bars=bars)
        yield _fold(table.title, drawn, shown=not table.folded) if table.title else drawn
    yield from map(_fact, report.facts)
    for line in report.lines:
        yield f'<div style="overflow-wrap: break-word">{_escaped(line)}</div>'
    yield from map(_listing, report.listings)


def _fold(title: str, content: str, *, shown: bool) -> str:
    return _FOLD.format(" open" if shown else "", _escaped(title), content)


def _fact(fact: Fact) -> str:
    form = _NAME.format if fact.code else str
    values = ", ".join([form(_escaped(value)) for value in fact.values])
    more = f" and {fact.more} more" if fact.more else ""
    return f'<div><span style="opacity: 0.75">{_escaped(fact.title)}:</span> {values}{more}</div>'


def _listing(listing: Listing) -> str:
    style = f"overflow-wrap: break-word; padding-left: 1em{f'; white-space: pre-wrap; {_CODE}' if listing.code else ''}"
    lines = "\n".join([f'<div style="{style}">{_escaped(line)}</div>' for line in listing.lines])
    title = listing.title if listing.code else f"{listing.title}: {len(listing.lines)}"
    return _fold(title, lines, shown=listing.code or len(listing.lines) <= _OPEN_LINES)


def _table(table: Table, *, bars: bool) -> str:
    """Return a table; the bars stand behind the last column of numbers."""
    numeric = [column in table.numbers for column in table.columns]
    sides = ["right" if number else "left" for number in numeric]
    styles = [
        "; white-space: nowrap" * number + f"; white-space: pre-wrap; {_CODE}" * (column in table.code)
        for column, number in zip(table.columns, numeric, strict=True)
    ]
    behind = len(numeric) - numeric[::-1].index(True) if bars and any(table.bars) and any(numeric) else None
    heads = [_HEAD.format(side, _escaped(column)) for side, column in zip(sides, table.columns, strict=True)]
    if behind is not None:
        heads.insert(behind, '<th style="border: none"></th>')
    rows = []
    for number, row in enumerate(table.rows):
        contents = list(map(_escaped, row))
        if table.curves:
            contents[table.columns.index("curve")] = html_spark(table.curves[number])
        cells = [_CELL.format(*look, content) for *look, content in zip(sides, styles, contents, strict=True)]
        if behind is not None:
            bar = table.bars[number]
            cells.insert(behind, _CELL.format("left", "; white-space: nowrap", html_bar(bar) if bar else ""))
        rows.append(_ROW.format("".join(cells)))
    return _TABLE.format(_HEADS.format("".join(heads)), "\n".join(rows))
