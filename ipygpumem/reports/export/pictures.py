"""The pictures of a page: drawn where matplotlib is installed, as SVG inside it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from ipygpumem.model import SessionRecord
from ipygpumem.reports.layout import clean

_SESSION_CELLS, _BAR_CELLS, _EXPERIMENTS = 1000, 200, 20
"""How many of the last are drawn."""

_REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')


def pictures(record: SessionRecord) -> Iterator[str]:
    """Yield the session, its cells and its experiments as figures; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    if record.cells:
        yield _figure("session", record.cells[-_SESSION_CELLS:], record.experiments)
        yield _figure("cells", record.cells[-_BAR_CELLS:])
    if record.experiments:
        yield _figure("experiments", record.experiments[-_EXPERIMENTS:])


def _figure(name: str, *records: Any) -> str:
    try:
        picture = importlib.import_module(f"ipygpumem.reports.figures.{name}").draw(*records)
        summary, svg = escape(clean(" ".join(picture.summary.split()))), picture.svg()
        picture.release()
    except Exception as error:  # matplotlib has many versions; the tables are worth having without it
        why = escape(clean(f"{type(error).__name__}: {error}"))
        return f"<p>The picture of the {name} could not be drawn: {why}</p>"
    # Ids of a picture are its own, and on a page there are several.
    svg = _REFERENCE.sub(rf"\g<1>{name}-", svg)
    return f'<figure role="img" aria-label="{summary}">{svg}</figure>'
