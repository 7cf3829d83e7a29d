"""Searches for the holders of objects, against the direction of the references: from an array to
the list that refers to it, from the list to the variable ``runs``.

The search goes one level of referrers at a time, each level one pass of the collector over the heap
in C. It ends at roots: namespaces, modules, threads, running functions. Only objects that were
alive when the ``Heap`` was made count, so that the search never finds itself. No user code runs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

from ipygpumem.heap.attributes import has_nameless_attributes
from ipygpumem.heap.holders.holder_finder import HolderFinder
from ipygpumem.heap.holders.referrer_graph import NextUp, ReferrerGraph
from ipygpumem.heap.holders.root_finder import RootFinder
from ipygpumem.heap.kinds.arrays import elements, is_array
from ipygpumem.heap.knowledge.frames import running_ids
from ipygpumem.heap.knowledge.tasks import wakes_task
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.roots import Rank, Root, Roots
from ipygpumem.interrupts import is_listener
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    loaded_object,
    name_of,
    text_of,
    type_name,
)

MOST_VISITS = 20_000_000
"""Maximum number of objects to examine in one search: each level examines the whole heap."""
_MAKES_DICTS = (3, 11) <= sys.version_info < (3, 13)
"""True if this Python creates the dict of an object's attributes when the dict is read."""


class BackwardSearch:
    """A breadth-first search from many targets at once, against the direction of the references.

    Args:
        targets: the objects whose holders are searched.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine, over all levels.
        for_all: True to find all holders of each target; False to find the nearest variable.

    Attributes:
        graph: the references that the search has read.
        holders: finds the holders of objects in these.
        roots_at: all roots that refer to an object directly, by the object's identity.
        up_to_roots: the ways from roots to objects.
        up_to_unheld: the ways to all objects from those to which nothing visible refers.
        is_limited: True if a limit ended the search before it had read all referrers.
    """

    _MOST_LEVELS = 40
    """Maximum number of references between a root and a target."""
    _WIDEST_LEVEL = 100_000
    """Maximum number of objects of one level whose referrers are searched."""

    def __init__(
        self,
        targets: Sequence[object],
        heap: Heap,
        roots: Roots,
        max_visits: int = MOST_VISITS,
        *,
        for_all: bool = False,
    ) -> None:
        self.graph = ReferrerGraph(targets)
        self.holders = HolderFinder(self.graph)
        self.roots_at: dict[int, list[Root]] = {}
        self.up_to_roots: NextUp = {}
        self.up_to_unheld: NextUp = {}
        self.is_limited = False
        self._heap = heap
        self._roots = roots
        self._for_all = for_all
        self._finder = RootFinder(roots)
        self._running = running_ids()
        self._targets = frozenset(self.graph.objects)
        self._references_of_roots: list[tuple[Root, int]] = []
        """Roots, and the objects to which they refer."""
        self._unheld: list[int] = []
        """Referrers to which nothing visible refers."""
        self._add_own_dicts(targets)
        self._search_levels(list(self.graph.objects), max_visits)
        self._find_ways()

    def search_for_all(self, targets: Sequence[object], max_visits: int = MOST_VISITS) -> None:
        """Extend the search until it has found all holders of objects, not only a variable that
        leads to them, and find the ways again.

        Args:
            targets: the objects; they need not be among the targets of the class.
            max_visits: maximum number of objects to examine.
        """
        self._for_all = True
        was_limited = self.is_limited
        unseen_targets = [target for target in targets if id(target) not in self.graph.objects]
        self._add_own_dicts(unseen_targets)
        self.graph.objects.update((id(target), target) for target in unseen_targets)
        self._search_levels(list(map(id, targets)), max_visits)
        self.is_limited = was_limited
        self._find_ways()

    def _add_own_dicts(self, targets: Sequence[object]) -> None:
        """Add the dicts of the targets' attributes to the heap.

        The parts of a row have been read since the heap was made, which creates these dicts; a
        cycle through a target would end at one of them.
        """
        for target in targets:
            if _has_managed_dict(target):
                self._heap.add(instance_dict(target), target)

    def _search_levels(self, targets: list[int], max_visits: int) -> None:
        """Examine the referrers of level after level until no object is left that may lead from a
        variable to a target, or a limit is reached.

        Args:
            targets: identities of the objects whose holders are searched.
            max_visits: as in the class.
        """
        if targets:
            self._finder.read_values()
        for number in itertools.count():
            level = self._next_level(targets)
            if not level:
                return
            if number == self._MOST_LEVELS or (number + 1) * self._heap.size > max_visits:
                self.is_limited = True
                return
            self._record_values(level)
            self._record_referrers(level)
            self.up_to_roots = self.graph.next_up(self._references_of_variables())

    def _find_ways(self) -> None:
        """Fill ``up_to_roots``, ``roots_at`` and ``up_to_unheld``, now that the search is over."""
        # An output, the last error or a module may also hold, by a longer path, an object of a
        # variable: no leak.
        self.up_to_roots = {
            **self.graph.next_up(self._references_of_roots),
            **self.up_to_roots,
        }
        self.roots_at = {}
        for root, key in self._references_of_roots:
            self.roots_at.setdefault(key, []).append(root)
        nowhere = Root("", Rank.NOWHERE, "end what keeps it: C++ code or a library")
        unheld = sorted(self._unheld, key=lambda key: type_name(self.graph.objects[key]))
        self.up_to_unheld = self.graph.next_up([(nowhere, key) for key in unheld])

    # -- levels -----------------------------------------------------------------------------------

    def _next_level(self, targets: list[int]) -> list[int]:
        """Return the objects whose referrers are searched next: the objects that may lead from a
        variable to a target, or to a holder of one in a search ``for_all``.
        """
        candidates: Iterable[int]
        if self._for_all:
            candidates = self._dying_and_leading_to_holders(targets)
        else:
            without_way = [key for key in targets if key not in self.up_to_roots]
            candidates = dict.fromkeys(self.graph.leading_to(without_way))
        return [key for key in candidates if key not in self.graph.referrers]

    def _dying_and_leading_to_holders(self, targets: list[int]) -> Iterable[int]:
        """Return all objects that must die with the targets, such as a tuple around one, and all
        objects that may lead from a variable to a holder of these.
        """
        next_down, items = self.holders.holders_of(targets)
        # What leads to a holder only through a target keeps nothing: a matplotlib line in a list
        # leads to the list of its axes, which the axes keep, too.
        next_up = self.graph.next_up(self._references_of_variables(), without=next_down)
        holders_without_way = [key for key in items if key not in next_up]
        lead_to_holders = self.graph.leading_to(holders_without_way, without=next_down)
        return dict.fromkeys([*next_down, *lead_to_holders])

    def _references_of_variables(self) -> list[tuple[Root, int]]:
        """Return the variables, and the objects to which they refer."""
        return [pair for pair in self._references_of_roots if pair[0].rank is Rank.VARIABLE]

    def _record_values(self, level: list[int]) -> None:
        """Record the roots of the objects of a level to which registries, context variables and
        running functions refer.
        """
        values = self._finder.values
        for key in level:
            if key in values:
                self._references_of_roots.append((values[key], key))

    def _record_referrers(self, level: list[int]) -> None:
        """Record all objects that refer to objects of a level, in ``graph`` or as roots."""
        self.graph.referrers.update((key, []) for key in level)
        objects = self._with_unknown_referrers(level)
        ids_with_referrer = set[int]()
        for referrer, children in self._heap.referrers(objects):
            owned = self._owned_by(referrer, children)
            if not owned or self._is_ours(referrer):
                continue
            ids_with_referrer.update(owned)
            for holder, held_children in _with_own_dict(referrer, owned):
                self._record(holder, held_children)
                if holder is not referrer:
                    # Else the next search would end at the dict that this one has created.
                    self._heap.add(holder, referrer)
        for key in objects:
            is_referrer = key in self.graph.children
            if is_referrer and key not in ids_with_referrer:
                self._unheld.append(key)

    def _with_unknown_referrers(self, level: list[int]) -> dict[int, object]:
        """Return the objects of a level whose referrers are searched, by identity: only the first
        ones of a very wide level, and none that a permanent root keeps, because it does not die.
        """
        if len(level) > self._WIDEST_LEVEL:
            self.is_limited = True
        objects = dict[int, object]()
        for key in level[: self._WIDEST_LEVEL]:
            root = self._finder.values.get(key)
            if root is None or not root.is_permanent:
                objects[key] = self.graph.objects[key]
        return objects

    def _owned_by(self, referrer: object, children: list[int]) -> list[int]:
        """Return the children of a referrer that it keeps alive by itself: not the task that a
        callback wakes, the values of context variables, or the class of an instance.
        """
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
        """Return True for a running frame, a hidden object of ``Roots``, and a signal handler of
        this package.
        """
        is_hidden = id(referrer) in self._roots.hidden or id(referrer) in self._running
        return is_hidden or is_listener(referrer)

    def _record(self, holder: object, children: list[int]) -> None:
        """Record the references from an object to its children, given by identity: as roots if it
        is a namespace, a thread or another root; else in ``graph``, so that its own referrers are
        searched next.
        """
        is_root = self._finder.is_namespace(holder)
        for key in children:
            for root in self._finder.roots_in(holder, self.graph.objects[key]):
                self._references_of_roots.append((root, key))
                is_root = True
        if not is_root:
            self.graph.add(holder, children)

    # -- its result -------------------------------------------------------------------------------

    def roots_of(self, target: object) -> list[Root]:
        """Return all roots that refer to ``target`` directly."""
        return self.roots_at.get(id(target), [])

    def is_in_hidden_cycle(self, target: object) -> bool:
        """Return True if nothing but a cycle through an array of objects holds an object.

        The collector does not look into arrays, so it never frees such a cycle.
        """
        leading = self.graph.all_leading_to(id(target))
        if self.is_limited or not self.up_to_roots.keys().isdisjoint(leading):
            return False
        for key in leading:
            item = self.graph.objects[key]
            is_array_of_objects = is_array(item) and elements(item) is not None
            if is_array_of_objects and key in self.graph.all_leading_to(key):
                return True
        return False


def _is_in_its_module(kind: type) -> bool:
    """Return True for a class that a module keeps, so that it outlives its instances."""
    module = text_of(class_dict(kind).get("__module__"))
    return loaded_object(module, name_of(kind)) is kind


def _with_own_dict(referrer: object, children: list[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield the holders of ``children`` with their children: an object, or the dict of its
    attributes, or both.

    CPython 3.11 and 3.12 create that dict when it is read. Before, the object itself refers to the
    values of its attributes; the path leads through the dict in either case.
    """
    if not _has_managed_dict(referrer):
        yield referrer, children
        return
    attributes = instance_dict(referrer) or {}
    value_ids = set(map(id, list(attributes.values())))
    children_in_dict = [child for child in children if child in value_ids]
    if children_in_dict:
        yield attributes, children_in_dict
    if len(children_in_dict) < len(children):
        yield referrer, [child for child in children if child not in value_ids]


def _has_managed_dict(item: object) -> bool:
    """Return True for an object whose attributes get a dict only when the dict is read."""
    return _MAKES_DICTS and has_nameless_attributes(item)
