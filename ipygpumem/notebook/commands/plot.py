"""``%gpumem plot``: which picture, of which records of the session, and where it goes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import PlotError
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.commands.status import reconcile
from ipygpumem.reconcile.records import Reconciliation
from ipygpumem.reports.content import Report, clean, device_label
from ipygpumem.reports.export import files
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook
    from ipygpumem.reports.figures.picture import Picture

SHOWN = {"session": 2000, "cells": 200, "experiments": 20}
"""How many of the last records are drawn, unless told otherwise."""
SUFFIXES = (".png", ".svg")
_MARK = "ipygpumem"
"""Stands at the head of the files that ``--save`` has written, and may write over."""


def plot(notebook: Notebook, options: Options) -> list[Report]:
    """Show the picture that ``%gpumem plot`` and its options ask for, or write it; return what there is to say."""
    target = None if options.save is None else _target(options.save)
    last = SHOWN.get(options.picture, 0) if options.n is None else options.n
    picture = _draw(notebook, options.picture, options.device, last)
    try:
        if target is None:
            return _shown(notebook, picture)
        content = picture.render(target.suffix[1:].lower(), dark=options.dark)
        size = files.write(target, content, is_ours=lambda head: _MARK in head, force=options.force)
        saved = Report("plot", f"saved: {clean(str(target))} ({format_bytes(size)})")
        return [*_shown(notebook, picture), saved] if notebook.tools.screen.has_images else [saved]
    finally:
        picture.release()


def _target(path: str) -> Path:
    target = files.place_of(path)
    if target.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{clean(path)}: the suffix says the format: {' or '.join(SUFFIXES)}")
    return target


def _draw(notebook: Notebook, picture: str, device: str | None, last: int) -> Picture:
    if picture == "devices":
        return of_devices(reconciliations(notebook), device)
    cells, experiments = list(notebook.session.history), list(notebook.experiments.finished)
    if picture == "experiments":
        return of_experiments(experiments, device, last)
    return of_cells(cells, device, last) if picture == "cells" else of_session(cells, experiments, device, last)


def _shown(notebook: Notebook, picture: Picture) -> list[Report]:
    """Show the picture; where there are no images, return what it says in words."""
    if notebook.tools.screen.has_images:
        notebook.tools.screen.show_image(picture)
        return []
    headline, *lines = picture.summary.splitlines()
    hint = "a terminal shows no pictures: --save FILE.png writes this one to a file"
    return [Report("plot", headline, (*(line.strip() for line in lines), hint))]


# -- the pictures ---------------------------------------------------------------------------------------------


def of_session(
    cells: Sequence[CellRecord], experiments: Sequence[ExperimentRecord], device: str | None, last: int
) -> Picture:
    """Return memory over the session."""
    shown = _last(cells, last, "cell")
    drawn: Picture = _figure("session").draw(shown, experiments, device=device, earlier=len(cells) - len(shown))
    return drawn


def of_cells(cells: Sequence[CellRecord], device: str | None, last: int) -> Picture:
    """Return what each cell cost."""
    drawn: Picture = _figure("cells").draw(_last(cells, last, "cell"), device=device)
    return drawn


def of_experiments(experiments: Sequence[ExperimentRecord], device: str | None, last: int) -> Picture:
    """Return experiments side by side."""
    drawn: Picture = _figure("experiments").draw(_last(experiments, last, "experiment"), device=device)
    return drawn


def of_devices(found: Sequence[Reconciliation], device: str | None) -> Picture:
    """Return what each device's memory consists of."""
    chosen = [
        item
        for item in found
        if device is None or device in (item.device, item.device.partition(":")[0], device_label(item.device))
    ]
    if not chosen:
        there = ", ".join(clean(device_label(item.device)) for item in found) or "none"
        raise PlotError(f"nothing is known of device {clean(str(device))!r}; there are: {there}")
    drawn: Picture = _figure("devices").draw(chosen)
    return drawn


def reconciliations(notebook: Notebook) -> list[Reconciliation]:
    """Return what each device's memory consists of now."""
    return list(reconcile(notebook).reconciliations)


def _last(records: Sequence[Any], number: int, what: str) -> Sequence[Any]:
    if number < 1:
        raise PlotError(f"-n {number}: how many {what}s? Write a number of 1 or more")
    if not records:
        raise PlotError(f"there is nothing to draw: no {what} has finished yet")
    return records[-number:]


def _figure(name: str) -> Any:
    """Import what draws the picture ``name``: matplotlib takes a while, and is optional."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("pictures need matplotlib, which is not installed: pip install 'ipygpumem[plot]'")
    return importlib.import_module(f"ipygpumem.reports.figures.{name}")
