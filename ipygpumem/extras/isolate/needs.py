"""Finds what a cell needs that a forked child process cannot use."""

from __future__ import annotations

import ast
import re
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.walk import ArraySearch
from ipygpumem.introspect import is_instance, module_dict, module_of, text_of
from ipygpumem.probes.accelerators import in_use, loaded_torch

_DEVICE = re.compile(r"(cuda|xpu)(:\d*)?")
_THREADED = ("polars", "jax", "tensorflow")
"""Libraries whose threads a fork loses: most of their calls then wait forever."""


def unusable(shell: Any, source: str) -> str:
    """Return why the cell cannot run in a forked child process; empty if nothing is known against
    it.
    """
    libraries = {"cupy", *_THREADED} & sys.modules.keys()
    devices = [backend for backend in ("cuda", "xpu") if in_use(backend) is not None]
    if not (libraries or devices):
        return ""
    words, values = _needs(shell, source)
    for name in sorted(libraries):
        if any(_library_of(value) == name for value in values):
            what = "threads of its own" if name in _THREADED else "the GPU"
            return (
                f"{name} cannot be used in a forked child process, because it has been using "
                f"{what} in this kernel"
            )
    search = ArraySearch()
    for device in devices:
        if device in words or any(_uses(device, value, search) for value in values):
            return (
                f"{device} is in use in this kernel, and a forked child process cannot use it: "
                "run the cell without %%isolate, or in a kernel that has not used the device yet"
            )
    return ""


def _needs(shell: Any, source: str) -> tuple[set[str], list[object]]:
    """Return the names and devices in the code and in the notebook's functions that it uses, and
    the names' values.
    """
    seen, namespace = set[str](), shell.user_ns
    try:
        tree = ast.parse(shell.transform_cell(source))
        waiting = [
            compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        ]
    except (SyntaxError, ValueError):  # the child process shows it
        return set(), []
    values = list[object]()
    while waiting:
        code = waiting.pop()
        waiting += [item for item in code.co_consts if type(item) is CodeType]
        texts = re.findall(
            r"'([^']*)'", repr([item for item in code.co_consts if type(item) is not CodeType])
        )
        devices = {match[1] for text in texts if (match := _DEVICE.fullmatch(text))}
        for name in {*code.co_names, *devices} - seen:
            seen.add(name)
            value = namespace.get(name)
            values.append(value)
            if type(value) is FunctionType and value.__globals__ is namespace:
                waiting.append(value.__code__)
    return seen, values


def _library_of(value: Any) -> str:
    name = (
        module_dict(value).get("__name__") if is_instance(value, ModuleType) else module_of(value)
    )
    return text_of(name).partition(".")[0]


def _uses(device: str, value: Any, search: ArraySearch) -> bool:
    """Return True for a device, its name, or an object that leads to its tensors."""
    if type(value) is str:
        return bool((match := _DEVICE.fullmatch(value)) and match[1] == device)
    kind = getattr(loaded_torch(), "device", None)
    if is_instance(kind, type) and type(value) is kind:
        return bool(value.type == device)
    return any(array.device.startswith(device) for _, array in search.find(value))
