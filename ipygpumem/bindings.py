"""Which names a cell binds, found in its syntax tree as Python's own scoping rules would.

``symtable`` answers a similar question but reports ``del x`` and a bare ``x: int`` as assignments, and misses a
walrus inside a comprehension; hence this walk.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field


@dataclass
class Bindings:
    """The top-level names that a piece of code binds, by the kind of statement."""

    assigned: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    """Named in a ``global`` statement at the top level: the notebook's, not a scope's."""
    deleted_first: set[str] = field(default_factory=set)
    """Deleted by a statement that always runs, before the code binds them (if it does)."""

    @property
    def bound(self) -> set[str]:
        """Names that the code may bind itself."""
        return (self.assigned | self.imported) - self.shared


def bindings_of(tree: ast.AST) -> Bindings:
    """Return what the top level of a module's ``tree`` binds."""
    finder = _Finder()
    for statement in ast.iter_child_nodes(tree):
        if isinstance(statement, ast.Delete):
            finder.note_deletion(statement)
        finder.visit(statement)
    return finder.found


class _Finder(ast.NodeVisitor):
    """Walks one scope: into blocks and expressions, not into the bodies of functions and classes."""

    def __init__(self) -> None:
        self.found = Bindings()

    def _assign(self, name: str | None) -> None:
        if name is not None:
            self.found.assigned.add(name)

    def note_deletion(self, node: ast.Delete) -> None:
        for target in ast.walk(node):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Del) and target.id not in self.found.bound:
                self.found.deleted_first.add(target.id)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._assign(node.id)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # a bare "x: int" binds nothing
            self.visit(node.target)
            self.visit(node.value)
        self.visit(node.annotation)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.imported.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found.imported.update(alias.asname or alias.name for alias in node.names if alias.name != "*")

    def visit_Global(self, node: ast.Global) -> None:
        self.found.shared.update(node.names)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._assign(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._assign(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._assign(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._assign(node.rest)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators, defaults and annotations run in this scope; the body does not.
        self._assign(node.name)
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.visit(node.args)
        if node.returns is not None:
            self.visit(node.returns)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._assign(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)

    def visit_TypeAlias(self, node: ast.AST) -> None:  # "type X = ...", Python 3.12
        self.visit(node.name)  # type: ignore[attr-defined]  # ast.TypeAlias is unknown to 3.10

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self.visit(node.elt)
        self._visit_generators(node.generators)

    visit_SetComp = visit_ListComp
    visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self.visit(node.key)
        self.visit(node.value)
        self._visit_generators(node.generators)

    def _visit_generators(self, generators: list[ast.comprehension]) -> None:
        # A comprehension's targets are its own, but a walrus inside it binds out here (PEP 572).
        for generator in generators:
            for part in (generator.iter, *generator.ifs):
                self.visit(part)
