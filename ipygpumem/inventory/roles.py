"""Tells parameters, gradients, buffers and optimizer state apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipygpumem.heap.arrays import library_type
from ipygpumem.heap.bulk import Kinds, kinds_of, of_types
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.tensors import Reader
from ipygpumem.introspect import instance_dict, is_instance
from ipygpumem.inventory.records import Role

_DEEPEST = 6
"""Maximum number of containers inside each other in an optimizer's state."""
_MOST_PER_STATE = 1_000_000
"""Maximum number of objects to examine in the state of one optimizer."""


def roles_of(
    reader: Reader, heap: Heap, tensors: Sequence[Any], gradients: Sequence[Any]
) -> dict[int, Role]:
    """Return the roles of storages, by ``Reader.keys``; the missing ones have the role "other"."""
    roles: dict[int, Role] = {}
    groups: tuple[tuple[Role, Iterable[Any]], ...] = (
        ("buffer", _buffers(reader, heap)),
        ("optimizer state", (tensor for _, tensor in optimizer_states(heap, reader.base))),
        ("gradient", gradients),
        ("parameter", _parameters(tensors)),
    )
    for role, tensors_of_role in groups:  # the last role wins
        for tensor in tensors_of_role:
            roles.update(dict.fromkeys((id(tensor), *reader.keys(tensor)), role))
    return roles


def roles_of_each(
    roles: Mapping[int, Role], keys: Iterable[tuple[int, ...]], ids: Iterable[int]
) -> list[Role]:
    """Return the role of each tensor, by the identities of its storages and its own."""
    of_each = list[Role]()
    for keys_of_storages, identity in zip(keys, ids, strict=True):
        candidates = (roles[key] for key in (*keys_of_storages, identity) if key in roles)
        of_each.append(next(candidates, "other"))
    return of_each


def _parameters(tensors: Sequence[Any]) -> Iterator[Any]:
    base = library_type("torch.nn", "Parameter")
    if base is None:
        return
    examples = Kinds(tensors).examples
    own = kinds_of(list(examples.values()), base)
    subclasses = examples.keys() - own - {id(base.__base__)}
    if own:
        yield from of_types(own, tensors)
    for tensor in of_types(subclasses, tensors) if subclasses else ():
        if (instance_dict(tensor) or {}).get("_is_param") is True:
            yield tensor  # torch's mark on a subclass's parameters


def _buffers(reader: Reader, heap: Heap) -> Iterator[Any]:
    for module in heap.modules:
        buffers = (instance_dict(module) or {}).get("_buffers")
        if is_instance(buffers, dict):
            values = list(dict.values(buffers))  # type: ignore[arg-type]  # is_instance says so
            yield from (item for item in values if is_instance(item, reader.base))


def optimizer_states(heap: Heap, base: Any) -> Iterator[tuple[object, Any]]:
    """Yield each tensor in a live optimizer's state, with its key in the state, usually a
    parameter.
    """
    for optimizer in heap.optimizers:
        state = (instance_dict(optimizer) or {}).get("state")
        yield from _tensors_in(state, base)


def _tensors_in(state: object, base: Any) -> Iterator[tuple[object, Any]]:
    """Yield the tensors in an optimizer's state, each with its key there.

    The state is not always one level deep.
    """
    waiting: list[tuple[object, Any, int]] = [(None, state, 0)]
    for _ in range(_MOST_PER_STATE):
        if not waiting:
            return
        owner, item, depth = waiting.pop()
        if is_instance(item, base):
            yield owner, item
        elif depth == _DEEPEST:
            continue
        elif is_instance(item, dict):
            for key, value in list(dict.items(item)):
                waiting.append((owner if depth else key, value, depth + 1))
        elif type(item) is list or type(item) is tuple:
            waiting += [(owner, value, depth + 1) for value in item]
