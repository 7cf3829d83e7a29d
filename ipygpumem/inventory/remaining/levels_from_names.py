"""Finds the chain of references from a name to an object that a search by levels has listed.

Such a search lists a million objects, level by level, without the way to each. Chains are needed
only for the few containers that have grown, so they are found afterwards: from a container back to
its parent in the level before, and so on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import by_identity, chunks, of_types
from ipygpumem.inventory.remaining.growth import GrownContainer

_PARENTS_AT_ONCE = 500
"""Number of possible parents whose references are listed at once."""

Chain = tuple[object, ...]
"""A named object, and the objects from there to another one: each refers to the next."""


class NamedContainer(NamedTuple):
    """An old container that has grown, which may keep only numbers or bytes."""

    name: str
    chain: Chain
    """The objects from the named one to the container."""
    container: GrownContainer


class LevelsFromNames:
    """Objects by their distance from names. The first level has the named objects, the second the
    objects to which these refer, and so on.

    Args:
        names: the name of each named object, by its identity.
        named: the named objects.
        owners: the module or class of each namespace that counts as one level below it, by the
            namespace's identity.
    """

    def __init__(
        self, names: Mapping[int, str], named: Sequence[Any], owners: Mapping[int, object]
    ) -> None:
        self._names = names
        self._owners = owners
        self._levels: list[Sequence[Any]] = [named]

    @property
    def last(self) -> Sequence[Any]:
        """The objects that are furthest from names so far."""
        return self._levels[-1]

    @property
    def before_last(self) -> Sequence[Any]:
        """The objects one reference nearer than the last ones; none if the last ones are named."""
        return self._levels[-2] if len(self._levels) > 1 else ()

    def add(self, level: Sequence[Any]) -> None:
        """Add the objects to which the last ones refer, as the level furthest from names."""
        self._levels.append(level)

    def containers_in_last(self, containers: Iterable[GrownContainer]) -> Iterator[NamedContainer]:
        """Yield the grown containers, all of the last level, each with its name and chain."""
        return self._with_chains(containers, self._levels[:-1])

    def containers_in_before_last(
        self, containers: Iterable[GrownContainer]
    ) -> Iterator[NamedContainer]:
        """Yield the grown containers, all of the level before the last, each with its name and
        chain.
        """
        return self._with_chains(containers, self._levels[:-2])

    def _with_chains(
        self, containers: Iterable[GrownContainer], nearer_levels: Sequence[Sequence[object]]
    ) -> Iterator[NamedContainer]:
        """Yield grown containers, each with its name and chain.

        Args:
            containers: the containers, all of one level.
            nearer_levels: the levels between names and theirs.
        """
        for container in containers:
            chain = self._chain_to(container.item, nearer_levels)
            yield NamedContainer(self._names[id(chain[0])], chain, container)

    def _chain_to(self, item: object, nearer_levels: Sequence[Sequence[object]]) -> Chain:
        """Return the objects from a named one to ``item``: one of each nearer level, then
        ``item``.
        """
        backward = [item]
        for level in reversed(nearer_levels):
            child = backward[-1]
            parent = self._owners.get(id(child))
            if parent is None:
                parent = _parent_of(child, level)
            backward.append(parent)
        return tuple(reversed(backward))


def _parent_of(child: object, level: Sequence[object]) -> object:
    """Return the object of a level that refers to ``child``, directly or by the dict of its
    attributes.
    """
    for references_of in (gc.get_referents, _through_dicts):
        for part in chunks(level, _PARENTS_AT_ONCE):
            if id(child) not in by_identity(references_of(*part)):
                continue
            for item in part:
                if id(child) in map(id, references_of(item)):
                    return item
    return child  # a thread has removed the reference since


def _through_dicts(*items: object) -> list[object]:
    """Return the objects in the dicts to which some objects refer, such as the dicts of
    attributes.
    """
    return gc.get_referents(*of_types({id(dict)}, gc.get_referents(*items)))
