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
from operator import attrgetter
from typing import Any

import IPython
from IPython import get_ipython

from ipygpumem.errors import GpuMemError, describe_error, quoted
from ipygpumem.magics import experiment
from ipygpumem.probes.accelerators import initialized_backend
from ipygpumem.reclaim.reclaim import bytes_in_use
from ipygpumem.records import ExperimentRecord
from ipygpumem.report import text
from ipygpumem.shell.app import App, app_of, find_app
from ipygpumem.shell.commands.parsing import parse
from ipygpumem.shell.recovery import free_on_devices

_NAME_OF_CALL = re.compile(r"_\w+_(f|args|kwargs|result)")
"""Names that ipyparallel binds on the engine for a call, such as ``_3f2a_args``."""


def answer(function: str, *words: Any) -> dict[str, Any]:
    """Call the function of ``_REQUESTS`` with this name; return ``{"value": its result}``, or
    ``{"error": message}`` if it fails.

    The notebook calls this on the engine, by way of ipyparallel.
    """
    names = get_ipython().user_ns
    # ipyparallel binds names for its call; an experiment that ends in it would own them.
    last_names = list(islice(reversed(names), 4))
    names_of_call = {name: names.pop(name) for name in last_names if _NAME_OF_CALL.fullmatch(name)}
    try:
        return {"value": _REQUESTS[function](_loaded_app(), *words)}
    except Exception as error:  # any error: the notebook reports it
        return {"error": describe_error(error)}
    finally:
        names.update(names_of_call)


def _loaded_app() -> App:
    """Return the extension of this engine; load it if it is not, so that it shows nothing by
    itself.
    """
    app = find_app(get_ipython())
    if app is None:
        get_ipython().extension_manager.load_extension("ipygpumem")
        app = app_of(get_ipython())
        app.context.config.report = False
    return app


def prepare(app: App, line: str) -> dict[str, Any]:
    """Check the options of the next cell, ``%%experiment LINE``, and return ``place()``.

    The client runs the cell only on engines that return their place.
    """
    _, options = parse(app.commands, "%experiment", f"start {line}")
    experiment.new_experiment(app, options)  # raises an error for a wrong option, and opens nothing
    return place()


def start(app: App, line: str) -> dict[str, Any]:
    """Open an experiment like ``%experiment start LINE``, and return ``place()``; end another
    client's experiment of the same name first.
    """
    options = parse(app.commands, "%experiment", f"start {line}")[1]
    # The first call imports modules, whose memory is not the experiment's.
    sys.modules["ipyparallel.serialize"].serialize_object(place())
    for earlier in list(app.experiments.open):
        is_of_another_client = earlier not in app.experiments.here()  # which may be gone
        if earlier.name == options.name and is_of_another_client:
            app.experiments.finish(earlier)
    experiment.start(app, options)
    return place()


def end(app: App, name: str, whose: str = "") -> dict[str, Any]:
    """End the experiment with this name, and return its ``_result``.

    Args:
        app: the extension.
        name: the name.
        whose: ``own`` for experiments of the requesting client only; otherwise an experiment of
            another client is ended if that client has none.

    Raises:
        GpuMemError: there is none.
    """
    candidates = list(app.experiments.here())
    if whose != "own":
        candidates = [*app.experiments.open, *candidates]  # the last one with the name is ended
    named = [item for item in candidates if item.name == name]
    if not named:
        raise GpuMemError(f"no experiment {quoted(name)} is open there")
    named[-1].report = "none"
    return _result(app, app.experiments.finish(named[-1]))


def record(app: App, name: str, since: Mapping[int, float]) -> dict[str, Any]:
    """Return the ``_result`` of the first experiment with that name that began since a time.

    Args:
        app: the extension.
        name: the name.
        since: the time on the clock of each engine, by its number.

    Raises:
        GpuMemError: there is none.
    """
    begin = since[get_ipython().kernel.engine_id]
    records = [
        item for item in app.experiments.finished if item.name == name and item.started_at >= begin
    ]
    if not records:
        raise GpuMemError("its cell ended no experiment")
    return _result(app, min(records, key=attrgetter("started_at")))


def _result(app: App, record: ExperimentRecord) -> dict[str, Any]:
    """Return an ended experiment's record, its first error, and this engine's free memory."""
    errors = [cell.error for cell in record.cells if cell.error is not None]
    return {
        **place(),
        "free": free_on_devices(app.context.meter.now()),
        "record": record.to_dict(),
        "error": errors[0] if errors else "",
    }


def look(app: App, magic: str, line: str) -> dict[str, Any]:
    """Return a command's output here as text, and the memory in use before and after it.

    Args:
        app: the extension.
        magic: ``gpumem``, for instance.
        line: the words after it: ``free``.
    """
    command, options = parse(app.commands, f"%{magic}", line)
    before = bytes_in_use(app.context.meter.now())
    reports = command.run(app, options)
    after = bytes_in_use(app.context.meter.now())
    return {
        **place(),
        "text": text.render(reports),
        "before": before,
        "after": after,
        "free": free_on_devices(app.context.meter.now()),
    }


def place() -> dict[str, Any]:
    """Return this engine's host, process, versions and time."""
    package = sys.modules["ipygpumem"].__version__
    python = platform.python_version()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cards": _cards(),
        "version": f"ipygpumem {package}, Python {python}, IPython {IPython.__version__}",
        "time": time.time(),
    }


def _cards() -> dict[str, str]:
    """Return the names of the GPUs on which torch has reserved memory here."""
    cards: dict[str, str] = {}
    cuda = initialized_backend("cuda")
    if cuda is None:
        return cards
    for number in range(cuda.device_count()):
        if cuda.memory_reserved(number):
            cards[f"cuda:{number}"] = str(cuda.get_device_properties(number).name)
    return cards


_REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "prepare": prepare,
    "start": start,
    "end": end,
    "record": record,
    "look": look,
}
"""Functions that a notebook may request."""
