"""Lists the memory that errors keep alive, within an allowance: freeing waits for the list.

A tensor in a local is described in microseconds. Everything else has to be walked, so a list of two
million references may take seconds. Walks stop once the allowance is spent; then a built-in
container counts at least with its own bytes.

An object is held by a name, such as a local of a function in a traceback. Its rows are for its
arrays, for the memory that autograd keeps behind them, and for all other memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.bulk import chunks, kinds_of, of_types
from ipygpumem.heap.containers import CONTAINERS
from ipygpumem.heap.kinds.arrays import describe, library_type
from ipygpumem.heap.knowledge.graphs import kept_by_many
from ipygpumem.heap.knowledge.nodes import Nodes
from ipygpumem.heap.sizes.sizes import MOST_SIZED, MeasuredSize, Sizes, row_of
from ipygpumem.heap.walks.array_search import ArraySearch, summed
from ipygpumem.heap.walks.walk import MOST_AT_START, MOST_OBJECTS
from ipygpumem.introspect import ATOMS, type_name
from ipygpumem.reclaim.exceptions import chain
from ipygpumem.reclaim.frames import finished_frames, frames_of, names_in
from ipygpumem.records import CutListing, RetainedArray
from ipygpumem.units import MIB

_SMALLEST_BYTES = MIB
"""Minimum bytes of a local's memory besides arrays."""
_MEASURED_TOGETHER = 50
"""Number of locals that are first measured together."""
_READ_ANYWAY = 1000
"""Number of locals to read even if memory is short: tensors and arrays among them are still listed.
"""
_PARTS_OF_TIME = 3
"""One object may take a third of the time that is left for it and all later ones."""
_TYPES_WITH_OWN_BYTES = set(map(id, (*CONTAINERS, str, bytes, bytearray)))
"""Identities of the types whose ``sys.getsizeof`` runs no user code and may be large."""


class HeldObject(NamedTuple):
    """An object that a name in a function or in an exception keeps alive."""

    name: str
    value: object
    function: str = ""
    """The function of which it is a local; empty if it is none."""
    line: int = 0
    """The line at which the function stopped."""
    call: int = 0
    """Number of the function's call in a traceback: a recursive function is there several times."""

    def key(self, title: str = "") -> RowKey:
        """Return the key of a row of this object; ``title`` is the row's name if it is not that of
        the object, as ``gradients of model``.
        """
        return title or self.name, self.function, self.call


RowKey = tuple[str, str, int]
"""Identifies a row: its name, the function, and the number of the function's call."""


@dataclass
class HeldMemory:
    """The memory that errors hold."""

    rows: tuple[RetainedArray, ...] = ()
    """The largest first."""
    cut: CutListing | None = None
    """How far the list got, if it is not complete."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.size_bytes for row in self.rows)


def held_by_frames(
    error: BaseException,
    notebook: Mapping[str, object],
    allowance: Allowance,
) -> HeldMemory:
    """Return the memory held by the locals of each function of a traceback, each storage once.

    Memory that autograd keeps behind tensors has its own rows. Left out are the memory of the names
    of the ``notebook``, which was held before the error too, and the frames of generators and
    threads that are still in use.
    """
    held_objects, unread_objects = _objects_in_frames(error, allowance)
    errors = list(chain(error))
    # The notebook may refer to a frame, as by ``frame = sys._getframe()``. The walk from its names
    # must not take the locals there for the notebook's.
    frames = frames_of(error)
    return memory_behind(held_objects, notebook, errors, frames, allowance, unread_objects)


def _objects_in_frames(error: BaseException, allowance: Allowance) -> tuple[list[HeldObject], int]:
    """Return the locals of the frames that can be released, and the number of locals that were not
    read.
    """
    held_objects = list[HeldObject]()
    unread_objects = 0
    reading = allowance.share(2)
    for call, (frame, line) in enumerate(finished_frames(error)):
        # Memory is often short here: it ran out. Some locals are read all the same.
        if reading.is_spent() and (reading.reason == "time" or len(held_objects) > _READ_ANYWAY):
            unread_objects += frame.f_code.co_nlocals
            continue
        for name, value in names_in(frame).items():
            if id(type(value)) not in ATOMS or sys.getsizeof(value) >= _SMALLEST_BYTES:
                held_objects.append(HeldObject(name, value, frame.f_code.co_name, line, call))
    return held_objects, unread_objects


def memory_behind(
    held_objects: Sequence[HeldObject],
    notebook: Mapping[str, object],
    errors: Sequence[BaseException],
    passed_over: Sequence[object],
    allowance: Allowance,
    unread_objects: int = 0,
) -> HeldMemory:
    """Return the memory that ``held_objects`` keep alive and ``notebook`` does not.

    After most errors, the locals hold less than a MiB. A first search without the notebook finds
    that out: walking from all names of the notebook would take long.

    Args:
        held_objects: the objects with their names.
        notebook: the names of the notebook and their objects.
        errors: exceptions, which lead to everything; they are not entered.
        passed_over: other objects that are not entered.
        allowance: the time and memory for it.
        unread_objects: number of objects that are missing from ``held_objects``.
    """
    if not held_objects and not unread_objects:
        return HeldMemory()
    if notebook and not unread_objects and not _surely_have_rows(held_objects):
        quick_search = _HeldMemorySearch(held_objects, (), errors, passed_over, allowance.share(3))
        quick_search.run()
        if not quick_search.rows and not quick_search.uncounted:
            return HeldMemory()
    search = _HeldMemorySearch(
        held_objects, list(notebook.values()), errors, passed_over, allowance
    )
    search.run()
    rows = sorted(_one_row_for_each_line(search.rows.values()), key=lambda row: -row.size_bytes)
    uncounted = len(search.uncounted) + unread_objects
    if not uncounted:
        return HeldMemory(tuple(rows))
    cut = CutListing(search.reason or "time", uncounted, len(held_objects) + unread_objects)
    return HeldMemory(tuple(rows), cut)


def _surely_have_rows(held_objects: Sequence[HeldObject]) -> bool:
    """Return True if one of the objects is an array, or has at least a MiB without its items: a
    search will make a row of it.
    """
    values = [held.value for held in held_objects]
    array_types = [library_type("torch", "Tensor"), library_type("numpy", "ndarray")]
    loaded_types = [kind for kind in array_types if kind is not None]
    if kinds_of(values, *loaded_types):
        return True
    sizes = map(sys.getsizeof, of_types(_TYPES_WITH_OWN_BYTES, values))
    return max(sizes, default=0) >= _SMALLEST_BYTES


def _own_bytes(value: object) -> int:
    """Return the bytes of a built-in container, text or bytes object without its items; 0 for any
    other object.
    """
    if id(type(value)) in _TYPES_WITH_OWN_BYTES:
        return sys.getsizeof(value)
    return 0


@dataclass
class _HeldMemorySearch:
    """Searches the memory behind held objects: arrays first, then all other objects.

    ``run`` does it once; ``rows``, ``uncounted`` and ``reason`` are its result.
    """

    held_objects: Sequence[HeldObject]
    """Objects with the names in functions or exceptions that keep them alive."""
    notebook_values: Sequence[object]
    """The objects of the notebook's names, whose memory gets no rows."""
    errors: Sequence[BaseException]
    """Exceptions, which are not entered: they lead to everything."""
    passed_over: Sequence[object]
    """Other objects that are not entered."""
    allowance: Allowance
    rows: dict[RowKey, RetainedArray] = field(default_factory=dict)
    """The rows by the keys of their objects."""
    uncounted: set[int] = field(default_factory=set)
    """Positions of the objects that were not counted, or only in part."""
    reason: Literal["time", "memory", "objects", ""] = ""
    """Why they were not counted."""
    own_bytes: list[int] = field(default_factory=list)
    """Bytes of each object without its items."""
    held_by_frames_alone: set[int] = field(default_factory=set)
    """Positions of large containers to which only frames refer: they are not the notebook's, too.
    """

    def run(self) -> None:
        """Fill the rows."""
        occurrences = Counter(id(held.value) for held in self.held_objects)
        self.own_bytes = [_own_bytes(held.value) for held in self.held_objects]
        # First of all, because a walk refers to the objects, too.
        for position, held in enumerate(self.held_objects):
            if self.own_bytes[position] < _SMALLEST_BYTES:
                continue
            if _is_held_by_frames_alone(held, occurrences[id(held.value)]):
                self.held_by_frames_alone.add(position)
        graphs = self._add_arrays()
        self._add_other_memory(graphs)

    def _note_cut(self, position: int, allowance: Allowance) -> None:
        """Note that an object was not counted in full, because ``allowance`` was spent, or else
        there were too many objects.
        """
        self.uncounted.add(position)
        if self.reason != "memory":  # the most important one, if there are several
            self.reason = allowance.reason or self.reason or "objects"

    # -- tensors and arrays ---------------------------------------------------------------------

    def _add_arrays(self) -> list[list[Any]]:
        """Add the rows of tensors and arrays; return the tensors that autograd keeps behind them,
        one list for each graph.
        """
        allowance = self.allowance.share(2)
        search = self._search_after_notebook(allowance)
        for position, held in enumerate(self.held_objects):
            share = allowance.share(min(_PARTS_OF_TIME, len(self.held_objects) - position))
            search.begin(share)
            search.add(held)
            if not search.complete:
                search.add_array_itself(held)
                self._note_cut(position, share)
        search.begin(allowance)
        unfinished_keys = {held.key() for held in search.add_autograd(allowance)}
        if unfinished_keys:
            for position, held in enumerate(self.held_objects):
                if held.key() in unfinished_keys:
                    self._note_cut(position, allowance)
        self.rows.update(search.rows)
        return search.graphs

    def _search_after_notebook(self, allowance: Allowance) -> _ArrayCollector:
        """Return a search that has seen the arrays of the notebook's names, so that they get no
        rows.
        """
        search = _ArrayCollector(allowance.share(2))
        search.pass_over(*self.errors, *self.passed_over)
        search.left = MOST_AT_START  # the notebook may have more objects than the errors
        search.add(HeldObject(name="", value=self.notebook_values))
        search.add_autograd(allowance.share(2))
        search.left = MOST_OBJECTS
        return search

    # -- other memory ---------------------------------------------------------------------------

    def _add_other_memory(self, graphs: list[list[Any]]) -> None:
        """Add the rows of objects that hold at least a MiB besides arrays, without memory of the
        notebook's names.

        Args:
            graphs: the tensors that each autograd graph keeps; graphs have rows of their own.
        """
        candidates = self._positions_of_large()
        if not candidates:
            return
        allowance = self.allowance.share(2)
        sizes = self._new_sizes(allowance)
        sizes.exclude([graphs, self.notebook_values])
        if not sizes.complete:  # some of the memory may be the notebook's
            for position in candidates:
                self._note_cut(position, allowance)
                self._add_row_of_memory(position, MeasuredSize({}, complete=False))
            return
        for number, position in enumerate(candidates):
            sizes.allowance = self.allowance.share(min(_PARTS_OF_TIME, len(candidates) - number))
            size = sizes.measure(self.held_objects[position].value)
            if not size.complete:
                self._note_cut(position, sizes.allowance)
            self._add_row_of_memory(position, size)

    def _new_sizes(self, allowance: Allowance) -> Sizes:
        """Return a measurement that does not enter the errors, which lead to everything."""
        sizes = Sizes(limit=MOST_SIZED // 4, allowance=allowance)
        sizes.pass_over(map(id, self.errors))
        return sizes

    def _positions_of_large(self) -> list[int]:
        """Return the positions of the objects that may hold a MiB besides arrays.

        Most objects hold little, so some of them are measured together: if they hold less than a
        MiB in all, none of them is measured alone.
        """
        every_position = range(len(self.held_objects))
        if max(self.own_bytes, default=0) >= _SMALLEST_BYTES:
            return list(every_position)
        sizes = self._new_sizes(self.allowance.share(3))
        total_bytes = 0
        candidates = list[int]()
        for positions in chunks(every_position, _MEASURED_TOGETHER):
            size_bytes = sizes.together(
                [self.held_objects[position].value for position in positions]
            )
            total_bytes += size_bytes
            if size_bytes >= _SMALLEST_BYTES or not sizes.complete:
                candidates += positions
            if not sizes.complete:  # an unknown size, which may be large
                total_bytes += _SMALLEST_BYTES
        array_bytes = sum(row.size_bytes for row in self.rows.values())
        if sizes.complete and total_bytes < array_bytes + _SMALLEST_BYTES:
            return []  # all that is large are arrays, which have their rows
        return candidates

    def _add_row_of_memory(self, position: int, size: MeasuredSize) -> None:
        """Add the row of an object with memory besides arrays, in place of the row of its arrays.

        Args:
            position: the position of the object.
            size: the memory behind it, arrays included. If it was not counted in full, a large
                container that only frames refer to has at least its own bytes.
        """
        held = self.held_objects[position]
        own_bytes = self.own_bytes[position]
        is_own = position in self.held_by_frames_alone
        if is_own and not size.complete and size.size_bytes < own_bytes:
            size = MeasuredSize({"cpu": own_bytes}, complete=False)
        if not size.device_bytes:
            return
        row_of_arrays = self.rows.get(held.key())
        array_bytes = 0
        arrays = 0
        if row_of_arrays is not None:
            array_bytes = row_of_arrays.size_bytes
            arrays = row_of_arrays.arrays
        if size.size_bytes < array_bytes + _SMALLEST_BYTES:
            return
        self.rows[held.key()] = replace(
            row_of([held.value], size),
            name=held.name,
            arrays=arrays,
            function=held.function,
            line=held.line,
        )


def _one_row_for_each_line(rows: Iterable[RetainedArray]) -> list[RetainedArray]:
    """Return the rows with equal ones joined: a recursive function may have a thousand rows of one
    name, which differ only in the call. Their sizes are added.
    """
    rows_by_line = dict[tuple[str, ...], list[RetainedArray]]()
    for row in rows:
        key = (row.name, row.function, str(row.line), row.type_name, row.dtype, row.device)
        rows_by_line.setdefault(key, []).append(row)
    joined_rows = list[RetainedArray]()
    for rows_of_line in rows_by_line.values():
        joined_row = rows_of_line[0]
        if len(rows_of_line) > 1:
            parts = Counter[str]()
            for row in rows_of_line:
                parts.update(row.parts)
            joined_row = replace(
                joined_row,
                shape=None,
                size_bytes=sum(row.size_bytes for row in rows_of_line),
                arrays=sum(row.arrays for row in rows_of_line),
                objects=sum(row.objects for row in rows_of_line),
                parts=dict(parts),
                is_at_least=any(row.is_at_least for row in rows_of_line),
            )
        joined_rows.append(joined_row)
    return joined_rows


def _is_held_by_frames_alone(held: HeldObject, occurrences: int) -> bool:
    """Return True if only frames and this list of locals refer to an object, so that it cannot
    be the notebook's, too. ``occurrences`` is the number of locals that have it.
    """
    probe = HeldObject(name="", value=object())  # one ``HeldObject`` refers to it, and no frame
    # Each ``HeldObject`` refers to it, and the frame of each; the probe is one of these.
    return sys.getrefcount(held.value) - sys.getrefcount(probe.value) < 2 * occurrences


class _ArrayCollector(ArraySearch):
    """Makes rows of the arrays behind names, and then of the tensors that autograd keeps in C++
    behind these: gradients, and saved tensors of graphs.
    """

    def __init__(self, allowance: Allowance) -> None:
        super().__init__(allowance=allowance)
        self.rows: dict[RowKey, RetainedArray] = {}
        """The rows by the keys of their objects."""
        self.graphs: list[list[Any]] = []
        """The tensors that autograd keeps, by graph; they are kept alive, because the search knows
        them by identity.
        """
        self._tensors_of_object: list[Any] = []
        """The tensors of the object that is being searched; the walk adds them in
        ``that_lead_on``.
        """
        self._with_tensors: list[tuple[HeldObject, list[Any]]] = []
        """Objects and their tensors, whose autograd memory is not listed yet."""
        self._nodes: Any = None
        """torch's autograd nodes, as ``kept_by_many`` needs them; made at the first graph."""

    def begin(self, allowance: Allowance) -> None:
        """Begin with another object, which has its own allowance."""
        self.allowance = allowance
        self.complete = True

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays that lead to other objects, as in the base class, and collect all
        tensors: also one without memory of its own may have a graph.
        """
        self._tensors_of_object += self.of_kind("tensor", arrays)
        return super().that_lead_on(arrays)

    def add(self, held: HeldObject) -> None:
        """Add a row of the arrays to which a held object leads and no earlier one does.

        An object without a name gets no row, nor do its arrays behind later objects.
        """
        self._tensors_of_object = []  # the walk adds them
        row_and_arrays = self.retained_by(
            held.name, held.value, function=held.function, line=held.line
        )
        if row_and_arrays is not None and held.name:
            row, *_ = row_and_arrays
            self.rows[held.key()] = row
        if self._tensors_of_object:
            self._with_tensors.append((held, self._tensors_of_object))

    def add_array_itself(self, held: HeldObject) -> None:
        """Add the row of a held object that is an array, without a walk: for one whose walk
        was cut short.
        """
        array = describe(held.value)
        if array is not None and array.storage not in self._storages:
            self._storages.add(array.storage)
            row = summed(held.name, type_name(held.value), [array], alone=True)
            self.rows[held.key()] = replace(row, function=held.function, line=held.line)

    def add_autograd(self, allowance: Allowance) -> list[HeldObject]:
        """Add the rows of the memory that autograd keeps behind the objects so far: first gradients
        of leaves, then the graphs of all other tensors.

        Return the objects for which the allowance did not suffice.
        """
        with_tensors, self._with_tensors = self._with_tensors, []
        for leaves, title in ((True, "gradients of"), (False, "autograd graph of")):
            for number, (held, tensors) in enumerate(with_tensors):
                self._add_graph(
                    f"{title} {held.name}", held, tensors, leaves=leaves, allowance=allowance
                )
                if allowance.is_spent():
                    return [unfinished for unfinished, _ in with_tensors[number:]]
        return []

    def _add_graph(
        self,
        name: str,
        held: HeldObject,
        tensors: list[Any],
        *,
        leaves: bool,
        allowance: Allowance,
    ) -> None:
        """Add a row of the memory that autograd keeps behind the tensors of a held object.

        Args:
            name: the name of the row.
            held: the object.
            tensors: its tensors.
            leaves: True for the gradients of its leaves, False for the graphs of its other tensors.
            allowance: the time and memory for it.
        """
        if self._nodes is None:
            self._nodes = Nodes()
        graph = kept_by_many(tensors, self._nodes, leaves=leaves, allowance=allowance)
        self.graphs.append(graph)
        row_and_arrays = self.retained_by(name, graph, function=held.function, line=held.line)
        if row_and_arrays is not None and held.name:
            self.rows[held.key(name)] = replace(row_and_arrays[0], type_name="")
