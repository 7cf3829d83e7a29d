"""Finds the names that a cell binds, in its syntax tree and by Python's scoping rules.

``import os.path; x, *y = [z := 1, 2]`` imports ``os``, and assigns ``x``, ``y`` and ``z``.

``symtable`` is close but reports ``del x`` and a bare ``x: int`` as assignments, and misses a
walrus inside a comprehension; hence this walk. It uses its own stack, because a long ``a + b + c +
...`` that Python compiles without trouble nests deeper than Python's recursion limit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Bindings:
    """The top-level names that a piece of code binds, by the kind of statement."""

    assigned: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    """Names in a top-level ``global`` statement: the notebook's, not a scope's."""
    deleted: set[str] = field(default_factory=set)
    """Names in a ``del`` statement."""

    @property
    def bound(self) -> set[str]:
        """Names that the code may bind in the scope around it: assigned or imported ones without
        those that it declares as ``global``.
        """
        return (self.assigned | self.imported) - self.shared


def bindings_of(tree: ast.AST) -> Bindings:
    """Return the bindings of ``tree``, a module or a single node, in the scope that contains it."""
    bindings = Bindings()
    for node in parts_of(tree):
        _add_names(node, bindings)
    return bindings


def parts_of(tree: ast.AST, *, blocks: bool = True) -> Iterator[ast.AST]:
    """Yield ``tree`` and the nodes below it that run in the same scope: not the body of a function.

    Args:
        tree: a module or a single node.
        blocks: False to leave out the statements inside of ``tree``, such as the body of a loop.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        parts = _children_in_scope(node)
        if not blocks:
            parts = [part for part in parts if not isinstance(part, ast.stmt)]
        waiting.extend(parts)
        yield node


def _add_names(node: ast.AST, bindings: Bindings) -> None:
    """Add the names that ``node`` itself binds, imports, deletes or declares as ``global``."""
    if isinstance(node, ast.Global):
        bindings.shared.update(node.names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            package, _, _ = alias.name.partition(".")
            bindings.imported.add(alias.asname or package)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.name != "*":
                bindings.imported.add(alias.asname or alias.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
        bindings.deleted.add(node.id)
    else:
        name = _assigned_name(node)
        if name is not None:
            bindings.assigned.add(name)


_NODES_WITH_NAME = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)
"""Nodes that assign to a name which is a text: ``def f``, ``except Error as e``, ``case [*rest]``.
"""


def _assigned_name(node: ast.AST) -> str | None:
    """Return the name that ``node`` itself assigns to, if any."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.MatchMapping):
        return node.rest
    if isinstance(node, _NODES_WITH_NAME):
        return node.name
    return None


def _children_in_scope(node: ast.AST) -> Iterable[ast.AST]:
    """Return the children of ``node`` that run in the same scope: not the body of a function."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        # Decorators, defaults and annotations run in the enclosing scope; the body does not.
        parts: list[ast.AST] = [*node.decorator_list, node.args]
        if node.returns:
            parts.append(node.returns)
        return parts
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    if isinstance(node, ast.Lambda):
        return [node.args]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return [node.elt, *_parts_of_generators(node.generators)]
    if isinstance(node, ast.DictComp):
        return [node.key, node.value, *_parts_of_generators(node.generators)]
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return [node.annotation]  # a bare "x: int" binds nothing
    if type(node).__name__ == "TypeAlias":  # "type X = ...", Python 3.12
        return [node.name]  # type: ignore[attr-defined]  # ast.TypeAlias is unknown to 3.10
    return ast.iter_child_nodes(node)


def _parts_of_generators(generators: Iterable[ast.comprehension]) -> Iterator[ast.AST]:
    """Yield the parts of a comprehension in which a walrus binds a name of the scope around it (PEP
    572); the comprehension's own targets are local.
    """
    for generator in generators:
        yield generator.iter
        yield from generator.ifs
