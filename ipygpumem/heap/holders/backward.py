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
        for_all: True to find all holders of each target; False to end the search of a target at
            the first variable that leads to it.

    Attributes:
        graph: the references that the search has read.
        holders: finds the objects in ``graph`` from which a user can remove a target.
        roots_at: all roots that refer to an object directly, by the object's identity.
        ways_from_roots: the shortest way from a root to each object to which one leads.
        ways_from_unheld: the same from objects to which nothing visible refers, such as a list that
            only C code has.
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
        self.ways_from_roots: NextUp = {}
        self.ways_from_unheld: NextUp = {}
        self.is_limited = False
        self._heap = heap
        self._roots = roots
        self._for_all = for_all
        self._finder = RootFinder(roots)
        self._running = running_ids()
        self._targets = frozenset(self.graph.objects)
        self._references_of_roots: list[tuple[Root, int]] = []
        """Each root that was found, with the identity of the object to which it refers."""
        self._unheld: list[int] = []
        """Identities of referrers to which nothing visible refers."""
        self._add_own_dicts(targets)
        self._search_levels(list(self.graph.objects), max_visits)
        self._find_ways()

    def search_for_all(self, targets: Sequence[object], max_visits: int = MOST_VISITS) -> None:
        """Continue the search until it has found all holders of some objects, and find the ways
        again.

        After ``runs.append(x); cache["x"] = x``, the search has ended at the dict ``cache``, which
        a variable refers to. Now it also goes up from the list to ``runs``.

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
        # The first search has found the nearest holders: a limit costs further ones only.
        self.is_limited = was_limited
        self._find_ways()

    def _add_own_dicts(self, targets: Sequence[object]) -> None:
        """Add the dicts of the targets' attributes to the heap.

        CPython 3.11 and 3.12 create such a dict when it is read, and the targets have been read
        since the heap was made. The search ignores objects that the heap does not have: it would
        not see a cycle through a target that leads through its dict.
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
            self._finder.read_invisible_roots()
        for number in itertools.count():
            level = self._next_level(targets)
            if not level:
                return
            # The collector passes over the whole heap for each level.
            if number == self._MOST_LEVELS or (number + 1) * self._heap.size > max_visits:
                self.is_limited = True
                return
            self._record_invisible_roots(level)
            self._record_referrers(level)
            # Targets to which a variable leads by now need no further levels (``_next_level``).
            self.ways_from_roots = self.graph.next_up(self._references_of_variables())

    def _find_ways(self) -> None:
        """Fill ``ways_from_roots``, ``roots_at`` and ``ways_from_unheld``; the search is over."""
        # So far these are the ways from variables. They stay the ways of their objects: an output
        # or a module that leads there, too, would make the object of a variable look like a leak.
        self.ways_from_roots = {
            **self.graph.next_up(self._references_of_roots),
            **self.ways_from_roots,
        }
        self.roots_at = {}
        for root, key in self._references_of_roots:
            self.roots_at.setdefault(key, []).append(root)
        nowhere = Root("", Rank.NOWHERE, advice="end what keeps it: C++ code or a library")
        unheld = sorted(self._unheld, key=lambda key: type_name(self.graph.objects[key]))
        self.ways_from_unheld = self.graph.next_up([(nowhere, key) for key in unheld])

    # -- levels -----------------------------------------------------------------------------------

    def _next_level(self, targets: list[int]) -> list[int]:
        """Return the identities of the objects whose referrers are searched next. The search is
        over if there are none.

        These are the objects seen so far that lead to a target without a way from a variable; in a
        search ``for_all``, those that lead to a holder without such a way.
        """
        candidates: Iterable[int]
        if self._for_all:
            candidates = self._dying_and_leading_to_holders(targets)
        else:
            without_way = [key for key in targets if key not in self.ways_from_roots]
            candidates = dict.fromkeys(self.graph.leading_to(without_way))
        return [key for key in candidates if key not in self.graph.referrers]

    def _dying_and_leading_to_holders(self, targets: list[int]) -> Iterable[int]:
        """Return the objects whose referrers a search ``for_all`` has to know.

        These are all objects that must die with the targets, such as a tuple around one, and all
        objects through which a variable may lead to a holder of these.
        """
        next_down, items = self.holders.holders_of(targets)
        # Objects that lead to a holder only through a target keep nothing. If the target is a line
        # of matplotlib, for instance, its axes' list of lines is a holder. The line leads to that
        # list, by its axes; but it dies, so what refers to the line does not keep the list.
        next_up = self.graph.next_up(self._references_of_variables(), without=next_down)
        holders_without_way = [key for key in items if key not in next_up]
        lead_to_holders = self.graph.leading_to(holders_without_way, without=next_down)
        return dict.fromkeys([*next_down, *lead_to_holders])

    def _references_of_variables(self) -> list[tuple[Root, int]]:
        """Return the variables, and the objects to which they refer."""
        return [pair for pair in self._references_of_roots if pair[0].rank is Rank.VARIABLE]

    def _record_invisible_roots(self, level: list[int]) -> None:
        """Record the roots of the objects of a level to which registries, context variables and
        running functions refer.
        """
        invisible_roots = self._finder.invisible_roots
        for key in level:
            if key in invisible_roots:
                self._references_of_roots.append((invisible_roots[key], key))

    def _record_referrers(self, level: list[int]) -> None:
        """Search for all objects that refer to objects of a level; record each one in ``graph``, or
        as a root.
        """
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
                    # The dict of attributes may exist only since it was read here. If the heap did
                    # not have it, the next search would end there.
                    self._heap.add(holder, referrer)
        for key in objects:
            is_referrer = key in self.graph.children  # not a target itself
            if is_referrer and key not in ids_with_referrer:
                self._unheld.append(key)

    def _with_unknown_referrers(self, level: list[int]) -> dict[int, object]:
        """Return the objects of a level whose referrers are searched, by identity.

        An object that a permanent root keeps does not die, so its referrers do not matter. Of a
        very wide level, only the first objects are searched, and ``is_limited`` becomes True.
        """
        if len(level) > self._WIDEST_LEVEL:
            self.is_limited = True
        objects = dict[int, object]()
        for key in level[: self._WIDEST_LEVEL]:
            root = self._finder.invisible_roots.get(key)
            if root is None or not root.is_permanent:
                objects[key] = self.graph.objects[key]
        return objects

    def _owned_by(self, referrer: object, children: list[int]) -> list[int]:
        """Return the children of a referrer that count as kept by it.

        Further children are left out, because a better holder of them is known, or because they
        outlive the referrer.

        Args:
            referrer: the object that refers.
            children: identities of the objects of a level to which it refers.
        """
        if wakes_task(referrer):
            # The callback of a future refers to the task that waits for it. The task has a root of
            # its own, the event loop; only if the task itself is searched, the callback counts.
            return [key for key in children if key in self._targets]
        if type_name(referrer).startswith("hamt"):  # a part of a context of ``contextvars``
            # The values of the current context have roots of their own, with a line for each.
            return [key for key in children if key not in self._finder.invisible_roots]
        kind = type(referrer)
        if id(kind) in children and _is_in_its_module(kind):
            # Each instance refers to its class, but the class outlives them. ``del finalizer`` does
            # not free what the class ``weakref.finalize`` keeps.
            return [key for key in children if key != id(kind)]
        return children

    def _is_ours(self, referrer: object) -> bool:
        """Return True for a referrer to ignore, because it exists only while we search or belongs
        to this package: a running frame, a hidden object of ``Roots``, or our signal handler.
        """
        is_hidden = id(referrer) in self._roots.hidden or id(referrer) in self._running
        return is_hidden or is_listener(referrer)

    def _record(self, holder: object, children: list[int]) -> None:
        """Record the references from an object to its children, given by identity.

        A namespace, a thread or another root ends the search there. Any other object is added to
        ``graph``, so that its own referrers are searched next.
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
        """Return True if nothing but a cycle through an array of objects holds an object, as after
        ``x.rows = numpy.array([x], dtype=object); del x``.

        The collector does not look into arrays, so it never frees such a cycle.
        """
        leading = self.graph.all_leading_to(id(target))
        if self.is_limited or not self.ways_from_roots.keys().isdisjoint(leading):
            return False
        for key in leading:
            item = self.graph.objects[key]
            is_array_of_objects = is_array(item) and elements(item) is not None
            if is_array_of_objects and key in self.graph.all_leading_to(key):
                return True
        return False


def _is_in_its_module(kind: type) -> bool:
    """Return True for a class that its module keeps under its name, so that it outlives its
    instances; False for a class that a function has made.
    """
    module = text_of(class_dict(kind).get("__module__"))
    return loaded_object(module, name_of(kind)) is kind


def _with_own_dict(referrer: object, children: list[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield a referrer with its children. For an instance whose attributes are among these, yield
    the dict of its attributes instead, with those children.

    CPython 3.11 and 3.12 create that dict when it is first read. Until then, the instance itself
    refers to the values of its attributes. With the dict, the path is the same in either case.

    Args:
        referrer: the object that refers.
        children: identities of the objects to which it refers.
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
