"""Reports as HTML for notebooks: inline styles and theme variables only, every text escaped."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ipygpumem.reports.content import Report

if TYPE_CHECKING:
    from jinja2 import Template

_LINE = (
    '<div style="font: 0.85em/1.5 var(--jp-code-font-family, monospace); opacity: 0.8; '
    'margin-left: var(--jp-code-padding, 5px)">{}</div>'
)


def render(reports: Iterable[Report]) -> str:
    """Return the reports one below the other."""
    return "\n".join(_report(report) for report in reports)


def _report(report: Report) -> str:
    if not report.lines and not report.tables:
        return _LINE.format(escape(report.headline))
    return _template().render(report=report)


@functools.cache
def _template() -> Template:
    # Imported here: most cells show one line, and loading the extension must stay fast.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ipygpumem.reports")
    return Environment(autoescape=True, loader=loader, undefined=StrictUndefined).get_template("report.html")
