"""Finds all tensors whose autograd graphs keep some storages, in one walk through the graphs.

After ``losses.append(loss); total = total + loss``, the graph of ``total`` contains that of the
loss. What the batch has saved is freed only if both tensors are removed.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ipygpumem.heap.kinds.arrays import StorageKey, memory_key
from ipygpumem.heap.knowledge.graphs import gradient_of, saved_by
from ipygpumem.heap.knowledge.nodes import Nodes, is_leaf

_MOST_BITS = 1 << 28
"""Maximum number of nodes times storages, each of which takes a bit: 32 MiB."""
_MOST_PAIRS = 100_000
"""Maximum number of pairs of a storage and a tensor that keeps it."""


def all_keepers(
    tensors: Sequence[Any], keys: Iterable[StorageKey]
) -> dict[StorageKey, list[Any]] | None:
    """Return the tensors whose graphs or gradients keep each of some storages; None if the graphs
    have too many nodes, or too many tensors keep a storage.

    Each storage has one bit, so that one number tells which storages a node keeps.
    """
    bits = {key: 1 << number for number, key in enumerate(keys)}
    with sys.modules["torch"]._C.DisableTorchFunction():
        nodes = Nodes()
        for tensor in tensors:
            for _ in nodes.of(tensor):  # reads each node of its graph into ``nodes.finished``
                pass
        if nodes.is_full or len(nodes.finished) * len(bits) > _MOST_BITS:
            return None
        kept_by_node = _kept_behind(nodes, bits)
        tensors_of: dict[StorageKey, list[Any]] = {key: [] for key in bits}
        number_of_pairs = 0
        for tensor in tensors:
            kept_by_tensor = kept_by_node.get(id(nodes.first(tensor)), 0)
            for gradient in gradient_of(tensor):
                kept_by_tensor |= bits.get(memory_key(gradient), 0)
            number_of_pairs += kept_by_tensor.bit_count()
            if number_of_pairs > _MOST_PAIRS:
                return None
            for key, bit in bits.items() if kept_by_tensor else ():
                if kept_by_tensor & bit:
                    tensors_of[key].append(tensor)
    return tensors_of


def tensors_with_gradients(
    tensors: Iterable[Any], keys: Container[StorageKey]
) -> dict[StorageKey, list[Any]]:
    """Return the tensors whose gradients are on each storage, by storage.

    They may be several: distributed training keeps all gradients of a model in one storage.
    """
    tensors_of = dict[StorageKey, list[Any]]()
    with sys.modules["torch"]._C.DisableTorchFunction():
        for tensor in tensors:
            for gradient in gradient_of(tensor):
                key = memory_key(gradient)
                if key in keys:
                    tensors_of.setdefault(key, []).append(tensor)
    return tensors_of


def _kept_behind(nodes: Nodes, bits: Mapping[StorageKey, int]) -> dict[int, int]:
    """Return the storages that each node and the nodes behind it keep, as a sum of bits, by the
    node's identity.

    Args:
        nodes: the nodes, which have been read; a node comes after those behind it.
        bits: the bit of each storage.
    """
    bits_by_node = dict[int, int]()
    following = dict[int, list[Any]]()
    for node in nodes.finished:
        bits_by_node[id(node)] = 0
        following[id(node)] = list(nodes.following(node))
        for item in saved_by(node):
            bits_by_node[id(node)] |= bits.get(memory_key(item), 0)
            if is_leaf(node):  # the gradient of its tensor may have a graph: create_graph=True
                following[id(node)].append(nodes.first(item))
    # Nodes come after those behind them, so one turn is enough, and a second one finds no change.
    # More are needed only if the graph of a gradient leads to the leaf that has this gradient.
    has_changed = True
    while has_changed:
        has_changed = False
        for node in nodes.finished:
            before = bits_by_node[id(node)]
            for part in following[id(node)]:
                bits_by_node[id(node)] |= bits_by_node.get(id(part), 0)
            has_changed = has_changed or bits_by_node[id(node)] != before
    return bits_by_node
