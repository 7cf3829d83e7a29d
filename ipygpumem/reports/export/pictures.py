"""Draws the pictures of a page, as SVG inside it, where matplotlib is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from ipygpumem.model import SessionRecord
from ipygpumem.reports import figures
from ipygpumem.reports.layout import clean

_REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')


def pictures(record: SessionRecord) -> Iterator[str]:
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
