"""Rewrites cells that begin with ``%%experiment``, ``%%memlines``, ``%%peak`` or ``%%autofit`` to
run as plain cells.

A cell magic gets its body as text and must run it itself, which means wrong line numbers, no
``Out`` and no top-level ``await``. So a first line ``%%experiment`` is turned into a call before
IPython parses the cell: the call opens the scope, and the scope closes when the cell ends.
``%%memlines`` and ``%%peak`` work in the same way. So does ``%%autofit``, which also gets a loop
around the body in the syntax tree; IPython runs it with outputs, ``await`` and tracebacks.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from typing import Any

from IPython.core.inputtransformer2 import cell_magic

from ipygpumem.introspect import text_of

REWRITTEN = ("experiment", "memlines", "peak", "autofit")
"""Cell magics whose first line is turned into a call, so that the body is a plain cell."""
_FIRST_LINE = re.compile(rf"%%({'|'.join(REWRITTEN)})(?:[ \t]+(.*?))?[ \t]*\r?\n?", re.DOTALL)
"""Matches a first line that is turned into a call: the name of the magic, and its words."""
LINE_MAGICS = "gpumem|ipygpumem|experiment"
"""Pattern of the names of our magics that are a line, without their sign."""
NEED_A_CELL = "autofit|estimate|isolate|memlines|peak"
"""Pattern of the names of our magics that need a cell: a line with one says how to write it."""
_BELOW_GPUMEM = re.compile(
    rf"%%?gpumem[ \t]+(?=(?:{NEED_A_CELL})\b)|%%gpumem[ \t]+(?=(?:experiment|gpumemit)\b)"
)
"""Matches ``%gpumem`` in a first line such as ``%gpumem peak``, which means ``%%peak``."""
_ON = re.compile(r"(?:^|\s)--on(?:[\s=]|$)")
"""Matches ``--on``: the cell runs on engines of a cluster, so it stays text."""
_WORD = r"""(?:[^\s'"]|'[^']*'|"[^"]*")+"""
"""Matches a word of a line, with the texts in quotes that it contains."""
_WITH_HELP = re.compile(rf"(?:[ \t]+{_WORD})*?[ \t]+(?:-h|--help)(?:[ \t]+.*|[ \t]*)\r?\n?")
"""Matches the rest of a first line that asks for help, next to other options or alone."""
_CELL_MAGIC = re.compile(rf"%%({NEED_A_CELL}|experiment|gpumemit)(?=\s|$)")
"""Matches the name in the first line of our cell magics."""
_COMMAND_WITH_MARK = re.compile(rf"(%(?:{LINE_MAGICS})[ \t]+[a-z]+)[ \t]*\?{{1,2}}\s*")
"""Matches a line such as ``%gpumem leaks?``, of which IPython would only look for ``leaks``."""
NO_BODY = "# no body\n"
"""Body of a cell magic without one, so that ours, not IPython, says what is missing.

A blank line instead would end the input in a terminal after the first line.
"""
_EXCEPTION_OF_SIGNAL = "__ipygpumem_struck__"
"""Name of the exception that a cell's code raises."""
_MARK = "%%"
"""Prefix of the argument of a rewritten call; no line written by a user starts with it."""


def rewrite_cell(lines: list[str]) -> list[str]:
    """Return the lines of a cell, with a first line such as ``%%experiment ARGS`` turned into a
    call. A cell that asks for help, or has no body, is changed so that our magic sees it.
    """
    if not lines:
        return lines
    is_one_line = len(lines) == 1
    if is_one_line:
        command_with_mark = _COMMAND_WITH_MARK.fullmatch(lines[0])
        if command_with_mark is not None:  # ``%gpumem leaks?``
            return [f"{command_with_mark[1]} -h\n"]
    lines = [_with_own_magic(lines[0]), *lines[1:]]
    magic = _CELL_MAGIC.match(lines[0])
    if magic is None:
        return lines
    if asks_for_help(lines[0][magic.end() :]):  # ``%%peak -h``
        # The cell stays text, so that its body does not run. IPython refuses a cell magic without
        # any body, so a line gets an empty one.
        if is_one_line:
            return [lines[0].rstrip() + "\n", "\n"]
        return lines
    if magic[1] in REWRITTEN:
        return _with_call(lines)
    if is_one_line:  # ``%%estimate`` alone
        return [lines[0].rstrip() + "\n", NO_BODY]
    return lines


def _with_call(lines: list[str]) -> list[str]:
    """Return the lines of a cell with its first line, such as ``%%experiment ARGS``, turned into a
    call; unchanged if they ask IPython for help, or are for engines of a cluster.
    """
    first_line = _FIRST_LINE.fullmatch(lines[0])
    if first_line is None:
        return lines
    name = first_line[1]
    arguments = first_line[2] or ""
    has_body = any(line.strip() for line in lines[1:])
    asks_ipython = arguments.endswith("?") and not has_body  # with a body, it ends a glob
    if asks_ipython or is_for_engines(arguments):
        return lines
    # IPython only looks for a cell magic in the first line of a cell, and this body may begin with
    # a further one.
    return [_call_of(name, f"{_MARK} {arguments}"), *cell_magic(rewrite_cell(lines[1:]))]


def asks_for_help(arguments: str) -> bool:
    """Return True if ``-h`` or ``--help`` is a word of a cell magic's line, outside quotes."""
    return _WITH_HELP.fullmatch(f" {arguments}") is not None


def runs_no_code(source: str) -> bool:
    """Return True if a cell begins with one of our cell magics, and has no body or asks for help.

    Without a body, a cell magic only says what is missing; but an experiment is opened and ended.
    """
    first_line, _, body = source.lstrip().partition("\n")
    first_line = _with_own_magic(first_line)
    magic = _CELL_MAGIC.match(first_line)
    if magic is None:
        return False
    if asks_for_help(first_line[magic.end() :]):
        return True
    return magic[1] != "experiment" and not body.strip()


def _call_of(name: str, line: str) -> str:
    """Return the call that a first line is turned into."""
    return f"get_ipython().run_line_magic({name!r}, {line!r})\n"


def show_as_written(name: str, line: str) -> None:
    """Let tracebacks show the running cell's first line as a comment, not as the call that it was
    turned into.

    IPython takes the lines of a traceback from linecache, which it fills before a cell runs.
    """
    call = _call_of(name, line)
    frame = sys._getframe().f_back
    while frame is not None:
        entry: Any = linecache.cache.get(frame.f_code.co_filename)
        if type(entry) is tuple and len(entry) == 4 and call in entry[2]:
            lines = entry[2]
            lines[lines.index(call)] = f"# %%{name} {words_of(line)}".rstrip() + "\n"
            return
        frame = frame.f_back


def _with_own_magic(line: str) -> str:
    """Return a cell's first line with ``%%peak`` for ``%gpumem peak``, which new users try."""
    below = _BELOW_GPUMEM.match(line)
    if below is None:
        return line
    return f"%%{line[below.end() :]}"


def our_magic(statement: ast.stmt) -> str | None:
    """Return the name of our cell magic if a statement is its rewritten first line."""
    call: Any = getattr(statement, "value", None)
    if type(call) is not ast.Call or getattr(call.func, "attr", "") != "run_line_magic":
        return None
    if len(call.args) != 2:
        return None
    name, line = (text_of(getattr(argument, "value", None)) for argument in call.args)
    if name in REWRITTEN and is_first_line(line):
        return name
    return None


def is_for_engines(line: str) -> bool:
    """Return True if the line of a magic contains ``--on``."""
    return _ON.search(line) is not None


def is_first_line(line: str) -> bool:
    """Return True if ``line`` is the argument of a rewritten first line."""
    return line.partition(" ")[0] == _MARK


def words_of(line: str) -> str:
    """Return the user's words in a rewritten first line."""
    return line.partition(" ")[2]


def first_lines(source: str) -> tuple[list[str], str]:
    """Return the names of our magics in the first lines of a cell, several below each other, and
    the cell's source without these lines.
    """
    names = list[str]()
    lines = source.lstrip().splitlines(keepends=True)
    for line in lines:
        match = _FIRST_LINE.fullmatch(_with_own_magic(line))
        if match is None:
            break
        names.append(match[1])
    return names, "".join(lines[len(names) :])


FIT_NAME = "__ipygpumem_fit__"
"""Built-in function that returns the running cell's fit to the loop."""
_FIT = f"{FIT_NAME}()"
_LOOP = f"while {_FIT}.again():\n    with {_FIT}:\n        pass\n"


def raise_at_start(tree: Any, error: BaseException, shell: Any) -> None:
    """Change a cell's code so that its first statement raises ``error``."""
    if type(tree) is not ast.Module or not tree.body:
        return
    place = 0
    for statement in tree.body[:-1]:
        if type(statement) is not ast.ImportFrom or statement.module != "__future__":
            break
        place += 1  # such imports must come first
    first = tree.body[place]
    shell.builtin_trap.add_builtin(_EXCEPTION_OF_SIGNAL, error)  # until the cell's end
    tree.body.insert(place, _located_statement(first, f"raise {_EXCEPTION_OF_SIGNAL}"))


def loop_over_body(tree: Any, shell: Any) -> None:
    """Wrap the body of a cell that begins with ``%%autofit`` in a loop; leave other trees
    unchanged.
    """
    body = _body_to_repeat(tree)
    if not body:
        return
    is_changed_already = getattr(body[0], "ipygpumem_loop", False)  # with transformers of the user
    if is_changed_already or not _compiles_without_loop(body):
        return
    number = len(body)
    loop: Any = _located_statement(body[0], _LOOP)
    loop.ipygpumem_loop = True
    shown = _statement_shown_after_loop(body, shell.ast_node_interactivity)
    loop.body[0].body = body
    tree.body[len(tree.body) - number :] = [loop, *shown]


def _body_to_repeat(tree: Any) -> list[ast.stmt]:
    """Return the statements below ``%%autofit``; none in any other tree."""
    if type(tree) is not ast.Module:
        return []
    start = _start_of_body(tree)
    if not start:
        return []
    body = tree.body[start:]
    while body and type(body[0]) is ast.ImportFrom and body[0].module == "__future__":
        body.pop(0)  # stays where it is, before the loop
    return body


def _statement_shown_after_loop(body: list[ast.stmt], interactivity: str) -> list[ast.stmt]:
    """Return a statement for the place after the loop, whose value IPython shows as the value of
    the body; none if it shows no value of the body.

    The last statement of ``body`` is changed so that it passes its value on to this one.
    """
    last: Any = body[-1]
    if interactivity == "last_expr_or_assign" and type(last) is ast.Assign:
        target = last.targets[0]
        if type(target) is not ast.Name:
            return []
        return [_located_statement(last, target.id)]  # IPython shows the name that was assigned
    shows_last = interactivity in ("last_expr", "last_expr_or_assign", "last", "all")
    if not shows_last or type(last) is not ast.Expr:
        return []
    keep: Any = _located_statement(last, f"{_FIT}.keep(None)")
    keep.value.args[0] = last.value
    body[-1] = keep
    return [_located_statement(last, f"{_FIT}.take()")]


def _start_of_body(tree: ast.Module) -> int:
    """Return the index of the first statement below ``%%autofit``; 0 if that is not among our
    magics at the top of the cell.
    """
    for index, statement in enumerate(tree.body):
        name = our_magic(statement)
        if name is None:
            break
        if name == "autofit":
            return index + 1
    return 0


def _compiles_without_loop(body: list[ast.stmt]) -> bool:
    """Return True if the body of ``%%autofit`` compiles by itself: inside the loop, a ``break`` of
    the user would compile, too.
    """
    try:
        compile(
            ast.Module(body, []),
            "<cell>",
            "exec",
            ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
    except (SyntaxError, ValueError):  # IPython reports it
        return False
    return True


def _located_statement(place: ast.stmt, code: str) -> ast.stmt:
    """Return the statement ``code``, with the location of ``place``."""
    (statement,) = ast.parse(code).body
    for node in ast.walk(statement):
        ast.copy_location(node, place)
    return statement
