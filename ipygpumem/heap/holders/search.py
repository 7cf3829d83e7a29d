"""Finds the shortest chain of references from a name of the user to an object.

The search goes backwards from the targets, one level of referrers at a time, each level one pass of
the collector over the heap in C. It ends at roots: namespaces, modules, threads, running functions.
Only objects that were alive when the ``Heap`` was made count, so that the search never finds
itself. No user code runs: attributes are found by identity in instance dicts and slots, and keys
are shown if they are plain text or numbers.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import (
    ModuleType,
)
from typing import Any

from ipygpumem.heap.arrays import (
    StorageKey,
    is_array,
    is_of_library,
    storage_key,
)
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.cuts import statement_of
from ipygpumem.heap.holders.frames import SUSPENDED, peek, running_frames, running_ids
from ipygpumem.heap.holders.graphs import GRADIENT, keepers, requiring_grad
from ipygpumem.heap.holders.paths import PathWriter, Way, joined, owns
from ipygpumem.heap.holders.roots import (
    EVENT_LOOP,
    NOTEBOOK,
    OF_IPYTHON,
    REMOVE,
    REMOVE_THEM,
    Root,
    Roots,
    module_code,
)
from ipygpumem.heap.holders.rows import Row, RowHolders
from ipygpumem.heap.holders.tasks import context_values, wakes_task
from ipygpumem.introspect import (
    instance_dict,
    is_exactly,
    is_instance,
    is_name,
    is_users_class,
    module_dict,
    module_of,
    text_of,
    type_name,
)
from ipygpumem.records import ReferencePath

_Ways = dict[int, tuple[Root, int | None]]
"""For each object reachable from a root: the root, and the next object on the way up to it."""
_MAKES_DICTS = (3, 11) <= sys.version_info < (3, 13)
_MANAGED_DICT = 1 << 4
_MOST_OWNERS = 5000
MOST_VISITS = 20_000_000
_NO_OBJECT = ReferencePath(
    path="no Python object: C++ code keeps it", advice="let the library that made it free it"
)
_OUT_OF_SIGHT = ReferencePath(
    path="something that cannot be seen from Python: a running function or compiled code",
    advice=(
        "end the function, or take the object out of the library that has it, as by "
        "atexit.unregister(function)"
    ),
)
_NOT_REACHED = ReferencePath(
    path="something that the search did not reach within its limits",
    advice="free something, then ask %gpumem leaks again",
)
_CYCLE = ReferencePath(
    path=(
        "a cycle in torch's own C++ code: a gradient that has a graph, as after "
        "backward(create_graph=True)"
    ),
    advice="set .grad to None before you delete the tensor",
)


def explain(
    keys: Iterable[StorageKey],
    heap: Heap,
    roots: Roots,
    *,
    more: Iterable[object] = (),
    rows: Mapping[StorageKey, Row] | None = None,
    all_places: bool = False,
    max_visits: int = MOST_VISITS,
) -> dict[StorageKey, ReferencePath]:
    """Return the holder that keeps each storage alive; the key of each of ``more`` is "object" and
    its identity.

    The holder of a storage that stands for a row in ``rows`` is the nearest one of all the row's
    arrays; it sets ``held`` of the row. With ``all_places``, the advice removes an object from all
    places that hold it.
    """
    wanted = set(keys)
    objects: dict[StorageKey, list[object]] = {("object", id(item)): [item] for item in more}
    without_storage = objects.keys() - wanted
    for item in [*heap.tensors, *heap.ndarrays] if wanted else ():
        key = storage_key(item) or ("object", id(item))
        if key in wanted:
            objects.setdefault(key, []).append(item)
    of_rows = RowHolders(rows or {}, heap, roots.namespaces)
    found = _Explanation(objects, heap, roots, max_visits)
    found.explain(rows=of_rows, all_places=all_places)
    holders, unnamed, left_out = found.named, found.unnamed, found.is_cut
    rest = wanted - holders.keys()
    if rest and heap.tensors:
        # A tensor saved by a graph may also be a Python object that only the graph refers to, which
        # is no answer.
        candidates = requiring_grad(heap.tensors)
        owners = {("object", id(tensor)): [tensor] for tensor in candidates[:_MOST_OWNERS]}
        of_owners = _Explanation(owners, heap, roots, max_visits)
        of_owners.explain(of_graphs=True)
        named = of_owners.named
        ordered = sorted(named, key=lambda owner: _order(named[owner]))
        kept, complete = keepers([owners[owner][0] for owner in ordered], rest)
        for key, keeper in kept.items():
            owner = named["object", id(keeper.tensor)]
            advice = keeper.advice and (owner.advice or keeper.advice)
            if keeper.how == GRADIENT:
                advice = _clearing_gradients(owner.path, roots.names)
            holders[key] = ReferencePath(owner.path + keeper.how, advice)
        left_out |= of_owners.is_cut or not complete or len(candidates) > _MOST_OWNERS
        among_themselves, _ = keepers(heap.tensors, rest - kept.keys())
        if any(keeper.how == GRADIENT for keeper in among_themselves.values()):
            holders.update(dict.fromkeys(among_themselves, _NOT_REACHED if left_out else _CYCLE))
    # An array's memory belongs to a Python object, which lives as long as the memory does.
    of_python = {key for key in wanted if key[0] == "numpy"} | without_storage
    unknown = dict.fromkeys(wanted, _NOT_REACHED if left_out else _NO_OBJECT)
    unknown.update((key, _NOT_REACHED if left_out else _OUT_OF_SIGHT) for key in of_python)
    return {**unknown, **unnamed, **holders}


def _clearing_gradients(path: str, names: Mapping[str, object]) -> str:
    """Return the statement that drops the gradient of a tensor with some path; empty if there is no
    code for it.

    It drops those of a whole module: one step of training makes all of them.
    """
    code = path.removeprefix(NOTEBOOK)
    name = code.partition(".")[0].partition("[")[0]
    if code == path or ": " in code or not is_name(name):
        return ""
    if is_of_library(names.get(name), "torch.nn", "Module"):
        return f"{name}.zero_grad()"
    return f"{name}.grad = None" if code == name else ""


class _Explanation:
    """The holders of some storages, each of which belongs to some objects.

    Attributes:
        named: the best-named holders.
        unnamed: the holders to which nothing visible refers.
        is_cut: True if some holders may not have been reached.
    """

    def __init__(
        self, objects: Mapping[StorageKey, list[object]], heap: Heap, roots: Roots, max_visits: int
    ) -> None:
        self._objects = objects
        self._search = Search(
            [item for items in objects.values() for item in items], heap, roots, max_visits
        )
        self._writer = PathWriter(roots)
        self._kept = roots.kept
        self._max_visits = max_visits
        self._targets: dict[StorageKey, tuple[object, Way]] = {}
        """The object to remove for each storage, and the best way to it."""
        self.named: dict[StorageKey, ReferencePath] = {}
        self.unnamed: dict[StorageKey, ReferencePath] = {}
        self.is_cut = False

    def explain(
        self,
        *,
        rows: RowHolders | None = None,
        all_places: bool = False,
        of_graphs: bool = False,
    ) -> None:
        """Find the holders, of whole rows if there are any."""
        for key, items in self._objects.items():
            found = self._nearest(self._search.named, items, of_graphs=of_graphs)
            if found is not None:
                self.named[key] = self._of_row(key, *found, rows).holder
        for key, items in self._objects.items():
            found = (
                None
                if key in self.named
                else self._nearest(self._search.unnamed, items, of_graphs=of_graphs)
            )
            if found is not None:
                self.unnamed[key] = found[1].holder
        self.is_cut = self._search.is_cut and len(self.named) < len(self._objects)
        if all_places:
            self._add_other_holders()

    def _nearest(
        self, ways: _Ways, items: Sequence[object], *, of_graphs: bool
    ) -> tuple[tuple[Root, tuple[object, ...]], Way] | None:
        """Return the shortest chain from a root to one of some objects, and its text; None if there
        is none.
        """
        chains = []
        for item in items:
            chain = self._search.chain(item, ways)
            if chain is not None:
                chains.append(chain)
        nearest = min(((root.rank, len(steps)) for root, steps in chains), default=None)
        nearby = [chain for chain in chains if (chain[0].rank, len(chain[1])) == nearest]
        written = [(chain, self._writer.way(*chain, of_graph=of_graphs)) for chain in nearby]
        return min(written, key=lambda pair: _order(pair[1].holder), default=None)

    def _of_row(
        self,
        key: StorageKey,
        chain: tuple[Root, tuple[object, ...]],
        way: Way,
        rows: RowHolders | None,
    ) -> Way:
        """Return the way to the holder of a whole row, given the way to one of its arrays."""
        root, steps = chain
        row = None if rows is None else rows.row(key)
        if rows is None or row is None:
            self._targets[key] = steps[-1], way
            return way
        shorter = rows.shortened(key, steps)
        holder = shorter[-1]
        if len(shorter) == len(steps):
            self._targets[key] = holder, way
            return way
        way = self._writer.way(root, shorter)
        if id(holder) == row.object_id:
            self._targets[key] = holder, way
            return way
        if row.is_inside_item and is_instance(
            holder, dict
        ):  # such as a pandas object: it is removed as a whole
            item = steps[len(shorter)]
            self._targets[key] = item, self._writer.way(root, (*shorter, item))
            return self._targets[key][1]
        cuts = self._writer.cuts_inside(root, shorter, row.array_ids)
        reached = {row.array_ids[id(item)] for item, _ in cuts}
        if not row.held <= reached:
            cuts = []
        advice = statement_of([cut for _, cut in cuts])
        if not advice:
            advice = REMOVE if len(row.storages) == 1 else REMOVE_THEM
        return Way(ReferencePath(way.holder.path, advice))

    def _add_other_holders(self) -> None:
        """Name the other places that hold an object, too: it dies only if it is removed from all of
        them.
        """
        targets = {key: pair for key, pair in self._targets.items() if pair[1].cut is not None}
        self._search.search_for_all([target for target, _ in targets.values()], self._max_visits)
        for key, (target, way) in targets.items():
            assert way.cut is not None
            found = {way.holder.advice: way}
            # A registry leads from each of its objects to all of them.
            ways_to_target = [] if id(target) in self._kept else self._search.ways_to([target])
            for names, steps, _ in ways_to_target:
                if any(step is target for step in steps[:-1]):
                    continue  # the object's own part refers to it
                other = self._writer.way(names[0], steps)
                found.setdefault(other.holder.advice, other)
            ways = list(found.values())
            if len(ways) > 1:
                self.named[key] = joined(ways)
            elif not way.holder.advice:
                self.named[key] = ReferencePath(way.holder.path, statement_of([way.cut]))


def _order(holder: ReferencePath) -> tuple[bool, int, str]:
    """Return the sort key that picks the holder to show, independent of the order in which the
    collector lists them.
    """
    return (not holder.path.startswith(NOTEBOOK), len(holder.path), holder.path)


class Search:
    """A breadth-first search from many targets at once, against the direction of the references."""

    _MOST_LEVELS = 40
    _WIDEST_LEVEL = 20_000

    def __init__(
        self,
        targets: Sequence[object],
        heap: Heap,
        roots: Roots,
        max_visits: int = MOST_VISITS,
        *,
        for_all: bool = False,
    ) -> None:
        """Search for the nearest variable of each target, or ``for_all`` of its holders."""
        self._heap, self._roots, self._for_all = heap, roots, for_all
        # __mp_main__ is __main__
        self._modules = {id(module_dict(module)): name for name, module in reversed(_modules())}
        self._running = running_ids()
        self._objects = {id(target): target for target in targets}
        self._targets = frozenset(self._objects)
        self._direct: dict[int, Root] = {}
        """The roots of objects that no other object need refer to: context variables' values, and
        running locals.
        """
        self._referrers: dict[int, list[int]] = {}
        """Referrers of each examined object, without roots."""
        self._children: dict[int, list[int]] = {}
        """The objects by which each referrer was found."""
        self._keys: dict[int, dict[int, list[object]]] = {}
        """For each namespace, the keys of its values by the values' identities."""
        self._references: dict[int, Counter[int]] = {}
        """Number of references from each holder to each object, by their identities."""
        self._kept: list[tuple[Root, int]] = []
        """Roots, and the objects that they keep."""
        self._tops: list[int] = []
        """Objects without a known referrer."""
        self.is_cut = False
        """True if the search ended somewhere before it had seen everything."""
        self.named: _Ways = {}
        self._run(list(self._objects), max_visits)
        self._finish()

    def search_for_all(self, targets: Sequence[object], max_visits: int = MOST_VISITS) -> None:
        """Go on until all holders of some objects that were examined are known."""
        self._for_all = True
        was_cut = self.is_cut
        self._run([id(target) for target in targets if id(target) in self._objects], max_visits)
        self.is_cut = was_cut
        self._finish()

    def _finish(self) -> None:
        # An output, the last error or a module may also hold, by a longer path, an object of a
        # variable: no leak.
        self.named = {**self._ways(self._kept), **self.named}
        self._roots_at: dict[int, list[Root]] = {}
        for root, key in self._kept:
            self._roots_at.setdefault(key, []).append(root)
        nowhere = Root("", 9, "end what keeps it: C++ code or a library")
        tops = sorted(self._tops, key=lambda key: type_name(self._objects[key]))
        self.unnamed = self._ways([(nowhere, key) for key in tops])

    def _run(self, targets: list[int], max_visits: int) -> None:
        if targets:
            self._direct = dict(self._roots.kept)
            for found in context_values(self._roots.names):
                self._direct[id(found.value)] = Root.of_context(found)
            for frame, thread in running_frames():
                local = peek(frame).items()
                self._direct.update(
                    (id(value), Root.of_running(frame, thread, name)) for name, value in local
                )
        for number in itertools.count():
            level = self._open(targets)
            if not level:
                return
            if number == self._MOST_LEVELS or (number + 1) * self._heap.size > max_visits:
                self.is_cut = True
                return
            self._kept += [(self._direct[key], key) for key in level if key in self._direct]
            self._look(level)
            self.named = self._ways([(root, key) for root, key in self._kept if root.rank == 0])

    def _open(self, targets: list[int]) -> list[int]:
        """Return the objects not examined yet that lead to a target without a variable known to
        hold it.
        """
        linked, ends = self._holders_of(targets) if self._for_all else ({}, targets)
        waiting = [key for key in ends if key not in self.named]
        seen = set(waiting)
        for key in waiting:  # the list grows
            new = [referrer for referrer in self._referrers.get(key, ()) if referrer not in seen]
            waiting += new
            seen.update(new)
        return [key for key in dict.fromkeys([*linked, *waiting]) if key not in self._referrers]

    def _holders_of(self, targets: Sequence[int]) -> tuple[dict[int, int | None], dict[int, int]]:
        """Return the targets with all that must die first, such as views and tuples, and the
        holders of these.

        The values are the objects by which the keys were found. A holder is one from which a user
        can remove an object.
        """
        linked, ends = dict[int, int | None].fromkeys(targets), dict[int, int]()
        waiting = list(linked)
        for key in waiting:  # the list grows
            for referrer in self._referrers.get(key, ()):
                if referrer not in linked and referrer not in ends:
                    if self._is_end(referrer):
                        ends[referrer] = key
                    else:
                        linked[referrer] = key
                        waiting.append(referrer)
        return linked, ends

    def _is_end(self, key: int) -> bool:
        item: Any = self._objects[key]
        if is_instance(
            item, dict
        ):  # known once its referrers are: an object's own dict dies with the object
            owners = map(self._objects.__getitem__, self._referrers.get(key, ()))
            return key in self._referrers and not any(owns(owner, item) for owner in owners)
        is_open = any(is_instance(item, kind) for kind in (list, set, deque, type)) or is_exactly(
            item, *SUSPENDED
        )
        return is_open or (
            is_users_class(type(item)) and not (is_array(item) or is_instance(item, tuple))
        )

    def _look(self, level: list[int]) -> None:
        """Record all objects that refer to those of a level."""
        self._referrers.update((key, []) for key in level)
        self.is_cut |= len(level) > self._WIDEST_LEVEL
        objects = {key: self._objects[key] for key in level[: self._WIDEST_LEVEL]}
        referred: set[int] = set()
        for referrer, children in self._heap.referrers(objects):
            if wakes_task(referrer):
                children = [key for key in children if key in self._targets]
            elif type_name(referrer).startswith("hamt"):  # part of a context
                children = [key for key in children if key not in self._direct]
            if not children or id(referrer) in self._roots.hidden or id(referrer) in self._running:
                continue
            referred.update(children)
            for holder, held in _with_own_dict(referrer, children):
                found = [
                    (root, key) for key in held for root in self._roots_in(holder, objects[key])
                ]
                self._kept += found
                if not found and id(holder) not in self._roots.namespaces:
                    self._objects[id(holder)] = holder
                    self._children.setdefault(id(holder), []).extend(held)
                    for key in held:
                        self._referrers[key].append(id(holder))
                if holder is not referrer:
                    # else the next search would end at the dict that this one has created
                    self._heap.add(holder)
        self._tops += [key for key in objects if key not in referred and key in self._children]

    def _ways(self, kept: list[tuple[Root, int]]) -> _Ways:
        """Return the shortest way from a root to each object that roots lead to."""
        ways: _Ways = {}
        for root, key in sorted(kept, key=lambda pair: (pair[0].rank, pair[0].text)):
            ways.setdefault(key, (root, None))
        waiting = list(ways)
        for parent in waiting:  # the list grows
            for child in self._children.get(parent, ()):
                if child not in ways:
                    ways[child] = ways[parent][0], parent
                    waiting.append(child)
        return ways

    def chain(self, target: object, ways: _Ways) -> tuple[Root, tuple[object, ...]] | None:
        """Return a root and the chain of objects from it to ``target``, if there is one among
        ``ways``.
        """
        key: int | None = id(target)
        if key not in ways:
            return None
        chain: list[object] = []
        while key is not None:
            chain.insert(0, self._objects[key])
            root, key = ways[key]
        return root, tuple(chain)

    def ways_to(
        self, targets: Sequence[object]
    ) -> list[tuple[list[Root], tuple[object, ...], int]]:
        """Return the roots that free a holder at once, a chain, and the number of references, for
        each holder.

        Variables come first. Only a search ``for_all`` knows all of them.
        """
        linked, ends = self._holders_of(list(map(id, targets)))
        found = list[tuple[list[Root], tuple[object, ...], int]]()
        for last, below in (*linked.items(), *ends.items()):
            item, down = self._objects[last], list[object]()
            while below is not None:
                down.append(self._objects[below])
                below = linked[below]
            if last in linked:
                roots: dict[str, list[Root]] = {}
                for root in sorted(self.roots_of(item), key=lambda root: (root.rank, root.text)):
                    # one ``del`` names them all
                    is_alias = not down and root.rank == 0 and not root.advice
                    kind = (
                        root.advice.partition(" ")[0]
                        if root.advice[:1] == "%"
                        else root.text * (not is_alias)
                    )
                    roots.setdefault(kind, []).append(root)
                found += [(several, (item, *down), 1) for several in roots.values()]
            elif (way := self.chain(item, self.named)) is not None:
                found.append(([way[0]], (*way[1], *down), self._references_from(item, linked)))
        found.sort(key=lambda way: way[0][0].rank)
        # IPython's own objects follow its outputs.
        of_users = [
            way for way in found if way[0][0].rank < OF_IPYTHON and not _is_of_ipython(way[1][0])
        ]
        return of_users or found

    def _references_from(self, holder: object, keys: Iterable[int]) -> int:
        """Return the number of references from an object, which may be large, to some objects."""
        counts = self._references.get(id(holder))
        if counts is None:
            counts = self._references[id(holder)] = Counter(map(id, gc.get_referents(holder)))
        return sum(map(counts.__getitem__, keys))

    def roots_of(self, target: object) -> list[Root]:
        """Return all roots that refer to ``target`` directly."""
        return self._roots_at.get(id(target), [])

    def _roots_in(self, referrer: object, child: object) -> list[Root]:
        """Return the roots with which ``referrer`` holds ``child``, if it is one."""
        key, found = id(referrer), list[Root]()
        if key in self._roots.namespaces:
            all_of_them = map(self._roots.namespaces[key], self._keys_of(referrer, child))
            found = [root for root in all_of_them if root is not None]
        elif key in self._roots.objects:
            found = [self._roots.objects[key]]
        elif key in self._modules:
            code = module_code(self._modules[key], self._roots.names)
            found = [
                Root.of_module(self._modules[key], name, code)
                for name in self._keys_of(referrer, child)
            ]
        elif (
            type(referrer) is ModuleType
            and sys.modules.get(text_of(module_dict(referrer).get("__name__"))) is referrer
        ):
            found = [Root.of_module(text_of(module_dict(referrer).get("__name__")), None)]
        elif is_instance(referrer, threading.Thread):
            name = text_of((instance_dict(referrer) or {}).get("_name"))
            found = [Root(f'thread "{name}"', 1, "let it end, then join() it")]
        elif is_of_library(
            referrer, "asyncio", "AbstractEventLoop"
        ):  # every task refers to it, and owns no other one
            found = [Root(EVENT_LOOP, 1, "let its tasks end, or cancel them")]
        return found

    def _keys_of(self, namespace: Any, child: object) -> list[object]:
        """Return the keys under which a namespace, which may be large, keeps ``child``."""
        if id(namespace) not in self._keys:
            keys = self._keys[id(namespace)] = {}
            for key, value in list(dict.items(namespace)):
                keys.setdefault(id(value), []).append(key)
        return self._keys[id(namespace)].get(id(child), [])


def _with_own_dict(referrer: object, children: list[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield the holder of ``children``: an object itself, or the dict of its attributes.

    CPython 3.11 and 3.12 create that dict when it is read, and reading it here must not make paths
    longer.
    """
    if not _MAKES_DICTS or not type.__dict__["__flags__"].__get__(type(referrer)) & _MANAGED_DICT:
        yield referrer, children
        return
    names = instance_dict(referrer) or {}
    values = set(map(id, list(names.values())))
    inside = [child for child in children if child in values]
    if inside:
        yield names, inside
    if len(inside) < len(children):
        yield referrer, [child for child in children if child not in values]


def _modules() -> list[tuple[str, ModuleType]]:
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if is_instance(module, ModuleType)
    ]


def _is_of_ipython(item: object) -> bool:
    return module_of(item).partition(".")[0] in ("IPython", "ipykernel")
