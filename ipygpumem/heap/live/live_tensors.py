"""Finds all live tensors, also the tensors that only graphs, leaves and TorchScript keep alive.

The garbage collector cannot see these references. They are found from the other end: from the nodes
of every live tensor's graph to their saved tensors.
"""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

from ipygpumem.heap.bulk import by_identity, kinds_of, of_types, without_types
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.kinds.tensors import tensors_of_script
from ipygpumem.heap.knowledge.graphs import kept_by, with_graph_or_gradient
from ipygpumem.heap.knowledge.nodes import Nodes, expect_dead_nodes
from ipygpumem.heap.live.garbage import Garbage, Known


def _let_swap(utils: Any) -> None:
    """Let torch swap two tensors, as ``module.to()`` may; it refuses where weak references such as
    ours exist.
    """
    if getattr(utils, "weakref", None) is weakref:
        utils.weakref = SimpleNamespace(
            **{**vars(weakref), "getweakrefs": _foreign_weak_references}
        )


def stop_letting_swap() -> None:
    """Restore torch's own ``weakref`` module once no reference of ours to a tensor is left."""
    utils: Any = sys.modules.get("torch.utils")
    if getattr(getattr(utils, "weakref", None), "getweakrefs", None) is _foreign_weak_references:
        utils.weakref = weakref


def _foreign_weak_references(item: object) -> list[Any]:
    """Return the weak references to an object, without ours: ``weakref.getweakrefs`` for torch."""
    return [reference for reference in weakref.getweakrefs(item) if type(reference) is not Known]


def create_hidden_tensors(garbage: Garbage) -> None:
    """Create the objects of the tensors known only in C++, as ``live_tensors`` does: from now on, a
    search of the heap finds them.
    """
    live_tensors(garbage)


def live_tensors(garbage: Garbage) -> list[Any]:
    """Return all live tensors, including those that only graphs, leaves and TorchScript keep alive.

    A result saved by its own operation, and a gradient that was never read, have no Python object
    yet: half the memory of a network of sigmoids. This call creates the objects, which live as long
    as the tensors.
    """
    base: Any = library_type("torch", "Tensor")
    if base is None:
        return []
    # The graphs are read below: those that the user has freed no longer count for the limit.
    expect_dead_nodes()
    # ``garbage`` keeps weak references to the tensors: torch would refuse ``module.to()`` for them.
    _let_swap(sys.modules.get("torch.utils"))
    scripted = library_type("torch.jit", "RecursiveScriptModule")
    bases = [base] if scripted is None else [base, scripted]
    instances = garbage.instances(*bases)  # one search of the heap
    tensor_types = kinds_of(instances, base)
    tensors: list[Any] = of_types(tensor_types, instances)
    live = list(tensors)
    for module in without_types(tensor_types, instances):
        live += tensors_of_script(module)
    nodes = Nodes()
    with sys.modules["torch"]._C.DisableTorchFunction():
        for tensor in with_graph_or_gradient(tensors):
            live += [saved for _, saved in kept_by(tensor, nodes)]
    return list(by_identity(live).values())
