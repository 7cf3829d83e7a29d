"""Whose code is it: the user's, or a library's, or ours. The file says so."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from ipygpumem.kinds import is_kind, module_dict, text_of

_OURS = str(Path(__file__).parent)


@functools.cache
def _libraries() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # it may be a checkout
    paths: list[str | None] = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), str(Path(torch).parent) if torch else None]
    return (*(path for path in paths if path), _OURS, "<frozen", "<string", "<__array_function__")


def is_users(filename: str) -> bool:
    """Whether a file is neither the standard library's, nor installed, nor ours."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return bool(filename) and not installed and not filename.startswith(_libraries())


def is_ours(filename: str) -> bool:
    """Whether a file is one of this package."""
    return filename.startswith(_OURS)


def is_users_module(module: Any) -> bool:
    """Whether a module is from a file of the user's, or was made by hand."""
    if not is_kind(module, ModuleType):
        return False
    names = module_dict(module)
    file = text_of(names.get("__file__"))
    return is_users(file) if file else names.get("__spec__") is None and "." not in text_of(names.get("__name__"))


def users_modules() -> dict[str, ModuleType]:
    """Return the modules from the user's files by name.

    A package's modules are whose the package is: there are thousands of modules, and to look into each takes longer.
    """
    modules: dict[str, Any] = dict(sys.modules)
    owned: dict[str, bool | None] = {}
    found = {}
    for name, module in modules.items():
        root, dot, _ = name.partition(".")
        if root not in owned:
            owned[root] = _is_users_package(modules.get(root))
        if owned[root] or (owned[root] is None and dot and is_users_module(module)):
            found[name] = module
    return {name: module for name, module in found.items() if is_kind(module, ModuleType)}


def _is_users_package(module: Any) -> bool | None:
    """Whether a top module is the user's; None for one without a file, such as a package of several folders."""
    if not is_kind(module, ModuleType):
        return None
    return is_users_module(module) or (None if not text_of(module_dict(module).get("__file__")) else False)
