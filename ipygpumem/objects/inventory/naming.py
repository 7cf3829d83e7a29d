"""The names of tensors and arrays: a walk forward from namespaces, through attributes and containers.

No code of the user's runs: attributes are read from instance dicts and slots, containers through their base class.
Modules, and classes from elsewhere, are not entered: what lies behind them belongs to everybody.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import count, islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

from ipygpumem.introspect import instance_dict, is_instance, key_text, text_of, type_name
from ipygpumem.objects.arrays import elements, inside_pandas, library_type, samples, slot_descriptors, slots
from ipygpumem.objects.columns import (
    CHUNK,
    Column,
    all_different,
    at,
    by_identity,
    chunks,
    identities,
    of_types,
    one_of_each,
    places_of,
    type_identities,
    types_of,
)
from ipygpumem.objects.inventory.labels import Indexed, Label, Paths
from ipygpumem.objects.progress import Progress, unseen

_COLLAPSED = ("_parameters", "_buffers", "_modules")
"""Dicts of torch's modules that users never write: ``model.weight`` is in one of them."""
_CONTAINERS: tuple[tuple[type, str], ...] = (
    (list, "sequence"),
    (tuple, "sequence"),
    (deque, "sequence"),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "set"),
    (FunctionType, "function"),
    (MethodType, "method"),
    (functools.partial, "partial"),
    (CellType, "cell"),
    (type, "class"),
)

_NOT_ENTERED = (ModuleType, FrameType, CodeType, TracebackType, BuiltinFunctionType)

_ARRAYS = {"tensor", "ndarray"}

_FEW = 100
"""More objects than that are looked into at once before any of them is by itself: most that are many lead nowhere."""
_TELLING = 250
"""So many objects are looked into before it is said how far the walk is."""
_LEVELS = 4
_WIDEST = 100_000
"""So many objects are looked at, at most, to see that."""


class Names:
    """Finds arrays under names, by their shortest paths; those with several may come several times, the shortest first.

    Args:
        leading: the identities of the arrays that lead to more than their type; None if each is to be asked.

    Attributes:
        arrays: the tensors and arrays that were found.
        kinds: the identities of their types.
        samples: one array of each type.
        names: the path of each.
        roots: the name that each path begins with.
        complete: False if the walk ended before it had seen everything.
    """

    MOST_OBJECTS = 300_000
    """How many objects that are no arrays are looked into."""
    LONGEST = 10_000_000
    """How many items of one container are looked at."""

    def __init__(self, leading: Collection[int] | None) -> None:
        self._leading = leading
        self.arrays: list[object] = []
        self.kinds: Column[int] = Column()
        self.samples: dict[int, object] = {}
        self.names = Paths()
        self.roots: Column[str] = Column()
        self.complete = True
        self._entered: list[object] = []  # as long as they live here, no identity can come to mean something new
        self._seen: set[int] = set()
        self._places: dict[int, int] = {}
        """By an array's identity, of the first ones."""
        self._placed = 0
        self._how: dict[int, str] = {}
        """By a type's identity: ``tensor``, ``ndarray``, ``skip``, or how to look into its objects."""
        self._slots: dict[int, dict[str, Any]] = {}
        """By a type's identity, what ``slot_descriptors`` gives."""
        self._queue: deque[tuple[object, str, str]] = deque()
        self._size, self._looked_at = 1, 0
        self._progress: Progress = unseen
        bases = (
            ("torch", "Tensor", "tensor"),
            ("numpy", "ndarray", "ndarray"),
            ("torch.nn", "Module", "module"),
            ("pandas", "DataFrame", "frame"),
            ("pandas", "Series", "frame"),
        )
        found = [(library_type(module, name), how) for module, name, how in bases]
        self._bases: list[tuple[type, str]] = [(base, how) for base, how in found if base is not None]

    def walk(self, roots: Iterable[tuple[str, object]], size: int = 1, progress: Progress = unseen) -> None:
        """Find what is behind ``roots``, names and their objects, those that are reached first by the fewest steps.

        Args:
            roots: names and their objects.
            size: how many objects there are in all; more is not behind the names, or only by several ways.
            progress: told how much has been looked at.
        """
        self._size, self._progress = max(size, 1), progress
        for name, value in roots:
            self._take([value], [name].__getitem__, name)
        while self._queue:
            if len(self._entered) >= self.MOST_OBJECTS:
                self.complete = False
                self._queue.clear()
                return
            if not len(self._entered) % _TELLING:
                self._tell()
            item, path, root = self._queue.popleft()
            try:
                self._enter(item, path, root)
            except RuntimeError:  # a thread changes a container while we look: its other items go unnamed
                self.complete = False

    def _tell(self) -> None:
        """Say how far the walk is: it ends when enough objects are looked into, or all are looked at."""
        entered = len(self._entered) / min(self.MOST_OBJECTS, self._size)
        self._progress(max(entered, self._looked_at / self._size))

    def drop(self) -> None:
        """Let go of all objects."""
        for found in (self.arrays, self.samples, self._seen, self._entered, self._places):
            found.clear()

    def once(self, places: Sequence[int]) -> Sequence[int]:
        """Return ``places`` of arrays, without those of an array that is at an earlier one, too."""
        keys = list(identities(at(places, self.arrays)))
        if all_different(keys):
            return places
        return sorted(dict(zip(reversed(keys), reversed(places), strict=True)).values())

    # -- what to do with an object ----------------------------------------------------------------------------

    def _take(self, items: Sequence[object], label: Label, root: str) -> None:
        """Note the arrays among ``items`` and queue what may lead to more; most items are neither."""
        if not items:
            return
        leading: list[int] = []
        for start, part in zip(count(0, CHUNK), chunks(items)):
            self._looked_at += len(part)
            if start:
                self._tell()
            kinds = type_identities(part)
            several = samples(kinds, part)
            for kind, item in several.items():
                if kind not in self._how:
                    self._how[kind] = self._way(item)
            arrays = {kind: item for kind, item in several.items() if self._how[kind] in _ARRAYS}
            others = {kind for kind in several if self._how[kind] != "skip"} - arrays.keys()
            if arrays:
                self.samples.update(arrays)
                places = places_of(arrays, kinds)
                self.kinds.extend(at(places, kinds))
                self.roots.extend(Column.same(root, len(places)))
                self.names.add(label, _shifted(places, start))
                self._take_arrays(at(places, part), arrays)
            places = places_of(others, kinds)
            if len(places) < _FEW or self._may_lead_on(at(places, part)):
                leading += [start + place for place in places]
        for position in leading:
            candidate: Any = items[position]
            is_empty = self._how[id(type(candidate))] == "dict" and not dict.__len__(candidate)  # a module has many
            if not is_empty and self._is_new(candidate):
                self._queue.append((candidate, label(position), root))

    def _may_lead_on(self, items: list[object]) -> bool:
        """Whether there may be arrays behind ``items`` that nothing else leads to; many are looked into at once."""
        level: dict[int, object] = dict(enumerate(items))
        for _ in range(_LEVELS):
            referents = gc.get_referents(*level.values())
            several = types_of(referents)
            if not several <= self._how.keys():
                new = one_of_each(referents).items()
                self._how.update((kind, self._way(item)) for kind, item in new if kind not in self._how)
            ways = {kind: self._how[kind] for kind in several if self._how[kind] != "skip"}
            if not ways:
                return False
            if not _ARRAYS.isdisjoint(ways.values()) or len(referents) > _WIDEST:
                return True
            classes = {kind for kind, how in ways.items() if how == "class"}
            found = of_types(ways.keys() - classes, referents)
            found += filter(_is_main, by_identity(of_types(classes, referents)).values())
            level = by_identity(found)
            for key in level.keys() & self._seen:  # it has its place in the queue, or had
                del level[key]
        return True

    def _take_arrays(self, new: list[object], kinds: Iterable[int]) -> None:
        """Note arrays, which are of some ``kinds``, and queue those that have attributes, or objects for elements."""
        start = len(self.arrays)
        self.arrays += new
        leading = self._leading
        if leading is None:
            leading = {id(item) for item in new if len(gc.get_referents(item)) > 1}
        if not leading and all(self._how[kind] != "ndarray" for kind in kinds):
            return  # a million of them costs nothing here
        for place, item in enumerate(new, start):
            if (id(item) in leading or elements(item) is not None) and self._is_new(item):
                self._queue.append((item, self.names[place], self.roots[place]))

    def _is_new(self, item: object) -> bool:
        """Whether ``item`` is seen for the first time."""
        (identity,) = identities([item])
        before = len(self._seen)
        self._seen.add(identity)
        return len(self._seen) > before

    def _way(self, item: object) -> str:
        if any(is_instance(item, kind) for kind in _NOT_ENTERED):
            return "skip"
        ways = (how for base, how in (*self._bases, *_CONTAINERS) if is_instance(item, base))
        how = next(ways, "object")
        if how == "object" and not type.__dict__["__flags__"].__get__(type(item)) & _HAS_REFERENCES:
            return "skip"
        return how

    def _enter(self, item: object, path: str, root: str) -> None:
        self._entered.append(item)
        kind = id(type(item))
        how = self._how[kind]
        if how == "sequence":
            self._sequence(item, path, root)
        elif how == "dict":
            self._dict(item, path, root)
        elif how == "set":
            base: Any = set if is_instance(item, set) else frozenset
            self._take(list(islice(base.__iter__(item), self.LONGEST)), lambda position: f"{path}{{…}}", root)
        elif how == "class":
            if _is_main(item):
                self._attributes(dict(_class_dict(item)), path, root)
        elif how == "ndarray" and (found := elements(item)) is not None:
            self._entered.append(found)
            self._sequence(found, path, root)
        else:
            self._object(item, path, root, is_module=how == "module")

    # -- what is inside ---------------------------------------------------------------------------------------

    def _sequence(self, item: object, path: str, root: str) -> None:
        base: Any = next(base for base in (list, tuple, deque) if is_instance(item, base))
        found = list(islice(base.__iter__(item), self.LONGEST))
        self._take(found, Indexed(path), root)

    def _dict(self, item: Any, path: str, root: str) -> None:
        if "__builtins__" in dict.keys(item):
            return  # a namespace: it leads to everything
        pairs = list(islice(dict.items(item), self.LONGEST))
        keys = [key for key, _ in pairs]
        self._take([value for _, value in pairs], lambda position: f"{path}[{self._key(keys[position])}]", root)
        self._take(keys, lambda position: f"list({path})[{position}]", root)

    def _key(self, key: object) -> str:
        text = key_text(key)
        if text is not None:
            return text
        if self._how.get(id(type(key))) == "tensor":  # an optimizer's state: its key has a name
            text = self._name_of(key)
        return f"<{type_name(key)}>" if text is None else text

    def _name_of(self, array: object) -> str | None:
        """Return the name of an array; None for one that is among those that are just being named."""
        for new in range(self._placed, len(self.arrays)):
            self._places.setdefault(id(self.arrays[new]), new)
        self._placed = len(self.arrays)
        place = self._places.get(id(array))
        return None if place is None else self.names[place]

    def _object(self, item: Any, path: str, root: str, *, is_module: bool) -> None:
        if type(item) is FunctionType:
            cells = item.__closure__ or ()
            self._take(cells, lambda position: f"{path}.__closure__[{position}]", root)
            self._take(item.__defaults__ or (), lambda position: f"{path}.__defaults__[{position}]", root)
            self._take([item.__kwdefaults__], lambda position: f"{path}.__kwdefaults__", root)
        elif type(item) is CellType:
            self._take(gc.get_referents(item), lambda position: f"{path}.cell_contents", root)
        elif self._how[id(type(item))] == "frame":
            self._frame(item, path, root)
        elif type(item) is MethodType:
            self._take([item.__self__, item.__func__], _labels(path, ["__self__", "__func__"]), root)
        elif is_instance(item, functools.partial):
            names = ["func", "args", "keywords"]
            parts = [functools.partial.__dict__[name].__get__(item) for name in names]
            self._take(parts, _labels(path, names), root)
        # A dict that is asked for is made, and stays: only objects that hold more than numbers and text are asked.
        if self._holds_something(item):
            self._attributes(instance_dict(item) or {}, path, root, is_module=is_module)
            if type(item) is not FunctionType:  # its slots lead to its module's names
                kind = id(type(item))
                if kind not in self._slots:
                    self._slots[kind] = slot_descriptors(type(item))
                found = slots(item, self._slots[kind])
                self._take(list(found.values()), _labels(path, list(found)), root)

    def _frame(self, item: object, path: str, root: str) -> None:
        """Name the arrays of a DataFrame or Series as it, which has them in places that users never write."""
        for part in gc.get_referents((instance_dict(item) or {}).get("_mgr")):
            if type(part) is tuple:  # the blocks
                self._take(inside_pandas(part), lambda position: path, root)
            elif type(part) is list:  # the axes
                ends = (".index",) if len(part) == 1 else (".columns", ".index")
                for axis, end in zip(part, ends, strict=False):
                    self._take(inside_pandas(axis), lambda position, name=path + end: name, root)  # type: ignore[misc]

    def _holds_something(self, item: object) -> bool:
        return any(self._how.get(id(type(child))) != "skip" for child in gc.get_referents(item))

    def _attributes(self, found: dict[str, Any], path: str, root: str, *, is_module: bool = False) -> None:
        if is_module:
            for collapsed in _COLLAPSED:
                inner = found.get(collapsed)
                if inner is not None and is_instance(inner, dict) and self._is_new(inner):
                    self._entered.append(inner)
                    parts = dict(dict.items(inner))
                    self._take(list(parts.values()), _labels(path, list(parts)), root)
        self._take(list(found.values()), _labels(path, list(found)), root)


def _shifted(places: Sequence[int], by: int) -> Sequence[int]:
    if type(places) is range:
        return range(places.start + by, places.stop + by)
    return [place + by for place in places]


_HAS_REFERENCES = 1 << 14
"""Py_TPFLAGS_HAVE_GC: objects of other types refer to nothing."""


def _class_dict(kind: object) -> Any:
    return type.__dict__["__dict__"].__get__(kind)


def _is_main(kind: object) -> bool:
    """Whether a class is the notebook's or the script's own: others are not entered."""
    return text_of(_class_dict(kind).get("__module__")) == "__main__"


def _labels(path: str, names: Sequence[object]) -> Label:
    return lambda position: path + _attribute(names[position])


def _attribute(name: object) -> str:
    """Return how an attribute is written; torch numbers the parts of a sequence."""
    text = text_of(name)
    if text.isidentifier():
        return f".{text}"
    return f"[{text}]" if text.isdecimal() else f".<{text!r}>"
