"""``%gpumem release`` and ``%gpumem purge``."""

from __future__ import annotations

from IPython.core.error import UsageError

from ipygpumem.extras.moving import moving, releasing
from ipygpumem.extras.moving.moving_report import purge_report, release_report
from ipygpumem.magics.parsing import Options
from ipygpumem.report.layout import Report, clean_name
from ipygpumem.shell.app import App
from ipygpumem.shell.ipython.sources import running_cell


def release(app: App, options: Options) -> list[Report]:
    """Empty the named objects, and free the memory that only they hold."""
    named = list(zip(options.names, _objects(app, "release", options.names), strict=True))
    context = app.context
    where = f"cell {running_cell(context.shell)}"
    roots = app.experiments.survivors.roots
    record = releasing.release(named, where, context.meter, context.garbage, roots)
    return [release_report(record)]


def purge(app: App, options: Options) -> list[Report]:
    """Move a model, and an optimizer's state, off the device and back."""
    if len(options.names) > 2:
        raise UsageError("%gpumem purge: it takes a model and its optimizer: %gpumem purge model optimizer")
    model, *optimizers = _objects(app, "purge", options.names)
    record = moving.purge(model, optimizers[0] if optimizers else None, app.context.meter, app.context.garbage)
    return [purge_report(record)]


def _objects(app: App, command: str, names: list[str]) -> list[object]:
    """Return the notebook's objects called ``names``."""
    for name in names:
        if name not in app.context.namespace:
            hint = f"; write ipygpumem.{command}({clean_name(name)})" if "." in name else ""
            raise UsageError(f"%gpumem {command}: there is no variable {clean_name(name)!r} here{hint}")
    return [app.context.namespace[name] for name in names]
