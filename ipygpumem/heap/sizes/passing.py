"""Passes over everything that some objects lead to, so that later readings count none of it: three
times as fast as reading it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

from ipygpumem.heap.bulk import ONCE_IN_LIST, by_identity, chunks, of_types, types_of, without_types
from ipygpumem.heap.kinds.libraries import BUFFERS
from ipygpumem.heap.sizes.folding import Folder
from ipygpumem.heap.sizes.frontier import Context

_SHORT_LEVEL = 8
"""Fewer objects may be nodes of linked lists, which are read together."""


class PlainObjects:
    """Passes over plain objects: their memory is shown by nothing that has no reference to them, as
    a view may show an array's.

    Args:
        context: the graph, and what its readers share.
        folder: reads the objects' references.
    """

    def __init__(self, context: Context, folder: Folder) -> None:
        self._barriers = context.barriers
        self._limits = context.limits
        self._types = context.types
        self._folder = folder

    def pass_over(self, roots: Sequence[Any]) -> list[Any]:
        """Pass over plain objects, and the plain objects behind them, as far as the limits allow.

        The result are the objects of other kinds among the roots and behind plain objects, such as
        arrays and tensors: these must be read.
        """
        other_kinds: dict[int, Any] = {}
        level = roots
        while level and not self._limits.is_reached():
            if len(level) < _SHORT_LEVEL:
                level = [*level, *chain.from_iterable(map(self._folder.links_behind, level))]
            self._limits.visit(len(level))
            following: dict[int, Any] = {}
            for part in chunks(level):
                self._limits.check()
                self._pass_over_part(part, other_kinds, following)
            level = self._barriers.enterable(list(following.values()))
        return list(other_kinds.values())

    def _pass_over_part(
        self, part: Sequence[Any], other_kinds: dict[int, Any], following: dict[int, Any]
    ) -> None:
        """Pass over the plain objects among some objects.

        Args:
            part: the objects.
            other_kinds: receives the objects of other kinds, by identity.
            following: receives the objects to which the plain ones refer, by identity.
        """
        self._types.learn(part)
        kinds = self._other_kinds()
        other_kinds.update(by_identity(of_types(kinds, part)))
        plain = without_types(kinds, part)
        self._barriers.passed_over.update(map(id, plain))
        for references, _ in self._folder.references_of(plain, types_of(plain)):
            following.update(by_identity(self._without_leaves(references.of_python)))

    def _without_leaves(self, items: Sequence[Any]) -> Sequence[Any]:
        """Pass over the numbers and texts among some objects; return the other objects, which may
        lead to more.
        """
        leaf_types = (self._types.learn(items) & self._types.leaves) - BUFFERS
        # A leaf with one reference need not be passed over, because no later reading comes to it.
        # The counts are read before ``compress``, which would hold another reference.
        are_shared = list(map(ONCE_IN_LIST.__lt__, map(sys.getrefcount, items)))
        leaves = of_types(leaf_types, list(compress(items, are_shared)))
        self._barriers.passed_over.update(map(id, leaves))
        return without_types(leaf_types, items)

    def _other_kinds(self) -> set[int]:
        """Return the types of the objects whose memory may be shown without a reference to them."""
        types = self._types
        with_memory = types.apart | types.own_bytes.readers.keys()
        return with_memory | types.streams | types.with_slices | BUFFERS
