"""``%gpumem guard``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import psutil
from IPython.core.error import UsageError

from ipygpumem import interrupts
from ipygpumem.errors import GpuMemError, describe_error, quoted
from ipygpumem.extras.guard.guard import MemoryGuard
from ipygpumem.report.layout import Report, note
from ipygpumem.report.words import clean
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import (
    Options,
    WrongValue,
    argument,
    byte_size,
    command,
    did_you_mean,
    option,
    switch,
)
from ipygpumem.units import MIB, format_bytes

_LIMIT = byte_size(minimum=64 * MIB)
"""Converter of the limit."""


@command(
    "%gpumem guard",
    "raise MemoryError before the system kills the kernel",
    argument("words", "on|off|SIZE", offers=("on", "off"), is_joined=True),
    option("--limit", "SIZE", "the most that the kernel may use", to=_LIMIT),
    switch("--touched", "count only memory in use, not what is allocated and never written"),
)
def guard(app: App, options: Options) -> list[Report]:
    """Switch the memory guard on or off, or return its state."""
    request = _request(options)
    with interrupts.deferred() as struck:  # half a guard could not be switched off
        if request.state:
            _switch_off(app)  # a new guard also replaces the old one
        if request.state == "on":
            _switch_on(app, request.limit_bytes, touched=options.touched)
    if struck:
        raise KeyboardInterrupt
    guards = _guards(app)
    if not guards:
        return [note("the guard is off: %gpumem guard on starts it")]
    return [note(guards[0].state)]


def _guards(app: App) -> list[MemoryGuard]:
    """Return the session's guard alone; nothing if it is off."""
    return [observer for observer in app.session.observers if type(observer) is MemoryGuard]


def _switch_off(app: App) -> None:
    """End the session's guard, if it is on."""
    session = app.session
    guards = _guards(app)
    session.observers = tuple(observer for observer in session.observers if observer not in guards)
    for memory_guard in guards:
        memory_guard.close()


def _switch_on(app: App, limit_bytes: int | None, *, touched: bool) -> None:
    """Start a guard, which also guards the rest of the cell that runs this command."""
    try:
        memory_guard = MemoryGuard(app.context, limit_bytes, touched=touched)
    except (OSError, RuntimeError, psutil.Error) as error:
        reason = describe_error(error)
        raise GpuMemError(
            f"%gpumem guard: the memory left cannot be read here: {reason}"
        ) from error
    app.session.observers = (*app.session.observers, memory_guard)
    for cell in app.context.cells.running()[:1]:
        memory_guard.cell_begins(cell)


class _Request(NamedTuple):
    """The user's words and options, understood."""

    state: Literal["on", "off", ""]
    """Empty: show the state."""
    limit_bytes: int | None
    """The user's limit; None without one."""


def _request(options: Options) -> _Request:
    """Return the user's request.

    A size alone, which users try first, means "on": ``%gpumem guard 8GiB``. So do the options.
    """
    state, _, size = options.words.partition(" ")
    if state not in ("on", "off"):
        state, size = "", options.words
    limits = [options.limit] if options.limit else []
    if size:
        limits.append(_size_alone(size))
    if len(limits) > 1:
        shown = " and ".join(map(format_bytes, reversed(limits)))
        raise UsageError(f"%gpumem guard: two limits: {shown}")
    if state == "off" and (limits or options.touched):
        raise UsageError("%gpumem guard: off takes no limit and no option")
    if state == "off":
        return _Request("off", limit_bytes=None)
    if state == "on" or limits or options.touched:
        return _Request("on", limits[0] if limits else None)
    return _Request("", limit_bytes=None)


def _size_alone(text: str) -> object:
    """Return the bytes of a size without an option, such as ``8GiB``.

    Raises:
        UsageError: the text is no size.
    """
    if not text.lstrip("-.")[:1].isdigit():
        hint = f"{did_you_mean(text, ('on', 'off'))}; use on, off, or a size such as 8GiB"
        raise UsageError(clean(f"%gpumem guard: invalid choice: {quoted(text)}{hint}"))
    try:
        return _LIMIT(text)
    except WrongValue as error:
        raise UsageError(clean(f"%gpumem guard: {error}")) from None
