"""Finds names of tensors and arrays: walks forward from namespaces, through attributes and containers.

No code of the user's runs: attributes are read from instance dicts and slots, containers through their base class.
Modules, and classes from elsewhere, are not entered: what lies behind them belongs to everybody.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count, islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ipygpumem.introspect import HAS_REFERENCES, class_dict, instance_dict, is_instance, key_text, text_of, type_name
from ipygpumem.objects.arrays import NOT_ENTERED, elements, inside_pandas, library_type, slot_descriptors, slots
from ipygpumem.objects.bulk import CHUNK, by_identity, chunks, of_types, one_of_each, types_of
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

_ARRAYS = {"tensor", "ndarray", "jax"}

_FEW = 100
"""More objects than that are looked into at once before any of them is by itself: most that are many lead nowhere."""
_REPORTED_AFTER = 250
"""So many objects are looked into before it is said how far the walk is."""
_LEVELS = 4
_WIDEST = 100_000
"""So many objects are looked at, at most, to see that."""

Label = Callable[[int], str]
"""Returns the path to the item at a position."""


class NamedArray(NamedTuple):
    """An array and the path that leads to it, which begins with the name ``root``."""

    array: object
    path: str
    root: str


class Names:
    """Finds arrays under names, by their shortest paths.

    Attributes:
        arrays: the tensors and arrays that were found, by identity; those on the shortest paths first.
        complete: False if the walk ended before it had seen everything.
    """

    MOST_OBJECTS = 300_000
    """How many objects that are no arrays are looked into."""
    LONGEST = 10_000_000
    """How many items of one container are looked at."""

    def __init__(self) -> None:
        self.arrays: dict[int, NamedArray] = {}
        self.complete = True
        self._seen: dict[int, object] = {}
        """What is looked into or will be, by identity, which cannot come to mean something new meanwhile."""
        self._categories: dict[int, str] = {}
        """By a type's identity: ``tensor``, ``ndarray``, ``jax``, ``skip``, or how to look into its objects."""
        self._slots: dict[int, dict[str, Any]] = {}
        """By a type's identity, what ``slot_descriptors`` gives."""
        self._queue: deque[tuple[object, str, str]] = deque()
        self._size, self._looked_at = 1, 0
        self._progress: Progress = unseen
        bases = (
            ("torch", "Tensor", "tensor"),
            ("numpy", "ndarray", "ndarray"),
            ("jax._src.array", "ArrayImpl", "jax"),
            ("torch.nn", "Module", "module"),
            ("pandas", "DataFrame", "frame"),
            ("pandas", "Series", "frame"),
        )
        known = [(library_type(module, name), category) for module, name, category in bases]
        self._bases = [*((base, category) for base, category in known if base is not None), *_CONTAINERS]

    def walk(self, roots: Iterable[tuple[str, object]], size: int = 1, progress: Progress = unseen) -> None:
        """Find what is behind ``roots``, the nearest first.

        Args:
            roots: names and their objects.
            size: how many objects there are in all; more is not behind the names, or only by several ways.
            progress: gets how much has been looked at.
        """
        self._size, self._progress = max(size, 1), progress
        for name, value in roots:
            self._take([value], [name].__getitem__, name)
        while self._queue:
            if not (len(self._seen) - len(self._queue)) % _REPORTED_AFTER:
                self._report()
            try:
                self._enter(*self._queue.popleft())
            except RuntimeError:  # a thread changes a container while we look: its other items go unnamed
                self.complete = False

    def _report(self) -> None:
        """Report how far the walk is: it ends when enough objects are looked into, or all are looked at."""
        entered = (len(self._seen) - len(self._queue)) / min(self.MOST_OBJECTS, self._size)
        self._progress(max(entered, self._looked_at / self._size))

    def objects(self) -> set[int]:
        """Return the identities of all objects that were looked into."""
        return set(self._seen)

    def keep_arrays_only(self) -> None:
        """Let go of all objects but the arrays; nothing is walked from here on."""
        self._seen.clear()

    def drop(self) -> None:
        """Let go of all objects."""
        self.arrays.clear()
        self._seen.clear()

    # -- what to do with an object ----------------------------------------------------------------------------

    def _take(self, items: Sequence[object], label: Label, root: str) -> None:
        """Note the arrays among ``items`` and queue what may lead to more; most items are neither."""
        for start, part in zip(count(0, CHUNK), chunks(items)):
            self._looked_at += len(part)
            if start:
                self._report()
            wanted = self._wanted(part)
            of_interest = map(wanted.__contains__, map(id, map(type, part)))
            for position in compress(range(len(part)), of_interest) if wanted else ():
                self._note(part[position], label, start + position, root)

    def _wanted(self, items: Sequence[object]) -> set[int]:
        """Return the types of which ``items`` are arrays, or may lead to some."""
        wanted = self._categorize(items)
        arrays = {kind for kind in wanted if self._categories[kind] in _ARRAYS}
        if len(items) >= _FEW and wanted > arrays:
            others = of_types(wanted - arrays, items)
            return arrays if len(others) >= _FEW and not self._may_lead_on(others) else wanted
        return wanted

    def _categorize(self, items: Sequence[object]) -> set[int]:
        """Decide how to look into each of the items' types; return those that are not skipped."""
        several = one_of_each(items)
        for kind in several.keys() - self._categories.keys():
            self._categories[kind] = self._category(several[kind])
        return {kind for kind in several if self._categories[kind] != "skip"}

    def _may_lead_on(self, items: list[object]) -> bool:
        """Whether there may be arrays behind ``items`` that nothing else leads to; many are looked into at once."""
        level: dict[int, object] = dict(enumerate(items))
        for _ in range(_LEVELS):
            referents = gc.get_referents(*level.values())
            wanted = self._categorize(referents)
            if any(self._categories[kind] in _ARRAYS for kind in wanted) or (wanted and len(referents) > _WIDEST):
                return True
            classes = {kind for kind in wanted if self._categories[kind] == "class"}
            own = types_of(list(level.values()))  # an object refers to its class, which has a name of its own
            leading = of_types(wanted - classes, referents)
            several = by_identity(of_types(classes, referents))
            leading += [kind for key, kind in several.items() if key not in own and _is_main(kind)]
            level = by_identity(leading)
            for key in level.keys() & self._seen.keys():  # it has its place in the queue, or had
                del level[key]
            if not level:
                return False
        return True

    def _note(self, item: object, label: Label, position: int, root: str) -> None:
        """Note an array, and queue what may lead to more, if it is seen for the first time."""
        key, category = id(item), self._categories[id(type(item))]
        if key in self._seen:
            return
        if category in _ARRAYS:
            if key in self.arrays:
                return
            self.arrays[key] = NamedArray(item, label(position), root)
            if category == "jax":
                return
            if len(gc.get_referents(item)) <= 1 and (category == "tensor" or elements(item) is None):
                return  # it leads to its type alone
        elif category == "dict" and not dict.__len__(item):  # type: ignore[arg-type]  # the category says so
            return  # a module has many
        if len(self._seen) >= self.MOST_OBJECTS:
            self.complete = False
            return
        self._seen[key] = item
        self._queue.append((item, label(position), root))

    def _category(self, item: object) -> str:
        if any(is_instance(item, kind) for kind in (ModuleType, *NOT_ENTERED)):
            return "skip"
        category = next((category for base, category in self._bases if is_instance(item, base)), "object")
        may_refer = type.__dict__["__flags__"].__get__(type(item)) & HAS_REFERENCES
        return category if category != "object" or may_refer else "skip"

    def _enter(self, item: object, path: str, root: str) -> None:
        category = self._categories[id(type(item))]
        if category == "sequence":
            self._sequence(item, path, root)
        elif category == "dict":
            self._dict(item, path, root)
        elif category == "set":
            base: Any = set if is_instance(item, set) else frozenset
            self._take(list(islice(base.__iter__(item), self.LONGEST)), lambda position: f"{path}{{…}}", root)
        elif category == "class":
            if _is_main(item):
                self._attributes(dict(class_dict(item)), path, root)
        elif category == "ndarray" and (found := elements(item)) is not None:
            self._sequence(found, path, root)
        else:
            self._object(item, path, root, is_module=category == "module")

    # -- what is inside ---------------------------------------------------------------------------------------

    def _sequence(self, item: object, path: str, root: str) -> None:
        base: Any = next(base for base in (list, tuple, deque) if is_instance(item, base))
        items = list(islice(base.__iter__(item), self.LONGEST))
        self._take(items, lambda position: f"{path}[{position}]", root)

    def _dict(self, item: Any, path: str, root: str) -> None:
        if "__builtins__" in dict.keys(item):
            return  # a namespace: it leads to everything
        both: tuple[Iterable[object], ...] = (dict.keys(item), dict.values(item))
        keys, values = map(list, both)  # one call in C: a thread may change the dict between two
        self._take(values, lambda position: f"{path}[{self._key(keys[position], path)}]", root)
        self._take(keys, lambda position: f"list({path})[{position}]", root)

    def _key(self, key: object, path: str) -> str:
        """Return how a key of the dict at ``path`` is written."""
        text = key_text(key)
        named = self.arrays.get(id(key)) if text is None else None
        if named is not None and not named.path.startswith(f"{path}["):  # an optimizer's state: its key has a name
            return named.path
        return f"<{type_name(key)}>" if text is None else text

    def _object(self, item: Any, path: str, root: str, *, is_module: bool) -> None:
        if type(item) is FunctionType:
            cells = item.__closure__ or ()
            self._take(cells, lambda position: f"{path}.__closure__[{position}]", root)
            self._take(item.__defaults__ or (), lambda position: f"{path}.__defaults__[{position}]", root)
            self._take([item.__kwdefaults__], lambda position: f"{path}.__kwdefaults__", root)
        elif type(item) is CellType:
            self._take(gc.get_referents(item), lambda position: f"{path}.cell_contents", root)
        elif self._categories[id(type(item))] == "frame":
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
        """Give the arrays of a DataFrame or Series its own name: users never write their real places."""
        for part in gc.get_referents((instance_dict(item) or {}).get("_mgr")):
            if type(part) is tuple:  # the blocks
                self._take(inside_pandas(part), lambda position: path, root)
            elif type(part) is list:  # the axes
                ends = (".index",) if len(part) == 1 else (".columns", ".index")
                for axis, end in zip(part, ends, strict=False):
                    self._take(inside_pandas(axis), lambda position, name=path + end: name, root)  # type: ignore[misc]

    def _holds_something(self, item: object) -> bool:
        return any(self._categories.get(id(type(child))) != "skip" for child in gc.get_referents(item))

    def _attributes(self, attributes: dict[str, Any], path: str, root: str, *, is_module: bool = False) -> None:
        if is_module:
            for collapsed in _COLLAPSED:
                inner = attributes.get(collapsed)
                if inner is not None and is_instance(inner, dict) and id(inner) not in self._seen:
                    self._seen[id(inner)] = inner
                    parts = dict(dict.items(inner))
                    self._take(list(parts.values()), _labels(path, list(parts)), root)
        self._take(list(attributes.values()), _labels(path, list(attributes)), root)


def _is_main(kind: object) -> bool:
    """Whether a class is the notebook's or the script's own: others are not entered."""
    return text_of(class_dict(kind).get("__module__")) == "__main__"


def _labels(path: str, names: Sequence[object]) -> Label:
    return lambda position: path + _attribute(names[position])


def _attribute(name: object) -> str:
    """Return how an attribute is written; torch numbers the parts of a sequence."""
    text = text_of(name)
    if text.isidentifier():
        return f".{text}"
    return f"[{text}]" if text.isdecimal() else f".<{text!r}>"
