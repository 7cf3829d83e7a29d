"""What an engine of a cluster does for the notebook that asks: experiments, commands and their records.

Everything here takes and returns plain values, since the engine may run other versions of Python and IPython.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import IPython
from IPython import get_ipython

from ipygpumem.errors import GpuMemError, quoted
from ipygpumem.introspect import type_name
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.cell import Cell, Part
from ipygpumem.notebook.commands import experiment
from ipygpumem.notebook.commands.magics import loaded
from ipygpumem.notebook.commands.parsing import Options, parse
from ipygpumem.notebook.experiments.run import ExperimentRun
from ipygpumem.notebook.extension import load
from ipygpumem.notebook.notebook import Notebook, find_notebook
from ipygpumem.probes import nvml
from ipygpumem.probes.accelerators import in_use
from ipygpumem.reports import text
from ipygpumem.reports.layout import Report

_OF_CALL = re.compile(r"_\w+_(f|args|kwargs|result)")
_KEPT_RECORDS = 20


class Ended(Part):
    """Keeps the records of the experiments that cells have ended, by the message that sent the cell."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._newest_before: ExperimentRecord | None = None
        self.records: dict[str, ExperimentRecord] = {}
        self.open: dict[str, ExperimentRun] = {}
        """Open experiments by the token of the notebook that began them."""

    def cell_begins(self, cell: Cell) -> None:
        """Note the newest record."""
        if not cell.nested:
            self._newest_before = self._newest()

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Keep a record that is newer."""
        newest = self._newest()
        if newest is not None and newest is not self._newest_before and not cell.nested:
            self.records[get_ipython().kernel.get_parent("shell")["header"]["msg_id"]] = newest
            for message in list(self.records)[:-_KEPT_RECORDS]:
                del self.records[message]
        return ()

    def _newest(self) -> ExperimentRecord | None:
        finished = self._notebook.experiments.finished
        return finished[-1] if finished else None


def answer(function: str, *words: Any) -> dict[str, Any]:
    """Call a function of this module; return its ``value``, or the ``error`` in words."""
    names = get_ipython().user_ns
    # ipyparallel binds what it calls; an experiment that ends meanwhile would take these names for its own.
    bound = {name: names.pop(name) for name in list(islice(reversed(names), 4)) if _OF_CALL.fullmatch(name)}
    try:
        return {"value": _ASKED[function](*words)}
    except GpuMemError as error:
        return {"error": str(error)}
    except Exception as error:  # whatever it is, the notebook names it
        return {"error": f"{type_name(error)}: {str(error).partition(chr(10))[0]}"}
    finally:
        names.update(bound)


def prepare(line: str) -> dict[str, Any]:
    """Load the extension, and check the words of a cell ``%%experiment LINE`` that comes next."""
    notebook, options = _parsed("experiment", f"start {line}")
    experiment.new(notebook, options)
    return place()


def start(line: str, token: str) -> dict[str, Any]:
    """Open an experiment as ``%experiment start LINE`` does, for the notebook with this token."""
    notebook, options = _parsed("experiment", f"start {line}")
    sys.modules["ipyparallel.serialize"].serialize_object(place())  # what the first one imports is not the experiment's
    for other in list(notebook.experiments.open):
        if other.name == options.name and other not in notebook.experiments.here():  # of a client that may be gone
            notebook.experiments.finish(other)
    experiment.start(notebook, options)
    _ended(notebook).open[token] = notebook.experiments.here()[-1]
    return place()


def cancel(token: str) -> None:
    """End the experiment of a notebook that no longer waits for its start."""
    if token in _ended(_notebook()).open:
        end("", token)


def end(name: str, token: str) -> dict[str, Any]:
    """End the experiment of this token; without one, as where another client began it, the last of that name."""
    notebook = _notebook()
    named = {item.name: item for item in notebook.experiments.open}
    opened = _ended(notebook).open.pop(token, None if token else named.get(name))
    if opened not in notebook.experiments.open:
        raise GpuMemError(f"no experiment {quoted(name)} is open there")
    opened.options.report = "none"
    return _result(notebook, notebook.experiments.finish(opened))


def record(message: str) -> dict[str, Any]:
    """Return the record of the experiment that the cell of this message has ended."""
    notebook = _notebook()
    found = _ended(notebook).records.pop(message, None)
    if found is None:
        raise GpuMemError("its cell ended no experiment")
    return _result(notebook, found)


def _result(notebook: Notebook, found: ExperimentRecord) -> dict[str, Any]:
    error = next((cell.error for cell in found.cells if cell.error is not None), "")
    return {**place(), "free": _free(notebook), "record": found.to_dict(), "error": error}


def look(magic: str, line: str) -> dict[str, Any]:
    """Return what a command shows here, as text, and what is in use before and after it."""
    notebook = _notebook()
    command, options = parse(f"%{magic}", line)
    before = {reading.device: reading.current_bytes for reading in notebook.context.meter.now().values()}
    reports = loaded(command.run)(notebook, options)
    after = {reading.device: reading.current_bytes for reading in notebook.context.meter.now().values()}
    return {**place(), "text": text.render(reports), "before": before, "after": after, "free": _free(notebook)}


def place() -> dict[str, Any]:
    """Return where this engine is, and what it runs."""
    cuda = in_use("cuda")
    used = [] if cuda is None else [at for at in range(cuda.device_count()) if cuda.memory_reserved(at)]
    ours = sys.modules["ipygpumem"].__version__
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cards": {f"cuda:{at}": str(cuda.get_device_properties(at).name) for at in used} if cuda else {},
        "version": f"ipygpumem {ours}, Python {platform.python_version()}, IPython {IPython.__version__}",
    }


def _parsed(magic: str, line: str) -> tuple[Notebook, Options]:
    notebook = _notebook()
    return notebook, parse(f"%{magic}", line)[1]


def _notebook() -> Notebook:
    """Return the extension here; where we load it ourselves, it shows nothing by itself."""
    shell = get_ipython()
    found = find_notebook(shell)
    if found is None:
        found = load(shell)
        found.context.config.report = False
    _ended(found)
    return found


def _ended(notebook: Notebook) -> Ended:
    for part in notebook.session.parts:
        if type(part) is Ended:
            return part
    made = Ended(notebook)
    notebook.join(made)
    return made


def _free(notebook: Notebook) -> dict[str, int]:
    """Return what nobody uses of each device that is measured here."""
    found = {"cpu": nvml.memory("cpu").free_bytes}
    for reading in notebook.context.meter.now().values():
        if reading.device != "cpu" and reading.total_bytes is not None and reading.used_bytes is not None:
            found[reading.device] = reading.total_bytes - reading.used_bytes
    return {device: free for device, free in found.items() if free is not None}


_ASKED: dict[str, Callable[..., Any]] = {
    "prepare": prepare,
    "start": start,
    "cancel": cancel,
    "end": end,
    "record": record,
    "look": look,
}
"""What may be asked for."""
