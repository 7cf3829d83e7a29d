"""Reads the tensors that autograd graphs keep in C++: those saved for a backward pass, gradients
and leaves.

The garbage collector cannot see these references. Nothing is unpacked: ``SavedTensor.data`` (torch
2.1 and later) returns the saved tensor without running the user's hooks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import is_not, not_
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.kinds.tensors import each
from ipygpumem.heap.knowledge.nodes import Nodes, has_graph, is_leaf
from ipygpumem.introspect import class_dict, instance_dict, is_instance


def requiring_grad(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors with ``requires_grad``: those that have a graph or may have a gradient."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        tensors = list(tensors)
        return list(compress(tensors, map(torch.Tensor.requires_grad.__get__, tensors)))


def with_graph_or_gradient(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that have a graph or may have a gradient.

    These are all with ``requires_grad``, and leaves without it that have a gradient all the same,
    as after a backward pass and ``weight.requires_grad_(False)``.
    """
    base: Any = sys.modules["torch"].Tensor
    with sys.modules["torch"]._C.DisableTorchFunction():
        tensors = list(tensors)
        require_grad = list(map(bool, each(base.requires_grad.__get__, tensors)))
        leaves = list(compress(tensors, map(not_, require_grad)))
        # Reading the gradient of a tensor that is no leaf would make torch warn.
        gradients = each(base.grad.__get__, leaves)
        with_gradients = compress(leaves, map(is_not, gradients, repeat(None)))
        return [*compress(tensors, require_grad), *with_gradients]


def with_graphs(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that have a graph; a parameter only has a gradient."""
    if not tensors:
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        return list(filter(has_graph, requiring_grad(tensors)))


def kept_by(tensor: Any, nodes: Nodes) -> Iterator[tuple[Any, Any]]:
    """Yield the tensors that a tensor keeps alive in C++, its gradient and those in its graph, each
    with the node that has saved it, which is None for the gradient.

    Args:
        tensor: the tensor.
        nodes: the nodes that the search has read: they are left out, and those of this graph are
            added.
    """
    for gradient in gradient_of(tensor):
        yield None, gradient
    # A view that was changed in place may refuse to return its graph.
    with contextlib.suppress(RuntimeError):
        for node in nodes.of(tensor):
            for saved in saved_by(node):
                yield node, saved


def gradient_of(tensor: Any) -> Iterator[Any]:
    """Yield a tensor's gradient, if it has one."""
    base: Any = sys.modules["torch"].Tensor
    # A view that was changed in place may refuse to return its graph.
    with contextlib.suppress(RuntimeError):
        # Reading the gradient of any other tensor makes torch warn.
        if base.is_leaf.__get__(tensor) or base.retains_grad.__get__(tensor):
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                yield gradient


def saved_by(node: Any) -> Iterator[Any]:
    """Yield the tensors that a node of a graph keeps, once for each reference: those that it has
    saved, without unpacking them, or a leaf and its gradient.
    """
    base: Any = sys.modules["torch"].Tensor
    if is_leaf(node):
        yield node.variable
        gradient = base.grad.__get__(node.variable)
        if gradient is not None:
            yield gradient
        return
    # The node of a user's ``torch.autograd.Function`` is the ``ctx`` on which it sets attributes.
    attributes = instance_dict(node) or {}
    for value in attributes.values():
        if is_instance(value, base):
            yield value
    for name in _names_of_saved(type(node)):
        with contextlib.suppress(RuntimeError):  # freed by a backward pass already
            saved = getattr(node, name)
            saved_tensors = saved if type(saved) is list or type(saved) is tuple else [saved]
            for saved_tensor in saved_tensors:
                # With a hook for saved tensors, as ``save_on_cpu``, this is the hook's result.
                data = getattr(saved_tensor, "data", None)
                if is_instance(data, base):
                    yield data


def _names_of_saved(kind: type) -> Iterator[str]:
    """Yield the attributes of a type of nodes that have saved tensors: ``_raw_saved_self``."""
    for base in type.mro(kind):
        for name in class_dict(base):
            if name.startswith("_raw_saved_"):
                yield name


def kept_by_many(
    tensors: Iterable[Any], nodes: Nodes, *, leaves: bool, allowance: Allowance | None = None
) -> list[Any]:
    """Return the tensors that many tensors keep alive in C++.

    Args:
        tensors: the tensors.
        nodes: the nodes that the search has read: they are left out, and new ones are added.
        leaves: True for the gradients of the leaves among the tensors; False for the tensors in the
            graphs of the other ones.
        allowance: the search ends early once it is spent.
    """
    base: Any = library_type("torch", "Tensor")
    if base is None:
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        kept_tensors = list[Any]()
        for tensor in with_graph_or_gradient(tensors):
            if base.is_leaf.__get__(tensor) != leaves:
                continue
            for _, kept in kept_by(tensor, nodes):
                if allowance is not None and allowance.is_spent():
                    return kept_tensors
                kept_tensors.append(kept)
        return kept_tensors
