"""Joins the lines that remove a name's object from its other holders with the line that deletes the
name.

``%gpumem why model`` has the rows ``del runs[0]`` and ``app.model = None``. Below the table, it has
one line to paste: ``del runs[0]; app.model = None; del model``.
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
    """Return the lines that free all of a name's object: its other holders' lines and the deletion
    of the name are joined to one line. Each output has a further one, because no statement can
    follow a magic.

    For example: ``del runs[0]; del model``, then ``%xdel _5``.

    Returns:
        No lines if the object has no other holder that is known, or may have further ones; if the
        line of a holder does not remove all of its references; or if it cannot be joined with
        another line.
    """
    large_parts = [part for part in ownership.held if part.keeps_much_of(ownership.size_bytes)]
    if not _names_all_holders(ownership, large_parts):
        return []
    remedies = list(dict.fromkeys(Remedy.of_text(part.holder.advice) for part in large_parts))
    if not all(map(_can_be_joined, remedies)):
        return []
    outputs = [remedy.deleted_output for remedy in remedies if remedy.deleted_output]
    statements = [remedy.line for remedy in remedies if not remedy.deleted_output]
    statements = _without_superfluous(statements)
    if not 1 <= len(statements) + len(outputs) <= _MOST_LINES:
        return []
    if _begin_at_same_variable(statements, ownership.name):
        return []
    return _with_deletion_of_name(statements, outputs, ownership)


def _names_all_holders(ownership: Ownership, parts: Sequence[HeldPart]) -> bool:
    """Return True if the parts name everything that keeps a name's object alive, so that their
    lines and the deletion of the name free it.

    Args:
        ownership: the object.
        parts: the holders, without those of small parts.
    """
    if not ownership.is_name or not ownership.complete or ownership.has_graph:
        return False
    return not any(part.has_further_references for part in parts)


def _can_be_joined(remedy: Remedy) -> bool:
    """Return True if other lines may follow a remedy, because it is a plain statement or ``%xdel``.
    Nothing can follow a comment.
    """
    if remedy.comment:
        return False
    return bool(remedy.deleted_output) or remedy.is_simple


def _with_deletion_of_name(
    statements: Sequence[str], outputs: Sequence[str], ownership: Ownership
) -> list[str]:
    """Return the lines, with the deletion of the name added if none of them deletes it.

    ``%xdel`` deletes all names of an output's object, so it follows the statements that use these.

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


def _without_superfluous(lines: Sequence[str]) -> list[str]:
    """Return the lines without those that do nothing once all other lines have run.

    ``model.zero_grad()`` removes an object from ``model``. It is superfluous next to ``del model``.
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
    """Return True if two lines use the same variable, or if one of several lines uses the name
    itself.

    After the first line, positions and names in the second one may be wrong:
    ``del rows[0]; del rows[1]``.
    """
    used_names = {own_name} if len(lines) > 1 else set[str]()
    for line in lines:
        names = _names_in(line)
        if not used_names.isdisjoint(names):
            return True
        used_names |= names
    return False


def _names_in(line: str) -> set[str]:
    """Return the variables that a line uses, without those that it binds itself: in
    ``for i in 3, 1: del rows[i]``, only ``rows``.
    """
    used = set[str]()
    bound = set[str]()
    for node in ast.walk(ast.parse(line)):
        if isinstance(node, ast.Name):
            names = bound if isinstance(node.ctx, ast.Store) else used
            names.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return used - bound
