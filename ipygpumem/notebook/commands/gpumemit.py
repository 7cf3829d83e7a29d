"""``%gpumemit`` and ``%%gpumemit``: their lines, and the statements that they compare."""

from __future__ import annotations

import ast
import re
from types import CodeType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from ipygpumem.profiling.statements import Statement, measure
from ipygpumem.reports.content import Report, clean
from ipygpumem.reports.statements import statements_report

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook

_REPEATS = 5
_OPTION = re.compile(r"""\s*-(?P<name>[rs])[\s=]*(?P<value>'[^']*'|"[^"]*"|\S+)(?:\s+|$)""")
_RULE = re.compile(r"^---[ \t]*$", re.MULTILINE)


def gpumemit(notebook: Notebook, line: str, cell: str | None = None) -> list[Report]:
    """Return what the statement of a line costs, or those of a cell side by side.

    Raises:
        UsageError: an option is wrong, or there is no statement.
    """
    __tracebackhide__ = True
    prog = "%gpumemit" if cell is None else "%%gpumemit"
    repeats, setup, rest = _options(prog, line)
    if cell is not None and rest:
        raise UsageError(f"{prog}: {clean(rest)!r} is too much for its line: statements stand below, setup after -s")
    shell = notebook.tools.shell
    statements = [Statement(rest, _compiled(shell, rest))] if cell is None else _statements(shell, cell)
    if not statements or not statements[0].text.strip():
        raise UsageError(f"{prog}: which statement? For instance: %gpumemit -r 3 torch.relu(x)")
    code = _compiled(shell, setup) if setup else None
    return [
        statements_report(
            *measure(notebook.tools.meter, statements, notebook.tools.namespace, setup=code, repeats=repeats)
        )
    ]


def _options(prog: str, line: str) -> tuple[int, str, str]:
    """Return the repeats, the setup, and the rest of a line as it was written."""
    repeats, setup = _REPEATS, ""
    while option := _OPTION.match(line):
        value, line = option["value"], line[option.end() :]
        if option["name"] == "s":
            setup = value[1:-1] if value[0] in "'\"" else value
        elif value.isdecimal() and 0 < int(value) <= 10_000:
            repeats = int(value)
        else:
            raise UsageError(f"{prog}: -r {clean(value)}: write a number of runs from 1 to 10000")
    if re.match(r"\s*--?[a-zA-Z]", line):
        word = clean(line.split()[0])
        raise UsageError(f"{prog}: {word!r} is no option; there are -r RUNS and -s 'SETUP'; or put (...) around it")
    return repeats, setup, line.strip()


def _statements(shell: Any, cell: str) -> list[Statement]:
    """Return the statements of a cell: what stands between lines ``---``, else each line's of its own."""
    if _RULE.search(cell):
        return [Statement(part, _compiled(shell, part)) for part in _RULE.split(cell) if part.strip()]
    source = shell.transform_cell(cell)
    groups: list[list[ast.stmt]] = []
    for node in _tree(source).body:
        if groups and _first_line(node) <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)  # after a semicolon
        else:
            groups.append([node])
    lines = source.splitlines()
    texts = ["\n".join(lines[_first_line(group[0]) - 1 : group[-1].end_lineno]) for group in groups]
    return [Statement(text, _compiled(shell, text)) for text in texts]


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def _compiled(shell: Any, text: str) -> CodeType:
    """Return code whose lines a traceback can show."""
    source = shell.transform_cell(text)
    name = shell.compile.cache(source)
    tree = _tree(source, name)
    try:
        code: CodeType = shell.compile(tree, name, "exec")
    except SyntaxError as error:
        if "await" in str(error.msg) or "async" in str(error.msg):
            raise UsageError(
                "gpumemit: a statement cannot await: the line below a plain cell says what it costs"
            ) from None
        raise UsageError(_said(error, source)) from None
    return code


def _tree(source: str, name: str = "<gpumemit>") -> ast.Module:
    try:
        return ast.parse(source, name)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise UsageError(_said(error, source)) from None


def _said(error: SyntaxError | ValueError, source: str) -> str:
    line = getattr(error, "text", None) or source
    return f"gpumemit: {getattr(error, 'msg', error)}: {clean(' '.join(line.split()))!r}"
