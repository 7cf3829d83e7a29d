"""Finds effects that an estimate cannot undo: calls that read, write, print or start processes, and
used iterators.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

from ipygpumem.errors import EstimateError
from ipygpumem.heap.arrays import is_of_library
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

_CALLS = (
    *(
        "Popen",
        "add_scalar",
        "add_image",
        "add_histogram",
        "input",
        "open",
        "print",
        "savefig",
        "system",
    ),
    *(
        "load",
        "read_bytes",
        "read_csv",
        "read_parquet",
        "read_text",
        "write",
        "write_bytes",
        "write_text",
    ),
    *(
        "to_csv",
        "to_excel",
        "to_feather",
        "to_hdf",
        "to_parquet",
        "to_pickle",
        "to_sql",
        "tofile",
        "writelines",
    ),
    *(
        "dump",
        "save",
        "save_model",
        "save_pretrained",
        "savetxt",
        "savez",
        "savez_compressed",
        "push_to_hub",
    ),
    *(
        "imsave",
        "imwrite",
        "makedirs",
        "mkdir",
        "mkdtemp",
        "mkstemp",
        "rmdir",
        "rmtree",
        "touch",
        "unlink",
    ),
    *("urlopen", "urlretrieve", "copyfile", "copytree", "NamedTemporaryFile", "SummaryWriter"),
    *("TemporaryDirectory", "Process", "Pool", "ProcessPoolExecutor", "init_process_group"),
)
"""Names of functions and methods with effects outside the estimate, in any module."""
_MODULES = (
    "multiprocessing",
    "requests",
    "shutil",
    "socket",
    "sqlite3",
    "subprocess",
    "wandb",
    "mlflow",
    "urllib",
)
"""Modules of which any function has such effects."""
_OF_OS = (
    *(
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
    ),
    *("renames", "replace", "startfile", "symlink", "truncate"),
)
"""The same of the module ``os`` alone: other modules and objects have harmless functions of these
names.
"""

WAITS = (
    "other threads do not see what the estimated code puts into a queue, so these calls may never "
    "return"
)


def effects_of(
    code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...], args: tuple[Any, ...] = ()
) -> list[str]:
    """Return notes on the effects of ``code``, and of the users' functions that it names, that
    cannot be undone.

    Names are looked up in ``namespaces``; ``args`` are the arguments of the call.
    """
    calls: set[str] = set()
    iterators: set[str] = {f"a {type_name(value)}" for value in args if _is_consumed(value)}
    waiting: set[str] = set()
    for names, value, module, owner in named_by(code, namespaces):
        top = module.partition(".")[0] or (names[0] if len(names) > 1 else "")
        is_of_os = top in ("os", "posix", "nt") and names[-1] in _OF_OS
        reaches_out = is_of_os or names[-1] in _CALLS or (top in _MODULES and len(names) > 1)
        if reaches_out and (top, names[-1]) != ("torch", "save"):  # torch.save is replaced
            calls.add(".".join(names))
        if _is_consumed(value):
            iterators.add(".".join(names))
        if names[-1] in ("get", "join", "put") and is_of_library(owner, "queue", "Queue"):
            waiting.add(".".join(names))
    notes = []
    if calls:
        notes.append(
            f"only tensors are fake; calls to these run for real: {', '.join(sorted(calls))}"
        )
    if iterators:
        notes.append(
            f"items that the code takes from these iterators are lost: "
            f"{', '.join(sorted(iterators))}"
        )
    if waiting:
        notes.append(f"{WAITS}: {', '.join(sorted(waiting))}")
    return notes


def refuse_numpy(
    code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...], args: tuple[Any, ...]
) -> None:
    """Raise an EstimateError if ``code`` calls NumPy and names nothing that may hold tensors."""
    tops = {type_name(value) for value in args if not is_atom(value)}
    for _, value, module, _ in named_by(code, namespaces):
        is_looked_into = type(value) is types.FunctionType and is_users(value.__code__.co_filename)
        if module:
            tops.add(module.partition(".")[0])
        elif value is not None and not is_atom(value) and not is_looked_into:
            is_module = is_instance(value, types.ModuleType)
            name = str(module_dict(value).get("__name__", "")) if is_module else type_name(value)
            tops.add(name.partition(".")[0])
    if "numpy" in tops and not tops - {"numpy", "ndarray", *sys.stdlib_module_names}:
        raise EstimateError(
            "NumPy arrays are not estimated: code really allocates them, and this code names no "
            "tensor"
        )


def named_by(
    code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...]
) -> Iterator[tuple[tuple[str, ...], Any, str, Any]]:
    """Yield the dotted names in ``code`` and in the users' functions that it names, with values,
    modules and owners.
    """
    seen: dict[int, types.CodeType] = {}
    waiting = [(code, namespaces)] if code is not None else []
    while waiting:
        code, spaces = waiting.pop()
        if id(code) in seen:
            continue
        seen[id(code)] = code
        waiting += [(item, spaces) for item in code.co_consts if type(item) is types.CodeType]
        for names in _paths(code):
            value, module = _at(names, spaces)
            yield names, value, module, _at(names[:-1], spaces)[0] if len(names) > 1 else None
            # Library functions are not searched: they name many calls that they rarely make.
            if type(value) is types.FunctionType and is_users(value.__code__.co_filename):
                waiting.append((value.__code__, (closure_of(value), value.__globals__)))


def closure_of(function: Any) -> dict[str, Any]:
    """Return the variables that a function uses from enclosing functions, by name."""
    names: dict[str, Any] = {}
    if type(function) is types.FunctionType:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                names[name] = cell.cell_contents
    return names


def _is_consumed(value: object) -> bool:
    """Return True for an iterator that is not copied, or whose copy shares such an iterator."""

    def is_iterator(value: object) -> bool:
        return any("__next__" in class_dict(kind) for kind in type.mro(type(value)))

    is_copied = solid_base(type(value)) is object
    held = (instance_dict(value) or {}).values() if is_copied else (value,)
    return is_iterator(value) and any(
        is_iterator(item) and solid_base(type(item)) is not object for item in held
    )


def _paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield each dotted name in ``code`` in full."""
    path: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            path.append(str(step.argval))
        elif step.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG"):
            if path:
                yield tuple(path)
            kinds = (
                "LOAD_NAME",
                "LOAD_GLOBAL",
                "LOAD_FAST",
                "LOAD_DEREF",
                "LOAD_CLASSDEREF",
                "IMPORT_NAME",
            )
            named = step.opname.startswith(kinds)
            # two names at once since 3.13
            last = step.argval[-1:] if type(step.argval) is tuple else (step.argval,)
            path = [str(name) for name in last] if named else []
    if path:
        yield tuple(path)


def _at(names: tuple[str, ...], namespaces: tuple[dict[str, Any], ...]) -> tuple[Any, str]:
    """Return the value of a dotted name, if all but its end are modules, and the name of the last
    module.
    """
    value: Any = next(
        (dict.get(space, names[0]) for space in namespaces if dict.__contains__(space, names[0])),
        None,
    )
    if value is None and names[0] in sys.modules:  # probably imported by the code itself
        value = sys.modules[names[0]]
    module = ""
    for name in names[1:]:
        if not is_instance(value, types.ModuleType):
            return None, module
        space = module_dict(value)
        module = str(space.get("__name__", ""))
        value = space.get(name)
    return value, module
