"""Finds the holders of objects: lists and other objects from which users can remove an item.

From a tuple nothing can be removed: it dies with its items, and the holder is the list around it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from ipygpumem.heap.holders.referrer_graph import ReferrerGraph
from ipygpumem.heap.kinds.arrays import is_array
from ipygpumem.heap.knowledge.frames import SUSPENDED
from ipygpumem.heap.paths.data_frame_steps import is_removable_from
from ipygpumem.heap.paths.items_and_attributes import owns
from ipygpumem.introspect import is_exactly, is_instance, is_users_class

_OF_FIXED_DICTS = {MappingProxyType, functools.partial, FunctionType}
"""Types of objects that have a dict, such as keyword arguments, from which users remove no items.
"""


class Holders(NamedTuple):
    """The holders of some targets, and the objects between them, by their identities.

    An example, in which the list is the holder::

        list --> tuple --> view --> target
                 both die with the target
    """

    next_down: dict[int, int | None]
    """The objects that must die: for each, the object to which it refers on the way down to a
    target; None for a target itself.
    """
    items: dict[int, list[int]]
    """For each holder, the objects to remove from it: the dying objects to which it refers."""


class HolderFinder:
    """Finds the holders of objects among their referrers.

    Args:
        graph: the references that a search has seen so far; all objects are given by identity.
    """

    def __init__(self, graph: ReferrerGraph) -> None:
        self._graph = graph
        self._are_holders: dict[int, bool] = {}
        """For objects except dicts: True for one from which a user can remove an item."""

    def holders_of(self, targets: Sequence[int]) -> Holders:
        """Return the holders of some targets.

        A referrer from which nothing can be removed, such as a tuple or a view, must die with the
        target: its own referrers may be holders.
        """
        next_down = dict[int, int | None].fromkeys(targets)
        items = dict[int, list[int]]()
        waiting = list(next_down)
        for key in waiting:  # the list grows
            for referrer in self._graph.referrers.get(key, ()):
                if referrer in items:
                    items[referrer].append(key)
                elif referrer in next_down:
                    continue
                elif self._is_holder(referrer):
                    items[referrer] = [key]
                else:
                    next_down[referrer] = key
                    waiting.append(referrer)
        return Holders(next_down, items)

    def _is_holder(self, key: int) -> bool:
        """Return True for an object from which a user can remove the objects to which it refers."""
        item: Any = self._graph.objects[key]
        if is_instance(item, dict):
            return self._is_holding_dict(key, item)
        if key not in self._are_holders:
            self._are_holders[key] = _can_remove_from(item)
        return self._are_holders[key]

    def _is_holding_dict(self, key: int, item: dict[str, object]) -> bool:
        """Return True for a dict from which a user can remove an item.

        That of an object's attributes dies with the object. A dict whose referrers the search has
        not read yet may be such a dict, so it is no holder either.
        """
        if key not in self._graph.referrers:
            return False
        owners = [self._graph.objects[referrer] for referrer in self._graph.referrers[key]]
        if owners and all(type(owner) in _OF_FIXED_DICTS for owner in owners):
            return False  # such as keyword arguments: no code reaches the dict but by its own name
        return not any(owns(owner, item) for owner in owners)


def _can_remove_from(item: Any) -> bool:
    """Return True for an object except a dict if a user can remove the objects to which it refers:
    a generator is closed, a list loses an item, an instance of the user's class an attribute.
    """
    if is_exactly(item, *SUSPENDED):
        return True
    if any(is_instance(item, kind) for kind in (list, set, deque, type, SimpleNamespace)):
        return True
    if is_array(item) or is_instance(item, tuple):
        return False
    return is_users_class(type(item)) or is_removable_from(item)
