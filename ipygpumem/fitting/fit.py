"""Runs an autofit's tries: measures each, and frees its memory before the next."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ipygpumem import interrupts
from ipygpumem.errors import AutofitError
from ipygpumem.estimating.records import (
    DOES_NOT_FIT,
    FITS,
    PERHAPS,
    DeviceEstimate,
    Estimate,
)
from ipygpumem.fitting import budgets
from ipygpumem.fitting.plan import Number, Plan
from ipygpumem.heap.live.garbage import Garbage, GcMark
from ipygpumem.introspect import is_exactly
from ipygpumem.meter.meter import Meter, Span
from ipygpumem.oom_texts import KINDS_OF_DEVICES, NUMBERED_DEVICE
from ipygpumem.probes import own_limits
from ipygpumem.probes.accelerators import TORCH_DEVICES, current_device
from ipygpumem.probes.host import available_bytes, available_on_machine
from ipygpumem.reclaim import reclaim
from ipygpumem.reclaim.failure import Failure, classify
from ipygpumem.reclaim.tracebacks import release
from ipygpumem.records import OUTSIDE, Record, Usage, usage_on
from ipygpumem.units import MIB, format_bytes

OUT_OF_MEMORY = "out of memory"
CROWDED = "too little headroom"
OVER = "over the budget"
TOO_LARGE = (OUT_OF_MEMORY, CROWDED, OVER, PERHAPS, DOES_NOT_FIT)
"""Outcomes after which a smaller value is tried."""
_MOST_INCREASE_BYTES = MIB
"""If a try leaves more bytes in use than this in addition, all garbage is collected."""


@dataclass(frozen=True)
class Try(Record):
    """One try: its values and their outcome."""

    values: dict[str, Any]
    outcome: str
    """``fits``, one of ``TOO_LARGE``, or the name of another error, which ended the autofit."""
    duration_seconds: float
    usages: tuple[Usage, ...]
    device: str | None = None
    """The device that had too little memory."""
    requested_bytes: int | None = None
    """Size of the failed allocation, if the error names it."""
    limit_bytes: int | None = None
    """Limit of torch's allocator, if that refused the memory and not the device."""
    required_bytes: int | None = None
    """Required memory of the device, as an estimate found."""


@dataclass(frozen=True)
class AutofitResult:
    """The result of ``ipygpumem.autofit``."""

    values: dict[str, Any]
    """The values that fit, by name."""
    result: Any = field(repr=False)
    """The function's return value with these values."""
    tries: tuple[Try, ...] = field(repr=False)

    @property
    def value(self) -> Any:
        """The value of the only or first variable."""
        return next(iter(self.values.values()))


class Fit:
    """Measures the tries of a plan, and frees their memory.

    The caller runs the user's code with ``plan.values``, between ``begin`` and ``end``. While
    ``has_next`` is True, it calls ``free_memory`` and runs the code with the next values::

        fit.begin()
        result = train(**fit.plan.values)
        fit.end(None, result)

    Args:
        plan: chooses the values to try.
        meter: measures each try.
        at_out_of_memory: called with each out-of-memory error before any memory that it holds is
            freed.
        garbage: collects garbage between tries.

    Raises:
        AutofitError: another try is running in this thread.
    """

    _threads_of_tries: ClassVar[set[int]] = set()
    """Threads in which a try is running."""

    def __init__(
        self,
        plan: Plan,
        meter: Meter,
        at_out_of_memory: Callable[[BaseException], object] = id,
        garbage: Garbage | None = None,
    ) -> None:
        if threading.get_ident() in self._threads_of_tries:
            raise AutofitError(
                "an autofit is already running: pass it both variables, and they are reduced in "
                "turn"
            )
        self.plan = plan
        self.tries: list[Try] = []
        self.has_next = True
        """True if ``plan.values`` must be tried next."""
        self._meter = meter
        self._at_out_of_memory = at_out_of_memory
        self._garbage = garbage or Garbage()
        self._mark: GcMark | None = None
        """The objects that existed before the last try."""
        self._bytes_after_last_try: dict[str, int] = {}
        """Bytes in use on each device after the last try."""
        # Of the running try:
        self._span: Span | None = None
        self._started = 0.0
        self._thread = 0

    def begin(self) -> None:
        """Start measuring a try."""
        self._thread = threading.get_ident()
        self._threads_of_tries.add(self._thread)
        self._mark = self._garbage.mark()
        self._span = self._meter.span()
        self._started = time.perf_counter()

    def end(self, error: BaseException | None, result: object = None) -> bool:
        """Stop measuring a try, and record its outcome.

        Args:
            error: the error that ended the user's code; None if it ran to its end.
            result: the value that the code returned. If that is an estimate, its verdict is the
                outcome instead of the measured memory.

        Returns:
            True if memory ran out. The frames of the error are released then, and the caller should
            suppress it, because smaller values may fit.
        """
        seconds = time.perf_counter() - self._started
        self._threads_of_tries.discard(self._thread)
        span, self._span = self._span, None
        usages = () if span is None else span.stop()
        measured = Try(dict(self.plan.values), FITS, seconds, usages)
        if error is not None:
            return self._record_error(error, measured)
        if is_exactly(result, Estimate):
            self._record_estimate(result, measured)  # type: ignore[arg-type]  # an Estimate
        else:
            self._record_measured(measured)
        return False

    def _record_measured(self, measured: Try) -> None:
        """Record a try without an error: it fits if enough memory stayed free."""
        crowded = None
        # The final run of values that fitted may use some of the headroom: that is its purpose.
        if not self.plan.is_final_run:
            crowded = crowded_device(measured.usages, self.plan.headroom)
        if crowded is None:
            self.tries.append(measured)
        else:
            self.tries.append(replace(measured, outcome=CROWDED, device=crowded))
        self.has_next = self.plan.record_outcome(fits=crowded is None)

    def _record_error(self, error: BaseException, measured: Try) -> bool:
        """Record a try that failed; return True if memory ran out, so that smaller values may
        fit.
        """
        failure = classify(error)
        # After an error that poisoned the device's context, no further try can run.
        if failure.kind != "oom" or failure.poisoned:
            self.tries.append(replace(measured, outcome=failure.error))
            self.has_next = False
            return False
        self._at_out_of_memory(error)
        with interrupts.reraise_swallowed():
            release(error)
        outcome = OUT_OF_MEMORY
        limit_bytes = None
        refusal = budgets.note_refusal(failure.message)
        if refusal is not None:
            limit_bytes = refusal.limit_bytes
            if refusal.budget is not None:
                outcome = OVER
        failed = replace(
            measured,
            outcome=outcome,
            device=failed_device(failure, measured.usages),
            requested_bytes=failure.requested_bytes,
            limit_bytes=limit_bytes,
        )
        self.tries.append(failed)
        self.has_next = self.plan.record_outcome(fits=False)
        return True

    def _record_estimate(self, estimate: Estimate, measured: Try) -> None:
        """Record an estimate as the outcome of a try.

        The values fit if its verdict is "fits", not if it is "fits perhaps", and if enough memory
        stays free.

        Raises:
            AutofitError: the estimate does not know the device's memory.
        """
        if not estimate.verdict:
            raise AutofitError(
                "the device's memory size is unknown: pass --device-memory (device_memory=)"
            )
        if not self.tries:  # estimates are cheap: search through more values
            self.plan.expect_estimates()
        outcome = estimate.verdict
        usable_share = 1 - self.plan.headroom
        for device in estimate.devices:
            usable_bytes = _room_bytes(device) * usable_share
            if outcome == FITS and device.required_bytes > usable_bytes:
                outcome = CROWDED
        fullest = max(
            estimate.devices, key=lambda device: device.required_bytes - _room_bytes(device)
        )
        estimated = replace(
            measured,
            outcome=outcome,
            usages=tuple(map(_estimated_usage, estimate.devices)),
            device=fullest.device,
            required_bytes=fullest.required_bytes,
        )
        self.tries.append(estimated)
        self.has_next = self.plan.record_outcome(fits=outcome == FITS)

    def free_memory(self) -> None:
        """Free the last try's memory, once nothing references it.

        Only the garbage of that try is collected, because a collection of all objects takes long;
        all garbage after the first try, and if more memory stays in use than after the try before.
        """
        since = self._mark if len(self.tries) > 1 else None
        bytes_in_use = self._collect_and_free(since)
        if since is not None and self._is_more_than_after_last_try(bytes_in_use):
            # Objects of earlier tries may have become garbage.
            bytes_in_use = self._collect_and_free(None)
        self._bytes_after_last_try = bytes_in_use

    def _is_more_than_after_last_try(self, bytes_in_use: Mapping[str, int]) -> bool:
        """Return True if notably more bytes of a device are in use than after the try before."""
        for device, size in bytes_in_use.items():
            if size > self._bytes_after_last_try.get(device, 0) + _MOST_INCREASE_BYTES:
                return True
        return False

    def _collect_and_free(self, since: GcMark | None) -> dict[str, int]:
        """Collect garbage, free caches, and return the bytes then in use on each device.

        Only garbage that was made ``since`` a mark is collected; with None, all garbage.
        """
        reclaim.run_steps(self._meter, reclaim.steps_that_free(self._garbage, lambda: since), [])
        return reclaim.bytes_in_use(self._meter.now())

    def raise_if_nothing_fits(self) -> None:
        """Raise ``AutofitError`` if no values of the tries fit."""
        __tracebackhide__ = True
        if self.plan.best is None:
            raise AutofitError(_message_that_nothing_fits(self.tries, self.plan))

    def abandon(self) -> None:
        """Stop measuring a try that ``end`` is not called for; do nothing after ``end``."""
        self._threads_of_tries.discard(self._thread)
        if self._span is not None:
            self._span.close()
            self._span = None


def _room_bytes(device: DeviceEstimate) -> float:
    """Return the bytes that a device has for the estimated code; infinite if that is unknown."""
    return device.room_bytes or math.inf


def _estimated_usage(device: DeviceEstimate) -> Usage:
    """Return the memory that an estimate found, in the form of a measured one."""
    return Usage(
        device.device,
        device.before_bytes,
        device.after_bytes,
        device.peak_bytes,
        device.room_bytes,
        "allocator",
    )


# -- headroom -----------------------------------------------------------------------------------


def crowded_device(usages: Sequence[Usage], headroom: float) -> str | None:
    """Return the first device of which less than a share of ``headroom`` was free at the peak, or
    None.

    Accelerators are checked if the try used one, else the host.
    """
    if not headroom:
        return None
    measured = [usage for usage in usages if usage.device not in OUTSIDE]
    used = [usage for usage in measured if usage.peak_delta_bytes > 0]
    accelerators = [usage for usage in used if usage.device != "cpu"]
    limits = budgets.limits()
    for usage in accelerators or used:
        room = _room_at_peak(usage, limits.get(usage.device))
        if room is not None and room.free_bytes < headroom * room.total_bytes:
            return usage.device
    return None


class _RoomAtPeak(NamedTuple):
    """The memory of a device for a try, and the part of it that was free at the try's peak."""

    total_bytes: int
    free_bytes: int


def _room_at_peak(usage: Usage, budget_bytes: int | None) -> _RoomAtPeak | None:
    """Return the room of a device at a try's peak; None if the device's size is unknown.

    A budget replaces the device's size, and the limits on this process's memory reduce that of RAM.
    """
    total_bytes = budget_bytes
    if total_bytes is None:
        total_bytes = usage.total_bytes
    if total_bytes is None:
        return None
    if usage.device == "cpu":
        limits_bytes = [limit.limit_bytes for limit in own_limits.limits()]
        total_bytes = min([total_bytes, *limits_bytes])
        # Available now, after the try; at the peak, the try's own memory came out of this.
        most_bytes = min(total_bytes, available_bytes() + usage.after_bytes)
        return _RoomAtPeak(total_bytes, most_bytes - usage.peak_bytes)
    free_bytes = total_bytes - usage.peak_bytes
    if budget_bytes is None:  # a budget counts torch's memory only
        free_bytes -= _bytes_outside_torch(usage)
    return _RoomAtPeak(total_bytes, free_bytes)


def _bytes_outside_torch(usage: Usage) -> int:
    """Return the bytes of a device that are in use outside of torch's allocator: by other
    processes, and by the context of this one; 0 if unknown.
    """
    if usage.used_bytes is None or usage.reserved_bytes is None:
        return 0
    return max(0, usage.used_bytes - usage.reserved_bytes)


# -- errors -------------------------------------------------------------------------------------


def failed_device(failure: Failure, usages: Sequence[Usage]) -> str:
    """Return the device that ran out of memory.

    It is the one that the error's text names; if that names only a kind of device, such as CUDA, or
    none, the accelerator with the highest peak; without accelerators the host.
    """
    text = f"{failure.error}: {failure.message}"
    kind = _kind_of_device_in(text)
    number = NUMBERED_DEVICE.search(text)
    if kind in TORCH_DEVICES and number:
        return f"{kind}:{number[1]}"
    accelerators = [usage for usage in usages if usage.device not in ("cpu", *OUTSIDE)]
    if kind:
        candidates = [usage for usage in accelerators if usage.device.startswith(kind)]
    else:
        candidates = [usage for usage in accelerators if usage.peak_bytes]
    if candidates:
        return max(candidates, key=lambda usage: usage.peak_bytes).device
    if kind in TORCH_DEVICES:
        return current_device(kind)
    return "cpu"


def _kind_of_device_in(text: str) -> str:
    """Return the kind of device that an error's text means, such as ``cuda``; empty if none."""
    for kind, pattern in KINDS_OF_DEVICES.items():
        if re.search(pattern, text):
            return kind
    return ""


def _message_that_nothing_fits(tries: Sequence[Try], plan: Plan) -> str:
    """Return the message of the error if not even the last, smallest values fit.

    ``even batch_size=1 does not fit (out of memory): it needs at least 9.00 GiB of cuda:0, which
    has 8.00 GiB``.
    """
    last = tries[-1]
    text = f"even {values_as_text(last.values)} does not fit"
    if last.outcome != DOES_NOT_FIT:
        text += f" ({last.outcome})"
    device = last.device or "cpu"
    usage = usage_on(last.usages, device)
    needed_bytes = _needed_bytes(last, usage)
    if needed_bytes:
        text += f": it needs {_need_in_words(last, needed_bytes, device, plan)}"
    elif device != "cpu":
        text += f" on {device}"
    text += _limit_in_words(last, device, needed_bytes, usage)
    if plan.exhausted:
        used = f"the {len(tries) - 1} tries after the first" if len(tries) > 2 else "all tries"
        text += f"; {used} are used: allow more tries, or start lower"
    return text


def _needed_bytes(last: Try, usage: Usage | None) -> int | None:
    """Return the memory that a try needed, or at least needed; None if it is unknown.

    ``usage``: its measured memory on the device that ran out.
    """
    if last.required_bytes is not None:
        return last.required_bytes
    peak_bytes = 0 if usage is None else usage.peak_bytes
    if last.outcome == CROWDED:  # it has run to its end: its peak is all that it needed
        return peak_bytes
    if last.requested_bytes is None:  # the error names no size
        return None
    return peak_bytes + last.requested_bytes


def _need_in_words(last: Try, needed_bytes: int, device: str, plan: Plan) -> str:
    """Return the memory that a try needed, in words: ``at least 9.00 GiB of cuda:0``."""
    memory = "RAM" if device == "cpu" else device
    text = f"{format_bytes(needed_bytes)} of {memory}"
    if last.outcome == CROWDED:
        return f"{text} plus the {plan.headroom * 100:g}% that must stay free"
    if last.required_bytes is None:  # it may have needed more after the failed allocation
        return f"at least {text}"
    return text


def _limit_in_words(last: Try, device: str, needed_bytes: int | None, usage: Usage | None) -> str:
    """Return the limit that the last try met, as the continuation of the message; empty if unknown.

    ``, but only 8.00 GiB is allowed``, or ``, which has 8.00 GiB``.
    """
    limit_bytes = last.limit_bytes or budgets.limits().get(device)
    if limit_bytes is not None:
        return f", but only {format_bytes(limit_bytes)} is allowed"
    own_limit = own_limits.nearest() if device == "cpu" else None
    if own_limit is not None and own_limit.available_bytes <= available_on_machine():
        quantity = (
            f"{format_bytes(own_limit.limit_bytes)} of {own_limits.QUANTITIES[own_limit.name]}"
        )
        return f", and {own_limit.name} allows this process {quantity}"
    total_bytes = usage.total_bytes if usage is not None else None
    if needed_bytes and total_bytes and needed_bytes > total_bytes:
        return f", which has {format_bytes(total_bytes)}"
    return ""


def values_as_text(values: dict[str, Number]) -> str:
    """Return the values of a try as text: ``batch_size=128, seq_len=512``."""
    texts = list[str]()
    for name, value in values.items():
        number = f"{value:g}" if type(value) is float else str(value)
        texts.append(f"{name}={number}")
    return ", ".join(texts)
