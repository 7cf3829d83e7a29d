"""Searches for the objects that one experiment has left, and for their holders.

``Survivors.rows_of_experiment`` calls the methods of ``SurvivorSearch`` in order: first
``find_named_arrays_and_tensors``, which needs no heap and decides how far to search one
(``extent``), then those that search a heap. Each of them explains a part of the RAM that the
experiment leaves in use; the search ends when no part worth a row is unexplained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.heap.bulk import of_types
from ipygpumem.heap.holders.explanation import NOT_REACHED, OUT_OF_SIGHT
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import (
    Array,
    StorageKey,
    describe,
    described,
    is_array,
    is_of_pandas,
    library_type,
    object_key,
    owner_of,
    span_of,
)
from ipygpumem.heap.knowledge.tasks import is_pending
from ipygpumem.heap.live.heap import Heap, large_tensors, undisturbed
from ipygpumem.heap.live.live_tensors import live_tensors
from ipygpumem.heap.paths.data_frame_steps import without_old_blocks
from ipygpumem.heap.paths.remedies import REMOVE, Holder
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.remaining.baseline import arrays_behind, arrays_within_reach
from ipygpumem.inventory.remaining.remaining import (
    Changes,
    find_remaining,
    most_bytes,
    remaining_in_new_memory,
)
from ipygpumem.inventory.remaining.remaining_rows import Remaining
from ipygpumem.inventory.remaining.watched_names import (
    WatchedName,
    detach_numpy,
    spans_of_numpy,
    storages_of,
)
from ipygpumem.inventory.rows.array_holders import (
    HeldArrays,
    find_array_holders,
    holder_of_possibly_older,
    storages_with_holder_of,
)
from ipygpumem.inventory.rows.array_parts import with_arrays
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.searched_rows import (
    MOST_SEARCHED,
    holder_of_several,
    is_searched_together,
)
from ipygpumem.notebook import cell_of_output, running_cell
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.sources import cell_that_bound
from ipygpumem.shell.recovery import MUCH_BYTES
from ipygpumem.shell.searches.baselines import Baseline

_MOST_OLD = 20_000_000
"""Maximum number of objects to examine behind the notebook's names, to know which memory is older.
"""


class HostGrowth(NamedTuple):
    """RAM that an experiment leaves in use, and the names whose objects may explain it."""

    size_bytes: int
    """Upper bound: the experiment may have used pages that were free before."""
    measured_bytes: int
    """The measured growth, which does not contain those pages."""
    kept_objects: Callable[[], list[object]]
    """Returns the objects of names that the user has kept."""
    names: dict[int, str]
    """The experiment's names, by the identity of their objects."""


@dataclass(frozen=True)
class EndedExperiment:
    """An experiment whose names have been deleted.

    Attributes:
        watched: the arrays of its names.
        is_known: returns True for an array allocated before, or kept on purpose.
        kept_storages: the storages kept on purpose; they are left out unless another object refers
            to them, too.
        keepers: the names that keep them.
        baseline: the objects at its start.
        growth: RAM that is searched for objects of any kind if arrays do not explain it.
        first_cell: number of its first cell; None for the running one.
    """

    watched: Sequence[WatchedName]
    is_known: Callable[[object, Array], bool]
    kept_storages: Container[StorageKey]
    keepers: Iterable[str]
    baseline: Baseline
    growth: HostGrowth
    first_cell: int | None = None


class Extent(Enum):
    """The objects of the heap that a search looks through."""

    NONE = "none"
    """The experiment has left nothing that is worth a search."""
    IN_OLDER_OBJECTS = "in older objects"
    """No new object has the memory, so only older objects can hold it: ``older[:] = text``."""
    ALL = "all"


class SurvivorSearch:
    """Searches for the objects that outlive one experiment.

    Args:
        context: the shell's services.
        ended: the experiment.

    Attributes:
        smallest: minimum bytes of a row.
        alive: the names with live arrays, and live arrays without a name, as far as they are found.
        unnamed_bytes: RAM that these arrays do not explain.
        extent: the objects of the heap to search; set by ``find_named_arrays_and_tensors``.
    """

    def __init__(self, context: ShellContext, ended: EndedExperiment) -> None:
        self._context = context
        self._ended = ended
        self._first_cell = ended.first_cell or running_cell(context.shell)
        self.smallest = context.config.min_held_bytes
        self.alive: list[WatchedName] = []
        self.unnamed_bytes = ended.growth.size_bytes
        self.extent = Extent.ALL
        self._held_arrays: list[HeldArrays] = []
        """The names with live arrays and their rows."""
        self._new_ids: set[int] | None = None
        """Identities of the objects made since the start; None until they are asked for."""
        self._kept_ids = set[int]()
        """Identities of objects that names keep on purpose."""

        self._small_within_reach: dict[StorageKey, int] = {}
        """Bytes of the small new NumPy arrays behind the user's names, by storage."""
        self._possibly_older: list[WatchedName] = []
        """Unknown arrays that may be older than the experiment."""

    # -- arrays that are found without a heap -----------------------------------------------------

    def find_named_arrays_and_tensors(self) -> None:
        """Find the live arrays of names, live tensors without a name, and new arrays behind the
        notebook's names; then decide how far to search the heap.
        """
        self._add_alive(self._live_arrays_of_names())
        self._add_alive(self._tensors_without_name(storages_of(self.alive)))
        if self.unnamed_bytes >= self.smallest:
            self._leave_out_kept_objects()
        if self.unnamed_bytes >= self.smallest:
            self._add_alive(self._arrays_within_reach(storages_of(self.alive)))
        self.extent = self._extent_of_heap_search()

    def _leave_out_kept_objects(self) -> None:
        """Exclude the objects of kept names from the search, and their bytes from the memory to
        explain: ``%%experiment --keep records`` may have made a million objects.
        """
        from ipygpumem.inventory.remaining.kept_objects import kept_objects  # only if needed

        values = self._ended.growth.kept_objects()
        if values:
            kept = kept_objects(values, self._ended.baseline.objects_at_end)
            self._kept_ids = kept.identities
            self.unnamed_bytes -= kept.size_bytes

    def _add_alive(self, names: Sequence[WatchedName]) -> None:
        """Add live arrays, which explain a part of the RAM."""
        self.alive += names
        for name in names:
            for array in name.live_arrays():
                if array.storage not in self._ended.kept_storages and array.device == "cpu":
                    self.unnamed_bytes -= array.size_bytes

    def _live_arrays_of_names(self) -> list[WatchedName]:
        """Return the names with large live arrays, each with the cell that bound it and, if that is
        new, the identity of its object. Note in ``_new_ids`` which objects are new.
        """
        ended = self._ended
        parts = list(ended.watched)
        if ended.kept_storages:
            parts = [part for name in ended.watched for part in name.divided(ended.kept_storages)]
        large = [part for part in parts if part.size_bytes >= self.smallest]
        if not large:
            return []
        # An older object of a name is more than the leak.
        self._new_ids = new_ids = ended.baseline.objects_since()
        object_ids = {name: key for key, name in ended.growth.names.items() if key in new_ids}
        named = list[WatchedName]()
        for part in large:
            name = part.record.name
            watched = replace(
                part,
                record=replace(part.record, cell=self._cell_of(name)),
                may_be_older=not ended.baseline.is_complete and self._may_be_older(part),
                object_id=object_ids.get(name, 0),
            )
            named.append(watched)
        return named

    def _may_be_older(self, watched: WatchedName) -> bool:
        """Return True if a live NumPy array of a name may have been made before the experiment."""
        is_new = self._ended.baseline.is_surely_new
        return not all(map(is_new, spans_of_numpy([watched])))

    def _tensors_without_name(self, storages_of_names: Container[StorageKey]) -> list[WatchedName]:
        """Return the large new tensors, one for each storage that is not a name's."""
        unnamed = list[WatchedName]()
        large = large_tensors(live_tensors(self._context.garbage), self.smallest)
        for key, (tensor, *_) in large.items():
            if key in storages_of_names:
                continue
            array = describe(tensor)
            if array is not None and not self._ended.is_known(tensor, array):
                unnamed.append(WatchedName.without_name(tensor, array))
        return unnamed

    def received(self) -> set[int]:
        """Return the identities of objects made in the experiment that containers from before it
        have received. The search for the names' arrays may have listed the new objects already;
        else this lists them.
        """
        if self._new_ids is None:
            self._new_ids = self._ended.baseline.objects_since()
        return self._ended.baseline.received(self._new_ids, self._test_of_older_arrays())

    def _arrays_within_reach(self, storages_found: Container[StorageKey]) -> list[WatchedName]:
        """Return the large new NumPy arrays behind the user's names, however deep; none if the
        baseline may have missed older arrays. The small ones are noted in ``_small_within_reach``.

        Arrays in data frames that older objects have received are left out: the frames have rows.

        Args:
            storages_found: the storages of the live arrays that are found already.
        """
        if library_type("numpy", "ndarray") is None or not self._ended.baseline.is_complete:
            return []
        arrays, _ = arrays_within_reach(self._context.namespace)
        large_new = dict[StorageKey, WatchedName]()
        notes_small_arrays = len(arrays) <= MOST_SEARCHED
        for item, array in described(arrays):
            is_small = array.size_bytes < self.smallest
            if is_small and not notes_small_arrays:
                continue
            if array.storage in storages_found or self._ended.is_known(item, array):
                continue
            if is_small:
                self._small_within_reach[array.storage] = array.size_bytes
            else:
                large_new.setdefault(array.storage, WatchedName.without_name(item, array))
        if large_new:
            for storage in self._storages_in_received_frames():
                large_new.pop(storage, None)
        return list(large_new.values())

    def _storages_in_received_frames(self) -> set[StorageKey]:
        """Return the storages of the new arrays in data frames that older objects have received."""
        changes = self._changes(self._ended.baseline.objects_at_end)
        received = chain.from_iterable(part.items for part in changes.received())
        frames = list(filter(is_of_pandas, received))
        if changes.new_ids:
            frames = without_old_blocks(frames, changes.new_ids)
        return {array.storage for _, array in described(arrays_behind(frames))}

    def _extent_of_heap_search(self) -> Extent:
        """Return how far the heap must be searched, after all that is found without one."""
        if self.alive:
            return Extent.ALL  # for the holders of these arrays
        if self.unnamed_bytes < self.smallest:
            return Extent.NONE
        small_bytes = sum(self._small_within_reach.values())
        if self.unnamed_bytes >= MUCH_BYTES or small_bytes >= self.smallest:
            return Extent.ALL
        if self._upper_bound_without_arrays() >= self.smallest:
            return Extent.ALL
        if self._ended.baseline.is_complete:
            return Extent.NONE
        return Extent.IN_OLDER_OBJECTS

    def guesses_arrays(self) -> bool:
        """Return True if NumPy arrays of which the baseline has no record count as the
        experiment's, although they may be older.

        That is so if much memory has no name, or if no other search can find new objects.
        """
        if self.unnamed_bytes < self.smallest:
            return False
        baseline = self._ended.baseline
        if self.unnamed_bytes >= MUCH_BYTES:
            return True
        # If new objects cannot be told from old ones, no other search finds them.
        return not baseline.is_complete or not baseline.knows_new_objects()

    def _upper_bound_without_arrays(self) -> int:
        """Return an upper bound of the bytes without arrays that the experiment leaves."""
        with undisturbed():
            return most_bytes(self._changes(self._ended.baseline.objects_at_end))

    def _changes(self, new_ids: set[int]) -> Changes:
        """Return the notebook's names, and the objects made since the start, without the objects of
        kept names.

        Args:
            new_ids: identities of the tracked objects made since then.
        """
        baseline = self._ended.baseline
        new_ids = new_ids - self._kept_ids
        new_ids -= {id(self._kept_ids), id(baseline.objects_at_end)}  # ours
        elsewhere = baseline.new_objects_elsewhere()
        names = ownable_objects(self._context.namespace)
        return Changes(
            names,
            baseline.contents,
            new_ids,
            elsewhere,
            baseline.number_of_new_modules(),
            self._test_of_older_arrays(),
            self._kept_ids,
        )

    def _test_of_older_arrays(self) -> Callable[[object], bool] | None:
        """Return ``_is_older_array``, or None if the start could not know all arrays."""
        return self._is_older_array if self._ended.baseline.is_complete else None

    def _is_older_array(self, item: object) -> bool:
        """Return True for an array that existed before the experiment, or may have."""
        array = describe(item)
        return array is None or self._ended.is_known(item, array)

    # -- rows -------------------------------------------------------------------------------------

    def rows_of_arrays(self, heap: Heap, roots: Roots) -> list[HeldRow]:
        """Return the rows of all live arrays, with their holders. After it, ``alive`` has the
        arrays of these rows.
        """
        from ipygpumem.inventory.rows.shared_memory import (  # only if needed
            rows_of,
            tensors_on_arrays,
        )

        self._add_alive(self._arrays_without_name(heap))
        self.alive += tensors_on_arrays(self.alive, heap)
        self._add_remarks_on_grown(heap)
        found = find_array_holders(self.alive, heap, roots, smallest=self.smallest)
        self._held_arrays = found.arrays
        detach_numpy(self.alive, heap)
        self.alive = [name for name, _ in self._held_arrays]
        return rows_of(self._held_arrays, heap)

    def _add_remarks_on_grown(self, heap: Heap) -> None:
        """Add remarks on live arrays that are older than their memory, such as one that the
        experiment has resized.
        """
        arrays = dict[StorageKey, Array]()
        for name in self.alive:
            arrays.update((array.storage, array) for array in name.live_arrays())
        if not arrays:
            return
        baseline = self._ended.baseline
        # The search has given further tensors a Python object since ``_new_ids``.
        remarks = baseline.remarks_on_grown(arrays, heap, baseline.objects_since())
        if remarks:
            self.alive = [replace(name, remarks=remarks) for name in self.alive]

    def _arrays_without_name(self, heap: Heap) -> list[WatchedName]:
        """Return the new NumPy arrays that no name has led to so far, largest first, as far as the
        host's growth can contain them.

        Arrays that may be older are noted in ``_possibly_older``: ``rows_of_possibly_older`` lists
        them when all other memory is known.
        """
        if not self.guesses_arrays():
            return []
        storages_found = storages_of(self.alive)
        is_complete = self._ended.baseline.is_complete
        new = list[WatchedName]()
        by_storage = {array.storage: (item, array) for item, array in described(heap.ndarrays)}
        for item, array in by_storage.values():
            if array.size_bytes < self.smallest or array.storage[0] != "numpy":
                continue
            if array.storage in storages_found or self._ended.is_known(item, array):
                continue
            watched = WatchedName.without_name(item, array)
            if is_complete or not self._may_be_older(watched):
                new.append(watched)
            elif self.unnamed_bytes >= MUCH_BYTES:
                self._possibly_older.append(replace(watched, may_be_older=True))
        return _largest_within(new, _limit_of_arrays(self.unnamed_bytes))

    def rows_of_possibly_older(self, heap: Heap, roots: Roots, other_bytes: int) -> list[HeldRow]:
        """Return the rows of NumPy arrays that may be older, with their holders, as far as other
        memory does not explain the host's growth. ``alive`` gets their arrays.

        Args:
            heap: the live objects.
            roots: where paths begin.
            other_bytes: the bytes of the rows without arrays.
        """
        from ipygpumem.inventory.rows.shared_memory import rows_of  # only if needed

        bytes_in_arrays = self._ended.growth.size_bytes - self.unnamed_bytes
        unexplained_bytes = self._ended.growth.measured_bytes - bytes_in_arrays - other_bytes
        limit_bytes = unexplained_bytes
        if not other_bytes:  # else most of the growth is explained, and these may well be older
            limit_bytes = _limit_of_arrays(unexplained_bytes)
        arrays = _largest_within(self._possibly_older, limit_bytes)
        if not arrays:
            return []
        found = find_array_holders(arrays, heap, roots, smallest=self.smallest)
        detach_numpy(arrays, heap)
        self.alive += [name for name, _ in found.arrays]
        return rows_of(found.arrays, heap)

    def rows_without_arrays(self, heap: Heap, roots: Roots) -> list[tuple[Remaining, HeldRow]]:
        """Return the memory that is in no array, each part with its row, which has the holder."""
        remaining = self._remaining(heap)
        objects_to_search = list[object]()
        rows_of_several = dict[StorageKey, Row]()
        """The rows of parts with several objects, by the key of the first object."""
        for part in remaining:
            if is_searched_together(part.items, len(objects_to_search)):
                rows_of_several[object_key(part.items[0])] = part.row()
                objects_to_search += part.items
            else:
                objects_to_search.append(part.items[0])
        holders = explain(
            (), heap, roots, objects=objects_to_search, rows=rows_of_several, all_places=True
        )
        rows = list[tuple[Remaining, HeldRow]]()
        for part in remaining:
            part = self._in_one_place(part, rows_of_several, holders)
            if len(part.items) > 1:
                holder = _holder_of_several(part, rows_of_several, holders, roots)
            else:
                holder = _holder_of_one(part, holders, roots)
            rows.append((part, self._row_of(part, holder)))
        return rows

    def _in_one_place(
        self,
        part: Remaining,
        rows_of_several: dict[StorageKey, Row],
        holders: Mapping[StorageKey, Holder],
    ) -> Remaining:
        """Return a part as it is if one object leads to all of its objects. Otherwise return only
        the objects in the place that has most of them, and add their row to ``rows_of_several``.

        Among a thousand new lists in a user's records may be one that a library has put elsewhere.
        """
        row = rows_of_several.get(object_key(part.items[0]))
        has_known_path = bool(part.chain)
        if has_known_path or row is None or row.is_whole:
            return part
        in_one_place = part.largest_place(holders, self.smallest)
        if in_one_place is None:
            return part
        rows_of_several[object_key(in_one_place.items[0])] = in_one_place.row()
        return in_one_place

    def _row_of(self, part: Remaining, holder: Holder) -> HeldRow:
        """Return the row of a part of the memory, given its holder. A single object's row has its
        name in the experiment, the cell that bound this, and the arrays in the object.
        """
        if part.may_be_older:
            holder = holder_of_possibly_older(holder)
        if len(part.items) > 1:
            return HeldRow(part.record, holder)
        item = part.items[0]
        name = self._ended.growth.names.get(id(item), "")
        cell = self._cell_of(name) if name else None
        row = HeldRow(replace(part.record, name=name, cell=cell), holder)
        storages = storages_with_holder_of(row, self._held_arrays)
        return HeldRow(with_arrays(row.row, item, storages), holder)

    def _remaining(self, heap: Heap) -> list[Remaining]:
        """Return the memory of the experiment that is in none of the arrays ``alive``, in parts:
        one for the objects of one type that belong together, such as the new items of a list.
        """
        growth = self._ended.growth
        bytes_in_arrays = sum(name.size_bytes for name in self.alive)
        bytes_left = growth.size_bytes - bytes_in_arrays
        in_new_memory = self._in_new_memory(heap)
        if self.extent is Extent.IN_OLDER_OBJECTS:
            return remaining_in_new_memory(in_new_memory, self.smallest, bytes_left)
        storages_in_rows = storages_of(self.alive)
        sizes = Sizes(limit=_MOST_OLD)
        arrays_to_exclude = list[object]()
        for item, array in described([*heap.tensors, *heap.ndarrays]):
            # An older array may have got a new holder, such as a tuple.
            if array.storage in storages_in_rows or self._ended.is_known(item, array):
                arrays_to_exclude.append(item)
        sizes.exclude_data(arrays_to_exclude)
        changes = self._changes(self._ended.baseline.objects_since())
        return find_remaining(
            heap,
            changes._replace(in_new_memory=in_new_memory),
            counted=sizes,
            smallest=self.smallest,
            size_bytes=bytes_left,
        )

    def _in_new_memory(self, heap: Heap) -> list[object]:
        """Return new arrays and texts that older objects may hold.

        If the baseline has all older arrays, these are the small new arrays behind names. Else they
        are the arrays and texts whose addresses could not be read at the start; none if some new
        objects are kept, whose data these may be.
        """
        baseline = self._ended.baseline
        if baseline.is_complete:
            small = self._small_within_reach
            arrays = described(heap.ndarrays) if small else ()
            return [item for item, array in arrays if array.storage in small]
        if self._ended.growth.kept_objects():
            return []
        in_new_memory = list[object]()
        storages_in_rows = storages_of(self.alive)
        for item, array in described(heap.ndarrays):
            if array.storage in storages_in_rows or self._ended.is_known(item, array):
                continue
            if baseline.is_in_new_container(item):
                continue
            owner = owner_of(item)
            if not is_array(owner):
                continue
            _, start, end = span_of(owner)
            if baseline.is_new_memory(start, end):
                in_new_memory.append(item)
        for text in of_types({id(str), id(bytes)}, list(heap.large_leaves)):
            if baseline.is_new_memory(id(text), id(text) + sys.getsizeof(text)):
                in_new_memory.append(text)
        return in_new_memory

    def _cell_of(self, name: str) -> int | None:
        """Return the last cell of the experiment that has bound a name; None if it is not known.
        Later cells may rebind the name, so it is looked up at the end.
        """
        return cell_of_output(name) or cell_that_bound(
            self._context.shell, name, range(self._first_cell)
        )


def _limit_of_arrays(grown_bytes: int) -> int:
    """Return an upper bound of the bytes of new arrays in a growth of RSS by ``grown_bytes``: the
    end has freed older memory, too, which hides a part of them.
    """
    return grown_bytes * 5 // 4


def _largest_within(names: Iterable[WatchedName], limit_bytes: int) -> list[WatchedName]:
    """Return the largest of the ``names`` whose arrays have at most ``limit_bytes`` together."""
    bytes_left = limit_bytes
    largest = list[WatchedName]()
    for name in sorted(names, key=attrgetter("size_bytes"), reverse=True):
        if name.size_bytes <= bytes_left:
            bytes_left -= name.size_bytes
            largest.append(name)
    return largest


def _holder_of_several(
    part: Remaining,
    rows: Mapping[StorageKey, Row],
    holders: Mapping[StorageKey, Holder],
    roots: Roots,
) -> Holder:
    """Return the holder of several objects: the one that the search has found or, if it could not
    find any, the path from a name.

    Args:
        part: the objects.
        rows: the rows of several objects that were searched, by the key of the first object.
        holders: the holders that the search has found.
        roots: where paths begin.
    """
    key = object_key(part.items[0])
    searched = holders.get(key)
    is_not_searched = key not in rows or all(map(is_pending, part.items))
    # The collector does not list a dict of text: the search for holders ends below it.
    if part.chain and (is_not_searched or searched in (None, OUT_OF_SIGHT, NOT_REACHED)):
        return part.from_name(roots)
    if searched is None:
        return NOT_REACHED
    return holder_of_several(part.items, rows.get(key), holders)


def _holder_of_one(part: Remaining, holders: Mapping[StorageKey, Holder], roots: Roots) -> Holder:
    """Return the holder of one object: its path from a name if that is known, unless the search has
    found it in this place and further ones.
    """
    searched = holders.get(object_key(part.items[0]))
    if not part.chain and searched is not None:
        return searched
    from_name = part.from_name(roots)
    if searched is None or searched.path == from_name.path:
        return from_name
    if from_name.remedy == REMOVE:  # such as an item of a registry, which a call removes
        return searched
    # The search writes all places of an object in one text: ``cache["a"], log[0]``.
    is_one_of_several = f", {from_name.path}, " in f", {searched.path}, "
    return searched if is_one_of_several else from_name
