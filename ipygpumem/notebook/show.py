"""Shows reports in a shell: one display with text and, where a front-end can use it, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.reports import html, text
from ipygpumem.reports.content import Report


class Screen:
    """Where the reports of one shell go."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def show(self, reports: Sequence[Report]) -> None:
        """Show ``reports`` in one display; nothing if there are none."""
        if not reports:
            return
        data = {"text/plain": text.render(reports)}
        if hasattr(self._shell, "kernel"):  # a terminal shows the text only
            data["text/html"] = html.render(reports)
        metadata = {"ipygpumem": {"reports": [report.kind for report in reports]}}
        self._shell.display_pub.publish(data=data, metadata=metadata)
