"""Asks each command about the same object, to compare the sizes and the holders that they name.

Run by test_agreement in processes of their own: ``python -m tests.agreement LIBRARY`` answers
questions about objects of a library. Each object has a forked process, in which it is the only
large one.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import ipygpumem.heap
import ipygpumem.inventory
from ipygpumem.extras.guard.guard import MemoryGuard
from ipygpumem.inventory.names.ownership import Ownership
from ipygpumem.inventory.names.top import LargestNames
from ipygpumem.records import ExperimentRecord, RetainedArray
from ipygpumem.report.layout import Report
from ipygpumem.report.text import render
from ipygpumem.shell.app import app_of
from ipygpumem.shell.cell import GuardAction
from ipygpumem.units import parse_bytes
from tests import kinds
from tests.agreement_cases import CASES, PLACES, Case, Place
from tests.answering import answer_questions, forked
from tests.kinds import KINDS, MIB

SIZE_BYTES = 4 * MIB
"""Size of each object, roughly."""
LEFT = 'outer["x"]'
"""The place in which a cell of an experiment leaves an object."""
_TOTAL = re.compile(r"(^\d+ leaks?.* · |but )(at least )?(?P<size>[\d.]+ (?:[KMG]i)?B)")
"""The sum of all rows in the headline."""


@dataclass(frozen=True)
class Answer:
    """One command's answer about an object."""

    command: str
    size_bytes: int
    """Bytes of the object, or the bytes that deleting its name would free; 0 if the command does
    not name it.
    """
    is_at_least: bool = False
    """True if the command says that the figure is a lower bound."""
    holder: str = ""
    """The holder of the object, or of the largest part of it."""
    advice: str = ""
    """The line that frees it."""


class Asker:
    """Runs cells and commands in a shell with the extension, and reads their reports."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._app = app_of(shell)
        self._reports: list[Report] = []
        self._app.context.display.show = self._receive  # type: ignore[method-assign]  # instead of printing them

    def _receive(self, reports: Any, *_: object, **__: object) -> None:
        self._reports += reports

    def run(self, cell: str) -> None:
        """Run a cell that must succeed."""
        self._shell.run_cell(cell).raise_error()

    def report(self, line: str) -> Report:
        """Return the report of ``%gpumem line``."""
        self._reports.clear()
        self._shell.run_line_magic("gpumem", line)
        (report,) = self._reports
        return report

    # -- the commands ----------------------------------------------------------------------------

    def top(self, name: str) -> Answer:
        """Ask ``%gpumem top`` about a name."""
        report = self.report("top")
        (largest,) = [record for record in report.records if isinstance(record, LargestNames)]
        rows = [row for row in largest.names if name in (row.name, *row.same)]
        is_at_least = _says_at_least(report)
        if not rows:
            return Answer("top", 0, is_at_least)
        return Answer("top", rows[0].size_bytes, is_at_least, advice=rows[0].remedy)

    def status(self, name: str) -> Answer:
        """Ask plain ``%gpumem``, which names the largest objects."""
        report = self.report("")
        shown = [line for line in report.lines if line.startswith("largest names: ")]
        is_shown = any(re.search(rf"[: ]{re.escape(name)} [\d.]", line) for line in shown)
        look = self._app.last_look
        size = look.name_bytes.get(name, 0) if is_shown else 0
        return Answer("%gpumem", size, _says_at_least(report))

    def guard(self, name: str) -> Answer:
        """Ask the memory guard, which lists the largest names after it has refused
        an allocation.
        """
        self.report("guard on")
        (guard,) = [
            observer for observer in self._app.session.observers if type(observer) is MemoryGuard
        ]
        report = guard._report(GuardAction("refused 1 GiB"))
        self.report("guard off")
        for table in report.tables:
            for row in table.rows:
                cells = dict(zip(table.columns, row, strict=True))
                if name in cells["name"].split(", "):
                    advice = cells.get("to free it", "")
                    size = parse_bytes(cells["size"].removeprefix("at least "))
                    return Answer("guard", size, _says_at_least(report), advice=advice)
        return Answer("guard", 0, _says_at_least(report))

    def why(self, expression: str) -> tuple[Answer, Ownership]:
        """Ask ``%gpumem why`` about the size of an object, without other variables' objects, and
        its first holder.
        """
        report = self.report(f"why {expression}")
        (ownership,) = [record for record in report.records if isinstance(record, Ownership)]
        own_names = "|".join(re.findall(r"\w+", expression))
        size = ownership.size_bytes
        others = re.compile(rf"notebook variable (?!({own_names})\b)")
        for part in ownership.held:
            if others.match(part.holder.path):
                size -= part.size_bytes
        is_at_least = _says_at_least(report) or not ownership.complete
        answer = Answer(f"why {expression}", size, is_at_least)
        # Else these are small objects, which other names use, too.
        if ownership.held and ownership.held[0].size_bytes >= size / 2:
            first = ownership.held[0].holder
            answer = Answer(
                answer.command, answer.size_bytes, is_at_least, first.path, first.advice
            )
        return answer, ownership

    def deletion(self, name: str) -> tuple[Answer, Answer]:
        """Ask ``%gpumem why`` about the size of a name's object, and about the bytes that ``del``
        frees.
        """
        answer, ownership = self.why(name)
        freed = sum(ownership.freed_bytes.values())
        return answer, Answer(f"why: del {name}", freed, answer.is_at_least)

    def leaks(self) -> list[Answer]:
        """Ask ``%gpumem leaks``: the sum of its rows with the holder of the largest one; none if it
        lists nothing.
        """
        report = self.report("leaks")
        answers = [
            _answer_of("leaks", row) for row in report.records if isinstance(row, RetainedArray)
        ]
        total = _TOTAL.search(report.headline)
        size = parse_bytes(total["size"]) if total else 0
        for table in report.tables:
            for texts in table.rows:
                row = dict(zip(table.columns, texts, strict=True))
                if not row.get("held by"):  # kept by mistake: it is no record of the report
                    size_text = row["size"].removeprefix("at least ")
                    answer = Answer(
                        "leaks",
                        parse_bytes(size_text),
                        size_text != row["size"],
                        row["what"],
                        row.get("to free it", ""),
                    )
                    answers.append(answer)
        return [replace(answer, size_bytes=size) for answer in _sum_of("leaks", answers)]

    def survivors(self) -> list[Answer]:
        """Return the leaks in the report of the last experiment, as one answer."""
        record: ExperimentRecord = self._app.experiments.finished[-1]
        return _sum_of("survivors", [_answer_of("survivors", row) for row in record.survivors])


def _answer_of(command: str, row: RetainedArray) -> Answer:
    if row.holder is None:
        return Answer(command, row.size_bytes, row.is_at_least)
    return Answer(command, row.size_bytes, row.is_at_least, row.holder.path, row.holder.advice)


def _sum_of(command: str, answers: list[Answer]) -> list[Answer]:
    """Return one answer for all rows of a command, with the holder of the largest row."""
    if not answers:
        return []
    largest = max(answers, key=lambda answer: answer.size_bytes)
    size = sum(answer.size_bytes for answer in answers)
    is_at_least = any(answer.is_at_least for answer in answers)
    return [Answer(command, size, is_at_least, largest.holder, largest.advice)]


def _says_at_least(report: Report) -> bool:
    return "at least" in render([report]).replace("no leak of at least", "")


# -- the two situations -------------------------------------------------------------------------


def about_name(ask: Asker, name: str) -> list[Answer]:
    """Return each command's answer about an object with a name."""
    return [*ask.deletion(name), ask.top(name), ask.status(name), *ask.leaks(), ask.guard(name)]


def about_left(ask: Asker, expression: str = LEFT) -> list[Answer]:
    """Return each command's answer about an object that an experiment has left in a place."""
    survivors = ask.survivors() or [Answer("survivors", 0)]
    leaks = ask.leaks() or [Answer("leaks", 0)]
    answers = [*survivors, *leaks, ask.why(expression)[0]]
    if expression == LEFT:
        answers += [
            *ask.deletion("outer"),
            ask.top("outer"),
            ask.status("outer"),
            ask.guard("outer"),
        ]
    return answers


@dataclass(frozen=True)
class Question:
    """Cells that make an object, and the situation in which the commands are asked about it."""

    library: str
    """The library to import before; empty for the standard library."""
    cells: tuple[str, ...]
    expression: str
    """The name of the object, or its expression if an experiment has left it."""
    is_left: bool
    sees_libraries: bool = False
    """True if objects of libraries lead to it, which are hidden otherwise: each look would pass
    over them.
    """

    def answers(self, shell: InteractiveShell | None) -> list[Answer]:
        """Run the cells in a shell with the extension, then ask each command.

        Args:
            shell: the prepared shell; None if the library is not loaded yet.
        """
        if shell is None:
            load_everything(self.library)
            gc.freeze()
            shell = new_shell()
        if self.sees_libraries:
            gc.unfreeze()
        ask = Asker(shell)
        for cell in self.cells:
            ask.run(cell)
        if self.is_left:
            return about_left(ask, self.expression)
        return about_name(ask, self.expression)


def questions() -> dict[str, Question]:
    """Return all questions by name: the situation, the library and the kind."""
    by_name = dict[str, Question]()
    for library, makers in KINDS.items():
        for kind in makers:
            code = f'x = __import__("tests.kinds").kinds.KINDS[{library!r}][{kind!r}]({SIZE_BYTES})'
            by_name |= _about_object(kind, Case(code, library))
    for kind, case in CASES.items():
        by_name |= _about_object(kind, case)
    for kind, place in PLACES.items():
        libraries = [place.library] if place.library else ["", "numpy"]
        for library in libraries:
            by_name |= _about_place(kind, place, library)
    return by_name


def _about_object(kind: str, case: Case) -> dict[str, Question]:
    """Return the questions about an object with a name, and about one that an experiment has left
    in a dict.
    """
    setup = textwrap.dedent(case.setup)
    code = textwrap.dedent(case.code)
    experiment = f"%%experiment e\n{code}\n{LEFT} = x"
    return {
        f"named {case.library}: {kind}": Question(case.library, (setup, code), "x", is_left=False),
        f"left {case.library}: {kind}": Question(
            case.library, (setup, "outer = {}", experiment), LEFT, is_left=True
        ),
    }


def _about_place(kind: str, place: Place, library: str) -> dict[str, Question]:
    """Return the question about an object that an experiment has left in a place: bytes, or an
    array with NumPy.

    It is so large that experiments search for objects of any kind. Places of arrays see all
    objects of libraries, those of bytes only where these lead to the place.
    """
    make = "x = __import__('numpy').ones(5 << 20)" if library else "x = b'x' * (40 << 20)"
    experiment = f"%%experiment e\n{make}\n{textwrap.dedent(place.code)}"
    cells = textwrap.dedent(place.setup), experiment
    sees_libraries = place.sees_libraries or library != ""
    return {
        f"place {library}: {kind}": Question(
            library, cells, place.expression, is_left=True, sees_libraries=sees_libraries
        )
    }


def import_late_modules() -> None:
    """Import what shells and reports need: each forked process would import it again, for as long
    as its reports take.
    """
    importlib.import_module("numpy")
    for package in (ipygpumem.heap, ipygpumem.inventory):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in forked(modules_of_a_notebook):
        with suppress(ImportError):
            importlib.import_module(name)


def modules_of_a_notebook() -> list[str]:
    """Return the modules that a shell, an experiment and reports import."""
    before = set(sys.modules)
    ask = Asker(new_shell())
    ask.run("outer = []")
    ask.run("%%experiment e\nouter.append(bytes(1 << 20))")
    for line in ("", "top", "why outer", "leaks"):
        ask.report(line)
    return sorted(set(sys.modules) - before)


STARTS_NO_THREADS = ("", "numpy")
"""Libraries that can be used before a process forks: a thread would stay in the parent."""


def load_everything(library: str) -> None:
    """Use a library, because many import their parts on first use."""
    for make in KINDS.get(library, {}).values():
        make(200_000)
    gc.collect()


def new_shell() -> InteractiveShell:
    """Return a new shell with the extension, in which a first cell has run."""
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("").raise_error()
    return shell


def shell_without_libraries() -> InteractiveShell:
    """Return a new shell in front of which the objects of libraries are hidden."""
    gc.collect()
    gc.freeze()
    return new_shell()


def prepare(library: str) -> InteractiveShell | None:
    """Import a library, and what every question needs; return the shell for all questions, in front
    of which the objects of libraries are hidden. None if each process must use the library itself.
    """
    importlib.import_module("zmq")  # the memory guard replaces its functions; a kernel has it
    import_late_modules()
    for name in ("numpy", library):
        for module in filter(None, (name.partition(".")[0], name)):
            with suppress(ImportError):
                kinds.lib[module] = importlib.import_module(module)
    if library not in STARTS_NO_THREADS:
        return None
    load_everything(library)
    gc.freeze()
    return new_shell()


def answer_to(name: str, shell: InteractiveShell | None) -> Any:
    """Return the answers to a question, or the error instead of them."""
    question = questions()[name]
    return forked(lambda: [asdict(answer) for answer in question.answers(shell)])


if __name__ == "__main__":
    shell = prepare(sys.argv[1])
    answer_questions(lambda name: answer_to(name, shell))
