"""One look at everything that is alive: tensors and arrays, who refers to them, what they are called.

Sizes and references are read in torch's and NumPy's own words. No code of the user's runs, nothing is changed, and the
look keeps all of it alive: use it, then drop it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ipygpumem.advising.places import Paths, Scope, Spot, named, outermost, tensors_of, with_parts
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import is_instance
from ipygpumem.objects.arrays import StorageKey, library_type, owner_of
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.inventory.listing import Labels, add_gradients
from ipygpumem.objects.inventory.memory import Reader
from ipygpumem.objects.inventory.naming import Names
from ipygpumem.objects.progress import Progress, part, unseen

COMPARED_BYTES = 2 << 30
"""So much content is read at most, all advice together. A limit of time would let answers change from call to call."""


class Look:
    """What was alive when it was made.

    Args:
        scope: the names that are seen where advice is asked for.
        reader: reads tensors; None where torch is not loaded.
        least: bytes that are worth a piece of advice.
        progress: gets how much has been looked at.

    Attributes:
        heap: all objects.
        tensors: torch's tensors; ``ndarrays``: NumPy's arrays.
        notes: what was not looked at.
    """

    def __init__(self, scope: Scope, reader: Reader | None, least: int, progress: Progress = unseen) -> None:
        self.scope, self.least, self.notes = scope, least, list[str]()
        self._reader = reader
        self._left = COMPARED_BYTES
        self._in_frames = Counter(map(id, running_locals()))  # before, as the heap does it
        self.heap = Heap(running_locals(), part(progress, 0.0, 0.3))
        try:
            self._read(part(progress, 0.3, 0.8))
        except BaseException:
            self.drop()
            raise

    def _read(self, progress: Progress) -> None:
        counted = _references(self.heap.ndarrays)  # before they are in lists of ours
        self.tensors: list[Any] = list(self.heap.tensors)
        self.ndarrays: list[Any] = list(self.heap.ndarrays)
        self._refer: dict[int, list[tuple[object, int]]] = {}
        """What refers to tensors and arrays, and how often."""
        # First of all: to ask an object for its attributes may make a dict, which then refers to them in its place.
        for referrer, children in self.heap.referrers({id(item): item for item in (*self.tensors, *self.ndarrays)}):
            if referrer is self.scope.local or (self._reader and is_instance(referrer, self._reader.base)):
                continue  # our copy of a function's names; a tensor, of which it is the gradient: C++ holds that
            times = Counter(map(id, gc.get_referents(referrer)))
            for child in children:
                self._refer.setdefault(child, []).append((referrer, times[child]))
        self._sort()
        for array, number in counted:
            if number > self.is_in_frames(array) + sum(times for _, times in self._refer.get(id(array), ())):
                self._locked.add(self._keys.get(id(array), ("", 0)))  # a view, or code in C
        self.names = self.scope.names()
        self.spot = Paths(self.scope, self.names).spot
        """Returns where a path leads."""
        self._walked = Names()
        self._walked.walk(self.names.items(), self.heap.size, progress)
        self._walked.keep_arrays_only()  # references are counted from here on
        if not self._walked.complete:
            self.notes.append("the search for names stopped early: some tensors have none here")

    def _sort(self) -> None:
        """Group tensors and arrays by their storages; note the storages that other code than torch may hold, too."""
        self.sizes: dict[StorageKey, int] = {}
        self.devices: dict[StorageKey, str] = {}
        self.shown_by: dict[StorageKey, list[Any]] = {}
        self._keys: dict[int, StorageKey] = {}
        self._locked: set[StorageKey] = set()
        if self._reader is not None:
            add_gradients(self._reader, self.tensors, Labels({}, {}))
            for tensor in self.tensors:
                self.key(tensor)
        kind: Any = library_type("numpy", "ndarray")
        for array in self.ndarrays if kind is not None else ():
            owner = owner_of(kind, array)
            if self._reader is not None and is_instance(owner, self._reader.base):
                self._locked.add(self.key(owner) or ("", 0))
                continue
            key = ("numpy", id(owner))
            self._keys[id(array)] = key
            self.shown_by.setdefault(key, []).append(array)
            self.sizes[key], self.devices[key] = int(kind.__dict__["nbytes"].__get__(owner)), "cpu"
            if not is_instance(owner, kind) or not kind.__dict__["flags"].__get__(owner).owndata:
                self._locked.add(key)

    def key(self, tensor: Any) -> StorageKey | None:
        """Return the identity of the storage of a tensor or array; None if it is not its alone."""
        key = self._keys.get(id(tensor))
        if key is not None or self._reader is None or not is_instance(tensor, self._reader.base):
            return key
        memory = self._reader.memory(tensor)
        for number, size in memory.storages.items():
            key = ("torch", number)
            self.sizes[key], self.devices[key] = size, memory.device
            self.shown_by.setdefault(key, []).append(tensor)
            if not memory.is_plain or memory.shared or self._reader.address_of_others(tensor) is not None:
                self._locked.add(key)
        if key is not None and memory.is_plain:
            self._keys[id(tensor)] = key
            return key
        return None

    def drop(self) -> None:
        """Let go of everything."""
        self.heap.drop()
        for kept in (self.tensors, self.ndarrays, self._refer, self.shown_by) if hasattr(self, "shown_by") else ():
            kept.clear()
        if hasattr(self, "_walked"):
            self._walked.drop()

    # -- what holds what --------------------------------------------------------------------------------------

    def read(self, name: str, tensor: Any) -> Any:
        """Return a property of a tensor; None if it cannot be read."""
        return None if self._reader is None else self._reader.read(name, tensor)

    def referrers(self, item: object) -> list[object]:
        """Return what refers to a tensor or array from Python, but for running functions."""
        return [referrer for referrer, _ in self._refer.get(id(item), ())]

    def is_held(self, item: object) -> bool:
        """Whether Python refers to a tensor: others are kept by C++ alone, for a graph or a view."""
        return id(item) in self._refer or id(item) in self._in_frames

    def is_in_frames(self, item: object) -> int:
        """Return how many running functions' names stand for an object."""
        return self._in_frames[id(item)]

    def is_only_at(self, item: object, place: Spot) -> bool:
        """Whether a tensor or array dies when something else is put at its place."""
        found = self._refer.get(id(item), ())
        if any(id(referrer) not in place.holders for referrer, _ in found):
            return False
        return sum(times for _, times in found) + self._in_frames[id(item)] == 1

    def dies(self, key: StorageKey, dropped: set[int]) -> bool:
        """Whether a storage is freed when Python no longer refers to the ``dropped`` tensors (by identity)."""
        if key in self._locked:
            return False
        return all(id(item) in dropped or not self.is_held(item) for item in self.shown_by.get(key, ()))

    # -- what things are called -------------------------------------------------------------------------------

    def spots(self, kind: type) -> Iterator[tuple[Any, Spot]]:
        """Yield the tensors or arrays of exactly this class that a path leads to, with the place that it is."""
        for one in list(self._walked.arrays.values()):
            if type(one.array) is kind:
                found = self.spot(one.path)
                if found is not None and found.value is one.array:
                    yield one.array, found

    def named(self, wanted: Iterable[object]) -> Iterator[tuple[Any, str]]:
        """Yield those of ``wanted`` that a path leads to, as it may be pasted."""
        for item, path in named(self.names, wanted):
            found = self.spot(path)
            if found is not None and found.value is item:
                yield item, found.code

    @functools.cached_property
    def models(self) -> list[tuple[Any, str]]:
        """The modules that are no other's part and that a path leads to, with it."""
        return list(self.named(outermost(self.heap.modules)))

    @functools.cached_property
    def shared(self) -> set[int]:
        """The identities of modules and weights that several models have: what changes one of them changes another."""
        times = Counter[int]()
        for model in outermost(self.heap.modules):
            times.update({id(item) for _, part in with_parts(model) for item in (part, *tensors_of(part))})
        return {key for key, number in times.items() if number > 1}

    def has_name(self, item: object) -> bool:
        """Whether the walk from the user's names came to a tensor or array."""
        return id(item) in self._walked.arrays

    def by_device(
        self, kind: str, shares: dict[StorageKey, int], what: str, code: str, condition: str
    ) -> Iterator[Finding]:
        """Yield a piece of advice once for each device on which it saves something."""
        for device in sorted({self.devices.get(key, "cpu") for key in shares}):
            here = {key: size for key, size in shares.items() if self.devices.get(key, "cpu") == device}
            yield Finding(kind, device, here, what, code, condition)

    # -- what is in it ----------------------------------------------------------------------------------------

    def may_read(self, size: int) -> bool:
        """Whether so many bytes of content may still be read; they count from now on."""
        if size > self._left:
            note = "some arrays are too large to compare what is in them: their content was not looked at"
            self.notes += [note] * (note not in self.notes)
            return False
        self._left -= size
        return True


def _references(items: list[Any]) -> list[tuple[Any, int]]:
    """Return how many references there are to each of a list's items, but for the list's and those of looking."""
    numbers = list(map(sys.getrefcount, items))
    (ours,) = map(sys.getrefcount, [object()])
    return [(item, number - ours) for item, number in zip(items, numbers, strict=True)]
