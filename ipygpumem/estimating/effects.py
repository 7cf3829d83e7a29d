"""Finds effects that an estimate cannot undo: calls that read, write, print or start processes, and
used iterators.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from ipygpumem.errors import EstimateError
from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_atom,
    is_instance,
    is_users,
    module_dict,
    solid_base,
    type_name,
)

_FUNCTIONS_THAT_READ = (
    "input",
    "load",
    "open",
    "read_bytes",
    "read_csv",
    "read_parquet",
    "read_text",
)
_FUNCTIONS_THAT_WRITE = (
    "dump",
    "print",
    "save",
    "savefig",
    "savetxt",
    "savez",
    "savez_compressed",
    "tofile",
    "write",
    "write_bytes",
    "write_text",
    "writelines",
    "imsave",
    "imwrite",
)
_FUNCTIONS_THAT_EXPORT = (
    "to_csv",
    "to_excel",
    "to_feather",
    "to_hdf",
    "to_parquet",
    "to_pickle",
    "to_sql",
    "push_to_hub",
    "save_model",
    "save_pretrained",
)
_FUNCTIONS_OF_TENSORBOARD = ("SummaryWriter", "add_histogram", "add_image", "add_scalar")
_FUNCTIONS_ON_FOLDERS = (
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "copyfile",
    "copytree",
    "makedirs",
    "mkdir",
    "mkdtemp",
    "mkstemp",
    "rmdir",
    "rmtree",
    "touch",
    "unlink",
)
_FUNCTIONS_ON_PROCESSES = (
    "Pool",
    "Popen",
    "Process",
    "ProcessPoolExecutor",
    "init_process_group",
    "system",
    "urlopen",
    "urlretrieve",
)
_FUNCTIONS_ON_FILES = (
    *_FUNCTIONS_THAT_READ,
    *_FUNCTIONS_THAT_WRITE,
    *_FUNCTIONS_THAT_EXPORT,
    *_FUNCTIONS_OF_TENSORBOARD,
    *_FUNCTIONS_ON_FOLDERS,
)
_FUNCTIONS = frozenset((*_FUNCTIONS_ON_FILES, *_FUNCTIONS_ON_PROCESSES))
"""Names of functions and methods with effects outside the estimate, in any module."""
_MODULES = frozenset(
    {
        "mlflow",
        "multiprocessing",
        "requests",
        "shutil",
        "socket",
        "sqlite3",
        "subprocess",
        "urllib",
        "wandb",
    }
)
"""Modules of which any function has such effects."""
_FUNCTIONS_OF_OS = frozenset(
    {
        "_exit",
        "abort",
        "chmod",
        "fork",
        "kill",
        "link",
        "popen",
        "putenv",
        "remove",
        "removedirs",
        "rename",
        "renames",
        "replace",
        "startfile",
        "symlink",
        "truncate",
    }
)
"""Functions with such effects in the module ``os`` alone: other modules and objects have harmless
functions of these names, such as ``str.replace``.
"""

_METHODS_THAT_WAIT = ("get", "join", "put")
"""Methods of a queue that may wait for another thread."""
WAITS = (
    "other threads do not see what the estimated code puts into a queue, so these calls may never "
    "return"
)


def effects_of(
    code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...], args: tuple[Any, ...] = ()
) -> list[str]:
    """Return notes on the effects of code that an estimate cannot undo.

    They are found by the names in the code, and in the users' functions that it names.

    Args:
        code: the code; None for a function in C, of which only the arguments are examined.
        namespaces: where names are looked up.
        args: the arguments of the call.
    """
    calls = set[str]()
    iterators = {f"a {type_name(value)}" for value in args if _loses_items(value)}
    waits = set[str]()
    for named in names_in(code, namespaces):
        path = ".".join(named.names)
        if _has_outside_effects(named.names, named.module):
            calls.add(path)
        if _loses_items(named.value):
            iterators.add(path)
        if named.names[-1] in _METHODS_THAT_WAIT and is_of_library(named.owner, "queue", "Queue"):
            waits.add(path)
    notes = {
        "only tensors are fake; calls to these run for real": calls,
        "items that the code takes from these iterators are lost": iterators,
        WAITS: waits,
    }
    return [f"{note}: {', '.join(sorted(paths))}" for note, paths in notes.items() if paths]


def _has_outside_effects(names: tuple[str, ...], module: str) -> bool:
    """Return True if a call of a dotted name has effects outside the estimate.

    Args:
        names: its parts, such as ``("df", "to_csv")``.
        module: the module of the last part; empty if it is unknown.
    """
    *owners, name = names
    library, _, _ = module.partition(".")
    if not library and owners:
        library = owners[0]
    if (library, name) == ("torch", "save"):  # replaced during the estimate
        return False
    if name in _FUNCTIONS:
        return True
    if library in _MODULES and owners:
        return True
    return library in ("os", "posix", "nt") and name in _FUNCTIONS_OF_OS


_WITHOUT_TENSORS = frozenset(
    ("matplotlib", "numpy", "pandas", "polars", "pyarrow", "scipy", "sklearn")
)
"""Libraries whose objects hold no tensors."""
_TYPES_WITHOUT_TENSORS = frozenset(("ndarray", "DataFrame", "Series"))


def refuse_without_tensors(
    code: types.CodeType | None,
    namespaces: tuple[dict[str, Any], ...],
    args: tuple[Any, ...] = (),
) -> None:
    """Raise an EstimateError if ``code`` uses NumPy, pandas and the like, and names nothing that
    may hold tensors. The arguments are those of ``effects_of``.
    """
    origins = {type_name(value) for value in args if not is_atom(value)}
    """Modules and types of the named objects."""
    for named in names_in(code, namespaces):
        value = named.value
        if value is None:  # such as ``model.encode``: then the value of ``model`` decides
            value, _ = _value_of_dotted_name(named.names[:1], namespaces)
        if named.module:
            origins.add(named.module)
        elif not is_atom(value) and not _is_users_function(value):
            origins.add(_module_or_type(value))
    libraries = {origin.partition(".")[0] for origin in origins}
    without_tensors = _WITHOUT_TENSORS | _TYPES_WITHOUT_TENSORS
    uses_arrays = bool(libraries & without_tensors)
    may_use_tensors = bool(libraries - without_tensors - sys.stdlib_module_names)
    if uses_arrays and not may_use_tensors:
        raise EstimateError(
            "only tensors are estimated, and this code names none: its arrays and data frames "
            "would really be allocated; %%peak measures them"
        )


def _is_users_function(value: Any) -> bool:
    """Return True for a function in Python that the user has written."""
    if type(value) is not types.FunctionType:
        return False
    return is_users(value.__code__.co_filename)


def _module_or_type(value: Any) -> str:
    """Return the name of a module, or of the type of another object."""
    if is_instance(value, types.ModuleType):
        return str(module_dict(value).get("__name__", ""))
    return type_name(value)


class NamedValue(NamedTuple):
    """A dotted name in code, and what it refers to."""

    names: tuple[str, ...]
    """The parts of the name, such as ``("torch", "relu")``."""
    value: Any
    """None if it is unknown, such as that of ``model.encode``, whose owner is no module."""
    module: str
    """The name of the last module among the parts, or of one that the code imports; else empty."""
    owner: Any
    """The object of which the value is an attribute; None for a name without a dot."""


def names_in(
    code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...]
) -> Iterator[NamedValue]:
    """Yield the dotted names in ``code`` and in the users' functions that it names, with their
    values, and the libraries that this code imports first.
    """
    if code is None:
        return
    examined: dict[int, types.CodeType] = {}
    waiting = [(code, namespaces)]
    while waiting:
        code, spaces = waiting.pop()
        if id(code) in examined:
            continue
        examined[id(code)] = code
        inner_codes = [item for item in code.co_consts if type(item) is types.CodeType]
        waiting += [(inner, spaces) for inner in inner_codes]
        for named in _names_in_one(code, spaces):
            yield named
            # Library functions are not searched: they name many calls that they rarely make.
            function = named.value
            if _is_users_function(function):
                spaces_of_function = (closure_of(function), function.__globals__)
                waiting.append((function.__code__, spaces_of_function))


def _names_in_one(
    code: types.CodeType, namespaces: tuple[dict[str, Any], ...]
) -> Iterator[NamedValue]:
    """Yield the dotted names in one code object, then the libraries that it imports first."""
    for names in _dotted_names(code):
        value, module = _value_of_dotted_name(names, namespaces)
        owner = None
        if len(names) > 1:
            owner, _ = _value_of_dotted_name(names[:-1], namespaces)
        yield NamedValue(names, value, module, owner)
    for library in _imported_by(code):
        if library not in sys.modules:
            yield NamedValue((library,), value=None, module=library, owner=None)


def closure_of(function: Any) -> dict[str, Any]:
    """Return the variables that a function uses from enclosing functions, by name.

    Empty for an object that is not a function in Python.
    """
    if type(function) is not types.FunctionType:
        return {}
    variables: dict[str, Any] = {}
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            variables[name] = cell.cell_contents
    return variables


def _loses_items(value: object) -> bool:
    """Return True for an iterator whose items the estimated code would really take, such as an open
    file.

    An estimate works on a copy of an iterator in Python. But a copy may hold an iterator in C, as
    after ``self._lines = iter(file)``, which cannot be copied.
    """
    if not _is_iterator(value):
        return False
    if not _is_copied(value):
        return True
    attributes = instance_dict(value) or {}
    iterators = filter(_is_iterator, attributes.values())
    return not all(map(_is_copied, iterators))


def _is_iterator(value: object) -> bool:
    """Return True for an object whose class defines ``__next__``; runs no code of the class."""
    classes = type.mro(type(value))
    return any("__next__" in class_dict(kind) for kind in classes)


def _is_copied(value: object) -> bool:
    """Return True if the code works on a copy of an iterator: if its class is in Python."""
    return solid_base(type(value)) is object


_NAME_LOADS = (
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "IMPORT_NAME",
)
"""Beginnings of CPython's instructions that load the value of a name."""
_WITHOUT_EFFECT = ("CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG")
"""CPython's instructions that may be between a name and its attribute."""


def _dotted_names(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield each dotted name in ``code`` in full, such as ``("torch", "nn", "Linear")``.

    In the bytecode that is a load of ``torch``, followed by loads of the attributes.
    """
    path: list[str] = []
    for step in dis.get_instructions(code):
        instruction = step.opname
        if instruction in _WITHOUT_EFFECT:
            continue
        if instruction.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            path.append(str(step.argval))
            continue
        if path:  # complete
            yield tuple(path)
        path = []
        if instruction.startswith(_NAME_LOADS):
            path.append(_name_loaded(step))
    if path:
        yield tuple(path)


def _imported_by(code: types.CodeType) -> set[str]:
    """Return the top-level packages that ``code`` imports."""
    libraries = set[str]()
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            libraries.add(str(step.argval).partition(".")[0])
    return libraries - {""}  # of a relative import


def _name_loaded(step: dis.Instruction) -> str:
    """Return the name that an instruction loads last: since 3.13 one may load two names."""
    if type(step.argval) is tuple:
        return str(step.argval[-1])
    return str(step.argval)


def _value_of_dotted_name(
    names: tuple[str, ...], namespaces: tuple[dict[str, Any], ...]
) -> tuple[Any, str]:
    """Return the value of a dotted name, and the name of the last module in it.

    The value is None unless all parts but the last are modules: attributes of objects may run code.
    """
    first, *attributes = names
    value = _value_of(first, namespaces)
    if value is None:
        value = sys.modules.get(first)  # probably imported by the code itself
    module = ""
    for name in attributes:
        if not is_instance(value, types.ModuleType):
            return None, module
        space = module_dict(value)
        module = str(space.get("__name__", ""))
        value = space.get(name)
    return value, module


def _value_of(name: str, namespaces: tuple[dict[str, Any], ...]) -> Any:
    """Return the value of a name in the first namespace that has it, or None."""
    # Not by lookup: a copied namespace would copy the value.
    for space in namespaces:
        if dict.__contains__(space, name):
            return dict.get(space, name)
    return None
