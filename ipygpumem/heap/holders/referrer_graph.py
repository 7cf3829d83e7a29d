"""The references that a search for holders has seen, and walks along them.

The search goes up: from targets to the objects that refer to them, and on to roots. The ways from
roots, and the parts that die with an object, are read from the same references afterwards. An
example, in which the list is a referrer of the dict, and the dict a child of the list::

    root "variable runs" --> list --> dict --> target
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from ipygpumem.heap.paths.roots import Root
from ipygpumem.introspect import type_name

Steps = tuple[object, ...]
"""A chain of objects, each of which refers to the next one."""
Chain = tuple[Root, Steps]
"""A root, and the chain of objects from it."""
NextUp = dict[int, tuple[Root, int | None]]
"""For each object to which a way leads from a root: the root, and the object before it on the way;
None if the root itself refers to the object.
"""
_LARGEST_SORTED_LEVEL = 200
"""Maximum number of objects of a level that are put in the same order in all reports."""


class ReferrerGraph:
    """References between objects, by the objects' identities.

    Args:
        targets: the objects from which a search begins.

    Attributes:
        objects: each object by its identity.
        referrers: the referrers of each object whose referrers were searched, without roots.
        children: for each referrer, the objects to which it refers.
    """

    def __init__(self, targets: Sequence[object]) -> None:
        self.objects = {id(target): target for target in targets}
        self.referrers: dict[int, list[int]] = {}
        self.children: dict[int, list[int]] = {}

    def add(self, referrer: object, children: list[int]) -> None:
        """Add the references from an object to ``children``, whose referrers are searched."""
        self.objects[id(referrer)] = referrer
        self.children.setdefault(id(referrer), []).extend(children)
        for key in children:
            self.referrers[key].append(id(referrer))

    def leading_to(self, keys: Iterable[int], without: Iterable[int] = ()) -> list[int]:
        """Return some objects, and all objects that lead to them, as far as the search has read the
        references.

        Args:
            keys: the objects.
            without: objects that are left out, and so are those that lead to ``keys`` only through
                them.
        """
        leading = list(keys)
        visited = {*leading, *without}
        for key in leading:  # the list grows
            referrers = self.referrers.get(key, ())
            new_referrers = [referrer for referrer in referrers if referrer not in visited]
            leading += new_referrers
            visited.update(new_referrers)
        return leading

    def all_leading_to(self, key: int) -> set[int]:
        """Return all objects that lead to an object; it is one of them if it is in a cycle."""
        return set(self.leading_to(self.referrers.get(key, ())))

    # -- ways from roots --------------------------------------------------------------------------

    def next_up(self, references: list[tuple[Root, int]], without: Collection[int] = ()) -> NextUp:
        """Return the shortest way from a root to each object to which one leads, of those that the
        search has seen.

        A way through a mappingproxy is only taken if there is no other one: nothing can be removed
        through it.

        Args:
            references: roots, and the objects to which they refer.
            without: objects to which, and through which, no way leads.
        """
        next_up: NextUp = {}
        for root, key in sorted(references, key=lambda pair: sort_key_of_root(pair[0])):
            if key not in without:
                next_up.setdefault(key, (root, None))
        proxies = list[int]()
        self._extend(next_up, list(next_up), without, proxies=proxies)  # around the proxies
        self._extend(next_up, proxies, without, proxies=None)  # through them
        return next_up

    def _extend(
        self,
        next_up: NextUp,
        starts: list[int],
        without: Collection[int],
        proxies: list[int] | None,
    ) -> None:
        """Extend the ways in ``next_up`` from objects to their children, level by level.

        Args:
            next_up: has the ways to ``starts``, and receives the ways to all objects to which these
                lead.
            starts: the objects from which the ways are extended.
            without: objects to which no way leads.
            proxies: receives the mappingproxies on these ways, which end there; None to go on.
        """
        level = starts
        while level:
            next_level = list[int]()
            for parent in level:
                if proxies is not None and type(self.objects[parent]) is MappingProxyType:
                    proxies.append(parent)
                    continue
                for child in self.children.get(parent, ()):
                    if child not in next_up and child not in without:
                        next_up[child] = next_up[parent][0], parent
                        next_level.append(child)
            if len(next_level) <= _LARGEST_SORTED_LEVEL:
                # Of two ways with the same length, all reports should take the same one, but the
                # order in which the collector lists objects changes.
                next_level.sort(key=functools.partial(self._sort_key_in_level, next_up))
            level = next_level

    def _sort_key_in_level(self, next_up: NextUp, key: int) -> tuple[object, ...]:
        """Return the sort key of an object: the order of its root, and its type."""
        root, _ = next_up[key]
        return sort_key_of_root(root), type_name(self.objects[key])

    def chain(self, target: object, next_up: NextUp) -> Chain | None:
        """Return a root and the chain of objects from it to ``target``; None without a way."""
        key: int | None = id(target)
        if key not in next_up:
            return None
        root, _ = next_up[key]
        steps: list[object] = []
        while key is not None:
            steps.append(self.objects[key])
            _, key = next_up[key]
        return root, tuple(reversed(steps))

    # -- parts of an object that lead to targets --------------------------------------------------

    def parts_of(
        self, item: object, target_ids: Set[int], stays: Callable[[object], bool]
    ) -> list[object]:
        """Return the objects through which an object leads to the targets, and which die with it:
        the list ``losses`` in ``{"losses": [a, b]}`` for the targets ``a`` and ``b``.

        Objects that lead back to the object itself are no parts of it, such as its parent.

        Args:
            item: the object.
            target_ids: identities of the targets.
            stays: returns True for an object that is no part, because it stays.
        """
        behind_item = self._objects_behind(item, stays)
        if not behind_item:  # such as each of 20,000 arrays that a line removes
            return []
        # Only objects behind the item are on a way from it to a target, or back to it.
        targets = target_ids & behind_item.keys()
        lead_to_targets = self._ids_reached(self.referrers, targets, behind_item)
        lead_back = self._ids_reached(self.referrers, [id(item)], behind_item)
        parts = list[object]()
        for key in behind_item:
            if key in lead_to_targets and key not in lead_back:
                parts.append(self.objects[key])
        return parts

    def parts_removed(
        self,
        owner_id: int,
        item_id: int,
        target_ids: Set[int],
        stays: Callable[[object], bool],
    ) -> list[object]:
        """Return an object that a line removes from its owner, and its parts that lead to targets.

        Args:
            owner_id: identity of the owner.
            item_id: identity of the object; 0 if the line removes all to which the owner refers.
            target_ids: identities of the targets.
            stays: as in ``parts_of``.
        """
        if item_id == 0 and owner_id in self.objects:
            return self.parts_of(self.objects[owner_id], target_ids, stays)
        if item_id not in self.objects:
            return []
        item = self.objects[item_id]
        return [item, *self.parts_of(item, target_ids, stays)]

    def _objects_behind(self, item: object, stays: Callable[[object], bool]) -> dict[int, None]:
        """Return all objects to which an object leads without passing through an object that stays:
        their identities, the nearest first.
        """
        waiting = [id(item)]
        behind = dict[int, None]()
        for key in waiting:  # the list grows
            for child in self.children.get(key, ()):
                if child not in behind and not stays(self.objects[child]):
                    behind[child] = None
                    waiting.append(child)
        return behind

    @staticmethod
    def _ids_reached(
        edges: Mapping[int, Sequence[int]], starts: Iterable[int], within: Container[int]
    ) -> dict[int, None]:
        """Return the objects to which edges lead from some start objects; a start object only if an
        edge leads back to it.

        Args:
            edges: the objects to which an edge leads from each object.
            starts: the start objects.
            within: the only objects that edges may lead to.
        """
        waiting = list(starts)
        reached = dict[int, None]()
        for key in waiting:  # the list grows
            for end in edges.get(key, ()):
                if end not in reached and end in within:
                    reached[end] = None
                    waiting.append(end)
        return reached


def sort_key_of_root(root: Root) -> tuple[int, bool, bool, str]:
    """Return the sort key of roots, the one to show first: variables before modules, and a module
    that users know, ``warnings.filters``, before that of C code, ``_warnings.filters``.
    """
    return (root.rank, root.is_of_library, root.text.startswith("module _"), root.text)
