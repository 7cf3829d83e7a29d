"""Reads which tensors an autograd graph keeps in C++: saved for a backward pass, as a gradient, or
as a graph's leaf.

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
from ipygpumem.heap.arrays import library_type
from ipygpumem.heap.knowledge.nodes import Nodes, has_graph, is_leaf
from ipygpumem.heap.tensors import each
from ipygpumem.introspect import class_dict, instance_dict, is_instance


def requiring_grad(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that have a graph or may have a gradient."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        tensors = list(tensors)
        return list(compress(tensors, map(torch.Tensor.requires_grad.__get__, tensors)))


def with_graph_or_gradient(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that have a graph or may have a gradient, and those with a gradient that
    require none now: ``requires_grad_(False)`` after a backward pass leaves it.
    """
    base: Any = sys.modules["torch"].Tensor
    with sys.modules["torch"]._C.DisableTorchFunction():
        tensors = list(tensors)
        require_grad = list(map(bool, each(base.requires_grad.__get__, tensors)))
        without = list(compress(tensors, map(not_, require_grad)))
        # Each of these is a leaf: reading the gradient of any other tensor makes torch warn.
        gradients = each(base.grad.__get__, without)
        frozen = compress(without, map(is_not, gradients, repeat(None)))
        return [*compress(tensors, require_grad), *frozen]


def with_graphs(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that have a graph; a parameter only has a gradient."""
    if not tensors:
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        return list(filter(has_graph, requiring_grad(tensors)))


def behind(tensor: Any, seen: Nodes) -> Iterator[tuple[Any, Any]]:
    """Yield the tensors that a tensor keeps alive in C++, each with its node; None for the tensor's
    gradient.

    Skips the nodes in ``seen``, and adds the new ones, so that their identities are not reused.
    """
    for gradient in gradient_of(tensor):
        yield None, gradient
    # A view that was changed in place may refuse to return its graph.
    with contextlib.suppress(RuntimeError):
        for node in seen.of(tensor):
            for item in saved_by(node):
                yield node, item


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
    """Yield the tensors that a node has saved, once per reference, without unpacking them; a leaf's
    gradient too.
    """
    base: Any = sys.modules["torch"].Tensor
    if is_leaf(node):
        gradient = base.grad.__get__(node.variable)
        yield from (node.variable,) if gradient is None else (node.variable, gradient)
        return
    attributes = instance_dict(node) or {}  # that the user's Function set on its ctx
    for value in attributes.values():
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
        for tensor in with_graph_or_gradient(tensors):
            if base.is_leaf.__get__(tensor) != leaves:
                continue
            for _, kept in behind(tensor, seen):
                if allowance is not None and allowance.is_spent():
                    return kept_tensors
                kept_tensors.append(kept)
        return kept_tensors
