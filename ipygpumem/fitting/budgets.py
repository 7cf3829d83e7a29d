"""Simulates a smaller device: limits torch's CUDA allocator, and recognises the out-of-memory
errors that a limit caused.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ipygpumem.errors import BudgetError, DeviceError, UnitError, describe_error, quoted
from ipygpumem.failures import GuardedBlock
from ipygpumem.interrupts import is_from_signal
from ipygpumem.probes.accelerators import (
    fractions,
    memory_fraction,
    parse_device,
    why_torch_counts_nothing,
)
from ipygpumem.probes.allocator import failed_allocation
from ipygpumem.units import MIB, checked_bytes, format_bytes

in_force: list[Budget] = []
"""The budgets in force, innermost last."""


def parse_budget(text: str) -> dict[str, int]:
    """Return the bytes by device of a text such as ``gpu=8GiB,cuda:1=4GiB``.

    Raises:
        BudgetError: a part of the text is not a device and a size.
    """
    sizes = dict[str, str]()
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if part and not equals:
            raise BudgetError(
                f"budget: {quoted(name)} must be a device and a size: write for instance gpu=8GiB"
            )
        if part:
            sizes[name] = size
    return checked_budget(sizes)


def checked_budget(sizes: Mapping[str, object]) -> dict[str, int]:
    """Return a budget in bytes by device; devices with the size None are left out.

    Raises:
        BudgetError: a size is invalid, there is none, or a device is not ``gpu`` or ``cuda:N``.
    """
    if not isinstance(sizes, Mapping):
        raise BudgetError("budget: write sizes by device, such as {'gpu': '8GiB'}")
    size_bytes: dict[str, int] = {}
    for name, size in sizes.items():
        if size is None:
            continue
        device = _checked_device(name)
        try:
            size_bytes[device] = checked_bytes(size, minimum=MIB)
        except UnitError as error:
            raise BudgetError(f"budget: {name}: {error}") from None
    if not size_bytes:
        raise BudgetError("budget: name a device, such as gpu=8GiB")
    return size_bytes


def _checked_device(name: object) -> str:
    """Return ``gpu`` or the name of a CUDA device, such as ``cuda:1``; else raise BudgetError."""
    try:
        device = parse_device(name, kinds=("cuda",))
    except DeviceError:
        text = f"budget: {quoted(name)} is not a device; write gpu, or one device such as cuda:1"
        raise BudgetError(text) from None
    if device == "cpu":
        raise BudgetError(
            "budget: RAM cannot be limited; write gpu=SIZE, or use leave_free(SIZE, 'RAM')"
        )
    return "gpu" if device == "cuda" else device


class _ChangedShare(NamedTuple):
    """A limit on torch's allocator that a budget has changed, as shares of the device."""

    before: float
    """The limit before the budget."""
    ours: float
    """The budget's own limit."""


class Budget(GuardedBlock):
    """Limits torch's allocator from ``start`` to ``stop``, or in a ``with`` block.

    Args:
        sizes: bytes by device; ``gpu`` means the current device and each on which this process has
            memory.
        owner: the block or the command that sets the budget, in words.
        before_end: called at the end of a ``with`` block, while the budget is still in force, with
            the budget and the error that leaves the block.
    """

    _block_name = "a budget"
    _lost_at_start = "it runs without this limit"
    _lost_at_end = "the refusals of this limit are not reported"

    def __init__(
        self,
        sizes: Mapping[str, int],
        owner: str = "the with block",
        before_end: Callable[[Budget, BaseException | None], None] = lambda budget, error: None,
    ) -> None:
        self.sizes = dict(sizes)
        self.owner = owner
        """The block or the command that set it, in words."""
        self._before_end = before_end
        self.limits: dict[str, int] = {}
        """Bytes by device, without devices that cannot be limited."""
        self.notes: list[str] = []
        """Sentences about devices that cannot be limited."""
        self.refusals: list[str] = []
        """Sentences about requests that it refused."""
        self._changed_shares: dict[int, _ChangedShare] = {}
        """The limits that this budget has changed, by device index."""

    def size_of(self, device: str) -> int:
        """Return the size that the budget gives to a CUDA device; 0 if it gives none. With ``gpu``,
        that is its size of each device, in use or not.
        """
        return self.sizes.get(device, self.sizes.get("gpu", 0))

    def start(self) -> None:
        """Set the limits, and add a note for each device that cannot be limited."""
        try:
            with self._errors_noted("no device can be limited"):
                self._limit_all()
            in_force.append(self)
        except BaseException:  # an interrupt, too
            self.stop()
            raise

    @contextlib.contextmanager
    def _errors_noted(self, fault: str) -> Iterator[None]:
        """Turn an error inside the block into a note that begins with ``fault``.

        If a device's context is broken, the user's code will raise that error itself.
        """
        try:
            yield
        except Exception as error:
            if is_from_signal(error):
                raise
            self.notes.append(f"budget: {fault} ({describe_error(error)})")

    def _limit_all(self) -> None:
        """Limit each device that can be limited, and note the other ones."""
        cuda = torch_cuda()
        reason = why_torch_counts_nothing()
        if cuda is None:
            reason = "there is no CUDA device here, so it limits nothing"
        if reason:
            self.notes.append(f"budget: {reason}")
            return
        count = cuda.device_count()
        for name, size in self._sizes_by_device(cuda, count).items():
            if index_of(name) < count:
                with self._errors_noted(f"{name} cannot be limited"):
                    self._limit(cuda, name, size)
            else:
                self.notes.append(f"budget: there is no {name} here")

    def _sizes_by_device(self, cuda: Any, count: int) -> dict[str, int]:
        """Return the budget's size of each device, with ``gpu`` replaced by the devices in use.

        A limit on any other device would create a context there. A device that the budget also
        names itself, as in ``gpu=8GiB,cuda:1=4GiB``, gets its own size.
        """
        sizes_by_name = dict(self.sizes)
        size_of_gpus = sizes_by_name.pop("gpu", None)
        if size_of_gpus is None:
            return sizes_by_name
        sizes_of_used_devices = dict[str, int]()
        for index in range(count):
            if index == cuda.current_device() or cuda.memory_reserved(index):
                sizes_of_used_devices[f"cuda:{index}"] = size_of_gpus
        return sizes_of_used_devices | sizes_by_name

    def _limit(self, cuda: Any, name: str, size: int) -> None:
        """Limit one device to a size, but never raise the limit that it has."""
        index = index_of(name)
        total = cuda.get_device_properties(name).total_memory
        # The allocator cudaMallocAsync reports more than 1 if there is no limit.
        share_before = min(1.0, memory_fraction(cuda, index))
        # torch rounds the product of share and total down to bytes: with a share that is a little
        # too low, a segment that exactly fits would be refused.
        share = min(share_before, math.nextafter(size / total, 1.0))
        # Before the change, in case of an interrupt.
        self._changed_shares[index] = _ChangedShare(share_before, share)
        _set_fraction(cuda, index, share)
        limit = self.limits[name] = min(size, int(share_before * total))
        if cuda.memory_reserved(name) > limit:  # the allocator keeps using memory reserved before
            cuda.empty_cache()
            self._note_reserved(cuda, name, limit)

    def _note_reserved(self, cuda: Any, name: str, limit: int) -> None:
        """Note that a device has more memory reserved than its limit, if it does."""
        reserved = cuda.memory_reserved(name)
        if reserved > limit:
            live = format_bytes(cuda.memory_allocated(name))
            text = (
                f"{format_bytes(reserved)} of {name} stay reserved, {live} of them by live tensors"
            )
            self.notes.append(f"budget: {text}: more than the {format_bytes(limit)} allowed")

    def stop(self) -> None:
        """Restore the previous limits, except those that other code has changed."""
        if self in in_force:
            in_force.remove(self)
        cuda = torch_cuda() if self._changed_shares else None
        for index, share in list(self._changed_shares.items()):
            with self._errors_noted(f"cuda:{index} stays limited"):
                current = min(1.0, memory_fraction(cuda, index))
                if _is_same_share(current, share.ours):
                    _set_fraction(cuda, index, share.before)
                elif not _is_same_share(current, share.before):  # else ours could not be set
                    self.notes.append(
                        f"budget: other code changed the limit on cuda:{index}; it is kept"
                    )
            self._changed_shares.pop(index)

    def _open_block(self) -> Budget:
        """Set the limits at the start of a ``with`` block; return the value for its ``as``."""
        self.start()
        return self

    def _close_block(self, error: BaseException | None) -> None:
        """Restore the previous limits at the end of a ``with`` block."""
        try:
            with contextlib.suppress(MemoryError):  # the user's own error matters more
                self._before_end(self, error)
        finally:
            self.stop()

    def _after_failed_end(self) -> None:
        """Restore the previous limits after a failed end."""
        self.stop()


def index_of(name: str) -> int:
    """Return the index of the CUDA device with a name: 1 for ``cuda:1``."""
    return int(name.removeprefix("cuda:"))


def _is_same_share(share: float, other: float) -> bool:
    """Return True if two limits differ by no more than torch's rounding to bytes."""
    return abs(share - other) < 1e-6


def limits() -> dict[str, int]:
    """Return the limits in force, in bytes by device; the innermost budget of a device counts."""
    limits_bytes = dict[str, int]()
    for budget in in_force:
        limits_bytes |= budget.limits
    return limits_bytes


class LimitRefusal(NamedTuple):
    """A request that a limit on torch's allocator refused, though the device had the
    memory free.
    """

    device: str
    limit_bytes: int
    budget: Budget | None
    """The budget that set the limit; None if other code set it."""
    text: str
    """A sentence that says which limit refused how much."""
    remedy: str = ""
    """A call that lifts a limit of other code."""


def note_refusal(message: str) -> LimitRefusal | None:
    """Add a refusal by a limit on torch's allocator to the budget that set it, and return it.

    None if the device itself ran out, or the message is not that of torch's out-of-memory error.
    """
    refusal = _refusal_in(message)
    if refusal is None:
        return None
    budget = refusal.budget
    if budget is not None and refusal.text not in budget.refusals:
        budget.refusals.append(refusal.text)
    return refusal


def _refusal_in(message: str) -> LimitRefusal | None:
    """Return the refusal that the message of an out-of-memory error describes; None if it describes
    none.
    """
    failed = failed_allocation(message)
    if failed is None or failed.limit is None:
        return None
    is_limited = failed.limit < failed.total
    had_memory = failed.free >= failed.requested
    if not is_limited or not had_memory:
        return None
    device = failed.device
    budget = _budget_of(device, failed.limit)
    if budget is None:
        limiter = f"the limit of {format_bytes(failed.limit)} on torch's allocator"
        remedy = f"torch.cuda.set_per_process_memory_fraction(1.0, {index_of(device)})"
    else:
        limiter = f"the budget of {budget.owner} ({format_bytes(budget.size_of(device))})"
        remedy = ""
    text = (
        f"{limiter} refused {format_bytes(failed.requested)} of {device}, although "
        f"{format_bytes(failed.free)} of it were free"
    )
    return LimitRefusal(device, failed.limit, budget, text, remedy)


def _budget_of(device: str, limit: int) -> Budget | None:
    """Return the innermost budget that set a limit; None if other code set it."""
    rounding_bytes = limit // 100  # of torch's message
    for budget in reversed(in_force):
        if device not in budget.limits:
            continue
        if abs(budget.size_of(device) - limit) <= rounding_bytes:
            return budget
    return None


def torch_cuda() -> Any:
    """Return ``torch.cuda`` if it has a device, else None.

    torch is imported if needed, since the user named a device.
    """
    torch: Any = None
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return torch.cuda


def _set_fraction(cuda: Any, index: int, fraction: float) -> None:
    """Set the share of a device that torch may use, and remember it, because torch before 2.8
    does not report it.
    """
    with cuda.device(index):  # older versions of torch change the current device
        cuda.set_per_process_memory_fraction(fraction, index)
    fractions[index] = fraction
