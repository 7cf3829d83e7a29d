"""``%gpumem guard``."""

from __future__ import annotations

import psutil

from ipygpumem import interrupts
from ipygpumem.errors import GpuMemError, describe_error
from ipygpumem.extras.guard.guard import MemoryGuard
from ipygpumem.report.layout import Report, note
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import (
    Options,
    argument,
    byte_size,
    command,
    option,
    switch,
)
from ipygpumem.units import MIB


@command(
    "%gpumem guard",
    "raise MemoryError before the system kills the kernel",
    argument("state", "", choices=("on", "off")),
    option("--limit", "SIZE", "the most that the kernel may use", to=byte_size(least=64 * MIB)),
    switch("--touched", "count only memory in use, not what is allocated and never written"),
)
def guard(app: App, options: Options) -> list[Report]:
    """Switch the memory guard on or off, or return its state."""
    session = app.session
    guards = [observer for observer in session.observers if type(observer) is MemoryGuard]
    if options.state != "on" and (options.limit or options.touched):
        raise GpuMemError(
            "%gpumem guard: write on before its options: %gpumem guard on --limit 8GiB"
        )
    with interrupts.deferred() as struck:  # half a guard could not be switched off
        if options.state is not None:
            session.observers = tuple(
                observer for observer in session.observers if observer not in guards
            )
            for observer in guards:
                observer.close()
            guards = []
        if options.state == "on":
            try:
                guards = [MemoryGuard(app.context, options.limit, touched=options.touched)]
            except (OSError, RuntimeError, psutil.Error) as error:
                reason = describe_error(error)
                raise GpuMemError(
                    f"%gpumem guard: the memory left cannot be read here: {reason}"
                ) from error
            session.observers = (*session.observers, *guards)
            for cell in app.context.cells.running()[:1]:
                guards[0].cell_begins(cell)
    if struck:
        raise KeyboardInterrupt
    if not guards:
        return [note("the guard is off: %gpumem guard on starts it")]
    return [note(guards[0].state)]
