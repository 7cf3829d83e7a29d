"""Finds tensors that autograd keeps in C++: saved for a backward pass, as a gradient, or as a
graph's leaf.

The garbage collector cannot see these references. They are found from the other end: from the nodes
of every live tensor's graph to their saved tensors. Nothing is unpacked: ``SavedTensor.data``
(torch 2.1 and later) returns the saved tensor without running the user's hooks.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from types import SimpleNamespace
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import StorageKey, library_type, storage_key
from ipygpumem.heap.bulk import by_identity, kinds_of, of_types, without_types
from ipygpumem.heap.garbage import Garbage, Known
from ipygpumem.heap.knowledge.nodes import Nodes, expect_dead_nodes, has_graph, is_leaf
from ipygpumem.introspect import class_dict, instance_dict, is_instance, type_name

GRADIENT = ".grad"
DETACH = "keep loss.item() or tensor.detach() instead of a tensor with its graph"
"""Advice for a graph that keeps memory alive."""


@dataclass(frozen=True)
class Keeper:
    """A tensor that keeps a storage alive through C++, and how: ``how`` follows the
    tensor's path.
    """

    tensor: Any
    how: str
    advice: str


def requiring_grad(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that have a graph or may have a gradient."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        tensors = list(tensors)
        return list(compress(tensors, map(torch.Tensor.requires_grad.__get__, tensors)))


def with_graphs(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that have a graph; a parameter only has a gradient."""
    if not tensors:
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        return list(filter(has_graph, requiring_grad(tensors)))


def keepers(
    tensors: Iterable[Any], wanted: set[StorageKey]
) -> tuple[dict[StorageKey, Keeper], bool]:
    """Return the tensor that keeps each of the ``wanted`` storages alive, and True if all graphs
    were seen.
    """
    torch: Any = sys.modules["torch"]
    by_storage: dict[StorageKey, Keeper] = {}
    seen = Nodes()
    with torch._C.DisableTorchFunction():
        # Leaves first: a leaf with a name is a better answer than a graph that leads to it.
        for tensor in sorted(
            requiring_grad(tensors), key=lambda tensor: not torch.Tensor.is_leaf.__get__(tensor)
        ):
            for node, kept in behind(tensor, seen) if len(by_storage) < len(wanted) else ():
                key = storage_key(kept)
                if key in wanted and key not in by_storage:
                    graph = f": its autograd graph ({type_name(node)})", DETACH
                    by_storage[key] = Keeper(tensor, *((GRADIENT, "") if node is None else graph))
    return by_storage, not seen.is_full


def kept_behind(
    tensors: Iterable[Any], seen: Nodes, *, leaves: bool, allowance: Allowance | None = None
) -> list[Any]:
    """Return the gradients of those ``tensors`` that are leaves, or the tensors in the graphs of
    the rest.
    """
    base: Any = library_type("torch", "Tensor")
    if base is None:
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        kept_tensors = list[Any]()
        for tensor in requiring_grad(tensors):
            if base.is_leaf.__get__(tensor) != leaves:
                continue
            for _, kept in behind(tensor, seen):
                if allowance is not None and allowance.is_spent():
                    return kept_tensors
                kept_tensors.append(kept)
        return kept_tensors


def _let_swap(utils: Any) -> None:
    """Let torch swap two tensors, as ``module.to()`` may; it refuses where weak references such as
    ours exist.
    """
    if getattr(utils, "weakref", None) is weakref:
        utils.weakref = SimpleNamespace(**{**vars(weakref), "getweakrefs": _references_of_others})


def stop_letting_swap() -> None:
    """Restore torch's own ``weakref`` module once no reference of ours to a tensor is left."""
    utils: Any = sys.modules.get("torch.utils")
    if getattr(getattr(utils, "weakref", None), "getweakrefs", None) is _references_of_others:
        utils.weakref = weakref


def _references_of_others(item: object) -> list[Any]:
    return [reference for reference in weakref.getweakrefs(item) if type(reference) is not Known]


def live_tensors(garbage: Garbage) -> list[Any]:
    """Return all live tensors, including those that only graphs, leaves and TorchScript keep alive.

    A result saved by its own operation, and a gradient that was never read, have no Python object
    yet: half the memory of a network of sigmoids. This call creates the objects, which live as long
    as the tensors.
    """
    base: Any = library_type("torch", "Tensor")
    if base is None:
        return []
    expect_dead_nodes()
    _let_swap(sys.modules.get("torch.utils"))
    scripted = library_type("torch.jit", "RecursiveScriptModule")
    bases = [base] if scripted is None else [base, scripted]
    instances = garbage.instances(*bases)  # one search of the heap
    tensor_types = kinds_of(instances, base)
    tensors: list[Any] = of_types(tensor_types, instances)
    live = list(tensors)
    for module in without_types(tensor_types, instances):
        live += of_script(module)
    nodes = Nodes()
    with sys.modules["torch"]._C.DisableTorchFunction():
        for tensor in requiring_grad(tensors):
            live += [saved for _, saved in behind(tensor, nodes)]
    return list(by_identity(live).values())


def of_script(module: object) -> Iterator[Any]:
    """Yield the parameters and buffers of a TorchScript module; nothing for a tensor."""
    inner = (instance_dict(module) or {}).get("_c")
    functions: Any = sys.modules["torch"]._C
    if type(inner) is functions.ScriptModule:
        for names in (functions.ParameterDict, functions.BufferDict):
            yield from (value for _, value in names(inner).items())


def behind(tensor: Any, seen: Nodes) -> Iterator[tuple[Any, Any]]:
    """Yield the tensors that a tensor keeps alive in C++, each with its node; None for the tensor's
    gradient.

    Skips the nodes in ``seen``, and adds the new ones, so that their identities are not reused.
    """
    for gradient in gradient_of(tensor):
        yield None, gradient
    with contextlib.suppress(
        RuntimeError
    ):  # a view that was changed in place may refuse to return its graph
        for node in seen.of(tensor):
            for item in saved_by(node):
                yield node, item


def gradient_of(tensor: Any) -> Iterator[Any]:
    """Yield a tensor's gradient, if it has one."""
    base: Any = sys.modules["torch"].Tensor
    with contextlib.suppress(
        RuntimeError
    ):  # a view that was changed in place may refuse to return its graph
        if base.is_leaf.__get__(tensor) or base.retains_grad.__get__(
            tensor
        ):  # reading it elsewhere makes torch warn
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                yield gradient


def saved_by(node: Any) -> Iterator[Any]:
    """Yield the tensors that a node has saved, once per reference, without unpacking them; a leaf's
    gradient too.
    """
    base: Any = sys.modules["torch"].Tensor
    if is_leaf(node):
        gradient = base.grad.__get__(node.variable)
        yield from (node.variable,) if gradient is None else (node.variable, gradient)
        return
    for value in (
        instance_dict(node) or {}
    ).values():  # attributes that the user's Function set on its ctx
        if is_instance(value, base):
            yield value
    names = (
        name
        for kind in type.mro(type(node))
        for name in class_dict(kind)
        if name.startswith("_raw_saved_")
    )
    for name in names:
        with contextlib.suppress(RuntimeError):  # freed by a backward pass already
            raw = getattr(node, name)
            for item in raw if type(raw) is list or type(raw) is tuple else [raw]:
                data = getattr(item, "data", None)  # the result of the user's hook, if there is one
                if is_instance(data, base):
                    yield data
