"""``%gpumem export``: what has finished goes to a file."""

from __future__ import annotations

from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.export import save
from ipygpumem.reports.layout import Report, count, note
from ipygpumem.units import format_bytes


def export(notebook: Notebook, options: Options) -> list[Report]:
    """Write what has finished to a file."""
    record = notebook.records()
    place, size_bytes = save(options.file, record, force=options.force)
    cells, experiments = count(len(record.cells), "cell"), count(len(record.experiments), "experiment")
    return [note(f"{cells} and {experiments} are in {place} ({format_bytes(size_bytes)})")]
