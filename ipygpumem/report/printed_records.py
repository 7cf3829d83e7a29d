"""Shows the records of cells, experiments and traces that users print, or end a cell with.

Unlike other displays they carry no records: those of the cells are in the notebook's outputs
already, and ``ipygpumem.load`` would find each of them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ipygpumem.records import (
    CellRecord,
    ExperimentRecord,
    History,
    MimeBundle,
    SessionRecord,
    TraceRecord,
    mimebundle,
)
from ipygpumem.report import html
from ipygpumem.report.cells import cell_report, trace_report
from ipygpumem.report.experiments import experiment_reports
from ipygpumem.report.history import experiments_report, history_report, traces_report
from ipygpumem.report.layout import Report

_ROWS_SHOWN = 20

Build = TypeVar("Build", bound=Callable[..., Sequence[Report]])


def _shows_without_metadata(kind: type[Any]) -> Callable[[Build], Build]:
    """Register the decorated function as the reports of a class of records. Unlike with
    ``registration.shows``, the display carries no records.
    """

    def register(build: Build) -> Build:
        def bundle(record: Any) -> MimeBundle:
            return html.with_text(build(record), bars=False), {}

        mimebundle.register(kind, bundle)
        return build

    return register


@_shows_without_metadata(CellRecord)
def of_cell(record: CellRecord) -> list[Report]:
    """Return the line of a cell."""
    return [cell_report(record)]


@_shows_without_metadata(ExperimentRecord)
def of_experiment(record: ExperimentRecord) -> list[Report]:
    """Return the full report of an experiment."""
    return experiment_reports(record, "full")


@_shows_without_metadata(TraceRecord)
def of_trace(record: TraceRecord) -> list[Report]:
    """Return the line of a trace."""
    return [trace_report(record)]


@_shows_without_metadata(History)
def of_history(history: History) -> list[Report]:
    """Return a row for each of the last cells."""
    return [history_report(history[-_ROWS_SHOWN:], total=len(history))]


@_shows_without_metadata(SessionRecord)
def of_session(session: SessionRecord) -> list[Report]:
    """Return a row for each of the last cells, experiments and traces."""
    reports = of_history(session.history)
    if session.experiments:
        reports.append(experiments_report(session.experiments[-_ROWS_SHOWN:]))
    if session.traces:
        last = session.traces[-_ROWS_SHOWN:]
        reports.append(traces_report(last, total=len(session.traces)))
    return reports
