"""Runs a notebook's requests on an engine of a cluster: experiments, commands and their records.

All functions take and return plain values, because the engine may run other versions of Python and
IPython.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import IPython
from IPython import get_ipython

from ipygpumem.errors import GpuMemError, describe_error, quoted
from ipygpumem.magics import experiment
from ipygpumem.probes.accelerators import in_use
from ipygpumem.reclaim.reclaim import current
from ipygpumem.records import ExperimentRecord
from ipygpumem.report import text
from ipygpumem.shell.app import App, app_of, find_app
from ipygpumem.shell.commands.parsing import parse
from ipygpumem.shell.recovery import free_on_devices

_OF_CALL = re.compile(r"_\w+_(f|args|kwargs|result)")


def answer(function: str, *words: Any) -> dict[str, Any]:
    """Call one of the functions below; return its ``value``, or the ``error`` message."""
    names = get_ipython().user_ns
    # ipyparallel binds names for its call; an experiment that ends in it would own them.
    bound = {
        name: names.pop(name)
        for name in list(islice(reversed(names), 4))
        if _OF_CALL.fullmatch(name)
    }
    try:
        found = find_app(get_ipython())
        if found is None:  # loaded here, it shows nothing by itself
            get_ipython().extension_manager.load_extension("ipygpumem")
            found = app_of(get_ipython())
            found.context.config.report = False
        return {"value": _ASKED[function](found, *words)}
    except Exception as error:  # any error: the notebook reports it
        return {"error": describe_error(error)}
    finally:
        names.update(bound)


def prepare(app: App, line: str) -> dict[str, Any]:
    """Check the options of the next cell, ``%%experiment LINE``."""
    experiment.new(app, parse(app.commands, "%experiment", f"start {line}")[1])
    return place()


def start(app: App, line: str) -> dict[str, Any]:
    """Open an experiment like ``%experiment start LINE``."""
    options = parse(app.commands, "%experiment", f"start {line}")[1]
    # what the first one imports is not the experiment's
    sys.modules["ipyparallel.serialize"].serialize_object(place())
    for other in list(app.experiments.open):
        if (
            other.name == options.name and other not in app.experiments.here()
        ):  # of a client that may be gone
            app.experiments.finish(other)
    experiment.start(app, options)
    return place()


def end(app: App, name: str, whose: str = "") -> dict[str, Any]:
    """End the named experiment: the requesting client's, else another client's unless ``whose`` is
    ``own``.
    """
    known = [*([] if whose == "own" else app.experiments.open), *app.experiments.here()]
    named = [item for item in known if item.name == name]
    if not named:
        raise GpuMemError(f"no experiment {quoted(name)} is open there")
    named[-1].report = "none"
    return _result(app, app.experiments.finish(named[-1]))


def record(app: App, name: str, since: Mapping[int, float]) -> dict[str, Any]:
    """Return the record of the first experiment with that name that began since ``since``, a time
    of this engine.
    """
    begin = since[get_ipython().kernel.engine_id]
    found = [
        item for item in app.experiments.finished if item.name == name and item.started_at >= begin
    ]
    if not found:
        raise GpuMemError("its cell ended no experiment")
    return _result(app, min(found, key=lambda item: item.started_at))


def _result(app: App, found: ExperimentRecord) -> dict[str, Any]:
    error = next((cell.error for cell in found.cells if cell.error is not None), "")
    return {
        **place(),
        "free": free_on_devices(app.context.meter.now()),
        "record": found.to_dict(),
        "error": error,
    }


def look(app: App, magic: str, line: str) -> dict[str, Any]:
    """Return a command's output here as text, and the memory in use before and after it."""
    command, options = parse(app.commands, f"%{magic}", line)
    before = current(app.context.meter.now())
    reports = command.run(app, options)
    after = current(app.context.meter.now())
    return {
        **place(),
        "text": text.render(reports),
        "before": before,
        "after": after,
        "free": free_on_devices(app.context.meter.now()),
    }


def place() -> dict[str, Any]:
    """Return this engine's host, process, versions and time."""
    cuda = in_use("cuda")
    used = (
        []
        if cuda is None
        else [at for at in range(cuda.device_count()) if cuda.memory_reserved(at)]
    )
    ours = sys.modules["ipygpumem"].__version__
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cards": {f"cuda:{at}": str(cuda.get_device_properties(at).name) for at in used}
        if cuda
        else {},
        "version": f"ipygpumem {ours}, Python {platform.python_version()}, "
        f"IPython {IPython.__version__}",
        "time": time.time(),
    }


_ASKED: dict[str, Callable[..., dict[str, Any]]] = {
    ask.__name__: ask for ask in (prepare, start, end, record, look)
}
"""Functions that a notebook may request."""
