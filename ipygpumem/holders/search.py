"""Who keeps an object alive: the shortest chain of references from something that the user can name.

The search goes backwards from the objects in question, one level of referrers at a time, each level one pass of the
garbage collector over the heap in C. It ends at roots: namespaces, modules, threads, running functions. Only what was
alive when the ``Heap`` was made counts, so that the search never finds itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import Any

from ipygpumem.arrays import StorageKey, storage_key
from ipygpumem.heap import Heap
from ipygpumem.holders.frames import peek, running_frames, running_ids
from ipygpumem.holders.graphs import GRADIENT, keepers, requiring_grad
from ipygpumem.holders.paths import Place, Writer, key_of
from ipygpumem.kinds import is_kind, module_dict, text_of
from ipygpumem.model import Holder


@dataclass(frozen=True)
class Roots:
    """What the user can name, besides modules, threads and running functions, which every program has.

    Attributes:
        namespaces: by the identity of a dict: makes the place of one of its keys.
        objects: by the identity of an object: its place.
        hidden: identities of objects that are not to be followed: they hold things for a moment only.
        cell_of: the number of the cell that a code's file name stands for.
    """

    namespaces: Mapping[int, Callable[[object], Place]] = field(default_factory=dict)
    objects: Mapping[int, Place] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()
    cell_of: Callable[[str], int | None] = lambda filename: None


_MOST_OWNERS = 5000
_MOST_LOOKS = 20_000_000
_NOBODY = Holder(path="no Python object: C++ code keeps it", advice="let the library that made it free it")
_NOT_REACHED = Holder(
    path="something that the search did not reach within its limits",
    advice="free what is listed above it, then ask %gpumem leaks again",
)
_CYCLE = Holder(
    path="a cycle in torch's own C++ code: a gradient that has a graph, as after backward(create_graph=True)",
    advice="set .grad to None before the tensor's names go",
)


@dataclass(frozen=True)
class _Found:
    """A root, and the objects from it to the target."""

    place: Place
    chain: tuple[object, ...]


def explain(
    keys: Iterable[StorageKey], heap: Heap, roots: Roots, *, looks: int = _MOST_LOOKS
) -> dict[StorageKey, Holder]:
    """Return for each storage who keeps it alive.

    Args:
        keys: identities of storages, see ``arrays.storage_key``.
        heap: what is alive.
        roots: what else the user can name.
        looks: how many objects are asked to what they refer, in each of three searches. What is not explained then
            stays so, and its holder says that. A limit of time would let answers change from call to call.
    """
    left_out = False

    def holders_of(objects: dict[StorageKey, list[object]], *, nobody: bool = False) -> dict[StorageKey, Holder]:
        nonlocal left_out
        found, cut = _holders(objects, heap, roots, looks, nobody=nobody)
        left_out |= cut
        return found

    objects = _objects_of(set(keys), heap)
    found = holders_of(objects)
    rest = set(keys) - found.keys()
    cycles: set[StorageKey] = set()
    if rest and heap.tensors:
        # What a graph has saved may be an object in Python too, which nobody but the graph holds: that is no answer.
        candidates = requiring_grad(heap.tensors)
        left_out |= len(candidates) > _MOST_OWNERS
        owners = {("object", id(tensor)): [tensor] for tensor in candidates[:_MOST_OWNERS]}
        named = holders_of(owners)
        kept, complete = keepers([owners[owner][0] for owner in named], rest)
        for key, keeper in kept.items():
            found[key] = Holder(named["object", id(keeper.tensor)].path + keeper.how, keeper.advice)
        rest -= found.keys()
        among_themselves, _ = keepers(heap.tensors, rest)
        left_out |= not complete
        if any(keeper.how == GRADIENT for keeper in among_themselves.values()):
            cycles = set(among_themselves)
    if not left_out:  # else somebody whom the search did not reach may hold them
        found.update(dict.fromkeys(cycles, _CYCLE))
    rest -= found.keys() | cycles
    found.update(holders_of({key: objects[key] for key in rest & objects.keys()}, nobody=True))
    return {**dict.fromkeys(keys, _NOT_REACHED if left_out else _NOBODY), **found}


def _objects_of(keys: set[StorageKey], heap: Heap) -> dict[StorageKey, list[object]]:
    """Return the tensors and arrays that show each storage."""
    objects: dict[StorageKey, list[object]] = {}
    for item in [*heap.tensors, *heap.ndarrays] if keys else ():
        key = storage_key(item) or ("object", id(item))
        if key in keys:
            objects.setdefault(key, []).append(item)
    return objects


def _holders(
    objects: dict[StorageKey, list[object]], heap: Heap, roots: Roots, looks: int, *, nobody: bool
) -> tuple[dict[StorageKey, Holder], bool]:
    """Return who holds the objects of each storage: the one that is named best; and whether some were not reached."""
    search = _Search([item for items in objects.values() for item in items], heap, roots, looks)
    search.run(nobody=nobody)
    writer = Writer(roots.cell_of)
    holders: dict[StorageKey, Holder] = {}
    for key, items in objects.items():
        found = [chain for item in items if (chain := search.found(item)) is not None]
        if found:
            best = min(found, key=lambda item: (item.place.rank, len(item.chain)))
            holders[key] = writer.holder(best.place, best.chain)
    return holders, search.is_cut and len(holders) < len(objects)


class _Search:
    """A breadth-first search from many targets at once, against the direction of the references."""

    _MOST_LEVELS = 40
    _WIDEST_LEVEL = 20_000

    def __init__(self, targets: Sequence[object], heap: Heap, roots: Roots, looks: int) -> None:
        self._targets = targets
        self._heap = heap
        self._roots = roots
        self._looks = looks
        self.is_cut = False
        """Whether the search ended, somewhere, before it had seen everything."""
        self._modules = {id(module_dict(module)): name for name, module in _modules()}
        self._running = running_ids()
        self._objects: dict[int, object] = {}
        self._children: dict[int, list[tuple[int, int]]] = {}
        """For each referrer the objects of earlier levels to which it refers, with the level at which that was seen."""
        self._leaves: dict[int, set[int]] = {}
        """For each object the targets that it leads to."""
        self._towards: dict[int, int | None] = {}
        """For each object that a root leads to the next one on the way up; None at the root's own child."""
        self._places: dict[int, Place] = {}
        self._level = 0
        self._others: list[tuple[int, Place, int]] = []
        """Roots that are no names of the notebook's, at which level, and what they keep, the nearest first."""
        self._keys: dict[int, dict[int, list[object]]] = {}
        """For each namespace the keys of its values, by their identities."""
        self._tops: list[int] = []
        """Objects that nothing seen refers to."""

    def run(self, *, nobody: bool) -> None:
        """Search; with ``nobody`` also tell of objects that nothing in sight refers to."""
        level = {id(target): target for target in self._targets}
        self._objects.update(level)
        self._leaves = {key: {key} for key in level}
        running = self._running_locals()
        for self._level in count():
            level = {key: item for key, item in level.items() if self._is_open(key)}
            if not level:
                break
            if self._level == self._MOST_LEVELS or (self._level + 1) * self._heap.size > self._looks:
                self.is_cut = True
                break
            self._others += [(self._level, running[key], key) for key in level.keys() & running.keys()]
            level = self._next(level)
        # An output, the last error or a module may hold what a variable holds too, by a longer path: that is no leak.
        for number, place, key in self._others:
            if self._is_open(key):
                self._towards.setdefault(key, None)
                self._places.setdefault(key, place)
                self._lead_on(key, number)
        for top in self._tops if nobody else ():
            if self._is_open(top):
                self._solve(top, Place.of_nobody())

    def _running_locals(self) -> dict[int, Place]:
        """Return the places of what the local names of running functions refer to."""
        return {
            id(value): Place.of_running(frame, thread, name)
            for frame, thread in running_frames()
            for name, value in peek(frame).items()
        }

    def _is_open(self, key: int) -> bool:
        """Whether an object leads to a target of which nobody knows yet who holds it."""
        return any(leaf not in self._towards for leaf in self._leaves[key])

    def _next(self, level: dict[int, object]) -> dict[int, object]:
        """Look at all that refers to ``level``: solve what roots refer to, and return the rest."""
        following: dict[int, object] = {}
        roots: list[tuple[Place, int]] = []
        referred: set[int] = set()
        for referrer, children in self._heap.referrers(level):
            key = id(referrer)
            if key in self._roots.hidden or key in self._running:
                continue
            referred.update(children)
            places = [(self._place(referrer, level[child]), child) for child in children]
            roots += [(place, child) for place, child in places if place is not None]
            if all(place is None for place, _ in places) and self._is_news(key, children):
                if key in self._towards:
                    self._lead_on(key)
                elif len(following) < self._WIDEST_LEVEL:
                    following[key] = referrer
                else:
                    self.is_cut = True
        self._objects.update(following)
        self._tops += [key for key in level if key not in referred and key in self._children]
        for place, child in sorted(roots, key=lambda root: root[0].rank):
            if place.rank == 0:
                self._solve(child, place)
            else:
                self._others.append((self._level, place, child))
        return following

    def _place(self, referrer: object, child: object) -> Place | None:
        """Return the place where ``referrer`` keeps ``child`` if it is a root, else None."""
        key = id(referrer)
        if key in self._roots.namespaces:
            places = map(self._roots.namespaces[key], self._keys_of(referrer, child))
            return min(places, key=lambda place: place.rank, default=None)  # a variable before an output of the same
        if key in self._roots.objects:
            return self._roots.objects[key]
        if key in self._modules:
            return Place.of_module(self._modules[key], key_of(referrer, child))
        if type(referrer) is ModuleType:
            return Place.of_module(text_of(module_dict(referrer).get("__name__")), None)
        if is_kind(referrer, threading.Thread):
            return Place.of_thread(referrer)
        return None

    def _keys_of(self, namespace: Any, child: object) -> list[object]:
        """Return the keys under which a namespace, which may be large, keeps ``child``."""
        if id(namespace) not in self._keys:
            keys = self._keys[id(namespace)] = {}
            for key, value in list(dict.items(namespace)):
                keys.setdefault(id(value), []).append(key)
        return self._keys[id(namespace)].get(id(child), [])

    def _is_news(self, key: int, children: list[int]) -> bool:
        """Note to what a referrer leads, and return whether it leads to a target that it was not known to lead to."""
        leaves = self._leaves.setdefault(key, set())
        known = len(leaves)
        leaves.update(*(self._leaves[child] for child in children))
        self._children.setdefault(key, []).extend((self._level, child) for child in children)
        return len(leaves) > known

    def _solve(self, key: int, place: Place) -> None:
        """Note that a root keeps ``key``, and so all that it leads to."""
        if key not in self._towards:
            self._towards[key] = None
            self._places[key] = place
            self._lead_on(key)

    def _lead_on(self, key: int, level: int | None = None) -> None:
        """Note that all to which ``key`` leads is kept by the root that keeps it.

        Args:
            key: of an object that a root keeps.
            level: only what it was known to lead to by then: by longer ways it may lead to what others keep nearer.
        """
        waiting, done = [key], set[int]()
        while waiting:
            parent = waiting.pop()
            for seen_at, child in self._children.get(parent, ()):
                if child not in done and (child not in self._towards if level is None else seen_at <= level):
                    done.add(child)
                    self._towards.setdefault(child, parent)
                    waiting.append(child)

    def found(self, target: object) -> _Found | None:
        """Return the chain from a root to ``target``, if there is one."""
        if id(target) not in self._towards:
            return None
        key: int = id(target)
        chain = [target]
        while (parent := self._towards[key]) is not None:
            chain.append(self._objects[parent])
            key = parent
        return _Found(self._places[key], tuple(reversed(chain)))


def _modules() -> list[tuple[str, ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items()) if is_kind(module, ModuleType)]
