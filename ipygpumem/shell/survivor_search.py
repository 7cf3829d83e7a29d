"""Searches for the objects that one experiment has left, and for their holders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.heap.arrays import (
    Array,
    StorageKey,
    describe,
    described,
    is_array,
    is_of_pandas,
    library_type,
    object_key,
    owner_of,
    place_of,
)
from ipygpumem.heap.bulk import of_types
from ipygpumem.heap.heap import Heap, large_tensors, undisturbed
from ipygpumem.heap.holders.explanation import NOT_REACHED, OUT_OF_SIGHT
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.knowledge.tasks import is_pending
from ipygpumem.heap.live_tensors import live_tensors
from ipygpumem.heap.paths.data_frame_steps import without_old_blocks
from ipygpumem.heap.paths.remedies import REMOVE, Holder
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.sizes import Sizes
from ipygpumem.inventory.array_holders import (
    Explained,
    explained,
    holder_of_possibly_older,
    storages_with_holder_of,
)
from ipygpumem.inventory.array_parts import with_arrays
from ipygpumem.inventory.baseline import arrays_behind, within_reach
from ipygpumem.inventory.held_rows import HeldRow
from ipygpumem.inventory.remaining import (
    Changes,
    find_remaining,
    most_bytes,
    remaining_in_new_memory,
)
from ipygpumem.inventory.remaining_rows import Remaining
from ipygpumem.inventory.searched_rows import (
    MOST_SEARCHED,
    holder_of_several,
    is_searched_together,
)
from ipygpumem.inventory.watched_names import (
    WatchedName,
    detach_numpy,
    places_of_numpy,
    storages_of,
)
from ipygpumem.notebook import cell_of_output, running_cell
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.baselines import Baseline
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.sources import cell_that_bound
from ipygpumem.shell.recovery import MUCH

_MOST_OLD = 20_000_000
"""Maximum number of objects to examine behind the notebook's names, to know which memory is older.
"""


class HostGrowth(NamedTuple):
    """RAM that an experiment leaves in use, and what is known about it."""

    size_bytes: int
    """At most so much, because the experiment may have used pages that were free before."""
    measured_bytes: int
    """The same without those pages."""
    kept: Callable[[], list[object]]
    """Returns the objects of names that the user has kept."""
    names: dict[int, str]
    """The experiment's names, by the identity of their objects."""


@dataclass(frozen=True)
class EndedExperiment:
    """An experiment whose names have been deleted.

    Attributes:
        watched: the arrays of its names.
        is_known: returns True for an array allocated before, or kept on purpose.
        kept: the storages kept on purpose; they are left out unless something else refers to
            them, too.
        keepers: the names that keep them.
        baseline: the objects at its start.
        growth: RAM that is searched for objects of any kind if arrays do not explain it.
        first_cell: number of its first cell; None for the running one.
    """

    watched: Sequence[WatchedName]
    is_known: Callable[[object, Array], bool]
    kept: Container[StorageKey]
    keepers: Iterable[str]
    baseline: Baseline
    growth: HostGrowth
    first_cell: int | None = None


class SurvivorSearch:
    """Searches the objects that outlive one experiment.

    Attributes:
        smallest: minimum bytes of a row.
        alive: the names with live arrays; those without a name are added on the way.
        unnamed_bytes: RAM that these arrays do not explain.
    """

    def __init__(self, context: ShellContext, ended: EndedExperiment) -> None:
        self._context = context
        self._ended = ended
        self._first_cell = ended.first_cell or running_cell(context.shell)
        self.smallest = context.config.min_held_bytes
        self.alive: list[WatchedName] = []
        self.unnamed_bytes = ended.growth.size_bytes
        self._explained: list[Explained] = []
        """The names with live arrays and their rows."""
        self._made: set[int] | None = None
        """Identities of the objects made since the start; None until they are asked for."""
        self._kept = set[int]()
        """Identities of objects that names keep on purpose."""
        self._is_only_in_old = False
        """True if no new object has the memory that is searched: only older ones can have received
        it.
        """
        self._small_within_reach: dict[StorageKey, int] = {}
        """Bytes of the small new NumPy arrays behind the user's names, by storage."""
        self._possibly_older: list[WatchedName] = []
        """Unknown arrays that may be older than the experiment."""

    # -- arrays that are known without a look at the heap -----------------------------------------

    def find_named_arrays_and_tensors(self) -> None:
        """Find the live arrays of names, and tensors without one."""
        self._add(self._live_arrays_of_names())
        self._add(self._tensors_without_name(storages_of(self.alive)))
        if self.unnamed_bytes >= self.smallest:
            self._leave_out_kept_objects()
        if self.unnamed_bytes >= self.smallest:
            self._add(self._arrays_within_reach(storages_of(self.alive)))

    def _leave_out_kept_objects(self) -> None:
        """Leave out the memory of kept names: ``%%experiment --keep records`` may have made a
        million of them.
        """
        from ipygpumem.inventory.kept_objects import kept_objects  # only if needed

        kept = self._ended.growth.kept()
        if kept:
            objects = kept_objects(kept, self._ended.baseline.objects_at_end)
            self._kept = objects.identities
            self.unnamed_bytes -= objects.size_bytes

    def _add(self, alive: Sequence[WatchedName]) -> None:
        """Add live arrays, which explain a part of the RAM."""
        self.alive += alive
        for item in alive:
            for array in item.live_arrays():
                if array.storage not in self._ended.kept and array.device == "cpu":
                    self.unnamed_bytes -= array.size_bytes

    def _live_arrays_of_names(self) -> list[WatchedName]:
        """Return the names with large live arrays, each with its cell and its object."""
        ended = self._ended
        parts = list(ended.watched)
        if ended.kept:
            parts = [part for item in ended.watched for part in item.divided(ended.kept)]
        large = [item for item in parts if item.size_bytes >= self.smallest]
        if not large:
            return []
        # An older object of a name is more than the leak.
        self._made = made = ended.baseline.objects_since()
        object_ids = {name: key for key, name in ended.growth.names.items() if key in made}
        named = list[WatchedName]()
        for item in large:
            name = item.record.name
            watched = replace(
                item,
                record=replace(item.record, cell=self._cell_of(name)),
                may_be_older=not ended.baseline.is_complete and self._may_be_older(item),
                object_id=object_ids.get(name, 0),
            )
            named.append(watched)
        return named

    def _may_be_older(self, item: WatchedName) -> bool:
        """Return True if a name's live NumPy arrays are not all surely new."""
        is_new = self._ended.baseline.is_surely_new
        return not all(map(is_new, places_of_numpy([item])))

    def _tensors_without_name(self, named: Container[StorageKey]) -> list[WatchedName]:
        """Return the large tensors on other storages than ``named`` ones."""
        unnamed = list[WatchedName]()
        large = large_tensors(live_tensors(self._context.garbage), self.smallest)
        for key, (tensor, *_) in large.items():
            if key in named:
                continue
            array = describe(tensor)
            if array is not None and not self._ended.is_known(tensor, array):
                unnamed.append(WatchedName.without_name(tensor, array))
        return unnamed

    def received(self) -> set[int]:
        """Return the identities of the new objects that older ones have received."""
        if self._made is None:
            self._made = self._ended.baseline.objects_since()
        return self._ended.baseline.received(self._made, self._test_of_older_arrays())

    def _arrays_within_reach(self, named: Container[StorageKey]) -> list[WatchedName]:
        """Return the large new NumPy arrays behind the user's names, however deep, on other
        storages than ``named`` ones; none if older ones may not be known. Note the small ones.

        Those in data frames that older objects have received are left out: the frames have rows.
        """
        if library_type("numpy", "ndarray") is None or not self._ended.baseline.is_complete:
            return []
        arrays, _ = within_reach(self._context.namespace)
        new = dict[StorageKey, WatchedName]()
        has_few = len(arrays) <= MOST_SEARCHED
        for item, array in described(arrays):
            is_small = array.size_bytes < self.smallest
            if array.storage in named or (is_small and not has_few):
                continue
            if self._ended.is_known(item, array):
                continue
            if is_small:
                self._small_within_reach[array.storage] = array.size_bytes
            else:
                new.setdefault(array.storage, WatchedName.without_name(item, array))
        if new:
            for storage in self._storages_in_received_frames():
                new.pop(storage, None)
        return list(new.values())

    def _storages_in_received_frames(self) -> set[StorageKey]:
        """Return the storages of the arrays in data frames that older objects have received, as far
        as these arrays are new.
        """
        changes = self._changes(self._ended.baseline.objects_at_end)
        received = chain.from_iterable(part.items for part in changes.received())
        frames = list(filter(is_of_pandas, received))
        if changes.new_ids:
            frames = without_old_blocks(frames, changes.new_ids)
        return {array.storage for _, array in described(arrays_behind(frames))}

    def finds_nothing(self) -> bool:
        """Return True if nothing is left that is worth a look at the heap."""
        if self.alive:
            return False
        if self.unnamed_bytes < self.smallest:
            return True
        small_bytes = sum(self._small_within_reach.values())
        if self.unnamed_bytes >= MUCH or small_bytes >= self.smallest:
            return False
        if self._most_bytes_without_arrays() >= self.smallest:
            return False
        self._is_only_in_old = True
        return self._ended.baseline.is_complete

    def guesses_arrays(self) -> bool:
        """Return True if any unknown NumPy array may be one that the experiment has left."""
        if self.unnamed_bytes < self.smallest:
            return False
        baseline = self._ended.baseline
        # If new objects cannot be told from old ones, no other search finds them.
        is_only_search = not baseline.is_complete or not baseline.knows_new_objects()
        return self.unnamed_bytes >= MUCH or is_only_search

    def _most_bytes_without_arrays(self) -> int:
        """Return an upper bound of the memory without arrays that the experiment leaves."""
        with undisturbed():
            return most_bytes(self._changes(self._ended.baseline.objects_at_end))

    def _changes(self, made: set[int]) -> Changes:
        """Return the names, and all that has come since the start of the experiment.

        Args:
            made: identities of the tracked objects made since then.
        """
        baseline = self._ended.baseline
        made = made - self._kept
        made -= {id(self._kept), id(baseline.objects_at_end)}  # ours
        elsewhere = baseline.elsewhere()
        names = ownable_objects(self._context.namespace)
        return Changes(
            names,
            baseline.contents,
            made,
            elsewhere,
            baseline.modules_imported(),
            self._test_of_older_arrays(),
            self._kept,
        )

    def _test_of_older_arrays(self) -> Callable[[object], bool] | None:
        """Return ``_is_older_array``, or None if the start could not know all arrays."""
        return self._is_older_array if self._ended.baseline.is_complete else None

    def _is_older_array(self, item: object) -> bool:
        """Return True for an array that the experiment has not made, or may not have made."""
        array = describe(item)
        return array is None or self._ended.is_known(item, array)

    # -- rows -------------------------------------------------------------------------------------

    def rows_of_arrays(self, heap: Heap, roots: Roots) -> list[HeldRow]:
        """Return the rows of arrays, with their holders; ``alive`` has the same arrays then."""
        from ipygpumem.inventory.shared_memory import rows_of, tensors_on_arrays  # only if needed

        self._add(self._arrays_without_name(heap))
        self.alive += tensors_on_arrays(self.alive, heap)
        self._note_grown(heap)
        rows_by_name = explained(self.alive, heap, roots, smallest=self.smallest)
        self._explained = rows_by_name
        detach_numpy(self.alive, heap)
        self.alive = [item for item, _ in rows_by_name]
        return rows_of(rows_by_name, heap)

    def _note_grown(self, heap: Heap) -> None:
        """Note which live arrays are older than their memory."""
        arrays = dict[StorageKey, Array]()
        for item in self.alive:
            arrays.update((array.storage, array) for array in item.live_arrays())
        if not arrays:
            return
        baseline = self._ended.baseline
        # The search has given further tensors a Python object since ``_made``.
        remarks = baseline.remarks_on_grown(arrays, heap, baseline.objects_since())
        if remarks:
            self.alive = [replace(item, remarks=remarks) for item in self.alive]

    def _arrays_without_name(self, heap: Heap) -> list[WatchedName]:
        """Return unknown NumPy arrays, largest first, as far as the host's growth can contain them;
        those that may be older wait until all other memory is known.
        """
        if not self.guesses_arrays():
            return []
        named = storages_of(self.alive)
        is_complete = self._ended.baseline.is_complete
        new = list[WatchedName]()
        by_storage = {array.storage: (item, array) for item, array in described(heap.ndarrays)}
        for item, array in by_storage.values():
            if array.size_bytes < self.smallest or array.storage[0] != "numpy":
                continue
            if array.storage in named or self._ended.is_known(item, array):
                continue
            watched = WatchedName.without_name(item, array)
            if is_complete or not self._may_be_older(watched):
                new.append(watched)
            elif self.unnamed_bytes >= MUCH:
                self._possibly_older.append(replace(watched, may_be_older=True))
        return _largest_within(new, _most_of_arrays(self.unnamed_bytes))

    def rows_of_possibly_older(self, heap: Heap, roots: Roots, other_bytes: int) -> list[HeldRow]:
        """Return the rows of unknown NumPy arrays that may be older, with their holders, as far as
        the bytes of the other rows do not explain the host's growth.
        """
        from ipygpumem.inventory.shared_memory import rows_of  # only if needed

        explained_bytes = self._ended.growth.size_bytes - self.unnamed_bytes + other_bytes
        left = self._ended.growth.measured_bytes - explained_bytes
        arrays = _largest_within(
            self._possibly_older, left if other_bytes else _most_of_arrays(left)
        )
        if not arrays:
            return []
        rows_by_name = explained(arrays, heap, roots, smallest=self.smallest)
        detach_numpy(arrays, heap)
        self.alive += [item for item, _ in rows_by_name]
        return rows_of(rows_by_name, heap)

    def rows_without_arrays(self, heap: Heap, roots: Roots) -> list[tuple[Remaining, HeldRow]]:
        """Return the rows of all memory that is in no array, with their holders."""
        remaining = self._remaining(heap)
        searched = list[object]()
        objects_rows = dict[StorageKey, Row]()
        for part in remaining:
            if is_searched_together(part.items, len(searched)):
                objects_rows[object_key(part.items[0])] = part.row()
                searched += part.items
            else:
                searched.append(part.items[0])
        holders = explain((), heap, roots, more=searched, rows=objects_rows, all_places=True)
        rows = list[tuple[Remaining, HeldRow]]()
        for part in remaining:
            objects_row = objects_rows.get(object_key(part.items[0]))
            if objects_row is not None and not objects_row.is_whole and not part.chain:
                # No object leads to all of them: the row has those in the largest place alone.
                in_one_place = part.largest_place(holders, self.smallest)
                if in_one_place is not None:
                    part = in_one_place
                    objects_rows[object_key(part.items[0])] = part.row()
            holder = _holder_of(part, objects_rows, holders, roots)
            rows.append((part, self._row_of(part, holder)))
        return rows

    def _row_of(self, part: Remaining, holder: Holder) -> HeldRow:
        """Return the row of some memory, with its name, given its holder."""
        if part.may_be_older:
            holder = holder_of_possibly_older(holder)
        if len(part.items) > 1:
            return HeldRow(part.record, holder)
        item = part.items[0]
        name = self._ended.growth.names.get(id(item), "")
        cell = self._cell_of(name) if name else None
        row = HeldRow(replace(part.record, name=name, cell=cell), holder)
        storages = storages_with_holder_of(row, self._explained)
        return HeldRow(with_arrays(row.row, item, storages), holder)

    def _remaining(self, heap: Heap) -> list[Remaining]:
        """Return the memory that is in none of the arrays."""
        growth = self._ended.growth
        in_arrays = sum(item.size_bytes for item in self.alive)
        left = growth.size_bytes - in_arrays
        in_new_memory = self._in_new_memory(heap)
        if self._is_only_in_old:
            return remaining_in_new_memory(in_new_memory, self.smallest, left)
        counted = storages_of(self.alive)
        sizes = Sizes(limit=_MOST_OLD)
        on_heap = described([*heap.tensors, *heap.ndarrays])
        listed = list[object]()
        for item, array in on_heap:
            # An older array may have got a new holder, such as a tuple.
            if array.storage in counted or self._ended.is_known(item, array):
                listed.append(item)
        sizes.exclude_data(listed)
        changes = self._changes(self._ended.baseline.objects_since())
        return find_remaining(
            heap,
            changes._replace(in_new_memory=in_new_memory),
            counted=sizes,
            smallest=self.smallest,
            size_bytes=left,
        )

    def _in_new_memory(self, heap: Heap) -> list[object]:
        """Return the arrays and texts in older objects that are new by their addresses, unless some
        new ones are kept; if all older arrays are known, the small new ones behind names, however
        deep.
        """
        baseline = self._ended.baseline
        if baseline.is_complete:
            small = self._small_within_reach
            arrays = described(heap.ndarrays) if small else ()
            return [item for item, array in arrays if array.storage in small]
        if self._ended.growth.kept():
            return []
        items = list[object]()
        listed = storages_of(self.alive)
        for item, array in described(heap.ndarrays):
            if array.storage in listed or self._ended.is_known(item, array):
                continue
            if baseline.is_in_new_container(item):
                continue
            owner = owner_of(item)
            if not is_array(owner):
                continue
            _, start, end = place_of(owner)
            if baseline.is_new_memory(start, end):
                items.append(item)
        for text in of_types({id(str), id(bytes)}, list(heap.large_leaves)):
            if baseline.is_new_memory(id(text), id(text) + sys.getsizeof(text)):
                items.append(text)
        return items

    def _cell_of(self, name: str) -> int | None:
        """Return the cell that bound a name, before later cells rebind it."""
        return cell_of_output(name) or cell_that_bound(
            self._context.shell, name, range(self._first_cell)
        )


def _most_of_arrays(grown_bytes: int) -> int:
    """Return the bytes of arrays that growth of the host can contain: the end has freed older
    memory, too.
    """
    return grown_bytes * 5 // 4


def _largest_within(items: Iterable[WatchedName], most_bytes: int) -> list[WatchedName]:
    """Return the largest of some arrays that have ``most_bytes`` together at most."""
    left = most_bytes
    largest = list[WatchedName]()
    for item in sorted(items, key=attrgetter("size_bytes"), reverse=True):
        if item.size_bytes <= left:
            left -= item.size_bytes
            largest.append(item)
    return largest


def _holder_of(
    part: Remaining,
    rows: Mapping[StorageKey, Row],
    holders: Mapping[StorageKey, Holder],
    roots: Roots,
) -> Holder:
    """Return the holder of some memory.

    That of one object is its path from a name, unless several places hold it.
    """
    key = object_key(part.items[0])
    searched = holders.get(key)
    if len(part.items) > 1:
        is_fixed = key not in rows or all(map(is_pending, part.items))
        # The collector does not list a dict of text: the search for holders ends below it.
        if part.chain and (is_fixed or searched in (None, OUT_OF_SIGHT, NOT_REACHED)):
            return part.from_name(roots)
        if searched is None:
            return NOT_REACHED
        return holder_of_several(part.items, rows.get(key), holders)
    if not part.chain and searched is not None:
        return searched
    from_name = part.from_name(roots)
    if searched is None or searched.path == from_name.path:
        return from_name
    if from_name.remedy == REMOVE:  # such as an item of a registry, which a call removes
        return searched
    is_one_of_several = f", {from_name.path}, " in f", {searched.path}, "
    return searched if is_one_of_several else from_name
