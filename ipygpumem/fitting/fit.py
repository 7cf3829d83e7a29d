"""Runs an autofit's tries: measures each, and frees its memory before the next."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ipygpumem import interrupts
from ipygpumem.errors import AutofitError, quoted
from ipygpumem.estimating.records import DOES_NOT_FIT, FITS, PERHAPS, Estimate
from ipygpumem.fitting import budgets
from ipygpumem.fitting.plan import Number, Plan
from ipygpumem.heap.garbage import Garbage, GcMark
from ipygpumem.introspect import is_exactly, text_of, type_name
from ipygpumem.meter.meter import Meter, Span
from ipygpumem.probes import own_limits
from ipygpumem.probes.accelerators import TORCH_DEVICES, current_device
from ipygpumem.probes.host import available_bytes
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
_TRIFLE = MIB
"""If a try leaves more bytes allocated, all garbage is collected."""
_NUMBERED = re.compile(r"\b(?:GPU|Allocation on device) (\d+)\b")
_KINDS = {
    "cupy": r"CU\w+Error:|OutOfMemoryError: Out of memory allocating",
    "cpu": (
        r"CPUAllocator|CPU memory|not enough memory: you "
        r"tried|HOST_ALLOCATION|\b(?!OutOf)\w*MemoryError: "
    ),
    "cuda": r"\b(CUDA|HIP|cuda|hip)|\b(cuBLAS|cuDNN)|Allocation on device",
    "xpu": r"\bXPU\b|DEVICE_ALLOCATION",
    "mps": r"\bMPS\b",
    "jax": r"RESOURCE_EXHAUSTED",
}
"""Patterns of an error's type and text by the kind of device that ran out; the first match counts.
"""


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
    """Runs a plan's tries one after the other: ``begin``, the user's code, ``end``,
    ``free_memory``.

    Args:
        plan: chooses the values to try.
        meter: measures each try.
        ran_out: called with each out-of-memory error before any memory that it holds is freed.
        garbage: collects garbage between tries.

    Raises:
        AutofitError: another try is running in this thread.
    """

    _threads: ClassVar[set[int]] = set()
    """Threads in which a try is running."""

    def __init__(
        self,
        plan: Plan,
        meter: Meter,
        ran_out: Callable[[BaseException], object] = id,
        garbage: Garbage | None = None,
    ) -> None:
        if threading.get_ident() in self._threads:
            raise AutofitError(
                "an autofit is already running: pass it both variables, and they are reduced in "
                "turn"
            )
        self.plan = plan
        self.tries: list[Try] = []
        self.more = True
        """True if ``plan.values`` must be tried next."""
        self._meter = meter
        self._ran_out = ran_out
        self._garbage = garbage or Garbage()
        self._mark: GcMark | None = None
        self._left: dict[str, int] = {}
        """Bytes in use on each device after the last try."""
        self._span: Span | None = None
        self._started = 0.0
        self._thread = 0

    def begin(self) -> None:
        """Start measuring a try."""
        self._thread = threading.get_ident()
        self._threads.add(self._thread)
        self._mark = self._garbage.mark()
        self._span = self._meter.span()
        self._started = time.perf_counter()

    def end(self, error: BaseException | None, result: object = None) -> bool:
        """Record the try's outcome; if ``error`` is an out-of-memory error, release its frames and
        return True.

        If ``result`` is an estimate, its verdict is the outcome instead of the measured memory.
        """
        seconds = time.perf_counter() - self._started
        self._threads.discard(self._thread)
        span, self._span = self._span, None
        usages = () if span is None else span.stop()
        note = functools.partial(
            Try, dict(self.plan.values), duration_seconds=seconds, usages=usages
        )
        if error is None and is_exactly(result, Estimate):
            self._end_estimate(result, note)  # type: ignore[arg-type]  # an Estimate
            return False
        if error is None:
            # The final run of values that fitted may use some of the headroom: that is its purpose.
            crowded = None if self.plan.repeats else crowded_device(usages, self.plan.headroom)
            self.tries.append(note(FITS if crowded is None else CROWDED, device=crowded))
            self.more = self.plan.note(fits=crowded is None)
            return False
        failure = classify(error)
        if failure.kind != "oom" or failure.poisoned:
            self.tries.append(note(failure.error))
            self.more = False
            return False
        self._ran_out(error)
        with interrupts.reraise_swallowed():
            release(error)
        refused = budgets.refusal(failure.message)
        outcome = OVER if refused is not None and refused.budget is not None else OUT_OF_MEMORY
        limit = refused.limit_bytes if refused is not None else None
        device = failed_device(failure, usages)
        self.tries.append(
            note(outcome, device=device, requested_bytes=failure.requested_bytes, limit_bytes=limit)
        )
        self.more = self.plan.note(fits=False)
        return True

    def _end_estimate(self, estimate: Estimate, note: Callable[..., Try]) -> None:
        """Record an estimate as the outcome; the values fit only if its verdict is a
        plain "fits".
        """
        if not estimate.verdict:
            raise AutofitError(
                "the device's memory size is unknown: pass --device-memory (device_memory=)"
            )
        if not self.tries:
            self.plan.expect_estimates()
        outcome = estimate.verdict
        rooms = [
            (device.required_bytes, device.room_bytes or math.inf) for device in estimate.devices
        ]
        if outcome == FITS and any(
            needed > room * (1 - self.plan.headroom) for needed, room in rooms
        ):
            outcome = CROWDED
        usages = tuple(
            Usage(
                item.device,
                item.before_bytes,
                item.after_bytes,
                item.peak_bytes,
                item.room_bytes,
                "allocator",
            )
            for item in estimate.devices
        )
        largest = max(
            estimate.devices, key=lambda item: item.required_bytes - (item.room_bytes or math.inf)
        )
        self.tries.append(
            note(
                outcome, usages=usages, device=largest.device, required_bytes=largest.required_bytes
            )
        )
        self.more = self.plan.note(fits=outcome == FITS)

    def free_memory(self) -> None:
        """Free the last try's memory, once nothing references it."""
        # the first try collects older garbage too
        since = self._mark if len(self.tries) > 1 else None
        left = self._free_since(since)
        if since is not None and any(
            left[device] > self._left.get(device, 0) + _TRIFLE for device in left
        ):
            left = self._free_since(None)  # objects of earlier tries may have become garbage
        self._left = left

    def _free_since(self, since: GcMark | None) -> dict[str, int]:
        """Collect garbage created since the mark; return the bytes in use on each device."""
        reclaim.run_steps(self._meter, reclaim.steps_that_free(self._garbage, lambda: since), [])
        return reclaim.current(self._meter.now())

    def check(self) -> None:
        """Raise ``AutofitError`` if nothing fits."""
        __tracebackhide__ = True
        if self.plan.best is None:
            raise AutofitError(_nothing_fits(self.tries, self.plan))

    def abandon(self) -> None:
        """Stop measuring a try that does not end normally."""
        self._threads.discard(self._thread)
        if self._span is not None:
            self._span.close()
            self._span = None


# -- headroom -----------------------------------------------------------------------------------


def crowded_device(usages: Sequence[Usage], headroom: float) -> str | None:
    """Return a device with less than ``headroom`` free at the peak, or None.

    Accelerators are checked if the try used one, else the host. A budget replaces the device's
    size.
    """
    used = (
        [usage for usage in usages if usage.peak_delta_bytes > 0 and usage.device not in OUTSIDE]
        if headroom
        else []
    )
    limits = budgets.limits()
    for usage in [usage for usage in used if usage.device != "cpu"] or used:
        total = limits.get(usage.device, usage.total_bytes)
        if total is None:
            continue
        if usage.device == "cpu":
            total = min([total, *(limit.limit_bytes for limit in own_limits.limits())])
            free = min(total, available_bytes() + usage.after_bytes) - usage.peak_bytes
        else:
            free = total - usage.peak_bytes
            if (
                usage.device not in limits
                and usage.used_bytes is not None
                and usage.reserved_bytes is not None
            ):
                # other processes', and the context's
                free -= max(0, usage.used_bytes - usage.reserved_bytes)
        if free < headroom * total:
            return usage.device
    return None


def failed_device(failure: Failure, usages: Sequence[Usage]) -> str:
    """Return the device that ran out according to the error's text, else the most
    used accelerator.
    """
    text = f"{failure.error}: {failure.message}"
    kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, text)), "")
    numbered = _NUMBERED.search(text)
    if kind in TORCH_DEVICES and numbered:
        return f"{kind}:{numbered[1]}"
    known = [
        usage
        for usage in usages
        if usage.device not in ("cpu", *OUTSIDE) and (kind or usage.peak_bytes)
    ]
    known = [usage for usage in known if usage.device.startswith(kind)]
    if kind in TORCH_DEVICES and not known:
        return current_device(kind)
    return max(known, key=lambda usage: usage.peak_bytes).device if known else "cpu"


def _nothing_fits(tries: Sequence[Try], plan: Plan) -> str:
    """Return the error message if not even the smallest values fit."""
    last = tries[-1]
    text = f"even {shown(last.values)} does not fit" + f" ({last.outcome})" * (
        last.outcome != DOES_NOT_FIT
    )
    device = last.device or "cpu"
    usage = usage_on(last.usages, device)
    needed, at_least = last.required_bytes, ""
    if needed is None and (last.outcome == CROWDED or last.requested_bytes is not None):
        needed = (usage.peak_bytes if usage is not None else 0) + (last.requested_bytes or 0)
        at_least = "" if last.outcome == CROWDED else "at least "
    if needed:
        text += (
            f": it needs {at_least}{format_bytes(needed)} of {'RAM' if device == 'cpu' else device}"
        )
    elif device != "cpu":
        text += f" on {device}"
    if needed and last.outcome == CROWDED:
        text += f" plus the {plan.headroom * 100:g}% that must stay free"
    limit = last.limit_bytes or budgets.limits().get(device)
    own = own_limits.nearest() if device == "cpu" else None
    if limit is not None:
        text += f", but only {format_bytes(limit)} is allowed"
    elif own is not None and own.available_bytes <= available_bytes():
        what = f"{format_bytes(own.limit_bytes)} of {own_limits.WHAT[own.name]}"
        text += f", and {own.name} allows this process {what}"
    elif needed and usage is not None and usage.total_bytes and needed > usage.total_bytes:
        text += f", which has {format_bytes(usage.total_bytes)}"
    if plan.exhausted:
        after = f"the {len(tries) - 1} tries after the first" if len(tries) > 2 else "all tries"
        return f"{text}; {after} are used: allow more tries, or start lower"
    return text


def shown(values: dict[str, Number]) -> str:
    """Return values as text: ``batch_size=128, seq_len=512``."""
    return ", ".join(
        f"{name}={value:g}" if type(value) is float else f"{name}={value}"
        for name, value in values.items()
    )


# -- functions ----------------------------------------------------------------------------------


def run_tries(function: Callable[..., Any], fit: Fit) -> AutofitResult:
    """Call ``function`` with the values of each try until they fit.

    Raises:
        AutofitError: no values fit, or the function does not take the variables.
    """
    __tracebackhide__ = True
    _checked_parameters(function, fit.plan.values)
    try:
        while True:
            result = _try(function, fit)
            if fit.more or fit.plan.best is None:
                with interrupts.reraise_swallowed():
                    result = None
                    fit.free_memory()
            if not fit.more:
                break
    finally:
        fit.abandon()
    fit.check()
    return AutofitResult(dict(fit.plan.values), result, tuple(fit.tries))


def _try(function: Callable[..., Any], fit: Fit) -> Any:
    """Return the function's return value; None after an out-of-memory error."""
    __tracebackhide__ = True
    fit.begin()
    try:
        result = function(**fit.plan.values)
    except BaseException as error:
        if not fit.end(error):
            raise
        return None
    fit.end(None, result)
    return result


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _called(function: Callable[..., Any]) -> str:
    return text_of(getattr(function, "__qualname__", None)) or type_name(function)


def _checked_parameters(
    function: Callable[..., Any], names: Mapping[str, Any]
) -> Sequence[inspect.Parameter]:
    """Return the function's known parameters (``AutofitError`` if it does not take
    the variables).
    """
    __tracebackhide__ = True
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(asks(function) for asks in later):
        raise AutofitError(
            f"{_called(function)} runs nothing when it is called: pass a plain function"
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions need not have one
        return ()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [] if takes_all else [name for name in names if name not in parameters]
    if missing:
        raise AutofitError(f"{_called(function)} takes no argument {quoted(missing[0])}")
    return tuple(parameters.values())


def decorated(
    function: Callable[..., Any], start: Mapping[str, Any], run: Callable[..., AutofitResult]
) -> Callable[..., Any]:
    """Return ``function`` wrapped: each call searches for fitting values; ``fitted`` is the last
    result.

    A call omits the variables, wherever they are among the function's parameters. To start from
    another value, pass a variable by name.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        own = {name: options.pop(name, value) for name, value in start.items()}
        parameters = _checked_parameters(function, own)
        free = [item for item in parameters if item.kind in _BY_POSITION and item.name not in own]
        is_open = not parameters or any(item.kind is item.VAR_POSITIONAL for item in parameters)
        if len(args) > len(free) and not is_open:
            name = next(iter(own))
            words = f"leave it out, or write {name}=NUMBER to start from that"
            raise AutofitError(f"{_called(function)}: autofit gives {name}: {words}")

        def tried(**values: Any) -> Any:
            __tracebackhide__ = True
            positional = list(args)
            for place, item in enumerate(parameters):
                is_before = place < len(positional) or item.kind is item.POSITIONAL_ONLY
                if item.name in values and item.kind in _BY_POSITION and is_before:
                    positional.insert(place, values.pop(item.name))
            return function(*positional, **values, **options)

        fitted = run(tried, own)
        # The return value may be large: only the caller keeps it.
        call.fitted = dataclasses.replace(fitted, result=None)  # type: ignore[attr-defined]  # any attribute will do
        return fitted.result

    call.fitted = None  # type: ignore[attr-defined]  # as above
    return call
