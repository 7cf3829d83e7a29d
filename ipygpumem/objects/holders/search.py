"""Finds who keeps an object alive: the shortest chain of references from something that the user can name.

The search goes backwards from the objects in question, one level of referrers at a time, each level one pass of the
garbage collector over the heap in C. It ends at roots: namespaces, modules, threads, running functions. Only what was
alive when the ``Heap`` was made counts, so that the search never finds itself.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ipygpumem.introspect import instance_dict, is_instance, module_dict, module_of, text_of, type_name
from ipygpumem.model import Holder
from ipygpumem.objects.arrays import StorageKey, storage_key
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.holders.frames import peek, running_frames, running_ids
from ipygpumem.objects.holders.graphs import GRADIENT, keepers, requiring_grad
from ipygpumem.objects.holders.paths import NOTEBOOK, Place, Writer


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


_MAKES_DICTS = (3, 11) <= sys.version_info < (3, 13)
_MANAGED_DICT = 1 << 4
_MOST_OWNERS = 5000
MOST_LOOKS = 20_000_000
_NOBODY = Holder(path="no Python object: C++ code keeps it", advice="let the library that made it free it")
_OUT_OF_SIGHT = Holder(path="something that cannot be seen from Python: a running function or compiled code", advice="")
_NOT_REACHED = Holder(
    path="something that the search did not reach within its limits",
    advice="free something, then ask %gpumem leaks again",
)
_CYCLE = Holder(
    path="a cycle in torch's own C++ code: a gradient that has a graph, as after backward(create_graph=True)",
    advice="set .grad to None before you delete the tensor",
)


@dataclass(frozen=True)
class _Found:
    """A root, and the objects from it to the target."""

    place: Place
    chain: tuple[object, ...]


def explain(
    keys: Iterable[StorageKey], heap: Heap, roots: Roots, *, looks: int = MOST_LOOKS
) -> dict[StorageKey, Holder]:
    """Return for each storage who keeps it alive."""
    left_out = False

    def holders_of(objects: dict[StorageKey, list[object]], *, nobody: bool = False) -> dict[StorageKey, Holder]:
        nonlocal left_out
        holders, cut = _holders(objects, heap, roots, looks, nobody=nobody)
        left_out |= cut
        return holders

    objects = _objects_of(set(keys), heap)
    holders = holders_of(objects)
    rest = set(keys) - holders.keys()
    cycles: set[StorageKey] = set()
    if rest and heap.tensors:
        # What a graph has saved may be an object in Python too, which nobody but the graph holds: that is no answer.
        candidates = requiring_grad(heap.tensors)
        left_out |= len(candidates) > _MOST_OWNERS
        owners = {("object", id(tensor)): [tensor] for tensor in candidates[:_MOST_OWNERS]}
        named = holders_of(owners)
        ordered = sorted(named, key=lambda owner: _order(named[owner]))
        kept, complete = keepers([owners[owner][0] for owner in ordered], rest)
        for key, keeper in kept.items():
            holders[key] = Holder(named["object", id(keeper.tensor)].path + keeper.how, keeper.advice)
        rest -= holders.keys()
        among_themselves, _ = keepers(heap.tensors, rest)
        left_out |= not complete
        if any(keeper.how == GRADIENT for keeper in among_themselves.values()):
            cycles = set(among_themselves)
    if not left_out:  # else somebody whom the search did not reach may hold them
        holders.update(dict.fromkeys(cycles, _CYCLE))
    rest -= holders.keys() | cycles
    holders.update(holders_of({key: objects[key] for key in rest & objects.keys()}, nobody=True))
    # The memory of an array belongs to an object in Python, which lives as long as the memory does.
    unknown = {key: _NOT_REACHED if left_out else _OUT_OF_SIGHT if key[0] == "numpy" else _NOBODY for key in keys}
    return {**unknown, **holders}


def _objects_of(keys: set[StorageKey], heap: Heap) -> dict[StorageKey, list[object]]:
    """Return the tensors and arrays that show each storage."""
    objects: dict[StorageKey, list[object]] = {}
    for item in [*heap.tensors, *heap.ndarrays] if keys else ():
        key = storage_key(item) or ("object", id(item))
        if key in keys:
            objects.setdefault(key, []).append(item)
    return objects


def _holders(
    objects: dict[StorageKey, list[object]],
    heap: Heap,
    roots: Roots,
    looks: int,
    *,
    nobody: bool,
) -> tuple[dict[StorageKey, Holder], bool]:
    """Return who holds the objects of each storage: the one that is named best; and whether some were not reached."""
    if not objects:
        return {}, False
    search = Search([item for items in objects.values() for item in items], heap, roots, looks)
    search.run(nobody=nobody)
    writer = Writer(roots.cell_of)
    holders: dict[StorageKey, Holder] = {}
    for key, items in objects.items():
        chains = [chain for item in items if (chain := search.found(item)) is not None]
        if chains:
            nearest = min((item.place.rank, len(item.chain)) for item in chains)
            nearby = [item for item in chains if (item.place.rank, len(item.chain)) == nearest]
            holders[key] = min((writer.holder(item.place, item.chain) for item in nearby), key=_order)
    return holders, search.is_cut and len(holders) < len(objects)


def _order(holder: Holder) -> tuple[bool, int, str]:
    """Order several holders, of which one is shown: never the one that the collector happens to list first."""
    return (not holder.path.startswith(NOTEBOOK), len(holder.path), holder.path)


class Search:
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
        self._modules = {
            id(module_dict(module)): name for name, module in reversed(_modules())
        }  # __mp_main__ is __main__
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
        """Search; with ``nobody``, also report objects to which nothing visible refers."""
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
        for number, place, key in sorted(self._others, key=lambda other: (other[0], other[1].order)):
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
        roots: list[tuple[Place, int]] = []
        referred: set[int] = set()
        seen: list[tuple[object, list[int]]] = []
        for referrer, children in self._heap.referrers(level):
            if id(referrer) in self._roots.hidden or id(referrer) in self._running:
                continue
            referred.update(children)
            for holder, held in with_own_dict(referrer, children):
                places = [(self._place(holder, level[child]), child) for child in held]
                roots += [(place, child) for place, child in places if place is not None]
                if all(place is None for place, _ in places):
                    seen.append((holder, held))
                if holder is not referrer:
                    self._heap.add(holder)  # else the next search would end at the dict that this one has made
        following, known = self._note(seen)
        self._objects.update(following)
        tops = [key for key in level if key not in referred and key in self._children]
        self._tops += sorted(tops, key=lambda key: type_name(level[key]))
        for place, child in sorted(roots, key=lambda root: root[0].order):
            if place.rank == 0:
                self._solve(child, place)
            else:
                self._others.append((self._level, place, child))
        for trail in sorted(map(self._trail, known), key=lambda trail: (len(trail), self._places[trail[-1]].order)):
            self._lead_on(trail[0])
        return following

    def _note(self, seen: list[tuple[object, list[int]]]) -> tuple[dict[int, object], list[int]]:
        """Note where referrers lead; return those to follow, and those to which a root is known to lead.

        The collector lists objects in an order that changes from call to call. No answer may depend on it.
        """
        following: dict[int, object] = {}
        known: list[int] = []
        leaves = [set[int]().union(*(self._leaves[child] for child in held)) for _, held in seen]
        for (holder, held), new in zip(seen, leaves, strict=True):
            key = id(holder)
            if not self._is_news(key, held, new):
                continue
            if key in self._towards:
                known.append(key)
            elif len(following) < self._WIDEST_LEVEL:
                following[key] = holder
            else:
                self.is_cut = True
        return following, known

    def _place(self, referrer: object, child: object) -> Place | None:
        """Return the place where ``referrer`` keeps ``child`` if it is a root, else None."""
        # A variable before an output of the same.
        return min(self.names_in(referrer, child), key=lambda place: place.rank, default=None)

    def names_in(self, referrer: object, child: object) -> list[Place]:
        """Return the places where ``referrer`` keeps ``child`` if it is a root."""
        key = id(referrer)
        if key in self._roots.namespaces:
            return list(map(self._roots.namespaces[key], self._keys_of(referrer, child)))
        if key in self._roots.objects:
            return [self._roots.objects[key]]
        if key in self._modules:
            module, is_home = self._modules[key], _home(child) == self._modules[key]
            return [Place.of_module(module, name, is_home=is_home) for name in self._keys_of(referrer, child)]
        if type(referrer) is ModuleType:
            return [Place.of_module(text_of(module_dict(referrer).get("__name__")), None)]
        if is_instance(referrer, threading.Thread):
            return [Place.of_thread(referrer)]
        return []

    def _keys_of(self, namespace: Any, child: object) -> list[object]:
        """Return the keys under which a namespace, which may be large, keeps ``child``."""
        if id(namespace) not in self._keys:
            keys = self._keys[id(namespace)] = {}
            for key, value in list(dict.items(namespace)):
                keys.setdefault(id(value), []).append(key)
        return self._keys[id(namespace)].get(id(child), [])

    def _is_news(self, key: int, children: list[int], new: set[int]) -> bool:
        """Note where a referrer leads, and return whether that includes a new target."""
        leaves = self._leaves.setdefault(key, set())
        known = len(leaves)
        leaves |= new
        self._children.setdefault(key, []).extend((self._level, child) for child in children)
        return len(leaves) > known

    def _solve(self, key: int, place: Place) -> None:
        """Note that a root keeps ``key``, and so all that it leads to."""
        if key not in self._towards:
            self._towards[key] = None
            self._places[key] = place
            self._lead_on(key)

    def _lead_on(self, key: int, level: int | None = None) -> None:
        """Note that the root which keeps ``key`` keeps all that it leads to."""
        waiting, done = deque([key]), set[int]()
        while waiting:
            parent = waiting.popleft()
            for seen_at, child in self._children.get(parent, ()):
                if child not in done and (child not in self._towards if level is None else seen_at <= level):
                    done.add(child)
                    self._towards.setdefault(child, parent)
                    waiting.append(child)

    def found(self, target: object) -> _Found | None:
        """Return the chain from a root to ``target``, if there is one."""
        if id(target) not in self._towards:
            return None
        trail = self._trail(id(target))
        return _Found(self._places[trail[-1]], tuple(self._objects[key] for key in reversed(trail)))

    def _trail(self, key: int) -> list[int]:
        """Return the way up from an object that a root leads to: its identity first, the root's child last."""
        trail = [key]
        while (parent := self._towards[trail[-1]]) is not None:
            trail.append(parent)
        return trail


def with_own_dict(referrer: object, children: list[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield who holds ``children``: an object itself, or the dict of its attributes.

    CPython 3.11 and 3.12 make that dict when somebody asks for it, and we do: paths must not grow by our asking.
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


def _home(item: object) -> str:
    """Return the module that a function or class belongs to, or that an object's class does."""
    if type(item) is FunctionType:
        return text_of(item.__globals__.get("__name__"))
    return text_of((instance_dict(item) or {}).get("__module__")) if is_instance(item, type) else module_of(item)


def _modules() -> list[tuple[str, ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items()) if is_instance(module, ModuleType)]


def others(item: object, given: Sequence[str], heap: Heap, roots: Roots, spared: Iterable[object]) -> str | None:
    """Return what else of the user's leads to an object; None if nothing does."""
    hidden = running_ids().union(*({id(one), id(instance_dict(one))} for one in spared))
    local_names = list[str]()
    for frame, thread in running_frames():
        values = peek(frame)
        found = [key for key, value in values.items() if value is item]
        found = _besides(found, given) if thread == threading.current_thread().name else found
        local_names += [Place.of_running(frame, thread, key).text for key in found]
        hidden.update({id(values.get(key)) for key in _rest_of_arguments(frame.f_code)})
    roots = replace(roots, hidden=roots.hidden | hidden)
    search = Search([], heap, roots, MOST_LOOKS)
    names, holders = list[str](), list[object]()
    for referrer, held in heap.referrers({id(item): item}):
        for holder, _ in () if id(referrer) in hidden else with_own_dict(referrer, held):
            places = search.names_in(holder, item)
            names += [place.text for place in places if place.is_users]
            holders += [holder] if not places and id(holder) not in hidden else []
    for text in (*_besides(sorted(names), given), *local_names):
        return text
    search = Search(holders, heap, roots, MOST_LOOKS)
    search.run(nobody=False)
    chains = [chain for holder in holders if (chain := search.found(holder)) is not None and chain.place.is_users]
    writer = Writer(roots.cell_of)
    return min((writer.holder(one.place, (*one.chain, item)).path for one in chains), key=len, default=None)


def _besides(names: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return names without those that are given: as many others are if it is called by others there."""
    rest = [name for name in names if name.rpartition(" ")[2] not in given]
    return rest[max(0, len(given) - len(names) + len(rest)) :]


def _rest_of_arguments(code: CodeType) -> tuple[str, ...]:
    """Return the name of ``*args``, if a function has it: that tuple only passes objects on."""
    first = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[first : first + 1] if code.co_flags & inspect.CO_VARARGS else ()
