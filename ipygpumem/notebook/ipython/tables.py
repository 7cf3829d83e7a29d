"""How inventories look as the result of a cell: a table instead of the one line of their ``repr``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ipygpumem.reports import html, text

if TYPE_CHECKING:
    from ipygpumem.objects.inventory.records import Inventory, InventoryDiff
    from ipygpumem.reports.layout import Report

_SHOWN = 20
_MODULE = "ipygpumem.objects.inventory.records"
_NAMES = ("Inventory", "InventoryDiff")


def register(shell: Any) -> Callable[[], None]:
    """Let ``shell`` show inventories as tables, and return what undoes that.

    They are registered by name: few sessions take one, and loading the extension must stay fast.
    """
    formatters = [shell.display_formatter.formatters[form] for form in ("text/plain", "text/html")]
    for formatter, printer in zip(formatters, (_print, _html), strict=True):
        for name in _NAMES:
            formatter.for_type_by_name(_MODULE, name, printer)

    def undo() -> None:
        records = sys.modules.get(_MODULE)
        for formatter in formatters:
            for name in _NAMES:
                formatter.deferred_printers.pop((_MODULE, name), None)
                formatter.type_printers.pop(getattr(records, name, None), None)  # where it is once one was shown

    return undo


def _report(found: Inventory | InventoryDiff) -> Report:
    from ipygpumem.objects.inventory.records import Inventory
    from ipygpumem.reports.tensors import difference_report, tensors_report

    if isinstance(found, Inventory):
        return tensors_report(found, top=_SHOWN)
    return difference_report(found, top=_SHOWN)


def _print(found: Any, printer: Any, cycle: bool) -> None:  # IPython passes it so
    inside_another = cycle or len(printer.stack) > 1
    printer.text(repr(found) if inside_another else text.render([_report(found)]))


def _html(found: Any) -> str:
    return html.render([_report(found)])
