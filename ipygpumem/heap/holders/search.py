"""Names the holder that keeps each storage or object alive, with the line that frees it, such as
``notebook variable runs[3]["loss"]`` with ``del runs[3]["loss"]``.

Attributes are found by identity in instance dicts and slots, and keys are shown if they are plain
text or numbers, so that no user code runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from ipygpumem.heap.holders.backward import MOST_VISITS
from ipygpumem.heap.holders.explanation import (
    NO_OBJECT,
    NOT_REACHED,
    OUT_OF_SIGHT,
    HolderSearch,
)
from ipygpumem.heap.holders.kept_by_graphs import (
    GraphHolders,
    search_graph_holders,
    with_saving_graphs,
)
from ipygpumem.heap.holders.rows import Row, RowHolders, objects_of_storages
from ipygpumem.heap.kinds.arrays import StorageKey, object_key
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.paths.roots import Roots


def explain(
    keys: Iterable[StorageKey],
    heap: Heap,
    roots: Roots,
    *,
    objects: Iterable[object] = (),
    rows: Mapping[StorageKey, Row] | None = None,
    all_places: bool = False,
    max_visits: int = MOST_VISITS,
) -> dict[StorageKey, Holder]:
    """Return the holder that keeps each storage or object alive, by its key.

    Of the holders that the searches find for a key, the first one in this list counts:

    1. a path from a root, and the graphs that have saved the storage, too:
       ``notebook variable batch, notebook variable loss: its autograd graph``;
    2. only a path from a root: ``notebook variable batch``;
    3. only a tensor whose graph or gradient keeps the storage: ``notebook variable loss: its
       autograd graph``;
    4. an object to which no root leads: ``a list that nothing visible from Python refers to``;
    5. words, if no search has found a holder.

    Args:
        keys: the storages.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        objects: further objects, such as lists; the key of each is "object" and its identity.
        rows: the rows for which storages or objects stand, by their keys. The holder of such a key
            is the nearest one of all the row's arrays; the search sets ``held_storages`` of the
            row.
        all_places: True if the advice must remove an object from all places that hold it.
        max_visits: maximum number of objects to examine.
    """
    wanted = set(keys)
    items_by_key = _items_by_key(wanted, objects, heap)
    row_holders = RowHolders(rows or {}, heap, roots.namespaces)
    search = HolderSearch(items_by_key, heap, roots, max_visits, rows=row_holders)
    explanation = search.explain(all_places=all_places)
    from_roots = explanation.from_roots
    without_root = wanted - from_roots.keys()
    by_graphs = GraphHolders({}, explanation.is_limited)
    if without_root and heap.tensors:
        # A gradient dies with its tensor. If a line already removes the tensor from all places, the
        # holder of the tensor is that of the gradient, too.
        holders_that_free = _holders_that_free(from_roots, rows or {}) if all_places else {}
        by_graphs = search_graph_holders(
            without_root,
            heap,
            roots,
            max_visits,
            is_limited=explanation.is_limited,
            holders_that_free=holders_that_free,
        )
    by_both = with_saving_graphs(from_roots, wanted - without_root, heap, roots, max_visits)
    in_words = _holders_in_words(
        wanted, items_by_key.keys() - wanted, is_limited=by_graphs.is_limited
    )
    # In the reverse order of the docstring: of several holders of a key, the last one counts.
    return {**in_words, **explanation.without_root, **by_graphs.holders, **from_roots, **by_both}


def _items_by_key(
    storages: Set[StorageKey], objects: Iterable[object], heap: Heap
) -> dict[StorageKey, list[object]]:
    """Return the objects that must die to free each storage, and each object itself, by key."""
    items_by_key: dict[StorageKey, list[object]] = {object_key(item): [item] for item in objects}
    for key, item in objects_of_storages(heap, storages):
        items_by_key.setdefault(key, []).append(item)
    return items_by_key


def _holders_in_words(
    storages: Set[StorageKey], objects: Set[StorageKey], *, is_limited: bool
) -> dict[StorageKey, Holder]:
    """Return, for each storage and object, the words to show if no search has found its holder.

    Args:
        storages: the storages.
        objects: the keys of the objects.
        is_limited: True if the search has not reached everything.
    """
    if is_limited:
        return dict.fromkeys(storages | objects, NOT_REACHED)
    unknown = dict.fromkeys(storages, NO_OBJECT)
    # An array's memory belongs to a Python object, which lives as long as the memory does.
    of_arrays = [key for key in storages if key[0] == "numpy"]
    unknown.update(dict.fromkeys([*of_arrays, *objects], OUT_OF_SIGHT))
    return unknown


def _holders_that_free(
    holders: Mapping[StorageKey, Holder], rows: Mapping[StorageKey, Row]
) -> dict[StorageKey, Holder]:
    """Return each storage that the line of a holder frees, with this holder.

    These are more storages than ``holders`` has. A row of 40 tensors is searched by its first one,
    and the line ``runs.clear()`` frees all of them.

    Args:
        holders: the holder of each storage that was searched.
        rows: the rows, each by the storage that was searched for it.
    """
    holders_that_free = dict[StorageKey, Holder]()
    for key, holder in holders.items():
        if not holder.remedy.is_simple:  # words, which free nothing by themselves
            continue
        freed_storages = rows[key].removed_storages() if key in rows else {key}
        holders_that_free.update(dict.fromkeys(freed_storages, holder))
    return holders_that_free
