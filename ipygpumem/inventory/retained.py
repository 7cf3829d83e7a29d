"""Finds memory kept by mistake: autograd graphs of stored results and evaluations, outputs, caches.

No user code runs, and nothing is changed.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import (
    StorageKey,
    describe,
    is_array,
    owner_of,
    place_of,
    read_array,
    storage_key,
)
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.graphs import of_script, saved_by
from ipygpumem.heap.holders.nodes import Nodes, has_graph, is_leaf
from ipygpumem.heap.walk import NamedArrays
from ipygpumem.introspect import instance_dict, is_instance, name_of, type_name
from ipygpumem.inventory.survey import torch_reader
from ipygpumem.probes.allocator import snapshots

_MOST_NODES = 1_000_000
_OTHERS = ""
"""Owner of the graph nodes that may still be needed."""
_ROOT = re.compile(r"Out\[\d+\]|\w+")
_LAST_STEP = re.compile(r"""\[("[^"]*"|[^\[\]"]*)\]$|[.][^.\[\]"]+$""")
_NO_CODE = re.compile(r"[<{…'\\]|cell_contents|_hooks\[")
"""Marks a path that cannot be assigned to as written; a key's quotes are shown as apostrophes."""


def paths_of(
    names: Mapping[str, object], outputs: Mapping[str, object]
) -> tuple[dict[int, str], set[int]]:
    """Return the paths of arrays by identity, and the identities of all objects that only
    ``outputs`` lead to.

    Call it before listing the heap: reading an object's attributes may create a dict.
    """
    walk = NamedArrays()
    walk.named(names.items())
    known = set(walk.seen)
    walk.named(outputs.items())
    walk.drop()
    return walk.paths, walk.seen - known


class Finding(NamedTuple):
    """Memory kept alive on one device, and a remedy."""

    device: str
    shares: dict[StorageKey, int]
    """Bytes by storage."""
    what: str
    remedy: str


class _Root(NamedTuple):
    """A tensor whose graph may not be needed, and the statement that would not store the graph."""

    node: Any
    path: str
    instead: str
    kind: str


class Retained:
    """Memory that the user's names and IPython's outputs keep alive; drop it with the heap."""

    def __init__(
        self,
        heap: Heap,
        paths: Mapping[int, str],
        outputs: Mapping[str, object],
        inside_outputs: Collection[int],
    ) -> None:
        self._heap, self._paths, self._outputs = heap, paths, outputs
        self._inside_outputs, self._in_frames, self.complete = (
            inside_outputs,
            set(map(id, heap.local)),
            True,
        )
        self._sizes: dict[StorageKey, tuple[str, int]] = {}
        self._shown_by: dict[StorageKey, list[Any]] = {}
        self._locked: set[StorageKey | None] = set()
        """Storages that code out of sight may keep alive."""
        self._graphs_of_outputs: dict[str, list[StorageKey]] = {}
        self._referrers: Mapping[int, Sequence[Any]] = {}
        """The objects that refer to each object that was asked about, by its identity."""
        self._tensor_ids = set(map(id, heap.tensors))
        with torch_reader() as reader:
            self._read = (lambda name, tensor: None) if reader is None else reader.read
            tensors = (
                []
                if reader is None
                else [item for item in heap.tensors if reader.memory(item).is_plain]
            )
            self._lock(set() if reader is None else set(map(reader.address_of_others, tensors)))
            self.graphs = list(self._graphs())

    def _lock(self, foreign: set[int | None]) -> None:
        """Record the arrays on each storage; lock NumPy's memory in torch, and memory that no array
        owns.
        """
        for item in (*self._heap.tensors, *self._heap.ndarrays):
            self._shown_by.setdefault(self._key(item), []).append(item)
        for array in self._heap.ndarrays:
            owner = owner_of(array)
            if (
                not is_array(owner)
                or not read_array("flags", owner).owndata
                or place_of(owner)[1] in foreign
            ):
                self._locked.add(self._key(array))

    def _key(self, item: object) -> StorageKey:
        found = describe(item)
        if found is None:
            return "object", id(item)
        self._sizes[found.storage] = found.device, found.size_bytes
        return found.storage

    def _ask_about(self, items: Iterable[object]) -> None:
        """Find the objects that refer to some items: all at once, because each search passes over
        the heap.
        """
        self._referrers = self._heap.referrers_of({id(item): item for item in items})

    def _is_held(self, item: object, inside: Collection[int] = ()) -> bool:
        """Return True if any Python object, except those ``inside``, refers to an object."""
        return id(item) in self._in_frames or any(
            id(one) not in inside for one in self._referrers_of(item)
        )

    def _referrers_of(self, item: object) -> list[Any]:
        """Return the objects that refer to an item, without tensors: C++ code holds a tensor's
        gradient.
        """
        return [one for one in self._referrers.get(id(item), ()) if id(one) not in self._tensor_ids]

    def _dies(self, key: StorageKey, inside: Collection[int]) -> bool:
        """Return True if a storage is freed with the objects ``inside``."""
        is_held = any(self._is_held(item, inside) for item in self._shown_by.get(key, ()))
        return key in self._sizes and key not in self._locked and not is_held

    def _findings(self, keys: Iterable[StorageKey], what: str, remedy: str) -> Iterator[Finding]:
        by_device: dict[str, dict[StorageKey, int]] = {}
        for key in keys:
            device, size = self._sizes[key]
            by_device.setdefault(device, {})[key] = size
        yield from (
            Finding(device, shares, what, remedy) for device, shares in sorted(by_device.items())
        )

    # -- graphs ----------------------------------------------------------------------------------

    def _graphs(self) -> Iterator[Finding]:
        """Yield the graphs that are probably not needed; none if there are too many to follow."""
        requiring = [tensor for tensor in self._heap.tensors if self._read("requires_grad", tensor)]
        with_graphs = list(filter(has_graph, requiring))
        held = self._heap.tensors
        if with_graphs:
            self._ask_about([*self._heap.tensors, *self._heap.ndarrays])
            held = list(filter(self._is_held, held))
            with_graphs = list(filter(self._is_held, with_graphs))
        ids_with_graphs = set(map(id, with_graphs))
        leaves = [tensor for tensor in held if id(tensor) not in ids_with_graphs]
        gradients = [grad for tensor in leaves if (grad := self._read("_grad", tensor)) is not None]
        scripted = [item for module in self._heap.modules for item in of_script(module)]
        self._locked.update(map(self._key, (*gradients, *scripted)))
        if not with_graphs:
            return
        nodes = _Nodes([*gradients, *with_graphs], self._at_rest())
        self.complete = nodes.are_all
        # after backward(create_graph=True)
        needed = [nodes.first(gradient) for gradient in gradients]
        roots = [
            (tensor, node) for tensor in with_graphs if (node := nodes.first(tensor)) is not None
        ]
        if roots and nodes.are_all:
            wanted = [self._root(tensor, node, nodes) for tensor, node in roots]
            wanted.sort(key=lambda root: root.kind != "sum")  # the largest graphs first
            needed += [root.node for root in wanted if not root.kind]
            yield from self._of_groups(nodes, needed, [root for root in wanted if root.kind])

    def _at_rest(self) -> set[int]:
        """Return the identities of the parameters of modules in eval mode that no module in
        training has.
        """
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for module in self._heap.modules:
            attributes = instance_dict(module) or {}
            parameters: Any = attributes.get("_parameters")
            if is_instance(parameters, dict):
                found[attributes.get("training") is not False].update(
                    map(id, dict.values(parameters))
                )
        return found[False] - found[True]

    def _root(self, tensor: Any, node: Any, nodes: _Nodes) -> _Root:
        """Return a tensor with a graph; its kind is empty if the graph may still be needed."""
        path = self._paths.get(id(tensor), "")
        value = (
            "loss.item()"
            if math.prod(self._read("shape", tensor) or ()) == 1
            else "result.detach()"
        )
        container, holders = _LAST_STEP.sub("", path), self._referrers_of(tensor)
        instead = f"{path} = {value}"
        kind = "" if not path or path.isidentifier() else "stored"
        if any(is_instance(one, list) or is_instance(one, deque) for one in holders):
            instead = f"{container}.append({value})"
        elif path and nodes.is_sum(node):
            kind, instead = (
                "sum",
                f"{path} += {value}" if _adds(node) else f"keep {value} in {path}",
            )
        if (
            any(is_instance(one, tuple) for one in holders)
            or _NO_CODE.search(path)
            or re.search(r"\[\d+\]", container)
        ):
            owner = "the hook" if "_hooks[" in path else _ROOT.findall(f"{path}_")[0]
            instead = f"keep {value} in {owner}"
        if nodes.leaves[id(node)] == {True} and path:
            kind, instead = "evaluation", "wrap the evaluation in with torch.no_grad():"
        elif path.startswith("Out["):
            kind = "output"
        return _Root(node, path, instead, kind)

    def _of_groups(self, nodes: _Nodes, needed: list[Any], roots: list[_Root]) -> Iterator[Finding]:
        """Yield the memory kept by groups of roots: those below one name, and those whose graphs
        share results.
        """
        owners = dict.fromkeys(map(id, nodes.behind(needed, {})[0]), _OTHERS)
        members: dict[str, list[_Root]] = {}
        for root in roots:
            new, known = nodes.behind([root.node], owners)
            # Several graphs may end in one leaf: that does not make them a group.
            names = [
                owners[id(node)]
                for node in known
                if not is_leaf(node) and owners[id(node)] != _OTHERS
            ]
            name = (*names, _ROOT.findall(root.path)[0])[0]
            owners.update(dict.fromkeys(map(id, new), name))
            if new or names:
                members.setdefault(name, []).append(root)
        needed_by, inside = dict[StorageKey, set[str]](), set[int]()
        for node, saved in nodes.saved():
            inside |= {id(node), id(instance_dict(node))}  # a Function refers to its saved objects
            needed_by.setdefault(storage_key(saved) or ("object", id(saved)), set()).add(
                owners[id(node)]
            )
        for name, those in members.items():
            keys = [
                key
                for key, names in needed_by.items()
                if names == {name} and self._dies(key, inside)
            ]
            if those[0].kind == "output":
                self._graphs_of_outputs[name] = keys
            else:
                yield from self._findings(keys, *_words(those))

    # -- outputs ---------------------------------------------------------------------------------

    def outputs(self, listed: Collection[StorageKey]) -> Iterator[Finding]:
        """Yield the outputs that only IPython refers to, without those already ``listed``."""
        found = self._graphs_of_outputs
        if not self._outputs:
            return
        by_output: dict[StorageKey, str] = {}
        for key, items in self._shown_by.items():
            names = {
                _ROOT.findall(path)[0] for item in items if (path := self._paths.get(id(item)))
            }
            if len(names) == 1 and not names.isdisjoint(self._outputs):
                by_output[key] = names.pop()
        arrays = [item for key in by_output for item in self._shown_by[key]]
        self._ask_about([*self._outputs.values(), *arrays])
        for key, name in by_output.items():
            if self._dies(key, self._inside_outputs):
                found.setdefault(name, []).append(key)
        for name, value in self._outputs.items():
            if not self._is_held(value, self._inside_outputs):
                keys = [key for key in found.get(name, ()) if key not in listed]
                what = f"{name}: {type_name(value)} that only IPython holds"
                yield from self._findings(keys, what, f"to free it: %xdel _{name[4:-1]}")


class _Nodes:
    """The nodes of the graphs of some tensors; ``at_rest`` are identities of models' parameters in
    eval mode.
    """

    def __init__(self, tensors: Iterable[Any], at_rest: set[int]) -> None:
        self.leaves: dict[int, set[bool]] = {}
        """For each node, True or False for the leaves behind it: parameters at rest or not."""
        self._nodes = Nodes(_MOST_NODES, with_gradients=False)
        for tensor in tensors:
            for _ in self._nodes.of(tensor):
                if self._nodes.is_full:
                    break
        self.are_all = not self._nodes.is_full
        for node in self._nodes.finished:
            if is_leaf(node):
                self.leaves[id(node)] = {id(node.variable) in at_rest}
            else:
                behind = (self.leaves.get(id(part), set()) for part in self._nodes.following(node))
                self.leaves[id(node)] = set().union(*behind)

    def first(self, tensor: Any) -> Any:
        """Return the first node of a tensor's graph; None if there is none or it
        must not be read.
        """
        return self._nodes.first(tensor)

    def behind(self, first: Iterable[Any], known: Collection[int]) -> tuple[list[Any], list[Any]]:
        """Return the nodes reachable from ``first``, inclusive, and the ``known`` ones where the
        search stopped.
        """
        new, ends, waiting = (
            dict[int, Any](),
            list[Any](),
            [node for node in first if node is not None],
        )
        while waiting:
            node = waiting.pop()
            if id(node) in known:
                ends.append(node)
            elif id(node) not in new:
                new[id(node)] = node
                waiting += self._nodes.following(node)
        return list(new.values()), ends

    def saved(self) -> Iterator[tuple[Any, Any]]:
        """Yield each node with each tensor that it has saved; a leaf with its gradient."""
        return ((node, item) for node in self._nodes.finished for item in saved_by(node))

    def is_sum(self, node: Any) -> bool:
        """Return True if a node sums the results of one repeated computation, as ``total += loss``
        does.
        """
        while not _adds(node) and len(self._nodes.following(node)) == 1:
            (node,) = self._nodes.following(node)  # such as a mean of the sum
        waiting, from_zero, seen, kinds, terms = [node], False, set[int](), set[frozenset[str]](), 0
        while waiting:
            node = waiting.pop()
            if _adds(node):
                from_zero |= len(self._nodes.following(node)) == 1
                waiting += self._nodes.following(node)
            elif not is_leaf(node):
                new, known = self.behind([node], seen)
                if not all(map(is_leaf, known)):
                    return False  # two results of one computation
                terms += 1
                seen.update(map(id, new))
                kinds.add(frozenset(name_of(type(part)) for part in new if not is_leaf(part)))
        return terms >= 3 - from_zero and len(kinds) == 1


def _adds(node: Any) -> bool:
    return name_of(type(node)) == "AddBackward0"


def _words(roots: list[_Root]) -> tuple[str, str]:
    """Return a description of a group of roots, and a remedy."""
    where, number = dict.fromkeys(_ROOT.findall(root.path)[0] for root in roots), len(roots)
    remedies = list(dict.fromkeys(root.instead for root in roots))[:3]
    if any(root.kind == "evaluation" for root in roots):
        remedies = [root.instead for root in roots if root.kind == "evaluation"][:1]
    what, path = f"{', '.join(where)}: {number:,} tensors keep their autograd graphs", roots[0].path
    if number == 1:
        named = (
            "a hook on " * ("_hooks[" in path) + next(iter(where))
            if _NO_CODE.search(path)
            else path
        )
        what = f"{named} keeps its autograd graph"
    return what, f"unless you still call backward(): {'; '.join(remedies)}"


def caches() -> Iterator[Finding]:
    """Yield the memory that torch's allocators have reserved and can free."""
    for backend in ("cuda", "xpu"):
        try:
            found = snapshots(backend)
        except RuntimeError:  # an allocator without snapshots
            continue
        for device, snapshot in found.items():
            what, remedy = (
                "reserved by torch, but not in use",
                "if another process or library needs it: %gpumem free",
            )
            yield Finding(device, {("cache", 0): snapshot.cached_bytes}, what, remedy)
