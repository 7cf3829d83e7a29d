"""Finds what a cell needs that a forked child process cannot use."""

from __future__ import annotations

import ast
import re
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.introspect import is_instance, module_dict, module_of, text_of
from ipygpumem.probes.accelerators import initialized_backend, loaded_torch

_DEVICE = re.compile(r"(cuda|xpu)(:\d*)?")
_THREADED = ("polars", "jax", "tensorflow")
"""Libraries whose threads a fork loses: most of their calls then wait forever."""


def why_unusable(shell: Any, source: str) -> str:
    """Return why the cell cannot run in a forked child process, such as ``cuda is in use in this
    kernel, ...``; empty if no reason is found.
    """
    libraries = {"cupy", *_THREADED} & sys.modules.keys()
    devices = [backend for backend in ("cuda", "xpu") if initialized_backend(backend) is not None]
    if not (libraries or devices):
        return ""
    words, values = _names_and_values_used(shell, source)
    for name in sorted(libraries):
        if any(_library_of(value) == name for value in values):
            what = "threads of its own" if name in _THREADED else "the GPU"
            return (
                f"{name} cannot be used in a forked child process, because it has been using "
                f"{what} in this kernel"
            )
    search = ArraySearch()
    for device in devices:
        if device in words or any(_leads_to_device(device, value, search) for value in values):
            return (
                f"{device} is in use in this kernel, and a forked child process cannot use it: "
                "run the cell without %%isolate, or in a kernel that has not used the device yet"
            )
    return ""


def _names_and_values_used(shell: Any, source: str) -> tuple[set[str], list[object]]:
    """Return the names and devices in a cell's code, and the values of the names.

    It also follows the code of the notebook's functions that are used: for ``train()``, the names
    in ``train`` belong to them. Code that does not compile has none.
    """
    try:
        tree = ast.parse(shell.transform_cell(source))
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code_of_cell = compile(tree, "<cell>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):  # the child process shows it
        return set(), []
    namespace = shell.user_ns
    words = set[str]()
    values = list[object]()
    waiting: list[CodeType] = [code_of_cell]
    while waiting:
        code = waiting.pop()
        constants = [item for item in code.co_consts if type(item) is not CodeType]
        waiting += [item for item in code.co_consts if type(item) is CodeType]
        for word in {*code.co_names, *_devices_in(constants)} - words:
            words.add(word)
            value = namespace.get(word)
            values.append(value)
            if type(value) is FunctionType and value.__globals__ is namespace:
                waiting.append(value.__code__)
    return words, values


def _devices_in(constants: list[object]) -> set[str]:
    """Return the kinds of devices that constants name, also those in tuples and sets: ``cuda`` for
    ``"cuda:1"``.
    """
    devices = set[str]()
    # Code has constants of Python's own types only, so that their texts show nested tuples, too.
    for text in re.findall(r"'([^']*)'", repr(constants)):
        match = _DEVICE.fullmatch(text)
        if match:
            devices.add(match[1])
    return devices


def _library_of(value: Any) -> str:
    """Return the package of a module, or of an object's type."""
    name: object = module_of(value)
    if is_instance(value, ModuleType):
        name = module_dict(value).get("__name__")
    return text_of(name).partition(".")[0]


def _leads_to_device(device: str, value: Any, search: ArraySearch) -> bool:
    """Return True for a device, its name, or an object that leads to its tensors."""
    if type(value) is str:
        match = _DEVICE.fullmatch(value)
        return match is not None and match[1] == device
    kind = getattr(loaded_torch(), "device", None)
    if is_instance(kind, type) and type(value) is kind:
        return bool(value.type == device)
    return any(array.device.startswith(device) for _, array in search.find(value))
