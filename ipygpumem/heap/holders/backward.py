"""Searches for the holders of objects, against the direction of the references.

The search goes one level of referrers at a time, each level one pass of the collector over the heap
in C. It ends at roots: namespaces, modules, threads, running functions. Only objects that were
alive when the ``Heap`` was made count, so that the search never finds itself. No user code runs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

from ipygpumem.heap.arrays import elements, is_array
from ipygpumem.heap.attributes import has_nameless_attributes
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.root_finder import RootFinder
from ipygpumem.heap.knowledge.frames import SUSPENDED, running_ids
from ipygpumem.heap.knowledge.tasks import wakes_task
from ipygpumem.heap.paths.data_frame_steps import is_removable_from
from ipygpumem.heap.paths.items_and_attributes import owns
from ipygpumem.heap.paths.roots import Rank, Root, Roots
from ipygpumem.interrupts import is_listener
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_exactly,
    is_instance,
    is_users_class,
    loaded_object,
    name_of,
    text_of,
    type_name,
)

Steps = tuple[object, ...]
"""A chain of objects, each of which refers to the next one."""
NextUp = dict[int, tuple[Root, int | None]]
"""For each object reachable from a root: the root, and the next object on the way up to it."""
MOST_VISITS = 20_000_000
_MOST_SORTED = 200
"""Maximum number of objects of a level that are put in the same order in all reports."""
_OF_FIXED_DICTS = {MappingProxyType, functools.partial, FunctionType}
"""Types of objects with a dict from which users remove no items, such as keyword arguments."""
_MAKES_DICTS = (3, 11) <= sys.version_info < (3, 13)


class BackwardSearch:
    """A breadth-first search from many targets at once, against the direction of the references.

    Args:
        targets: the objects whose holders are searched.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine, over all levels.
        for_all: True to find all holders of each target; False to find the nearest variable.

    Attributes:
        objects: the examined objects, and those that refer to them, by identity.
        referrers: identities of the referrers of each examined object, without roots.
        children: identities of the objects by which each referrer was found.
        roots_at: all roots that refer to an object directly, by its identity.
        named: the next objects up from the objects that roots lead to.
        unnamed: those of the other objects, up to objects to which nothing visible refers.
        is_cut: True if the search ended somewhere before it had seen everything.
    """

    _MOST_LEVELS = 40
    _WIDEST_LEVEL = 100_000

    def __init__(
        self,
        targets: Sequence[object],
        heap: Heap,
        roots: Roots,
        max_visits: int = MOST_VISITS,
        *,
        for_all: bool = False,
    ) -> None:
        self._heap = heap
        self._roots = roots
        self._for_all = for_all
        self._finder = RootFinder(roots)
        self._running = running_ids()
        self.objects = {id(target): target for target in targets}
        self._targets = frozenset(self.objects)
        self.referrers: dict[int, list[int]] = {}
        self.children: dict[int, list[int]] = {}
        self._are_removable_from: dict[int, bool] = {}
        """True for an object from which a user can remove what it refers to; not for dicts."""
        self._kept: list[tuple[Root, int]] = []
        """Roots, and the objects that they keep."""
        self.roots_at: dict[int, list[Root]] = {}
        self._tops: list[int] = []
        """Objects without a known referrer."""
        self.is_cut = False
        self.named: NextUp = {}
        self.unnamed: NextUp = {}
        self._add_own_dicts(targets)
        self._run(list(self.objects), max_visits)
        self._finish()

    def _add_own_dicts(self, targets: Sequence[object]) -> None:
        """Add the dicts of the targets' attributes to the heap.

        The parts of a row have been read since the heap was made, which creates these dicts; a
        cycle through a target would end at one of them.
        """
        for target in targets:
            if _has_managed_dict(target):
                self._heap.add(instance_dict(target), target)

    def search_for_all(self, targets: Sequence[object], max_visits: int = MOST_VISITS) -> None:
        """Go on until all holders of some objects are known."""
        self._for_all = True
        was_cut = self.is_cut
        new = [target for target in targets if id(target) not in self.objects]
        self._add_own_dicts(new)
        self.objects.update((id(target), target) for target in new)
        self._run(list(map(id, targets)), max_visits)
        self.is_cut = was_cut
        self._finish()

    # -- the search -------------------------------------------------------------------------------

    def _run(self, targets: list[int], max_visits: int) -> None:
        """Examine level after level until nothing is left that may lead to a variable."""
        if targets:
            self._finder.read_values()
        for number in itertools.count():
            level = self._next_level(targets)
            if not level:
                return
            if number == self._MOST_LEVELS or (number + 1) * self._heap.size > max_visits:
                self.is_cut = True
                return
            self._record_values(level)
            self._record_referrers(level)
            self.named = self._next_up(self._kept_by_variables())

    def _finish(self) -> None:
        """Find the ways from all roots, now that the search is over."""
        # An output, the last error or a module may also hold, by a longer path, an object of a
        # variable: no leak.
        self.named = {**self._next_up(self._kept), **self.named}
        self.roots_at = {}
        for root, key in self._kept:
            self.roots_at.setdefault(key, []).append(root)
        nowhere = Root("", Rank.NOWHERE, "end what keeps it: C++ code or a library")
        tops = sorted(self._tops, key=lambda key: type_name(self.objects[key]))
        self.unnamed = self._next_up([(nowhere, key) for key in tops])

    def _next_level(self, targets: list[int]) -> list[int]:
        """Return the objects to examine next: those that may lead from a variable to a target."""
        linked: Collection[int] = ()
        starts: Iterable[int] = targets
        named = self.named
        if self._for_all:
            linked, starts = self.holders_of(targets)
            # What leads to a holder only through a target keeps nothing: a matplotlib line in a
            # list leads to the list of its axes, which the axes keep, too.
            named = self._next_up(self._kept_by_variables(), without=linked)
        unnamed = [key for key in starts if key not in named]
        above = self._with_all_above(unnamed, besides=linked)
        candidates = dict.fromkeys([*linked, *above])
        return [key for key in candidates if key not in self.referrers]

    def _kept_by_variables(self) -> list[tuple[Root, int]]:
        """Return the variables, and the objects that they keep."""
        return [(root, key) for root, key in self._kept if root.rank is Rank.VARIABLE]

    def _record_values(self, level: list[int]) -> None:
        """Record the roots of the objects of a level that registries, context variables and
        running functions keep.
        """
        values = self._finder.values
        for key in level:
            if key in values:
                self._kept.append((values[key], key))

    def _record_referrers(self, level: list[int]) -> None:
        """Record all objects that refer to those of a level."""
        self.referrers.update((key, []) for key in level)
        if len(level) > self._WIDEST_LEVEL:
            self.is_cut = True
        objects = dict[int, object]()
        for key in level[: self._WIDEST_LEVEL]:
            root = self._finder.values.get(key)
            if root is None or not root.is_permanent:
                objects[key] = self.objects[key]
        referred: set[int] = set()
        for referrer, children in self._heap.referrers(objects):
            children = self._owned_by(referrer, children)
            if not children or self._is_ours(referrer):
                continue
            referred.update(children)
            for holder, of_holder in _with_own_dict(referrer, children):
                self._record(holder, of_holder)
                if holder is not referrer:
                    # Else the next search would end at the dict that this one has created.
                    self._heap.add(holder, referrer)
        self._tops += [key for key in objects if key not in referred and key in self.children]

    def _owned_by(self, referrer: object, children: list[int]) -> list[int]:
        """Return the objects that a referrer owns: it may lead to more than its own."""
        if wakes_task(referrer):
            return [key for key in children if key in self._targets]
        if type_name(referrer).startswith("hamt"):  # part of a context
            return [key for key in children if key not in self._finder.values]
        kind = type(referrer)
        if id(kind) in children and _is_in_its_module(kind):
            # ``del finalizer`` does not free what the class ``weakref.finalize`` keeps.
            return [key for key in children if key != id(kind)]
        return children

    def _is_ours(self, referrer: object) -> bool:
        """Return True for a running frame, and for an object that we have made for a while."""
        is_hidden = id(referrer) in self._roots.hidden or id(referrer) in self._running
        return is_hidden or is_listener(referrer)

    def _record(self, holder: object, children: list[int]) -> None:
        """Record that an object holds some children, as a root or as an object to examine later."""
        is_root = self._finder.is_namespace(holder)
        for key in children:
            for root in self._finder.roots_in(holder, self.objects[key]):
                self._kept.append((root, key))
                is_root = True
        if is_root:
            return
        self.objects[id(holder)] = holder
        self.children.setdefault(id(holder), []).extend(children)
        for key in children:
            self.referrers[key].append(id(holder))

    def _next_up(self, kept: list[tuple[Root, int]], without: Collection[int] = ()) -> NextUp:
        """Return the next objects on the shortest ways from roots to all objects, except on ways
        through the objects ``without``.

        A way through a mappingproxy is only taken if there is no other one: nothing can be removed
        through it.
        """
        next_up: NextUp = {}
        for root, key in sorted(kept, key=lambda pair: order_of_root(pair[0])):
            if key not in without:
                next_up.setdefault(key, (root, None))
        proxies = list[int]()
        self._extend(next_up, list(next_up), without, proxies)
        self._extend(next_up, proxies, without, None)
        return next_up

    def _extend(
        self,
        next_up: NextUp,
        waiting: list[int],
        without: Collection[int],
        proxies: list[int] | None,
    ) -> None:
        """Add the next objects up of the objects below some objects.

        Args:
            next_up: receives them, and has those of the objects already.
            waiting: the objects.
            without: the objects to which no way leads.
            proxies: receives the mappingproxies on these ways, which end there; None to go on.
        """
        level = waiting
        while level:
            below = list[int]()
            for parent in level:
                if proxies is not None and type(self.objects[parent]) is MappingProxyType:
                    proxies.append(parent)
                    continue
                for child in self.children.get(parent, ()):
                    if child not in next_up and child not in without:
                        next_up[child] = next_up[parent][0], parent
                        below.append(child)
            if len(below) <= _MOST_SORTED:
                # Of two ways of one length, the same one in all reports: the order in which the
                # collector lists objects changes.
                below.sort(key=functools.partial(self._order_in_level, next_up))
            level = below

    def _order_in_level(self, next_up: NextUp, key: int) -> tuple[object, ...]:
        """Return the sort key of an object: the order of its root, and its type."""
        root, _ = next_up[key]
        return order_of_root(root), type_name(self.objects[key])

    # -- its result -------------------------------------------------------------------------------

    def chain(self, target: object, next_up: NextUp) -> tuple[Root, Steps] | None:
        """Return a root and the chain of objects from it to ``target``; None without a way."""
        key: int | None = id(target)
        if key not in next_up:
            return None
        root = next_up[key][0]
        steps: list[object] = []
        while key is not None:
            steps.append(self.objects[key])
            _, key = next_up[key]
        return root, tuple(reversed(steps))

    def is_in_hidden_cycle(self, target: object) -> bool:
        """Return True if nothing but a cycle through an array of objects holds an object.

        The collector does not look into arrays, so it never frees such a cycle.
        """
        above = self._all_above(id(target))
        if self.is_cut or not self.named.keys().isdisjoint(above):
            return False
        for key in above:
            item = self.objects[key]
            if is_array(item) and elements(item) is not None and key in self._all_above(key):
                return True
        return False

    def _all_above(self, key: int) -> set[int]:
        """Return the identities of all objects that lead to an object."""
        return set(self._with_all_above(self.referrers.get(key, ())))

    def _with_all_above(self, keys: Iterable[int], besides: Iterable[int] = ()) -> list[int]:
        """Return the identities of some objects, and of all that lead to them, except those of
        other objects and of what leads to them only through these.
        """
        waiting = list(keys)
        met = {*waiting, *besides}
        for key in waiting:  # the list grows
            new = [referrer for referrer in self.referrers.get(key, ()) if referrer not in met]
            waiting += new
            met.update(new)
        return waiting

    def between(
        self, item: object, target_ids: Set[int], stays: Callable[[object], bool]
    ) -> list[object]:
        """Return the objects on the ways from an object to some targets inside it.

        Those that lead to the object itself are no parts of it, such as its parent.

        Args:
            item: the object.
            target_ids: identities of the targets.
            stays: returns True for an object that no way leads through, because it stays.
        """
        below = self._below(item, stays)
        if not below:  # such as each of 20,000 arrays that a line removes
            return []
        # Only ways inside ``below`` lead from its objects to a target or back to the object.
        above = self._reached(self.referrers, target_ids & below.keys(), below)
        around = self._reached(self.referrers, [id(item)], below)
        return [self.objects[key] for key in below if key in above and key not in around]

    def _below(self, item: object, stays: Callable[[object], bool]) -> dict[int, None]:
        """Return the identities of the objects to which one leads, but not through those that
        stay.
        """
        waiting = [id(item)]
        below = dict[int, None]()
        for key in waiting:  # the list grows
            for child in self.children.get(key, ()):
                if child not in below and not stays(self.objects[child]):
                    below[child] = None
                    waiting.append(child)
        return below

    def below(
        self,
        owner_id: int,
        item_id: int,
        target_ids: Set[int],
        stays: Callable[[object], bool],
    ) -> list[object]:
        """Return an object to which another one refers, and its parts that lead to some targets.

        Args:
            owner_id: identity of the object that refers.
            item_id: identity of the object; 0 for all to which the owner refers.
            target_ids: identities of the targets.
            stays: as in ``between``.
        """
        if item_id == 0 and owner_id in self.objects:
            return self.between(self.objects[owner_id], target_ids, stays)
        if item_id not in self.objects:
            return []
        item = self.objects[item_id]
        return [item, *self.between(item, target_ids, stays)]

    @staticmethod
    def _reached(
        edges: Mapping[int, Sequence[int]],
        starts: Iterable[int],
        within: Container[int] | None = None,
    ) -> dict[int, None]:
        """Return the identities to which edges lead from the first ones.

        Args:
            edges: the identities to which an edge leads from each identity.
            starts: the first ones.
            within: the identities to go to; None for all.
        """
        waiting = list(starts)
        reached = dict[int, None]()
        for key in waiting:  # the list grows
            for end in edges.get(key, ()):
                if end in reached or (within is not None and end not in within):
                    continue
                reached[end] = None
                waiting.append(end)
        return reached

    def roots_of(self, target: object) -> list[Root]:
        """Return all roots that refer to ``target`` directly."""
        return self.roots_at.get(id(target), [])

    def holders_of(
        self, targets: Sequence[int]
    ) -> tuple[dict[int, int | None], dict[int, list[int]]]:
        """Return the objects that must die with some targets, and the holders of all of them.

        A user can remove an object from a holder, such as a list. Every other referrer, such as a
        tuple or a view, must die with the target.

        Returns:
            linked: the targets and these referrers; for each referrer the object to which it
                refers, for a target None.
            held: the objects among them to which each holder refers, by the holder.
        """
        linked = dict[int, int | None].fromkeys(targets)
        held = dict[int, list[int]]()
        waiting = list(linked)
        for key in waiting:  # the list grows
            for referrer in self.referrers.get(key, ()):
                if referrer in held:
                    held[referrer].append(key)
                elif referrer in linked:
                    continue
                elif self._can_remove_from(referrer):
                    held[referrer] = [key]
                else:
                    linked[referrer] = key
                    waiting.append(referrer)
        return linked, held

    def _can_remove_from(self, key: int) -> bool:
        """Return True for an object from which a user can remove what it refers to."""
        item: Any = self.objects[key]
        if is_instance(item, dict):
            return self._can_remove_from_dict(key, item)
        if key not in self._are_removable_from:
            self._are_removable_from[key] = _can_remove_from(item)
        return self._are_removable_from[key]

    def _can_remove_from_dict(self, key: int, item: dict[str, object]) -> bool:
        """Return True for a dict from which a user can remove an item, as far as is known yet."""
        if key not in self.referrers:
            return False  # an object's own dict dies with the object: its referrers tell
        owners = [self.objects[referrer] for referrer in self.referrers[key]]
        if owners and all(type(owner) in _OF_FIXED_DICTS for owner in owners):
            return False  # only a name of the dict itself could remove an item
        return not any(owns(owner, item) for owner in owners)


def order_of_root(root: Root) -> tuple[int, bool, bool, str]:
    """Return the sort key of roots: a module's name that users write comes before that of C code,
    such as ``warnings.filters`` before ``_warnings.filters``.
    """
    return (root.rank, root.is_of_library, root.text.startswith("module _"), root.text)


def _can_remove_from(item: Any) -> bool:
    """Return True for an object, no dict, from which a user can remove what it refers to."""
    if is_exactly(item, *SUSPENDED):
        return True
    if any(is_instance(item, kind) for kind in (list, set, deque, type, SimpleNamespace)):
        return True
    if is_array(item) or is_instance(item, tuple):
        return False
    return is_users_class(type(item)) or is_removable_from(item)


def _is_in_its_module(kind: type) -> bool:
    """Return True for a class that a module keeps, so that it outlives its instances."""
    module = text_of(class_dict(kind).get("__module__"))
    return loaded_object(module, name_of(kind)) is kind


def _with_own_dict(referrer: object, children: list[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield the holder of ``children``: an object itself, or the dict of its attributes.

    CPython 3.11 and 3.12 create that dict when it is read, and reading it here must not make paths
    longer.
    """
    if not _has_managed_dict(referrer):
        yield referrer, children
        return
    names = instance_dict(referrer) or {}
    values = set(map(id, list(names.values())))
    attributes = [child for child in children if child in values]
    if attributes:
        yield names, attributes
    if len(attributes) < len(children):
        yield referrer, [child for child in children if child not in values]


def _has_managed_dict(item: object) -> bool:
    """Return True for an object whose attributes get a dict only when it is read."""
    return _MAKES_DICTS and has_nameless_attributes(item)
