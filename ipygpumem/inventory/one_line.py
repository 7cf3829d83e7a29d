"""Joins the lines for the holders of a name's memory with the one that deletes the name."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ipygpumem.heap.paths.cuts import in_sequence
from ipygpumem.heap.paths.remedies import Remedy
from ipygpumem.introspect import is_name, target_of
from ipygpumem.inventory.ownership import Ownership
from ipygpumem.records import COMMENT

_MOST_LINES = 5
"""Maximum number of lines to join; a longer line is hard to check before it is run."""


def lines_for_all(ownership: Ownership) -> list[str]:
    """Return the lines that remove a name's object from all holders in the report and delete the
    name: one of statements, and one for each output, because no statement can follow a magic.

    Returns:
        No lines if no other holder is known, or some may not be, or if one has references that
        its line does not remove, or no statement that can be joined with another one.
    """
    if not ownership.is_name or not ownership.complete or ownership.has_graph:
        return []
    size_bytes = ownership.size_bytes
    parts = [part for part in ownership.held if part.keeps_much_of(size_bytes)]
    if any(part.has_further_references for part in parts):
        return []
    remedies = dict.fromkeys(Remedy.of_text(part.holder.advice) for part in parts)
    outputs = [remedy.deleted_output for remedy in remedies if remedy.deleted_output]
    statements = [remedy for remedy in remedies if not remedy.deleted_output]
    if any(remedy.comment for remedy in remedies):
        return []
    if not all(remedy.is_simple for remedy in statements):
        return []
    lines = [remedy.line for remedy in statements]
    lines = _without_ended(lines)
    if not 1 <= len(lines) + len(outputs) <= _MOST_LINES:
        return []
    if _meet(lines, ownership.name):
        return []
    other_outputs = [name for name in outputs if name not in ownership.outputs]
    if len(other_outputs) < len(outputs) and is_name(ownership.name):
        return _with_outputs(lines, [ownership.name, *other_outputs], ownership.remark)
    own = f"del {target_of(ownership.name)}"
    if ownership.name not in outputs and not any(_ends_with(line, own) for line in lines):
        lines.append(own)
    return _with_outputs(lines, outputs, ownership.remark)


def _with_outputs(lines: Sequence[str], outputs: Sequence[str], remark: str) -> list[str]:
    """Return statements in one line with their remark, followed by the lines that delete outputs.

    ``%xdel`` deletes all names of an output's object, so it follows the statements that use them.
    """
    deletions = [f"%xdel {name}" for name in outputs]
    if not lines:
        return deletions
    line = in_sequence(lines)
    if remark:
        line += f"{COMMENT}{remark}"
    return [line, *deletions]


def _without_ended(lines: Sequence[str]) -> list[str]:
    """Return lines without those that only use variables which other lines delete.

    Such a line removes an object from what a variable leads to, as ``model.zero_grad()`` does, and
    is not needed after ``del model``.
    """
    deleted = set[str]()
    for line in lines:
        deleted |= Remedy(line).deleted_names
    needed = []
    for line in lines:
        is_deletion = bool(Remedy(line).deleted_names)
        names = _names_in(line)
        if is_deletion or not names or not names <= deleted:
            needed.append(line)
    return needed


def _ends_with(line: str, statement: str) -> bool:
    return line == statement or line.endswith(f"; {statement}")


def _meet(lines: Sequence[str], own_name: str) -> bool:
    """Return True if two lines begin at the same variable.

    After the first line, the positions and names in the second one could be wrong: ``del rows[0];
    del rows[1]``.
    """
    seen = {own_name} if len(lines) > 1 else set[str]()
    for line in lines:
        names = _names_in(line)
        if not seen.isdisjoint(names):
            return True
        seen |= names
    return False


def _names_in(line: str) -> set[str]:
    """Return the variables that a line uses, without those that it binds itself."""
    used = set[str]()
    bound = set[str]()
    for node in ast.walk(ast.parse(line)):
        if isinstance(node, ast.Name):
            names = bound if isinstance(node.ctx, ast.Store) else used
            names.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return used - bound
