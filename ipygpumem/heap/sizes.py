"""Measures how much memory any object holds, and what it consists of.

No user code runs: objects are followed as in ``walk``, and sized by the C code of their built-in or library base.
Loops over objects run in C, so that a million short strings take a quarter of a second.
"""

from __future__ import annotations

import gc
import math
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, itemgetter
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import (
    PlainTensors,
    Reader,
    describe,
    holding_objects,
    is_array,
    is_of_library,
    library_type,
    place_of,
    read_array,
    storage_key,
)
from ipygpumem.heap.bulk import (
    CHUNK,
    by_identity,
    chunks,
    container_base,
    held_once,
    of_types,
    one_of_each,
)
from ipygpumem.heap.knowledge.barriers import Barriers, is_left_out
from ipygpumem.heap.knowledge.own_bytes import STORAGE_BYTES, OwnBytes, of_storages, of_tensors
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.libraries import ObjectPart, Piece, parts_of
from ipygpumem.heap.walk import Group, Walk
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import ATOMS, HAS_REFERENCES, is_instance, name_of, type_name
from ipygpumem.records import RetainedArray

MOST_SIZED = 4_000_000
"""Maximum number of objects that one ``Sizes`` examines."""
_MOST_ITEMS = 1_000_000
"""Number of items to examine of longer containers: an evenly spread sample stands for all."""
_MOST_SORTED = 200_000
"""Maximum number of items that are sorted by type if there is an allowance."""
_AT_ONCE = 2000
_CHUNK_COST = 40
"""Number of objects that take as long as the overhead of a chunk: a chain has one object in each."""
_MOST_MET = 100_000
"""Maximum number of objects that one measurement compares with those of earlier ones."""
_LARGE = 1 << 16
"""Smallest size in bytes of host memory that is compared by address, because a tensor and an array may share it."""


class Share(NamedTuple):
    """The memory of some of an object's content."""

    name: str
    """A column, variable, key, attribute, or type of items."""
    kind: str
    """``columns``, ``index``, ``variables``, ``keys``, ``attributes`` or ``items``."""
    type_name: str
    """Empty for columns, an index and variables."""
    items: int
    size_bytes: int


class Size(NamedTuple):
    """The memory that an object holds, as far as no earlier measurement counted it."""

    device_bytes: dict[str, int]
    """Bytes by device; ``cpu`` is RAM."""
    objects: int
    parts: tuple[Share, ...] = ()
    """The largest first."""
    also_in: tuple[str, ...] = ()
    """Labels of other objects that hold memory of this object, too, which is counted there."""
    notes: tuple[str, ...] = ()
    """Reasons why the size is an estimate, or need not be in RAM."""
    complete: bool = True
    """False if a limit was reached: there is more."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes on all devices."""
        return sum(self.device_bytes.values())


class Sizes(Walk):
    """Measures objects one after the other; memory that several share is counted once.

    It keeps shared objects alive: use it inside ``undisturbed``, then drop it.

    Args:
        named: objects by label. Each of these objects is counted only when it is measured itself.
        limit: maximum number of objects to examine; one measurement uses a third of what is left.
        progress: called again and again during a measurement.
        allowance: time and memory for all measurements; without it they are not limited.

    >>> Sizes().measure([bytes(1_000_000)]).size_bytes > 1_000_000
    True
    """

    def __init__(
        self,
        named: Mapping[str, object] | None = None,
        limit: int = MOST_SIZED,
        progress: Callable[[], object] = bool,
        allowance: Allowance | None = None,
    ) -> None:
        super().__init__(limit, find=("tensor", "ndarray"), allowance=allowance)
        self._alone, self._progress = held_once(), progress
        self._barriers = Barriers()
        self._references = ReferenceReader(self._barriers)
        self._own_bytes = OwnBytes()
        self._sized: set[int] = set()
        """Identities of the types that ``_own_bytes`` knows."""
        self._times = 1
        """Number of objects for which each examined one stands."""
        self._label = ""
        self._labels: dict[object, str] = {}
        """Labels of named objects by identity, and of pieces of memory by key."""
        self._starts, self._ends = list[int](), list[int]()
        """Large host memory that has been counted: sorted, without overlaps."""
        self._pieces: set[object] = set()
        self._read: set[int] = set()
        """Identities of object arrays whose elements have been counted."""
        self._left_out: set[object] = set()
        """Keys of storages, and of small NumPy arrays, whose data is not counted."""
        self._bytes, self._objects, self._also, self._notes = Counter[str](), 0, dict[str, None](), dict[str, None]()
        labels = {id(item): label for label, item in reversed(list((named or {}).items()))}
        objects = sizeable(list((named or {}).values()))
        self._kept.append(objects)
        self._waiting = {key: labels[key] for key in map(id, objects)}
        """Labels of named objects that have not been measured yet, by identity."""
        self._labels |= dict[object, str](self._waiting.items())
        self.seen.update(self._waiting)
        self._counted, self._met = set[int](), dict[int, object]()
        """Identities of objects that this measurement counted, and some objects that earlier ones did."""
        self._measured: list[tuple[str, set[int]]] = []

    def drop(self) -> None:
        """Drop all references."""
        super().drop()
        self._met.clear()
        self._references = ReferenceReader(self._barriers)  # the old one refers to nodes of graphs

    def measure(self, value: object, label: str = "") -> Size:
        """Return the memory that ``value`` holds and that no earlier call counted."""
        rest = self._begin(label)
        if self._waiting.get(id(value)) == label:
            self._waiting.pop(id(value))
            self.seen.discard(id(value))
        shares, remaining = list[Share](), list[ObjectPart]()
        is_skipped = id(value) in self.seen or is_left_out(value) or self.is_stopped()
        if not is_skipped:
            self._barriers.open([value])
        parts = [] if is_skipped else self._parts(value)
        if not is_skipped:
            # A part may lead back to the object: a trainer's callback refers to the trainer, and does not own its data.
            self.seen.add(id(value))
        for part in parts:
            if part.objects is None:
                remaining.append(part)
            else:
                shares += self._of_part(part)
        if not is_skipped:
            self.seen.discard(id(value))
            self._met.pop(id(value), None)
        before = self._total()
        self._take([value])
        self._finish()
        size = self._total() - before
        shares += [Share(name, part.kind, name, part.items, size) for part in remaining for name in part.names]
        shares.sort(key=attrgetter("size_bytes"), reverse=True)
        self.left += rest
        self._find_sharers()
        if label:
            self._measured.append((label, self._counted))
        found = {device: size for device, size in self._bytes.items() if size > 0}
        return Size(found, self._objects, tuple(shares), tuple(self._also), tuple(self._notes), self.complete)

    def together(self, values: Sequence[object]) -> int:
        """Return the bytes that several named objects hold, on all devices; faster than one after the other."""
        rest = self._begin("")
        self.seen.difference_update(self._waiting.keys() & set(map(id, values)))
        self._take(list(values))
        self._finish()
        self.left += rest
        return self._total()

    def of_pieces(self, pieces: Sequence[Piece]) -> dict[str, int]:
        """Return the bytes by device of some memory, as far as no earlier call counted it."""
        rest = self._begin("")
        self._take(pieces)
        self.left += rest
        return dict(self._bytes)

    def leave_out(self, arrays: Iterable[Any]) -> None:
        """Do not count the data of ``arrays``; the objects themselves and their elements count when measured."""
        for array in arrays:
            if not is_array(array):
                self._left_out.add(storage_key(array))
            elif read_array("nbytes", array) < _LARGE:
                self._left_out.add(("numpy", id(array)))
            else:
                _, start, end = place_of(array)
                self._uncounted(start, end)

    def _begin(self, label: str) -> int:
        """Reset the sums of a measurement; return the number of objects that are left for later ones."""
        rest, self.left = self.left, math.ceil(self.left / 3)
        self._bytes, self._objects, self._also, self._notes = Counter(), 0, {}, {}
        self._label, self.complete, self._counted, self._met = label, True, set(), {}
        return rest - self.left

    def _find_sharers(self) -> None:
        """Record the labels of earlier objects that share more than a little with this one."""
        for label, own in self._measured if self._met else ():
            common = [self._met[key] for key in own & self._met.keys()]
            kinds = set(map(id, map(type, common)))
            arrays = map(describe, of_types(self._arrays, common))
            size = sum(array.size_bytes for array in arrays if array is not None)
            if common and (self._own_bytes.readers.keys() & kinds or size + self._own_bytes.of(common) >= _LARGE):
                self._also[label] = None

    def _parts(self, value: object) -> list[ObjectPart]:
        base = container_base(type(value))
        if self.allowance is not None and base is not None and base.__len__(value) > _MOST_SORTED:
            return []  # sorting a million items takes as long as measuring them
        try:
            return list(parts_of(value))
        except Exception as error:  # a thread changes it, or an unknown version of a library
            if is_from_signal(error):
                raise
            return []

    def _of_part(self, part: ObjectPart) -> list[Share]:
        """Measure a part; names that share memory get equal shares, except of the elements of an object array."""
        values, own = list[Any](part.objects or ()), Counter[str]()
        if len(part.names) > 1:
            for array in filter(_is_rows_of_objects, values):
                self._read.update((id(array), id(array.base)))
                for name, row in zip(part.names, array, strict=True):
                    before = self._total()
                    self._elements(row)
                    self._finish()
                    own[name] += self._total() - before
        before = self._total()
        self._take(values)
        self._finish()
        together = (self._total() - before) // len(part.names)
        kind = type_name(values[0]) if part.kind in ("keys", "attributes", "items") and values else ""
        return [Share(name, part.kind, kind, part.items, own[name] + together) for name in part.names]

    def _total(self) -> int:
        return self._bytes.total()

    def _finish(self) -> None:
        """Examine everything that was found but not entered yet."""
        deque(self.run(()), maxlen=0)
        self._times = 1

    # -- the walk -------------------------------------------------------------------------------------------------

    def kind_of(self, item: object) -> str:
        """Return how objects of the type of ``item`` are handled."""
        if is_array(item):
            return "ndarray"
        if is_of_library(item, "torch", "Tensor"):
            return "tensor"
        return "leading" if type.__dict__["__flags__"].__get__(type(item)) & HAS_REFERENCES else "skip"

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of some objects; ``path`` is the number of objects for which each of them stands."""
        times = self._times = int(path or 1)
        if len(objects) == 1 and self._length(objects[0]) > CHUNK:
            step = self._step(self._length(objects[0]))
            for part in self._contents_of_long(objects[0], step):
                yield self._barriers.entered(part), None
            self._times = times
            return
        yield self._chain(objects), None
        references = self._references.of(objects)
        self.complete &= references.is_complete and not self._references.is_full
        yield references.of_python, None
        yield [tensor for _, tensor in references.of_torch], None

    def _step(self, length: int) -> int:
        """Return how far apart the chunks of a container begin."""
        stands_for = max(1, -(-length // _MOST_ITEMS))
        if stands_for > 1:
            self._times *= stands_for
            self._notes["estimated from a sample of its items"] = None
        return CHUNK * stands_for

    def _may_lead_on(self, container: Any) -> bool:
        """Return True: numbers and text are counted, too."""
        return True

    def _take(self, items: Sequence[Any]) -> None:
        """Count objects and pieces of memory; note what they lead to."""
        pieces = of_types({id(Piece)}, items)
        for piece in pieces:
            self._piece(piece)
        if pieces:
            items = [item for item in items if type(item) is not Piece]
        for part in chunks(self._barriers.entered(items)):
            if self.allowance is not None and self.is_stopped():
                return
            self._sift(part, with_paths=False)

    def _sift(self, items: Sequence[Any], *, with_paths: bool) -> tuple[list[Any], list[Any]]:
        """Count the new ones among ``items``; keep those that lead to more for later."""
        self._progress()
        several = self._sort(items)
        if not several <= self._sized:
            self._sized |= self._own_bytes.learn(items)
        fresh = self._fresh(items)
        if self.left <= 0 and fresh:
            self.complete = False
            self._queue.clear()
            self._long.clear()
            return [], []
        self.left -= len(fresh) + _CHUNK_COST
        self._objects += len(fresh) * self._times
        self._add("cpu", self._own_bytes.of(fresh, several))
        if not self._arrays.isdisjoint(several):
            self._tensors(self.of_kind("tensor", fresh))
            self._ndarrays(self.of_kind("ndarray", fresh))
        if not self._own_bytes.readers.keys().isdisjoint(several):
            for item in of_types(self._own_bytes.readers, fresh):
                self._look_behind(item)
        self._enter_later(self.of_kind("leading", fresh))
        return [], []

    def _enter_later(self, items: list[Any]) -> None:
        self._queue.extend((some, str(self._times)) for some in chunks(items, _AT_ONCE))

    def _fresh(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the items that have not been counted. Most have one reference: they need not be remembered."""
        references = list(map(sys.getrefcount, items))
        shared = list(compress(items, map(self._alone.__lt__, references)))
        if not shared:
            return items
        by_key = by_identity(shared)
        met = self._labels.keys() & by_key.keys()
        self._also.update(dict.fromkeys([self._labels[key] for key in met if self._labels[key] != self._label]))
        new_keys = by_key.keys() - self.seen
        self.seen |= new_keys
        self._counted |= new_keys
        new = [by_key[key] for key in by_key if key in new_keys]
        if len(self._met) < _MOST_MET and len(new) < len(by_key):
            self._met |= {key: by_key[key] for key in by_key.keys() - self._counted}
        self._kept.append(new)
        return [*compress(items, map(self._alone.__ge__, references)), *new]

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _add(self, device: str, size_bytes: int) -> None:
        self._bytes[device] += size_bytes * self._times

    def _piece(self, piece: Piece) -> None:
        """Add memory behind an object."""
        known = self._labels.setdefault(piece.key, self._label)
        if piece.key in self._pieces:
            self._also.update(dict.fromkeys([known] * (known != self._label)))
            return
        self._pieces.add(piece.key)
        size = piece.size_bytes
        if piece.address and size >= _LARGE:
            size = self._uncounted(piece.address, piece.address + size)
        self._add(piece.device, size)
        if piece.note:
            self._notes[piece.note] = None

    def _uncounted(self, start: int, end: int) -> int:
        """Return the number of bytes of a span of host memory that no other span had, and note it as counted."""
        first, last = bisect_right(self._starts, start), bisect_left(self._starts, end)
        first -= first > 0 and self._ends[first - 1] > start
        spans = list(zip(self._starts[first:last], self._ends[first:last], strict=True))
        counted = sum(min(end, stop) - max(start, begin) for begin, stop in spans)
        self._starts[first:last] = [min([start, *self._starts[first:last]])]
        self._ends[first:last] = [max([end, *self._ends[first:last]])]
        return end - start - counted

    def _look_behind(self, item: object) -> None:
        try:
            found = list(self._own_bytes.readers[id(type(item))](item))
        except Exception as error:  # closed, or an unknown version of the library
            if is_from_signal(error):
                raise
            self._notes["not all of it can be read"] = None
            return
        self._take(found)

    def _ndarrays(self, arrays: list[Any]) -> None:
        """Add NumPy arrays, and the owners of their memory."""
        if not arrays:
            return
        base: Any = library_type("numpy", "ndarray")
        read = base.__dict__
        bases = list(map(read["base"].__get__, arrays))
        owners = list(compress(arrays, map(is_, bases, repeat(None))))
        for array in compress(owners, map(_LARGE.__le__, map(read["nbytes"].__get__, owners))):
            _, start, end = place_of(array)
            self._add("cpu", self._uncounted(start, end) - (end - start))
        for array in owners if self._left_out else ():
            self._add("cpu", -read_array("nbytes", array) * (("numpy", id(array)) in self._left_out))
        self._sort(bases)
        for array, owner in zip(arrays, bases, strict=True):
            if owner is not None and id(type(owner)) in self._kinds["skip"] and self._is_unknown(owner):
                _, start, end = place_of(array)
                self._add("cpu", self._uncounted(start, end))
        leading = [array for array, owner in zip(arrays, bases, strict=True) if owner is not None]
        for array in compress(owners, holding_objects(owners)):
            if id(array) in self._read:
                continue
            if read["size"].__get__(array) > _MOST_ITEMS:
                self._elements(array)
            else:
                leading.append(array)
        leading += filter(gc.is_tracked, arrays)  # with attributes
        self._enter_later(list(by_identity(leading).values()))

    def _is_unknown(self, owner: object) -> bool:
        return id(type(owner)) not in ATOMS and id(type(owner)) not in self._own_bytes.readers

    def _elements(self, array: Any) -> None:
        """Count the elements of an object array."""
        base: Any = library_type("numpy", "ndarray")
        flat = base.ravel(base.view(array, base), "K")
        times, step = self._times, self._step(len(flat))
        for start in range(0, len(flat), step):
            self._take(flat[start : start + CHUNK].tolist())
        self._times = times

    def _tensors(self, tensors: list[Any]) -> None:
        """Add torch tensors, their gradients, and what their attributes refer to."""
        torch: Any = sys.modules.get("torch")
        if not tensors or torch is None:
            return
        with torch._C.DisableTorchFunction():
            reader = Reader(torch)
            plain, rest = reader.plain(tensors)
            self._storages(plain)
            for tensor in rest:
                found = describe(tensor)
                if found is not None:
                    self._piece(Piece(found.storage, found.size_bytes, found.device))
            self._add("cpu", of_tensors(reader, tensors))
        self._enter_later(tensors)

    def _storages(self, plain: PlainTensors) -> None:
        """Add tensors' storages: small ones all at once, rounded as malloc does."""
        columns = zip(plain.sizes, plain.devices, plain.storages, strict=True)
        found: dict[tuple[object, ...], tuple[int, str, Any]] = dict(
            zip(zip(repeat("torch"), plain.keys), columns, strict=False)
        )
        apart = {key for key, (size, device, _) in found.items() if size >= _LARGE and device == "cpu"}
        apart |= found.keys() & self._pieces
        new = found.keys() - self._pieces
        for size, device, _ in map(found.__getitem__, new & self._left_out):
            self._add(device, -size)
        for key in apart:
            size, device, storage = found.pop(key)
            if key in new:
                self._add("cpu", STORAGE_BYTES)
            self._piece(Piece(key, size, device, storage.data_ptr() if device == "cpu" else 0))
        self._pieces.update(found)
        self._labels.update(dict.fromkeys(found, self._label))
        sizes, devices = list(map(itemgetter(0), found.values())), list(map(itemgetter(1), found.values()))
        for device, size in of_storages(sizes, devices).items():
            self._add(device, size)


def sizeable(values: Sequence[object]) -> list[object]:
    """Return the values without plain numbers, short text, modules, and classes of libraries."""
    texts, kinds = of_types(ATOMS, values), one_of_each(values)
    chosen = set(map(id, compress(texts, map(_LARGE.__le__, map(sys.getsizeof, texts)))))
    asked = {key for key, one in kinds.items() if is_instance(one, type) or is_instance(one, ModuleType)}
    chosen.update(id(item) for item in of_types(asked, values) if not is_left_out(item))
    plain = asked | ATOMS
    return [item for item in values if id(type(item)) not in plain or id(item) in chosen]


def _is_rows_of_objects(value: Any) -> bool:
    """Return True for a plain object array of rows, or a view of one that shows all of it."""
    exact = type(value) is library_type("numpy", "ndarray")
    is_whole = exact and (value.base is None or (type(value.base) is type(value) and value.base.size == value.size))
    return is_whole and len(value.shape) > 1 and all(holding_objects([value]))


_MOST_SHOWN = 3
"""Maximum number of parts in a row."""


def row_of(items: Sequence[object], size: Size) -> RetainedArray:
    """Return the row of some objects."""
    kinds = {name_of(type(item)) for item in one_of_each(items).values()}
    kind = kinds.pop() if len(kinds) == 1 else "object"
    device = ", ".join(sorted(size.device_bytes)) or "cpu"
    parts = {share.name: share.size_bytes for share in size.parts[:_MOST_SHOWN]} if len(items) == 1 else {}
    return RetainedArray("", kind, None, "", device, size.size_bytes, arrays=0, objects=len(items), parts=parts)
