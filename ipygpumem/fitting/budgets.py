"""Limits torch's CUDA allocator, and reads from its out-of-memory errors whether a limit refused the memory."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ipygpumem.errors import BudgetError, UnitError, quoted, said
from ipygpumem.probes.accelerators import uncounted
from ipygpumem.units import MIB, checked_bytes, format_bytes, parse_bytes

_ONE_DEVICE = re.compile(r"cuda:\d+")
_BYTES = r"([\d.]+ (?:bytes|[KMGT]iB))"
_OUT_OF_MEMORY = re.compile(  # the caching allocator's, since torch 2.1
    rf"(?:CUDA|HIP) out of memory\. Tried to allocate {_BYTES}\. GPU (\d+) .*? of which {_BYTES} is free\..*?"
    rf"{_BYTES} allowed; ",
    re.DOTALL,
)


def parse_budget(text: str) -> dict[str, int]:
    """Return the sizes of ``gpu=8GiB,cuda:1=4GiB`` (``BudgetError`` if a part is no such thing)."""
    sizes: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, equals, size = part.partition("=")
        if not equals or name in sizes:
            fault = f"{name} is given twice" if equals else f"{quoted(part)} is not NAME=SIZE"
            raise BudgetError(f"budget: {fault}; write for instance gpu=8GiB")
        sizes[name] = size
    return checked(sizes)


def checked(sizes: Mapping[str, object]) -> dict[str, int]:
    """Return a budget in bytes (``BudgetError`` if it names no size, or something else than ``gpu`` or ``cuda:N``)."""
    given = {name: size for name, size in sizes.items() if size is not None}
    for name in given:
        if name in ("ram", "cpu"):
            raise BudgetError("budget: RAM cannot be limited; write gpu=SIZE, or use leave_free(SIZE, 'cpu')")
        if name != "gpu" and not _ONE_DEVICE.fullmatch(name):
            raise BudgetError(f"budget: {quoted(name)} is not a device; write gpu, or one device such as cuda:1")
    if not given:
        raise BudgetError("budget: no device is named; write for instance gpu=8GiB")
    return {name: _size(name, size) for name, size in given.items()}


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
    """Limits torch's allocator from ``start`` to ``stop``, or in a ``with`` block.

    Args:
        sizes: bytes of ``cuda:N``, or of ``gpu``: the current device and each on which this process has memory.
        of: the name for reports.
        around: the budgets in force, innermost last.
        leaving: called at the block's end, with the error that leaves it if there is one.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        of: str = "the with block",
        around: list[Budget] | None = None,
        leaving: Callable[[Budget, BaseException | None], None] = lambda budget, error: None,
    ) -> None:
        self.sizes = dict(sizes)
        self.limits: dict[str, int] = {}
        """Bytes by device; one that cannot be limited is left out."""
        self.notes: list[str] = []
        """Sentences on what cannot be limited."""
        self.refusals: list[str] = []
        """Sentences on the requests that it refused."""
        self.of = of
        self._around = [] if around is None else around
        self._leaving = leaving
        self._earlier: dict[int, tuple[float, float]] = {}
        """torch's limit before, and ours, as shares of the device."""
        self._started = False

    def start(self) -> None:
        """Set the limits (``BudgetError`` if it was started before)."""
        if self._started:
            raise BudgetError("budget: this one has been used: make a new one")
        self._started = True
        cuda = _cuda()
        why = "there is no CUDA device here, so it limits nothing" if cuda is None else uncounted()
        try:
            if why:
                self.notes.append(f"budget: {why}")
            else:
                self._try("no device can be limited", self._limit_all, cuda)
            self._around.append(self)
        except BaseException:  # an interrupt, too
            self.stop()
            raise

    def _try(self, fault: str, change: Callable[..., object], *words: Any) -> None:
        """Note an error of a device instead of raising it: the user's own code reports a broken context itself."""
        try:
            change(*words)
        except Exception as error:
            self.notes.append(f"budget: {fault} ({said(error)})")

    def _limit_all(self, cuda: Any) -> None:
        count, sizes = cuda.device_count(), dict(self.sizes)
        if size := sizes.pop("gpu", None):  # a limit on any other device would create a context there
            used = [index for index in range(count) if index == cuda.current_device() or cuda.memory_reserved(index)]
            sizes = {**{f"cuda:{index}": size for index in used}, **sizes}
        for name, size in sizes.items():
            if int(name[5:]) < count:
                self._try(f"{name} cannot be limited", self._limit, cuda, name, size)
            else:
                self.notes.append(f"budget: there is no {name} here")

    def _limit(self, cuda: Any, name: str, size: int) -> None:
        index, total = int(name[5:]), cuda.get_device_properties(name).total_memory
        known = _fraction(cuda, index)
        outer = [budget.limits[name] / total for budget in self._around if name in budget.limits]
        earlier = min([1.0, *outer] if known is None else [1.0, known])  # cudaMallocAsync calls no limit more than all
        share = size / total
        if int(share * total) < size:  # as torch computes it: one byte less costs a block of 2 MiB
            share = math.nextafter(share, 1.0)
        share = min(share, earlier)
        self._earlier[index] = earlier, share  # first: an interrupt may come after the change
        try:
            _set_fraction(cuda, index, share)
        except Exception:
            del self._earlier[index]
            raise
        limit = self.limits[name] = min(size, int(earlier * total))
        if cuda.memory_reserved(name) > limit:  # the allocator goes on using what it has already
            cuda.empty_cache()
            if (reserved := cuda.memory_reserved(name)) > limit:
                live = format_bytes(cuda.memory_allocated(name))
                text = f"{format_bytes(reserved)} of {name} stay reserved, {live} of them by live tensors"
                self.notes.append(f"budget: {text}: more than the {format_bytes(limit)} allowed")

    def stop(self) -> None:
        """Restore the previous limits; one that was set by other code meanwhile stays."""
        if self in self._around:
            self._around.remove(self)
        cuda = _cuda() if self._earlier else None
        for index in list(self._earlier):
            self._try(f"cuda:{index} stays limited", self._restore, cuda, index)
            self._earlier.pop(index)

    def _restore(self, cuda: Any, index: int) -> None:
        (earlier, ours), known = self._earlier[index], _fraction(cuda, index)
        if known is None or abs(known - ours) < 1e-6:  # it is rounded to bytes
            _set_fraction(cuda, index, earlier)
        else:
            self.notes.append(f"budget: other code has set a new limit on cuda:{index} meanwhile; it stays")

    def __enter__(self) -> Budget:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            with contextlib.suppress(MemoryError):  # the user's own error matters more
                self._leaving(self, error)
        finally:
            self.stop()


class Refusal(NamedTuple):
    """A request that a limit on torch's allocator refused, though the device had the memory free."""

    device: str
    limit_bytes: int
    requested_bytes: int
    free_bytes: int

    def is_by(self, limit_bytes: int) -> bool:
        """Return True if that is the limit; torch's text has two decimals of it."""
        return abs(limit_bytes - self.limit_bytes) <= self.limit_bytes // 100


def refusal(message: str) -> Refusal | None:
    """Return what torch's out-of-memory error says of the limit that refused; None if the device did."""
    found = _OUT_OF_MEMORY.search(message)
    if found is None:
        return None
    requested, free, limit = (parse_bytes(found[group]) for group in (1, 3, 4))
    return Refusal(f"cuda:{found[2]}", limit, requested, free) if free >= requested else None


def who_refused(message: str, in_force: list[Budget]) -> str:
    """Return which budget, or other limit on torch's allocator, an error speaks of, in words; empty if none."""
    refused = refusal(message)
    if refused is None:
        return ""
    text = f"refused {format_bytes(refused.requested_bytes)} of {refused.device}, "
    text += f"although {format_bytes(refused.free_bytes)} of it were free"
    by = f"the limit of {format_bytes(refused.limit_bytes)} on torch's allocator {text}"
    for budget in in_force:
        size = budget.sizes.get(refused.device, budget.sizes.get("gpu", 0))
        if refused.device in budget.limits and refused.is_by(size):
            by = f"the budget of {budget.of} ({format_bytes(size)}) {text}"
            budget.refusals += [by] if by not in budget.refusals else []
    return by


def torch_allows(cuda: Any, index: int) -> int:
    """Return how many bytes torch's own limit lets it still get from a device."""
    total, known = cuda.get_device_properties(index).total_memory, _fraction(cuda, index)
    return max(0, int(total if known is None else known * total) - int(cuda.memory_reserved(index)))


def _cuda() -> Any:
    """Return ``torch.cuda`` where it has a device. It may load torch: the user has named the device."""
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") is not None else None
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _fraction(cuda: Any, index: int) -> float | None:
    """Return torch's limit as a share of the device; None before torch 2.8, which does not tell."""
    ask = getattr(cuda, "get_per_process_memory_fraction", None)
    return None if ask is None else float(ask(index))


def _set_fraction(cuda: Any, index: int, fraction: float) -> None:
    with cuda.device(index):  # older versions of torch change the current device
        cuda.set_per_process_memory_fraction(fraction, index)
