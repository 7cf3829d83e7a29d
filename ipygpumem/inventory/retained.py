"""Finds memory kept by mistake: autograd graphs of stored results and evaluations, outputs, caches.

No user code runs, and nothing is changed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import (
    StorageKey,
    described,
    is_array,
    object_key,
    owner_of,
    place_of,
    read_array,
    storage_key,
)
from ipygpumem.heap.containers import CONTAINERS
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.knowledge.graphs import saved_by
from ipygpumem.heap.knowledge.nodes import Nodes, has_graph, is_leaf
from ipygpumem.heap.named_arrays import NamedArrays
from ipygpumem.heap.tensors import tensors_of_script
from ipygpumem.introspect import instance_dict, is_exactly, is_instance, name_of, type_name
from ipygpumem.inventory.tensor_records import torch_reader
from ipygpumem.notebook import OUTPUT, OUTPUT_PREFIX, cell_of_output, deletion_of_output
from ipygpumem.probes.allocator import snapshots

_MOST_NODES = 1_000_000
_OTHERS = ""
"""Owner of the graph nodes that may still be needed."""
_ROOT = re.compile(rf"(?:{OUTPUT.pattern})|\w+")
_LAST_STEP = re.compile(r"""\[("[^"]*"|[^\[\]"]*)\]$|[.][^.\[\]"]+$""")
_POSITION = re.compile(r"\[\d+\]")
_NO_CODE = re.compile(r"[<{…'\\]|cell_contents|_hooks\[")
"""Marks a path that cannot be assigned to as written; a key's quotes are shown as apostrophes."""
_REMEDIES_SHOWN = 3


def paths_of(
    names: Mapping[str, object], outputs: Mapping[str, object]
) -> tuple[dict[int, str], set[int]]:
    """Return the paths of arrays by identity, and the identities of all objects that only
    ``outputs`` lead to.

    Call it before listing the heap: reading an object's attributes may create a dict.
    """
    walk = NamedArrays()
    walk.named(names.items())
    behind_names = set(walk.seen)
    walk.named(outputs.items())
    walk.drop()
    return walk.paths, walk.seen - behind_names


class Finding(NamedTuple):
    """Memory kept alive on one device, and a remedy."""

    device: str
    shares: dict[StorageKey, int]
    """Bytes by storage."""
    what: str
    remedy: str

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all storages."""
        return sum(self.shares.values())


class _GraphTensor(NamedTuple):
    """A tensor whose graph may not be needed, and the statement that would not store the graph."""

    node: Any
    path: str
    instead: str
    kind: str
    """``evaluation``, ``output``, ``stored`` or ``sum``; empty if the graph may be needed."""
    value: str = ""
    """Code of the value without the graph."""
    places: int = 1
    """Number of containers that hold the tensor."""

    @property
    def name(self) -> str:
        """Return the name or output at which the path begins."""
        return _name_in(self.path)

    @property
    def statement(self) -> str:
        """Return the statement with the number of further places where the tensor is kept."""
        if self.places < 2:
            return self.instead
        noun = "place" if self.places == 2 else "places"
        return f"{self.instead} (and in {self.places - 1:,} more {noun})"


def _name_in(path: str) -> str:
    """Return the name or output at which a path begins."""
    first = _ROOT.search(path)
    assert first is not None
    return first[0]


class Retained:
    """Memory that the user's names and IPython's outputs keep alive; drop it with the heap.

    Args:
        heap: the live objects.
        paths: paths of arrays by identity.
        outputs: the outputs that IPython keeps.
        inside_outputs: identities of the objects that only outputs lead to.

    Attributes:
        graphs: the memory of graphs that are probably not needed.
        in_graphs_of_names: the storages that the graphs of named results have saved, on which
            ``backward()`` may still be called; not the parameters and their gradients.
        complete: False if there were too many nodes of graphs to follow.
    """

    def __init__(
        self,
        heap: Heap,
        paths: Mapping[int, str],
        outputs: Mapping[str, object],
        inside_outputs: Collection[int],
    ) -> None:
        self.complete = True
        self.in_graphs_of_names: set[StorageKey] = set()
        self._paths = paths
        self._outputs = outputs
        self._inside_outputs = inside_outputs
        self._graphs_of_outputs: dict[str, list[StorageKey]] = {}
        with torch_reader() as reader:
            foreign = set[int | None]()
            self._read: Callable[[str, object], Any] = _read_nothing
            if reader is not None:
                self._read = reader.read
                plain = [item for item in heap.tensors if reader.memory(item).is_plain]
                foreign.update(map(reader.address_of_others, plain))
            self._memory = _Memory(heap)
            self._memory.lock_arrays(heap.ndarrays, foreign)
            self.graphs = list(self._of_graphs(heap))

    # -- graphs ----------------------------------------------------------------------------------

    def _of_graphs(self, heap: Heap) -> Iterator[Finding]:
        """Yield the graphs that are probably not needed; none if there are too many to follow."""
        requiring = [tensor for tensor in heap.tensors if self._read("requires_grad", tensor)]
        with_graphs = list(filter(has_graph, requiring))
        tensors = heap.tensors
        if with_graphs:
            self._memory.ask_about([*heap.tensors, *heap.ndarrays])
            tensors = list(filter(self._memory.is_referred, tensors))
            with_graphs = list(filter(self._memory.is_referred, with_graphs))
        gradients = self._gradients(tensors, without=set(map(id, with_graphs)))
        self._memory.lock(gradients)
        for module in heap.modules:
            self._memory.lock(tensors_of_script(module))
        if not with_graphs:
            return
        nodes = _Nodes([*gradients, *with_graphs], _at_rest(heap.modules))
        self.complete = nodes.are_all
        if self.complete:
            yield from self._of_groups(self._groups(with_graphs, gradients, nodes))

    def _groups(
        self, with_graphs: Iterable[object], gradients: Iterable[object], nodes: _Nodes
    ) -> _Groups:
        """Return the tensors whose graphs are probably not needed, in groups."""
        # Those of gradients are needed after backward(create_graph=True).
        needed = list(map(nodes.first, gradients))
        of_names = []
        not_needed = []
        for graph_tensor in self._graph_tensors(with_graphs, nodes):
            if graph_tensor.kind:
                not_needed.append(graph_tensor)
                continue
            needed.append(graph_tensor.node)
            if graph_tensor.path:
                of_names.append(graph_tensor.node)
        self.in_graphs_of_names = nodes.saved_behind(of_names)
        groups = _Groups(nodes, needed)
        for graph_tensor in not_needed:
            groups.add(graph_tensor)
        return groups

    def _gradients(self, tensors: Iterable[object], without: Collection[int]) -> list[Any]:
        """Return the gradients of tensors, except those ``without`` some."""
        gradients = []
        for tensor in tensors:
            if id(tensor) not in without:
                gradient = self._read("_grad", tensor)
                if gradient is not None:
                    gradients.append(gradient)
        return gradients

    def _graph_tensors(self, tensors: Iterable[object], nodes: _Nodes) -> list[_GraphTensor]:
        """Return the tensors with graphs, those with the largest graphs first: those of sums."""
        graph_tensors = []
        for tensor in tensors:
            node = nodes.first(tensor)
            if node is not None:
                graph_tensors.append(self._graph_tensor(tensor, node, nodes))
        return sorted(graph_tensors, key=lambda graph_tensor: graph_tensor.kind != "sum")

    def _graph_tensor(self, tensor: Any, node: Any, nodes: _Nodes) -> _GraphTensor:
        """Return a tensor with a graph; its kind is empty if the graph may still be needed."""
        path = self._paths.get(id(tensor), "")
        is_evaluation = nodes.leaves[id(node)] == {True} and path
        if is_evaluation:
            return _GraphTensor(
                node, path, "wrap the evaluation in with torch.no_grad():", "evaluation"
            )
        value = "result.detach()"
        if math.prod(self._read("shape", tensor) or ()) == 1:
            value = "loss.item()"
        holders = self._memory.referrers_of(tensor)
        kind = "stored"
        if not path or path.isidentifier():
            kind = ""  # the name of a result whose graph may be needed
        instead = f"{path} = {value}"
        if _is_item_of_list(tensor, path, holders):
            instead = f"{_LAST_STEP.sub('', path)}.append({value})"
        elif path and nodes.is_sum(node):
            kind = "sum"
            instead = f"{path} += {value}" if _adds(node) else f"keep {value} in {path}"
        if _any_is(holders, tuple) or _has_no_code(path):
            instead = f"keep {value} in {_owner_in(path)}"
        if path.startswith(OUTPUT_PREFIX):
            kind = "output"
        return _GraphTensor(node, path, instead, kind, value, _number_of_places(holders))

    def _of_groups(self, groups: _Groups) -> Iterator[Finding]:
        """Yield the memory kept by groups of tensors with graphs."""
        needed_by, of_nodes = groups.saved()
        for name, graph_tensors in groups.members.items():
            keys = []
            for key, names in needed_by.items():
                if names == {name} and self._memory.dies(key, of_nodes):
                    keys.append(key)
            if graph_tensors[0].kind == "output":
                self._graphs_of_outputs[name] = keys
            else:
                yield from self._memory.findings(keys, *_words_on_graphs(graph_tensors))

    # -- outputs ---------------------------------------------------------------------------------

    def outputs(self, listed: Collection[StorageKey]) -> Iterator[Finding]:
        """Yield the outputs that only IPython refers to, without those already ``listed``."""
        if not self._outputs:
            return
        storages = dict(self._graphs_of_outputs)
        by_output = self._storages_of_outputs()
        items = list(self._outputs.values())
        for key in by_output:
            items += self._memory.shown_by[key]
        self._memory.ask_about(items)
        for key, name in by_output.items():
            if self._memory.dies(key, self._inside_outputs):
                storages.setdefault(name, []).append(key)
        for name, value in self._outputs.items():
            if self._memory.is_referred(value, self._inside_outputs):
                continue
            keys = [key for key in storages.get(name, ()) if key not in listed]
            yield from self._memory.findings(keys, *words_on_output(name, value))

    def _storages_of_outputs(self) -> dict[StorageKey, str]:
        """Return the storages whose arrays have paths from one output only, with its name."""
        by_output: dict[StorageKey, str] = {}
        for key, items in self._memory.shown_by.items():
            names = set()
            for item in items:
                path = self._paths.get(id(item))
                if path:
                    names.add(_name_in(path))
            if len(names) == 1 and not names.isdisjoint(self._outputs):
                by_output[key] = names.pop()
        return by_output


def _order_of(graph_tensor: _GraphTensor) -> tuple[bool, int, str]:
    """Return the sort key: the collector lists tensors in any order."""
    return graph_tensor.kind != "sum", len(graph_tensor.path), graph_tensor.path


def words_on_output(name: str, value: object) -> tuple[str, str]:
    """Return the description of an output that only IPython refers to, and the line that frees
    it.
    """
    what = f"{name}: {type_name(value)} that only IPython holds"
    return what, deletion_of_output(cell_of_output(name))


def _has_no_code(path: str) -> bool:
    """Return True if nothing can be assigned to a path as it is written."""
    return bool(_NO_CODE.search(path) or _POSITION.search(_LAST_STEP.sub("", path)))


def _owner_in(path: str) -> str:
    """Return the words for the object that keeps the tensor at a path."""
    return "the hook" if "_hooks[" in path else _name_in(f"{path}_")


def _is_item_of_list(tensor: object, path: str, holders: Iterable[Any]) -> bool:
    """Return True if a path leads to an item of a list or deque, not of a dict with numbers as
    keys.
    """
    step = _LAST_STEP.search(path)
    if step is None or not _POSITION.fullmatch(step[0]):
        return False
    position = int(step[1])
    for holder in holders:
        for kind in (list, deque):
            if not is_instance(holder, kind) or position >= kind.__len__(holder):
                continue
            if kind.__getitem__(holder, position) is tensor:
                return True
    return False


def _number_of_places(holders: Sequence[object]) -> int:
    """Return the number of containers among holders; one with attributes counts once."""
    containers = [holder for holder in holders if _any_is([holder], *CONTAINERS)]
    attributes = {
        id(instance_dict(holder)) for holder in containers if not is_exactly(holder, *CONTAINERS)
    }
    return sum(id(holder) not in attributes for holder in containers)


def _any_is(items: Iterable[object], *kinds: type) -> bool:
    return any(is_instance(item, kind) for item in items for kind in kinds)


def _read_nothing(name: str, tensor: object) -> None:
    """Stand for ``Reader.read`` without torch."""


def _at_rest(modules: Iterable[object]) -> set[int]:
    """Return the identities of the parameters of modules in eval mode that no module in training
    has.
    """
    in_training = set[int]()
    in_evaluation = set[int]()
    for module in modules:
        attributes = instance_dict(module) or {}
        parameters: Any = attributes.get("_parameters")
        if is_instance(parameters, dict):
            identities = map(id, dict.values(parameters))
            if attributes.get("training") is False:
                in_evaluation.update(identities)
            else:
                in_training.update(identities)
    return in_evaluation - in_training


class _Memory:
    """The storages of live tensors and arrays, and what refers to these.

    Attributes:
        shown_by: the tensors and arrays on each storage.
    """

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._in_frames = set(map(id, heap.local))
        self._tensor_ids = set(map(id, heap.tensors))
        self._sizes: dict[StorageKey, tuple[str, int]] = {}
        """Device and bytes of each storage."""
        self._locked: set[StorageKey | None] = set()
        """Storages that code out of sight may keep alive."""
        self._referrers: Mapping[int, Sequence[Any]] = {}
        """The objects that refer to each object that was asked about, by its identity."""
        self.shown_by: dict[StorageKey, list[Any]] = {}
        items = [*heap.tensors, *heap.ndarrays]
        for item, key in zip(items, self._keys(items), strict=True):
            self.shown_by.setdefault(key, []).append(item)

    def _keys(self, items: Sequence[object]) -> list[StorageKey]:
        """Return the storage of each tensor or array, and record its bytes; an object without a
        storage stands for itself.
        """
        arrays = {id(item): array for item, array in described(items)}
        keys = list[StorageKey]()
        for item in items:
            array = arrays.get(id(item))
            if array is None:
                keys.append(object_key(item))
                continue
            self._sizes[array.storage] = array.device, array.size_bytes
            keys.append(array.storage)
        return keys

    def lock(self, items: Iterable[object]) -> None:
        """Note that code out of sight may keep some tensors alive."""
        self._locked.update(self._keys(list(items)))

    def lock_arrays(self, arrays: Iterable[Any], foreign: Collection[int | None]) -> None:
        """Lock NumPy's memory in torch, at the ``foreign`` addresses, and memory that no array
        owns.
        """
        locked = list[object]()
        for array in arrays:
            owner = owner_of(array)
            is_owned = is_array(owner) and read_array("flags", owner).owndata
            if not is_owned or place_of(owner)[1] in foreign:
                locked.append(array)
        self.lock(locked)

    def ask_about(self, items: Iterable[object]) -> None:
        """Find the objects that refer to some items: all at once, because each search passes over
        the heap.
        """
        self._referrers = self._heap.referrers_of({id(item): item for item in items})

    def is_referred(self, item: object, inside: Collection[int] = ()) -> bool:
        """Return True if any Python object, except those ``inside``, refers to an object."""
        if id(item) in self._in_frames:
            return True
        return any(id(referrer) not in inside for referrer in self.referrers_of(item))

    def referrers_of(self, item: object) -> list[Any]:
        """Return the objects that refer to an item, without tensors: C++ code holds a tensor's
        gradient.
        """
        referrers = self._referrers.get(id(item), ())
        return [referrer for referrer in referrers if id(referrer) not in self._tensor_ids]

    def dies(self, key: StorageKey, inside: Collection[int]) -> bool:
        """Return True if a storage is freed with the objects ``inside``."""
        if key not in self._sizes or key in self._locked:
            return False
        items = self.shown_by.get(key, ())
        return not any(self.is_referred(item, inside) for item in items)

    def findings(self, keys: Iterable[StorageKey], what: str, remedy: str) -> Iterator[Finding]:
        """Yield a finding for the storages on each device; ``what`` and ``remedy`` are words."""
        by_device: dict[str, dict[StorageKey, int]] = {}
        for key in keys:
            device, size = self._sizes[key]
            by_device.setdefault(device, {})[key] = size
        for device, shares in sorted(by_device.items()):
            yield Finding(device, shares, what, remedy)


class _Groups:
    """Roots below one name, or whose graphs share results, and the nodes that only a group needs.

    Args:
        nodes: the nodes of all graphs.
        needed: nodes that are needed, with all nodes behind them.

    Attributes:
        members: the tensors with graphs of each group, by its name.
    """

    def __init__(self, nodes: _Nodes, needed: Iterable[Any]) -> None:
        self.members: dict[str, list[_GraphTensor]] = {}
        self._nodes = nodes
        behind_needed, _ = nodes.behind(needed, {})
        self._owners = dict.fromkeys(map(id, behind_needed), _OTHERS)
        """The name of the group that needs a node, by the node's identity."""

    def add(self, graph_tensor: _GraphTensor) -> None:
        """Add a tensor to the group with which it shares results, or else to that of its name."""
        new, ends = self._nodes.behind([graph_tensor.node], self._owners)
        names = []
        for node in ends:
            name = self._owners[id(node)]
            # Several graphs may end in one leaf: that does not make them a group.
            if name != _OTHERS and not is_leaf(node):
                names.append(name)
        group = names[0] if names else graph_tensor.name
        self._owners.update(dict.fromkeys(map(id, new), group))
        if new or names:
            self.members.setdefault(group, []).append(graph_tensor)

    def saved(self) -> tuple[dict[StorageKey, set[str]], set[int]]:
        """Return the groups that need each storage that a node has saved, and the identities of the
        nodes that have saved one.
        """
        needed_by = dict[StorageKey, set[str]]()
        of_nodes = set[int]()
        for node, item in self._nodes.saved():
            of_nodes |= {id(node), id(instance_dict(node))}  # a Function refers to saved objects
            key = storage_key(item) or object_key(item)
            owner = self._owners[id(node)]
            needed_by.setdefault(key, set()).add(owner)
        return needed_by, of_nodes


class _Nodes:
    """The nodes of the graphs of some tensors.

    Args:
        tensors: the tensors.
        at_rest: identities of models' parameters in eval mode.

    Attributes:
        leaves: for each node, True or False for the leaves behind it: parameters at rest or not.
        are_all: False if there were too many nodes.
    """

    def __init__(self, tensors: Iterable[Any], at_rest: set[int]) -> None:
        self.leaves: dict[int, set[bool]] = {}
        self._nodes = Nodes(_MOST_NODES, with_gradients=False)
        for tensor in tensors:
            for _ in self._nodes.of(tensor):
                if self._nodes.is_full:
                    break
        self.are_all = not self._nodes.is_full
        for node in self._nodes.finished:
            leaves = set[bool]()
            if is_leaf(node):
                leaves.add(id(node.variable) in at_rest)
            else:
                for part in self._nodes.following(node):
                    leaves |= self.leaves.get(id(part), set())
            self.leaves[id(node)] = leaves

    def first(self, tensor: Any) -> Any:
        """Return the first node of a tensor's graph; None if there is none or it must not be
        read.
        """
        return self._nodes.first(tensor)

    def behind(self, first: Iterable[Any], known: Collection[int]) -> tuple[list[Any], list[Any]]:
        """Return the nodes reachable from ``first``, inclusive, and the ``known`` ones where the
        search stopped.
        """
        new = dict[int, Any]()
        ends = list[Any]()
        waiting = [node for node in first if node is not None]
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
        for node in self._nodes.finished:
            for item in saved_by(node):
                yield node, item

    def saved_behind(self, first: Iterable[Any]) -> set[StorageKey]:
        """Return the storages that the nodes behind ``first`` have saved, without those of leaves
        and of their gradients.
        """
        storages = set[StorageKey]()
        of_leaves = set[StorageKey]()
        for node in self.behind(first, ())[0]:
            saved = of_leaves if is_leaf(node) else storages
            for item in saved_by(node):
                saved.add(storage_key(item) or object_key(item))
        return storages - of_leaves

    def is_sum(self, node: Any) -> bool:
        """Return True if a node sums the results of one repeated computation, as ``total += loss``
        does.
        """
        first = self._past_single_steps(node)
        waiting = [first]
        counted = set[int]()
        kinds_of_terms = set[frozenset[str]]()
        terms = 0
        begins_with_number = False
        while waiting:
            node = waiting.pop()
            if _adds(node):
                following = self._nodes.following(node)
                begins_with_number |= len(following) == 1  # as ``total = 0`` does
                waiting += following
            elif not is_leaf(node):
                term, ends = self.behind([node], counted)
                if not all(map(is_leaf, ends)):
                    return False  # two results of one computation
                terms += 1
                counted.update(map(id, term))
                kinds_of_terms.add(_kinds_in(term))
        least = 2 if begins_with_number else 3
        return terms >= least and len(kinds_of_terms) == 1

    def _past_single_steps(self, node: Any) -> Any:
        """Return the first node that adds or has several inputs, behind nodes such as a mean."""
        while not _adds(node) and len(self._nodes.following(node)) == 1:
            (node,) = self._nodes.following(node)
        return node


def _adds(node: Any) -> bool:
    return name_of(type(node)) == "AddBackward0"


def _kinds_in(nodes: Iterable[Any]) -> frozenset[str]:
    """Return the names of the operations of some nodes."""
    return frozenset(name_of(type(node)) for node in nodes if not is_leaf(node))


def _words_on_graphs(graph_tensors: Sequence[_GraphTensor]) -> tuple[str, str]:
    """Return a description of a group of tensors with graphs, and a remedy."""
    evaluations = [
        graph_tensor.instead for graph_tensor in graph_tensors if graph_tensor.kind == "evaluation"
    ]
    remedies = evaluations[:1]
    if not evaluations:
        remedies = _statements_of(graph_tensors)
    remedy = f"unless you still call backward(): {'; '.join(remedies)}"
    if len(graph_tensors) > 1:
        names = ", ".join(dict.fromkeys(graph_tensor.name for graph_tensor in graph_tensors))
        return f"{names}: {len(graph_tensors):,} tensors keep their autograd graphs", remedy
    (graph_tensor,) = graph_tensors
    named = graph_tensor.path
    if "_hooks[" in graph_tensor.path:
        named = f"a hook on {graph_tensor.name}"
    elif _NO_CODE.search(graph_tensor.path):
        named = graph_tensor.name
    return f"{named} keeps its autograd graph", remedy


def _statements_of(graph_tensors: Sequence[_GraphTensor]) -> list[str]:
    """Return the statements that would not store the graphs of some tensors, or the first of them
    and the number of further ones.
    """
    number_of_sums = Counter(
        _LAST_STEP.sub("", item.path) for item in graph_tensors if item.kind == "sum"
    )
    statements = dict[str, None]()
    for item in sorted(graph_tensors, key=_order_of):
        # Totals in one dict are copies of one total, each of which is stored.
        is_copy = number_of_sums[_LAST_STEP.sub("", item.path)] > 1 and not item.path.isidentifier()
        if item.kind == "sum" and is_copy and not _has_no_code(item.path):
            item = item._replace(instead=f"{item.path} = {item.value}")
        statements[item.statement] = None
    shown = list(statements)[:_REMEDIES_SHOWN]
    if len(statements) > len(shown):
        shown.append(f"and {len(statements) - len(shown):,} more")
    return shown


def allocator_caches() -> Iterator[Finding]:
    """Yield the memory that torch's allocators have reserved and can free."""
    for backend in ("cuda", "xpu"):
        try:
            by_device = snapshots(backend)
        except RuntimeError:  # an allocator without snapshots
            continue
        for device, snapshot in by_device.items():
            yield Finding(
                device,
                {("cache", 0): snapshot.cached_bytes},
                "reserved by torch, but not in use",
                "if another process or library needs it: %gpumem free",
            )
