"""Divides an object into parts that the user knows by name or by kind: columns, keys, attributes,
variables, and items by type.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.attributes import MODULE_PARTS, slots
from ipygpumem.heap.bulk import container_base, of_types, one_of_each, types_of
from ipygpumem.heap.kinds.arrays import is_of_library, library_type
from ipygpumem.heap.kinds.libraries import library_of, polars_column, polars_columns
from ipygpumem.heap.knowledge.frames import SUSPENDED, locals_in_traceback, locals_of
from ipygpumem.introspect import (
    ATOMS,
    class_dict,
    instance_dict,
    is_atom,
    is_exactly,
    is_instance,
    key_text,
    text_of,
    type_name,
)

CACHED = "cached results"
"""Name of the part of an ``lru_cache`` with its results."""
MOST_PARTS = 200
"""Maximum number of columns, keys or attributes that are measured one by one."""
_MOST_ITEMS = 1_000_000
"""Maximum number of a container's items that are sorted by their types."""
_MOST_TYPES_SHOWN = 3
"""Maximum number of types in the name of a part with items of many types."""


class ObjectPart(NamedTuple):
    """Some of an object's content, which the user knows by names or by kind."""

    kind: str
    """One of columns, index, variables, keys, attributes, or items, which are grouped by type."""
    names: Sequence[str]
    """Columns, keys or attributes that share the memory equally; or a type."""
    objects: Sequence[object] | None
    """None for all content that no other part has."""
    items: int = 1
    """Number of items in the part."""


def parts_of(value: Any) -> Iterator[ObjectPart]:
    """Yield the parts of an object: by a function for its class, if there is one in
    ``_FUNCTIONS_OF_CLASSES``, else entries of a dict, items of a container, or attributes.
    """
    for module, name, function in _FUNCTIONS_OF_CLASSES:
        base = library_type(module, name)
        if base is not None and is_instance(value, base):
            yield from function(value)
            return
    base = container_base(type(value))
    if base is dict:
        yield from _of_dict(value)
    elif base is not None:
        items = list(islice(base.__iter__(value), _MOST_ITEMS))
        yield from _by_type(items, base.__len__(value))
    elif is_instance(value, type):
        yield from _named_parts(class_dict(value))
    elif not is_exactly(value, FunctionType, ModuleType):
        yield from _parts_in_attributes(value)


def cached(cache: object) -> list[object]:
    """Return the objects in an ``lru_cache``, without the function and its own attributes."""
    attributes = instance_dict(cache) or {}
    function = attributes.get("__wrapped__")
    referents = gc.get_referents(cache)
    return [item for item in referents if item is not attributes and item is not function]


# -- containers and objects ---------------------------------------------------------------------


def _of_dict(value: Any) -> Iterator[ObjectPart]:
    """Yield each entry of a dict, or its values by type if they are many."""
    length = dict.__len__(value)
    if length > MOST_PARTS:
        first_items = list(islice(dict.values(value), _MOST_ITEMS))
        yield from _by_type(first_items, length)
        return
    for key, item in list(dict.items(value)):
        name = key_text(key) or f"<{type_name(key)}>"
        yield ObjectPart("keys", [f"[{name}]"], [item])


def _by_type(items: list[object], length: int) -> Iterator[ObjectPart]:
    """Yield the items of each type as a part, or all as one part if the types are too many."""
    kinds = one_of_each(items)
    if len(kinds) == 1 or length > len(items) or len(kinds) > MOST_PARTS:
        examples = islice(kinds.values(), _MOST_TYPES_SHOWN)
        names = ", ".join(map(type_name, examples))
        yield ObjectPart("items", [names], objects=None, items=length)
        return
    for type_id, example in kinds.items():
        group = of_types({type_id}, items)
        yield ObjectPart("items", [type_name(example)], group, len(group))


def _parts_in_attributes(value: object) -> Iterator[ObjectPart]:
    """Yield the attributes of an object; nothing if they are only numbers and text."""
    # Reading ``__dict__`` creates the dict for good, so only objects that hold more than numbers
    # and text are read.
    kind = type(value)
    contents = [item for item in gc.get_referents(value) if item is not kind]
    if types_of(contents) <= ATOMS:
        return
    attributes = slots(value) | (instance_dict(value) or {})
    if is_of_library(value, "torch.nn", "Module"):
        attributes = _content_of_module(attributes)
    yield from _named_parts(attributes)


def _content_of_module(attributes: Mapping[str, Any]) -> dict[str, object]:
    """Return the parameters, buffers and modules of a torch module by name, and its other
    attributes, without numbers, texts and empty containers: most modules have empty dicts of hooks.
    """
    content: dict[str, object] = {}
    for group in MODULE_PARTS:
        by_name: Any = attributes.get(group)
        if is_instance(by_name, dict):
            content.update(dict.items(by_name))
    for name, value in attributes.items():
        is_empty = is_exactly(value, dict, OrderedDict, list, set) and not value
        if name not in MODULE_PARTS and not is_atom(value) and not is_empty:
            content.setdefault(name, value)
    return content


def _named_parts(attributes: Mapping[str, object]) -> Iterator[ObjectPart]:
    """Yield each of the first attributes as a part; they are as many as are measured one by one."""
    for name, item in list(attributes.items())[:MOST_PARTS]:
        yield ObjectPart("attributes", [f".{text_of(name)}"], [item])


def _variables(value: Any) -> Iterator[ObjectPart]:
    """Yield the local variables that a generator, coroutine or exception keeps."""
    if is_exactly(value, *SUSPENDED):
        variables = list(locals_of(value).items())
    else:
        variables = list(locals_in_traceback(value))
    for name, item in variables:
        yield ObjectPart("variables", [name], [item])


def _cached_results(cache: Any) -> Iterator[ObjectPart]:
    """Yield the results in an ``lru_cache`` as one part."""
    yield ObjectPart("items", [CACHED], cached(cache), cache.cache_info().currsize)


# -- tables -------------------------------------------------------------------------------------


def _pandas_columns(frame: Any) -> Iterator[ObjectPart]:
    """Yield the columns of each block of a frame, and the index; nothing for a frame of many
    blocks.
    """
    manager = _manager(frame)
    if manager is None or len(manager.items) > MOST_PARTS:
        return
    labels = [_column_label(position, label) for position, label in enumerate(manager.items)]
    for block in manager.blocks:
        labels_of_block = [labels[position] for position in block.mgr_locs]
        yield ObjectPart("columns", labels_of_block, [block.values])
    yield ObjectPart("index", ["index"], [manager.axes[-1]])


def _pandas_values(series: Any) -> Iterator[ObjectPart]:
    """Yield the values of a series and its index, as ``.values`` and ``.index``."""
    manager = _manager(series)
    if manager is not None:
        values = [block.values for block in manager.blocks]
        yield ObjectPart("attributes", [".values"], values)
        yield ObjectPart("attributes", [".index"], [manager.axes[-1]])


def _manager(value: Any) -> Any:
    """Return the object in which pandas keeps the blocks of a frame or series; None if a part of it
    is of a user's class, such as an index.
    """
    attributes = instance_dict(value) or {}
    manager: Any = attributes.get("_mgr")
    for item in (manager, manager.items):
        if library_of(type(item)) != "pandas":
            return None
    return manager


def _column_label(position: int, label: object) -> str:
    """Return the text of a column's label; ``column 3`` if the label is an object of the user."""
    if type(label) is str:
        return label
    return key_text(label) or f"column {position}"


def _polars_columns(frame: Any) -> Iterator[ObjectPart]:
    """Yield each column of a frame of polars."""
    for column, key in polars_columns(frame):
        yield ObjectPart("columns", [column.name()], list(polars_column(column, *key)))


def _arrow_table_columns(table: Any) -> Iterator[ObjectPart]:
    """Yield each column of an Arrow table."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        yield ObjectPart("columns", [name], [column])


def _xarray_variables(dataset: Any) -> Iterator[ObjectPart]:
    """Yield each variable of a data set."""
    variables = slots(dataset).get("_variables")
    if type(variables) is not dict:
        return
    for name, variable in variables.items():
        yield ObjectPart("variables", [_column_label(position=0, label=name)], [variable])


_FUNCTIONS_OF_CLASSES: tuple[tuple[str, str, Callable[[Any], Iterator[ObjectPart]]], ...] = (
    ("builtins", "BaseException", _variables),
    ("functools", "_lru_cache_wrapper", _cached_results),
    ("pandas", "DataFrame", _pandas_columns),
    ("pandas", "Series", _pandas_values),
    ("polars.dataframe.frame", "DataFrame", _polars_columns),
    ("pyarrow", "RecordBatch", _arrow_table_columns),
    ("pyarrow", "Table", _arrow_table_columns),
    ("types", "AsyncGeneratorType", _variables),
    ("types", "CoroutineType", _variables),
    ("types", "GeneratorType", _variables),
    ("xarray", "Dataset", _xarray_variables),
)
