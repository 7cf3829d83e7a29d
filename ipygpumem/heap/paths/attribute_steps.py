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
from ipygpumem.heap.paths.cuts import Cut, Kind, as_one_cut, split
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
    code = _code_with(path.code, attribute)
    library = library_that_keeps(parent, attribute[1:], child)
    if library:  # model._hf_hook
        path.advise(words=f"let {library} remove it from there")
        path.append_fixed(attribute, code)
        return
    # Of these cases, the first one that applies counts.
    is_appended = (
        _append_odd_attribute(path, parent, child, attribute)  # vars(run)["a b"]
        or _append_removable_attribute(path, parent, child, attribute)  # run.model
        or _append_guarded_attribute(path, parent, child, attribute)  # of a frozen data class
    )
    if not is_appended:  # ax.xaxis: without it, the library's object would break
        path.append_fixed(_shown(parent, attribute), code)


def _code_with(code: str, attribute: str) -> str:
    """Return the code of an attribute, ``run.model``; empty if it cannot be typed."""
    return f"{code}{attribute}" if code and attribute.startswith(".") else ""


def _shown(owner: object, attribute: str) -> str:
    """Return the text of a step through an attribute; without one, the type of its owner."""
    return attribute or f" ({type_name(owner)})"


def _append_odd_attribute(path: Path, parent: object, child: object, attribute: str) -> bool:
    """Append an attribute whose name cannot follow a dot, ``vars(run)["a b"]``; return False for
    any other attribute.
    """
    if not path.code or attribute.startswith("."):
        return False
    code = _code_of_odd_attribute(parent, child, path.code)
    if not code:
        return False
    cut = Cut(Kind.KEY, id(parent), path.code, code)
    path.append_removable(_shown(parent, attribute), code, cut)
    return True


def _append_removable_attribute(path: Path, parent: object, child: object, attribute: str) -> bool:
    """Append an attribute that a line may remove, ``run.model = None``; return False for any other
    attribute.
    """
    name = attribute[1:]
    kind = kind_of_attribute(parent, name, child)
    if (kind is None or path.is_of_library) and is_added(parent, name, child):
        # The user has added the attribute to a library's object: model.my_cache = ...
        path.is_of_library = False
        kind = Kind.DELETED_ATTRIBUTE
    if kind is None:
        return False
    cut = None
    if _code_with(path.code, attribute):
        cut = _cut_of_attributes(parent, child, path.code)
    code = _code_to_read(parent, child, path.code, attribute)
    path.append_removable(_shown(parent, attribute), code, cut)
    return True


def _append_guarded_attribute(path: Path, parent: object, child: object, name: str) -> bool:
    """Append an attribute that an assignment cannot set, such as that of a frozen data class; the
    line is ``object.__setattr__(run, "model", None)``. Return False for any other attribute.

    Only for the object of a variable: one in a list is removed from the list as a whole.
    """
    is_variable = path.cut is not None and path.cut.kind is Kind.NAME and path.code != ""
    if not is_variable or not is_users_class(type(parent)) or not name.startswith("."):
        return False
    imports, code = split(path.code)
    cuts = list[Cut]()
    for attribute in filter(is_name, attribute_names(parent, child)):
        call = f'{imports}object.__setattr__({code}, "{attribute}", None)'
        cuts.append(Cut(Kind.CALL, id(parent), path.code, call))
    path.append_removable(name, f"{path.code}{name}", as_one_cut(cuts))
    return True


def _code_of_odd_attribute(owner: object, child: object, code: str) -> str:
    """Return the code of an attribute whose name cannot follow a dot, ``vars(run)["a b"]``; empty
    for any other attribute, and for an object of a library's class.
    """
    names = attribute_names(owner, child)
    if not names or is_name(names[0]) or not is_users_class(type(owner)):
        return ""
    key = literal(names[0])
    if not key or names[0] not in (instance_dict(owner) or {}):  # ``vars(run)`` has no slots
        return ""
    imports, expression = split(code)
    return f"{imports}vars({expression})[{key}]"


def _cut_of_attributes(owner: object, child: object, code: str) -> Cut | None:
    """Return the reference of an object's attribute to another object, with those of its further
    attributes to the same object: ``run.model`` and ``run.best``. Attributes that a library's code
    may need are left out.

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
    return as_one_cut(cuts)


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
