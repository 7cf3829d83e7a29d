"""Follows live graphs through the blocks of a model, one after the other.

A node is of the last block whose weights it reaches. So what a block computes before it uses a weight counts as the
end of the block before it; over all blocks that comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property
from typing import Any

from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import parameters_of
from ipygpumem.objects.arrays import StorageKey

_FEW = 16
"""Nodes that make one input of another before the first weight, as a norm's; more are not the block's own."""
METADATA = "_input_metadata"
"""Where a node says what shapes its outputs had: the inputs of its backward pass."""
Output = tuple[int, int]
"""A node, and the number of its output."""


class Chain:
    """The nodes of blocks that one tensor goes through.

    Args:
        look: what is alive.
        graphs: the live graphs.
        blocks: the modules, in order.

    Attributes:
        is_one: whether each block takes one tensor of the block before it, in one pass, and nothing else of a block.
    """

    def __init__(self, look: Look, graphs: Graphs, blocks: list[Any]) -> None:
        self._look, self._graphs, self._flow = look, graphs, graphs.flow
        self._count = len(blocks)
        numbers = {id(weight): place for place, block in enumerate(blocks, 1) for weight in parameters_of(block)}
        self._levels = self._flow.reach(numbers)
        """Of each node the number of its block, from 1; 0 before them."""
        self._inputs: dict[int, set[Output]] = {level: set() for level in range(1, self._count + 1)}
        for key, level in self._levels.items():
            lower = (one for one in self._flow.sources[key] if self._levels[one[0]] < level)
            self._inputs[level].update(one for one in lower if one[0] not in self._flow.leaves)
        for level, inputs in self._inputs.items():
            self._inputs[level] = self._without_inner(level, inputs)
        self.is_one = all(self._is_next(level) for level in self._inputs) and 1 in self._levels.values()

    def _without_inner(self, level: int, inputs: set[Output]) -> set[Output]:
        """Return a block's inputs without what the block itself makes of them before it uses a weight."""
        nodes, inner = {node for node, _ in inputs}, set[int]()
        for node in nodes:
            inner |= self._made_of(node, nodes, level)
        return {one for one in inputs if one[0] not in inner}

    def _made_of(self, last: int, inputs: set[int], level: int) -> set[int]:
        """Return the few nodes that make one input of others, for this block alone; nothing if there is more to it."""
        found, waiting = set[int](), [last]
        while waiting:
            node = waiting.pop()
            if node in found or (node in inputs and node != last):
                continue
            found.add(node)
            waiting += [source for source, _ in self._flow.sources[node]]
            if len(found) > _FEW or not self._flow.sources[node]:
                return set()
        takers = [taker for node in found for taker in self._flow.takers[node]]
        return found if all(self._levels[taker] == level or taker in found for taker in takers) else set()

    def _is_next(self, level: int) -> bool:
        of_blocks = [self._levels[node] for node, _ in self._inputs[level] if self._levels[node]]
        return of_blocks == [level - 1] * (level > 1)

    @cached_property
    def _behind(self) -> set[int]:
        """The nodes of the last level that come behind all blocks: they reach weights that no block needs."""
        last = self._inputs[self._count]
        waiting, before = [node for node, _ in last], set[int]()
        while waiting:
            node = waiting.pop()
            if node not in before:
                before.add(node)
                waiting += [source for source, _ in self._flow.sources[node]]
        others = [leaf for node, leaf in self._flow.leaves.items() if node not in before and not self._levels[node]]
        reached = self._flow.reach({id(leaf): 1 for leaf in others})
        return {key for key, level in self._levels.items() if level == self._count and reached[key]}

    @property
    def has_end(self) -> bool:
        """Whether it is known where the last block ends."""
        return bool(self._behind)

    @property
    def takes_data(self) -> bool:
        """Whether no weight is in front of the blocks: what the first one does to data has no node."""
        return not self._inputs[1]

    def freed(self, *, whole: bool, without_end: Collection[int] = ()) -> dict[StorageKey, int]:
        """Return the bytes that graphs would not keep if the blocks ran again in backward, by their storages.

        Args:
            whole: all blocks, and not all but the last.
            without_end: the numbers of blocks, from 1, of which what comes behind the last weight does not count.
        """
        last = self._count if whole else self._count - 1
        nodes = {key for key, level in self._levels.items() if level <= last}
        if whole:
            nodes -= self._behind
        nodes -= {key for key in nodes if self._levels[key] in without_end and key not in self._before_weights}
        shares: dict[StorageKey, int] = {}
        for key in {key for node in nodes for key, _ in self._graphs.saved.get(node, ())}:
            savers = self._flow.savers.get(key, ())
            of_one = nodes.issuperset(savers) and len({self._levels[saver] for saver in savers}) == 1
            if of_one and self._look.dies(key, set()):
                shares[key] = self._look.sizes[key]
        inputs = set[Output]().union(*(self._inputs[level] for level in range(1, last + 1)))
        for one in inputs:
            for key in self._graphs.results.get(one, ()):
                shares.pop(key, None)
        if self.takes_data:  # what the first nodes have saved may be it
            for key in [key for key in shares if any(map(self._is_first, self._flow.savers[key]))]:
                del shares[key]
        sizes = [self._bytes_of(*one) for one in inputs if one not in self._graphs.results]
        missing = [size for size in sizes if size is not None]
        return _without(shares, sum(missing)) if len(missing) == len(sizes) else {}

    def _bytes_of(self, node: int, place: int) -> int | None:
        """Return the size of a node's output that no graph has saved; None where torch does not tell."""
        try:
            made = getattr(self._flow.nodes[node], METADATA)[place]
            return math.prod(map(int, made.shape)) * int(made.dtype.itemsize)
        except (AttributeError, LookupError, RuntimeError, TypeError):  # torch 2.0, a nested tensor
            return None

    def _is_first(self, node: int) -> bool:
        return self._levels[node] == 1 and all(self._is_weight(source) for source, _ in self._flow.sources[node])

    def _is_weight(self, node: int) -> bool:
        """Whether a node is a leaf, or makes something of one alone that is no larger, as a transpose."""
        made = self._bytes_of(node, 0)
        while node not in self._flow.leaves:
            sources = self._flow.sources[node]
            if len(sources) != 1:
                return False
            ((node, _),) = sources
        return (made or 0) <= int(self._look.read("nbytes", self._flow.leaves[node]))

    @cached_property
    def _before_weights(self) -> set[int]:
        """The nodes that a node of the same block with a weight takes something of, and those nodes."""
        found: set[int] = set()
        for node, level in reversed(self._levels.items()):
            uses = any(self._levels[one] == level and self._is_weight(one) for one, _ in self._flow.sources[node])
            if uses or any(self._levels[one] == level and one in found for one in self._flow.takers[node]):
                found.add(node)
        return found


def _without(shares: dict[StorageKey, int], size: int) -> dict[StorageKey, int]:
    """Return shares that are so many bytes less in all."""
    rest = dict(shares)
    for key in sorted(shares, key=shares.__getitem__, reverse=True) if size else ():
        taken = min(size, rest[key])
        rest[key], size = rest[key] - taken, size - taken
    return rest
