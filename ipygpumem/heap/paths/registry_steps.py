"""Writes the steps of paths through registries of libraries, from which calls remove objects, such
as ``logger.removeHandler(handler)``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ipygpumem.heap.kinds.arrays import is_of_library, library_type
from ipygpumem.heap.paths.cuts import Cut, Kind, as_one_cut, condition_of, split
from ipygpumem.heap.paths.figure_steps import append_figure_step
from ipygpumem.heap.paths.items_and_attributes import position_of
from ipygpumem.heap.paths.loggers import append_logger_step, is_filterer
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import (
    class_dict,
    is_exactly,
    is_name,
    text_of,
)


def append_registry_step(path: Path, steps: Sequence[object], names: Mapping[str, object]) -> int:
    """Append an object that a registry of Python or a library keeps, such as a handler of a logger;
    return the number of references, 0 if the first object is no registry.

    Args:
        path: the path to the registry.
        steps: the registry, and the objects after it.
        names: the user's names.
    """
    if not path.code:
        return 0
    if type(steps[0]) is threading.local:
        return _append_attribute_of_thread(path, steps)
    if is_of_library(steps[0], "sqlite3", "Connection"):
        return _append_row_factory(path, steps)
    in_figure = append_figure_step(path, steps)
    if in_figure:
        return in_figure
    if len(steps) < 3:
        return 0
    parent, child, item = steps[:3]
    if is_exactly(child, list) and is_filterer(parent):
        return append_logger_step(path, parent, child, item)  # type: ignore[arg-type]  # a list
    if is_exactly(child, dict) and parent is library_type("weakref", "finalize"):
        return _append_finalizer(path, child, item)
    is_manager = is_of_library(parent, "IPython.core.events", "EventManager")
    if is_manager and is_exactly(child, dict) and is_exactly(item, list) and len(steps) > 3:
        return _append_callback(path, child, item, steps[3], names)
    return 0


def _append_attribute_of_thread(path: Path, steps: Sequence[object]) -> int:
    """Append an attribute that this thread has in a ``threading.local``; return the number of
    references, 0 if another thread has it, whose attributes code cannot reach here.
    """
    names = vars(steps[0])
    for taken, item in enumerate(steps[1:], start=1):
        cuts = list[Cut]()
        for name, value in list(names.items()):
            if value is item and is_name(text_of(name)):
                target = f"{path.code}.{name}"
                cuts.append(Cut(Kind.ATTRIBUTE, id(steps[0]), path.code, target))
        if cuts:
            target = cuts[0].target
            path.append_removable(target.removeprefix(path.code), target, as_one_cut(cuts))
            return taken
        if not is_exactly(item, dict):
            return 0
    return 0


def _append_row_factory(path: Path, steps: Sequence[object]) -> int:
    """Append the ``row_factory`` of a connection to a database; return 1, the number of references,
    or 0 for any other object.
    """
    connection = steps[0]
    base: Any = library_type("sqlite3", "Connection")
    # A property of a subclass with this name would run the user's code.
    if steps[1] is class_dict(base)["row_factory"].__get__(connection):
        target = f"{path.code}.row_factory"
        cut = Cut(Kind.ATTRIBUTE, id(connection), path.code, target)
        path.append_removable(".row_factory", target, cut)
        return 1
    return 0


def _append_finalizer(path: Path, registry: Any, info: object) -> int:
    """Append the arguments of a ``weakref.finalize``; return 2, the number of references.

    Args:
        path: the path to the class ``finalize``.
        registry: its dict of all finalizers.
        info: the value in it, which refers to the arguments.
    """
    keys = [key for key, value in list(dict.items(registry)) if value is info]
    imports, code = split(path.code)
    # With the semicolon, IPython keeps no output: the arguments.
    condition = f"id(item) == {id(keys[0])}" if keys else "False"
    call = f"{imports}[item.detach() for item in list({code}._registry) if {condition}];"
    path.append_removable(
        "._registry (arguments of a finalizer)", "", Cut(Kind.CALL, id(registry), path.code, call)
    )
    path.text.is_lost = True
    path.is_fixed = True
    return 2


def _append_callback(
    path: Path, callbacks: Any, functions: Any, function: object, names: Mapping[str, object]
) -> int:
    """Append a function that IPython calls at an event; return 3, the number of references.

    Args:
        path: the path to the manager of IPython's events.
        callbacks: the manager's lists of functions by event.
        functions: the list with the function.
        function: the function.
        names: the user's names, one of which may be the function's.
    """
    event = next((text_of(key) for key, value in callbacks.items() if value is functions), "")
    position = position_of(functions, function)
    step = f'.callbacks["{event}"][{position}]'
    code = f"{path.code}{step}"
    name = next(
        (name for name, value in list(names.items()) if value is function and is_name(name)), ""
    )
    imports, manager = split(path.code)
    if name or len(functions) == 1:
        call = f'{manager}.unregister("{event}", {name or split(code)[1]})'
    else:  # a position would be that of another function once a line has removed an earlier one
        condition = condition_of(function, functions, "item")
        registered = f'{manager}.callbacks["{event}"][:]'
        call = f'[{manager}.unregister("{event}", item) for item in {registered} if {condition}];'
    cut = Cut(Kind.CALL, id(functions), path.code, f"{imports}{call}")
    path.append_removable(step, code, cut)
    return 3
