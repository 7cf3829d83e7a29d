"""Remembers the nearest older objects behind those that outlived experiments.

``results.append(model)``, where ``model`` is older than the experiment, leaves a new list item that
leads to an older object. No experiment has left that, so reports don't count its bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence, Set
from itertools import chain

from ipygpumem.heap.bulk import Kinds, by_identity
from ipygpumem.heap.kinds.arrays import ArraySpan, is_array, spans_of
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.live.remembered import Remembered
from ipygpumem.inventory.remaining.earlier_data import EarlierData
from ipygpumem.shell.context import ShellContext

_MOST_OBJECTS_BEHIND = 20_000
"""Maximum number of objects behind a survivor among which older data is searched."""


class OlderObjects:
    """Weak records of the older objects to which survivors lead, for one shell: of each survivor,
    the nearest ones.
    """

    def __init__(self, context: ShellContext) -> None:
        self._context = context
        self._tracked: list[Remembered] = []
        """Records of objects that the collector tracks."""
        self._arrays: dict[int, ArraySpan] = {}
        """The addresses of each NumPy array's memory, by the array's identity. Arrays must have no
        weak references while user code runs.
        """
        self._data = EarlierData()
        """Samples of untracked data, such as texts."""

    def add(self, objects: Sequence[object]) -> None:
        """Remember further older objects, without keeping them alive."""
        self._tracked.append(Remembered(list(filter(gc.is_tracked, objects))))
        self._data.add(Kinds(objects))
        for array in filter(is_array, objects):
            for span in spans_of([array]):
                self._arrays[id(array)] = span

    def tracked_identities(self) -> set[int]:
        """Return the identities of the tracked objects, as of the last ``update``."""
        return set(chain.from_iterable(item.identities for item in self._tracked))

    def update(self, live: Mapping[int, object], heap: Heap) -> None:
        """Forget the objects that have died.

        Args:
            live: the live objects among those with ``tracked_identities``, by identity.
            heap: the live objects, among which are all live arrays.
        """
        spans = heap.spans() if self._arrays else set[ArraySpan]()
        self._arrays = {key: span for key, span in self._arrays.items() if span in spans}
        live_groups = list(filter(None, [group.alive(live) for group in self._tracked]))
        self._tracked = list(map(Remembered, live_groups))

    def identities(self, survivors: Sequence[object]) -> Set[int]:
        """Return the identities of the remembered objects that were alive at the last ``update``.

        Args:
            survivors: the objects behind which untracked data, such as texts, is searched: it can
                only be recognised when it is seen again.
        """
        data = set(map(id, self._data_behind(survivors)))
        return self.tracked_identities() | self._arrays.keys() | data

    def objects(self, heap: Heap, survivors: Sequence[object]) -> list[object]:
        """Return the remembered objects that were alive at the last ``update``, each once.

        Args:
            heap: the live objects.
            survivors: the objects behind which untracked data is searched.
        """
        tracked = heap.with_identities(self.tracked_identities())
        arrays = [array for array in heap.ndarrays if id(array) in self._arrays]
        data = self._data_behind(survivors)
        return list(by_identity([*tracked.values(), *arrays, *data]).values())

    def _data_behind(self, items: Sequence[object]) -> list[object]:
        """Return the remembered data among ``items`` and the objects to which these lead, level by
        level until there are ``_MOST_OBJECTS_BEHIND`` objects.
        """
        barriers = Barriers([id(self._context.namespace)])
        references = ReferenceReader(barriers, has_text_keys=False)
        reached = dict[int, object]()
        level = {} if self._data.is_empty else by_identity(items)
        while level and len(reached) < _MOST_OBJECTS_BEHIND:
            reached.update(level)
            referents = by_identity(references.of(list(level.values())).of_python)
            level = {key: referents[key] for key in referents.keys() - reached.keys()}
        return self._data.earlier_among([*reached.values(), *level.values()])
