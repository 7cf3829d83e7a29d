"""Finds the tensors whose autograd graph or gradient keeps a storage alive."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ipygpumem.heap.arrays import StorageKey, memory_key, object_key, storage_key
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.backward import MOST_VISITS
from ipygpumem.heap.holders.explanation import (
    NOT_REACHED,
    Explanation,
    order_of_holder,
)
from ipygpumem.heap.holders.gradients import ClearableGradients
from ipygpumem.heap.holders.graph_keepers import all_keepers, tensors_by_gradient
from ipygpumem.heap.knowledge.graphs import behind, with_graph_or_gradient, with_graphs
from ipygpumem.heap.knowledge.nodes import Nodes
from ipygpumem.heap.paths.cuts import Cut, in_sequence
from ipygpumem.heap.paths.remedies import NO_REMEDY, Holder, Remedy, comments_of
from ipygpumem.heap.paths.roots import NOTEBOOK, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.torch_steps import DETACH
from ipygpumem.introspect import type_name
from ipygpumem.notebook import OUTPUT

GRADIENT = ".grad"
"""Follows the path of a tensor whose gradient keeps a storage."""
_MOST_OWNERS = 5000
"""Maximum number of tensors whose graphs are searched."""
_MOST_GRAPHS = 50
"""Maximum number of tensors with graphs of which each is asked whether it has saved something that
also has other holders.
"""
_MOST_LINES = 4
"""Maximum number of lines that are joined if no statement does the work of all."""
_MORE_GRAPHS = "other graphs may keep it, too"
_REMOVE_GRAPHS = Remedy(
    "remove all of these tensors, or keep tensor.detach() or loss.item() instead of them"
)
_CLEAR_THEM = "set .grad of all these tensors to None"
_CYCLE = Holder(
    "a cycle in torch's own C++ code: a gradient that has a graph, "
    "as after backward(create_graph=True)",
    Remedy("set .grad to None before you delete the tensor"),
)


@dataclass(frozen=True)
class GraphKeeper:
    """A tensor that keeps a storage alive through C++, and how: ``how`` follows the
    tensor's path.
    """

    tensor: Any
    how: str
    advice: str


def keepers(
    tensors: Iterable[Any], wanted: set[StorageKey]
) -> tuple[dict[StorageKey, GraphKeeper], bool]:
    """Return the tensor that keeps each of the ``wanted`` storages alive, and True if all graphs
    were seen.
    """
    torch: Any = sys.modules["torch"]
    by_storage: dict[StorageKey, GraphKeeper] = {}
    seen = Nodes()
    with torch._C.DisableTorchFunction():
        # Leaves first: a leaf with a name is a better answer than a graph that leads to it.
        for tensor in sorted(
            with_graph_or_gradient(tensors),
            key=lambda tensor: not torch.Tensor.is_leaf.__get__(tensor),
        ):
            if len(by_storage) == len(wanted):
                continue
            own_key = storage_key(tensor)
            for node, kept in behind(tensor, seen):
                key = memory_key(kept)
                if key not in wanted or key in by_storage:
                    continue
                if key == own_key:  # it holds it itself: a view, or ``exp`` has saved its result
                    continue
                if node is None:
                    by_storage[key] = GraphKeeper(tensor, GRADIENT, "")
                else:
                    how = f": its autograd graph ({type_name(node)})"
                    by_storage[key] = GraphKeeper(tensor, how, DETACH)
    return by_storage, not seen.is_full


def graph_holders(keys: set[StorageKey], heap: Heap, roots: Roots) -> dict[StorageKey, Holder]:
    """Return the tensors whose graphs keep storages alive, where they are known."""
    holders, _ = search_graph_holders(keys, heap, roots, MOST_VISITS, is_limited=False)
    return {key: holder for key, holder in holders.items() if holder.remedy.text}


def search_graph_holders(
    missing: set[StorageKey],
    heap: Heap,
    roots: Roots,
    max_visits: int,
    *,
    is_limited: bool,
    holders_that_free: Mapping[StorageKey, Holder] | None = None,
) -> tuple[dict[StorageKey, Holder], bool]:
    """Return the holders of the ``missing`` storages that autograd keeps.

    The second item is True if some holders may not have been reached: ``is_limited``, or now.

    Args:
        missing: the storages.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine.
        is_limited: True if an earlier search has not reached everything.
        holders_that_free: holders whose lines remove tensors from all places, by the tensors'
            storages: the gradients of these tensors die with them.
    """
    # A tensor saved by a graph may also be a Python object that only the graph refers to, which is
    # no answer.
    candidates = with_graph_or_gradient(heap.tensors)
    owners = {object_key(tensor): [tensor] for tensor in candidates[:_MOST_OWNERS]}
    explanation = Explanation(owners, heap, roots, max_visits, of_graphs=True)
    explanation.explain()
    named = explanation.named
    ordered = sorted(named, key=lambda owner: order_of_holder(named[owner]))
    tensors = [owners[owner][0] for owner in ordered]
    kept, is_complete = keepers(tensors, missing)
    in_graphs = [key for key, keeper in kept.items() if keeper.how != GRADIENT]
    keepers_of = all_keepers(tensors, in_graphs)
    explanation.add_other_holders(_owners_of_graphs(kept, keepers_of or {}))
    trained = tensors_by_gradient(tensors, kept)
    gradients = ClearableGradients(missing, roots.ages)
    holders = _holders_of_storages(
        kept, keepers_of, trained, explanation, gradients, holders_that_free or {}
    )
    if explanation.is_limited or not is_complete or len(candidates) > _MOST_OWNERS:
        is_limited = True
    for key in _storages_in_cycles(heap, missing - kept.keys()):
        holders[key] = NOT_REACHED if is_limited else _CYCLE
    return holders, is_limited


def holders_of_saving_graphs(
    keys: set[StorageKey], heap: Heap, roots: Roots, max_visits: int
) -> dict[StorageKey, list[Holder]]:
    """Return the holders of the tensors whose graphs have saved some storages, by storage; none if
    there are too many to ask each.

    The storages have other holders, as after ``runs.append({"batch": x, "pred": model(x)})``.
    """
    candidates = with_graphs(heap.tensors) if keys else []
    if len(candidates) > _MOST_GRAPHS:
        return {}
    saved_by = dict[StorageKey, list[object]]()
    for tensor in candidates:
        for key, keeper in keepers([tensor], keys)[0].items():
            if keeper.how != GRADIENT:
                saved_by.setdefault(key, []).append(tensor)
    owners = {object_key(item): [item] for items in saved_by.values() for item in items}
    explanation = Explanation(owners, heap, roots, max_visits, of_graphs=True)
    explanation.explain()
    holders = dict[StorageKey, list[Holder]]()
    for key, items in saved_by.items():
        named = [explanation.named.get(object_key(item)) for item in items]
        holders[key] = [holder for holder in named if holder is not None]
    return holders


def with_graph_holders(holder: Holder, of_graphs: Sequence[Holder]) -> Holder:
    """Return the holder of a storage that graphs have saved, with the line that also removes the
    graphs.

    Args:
        holder: the holder.
        of_graphs: the holders of tensors with such graphs.
    """
    if not of_graphs:
        return holder
    path = f"{holder.path}, {of_graphs[0].path}: its autograd graph"
    if len(of_graphs) > 1:
        path += f", and {len(of_graphs) - 1} more"
    roots = holder.roots + of_graphs[0].roots
    of_all = [each.remedy for each in (holder, *of_graphs)]
    by_line = {remedy.line: remedy for remedy in of_all}
    if "" in by_line:  # a model needs it: the other lines would free nothing
        return Holder(path, NO_REMEDY, roots)
    remedies = [remedy for remedy in by_line.values() if remedy.is_simple]
    words = [line for line, remedy in by_line.items() if not remedy.is_code]
    if not remedies or len(remedies) + len(words) < len(by_line):
        return Holder(path, Remedy("remove it from all of these"), roots)
    cuts = _cuts_of(remedies)
    line = statement_of(cuts) or in_sequence([remedy.line for remedy in remedies])
    first = f"and {', and '.join(words)}" if words else ""
    return Holder(path, Remedy(line, comments_of(of_all, first=first), tuple(cuts)), roots)


def _holders_of_storages(
    kept: Mapping[StorageKey, GraphKeeper],
    keepers_of: Mapping[StorageKey, Sequence[object]] | None,
    trained: Mapping[StorageKey, Sequence[object]],
    explanation: Explanation,
    gradients: ClearableGradients,
    holders_that_free: Mapping[StorageKey, Holder],
) -> dict[StorageKey, Holder]:
    """Return the holders of storages that graphs and gradients keep.

    Args:
        kept: one tensor that keeps each storage.
        keepers_of: all tensors that keep each storage in a graph; None if they are not known.
        trained: the tensors whose gradients are on a storage.
        explanation: has the holders of these tensors.
        gradients: tells which gradients lines may clear.
        holders_that_free: as in ``search_graph_holders``.
    """
    holders = dict[StorageKey, Holder]()
    for key, keeper in kept.items():
        tensor_key = storage_key(keeper.tensor)
        if keeper.how == GRADIENT and tensor_key is not None and tensor_key in holders_that_free:
            holders[key] = holders_that_free[tensor_key]
            continue
        if keeper.how == GRADIENT:
            holders[key] = _holder_of_gradients(trained[key], explanation, gradients)
            continue
        owner = explanation.named[object_key(keeper.tensor)]
        owners_of_all = list[Holder]()
        for tensor in (keepers_of or {}).get(key, ()):
            owners_of_all.append(explanation.named[object_key(tensor)])
        holder = _holder_of_graph(keeper, owner)
        holders[key] = _with_other_keepers(holder, owner, owners_of_all)
        if keepers_of is None:
            remedy = holders[key].remedy.with_comment(_MORE_GRAPHS)
            holders[key] = replace(holders[key], remedy=remedy)
    return holders


def _storages_in_cycles(heap: Heap, keys: set[StorageKey]) -> Iterable[StorageKey]:
    """Return the storages that tensors keep to which nothing refers: a cycle in torch's own code
    with a gradient in it.
    """
    among_themselves, _ = keepers(heap.tensors, keys)
    if any(keeper.how == GRADIENT for keeper in among_themselves.values()):
        return among_themselves
    return ()


def _owners_of_graphs(
    kept: Mapping[StorageKey, GraphKeeper], keepers_of: Mapping[StorageKey, Sequence[object]]
) -> set[StorageKey]:
    """Return the keys of all tensors that must lose their graphs, so that these keep nothing."""
    owners = set[StorageKey]()
    for key, keeper in kept.items():
        if keeper.how != GRADIENT:
            tensors = [keeper.tensor, *keepers_of.get(key, ())]
            owners.update(object_key(tensor) for tensor in tensors)
    return owners


def _with_other_keepers(holder: Holder, owner: Holder, owners: Sequence[Holder]) -> Holder:
    """Return the holder of a storage that several graphs keep, with the line that removes all of
    their tensors if there is one.

    Args:
        holder: the holder, whose advice removes one tensor.
        owner: the holder of that tensor.
        owners: the holders of all tensors.
    """
    remedies = list({each.remedy.line: each.remedy for each in owners}.values())
    if len(remedies) < 2 or holder.remedy != owner.remedy:
        return holder
    path = f"{holder.path}, and {len(remedies) - 1} more"
    cuts = list[Cut]()
    line = ""
    if all(remedy.is_simple for remedy in remedies):
        cuts = _cuts_of(remedies)
        line = statement_of(cuts)
        if not line and len(remedies) <= _MOST_LINES:
            cuts = []
            line = in_sequence([remedy.line for remedy in remedies])
    if not line:
        return replace(holder, path=path, remedy=_REMOVE_GRAPHS)
    remedy = Remedy(line, holder.remedy.comment, tuple(cuts))
    return replace(holder, path=path, remedy=remedy)


def _cuts_of(remedies: Iterable[Remedy]) -> list[Cut]:
    """Return the references that some lines remove; none if those of one line are not known."""
    cuts = list[Cut]()
    for remedy in remedies:
        if not remedy.removed:
            return []
        cuts += remedy.removed
    return cuts


def _holder_of_graph(keeper: GraphKeeper, owner: Holder) -> Holder:
    """Return the holder of a storage that the graph of a tensor keeps.

    Args:
        keeper: the tensor.
        owner: the holder of the tensor.
    """
    remedy = owner.remedy if owner.remedy.text else Remedy(keeper.advice)
    return replace(owner, path=owner.path + keeper.how, remedy=remedy)


def _holder_of_gradients(
    tensors: Sequence[object], explanation: Explanation, gradients: ClearableGradients
) -> Holder:
    """Return the holder of a storage on which are the gradients of some tensors.

    Args:
        tensors: the tensors.
        explanation: has their holders.
        gradients: tells which gradients lines may clear.
    """
    owners = [explanation.named[object_key(tensor)] for tensor in tensors]
    path = owners[0].path + GRADIENT
    if len(owners) > 1:
        path += f", and {len(owners) - 1} more"
    # One step makes all gradients of a module or optimizer.
    line = _statement_on(explanation.path_of_trained(tensors, gradients), ".zero_grad()")
    if not line:
        lines = [_statement_on(owner.path, f"{GRADIENT} = None") for owner in owners]
        if len(lines) <= _MOST_LINES and all(lines):
            line = in_sequence(lines)
        elif len(lines) > 1:
            line = _CLEAR_THEM
    return replace(owners[0], path=path, remedy=Remedy(line))


def _statement_on(path: str, ending: str) -> str:
    """Return the code at a path with an ending; empty if there is no code."""
    code = path.removeprefix(NOTEBOOK)
    is_code = code != path or OUTPUT.match(code) is not None
    if is_code and ": " not in code and " (" not in code and "…" not in code:
        return f"{code}{ending}"
    return ""
