"""Records of cells, experiments and sessions with simple figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from ipygpumem.records import (
    CellRecord,
    ExperimentRecord,
    FreeingStep,
    RecoveryRecord,
    RetainedArray,
    SessionRecord,
    Usage,
)
from ipygpumem.units import MIB

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[31m\n\ud800\u202e{}%s $x$"


def usage(device: str = "cpu", before: int = 100, after: int = 150, peak: int = 400) -> Usage:
    return Usage(
        device, before * MIB, after * MIB, peak * MIB, 1000 * MIB, "kernel", reserved_bytes=5
    )


def cell(number: int | None = 1, **changes: Any) -> CellRecord:
    record = CellRecord(
        number, "id", None, 1.5, 2.0, True, None, (usage(), usage("cuda:0")), "ab" * 8, "train()"
    )
    return dataclasses.replace(record, **changes)


def oom() -> RecoveryRecord:
    held = RetainedArray(
        "batch", "Tensor", (4, 4), "float32", "cuda:0", 64 * MIB, function="train", line=3
    )
    steps = (FreeingStep("frames", {"cpu": 5}, {"cuda:0": 7}, 0.1),)
    return RecoveryRecord(
        "oom",
        "OutOfMemoryError",
        "no",
        2**30,
        {"cpu": 9},
        (held,),
        2,
        {"cpu": 5},
        {"cpu": 4},
        steps,
    )


def experiment(name: str = "run", **changes: Any) -> ExperimentRecord:
    record = ExperimentRecord(
        name,
        1.0,
        3.0,
        (cell(),),
        (usage(), usage("cuda:0")),
        {"cpu": 50 * MIB, "cuda:0": 60 * MIB},
        {"cpu": 40 * MIB, "cuda:0": 55 * MIB},
        ("x",),
        (),
        ("y",),
        (),
        parameters={"lr": 1e-3, "bs": 64, "opt": "adam"},
        ooms=1,
    )
    return dataclasses.replace(record, **changes)


SESSION = SessionRecord(
    1_700_000_000.0,
    (
        cell(1),
        cell(2, success=False, error="OutOfMemory", recovery=oom(), experiment="run"),
        cell(None, usages=()),
    ),
    (experiment(), experiment("other", parameters={"lr": 0.1}), experiment()),
)
