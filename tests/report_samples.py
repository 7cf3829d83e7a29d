"""Records with known figures, and all kinds of reports with a given text wherever a user's text may
come.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ipygpumem.estimating.records import DeviceEstimate, Estimate, ModelSummary, ModuleRow
from ipygpumem.extras.cluster.engines_report import (
    EngineOutput,
    engines_report,
    merged_record,
    outputs_report,
)
from ipygpumem.extras.guard.report import guard_report
from ipygpumem.extras.lines.gpumemit import statements_report
from ipygpumem.extras.lines.lines import CodeBlock, LineCost, LinesRecord
from ipygpumem.extras.lines.memlines import lines_report
from ipygpumem.extras.lines.statements import Cost, StatementRun
from ipygpumem.extras.moving.moving import PurgeRecord, purge_report
from ipygpumem.extras.moving.releasing import ReleaseRecord, release_report
from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow
from ipygpumem.extras.peak.report import peak_report
from ipygpumem.extras.recorder import recorder_commands as postmortem
from ipygpumem.extras.recorder.recordings import Moment, RecordedKernel, Recording, Verdict
from ipygpumem.extras.tracker.tracker import TrackerRecord, tracker_report
from ipygpumem.fitting.fit import Try
from ipygpumem.fitting.plan import Plan
from ipygpumem.heap.sizes.sizes import Share
from ipygpumem.inventory.arrays.records import Inventory, InventoryDiff, TensorGroup, TensorRecord
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation
from ipygpumem.inventory.names.ownership import HeldPart, Ownership
from ipygpumem.inventory.names.top import LargestNames, NamedSize
from ipygpumem.records import (
    CellRecord,
    EngineRecord,
    ExperimentRecord,
    FreeingStep,
    Growth,
    Reading,
    RecoveryRecord,
    ReferencePath,
    RetainedArray,
    TraceRecord,
    Usage,
)
from ipygpumem.report import growth_lines, history
from ipygpumem.report.autofit import autofit_report
from ipygpumem.report.cells import cell_report, trace_report
from ipygpumem.report.estimate import estimate_report, summary_report
from ipygpumem.report.experiments import experiment_reports
from ipygpumem.report.freeing import freed_report
from ipygpumem.report.layout import Report, note
from ipygpumem.report.leaks import leaks_report
from ipygpumem.report.recovery import recovery_reports
from ipygpumem.report.status import status_report
from ipygpumem.report.tensors import difference_report, groups_report, tensors_report
from ipygpumem.report.top import top_report
from ipygpumem.report.why import undefined_name_report, why_report
from ipygpumem.units import GIB, MIB

RAM = Usage("cpu", 3 * GIB, 3 * GIB + 512 * MIB, 3 * GIB + 1341 * MIB, 16 * GIB, "kernel")
CUDA = Usage(
    "cuda:0", 0, GIB, 6 * GIB + 200 * MIB, 140 * GIB, "allocator", 7 * GIB, 8 * GIB + 400 * MIB
)


def cell(**changes: Any) -> CellRecord:
    return dataclasses.replace(
        CellRecord(12, None, None, 0.0, 3.21, True, None, (RAM, CUDA)), **changes
    )


def experiment(**changes: Any) -> ExperimentRecord:
    values: dict[str, Any] = {
        "name": "small",
        "started_at": 0.0,
        "duration_seconds": 4.2,
        "cells": (cell(), cell()),
        "usages": (RAM,),
        "consumed": {"cpu": 600 * MIB},
        "freed": {"cpu": 88 * MIB},
        "deleted": ("a", "b"),
        "restored": ("x",),
        "kept": (),
        "survivors": (RetainedArray("b", "Tensor", (8, 1024, 1024), "float32", "cpu", 32 * MIB),),
        "steps": (FreeingStep("names", {"cpu": 88 * MIB}, {"cuda:0": 2 * MIB}, 0.1),),
        "notes": ("keep: no name matches 'q'",),
    }
    return ExperimentRecord(**{**values, **changes})


def recovery(**changes: Any) -> RecoveryRecord:
    values: dict[str, Any] = {
        "kind": "oom",
        "error": "OutOfMemoryError",
        "message": "...",
        "requested_bytes": 20 * GIB,
        "free": {"cpu": 10 * GIB, "cuda:0": 3 * GIB},
        "held": (
            RetainedArray(
                "batch",
                "Tensor",
                (512, 1024),
                "float32",
                "cuda:0",
                2 * MIB,
                function="train",
                line=7,
            ),
            RetainedArray(
                "lists", "dict", None, "float32", "cuda:0", MIB, arrays=3, function="main", line=2
            ),
        ),
        "frames": 4,
        "freed": {"cpu": -5, "cuda:0": 3 * MIB},
        "now": {"cpu": GIB, "cuda:0": 0},
    }
    return RecoveryRecord(**{**values, **changes})


def every_report(word: str = "x") -> list[Report]:
    """All kinds of reports, with ``word`` wherever a user's text may come."""
    step = FreeingStep(word, {word: MIB}, {word: MIB}, 0.1, error=word)
    usage = Usage(word, 1, 2, 3, 10 * MIB, "sampled", used_bytes=5, reserved_bytes=4, note=word)
    tensor = TensorRecord(word, word, (1,), word, word, MIB, note=word)
    survivors = (survivor(word, shape=(1,)), survivor(word, shape=None))
    ended = experiment(
        name=word,
        deleted=(word,),
        restored=(word,),
        kept=(word,),
        survivors=survivors,
        notes=(word,),
        steps=(step,),
    )
    return [
        cell_report(cell(error=word, usages=(RAM, usage))),
        *experiment_reports(ended, "full"),
        *experiment_reports(ended, "compact"),
        *recovery_reports(failed_recovery(word, survivors, step), MIB),
        note(word),
        leaks_report(survivors, MIB),
        freed_report(word, [step], {word: 1}),
        report_of_status(word),
        *reports_of_tensors(word, tensor),
        *reports_of_names(word),
        undefined_name_report(word, 1, survivors),
        *reports_over_time(word, ended),
        *reports_of_stretches(word, usage, tensor, survivors, step),
        *reports_of_choices(word, usage),
        *reports_of_engines(word, ended),
        report_of_peak(word),
    ]


def survivor(word: str, *, shape: tuple[int, ...] | None) -> RetainedArray:
    holder = ReferencePath(word, word)
    return RetainedArray(
        word, word, shape, word, word, 9 * MIB, function=word, line=1, holder=holder
    )


def failed_recovery(
    word: str, survivors: tuple[RetainedArray, ...], step: FreeingStep
) -> RecoveryRecord:
    return recovery(
        error=word,
        held=survivors * 10,
        message=word,
        steps=(step,),
        plain=(word,),
        free={word: 1},
        now={word: 2},
    )


def report_of_status(word: str) -> Report:
    """A report on one device and its parts."""
    reading = Reading(word, 1, 2, "allocator", 100, 5, 8, 1, note=word)
    parts = (Part(word, 40, word), Part(word, None, word))
    memory = Reconciliation(word, 100, word, parts, (word,))
    return status_report(word, [word], [reading], [memory])


def reports_of_tensors(word: str, tensor: TensorRecord) -> list[Report]:
    inventory = Inventory((tensor, tensor), 0.0, notes=(word,))
    groups = [TensorGroup(word, 1, MIB)] * 2
    return [
        tensors_report(inventory, top=1),
        groups_report(inventory, word, groups, top=1),
    ]


def reports_of_names(word: str) -> list[Report]:
    """Reports on the memory of names: of the largest, and of one."""
    share = Share(word, "keys", word, 1, MIB)
    named = NamedSize(
        word, word, {word: MIB}, (share,), 1, (word,), (word,), (word,), 1, word, (word,)
    )
    largest = LargestNames((named, named), {word: GIB}, 0.0, 1, (word,))
    held_parts = (HeldPart(ReferencePath(word, word), 1, {word: MIB}),)
    owned = Ownership(word, True, word, {word: MIB}, {word: 1}, ((word, 1),), held_parts)
    return [
        top_report(largest, top=1),
        guard_report(word, [word], 1, largest),
        why_report(owned),
    ]


def report_of_peak(word: str) -> Report:
    row = PeakRow(MIB, *[word] * 5)
    device = DevicePeak(word, word, MIB, 0.1, (row, row))
    return peak_report(PeakRecord((device,), 1.0, (word,)), top=1)


def reports_over_time(word: str, ended: ExperimentRecord) -> list[Report]:
    """Reports on many cells and experiments, and on a kernel that is gone."""
    record = cell(error=word, experiment=word, source_line=word)
    kernel = RecordedKernel(0.0, 1, 0.0, word, f"folder/{word}", word)
    moments = tuple(
        Moment(kind, 1.0, 1, {word: 1, "cpu": 2}, {word: 3}, 1, f"{word}\n  {word}", error=word)  # type: ignore[arg-type]
        for kind in ("cell", "tick", "cell end")
    )
    gone = Recording(Path(word.replace("\0", "")[:9]), kernel, moments, None, 1)
    noted = dataclasses.replace(ended, parameters={word: word})
    return [
        history.history_report([record], total=2, experiment=word),
        history.experiments_report([noted, noted], [word]),
        history.comparison_report(history.numbered([noted, noted])),
        note(growth_lines.growth_line(Growth(word, 3, MIB, GIB))),
        postmortem.postmortem_report(gone, Verdict(word, "likely", word)),
    ]


def reports_of_stretches(
    word: str,
    usage: Usage,
    tensor: TensorRecord,
    survivors: tuple[RetainedArray, ...],
    step: FreeingStep,
) -> list[Report]:
    """Reports on spans of code, on objects made and freed in them, and on ways to save memory."""
    passed = [TraceRecord(word, 1.0, 0.1, word, (RAM, usage), number) for number in (None, 1, 2)]
    changed = InventoryDiff((tensor,) * 3, (tensor,) * 3, word, word)
    one = (tensor,)
    tracked = TrackerRecord(
        one, one, word, word, 2, 0.0, word, 1, 1, word, {word: 1}, (RAM, usage), (word,)
    )
    return [
        trace_report(passed[0], word),
        history.traces_report(passed, total=4),
        history.loop_report(passed[1:], 5, (word,)),
        history.iteration_report(passed[1]),
        difference_report(changed, top=2),
        tracker_report(tracked, top=2),
        release_report(ReleaseRecord((word,), word, survivors, survivors, {word: 1}, (step,))),
        *(
            purge_report(PurgeRecord(1, stays, {word: 2}, {word: 1}, (word,)))
            for stays in (False, True)
        ),
    ]


def reports_of_choices(word: str, usage: Usage) -> list[Report]:
    """Reports on sizes that were tried or estimated, on statements and on lines."""
    plan = Plan({word: 8})
    tries = [Try({word: 8}, outcome, 0.1, (usage,), word, 1) for outcome in ("out of memory", word)]
    share = DeviceEstimate(word, 1, 2, 3, 4, 4, {word: 1}, 1)
    rows = tuple(
        ModuleRow(name, word, depth, (1,), 1, 1, 1, 1, 1) for depth, name in enumerate(("", word))
    )
    cost = Cost(word, [StatementRun((usage,), 0.1)])
    costs = {(0, 1): LineCost(1, 0.1, {word: 1}, {word: 1})}
    lines = LinesRecord([CodeBlock(word, 1, (word, word))], costs, 1.0, 0.1, word)
    return [
        autofit_report(tries, [word], plan),
        estimate_report(Estimate((share,), 0.1, (word,), (word,))),
        summary_report(ModelSummary(rows, 1)),
        statements_report([cost, cost], cost),
        *(lines_report(lines, order) for order in ("line", "peak")),
    ]


def reports_of_engines(word: str, ended: ExperimentRecord) -> list[Report]:
    """Reports on a cluster's engines."""
    places = [
        EngineRecord(at, word, 1, {word: word}, {"cpu": 1}, f"{word}{at}", word, ended)
        for at in (0, 1)
    ]
    merged = merged_record(word, 0.0, 1.0, [*places, EngineRecord(2, error=word)])
    return [
        engines_report(merged),
        outputs_report(
            word,
            {0: EngineOutput(word, word, {("in use", word): 1.0})},
            {1: word, 2: word},
        ),
    ]
