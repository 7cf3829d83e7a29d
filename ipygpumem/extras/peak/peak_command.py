"""``%%peak``: the magic, which measures the cell below it."""

from __future__ import annotations

from dataclasses import replace

from IPython.core.error import UsageError
from IPython.display import display

from ipygpumem.errors import PlotError
from ipygpumem.extras.peak.peak import Peak
from ipygpumem.extras.peak.records import DevicePeak
from ipygpumem.extras.peak.report import peak_report
from ipygpumem.inventory.arrays.records import Inventory
from ipygpumem.magics import completions
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.commands.declarations import Options, at_least_one, command, option
from ipygpumem.shell.ipython.caches import names_and_outputs
from ipygpumem.shell.ipython.last_errors import shown_since
from ipygpumem.shell.ipython.rewriting import first_lines
from ipygpumem.shell.notebook_inventory import inventory_of_notebook


@command(
    "%%peak",
    "run a cell, and show what the memory held at its highest moment, by name, origin and purpose",
    option("--top", "N", "number of rows to show", to=at_least_one, default=20, also=("-n",)),
    option(
        "--save",
        "FILE",
        "write torch's history of CUDA allocations, for pytorch.org/memory_viz",
        offers=completions.files,
    ),
    option(
        "--flame",
        "FILE",
        "write memray's flame graph of RAM, an .html page (needs memray)",
        offers=completions.files,
    ),
    details="After an out-of-memory error it shows the moment of the failure. "
    "Code with many calls of small functions or torch operations takes 2 to 7 times as long.",
)
def of_cell(app: App, options: Options) -> list[Report]:
    """Follow the memory of the running cell until it ends."""
    running = app.context.cells.running()
    if not running:
        raise UsageError("%%peak must be the first line of a cell that you run yourself")
    if not first_lines(running[-1].source)[1].strip():
        raise UsageError(
            "%%peak: the cell is empty: write the code to measure below the line with %%peak"
        )
    cell = running[-1]
    peak = _PeakOfCell(app, cell, options)
    # They run in the other order. If a Ctrl-C stops ``finish``, ``drop`` still ends the
    # measurement.
    cell.at_code_end.append(peak.drop)
    cell.at_code_end.append(peak.finish)
    peak.start()
    return []


class _PeakOfCell:
    """The peak of one cell, followed until its code ends."""

    def __init__(self, app: App, cell: Cell, options: Options) -> None:
        self._app = app
        self._cell = cell
        self._top = options.top
        shell = app.context.shell
        self._peak = Peak(lambda: names_and_outputs(shell).items(), options.save, options.flame)

    def start(self) -> None:
        """Start following the memory."""
        self._peak.start()

    def drop(self) -> list[Report]:
        """Stop following, without a report."""
        self._peak.drop()
        return []

    def finish(self) -> list[Report]:
        """Stop following, show the picture, and return the report."""
        error = shown_since(self._cell.errors.last_id_before)
        record = self._peak.stop(self._inventory, error)
        has_curves = any(map(_has_changed_tensors, record.devices))
        if self._app.context.display.has_images and has_curves:
            try:
                with growth_for("%%peak"):
                    display(record.picture())
            except PlotError as problem:
                record = replace(record, notes=(*record.notes, str(problem)))
        return [peak_report(record, top=self._top)]

    def _inventory(self, has_unnamed: bool) -> Inventory:
        """Return the tensors at the peak, by name."""
        shell = self._app.context.shell
        return inventory_of_notebook(shell, has_arrays=False, has_unnamed=has_unnamed)


def _has_changed_tensors(device: DevicePeak) -> bool:
    """Return True if the code has allocated or freed tensors on a device."""
    return any(point.seconds > 0 for point in device.curve)
