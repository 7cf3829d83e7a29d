"""Finds memory that is probably kept by mistake: autograd graphs of stored results and evaluations,
outputs, caches.

After ``losses.append(loss)``, each loss keeps its graph, with all activations. No user code runs,
and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.kinds.arrays import (
    StorageKey,
    described,
    is_array,
    object_key,
    owner_of,
    read_array,
    span_of,
)
from ipygpumem.heap.kinds.tensors import tensors_of_script
from ipygpumem.heap.knowledge.nodes import has_graph
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.walks.named_arrays import NamedArrays
from ipygpumem.introspect import instance_dict, is_instance, type_name
from ipygpumem.inventory.arrays.tensor_records import torch_reader
from ipygpumem.inventory.leaks.graph_nodes import GraphNodes
from ipygpumem.inventory.leaks.stored_graphs import (
    GraphGroups,
    StoredGraph,
    name_in,
    words_on_graphs,
)
from ipygpumem.notebook import cell_of_output, deletion_of_output
from ipygpumem.probes.allocator import snapshots


class NamedPaths(NamedTuple):
    """The paths to arrays, and the objects behind outputs."""

    paths: dict[int, str]
    """The path to each array, such as ``model.weight``, by the array's identity."""
    only_in_outputs: set[int]
    """The identities of all objects to which only outputs lead."""


def paths_of(names: Mapping[str, object], outputs: Mapping[str, object]) -> NamedPaths:
    """Return the paths of arrays, and the objects that only ``outputs`` lead to.

    Call it before listing the heap: reading an object's attributes may create a dict.
    """
    walk = NamedArrays()
    walk.named(names.items())
    behind_names = set(walk.seen)
    walk.named(outputs.items())
    walk.drop()
    only_in_outputs = walk.seen - behind_names
    return NamedPaths(walk.paths, only_in_outputs)


class Finding(NamedTuple):
    """Memory that is kept alive on one device, with words for its holder and a remedy."""

    device: str
    shares: dict[StorageKey, int]
    """Bytes by storage."""
    what: str
    """The words for what keeps it, such as ``Out[5]: Tensor that only IPython holds``."""
    remedy: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(self.shares.values())


class _MemoryOfGraphs(NamedTuple):
    """The memory that autograd graphs keep."""

    not_needed: list[Finding]
    """The memory of graphs that are probably not needed, without those of outputs."""
    of_outputs: dict[str, list[StorageKey]]
    """The storages that the graph of each output keeps, by the output's name."""
    of_names: set[StorageKey]
    """The storages that the graphs of named results have saved, which may be needed."""
    are_all: bool = True
    """False if there were too many nodes of graphs to follow; then there is nothing else here."""


class Retained:
    """Finds memory that the user's names and IPython's outputs keep alive, probably by mistake;
    drop it with the heap.

    Args:
        heap: the live objects.
        paths: paths of arrays by identity.
        outputs: the outputs that IPython keeps.
        only_in_outputs: identities of the objects that only outputs lead to.

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
        only_in_outputs: Collection[int],
    ) -> None:
        self._paths = paths
        self._outputs = outputs
        self._only_in_outputs = only_in_outputs
        with torch_reader() as reader:
            foreign_addresses = set[int | None]()
            self._read: Callable[[str, object], Any] = _read_nothing
            if reader is not None:
                self._read = reader.read
                plain = [item for item in heap.tensors if reader.memory(item).is_plain]
                foreign_addresses.update(map(reader.address_of_others, plain))
            self._memory = _LiveStorages(heap)
            self._memory.lock_arrays(heap.ndarrays, foreign_addresses)
            graphs = self._graphs_on(heap)
        self.graphs = graphs.not_needed
        self.in_graphs_of_names = graphs.of_names
        self.complete = graphs.are_all
        self._graphs_of_outputs = graphs.of_outputs

    # -- graphs ----------------------------------------------------------------------------------

    def _graphs_on(self, heap: Heap) -> _MemoryOfGraphs:
        """Return the memory that autograd graphs keep. Gradients, and what scripted modules keep,
        count as needed.
        """
        requiring = [tensor for tensor in heap.tensors if self._read("requires_grad", tensor)]
        with_graphs = list(filter(has_graph, requiring))
        tensors = heap.tensors
        if with_graphs:  # only then is a search for references worth its time
            self._memory.ask_about([*heap.tensors, *heap.ndarrays])
            tensors = list(filter(self._memory.is_referred, tensors))
            with_graphs = list(filter(self._memory.is_referred, with_graphs))
        gradients = self._gradients(tensors, without=set(map(id, with_graphs)))
        self._memory.lock(gradients)
        for module in heap.modules:
            self._memory.lock(tensors_of_script(module))
        if not with_graphs:
            return _MemoryOfGraphs([], {}, set())
        nodes = GraphNodes([*gradients, *with_graphs], _parameters_in_evaluation(heap.modules))
        if not nodes.are_all:
            return _MemoryOfGraphs([], {}, set(), are_all=False)
        return self._graphs_of(with_graphs, gradients, nodes)

    def _graphs_of(
        self, with_graphs: Iterable[object], gradients: Iterable[object], nodes: GraphNodes
    ) -> _MemoryOfGraphs:
        """Return the memory that the graphs of tensors keep.

        Args:
            with_graphs: the tensors with graphs.
            gradients: the gradients, whose graphs are needed after
                ``backward(create_graph=True)``.
            nodes: the nodes of all graphs.
        """
        needed = list(map(nodes.first, gradients))
        nodes_of_names = []
        not_needed = []
        for graph in self._stored_graphs(with_graphs, nodes):
            if graph.kind:
                not_needed.append(graph)
                continue
            # A plain variable, or a tensor without a name: ``backward()`` may follow.
            needed.append(graph.node)
            if graph.path:
                nodes_of_names.append(graph.node)
        groups = GraphGroups(nodes, needed)
        for graph in not_needed:
            groups.add(graph)
        findings = list[Finding]()
        of_outputs = dict[str, list[StorageKey]]()
        for name, storages in self._storages_of_groups(groups).items():
            graphs = groups.members[name]
            if graphs[0].kind == "output":
                of_outputs[name] = storages
            else:
                findings += self._memory.findings(storages, *words_on_graphs(graphs))
        return _MemoryOfGraphs(findings, of_outputs, nodes.saved_behind(nodes_of_names))

    def _storages_of_groups(self, groups: GraphGroups) -> dict[str, list[StorageKey]]:
        """Return the storages that only the graphs of one group keep alive, by the group's name."""
        saved = groups.saved()
        storages_by_group = dict[str, list[StorageKey]]()
        for name in groups.members:
            storages = storages_by_group[name] = list[StorageKey]()
            for key, groups_with_storage in saved.groups.items():
                if groups_with_storage == {name} and self._memory.dies(key, saved.node_ids):
                    storages.append(key)
        return storages_by_group

    def _gradients(self, tensors: Iterable[object], without: Collection[int]) -> list[Any]:
        """Return the gradients of tensors.

        Args:
            tensors: the tensors.
            without: identities of tensors whose gradients are left out.
        """
        gradients = []
        for tensor in tensors:
            if id(tensor) not in without:
                gradient = self._read("_grad", tensor)
                if gradient is not None:
                    gradients.append(gradient)
        return gradients

    def _stored_graphs(self, tensors: Iterable[object], nodes: GraphNodes) -> list[StoredGraph]:
        """Return the tensors with their graphs. Those of sums come first: they are the largest, and
        a graph that two tensors share belongs to the group of the first.
        """
        graphs = []
        for tensor in tensors:
            node = nodes.first(tensor)
            if node is not None:
                path = self._paths.get(id(tensor), "")
                shape = self._read("shape", tensor) or ()
                holders = self._memory.referrers_of(tensor)
                graphs.append(StoredGraph.of(tensor, node, path, shape, holders, nodes))
        return sorted(graphs, key=lambda graph: graph.kind != "sum")

    # -- outputs ---------------------------------------------------------------------------------

    def outputs(self, listed: Collection[StorageKey]) -> Iterator[Finding]:
        """Yield the memory of the outputs that only IPython refers to.

        Args:
            listed: storages to leave out, because they have rows.
        """
        if not self._outputs:
            return
        storages_by_output = dict(self._graphs_of_outputs)
        output_of_storage = self._output_of_each_storage()
        items = list(self._outputs.values())
        for key in output_of_storage:
            items += self._memory.shown_by[key]
        self._memory.ask_about(items)
        for key, name in output_of_storage.items():
            if self._memory.dies(key, self._only_in_outputs):
                storages_by_output.setdefault(name, []).append(key)
        for name, value in self._outputs.items():
            if self._memory.is_referred(value, self._only_in_outputs):
                continue
            unlisted = [key for key in storages_by_output.get(name, ()) if key not in listed]
            yield from self._memory.findings(unlisted, *words_on_output(name, value))

    def _output_of_each_storage(self) -> dict[StorageKey, str]:
        """Return the name of the output that leads to a storage's arrays, by the storage. Storages
        to which another name leads, too, are left out.
        """
        output_of_storage: dict[StorageKey, str] = {}
        for key, items in self._memory.shown_by.items():
            names = set()
            for item in items:
                path = self._paths.get(id(item))
                if path:
                    names.add(name_in(path))
            if len(names) == 1 and not names.isdisjoint(self._outputs):
                output_of_storage[key] = names.pop()
        return output_of_storage


def words_on_output(name: str, value: object) -> tuple[str, str]:
    """Return the description of an output that only IPython refers to, and the line that frees
    it.
    """
    what = f"{name}: {type_name(value)} that only IPython holds"
    return what, deletion_of_output(cell_of_output(name))


def _read_nothing(name: str, tensor: object) -> None:
    """Take the place of ``Reader.read`` if torch is not loaded, and return None."""


def _parameters_in_evaluation(modules: Iterable[object]) -> set[int]:
    """Return the identities of the parameters of modules in eval mode. Parameters that a module in
    training shares are left out.
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


class _LiveStorages:
    """The storages of live tensors and arrays, and the objects that refer to these. It tells which
    storages are freed with some objects.

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
        for item, key in zip(items, self._record_storages(items), strict=True):
            self.shown_by.setdefault(key, []).append(item)

    def _record_storages(self, items: Sequence[object]) -> list[StorageKey]:
        """Record the bytes of the storage of each tensor or array, and return the storages. For an
        object without a storage, the object itself is returned as one.
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
        """Lock the memory of tensors or arrays: code out of sight may keep it alive, so it never
        counts as freed.
        """
        self._locked.update(self._record_storages(list(items)))

    def lock_arrays(self, arrays: Iterable[Any], foreign_addresses: Collection[int | None]) -> None:
        """Lock the memory of arrays that code out of sight may keep: memory that no array owns (a
        buffer), or on which a tensor lies.

        Args:
            arrays: NumPy arrays.
            foreign_addresses: the addresses at which tensors show memory that torch has not
                allocated, such as that of an array.
        """
        locked = list[object]()
        for array in arrays:
            owner = owner_of(array)
            is_owned = is_array(owner) and read_array("flags", owner).owndata
            if not is_owned or span_of(owner)[1] in foreign_addresses:
                locked.append(array)
        self.lock(locked)

    def ask_about(self, items: Iterable[object]) -> None:
        """Find the objects that refer to the items, which ``is_referred``, ``referrers_of`` and
        ``dies`` need. All are asked about at once, because each search passes over the heap.
        """
        self._referrers = self._heap.referrers_of({id(item): item for item in items})

    def is_referred(self, item: object, inside: Collection[int] = ()) -> bool:
        """Return True if a Python object refers to an item.

        Args:
            item: the item.
            inside: identities of objects that do not count, because they would be freed, too.
        """
        if id(item) in self._in_frames:
            return True
        return any(id(referrer) not in inside for referrer in self.referrers_of(item))

    def referrers_of(self, item: object) -> list[Any]:
        """Return the objects that refer to an item, without tensors: a tensor refers to its
        gradient only in C++, which is no place from which a user could remove it.
        """
        referrers = self._referrers.get(id(item), ())
        return [referrer for referrer in referrers if id(referrer) not in self._tensor_ids]

    def dies(self, key: StorageKey, inside: Collection[int]) -> bool:
        """Return True if a storage is freed with some objects.

        Args:
            key: the storage.
            inside: the identities of the objects.
        """
        if key not in self._sizes or key in self._locked:
            return False
        items = self.shown_by.get(key, ())
        return not any(self.is_referred(item, inside) for item in items)

    def findings(self, keys: Iterable[StorageKey], what: str, remedy: str) -> Iterator[Finding]:
        """Yield a finding for each device with some of the storages.

        Args:
            keys: the storages.
            what: the words for their holder.
            remedy: the line or advice that frees them.
        """
        by_device: dict[str, dict[StorageKey, int]] = {}
        for key in keys:
            device, size = self._sizes[key]
            by_device.setdefault(device, {})[key] = size
        for device, bytes_by_storage in sorted(by_device.items()):
            yield Finding(device, bytes_by_storage, what, remedy)


def allocator_caches() -> Iterator[Finding]:
    """Yield the memory that torch's allocators have reserved and can return, for each device."""
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
