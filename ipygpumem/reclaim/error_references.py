"""Says what refers to a stored error, and with which statement the user removes the reference."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import kinds_of, of_types
from ipygpumem.heap.paths.literals import call_of_magic
from ipygpumem.introspect import target_of
from ipygpumem.notebook import cell_of_output, deletion_of_output
from ipygpumem.reclaim.stored_errors import (
    CLEARABLE_TYPES,
    DICT_TYPES,
    KeyPath,
    has_assignable_items,
    items_of,
    key_code,
)

COLLECT = "import gc; gc.collect()"
"""The statement that frees objects that refer to each other."""


class ErrorReference(NamedTuple):
    """A reference to an error by which the user can reach it."""

    place: str
    """``error``, ``errors[0]``; empty for the last error, kept by IPython and ``sys``."""
    statement: str
    """The statement that removes the reference; empty if an assignment to ``target`` does."""
    target: str = ""
    """The place as the target of an assignment, if that removes the reference."""
    loses: str = ""
    """A container whose other items the statement removes, too."""

    @property
    def order(self) -> int:
        """The rank of the reference among the statements of a line: assignments first, because they
        use the containers' names, which other statements may delete. Outputs come last: their
        ``%xdel`` also deletes names of the same object.
        """
        if self.target:
            return 0
        return 2 if self.statement.startswith("%") else 1


def line_that_removes(references: Iterable[ErrorReference], *, collects: bool) -> str:
    """Return the line that removes all references, such as ``a["x"] = b[0] = None; runs.clear()``.

    With ``collects``, it also collects garbage, because the errors refer to themselves.
    """
    ordered = sorted(references, key=lambda reference: reference.order)
    targets = [reference.target for reference in ordered if reference.target]
    statements = [reference.statement for reference in ordered if not reference.target]
    if targets:
        unique_targets = " = ".join(dict.fromkeys(targets))
        statements.insert(0, f"{unique_targets} = None")
    if collects:
        statements.append(COLLECT)
    statements = list(dict.fromkeys(statements))
    if len(statements) == 1:
        return statements[0]
    return "; ".join(map(_as_code, statements))


def _as_code(statement: str) -> str:
    """Return a statement that can follow another one in a line, as a magic cannot."""
    return call_of_magic(statement) if statement.startswith("%") else statement


def reference_to(name: str, container: Any, path: KeyPath) -> ErrorReference:
    """Return the reference to a stored error.

    Args:
        name: the variable or output that leads to it.
        container: the container in which it is; None if the name is that of the error itself.
        path: its keys in the container; empty if all of the container is to be removed.
    """
    if container is None:
        return ErrorReference(name, _deleting_statement(name))
    if not path:
        return _reference_to_container(name, container)
    return _reference_to_item(name, container, path)


def _reference_to_container(name: str, container: Any) -> ErrorReference:
    """Return the reference to a named container of errors. It is emptied, ``errors.clear()``, or
    deleted if it cannot be emptied, as a tuple: ``del errors``.
    """
    statement = _deleting_statement(name)
    if id(type(container)) in CLEARABLE_TYPES:
        statement = f"{_code_of_name(name)}.clear()"
    loses = name if _has_other_items(container) else ""
    return ErrorReference(name, statement, loses=loses)


def _reference_to_item(name: str, container: Any, path: KeyPath) -> ErrorReference:
    """Return the reference to an item, ``runs["first"][0]``, which is set to None.

    If a later key has no source text, as a user's object, or the item before it is a set or a
    tuple, that item is set to None as a whole: ``runs["first"]``. The reference then says that its
    other items are lost.
    """
    steps = ""
    loses = ""
    inner = container
    for key in path:
        code = key_code(key)
        if not code or not has_assignable_items(inner):
            if _has_other_items(inner):
                loses = f"{name}{steps}"
            break
        steps += f"[{code}]"
        inner = _item_at(inner, key)
    target = f"{_code_of_name(name)}{steps}"
    return ErrorReference(f"{name}{steps}", statement="", target=target, loses=loses)


def _item_at(container: Any, key: object) -> Any:
    """Return the item of a list, deque or dict at a key that it has."""
    if id(type(container)) not in DICT_TYPES:
        return container[key]
    # No lookup, which might call the comparison of a user's key.
    for candidate, value in list(container.items()):
        if candidate is key:
            return value
    return None


def _code_of_name(name: str) -> str:
    """Return the source text by which the user's code reads a variable or an output.

    It is ``results`` for a variable, ``globals()["my results"]`` for one that is no identifier, and
    for the output ``Out[5]`` its name.
    """
    if cell_of_output(name) is not None:
        return name
    return target_of(name)


def _deleting_statement(name: str) -> str:
    """Return the statement that deletes a name, ``del results``, or an output."""
    number = cell_of_output(name)
    if number is not None:
        return deletion_of_output(number)
    return f"del {target_of(name)}"


def _has_other_items(container: Any) -> bool:
    """Return True if a container also has items other than errors and the parts of
    ``sys.exc_info()``: types and tracebacks.
    """
    items = items_of(container)
    parts_of_errors = kinds_of(items, BaseException, type, TracebackType)
    return len(of_types(parts_of_errors, items)) < len(items)
