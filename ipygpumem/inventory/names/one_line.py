"""Joins the lines for the holders of a name's memory with the one that deletes the name.

The lines ``del runs[0]`` and ``app.model = None`` become ``del runs[0]; app.model = None; del
model``.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ipygpumem.heap.paths.cuts import in_sequence
from ipygpumem.heap.paths.remedies import Remedy
from ipygpumem.introspect import is_name, target_of
from ipygpumem.inventory.names.ownership import HeldPart, Ownership
from ipygpumem.records import COMMENT

_MOST_LINES = 5
"""Maximum number of lines to join; a longer line is hard to check before it is run."""


def lines_for_all(ownership: Ownership) -> list[str]:
    """Return the lines that remove a name's object from all holders in the report and delete the
    name: one of statements, and one for each output, because no statement can follow a magic.

    ``del runs[0]; del model`` and ``%xdel _5`` are an example.

    Returns:
        No lines if no other holder is known, or some may not be, or if one has references that
        its line does not remove, or no statement that can be joined with another one.
    """
    size_bytes = ownership.size_bytes
    parts = [part for part in ownership.held if part.keeps_much_of(size_bytes)]
    remedies = list(dict.fromkeys(Remedy.of_text(part.holder.advice) for part in parts))
    if not _names_all_holders(ownership, parts) or not all(map(_can_be_joined, remedies)):
        return []
    outputs = [remedy.deleted_output for remedy in remedies if remedy.deleted_output]
    statements = [remedy.line for remedy in remedies if not remedy.deleted_output]
    statements = _without_ended(statements)
    if not 1 <= len(statements) + len(outputs) <= _MOST_LINES:
        return []
    if _begin_at_same_variable(statements, ownership.name):
        return []
    return _with_deletion_of_name(statements, outputs, ownership)


def _names_all_holders(ownership: Ownership, parts: Sequence[HeldPart]) -> bool:
    """Return True if the lines of the parts remove the object of a name from all holders.

    Args:
        ownership: the object.
        parts: the parts that are no small ones.
    """
    if not ownership.is_name or not ownership.complete or ownership.has_graph:
        return False
    return not any(part.has_further_references for part in parts)


def _can_be_joined(remedy: Remedy) -> bool:
    """Return True if other lines may follow a remedy: it deletes an output, or is a statement."""
    if remedy.comment:
        return False
    return bool(remedy.deleted_output) or remedy.is_simple


def _with_deletion_of_name(
    statements: Sequence[str], outputs: Sequence[str], ownership: Ownership
) -> list[str]:
    """Return the lines with the one that deletes the name, if none of them does that.

    ``%xdel`` deletes all names of an output's object, so it follows the statements that use them.

    Args:
        statements: the statements.
        outputs: the names of outputs to delete.
        ownership: the object. If it is an output itself, ``%xdel model`` deletes the output, too.
    """
    name = ownership.name
    other_outputs = [output for output in outputs if output not in ownership.outputs]
    is_output = len(other_outputs) < len(outputs)
    own_deletion = f"del {target_of(name)}"
    if is_output and is_name(name):
        outputs = [name, *other_outputs]
    elif name not in outputs and not any(_ends_with(line, own_deletion) for line in statements):
        statements = [*statements, own_deletion]
    lines = [f"%xdel {output}" for output in outputs]
    if statements:
        line = in_sequence(statements)
        if ownership.remark:
            line += f"{COMMENT}{ownership.remark}"
        lines.insert(0, line)
    return lines


def _without_ended(lines: Sequence[str]) -> list[str]:
    """Return the lines that are needed if all of them run: no line that only uses variables which
    other lines delete.

    Such a line removes an object from what a variable leads to, as ``model.zero_grad()`` does, and
    is not needed after ``del model``.
    """
    deleted = set[str]()
    for line in lines:
        deleted |= Remedy(line).deleted_names
    lines_needed = []
    for line in lines:
        is_deletion = bool(Remedy(line).deleted_names)
        names = _names_in(line)
        if is_deletion or not names or not names <= deleted:
            lines_needed.append(line)
    return lines_needed


def _ends_with(line: str, statement: str) -> bool:
    """Return True if a statement is the last one of a line."""
    return line == statement or line.endswith(f"; {statement}")


def _begin_at_same_variable(lines: Sequence[str], own_name: str) -> bool:
    """Return True if two lines use the same variable, or one of several lines the name itself.

    After the first line, the positions and names in the second one could be wrong: ``del rows[0];
    del rows[1]``.
    """
    used_names = {own_name} if len(lines) > 1 else set[str]()
    for line in lines:
        names = _names_in(line)
        if not used_names.isdisjoint(names):
            return True
        used_names |= names
    return False


def _names_in(line: str) -> set[str]:
    """Return the variables that a line uses and does not bind itself."""
    used = set[str]()
    bound = set[str]()
    for node in ast.walk(ast.parse(line)):
        if isinstance(node, ast.Name):
            names = bound if isinstance(node.ctx, ast.Store) else used
            names.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return used - bound
