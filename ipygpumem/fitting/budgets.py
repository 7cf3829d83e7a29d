"""A budget: pretend that the accelerators or the host have less memory than they have.

The part of an accelerator is enforced by torch's caching allocator; for the host there is no such means, so a budget
only knows whether it was crossed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ipygpumem.errors import BudgetError, UnitError, said
from ipygpumem.freeing import tracebacks
from ipygpumem.measuring.meter import Measurement, Meter
from ipygpumem.model import Record, Usage
from ipygpumem.probes.accelerators import accelerators, uncounted
from ipygpumem.probes.host import HostProbe
from ipygpumem.units import MIB, format_bytes, parse_bytes

_DEVICE = re.compile(r"cuda:\d+")

# What torch says when memory runs out: the caching allocator since 2.1 and before, and cudaMallocAsync.
_BYTES = r"([\d.]+ (?:bytes|[KMGT]iB))"
_OF_CUDA = re.compile(r"\b(?:CUDA|HIP) out of memory\b.*?\bGPU (\d+)|Allocation on device (\d+) would", re.DOTALL)
_ALLOWED = re.compile(rf"{_BYTES} allowed; |PyTorch limit[^:]*: {_BYTES}")
_REQUESTED = re.compile(rf"Tried to allocate {_BYTES}|Requested\s*: {_BYTES}")
_FREE = re.compile(rf"of which {_BYTES} is free|; {_BYTES} free; |Free \(according to CUDA\): {_BYTES}")
_TAKEN = re.compile(
    rf"{_BYTES} is allocated by PyTorch|{_BYTES} is reserved by PyTorch but|{_BYTES} reserved in total by PyTorch"
    rf"|Currently allocated\s*: {_BYTES}"
)


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


@dataclass(frozen=True)
class Refusal:
    """A request that a limit on torch's allocator refused, whoever has set it."""

    device: str
    limit_bytes: int
    requested_bytes: int
    free_bytes: int
    """What the device itself had free then."""

    def is_by(self, limit_bytes: int) -> bool:
        """Whether ``limit_bytes`` is that limit, as far as torch's text tells: it has two decimals."""
        return abs(limit_bytes - self.limit_bytes) <= self.limit_bytes // 100

    def told(self, who: str) -> str:
        """Return in words what ``who`` refused."""
        asked, free = format_bytes(self.requested_bytes), format_bytes(self.free_bytes)
        if self.free_bytes >= self.requested_bytes:
            return f"{who} refused {asked} of {self.device}, and not the device: {free} of it were free"
        return f"{who} refused {asked} of {self.device}; the device had less than that free, too: {free}"


def refusal(message: str) -> Refusal | None:
    """Return what torch's out-of-memory error says of the limit that refused; None if the device did.

    torch asks its limit first, and counts what it has reserved (``cudaMallocAsync``: what is in use).
    """
    device, limit = _OF_CUDA.search(message), _first_size(_ALLOWED, message)
    requested, free = _first_size(_REQUESTED, message), _first_size(_FREE, message)
    if device is None or limit is None or requested is None or free is None:
        return None
    taken = sum(parse_bytes(size) for sizes in _TAKEN.findall(message) for size in sizes if size)
    if free < requested and taken + requested <= limit:
        return None
    return Refusal(f"cuda:{device[1] or device[2]}", limit, requested, free)


def _first_size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return None if match is None else parse_bytes(next(filter(None, match.groups())))


def parse_budget(text: str) -> dict[str, int]:
    """Return the sizes that ``gpu=8GiB,ram=4GiB`` gives.

    Raises:
        BudgetError: a part is no such thing.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, equals, size = part.partition("=")
        if not equals or name in sizes:
            raise BudgetError(f"budget: {part!r} is no part of one; write for instance gpu=8GiB,ram=4GiB")
        sizes[name] = _size(name, size)
    return checked(sizes)


def checked(sizes: Mapping[str, object]) -> dict[str, int]:
    """Return a budget with its sizes in bytes.

    Raises:
        BudgetError: it is empty, names something else than ``gpu``, ``ram`` or ``cuda:N``, or a size is none.
    """
    found = {name: _size(name, size) for name, size in sizes.items() if size is not None}
    for name in found:
        if name not in ("gpu", "ram") and not _DEVICE.fullmatch(name):
            raise BudgetError(f"budget: {name!r} is no device; write gpu, ram, or one device such as cuda:1")
    if not found:
        raise BudgetError("budget: of what? Write for instance gpu=8GiB,ram=4GiB")
    return found


def _size(name: str, size: object) -> int:
    try:
        found = parse_bytes(size) if type(size) is str else size
    except UnitError as error:
        raise BudgetError(f"budget: {name}: {error}") from None
    if type(found) is not int or found <= 0:
        raise BudgetError(f"budget: {name} is a size such as 8GiB, more than nothing")
    if type(size) is str and size[-1:].isdigit() and found < MIB:
        raise BudgetError(f"budget: {name}={size} means {format_bytes(found)}; write a unit, such as {size}GiB")
    return found


class DeviceLimits:
    """Limits on torch's allocator of CUDA devices, and what was there before them."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self.notes: list[str] = []
        self._earlier: dict[int, tuple[float, float]] = {}
        """The fraction before, and ours, by device."""

    def set(self, sizes: Mapping[str, int], outer: Mapping[str, int]) -> None:
        """Let each device have no more than ``sizes`` says, nor than it had before.

        Args:
            sizes: bytes by device; ``gpu`` is each that this process uses, and the current one.
            outer: the limits of budgets around this one.
        """
        cuda = _cuda()
        if cuda is None:
            self.notes.append("budget: there is no CUDA device here, so its GPU part limits nothing")
            return
        if why := uncounted():
            self.notes.append(f"budget: {why}")
            return
        try:
            count = cuda.device_count()
            wanted = dict.fromkeys(_in_use(cuda), sizes["gpu"]) if "gpu" in sizes else {}
        except Exception as error:  # a broken context: the code under the budget will say so itself
            self.notes.append(f"budget: no device can be limited ({said(error)})")
            return
        wanted.update((int(name[5:]), size) for name, size in sizes.items() if _DEVICE.fullmatch(name))
        for index, size in wanted.items():
            if index >= count:
                self.notes.append(f"budget: there is no cuda:{index} here")
                continue
            self._limit(cuda, index, size, outer.get(f"cuda:{index}"))
        for name, limit in self.limits.items():
            self._shrink(cuda, name, limit)

    def _limit(self, cuda: Any, index: int, size: int, outer: int | None) -> None:
        known = getattr(cuda, "get_per_process_memory_fraction", None)  # torch 2.8
        try:
            total = cuda.get_device_properties(index).total_memory
            earlier = float(known(index)) if known is not None else (outer or total) / total
            earlier = min(1.0, earlier)  # cudaMallocAsync says more where there is no limit
            fraction = min(size / total, earlier)
            self._earlier[index] = earlier, fraction  # first: an interrupt may come after the change
            _set_fraction(cuda, index, fraction)
        except Exception as error:  # as above
            self._earlier.pop(index, None)
            self.notes.append(f"budget: cuda:{index} cannot be limited ({said(error)})")
            return
        self.limits[f"cuda:{index}"] = min(size, int(earlier * total))

    def _shrink(self, cuda: Any, name: str, limit: int) -> None:
        """Give back what the allocator has cached above ``limit``, and note what stays above it.

        The limit holds for what torch gets from the device. What it has got already it goes on handing out.
        """
        try:
            if cuda.memory_reserved(name) <= limit:
                return
            cuda.empty_cache()
        except Exception as error:  # as above
            self.notes.append(f"budget: the cache of {name} cannot be emptied ({said(error)})")
            return
        live, reserved = cuda.memory_allocated(name), cuda.memory_reserved(name)
        allowed = f"more than the {format_bytes(limit)} allowed"
        if live > limit:
            text = f"live tensors hold {format_bytes(live)} of {name} already, {allowed}: torch gets no more from the "
            self.notes.append(f"budget: {text}device until enough of them are freed")
        elif reserved > limit and _counts_reserved(cuda):
            text = f"{format_bytes(reserved)} of {name} stay reserved, {allowed}: {format_bytes(live)} of live tensors"
            text += ", and gaps beside them or pools of CUDA graphs; what fits into gaps is given all the same"
            self.notes.append(f"budget: {text}")

    def restore(self) -> None:
        """Let each device have what it had before."""
        cuda = _cuda() if self._earlier else None
        while cuda is not None and self._earlier:
            index, (earlier, ours) = next(iter(self._earlier.items()))
            try:
                if _is_limited_to(cuda, index, ours):
                    _set_fraction(cuda, index, earlier)
                else:
                    self.notes.append(f"budget: the limit of cuda:{index} was set anew meanwhile, and stays")
            except Exception as error:  # a broken context must not keep an experiment from its end
                self.notes.append(f"budget: cuda:{index} stays limited ({said(error)})")
            del self._earlier[index]


def _cuda() -> Any | None:
    """Return ``torch.cuda`` where it has a device. A budget for one is asked for by name, so torch may be loaded."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    return torch.cuda if torch.cuda.is_available() else None


def _set_fraction(cuda: Any, index: int, fraction: float) -> None:
    """Set torch's limit; older versions leave the device current whose limit they set."""
    with cuda.device(index):
        cuda.set_per_process_memory_fraction(fraction, index)


def _is_limited_to(cuda: Any, index: int, fraction: float) -> bool:
    """Whether torch's limit is that ``fraction`` still, which is rounded to bytes; True where torch does not tell."""
    known = getattr(cuda, "get_per_process_memory_fraction", None)  # torch 2.8
    return known is None or abs(known(index) - fraction) < 1e-6


def _counts_reserved(cuda: Any) -> bool:
    """Whether the limit holds for what is reserved; ``cudaMallocAsync`` counts what is in use."""
    backend = getattr(cuda, "get_allocator_backend", None)
    return backend is None or backend() == "native"


def _in_use(cuda: Any) -> list[int]:
    """Return the devices on which this process has memory, and the current one: a limit creates a context."""
    current = cuda.current_device()
    return [index for index in range(cuda.device_count()) if index == current or cuda.memory_reserved(index) > 0]


class Budget:
    """A budget from ``start`` to ``stop``, or over a ``with`` block.

    Args:
        sizes: bytes of ``gpu``, ``ram`` or ``cuda:N``.
        meter: tells the peak.
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

    def note_refusal(self, found: Refusal) -> str:
        """Remember that this budget refused memory, and return that in words; empty if another limit did."""
        size = self.sizes.get(found.device, self.sizes.get("gpu"))
        if size is None or found.device not in self.limits or not found.is_by(size):
            return ""
        text = found.told(f"the budget of {self._of} ({format_bytes(size)})")
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
        super().__init__(sizes, Meter([HostProbe()], find_more=accelerators))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import warnings  # only a crossing needs it

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
        found = refusal(tracebacks.classify(error).message)
        text = self.note_refusal(found) if found is not None else ""
        add_note: Any = getattr(BaseException, "add_note", None)  # Python 3.11
        if text and add_note is not None:
            add_note(error, f"ipygpumem: {text}")
