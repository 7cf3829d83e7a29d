"""Registers the reports that show records in a notebook and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ipygpumem.records import MimeBundle, Record, mimebundle, packed
from ipygpumem.report import html, text
from ipygpumem.report.layout import Report

Build = TypeVar("Build", bound=Callable[..., Report])


def shows(kind: type[Record]) -> Callable[[Build], Build]:
    """Register the decorated function as the report of a class of records.

    ::

        @shows(Inventory)
        def tensors_report(inventory: Inventory, *, top: int = 30) -> Report: ...
    """

    def register(build: Build) -> Build:
        def bundle(record: Record) -> MimeBundle:
            report = build(record)
            metadata = {"ipygpumem": {"reports": [report.kind], **packed([record])}}
            return rendered([report]), metadata

        mimebundle.register(kind, bundle)
        return build

    return register


def rendered(reports: Sequence[Report], *, bars: bool = False) -> dict[str, str]:
    """Return reports in the formats from which a frontend chooses."""
    return {
        "text/plain": text.render(reports),
        "text/html": html.render(reports, bars=bars),
    }
