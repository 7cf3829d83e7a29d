"""Finds calls in code that reach beyond its tensors: they read, write, print or start processes."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

from ipygpumem.introspect import is_instance, is_users, module_dict

_CALLS = frozenset(
    [
        *("Popen", "add_scalar", "add_image", "add_histogram", "input", "open", "print", "savefig", "system"),
        *("load", "read_bytes", "read_csv", "read_parquet", "read_text", "write", "write_bytes", "write_text"),
        *("to_csv", "to_excel", "to_feather", "to_hdf", "to_parquet", "to_pickle", "to_sql", "tofile", "writelines"),
        *("dump", "save", "save_model", "save_pretrained", "savetxt", "savez", "savez_compressed", "push_to_hub"),
        *("imsave", "imwrite", "makedirs", "mkdir", "mkdtemp", "mkstemp", "rmdir", "rmtree", "touch", "unlink"),
        *("urlopen", "urlretrieve", "copyfile", "copytree", "NamedTemporaryFile", "SummaryWriter"),
        "TemporaryDirectory",
    ]
)
"""Names whose calls reach beyond the estimate, whatever they belong to."""
_MODULES = frozenset(["requests", "shutil", "socket", "sqlite3", "subprocess", "wandb", "mlflow", "urllib"])
"""Modules of which any function does."""
_OF_OS = frozenset(
    [
        *("chdir", "chmod", "kill", "link", "makedirs", "mkdir", "popen", "putenv", "remove", "removedirs", "rename"),
        *("renames", "replace", "rmdir", "startfile", "symlink", "system", "truncate", "unlink", "write"),
    ]
)
_HARMLESS = frozenset([("torch", "save")])
"""Calls that are replaced."""


def effects_of(code: types.CodeType, namespaces: tuple[dict[str, Any], ...]) -> list[str]:
    """Return the calls that ``code`` names, and functions of the user's that it names, in order of their names."""
    effects: set[str] = set()
    seen: dict[int, types.CodeType] = {}
    waiting = [(code, namespaces)]
    while waiting:
        code, spaces = waiting.pop()
        if id(code) in seen:
            continue
        seen[id(code)] = code
        waiting += [(item, spaces) for item in code.co_consts if type(item) is types.CodeType]
        for names in _paths(code):
            value, module = _at(names, spaces)
            if _reaches_out(names, module):
                effects.add(".".join(names))
            # Libraries' own functions name much that they seldom do.
            if type(value) is types.FunctionType and is_users(value.__code__.co_filename):
                waiting.append((value.__code__, (value.__globals__,)))
    return sorted(effects)


def _paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the dotted names in ``code``, the longest of each."""
    path: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            path.append(str(step.argval))
        elif step.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG"):
            if path:
                yield tuple(path)
            named = step.opname.startswith(("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF"))
            last = step.argval[-1:] if type(step.argval) is tuple else (step.argval,)  # two in one, from 3.13 on
            path = [str(name) for name in last] if named else []
    if path:
        yield tuple(path)


def _at(names: tuple[str, ...], namespaces: tuple[dict[str, Any], ...]) -> tuple[Any, str]:
    """Return what a dotted name is, as far as modules go, and the name of the last module on the way."""
    value: Any = next((dict.get(space, names[0]) for space in namespaces if dict.__contains__(space, names[0])), None)
    if value is None and names[0] in sys.modules:  # imported by the code itself, as often as not
        value = sys.modules[names[0]]
    module = ""
    for name in names[1:]:
        if not is_instance(value, types.ModuleType):
            return None, module
        space = module_dict(value)
        module = str(space.get("__name__", ""))
        value = space.get(name)
    return value, module


def _reaches_out(names: tuple[str, ...], module: str) -> bool:
    top = module.partition(".")[0] or (names[0] if len(names) > 1 else "")
    if (top, names[-1]) in _HARMLESS:
        return False
    if top in ("os", "posix", "nt"):
        return names[-1] in _OF_OS
    return names[-1] in _CALLS or (top in _MODULES and len(names) > 1)
