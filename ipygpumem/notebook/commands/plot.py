"""``%gpumem plot``: which picture, of which records of the session, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ipygpumem.errors import PlotError, short
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.commands.status import reconcile
from ipygpumem.reports import figures
from ipygpumem.reports.export import files
from ipygpumem.reports.layout import Report, clean
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook
    from ipygpumem.reports.figures.picture import Picture

SUFFIXES = (".png", ".svg")
_MARK = "ipygpumem"
"""Stands at the head of the files that ``--save`` has written, and may write over."""


def plot(notebook: Notebook, options: Options) -> list[Report]:
    """Show or write the picture that the options ask for; return the reports."""
    target = None if options.save is None else _target(options.save)
    picture = figures.draw(
        options.picture,
        cells=list(notebook.session.history),
        experiments=list(notebook.experiments.finished),
        reconciliations=reconcile(notebook).reconciliations if options.picture == "devices" else (),
        device=options.device,
        last=options.n,
    )
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
        raise PlotError(f"{clean(short(path))}: write a file name that ends in {' or '.join(SUFFIXES)}")
    return target


def _shown(notebook: Notebook, picture: Picture) -> list[Report]:
    """Show the picture; where there are no images, return what it says in words."""
    if notebook.tools.screen.has_images:
        notebook.tools.screen.show_image(picture)
        return []
    headline, *lines = picture.summary.splitlines()
    hint = "a terminal shows no pictures: --save FILE.png writes this one to a file"
    return [Report("plot", headline, (*(line.strip() for line in lines), hint))]
