"""Makes the pictures of docs/traces.md: ``python examples/plots.py docs/img``.

The session is made up, so that everything is in it on every machine: two devices, experiments, an
out-of-memory error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from ipygpumem.extras.pictures import plot
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation
from ipygpumem.records import CellRecord, ExperimentRecord, Usage
from ipygpumem.units import GIB, MIB

RAM = 31 * GIB
CARD = 24 * GIB

# Per cell: pause before it and its length in seconds; experiment; RAM after it and at its peak in
# MiB; the card's allocated bytes after it and at their peak in GiB; error.
CELLS = (
    (0, 2.1, None, 410, 430, 0, 0, None),
    (14, 9.4, None, 3900, 6200, 0, 0, None),
    (35, 1.2, None, 4100, 4150, 1.4, 1.4, None),
    (9, 0.4, None, 4110, 4110, 1.4, 2.1, None),
    (48, 3.0, "baseline", 4200, 4300, 1.5, 9.8, None),
    (6, 41.5, "baseline", 4350, 4500, 4.3, 12.6, None),
    (4, 5.2, "baseline", 4360, 4400, 4.3, 7.9, None),
    (2, 0.3, "baseline", 4180, 4360, 1.4, 4.3, None),
    (600, 4.1, "bs=128", 4300, 4420, 1.4, 23.4, "OutOfMemoryError"),
    (3, 0.1, "bs=128", 4300, 4300, 1.4, 1.4, "NameError"),
    (31, 0.2, None, 4290, 4300, 1.4, 1.4, None),
    (12, 38.0, "bs=96", 4800, 5200, 4.9, 20.7, None),
    (5, 22.4, "bs=96", 4810, 4900, 4.9, 20.9, None),
    (2, 0.2, "bs=96", 4330, 4810, 1.6, 4.9, None),
    (20, 6.5, None, 4400, 7100, 1.6, 3.2, None),
)
PARAMETERS = {
    "baseline": {"lr": 0.001, "bs": 32},
    "bs=128": {"lr": 0.002, "bs": 128},
    "bs=96": {"lr": 0.002, "bs": 96},
}

PARTS = (
    ("tensors: parameter", 1.4),
    ("tensors: gradient", 1.4),
    ("tensors: optimizer state", 2.8),
    ("tensors: other", 3.1),
    ("autograd or C++ code", 5.6),
    ("allocator cache", 1.9),
    ("fragmentation", 0.8),
    ("rounding", 0.01),
    ("context and libraries", 0.5),
    ("process 4242 (python)", 3.2),
    ("unknown", 0.4),
)


def made_up_cells() -> list[CellRecord]:
    records = []
    moment = 1.8e9
    ram = 180
    card = 0.0
    reserved = 0.0
    for number, (pause, seconds, name, ram_after, ram_peak, after, peak, error) in enumerate(
        CELLS, start=1
    ):
        moment += pause
        reserved = max(reserved, peak)
        usages = [Usage("cpu", ram * MIB, ram_after * MIB, max(ram, ram_peak) * MIB, RAM, "kernel")]
        if reserved:
            sizes = [round(size * GIB) for size in (card, after, max(card, peak))]
            usages.append(
                Usage("cuda:0", *sizes, CARD, "allocator", reserved_bytes=round(reserved * GIB))
            )
        records.append(
            CellRecord(number, None, name, moment, seconds, error is None, error, tuple(usages))
        )
        moment, ram, card = moment + seconds, ram_after, after
    return records


def made_up_experiment(name: str, cells: list[CellRecord]) -> ExperimentRecord:
    own = [cell for cell in cells if cell.experiment == name]
    usages = []
    consumed = {}
    freed = {}
    for index, first in enumerate(own[0].usages):
        series = [cell.usages[index] for cell in own]
        before = first.before_bytes
        after = series[-1].after_bytes
        peak = max(usage.peak_bytes for usage in series)
        usages.append(Usage(first.device, before, after, peak, first.total_bytes, first.method))
        freed[first.device] = max(0, series[-1].before_bytes - after)
        consumed[first.device] = after - before + freed[first.device]
    end = own[-1].started_at + own[-1].duration_seconds
    return ExperimentRecord(
        name,
        own[0].started_at,
        end - own[0].started_at,
        tuple(own),
        tuple(usages),
        consumed,
        freed,
        deleted=(),
        restored=(),
        kept=(),
        survivors=(),
        parameters=dict(PARAMETERS[name]),
        ooms=sum(cell.error == "OutOfMemoryError" for cell in own),
    )


def pictures() -> dict[str, Figure]:
    cells = made_up_cells()
    records = [*cells, *(made_up_experiment(name, cells) for name in PARAMETERS)]
    parts = [Part(name, round(size * GIB), "") for name, size in PARTS]
    free = Part("free", CARD - sum(part.size_bytes or 0 for part in parts), "")
    return {
        "session": plot.session(records),
        "experiments": plot.experiments(records),
        "devices": plot.devices(
            [Reconciliation("cuda:0", CARD, "the device's memory", (*parts, free))]
        ),
    }


if __name__ == "__main__":
    for name, figure in pictures().items():
        figure.savefig(
            Path(sys.argv[1]) / f"plot-{name}.png", dpi=150, metadata={"Software": "ipygpumem"}
        )
