"""The steps that give memory back once nothing refers to it any more."""

from __future__ import annotations

from collections.abc import Callable

from ipygpumem.freeing.reclaim import Step, memory_steps
from ipygpumem.objects.garbage import Garbage, Mark
from ipygpumem.probes.accelerators import loaded_torch


def steps_that_free(
    garbage: Garbage, since: Callable[[], Mark | None] = lambda: None, *, devices: bool = True
) -> list[Step]:
    """Return the steps that collect garbage and empty the caches; see ``reclaim.memory_steps``.

    Args:
        garbage: collects it.
        since: returns the moment after which all was made that may be garbage now, if there is one.
        devices: also empty the caches of accelerators, which fails where a context is broken.
    """
    steps: list[Step] = [("garbage", lambda: garbage.collect(since()))]
    if loaded_torch() is not None:
        steps.append(("autograd cycles", lambda: _collect_cycles(garbage)))
    return memory_steps(*steps, devices=devices)


def _collect_cycles(garbage: Garbage) -> int:
    from ipygpumem.freeing import cycles  # loading the extension must stay fast, and there may be no memory for it

    return cycles.collect(garbage)
