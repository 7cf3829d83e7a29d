"""How inventories look as the result of a cell: a table instead of the one line of their ``repr``."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ipygpumem.reports import html, text
from ipygpumem.reports.layout import Report

_SHOWN = 20
_MODULE = "ipygpumem.objects.inventory.records"
_REPORTS = {"Inventory": "tensors_report", "InventoryDiff": "difference_report"}


def register(shell: Any) -> Callable[[], None]:
    """Let ``shell`` show inventories as tables, and return what undoes that.

    They are registered by name: few sessions take one, and loading the extension must stay fast.
    """
    formatters = [shell.display_formatter.formatters[form] for form in ("text/plain", "text/html")]
    for name, report in _REPORTS.items():
        formatters[0].for_type_by_name(_MODULE, name, functools.partial(_print, report))
        formatters[1].for_type_by_name(_MODULE, name, functools.partial(_html, report))

    def undo() -> None:
        records = sys.modules.get(_MODULE)
        for formatter in formatters:
            for name in _REPORTS:
                formatter.deferred_printers.pop((_MODULE, name), None)
                formatter.type_printers.pop(getattr(records, name, None), None)  # where it is once one was shown

    return undo


def _report(name: str, found: Any) -> Report:
    """Make a report by its function's name: few sessions need one."""
    report: Report = getattr(importlib.import_module("ipygpumem.reports.tensors"), name)(found, top=_SHOWN)
    return report


def _print(report: str, found: Any, printer: Any, cycle: bool) -> None:  # IPython passes it so
    inside_another = cycle or len(printer.stack) > 1
    printer.text(repr(found) if inside_another else text.render([_report(report, found)]))


def _html(report: str, found: Any) -> str:
    return html.render([_report(report, found)])
