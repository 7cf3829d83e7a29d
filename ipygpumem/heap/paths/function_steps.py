"""Writes the steps of paths through functions: to the variables of closures, default arguments and
attributes, and through bound methods and ``lru_cache``.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Sequence
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
)
from typing import Any

from ipygpumem.heap.paths.attributes_to_remove import is_added
from ipygpumem.heap.paths.cuts import Cut, Kind, as_one_cut
from ipygpumem.heap.paths.items_and_attributes import (
    attribute_names,
    attribute_text,
    position_of,
)
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.heap.paths.remedies import REMOVE
from ipygpumem.introspect import instance_dict, is_exactly, is_users, type_name

CellOf = Callable[[str], int | None]
"""Returns the number of the cell with a code's file name."""
_OR_FUNCTION = f"{REMOVE.line}, or delete the function when you no longer need it"
_UNBOUND = object()
"""Stands for the object of a closure's variable that has none yet."""


def append_function_step(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Append the step through a function, a method or an ``lru_cache``, ``: closure of function f,
    variable x``; return the number of its references, 0 for any other object.

    Args:
        path: the path to the function.
        steps: the function, and the objects after it.
        cell_of: returns the number of the cell with a code's file name.
    """
    function: Any = steps[0]
    kind = type(function)
    if kind is FunctionType:
        return _append_function(path, steps, cell_of)
    if kind is functools._lru_cache_wrapper:
        return _append_cache(path, steps, cell_of)
    if kind is MethodType:  # without its object it cannot be called, so the method is removed
        path.advise(path.removal)
        name = _name_of_function(function.__func__, cell_of)
        path.append_words(f": bound method {name}, its object")
        return 1
    if is_exactly(function, BuiltinMethodType, MethodWrapperType):
        path.append_fixed(".__self__", path.code and f"{path.code}.__self__")
        return 1
    if kind is staticmethod or kind is classmethod:
        # Reading the attribute returns the function: users do not type ``.__func__``.
        path.append_fixed("", path.code)
        return 1
    return 0


def name_of_code(code: CodeType, cell_of: CellOf) -> str:
    """Return the name of a function's code, with the number of its cell: ``train (cell 7)``."""
    cell = cell_of(code.co_filename)
    return code.co_name if cell is None else f"{code.co_name} (cell {cell})"


def _name_of_function(function: object, cell_of: CellOf) -> str:
    """Return a function's name with the number of its cell, ``train (cell 7)``; the name of its
    type for an object that is no Python function.
    """
    if type(function) is not FunctionType:
        return type_name(function)
    return name_of_code(function.__code__, cell_of)


def _append_function(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Append the step through a Python function; return the number of its references."""
    function, child = steps[0], steps[1]
    assert type(function) is FunctionType
    name = _name_of_function(function, cell_of)
    following = steps[2] if len(steps) > 2 else None
    # Unless the closure or an attribute can be emptied, the line deletes the function.
    path.set_fallback("when you no longer need the function", _OR_FUNCTION)
    if child is function.__closure__ and child is not None:
        return _append_closure(path, function, steps[2:], name)
    if child is function.__defaults__ or child is function.__kwdefaults__:
        code = path.code and _code_of_default(path.code, function, following)
        path.append_words(f": default argument of function {name}", code)
        return 1 if following is None else 2
    code = path.code
    path.append_words(f": function {name}")
    if following is not None and child is instance_dict(function):
        _append_attribute(path, code, function, following)
        return 2
    _append_attribute(path, code, function, child)  # without the dict
    return 1


# -- closures and default arguments ---------------------------------------------------------------


def _append_closure(
    path: Path, function: FunctionType, following: Sequence[object], name: str
) -> int:
    """Append the step through a function's closure to the object of one of its variables; return
    the number of references.

    Args:
        path: the path to the function.
        function: the function.
        following: the objects after the closure: the variable's cell, its object, and so on.
        name: the function's name, with the number of its cell in the notebook.
    """
    cells = function.__closure__ or ()
    cell = following[0] if following else None
    if type(cell) is not CellType:
        path.append_words(f": closure of function {name}")
        return 1
    position = position_of(cells, cell)
    variable = function.__code__.co_freevars[position]
    code = path.code and f"{path.code}.__closure__[{position}].cell_contents"
    words = f": closure of function {name}, variable {variable}"
    cut = _cut_of_variable(function, cell, path.code)
    if cut is not None:
        path.append_removable(words, code, cut)
    else:
        path.append_words(words, code)
    return 3 if len(following) > 1 else 2


def _cut_of_variable(function: FunctionType, cell: CellType, code: str) -> Cut | None:
    """Return the reference of a closure's variable, with those of its further variables to the same
    object; None if the function may need the object.

    It does unless it assigns all of these variables itself: with ``nonlocal cache``, it can cope
    with another value.

    Args:
        function: the function.
        cell: the cell of the variable.
        code: the code of the function; empty if there is none.
    """
    value = _object_of(cell)
    cuts = list[Cut]()
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for position, (variable, other) in enumerate(variables):
        if other is not cell and (value is _UNBOUND or _object_of(other) is not value):
            continue  # a variable with another object
        if not code or not _assigns(function.__code__, variable):
            return None
        target = f"{code}.__closure__[{position}].cell_contents"
        cuts.append(Cut(Kind.ATTRIBUTE, id(other), code, target))
    return as_one_cut(cuts)


def _object_of(cell: CellType) -> object:
    """Return the object of a variable; ``_UNBOUND`` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND


def _assigns(code: CodeType, variable: str) -> bool:
    """Return True if a function assigns a variable of the functions around it: ``nonlocal``."""
    return any(
        step.opname == "STORE_DEREF" and step.argval == variable
        for step in dis.get_instructions(code)
    )


def _code_of_default(code: str, function: FunctionType, value: object) -> str:
    """Return the code of a function's default argument, ``f.__defaults__[0]``; empty if no argument
    has this value.
    """
    defaults = function.__defaults__ or ()
    position = next((place for place, item in enumerate(defaults) if item is value), None)
    if position is not None:
        return f"{code}.__defaults__[{position}]"
    by_name = function.__kwdefaults__ or {}
    name = next((name for name, item in by_name.items() if item is value), "")
    return f'{code}.__kwdefaults__["{name}"]' if name else ""


# -- attributes and caches ------------------------------------------------------------------------


def _append_attribute(path: Path, code: str, function: FunctionType, value: object) -> None:
    """Append an attribute of a function: ``load.cache``. Users can remove attributes of their own
    functions, and those that they have added to a library's.

    Args:
        path: the path to the function. It has words about the function already, and no code.
        code: the code of the function.
        function: the function.
        value: the object of the attribute.
    """
    attribute = attribute_text(function, value)
    kind = Kind.ATTRIBUTE
    if not is_users(function.__code__.co_filename):
        if not is_added(function, attribute[1:], value):
            path.append_fixed(attribute)
            return
        path.is_of_library = False
        kind = Kind.DELETED_ATTRIBUTE
    if not attribute.startswith("."):
        path.append_fixed(attribute)
        return
    if not code:
        path.append_removable(attribute)
        return
    cuts = list[Cut]()
    for name in attribute_names(function, value):
        if kind is Kind.ATTRIBUTE or is_added(function, name, value):
            cuts.append(Cut(kind, id(function), code, f"{code}.{name}"))
    path.append_removable(attribute, f"{code}{attribute}", as_one_cut(cuts))


def _append_cache(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Append the step from an ``lru_cache`` to a result, an argument or its function; return the
    number of its references, 0 if it leads to an attribute that was added to the cache.
    """
    cache, child = steps[0], steps[1]
    names = attribute_names(cache, child)
    if names and names != ["__wrapped__"]:
        return 0
    function = (instance_dict(cache) or {}).get("__wrapped__")
    path.advise(path.statement("{}.cache_clear()"), words="call cache_clear() of that function")
    path.append_words(f": lru_cache of function {_name_of_function(function, cell_of)}")
    return 2 if type(child) is dict and len(steps) > 2 else 1
