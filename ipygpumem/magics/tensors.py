"""``%gpumem tensors`` and ``top``, and inventories with the notebook's names and cells."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from types import FrameType
from typing import Any

from ipygpumem.errors import NotLoadedError
from ipygpumem.heap.arrays import Storages
from ipygpumem.heap.bulk import Progress, no_progress
from ipygpumem.inventory import records, survey
from ipygpumem.inventory.records import Inventory
from ipygpumem.inventory.top import LargestNames, select
from ipygpumem.inventory.top import take as take_largest
from ipygpumem.magics.parsing import Options
from ipygpumem.probes.host import rss_bytes
from ipygpumem.report import inventory as reports
from ipygpumem.report.inventory import top_report
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App, app_of, find_app
from ipygpumem.shell.ipython.caches import cell_of_output, named_objects
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


def top(app: App, options: Options) -> list[Report]:
    """Return the report of ``%gpumem top``."""
    found = select(largest(app), options.names, device=options.device, min_bytes=options.min or 0)
    return [top_report(found, top=options.n)]


def largest(app: App) -> LargestNames:
    """Return the memory that names and outputs hold; show a progress bar if it takes long."""
    return largest_at(None, app.context.shell)


def largest_at(frame: FrameType | None, shell: Any) -> LargestNames:
    """Return the memory that names and outputs hold, and the local names of ``frame`` if given."""
    app = find_app(shell)
    local = {} if frame is None else survey.locals_of(frame)
    named, covered = named_objects(shell), _covered(shell)
    used = {"cpu": rss_bytes()}
    if app is not None:
        used = {device: reading.current_bytes for device, reading in app.context.meter.now().items()}

    def cell_of(root: str) -> int | None:
        return None if root in local else _cell_of(shell, root, covered.get(root, ()))

    with contextlib.nullcontext(no_progress) if app is None else app.context.display.working("names") as progress:
        return take_largest(named | local, used, cell_of=cell_of, remedy_of=_remedy_of, progress=progress)


def _remedy_of(names: Sequence[str]) -> str:
    """Return the line that deletes an object's names; ``del`` would leave IPython's copies of an output."""
    numbers = [number for number in map(cell_of_output, names) if number is not None]
    plain = [name for name in names if cell_of_output(name) is None]
    return f"%xdel {plain[0] if plain else f'_{numbers[0]}'}" if numbers else f"del {', '.join(plain)}"


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
        [*local.items(), *named_objects(shell).items()],
        cell_of=lambda root: None if root in local else _cell_of(shell, root, covered.get(root, ())),
        file=filename if is_script else None,
        line=frame.f_lineno if is_script and frame is not None else None,
        cell=asking,
        storages=storages,
        progress=progress,
    )


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
