"""Finds memory of any kind that remains after an experiment: new objects, and the old objects that
keep them.

There are two ways to find them. The old objects within a few steps of a name are compared with
their earlier contents, text included (``contents.py``). Everywhere else, new objects that the
collector tracks count if an old object refers to them (``new_objects.py``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.knowledge.tasks import pending_tasks
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.data_frame_steps import without_old_blocks
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.remaining.contents import Contents, Received
from ipygpumem.inventory.remaining.leftover import MANY_MODULES
from ipygpumem.inventory.remaining.new_objects import AllNewObjects, NewNearNames, objects_with_data
from ipygpumem.inventory.remaining.remaining_rows import Remaining, RemainingRows


class Changes(NamedTuple):
    """The changes since the start of an experiment: the names now, their contents then, and the
    objects made since.
    """

    names: Mapping[str, object]
    """The names and their objects."""
    contents: Contents
    """The contents of the names at the start."""
    new_ids: set[int]
    """Identities of the tracked objects made since, and maybe of some that have died."""
    elsewhere: Sequence[object]
    """Other new objects, to which no object of the heap refers."""
    modules: int = 0
    """Number of modules that were imported."""
    is_older_array: Callable[[object], bool] | None = None
    """Returns True for a NumPy array that may be older; None if that is not known of any."""
    kept: Set[int] = frozenset()
    """Identities of objects that names keep on purpose; none of them is in ``new_ids``."""
    in_new_memory: Sequence[object] = ()
    """Arrays and texts in older objects, which are new by their addresses."""

    def received(self, heap: Heap | None = None) -> list[Received]:
        """Return the new objects in each old one to which a name leads, and at the end those in
        unknown old ones.

        Args:
            heap: the live objects, if there is a ``Heap``. It refers to them, too, which is no
                reference of the user's code.
        """
        own_references = None if heap is None else heap.own_references()
        received = self.contents.received(
            dict(self.names), self.new_ids, own_references, self.is_older_array
        )
        return [*received, *_received_without_name(self.in_new_memory)]


def _received_without_name(items: Sequence[object]) -> list[Received]:
    """Return new objects in the form of ``Received``, in a list: an unknown older object has
    received them. Return nothing if there are none.
    """
    return [Received(name="", chain=(), items=list(items))] if items else []


def find_remaining(
    heap: Heap,
    changes: Changes,
    *,
    counted: Sizes,
    smallest: int,
    size_bytes: int,
) -> list[Remaining]:
    """Return the rows of the memory that remains, in no particular order.

    Args:
        heap: the live objects.
        changes: the names and the new objects.
        counted: has measured everything that is named already.
        smallest: minimum bytes of a row.
        size_bytes: the memory to find; once so much has been found, the search ends.
    """
    new_ids = changes.new_ids
    received = _received_nearest_first(changes, heap)
    items_received = list(chain.from_iterable(part.items for part in received))
    new_objects: AllNewObjects | NewNearNames
    if changes.modules >= MANY_MODULES:
        new_objects = NewNearNames(changes.names, new_ids, items_received)
    else:
        new_objects = AllNewObjects(heap, new_ids)
    _count_older_memory(counted, changes, new_objects, items_received)
    # The new memory: first in the old objects near names, then anywhere.
    rows = RemainingRows(counted, smallest, size_bytes)
    rows.add_received(received)
    if rows.is_done():
        return rows.remaining
    not_counted = counted.not_counted(new_ids)
    in_older = objects_with_data(new_objects.in_older_objects(not_counted), new_ids)
    without_place = without_old_blocks(in_older, new_ids)
    without_place += _pending_tasks(heap, not_counted)
    rows.add_rows([*without_place, *changes.elsewhere])
    if not rows.is_done():
        rows.add_rows(heap.in_arrays(counted.not_counted(new_ids)))
    return rows.remaining


def _count_older_memory(
    counted: Sizes,
    changes: Changes,
    new_objects: AllNewObjects | NewNearNames,
    items_received: Sequence[object],
) -> None:
    """Count the memory that is no row of the experiment: that of objects kept on purpose, and that
    of older objects, to which new ones may lead.

    Args:
        counted: counts it.
        changes: the names and the new objects.
        new_objects: the new objects.
        items_received: new objects in old ones, which the collector may not track.
    """
    counted.pass_over(changes.kept)
    new_and_received = changes.new_ids | set(map(id, items_received))
    _measure_old(counted, list(changes.names.values()), new_and_received)
    older = _older_behind(new_objects, items_received, changes)
    _measure_old(counted, older, new_and_received)


def remaining_in_new_memory(
    items: Sequence[object], smallest: int, size_bytes: int
) -> list[Remaining]:
    """Return the rows of arrays and texts that are new by their addresses. It is used if no other
    new object can hold the memory, and is much faster than ``find_remaining``.

    Args:
        items: the arrays and texts.
        smallest: minimum bytes of a row.
        size_bytes: the memory to find.
    """
    rows = RemainingRows(Sizes(), smallest, size_bytes)
    rows.add_received(_received_without_name(items))
    return rows.remaining


def most_bytes(changes: Changes) -> int:
    """Return an upper bound of the bytes that ``find_remaining`` can find. It takes little time if
    they are few.
    """
    sizes = Sizes()
    sizes.pass_over(changes.kept)
    tracked = gc.get_objects()
    received = list[object]()
    for part in changes.received():
        received += part.items
    # Each object counts once: ``together`` leaves out those that an earlier call has counted.
    received_bytes = sizes.together(received)
    are_new = list(map(changes.new_ids.__contains__, map(id, tracked)))
    sizes.pass_over(compress(map(id, tracked), map(not_, are_new)))
    new_objects = compress(tracked, are_new)
    return received_bytes + sizes.together([*new_objects, *changes.elsewhere])


def _received_nearest_first(changes: Changes, heap: Heap) -> list[Received]:
    """Return the new objects in each old one; the old object nearest to a name comes first. Its row
    gets an object that several old ones have received, as a search for holders would name it, too.
    """
    received = list[Received]()
    for part in changes.received(heap):
        items = part.items
        if changes.new_ids:
            items = without_old_blocks(items, changes.new_ids)
        received.append(part._replace(items=items))
    return sorted(
        received, key=lambda part: (not part.name, len(part.chain), len(part.name), part.name)
    )


def _measure_old(counted: Sizes, objects: Sequence[object], new_ids: set[int]) -> None:
    """Count the memory behind old objects. The way does not lead through new objects, so that older
    memory to which only new objects lead is not counted.
    """
    with counted.passing_over(counted.not_counted(new_ids)):
        counted.pass_through(objects)


def _older_behind(
    new_objects: AllNewObjects | NewNearNames, received: Sequence[object], changes: Changes
) -> list[object]:
    """Return the older objects to which new ones refer, and the untracked data from before the
    experiment. After ``chain = (new, chain)``, the older object is the old chain.

    Args:
        new_objects: the new objects.
        received: new objects that the collector may not track.
        changes: the names and the new objects.
    """
    earlier_data = changes.contents.earlier
    older = by_identity(earlier_data.earlier_behind(received))
    for part in new_objects.parts():
        referents = gc.get_referents(*part)
        are_older = map(not_, map(changes.new_ids.__contains__, map(id, referents)))
        for item in filter(gc.is_tracked, compress(referents, are_older)):
            older[id(item)] = item
        older.update(by_identity(earlier_data.earlier_behind(referents)))
    return list(older.values())


def _pending_tasks(heap: Heap, not_counted: set[int]) -> list[object]:
    """Return the new asyncio tasks that are not done, of which nothing else is counted: only the
    event loop keeps them, by a future that wakes each.
    """
    return [task for task in pending_tasks(heap.tasks) if id(task) in not_counted]
