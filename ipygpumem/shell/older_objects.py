"""Remembers older objects behind those that outlived experiments: no experiment has left these."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence, Set
from itertools import chain

from ipygpumem.heap.arrays import Span, is_array, places_of
from ipygpumem.heap.bulk import Kinds, by_identity
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.remembered import Remembered
from ipygpumem.inventory.earlier_data import EarlierData
from ipygpumem.shell.context import ShellContext

_MOST_BEHIND = 20_000
"""Maximum number of objects behind a survivor among which older data is searched."""


class OlderObjects:
    """Weak records of the nearest older objects behind the survivors of one shell."""

    def __init__(self, context: ShellContext) -> None:
        self._context = context
        self._tracked: list[Remembered] = []
        """Records of objects that the collector tracks."""
        self._arrays: dict[int, Span] = {}
        """The place of the memory of each NumPy array, by the array's identity. Arrays must have no
        weak references while user code runs.
        """
        self._data = EarlierData()
        """Samples of untracked data, such as texts."""

    def add(self, objects: Sequence[object]) -> None:
        """Remember further older objects."""
        self._tracked.append(Remembered(list(filter(gc.is_tracked, objects))))
        self._data.add(Kinds(objects))
        for array in filter(is_array, objects):
            for place in places_of([array]):
                self._arrays[id(array)] = place

    def tracked_identities(self) -> set[int]:
        """Return the identities of the tracked objects, as of the last ``update``."""
        return set(chain.from_iterable(item.identities for item in self._tracked))

    def update(self, live: Mapping[int, object], heap: Heap) -> None:
        """Forget the tracked objects that are not among the ``live`` ones, which the caller has
        looked up by ``tracked_identities``, and the arrays that are not on the ``heap``.
        """
        places = heap.places() if self._arrays else set[Span]()
        self._arrays = {key: place for key, place in self._arrays.items() if place in places}
        still_alive = list(filter(None, [item.alive(live) for item in self._tracked]))
        self._tracked = list(map(Remembered, still_alive))

    def identities(self, survivors: Sequence[object]) -> Set[int]:
        """Return the identities of the remembered objects that were alive at the last ``update``;
        data is only searched behind ``survivors``.
        """
        data = set(map(id, self._data_behind(survivors)))
        return self.tracked_identities() | self._arrays.keys() | data

    def objects(self, heap: Heap, survivors: Sequence[object]) -> list[object]:
        """Return the remembered objects that were alive at the last ``update``, each once; data is
        only searched behind ``survivors``.
        """
        tracked = heap.with_identities(self.tracked_identities())
        arrays = [array for array in heap.ndarrays if id(array) in self._arrays]
        data = self._data_behind(survivors)
        return list(by_identity([*tracked.values(), *arrays, *data]).values())

    def _data_behind(self, items: Sequence[object]) -> list[object]:
        """Return the data to which some objects lead, as far as the limit of objects allows."""
        barriers = Barriers([id(self._context.namespace)])
        references = ReferenceReader(barriers, has_text_keys=False)
        behind = dict[int, object]()
        waiting = {} if self._data.is_empty else by_identity(items)
        while waiting and len(behind) < _MOST_BEHIND:
            behind.update(waiting)
            below = by_identity(references.of(list(waiting.values())).of_python)
            waiting = {key: below[key] for key in below.keys() - behind.keys()}
        return self._data.earlier_among([*behind.values(), *waiting.values()])
