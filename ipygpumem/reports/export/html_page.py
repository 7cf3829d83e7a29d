"""Makes a page that needs nothing else: the experiments, cells and recoveries, as the notebook showed them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from html import escape

from ipygpumem.model import ExperimentRecord, SessionRecord
from ipygpumem.reports import content, figures, history, html
from ipygpumem.reports.bars import Scales
from ipygpumem.reports.engines import engines_report
from ipygpumem.reports.layout import Report, clean, count
from ipygpumem.units import format_seconds

_MARK = '<meta name="generator" content="ipygpumem">'
_CELLS_SHOWN = 1000
_REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{mark}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ipygpumem: {title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ max-width: 75em; margin: 2em auto; padding: 0 1em; font-family: system-ui, sans-serif;
  color: CanvasText; background: Canvas }}
h1 {{ font-size: 1.4em }} h2 {{ font-size: 1.1em; margin-top: 2em }}
section {{ overflow-x: auto }}
figure {{ margin: 1em 0 }} svg {{ max-width: 100%; height: auto }}
@media (prefers-color-scheme: dark) {{ svg {{ filter: {dark} }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Exported {saved} by ipygpumem.</p>
{sections}
</body>
</html>
"""


def render(record: SessionRecord) -> str:
    """Return the page."""
    cells, experiments = len(record.cells), len(record.experiments)
    seconds = format_seconds(sum(cell.duration_seconds for cell in record.cells))
    return _PAGE.format(
        mark=_MARK,
        dark=html.DARK_PICTURE,
        title=f"{count(cells, 'cell')}, {count(experiments, 'experiment')}, {seconds}",
        saved=datetime.fromtimestamp(record.saved_at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        sections="\n".join(f"<h2>{title}</h2>\n<section>\n{body}\n</section>" for title, body in _sections(record)),
    )


def is_ours(head: str) -> bool:
    """Whether a file that begins with ``head`` was written by ``render``."""
    return _MARK in head


def _sections(record: SessionRecord) -> Iterator[tuple[str, str]]:
    if record.experiments:
        yield "Experiments side by side", html.render([history.comparison_report(history.numbered(record.experiments))])
    drawn = "\n".join(_pictures(record))
    if drawn:
        yield "Pictures", drawn
    shown = record.cells[-_CELLS_SHOWN:]
    yield "Cells", html.render([history.history_report(shown, total=len(record.cells))])
    scales = Scales()
    alone = [item.usages for item in record.experiments if not item.engines]
    for usages in (*(cell.usages for cell in record.cells), *alone):
        scales.note(usages)
    reports = [report for item in record.experiments for report in _experiment(item, scales)]
    if reports:
        yield "Experiments", html.render(reports)
    for cell in shown:
        if cell.recovery is not None and (reports := content.recovery_reports(cell.recovery, 0)):
            name = "a cell" if cell.execution_count is None else f"cell {cell.execution_count}"
            yield f"Recovery in {name}", html.render(reports)


def _experiment(record: ExperimentRecord, scales: Scales) -> list[Report]:
    return [engines_report(record)] if record.engines else content.experiment_reports(record, "full", scales)


def _pictures(record: SessionRecord) -> Iterator[str]:
    """Yield the session, its cells and its experiments as figures; nothing without matplotlib."""
    if figures.is_installed():
        names = ["session", "cells"] * bool(record.cells) + ["experiments"] * bool(record.experiments)
        yield from (_figure(name, record) for name in names)


def _figure(name: str, record: SessionRecord) -> str:
    try:
        picture = figures.draw(name, cells=record.cells, experiments=record.experiments)
        summary, svg = escape(clean(" ".join(picture.summary.split()))), picture.svg()
        picture.release()
    except Exception as error:  # matplotlib has many versions; the tables are worth having without it
        why = escape(clean(f"{type(error).__name__}: {error}"))
        return f"<p>The picture of the {name} could not be drawn: {why}</p>"
    # Ids of a picture are its own, and on a page there are several.
    svg = _REFERENCE.sub(rf"\g<1>{name}-", svg)
    return f'<figure role="img" aria-label="{summary}">{svg}</figure>'
