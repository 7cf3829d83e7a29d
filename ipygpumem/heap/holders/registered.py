"""Writes the steps of paths through registries of libraries, which have calls to remove objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ipygpumem.heap.arrays import is_of_library, library_type
from ipygpumem.heap.holders.cuts import Cut, Kind, split
from ipygpumem.heap.holders.path import Path
from ipygpumem.heap.holders.references_of import attribute_text, position_of
from ipygpumem.introspect import (
    is_exactly,
    is_name,
    text_of,
)


def went_into_registry(path: Path, steps: Sequence[object], names: Mapping[str, object]) -> int:
    """Append an object that a library's registry keeps; return the number of references, 0 if there
    is no registry.
    """
    if len(steps) < 3 or not path.code:
        return 0
    parent, child, item = steps[:3]
    if is_exactly(child, list) and is_of_library(parent, "logging", "Filterer"):
        return _went_into_logger(path, parent, child, item)
    if is_exactly(child, dict) and parent is library_type("weakref", "finalize"):
        return _went_into_finalizers(path, child, item)
    is_manager = is_of_library(parent, "IPython.core.events", "EventManager")
    if is_manager and is_exactly(child, dict) and is_exactly(item, list) and len(steps) > 3:
        return _went_into_callbacks(path, child, item, steps[3], names)
    return 0


def _went_into_logger(path: Path, owner: object, items: Any, item: object) -> int:
    """Append a handler or filter of a logger."""
    name = attribute_text(owner, items)
    method = {".handlers": "removeHandler", ".filters": "removeFilter"}.get(name)
    if method is None:
        return 0
    position = position_of(items, item)
    imports, code = split(path.code)
    call = f"{imports}{code}.{method}({code}{name}[{position}])"
    path.enter(
        f"{name}[{position}]",
        f"{path.code}{name}[{position}]",
        Cut(Kind.CALL, id(items), path.code, call),
    )
    return 2


def _went_into_finalizers(path: Path, registry: Any, info: object) -> int:
    """Append the arguments of a ``weakref.finalize``."""
    pairs = list(dict.items(registry))
    position = next((place for place, (_, value) in enumerate(pairs) if value is info), 0)
    imports, code = split(path.code)
    # With the semicolon, IPython keeps no output: the arguments.
    call = f"{imports}list({code}._registry)[{position}].detach();"
    path.enter(
        "._registry (arguments of a finalizer)", "", Cut(Kind.CALL, id(registry), path.code, call)
    )
    path.is_lost = True
    path.is_fixed = True
    return 2


def _went_into_callbacks(
    path: Path, callbacks: Any, functions: Any, function: object, names: Mapping[str, object]
) -> int:
    """Append a function that IPython calls at an event."""
    event = next((text_of(key) for key, value in callbacks.items() if value is functions), "")
    position = position_of(functions, function)
    place = f'.callbacks["{event}"][{position}]'
    code = f"{path.code}{place}"
    name = next(
        (name for name, value in list(names.items()) if value is function and is_name(name)), ""
    )
    imports, manager = split(path.code)
    call = f'{imports}{manager}.unregister("{event}", {name or split(code)[1]})'
    path.enter(place, code, Cut(Kind.CALL, id(functions), path.code, call))
    return 3
