"""Remembers older objects behind those that outlived experiments: no experiment has left these."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence, Set
from itertools import chain, filterfalse

from ipygpumem.heap.bulk import Kinds, by_identity
from ipygpumem.heap.garbage import weak
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
        self._arrays: list[weakref.ref[object]] = []
        """References to the untracked objects that support weak references: arrays of numbers."""
        self._data = EarlierData()
        """Samples of untracked data, such as texts."""

    def add(self, objects: Sequence[object]) -> None:
        """Remember further older objects."""
        self._tracked.append(Remembered(list(filter(gc.is_tracked, objects))))
        self._data.add(Kinds(objects))
        for item in filterfalse(gc.is_tracked, objects):
            reference = weak(item)
            if reference is not None:
                self._arrays.append(reference)

    def tracked_identities(self) -> set[int]:
        """Return the identities of the tracked objects, as of the last ``update``."""
        return set(chain.from_iterable(item.identities for item in self._tracked))

    def update(self, live: Mapping[int, object]) -> None:
        """Forget the tracked objects that are not among the ``live`` ones, which the caller has
        looked up by ``tracked_identities``.
        """
        still_alive = list(filter(None, [item.alive(live) for item in self._tracked]))
        self._tracked = list(map(Remembered, still_alive))

    def identities(self, survivors: Sequence[object]) -> Set[int]:
        """Return the identities of the remembered objects that are alive; data is only searched
        behind ``survivors``.
        """
        self._arrays = [item for item in self._arrays if item() is not None]
        arrays = {id(item()) for item in self._arrays}
        data = set(map(id, self._data_behind(survivors)))
        return self.tracked_identities() | arrays | data

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
        return self._data.among([*behind.values(), *waiting.values()])
