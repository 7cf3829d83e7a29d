"""Finds the tensors whose autograd graph or gradient keeps a storage alive."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ipygpumem.heap.arrays import StorageKey, storage_key
from ipygpumem.heap.knowledge.graphs import behind, requiring_grad
from ipygpumem.heap.knowledge.nodes import Nodes
from ipygpumem.heap.paths.torch_steps import DETACH
from ipygpumem.introspect import type_name

GRADIENT = ".grad"


@dataclass(frozen=True)
class Keeper:
    """A tensor that keeps a storage alive through C++, and how: ``how`` follows the
    tensor's path.
    """

    tensor: Any
    how: str
    advice: str


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
