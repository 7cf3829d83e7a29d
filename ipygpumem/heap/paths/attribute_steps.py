"""Writes the steps of paths through attributes, ``run.model``, of objects of any class for which no
other file writes the step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType

from ipygpumem.heap.paths.attributes_to_remove import (
    is_added,
    kind_of_attribute,
    library_that_keeps,
)
from ipygpumem.heap.paths.cuts import Cut, Kind, split, with_repeated
from ipygpumem.heap.paths.items_and_attributes import attribute_names, attribute_text
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import (
    instance_dict,
    is_descriptor,
    is_exactly,
    is_instance,
    is_name,
    is_users_class,
    type_name,
)

_READ_AS_THEMSELVES = (
    FunctionType,
    property,
    functools.cached_property,
    staticmethod,
    classmethod,
    type(functools.lru_cache(len)),
)
"""Types of attributes which, read from a class, are themselves, or the function in them."""


def append_attribute_step(path: Path, steps: Sequence[object]) -> int:
    """Append the step from an object to the next one, which is its attribute; return 1, the number
    of references.
    """
    _append_attribute(path, steps[0], steps[1])
    return 1


def _append_attribute(path: Path, parent: object, child: object) -> None:
    """Append the attribute by which an object refers to another one: ``run.model``."""
    attribute = attribute_text(parent, child)
    name = attribute[1:]
    target = ""
    if path.code and attribute.startswith("."):
        target = f"{path.code}{attribute}"
    library = library_that_keeps(parent, name, child)
    if library:  # model._hf_hook
        path.advise("", f"let {library} remove it from there")
        path.append_fixed(attribute, target)
        return
    shown = attribute or f" ({type_name(parent)})"
    if path.code and not target:
        in_vars = _code_of_odd_attribute(parent, child, path.code)
        if in_vars:  # vars(run)["a b"]
            path.append_removable(shown, in_vars, Cut(Kind.KEY, id(parent), path.code, in_vars))
            return
    kind = kind_of_attribute(parent, name, child)
    # The user may have added an attribute to a library's object: model.my_cache = ...
    if (kind is None or path.is_of_library) and is_added(parent, name, child):
        path.is_of_library = False
        kind = Kind.DELETED_ATTRIBUTE
    if kind is not None:  # run.model
        cut = None
        if target:
            cut = _cut_of_attributes(parent, child, path.code)
        path.append_removable(shown, _code_to_read(parent, child, path.code, attribute), cut)
        return
    if _append_guarded_attribute(path, parent, child, attribute):  # of a frozen data class
        return
    path.append_fixed(shown, target)


def _append_guarded_attribute(path: Path, parent: object, child: object, name: str) -> bool:
    """Append an attribute of a variable's object that an assignment cannot set, such as that of a
    frozen data class: ``object.__setattr__(run, "model", None)`` does. Return False for anything
    else.
    """
    is_variable = path.cut is not None and path.cut.kind is Kind.NAME and path.code != ""
    if not is_variable or not is_users_class(type(parent)) or not name.startswith("."):
        return False
    imports, code = split(path.code)
    cuts = list[Cut]()
    for attribute in filter(is_name, attribute_names(parent, child)):
        call = f'{imports}object.__setattr__({code}, "{attribute}", None)'
        cuts.append(Cut(Kind.CALL, id(parent), path.code, call))
    path.append_removable(name, f"{path.code}{name}", with_repeated(cuts))
    return True


def _code_of_odd_attribute(owner: object, child: object, code: str) -> str:
    """Return the code of an attribute whose name cannot follow a dot, ``vars(run)["a b"]``; empty
    for any other attribute, and for an object of a library's class.
    """
    names = attribute_names(owner, child)
    if not names or is_name(names[0]) or not is_users_class(type(owner)):
        return ""
    key = literal(names[0])
    if not key or names[0] not in (instance_dict(owner) or {}):
        return ""
    imports, expression = split(code)
    return f"{imports}vars({expression})[{key}]"


def _cut_of_attributes(owner: object, child: object, code: str) -> Cut | None:
    """Return the reference of an object's attribute to another object, with those of its other
    attributes to the same object, but without attributes that a library's code may need.

    Args:
        owner: the object.
        child: the object to which its attributes refer.
        code: the code of the owner.
    """
    cuts = list[Cut]()
    for name in attribute_names(owner, child):
        kind = kind_of_attribute(owner, name, child)
        if kind is None and is_added(owner, name, child):
            kind = Kind.DELETED_ATTRIBUTE
        if kind is not None:
            cuts.append(Cut(kind, id(owner), code, f"{code}.{name}"))
    return with_repeated(cuts)


def _code_to_read(owner: object, child: object, code: str, name: str) -> str:
    """Return the code that reads an attribute; empty if there is none.

    ``Model.table`` of a class may run the attribute's ``__get__``, which returns something else:
    then it is ``vars(Model)["table"]``.

    Args:
        owner: the object or class.
        child: the attribute's object.
        code: the code of the owner.
        name: the attribute, such as ``.table``.
    """
    if not code or not name.startswith("."):
        return ""
    if not is_instance(owner, type) or is_exactly(child, *_READ_AS_THEMSELVES):
        return f"{code}{name}"
    if not is_descriptor(child):
        return f"{code}{name}"
    imports, expression = split(code)
    return f'{imports}vars({expression})["{name[1:]}"]'
