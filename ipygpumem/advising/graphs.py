"""Advice on autograd graphs that nothing will go back through: of stored results, of evaluations."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from ipygpumem.advising.flow import Flow, Following, Saved
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import entries
from ipygpumem.advising.records import Finding
from ipygpumem.advising.rewriting import Rewriting, rewritings
from ipygpumem.introspect import instance_dict, name_of
from ipygpumem.objects.arrays import StorageKey, library_type
from ipygpumem.objects.holders.graphs import gradient_behind, saved_by

_MOST_NODES = 200_000
_OTHERS, _SHARED = "others", "shared"


class Graphs:
    """Which storages live only as long as the graphs of some tensors do.

    Each tensor with a graph belongs to one who holds it: a name, a container, an output. What the graphs of one holder
    have saved, and those of nobody else, is freed when the holder lets go of them.
    """

    def __init__(self, look: Look) -> None:
        self._look, self._base = look, library_type("torch", "Tensor")
        self._labels: dict[int, Hashable] = {}
        self.nodes: list[Any] = []
        """Kept, so that identities hold."""
        self.following: Following = {}
        self.saved: Saved = {}
        self._owners: dict[StorageKey, Hashable] = {}
        self._live: list[Any] = []
        """Nodes that have saved something: no backward pass has gone through them."""
        self.complete = True
        self.roots: list[Any] = []
        for tensor in look.tensors:
            node = look.read("grad_fn", tensor) if look.read("requires_grad", tensor) else None
            if node is not None and look.is_held(tensor):
                self.roots.append(tensor)
                self._spread(node, self.holder(tensor))
            gradient = look.read("_grad", tensor) if node is None else None
            if gradient is not None:  # it has a graph of its own after backward(create_graph=True)
                self._spread(look.read("grad_fn", gradient), _OTHERS)
        self._note_saved()

    @functools.cached_property
    def flow(self) -> Flow:
        """The nodes in the order in which they ran; nothing where there are too many of them."""
        nodes = self.nodes if self.complete else []
        return Flow(nodes, self.following, self.saved)

    @functools.cached_property
    def results(self) -> dict[tuple[int, int], set[StorageKey]]:
        """The storages of what nodes have made and is alive, in whatever shape; by a node and its output's number."""
        found: dict[tuple[int, int], set[StorageKey]] = {}
        read = self._look.read
        for tensor in self._look.tensors:
            for shown in (tensor, read("_base", tensor)):
                node = read("grad_fn", shown) if shown is not None else None
                key = self._look.key(tensor) if id(node) in self.following else None
                if key is not None:
                    found.setdefault((id(node), read("output_nr", shown)), set()).add(key)
        return found

    def holder(self, tensor: Any) -> Hashable:
        """Return the identity of the only list, dict or object that holds a tensor, or the tensor's if it is a name."""
        look, referrers = self._look, self._look.referrers(tensor)
        if referrers and all(id(referrer) in look.scope.outputs.keepers for referrer in referrers):
            is_users = any(value is tensor for value in look.names.values())
            return ("name", id(tensor)) if not is_users else _only_name(look, tensor, len(referrers))
        if len(referrers) + look.is_in_frames(tensor) != 1:
            return _OTHERS
        if not referrers or referrers[0] is look.scope.namespace:
            return _only_name(look, tensor, 1)
        return id(referrers[0])

    def _spread(self, node: Any, label: Hashable) -> None:
        waiting = [(node, label)]
        while waiting:
            node, label = waiting.pop()
            old = self._labels.get(id(node))
            new = label if old is None else _SHARED
            if node is None or old in (label, _SHARED):
                continue
            if old is None:
                if len(self.nodes) >= _MOST_NODES:
                    self.complete = False
                    return
                self.nodes.append(node)
                self.following[id(node)] = node.next_functions
            self._labels[id(node)] = new
            waiting += [(following, new) for following, _ in self.following[id(node)]]
            gradient = gradient_behind(self._base, node)
            if gradient is not None:
                waiting.append((self._look.read("grad_fn", gradient), new))

    def _note_saved(self) -> None:
        names: dict[int, list[str]] = {}
        for node in self.nodes:
            label = self._labels[id(node)]
            saved_here = list(saved_by(node, names))
            if not saved_here:
                continue
            if name_of(type(node)) == "AccumulateGrad":
                saved_here.append(gradient_behind(self._base, node))
            else:
                self._live.append(node)
            for saved in saved_here:
                key = None if saved is None else self._look.key(saved)
                if key is not None:
                    self.saved.setdefault(id(node), []).append((key, saved))
                    known = self._owners.setdefault(key, label)
                    self._owners[key] = label if known == label else _SHARED

    def saves(self, key: StorageKey) -> bool:
        """Whether any graph needs a storage."""
        return not self.complete or key in self._owners

    def freed_with(self, holder: Hashable) -> dict[StorageKey, int]:
        """Return the storages, and their bytes, that die with the graphs of one holder."""
        if not self.complete or holder in (_OTHERS, _SHARED):
            return {}
        look = self._look
        return {key: look.sizes[key] for key in self._owned.get(holder, ()) if look.dies(key, set())}

    @functools.cached_property
    def _owned(self) -> dict[Hashable, list[StorageKey]]:
        """The storages by their owners."""
        owned: dict[Hashable, list[StorageKey]] = {}
        for key, owner in self._owners.items():
            owned.setdefault(owner, []).append(key)
        return owned

    @functools.cached_property
    def tensors_of(self) -> Counter[Hashable]:
        """How many tensors with graphs each holder has."""
        return Counter(map(self.holder, self.roots))

    def leaves(self, tensor: Any) -> list[Any]:
        """Return the leaves to which the graph of a tensor leads."""
        return self._leaves_behind([self._look.read("grad_fn", tensor)])

    @functools.cached_property
    def waiting_for_backward(self) -> set[int]:
        """The identities of the leaves whose gradients a backward pass that may still come would change."""
        return set(map(id, self._leaves_behind(self._live)))

    def _leaves_behind(self, nodes: list[Any]) -> list[Any]:
        waiting, seen = list(nodes), dict[int, Any]()  # it keeps the nodes, so that identities hold
        while waiting:
            node = waiting.pop()
            if node is not None and id(node) not in seen:
                seen[id(node)] = node
                known = self.following.get(id(node))
                waiting += [following for following, _ in (node.next_functions if known is None else known)]
        return [node.variable for node in seen.values() if name_of(type(node)) == "AccumulateGrad"]


def _only_name(look: Look, tensor: Any, referrers: int) -> Hashable:
    times = sum(value is tensor for value in list(look.scope.namespace.values())) + look.is_in_frames(tensor)
    return ("name", id(tensor)) if times == 1 and referrers == 1 else _OTHERS


def stored(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield the graphs that results in containers and attributes keep alive: losses, mostly."""
    for one in _with_graphs(look):
        if one.spot.code.isidentifier():
            continue
        holders = {graphs.holder(item) for item in one.items}
        shares = {
            key: size for holder in holders if type(holder) is int for key, size in graphs.freed_with(holder).items()
        }
        if len(one.items) == 1 and (not one.only or any(graphs.tensors_of[holder] != 1 for holder in holders)):
            continue
        yield from look.by_device(
            "stored graph",
            shares,
            _whose(one),
            one.code,
            "if no backward() through it is to come; next time keep loss.item(), or loss.detach()",
        )


def evaluated(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield results of models in eval mode that have built a graph, under a name of the user's."""
    at_rest = _leaves_at_rest(look)
    for one in _with_graphs(look):
        (item, *more) = one.items
        shares = {} if more or not one.spot.code.isidentifier() else graphs.freed_with(graphs.holder(item))
        leaves = graphs.leaves(item) if sum(shares.values()) >= look.least else ()
        if not leaves or any(id(leaf) not in at_rest for leaf in leaves):
            continue
        yield from look.by_device(
            "graph of an evaluation",
            shares,
            f"{one.place} has an autograd graph, of a model in eval mode",
            one.code,
            "if no backward() through it is to come; next time evaluate under torch.inference_mode()",
        )


def _leaves_at_rest(look: Look) -> set[int]:
    """Return the identities of the parameters of modules in eval mode that no module in training has."""
    sets: dict[bool, set[int]] = {True: set(), False: set()}
    for module in look.heap.modules:
        attributes = instance_dict(module) or {}
        parameters = entries(attributes.get("_parameters"))
        sets[attributes.get("training") is not False] |= set(map(id, parameters.values()))
    return sets[False] - sets[True]


def _with_graphs(look: Look) -> Iterator[Rewriting]:
    kind: Any = library_type("torch", "Tensor")
    if kind is not None:
        wanted = [(item, place) for item, place in look.spots(kind) if look.read("grad_fn", item) is not None]
        yield from rewritings(look, wanted, ".detach()")


def _whose(one: Rewriting) -> str:
    if len(one.items) == 1:
        return f"{one.place} keeps its autograd graph"
    return f"{len(one.items):,} tensors in {one.place} keep their autograd graphs"
