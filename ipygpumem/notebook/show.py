"""Shows reports in a shell: one display with text and, where a front-end can use it, HTML."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
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
        with _no_needless_flush(self._shell.display_pub):
            self._shell.display_pub.publish(data=data, metadata=metadata)


@contextlib.contextmanager
def _no_needless_flush(publisher: Any) -> Iterator[None]:
    """Spare the kernel's publisher the flush of stdout and stderr where neither has anything to flush.

    It waits for another thread twice, which is most of what a report costs (1.1 of 1.3 ms were seen on a slow machine).
    """
    idle = all(getattr(stream, "_flush_pending", True) is False for stream in (sys.stdout, sys.stderr))
    if not idle or not hasattr(publisher, "_flush_streams"):
        yield  # something was printed, or these are no streams of a kernel
        return
    publisher._flush_streams = lambda: None
    try:
        yield
    finally:
        del publisher._flush_streams
