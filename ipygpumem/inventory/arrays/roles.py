"""Finds the role of each tensor: parameter, gradient, buffer or optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipygpumem.heap.bulk import Kinds
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.kinds.tensors import Reader
from ipygpumem.heap.live.heap import Heap, TrackedInstances
from ipygpumem.heap.paths.torch_steps import MADE_IN_STEPS
from ipygpumem.introspect import instance_dict, is_instance, module_of
from ipygpumem.inventory.arrays.records import Role

_DEEPEST = 6
"""Maximum number of containers inside each other in an optimizer's state."""
_MOST_PER_STATE = 1_000_000
"""Maximum number of objects to examine in the state of one optimizer."""


def roles_of(
    reader: Reader, heap: Heap | TrackedInstances, tensors: Sequence[Any], gradients: Sequence[Any]
) -> dict[int, Role]:
    """Return the roles of tensors and storages; the missing ones have the role "other".

    Args:
        reader: reads tensors without user code.
        heap: has all live modules and optimizers.
        tensors: all live tensors.
        gradients: the gradients among them.

    Returns:
        The roles by the identity of a tensor, and by the keys of its storages.
    """
    in_optimizers = [tensor for _, tensor in optimizer_states(heap, reader.base)]
    tensors_by_role: dict[Role, Iterable[Any]] = {
        "buffer": _buffers(reader, heap),
        "optimizer state": in_optimizers,
        "gradient": gradients,
        "parameter": _parameters(tensors),
    }
    roles: dict[int, Role] = {}
    for role, tensors_of_role in tensors_by_role.items():  # the last role wins
        for tensor in tensors_of_role:
            roles[id(tensor)] = role
            roles.update(dict.fromkeys(reader.keys(tensor), role))
    return roles


def roles_of_each(
    roles: Mapping[int, Role], keys: Iterable[tuple[int, ...]], ids: Iterable[int]
) -> list[Role]:
    """Return the role of each tensor: that of one of its storages, or else its own.

    Args:
        roles: the result of ``roles_of``.
        keys: the keys of the storages of each tensor.
        ids: the identity of each tensor.
    """
    of_each = list[Role]()
    for keys_of_storages, identity in zip(keys, ids, strict=True):
        role = roles.get(identity, "other")
        for key in keys_of_storages:
            if key in roles:
                role = roles[key]
                break
        of_each.append(role)
    return of_each


def _parameters(tensors: Sequence[Any]) -> Iterator[Any]:
    """Yield the parameters, among which are tensors of other subclasses with torch's mark."""
    base = library_type("torch.nn", "Parameter")
    if base is None:
        return
    kinds = Kinds(tensors)
    yield from kinds.instances(base)
    other_subclasses = kinds.examples.keys() - kinds.derived_from(base) - {id(base.__base__)}
    for tensor in kinds.of_types(other_subclasses):
        attributes = instance_dict(tensor) or {}
        if attributes.get("_is_param") is True:
            yield tensor  # torch's mark on a subclass's parameters


def _buffers(reader: Reader, heap: Heap | TrackedInstances) -> Iterator[Any]:
    """Yield the buffers of all live modules."""
    for module in heap.modules:
        attributes = instance_dict(module) or {}
        buffers: Any = attributes.get("_buffers")
        if is_instance(buffers, dict):
            values = list(dict.values(buffers))
            yield from (item for item in values if is_instance(item, reader.base))


def optimizer_states(heap: Heap | TrackedInstances, base: Any) -> Iterator[tuple[object, Any]]:
    """Yield each tensor in a live optimizer's state, with its key in the state, usually a
    parameter.
    """
    for optimizer in heap.optimizers:
        attributes = instance_dict(optimizer) or {}
        yield from _tensors_in(attributes.get("state"), base)


def added_to_optimizers(heap: Heap, base: Any) -> Iterator[Any]:
    """Yield each tensor that users have added to the state of one of torch's own optimizers, which
    does not need it.
    """
    for optimizer in heap.optimizers:
        state: Any = (instance_dict(optimizer) or {}).get("state")
        if not module_of(optimizer).startswith("torch.optim.") or not is_instance(state, dict):
            continue
        for of_parameter in list(dict.values(state)):
            if not is_instance(of_parameter, dict):
                continue
            for key, value in list(dict.items(of_parameter)):
                if type(key) is not str or key not in MADE_IN_STEPS:
                    yield from (tensor for _, tensor in _tensors_in(value, base))


def _tensors_in(state: object, base: Any) -> Iterator[tuple[object, Any]]:
    """Yield the tensors in an optimizer's state, each with its key there.

    The state is not always one level deep.
    """
    waiting: list[tuple[object, Any, int]] = [(None, state, 0)]
    """Keys in the state, objects behind them, and the number of containers around each."""
    for _ in range(_MOST_PER_STATE):
        if not waiting:
            return
        key_in_state, item, depth = waiting.pop()
        if is_instance(item, base):
            yield key_in_state, item
        elif depth == _DEEPEST:
            continue
        elif is_instance(item, dict):
            for key, value in list(dict.items(item)):
                waiting.append((key_in_state if depth else key, value, depth + 1))
        elif type(item) is list or type(item) is tuple:
            waiting += [(key_in_state, value, depth + 1) for value in item]
