"""Leaves data in places of all kinds, runs each line that a report prints to free it, and sees what
died.

Run by test_remedies: ``python -m tests.remedies torch`` answers questions, each in a forked process
with torch.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
import sys
import textwrap
import threading
from dataclasses import asdict, dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.records import COMMENT
from tests.agreement import Asker, import_late_modules, new_shell
from tests.answering import answer_questions, forked
from tests.remedy_cases import CASES, Case

MAKERS = {
    "array": "x = np.ones(5 << 20)",
    "object": "x = Big(40 << 20)",
    "tensor": "x = torch.ones(10 << 20)",
}
"""Code that makes 40 MiB: an array, an object of the user with a text, and a tensor."""
_PRELUDE = """
import gc, weakref
import numpy as np
class Big:
    def __init__(self, size):
        self.data = b"x" * size
"""
_WATCH = """
import weakref
watched = []
"""


class Row(NamedTuple):
    """A row of a report."""

    size_bytes: int
    path: str
    """The holder, as the report writes it; empty if none is known."""
    advice: str


@dataclass
class Outcome:
    """The result of the lines that ``leaks`` printed."""

    survivors: list[Row]
    """Rows of the experiment's report."""
    rows: list[Row]
    """Rows of ``leaks``."""
    sentences: list[str]
    """The advice that is no code."""
    failures: list[str]
    """The lines that raised an error."""
    alive: int
    """Number of objects still alive after all lines."""
    after: str = ""
    """Error of the case's own code after the lines."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        """Return the outcome that another process has sent as JSON, which knows only lists."""
        outcome = cls(**fields)
        outcome.survivors = [Row(*row) for row in outcome.survivors]
        outcome.rows = [Row(*row) for row in outcome.rows]
        return outcome


def outcome(shell: InteractiveShell, case: Case, kind: str) -> Outcome:
    """Return the result of the lines that ``leaks`` prints after an experiment."""
    ask = Asker(shell)
    if case.setup:
        ask.run(textwrap.dedent(case.setup))
    code = textwrap.dedent(case.code)
    ask.run(f"%%experiment e\n{MAKERS[kind]}\n{code}\nwatched.append(weakref.ref(x))")
    survivors, answers = rows(ask, "survivors"), rows(ask, "leaks")
    sentences = list[str]()
    failures = list[str]()
    for row in answers:
        advice = row.advice
        if not is_code(shell, advice):
            sentences.append(advice)
            continue
        result = shell.run_cell(advice, store_history=True)
        if not result.success:
            failures.append(f"{advice}: {result.error_in_exec or result.error_before_exec!r}")
    join_cancelled_timers()
    gc.collect()
    alive = sum(reference() is not None for reference in shell.user_ns["watched"])
    after = ""
    if case.after:
        result = shell.run_cell(textwrap.dedent(case.after))
        if not result.success:
            after = repr(result.error_in_exec)
    return Outcome(survivors, answers, sentences, failures, alive, after)


def join_cancelled_timers() -> None:
    """Wait until the threads of cancelled timers have ended."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.finished.is_set():
            thread.join()


def rows(ask: Asker, report: str) -> list[Row]:
    """Return the rows of a report."""
    if report == "leaks":
        records = [row for row in ask.report("leaks").records if hasattr(row, "holder")]
    else:
        records = list(ask._app.experiments.finished[-1].survivors)
    printed_rows = []
    for record in records:
        path, advice = "", ""
        if record.holder:
            path, advice = record.holder.path, record.holder.advice
        printed_rows.append(Row(record.size_bytes, path, advice))
    return printed_rows


def is_code(shell: Any, advice: str) -> bool:
    """Return True if a line can be pasted: a statement or a magic."""
    if not advice.strip():
        return False
    try:
        compile(shell.transform_cell(advice), "advice", "exec", flags=0x2000)  # top-level await
    except SyntaxError:
        return False
    return True


def spoiled(line: str, part: str) -> str:
    """Return a line without its first statement or its remark, with which a test must fail."""
    statements, comment, remark = line.partition(COMMENT)
    if part == "statement":
        rest = "; ".join(statements.split("; ")[1:])
        return (rest or "pass") + comment + remark
    if part == "remark":
        return statements
    return line


def prepared_shell() -> InteractiveShell:
    """Return the shell for all questions, in front of which the objects of libraries are hidden."""
    gc.collect()
    gc.freeze()
    shell = new_shell()
    ask = Asker(shell)
    ask.run(_PRELUDE)
    ask.run(_WATCH)
    return shell


def show_modules_of(case: Case) -> None:
    """Let looks see again, of all hidden objects, those of the modules that a case imports."""
    used = {"builtins", "weakref"}
    for names in re.findall(r"import ([\w., ]+)", f"{case.setup}\n{case.code}"):
        used.update(root_of(name.strip()) for name in names.split(","))
    modules = {name: module for name, module in sys.modules.items() if root_of(name) in used}
    own_variables = {id(vars(module)) for module in modules.values()}
    variables = {id(vars(module)) for module in list(sys.modules.values())} - own_variables
    shown = set[int]()
    waiting: list[Any] = list(modules.values())
    while waiting:
        item = waiting.pop()
        if id(item) in shown or id(item) in variables or not gc.is_tracked(item):
            continue
        if isinstance(item, ModuleType) and item.__name__ not in modules:
            continue
        if isinstance(item, (FunctionType, type)) and root_of(item.__module__) not in used:
            continue
        shown.add(id(item))
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(item))
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(item))  # among the visible ones
        waiting += gc.get_referents(item)


def root_of(module_name: str) -> str:
    """Return the first part of a module's name."""
    return module_name.partition(".")[0]


def answer(question: list[Any], shell: InteractiveShell) -> Any:
    """Return the outcome of a case and a kind, or the error instead of it.

    The objects of libraries are hidden, except those of the modules in which a case leaves its
    data, unless the question's third part is true: each report would pass over them.
    """
    name, kind, sees_all = question
    case = CASES[name]

    def work() -> dict[str, Any]:
        if sees_all or case.sees_all:
            gc.unfreeze()
        elif case.sees_libraries:
            show_modules_of(case)
        return asdict(outcome(shell, case, kind))

    return forked(work)


LATE = {"torch": "torch._dynamo", "matplotlib": "matplotlib.pyplot"}
"""Modules that a library's first use imports, which takes seconds: an optimizer, a figure."""

if __name__ == "__main__":
    late = [LATE[library] for library in sys.argv[1:] if library in LATE]
    for module in ("zmq", *sys.argv[1:], *late):  # zmq as a kernel has it
        importlib.import_module(module)
    import_late_modules()
    shell = prepared_shell()
    answer_questions(lambda question: answer(question, shell))
