"""Walks forward from objects to the tensors and arrays behind them, many objects at a time, up to a limit.

No code of the user's runs: the collector tells what an object refers to, or attributes are read from instance dicts
and slots, and containers through their base class. Modules, and classes from elsewhere, are not entered: what lies
behind them belongs to everybody.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, count, islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from ipygpumem.introspect import (
    HAS_REFERENCES,
    class_dict,
    instance_dict,
    is_instance,
    key_text,
    module_of,
    text_of,
    type_name,
)
from ipygpumem.model import Held
from ipygpumem.objects.arrays import (
    NOT_ENTERED,
    TOOLS,
    Array,
    describe,
    elements,
    flat_elements,
    holding_objects,
    inside_pandas,
    library_type,
    slot_descriptors,
    slots,
)
from ipygpumem.objects.bulk import CHUNK, by_identity, chunks, of_types, one_of_each, types_of
from ipygpumem.objects.progress import Progress, unseen

MOST_OBJECTS = 300_000
"""How many objects that are no arrays one walk looks into."""
MOST_AT_START = 50_000
"""How many at the start of an experiment, which nobody is to wait for."""
MOST_KEPT = 1_000_000
"""How many a walk looks into that misses none without harm to the user's objects."""
_LONGEST = 10_000_000
"""How many items of one container."""
_MANY = 20_000
"""A container of more comes last where there are no paths: a list of a million must not hide what is beside it."""
_AT_ONCE = 500
_FEW = 100
"""More objects than that are looked into at once before any of them gets a path: most that are many lead nowhere."""
_LEVELS = 4
_WIDEST = 100_000
"""So many objects are looked at, at most, to see that."""
_REPORTED_AFTER = 250
"""So many objects are looked into before it is said how far the walk is."""

_FUNCTION = {id(FunctionType)}
_SIZED = {id(kind) for kind in (list, tuple, dict, set, frozenset)}
_ARRAYS = {"tensor": ("torch", "Tensor"), "ndarray": ("numpy", "ndarray"), "jax": ("jax._src.array", "ArrayImpl")}

Label = Callable[[int], str]
"""Returns the path to the item at a position."""
Group = tuple[Sequence[Any], "Label | None"]
"""Some objects, and their paths."""


class Walk:
    """Finds the arrays behind objects, the nearest first, each once over the life of the walk.

    This one follows what the collector says, without paths. It keeps what it finds alive: use it, then drop it.

    Args:
        limit: how many objects that are no arrays are looked into.
        find: the kinds of arrays; others are looked into.
        classes: the modules whose classes are entered.
        patience: if so many objects behind a long container's items, in a row, lead to no array, or four times as many
            items are plain numbers and the like, the rest of it is left out.

    Attributes:
        complete: whether everything was seen.
        paths: those of arrays, by identity.
        left: how many objects may still be looked into.
        seen: identities of all that was looked into, and of arrays.
    """

    def __init__(
        self,
        limit: int = MOST_OBJECTS,
        find: Iterable[str] = tuple(_ARRAYS),
        classes: Collection[str] = (),
        patience: int | None = None,
    ) -> None:
        self.complete, self.left, self.paths = True, limit, dict[int, str]()
        self._limit, self._patience, self._own = limit, patience, classes
        self._bases = [(library_type(*_ARRAYS[name]), name) for name in find]
        self._kinds: dict[str, set[int]] = {name: set() for name in (*_ARRAYS, "leading", "class", "module", "skip")}
        """Identities of types, by what to do with their objects."""
        self._types: set[int] = set()
        self._arrays: set[int] = set()
        self._dicts: set[int] = set()
        self.seen: set[int] = set()
        self._kept: list[Sequence[object]] = []
        """As long as they live here, no identity can come to mean something new."""
        self._long: deque[Any] = deque()
        self._size = 1
        self._progress: Progress = unseen

    def run(self, groups: Iterable[Group]) -> Iterator[list[Any]]:
        """Yield the arrays among objects and behind them, some at a time, those in long containers last."""
        yield from self._run(groups)
        while self._long:
            left, self.left = self.left, self.left // len(self._long)
            rest = left - self.left
            yield from self._go_through(self._long.popleft())
            self.left += rest

    def pass_over(self, *items: object) -> None:
        """Do not look into these, wherever they are found; the caller keeps them alive meanwhile."""
        self.seen.update(map(id, items))

    def of_kind(self, kind: str, items: Sequence[Any]) -> list[Any]:
        """Return the items of a kind, of which the walk has seen the types."""
        return of_types(self._kinds[kind], items)

    def drop(self) -> None:
        """Let go of all objects."""
        self._kept.clear()

    # -- what differs from walk to walk -----------------------------------------------------------------------

    def kind_of(self, item: object) -> str:
        """Return what to do with objects of the type of ``item``: one of ``_kinds``."""
        array = next((name for base, name in self._bases if base is not None and is_instance(item, base)), None)
        if array is not None:
            return array
        if is_instance(item, type):
            return "class"
        if is_instance(item, ModuleType):
            return "module"
        may_refer = type.__dict__["__flags__"].__get__(type(item)) & HAS_REFERENCES
        is_foreign = module_of(item).partition(".")[0] in TOOLS or any(is_instance(item, base) for base in NOT_ENTERED)
        return "leading" if may_refer and not is_foreign else "skip"

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays that lead to more: by attributes of a subclass, or elements that are objects."""
        tensors = self.of_kind("tensor", arrays) if self._kinds["tensor"] else []
        found = [tensor for tensor in tensors if len(gc.get_referents(tensor)) > 1]
        ndarrays = self.of_kind("ndarray", arrays)
        with_objects = compress(ndarrays, holding_objects(ndarrays))
        return found + list(by_identity([*with_objects, *filter(gc.is_tracked, ndarrays)]).values())

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield what is in some objects; those with a path come one at a time."""
        several = types_of(objects)
        for function in of_types(_FUNCTION, objects) if several >= _FUNCTION else ():  # a namespace leads to everything
            self.seen.add(id(function.__globals__))
        sized: list[Any] = of_types(_SIZED, objects)
        later = {id(item): item for item, size in zip(sized, map(len, sized), strict=True) if size > _MANY}
        self._long += later.values()
        yield gc.get_referents(*(item for item in objects if id(item) not in later) if later else objects), None
        for array in () if self._kinds["ndarray"].isdisjoint(several) else self.of_kind("ndarray", objects):
            inside = flat_elements(array)
            self.complete &= inside is not None or not all(holding_objects([array]))
            yield inside or (), None

    # -- how ------------------------------------------------------------------------------------------------------

    def _run(self, groups: Iterable[Group]) -> Iterator[list[Any]]:
        queue: deque[tuple[Sequence[Any], str]] = deque()
        for items, label in chain(groups, self._inside(queue)):
            for start, part in zip(count(0, CHUNK), chunks(items)):
                arrays, leading = self._sift(part, with_paths=label is not None)
                if label is None:
                    queue.extend((some, "") for some in chunks(leading, _AT_ONCE))
                elif arrays or leading:
                    from_last = range(start + len(part) - 1, start - 1, -1)
                    places = dict(zip(map(id, reversed(part)), from_last, strict=True))
                    leading.sort(key=lambda item: places[id(item)])
                    self.paths.update([(id(item), label(places[id(item)])) for item in arrays])
                    queue.extend([([item], label(places[id(item)])) for item in leading])
                if arrays:
                    yield arrays

    def _inside(self, queue: deque[tuple[Sequence[Any], str]]) -> Iterator[Group]:
        for entered in count():
            if not queue:
                return
            if not entered % _REPORTED_AFTER:
                self._progress((self._limit - self.left) / max(1, min(self._limit, self._size)))
            try:
                yield from self.enter(*queue.popleft())
            except RuntimeError:  # a thread changes a container while we look: its rest is not seen
                self.complete = False

    def _go_through(self, container: Any) -> Iterator[list[Any]]:
        """Follow the items of a long container, as long as arrays are among them or behind them."""
        plain = barren = 0
        for some in _pieces(container):
            left, found = self.left, False
            for arrays in self._run([(some, None)]):
                found = True
                yield arrays
            if found or self._patience is None:
                plain = barren = 0
                continue
            plain += len(some) if left == self.left else 0
            barren += left - self.left
            self.complete &= barren < self._patience
            if plain >= 4 * self._patience or barren >= self._patience:
                return

    def _sift(self, items: Sequence[Any], *, with_paths: bool) -> tuple[list[Any], list[Any]]:
        """Return the arrays among ``items``, and what may lead to more; only what was not seen before."""
        several = self._sort(items)
        arrays, leading = list[Any](), list[Any]()
        if not self._arrays.isdisjoint(several):
            arrays = self._new(of_types(self._arrays, items))
            leading += self.that_lead_on(arrays)
            self._kept.append(arrays)
        if not self._kinds["leading"].isdisjoint(several):
            others = self.of_kind("leading", items)
            if with_paths:  # a module has many empty dicts
                others = [item for item in others if id(type(item)) not in self._dicts or dict.__len__(item)]
            if not with_paths or len(others) < _FEW or self._may_lead_on(others):
                leading += self._new(others)
        if self._own and not self._kinds["class"].isdisjoint(several):
            leading += filter(self._is_own, self._new(self.of_kind("class", items)))
        if len(leading) > self.left:
            self.complete = False
            del leading[max(0, self.left) :]
        self.left -= len(leading)
        self._kept.append(leading)
        return arrays, leading

    def _sort(self, items: Sequence[object]) -> set[int]:
        """Return the types of ``items``, of which it is known by then what to do with their objects."""
        several = types_of(items)
        if not several <= self._types:
            for key, item in one_of_each(items).items():
                if key not in self._types:
                    self._types.add(key)
                    kind = self.kind_of(item)
                    self._kinds[kind].add(key)
                    if is_instance(item, dict):
                        self._dicts.add(key)
                    if kind in _ARRAYS:
                        self._arrays.add(key)
        return several

    def _new(self, items: Sequence[Any]) -> list[Any]:
        by_key = by_identity(items)
        new = by_key.keys() - self.seen
        self.seen |= new
        return list(by_key.values()) if len(new) == len(by_key) else [by_key[key] for key in by_key if key in new]

    def _is_own(self, kind: object) -> bool:
        return text_of(class_dict(kind).get("__module__")) in self._own

    def _may_lead_on(self, items: Sequence[object]) -> bool:
        """Whether there may be arrays behind ``items`` that nothing else leads to; many are looked into at once."""
        level: Sequence[object] = items
        for _ in range(_LEVELS):
            referents = gc.get_referents(*level)
            several = self._sort(referents)
            leads_on = not several.isdisjoint(self._kinds["leading"] | self._kinds["class"])
            if not self._arrays.isdisjoint(several) or (leads_on and len(referents) > _WIDEST):
                return True
            own = types_of(level)  # an object refers to its class, which has a name of its own
            leading = by_identity(self.of_kind("leading", referents))
            classes = by_identity(self.of_kind("class", referents))
            leading.update((key, kind) for key, kind in classes.items() if key not in own and self._is_own(kind))
            level = [item for key, item in leading.items() if key not in self.seen]
            if not level:
                return False
        return True


def _pieces(container: Any) -> Iterator[Sequence[Any]]:
    """Yield what a list, tuple, dict or set holds, some at a time."""
    if type(container) is list or type(container) is tuple:
        yield from chunks(container)
        return
    items = chain.from_iterable(container.items()) if type(container) is dict else iter(container)
    with contextlib.suppress(RuntimeError):  # a thread changes it while we look
        while some := list(islice(items, CHUNK)):
            yield some


# -- with their sizes -----------------------------------------------------------------------------------------------


class ArraySearch(Walk):
    """Finds the tensors and arrays that objects hold, each memory once; none behind an array, and none of a class's.

    Args:
        leaves_out: says of an array whether its memory is of no interest.
    """

    def __init__(self, leaves_out: Callable[[object, Array], bool] = lambda item, array: False) -> None:
        super().__init__(find=("tensor", "ndarray"))
        self._leaves_out = leaves_out
        self._storages: set[tuple[str, int]] = set()
        self._found: list[tuple[object, Array]] = []

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return wrappers, whose memory is that of the tensors inside them; note the others."""
        pairs = [(item, describe(item)) for item in arrays]
        self._found += [(item, array) for item, array in pairs if array is not None]
        return [item for item, array in pairs if array is None]

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield what is in some objects, but in no namespace."""
        spaces = [item for item in of_types({id(dict)}, objects) if "__builtins__" in item]
        self.pass_over(*spaces)
        keys = set(map(id, spaces))
        yield from super().enter([item for item in objects if id(item) not in keys] if keys else objects, path)

    def find(self, value: object) -> Iterator[tuple[object, Array]]:
        """Yield the arrays that ``value`` is or refers to and that no earlier call has found."""
        rest, self.left = self.left, min(self.left, MOST_OBJECTS // 3)
        rest -= self.left
        for _ in self.run([([value], None)]):
            found, self._found = self._found, []
            for item, array in found:
                if array.storage not in self._storages:
                    self._storages.add(array.storage)
                    if not self._leaves_out(item, array):
                        yield item, array
        self.left += rest
        self.drop()

    def ignore(self, value: object) -> None:
        """Leave the memory of ``value`` out if it is an array itself: views of it are not found either."""
        array = describe(value)
        if array is not None:
            self._storages.add(array.storage)

    def held(self, name: str, value: object, *, function: str = "", line: int = 0) -> tuple[Held, list[object]] | None:
        """Return what ``name`` holds, and the arrays themselves; None if that is nothing new."""
        pairs = list(self.find(value))
        if not pairs:
            return None
        arrays = [array for _, array in pairs]
        held = Held(
            name=name,
            type_name=type_name(value),
            shape=arrays[0].shape if describe(value) is not None else None,
            dtype=", ".join(sorted({array.dtype for array in arrays})),
            device=", ".join(sorted({array.device for array in arrays})),
            size_bytes=sum(array.size_bytes for array in arrays),
            arrays=len(arrays),
            function=function,
            line=line,
        )
        return held, [item for item, _ in pairs]


# -- with their paths -----------------------------------------------------------------------------------------------

_COLLAPSED = ("_parameters", "_buffers", "_modules")
"""Dicts of torch's modules that users never write: ``model.weight`` is in one of them."""
_CONTAINERS: tuple[tuple[type, str], ...] = (
    *((kind, "sequence") for kind in (list, tuple, deque)),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "set"),
    (FunctionType, "function"),
    (CellType, "cell"),
    (MethodType, "method"),
    (functools.partial, "partial"),
    (type, "class"),
)


class Names(Walk):
    """Finds arrays under names, by their shortest paths.

    Args:
        size: how many objects there are in all; more is not behind the names, or only by several ways.
        progress: gets how much has been looked at.
        limit: how many objects that are no arrays are looked into.
    """

    def __init__(self, size: int = 1, progress: Progress = unseen, limit: int | None = None) -> None:
        super().__init__(MOST_OBJECTS if limit is None else limit, classes={"__main__"})
        self._size, self._progress = max(size, 1), progress
        self._slots: dict[int, dict[str, Any]] = {}
        """By a type's identity, what ``slot_descriptors`` gives."""
        known = (("torch.nn", "Module", "module"), ("pandas", "DataFrame", "frame"), ("pandas", "Series", "frame"))
        bases = [*((*_ARRAYS[name], name) for name in ("tensor", "ndarray")), *known]
        found = [(library_type(module, name), category) for module, name, category in bases]
        self._ways = [*((base, category) for base, category in found if base is not None), *_CONTAINERS]
        self._categories: dict[int, str] = {}
        """By a type's identity, how to look into its objects."""

    def named(self, roots: Iterable[tuple[str, object]]) -> dict[int, Any]:
        """Return the arrays behind names and their objects, by identity; those on the shortest paths first."""
        groups = (([value], [name].__getitem__) for name, value in roots)
        return {id(item): item for arrays in self.run(groups) for item in arrays}

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield what is in an object, and the paths to it."""
        (item,) = objects
        category = self._categories.get(id(type(item)))
        if category is None:
            category = next((category for base, category in self._ways if is_instance(item, base)), "object")
            self._categories[id(type(item))] = category
        if category == "sequence":
            base: Any = next(base for base in (list, tuple, deque) if is_instance(item, base))
            yield list(islice(base.__iter__(item), _LONGEST)), lambda position: f"{path}[{position}]"
        elif category == "dict":
            yield from self._dict(item, path)
        elif category == "set":
            base = set if is_instance(item, set) else frozenset
            yield list(islice(base.__iter__(item), _LONGEST)), lambda position: f"{path}{{…}}"
        elif category == "class":
            yield from self._attributes(dict(class_dict(item)), path)
        elif category == "ndarray" and (found := elements(item)) is not None:
            yield found, lambda position: f"{path}[{position}]"
        else:
            yield from self._object(item, category, path)

    def _dict(self, item: Any, path: str) -> Iterator[Group]:
        if "__builtins__" in dict.keys(item):
            return  # a namespace: it leads to everything
        both: tuple[Iterable[object], ...] = (dict.keys(item), dict.values(item))
        keys, values = map(list, both)  # one call in C: a thread may change the dict between two
        yield values, lambda position: f"{path}[{self._key(keys[position], path)}]"
        yield keys, lambda position: f"list({path})[{position}]"

    def _key(self, key: object, path: str) -> str:
        """Return how a key of the dict at ``path`` is written."""
        text = key_text(key)
        named = self.paths.get(id(key)) if text is None else None
        if named is not None and not named.startswith(f"{path}["):  # an optimizer's state: its key has a name
            return named
        return f"<{type_name(key)}>" if text is None else text

    def _object(self, item: Any, category: str, path: str) -> Iterator[Group]:
        yield from self._fields(item, category, path)
        # A dict that is asked for is made, and stays: only objects that hold more than numbers and text are asked.
        if self._kinds["skip"].issuperset(types_of(gc.get_referents(item))):
            return
        attributes = instance_dict(item) or {}
        self.pass_over(*[attributes] * bool(attributes))
        for name in _COLLAPSED if category == "module" else ():
            inner = attributes.get(name)
            if inner is not None and is_instance(inner, dict) and id(inner) not in self.seen:
                self.pass_over(inner)
                yield from self._attributes(dict(dict.items(inner)), path)
        yield from self._attributes(attributes, path)
        if category != "function":  # its slots lead to its module's names
            kind = id(type(item))
            if kind not in self._slots:
                self._slots[kind] = slot_descriptors(type(item))
            yield from self._attributes(slots(item, self._slots[kind]), path)

    def _fields(self, item: Any, category: str, path: str) -> Iterator[Group]:
        if category == "function":
            yield item.__closure__ or (), lambda position: f"{path}.__closure__[{position}]"
            yield item.__defaults__ or (), lambda position: f"{path}.__defaults__[{position}]"
            yield [item.__kwdefaults__], lambda position: f"{path}.__kwdefaults__"
        elif category == "cell":
            yield gc.get_referents(item), lambda position: f"{path}.cell_contents"
        elif category == "frame":
            yield from self._frame(item, path)
        elif category == "method":
            yield [item.__self__, item.__func__], _labels(path, ["__self__", "__func__"])
        elif category == "partial":
            names = ["func", "args", "keywords"]
            yield [functools.partial.__dict__[name].__get__(item) for name in names], _labels(path, names)

    def _frame(self, item: object, path: str) -> Iterator[Group]:
        """Give the arrays of a DataFrame or Series its own name: users never write their real places."""
        for part in gc.get_referents((instance_dict(item) or {}).get("_mgr")):
            if type(part) is tuple:  # the blocks
                yield inside_pandas(part), _same(path)
            elif type(part) is list:  # the axes
                ends = (".index",) if len(part) == 1 else (".columns", ".index")
                for axis, end in zip(part, ends, strict=False):
                    yield inside_pandas(axis), _same(path + end)

    def _attributes(self, attributes: dict[str, Any], path: str) -> Iterator[Group]:
        yield list(attributes.values()), _labels(path, list(attributes))


def _same(path: str) -> Label:
    return lambda position: path


def _labels(path: str, names: Sequence[object]) -> Label:
    return lambda position: path + _attribute(names[position])


def _attribute(name: object) -> str:
    """Return how an attribute is written; torch numbers the parts of a sequence."""
    text = text_of(name)
    if text.isidentifier():
        return f".{text}"
    return f"[{text}]" if text.isdecimal() else f".<{text!r}>"
