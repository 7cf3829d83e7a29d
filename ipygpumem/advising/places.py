"""Follows paths such as ``model.layers[0].weight`` to their objects without running any code of the user's.

What it finds is what the same text means as Python code, or nothing: a path through a property, through a class with an
``__getattr__`` of its own, or with a key that cannot be written leads nowhere.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MemberDescriptorType
from typing import Any

from ipygpumem.introspect import (
    ATOMS,
    class_dict,
    instance_dict,
    is_atom,
    is_instance,
    key_text,
    text_of,
)
from ipygpumem.objects.arrays import library_type
from ipygpumem.objects.bulk import types_of

_MOST = 20_000
"""Objects that are looked at for the names of models and optimizers."""
_IN_MODULES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Outputs:
    """What IPython keeps in ``Out``."""

    cache: Mapping[int, object]
    """``Out`` itself: a copy would hold them, too."""
    numbers: frozenset[int]
    """Those that can be forgotten."""
    keepers: frozenset[int]
    """Identities of all objects with which IPython keeps outputs."""
    code: Callable[[int], str]
    """Returns the line that makes IPython forget one."""


NO_OUTPUTS = Outputs({}, frozenset(), frozenset(), str)


@dataclass(frozen=True)
class Scope:
    """The names that are seen where advice is asked for."""

    namespace: Mapping[str, Any]
    """The notebook's or the module's own dict, in which its names are kept."""
    local: Mapping[str, object]
    """A running function's, which come first."""
    is_users: Callable[[str], bool] = lambda name: not name.startswith("__")
    outputs: Outputs = NO_OUTPUTS

    def names(self) -> dict[str, object]:
        """Return the user's names and what they refer to now."""
        plain = {name: value for name, value in list(self.namespace.items()) if type(name) is str}
        return {**self.local, **{n: value for n, value in plain.items() if n not in self.local and self.is_users(n)}}

    def line_with(self, module: str, code: str) -> str:
        """Return a line that needs a module, with its import where the name does not stand for it."""
        is_there = self.names().get(module) is sys.modules.get(module)
        return code if is_there else f"import {module}; {code}"


@dataclass(frozen=True)
class Spot:
    """Where a path leads."""

    code: str
    """The path as it may be pasted."""
    value: object
    holders: frozenset[int]
    """Identities of what holds the value there: a namespace, a container, an object or its dict."""
    container: object = None
    """The list or dict of which it is an item."""
    container_code: str = ""
    takes: bool = False
    """Whether another object can be put there, by an assignment that runs no code of the user's."""

    @functools.cached_property
    def items(self) -> Any:
        """What indices lead to; nothing where only the user's code could tell."""
        value: Any = self.value
        if type(value) is list or type(value) is tuple:
            return value
        if type(value) is dict:  # to compare with other keys may run their code
            return value if ATOMS.issuperset(types_of(list(value))) else {}
        bases = [library_type("torch.nn", name) for name in ("Sequential", "ModuleList")]
        if not any(base and is_instance(value, base) for base in bases) or not has_torchs(value, "__getitem__"):
            return {}
        return {place: part for place, (name, part) in enumerate(entries(self.parts).items()) if name == str(place)}

    @property
    def parts(self) -> Any:
        """The dict with a module's parts."""
        return (instance_dict(self.value) or {}).get("_modules")


class Paths:
    """Finds where paths lead; each is looked up once, and what many begin with, too.

    Args:
        scope: has the names.
        names: what they refer to now.
    """

    def __init__(self, scope: Scope, names: Mapping[str, object]) -> None:
        self._scope, self._names = scope, names
        self._known: dict[str, Spot | None] = {}

    def spot(self, path: str) -> Spot | None:
        """Return where a path leads; None if it is no code, or only the user's code could tell."""
        if path not in self._known:
            try:
                self._known[path] = self._spot(ast.parse(path, mode="eval").body)
            except (SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError):
                self._known[path] = None
        return self._known[path]

    def _spot(self, node: ast.expr) -> Spot | None:
        code = ast.unparse(node)
        if code not in self._known:
            self._known[code] = self._find(node, code)
        return self._known[code]

    def _find(self, node: ast.expr, code: str) -> Spot | None:
        if isinstance(node, ast.Name):
            holders = () if node.id in self._scope.local else (id(self._scope.namespace),)
            return Spot(code, self._names[node.id], frozenset(holders), takes=True)
        if not isinstance(node, (ast.Attribute, ast.Subscript)):
            return None
        owner = self._spot(node.value)
        if owner is None:
            return None
        if isinstance(node, ast.Attribute):
            return _attribute(owner.value, node.attr, code)
        return _item(owner, node.slice.value, code) if isinstance(node.slice, ast.Constant) else None


def _item(owner: Spot, key: Any, code: str) -> Spot:
    container, item = owner.value, owner.items[key]
    if type(container) in (list, tuple, dict):
        return Spot(code, item, frozenset({id(container)}), container, owner.code, type(container) is not tuple)
    return Spot(code, item, frozenset({id(owner.parts)}))


def _attribute(owner: Any, name: str, code: str) -> Spot | None:
    found = _lookup(type(owner), name)
    is_slot = type(found) is MemberDescriptorType
    if _lookup(type(owner), "__getattribute__") is not object.__getattribute__:
        return None
    if is_slot:
        takes = _lookup(type(owner), "__setattr__") is object.__setattr__
        return Spot(code, found.__get__(owner), frozenset({id(owner)}), takes=takes)
    if any("__set__" in class_dict(kind) for kind in type.mro(type(found))):
        return None
    attributes = instance_dict(owner) or {}
    if name in attributes:
        is_plain = _lookup(type(owner), "__setattr__") is object.__setattr__ or _is_torchs(owner, "__setattr__")
        return Spot(code, attributes[name], frozenset({id(owner), id(attributes)}), takes=is_plain)
    if found is None and _is_torchs(owner, "__getattr__"):
        parts: list[Any] = [part for part in map(attributes.get, _IN_MODULES) if is_instance(part, dict)]
        for part in parts:
            if dict.__contains__(part, name):
                takes = _is_torchs(owner, "__setattr__")
                return Spot(code, dict.__getitem__(part, name), frozenset({id(part)}), takes=takes)
    return None


def _lookup(kind: type, name: str) -> Any:
    """Return what a class has under a name, past its metaclass; None if nothing."""
    return next((class_dict(base)[name] for base in type.mro(kind) if name in class_dict(base)), None)


def _is_torchs(owner: object, method: str) -> bool:
    """Whether an object is one of torch's modules, and the method is the one that torch wrote."""
    base = library_type("torch.nn", "Module")
    return base is not None and is_instance(owner, base) and has_torchs(owner, method)


def has_torchs(owner: object, *methods: str) -> bool:
    """Whether torch wrote these methods of an object."""
    found = [_lookup(type(owner), name) for name in methods]
    return all(type(item) is FunctionType and f"{text_of(item.__module__)}.".startswith("torch.") for item in found)


def entries(item: Any) -> dict[Any, Any]:
    """Return what is in a dict, also in one of a class derived from it; nothing for another object."""
    return dict(dict.items(item)) if is_instance(item, dict) else {}


def inner(module: Any, part: str) -> dict[str, Any]:
    """Return a module's ``_modules``, ``_parameters`` or ``_buffers``, without the empty ones."""
    found = entries((instance_dict(module) or {}).get(part))
    return {name: item for name, item in found.items() if item is not None}


def outermost(modules: Iterable[Any]) -> list[Any]:
    """Return the modules that are no other's part."""
    modules = list(modules)
    parts = {id(part) for module in modules for part in inner(module, "_modules").values()}
    return [module for module in modules if id(module) not in parts]


def with_parts(module: Any) -> list[tuple[str, Any]]:
    """Return a module and all modules in it, each once, behind the path that leads there from the first."""
    found, seen = [("", module)], {id(module)}
    for path, one in found:  # the list grows
        for name, part in inner(one, "_modules").items():
            if id(part) not in seen:
                seen.add(id(part))
                found.append((f"{path}[{name}]" if name.isdecimal() else f"{path}.{name}", part))
    return found


def tensors_of(part: Any) -> list[Any]:
    """Return a module's own parameters and buffers, without those of the modules in it."""
    return [item for name in ("_parameters", "_buffers") for item in inner(part, name).values()]


def parameters_of(module: Any) -> list[Any]:
    """Return the parameters of a module and of all in it, each once."""
    several = [item for _, part in with_parts(module) for item in inner(part, "_parameters").values()]
    return list({id(item): item for item in several}.values())


def named(names: Mapping[str, object], wanted: Iterable[object]) -> Iterator[tuple[object, str]]:
    """Yield those of ``wanted`` that names lead to, by attributes and plain containers, with the shortest path."""
    missing = {id(item): item for item in wanted}
    waiting, seen = deque((value, name) for name, value in names.items()), set[int]()
    for _ in range(_MOST):
        if not waiting or not missing:
            return
        item, path = waiting.popleft()
        if id(item) in missing:
            yield missing.pop(id(item)), path
        if is_atom(item) or id(item) in seen or is_instance(item, type(sys)) or is_instance(item, type):
            continue
        seen.add(id(item))
        if type(item) is list or type(item) is tuple:
            waiting += [(value, f"{path}[{place}]") for place, value in enumerate(item[:_MOST])]
        elif type(item) is dict:
            pairs = [(value, key_text(key)) for key, value in list(item.items())[:_MOST]]
            waiting += [(value, f"{path}[{key}]") for value, key in pairs if key is not None]
        elif path.count(".") < 2 and type(item) is not FunctionType:
            pairs = [(value, text_of(key)) for key, value in list((instance_dict(item) or {}).items())]
            waiting += [(value, f"{path}.{key}") for value, key in pairs]
