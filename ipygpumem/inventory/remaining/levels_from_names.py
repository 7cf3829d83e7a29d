"""Finds the chain of references from a name to an object that a search by levels has listed.

Such a search lists a million objects without the way to each. Chains are wanted of the few
containers that have grown: they are found afterwards, by a search for parents in the levels.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import by_identity, chunks, of_types
from ipygpumem.inventory.remaining.growth import Grown

_PARENTS_AT_ONCE = 500
"""Number of possible parents whose references are listed at once."""

Chain = tuple[object, ...]
"""A named object, and the objects from there to another one: each refers to the next."""


class GrownContainer(NamedTuple):
    """An old container that has grown, which may keep only numbers or bytes."""

    name: str
    chain: Chain
    """The objects from the named one to the container."""
    grown: Grown


class LevelsFromNames:
    """The objects by their distance from names: named objects, the objects in these, and so on.

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

    def containers_in_last(self, containers: Iterable[Grown]) -> Iterator[GrownContainer]:
        """Yield containers of the last level that have grown, with their names and chains."""
        return self._with_chains(containers, self._levels[:-1])

    def containers_in_before_last(self, containers: Iterable[Grown]) -> Iterator[GrownContainer]:
        """Yield containers of the level before the last that have grown, with their names and
        chains.
        """
        return self._with_chains(containers, self._levels[:-2])

    def _with_chains(
        self, containers: Iterable[Grown], nearer_levels: Sequence[Sequence[object]]
    ) -> Iterator[GrownContainer]:
        """Yield grown containers with their names and chains.

        Args:
            containers: the containers, all of one level.
            nearer_levels: the levels between names and theirs.
        """
        for grown in containers:
            chain = self._chain_to(grown.item, nearer_levels)
            yield GrownContainer(self._names[id(chain[0])], chain, grown)

    def _chain_to(self, item: object, nearer_levels: Sequence[Sequence[object]]) -> Chain:
        """Return the objects from a named one to ``item``, with one of each nearer level."""
        backward = [item]
        for level in reversed(nearer_levels):
            child = backward[-1]
            parent = self._owners.get(id(child))
            if parent is None:
                parent = _parent_of(child, level)
            backward.append(parent)
        return tuple(reversed(backward))


def _parent_of(child: object, level: Sequence[object]) -> object:
    """Return the object in ``level`` that refers to ``child``, perhaps through the dict of its
    attributes.
    """
    for references_of in (gc.get_referents, _through_dicts):
        for part in chunks(level, _PARENTS_AT_ONCE):
            if id(child) not in by_identity(references_of(*part)):
                continue
            for item in part:
                if id(child) in map(id, references_of(item)):
                    return item
    return child  # a thread has removed it since


def _through_dicts(*items: object) -> list[object]:
    """Return the objects to which dicts among the references of some objects refer."""
    return gc.get_referents(*of_types({id(dict)}, gc.get_referents(*items)))
