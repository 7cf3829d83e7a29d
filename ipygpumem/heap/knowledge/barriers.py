"""Stops walks at objects that lead to everything, such as modules: behind ``numpy`` is no object
of the user.

Walks do not enter:

- Imported modules and their namespaces: each function leads to the globals of its module.
- Classes that can be imported, and those of the notebook: each instance leads to its class.
- Code, running frames, and frames of IPython's and our own functions.
- Objects of IPython, ipykernel and this package: they lead to the shell, and so to all outputs.
- Event loops: each task leads to its loop, and the loop to all tasks.
- Loggers, which the logging module keeps: each leads to all loggers, and many objects to one.
- The heap of multiprocessing: each shared array leads to all of them.
- The values of the current context's variables: each copy of the context leads to them.

A module or class that nothing but some objects refers to is none of these: the walk enters it. Such
are the globals of ``runpy.run_path``, and a class made in a function.

The walks from names to arrays (heap/walks/walk.py) ask only ``types_not_entered`` and
``is_of_tool``, not ``Barriers``: they enter loggers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import contains
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from ipygpumem.heap.bulk import (
    by_identity,
    of_types,
    one_of_each,
    types_of,
    without_ids,
    without_types,
)
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.kinds.arrays import is_of_library, library_type
from ipygpumem.heap.knowledge.frames import frame_of, is_not_of_kernel, running_ids
from ipygpumem.heap.knowledge.tasks import storage_of_context
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    is_made_by_statement,
    is_users_class,
    loaded_modules,
    module_dict,
    module_dicts,
    module_of,
    name_of,
    text_of,
)

TOOLS = {"IPython", "ipykernel", "ipygpumem"}
"""Libraries whose objects lead to the shell, and so to all outputs."""
NOT_ENTERED = (FrameType, CodeType, TracebackType)
"""Types that no search for arrays by name enters, because they lead to objects of every owner.

``Barriers`` decides about each frame instead: it enters those of suspended generators.
"""
_FUNCTION = {id(FunctionType)}
_FRAME = {id(FrameType)}


class Barriers:
    """The objects that one walk does not enter.

    Objects are known by their identities, because all of them stay alive during a look.

    Args:
        namespaces: identities of further dicts that are not entered, because they contain the
            user's names.

    Attributes:
        passed_over: identities of the namespaces, and of further objects that are not entered.
    """

    def __init__(self, namespaces: Iterable[int] = ()) -> None:
        modules = loaded_modules()
        storages = storage_of_context()
        self._modules: set[int] = set(map(id, modules))
        self.passed_over: set[int] = {*namespaces, *map(id, module_dicts(modules))}
        self.passed_over.update(map(id, [sys.modules, *storages]))
        self._running: set[int] = running_ids()
        self._storages = storages
        """Kept alive, so that their identities are not reused."""
        self._classified_types: set[int] = set()
        """Identities of the types that ``_classify`` has met."""
        self._closed_types: set[int] = set()
        """Types of which no object is entered."""
        self._examined_types: set[int] = set()
        """Types of which some objects are entered: modules, classes, frames and loggers."""
        self._loggers: set[int] = set()
        """The loggers that the logging module keeps, once ``_classify`` has met one."""
        self._verdicts: dict[int, bool] = {}
        """True for each module, class, frame or logger that may be entered, by identity."""

    def open(self, objects: Sequence[object]) -> None:
        """Let walks enter these modules, classes or frames, because they begin there: the user
        asks about them.
        """
        self.enterable(objects)  # for its effect: it classifies their types
        self._verdicts.update(dict.fromkeys(map(id, objects), True))

    def open_suspended(self, suspended: Sequence[Any]) -> None:
        """Let walks enter the frames of generators and coroutines that do not run, also those of
        libraries, such as of ``asyncio.sleep``.

        Up to Python 3.10, a generator refers to its frame. Later versions report the objects in the
        frame as the generator's own.
        """
        frames = filter(None, map(frame_of, suspended))
        for frame in frames:
            if id(frame) not in self._running:
                self._verdicts[id(frame)] = True

    def enterable(self, objects: Sequence[Any]) -> Sequence[Any]:
        """Return the objects that a walk enters, without those at which it stops.

        Types and namespaces that the walk meets for the first time are classified.
        """
        type_ids = types_of(objects)
        if not type_ids <= self._classified_types:
            self._classify(objects)
        if not self._closed_types.isdisjoint(type_ids):
            objects = without_types(self._closed_types, objects)
        if not _FUNCTION.isdisjoint(type_ids):
            functions = of_types(_FUNCTION, objects)
            self._close_namespaces(function.__globals__ for function in functions)
        if not _FRAME.isdisjoint(type_ids):
            self._close_namespaces(frame.f_globals for frame in of_types(_FRAME, objects))
        if not self._examined_types.isdisjoint(type_ids):
            examined = of_types(self._examined_types, objects)
            objects = _objects_without(self._refused(examined), objects)
        return _objects_without(self.passed_over, objects)

    def _classify(self, objects: Sequence[object]) -> None:
        """Classify the new types of objects: walks enter all objects of a type, none, or some."""
        loop = library_type("asyncio", "AbstractEventLoop")
        for type_id, example in one_of_each(objects).items():
            if type_id in self._classified_types:
                continue
            self._classified_types.add(type_id)
            is_loop = loop is not None and is_instance(example, loop)
            if is_loop or is_instance(example, CodeType) or _leads_to_shell(example):
                self._closed_types.add(type_id)
            elif any(is_instance(example, kind) for kind in (ModuleType, type, FrameType)):
                self._examined_types.add(type_id)
            elif any(is_of_library(example, *kind) for kind in _LEADING_TO_ALL):
                self._closed_types.add(type_id)
            elif is_of_library(example, "logging", "Logger"):
                self._examined_types.add(type_id)
                self._loggers = _registered_loggers()

    def _close_namespaces(self, namespaces: Iterable[dict[str, object]]) -> None:
        """Let walks pass over the globals of functions or frames, if they are those of a module.

        A name decides, not the identity: IPython's ``%run`` executes a file in a module that is not
        imported, but that has the name of one, ``__main__``.
        """
        for key, namespace in by_identity(list(namespaces)).items():
            if text_of(dict.get(namespace, "__name__")) in sys.modules:
                self.passed_over.add(key)

    def _refused(self, objects: Sequence[object]) -> set[int]:
        """Return the identities of the objects not to enter, among modules, classes, frames and
        loggers.
        """
        for key, item in by_identity(objects).items():
            if key not in self._verdicts:
                self._verdicts[key] = self._may_enter(item)
        return {key for key in map(id, objects) if not self._verdicts[key]}

    def _may_enter(self, item: Any) -> bool:
        """Return True if a walk enters a module, class, frame or logger."""
        if is_instance(item, FrameType):
            return id(item) not in self._running and is_not_of_kernel(item)
        if is_instance(item, ModuleType):
            return id(item) not in self._modules
        if is_of_library(item, "logging", "Logger"):
            return id(item) not in self._loggers
        return _is_made_at_run_time(item)


def _registered_loggers() -> set[int]:
    """Return the identities of the loggers that the logging module keeps: the root, and those made
    by ``logging.getLogger(name)``.
    """
    kind: Any = library_type("logging", "Logger")
    if kind is None:
        return set()
    loggers = (instance_dict(kind.manager) or {}).get("loggerDict", {})
    return {id(kind.root), *map(id, list(loggers.values()))}


def _objects_without(identities: set[int], objects: Sequence[Any]) -> Sequence[Any]:
    """Return the objects without those that have one of the identities."""
    if identities.isdisjoint(map(id, objects)):
        return objects
    return without_ids(identities, objects)


_LEADING_TO_ALL = (
    ("logging", "Manager"),
    ("multiprocessing.heap", "Arena"),
    ("multiprocessing.heap", "Heap"),
)
"""Types of objects that lead to all objects of their library: all loggers, all shared blocks."""
_DATA_OF_TOOLS = ("IPython.core.display", "IPython.lib.display", "IPython.utils.capture")
"""Modules of IPython whose objects are the user's data, such as images and captured output."""


def is_of_tool(item: object) -> bool:
    """Return True for an object of IPython, ipykernel or this package."""
    return module_of(item).partition(".")[0] in TOOLS


def is_of_this_package(item: object) -> bool:
    """Return True for an object of a class of this package."""
    return module_of(item).partition(".")[0] == "ipygpumem"


def recorders_of_cells(objects: Sequence[Any]) -> list[Any]:
    """Return the objects among many that record cells: those of this package, and IPython's
    history. Also return the containers that are their attributes.

    They grow with every cell, and are not the user's.
    """
    types_of_ours, types_of_history = set[int](), set[int]()
    for type_id, example in one_of_each(objects).items():
        if is_of_this_package(example):
            types_of_ours.add(type_id)
        elif module_of(example) == "IPython.core.history":
            types_of_history.add(type_id)
    ours = of_types(types_of_ours, objects)
    containers = of_types(CONTAINER_TYPES, gc.get_referents(*ours))
    # Our objects also refer to the user's namespace, which is no record.
    namespaces = set(map(id, globals_among(containers)))
    traits = list[Any]()
    for history in of_types(types_of_history, objects):
        traits.append((instance_dict(history) or {}).get("_trait_values"))
    return [*ours, *_objects_without(namespaces, containers), *filter(None, traits)]


def _leads_to_shell(item: object) -> bool:
    """Return True for an object of a tool that is no data of the user, such as an image."""
    return is_of_tool(item) and module_of(item) not in _DATA_OF_TOOLS


def types_not_entered() -> tuple[Any, ...]:
    """Return the types that no search for arrays by name enters: ``NOT_ENTERED``, and event loops,
    each of which leads to all tasks.
    """
    loop = library_type("asyncio", "AbstractEventLoop")
    return NOT_ENTERED if loop is None else (*NOT_ENTERED, loop)


def are_globals(names: Any) -> bool:
    """Return True for a dict with the globals of a module or notebook, which lead to everything."""
    return dict.__contains__(names, "__builtins__")


def globals_among(items: Sequence[Any]) -> list[Any]:
    """Return the dicts among many objects for which ``are_globals`` is True; a loop in C."""
    dicts: list[Any] = of_types({id(dict)}, items)
    return list(compress(dicts, map(contains, dicts, repeat("__builtins__"))))


def is_never_followed(item: Any) -> bool:
    """Return True for an object whose content is never counted, even if a name of the user refers
    to it, such as the module ``numpy`` or a class of a library.
    """
    if is_instance(item, ModuleType):
        name = text_of(module_dict(item).get("__name__"))
        return item is sys.modules.get(name)
    if is_instance(item, type):
        return not (is_users_class(item) or _is_made_at_run_time(item))
    is_loop = is_of_library(item, "asyncio", "AbstractEventLoop")
    return is_loop or is_instance(item, CodeType) or _leads_to_shell(item)


def without_never_followed(items: Sequence[Any]) -> Sequence[Any]:
    """Return the items for which ``is_never_followed`` is False.

    For many items it is fast: the answer is the same for all objects of a type, except modules and
    classes.
    """
    never_followed = set[int]()
    for type_id, example in one_of_each(items).items():
        if is_instance(example, ModuleType) or is_instance(example, type):
            for item in of_types({type_id}, items):
                if is_never_followed(item):
                    never_followed.add(id(item))
        elif is_never_followed(example):
            never_followed.update(map(id, of_types({type_id}, items)))
    if not never_followed:
        return items
    return [item for item in items if id(item) not in never_followed]


def _is_made_at_run_time(kind: type) -> bool:
    """Return True for a class of the user that its module does not have: a function made it, or
    ``exec``.

    ``exec`` without a ``__name__`` makes classes that claim to be of ``builtins``. A class inside a
    class counts, too: it is part of that one. A library's own class never counts, because all of
    its objects may share one, such as the named tuple of ``functools.lru_cache``.
    """
    if not is_made_by_statement(kind):
        return False
    name = text_of(class_dict(kind).get("__module__"))
    module: Any = sys.modules.get(name)
    if name == "builtins" or not is_instance(module, ModuleType):
        return True
    return is_users_class(kind) and module_dict(module).get(name_of(kind)) is not kind
