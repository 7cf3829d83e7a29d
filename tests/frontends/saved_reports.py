"""A notebook with saved reports."""

from __future__ import annotations

from ipygpumem.report import html
from ipygpumem.report.cells import cell_report
from tests.notebooks import Node, code, node, notebook
from tests.report_samples import RAM, cell, every_report


def saved() -> Node:
    """Return a notebook with each kind of report as a saved output; nobody has run it here."""
    cells = []
    for report in (cell_report(cell(usages=(RAM,))), *every_report()):
        data = {"text/html": html.render([report]), "text/plain": "the plain text"}
        made = code("1")
        made.outputs = [node(output_type="display_data", data=data, metadata={})]
        made.execution_count = 1
        cells.append(made)
    return notebook(*cells)
