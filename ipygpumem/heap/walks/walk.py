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
from itertools import chain, compress, count, repeat
from types import FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import (
    CHUNK,
    OBSERVERS,
    by_identity,
    chunks,
    container_base,
    lengths_of,
    linked_to,
    not_among,
    of_types,
    one_of_each,
    parts_of_container,
    types_of,
)
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.kinds.arrays import (
    flat_elements,
    holding_objects,
    library_type,
    object_arrays,
)
from ipygpumem.heap.knowledge.barriers import is_of_tool, types_not_entered
from ipygpumem.heap.knowledge.tasks import BUILTIN, storage_of_context, without_wakeups
from ipygpumem.introspect import (
    ATOMS,
    HAS_REFERENCES,
    flags_of,
    instance_dict,
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
_LONG_LENGTH = 20_000
"""Containers with more items come last: a list of a million must not hide its neighbours."""
_ENTERED_AT_ONCE = 500
"""Maximum number of objects that are entered at once."""
_ITEMS_AT_ONCE = 100_000
"""Maximum number of items in these objects, because their list takes memory."""
_MOST_GLANCES = 300_000
"""Number of items of long containers at whose types a hasty walk looks: ten milliseconds."""
_CHECKED_LENGTH = 100
"""More objects than these are checked together for anything but numbers and text."""
_LEVELS = 3
"""Number of levels of containers in each other that are checked."""

ARRAY_TYPES = {
    "tensor": ("torch", "Tensor"),
    "ndarray": ("numpy", "ndarray"),
    # not jax.Array, which covers tracers, too: these have no memory
    "jax": ("jax._src.array", "ArrayImpl"),
}
_KINDS = (*ARRAY_TYPES, "leading", "class", "module", "skip")
"""Ways in which a walk handles the objects of a type: it finds arrays, enters "leading" objects and
some classes, and passes over modules and objects to skip, such as numbers and text.
"""
_FUNCTION = {id(FunctionType)}
_MODULE_OF: Callable[[Any], object] = vars(type)["__module__"].__get__

Label = Callable[[int], str]
"""Returns the path to the item at a position."""
Group = tuple[Sequence[Any], "Label | None"]
"""Some objects, and the function that labels them."""


class _TypesByKind:
    """The types that a walk has met, by how it handles their objects. Types are known by their
    identities.

    Attributes:
        by_kind: the types of each kind in ``_KINDS``.
        arrays: the types of arrays of every kind.
        containers: the built-in container from which a type derives, by the type.
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, set[int]] = {kind: set() for kind in _KINDS}
        self.arrays: set[int] = set()
        self.containers: dict[int, Any] = {}
        self._sorted: set[int] = set()

    def sort(self, items: Sequence[object], kind_of: Callable[[object], str]) -> set[int]:
        """Sort the types of ``items`` that are new, and return all types of the items.

        Args:
            items: any objects.
            kind_of: returns the kind of an object's type.
        """
        type_ids = types_of(items)
        if type_ids <= self._sorted:
            return type_ids
        for type_id, example in one_of_each(items).items():
            if type_id in self._sorted:
                continue
            kind = kind_of(example)
            self._sorted.add(type_id)
            self.by_kind[kind].add(type_id)
            if kind in ARRAY_TYPES:
                self.arrays.add(type_id)
            elif kind == "leading":
                base = container_base(type(example))
                if base is not None:
                    self.containers[type_id] = base
        return type_ids

    def length(self, item: object) -> int:
        """Return the length of a container whose type was sorted; 0 for any other object."""
        base = self.containers.get(id(type(item)))
        if base is None:
            return 0
        return int(base.__len__(item))


class Walk:
    """Finds the arrays behind objects, the nearest first, each once during the walk's lifetime.

    This base class follows the collector's referents, without paths. It keeps the objects that it
    has met alive: use it, then drop it.

    The walk goes level by level: ``walk_from`` takes groups of objects, yields the arrays among
    them, and queues the objects that may lead to more; ``enter`` yields the contents of queued
    objects as further groups.

    Args:
        limit: maximum number of objects to enter.
        find: the kinds of arrays to find, of ``ARRAY_TYPES``.
        classes: modules whose classes are entered, as ``__main__`` for the user's.
        is_hasty: True to leave out long containers that seem to have only numbers and text, without
            a look at each of their items.
        allowance: the walk's time and memory, if they are limited.

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
        self.complete = True
        self.left = limit
        self.paths: dict[int, str] = {}
        self.allowance = allowance
        self._modules_of_classes = classes
        self._is_hasty = is_hasty
        self._glances_left = _MOST_GLANCES
        """Number of items of long containers at whose types a hasty walk may still look."""
        self._not_entered = frozenset(map(id, types_not_entered()))
        """Identities of types whose objects, and those of subclasses, are not entered."""
        self._bases = _bases_of_kinds(find)
        """Classes with the kind of their instances."""
        self._types = _TypesByKind()
        context_storages = storage_of_context()
        self._alive: list[Sequence[object]] = [context_storages]
        """Keeps the objects alive, so that no identity is reused."""
        self.seen: set[int] = set(map(id, context_storages))
        self._queue: deque[tuple[Sequence[Any], str]] = deque()
        """Groups of objects to enter, each with its path if it is a single object's."""
        self._long: deque[tuple[Any, str]] = deque()
        """Long containers to enter when the queue is empty, with their paths."""

    def pass_over(self, *items: object) -> None:
        """Never enter these objects; the caller keeps them alive."""
        self.seen.update(map(id, items))

    def of_kind(self, kind: str, items: Sequence[Any]) -> list[Any]:
        """Return the items of a kind, one of ``_KINDS``; the walk must have met their types."""
        return of_types(self._types.by_kind[kind], items)

    def stop_if_spent(self) -> bool:
        """If the allowance is spent, forget the objects to enter, and return True."""
        if self.allowance is None or not self.allowance.is_spent():
            return False
        self.complete = False
        self._queue.clear()
        self._long.clear()
        return True

    def drop(self) -> None:
        """Drop all references to the objects that the walk has met."""
        self._alive.clear()

    # -- overridden by subclasses ----------------------------------------------------------------

    def kind_of(self, item: object) -> str:
        """Return how the walk handles the objects of a type, one of ``_KINDS``; asked once for each
        type.

        Args:
            item: any object of the type.
        """
        base_ids = set(map(id, mro_of(type(item))))
        for base, kind in self._bases:
            if id(base) in base_ids:
                return kind
        if not flags_of(type(item)) & HAS_REFERENCES:
            return "skip"
        if not base_ids.isdisjoint(self._not_entered):
            return "skip"
        if is_of_tool(item):
            return "skip"
        return "leading"

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays, of some, that lead to other objects: by attributes of a tensor or of
        an instance of a subclass, or by elements that are objects.

        The walk calls it once with each array that it meets.
        """
        tensors = self.of_kind("tensor", arrays)
        ndarrays = self.of_kind("ndarray", arrays)
        leading = object_arrays(ndarrays)
        leading += filter(gc.is_tracked, ndarrays)  # instances of subclasses
        return _with_attributes(tensors) + list(by_identity(leading).values())

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of some objects, in groups.

        Args:
            objects: the objects; only one of them if it has a path.
            path: the path; empty without one.
        """
        if len(objects) == 1 and self._types.length(objects[0]) > _LONG_LENGTH:
            for part in self._contents_of_long(objects[0]):
                yield part, None
            return
        type_ids = types_of(objects)
        if type_ids >= _FUNCTION:
            for function in of_types(_FUNCTION, objects):
                self.seen.add(id(function.__globals__))  # a namespace leads to everything
        yield self._links_behind(objects), None
        yield gc.get_referents(*objects), None
        if not self._types.by_kind["ndarray"].isdisjoint(type_ids):
            for array in self.of_kind("ndarray", objects):
                yield self._objects_in_array(array), None

    # -- implementation --------------------------------------------------------------------------

    def walk_from(self, groups: Iterable[Group]) -> Iterator[list[Any]]:
        """Walk from objects, and yield the arrays among them and behind them that the walk has not
        met, some at a time; arrays in long containers last.

        Args:
            groups: the objects to begin with, with their labels, or None for no paths.
        """
        for items, label in chain(groups, self._contents_of_waiting()):
            for start, part in zip(count(0, CHUNK), chunks(items)):
                if self.allowance is not None and self.stop_if_spent():
                    return
                for observe in OBSERVERS:
                    observe()
                if start > 0 and self.left <= 0:  # the first part of each group is read anyway
                    self.complete = False
                    break
                arrays, leading = self._arrays_and_leading(part, with_paths=label is not None)
                if label is None:
                    self._queue.extend(zip(chunks(leading, _ENTERED_AT_ONCE), repeat("")))
                else:
                    self._note_paths(arrays, leading, part, start, label)
                if arrays:
                    yield arrays

    def _note_paths(
        self,
        arrays: Sequence[Any],
        leading: Sequence[Any],
        part: Sequence[Any],
        start: int,
        label: Label,
    ) -> None:
        """Note the paths of arrays, and queue the objects that lead on with their paths.

        Args:
            arrays: the new arrays among the ``part``.
            leading: the new objects of the ``part`` that lead on.
            part: some items of a group.
            start: position of the first of them in the group.
            label: returns the path to the item at a position of the group.
        """
        positions = range(start, start + len(part))
        if len(arrays) == len(part) and not leading:  # such as a list of a million tensors
            labels = map(label, positions)
            self.paths.update(zip(map(id, arrays), labels, strict=True))
            return
        if not arrays and not leading:
            return
        # The last position comes first, so that the dict keeps the first of equal objects.
        identities = map(id, reversed(part))
        position_by_id = dict(zip(identities, reversed(positions), strict=True))
        for array in arrays:
            position = position_by_id[id(array)]
            self.paths[id(array)] = label(position)

        def position_of(item: object) -> int:
            return position_by_id[id(item)]

        for item in sorted(leading, key=position_of):
            path = label(position_of(item))
            self._queue.append(([item], path))

    def _contents_of_waiting(self) -> Iterator[Group]:
        """Yield the contents of the objects that wait to be entered, long containers last. The walk
        is incomplete if a thread changes one of them.
        """
        while self._queue or self._long:
            try:
                if self._queue:
                    objects, path = self._queue.popleft()
                    objects = self._to_enter_now(objects, path)
                else:
                    container, path = self._long.popleft()
                    objects = [container]
                if objects:
                    yield from self.enter(objects, path)
            except RuntimeError:  # noqa: PERF203  # a thread changes a container: skip its items
                self.complete = False

    def _to_enter_now(self, objects: Sequence[Any], path: str) -> Sequence[Any]:
        """Return the objects, of some, that are to be entered now, and put off the other ones.

        Long containers go into ``_long``. If the objects have too many items for one list, none is
        entered now: they go to the head of the queue again, in two halves.

        Args:
            objects: some objects that were taken from the queue.
            path: their path.
        """
        if not BUILTIN.isdisjoint(map(id, map(type, objects))):
            objects, _ = without_wakeups(objects)
        types_of_containers = self._types.containers
        containers: list[Any] = of_types(types_of_containers, objects)
        if not containers:
            return objects
        lengths = lengths_of(containers, types_of_containers)
        if len(objects) > 1 and sum(lengths) > _ITEMS_AT_ONCE:
            middle = len(objects) // 2
            self._queue.appendleft((objects[middle:], path))
            self._queue.appendleft((objects[:middle], path))
            return []
        if max(lengths) <= _LONG_LENGTH:
            return objects
        long_containers = compress(containers, map(_LONG_LENGTH.__lt__, lengths))
        long_by_key = by_identity(list(long_containers))
        for container in filter(self._may_lead_on, long_by_key.values()):
            self._long.append((container, path))
        return [item for item in objects if id(item) not in long_by_key]

    def _contents_of_long(self, container: Any) -> Iterator[Sequence[Any]]:
        """Yield the items of a long container in chunks, then its attributes if it is an instance
        of a subclass. The walk is incomplete if it may enter only some of the items.
        """
        base = self._types.containers[id(type(container))]
        for number, part in enumerate(parts_of_container(container, base)):
            if number > 0 and self.left <= 0:
                self.complete = False
                return
            yield part
        if id(type(container)) not in CONTAINER_TYPES:
            yield [instance_dict(container), *slots(container).values()]

    def _objects_in_array(self, array: Any) -> list[Any]:
        """Return the objects in an array; if they cannot be read, none, and the walk is
        incomplete.
        """
        elements = flat_elements(array)
        if elements is None and any(holding_objects([array])):
            self.complete = False
        return elements or []

    def _links_behind(self, objects: Sequence[object]) -> list[object]:
        """Return the next nodes of a linked list if ``objects`` is one of its nodes, else nothing.

        The walk goes level by level, and each node is a level of its own: a list of a million nodes
        would take a million steps.
        """
        nodes = list[object]()
        if len(objects) != 1 or type(objects[0]) is FunctionType:
            return nodes
        (node,) = objects
        node_ids = set[int]()
        while len(nodes) < CHUNK:
            following = [item for item in linked_to(node) if id(item) not in node_ids]
            if len(following) != 1 or id(following[0]) in self.seen:
                break
            (node,) = following
            node_ids.add(id(node))
            nodes.append(node)
        return nodes

    def _arrays_and_leading(
        self, items: Sequence[Any], *, with_paths: bool
    ) -> tuple[list[Any], list[Any]]:
        """Return the arrays among ``items`` that the walk has not seen, and the unseen objects that
        may lead to more; of the latter only as many as may still be entered. From now on, the
        walk has seen all of these, and keeps them alive until its end.

        Args:
            items: some items of a group.
            with_paths: True if their paths are known, so that each is entered by itself: then it
                is worth the time to leave out containers of numbers and text first.
        """
        types = self._types
        type_ids = types.sort(items, self.kind_of)
        arrays = list[Any]()
        leading = list[Any]()
        if not types.arrays.isdisjoint(type_ids):
            arrays = self._take_unseen(of_types(types.arrays, items))
            leading += self.that_lead_on(arrays)
            self._alive.append(arrays)
        if not types.by_kind["leading"].isdisjoint(type_ids):
            candidates = self.of_kind("leading", items)
            if with_paths and len(candidates) > _CHECKED_LENGTH:
                candidates = self._without_plain_containers(candidates)
            leading += self._take_unseen(candidates)
        has_classes = not types.by_kind["class"].isdisjoint(type_ids)
        if self._modules_of_classes and has_classes:
            classes = self._classes_to_enter(items)
            leading += self._take_unseen(classes)
        if len(leading) > self.left:
            self.complete = False
            del leading[max(0, self.left) :]
        self.left -= len(leading)
        self._alive.append(leading)
        return arrays, leading

    def _classes_to_enter(self, items: Sequence[Any]) -> list[Any]:
        """Return the classes among ``items`` that belong to the chosen modules; no other class is
        entered.
        """
        classes = list[Any]()
        for kind in self.of_kind("class", items):
            module = _MODULE_OF(kind)
            if type(module) is str and module in self._modules_of_classes:
                classes.append(kind)
        return classes

    def _may_lead_on(self, container: Any) -> bool:
        """Return True if a long container has more than numbers and text.

        A hasty walk looks at no more than the first part with other items. If these are containers
        of numbers and text, as in a list of a million pairs, it takes all items for such ones, and
        is incomplete.
        """
        base = self._types.containers[id(type(container))]
        for part in parts_of_container(container, base):
            if self._is_hasty and self._glances_left <= 0:
                self.complete = False
                return False
            self._glances_left -= len(part)
            if types_of(part) <= ATOMS:
                continue
            if self._is_hasty and self._are_plain_containers([part]):
                self.complete = False
                return False
            return True
        return False

    def _without_plain_containers(self, items: Sequence[object]) -> list[Any]:
        """Return the objects that refer to more than numbers and text; none if all of them lead
        only to these.
        """
        if self._are_plain_containers(items):
            return []
        skip = self._types.by_kind["skip"]
        return [
            item
            for item in items
            if not skip.issuperset(map(id, map(type, gc.get_referents(item))))
        ]

    def _are_plain_containers(self, items: Sequence[object]) -> bool:
        """Return True if objects lead only to numbers and text, on at most ``_LEVELS`` levels, as
        most containers do.
        """
        skip = self._types.by_kind["skip"]
        leading = self._types.by_kind["leading"]
        for _ in range(_LEVELS):
            items = gc.get_referents(*items)
            type_ids = self._types.sort(items, self.kind_of)
            if type_ids <= skip:
                return True
            if not type_ids <= skip | leading:
                return False
            items = self.of_kind("leading", items)
        return False

    def _take_unseen(self, items: Sequence[Any]) -> list[Any]:
        """Add the items to ``seen``, and return those that were not there, each once, in their
        order.
        """
        by_key = by_identity(items)
        unseen = not_among(by_key, self.seen)
        self.seen.update(by_key)
        return unseen


def _bases_of_kinds(names: Iterable[str]) -> list[tuple[type, str]]:
    """Return the base classes of some kinds of arrays, of classes and of modules, with the kind's
    name.
    """
    bases = list[tuple[type, str]]()
    for name in names:
        base = library_type(*ARRAY_TYPES[name])
        if base is not None:
            bases.append((base, name))
    return [*bases, (type, "class"), (ModuleType, "module")]


def _with_attributes(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that refer to more than their class, by attributes as in
    ``weight.history = losses``.
    """
    # Most tensors do not, so one call answers for all of them.
    if len(gc.get_referents(*tensors)) == len(tensors):
        return []
    return [tensor for tensor in tensors if len(gc.get_referents(tensor)) > 1]
