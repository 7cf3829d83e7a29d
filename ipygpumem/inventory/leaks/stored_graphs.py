"""Describes tensors whose autograd graphs may not be needed: why each graph is stored, which
statement would not store it, and which tensors belong together.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.containers import CONTAINERS
from ipygpumem.heap.kinds.arrays import StorageKey, object_key, storage_key
from ipygpumem.heap.knowledge.nodes import is_leaf
from ipygpumem.introspect import instance_dict, is_exactly, is_instance
from ipygpumem.inventory.leaks.graph_nodes import GraphNodes, adds
from ipygpumem.notebook import OUTPUT, OUTPUT_PREFIX

_MAY_BE_NEEDED = ""
"""Stands for a group's name with graph nodes that may still be needed."""
_FIRST_NAME = re.compile(rf"(?:{OUTPUT.pattern})|\w+")
_LAST_STEP = re.compile(r"""\[("[^"]*"|[^\[\]"]*)\]$|[.][^.\[\]"]+$""")
_POSITION = re.compile(r"\[\d+\]")
_NOT_CODE = re.compile(r"[<{…'\\]|cell_contents|_hooks\[")
"""Marks a path that cannot be assigned to as written; a key's quotes are shown as apostrophes."""
_REMEDIES_SHOWN = 3
"""Maximum number of statements in a remedy."""


class StoredGraph(NamedTuple):
    """A tensor whose graph may not be needed.

    ==========  ==========================================  ====================================
    kind        the tensor                                  how not to store its graph
    ==========  ==========================================  ====================================
    evaluation  the result of models in eval mode           ``with torch.no_grad():``
    output      one that only an output of IPython leads to ``out = result.detach()``
    sum         ``total += loss`` in a loop                 ``total += loss.item()``
    stored      an item of a container, or an attribute     ``losses.append(loss.item())``
    (empty)     a variable: ``backward()`` may follow       it may be needed
    ==========  ==========================================  ====================================
    """

    node: Any
    """The first node of its graph."""
    path: str
    instead: str
    """The statement that would not store the graph."""
    kind: str
    value: str = ""
    """Code of the value without the graph."""
    places: int = 1
    """Number of containers that hold the tensor."""

    @classmethod
    def of(
        cls,
        tensor: Any,
        node: Any,
        path: str,
        shape: Sequence[int],
        holders: Sequence[Any],
        nodes: GraphNodes,
    ) -> StoredGraph:
        """Return a tensor with the kind of its graph, and the statement that would not store the
        graph.

        Args:
            tensor: the tensor.
            node: the first node of its graph.
            path: the user's path to it; empty if there is none.
            shape: its shape.
            holders: the objects that refer to it.
            nodes: all nodes of its graph, and of other graphs.
        """
        is_of_evaluation = nodes.leaves[id(node)] == {True}  # all its leaves are parameters at rest
        if path and is_of_evaluation:
            return cls(node, path, "wrap the evaluation in with torch.no_grad():", "evaluation")
        value = "loss.item()" if math.prod(shape) == 1 else "result.detach()"
        is_item = _is_item_of_list(tensor, path, holders)
        is_sum = path != "" and not is_item and nodes.is_sum(node)
        if _any_is(holders, tuple) or _cannot_be_assigned(path):
            instead = f"keep {value} in {_owner_in(path)}"
        elif is_item:  # losses.append(loss)
            instead = f"{_LAST_STEP.sub('', path)}.append({value})"
        elif not is_sum:  # state.loss = loss
            instead = f"{path} = {value}"
        elif adds(node):  # total += loss
            instead = f"{path} += {value}"
        else:  # mean = total / number
            instead = f"keep {value} in {path}"
        kind = _kind_of(path, is_sum=is_sum)
        return cls(node, path, instead, kind, value, _number_of_places(holders))

    @property
    def name(self) -> str:
        """The name or output at which the path begins."""
        return name_in(self.path)

    @property
    def statement(self) -> str:
        """The statement, with the number of further places where the tensor is kept."""
        if self.places < 2:
            return self.instead
        noun = "place" if self.places == 2 else "places"
        return f"{self.instead} (and in {self.places - 1:,} more {noun})"


def name_in(path: str) -> str:
    """Return the name or output at which a path begins."""
    first = _FIRST_NAME.search(path)
    assert first is not None
    return first[0]


def _kind_of(path: str, *, is_sum: bool) -> str:
    """Return the kind of a tensor's graph, as in the table of ``StoredGraph``, if it is of no
    evaluation.
    """
    if path.startswith(OUTPUT_PREFIX):
        return "output"
    if is_sum:
        return "sum"
    if not path or path.isidentifier():
        return ""
    return "stored"


def _cannot_be_assigned(path: str) -> bool:
    """Return True if no statement can assign to a path: it is no code, such as ``<locals>``, or it
    leads through a position (``models[3].loss``), so that it names one of many places.
    """
    return bool(_NOT_CODE.search(path) or _POSITION.search(_LAST_STEP.sub("", path)))


def _owner_in(path: str) -> str:
    """Return the words for the object that keeps the tensor at a path: its name, or
    ``the hook``.
    """
    return "the hook" if "_hooks[" in path else name_in(f"{path}_")


def _is_item_of_list(tensor: object, path: str, holders: Iterable[Any]) -> bool:
    """Return True if a path leads to an item of a list or deque; a dict may have numbers as keys,
    too.
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
    """Return the number of containers among holders. An object and the dict of its attributes are
    one.
    """
    containers = [holder for holder in holders if _any_is([holder], *CONTAINERS)]
    attributes = {
        id(instance_dict(holder)) for holder in containers if not is_exactly(holder, *CONTAINERS)
    }
    return sum(id(holder) not in attributes for holder in containers)


def _any_is(items: Iterable[object], *kinds: type) -> bool:
    """Return True if one of the items is an instance of one of the types."""
    return any(is_instance(item, kind) for item in items for kind in kinds)


class SavedStorages(NamedTuple):
    """The storages that the nodes of graphs have saved."""

    groups: dict[StorageKey, set[str]]
    """The names of the groups that need each storage; an empty name for nodes that are needed."""
    node_ids: set[int]
    """Identities of the nodes that have saved one, and of their dicts of attributes."""


class GraphGroups:
    """Groups of tensors with graphs that may not be needed. Tensors are in one group if they are
    below one name, such as ``losses[0]`` and ``losses[1]``, or if their graphs share results.

    A node belongs to the group whose tensors alone need it.

    Args:
        nodes: the nodes of all graphs.
        needed: nodes that are needed, with all nodes behind them.

    Attributes:
        members: the tensors of each group, by the group's name: that of its first tensor.
    """

    def __init__(self, nodes: GraphNodes, needed: Iterable[Any]) -> None:
        self.members: dict[str, list[StoredGraph]] = {}
        self._nodes = nodes
        behind_needed = nodes.behind(needed, {})
        self._owners = dict.fromkeys(map(id, behind_needed.followed), _MAY_BE_NEEDED)
        """The name of the group that needs a node, by the node's identity."""

    def add(self, graph: StoredGraph) -> None:
        """Add a tensor to the group with whose graphs its own shares results; if there is none, to
        the group of its name. A tensor whose graph is needed as a whole is in no group.
        """
        behind = self._nodes.behind([graph.node], self._owners)
        sharing_groups = []
        for node in behind.boundary:
            name = self._owners[id(node)]
            # Several graphs may end in one leaf: that does not make them a group.
            if name != _MAY_BE_NEEDED and not is_leaf(node):
                sharing_groups.append(name)
        group = sharing_groups[0] if sharing_groups else graph.name
        self._owners.update(dict.fromkeys(map(id, behind.followed), group))
        if behind.followed or sharing_groups:
            self.members.setdefault(group, []).append(graph)

    def saved(self) -> SavedStorages:
        """Return the storages that nodes have saved, each with the groups that need it."""
        groups_by_storage = dict[StorageKey, set[str]]()
        node_ids = set[int]()
        for node, item in self._nodes.saved():
            node_ids |= {id(node), id(instance_dict(node))}  # a Function refers to saved objects
            key = storage_key(item) or object_key(item)
            owner = self._owners[id(node)]
            groups_by_storage.setdefault(key, set()).add(owner)
        return SavedStorages(groups_by_storage, node_ids)


# -- words ----------------------------------------------------------------------------------------


def words_on_graphs(graphs: Sequence[StoredGraph]) -> tuple[str, str]:
    """Return the words on a group of tensors with graphs, such as
    ``losses: 100 tensors keep their autograd graphs``, and its remedy.
    """
    evaluations = [graph.instead for graph in graphs if graph.kind == "evaluation"]
    remedies = evaluations[:1]
    if not evaluations:
        remedies = _statements_of(graphs)
    remedy = f"unless you still call backward(): {'; '.join(remedies)}"
    if len(graphs) > 1:
        names = ", ".join(dict.fromkeys(graph.name for graph in graphs))
        return f"{names}: {len(graphs):,} tensors keep their autograd graphs", remedy
    (graph,) = graphs
    named = graph.path
    if "_hooks[" in graph.path:
        named = f"a hook on {graph.name}"
    elif _NOT_CODE.search(graph.path):
        named = graph.name
    return f"{named} keeps its autograd graph", remedy


def _statements_of(graphs: Sequence[StoredGraph]) -> list[str]:
    """Return the statements that would not store the tensors' graphs. Of more than
    ``_REMEDIES_SHOWN``, the last item is their number: ``and 12 more``.
    """
    number_of_sums = Counter(_owner_of(graph) for graph in graphs if graph.kind == "sum")
    statements = dict[str, None]()
    for graph in sorted(graphs, key=_in_order_of_paths):
        # Totals in one dict are copies of one total, each of which is stored.
        is_copy = number_of_sums[_owner_of(graph)] > 1 and not graph.path.isidentifier()
        if graph.kind == "sum" and is_copy and not _cannot_be_assigned(graph.path):
            graph = graph._replace(instead=f"{graph.path} = {graph.value}")
        statements[graph.statement] = None
    statements_shown = list(statements)[:_REMEDIES_SHOWN]
    if len(statements) > len(statements_shown):
        statements_shown.append(f"and {len(statements) - len(statements_shown):,} more")
    return statements_shown


def _owner_of(graph: StoredGraph) -> str:
    """Return the path to the container that has the tensor: ``totals`` for ``totals["loss"]``."""
    return _LAST_STEP.sub("", graph.path)


def _in_order_of_paths(graph: StoredGraph) -> tuple[bool, int, str]:
    """Return a sort key by which sums come first, then short paths. The collector lists tensors in
    any order, and the remedy should always be the same.
    """
    return graph.kind != "sum", len(graph.path), graph.path
