"""How inventories look as the result of a cell: a table instead of the one line of their ``repr``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipygpumem.model import Inventory, InventoryDiff
from ipygpumem.reports import html, text
from ipygpumem.reports.layout import Report

_SHOWN = 20


def _of_inventory(found: Inventory) -> Report:
    from ipygpumem.reports.tensors import tensors_report  # loading the extension must stay fast

    return tensors_report(found, top=_SHOWN)


def _of_difference(found: InventoryDiff) -> Report:
    from ipygpumem.reports.tensors import difference_report  # as above

    return difference_report(found, top=_SHOWN)


_REPORTS: dict[type, Callable[[Any], Report]] = {Inventory: _of_inventory, InventoryDiff: _of_difference}


def register(shell: Any) -> Callable[[], None]:
    """Let ``shell`` show inventories as tables, and return what undoes that."""
    formatters = shell.display_formatter.formatters
    printers = {"text/plain": _print, "text/html": _html}
    earlier = [
        (formatters[form].type_printers, kind, formatters[form].for_type(kind, printer))
        for form, printer in printers.items()
        for kind in _REPORTS
    ]

    def undo() -> None:
        for known, kind, before in earlier:
            known.pop(kind, None)
            if before is not None:
                known[kind] = before

    return undo


def _print(found: Any, printer: Any, cycle: bool) -> None:  # IPython passes it so
    inside_another = cycle or len(printer.stack) > 1
    printer.text(repr(found) if inside_another else text.render([_REPORTS[type(found)](found)]))


def _html(found: Any) -> str:
    return html.render([_REPORTS[type(found)](found)])
