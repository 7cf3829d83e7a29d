r"""Chains of references from roots to objects, one through each holder of these objects.

An example, in which the dict is the holder::

    root "variable runs" --> list --> dict --> tuple --> view --> target
    \_________________________________/       \__________________/
              chain to the holder               chain down: all of it dies with the target
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.holder_finder import Holders
from ipygpumem.heap.holders.referrer_graph import Chain, Steps, sort_key_of_root
from ipygpumem.heap.kinds.arrays import elements, flat_elements, is_array
from ipygpumem.heap.knowledge.text_keys import referents_with_keys
from ipygpumem.heap.paths.data_frame_steps import are_blocks
from ipygpumem.heap.paths.roots import Rank, Root
from ipygpumem.introspect import module_of

_MOST_ITEMS = 200
"""Maximum number of items of one holder for each of which a chain is returned."""


class FoundChain(NamedTuple):
    """A chain of references from a root to an object, through one holder.

    If several items of the holder lead to the object, such as ``runs[0]`` and ``runs[7]``, the
    chain leads through the first item; ``further_down`` has the end of the chain through each other
    one.
    """

    roots: list[Root]
    """The root at which the chain begins, and further roots of the same object that one statement
    removes with it: ``del x, y``.
    """
    steps: Steps
    number_of_references: int
    """Number of references with which the holder holds the objects that were asked about: 2 for
    ``runs[0]`` and ``runs[7]``.
    """
    holder_at: int = -1
    """Position of the holder among the steps; -1 if the root is the holder."""
    further_down: tuple[Steps, ...] = ()
    """The chains down from the holder's other items to the object."""
    many_items: Sequence[object] = ()
    """All items that lead to the object, if there are too many for a chain through each; else
    empty.
    """

    @property
    def to_holder(self) -> Steps:
        """The steps up to the holder; none if the root is the holder."""
        return self.steps[: self.holder_at + 1]

    def steps_through_items(self) -> list[Steps]:
        """Return the whole chain through each item of the holder that leads to the object; through
        the first ``_MOST_ITEMS`` if there are more.
        """
        to_holder = self.to_holder
        return [self.steps, *((*to_holder, *chain_down) for chain_down in self.further_down)]

    def has_all_steps(self) -> bool:
        """Return True if ``steps_through_items`` has a chain for each reference of the holder."""
        return self.number_of_references == 1 + len(self.further_down)


class HolderChains:
    """The chains through the holders of objects, in the references that a search has read so far.

    Args:
        search: the search; it may go on between two questions.
    """

    def __init__(self, search: BackwardSearch) -> None:
        self._search = search
        self._graph = search.graph
        self._reference_counts: dict[int, Counter[int]] = {}
        """Number of references from each holder to each object, by their identities."""

    def chains_to(self, targets: Sequence[object]) -> list[FoundChain]:
        """Return a chain through each holder of some objects, the chains from variables first.

        These are all holders only after ``search_for_all``: before, the search may have ended at
        the first variable.
        """
        holders = self._search.holders.holders_of(list(map(id, targets)))
        chains = self._chains_without_holder(holders)
        # Chains to a holder through an object that dies with the targets: this object has holders,
        # too. Once it is removed from them, such a chain leads nowhere.
        inner_chains = list[FoundChain]()
        for key in holders.items:
            found_chain = self._chain_through(key, holders)
            if found_chain is None:
                continue
            if _leads_through_dying(found_chain, targets, holders):
                inner_chains.append(found_chain)
            else:
                chains.append(found_chain)
        chains = chains or inner_chains
        chains.sort(key=lambda found_chain: found_chain.roots[0].rank)
        # IPython's own objects follow its outputs.
        of_users = [found_chain for found_chain in chains if not _is_of_ipython(found_chain)]
        return of_users or chains

    def _chains_without_holder(self, holders: Holders) -> list[FoundChain]:
        """Return the chains from roots that refer to a target directly, as a variable does, or to
        an object that must die with a target, such as a tuple around it.
        """
        chains = list[FoundChain]()
        for key in holders.next_down:
            if key not in self._search.roots_at:
                continue
            for steps in self._chains_of_elements(key, holders):
                for roots in self._roots_together(steps):
                    chains.append(FoundChain(roots, steps, number_of_references=1))
        return chains

    def _chain_through(self, key: int, holders: Holders) -> FoundChain | None:
        """Return the chain through a holder to a target, with the chains through the holder's other
        items that lead to a target; None if no root leads to the holder.

        Args:
            key: identity of the holder.
            holders: all holders of the targets.
        """
        holder = self._graph.objects[key]
        chain = self._chain_to_holder(key, holders)
        if chain is None:
            return None
        root, steps = chain
        item_ids = holders.items[key]  # one for each reference, but many for 1,000 views
        first_down, *further_down = self._chains_down(item_ids[:_MOST_ITEMS], holders)
        many_items = list[object]()
        if len(item_ids) > _MOST_ITEMS:
            many_items = list(map(self._graph.objects.__getitem__, item_ids))
        # The holder is asked now, so it may have fewer references than chains: another thread may
        # have removed one. And several chains lead through the dict of a holder's attributes, which
        # is only one reference.
        number = self._number_of_references(holder, holders.next_down.keys())
        number = max(1 + len(further_down), number)
        return FoundChain(
            self._names_of(root, steps),
            (*steps, *first_down),
            number_of_references=number,
            holder_at=len(steps) - 1,
            further_down=tuple(further_down),
            many_items=many_items,
        )

    def _chain_to_holder(self, key: int, holders: Holders) -> Chain | None:
        """Return a root and the chain from it to a holder; None if no root leads to the holder.

        A chain through objects that must die with the targets is only taken if there is no other
        one.

        Args:
            key: identity of the holder.
            holders: all holders of the targets, and the objects that must die.
        """
        dying = holders.next_down
        chain = self._graph.chain(self._graph.objects[key], self._search.ways_from_roots)
        if chain is None or dying.keys().isdisjoint(map(id, chain[1])):
            return chain
        # Go up from the holder, past the objects that die, to the nearest root.
        next_down: dict[int, int | None] = {key: None}
        waiting = [key]
        for upper in waiting:  # the list grows
            roots = self._search.roots_at.get(upper)
            if roots:
                return min(roots, key=sort_key_of_root), self._steps_down(upper, next_down)
            for referrer in self._graph.referrers.get(upper, ()):
                if referrer not in next_down and referrer not in dying:
                    next_down[referrer] = upper
                    waiting.append(referrer)
        return chain

    # -- from a holder's items down to targets ----------------------------------------------------

    def _chains_down(self, item_ids: Sequence[int], holders: Holders) -> Iterator[Steps]:
        """Yield the chains from items of a holder to targets, one for each attribute if an item is
        the dict of the holder's attributes.

        Args:
            item_ids: the identities of the items.
            holders: all holders of the targets, and the objects between them.
        """
        for key in item_ids:
            item = self._graph.objects[key]
            key_below = holders.next_down[key]
            # The item is the dict of the holder's attributes: one chain for each attribute.
            if type(item) is dict and key_below is not None:
                to_attribute: Steps = (item, self._graph.objects[key_below])
                yield from self._chains_of_attributes(to_attribute, holders)
                continue
            for steps in self._chains_to_whole_arrays(key, holders):
                yield from self._chains_of_attributes(steps, holders)

    def _chains_of_attributes(self, steps: Steps, holders: Holders) -> Iterator[Steps]:
        """Yield the chains that differ from a chain only in the value of its first dict: one for
        each value that leads to a target. Yield the chain itself if it leads through no dict.

        The dict has the attributes of a library's object, several of which may have the target.
        """
        for position, step in enumerate(steps[:-1]):
            if type(step) is dict:
                for chain_down in self._chains_of_children(steps, position, holders):
                    yield from self._chains_of_blocks(chain_down, holders)
                return
        yield from self._chains_of_blocks(steps, holders)

    def _chains_of_blocks(self, steps: Steps, holders: Holders) -> Iterator[Steps]:
        """Yield the chains that differ from a chain only in the block of its data frame: one for
        each block that leads to a target. Yield the chain itself if it leads through no blocks.

        A column is removed with its own block only.
        """
        for position, step in enumerate(steps[:-1]):
            if are_blocks(step):
                yield from self._chains_of_children(steps, position, holders)
                return
        yield steps

    def _chains_of_children(self, steps: Steps, position: int, holders: Holders) -> Iterator[Steps]:
        """Yield a chain through each child that leads to a target, of one object on a chain; the
        chain itself first.

        Args:
            steps: the chain.
            position: the position of the object among the steps.
            holders: knows which children lead to a target.
        """
        id_on_chain = id(steps[position + 1])
        children = [id_on_chain, *self._graph.children.get(id(steps[position]), ())]
        for child in dict.fromkeys(children):
            if child in holders.next_down:
                yield (*steps[: position + 1], *self._steps_down(child, holders.next_down))

    def _chains_to_whole_arrays(self, key: int, holders: Holders) -> list[Steps]:
        """Return the chains from an object to targets.

        If it is an array of objects, all of which lead to targets, that is a chain of the array
        alone: the line removes it as a whole, ``del runs[0]``.
        """
        item = self._graph.objects[key]
        chains = self._chains_of_elements(key, holders)
        if len(chains) > 1 and len(chains) == _number_of_elements(item):
            return [(item,)]
        return chains

    def _chains_of_elements(self, key: int, holders: Holders) -> list[Steps]:
        """Return the chain from an object to a target. From an array of objects, return one chain
        for each element that leads to a target: the target dies only without all of them.
        """
        next_down = holders.next_down
        item = self._graph.objects[key]
        leading = list[int]()
        if is_array(item) and elements(item) is not None:
            leading = [child for child in self._graph.children.get(key, ()) if child in next_down]
        has_several_chains = 1 < len(leading) <= _MOST_ITEMS
        if not has_several_chains:
            return [self._steps_down(key, next_down)]
        return [(item, *self._steps_down(child, next_down)) for child in dict.fromkeys(leading)]

    def _steps_down(self, key: int | None, next_down: Mapping[int, int | None]) -> Steps:
        """Return the chain down from an object to its target."""
        steps = list[object]()
        while key is not None:
            steps.append(self._graph.objects[key])
            key = next_down[key]
        return tuple(steps)

    # -- roots and references ---------------------------------------------------------------------

    def _roots_together(self, steps: Steps) -> list[list[Root]]:
        """Return the roots that refer to the first step, in groups that one statement removes: the
        variables ``x`` and ``y`` with ``del x, y``.
        """
        groups: dict[str, list[Root]] = {}
        is_target = len(steps) == 1
        roots = self._search.roots_of(steps[0])
        for root in sorted(roots, key=lambda root: (root.rank, root.text)):
            if root.is_output:  # ``%xdel _5`` removes ``Out[5]``, too
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
        """Return the number of references from a holder to objects.

        Args:
            holder: the holder. It may be large, so its references are counted once for all calls.
            keys: the identities of the objects.
        """
        counts = self._reference_counts.get(id(holder))
        if counts is None:
            counts = Counter(map(id, referents_with_keys(holder)))
            self._reference_counts[id(holder)] = counts
        # Either may be long, so go through the shorter one.
        return sum(map(counts.__getitem__, counts.keys() & keys))


def _leads_through_dying(
    found_chain: FoundChain, targets: Sequence[object], holders: Holders
) -> bool:
    """Return True for a chain that leads to its holder through an object that dies with the
    targets: this object has holders of its own.
    """
    for step in found_chain.to_holder:
        if id(step) in holders.next_down and _dies_without_item(step, targets):
            return True
    return False


def _dies_without_item(item: object, targets: Sequence[object]) -> bool:
    """Return True for an object that is removed as a whole if one of its items is to be removed,
    such as a tuple. False for a dict, and for an array of objects unless it is itself a target: an
    item can be taken out of these.
    """
    if type(item) is dict:
        return False
    return elements(item) is None or any(item is target for target in targets)


def _number_of_elements(array: object) -> int:
    """Return the number of objects other than None in an array of objects."""
    return len({id(element) for element in flat_elements(array) or () if element is not None})


def _is_of_ipython(found_chain: FoundChain) -> bool:
    """Return True for a chain from IPython's own objects, such as its caches of outputs."""
    if found_chain.roots[0].rank in (Rank.IPYTHON, Rank.OURS, Rank.NOWHERE):
        return True
    return module_of(found_chain.steps[0]).partition(".")[0] in ("IPython", "ipykernel")
