"""Asks all kinds of advice, adds up what they save, and counts no byte twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ipygpumem.advising import (
    activations,
    caches,
    checkpoints,
    copies,
    frames,
    gaps,
    graphs,
    modules,
    narrowing,
    outputs,
    training,
    workers,
)
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import Scope
from ipygpumem.advising.records import Advice, Advised, Finding
from ipygpumem.objects.arrays import StorageKey
from ipygpumem.objects.heap import undisturbed
from ipygpumem.objects.inventory.survey import torch_reader
from ipygpumem.objects.progress import Progress, counted, part, unseen
from ipygpumem.objects.traced import refuse_while_traced
from ipygpumem.units import MIB

LEAST_BYTES = MIB
"""What saves less is not worth a line."""

KINDS: tuple[Callable[[Look, Graphs], Iterator[Finding]], ...] = (
    graphs.stored,
    graphs.evaluated,
    training.gradients,
    training.states,
    modules.halved,
    modules.untied,
    copies.views,
    copies.duplicates,
    narrowing.doubles,
    narrowing.arrays,
    frames.frames,
    outputs.outputs,
    caches.caches,
    workers.workers,
    gaps.gaps,
    activations.in_place,
    checkpoints.checkpointing,
)
"""Each looks for one kind of saving. A new kind is a function here."""


def advise(scope: Scope, least: int = LEAST_BYTES, progress: Progress = unseen) -> Advised:
    """Return what would save at least so many bytes, what saves most first.

    Args:
        scope: the names that are seen where it is asked for.
        least: bytes that are worth a piece of advice.
        progress: gets how much has been looked at.

    Raises:
        GpuMemError: torch is tracing the code that asks.
    """
    refuse_while_traced("ask for advice")
    with undisturbed(), torch_reader() as reader:
        look = Look(scope, reader, least, part(progress, 0.0, 0.8))
        try:
            known = Graphs(look)
            if not known.complete:
                look.notes.append("there are too many autograd graphs to follow: nothing is said about them")
            kinds = counted(KINDS, len(KINDS), part(progress, 0.8, 1.0))
            found = [finding for kind in kinds for finding in kind(look, known)]
            return _advised([one for one in found if sum(one.shares.values()) >= max(least, 1)], look.notes)
        finally:
            look.drop()


def _advised(found: list[Finding], notes: list[str]) -> Advised:
    found = sorted(found, key=lambda one: -sum(one.shares.values()))
    most: dict[str, dict[StorageKey, int]] = {}
    for one in found:
        of_device = most.setdefault(one.device, {})
        for key, size in one.shares.items():
            of_device[key] = max(size, of_device.get(key, 0))
    advice = [Advice(one.kind, one.device, sum(one.shares.values()), *one[3:]) for one in found]
    return Advised(tuple(advice), {device: sum(sizes.values()) for device, sizes in most.items()}, tuple(notes))
