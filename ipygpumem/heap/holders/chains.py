"""Chains of references from roots to objects, one through each holder of these objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from ipygpumem.heap.arrays import elements, flat_elements, is_array
from ipygpumem.heap.holders.backward import BackwardSearch, Steps, order_of_root
from ipygpumem.heap.knowledge.text_keys import referents_with_keys
from ipygpumem.heap.paths.roots import Rank, Root
from ipygpumem.introspect import module_of

_MOST_ITEMS = 200
"""Maximum number of items of one holder for each of which a chain is returned."""


class FoundChain(NamedTuple):
    """A chain of references from some roots to an object, with its holder."""

    roots: list[Root]
    """The roots that one statement removes; the first of them begins the chain."""
    steps: Steps
    references: int
    """Number of references with which the holder holds the objects that were asked about."""
    holder_at: int = -1
    """Position of the holder among the steps; -1 if the root is the holder."""
    more: tuple[Steps, ...] = ()
    """Other chains from the holder, without it: through its other items that lead to the object."""
    items: Sequence[object] = ()
    """All these items, if they are too many for a chain of each."""


class HolderChains:
    """The chains through the holders of objects, as a search has seen them so far.

    Args:
        search: the search, which may go on.
    """

    def __init__(self, search: BackwardSearch) -> None:
        self._search = search
        self._reference_counts: dict[int, Counter[int]] = {}
        """Number of references from each holder to each object, by their identities."""

    def chains_to(self, targets: Sequence[object]) -> list[FoundChain]:
        """Return a chain from each holder of some objects, those of variables first.

        Only a search ``for_all`` knows all of them.
        """
        linked, held = self._search.holders_of(list(map(id, targets)))
        chains, inner_chains = list[FoundChain](), list[FoundChain]()
        for key in linked:
            if key in self._search.roots_at:
                for steps in self._chains_of_elements(key, linked):
                    chains += [FoundChain(roots, steps, 1) for roots in self._roots_together(steps)]
        for key, items in held.items():
            found_chain = self._chain_through(key, items, linked)
            if found_chain is None:
                continue
            to_holder = found_chain.steps[: found_chain.holder_at + 1]
            on_the_way = [step for step in to_holder if id(step) in linked]
            if any(_dies_without_item(step, targets) for step in on_the_way):
                # It dies with these, which have holders of their own.
                inner_chains.append(found_chain)
            else:
                chains.append(found_chain)
        chains = chains or inner_chains
        chains.sort(key=lambda found_chain: found_chain.roots[0].rank)
        # IPython's own objects follow its outputs.
        of_users = [found_chain for found_chain in chains if not _is_of_ipython(found_chain)]
        return of_users or chains

    def _chain_through(
        self, key: int, items: Sequence[int], linked: dict[int, int | None]
    ) -> FoundChain | None:
        """Return the chain through a holder, with those through its other items that lead to a
        target; None if no root leads to it.

        Args:
            key: identity of the holder.
            items: identities of these items.
            linked: as from ``BackwardSearch.holders_of``.
        """
        holder = self._search.objects[key]
        chain = self._chain_outside(key, linked.keys())
        if chain is None:
            return None
        root, steps = chain
        below, *more = self._chains_down(items[:_MOST_ITEMS], linked)
        many = list[object]()
        if len(items) > _MOST_ITEMS:
            many = list(map(self._search.objects.__getitem__, items))
        # Another thread may have removed the reference by now, as the end of a thread does. And the
        # dict of a holder's attributes is one reference, which has several.
        number = self._number_of_references(holder, linked.keys())
        number = max(1 + len(more), number)
        names = self._names_of(root, steps)
        return FoundChain(names, (*steps, *below), number, len(steps) - 1, tuple(more), many)

    def _chain_outside(self, key: int, linked: Set[int]) -> tuple[Root, Steps] | None:
        """Return a root and the chain of objects from it to a holder of ``linked`` objects, not
        through one of these if there is another chain; None without a way.
        """
        chain = self._search.chain(self._search.objects[key], self._search.named)
        if chain is None or linked.isdisjoint(map(id, chain[1])):
            return chain
        above: dict[int, int | None] = {key: None}
        waiting = [key]
        for lower in waiting:  # the list grows
            for root in sorted(self._search.roots_at.get(lower, ()), key=order_of_root):
                return root, self._steps_down(lower, above)
            for referrer in self._search.referrers.get(lower, ()):
                if referrer not in above and referrer not in linked:
                    above[referrer] = lower
                    waiting.append(referrer)
        return chain

    def _chains_down(self, items: Sequence[int], linked: dict[int, int | None]) -> Iterator[Steps]:
        """Yield the chains from items of a holder to targets, one for each attribute if an item is
        the dict of the holder's attributes.
        """
        for item in items:
            below = linked[item]
            if below is None or type(self._search.objects[item]) is not dict:
                for steps in self._chains_to_whole_arrays(item, linked):
                    yield from self._chains_of_attributes(steps, linked)
            else:
                steps = (self._search.objects[item], self._search.objects[below])
                yield from self._chains_of_attributes(steps, linked)

    def _chains_of_attributes(self, steps: Steps, linked: dict[int, int | None]) -> Iterator[Steps]:
        """Yield a chain, or one for each attribute of the first object on it with a dict of these:
        a library's object may lead to several targets.
        """
        for position, step in enumerate(steps[:-1]):
            if type(step) is dict:
                first = id(steps[position + 1])
                for attribute in dict.fromkeys([first, *self._search.children.get(id(step), ())]):
                    if attribute in linked:
                        yield (*steps[: position + 1], *self._steps_down(attribute, linked))
                return
        yield steps

    def _chains_to_whole_arrays(self, key: int, linked: dict[int, int | None]) -> list[Steps]:
        """Return the chains from an object to targets, but only the object if it is an array all of
        whose elements lead to targets: it is removed as a whole.
        """
        item = self._search.objects[key]
        chains = self._chains_of_elements(key, linked)
        if len(chains) > 1 and len(chains) == _number_of_elements(item):
            return [(item,)]
        return chains

    def _chains_of_elements(self, key: int, linked: dict[int, int | None]) -> list[Steps]:
        """Return the chain from an object to a target, or one for each element if it is an array of
        objects: the target dies only without all of these.
        """
        item = self._search.objects[key]
        leading = list[int]()
        if is_array(item) and elements(item) is not None:
            leading = [child for child in self._search.children.get(key, ()) if child in linked]
        if not 1 < len(leading) <= _MOST_ITEMS:
            return [self._steps_down(key, linked)]
        return [(item, *self._steps_down(child, linked)) for child in dict.fromkeys(leading)]

    def _steps_down(self, key: int | None, linked: dict[int, int | None]) -> Steps:
        """Return the chain from an object to the target by which it was found."""
        steps = list[object]()
        while key is not None:
            steps.append(self._search.objects[key])
            key = linked[key]
        return tuple(steps)

    def _roots_together(self, steps: Steps) -> list[list[Root]]:
        """Return the roots that refer to the first step, in groups that one statement removes."""
        groups: dict[str, list[Root]] = {}
        is_target = len(steps) == 1
        roots = self._search.roots_of(steps[0])
        for root in sorted(roots, key=lambda root: (root.rank, root.text)):
            if root.is_output:
                group = "%xdel"
            elif root.is_freed_by_command:
                group = "%gpumem"
            elif is_target and root.rank is Rank.VARIABLE and not root.advice:
                group = ""  # one ``del`` names all variables
            else:
                group = root.text
            groups.setdefault(group, []).append(root)
        return list(groups.values())

    def _names_of(self, root: Root, steps: Steps) -> list[Root]:
        """Return a root, with all other names of the object if the root refers to it directly."""
        if len(steps) == 1:
            for group in self._roots_together(steps):
                if root in group:
                    return group
        return [root]

    def _number_of_references(self, holder: object, keys: Set[int]) -> int:
        """Return the number of references from an object, which may be large, to some objects."""
        counts = self._reference_counts.get(id(holder))
        if counts is None:
            counts = Counter(map(id, referents_with_keys(holder)))
            self._reference_counts[id(holder)] = counts
        # Either may be long, so go through the shorter one.
        return sum(map(counts.__getitem__, counts.keys() & keys))


def _dies_without_item(item: object, targets: Sequence[object]) -> bool:
    """Return True for an object that is removed as a whole if one of its items is; not for the dict
    of an object's attributes, or an array of objects that is none of some targets.
    """
    if type(item) is dict:
        return False
    return elements(item) is None or any(item is target for target in targets)


def _number_of_elements(array: object) -> int:
    """Return the number of objects other than None in an array of objects."""
    return len({id(element) for element in flat_elements(array) or () if element is not None})


def _is_of_ipython(found_chain: FoundChain) -> bool:
    """Return True for a chain from IPython's own objects."""
    if found_chain.roots[0].rank in (Rank.IPYTHON, Rank.OURS, Rank.NOWHERE):
        return True
    return module_of(found_chain.steps[0]).partition(".")[0] in ("IPython", "ipykernel")
