"""``ipygpumem.tensors``, ``diff`` and ``tracker``."""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from ipygpumem.api.shell import current_shell, current_traces, loaded_notebook, show
from ipygpumem.errors import FileError, GpuMemError, TraceError, UnitError, said
from ipygpumem.introspect import is_instance, module_dict, type_name
from ipygpumem.model import Usage
from ipygpumem.objects.arrays import Storages
from ipygpumem.objects.heap import Heap, undisturbed
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.holders.search import NOTEBOOK, Place, Roots, explain
from ipygpumem.objects.inventory import records, survey
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff, TensorRecord, TrackerRecord
from ipygpumem.reports import text
from ipygpumem.reports.layout import Report, note
from ipygpumem.reports.tensors import tracker_report
from ipygpumem.units import checked_bytes, whole


def tensors(*names: str, device: str | None = None, kind: str | None = None, min_bytes: float | str = 0) -> Inventory:
    """Return the tensors and arrays that are alive, each storage once, the largest first.

    It works in a script as well. In IPython it lists the notebook's names and cells too, even without the extension.

    Args:
        names: globs, of which one must fit a tensor's name: ``"model.*"``; none: also tensors without a name.
        device: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: ``parameter``, ``gradient``, ``optimizer state``, ``buffer`` or ``other``.
        min_bytes: the smallest size: a number, or ``"1MiB"``.

    Raises:
        GpuMemError: a name is no text, or there is no such kind or device.
        UnitError: ``min_bytes`` is not a size.
    """
    wrong = [type_name(name) for name in names if type(name) is not str]
    if wrong:
        raise GpuMemError(
            f"tensors takes names as text, such as 'model.*', and not {wrong[0]}; see diff for inventories"
        )
    if kind is not None and kind not in records.KINDS:
        raise GpuMemError(f"there is no such kind of tensor: write one of {', '.join(records.KINDS)}")
    least = checked_bytes(min_bytes)
    found = inventory_at(sys._getframe(1))
    return records.select(found, names, device=device, kind=kind, min_bytes=least)


def inventory_at(frame: FrameType, storages: Storages | None = None) -> Inventory:
    """Return an inventory of everything, with the names that code at ``frame`` sees; ``storages`` as in a survey."""
    shell = current_shell()
    if shell is None:
        code = frame.f_code
        return survey.take(survey.names_in(frame), file=code.co_filename, line=frame.f_lineno, storages=storages)

    from ipygpumem.notebook.commands.tensors import asked_by  # no script needs IPython

    return asked_by(frame, shell, storages)


def keeper_of(tensor: TensorRecord) -> str:
    """Describe the holder of a tensor that no name refers to directly, as ``%gpumem leaks`` does."""
    notebook = loaded_notebook()
    main = module_dict(sys.modules["__main__"])
    roots = Roots({id(main): Place.of_variable}) if notebook is None else notebook.experiments.survivors.roots()
    key = tensor.library, tensor.storage
    with undisturbed():
        heap = Heap(running_locals())
        found = explain([key], heap, roots)[key]
        heap.drop()
    return found.path.removeprefix(NOTEBOOK)


def diff(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories of ``tensors``.

    Raises:
        GpuMemError: one of them is no inventory.
    """
    for given in (before, after):
        if type(given) is not Inventory:
            raise GpuMemError(
                f"diff takes two inventories, as ipygpumem.tensors() gives them, and not {type_name(given)}"
            )
    return records.difference(before, after)


# -- trackers -------------------------------------------------------------------------------------------------


def tracker(to: object = None, *, top: int = 10, silent: bool = False) -> Tracker:
    """Return a tracker, whose ``track()`` says anywhere which tensors and arrays came and went since its last call.

    Args:
        to: where it says so: None is the notebook, in a script its stdout; a logger gets it as ``INFO``; a path is that
            of a file, to which it is added.
        top: how many of those that came are listed, and of those that went: the largest. The others are counted.
        silent: say nothing; ``track()`` returns the record in any case.

    Raises:
        TraceError: ``to`` is nothing to write to, or ``top`` no number of rows.
        FileError: the file cannot be written.
    """
    try:
        rows = whole(top, least=0)
    except UnitError as error:
        raise TraceError(f"top: {error}") from None
    return Tracker(_writer(to), rows, silent=silent)


class Tracker:
    """Follows the tensors and arrays that are alive, from call to call; made by ``tracker``. It keeps none alive."""

    def __init__(self, write: Callable[[Report], None], top: int, *, silent: bool) -> None:
        self._write = write
        self._top = top
        self._silent = silent
        self._number = 0
        self._last: tuple[Inventory, str, Storages] | None = None
        """What was there, where that was asked, and its storages: kept until the next inventory is taken, they let
        none be mistaken for one of them."""
        self._traces = current_traces()
        self._span = self._traces.meter.start()

    def __getstate__(self) -> NoReturn:  # each has storages and a span of its own
        raise TraceError("a tracker cannot be copied: make another")

    def track(self) -> TrackerRecord:
        """Say what came and went since the last call, and return it; the first call finds all that is there."""
        caller = sys._getframe().f_back
        usages, notes = self._usages()
        storages = Storages()
        found = inventory_at(caller or sys._getframe(), storages)  # no code in Python calls what atexit runs
        before, place, _ = self._last or (Inventory((), 0.0), "", None)
        file, line, cell, function = _position(caller, found.cell)
        where = f"{file}:{line}" if file is not None else "" if cell is None else f"cell {cell}, line {line}"
        where += f" in {function}" if function else ""
        changed = records.difference(before, found)
        self._number += 1
        record = TrackerRecord(
            changed.came,
            changed.went,
            place,
            where,
            self._number,
            *(found.taken_at, file, line, cell, function, found.device_bytes, usages, (*notes, *found.notes)),
        )
        self._last = found, where, storages
        self._traces.meter.lap(self._span)  # what our look took is not the code's
        if not self._silent:
            self._write(tracker_report(record, top=self._top))
        return record

    def _usages(self) -> tuple[tuple[Usage, ...], list[str]]:
        traces = current_traces()
        if traces is self._traces:
            return traces.meter.lap(self._span), []
        self._traces, self._span = traces, traces.meter.start()
        return traces.meter.read(self._span), ["the extension was loaded or unloaded: peaks count from this call only"]


def _position(caller: FrameType | None, cell: int | None) -> tuple[str | None, int | None, int | None, str]:
    """Return the file (None for a cell), the line, the cell and the function of ``caller``, which ``cell`` has."""
    if caller is None:
        return None, None, None, ""
    code = caller.f_code
    name = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")  # from Python 3.11 on
    function = "" if name == "<module>" or name.startswith("<cell line:") else name  # so IPython 8 calls a cell
    return (code.co_filename if cell is None else None), caller.f_lineno, cell, function


def _writer(to: Any) -> Callable[[Report], None]:
    """Return what writes a report to ``to``; where that fails, it shows it with the reason: the user's code goes on."""
    if to is None:
        return show
    if is_instance(to, logging.Logger) or is_instance(to, logging.LoggerAdapter):
        name = "its logger"
    elif type(to) is str or is_instance(to, pathlib.PurePath):
        try:
            to = pathlib.Path(to).expanduser().absolute()
            _append(to, "")
        except (OSError, ValueError, RuntimeError) as error:
            raise FileError(f"the tracker's file cannot be written: {said(error)}") from None
        name = str(to)
    else:
        raise TraceError(f"a tracker writes to a logger, or to a file whose path it gets, and not to {type_name(to)}")

    def write(report: Report) -> None:
        try:
            shown = text.render([report])
            if is_instance(to, pathlib.PurePath):
                _append(to, shown + "\n")
            else:
                to.info("%s", shown.rstrip(), stacklevel=3)  # who calls ``track``, which calls this
        except Exception as error:
            show(report)
            show(note(f"ipygpumem: the tracker could not write to {name}: {said(error)}"))

    return write


def _append(path: pathlib.Path, shown: str) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(shown)
