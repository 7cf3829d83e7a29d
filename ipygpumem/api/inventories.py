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
    """Return the live tensors and arrays, each storage once, the largest first.

    Use it to find out which names hold the memory, or before and after a step, with ``diff``. It works in a script as
    well. In IPython it also lists the notebook's names and cells, even without the extension. Memory without a Python
    object is not listed: activations saved for backward, buffers in C++.

    Args:
        names: globs, of which one must match a tensor's name: ``"model.*"``; none: all, with and without a name.
        device: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: ``parameter``, ``gradient``, ``optimizer state``, ``buffer`` or ``other``.
        min_bytes: the smallest size: a number, or ``"1MiB"``.

    Raises:
        GpuMemError: a name is not a string, or there is no such kind or device.
        UnitError: ``min_bytes`` is not a size.

    >>> weights = numpy.zeros((256, 512))
    >>> ipygpumem.tensors("weights").total_bytes
    1048576
    """
    wrong = [type_name(name) for name in names if type(name) is not str]
    if wrong:
        raise GpuMemError(
            f"tensors takes names as strings, such as 'model.*', not {wrong[0]}; see diff for inventories"
        )
    if kind is not None and kind not in records.KINDS:
        raise GpuMemError(f"there is no such kind of tensor: write one of {', '.join(records.KINDS)}")
    least = checked_bytes(min_bytes)
    found = inventory_at(sys._getframe(1))
    return records.select(found, names, device=device, kind=kind, min_bytes=least)


def inventory_at(frame: FrameType, storages: Storages | None = None) -> Inventory:
    """Return an inventory with the names visible to code at ``frame``; ``storages`` as in a survey."""
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
    """Return the tensors and arrays that came and went between two inventories of ``tensors``.

    Use it to see what a step leaves behind. A new storage at the address of a freed one of the same size is missed.

    Raises:
        GpuMemError: an argument is not an inventory.

    >>> before = ipygpumem.tensors("batch")
    >>> batch = numpy.ones(2**17)
    >>> ipygpumem.diff(before, ipygpumem.tensors("batch")).changed_bytes
    {'cpu': 1048576}
    """
    for given in (before, after):
        if type(given) is not Inventory:
            raise GpuMemError(
                f"diff takes two inventories, as ipygpumem.tensors() returns them, not {type_name(given)}"
            )
    return records.difference(before, after)


# -- trackers -------------------------------------------------------------------------------------------------


def tracker(to: object = None, *, top: int = 10, silent: bool = False) -> Tracker:
    """Return a tracker, whose ``track()`` reports the tensors and arrays that came and went since its last call.

    Use it inside functions, where no cell ends: call ``track()`` before and after the suspected code.

    Args:
        to: destination of the reports: None is the notebook, or a script's stdout; a logger gets them as ``INFO``; a
            path is that of a file to append to.
        top: maximum number of new ones to list, and of gone ones, the largest first; the rest are counted.
        silent: report nothing; ``track()`` returns the record in any case.

    Raises:
        TraceError: ``to`` is no destination, or ``top`` not a number of rows.
        FileError: the file cannot be written.

    >>> tracker = ipygpumem.tracker(silent=True)
    >>> first = tracker.track()
    >>> image = numpy.zeros(2**20)
    >>> tracker.track().came[0].name
    'image'
    """
    try:
        rows = whole(top, least=0)
    except UnitError as error:
        raise TraceError(f"top: {error}") from None
    return Tracker(_writer(to), rows, silent=silent)


class Tracker:
    """Compares the live tensors and arrays from call to call, without keeping them alive; made by ``tracker``."""

    def __init__(self, write: Callable[[Report], None], top: int, *, silent: bool) -> None:
        self._write = write
        self._top = top
        self._silent = silent
        self._number = 0
        self._last: tuple[Inventory, str, Storages] | None = None
        """The last inventory, its place in the code, and its storages, so that no new one reuses their identities."""
        self._traces = current_traces()
        self._span = self._traces.meter.start()

    def __getstate__(self) -> NoReturn:  # its storages and span cannot be shared
        raise TraceError("a tracker cannot be copied: make a new one")

    def track(self) -> TrackerRecord:
        """Report and return what came and went since the last call; the first call lists everything as new."""
        caller = sys._getframe().f_back
        usages, notes = self._usages()
        storages = Storages()
        found = inventory_at(caller or sys._getframe(), storages)  # no Python code calls an atexit handler
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
        self._traces.meter.lap(self._span)  # exclude the memory of our own search
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
    """Return the file (None for a cell), the line, the cell and the function of ``caller``."""
    if caller is None:
        return None, None, None, ""
    code = caller.f_code
    name = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")  # from Python 3.11 on
    function = "" if name == "<module>" or name.startswith("<cell line:") else name  # IPython 8's name for a cell
    return (code.co_filename if cell is None else None), caller.f_lineno, cell, function


def _writer(to: Any) -> Callable[[Report], None]:
    """Return a function that writes a report to ``to``; if that fails, it shows the report with the reason."""
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
        raise TraceError(f"a tracker writes to a logger or to a file path, not to {type_name(to)}")

    def write(report: Report) -> None:
        try:
            shown = text.render([report])
            if is_instance(to, pathlib.PurePath):
                _append(to, shown + "\n")
            else:
                to.info("%s", shown.rstrip(), stacklevel=3)  # the caller of ``track``, which calls this
        except Exception as error:
            show(report)
            show(note(f"ipygpumem: the tracker could not write to {name}: {said(error)}"))

    return write


def _append(path: pathlib.Path, shown: str) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(shown)
