"""Names the tensors whose autograd graph or gradient keeps a storage alive.

After ``losses.append(model(x).sum())``, no Python object refers to what the model has saved for
``backward()``: the graph of ``losses[0]`` keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ipygpumem.heap.holders.backward import MOST_VISITS
from ipygpumem.heap.holders.explanation import (
    NOT_REACHED,
    HolderSearch,
    sort_key_of_holder,
)
from ipygpumem.heap.holders.gradients import ClearableGradients
from ipygpumem.heap.holders.graph_keepers import all_keepers, tensors_with_gradients
from ipygpumem.heap.kinds.arrays import StorageKey, memory_key, object_key, storage_key
from ipygpumem.heap.knowledge.graphs import kept_by, with_graph_or_gradient, with_graphs
from ipygpumem.heap.knowledge.nodes import Nodes
from ipygpumem.heap.live.heap import Heap
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
    """A tensor that keeps a storage alive through C++.

    Attributes:
        tensor: the tensor.
        how: the text that follows its path: ``.grad``, or ``: its autograd graph (MulBackward0)``.
        advice: how to free the storage if no line removes the tensor; empty for a gradient.
    """

    tensor: Any
    how: str
    advice: str

    @property
    def is_by_gradient(self) -> bool:
        """True if the storage is that of the tensor's own gradient."""
        return self.how == GRADIENT


class FoundKeepers(NamedTuple):
    """The tensors that keep some storages alive by their graphs or gradients."""

    by_storage: dict[StorageKey, GraphKeeper]
    """One tensor for each storage that has any."""
    are_all_graphs_read: bool
    """True if all graphs were read; False if they have too many nodes."""


def keepers(tensors: Iterable[Any], wanted: set[StorageKey]) -> FoundKeepers:
    """Return one tensor that keeps each of the ``wanted`` storages alive by its graph or gradient,
    if there is one.
    """
    torch: Any = sys.modules["torch"]
    is_leaf = torch.Tensor.is_leaf.__get__
    by_storage = dict[StorageKey, GraphKeeper]()
    nodes_read = Nodes()
    with torch._C.DisableTorchFunction():
        # Leaves first: a leaf with a name is a better answer than a graph that leads to it.
        candidates = sorted(with_graph_or_gradient(tensors), key=lambda tensor: not is_leaf(tensor))
        for tensor in candidates:
            if len(by_storage) == len(wanted):
                break
            own_key = storage_key(tensor)
            for node, kept_tensor in kept_by(tensor, nodes_read):
                key = memory_key(kept_tensor)
                if key not in wanted or key in by_storage:
                    continue
                if (
                    key == own_key
                ):  # the tensor holds it itself, also if ``exp`` has saved its result
                    continue
                if node is None:
                    by_storage[key] = GraphKeeper(tensor, GRADIENT, advice="")
                else:
                    how = f": its autograd graph ({type_name(node)})"
                    by_storage[key] = GraphKeeper(tensor, how, DETACH)
    return FoundKeepers(by_storage, are_all_graphs_read=not nodes_read.is_full)


def graph_holders(keys: set[StorageKey], heap: Heap, roots: Roots) -> dict[StorageKey, Holder]:
    """Return the holder of each storage that autograd keeps, a tensor with its graph or gradient;
    without the storages for which there is no advice.
    """
    result = search_graph_holders(keys, heap, roots, MOST_VISITS, is_limited=False)
    return {key: holder for key, holder in result.holders.items() if holder.remedy.text}


class GraphHolders(NamedTuple):
    """The holders of storages that autograd keeps."""

    holders: dict[StorageKey, Holder]
    """The tensor whose graph or gradient keeps each storage, with the line that frees it."""
    is_limited: bool
    """True if some holders may not have been reached, by this search or by the one before it."""


def search_graph_holders(
    missing: set[StorageKey],
    heap: Heap,
    roots: Roots,
    max_visits: int,
    *,
    is_limited: bool,
    holders_that_free: Mapping[StorageKey, Holder] | None = None,
) -> GraphHolders:
    """Return the holders of the ``missing`` storages that autograd keeps.

    Args:
        missing: storages to which no root leads.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine.
        is_limited: True if an earlier search has not reached everything.
        holders_that_free: holders whose lines remove tensors from all places, by the tensors'
            storages: the gradients of these tensors die with them.
    """
    tensors = _TensorsWithHolders(heap, roots, max_visits)
    found = keepers(tensors.with_holder, missing)
    holders = _holders_of_kept(found.by_storage, tensors, missing, roots, holders_that_free or {})
    if tensors.is_limited or not found.are_all_graphs_read:
        is_limited = True
    for key in _storages_in_cycles(heap, missing - found.by_storage.keys()):
        # If a search was cut short, the holder may be a tensor that it has not reached.
        holders[key] = NOT_REACHED if is_limited else _CYCLE
    return GraphHolders(holders, is_limited)


def _holders_of_kept(
    keeper_by_storage: Mapping[StorageKey, GraphKeeper],
    tensors: _TensorsWithHolders,
    missing: Set[StorageKey],
    roots: Roots,
    holders_that_free: Mapping[StorageKey, Holder],
) -> dict[StorageKey, Holder]:
    """Return the holder of each storage that a tensor keeps: all places of all tensors whose graphs
    keep it, because the storage is only freed if none of these graphs is left.

    Args:
        keeper_by_storage: one tensor that keeps each storage.
        tensors: all tensors that may keep one, with their holders.
        missing: as in ``search_graph_holders``, like the remaining arguments.
        roots: the names and objects from which the user can reach objects.
        holders_that_free: holders whose lines remove tensors from all places.
    """
    in_graphs = [key for key, keeper in keeper_by_storage.items() if not keeper.is_by_gradient]
    all_keepers_of = all_keepers(tensors.with_holder, in_graphs)  # None: too many to name all
    owner_keys = _keys_of_owners(keeper_by_storage, all_keepers_of or {})
    kept_storages = _KeptStorages(
        tensors.search,
        tensors.holders_with_all_places_of(owner_keys),
        ClearableGradients(missing, roots.lines.ages),
        holders_that_free,
    )
    tensors_by_gradient = tensors_with_gradients(tensors.with_holder, keeper_by_storage)
    holders = dict[StorageKey, Holder]()
    for key, keeper in keeper_by_storage.items():
        if keeper.is_by_gradient:
            holders[key] = kept_storages.holder_by_gradient(keeper, tensors_by_gradient[key])
        else:
            all_of_storage = None if all_keepers_of is None else all_keepers_of[key]
            holders[key] = kept_storages.holder_by_graph(keeper, all_of_storage)
    return holders


class _TensorsWithHolders:
    """The tensors that have a graph or may have a gradient, and their holders.

    After ``losses.append(model(x).sum())``, the loss is such a tensor, and its holder is the list.
    A result inside the model, which the graph has saved, may be a Python object, too; but no list
    or variable refers to it. It has no holder, so it is not one of ``with_holder``.

    Args:
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine.

    Attributes:
        search: the search for the holders.
        with_holder: the tensors with a holder, the tensor with the best holder first.
        is_limited: True if some tensors or holders may be missing.
    """

    def __init__(self, heap: Heap, roots: Roots, max_visits: int) -> None:
        candidates = with_graph_or_gradient(heap.tensors)
        tensors_by_key = {object_key(tensor): [tensor] for tensor in candidates[:_MOST_OWNERS]}
        self.search = HolderSearch(tensors_by_key, heap, roots, max_visits, of_graphs=True)
        self._explanation = self.search.explain()
        holders = self._explanation.from_roots
        ordered_keys = sorted(holders, key=lambda key: sort_key_of_holder(holders[key]))
        self.with_holder = [tensors_by_key[key][0] for key in ordered_keys]
        self.is_limited = self._explanation.is_limited or len(candidates) > _MOST_OWNERS

    def holders_with_all_places_of(self, keys: Set[StorageKey]) -> dict[StorageKey, Holder]:
        """Return the holder of each tensor, by the tensor's key. It names all places of a tensor in
        ``keys``, but only the nearest place of any other tensor.
        """
        removals = self._explanation.removals
        wanted = {key: removal for key, removal in removals.items() if key in keys}
        return {**self._explanation.from_roots, **self.search.holders_in_all_places(wanted)}


def with_saving_graphs(
    holders: Mapping[StorageKey, Holder],
    keys: set[StorageKey],
    heap: Heap,
    roots: Roots,
    max_visits: int,
) -> dict[StorageKey, Holder]:
    """Return the holders of storages that graphs have saved, too, with the line that also removes
    the graphs: ``del batch, loss`` after ``loss = model(batch).sum()``.

    Storages that no graph has saved are left out.

    Args:
        holders: the holder of each storage, to which a root leads.
        keys: the storages.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine.
    """
    of_graphs = _holders_of_saving_graphs(keys, heap, roots, max_visits)
    return {
        key: _with_graph_holders(holders[key], graph_holders)
        for key, graph_holders in of_graphs.items()
    }


def _holders_of_saving_graphs(
    keys: set[StorageKey], heap: Heap, roots: Roots, max_visits: int
) -> dict[StorageKey, list[Holder]]:
    """Return the holders of the tensors whose graphs have saved storages, by storage; none if there
    are too many graphs to read each.

    The storages have other holders, as after ``runs.append({"batch": x, "pred": model(x)})``.
    """
    candidates = with_graphs(heap.tensors) if keys else []
    if len(candidates) > _MOST_GRAPHS:
        return {}
    tensors_by_storage = _tensors_whose_graphs_saved(keys, candidates)
    tensors_by_key = dict[StorageKey, list[object]]()
    for tensors in tensors_by_storage.values():
        tensors_by_key.update((object_key(tensor), [tensor]) for tensor in tensors)
    search = HolderSearch(tensors_by_key, heap, roots, max_visits, of_graphs=True)
    holder_by_tensor = search.explain().from_roots
    holders = dict[StorageKey, list[Holder]]()
    for key, tensors in tensors_by_storage.items():
        holders_of_tensors = map(holder_by_tensor.get, map(object_key, tensors))
        holders[key] = [holder for holder in holders_of_tensors if holder is not None]
    return holders


def _tensors_whose_graphs_saved(
    keys: set[StorageKey], tensors: Sequence[object]
) -> dict[StorageKey, list[object]]:
    """Return the tensors whose graphs have saved each of some storages.

    A tensor on the storage itself is left out, although its graph may have saved it, as that of
    ``y = x.exp()`` has saved ``y``: it is one of the storage's holders without its graph, too.
    """
    tensors_by_storage = dict[StorageKey, list[object]]()
    for tensor in tensors:
        found = keepers([tensor], keys - {storage_key(tensor)})
        for key, keeper in found.by_storage.items():
            if not keeper.is_by_gradient:
                tensors_by_storage.setdefault(key, []).append(tensor)
    return tensors_by_storage


def _with_graph_holders(holder: Holder, of_graphs: Sequence[Holder]) -> Holder:
    """Return the holder of a storage that graphs have saved, with the line that also removes the
    graphs: ``del batch, loss`` after ``loss = model(batch).sum()``.

    Args:
        holder: the holder, such as the variable ``batch``.
        of_graphs: the holders of tensors with such graphs, such as the variable ``loss``.
    """
    if not of_graphs:
        return holder
    path = f"{holder.path}, {of_graphs[0].path}: its autograd graph"
    if len(of_graphs) > 1:
        path += f", and {len(of_graphs) - 1} more"
    remedy = _remedy_of_all([each.remedy for each in (holder, *of_graphs)])
    return Holder(path, remedy, holder.roots + of_graphs[0].roots)


def _remedy_of_all(remedies: Sequence[Remedy]) -> Remedy:
    """Return the remedy that does the work of several: one line, with words in its comment for the
    remedies without a line; words alone if there is no such line.

    An example is ``del runs[0]["pred"], x  # and call tensor.detach()``.
    """
    by_line = {remedy.line: remedy for remedy in remedies}
    is_kept_anyway = "" in by_line  # by a model that needs it: the other lines would free nothing
    if is_kept_anyway:
        return NO_REMEDY
    statements = [remedy for remedy in by_line.values() if remedy.is_simple]
    words = [line for line, remedy in by_line.items() if not remedy.is_code]
    # What is neither a statement nor words is a magic or a loop: no statement can follow it.
    has_magic_or_loop = len(statements) + len(words) < len(by_line)
    if not statements or has_magic_or_loop:
        return Remedy("remove it from all of these")
    cuts = _cuts_of(statements)
    line = statement_of(cuts) or in_sequence([remedy.line for remedy in statements])
    first_comment = f"and {', and '.join(words)}" if words else ""
    return Remedy(line, comments_of(remedies, first=first_comment), tuple(cuts))


class _KeptStorages:
    """Names the holders of storages that tensors keep by their graphs or gradients.

    Args:
        search: the search for the holders of the tensors.
        tensor_holders: the holder of each tensor, by its key.
        gradients: decides which gradients lines may clear.
        holders_that_free: as in ``search_graph_holders``.
    """

    def __init__(
        self,
        search: HolderSearch,
        tensor_holders: Mapping[StorageKey, Holder],
        gradients: ClearableGradients,
        holders_that_free: Mapping[StorageKey, Holder],
    ) -> None:
        self._search = search
        self._tensor_holders = tensor_holders
        self._gradients = gradients
        self._holders_that_free = holders_that_free

    def holder_by_graph(self, keeper: GraphKeeper, tensors: Sequence[object] | None) -> Holder:
        """Return the holder of a storage that graphs keep.

        Args:
            keeper: one tensor with such a graph.
            tensors: all tensors with such a graph; None if ``all_keepers`` has found too many.
        """
        owner = self._tensor_holders[object_key(keeper.tensor)]
        remedy = owner.remedy if owner.remedy.text else Remedy(keeper.advice)
        holder = replace(owner, path=owner.path + keeper.how, remedy=remedy)
        if tensors is None:
            return replace(holder, remedy=remedy.with_comment(_MORE_GRAPHS))
        all_owners = [self._tensor_holders[object_key(tensor)] for tensor in tensors]
        return _with_other_keepers(holder, owner, all_owners)

    def holder_by_gradient(self, keeper: GraphKeeper, tensors: Sequence[object]) -> Holder:
        """Return the holder of a storage on which gradients are.

        Args:
            keeper: one tensor with such a gradient.
            tensors: all tensors with such a gradient.
        """
        tensor_key = storage_key(keeper.tensor)
        if tensor_key is not None and tensor_key in self._holders_that_free:
            # The line removes the tensor anyway, and the gradient dies with it.
            return self._holders_that_free[tensor_key]
        owners = [self._tensor_holders[object_key(tensor)] for tensor in tensors]
        path = owners[0].path + GRADIENT
        if len(owners) > 1:
            path += f", and {len(owners) - 1} more"
        return replace(owners[0], path=path, remedy=Remedy(self._clearing_line(tensors, owners)))

    def _clearing_line(self, tensors: Sequence[object], owners: Sequence[Holder]) -> str:
        """Return the line that clears the gradients of tensors, ``model.zero_grad()`` or
        ``x.grad = None``. Without a line, return words for several tensors, and nothing for one.

        Args:
            tensors: the tensors.
            owners: their holders, in the same order.
        """
        # One training step makes all gradients of a model, so one call may clear all of them.
        path_to_trained = self._search.path_of_trained(tensors, self._gradients)
        line = _statement_on(path_to_trained, ".zero_grad()")
        if line:
            return line
        lines = [_statement_on(owner.path, f"{GRADIENT} = None") for owner in owners]
        if len(lines) <= _MOST_LINES and all(lines):
            return in_sequence(lines)
        return _CLEAR_THEM if len(lines) > 1 else ""


def _storages_in_cycles(heap: Heap, keys: set[StorageKey]) -> Iterable[StorageKey]:
    """Return the storages that are kept only by tensors to which nothing refers: a cycle in torch's
    own code with a gradient in it.

    Args:
        heap: the live objects, with all tensors.
        keys: the storages that no tensor with a holder keeps.
    """
    keeper_by_storage = keepers(heap.tensors, keys).by_storage
    # A graph without a gradient forms no cycle: something out of sight keeps its tensor.
    if any(keeper.is_by_gradient for keeper in keeper_by_storage.values()):
        return keeper_by_storage
    return ()


def _keys_of_owners(
    keeper_by_storage: Mapping[StorageKey, GraphKeeper],
    all_keepers_of: Mapping[StorageKey, Sequence[object]],
) -> set[StorageKey]:
    """Return the keys of all tensors that must lose their graphs, so that the graphs keep none of
    the storages.

    Args:
        keeper_by_storage: one tensor that keeps each storage.
        all_keepers_of: all tensors whose graphs keep each storage; empty if they are too many.
    """
    owner_keys = set[StorageKey]()
    for key, keeper in keeper_by_storage.items():
        if not keeper.is_by_gradient:
            tensors = [keeper.tensor, *all_keepers_of.get(key, ())]
            owner_keys.update(object_key(tensor) for tensor in tensors)
    return owner_keys


def _with_other_keepers(holder: Holder, owner: Holder, owners: Sequence[Holder]) -> Holder:
    """Return the holder of a storage that several graphs keep, with the line that removes all of
    their tensors if there is one.

    Args:
        holder: the holder, whose advice removes one tensor.
        owner: the holder of that tensor.
        owners: the holders of all tensors.
    """
    remedies = list({each.remedy.line: each.remedy for each in owners}.values())
    is_one_line_enough = len(remedies) < 2  # all tensors are in one list: ``losses.clear()``
    removes_no_tensor = holder.remedy != owner.remedy  # its advice is to detach
    if is_one_line_enough or removes_no_tensor:
        return holder
    path = f"{holder.path}, and {len(remedies) - 1} more"
    if not all(remedy.is_simple for remedy in remedies):
        return replace(holder, path=path, remedy=_REMOVE_GRAPHS)
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
    """Return the references that the lines of all remedies remove; none if one of the remedies is
    words, or a line that does anything else.
    """
    cuts = list[Cut]()
    for remedy in remedies:
        if not remedy.removed:
            return []
        cuts += remedy.removed
    return cuts


def _statement_on(path: str, ending: str) -> str:
    """Return the code for the object at the path of a holder, followed by an ending; empty if the
    path is no code. An example is ``model.zero_grad()`` for "notebook variable model".
    """
    code = path.removeprefix(NOTEBOOK)
    begins_with_code = code != path or OUTPUT.match(code) is not None
    if not begins_with_code:
        return ""
    # ": closure of ...", " (in a set)", and the end of a path that was too long
    has_words = ": " in code or " (" in code or "…" in code
    return "" if has_words else f"{code}{ending}"
