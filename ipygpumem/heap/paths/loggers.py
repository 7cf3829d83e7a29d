"""Finds loggers, which the logging module keeps, with their handlers and filters, and writes the
lines that remove these: ``logging.getLogger("x").removeHandler(handler)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

from ipygpumem.heap.bulk import kinds_of
from ipygpumem.heap.kinds.arrays import is_of_library, library_type
from ipygpumem.heap.paths.cuts import Cut, Kind, condition_of, split
from ipygpumem.heap.paths.items_and_attributes import attribute_text, position_of
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.heap.paths.roots import Rank, Root
from ipygpumem.introspect import (
    attribute_of,
    class_dict,
    instance_dict,
    is_exactly,
    is_instance,
    mro_of,
    target_of,
    text_of,
)

_METHODS = {"handlers": "removeHandler", "filters": "removeFilter"}
"""The method that removes an item from a list of a logger or handler, by the list's name."""


def loggers(names: Mapping[str, object]) -> Iterator[tuple[object, Root]]:
    """Yield the loggers that the logging module keeps, each with its root.

    Args:
        names: the user's names, to write code.
    """
    kind: Any = library_type("logging", "Logger")
    if kind is None:
        return
    names_of_loggers = _names_of_instances(names, kind)
    code_of_root = names_of_loggers.get(id(kind.root), "import logging; logging.getLogger()")
    yield kind.root, _root_of_logger(kind.root, "root logger", code_of_root)
    attributes = instance_dict(kind.manager) or {}
    for name, logger in list(attributes.get("loggerDict", {}).items()):
        if is_instance(logger, kind):  # else a placeholder
            text = text_of(name)
            call = f"import logging; logging.getLogger({literal(text)})"
            code = names_of_loggers.get(id(logger), call)
            yield logger, _root_of_logger(logger, f'logger "{text}"', code)


def handlers_and_filters(names: Mapping[str, object]) -> Iterator[tuple[object, Root]]:
    """Yield the handlers and filters of all loggers, each with the root that removes only it.

    A filter of a handler comes before the handler, which leads to it.

    Args:
        names: the user's names, to write code.
    """
    for logger, root in loggers(names):
        yield from _handlers_or_filters(logger, "filters", root.text, root.code)
        handlers = _handlers_or_filters(logger, "handlers", root.text, root.code)
        for handler, root_of_handler in handlers:
            yield from _handlers_or_filters(
                handler, "filters", root_of_handler.text, root_of_handler.code
            )
            yield handler, root_of_handler


def append_logger_step(path: Path, owner: object, items: Sequence[object], item: object) -> int:
    """Append a handler or filter of a logger, or a filter of a handler; return 2, the number of
    references, or 0 if the item is neither.

    Args:
        path: the path to the logger or handler.
        owner: the logger or handler.
        items: the list that has the item.
        item: the handler or filter.
    """
    name = attribute_text(owner, items).removeprefix(".")
    if name not in _METHODS:
        return 0
    position = position_of(items, item)
    step = f".{name}[{position}]"
    call = _removal(path.code, name, items, item)
    path.append_removable(
        step, f"{path.code}{step}", Cut(Kind.CALL, id(items), path.code, call, position)
    )
    return 2


def is_filterer(item: object) -> bool:
    """Return True for a logger or handler."""
    return is_of_library(item, "logging", "Filterer")


def _handlers_or_filters(
    owner: object, name: str, text: str, code: str
) -> Iterator[tuple[object, Root]]:
    """Yield the handlers or filters of a logger or handler, each with its root.

    Args:
        owner: the logger or handler.
        name: ``handlers`` or ``filters``.
        text: the path to the owner.
        code: its code.
    """
    items = _list_of(owner, name)
    for position, item in enumerate(items):
        step = f".{name}[{position}]"
        cut = Cut(Kind.CALL, id(items), code, _removal(code, name, items, item), position)
        yield item, Root(f"{text}{step}", Rank.PLACE, code=f"{code}{step}", cut=cut)


def _list_of(owner: object, name: str) -> Sequence[object]:
    """Return the handlers or filters of a logger or handler; none if reading them would run the
    user's code, such as a property of a subclass, or the iterator of a subclass of ``list``.
    """
    if any(name in class_dict(kind) for kind in mro_of(type(owner))):
        return ()
    items = attribute_of(owner, name)
    if is_exactly(items, list):
        return items  # type: ignore[no-any-return]  # a list
    return ()


def _removal(code: str, name: str, items: Sequence[object], item: object) -> str:
    """Return the statement that removes a handler or filter.

    It names no position if there are several: the line of another one, which runs before, would
    change the position.

    Args:
        code: the code of the logger or handler.
        name: ``handlers`` or ``filters``.
        items: all of them.
        item: the handler or filter.
    """
    imports, owner = split(code)
    method = _METHODS[name]
    if len(items) == 1:
        return f"{imports}{owner}.{method}({owner}.{name}[0])"
    condition = condition_of(item, items, "item")
    return f"{imports}[{owner}.{method}(item) for item in {owner}.{name}[:] if {condition}];"


def _root_of_logger(logger: object, name: str, code: str) -> Root:
    """Return the root of a logger, whose line removes all of its handlers and filters.

    Args:
        logger: the logger.
        name: its name in the report.
        code: its code.
    """
    emptied = [name for name in _METHODS if _list_of(logger, name)] or ["handlers"]
    imports, expression = split(code)
    calls = "; ".join(f"{expression}.{list_name}.clear()" for list_name in emptied)
    cut = Cut.of_root(Kind.CALL, f"{imports}{calls}")
    # A logger with a name stays in the logging module, too, and leads to all loggers.
    return Root(
        f"the logging module, {name}",
        Rank.PLACE,
        code=code,
        cut=cut,
        is_only_place=True,
        is_permanent=True,
    )


def _names_of_instances(names: Mapping[str, object], kind: type) -> dict[int, str]:
    """Return the user's names for instances of a class as code, by the identity of the instance.

    The loops are in C, because there may be 100,000 names.
    """
    names_now = dict(names)  # a thread may change them
    kinds = kinds_of(list(names_now.values()), kind)
    are_instances = map(kinds.__contains__, map(id, map(type, names_now.values())))
    instances = compress(names_now.items(), are_instances)
    return {id(value): target_of(name) for name, value in instances}
