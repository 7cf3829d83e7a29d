"""Pretends that the accelerators or the host have less memory than they have.

torch's caching allocator enforces an accelerator's part. Nothing enforces the host's: a budget only notes that it was
crossed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ipygpumem.errors import BudgetError, UnitError, quoted
from ipygpumem.fitting.device_limits import DeviceLimits, is_device
from ipygpumem.fitting.refusals import Refusal, refusal
from ipygpumem.freeing import tracebacks
from ipygpumem.measuring.meter import Measurement, Meter
from ipygpumem.model import Usage
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.pools import finder
from ipygpumem.record import Record
from ipygpumem.units import MIB, checked_bytes, format_bytes


@dataclass(frozen=True)
class BudgetRecord(Record):
    """A budget that is over."""

    limits: dict[str, int]
    """Bytes by device; one that could not be enforced is left out."""
    peaks: dict[str, int]
    """The peak of each device that has a limit: RSS for the host, live tensors for an accelerator."""
    crossings: tuple[str, ...]
    """Where the host's limit was crossed, in words."""
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    """What an accelerator's limit refused, in words, where the error ended a cell or the block."""


def parse_budget(text: str) -> dict[str, int]:
    """Return the sizes that ``gpu=8GiB,ram=4GiB`` gives.

    Raises:
        BudgetError: a part is no such thing.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, equals, size = part.partition("=")
        if not equals or name in sizes:
            fault = f"{name} is given twice" if equals else f"{quoted(part)} is not NAME=SIZE"
            raise BudgetError(f"budget: {fault}; write for instance gpu=8GiB,ram=4GiB")
        sizes[name] = _size(name, size)
    return checked(sizes)


def checked(sizes: Mapping[str, object]) -> dict[str, int]:
    """Return a budget with its sizes in bytes.

    Raises:
        BudgetError: it is empty, names something else than ``gpu``, ``ram`` or ``cuda:N``, or a size is none.
    """
    given = {name: _size(name, size) for name, size in sizes.items() if size is not None}
    for name in given:
        if name not in ("gpu", "ram") and not is_device(name):
            raise BudgetError(f"budget: {quoted(name)} is not a device; write gpu, ram, or one device such as cuda:1")
    if not given:
        raise BudgetError("budget: no device is named; write for instance gpu=8GiB,ram=4GiB")
    return given


def _size(name: str, size: object) -> int:
    try:
        size_bytes = checked_bytes(size) if type(size) is str or (type(size) is int and size > 0) else size
    except UnitError as error:
        raise BudgetError(f"budget: {name}: {error}") from None
    if type(size_bytes) is not int or size_bytes <= 0:
        raise BudgetError(f"budget: {name} must be a size above zero, such as 8GiB")
    if type(size) is str and size[-1:].isdigit() and size_bytes < MIB:
        raise BudgetError(f"budget: {name}={size} means {format_bytes(size_bytes)}; write a unit, such as {size}GiB")
    return size_bytes


class Budget:
    """A budget from ``start`` to ``stop``, or over a ``with`` block.

    Args:
        sizes: bytes of ``gpu``, ``ram`` or ``cuda:N``.
        meter: measures the peak.
        outer: gives the limits of the budgets around this one.
        of: whose it is, in words.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        meter: Meter,
        outer: Callable[[], Mapping[str, int]] | None = None,
        of: str = "the with block",
    ) -> None:
        self.sizes = dict(sizes)
        self.record: BudgetRecord | None = None
        self.crossings: list[str] = []
        self.refusals: list[str] = []
        self._of = of
        self._meter = meter
        self._outer = outer
        self._devices = DeviceLimits()
        self._started = False
        self._span: Measurement | None = None

    @property
    def limits(self) -> dict[str, int]:
        """The limits in force, by device."""
        host = {"cpu": self.sizes["ram"]} if "ram" in self.sizes else {}
        return {**host, **self._devices.limits}

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be limited, in words."""
        return tuple(self._devices.notes)

    def start(self) -> None:
        """Set the limits and start measuring.

        Raises:
            BudgetError: it was started before.
        """
        if self._started:
            raise BudgetError("budget: this one has been used: make a new one")
        self._started = True
        try:
            if set(self.sizes) - {"ram"}:
                self._devices.set(self.sizes, self._outer() if self._outer is not None else {})
            self._span = self._meter.start()
        except BaseException:  # an interrupt, too
            self._devices.restore()
            raise

    def crossed(self, rss_bytes: int) -> bool:
        """Whether the host's memory is above its limit."""
        return "ram" in self.sizes and rss_bytes > self.sizes["ram"]

    def note_refusal(self, refused: Refusal) -> str:
        """Remember that this budget refused memory, and return that in words; empty if another limit did."""
        size = self.sizes.get(refused.device, self.sizes.get("gpu"))
        if size is None or refused.device not in self.limits or not refused.is_by(size):
            return ""
        text = refused.text(f"the budget of {self._of} ({format_bytes(size)})")
        if text not in self.refusals:
            self.refusals.append(text)
        return text

    def note_crossing(self, where: str, peak_bytes: int) -> str:
        """Remember that the host's limit was crossed, and return that in words."""
        limit = format_bytes(self.sizes["ram"])
        text = f"{where} crossed the RAM budget of {limit}: its peak was {format_bytes(peak_bytes)}"
        self.crossings.append(text)
        return text

    def stop(self, where: str = "the code under the budget") -> BudgetRecord:
        """Put back what was there before, and return the record; ``where`` names what ran last."""
        self._devices.restore()
        if self.record is None:
            assert self._span is not None
            usages = {usage.device: usage for usage in self._meter.stop(self._span)}
            host: Usage | None = usages.get("cpu")
            if host is not None and not self.crossings and self.crossed(host.peak_bytes):
                self.note_crossing(where, host.peak_bytes)
            peaks = {device: usages[device].peak_bytes for device in self.limits if device in usages}
            crossings, refusals = tuple(self.crossings), tuple(self.refusals)
            self.record = BudgetRecord(self.limits, peaks, crossings, self.notes, refusals)
        return self.record

    def __enter__(self) -> Budget:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def abandon(self) -> None:
        """Put back what was there before, and measure no more."""
        self._devices.restore()
        if self._span is not None:
            self._meter.drop(self._span)


class ScriptBudget(Budget):
    """A budget over a ``with`` block outside IPython: it has a meter of its own, and a crossing is a warning."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes, Meter([HostProbe()], find_more=finder()))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None:
                with contextlib.suppress(MemoryError):  # the user's own error matters more
                    self._add_refusal(error)
        finally:
            try:
                record = self.stop()
            finally:
                self._meter.close()
        for crossing in record.crossings:
            warnings.warn(f"ipygpumem: {crossing}", ResourceWarning, stacklevel=2)

    def _add_refusal(self, error: BaseException) -> None:
        """Say in the error that this budget refused the memory: its own text speaks of the device."""
        refused = refusal(tracebacks.classify(error).message)
        text = self.note_refusal(refused) if refused is not None else ""
        add_note: Any = getattr(BaseException, "add_note", None)  # Python 3.11
        if text and add_note is not None:
            add_note(error, f"ipygpumem: {text}")
