"""Tells which attributes and globals a line may remove, and which ones the code of a class or
library needs. Runs no code of the user.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import (
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)

from ipygpumem.heap.kinds.arrays import is_array, is_of_library, is_of_pandas
from ipygpumem.heap.paths.cuts import Kind
from ipygpumem.heap.paths.items_and_attributes import is_opaque
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_descriptor,
    is_exactly,
    is_instance,
    is_name,
    is_users,
    is_users_class,
    module_dict,
    mro_of,
    text_of,
)


def kind_of_attribute(owner: object, name: str, child: object) -> Kind | None:
    """Return how a line removes an attribute: by ``run.model = None`` or ``del run.model``; None if
    it cannot be removed, or if the code of a library may need it.

    Args:
        owner: the object or class that has the attribute.
        name: the name of the attribute.
        child: its value.
    """
    if not is_name(name) or is_instance(owner, functools.partial) or is_of_pandas(owner):
        return None
    if library_that_keeps(owner, name, child):
        return None
    if is_instance(owner, type):
        return Kind.DELETED_ATTRIBUTE if is_descriptor(child) else Kind.ATTRIBUTE
    kind = type(owner)
    if type(_class_attribute(kind, name)) is functools.cached_property:  # made again when read
        return Kind.DELETED_ATTRIBUTE
    if is_exactly(owner, SimpleNamespace):  # no class expects its attributes
        return Kind.DELETED_ATTRIBUTE
    if not sets_attributes(owner):  # ``run.model = None`` may fail, or do something else
        return None
    if is_users_class(kind):
        return Kind.ATTRIBUTE
    is_stored = name in (instance_dict(owner) or {})
    if not is_stored or name.startswith("_"):
        return None
    # Without one of its parts a library's object breaks: ``ax.xaxis``. Data can be replaced.
    is_part = is_opaque(child) and not is_of_library(child, "torch", "Tensor")
    return None if is_part else Kind.ATTRIBUTE


def is_shadowed(owner: object, name: str) -> bool:
    """Return True if a property, or another descriptor of an object's class, handles assignments to
    an attribute, so that ``run.model = None`` may not set it.
    """
    if is_instance(owner, type):
        return False
    attribute = _class_attribute(type(owner), name)
    if attribute is None or type(attribute) is MemberDescriptorType:  # the latter is a slot
        return False
    return any("__set__" in class_dict(base) for base in mro_of(type(attribute)))


def sets_attributes(owner: object) -> bool:
    """Return True if assignments to an object's attributes store the values; False if its class may
    refuse them, as a frozen data class does.
    """
    if is_exactly(owner, SimpleNamespace):  # its own ``__setattr__`` does what that of object does
        return True
    setter = _class_attribute(type(owner), "__setattr__")
    if is_instance(owner, type):
        return setter is type.__setattr__
    return setter is object.__setattr__ or is_of_library(owner, "torch.nn", "Module")


def _class_attribute(kind: type, name: str) -> object:
    """Return an attribute of a class or its bases without running their code; None if there is
    none.
    """
    for base in mro_of(kind):
        attribute = class_dict(base).get(name)
        if attribute is not None:
            return attribute
    return None


def is_added(owner: object, name: str, child: object) -> bool:
    """Return True for an attribute that a user has added to an object, class or function of a
    library: the sources of its classes do not have the name.

    Args:
        owner: the object, class or function.
        name: the name of the attribute.
        child: its value.
    """
    if type(owner) is FunctionType:
        modules = {text_of(owner.__module__)}
    else:
        kind = owner if is_instance(owner, type) else type(owner)
        modules = {text_of(class_dict(base).get("__module__")) for base in mro_of(kind)}
    modules -= {"", "builtins"}
    if not is_name(name) or name.startswith("__") or not modules:
        return False  # Python's own, such as ``__dict__``, or an object of a built-in class
    if library_that_keeps(owner, name, child):
        return False
    for module in map(sys.modules.get, modules):
        if not is_instance(module, ModuleType) or is_in_source(module, name):  # type: ignore[arg-type]  # is_instance says so
            return False
    return True


def is_users_callable(item: object) -> bool:
    """Return True for a function or method of the user, or an object of a class of the user."""
    function = item.__func__ if type(item) is MethodType else item
    if type(function) is FunctionType:
        return is_users(function.__code__.co_filename)
    return is_users_class(type(function))


def library_that_keeps(owner: object, name: str, child: object) -> str:
    """Return the library that has put an object of its own into a private attribute of another
    object, and needs it there; empty for any other attribute.

    An example is ``model._hf_hook``, in which accelerate keeps the hook that moves the weights: its
    code has the name. A user's ``model._cache`` with a tensor is the user's, although torch uses
    such a name, too.

    Args:
        owner: the object, of the user or of another library.
        name: the name of the attribute.
        child: its value.
    """
    if not name.startswith("_") or is_array(child) or is_of_pandas(child):
        return ""  # data, which only the user can have put there
    kind = child if is_instance(child, type) else type(child)
    package = text_of(class_dict(kind).get("__module__")).partition(".")[0]
    if package in sys.stdlib_module_names or package == "__main__" or is_users_class(kind):
        return ""  # no object of a library
    kind_of_owner = owner if is_instance(owner, type) else type(owner)
    for base in mro_of(kind_of_owner):
        if text_of(class_dict(base).get("__module__")).partition(".")[0] == package:
            return ""  # the library's own object
    return package if _is_in_code_of_package(package, name, len(sys.modules)) else ""


@functools.lru_cache(maxsize=1000)
def _is_in_code_of_package(package: str, name: str, number_of_modules: int) -> bool:
    """Return True if the loaded code of a package has a name.

    The number of loaded modules is a part of the cache's key: a further module may have the name.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != package or not is_instance(module, ModuleType):
            continue
        if is_in_code(module, name):
            return True
    return False


def is_in_code(module: ModuleType, name: str) -> bool:
    """Return True if a function or method of a module uses a name, or has it as text."""
    codes = _codes_of_functions(module)
    for code in codes:  # the list grows
        if name in code.co_names:
            return True
        for constant in code.co_consts:
            if type(constant) is str and constant == name:
                return True
            if type(constant) is CodeType:  # of an inner function
                codes.append(constant)
    return False


def _codes_of_functions(module: ModuleType) -> list[CodeType]:
    """Return the code of a module's functions, and of the methods of its classes."""
    values = list(module_dict(module).values())
    functions = [value for value in values if type(value) is FunctionType]
    for kind in [value for value in values if type(value) is type]:
        methods = list(class_dict(kind).values())
        functions += [method for method in methods if type(method) is FunctionType]
    return [function.__code__ for function in functions]


def is_needed_by_methods(kind: type, name: str) -> bool:
    """Return True if methods of a class need an attribute: they read it, and none of them tests it
    for None.

    If ``forward`` reads ``self.mask``, its next call would fail if that were None. But a method
    with ``if self.cache is None`` fills the cache again.
    """
    is_read = False
    for code in _codes_of_methods(kind):
        if name in code.co_consts:
            is_read = True  # such as ``getattr(self, "mask")``
        if name not in code.co_names:
            continue
        instructions = list(dis.get_instructions(code))
        for position, instruction in enumerate(instructions):
            if instruction.opname not in _READING or instruction.argval != name:
                continue
            if _are_test_for_none(instructions[position + 1 : position + 3]):
                return False
            is_read = True
    return is_read


_READING = {"LOAD_ATTR", "LOAD_METHOD"}
"""Instructions that read an attribute."""


def _are_test_for_none(instructions: Sequence[dis.Instruction]) -> bool:
    """Return True if two instructions test the last value for None: ``LOAD_CONST`` and ``IS_OP``,
    or a single one such as ``POP_JUMP_IF_NOT_NONE``, which Python 3.11 and later have.
    """
    if instructions[0].opname.endswith("_NONE"):
        return True
    is_none = instructions[0].opname == "LOAD_CONST" and instructions[0].argval is None
    return is_none and instructions[1].opname == "IS_OP"


def _codes_of_methods(kind: type) -> Iterator[CodeType]:
    """Yield the code of a class's methods, except ``__init__``, and of the functions inside them.

    ``__init__`` runs only once, before the attribute was set to None.
    """
    for base in mro_of(kind):
        for method_name, method in list(class_dict(base).items()):
            function = method.fget if type(method) is property else method
            if type(function) is not FunctionType or method_name == "__init__":
                continue
            codes = [function.__code__]
            for code in codes:  # the list grows
                codes += [constant for constant in code.co_consts if type(constant) is CodeType]
                yield code


def is_in_source(module: ModuleType, name: str) -> bool:
    """Return True if a module's source has a name, or may have it: if it has ``import *``, or if it
    cannot be read.
    """
    return _is_in_file(text_of(module_dict(module).get("__file__")), name)


@functools.lru_cache(maxsize=1000)
def _is_in_file(file: str, name: str) -> bool:
    """Return True if a file of Python code has a name, or may have it.

    The result is cached: each path through a library's object asks again, and its files are long.
    """
    if not file.endswith(".py"):
        return True
    try:
        source = Path(file).read_text("utf-8", "replace")
    except OSError:
        return True
    # Most names stand near the beginning; ``in`` passes over a long file faster than an expression.
    if name in source and re.search(rf"\b{re.escape(name)}\b", source):
        return True
    if "*" not in source:  # fast, and true of most files
        return False
    return re.search(r"^\s*from\s+\S+\s+import\s+\*", source, re.MULTILINE) is not None
