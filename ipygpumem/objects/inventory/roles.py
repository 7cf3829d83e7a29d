"""Finds what tensors are for: parameters, gradients, optimizer state, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ipygpumem.introspect import instance_dict, is_instance
from ipygpumem.objects.arrays import library_type
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.inventory.memory import Reader
from ipygpumem.objects.inventory.records import Role

_DEEPEST = 6
_MOST_PER_STATE = 1_000_000


def roles_of(reader: Reader, heap: Heap, tensors: Sequence[Any], gradients: Sequence[Any]) -> dict[int, Role]:
    """Return what storages are for, by ``Reader.keys``; those that are not in it are for anything else."""
    roles: dict[int, Role] = {}
    groups: tuple[tuple[Role, Iterable[Any]], ...] = (
        ("buffer", _buffers(reader, heap)),
        ("optimizer state", (tensor for _, tensor in optimizer_states(heap, reader.base))),
        ("gradient", gradients),
        ("parameter", _parameters(tensors)),
    )
    for role, tensors_of_role in groups:  # of several, the last one counts
        roles.update((key, role) for tensor in tensors_of_role for key in (id(tensor), *reader.keys(tensor)))
    return roles


def _parameters(tensors: Sequence[Any]) -> Iterator[Any]:
    base = library_type("torch.nn", "Parameter")
    if base is None:
        return
    for tensor in tensors:
        if is_instance(tensor, base):
            yield tensor
        elif type(tensor) is not base.__base__ and (instance_dict(tensor) or {}).get("_is_param") is True:
            yield tensor  # torch marks a subclass's parameters so


def _buffers(reader: Reader, heap: Heap) -> Iterator[Any]:
    for module in heap.modules:
        buffers = (instance_dict(module) or {}).get("_buffers")
        if is_instance(buffers, dict):
            yield from (item for item in list(dict.values(buffers)) if is_instance(item, reader.base))  # type: ignore[arg-type]  # is_instance says so


def optimizer_states(heap: Heap, base: Any) -> Iterator[tuple[object, Any]]:
    """Yield each tensor that a live optimizer remembers, behind the key of its state: a parameter, mostly."""
    for optimizer in heap.optimizers:
        waiting: list[tuple[object, Any, int]] = [(None, (instance_dict(optimizer) or {}).get("state"), 0)]
        for _ in range(_MOST_PER_STATE):
            if not waiting:
                break
            owner, item, depth = waiting.pop()  # which is not always one level deep
            if is_instance(item, base):
                yield owner, item
            elif depth < _DEEPEST and is_instance(item, dict):
                waiting += [(owner if depth else key, value, depth + 1) for key, value in list(dict.items(item))]
            elif depth < _DEEPEST and (type(item) is list or type(item) is tuple):
                waiting += [(owner, value, depth + 1) for value in item]
