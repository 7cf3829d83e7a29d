"""Walks forward from objects to the tensors and arrays behind them, many objects at a time, up to a
limit.

No user code runs: the collector reports referents, attributes are read from instance dicts and
slots, and containers through their base class. Modules and other libraries' classes are not
entered, because they lead to everything.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, count, islice, repeat
from types import FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import (
    NOT_ENTERED,
    TOOLS,
    flat_elements,
    holding_objects,
    library_type,
)
from ipygpumem.heap.attributes import (
    slots,
)
from ipygpumem.heap.bulk import (
    CHUNK,
    CONTAINERS,
    OBSERVERS,
    by_identity,
    chunks,
    container_base,
    of_types,
    one_of_each,
    parts_of_container,
    types_of,
)
from ipygpumem.heap.holders.tasks import BUILTIN, storage_of_context, without_wakeups
from ipygpumem.introspect import (
    ATOMS,
    HAS_REFERENCES,
    flags_of,
    instance_dict,
    module_of,
    mro_of,
)

MOST_OBJECTS = 300_000
"""Maximum number of objects other than arrays that one walk enters."""
MOST_AT_START = 50_000
"""Maximum at the start of an experiment, which must not delay the cell."""
MOST_KEPT = 1_000_000
"""Maximum for a walk that protects the user's objects by finding all of them."""
LONGEST = 10_000_000
"""Maximum number of items of one container."""
_MANY = 20_000
"""Containers with more items come last: a list of a million must not hide its neighbours."""
_AT_ONCE, _MOST_INSIDE = 500, 100_000
"""Maximum number of objects that are entered at once, and of items in them, whose list takes
memory.
"""
_FEW, _LEVELS = 100, 3
"""Containers with more items are checked at once, this many levels deep, for anything but numbers
and text.
"""

_FUNCTION = {id(FunctionType)}
_NOT_ENTERED = frozenset(map(id, NOT_ENTERED))
_MODULE_OF: Callable[[Any], object] = vars(type)["__module__"].__get__
_SIZED = set(map(id, CONTAINERS))
ARRAY_TYPES = {
    "tensor": ("torch", "Tensor"),
    "ndarray": ("numpy", "ndarray"),
    "jax": ("jax._src.array", "ArrayImpl"),
}

Label = Callable[[int], str]
"""Returns the path to the item at a position."""
Group = tuple[Sequence[Any], "Label | None"]
"""Some objects, and the function that labels them."""


class Walk:
    """Finds the arrays behind objects, the nearest first, each once during the walk's lifetime.

    This base class follows the collector's referents, without paths. It keeps the found objects
    alive: use it, then drop it.

    Attributes:
        complete: False if a limit was reached or a container could not be read.
        paths: paths of arrays by identity.
        left: number of objects that may still be entered.
        allowance: the walk's time and memory, if they are limited.
        seen: identities of the entered objects, and of arrays.
    """

    def __init__(
        self,
        limit: int = MOST_OBJECTS,
        find: Iterable[str] = tuple(ARRAY_TYPES),
        classes: Collection[str] = (),
        *,
        is_hasty: bool = False,
        allowance: Allowance | None = None,
    ) -> None:
        self.complete, self.left, self.paths = True, limit, dict[int, str]()
        self.allowance = allowance
        self._own, self._is_hasty = classes, is_hasty
        arrays = [(library_type(*ARRAY_TYPES[name]), name) for name in find]
        # each task leads to it, and it to all tasks
        loop = library_type("asyncio", "AbstractEventLoop")
        self._not_entered = _NOT_ENTERED if loop is None else _NOT_ENTERED | {id(loop)}
        self._bases = [pair for pair in arrays if pair[0]] + [
            (type, "class"),
            (ModuleType, "module"),
        ]
        self._kinds: dict[str, set[int]] = {
            name: set() for name in (*ARRAY_TYPES, "leading", "class", "module", "skip")
        }
        """Identities of types, by how their objects are handled."""
        self._types: set[int] = set()
        self._containers: dict[int, Any] = {}
        """Built-in containers from which types derive, by the types' identities."""
        self._arrays: set[int] = set()
        self._kept: list[Sequence[object]] = [storage_of_context()]
        self.seen: set[int] = set(map(id, self._kept[0]))
        """Keeps the objects alive, so that no identity is reused."""
        self._queue: deque[tuple[Sequence[Any], str]] = deque()
        self._long: deque[tuple[Any, str]] = deque()

    def pass_over(self, *items: object) -> None:
        """Never enter these objects; the caller keeps them alive."""
        self.seen.update(map(id, items))

    def of_kind(self, kind: str, items: Sequence[Any]) -> list[Any]:
        """Return the items of a kind; the walk must have seen their types."""
        return of_types(self._kinds[kind], items)

    def is_stopped(self) -> bool:
        """Return True if the allowance is spent; then forget all that was not entered yet."""
        if self.allowance is None or not self.allowance.is_spent():
            return False
        self.complete = False
        self._queue.clear()
        self._long.clear()
        return True

    def drop(self) -> None:
        """Drop all references."""
        self._kept.clear()

    # -- overridden by subclasses ----------------------------------------------------------------

    def kind_of(self, item: object) -> str:
        """Return how objects of the type of ``item`` are handled: one of ``_kinds``."""
        bases = set(map(id, mro_of(type(item))))
        for base, kind in self._bases:
            if id(base) in bases:
                return kind
        may_refer = flags_of(type(item)) & HAS_REFERENCES
        if (
            not may_refer
            or not bases.isdisjoint(self._not_entered)
            or module_of(item).partition(".")[0] in TOOLS
        ):
            return "skip"
        return "leading"

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays that lead to other objects: by a subclass's attributes, or by elements
        that are objects.
        """
        tensors = self.of_kind("tensor", arrays) if self._kinds["tensor"] else []
        if len(gc.get_referents(*tensors)) == len(tensors):  # only to their classes
            tensors = []
        found = [tensor for tensor in tensors if len(gc.get_referents(tensor)) > 1]
        ndarrays = self.of_kind("ndarray", arrays)
        with_objects = compress(ndarrays, holding_objects(ndarrays))
        return found + list(by_identity([*with_objects, *filter(gc.is_tracked, ndarrays)]).values())

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of some objects; objects with a path come one at a time."""
        if len(objects) == 1 and self._length(objects[0]) > _MANY:
            yield from ((part, None) for part in self._contents_of_long(objects[0], CHUNK))
            return
        several = types_of(objects)
        for function in (
            of_types(_FUNCTION, objects) if several >= _FUNCTION else ()
        ):  # a namespace leads to everything
            self.seen.add(id(function.__globals__))
        yield self._chain(objects), None
        yield gc.get_referents(*objects), None
        for array in (
            () if self._kinds["ndarray"].isdisjoint(several) else self.of_kind("ndarray", objects)
        ):
            inside = flat_elements(array)
            self.complete &= inside is not None or not all(holding_objects([array]))
            yield inside or (), None

    # -- implementation --------------------------------------------------------------------------

    def _length(self, item: object) -> int:
        """Return the number of items of a container whose type the walk has seen; 0 for any other
        object.
        """
        base = self._containers.get(id(type(item)))
        return 0 if base is None else base.__len__(item)

    def _lengths(self, containers: Sequence[Any]) -> list[int]:
        """Return the number of items of each container; of plain ones in C, because there may be a
        million.
        """
        if types_of(containers) <= _SIZED:
            return list(map(len, containers))
        return list(map(self._length, containers))

    def _contents_of_long(self, container: Any, step: int) -> Iterator[Sequence[Any]]:
        """Yield the items of a long container in chunks, then its attributes if it is an instance
        of a subclass.
        """
        for number, part in enumerate(
            parts_of_container(container, self._containers[id(type(container))], step)
        ):
            if self.left <= 0 < number:
                self.complete = False
                return
            yield part
        if id(type(container)) not in _SIZED:
            yield [instance_dict(container), *slots(container).values()]

    def _chain(self, objects: Sequence[object]) -> list[object]:
        """Return the next objects of a linked list, if ``objects`` is one of its nodes: one by one
        would take long.
        """
        item, found, known = objects[0] if len(objects) == 1 else None, list[object](), set[int]()
        kind = type(item)
        while len(found) < CHUNK and kind is not FunctionType:
            inside = gc.get_referents(item)
            following = [one for one in inside if type(one) is kind and id(one) not in known]
            if not following and kind is not dict:
                spaces = [one for one in inside if type(one) is dict and "__builtins__" not in one]
                in_spaces = gc.get_referents(*spaces)
                following = [one for one in in_spaces if type(one) is kind and id(one) not in known]
            if len(following) != 1 or id(following[0]) in self.seen:
                break
            (item,) = following
            known.add(id(item))
            found.append(item)
        # as objects with several references they are remembered
        if found:
            self._kept.append(found[:])
        return found

    def run(self, groups: Iterable[Group]) -> Iterator[list[Any]]:
        """Yield the arrays among objects and behind them, in groups; those in long
        containers last.
        """
        for items, label in chain(groups, self._inside()):
            for start, part in zip(count(0, CHUNK), chunks(items)):
                if self.allowance is not None and self.is_stopped():
                    return
                for observe in OBSERVERS:
                    observe()
                if self.left <= 0 < start:
                    self.complete = False
                    break
                arrays, leading = self._sift(part, with_paths=label is not None)
                if label is None:
                    self._queue.extend(zip(chunks(leading, _AT_ONCE), repeat("")))
                elif (
                    len(arrays) == len(part) and not leading
                ):  # such as a list of a million tensors
                    places_here = range(start, start + len(part))
                    self.paths.update(zip(map(id, arrays), map(label, places_here), strict=True))
                elif arrays or leading:
                    from_last = range(start + len(part) - 1, start - 1, -1)
                    places = dict(zip(map(id, reversed(part)), from_last, strict=True))
                    leading.sort(key=lambda item: places[id(item)])
                    keys = list(map(id, arrays))
                    self.paths.update(
                        zip(keys, map(label, map(places.__getitem__, keys)), strict=True)
                    )
                    self._queue.extend([([item], label(places[id(item)])) for item in leading])
                if arrays:
                    yield arrays

    def _inside(self) -> Iterator[Group]:
        while self._queue or self._long:
            try:
                if self._queue:
                    objects, path = self._queue.popleft()
                    if not BUILTIN.isdisjoint(map(id, map(type, objects))):
                        objects, _ = without_wakeups(objects)
                    sized: list[Any] = of_types(self._containers, objects)
                    sizes = self._lengths(sized) if sized else []
                    later = {
                        id(item): item
                        for item, size in zip(sized, sizes, strict=True)
                        if size > _MANY
                    }
                    if len(objects) > 1 and sum(sizes) > _MOST_INSIDE:
                        middle = len(objects) // 2
                        self._queue.extendleft([(objects[middle:], path), (objects[:middle], path)])
                        continue
                    if later:
                        self._long.extend(
                            (item, path) for item in later.values() if self._may_lead_on(item)
                        )
                        objects = [item for item in objects if id(item) not in later]
                    yield from self.enter(objects, path)
                else:
                    item, path = self._long.popleft()
                    yield from self.enter([item], path)
            except RuntimeError:  # a thread changes the container: skip the rest
                self.complete = False

    def _sift(self, items: Sequence[Any], *, with_paths: bool) -> tuple[list[Any], list[Any]]:
        """Return the new arrays among ``items``, and the new objects that may lead to more."""
        several = self._sort(items)
        arrays, leading = list[Any](), list[Any]()
        if not self._arrays.isdisjoint(several):
            arrays = self._new(of_types(self._arrays, items))
            leading += self.that_lead_on(arrays)
            self._kept.append(arrays)
        if not self._kinds["leading"].isdisjoint(several):
            candidates = self.of_kind("leading", items)
            if with_paths and len(candidates) > _FEW:
                candidates = [] if self._lead_nowhere(candidates) else self._with_more(candidates)
            leading += self._new(candidates)
        if self._own and not self._kinds["class"].isdisjoint(several):
            classes = self.of_kind("class", items)
            modules = map(_MODULE_OF, classes)
            own = [
                kind
                for kind, name in zip(classes, modules, strict=True)
                if type(name) is str and name in self._own
            ]
            leading += self._new(own)
        if len(leading) > self.left:
            self.complete = False
            del leading[max(0, self.left) :]
        self.left -= len(leading)
        self._kept.append(leading)
        return arrays, leading

    def _may_lead_on(self, container: Any) -> bool:
        """Return False if a long container starts with numbers and text; in haste, also if these
        are further inside.
        """
        base = self._containers[id(type(container))]
        items = list(
            islice(dict.values(container) if base is dict else base.__iter__(container), CHUNK)
        )
        if self._is_hasty and self._lead_nowhere([items]):
            self.complete = self.complete and types_of(items) <= ATOMS
            return False
        return not types_of(items) <= ATOMS

    def _with_more(self, items: Sequence[object]) -> list[Any]:
        """Return the objects that contain more than numbers and text, after ``_lead_nowhere`` has
        seen them.
        """
        skip = self._kinds["skip"]
        return [
            item
            for item in items
            if not skip.issuperset(map(id, map(type, gc.get_referents(item))))
        ]

    def _lead_nowhere(self, items: Sequence[object]) -> bool:
        """Return True if containers contain only numbers and text, as most do."""
        for _ in range(_LEVELS):
            items = gc.get_referents(*items)
            several = self._sort(items)
            if (
                several <= self._kinds["skip"]
                or not several <= self._kinds["skip"] | self._kinds["leading"]
            ):
                return several <= self._kinds["skip"]
            items = self.of_kind("leading", items)
        return False

    def _sort(self, items: Sequence[object]) -> set[int]:
        """Return the types of ``items``, after classifying the new ones."""
        several = types_of(items)
        if not several <= self._types:
            for key, item in one_of_each(items).items():
                if key not in self._types:
                    self._types.add(key)
                    kind = self.kind_of(item)
                    self._kinds[kind].add(key)
                    base = container_base(type(item)) if kind == "leading" else None
                    if base is not None:
                        self._containers[key] = base
                    if kind in ARRAY_TYPES:
                        self._arrays.add(key)
        return several

    def _new(self, items: Sequence[Any]) -> list[Any]:
        by_key = by_identity(items)
        if self.seen.isdisjoint(by_key):
            self.seen.update(by_key)
            return list(by_key.values())
        new = by_key.keys() - self.seen
        self.seen |= new
        return [by_key[key] for key in by_key if key in new]
