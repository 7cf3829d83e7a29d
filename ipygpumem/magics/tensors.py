"""``%gpumem tensors``, and inventories with the notebook's names and cells."""

from __future__ import annotations

from collections.abc import Container, Iterator
from types import FrameType
from typing import Any

from ipygpumem.errors import NotLoadedError
from ipygpumem.heap.arrays import Storages
from ipygpumem.heap.bulk import Progress, no_progress
from ipygpumem.introspect import is_instance
from ipygpumem.inventory import records, survey
from ipygpumem.inventory.records import Inventory
from ipygpumem.magics.parsing import Options
from ipygpumem.report import tensors as reports
from ipygpumem.report.layout import Report
from ipygpumem.scope.scope import ownable
from ipygpumem.shell.app import App, app_of
from ipygpumem.shell.ipython.caches import cell_of_output
from ipygpumem.shell.ipython.sources import cell_of_file, cell_that_bound, running_cell

_WORK = "tensors and arrays"


def tensors(app: App, options: Options) -> list[Report]:
    """Return the report of ``%gpumem tensors``."""
    kind = next((kind for kind in records.KINDS if options.kind and kind.startswith(options.kind)), None)
    found = records.select(inventory(app), options.names, device=options.device, kind=kind, min_bytes=options.min or 0)
    if options.by is None:
        return [reports.tensors_report(found, top=options.top)]
    groups = records.group(found.tensors, options.by)
    return [reports.groups_report(found, options.by, groups, top=options.top)]


def inventory(app: App) -> Inventory:
    """Return an inventory with the notebook's names; show a progress bar if it takes long."""
    with app.context.display.working(_WORK) as progress:
        return take(app.context.shell, progress=progress)


def asked_by(frame: FrameType, shell: Any, storages: Storages | None = None) -> Inventory:
    """Return an inventory for code at ``frame``, with a progress bar if the extension is loaded."""
    try:
        app = app_of(shell)
    except NotLoadedError:
        return take(shell, frame, storages)
    with app.context.display.working(_WORK) as progress:
        return take(shell, frame, storages, progress=progress)


def take(
    shell: Any, frame: FrameType | None = None, storages: Storages | None = None, *, progress: Progress = no_progress
) -> Inventory:
    """Return an inventory with the notebook's names, and the local names of ``frame`` if given."""
    filename = "" if frame is None else frame.f_code.co_filename
    asking = running_cell(shell) if frame is None else cell_of_file(shell, filename)
    is_script = frame is not None and asking is None and not filename.startswith("<")
    local = {} if frame is None else survey.locals_of(frame)
    covered = _covered(shell)
    return survey.take(
        [*local.items(), *_roots(shell)],
        cell_of=lambda root: None if root in local else _cell_of(shell, root, covered.get(root, ())),
        file=filename if is_script else None,
        line=frame.f_lineno if is_script and frame is not None else None,
        cell=asking,
        storages=storages,
        progress=progress,
    )


def _roots(shell: Any) -> Iterator[tuple[str, object]]:
    """Yield the notebook's names, names with an underscore last, then its outputs."""
    namespace = {name: value for name, value in list(shell.user_ns.items()) if type(name) is str}
    plain = ownable(namespace)
    for name in sorted(plain, key=lambda name: name.startswith("_")):
        yield name, namespace[name]
    outputs = namespace.get("_oh")
    if is_instance(outputs, dict):
        for number, value in list(dict.items(outputs)):  # type: ignore[arg-type]  # is_instance says so
            if type(number) is int:
                yield f"Out[{number}]", value


def _cell_of(shell: Any, root: str, covered: Container[int | None]) -> int | None:
    return cell_of_output(root) or cell_that_bound(shell, root, covered)


def _covered(shell: Any) -> dict[str, set[int | None]]:
    """Return restored names → cells whose bindings an experiment undid."""
    try:
        experiments = app_of(shell).experiments.finished
    except NotLoadedError:
        return {}
    covered: dict[str, set[int | None]] = {}
    for experiment in experiments:
        for name in experiment.restored:
            covered.setdefault(name, set()).update(cell.execution_count for cell in experiment.cells)
    return covered
