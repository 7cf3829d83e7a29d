"""Finds and clears the outputs that IPython keeps after a cell: ``Out``, ``_5``, ``_``, ``__``,
``___``.

It also clears caches without a name: modules of %run, objects of %store, the debugger. The user
loses nothing: a script's names are in the notebook, a stored object is in its file, and the
debugger is created again when needed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable
from itertools import compress, repeat
from operator import not_
from types import FunctionType
from typing import Any, NamedTuple

from ipygpumem.introspect import (
    instance_dict,
    is_exactly,
    is_instance,
    loaded_object,
    module_dict,
)
from ipygpumem.notebook import code_of_output
from ipygpumem.scope.ownable import ownable
from ipygpumem.shell.ipython.printed import Printed, PrintedMark

_NAME = re.compile(r"(?P<output>_{1,3}|_(?P<number>\d+))|(?P<input>_i{1,3}|_i\d+)")
"""Matches IPython's names of outputs (``_``, ``_5``) and inputs (``_i``, ``_i5``)."""
_LATEST = ("_", "__", "___")
_MOST_COMPARED = 5
"""Maximum number of outputs among which the numbers of the latest three are looked up."""


def is_of_ipython(name: str) -> bool:
    """Return True if IPython uses this name for outputs or inputs."""
    return _NAME.fullmatch(name) is not None


def _names_of_ipython_in(namespace: dict[str, Any]) -> list[re.Match[str]]:
    """Return IPython's names of outputs and inputs in a namespace, as matches of ``_NAME``."""
    matches = list[re.Match[str]]()
    for name in list(namespace):
        match = _NAME.fullmatch(name) if type(name) is str else None
        if match is not None:
            matches.append(match)
    return matches


class KeptOutputs(NamedTuple):
    """The outputs that ``%xdel _5`` would free."""

    by_cell: dict[int, Any]
    """The outputs by the numbers of their cells."""
    holder_ids: set[int]
    """The identities of IPython's objects that refer to them."""


def kept_outputs(shell: Any) -> KeptOutputs:
    """Return the outputs that ``%xdel`` of their names would free: none that the user has put into
    ``Out``, or whose name ``_5`` has another object now.
    """
    cache = shell.user_ns.get("_oh")
    namespace = shell.user_ns
    if type(cache) is not dict:
        return KeptOutputs({}, set())
    holder_ids = {id(cache), id(namespace), id(shell.user_ns_hidden)}
    for holder in (shell.displayhook, shell.last_execution_result):
        holder_ids.add(id(holder))
        if holder is not None:
            holder_ids.add(id(instance_dict(holder)))
    by_cell = dict[int, Any]()
    for number, value in list(cache.items()):
        if type(number) is int and namespace.get(f"_{number}") is value:
            by_cell[number] = value
    return KeptOutputs(by_cell, holder_ids)


def references_of_names(shell: Any) -> Counter[int]:
    """Return the number of references that names and IPython's caches have to each object, by the
    object's identity.

    ``del`` removes the reference of a name, and ``%xdel`` also those of an output's copies.
    """
    references = Counter[int]()
    dicts = [shell.user_ns.get("_oh"), shell.user_ns, shell.user_ns_hidden]
    dicts += [instance_dict(item) for item in (shell.displayhook, shell.last_execution_result)]
    for holder in dicts:
        if type(holder) is dict:
            references.update(map(id, list(holder.values())))
    return references


def names_and_outputs(shell: Any) -> dict[str, object]:
    """Return the objects of the notebook's names, names with an underscore last, then its outputs
    by their code, such as ``Out[5]``.
    """
    namespace = dict(shell.user_ns)
    if is_exactly(namespace.get("open"), FunctionType):  # IPython's own
        namespace.pop("open")
    names = ownable(namespace)
    is_private = list(map(str.startswith, names, repeat("_")))  # in C: there may be 100,000 names
    if any(is_private):
        names = [*compress(names, map(not_, is_private)), *compress(names, is_private)]
    objects = dict(zip(names, map(namespace.__getitem__, names), strict=True))
    objects |= _users_latest(shell)
    outputs: Any = namespace.get("_oh")
    if is_instance(outputs, dict):
        for number, value in list(dict.items(outputs)):
            if type(number) is int:
                objects[code_of_output(number)] = value
    return objects


def _users_latest(shell: Any) -> dict[str, object]:
    """Return the variables that the user has named ``_``, ``__`` or ``___``: then IPython does not
    bind the name to its latest outputs.
    """
    outputs = instance_dict(shell.displayhook) or {}
    names = [name for name in _LATEST if name in shell.user_ns and name in outputs]
    return {name: shell.user_ns[name] for name in names if shell.user_ns[name] is not outputs[name]}


def outputs_of(shell: Any, item: object) -> tuple[str, ...]:
    """Return IPython's names, such as ``_5``, of the outputs that are ``item``."""
    outputs = kept_outputs(shell).by_cell
    return tuple(f"_{number}" for number, value in outputs.items() if value is item)


_INPUTS = "IPython's list of the text of your cells"
_COMMAND = "a command of IPython, which holds none of your data"
_OF_IPYTHON = {
    "In": _INPUTS,
    "_ih": _INPUTS,
    "_dh": "IPython's list of the folders that %cd has visited",
    "exit": _COMMAND,
    "quit": _COMMAND,
    "get_ipython": "the function that returns IPython's shell, which holds none of your data",
}
"""IPython's own names → their descriptions."""
_NO_OUTPUT = "IPython's name for one of the last three outputs: there is none yet"
_INPUT = "IPython's copy of the text of a cell"


def made_by_ipython(shell: Any, name: str) -> str:
    """Return a description of a name that IPython has bound; empty for an output, and for a user's
    name.
    """
    if name in _LATEST:
        if _is_latest_without_output(shell, name):
            return _NO_OUTPUT
        return ""
    is_users = shell.user_ns.get(name) is not shell.user_ns_hidden.get(name)
    if is_users:
        return ""
    if _is_input(name):
        return _INPUT
    return _OF_IPYTHON.get(name, "")


def _is_input(name: str) -> bool:
    """Return True if IPython uses this name for inputs."""
    match = _NAME.fullmatch(name)
    return match is not None and match["input"] is not None


def _is_latest_without_output(shell: Any, name: str) -> bool:
    """Return True if ``_``, ``__`` or ``___`` is the empty text that IPython binds it to before
    there is an output; False for an output that is an empty text, and for a user's object.
    """
    value = shell.user_ns.get(name)
    outputs = instance_dict(shell.displayhook) or {}
    is_empty_text = type(value) is str and value == ""
    return value is outputs.get(name) and is_empty_text and not outputs_of(shell, value)


def global_of_run(file: str, name: str) -> str:
    """Return code for a global of a script that ``%run`` has run: IPython keeps its module."""
    return f"get_ipython()._main_mod_cache[{file!r}].{name}"


def in_run_modules(shell: Any) -> list[object]:
    """Return the objects of the globals of scripts that ``%run`` has run."""
    data = list[object]()
    for _, module in _modules_of_run(shell):
        for name, value in list(module_dict(module).items()):
            if not name.startswith("__"):
                data.append(value)
    return data


def namespaces_of_run(shell: Any) -> set[int]:
    """Return the identities of the globals of scripts that ``%run`` has run.

    Functions of a script refer to them, and IPython keeps them without those functions, too.
    """
    return {id(module_dict(module)) for _, module in _modules_of_run(shell)}


def _modules_of_run(shell: Any) -> list[tuple[str, Any]]:
    """Return the files of scripts that ``%run`` has run, with their modules."""
    return list(getattr(shell, "_main_mod_cache", {}).items())


def kept_by_run(shell: Any, names: Iterable[str]) -> list[str]:
    """Return the statements by which modules of ``%run`` drop the objects of the notebook's
    ``names``: after ``%run train.py``, its module keeps ``model``, too.
    """
    names = list(names)
    missing = object()
    statements = list[str]()
    for file, module in _modules_of_run(shell):
        for name in names:
            if module_dict(module).get(name, missing) is shell.user_ns.get(name):
                statements.append(f"{global_of_run(file, name)} = None")
    return statements


_CachedFunction = type(functools.lru_cache(lambda: None))

StoredMark = dict[Any, float]
"""Files cached by %store's database → their time."""


class LatestOutput(NamedTuple):
    """An object named by ``_``, ``__`` or ``___``; not kept alive if it is in the output cache."""

    number: int | None
    """The number of its cell, if it is among the latest outputs of the cache."""
    identity: int
    value: Any = ""
    """The object, if it has no number."""


class OutputMark(NamedTuple):
    """The extent of the outputs at a moment, without the objects in the output cache."""

    numbers: set[int]
    """The numbers of the cells with outputs."""
    latest: dict[str, LatestOutput]
    """The objects that IPython keeps as ``_``, ``__`` and ``___``."""
    users: dict[str, Any]
    """Values of ``_``, ``__`` and ``___`` bound by the user."""
    stored: StoredMark
    printed: PrintedMark
    """The texts and displays that IPython 9 keeps of cells."""


class Outputs:
    """The outputs of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.printed = Printed(shell)

    def _cache(self) -> dict[int, Any]:
        """Return ``Out``, or an empty dict if the user has removed or replaced it."""
        cache = self._shell.user_ns.get("_oh")
        return cache if type(cache) is dict else {}

    def _by_number(self) -> dict[int, Any]:
        """Return the outputs by cell number, without items of ``Out`` that the user has added: no
        code of their keys must run.
        """
        items = list(self._cache().items())
        return {number: value for number, value in items if type(number) is int}

    def mark(self) -> OutputMark:
        """Return the extent of the current outputs."""
        namespace = self._shell.user_ns
        hook = self._shell.displayhook
        outputs = self._by_number()
        newest_first = list(reversed(outputs.items()))[:_MOST_COMPARED]
        users = dict[str, Any]()
        latest = dict[str, LatestOutput]()
        for name in _LATEST:
            # %reset removes them from the namespace.
            if name in namespace and namespace[name] is not getattr(hook, name, None):
                users[name] = namespace[name]
            latest[name] = _latest(getattr(hook, name, ""), newest_first)
        stored = {path: time for path, (_, time) in self._stored().items()}
        return OutputMark(set(outputs), latest, users, stored, self.printed.mark())

    def _value_of(self, latest: LatestOutput) -> object:
        """Return the object of a latest output, or an empty text if it has been deleted."""
        if latest.number is None:
            return latest.value
        name = f"_{latest.number}"
        value = self._cache().get(latest.number, self._shell.user_ns.get(name, ""))
        if id(value) != latest.identity:  # another output: %reset restarts the count
            return ""
        return value

    def drop_deleted_from(self, mark: OutputMark) -> None:
        """Remove deleted outputs from ``mark``, because %reset restarts the count and reuses their
        numbers.
        """
        mark.numbers.intersection_update(self._by_number())
        self.printed.drop_deleted_from(mark.printed)

    def leave_output(self, mark: OutputMark, number: int) -> None:
        """Let ``forget_since`` keep the output of another thread's cell."""
        mark.numbers.add(number)
        for numbers in mark.printed.numbers.values():
            numbers.add(number)

    def since(self, mark: OutputMark) -> dict[int, Any]:
        """Return the outputs created after ``mark``, by cell number."""
        outputs = self._by_number()
        return {number: value for number, value in outputs.items() if number not in mark.numbers}

    def forget_since(self, mark: OutputMark) -> None:
        """Remove the outputs created after ``mark`` everywhere in IPython."""
        new_numbers = list(self.since(mark))
        for number in new_numbers:
            self._cache().pop(number, None)
            for namespace in (self._shell.user_ns, self._shell.user_ns_hidden):
                namespace.pop(f"_{number}", None)
        self._forget_culled()
        self._reset_latest(mark)
        self.forget_hidden()
        last_result = self._shell.last_execution_result
        if last_result is not None and new_numbers:
            last_result.result = None
        self._forget_caches(mark.stored)
        self.printed.forget_since(mark.printed)

    def forget_hidden(self) -> None:
        """Drop hidden copies of outputs whose names the user has deleted or rebound, also by
        ``%reset -f out``.
        """
        namespace = self._shell.user_ns
        hidden = self._shell.user_ns_hidden
        hook = self._shell.displayhook
        for match in _names_of_ipython_in(hidden):
            name = match["output"]
            if not name or (name in namespace and namespace[name] is hidden[name]):
                continue  # an input, or an output whose name exists
            is_latest = name in namespace and hasattr(hook, name)  # ``_``, ``__`` or ``___``
            if is_latest and getattr(hook, name) is namespace[name]:
                hidden[name] = namespace[name]  # still IPython's own variable
                continue
            del hidden[name]
            if is_latest:
                # IPython leaves the name to the user as long as its object is not the hook's. So
                # the hook gets a new object instead of the output.
                setattr(hook, name, object())

    def _forget_culled(self) -> None:
        """Drop hidden copies of outputs that IPython removed from a full cache."""
        hidden = self._shell.user_ns_hidden
        cache = self._cache()
        for match in _names_of_ipython_in(hidden):
            if match["number"] and int(match["number"]) not in cache:
                hidden.pop(match[0], None)

    def _reset_latest(self, mark: OutputMark) -> None:
        """Give ``_``, ``__`` and ``___`` the objects that they had at ``mark``."""
        shell = self._shell
        for name, latest in mark.latest.items():
            value = self._value_of(latest)
            if hasattr(shell.displayhook, name):
                setattr(shell.displayhook, name, value)
            if name in mark.users:
                shell.user_ns[name] = mark.users[name]
                shell.user_ns_hidden.pop(name, None)
            else:
                shell.user_ns[name] = shell.user_ns_hidden[name] = value

    def _forget_caches(self, mark: StoredMark) -> None:
        """Drop copies of objects that ``%store`` has stored after ``mark``, and caches that later
        cells do not need.

        These caches are modules of scripts, which %run clears itself on a rerun; the debugger,
        which keeps each frame in which it displays something; the warning registry, which IPython
        drops before each cell; and the syntax trees of files in tracebacks.
        """
        shell = self._shell
        stored = self._stored()
        for path in [path for path, (_, time) in stored.items() if mark.get(path) != time]:
            del stored[path]
        shell.clear_main_mod_cache()
        if getattr(shell.InteractiveTB, "pdb", None) is not None:
            shell.InteractiveTB.pdb = None
        shell.user_ns.pop("__warningregistry__", None)
        _forget_syntax_trees()

    def _stored(self) -> dict[Any, tuple[Any, float]]:
        """Return the cache of %store's database: each object with its time, by file."""
        attributes = vars(self._shell)
        # Accessing ``db`` would create one in IPython 9.
        database = attributes.get("_db", attributes.get("db"))
        cache = getattr(database, "cache", None)
        return cache if type(cache) is dict else {}


_OPERATORS = """
a = b + c - d * e @ f / g % h ** i << j >> k | l ^ m & n // o
del a
b = ~c, not d, +e, -f, g and h or i
c = a == b != c < d <= e > f >= g is h is not i in j not in k
"""
"""Code with each operator and each context of a name."""
_CACHES_OF_SOURCES = ("__source_cache", "__source_cache_with_lines", "__executing_cache")


def _forget_syntax_trees() -> None:
    """Drop the syntax trees of files that were cached for IPython's tracebacks.

    executing and stack_data, which mark the code that failed, keep them until the kernel ends: 20
    MiB for torch/nn/functional.py. The next traceback parses a file again.
    """
    source = loaded_object("executing.executing", "Source")
    if source is None:
        return
    caches = list[dict[Any, Any]]()
    for kind in (source, loaded_object("stack_data.core", "Source")):
        of_class = {} if kind is None else vars(kind)
        for name in _CACHES_OF_SOURCES:
            cache = of_class.get(name)
            if type(cache) is dict:
                caches.append(cache)
    if not any(caches):  # no traceback was shown since the last experiment
        return
    for cache in caches:
        cache.clear()
    statement_of_node = loaded_object("executing.executing", "statement_containing_node")
    for function in (vars(source).get("statements_at_line"), statement_of_node):
        if isinstance(function, _CachedFunction):
            function.cache_clear()
    # All syntax trees share one object for each operator, and executing gives it a parent.
    for node in ast.walk(ast.parse(_OPERATORS)):
        vars(node).pop("parent", None)


def _latest(value: object, newest_first: list[tuple[int, Any]]) -> LatestOutput:
    """Return the object that IPython keeps as ``_``, ``__`` or ``___`` in a form that does not keep
    it alive, if it is among the newest outputs of the cache.

    Args:
        value: the object.
        newest_first: the newest outputs with the numbers of their cells.
    """
    for number, output in newest_first:
        if output is value:
            return LatestOutput(number, id(value))
    return LatestOutput(number=None, identity=id(value), value=value)
