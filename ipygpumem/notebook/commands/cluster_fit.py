"""``%%autofit --on``: all engines try the same values, and one that runs out of memory counts for all."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ipygpumem.errors import AutofitError
from ipygpumem.fitting import room
from ipygpumem.fitting.fit import CROWDED, FITS, OUT_OF_MEMORY, Try, nothing_fits, shown
from ipygpumem.fitting.plan import Plan, Values
from ipygpumem.merging import engine_numbers
from ipygpumem.model import CellRecord, Usage, devices_of
from ipygpumem.notebook.cluster.engines import Asked, Engines, failed, raise_errors, show_outputs, unanswered
from ipygpumem.notebook.cluster.experiment import ClusterExperiment, RanCell
from ipygpumem.notebook.cluster.targets import engines_of
from ipygpumem.notebook.commands.autofit import given
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.autofit import autofit_report
from ipygpumem.reports.layout import Report

_NAME = "autofit"
_GRACE_SECONDS = 2.0
"""So long the others may go on after one has failed: they may wait for it, as in a collective operation."""
_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.2
_OOM_NAMES = ("OutOfMemoryError", "MemoryError")


def fit(notebook: Notebook, options: Options, cell: str) -> list[Report]:
    """Run the cell on engines with smaller values until it fits on all of them."""
    __tracebackhide__ = True
    start, wanted = given(options, {})
    plan = wanted.plan(start)
    engines = engines_of(notebook.tools.shell, options.on)
    tries: list[Try] = []
    remarks: list[str] = []
    more = True
    try:
        while more:
            fits, remark = _try(notebook, engines, plan, cell, wanted.share, tries)
            remarks += remark
            more = plan.note(fits=fits)
    except BaseException:
        _end(engines, start, fits=False)
        raise
    _end(engines, start, fits=plan.best is not None)
    reports = [autofit_report(tries, list(dict.fromkeys(remarks)), plan)]
    if plan.best is None:
        notebook.tools.screen.show(reports)
        raise AutofitError(nothing_fits(tries, {}, wanted.share, exhausted=plan.exhausted))
    return reports


def _end(engines: Engines, values: Values, *, fits: bool) -> None:
    asked = engines.ask("end_fit", list(values), fits)
    engines.wait(asked, _ANSWER_SECONDS, anew=True)
    engines.forget(asked)


def _try(
    notebook: Notebook, engines: Engines, plan: Plan, cell: str, share: float, tries: list[Try]
) -> tuple[bool, list[str]]:
    """Try the plan's values on all engines; return whether they fit, and what there is to say.

    Raises:
        CompositeError: ipyparallel's, of errors that are not about memory.
        KeyboardInterrupt: Ctrl-C.
    """
    __tracebackhide__ = True
    values, began = dict(plan.values), time.perf_counter()
    asked = engines.ask("begin_try", values)
    engines.wait(asked, _ANSWER_SECONDS)
    engines.forget(asked)
    experiment = ClusterExperiment(_NAME, engines, "none")
    results: Asked = {}
    cells: dict[int, RanCell] = {}
    verdicts: dict[int, str] = {}
    try:
        experiment.start(f"{_NAME} --report none", is_for_cell=True)
        left_out = experiment.reasons
        results, interrupted = experiment.run(cell, lambda running: _wait(engines, running))
        cells, _ = experiment.new_cells(_ANSWER_SECONDS)
        headroom = 0.0 if plan.repeats else share  # what fitted with headroom may take a little of it again
        verdicts = {number: _verdict(ran, headroom) for number, ran in cells.items()}
        large = [number for number, verdict in verdicts.items() if verdict in (OUT_OF_MEMORY, CROWDED)]
        if not large and not interrupted and not failed(results):
            experiment.keep("'*'")
            show_outputs(results)
    finally:
        experiment.end(lambda share: None)
        engines.forget(results)
    if interrupted:
        raise KeyboardInterrupt
    if not large:
        raise_errors(results)
    outcome = next((verdicts[number] for number in large), FITS)
    tries.append(_merged_try(values, outcome, time.perf_counter() - began, cells, large))
    said = [f"{left_out}: takes no part"] if left_out else []
    return not large, said + ([f"{shown(values)}: {_together(verdicts)}"] if large else [])


def _together(verdicts: Mapping[int, str]) -> str:
    """Return who did not fit, and who failed beside them: that may be a consequence, and ends no fit."""
    names = [name for name in dict.fromkeys(verdicts.values()) if name not in (FITS, "KeyboardInterrupt")]  # ours
    names.sort(key=lambda name: name not in (OUT_OF_MEMORY, CROWDED))
    who = {name: [number for number, own in verdicts.items() if own == name] for name in names}
    return "; ".join(f"{name} on {engine_numbers(numbers)}" for name, numbers in who.items())


def _wait(engines: Engines, results: Asked) -> bool:
    """Wait for all; once one has failed, the others are stopped if they do not end by themselves."""
    until = None
    while unanswered(results):
        engines.check(results)
        if engines.wait(results, _POLL_SECONDS, to_all=True):
            return True
        if until is None and failed(results):
            until = time.monotonic() + _GRACE_SECONDS
        if until is not None and time.monotonic() > until:
            engines.interrupt(results)
            return engines.wait(results, _ANSWER_SECONDS, to_all=True)
    return False


def _verdict(ran: RanCell, headroom: float) -> str:
    """Return what came of a try on one engine: ``fits``, too large, or another error's name."""
    record = ran.record
    if _ran_out(record):
        return OUT_OF_MEMORY
    if record.error is not None:
        return record.error
    crowded = room.crowded_device(record.usages, headroom, {}, host_available=ran.free.get("cpu"))
    return FITS if crowded is None else CROWDED


def _ran_out(record: CellRecord) -> bool:
    return record.error in _OOM_NAMES or (record.recovery is not None and record.recovery.kind == "oom")


def _merged_try(values: Values, outcome: str, seconds: float, cells: Mapping[int, RanCell], large: list[int]) -> Try:
    """Return the try with each device's highest peak."""
    every = [usage for ran in cells.values() for usage in ran.record.usages]
    usages = tuple(_highest(every, device) for device in devices_of(every))
    recovery = cells[large[0]].record.recovery if large else None
    requested = None if recovery is None else recovery.requested_bytes
    return Try(values, outcome, seconds, usages, None, requested)


def _highest(usages: list[Usage], device: str) -> Usage:
    return max((usage for usage in usages if usage.device == device), key=lambda usage: usage.peak_bytes)
