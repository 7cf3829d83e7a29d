"""Finds memory of any kind that the user's code keeps in places to which no name of the notebook
leads directly.

Such places are functions (closures, defaults, caches), generators, errors, running functions, and
libraries. Everything to which names lead by items and attributes is kept on purpose.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.bulk import (
    Batch,
    by_identity,
    chunks,
    container_base,
    ids_of,
    instances_among,
    of_types,
    without_objects,
)
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.knowledge.frames import SUSPENDED, code_of, locals_of, with_tracebacks
from ipygpumem.heap.knowledge.slices import Slices, is_view
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.heap.walks.parts import cached
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_atom,
    is_exactly,
    is_instance,
    is_users,
    is_users_class,
    module_dict,
    module_of,
)
from ipygpumem.reclaim.frames import frames_of, names_in

_MOST_ELSEWHERE = 2000
"""Maximum number of large objects to measure that only libraries hold."""
_MOST_NAMED = 200_000
"""Maximum number of objects behind names to pass through before the holders are searched."""
_MOST_ITEMS_AT_ONCE = 500
"""Maximum number of items of a container that is read at once. A *wide* one has more, and waits
until all smaller ones are read: else a table of a million rows would hide the layers of a model.
"""
_MOST_TOGETHER = 20_000
"""Maximum number of items of waiting containers that are read together."""
_MODULES_OF_PYTHON = {
    "",
    "builtins",
    "types",
    "functools",
    "_asyncio",
    "asyncio",
    "contextvars",
    "_contextvars",
    "weakref",
    "_weakref",
    "logging",
}
"""Modules of classes whose objects are no plain containers: a task holds its coroutine's frame."""


KEEPER_TYPES: tuple[type, ...] = (
    FunctionType,
    functools._lru_cache_wrapper,
    *SUSPENDED,
    BaseException,
)
"""The classes of which a heap must know the ``instances`` for ``CodeKeepers``."""


class CodeKeepers:
    """The user's functions, caches, generators and errors, and the objects that they keep.

    Make it before anything is measured: it holds a second reference to each object, so that
    ``Sizes`` remembers the object and nothing counts it twice.

    Args:
        heap: the live objects, with the instances of ``KEEPER_TYPES``.

    Attributes:
        items: the functions, caches, generators and errors.
        contents: the objects in these, and those of running functions, by identity.
    """

    def __init__(self, heap: Heap) -> None:
        self.items: list[Any] = list(_users_keepers(heap))
        self.contents: dict[int, object] = {}
        for keeper in self.items:
            self.contents.update(by_identity(_contents_of(keeper)))
        self.contents.update(by_identity(heap.local))


def possible_leaks(
    keepers: CodeKeepers,
    large: Iterable[object],
    sizes: Sizes,
    names: Iterable[object],
    smallest: int,
    most: int,
) -> list[object]:
    """Return the objects that are leaks if no name leads to them: objects that the user's code
    keeps, and large ones anywhere else.

    Args:
        keepers: the functions, caches, generators and errors of the user's code.
        large: the objects that are large by themselves.
        sizes: has measured the arrays that are listed elsewhere.
        names: the objects of the notebook's names, which are no leaks.
        smallest: minimum bytes of each.
        most: maximum number of objects, the largest ones.
    """
    named_ids = set(map(id, names))
    sizes.pass_over(map(id, keepers.items))  # their contents are measured themselves
    sized = list[tuple[int, object]]()
    """The bytes of each object, and the object."""
    for key, item in keepers.contents.items():
        if key not in named_ids and (not is_atom(item) or sys.getsizeof(item) >= smallest):
            sized.append((sizes.together([item]), item))
    examined_ids = named_ids | keepers.contents.keys()
    elsewhere = (item for item in large if id(item) not in examined_ids)
    for item in islice(elsewhere, _MOST_ELSEWHERE):
        # What a large container leads to matters only if no name leads to the container, and few
        # are measured then.
        size = sys.getsizeof(item)
        if size < smallest:
            size = sizes.together([item])
        sized.append((size, item))
    return _largest_objects(sized, smallest, most)


def _largest_objects(sized: Iterable[tuple[int, object]], smallest: int, most: int) -> list[object]:
    """Return the ``most`` largest of the objects that have at least ``smallest`` bytes, in the
    order in which they were found.
    """
    large_enough = [pair for pair in sized if pair[0] >= smallest]
    largest = sorted(large_enough, key=itemgetter(0), reverse=True)[:most]
    largest_ids = {id(item) for _, item in largest}
    return [item for _, item in large_enough if id(item) in largest_ids]


def ids_behind_names(names: Iterable[object], wanted: set[int]) -> set[int]:
    """Return the ``wanted`` identities whose objects are behind names, by items and attributes
    alone.

    It does not enter functions, classes, modules, errors and other objects of Python itself that
    are no containers. It stops after ``_MOST_NAMED`` objects, so the names may lead to more of
    them.
    """
    reached_ids = set[int]()
    passed_ids = set[int]()
    types = _EnteredTypes()
    slices = Slices()
    level = list(by_identity(types.of_entered_types(list(names))).values())
    wide = list[Any]()
    """Containers with very many items, which are entered when nothing else is left to enter."""
    while (level or wide) and len(reached_ids) < len(wanted) and len(passed_ids) < _MOST_NAMED:
        reads_wide = not level  # only when nothing else is left to enter
        if reads_wide:
            level = _take_smallest(wide)
        below = dict[int, object]()
        for part in chunks(level):
            entered = part if reads_wide else _put_wide_aside(part, wide)
            referents = gc.get_referents(*entered)
            referents += slices.of(entered)
            reached_ids.update(wanted.intersection(ids_of(referents)))
            if len(passed_ids) < _MOST_NAMED:  # else this level is the last one
                passed_ids.update(map(id, part))
                below.update(by_identity(types.of_entered_types(referents)))
        for key in below.keys() & passed_ids:
            del below[key]
        level = list(below.values())
    return reached_ids


def _put_wide_aside(items: Sequence[Any], wide: list[Any]) -> Sequence[Any]:
    """Add the containers of very many items to ``wide``, and return all other items."""
    containers = of_types(CONTAINER_TYPES, items)
    # In C: most objects have a dict of attributes, and a loop would take ten times as long.
    are_wide = list(map(_MOST_ITEMS_AT_ONCE.__lt__, map(len, containers)))
    if True not in are_wide:
        return items
    wide_here = list(compress(containers, are_wide))
    wide += wide_here
    return without_objects(wide_here, items)


def _take_smallest(containers: list[Any]) -> list[Any]:
    """Remove the smallest containers from a list, and return them: as many as have
    ``_MOST_TOGETHER`` items together, but at least one.
    """
    containers.sort(key=len, reverse=True)
    smallest = [containers.pop()]
    number_of_items = len(smallest[0])
    while containers and number_of_items + len(containers[-1]) <= _MOST_TOGETHER:
        smallest.append(containers.pop())
        number_of_items += len(smallest[-1])
    return smallest


class _EnteredTypes:
    """Decides from the types of objects which ones are entered: containers, and instances of
    classes that users or libraries have defined. Their items and attributes are kept on purpose if
    they are.
    """

    def __init__(self) -> None:
        self._examined = set[int]()
        """Identities of the types about which it has decided."""
        self._entered = set[int]()
        """Identities of the types of which objects are entered."""

    def of_entered_types(self, items: Sequence[Any]) -> list[Any]:
        """Return the items that are entered."""
        batch = Batch(items)
        examples = batch.one_of_each(batch.types - self._examined)
        for type_id, example in examples.items():
            is_container = container_base(type(example)) is not None
            if is_container or _is_plain_object(example) or is_view(example):
                self._entered.add(type_id)
        self._examined |= batch.types
        return batch.of_types(self._entered)


def _is_plain_object(item: object) -> bool:
    """Return True for an instance of a class that users or libraries have defined."""
    if is_atom(item) or is_instance(item, type) or is_instance(item, BaseException):
        return False
    return module_of(item).partition(".")[0] not in _MODULES_OF_PYTHON


def count_named(
    sizes: Sizes, keepers: CodeKeepers, names: Iterable[object], modules: Iterable[ModuleType]
) -> None:
    """Count the memory to which names lead by items and attributes. It is kept on purpose, so it is
    not listed as memory without a name.

    Args:
        sizes: counts it; has measured everything that is listed elsewhere.
        keepers: the functions, caches, generators and errors of the user's code.
        names: the objects of the notebook's names.
        modules: the user's modules among the names, whose data is kept on purpose, too.
    """
    values = list(names)
    for module in modules:
        values += list(module_dict(module).values())
    for kind in instances_among(values, type):
        if is_users_class(kind):
            values += list(class_dict(kind).values())
    with sizes.passing_over(set(map(id, keepers.items))):
        sizes.pass_through(values)


def _users_keepers(heap: Heap) -> Iterator[Any]:
    """Yield the user's functions and their caches, the user's generators, and all errors that have
    a traceback: an error may have frames of the user's code.
    """
    functions = heap.instances(FunctionType)
    files = list(map(attrgetter("__code__.co_filename"), functions))
    users_files = set(filter(is_users, set(files)))
    users_functions = list(compress(functions, map(users_files.__contains__, files)))
    yield from users_functions
    function_ids = set(map(id, users_functions))
    for cache in heap.instances(functools._lru_cache_wrapper):
        attributes = instance_dict(cache) or {}
        if id(attributes.get("__wrapped__")) in function_ids:
            yield cache
    for suspended in heap.instances(*SUSPENDED):
        if is_users(code_of(suspended).co_filename):
            yield suspended
    yield from with_tracebacks(heap.instances(BaseException))


def _contents_of(keeper: Any) -> list[object]:
    """Return the objects that a function, a cache, a generator or an error keeps: default arguments
    and closure variables, cached results, local variables.
    """
    if is_instance(keeper, BaseException):
        values = list[object]()
        for frame in frames_of(keeper):
            values += names_in(frame).values()
        return values
    if is_exactly(keeper, *SUSPENDED):
        return list(locals_of(keeper).values())
    if type(keeper) is not FunctionType:
        return cached(keeper)
    values = gc.get_referents(*(keeper.__closure__ or ()))
    values += keeper.__defaults__ or ()
    values += (keeper.__kwdefaults__ or {}).values()
    values += (instance_dict(keeper) or {}).values()
    return values
