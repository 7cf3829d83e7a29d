"""Roots of references: the names, outputs, threads and modules at which a search for holders ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType

from ipygpumem.heap.holders.tasks import ContextValue
from ipygpumem.introspect import is_name, is_users_module, target_of, text_of

OF_MODULE, OF_IPYTHON = 2, 3
"""The ranks of modules' global names, and of IPython's own copies."""
NOTEBOOK, EVENT_LOOP = "notebook variable ", "the event loop"
REMOVE = "remove it from there"
"""Advice for a reference that no line can be written for."""


@dataclass(frozen=True)
class Root:
    """A root of references, such as a variable; the one with the lowest ``rank`` is shown.

    No advice deletes more than the leak: a name may lead to much else, and be older than the leak.
    """

    text: str
    rank: int
    advice: str
    code: str = ""
    """The code to type for it, after a statement with its imports; empty if it cannot be typed."""
    is_all: bool = False
    """True if its target cannot be typed."""

    @classmethod
    def of_variable(cls, key: object) -> Root:
        """Return the root of a notebook's name."""
        return cls(f"{NOTEBOOK}{text_of(key)}", 0, "", code=target_of(key) if type(key) is str else "")

    @classmethod
    def of_module(cls, module: str, key: object, code: str = "") -> Root:
        """Return the root of a module's global name; ``code`` is the user's expression for the module."""
        if (module, text_of(key)) in _LAST_ERROR:
            return LAST_ERROR
        where = f"module {module}, global {text_of(key)}" if key is not None else f"module {module}"
        advice = "" if code and is_users_module(sys.modules.get(module)) else REMOVE
        return cls(where, OF_MODULE, advice, f"{code}.{key}" if code and is_name(text_of(key)) else "")

    @classmethod
    def of_context(cls, found: ContextValue) -> Root:
        """Return the root of a context variable."""
        return cls(f"context variable {found.variable}", 1, found.advice, found.code)

    @classmethod
    def of_running(cls, frame: FrameType, thread: str, name: str) -> Root:
        """Return the root of a local name of a running function."""
        code = frame.f_code
        where = f'thread "{thread}": running {code.co_name}() line {frame.f_lineno}, local {name}'
        return cls(where, 1, "let the function return")


LAST_ERROR = Root("the last error", 1, "%gpumem free")
_LAST_ERROR = {("sys", name) for name in ("last_value", "last_traceback", "last_exc")}


@dataclass(frozen=True)
class Roots:
    """The objects that the user can name, except modules, threads and running functions, which every program has.

    Attributes:
        namespaces: by the identity of a dict: returns the root of one of its keys; None to ignore the key.
        objects: roots by the identity of an object.
        hidden: identities of objects to skip, which refer to their contents only temporarily.
        cell_of: returns the number of the cell with a code's file name.
        names: the user's names, to write the statement that frees an object.
    """

    namespaces: Mapping[int, Callable[[object], Root | None]] = field(default_factory=dict)
    objects: Mapping[int, Root] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()
    cell_of: Callable[[str], int | None] = lambda filename: None
    names: Mapping[str, object] = field(default_factory=dict)


def module_code(name: str, names: Mapping[str, object]) -> str:
    """Return the code with which a notebook with these ``names`` refers to a loaded module; empty if there is none."""
    modules: dict[str, object] = dict(sys.modules)
    first = name.partition(".")[0]
    aliases = [key for key, value in list(names.items()) if value is modules[name]]
    if aliases:
        return aliases[0]
    is_bound = names.get(first) is modules.get(first) and "." in name
    written = name if all(map(str.isidentifier, name.split("."))) else ""
    return written if is_bound or not written else f"import {name}; {name}"
