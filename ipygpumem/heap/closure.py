"""Finds everything that some objects lead to, and which of it is referenced from elsewhere too.

References are counted as CPython's garbage collector counts them: an object with more references than those from
inside is also held from outside, and keeps everything alive that it leads to. So it takes no search of the heap to
know what one name owns.
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from operator import itemgetter, not_
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import (
    NOT_ENTERED,
    TOOLS,
    flat_elements,
    is_array,
    is_of_library,
    library_type,
    read_array,
    storage_key,
)
from ipygpumem.heap.bulk import OBSERVERS, by_identity, chunks, held_once, of_types, one_of_each, types_of
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.frames import is_users, running_ids
from ipygpumem.heap.holders.graphs import behind, kept_behind
from ipygpumem.heap.holders.nodes import Nodes
from ipygpumem.heap.holders.tasks import pending, storage_of_context, without_wakeups
from ipygpumem.heap.libraries import BUFFERS, Piece, bytes_of, segments, sharing_kinds, with_memory
from ipygpumem.introspect import (
    ATOMS,
    is_atom,
    is_exactly,
    is_instance,
    is_users_class,
    module_dict,
    module_of,
    mro_of,
    type_name,
)

_BASES = (("ndarray", ("numpy", "ndarray")), ("tensor", ("torch", "Tensor")), ("stream", ("io", "BytesIO")))
_CONTAINERS, _PLAIN = set(map(id, (object, list, dict, tuple, set, frozenset))), ATOMS - BUFFERS
MOST_OWNED = 20_000_000
"""Maximum number of objects, except numbers and text with one holder."""
_MOST_PARTNERS = 20
"""Maximum number of objects that share the memory of one object to look at."""
_FUNCTION, _FRAME = {id(FunctionType)}, {id(FrameType)}
_OF_CONSTANT, _LARGEST_CONSTANT = 100, 512
"""Plain numbers and text of few bytes with as many references from outside are constants, which no user owns."""


class Closure:
    """All objects that ``roots`` lead to; it keeps them alive.

    Modules, running frames and libraries' classes are left out, because they lead to everything.

    Known limit: references that a C library holds without telling the collector count as references from outside.

    Attributes:
        objects: by identity, without those that are ``alone``, and without numbers and text that have one holder.
        alone: containers and instances of the user's classes with one holder, so that nothing outside refers to them.
        complete: False if there were too many objects.

    Raises:
        AllowanceError: the allowance is spent.
    """

    def __init__(self, roots: Sequence[object], allowance: Allowance | None = None) -> None:
        self.objects: dict[int, object] = {}
        self.alone: list[object] = []
        self.complete = True
        names = ("all", "entered", "alone", *(name for name, _ in _BASES))
        self._kinds: dict[str, set[int]] = {name: set() for name in names}
        """Identities of types, by how their objects are handled."""
        self._spaces = {id(module_dict(item)) for item in list(sys.modules.values()) if is_instance(item, ModuleType)}
        """Identities of namespaces of modules."""
        self._spaces.update(map(id, storage_of_context()))
        self._running = running_ids()
        self._inside: Counter[int] = Counter()
        """Number of references from inside, by an object's identity."""
        self._inside_torch: Counter[int] = Counter()
        """The same, of references in torch's C++ code."""
        nodes = Nodes()
        alone, level = held_once(), list(roots)
        self.objects.update(by_identity(level))
        while level and self.complete:
            self.complete = len(self.objects) + len(self.alone) <= MOST_OWNED
            parts, level = chunks(level), []
            for observe in OBSERVERS:
                observe()
            for part in parts:
                if allowance is not None:
                    allowance.check()
                references, of_torch = self._referents(part, nodes)
                self._inside_torch.update(map(id, of_torch))
                for below in chunks(references):
                    is_alone = list(map(alone.__ge__, map(sys.getrefcount, below)))
                    singles = list(compress(below, is_alone))
                    plain = of_types(self._kinds["alone"], singles)
                    other = of_types(types_of(singles) - self._kinds["alone"] - _PLAIN, singles)
                    shared = [*compress(below, map(not_, is_alone)), *other]
                    self._inside.update(map(id, shared))
                    self.alone += plain
                    level += plain
                    level += self._new(shared, self.objects)
                level += self._new(of_torch, self.objects)

    def reach(self, keys: Iterable[int]) -> set[int]:
        """Return the identities of some objects, and of all that they lead to, without plain numbers and text."""
        level, nodes = [self.objects[key] for key in keys], Nodes()
        found = by_identity(level)
        while level and len(found) <= MOST_OWNED:
            parts, level = chunks(level), []
            for part in parts:
                for references in self._referents(part, nodes):
                    level += self._new(of_types(types_of(references) - ATOMS, references), found)
        return set(found)

    @staticmethod
    def _new(items: Sequence[Any], known: dict[int, Any]) -> list[Any]:
        """Add the items to the ``known`` ones; return the new ones."""
        new = {key: item for key, item in by_identity(items).items() if key not in known}
        known.update(new)
        return list(new.values())

    def held_from_outside(self, ours: Mapping[int, int]) -> set[int]:
        """Return the identities of the objects that something outside refers to, except constants such as ``True``.

        Args:
            ours: number of references that the caller holds, by an object's identity.
        """
        probe = object()
        self.objects[id(probe)] = probe
        del probe
        counts = dict(zip(self.objects, map(sys.getrefcount, self.objects.values()), strict=True))
        self.objects.popitem()
        _, every = counts.popitem()  # the references that each object has at this moment
        inside = self._inside.copy()
        inside.update(ours)
        more = {key: number - every - inside[key] for key, number in counts.items() if number - every != inside[key]}
        held = {key: number for key, number in self._of_tensors(self.tensors(), more).items() if number > 0}
        return {key for key, number in held.items() if number < _OF_CONSTANT or not self._is_small(key)}

    @property
    def may_share(self) -> bool:
        """Return True if objects may share memory with objects to which they do not refer."""
        known = list(self.objects.values())
        arrays = of_types(self._kinds["ndarray"], known)
        bases = [read_array("base", array) for array in arrays]
        is_foreign = any(base is not None and not is_array(base) for base in bases)
        return is_foreign or bool(self.tensors() or of_types(sharing_kinds(), known) or segments(known))

    def partners(self, heap: Heap, held: Collection[int]) -> dict[int, list[tuple[Piece, list[object]]]]:
        """Return the memory that this closure shares with objects from outside, with these objects.

        The keys are the identities of the objects in this closure. Libraries share memory without references between
        their objects, so addresses are compared. A tensor that a graph from outside has saved is its own partner.

        Args:
            heap: the live objects.
            held: objects of this closure that are held from outside. A tensor's storage is a partner of these only,
                because torch keeps its Python object while the tensor lives.
        """
        every = with_memory(list(self.objects.values()))
        own = {(piece.address or piece.key, piece.size_bytes): (item, piece) for item, piece in every}.values()
        more = heap.of_types(sharing_kinds() | BUFFERS) if own else []
        outside, tensors = (
            [item for item in items if id(item) not in self.objects]
            for items in ((*more, *heap.ndarrays), heap.tensors if own else ())
        )
        found_outside, nodes, by_key = with_memory([*outside, *tensors]), Nodes(), dict[object, list[object]]()
        for item, piece in found_outside:
            by_key.setdefault(piece.key, []).append(item)
        kept = [item for leaves in (True, False) for item in kept_behind(tensors, nodes, leaves=leaves)]
        saved = set(map(storage_key, kept))
        spans = [(one.address, one.address + one.size_bytes, place) for place, (_, one) in enumerate(found_outside)]
        spans = sorted(span for span in spans if span[0])
        starts, furthest = list(map(itemgetter(0), spans)), list(accumulate(map(itemgetter(1), spans), max))
        found: dict[int, list[tuple[Piece, list[object]]]] = {}
        for item, piece in own:
            same, place = (
                by_key.get(piece.key, [])[:_MOST_PARTNERS],
                bisect_left(starts, piece.address + piece.size_bytes),
            )
            while place > 0 and furthest[place - 1] > piece.address > 0 and len(same) < _MOST_PARTNERS:
                place -= 1
                same += [found_outside[spans[place][2]][0]] * (spans[place][1] > piece.address)
            same = [one for one in same if id(item) in held or type_name(one) != "UntypedStorage"]
            same += [item] * (piece.key in saved)
            if same:
                found.setdefault(id(item), []).append((piece, same))
        return found

    def tensors(self, keys: Collection[int] | None = None) -> list[Any]:
        """Return the tensors, all or those with some identities."""
        found = of_types(self._kinds["tensor"], list(self.objects.values()))
        return found if keys is None else [tensor for tensor in found if id(tensor) in keys]

    def pending(self) -> list[Any]:
        """Return the asyncio tasks that are not done."""
        return pending(list(self.objects.values()))

    # -- implementation -------------------------------------------------------------------------------------------

    def _is_small(self, key: int) -> bool:
        item = self.objects[key]
        return is_atom(item) and sys.getsizeof(item) <= _LARGEST_CONSTANT

    def _of_tensors(self, tensors: Sequence[Any], more: dict[int, int]) -> dict[int, int]:
        """Correct the references from outside for those in torch's C++ code, which Python's counts do not show."""
        if not tensors:
            return more
        torch: Any = sys.modules["torch"]
        count: Any = getattr(torch.Tensor, "_use_count", None)  # neither is in every torch
        counts_storage: Any = getattr(torch._C, "_storage_Use_Count", None)
        with torch._C.DisableTorchFunction():
            one = torch.empty(0, device="meta")
            alone = sys.getrefcount(one)
            view = one[:]
            shows_one = sys.getrefcount(one) - alone  # from torch 2.10 on, the object has one for all of C++
            del view
            storage = torch.Tensor.untyped_storage(one)
            unnamed = sys.getrefcount(storage)
            for tensor in tensors if count is not None else ():
                in_torch = count(tensor) - 1
                beyond = in_torch - self._inside_torch[id(tensor)]
                more[id(tensor)] = more.get(id(tensor), 0) - (shows_one if in_torch else 0) + max(0, beyond)
            on_storage: dict[Any, list[Any]] = {}
            for tensor in tensors if counts_storage is not None else ():
                on_storage.setdefault(storage_key(tensor), []).append(tensor)
            on_storage.pop(None, None)
            for same in on_storage.values():
                storage = torch.Tensor.untyped_storage(same[0])
                has_name = id(storage) not in self.objects and sys.getrefcount(storage) > unnamed
                if has_name or counts_storage(storage._cdata) > len(same) + 1:
                    more[id(same[0])] = 1
        return more

    def _referents(self, objects: Sequence[Any], nodes: Nodes) -> tuple[list[Any], list[Any]]:
        """Return the objects to which some objects refer, once for each reference, and those of torch's C++ code."""
        several = self._learn(objects)
        if not several.isdisjoint(_FUNCTION):
            self._spaces.update(id(function.__globals__) for function in of_types(_FUNCTION, objects))
        self._spaces.update(id(frame.f_globals) for frame in of_types(_FRAME, objects))
        objects, waking = without_wakeups(objects)
        found, of_torch = gc.get_referents(*objects), list[Any]()
        # A future leads to no task but one that has led to the future.
        found += [item.__self__ for item in waking if id(item.__self__) in self.objects]
        if not several.isdisjoint(self._kinds["ndarray"]):
            read: Any = library_type("numpy", "ndarray")
            for array in of_types(self._kinds["ndarray"], objects):
                viewed = read.base.__get__(array)
                found += (flat_elements(array) or ()) if viewed is None else [viewed]
        for item in of_types(self._kinds["stream"], objects):
            found += bytes_of(item)
        if not several.isdisjoint(self._kinds["tensor"]):
            base: Any = library_type("torch", "Tensor")
            with sys.modules["torch"]._C.DisableTorchFunction():
                for tensor in of_types(self._kinds["tensor"], objects):
                    of_torch += [kept for _, kept in behind(tensor, nodes)]
                    viewed = base._base.__get__(tensor)
                    of_torch += [] if viewed is None else [viewed]
        return self._entered(found), self._entered(of_torch)

    def _entered(self, objects: list[Any]) -> list[Any]:
        """Return the objects that are not left out."""
        if not self._learn(objects) <= self._kinds["entered"]:
            objects = of_types(self._kinds["entered"], objects)
        for frame in of_types(_FRAME, objects):
            if id(frame) in self._running or not is_users(frame):
                objects = [item for item in objects if item is not frame]
        keys = list(map(id, objects))
        if self._spaces.isdisjoint(keys):
            return objects
        return list(compress(objects, map(not_, map(self._spaces.__contains__, keys))))

    def _learn(self, objects: Sequence[Any]) -> set[int]:
        """Return the types of some objects, after sorting the new ones."""
        several = types_of(objects)
        if not several <= self._kinds["all"]:
            for key, item in one_of_each(objects).items():
                if key not in self._kinds["all"]:
                    self._kinds["all"].add(key)
                    if is_exactly(item, TracebackType, FrameType) or not is_left_out(item):
                        self._kinds["entered"].add(key)
                    if all(id(base) in _CONTAINERS or is_users_class(base) for base in mro_of(type(item))):
                        self._kinds["alone"].add(key)
                    for name, place in _BASES:
                        base = library_type(*place)
                        if base is not None and is_instance(item, base):
                            self._kinds[name].add(key)
        return several


def is_left_out(item: object) -> bool:
    """Return True for modules, frames, code, objects of tools, event loops, and classes."""
    is_foreign = is_of_library(item, "asyncio", "AbstractEventLoop")
    is_foreign |= module_of(item).partition(".")[0] in TOOLS or any(is_instance(item, base) for base in NOT_ENTERED)
    return is_foreign or is_instance(item, ModuleType) or is_instance(item, type)
