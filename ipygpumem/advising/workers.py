"""Advice on the worker processes that data loaders keep between two passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import instance_dict
from ipygpumem.objects.arrays import library_type
from ipygpumem.objects.heap import live_instances


def workers(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield the persistent workers of each data loader; what they share with this process stays."""
    kind: Any = library_type("torch.utils.data", "DataLoader")
    for loader, path in look.named(live_instances(kind)) if kind is not None else ():
        iterator = (instance_dict(loader) or {}).get("_iterator")
        numbers = [number for number in map(_number, _processes(iterator)) if number is not None]
        if not numbers or not _is_at_rest(look, loader, iterator):
            continue
        yield Finding(
            "data loader's workers",
            "cpu",
            {(f"process {number}", 0): _own_bytes(number) for number in numbers},
            f"{len(numbers)} persistent workers of {path}, with what they share with nobody",
            f"{path}._iterator = None",
            "if no loop over it is to come soon: it would start new ones; next time fewer, or persistent_workers=False",
        )


def _processes(iterator: object) -> Sequence[object]:
    found = (instance_dict(iterator) or {}).get("_workers")
    return found if type(found) is list else ()


def _number(process: Any) -> int | None:
    """Return the number of a process of ``multiprocessing`` that this process has started."""
    popen = (instance_dict(process) or {}).get("_popen")
    number = (instance_dict(popen) or {}).get("pid")
    return number if type(number) is int else None


def _is_at_rest(look: Look, loader: object, iterator: object) -> bool:
    """Whether nothing but its loader has the iterator: no loop is running."""
    own = {id(loader), id(instance_dict(loader))}
    referrers = look.heap.referrers({id(iterator): iterator})
    return not look.is_in_frames(iterator) and all(id(referrer) in own for referrer, _ in referrers)


def _own_bytes(number: int) -> int:
    """Return the memory of a process that nobody shares, and that is free when it ends (USS); 0 if it has ended."""
    try:
        return int(psutil.Process(number).memory_full_info().uss)
    except psutil.Error:
        return 0
