"""Roots: the names, outputs, threads and modules at which paths to objects begin, such as
``notebook variable runs`` in ``notebook variable runs[3]``.
"""

from __future__ import annotations

import builtins
import re
import sys
import weakref
from collections.abc import Callable, Container, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import IntEnum
from types import FrameType, ModuleType
from typing import Any

from ipygpumem.heap.paths.ages import Ages
from ipygpumem.heap.paths.attributes_to_remove import is_in_code, is_in_source, is_users_callable
from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.patches import line_that_stops, patch_of
from ipygpumem.heap.paths.task_endings import ContextValue
from ipygpumem.introspect import (
    is_instance,
    is_name,
    is_users_module,
    module_dict,
    target_of,
    text_of,
)

NOTEBOOK, EVENT_LOOP = "notebook variable ", "the event loop"
KEPT = "kept variable "
"""Begins the path of a name that an experiment keeps on purpose."""


class Rank(IntEnum):
    """The kinds of roots. If several lead to an object, the one with the lowest rank is shown."""

    VARIABLE = 0
    PLACE = 1
    """Another place that a user knows, such as ``Out[5]``, a logger or a timer."""
    MODULE = 2
    """A module's global name, or IPython's name for an output, such as ``_5``."""
    IPYTHON = 3
    """IPython's own copies, whose variables users should keep."""
    OURS = 4
    """An object of this package."""
    KEPT = 5
    """A name that is kept on purpose."""
    NOWHERE = 9
    """No root that Python sees."""


@dataclass(frozen=True)
class Root:
    """The place at which a path begins, such as a variable.

    Its own ``advice`` is only used if no reference on the path can be removed: a line about the
    root may delete much that is older than the memory to free.
    """

    text: str
    """The beginning of the path, such as ``notebook variable runs``."""
    rank: Rank
    _: KW_ONLY
    advice: str = ""
    """The line or words that free its object, if nothing on the path can be removed; may be empty.
    """
    code: str = ""
    """The code to type for its object, after the imports; empty if it cannot be typed."""
    is_removed_as_whole: bool = False
    """True if its line removes all objects to which it leads, such as ``plt.close(1)``: steps after
    it get no code.
    """
    cut: Cut | None = None
    """The root's reference to its object, if that can be removed."""
    is_only_place: bool = False
    """True if no further place that holds its object has to be searched: its line frees the object,
    as a call that ends a timer does.
    """
    is_permanent: bool = False
    """True if its object always stays alive, such as a logger with a name: no further holder of it
    matters, because the line only empties it.
    """
    name: str = ""
    """The name of a variable, a local or a global, or ``Out``; empty for any other root."""
    module: str = ""
    """The module of which it is a global; empty for any other root."""
    plural: str = ""
    """The noun for several roots of its kind, ``matplotlib figures``; empty if a report names the
    first one and the number of further ones instead.
    """
    is_variable: bool = False
    """True for a variable of the notebook."""
    is_of_library: bool = False
    """True if it belongs to a library, whose code may need each reference."""
    is_output: bool = False
    """True for ``Out[5]``, and for IPython's names for it, such as ``_5`` and ``_``."""
    is_freed_by_command: bool = False
    """True if ``%gpumem free`` frees its object."""

    @classmethod
    def of_variable(cls, key: object) -> Root:
        """Return the root of a notebook's name."""
        code = target_of(key) if type(key) is str else ""
        return cls(
            f"{NOTEBOOK}{text_of(key)}",
            Rank.VARIABLE,
            code=code,
            cut=Cut.of_root(Kind.NAME, code) if code else None,
            name=text_of(key),
            is_variable=True,
        )

    @classmethod
    def freed_by_command(cls, text: str, rank: Rank) -> Root:
        """Return the root of an object that ``%gpumem free`` frees."""
        return cls(text, rank, advice="%gpumem free", is_freed_by_command=True)

    @classmethod
    def of_module(cls, module: str, key: object, code: str = "") -> Root:
        """Return the root of a module's global name.

        Args:
            module: the name of the module.
            key: the global name; None for an object to which the module refers without a name.
            code: the user's expression for the module; empty if there is none.
        """
        name = text_of(key)
        if (module, name) in _LAST_ERROR:
            return LAST_ERROR
        if key is None:
            return cls(f"module {module}", Rank.MODULE, is_of_library=True)
        text = f"module {module}, global {name}"
        root = cls(text, Rank.MODULE, name=name, module=module)
        if not code or not is_name(name):
            return replace(root, is_of_library=True)
        patch = patch_of(sys.modules.get(module), name)
        if patch is not None:  # stopping it puts the original back
            return cls.of_patch(patch)
        root = replace(root, code=f"{code}.{name}")
        if (module, name) in _FILLED_BY_USERS or _is_of_hooks(module, name):
            return root  # no cut: a line removes items from it, not the container
        cut = _cut_of_global(module, name, code)
        if cut is None:
            return replace(root, is_of_library=True)
        return replace(root, is_removed_as_whole=(module, name) in _RESETTING_CALLS, cut=cut)

    @classmethod
    def of_context(cls, value: ContextValue) -> Root:
        """Return the root of a context variable."""
        text = f"context variable {value.variable}"
        cut = Cut.of_root(Kind.CALL, value.advice) if value.advice else None
        return cls(text, Rank.PLACE, advice=value.advice, code=value.code, cut=cut)

    @classmethod
    def of_patch(cls, patch: object) -> Root:
        """Return the root of a started patch of ``unittest.mock``."""
        cut = Cut.of_root(Kind.CALL, line_that_stops(patch))
        text = "a started patch of unittest.mock"
        return cls(text, Rank.PLACE, is_removed_as_whole=True, cut=cut, is_only_place=True)

    @classmethod
    def of_running(cls, frame: FrameType, thread: str, name: str) -> Root:
        """Return the root of a local name of a running function.

        Args:
            frame: the frame of the function.
            thread: the name of its thread.
            name: the local name.
        """
        code = frame.f_code
        where = f'thread "{thread}": running {code.co_name}() line {frame.f_lineno}, local {name}'
        return cls(where, Rank.PLACE, advice="let the function return", name=name)


NO_ROOT = Root("", Rank.NOWHERE)
"""Stands for the root of a path that begins with words."""


def _cut_of_global(module: str, name: str, code: str) -> Cut | None:
    """Return the reference of a module's global name to its value, which a line can remove; None if
    a library's code may need it.

    Args:
        module: the name of the module.
        name: the global name.
        code: the expression for the module.
    """
    owner: Any = sys.modules.get(module)
    names: Mapping[str, object] = {}
    if is_instance(owner, ModuleType):
        names = module_dict(owner)
    is_users_function = is_users_callable(names.get(name))
    target = f"{code}.{name}"
    if (module, name) in _REPLACED_FUNCTIONS and not is_users_function:
        return None  # that of a debugger, or of another library
    if (module, name) in _RESETTING_CALLS:  # re.purge()
        return Cut(Kind.CALL, id(owner), code, _RESETTING_CALLS[module, name])
    if is_users_module(owner):  # settings.cache = None
        return Cut(Kind.ATTRIBUTE, id(owner), code, target)
    if _is_added_by_user(owner, name):  # del builtins.dataset
        return Cut(Kind.DELETED_ATTRIBUTE, id(owner), code, target)
    original = f"__{name}__"
    if original in names and is_users_function:  # sys.excepthook = sys.__excepthook__
        call = f"{target} = {split(code)[1]}.{original}"
        return Cut(Kind.CALL, id(owner), code, call)
    return None


LAST_ERROR = Root.freed_by_command("the last error", Rank.PLACE)
_LAST_ERROR = {("sys", name) for name in ("last_value", "last_traceback", "last_exc")}


_RESETTING_CALLS = {
    ("threading", "_trace_hook"): "import threading; threading.settrace(None)",
    ("threading", "_profile_hook"): "import threading; threading.setprofile(None)",
    ("logging", "_logRecordFactory"): (
        "import logging; logging.setLogRecordFactory(logging.LogRecord)"
    ),
    ("warnings", "showwarning"): (
        "import warnings; warnings.showwarning = warnings._showwarning_orig"
    ),
    ("re", "_cache"): "import re; re.purge()",
    ("re", "_cache2"): "import re; re.purge()",
    ("regex._main", "_cache"): "import regex; regex.purge()",
    ("linecache", "cache"): "import linecache; linecache.clearcache()",
    ("urllib.parse", "_parse_cache"): "import urllib.parse; urllib.parse.clear_cache()",
}
"""The call that empties a library's cache, or resets a function in it, by its module and name.
"""
_REPLACED_FUNCTIONS = {
    ("warnings", "showwarning"),
    ("threading", "_trace_hook"),
    ("threading", "_profile_hook"),
    ("logging", "_logRecordFactory"),
}
"""Functions among these names, which a debugger or another library may have set."""
_FILLED_BY_USERS = {
    ("gc", "callbacks"),
    ("warnings", "filters"),
    ("copyreg", "dispatch_table"),
    ("sqlite3", "adapters"),
    ("sqlite3", "converters"),
    *[("sys", name) for name in ("path_hooks", "meta_path", "path_importer_cache")],
}
"""Containers of the standard library to which users add items, and remove them again."""


def _is_of_hooks(module: str, name: str) -> bool:
    """Return True for a dict with hooks that torch calls for all modules: the line deletes a hook
    from it, as ``remove()`` of the hook's handle does, and keeps the dict.
    """
    is_global = name.startswith("_global_") and name.endswith("_hooks")
    return module == "torch.nn.modules.module" and is_global


def _is_added_by_user(module: Any, name: str) -> bool:
    """Return True for a global that the user has added to a library's module, such as
    ``builtins.dataset``: the library's own code does not have the name.

    A name of the library occurs in the module's source, as ``numpy.nan`` does, or in the code of
    its functions, as ``re._cache`` does. If there is no source, no name counts as added.
    """
    if not is_instance(module, ModuleType):
        return False
    names = module_dict(module)
    module_name = text_of(names.get("__name__"))
    if module_name in _NAMES_IN_C:
        is_own_name = name in _NAMES_IN_C[module_name]
    else:
        is_own_name = is_in_source(module, name)
    if is_own_name or is_in_code(module, name):
        return False
    return f"__{name}__" not in names  # such as ``sys.excepthook``


_NAMES_IN_C = {"builtins": frozenset(vars(builtins)), "sys": frozenset(vars(sys))}
"""Names that code in C uses, as far as they existed when this package was imported."""


RootOf = Callable[[object], Root | None]
"""A function that returns the root of a key of a namespace, such as the name of a variable; None to
ignore the key.
"""


@dataclass(frozen=True)
class RemovedByLines:
    """Collects the objects that the lines of a report may remove, while these are written.

    The report reads them when all lines are written. It has to know which other data the lines
    drop, and which cycles they end. A later report recognises the records, modules and figures.
    """

    objects: dict[int, object] = field(default_factory=dict)
    """The objects to which the removed references lead, and objects that a call ends, by identity.
    """
    records: dict[int, object] = field(default_factory=dict)
    """The records that lines remove as a whole, by identity."""
    modules_and_figures: list[weakref.ref[Any]] = field(default_factory=list)
    """The new modules of torch and figures that lines remove as a whole."""

    def add_object(self, item: object) -> None:
        """Add an object to which a removed reference leads, or which a call ends."""
        self.objects[id(item)] = item

    def add_record(self, record: object) -> None:
        """Add a record that a line removes as a whole."""
        self.records[id(record)] = record

    def add_module_or_figure(self, item: object) -> None:
        """Add a new module of torch, or figure, that a line removes as a whole."""
        self.modules_and_figures.append(weakref.ref(item))


@dataclass(frozen=True)
class LinesOfReport:
    """The objects that the lines of one report must keep, and a collector for those that they
    remove.

    Attributes:
        ages: tells which objects are older than the memory to free: a line keeps them.
        received: returns the identities of the records that older objects have received since, such
            as ``checkpoints["epoch 1"]``: a line removes each as a whole.
        removed: collects the objects of all lines. The caller passes an empty one, and
            reads it at the end.
    """

    ages: Ages = field(default_factory=Ages)
    received: Callable[[], Container[int]] = frozenset
    removed: RemovedByLines = field(default_factory=RemovedByLines)


@dataclass(frozen=True)
class Roots:
    """The objects that the user can name, except modules, threads and running functions, which
    every program has.

    Attributes:
        namespaces: for each dict of names, by its identity, the function that returns the root of a
            key.
        objects: the root of each object that is one itself, such as the shell, by the identity of
            the object.
        registered: the root of each object that a registry keeps, such as a logger, by the identity
            of the object: no other object need refer to it.
        hidden: identities of objects that searches skip, because they are no holders: registries of
            which ``registered`` has all objects, and objects that a caller adds.
        cell_of: returns the number of the cell with a code's file name.
        names: the user's names, to write the statement that frees an object.
        lines: the objects that lines about these roots keep and remove.
    """

    namespaces: Mapping[int, RootOf] = field(default_factory=dict)
    objects: Mapping[int, Root] = field(default_factory=dict)
    registered: Mapping[int, Root] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()
    cell_of: Callable[[str], int | None] = lambda filename: None
    names: Mapping[str, object] = field(default_factory=dict)
    lines: LinesOfReport = field(default_factory=LinesOfReport)


_QUOTED = re.compile(r"""(?<=\[)("[^"]*"|b?'(\\.|[^'\\])*')""")
"""Matches text as the key of an item."""


def without_keys(path: str) -> str:
    """Return a path without the text of keys, which may be anything: ``runs[]`` for
    ``runs["a: b"]``.
    """
    return _QUOTED.sub("", path)


def module_code(name: str, names: Mapping[str, object]) -> str:
    """Return the code by which a notebook refers to a loaded module, ``np``, ``sklearn.base`` or
    ``import re; re``; empty if there is none.

    Args:
        name: the name of the module.
        names: the names of the notebook.
    """
    modules: dict[str, object] = dict(sys.modules)
    aliases = [key for key, value in list(names.items()) if value is modules[name]]
    if aliases:  # np
        return aliases[0]
    if not all(map(str.isidentifier, name.split("."))):
        return ""
    package = name.partition(".")[0]
    is_package_bound = "." in name and names.get(package) is modules.get(package)
    return name if is_package_bound else f"import {name}; {name}"
