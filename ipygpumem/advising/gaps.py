"""Advice on segments of a device that are partly in use: what moving a model out of them and in again gives back.

The moves are those of ``purge``; where the allocator puts what comes back is worked out by its own rules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ipygpumem.advising.flow import is_wrapper
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.modules import optimized
from ipygpumem.advising.places import parameters_of, tensors_of, with_parts
from ipygpumem.advising.records import Finding
from ipygpumem.advising.training import rows_of
from ipygpumem.estimating.caching import Allocator, Rules, settings
from ipygpumem.freeing.moving import references_of_tensors
from ipygpumem.introspect import instance_dict, is_exactly, is_instance
from ipygpumem.objects.arrays import StorageKey, library_type
from ipygpumem.probes.allocator import Segment, Snapshot, snapshots
from ipygpumem.probes.workspaces import sizes

_UNSURE = 1.1
"""So much more may be given back if memory goes that no tensor shows, and is no workspace; half of that is promised."""


def gaps(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield models that lie scattered over segments, which would be given back if they were moved together."""
    devices = _snapshots()
    named = list(look.named(look.heap.optimizers)) if devices else []
    for model, path in look.models if devices else ():
        weights = set(map(id, parameters_of(model)))
        own = [one for one in named if weights & set(map(id, optimized(one[0])))]
        if len(own) > 1 or any(map(is_wrapper, dict(with_parts(model)).values())):
            continue
        keys = _moved(look, graphs, model, [one for one, _ in own])
        words = ", ".join([path, *(where for _, where in own)])
        for device in sorted({look.devices[key] for key in keys or ()} & devices.keys()):
            shares = _given_back(look, device, devices[device], [k for k in keys or () if look.devices[k] == device])
            if shares:
                yield Finding(
                    "fragmentation",
                    device,
                    shares,
                    f"segments that are kept for pieces of {path}, and all that is free",
                    look.scope.line_with("ipygpumem", f"ipygpumem.purge({words})"),
                    "when nothing runs on the device; the model goes to the host and back, what is free to others",
                )


def _snapshots() -> dict[str, Snapshot]:
    """Return what each device has reserved, where torch's own allocator works by its usual rules."""
    try:
        return {} if settings() or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") else snapshots("cuda")
    except RuntimeError:  # an allocator without snapshots
        return {}


def _moved(look: Look, graphs: Graphs, model: Any, optimizers: list[Any]) -> list[StorageKey] | None:
    """Return the storages that a purge moves; None if there is one that it may leave."""
    base: Any = library_type("torch", "Tensor")
    found: list[Any] = []
    for _, part in with_parts(model):
        found += tensors_of(part)
        for value in list((instance_dict(part) or {}).values()):
            several = value.values() if type(value) is dict else value if is_exactly(value, list, tuple) else ()
            found += [item for item in (value, *several) if is_instance(item, base)]
    found += [grad for item in found if look.read("is_leaf", item) and (grad := look.read("_grad", item)) is not None]
    found += [item for one in optimizers for row in rows_of(one) for item in row.values() if is_instance(item, base)]
    keys, own = {look.key(item) for item in found}, set(map(id, found))
    shown = references_of_tensors()
    for key in keys:
        tensors = look.shown_by[key] if key is not None else []
        if key is None or shown(base.untyped_storage(tensors[0])) != len(tensors):
            return None
        if not graphs.saves(key) and not all(id(item) in own or look.is_held(item) for item in tensors):
            return None  # a capsule of DLPack's
    return [key for key in keys if key is not None]


def _given_back(look: Look, device: str, snapshot: Snapshot, moved: list[StorageKey]) -> dict[StorageKey, int]:
    addresses = {_address(look, key): look.sizes[key] for key in moved if look.sizes[key]}
    blocks = [block for segment in snapshot.segments for block in segment.blocks]
    there = {block.address for block in blocks if block.state == "allocated"}
    odd = any(one.private or one.page_bytes is not None or one.stream for one in snapshot.segments)
    if odd or any(block.state == "pending" for block in blocks) or not addresses.keys() <= there:
        return {}
    tensors = {_address(look, key) for key, where in look.devices.items() if where == device}
    workspaces = _workspace_sizes(device)
    goes = {block.address for block in blocks if block.requested_bytes in workspaces} - tensors
    ends = (there - goes, tensors)  # a purge ends workspaces, and maybe more that no tensor shows
    given = [snapshot.reserved_bytes - _reserved_after(snapshot.segments, stays, addresses) for stays in ends]
    least, most = min(given), max(given)
    if most > _UNSURE * least or least - snapshot.cached_bytes < look.least:
        return {}
    freed = (least + most) // 2 - snapshot.cached_bytes
    return {(f"cache of {device}", 0): snapshot.cached_bytes, (f"gaps of {device}", 0): freed}


def _workspace_sizes(device: str) -> tuple[int, int]:
    torch: Any = sys.modules["torch"]
    return sizes(torch.cuda.get_device_capability(device))


def _address(look: Look, key: StorageKey) -> int:
    base: Any = library_type("torch", "Tensor")
    return int(base.untyped_storage(look.shown_by[key][0]).data_ptr())


def _reserved_after(segments: Iterable[Segment], stays: set[int], moved: dict[int, int]) -> int:
    """Return what the allocator has reserved when memory was freed, its cache emptied, and the memory taken again.

    Args:
        segments: what it has now.
        stays: the addresses of blocks that are in use all the time, and maybe of those moved.
        moved: bytes by address.
    """
    allocator = Allocator(Rules())
    for segment in segments:
        allocator.take_over(
            (one.size_bytes, one.state != "allocated" or one.address not in stays or one.address in moved)
            for one in segment.blocks
        )
    allocator.empty()
    for size in sorted(moved.values(), reverse=True):
        allocator.take(size)
    return allocator.reserved_bytes
