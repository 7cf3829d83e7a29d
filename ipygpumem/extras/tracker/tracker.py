"""Trackers: each call reports the tensors and arrays that were added and removed since the last
one.
"""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from ipygpumem.api.inventories import inventory_at
from ipygpumem.api.shell import current_traces, show
from ipygpumem.errors import FileError, TraceError, UnitError, describe_error
from ipygpumem.heap.kinds.tensors import Storages
from ipygpumem.introspect import is_instance, type_name
from ipygpumem.inventory.arrays import records
from ipygpumem.inventory.arrays.records import Inventory, InventoryDiff
from ipygpumem.records import Usage
from ipygpumem.report import devices, layout, text
from ipygpumem.report.devices import device_label, sizes
from ipygpumem.report.layout import Report, note
from ipygpumem.report.tensors import changed_tables
from ipygpumem.report.words import clean, count
from ipygpumem.units import checked_integer, format_bytes, format_change


def tracker(to: object = None, *, top: int = 10, silent: bool = False) -> Tracker:
    """Return a tracker, whose ``track()`` reports the tensors and arrays added and removed since
    its last call.

    Use it inside functions, where no cell ends: call ``track()`` before and after the suspected
    code.

    Args:
        to: destination of the reports: None is the notebook, or a script's stdout; a logger gets
            them as ``INFO``; a path is that of a file to append to.
        top: maximum number of new ones to list, and of gone ones, the largest first; the rest are
            counted.
        silent: report nothing; ``track()`` returns the record in any case.

    Raises:
        TraceError: ``to`` is no destination, or ``top`` not a number of rows.
        FileError: the file cannot be written.

    >>> tracker = ipygpumem.tracker(silent=True)
    >>> first = tracker.track()
    >>> image = numpy.zeros(2**20)
    >>> tracker.track().added[0].name
    'image'
    """
    try:
        rows = checked_integer(top, minimum=0)
    except UnitError as error:
        raise TraceError(f"top: {error}") from None
    return Tracker(_function_that_writes(to), rows, silent=silent)


@dataclass(frozen=True, repr=False)
class TrackerRecord(InventoryDiff):
    """Changes between two calls of a tracker, and the state at the second; in the first call
    everything is new.
    """

    number: int
    """Number of the call, counted from 1."""
    taken_at: float
    """Unix time."""
    file: str | None
    """The calling code's file; None for a notebook cell, and without a Python caller."""
    line: int | None
    """Line in the file, or in the cell."""
    cell: int | None
    """Execution count of the cell with the calling code."""
    function: str
    """The calling function, such as ``Net.forward``; empty at the top level."""
    tensor_bytes: dict[str, int]
    """Bytes of all tensors and arrays on each device, each storage once."""
    usages: tuple[Usage, ...]
    """Usage of each device since the last call."""
    notes: tuple[str, ...] = ()
    """Messages for the user about tensors that could not be read."""


class _TrackerState(NamedTuple):
    """The tensors and arrays at one call of a tracker."""

    inventory: Inventory
    place: str
    """The place of the call, in words."""
    storages: Storages | None
    """The storages of the inventory, which are kept so that no new one reuses their identities."""


_BEFORE_FIRST_CALL = _TrackerState(Inventory(tensors=(), taken_at=0.0), place="", storages=None)


class Tracker:
    """Compares the live tensors and arrays from call to call, without keeping them alive; made by
    ``tracker``.

    Args:
        write: writes a report.
        top: number of rows, as in ``tracker``.
        silent: do not report.
    """

    def __init__(self, write: Callable[[Report], None], top: int, *, silent: bool) -> None:
        self._write = write
        self._top = top
        self._silent = silent
        self._number = 0
        """Number of calls so far."""
        self._last = _BEFORE_FIRST_CALL
        """The state at the last call."""
        self._traces = current_traces()
        self._span = self._traces.meter.span()

    def __repr__(self) -> str:
        return f"<tracker: {count(self._number, 'call')}>"

    def track(self) -> TrackerRecord:
        """Report and return the changes since the last call; the first call lists everything as
        added.
        """
        caller = sys._getframe().f_back
        usages, notes = self._usages()
        storages = Storages()
        # ``atexit.register(tracker.track)``: no Python code calls this
        inventory = inventory_at(caller or sys._getframe(), storages)
        place = _code_place(caller, inventory.cell)
        changes = records.difference(self._last.inventory, inventory)
        self._number += 1
        record = TrackerRecord(
            changes.added,
            changes.removed,
            self._last.place,
            place.text,
            self._number,
            inventory.taken_at,
            place.file,
            place.line,
            place.cell,
            place.function,
            tensor_bytes=inventory.device_bytes,
            usages=usages,
            notes=(*notes, *inventory.notes),
        )
        self._last = _TrackerState(inventory, place.text, storages)
        self._span.lap()  # exclude the memory of our own search
        if not self._silent:
            self._write(tracker_report(record, top=self._top))
        return record

    def _usages(self) -> tuple[tuple[Usage, ...], list[str]]:
        """Return each device's usage since the last call, and a note if it cannot be since then."""
        traces = current_traces()
        if traces is self._traces:
            return self._span.lap(), []
        self._traces = traces
        self._span = traces.meter.span()
        why = "the extension was loaded or unloaded: peaks count from this call only"
        return self._span.read(), [why]


class _CodePlace(NamedTuple):
    """A place in the calling code."""

    file: str | None = None
    line: int | None = None
    cell: int | None = None
    function: str = ""

    @property
    def text(self) -> str:
        """The place in words."""
        place = ""
        if self.file is not None:
            place = f"{self.file}:{self.line}"
        elif self.cell is not None:
            place = f"cell {self.cell}, line {self.line}"
        if self.function:
            return f"{place} in {self.function}"
        return place


def _code_place(caller: FrameType | None, cell: int | None) -> _CodePlace:
    """Return the place of a frame in the code.

    Args:
        caller: the frame; None without a Python caller.
        cell: the number of the cell whose code the frame runs; None for a file.
    """
    if caller is None:
        return _CodePlace()
    code = caller.f_code
    # co_qualname exists from Python 3.11 on
    name = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")
    # IPython 8 calls the code of a cell so
    is_top_level = name == "<module>" or name.startswith("<cell line:")
    return _CodePlace(
        file=code.co_filename if cell is None else None,
        line=caller.f_lineno,
        cell=cell,
        function="" if is_top_level else name,
    )


def _function_that_writes(to: Any) -> Callable[[Report], None]:
    """Return a function that writes a report to ``to``, as in ``tracker``; if that fails, the
    function shows the report with the reason.

    Raises:
        TraceError: ``to`` is no destination.
        FileError: the file cannot be written.
    """
    if to is None:
        return show
    destination = to
    if is_instance(to, logging.Logger) or is_instance(to, logging.LoggerAdapter):
        name = "its logger"
    elif type(to) is str or is_instance(to, pathlib.PurePath):
        destination = _writable_file(to)
        name = str(destination)
    else:
        raise TraceError(f"a tracker writes to a logger or to a file path, not to {type_name(to)}")

    def write(report: Report) -> None:
        """Write a report to the logger or file."""
        try:
            shown = text.render([report])
            if is_instance(destination, pathlib.PurePath):
                _append_text(destination, shown + "\n")
            else:
                # The log names the caller of ``track``, which has called this function.
                destination.info("%s", shown.rstrip(), stacklevel=3)
        except Exception as error:
            show(report)
            show(note(f"ipygpumem: the tracker could not write to {name}: {describe_error(error)}"))

    return write


def _writable_file(path: str | pathlib.PurePath) -> pathlib.Path:
    """Return the absolute path of a file; FileError if it cannot be written."""
    try:
        file = pathlib.Path(path).expanduser().absolute()
        _append_text(file, "")  # makes the file, or raises the error that a later write would
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"the tracker's file cannot be written: {describe_error(error)}") from None
    return file


def _append_text(path: pathlib.Path, shown: str) -> None:
    """Append text to a file; make the file if there is none."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(shown)


def tracker_report(record: TrackerRecord, *, top: int) -> Report:
    """Return the ``top`` largest tensors that were added, as many that were removed, and each
    device's totals.
    """
    head = [f"tracker {record.number}"]
    if record.after:
        head.append(record.after)
    head += sizes(record.changed_bytes, format_change) or ["no change"]
    headline = clean(layout.SEPARATOR.join(head))
    lines = [clean(line) for line in (*_device_lines(record), *record.notes)]
    return Report("tracker", headline, lines, changed_tables(record, top), records=[record])


def _device_lines(record: TrackerRecord) -> Iterator[str]:
    """Yield a line for each device in use: its tensors, other memory there, and the peak."""
    since = "since the tracker was made" if record.number == 1 else "since the last call"
    tensor_bytes = dict(record.tensor_bytes)
    for usage in record.usages:
        size = tensor_bytes.pop(usage.device, None)
        if size is None:
            size = tensor_bytes.pop(f"{usage.device}:0", 0)  # a single device: mps
        if devices.is_worth_reporting(usage) or size:
            tensors = f"{device_label(usage.device)}: {format_bytes(size)} in tensors"
            peak = f"peak {format_bytes(usage.peak_bytes)}{devices.sampled_mark(usage)} {since}"
            yield f"{tensors}{_other_memory(usage, size)}, {peak}"
    for device, size in tensor_bytes.items():
        if size:
            yield f"{device_label(device)}: {format_bytes(size)} in tensors"


def _other_memory(usage: Usage, tensor_bytes: int) -> str:
    """Return the memory of a device next to its tensors, in words: the process's RSS for RAM, and
    the bytes allocated by torch for an accelerator.
    """
    if usage.device == "cpu":
        return f" and arrays; RSS {format_bytes(usage.after_bytes)}"
    text = f"; torch has allocated {format_bytes(usage.after_bytes)}"
    difference = usage.after_bytes - tensor_bytes
    if difference > 0:
        text += f" ({format_bytes(difference)} of it in no Python tensor, or rounding)"
    elif difference < 0:
        fewer = format_bytes(-difference)
        text += f" ({fewer} less: some are memory that torch does not count here)"
    if usage.reserved_bytes is not None:
        text += f", reserved {format_bytes(usage.reserved_bytes)}"
    return text
