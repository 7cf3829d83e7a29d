"""Lets a record show itself as its report."""

from __future__ import annotations

from collections.abc import Callable

from ipygpumem.reports import html, text
from ipygpumem.reports.layout import Report


class Shown:
    """A record that a notebook shows as its report, and ``print`` as its text."""

    _report: Callable[[], Report]

    def __str__(self) -> str:
        return text.render([self._report()])

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": html.render([self._report()], bars=False)}
