"""Runs an autofit's tries: notes what each needed, and gives its memory back before the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipygpumem.errors import AutofitError
from ipygpumem.fitting import plan, room
from ipygpumem.fitting.budgets import refusal
from ipygpumem.fitting.plan import Number, Plan, Values
from ipygpumem.freeing import reclaim, tracebacks
from ipygpumem.freeing.reclaim import steps_that_free
from ipygpumem.measuring.meter import Measurement, Meter
from ipygpumem.model import Usage
from ipygpumem.objects import interrupts
from ipygpumem.objects.garbage import Garbage, Mark
from ipygpumem.record import Record
from ipygpumem.units import MIB, format_bytes

FITS = "fits"
OUT_OF_MEMORY = "out of memory"
CROWDED = "too little headroom"
OVER = "over the budget"
TOO_LARGE = (OUT_OF_MEMORY, CROWDED, OVER)
"""The outcomes after which a smaller value is tried."""
_TRIFLE = MIB
"""If a try leaves more than that behind, it is worth a look at everything."""


@dataclass(frozen=True)
class Try(Record):
    """One try: the values, and what came of them."""

    values: dict[str, Any]
    outcome: str
    """``fits``, one of ``TOO_LARGE``, or the name of another error, which ended it all."""
    duration_seconds: float
    usages: tuple[Usage, ...]
    device: str | None = None
    """The device that had too little memory."""
    requested_bytes: int | None = None
    """What could not be allocated, where the error says so."""
    limit_bytes: int | None = None
    """The limit of torch's allocator, where that refused it and not the device."""

    @property
    def needed_bytes(self) -> int | None:
        """What the try needed of that device at least: its peak, and what could not be allocated on top of it."""
        peaks = [usage.peak_bytes for usage in self.usages if usage.device == self.device]
        return peaks[0] + (self.requested_bytes or 0) if peaks else None


@dataclass(frozen=True)
class AutofitResult:
    """What ``ipygpumem.autofit`` found."""

    values: dict[str, Any]
    """The values that fit, by name."""
    result: Any = field(repr=False)
    """What the function returned with them."""
    tries: tuple[Try, ...] = field(repr=False)

    @property
    def value(self) -> Any:
        """The value of the only variable, or of the first."""
        return next(iter(self.values.values()))


@dataclass(frozen=True)
class Options:
    """How to look for what fits; ``None`` and texts as the user gives them."""

    min: Any = None
    step: Any = "halve"
    headroom: Any = None
    max_tries: Any = 10

    def plan(self, start: Values) -> Plan:
        """Return the plan that reduces ``start`` (``AutofitError`` where that makes no sense)."""
        of = plan.variables(start, self.min)
        return Plan(of, step=plan.parse_step(self.step), most=self.max_tries)

    @property
    def share(self) -> float:
        """The headroom as a share: by default 5 % for a search, else none."""
        if self.headroom is None:
            return 0.05 if self.step == "search" else 0.0
        return plan.parse_share(self.headroom)


class Fit:
    """Runs a plan's tries one after the other: ``begin``, the user's code, ``end``, ``give_back``.

    Args:
        plan: what to try.
        meter: measures each try.
        headroom: share of each device that must stay free at the peak.
        limits: gives the budgets by device that are in force at the end of a try.
        ran_out: is called with each out-of-memory error before anything that it holds is released.
        garbage: collects it.
    """

    def __init__(
        self,
        plan: Plan,
        meter: Meter,
        *,
        headroom: float = 0.0,
        limits: Callable[[], room.Limits] = dict,
        ran_out: Callable[[BaseException], object] = id,
        garbage: Garbage | None = None,
    ) -> None:
        self.plan = plan
        self.tries: list[Try] = []
        self.more = True
        """Whether ``plan.values`` are to be tried."""
        self._meter = meter
        self._headroom = headroom
        self._limits = limits
        self._ran_out = ran_out
        self._garbage = garbage or Garbage()
        self._mark: Mark | None = None
        self._left: dict[str, int] = {}
        """What was in use of each device after the last try."""
        self._allowed: room.Limits = {}
        self._span: Measurement | None = None
        self._started = 0.0

    def begin(self) -> None:
        """Start measuring a try."""
        self._mark = self._garbage.mark()
        self._span = self._meter.start()
        self._started = time.perf_counter()

    def end(self, error: BaseException | None) -> bool:
        """Note how the try ended, and release the frames of an out-of-memory error; return whether it was one."""
        seconds = time.perf_counter() - self._started
        span, self._span = self._span, None
        usages = () if span is None else self._meter.stop(span)
        values = dict(self.plan.values)
        self._allowed = self._limits()
        if error is None:
            # What fitted with headroom may take a little of it when it runs again: that is what it is for.
            headroom = 0.0 if self.plan.repeats else self._headroom
            crowded = room.crowded_device(usages, headroom, self._allowed)
            self.tries.append(Try(values, self._outcome(crowded, usages), seconds, usages, crowded))
            self.more = self.plan.note(fits=crowded is None)
            return False
        failure = tracebacks.classify(error)
        if failure.kind != "oom" or failure.poisoned:
            self.tries.append(Try(values, failure.error, seconds, usages))
            self.more = False
            return False
        self._ran_out(error)
        with interrupts.kept():
            tracebacks.release(error)
        refused = refusal(failure.message)
        limit = self._allowed.get(refused.device) if refused is not None else None
        outcome = OVER if refused is not None and limit is not None and refused.is_by(limit) else OUT_OF_MEMORY
        device, limit = room.failed_device(failure, usages), refused.limit_bytes if refused is not None else None
        self.tries.append(Try(values, outcome, seconds, usages, device, failure.requested_bytes, limit))
        self.more = self.plan.note(fits=False)
        return True

    def _outcome(self, crowded: str | None, usages: Sequence[Usage]) -> str:
        """Return what came of a try that had no error."""
        if crowded is None:
            return FITS
        over = [u for u in usages if u.device == crowded and u.peak_bytes > self._allowed.get(crowded, u.peak_bytes)]
        return OVER if over else CROWDED

    def give_back(self) -> None:
        """Give back what the last try leaves behind, once nothing refers to it any more."""
        since = self._mark if len(self.tries) > 1 else None  # what older garbage there is goes after the first
        left = self._free_since(since)
        if since is not None and any(left[device] > self._left.get(device, 0) + _TRIFLE for device in left):
            left = self._free_since(None)  # what the try has replaced may be an earlier one's, and garbage now
        self._left = left

    def _free_since(self, since: Mark | None) -> dict[str, int]:
        """Collect garbage that was made since then, and return what is in use of each device."""
        reclaim.run_steps(self._meter, steps_that_free(self._garbage, lambda: since), [])
        return reclaim.current(self._meter.now())

    def check(self) -> None:
        """Raise ``AutofitError`` if nothing fits."""
        __tracebackhide__ = True
        if self.plan.best is None:
            raise AutofitError(nothing_fits(self.tries, self._allowed, self._headroom, exhausted=self.plan.exhausted))

    def abandon(self) -> None:
        """Stop measuring a try that has no end."""
        if self._span is not None:
            self._meter.drop(self._span)
            self._span = None


def nothing_fits(tries: Sequence[Try], allowed: room.Limits, headroom: float, *, exhausted: bool) -> str:
    """Return what is said where not even the smallest values fit."""
    last = tries[-1]
    text = f"even {shown(last.values)} does not fit ({last.outcome})"
    needed = last.needed_bytes
    if needed is not None and last.device is not None:
        ran_out = last.outcome == OUT_OF_MEMORY or last.requested_bytes is not None
        text += f": it needs {'at least ' if ran_out else ''}{format_bytes(needed)}"
        text += f" of {'RAM' if last.device == 'cpu' else last.device}"
        if last.outcome == CROWDED:
            text += f" beside the {headroom * 100:g}% that must stay free"
        total = next((usage.total_bytes for usage in last.usages if usage.device == last.device), None)
        limit = last.limit_bytes or allowed.get(last.device)
        if limit is not None:
            text += f", of which {format_bytes(limit)} are allowed"
        else:
            text += room.why_too_little(last.device, needed, total)
    if exhausted:
        after = f"the {len(tries) - 1} tries after the first" if len(tries) > 2 else "all tries"
        return f"{text}; {after} are used: allow more tries, or start lower"
    return text


def shown(values: dict[str, Number]) -> str:
    """Return values as text: ``batch_size=128, seq_len=512``."""
    return ", ".join(
        f"{name}={value:g}" if type(value) is float else f"{name}={value}" for name, value in values.items()
    )
