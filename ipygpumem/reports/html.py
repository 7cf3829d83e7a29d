"""Reports as HTML for notebooks, every text escaped; without its styles it reads well, too.

Text has the page's own colour, so that it is legible in every theme; colours are on borders and bars only. There is
no script, no style sheet, no id and nothing from outside. Where a sanitizer drops the styles (GitHub) or the theme
variables (notebooks that are not trusted), words, tables and folding stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from ipygpumem.reports.bars import html_bar
from ipygpumem.reports.layout import SEPARATOR, Report, Segment, clean

if TYPE_CHECKING:
    from jinja2 import Template

# Each theme variable follows a plain value: JupyterLab's sanitizer drops the one and keeps the other.
_LINE = (
    '<div style="font-family: monospace; '
    "font-family: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace)); "
    "font-size: 0.85em; line-height: 1.6; "
    'margin-left: 5px; margin-left: var(--jp-code-padding, 5px)">{}</div>'
)
_PART = '<span style="display: inline-block; max-width: 100%; overflow-wrap: break-word; opacity: 0.85">{}</span>'
_FIRST = '<b style="font-weight: 600">{}</b>'


def render(reports: Iterable[Report], *, bars: bool = True) -> str:
    """Return the reports one below the other."""
    return "\n".join([_report(report, bars=bars) for report in reports])


def _report(report: Report, *, bars: bool) -> str:
    if report.tables or report.facts or report.listings or (report.lines and report.kind != "cell"):
        shown = [segment for segment in report.head if not segment.tabled]
        accent = _ACCENTS.get(report.kind, _ACCENT)
        return _template().render(report=report, head=_headline(shown, bars=bars), bars=bars, accent=accent)
    # One line after each cell: plain formatting is many times faster than a template.
    alone = len(report.head) == 1 and not report.lines
    lines = [
        escape(clean(report.headline)) if alone else _headline(report.head, bars=bars),
        *(escape(clean(line)) for line in report.lines),
    ]
    return _LINE.format("<br>".join(lines))


_ACCENT = ("#1e88e5", "var(--jp-brand-color1, var(--vscode-focusBorder, #1e88e5))")
_ACCENTS = {"recovery": ("#e67e22", "var(--jp-warn-color1, var(--vscode-editorWarning-foreground, #e67e22))")}


def _headline(segments: Iterable[Segment], *, bars: bool) -> str:
    """Return the parts of a headline; it breaks between them, and within one only if that is too long for a line."""
    parts: list[str] = []
    segments = list(segments)
    for segment in segments:
        text = escape(clean(segment.text))
        if segment.bar is not None and bars:
            text = f"{html_bar(segment.bar)} {text}"
        if segment is not segments[-1]:
            text += SEPARATOR.rstrip()  # within the part, so that no line begins with it
        parts.append((_PART if parts else _FIRST).format(text))
    return " ".join(parts)


def _finalize(value: Any) -> Any:
    """Clean all that is the users' or may be; what is Markup is ours."""
    return clean(value) if type(value) is str else value


@functools.cache
def _template() -> Template:
    # Imported here: most cells show one line, and loading the extension must stay fast.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        loader=PackageLoader("ipygpumem.reports"),
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bar"] = lambda bar: Markup(html_bar(bar))  # noqa: S704  # it escapes what it is given
    environment.filters["ours"] = Markup
    return environment.get_template("report.html")
