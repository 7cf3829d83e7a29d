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
    """Return the roles of tensors. One without a role here has the role "other".

    A storage has the role of a tensor on it, so that a view of a parameter is a parameter, too.

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
    # In this order, because the last role of a tensor counts: a parameter that an optimizer has in
    # its state is a parameter.
    for role, tensors_of_role in tensors_by_role.items():
        for tensor in tensors_of_role:
            roles[id(tensor)] = role
            roles.update(dict.fromkeys(reader.keys(tensor), role))
    return roles


def roles_of_each(
    roles: Mapping[int, Role], keys: Iterable[tuple[int, ...]], ids: Iterable[int]
) -> list[Role]:
    """Return the role of each tensor: that of one of its storages or, if none has a role, its own.

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
    """Yield the parameters among tensors. A parameter of a tensor subclass is no ``nn.Parameter``,
    but has a mark of torch.
    """
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
    """Yield each tensor in the state of a live optimizer, with the key under which the state has
    it, usually a parameter.
    """
    for optimizer in heap.optimizers:
        attributes = instance_dict(optimizer) or {}
        yield from _tensors_in(attributes.get("state"), base)


def added_to_optimizers(heap: Heap, base: Any) -> Iterator[Any]:
    """Yield each tensor that a user has added to the state of one of torch's own optimizers:
    ``optimizer.state[p]["history"] = x``. The optimizer does not need it, so it may be a leak.
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
    """Yield the tensors in an optimizer's state, each with its key there: the state has a dict for
    each parameter, which may have further containers.
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
