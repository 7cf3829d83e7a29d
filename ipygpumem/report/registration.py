"""Registers the report that a front-end shows if a record is the value of a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ipygpumem.records import MimeBundle, Record, mimebundle, packed
from ipygpumem.report import html
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
            return html.with_text([report], bars=False), metadata

        mimebundle.register(kind, bundle)
        return build

    return register
