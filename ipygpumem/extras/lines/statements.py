"""Measures statements: memory kept, its peak and the time, in several runs, several statements in
turn.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

from ipygpumem import interrupts
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.reclaim import emptying
from ipygpumem.records import Usage
from ipygpumem.report.devices import is_worth_reporting


@dataclass(frozen=True)
class Statement:
    """Code to run, and its source text."""

    text: str
    code: CodeType


NOTHING = Statement("pass", compile("pass", "<nothing>", "exec"))
"""An empty statement, whose figures are the noise."""


class StatementRun(NamedTuple):
    """One run of a statement."""

    usages: tuple[Usage, ...]
    """The memory of each device during the run."""
    seconds: float
    """Time of the run, including the device's own if it continues after the call."""


@dataclass(frozen=True)
class Cost:
    """Cost of a statement in all its runs."""

    text: str
    """The source text of the statement."""
    runs: list[StatementRun] = field(default_factory=list)

    @property
    def devices(self) -> list[str]:
        """The host, and each other device on which memory was in use."""
        devices: dict[str, None] = {}
        for run in self.runs:
            for usage in run.usages:
                if is_worth_reporting(usage):
                    devices[usage.device] = None
        return list(devices)

    def usages(self, device: str) -> list[Usage]:
        """Return each run's usage of a device.

        Its ``delta_bytes`` are the memory of objects to which the statement has bound names.
        """
        usages = list[Usage]()
        for run in self.runs:
            usages += [usage for usage in run.usages if usage.device == device]
        return usages


def measure(
    meter: Meter,
    statements: Iterable[Statement],
    namespace: dict[str, Any],
    *,
    setup: CodeType | None,
    repeats: int,
) -> tuple[list[Cost], Cost]:
    """Return the costs of the statements, and the cost of an empty one, in ``repeats`` runs.

    Each first runs once unmeasured: libraries load, allocators reserve memory. Then they take
    turns, so that drift affects all of them. A run sees the names of ``namespace`` and binds its
    own in a copy; the objects are the same, so changes to them persist.

    Args:
        meter: measures the runs.
        statements: the statements.
        namespace: the notebook's names.
        setup: code that runs before every run, unmeasured; None without one.
        repeats: number of measured runs of each statement.
    """
    # IPython shows the frames of the statement, and not those of its callers
    __tracebackhide__ = True
    measured = [NOTHING, *statements]
    costs = [Cost(statement.text) for statement in measured]
    for statement in measured:
        _run_once(meter, statement, namespace, setup, _function_that_waits_for([]))
    in_use = [device for device, reading in meter.now().items() if reading.reserved_bytes]
    wait = _function_that_waits_for(in_use)
    for _ in range(repeats):
        for statement, cost in zip(measured, costs, strict=True):
            cost.runs.append(_run_once(meter, statement, namespace, setup, wait))
    nothing, *costs_of_statements = costs
    return costs_of_statements, nothing


def _run_once(
    meter: Meter,
    statement: Statement,
    namespace: dict[str, Any],
    setup: CodeType | None,
    wait: Callable[[], None],
) -> StatementRun:
    """Run a statement once, and return its memory and time.

    Args:
        meter: measures the run.
        statement: the statement.
        namespace: the notebook's names, of which the run gets a copy.
        setup: code that runs before, unmeasured.
        wait: waits until the devices have finished their work.
    """
    __tracebackhide__ = True
    names = dict(namespace)
    if setup is not None:
        exec(setup, names)  # noqa: S102  # the user's own code
    if statement is not NOTHING:  # which makes no garbage
        with interrupts.reraise_swallowed():
            gc.collect()
    # Pages that the allocator kept would be used again without being seen.
    emptying.trim_host_heap()
    wait()
    with meter.span() as span:
        started = time.perf_counter()
        exec(statement.code, names)  # noqa: S102
        wait()
        seconds = time.perf_counter() - started
        # Pages that the statement has freed do not count as kept; they count for the kernel's peak.
        emptying.trim_host_heap()
        return StatementRun(span.stop(), seconds)


def _function_that_waits_for(devices: Sequence[str]) -> Callable[[], None]:
    """Return a function that waits until ``devices`` have finished their work."""
    torch: Any = loaded_torch()
    waits: list[Callable[[], None]] = []
    for device in devices:
        kind, _, index = device.partition(":")
        synchronize = getattr(torch, kind).synchronize
        if index:
            synchronize = partial(synchronize, int(index))
        # RuntimeError: a context that is broken already does nothing to wait for
        with contextlib.suppress(RuntimeError):
            synchronize()
            waits.append(synchronize)

    def wait() -> None:
        """Wait for each of the devices."""
        for synchronize in waits:
            synchronize()

    return wait
