"""Writes OpenMetrics text, for Prometheus' textfile collector: totals of the session, and its experiments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ipygpumem.model import CellRecord, ExperimentRecord, SessionRecord, Usage
from ipygpumem.reports.history import numbered
from ipygpumem.reports.layout import clean

_HEAD = "# TYPE ipygpumem_"


_Sample = tuple[Mapping[str, str], float]
"""Labels and a value."""


def render(record: SessionRecord) -> str:
    """Return the session's metrics."""
    return "".join([*_of_cells(record.cells), *_of_experiments(record.experiments), "# EOF\n"])


def is_ours(head: str) -> bool:
    """Whether a file that begins with ``head`` was written by ``render``."""
    return head.startswith(_HEAD)


def _of_cells(cells: Iterable[CellRecord]) -> Iterator[str]:
    cells = list(cells)
    failed = sum(not cell.success for cell in cells)
    counts = [({"success": "true"}, len(cells) - failed), ({"success": "false"}, failed)]
    yield _family("cells", "counter", "Finished cells.", counts)
    seconds = sum(cell.duration_seconds for cell in cells)
    yield _family("cell_seconds", "counter", "Time that cells ran.", [({}, seconds)])
    ooms = sum(cell.recovery is not None and cell.recovery.kind == "oom" for cell in cells)
    yield _family("recoveries", "counter", "Recoveries from out-of-memory errors.", [({}, ooms)])
    last: dict[str, Usage] = {}
    peaks: dict[str, int] = {}
    for usage in (usage for cell in cells for usage in cell.usages):
        last[usage.device] = usage
        peaks[usage.device] = max(peaks.get(usage.device, 0), usage.peak_bytes)
    now = [({"device": usage.device}, usage.after_bytes) for usage in last.values()]
    yield _family("memory_bytes", "gauge", "RSS of the host, live tensors elsewhere, after the last cell.", now)
    highest = [({"device": device}, size) for device, size in peaks.items()]
    yield _family("peak_bytes", "gauge", "The highest use by any cell.", highest)
    totals = [({"device": name}, usage.total_bytes) for name, usage in last.items() if usage.total_bytes is not None]
    yield _family("device_bytes", "gauge", "Size of each device.", totals)


def _of_experiments(experiments: Iterable[ExperimentRecord]) -> Iterator[str]:
    runs = [({"experiment": run.name, "run": str(run.number)}, run.record) for run in numbered(experiments)]
    seconds = [(labels, item.duration_seconds) for labels, item in runs]
    yield _family("experiment_seconds", "gauge", "Time from an experiment's start until its end was done.", seconds)
    ooms = [(labels, item.ooms) for labels, item in runs]
    yield _family("experiment_ooms", "gauge", "Out-of-memory errors of an experiment.", ooms)
    parameters = [
        ({**labels, "parameter": name, "value": str(value)}, 1)
        for labels, item in runs
        for name, value in item.parameters.items()
    ]
    yield _family("experiment_parameter", "info", "What --note said of an experiment.", parameters)
    usages = [(labels, usage) for labels, item in runs for usage in item.usages]
    figures = {
        "peak": ("How far an experiment rose above its start.", [(x, u.device, u.peak_delta_bytes) for x, u in usages]),
        "kept": ("What did not come back at its end.", [(x, u.device, u.delta_bytes) for x, u in usages]),
        "consumed": ("What an experiment held when it was ended, above its start.", _by_device(runs, "consumed")),
        "reclaimed": ("What its end gave back.", _by_device(runs, "reclaimed")),
    }
    for name, (words, found) in figures.items():
        samples = [({**labels, "device": device}, size) for labels, device, size in found]
        yield _family(f"experiment_{name}_bytes", "gauge", words, samples)


def _by_device(runs: list[tuple[dict[str, str], ExperimentRecord]], name: str) -> list[tuple[dict[str, str], str, int]]:
    return [(labels, device, size) for labels, item in runs for device, size in getattr(item, name).items()]


def _family(name: str, kind: str, words: str, samples: Iterable[_Sample]) -> str:
    """Return one metric with its samples."""
    name = f"ipygpumem_{name}"
    lines = [f"# TYPE {name} {kind}"]
    lines += [f"# UNIT {name} {unit}" for unit in ("bytes", "seconds") if name.endswith(f"_{unit}")]
    lines.append(f"# HELP {name} {words}")
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    for labels, figure in samples:
        inside = ",".join(f'{label}="{_escape(value)}"' for label, value in labels.items())
        lines.append(f"{name}{suffix}{{{inside}}} {figure}" if inside else f"{name}{suffix} {figure}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"')
