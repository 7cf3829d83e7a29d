"""Pictures: records in, a matplotlib figure out. matplotlib is optional and slow: it is imported to draw only."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ipygpumem.errors import PlotError
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.reconcile.records import Reconciliation

if TYPE_CHECKING:
    from ipygpumem.reports.figures.picture import Picture

T = TypeVar("T")

SHOWN = {"session": 2000, "cells": 200, "devices": 0, "experiments": 20}
"""The pictures, and how many of the last records each draws by default."""


def draw(
    name: str,
    *,
    cells: Sequence[CellRecord] = (),
    experiments: Sequence[ExperimentRecord] = (),
    reconciliations: Sequence[Reconciliation] = (),
    device: str | None = None,
    last: int | None = None,
) -> Picture:
    """Return the picture ``name`` of those records that it shows.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    if not is_installed():
        raise PlotError("pictures need matplotlib, which is not installed: pip install matplotlib")
    number = SHOWN[name] if last is None else last
    drawn: Callable[..., Picture] = importlib.import_module(f"ipygpumem.reports.figures.{name}").draw
    if name == "devices":
        return drawn(reconciliations, device=device)
    if name == "experiments":
        return drawn(_last(experiments, number, "experiment"), device=device)
    shown = _last(cells, number, "cell")
    if name == "cells":
        return drawn(shown, device=device)
    return drawn(shown, experiments, device=device, earlier=len(cells) - len(shown))


def is_installed() -> bool:
    """Whether there is matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def _last(records: Sequence[T], number: int, what: str) -> Sequence[T]:
    if number < 1:
        raise PlotError(f"-n {number}: how many {what}s? Write a number of 1 or more")
    if not records:
        raise PlotError(f"there is nothing to draw: no {what} has finished yet")
    return records[-number:]
