"""Walks over everything to which objects lead, within one limit for all rows of a report.

To name one holder of a hundred arrays, a report asks of each object on a chain to how many of the
arrays it leads: ``runs`` to all of them, ``runs[0]`` to one.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity, chunks, not_among, of_types, types_of, without_types
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader

_MOST_VISITS = 2_000_000
"""Maximum number of objects to look at for all rows of a report: a second of work."""
_MOST_PARTS = 10_000
"""Maximum number of objects in an item that is removed as a whole."""
_DATA = set(map(id, (int, float, complex, bool, type(None), str, bytes)))
"""Types of numbers and text."""


class ObjectsInside(NamedTuple):
    """An object, and all objects to which it leads."""

    objects: dict[int, object]
    """These objects by identity."""
    owners: dict[int, list[int]]
    """For each object except the first one, the identities of those that refer to it."""


class LimitedWalk:
    """Walks from objects to all objects to which they lead.

    Numbers and text lead to nothing, so they are not noted, unless they are objects of a row.

    Args:
        namespaces: identities of the dicts with the user's names, which are not entered: they lead
            to everything.
        objects_of_rows: the objects of all rows.
    """

    def __init__(self, namespaces: Iterable[int], objects_of_rows: Sequence[object]) -> None:
        self._references = ReferenceReader(Barriers(namespaces), has_text_keys=False)
        self._visits_left = _MOST_VISITS
        self._noted_types = _DATA & types_of(objects_of_rows)
        """Types of the numbers and texts that are objects of rows."""
        self._noted_ids = set(map(id, of_types(self._noted_types, objects_of_rows)))
        """Identities of these numbers and texts."""

    @property
    def is_at_limit(self) -> bool:
        """True if the limit was reached: results since then are incomplete."""
        return self._visits_left <= 0

    def ids_reached_from(self, item: object) -> set[int]:
        """Return the identities of an object and of all objects to which it leads."""
        reached_ids = set[int]()
        self.reach(item, reached_ids)
        return reached_ids

    def reach(
        self, item: object, reached_ids: set[int], *, wanted: Collection[int] | None = None
    ) -> None:
        """Add the identities of an object, and of all objects to which it leads, to
        ``reached_ids``.

        Args:
            item: the object.
            reached_ids: the identities that earlier walks have added: their objects are not entered
                again.
            wanted: identities of objects; the walk stops once all of these are reached. None to
                reach all objects.
        """
        waiting: list[Sequence[object]] = [[item]]
        while waiting and self._visits_left > 0:
            by_key = by_identity(waiting.pop())
            new_objects = not_among(by_key, reached_ids)
            reached_ids.update(by_key)
            self._visits_left -= len(new_objects)
            if not new_objects:
                continue
            references = self._references.of(new_objects)
            waiting += chunks(without_types(_DATA, references.of_python))
            # Numbers and texts are not entered; those that are objects of rows are noted at once.
            data = of_types(self._noted_types, references.of_python)
            reached_ids.update(self._noted_ids.intersection(map(id, data)))
            if references.of_torch:
                waiting.append([tensor for _, tensor in references.of_torch])
            if wanted is not None and all(map(reached_ids.__contains__, wanted)):
                return

    def objects_inside(self, item: object, without: Container[int]) -> ObjectsInside | None:
        """Return an object and all objects to which it leads, numbers and text included; None if
        these are too many for an item that is removed as a whole.

        Args:
            item: the object.
            without: the identities of objects that are left out, with what only they lead to.
        """
        objects = {id(item): item}
        owners = dict[int, list[int]]()
        waiting = [item]
        for owner in waiting:  # the list grows
            references = self._references.of([owner])
            children = [*references.of_python, *(tensor for _, tensor in references.of_torch)]
            for child in children:
                owners.setdefault(id(child), []).append(id(owner))
                if id(child) not in objects and id(child) not in without:
                    objects[id(child)] = child
                    waiting.append(child)
            if len(waiting) > _MOST_PARTS:
                return None
        return ObjectsInside(objects, owners)
