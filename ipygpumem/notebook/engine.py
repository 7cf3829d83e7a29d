"""What an engine of a cluster does for the notebook that asks: its own experiments, commands and measurements.

Everything here takes and returns plain values, since the engine may run other versions of Python and IPython.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import IPython
from IPython import get_ipython

from ipygpumem.errors import GpuMemError, quoted
from ipygpumem.introspect import type_name
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.commands import experiment
from ipygpumem.notebook.commands.magics import loaded
from ipygpumem.notebook.commands.parsing import parse
from ipygpumem.notebook.experiments.run import ExperimentRun
from ipygpumem.notebook.extension import load
from ipygpumem.notebook.notebook import Notebook, find_notebook
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.registry import MAGICS
from ipygpumem.probes import device_memory
from ipygpumem.probes.nvml import Nvml
from ipygpumem.reports import text
from ipygpumem.reports.layout import Report
from ipygpumem.scopes.scope import Scope

_OF_CALL = re.compile(r"_\w+_(f|args|kwargs|result)")
_BEFORE_FIT = "_ipygpumem_before_fit"
_RANKS = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""What torchrun, MPI and Slurm set for each process of a job."""


class Quiet(Part):
    """Keeps our lines off here while experiments are open whose reports a notebook merges, however they end."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._report = False
        self.open: dict[str, ExperimentRun] = {}
        """By the notebook's token."""
        self.of_cells: dict[str, set[str] | None] = {}
        """Of those for one cell, what the cell has bound; None before it has."""

    def add(self, token: str, opened: ExperimentRun, *, is_for_cell: bool) -> None:
        """Keep them off until this one is over."""
        config = self._notebook.tools.config
        if not self.open:
            self._report = config.report
        self.open[token] = opened
        if is_for_cell:
            self.of_cells[token] = None
        config.report = False

    def settle(self) -> None:
        """Put the option back if none is open any more; what the user has switched on since stays on."""
        if self.open:
            self.open = {token: item for token, item in self.open.items() if item in self._notebook.experiments.open}
            self.of_cells = {token: names for token, names in self.of_cells.items() if token in self.open}
            if not self.open:
                self._notebook.tools.config.report |= self._report

    def cell_begins(self, cell: Cell) -> None:
        """Leave to others what they have sent here since an experiment for one cell was opened, such as a push."""
        for token, scope in self._scopes_of_cells(cell):
            self.leave_to_others(token, scope)

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """See what the cell has ended, and what it has bound."""
        self.settle()
        for token, scope in self._scopes_of_cells(cell):
            self.of_cells[token] = set(scope.own_names())
        return ()

    def _scopes_of_cells(self, cell: Cell) -> list[tuple[str, Scope]]:
        """Return the scopes for one cell that this may be."""
        waiting = [] if cell.nested else [token for token, names in self.of_cells.items() if names is None]
        here = self._notebook.experiments.here() if waiting else ()
        return [(token, self.open[token].scope) for token in waiting if self.open[token] in here]

    def leave_to_others(self, token: str, scope: Scope) -> None:
        """Leave to others what the cell of an experiment for one has not bound."""
        scope.leave_to_others(set(scope.own_names()) - (self.of_cells[token] or set()), ())


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


def has_card() -> bool:
    """Whether this process may use a CUDA device. It makes no context."""
    if (cuda := device_memory.cuda_in_use()) is not None:
        return bool(cuda.device_count())
    with contextlib.closing(Nvml()) as nvml, contextlib.suppress(LookupError):
        return bool(nvml.visible())
    return False


def start(line: str, token: str, is_for_cell: bool) -> dict[str, Any]:  # it comes over the wire
    """Open an experiment as ``%experiment start LINE`` does; our own reports are off until it ends."""
    notebook = _notebook()
    _, options = parse(_command("experiment"), f"start {line}")
    sys.modules["ipyparallel.serialize"].serialize_object(place())  # what the first one imports is not the experiment's
    for other in () if is_for_cell else list(notebook.experiments.open):
        if other.name == options.name and other not in notebook.experiments.here():  # of a client that may be gone
            notebook.experiments.finish(other)
    experiment.start(notebook, options)
    _quiet(notebook).add(token, notebook.experiments.here()[-1], is_for_cell=is_for_cell)
    return place()


def cancel(token: str) -> None:
    """End what an earlier question has opened, whose answer came too late."""
    notebook = find_notebook(get_ipython())
    opened = None if notebook is None else _quiet(notebook).open.get(token)
    if notebook is not None and opened is not None and opened in notebook.experiments.open:
        end(opened.name, token)


def end(name: str, token: str) -> dict[str, Any]:
    """End the experiment of this token, else the last one of that name, and return its record."""
    notebook = find_notebook(get_ipython())
    opened = _opened(notebook, name, token)
    if notebook is None or opened is None:
        raise GpuMemError(f"no experiment {quoted(name)} is open there")
    quiet = _quiet(notebook)
    if token in quiet.of_cells:
        quiet.leave_to_others(token, opened.scope)
    opened.options.report = "none"
    record = notebook.experiments.finish(opened)
    quiet.settle()
    return {**place(), "free": _free(notebook), "record": record.to_dict(), "error": _error_of(record)}


def keep(line: str) -> None:
    """Let names stay, as ``%experiment keep LINE`` does."""
    _, options = parse(_command("experiment"), f"keep {line}")
    experiment.keep(_notebook(), options)


def _opened(notebook: Notebook | None, name: str, token: str) -> ExperimentRun | None:
    """Return the open experiment of a token; without one, as where another client began it, the last of that name."""
    if notebook is None:
        return None
    named = {item.name: item for item in notebook.experiments.open}
    return _quiet(notebook).open.get(token, None if token else named.get(name))


def cells(name: str, token: str, known: int) -> dict[str, Any]:
    """Return how many cells an open experiment has, and the records of those after the first ``known``."""
    notebook = find_notebook(get_ipython())
    opened = _opened(notebook, name, token)
    own = opened.cells if opened is not None else ()
    free = {} if notebook is None else _free(notebook)
    return {"count": len(own), "cells": [cell.to_dict() for cell in own[known:]], "free": free}


def look(magic: str, line: str) -> dict[str, Any]:
    """Return what a command shows here, as text, and what is in use before and after it."""
    notebook = _notebook()
    command, options = parse(_command(magic), line)
    before = {reading.device: reading.current_bytes for reading in notebook.tools.meter.now().values()}
    reports = loaded(command.run)(notebook, options)
    after = {reading.device: reading.current_bytes for reading in notebook.tools.meter.now().values()}
    return {**place(), "text": text.render(reports), "before": before, "after": after, "free": _free(notebook)}


def place() -> dict[str, Any]:
    """Return where this engine is, and what it runs."""
    cuda = device_memory.cuda_in_use()
    used = [] if cuda is None else [at for at in range(cuda.device_count()) if cuda.memory_reserved(at)]
    ours = sys.modules["ipygpumem"].__version__
    versions = f"ipygpumem {ours}, Python {platform.python_version()}, IPython {IPython.__version__}"
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": _rank(),
        "cards": {f"cuda:{at}": str(cuda.get_device_properties(at).name) for at in used} if cuda else {},
        "version": versions,
    }


def _rank() -> int | None:
    texts = (os.environ.get(name, "") for name in _RANKS)
    return next((int(text) for text in texts if text.isdecimal() and len(text) < 10), None)


def begin_try(values: dict[str, int | float]) -> None:
    """Bind the variables of an autofit; what they were before its first try is remembered."""
    shell = get_ipython()
    if _BEFORE_FIT not in vars(shell):
        setattr(shell, _BEFORE_FIT, {name: shell.user_ns[name] for name in values if name in shell.user_ns})
    shell.user_ns.update(values)


def end_fit(names: list[str], fits: bool) -> None:  # it comes over the wire
    """Let the variables have what they had before, unless it ``fits``."""
    shell = get_ipython()
    before = vars(shell).pop(_BEFORE_FIT, {})
    for name in () if fits else names:
        shell.user_ns.pop(name, None)
    shell.user_ns.update({} if fits else before)


def _command(name: str) -> Any:
    return next(magic for magic in MAGICS if magic.name == name).command("line")


def _notebook() -> Notebook:
    """Return the extension here; where we load it ourselves, it shows nothing by itself."""
    shell = get_ipython()
    found = find_notebook(shell)
    if found is None:
        found = load(shell)
        found.tools.config.report = False
    return found


def _quiet(notebook: Notebook) -> Quiet:
    for part in notebook.session.parts:
        if type(part) is Quiet:
            return part
    made = Quiet(notebook)
    notebook.join(made)
    return made


def _free(notebook: Notebook) -> dict[str, int]:
    """Return what nobody uses of each device that is measured here."""
    return {device: free for device, free in _free_of(notebook) if free is not None}


def _free_of(notebook: Notebook) -> Iterator[tuple[str, int | None]]:
    for reading in notebook.tools.meter.now().values():
        if reading.device == "cpu":
            yield "cpu", device_memory.read("cpu").free_bytes
        elif reading.total_bytes is not None and reading.used_bytes is not None:
            yield reading.device, reading.total_bytes - reading.used_bytes


def _error_of(record: ExperimentRecord) -> str:
    return next((cell.error for cell in record.cells if cell.error is not None), "")


_ASKED: dict[str, Callable[..., Any]] = {
    "has_card": has_card,
    "start": start,
    "cancel": cancel,
    "end": end,
    "keep": keep,
    "cells": cells,
    "look": look,
    "begin_try": begin_try,
    "end_fit": end_fit,
}
"""What may be asked for."""
