"""``ipygpumem.tracker``."""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from ipygpumem.api.inventories import inventory_at
from ipygpumem.api.shell import current_traces, show
from ipygpumem.errors import FileError, TraceError, quoted, said
from ipygpumem.introspect import is_instance, type_name
from ipygpumem.model import Usage
from ipygpumem.objects.arrays import Storages
from ipygpumem.objects.inventory import records
from ipygpumem.objects.inventory.records import Inventory, TrackerRecord
from ipygpumem.reports import text
from ipygpumem.reports.layout import Report, note
from ipygpumem.reports.tensors import tracker_report

_LEVELS = 4
"""From who calls the logger to who calls ``track``."""


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
    if type(top) is not int or top < 0:
        raise TraceError(
            f"top is how many rows are shown, 0 or more, and not {quoted(top) if type(top) is int else type_name(top)}"
        )
    return Tracker(_writer(to), top, silent=silent)


class Tracker:
    """Follows the tensors and arrays that are alive, from call to call; made by ``tracker``. It keeps none alive."""

    def __init__(self, write: Callable[[Report], None], top: int, *, silent: bool) -> None:
        self._write = write
        self._top = top
        self._silent = silent
        self._numbers = itertools.count(1)
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
        position = _position(caller, found.cell)
        changed = records.difference(before, found)
        record = TrackerRecord(
            came=changed.came,
            went=changed.went,
            before=place,
            after=_place(*position),
            number=next(self._numbers),
            taken_at=found.taken_at,
            file=position[0],
            line=position[1],
            cell=position[2],
            function=position[3],
            tensor_bytes=found.device_bytes,
            usages=usages,
            notes=(*notes, *found.notes),
        )
        self._last = found, record.after, storages
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


Position = tuple["str | None", "int | None", "int | None", str]
"""A file, or None for a cell; the line there; the cell; the function."""


def _position(caller: FrameType | None, cell: int | None) -> Position:
    """Return where ``caller`` is, whose code is of ``cell`` if that is a number."""
    if caller is None:
        return None, None, None, ""
    code = caller.f_code
    name = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")  # from Python 3.11 on
    function = "" if name == "<module>" or name.startswith("<cell line:") else name  # so IPython 8 calls a cell
    return (code.co_filename if cell is None else None), caller.f_lineno, cell, function


def _place(file: str | None, line: int | None, cell: int | None, function: str) -> str:
    where = f"{file}:{line}" if file is not None else "" if cell is None else f"cell {cell}, line {line}"
    return f"{where} in {function}" if function else where


# -- where it is said -----------------------------------------------------------------------------------------


def _writer(to: object) -> Callable[[Report], None]:
    if to is None:
        return show
    if is_instance(to, logging.Logger) or is_instance(to, logging.LoggerAdapter):
        return functools.partial(_safely, functools.partial(_log, to), "its logger")
    if type(to) is not str and not is_instance(to, pathlib.PurePath):
        raise TraceError(f"a tracker writes to a logger, or to a file whose path it gets, and not to {type_name(to)}")
    try:
        path = pathlib.Path(to).expanduser().absolute()  # type: ignore[arg-type]  # a text or a path
        _append(path, "")
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"the tracker's file cannot be written: {said(error)}") from None
    return functools.partial(_safely, functools.partial(_append, path), str(path))


def _safely(write: Callable[[str], None], name: str, report: Report) -> None:
    """Write a report; where that fails, show it with the reason: the code that is followed goes on."""
    try:
        write(text.render([report]) + "\n")
    except Exception as error:
        show(report)
        show(note(f"ipygpumem: the tracker could not write to {name}: {said(error)}"))


def _log(logger: Any, shown: str) -> None:
    logger.info("%s", shown.rstrip(), stacklevel=_LEVELS)


def _append(path: pathlib.Path, shown: str) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(shown)
