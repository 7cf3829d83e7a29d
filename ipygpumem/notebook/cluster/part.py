"""Keeps the experiments that engines have open, and says what each cell cost there."""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.model import CellRecord
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.cluster.controller import is_closed
from ipygpumem.notebook.cluster.experiment import ClusterExperiment
from ipygpumem.notebook.experiments.manager import Experiments
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.parts.subscribers import Subscribers
from ipygpumem.notebook.tools import Tools
from ipygpumem.reports.engines import cells_line, engines_report
from ipygpumem.reports.layout import Report


class Cluster(Part):
    """The experiments of one shell that run on engines."""

    def __init__(
        self, tools: Tools, experiments: Experiments, subscribers: Subscribers, open_ones: list[ClusterExperiment]
    ) -> None:
        self._tools = tools
        self._experiments = experiments
        self._subscribers = subscribers
        self.open = open_ones

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Return a line for each experiment of which engines have run a cell meanwhile."""
        if cell.nested:
            return ()
        lines = []
        for experiment in self.open:
            if is_closed(experiment.all.client):
                continue
            cells, busy = experiment.new_cells()
            if (cells or busy) and self._tools.config.report:
                lines.append(
                    cells_line(experiment.name, {at: cell.record for at, cell in cells.items()}, still_busy=busy)
                )
        return lines

    def ended(self, experiment: ClusterExperiment) -> list[Report]:
        """Remember the record of an experiment that has ended, and return its report."""
        if experiment in self.open:
            self.open.remove(experiment)
        if experiment.record is None:
            return []
        self._experiments.finished.append(experiment.record)
        self._subscribers.add(experiment.record)
        is_shown = (experiment.report or self._tools.config.experiment_report) != "none"
        return [engines_report(experiment.record)] if is_shown else []

    def close(self) -> None:
        """Leave what is open on the engines as it is."""
        self.open.clear()
