"""Pastes the lines with which ``why`` frees a name's memory, for random graphs of objects, and sees
what died.

A graph is a list of plain objects (lists, dicts, objects, views, functions, partials) that share
arrays, and most of them have names. Each name is asked about. The size must be that of the arrays
to which its object leads. If there is a line for all of its holders, all of them must be dead after
it, and everything else still there, except the other data that the line announces. The line and the
truth have forked processes of their own. The truth is measured too: the arrays that survive when
all other names are deleted.

Run by test_random_lines in a process of its own, which answers questions with such arguments:

    python -m tests.random_lines 0 60            # prints the seeds that fail, with their programs
    python -m tests.random_lines 17 --shrink     # prints the smallest program that still fails
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.inventory.names.ownership import Ownership
from ipygpumem.report.layout import IN_ONE_LINE, Report
from ipygpumem.units import parse_bytes
from tests.agreement import Asker, import_late_modules, shell_without_libraries
from tests.answering import answer_questions, forked
from tests.random_graphs import (
    KIB,
    KINDS,
    SLACK_BYTES,
    Graph,
    collect,
    helpers_of,
    random_nodes,
    shrunk,
    with_late_references,
)
from tests.remedies import is_code, spoiled

_MOST_NODES = 14
_NAMED_CONTAINERS = 0.6
_NAMED_ARRAYS = 0.2
"""Shares of the objects that have names; the arrays without a name are data that a line drops."""
_WITHIN = 0.01
"""Largest relative difference between an announced size, which has three digits, and the truth."""
PAYLOADS = [KINDS["a NumPy array"]]
CONTAINERS = [
    KINDS[name]
    for name in (
        "a list",
        "a tuple",
        "values of a dict",
        "nested lists",
        "attributes",
        "slots",
        "a deque",
        "a default argument",
        "a closure",
        "a partial",
        "a view of an array",
    )
]
_OTHER_DATA = re.compile(r"also drops (?P<size>[\d.]+ (?:[KMG]i)?B) of (?:other|older) data")


def plain_graph(seed: int) -> Graph:
    """Return the graph of a seed, in which most objects have names."""
    random = Random(seed)
    nodes = random_nodes(random, PAYLOADS, CONTAINERS, _MOST_NODES)
    kept = []
    for node in nodes[:-1]:
        share = _NAMED_ARRAYS if node.kind.is_payload else _NAMED_CONTAINERS
        if random.random() < share:
            kept.append(node.name)
    graph = Graph(tuple(nodes), (*kept, nodes[-1].name))
    return with_late_references(random, graph)


class Notebook:
    """A graph's objects in the shell of this process, with weak references to its arrays."""

    def __init__(self, shell: InteractiveShell, graph: Graph) -> None:
        self._shell = shell
        self._ask = Asker(shell)
        self._graph = graph
        self._arrays: dict[str, Any] = {}
        statements = graph.statements
        number = len(graph.nodes)
        self._ask.run(helpers_of("\n".join(statements)))
        self._ask.run("\n".join(statements[:number]))
        for node in graph.nodes:
            if node.kind.is_payload:
                self._arrays[node.name] = weakref.ref(shell.user_ns[node.name])
        self._ask.run("\n".join(statements[number:]))
        collect()

    @property
    def arrays(self) -> dict[str, int]:
        """The bytes of the arrays that are alive, by name."""
        sizes = {}
        for node in self._graph.nodes:
            if node.name in self._arrays and self._arrays[node.name]() is not None:
                sizes[node.name] = node.size_bytes
        return sizes

    def report(self, name: str) -> Report:
        """Return the answer of ``%gpumem why``."""
        return self._ask.report(f"why {name}")

    def reached(self, name: str) -> list[str]:
        """Return the arrays that survive if a name is the only one, found in a forked process."""
        others = [other for other in self._graph.kept if other != name]
        return self.left_after("\n".join(f"del {other}" for other in others))

    def left_after(self, code: str) -> list[str]:
        """Return the arrays that survive some code, found in a forked process."""

        def left() -> list[str]:
            self._shell.run_cell(code, store_history=True).raise_error()
            collect()
            return list(self.arrays)

        outcome = forked(left)
        if type(outcome) is not list:
            raise RuntimeError(f"{code}: {outcome}")
        return outcome


@dataclass(frozen=True)
class Lines:
    """The lines of an answer that can be pasted."""

    together: str
    """Frees all of the object; empty if there is no such line."""
    of_holders: tuple[str, ...]
    """Each removes the object from one holder."""

    @property
    def all(self) -> list[str]:
        """All lines."""
        return [line for line in (self.together, *self.of_holders) if line]


def lines_of(report: Report, shell: InteractiveShell, part: str) -> Lines:
    """Return the lines of a report, each robbed of a part."""
    together = ""
    for line in report.lines:
        if line.startswith(IN_ONE_LINE):
            together = spoiled(line.removeprefix(IN_ONE_LINE), part)
    of_holders = []
    for table in report.tables:
        for row in table.rows:
            advice = dict(zip(table.columns, row, strict=True))["freed by"]
            if is_code(shell, advice):
                of_holders.append(spoiled(advice, part))
    return Lines(together, tuple(of_holders))


def mistakes_about(notebook: Notebook, ownership: Ownership, lines: Lines) -> list[str]:
    """Return the mistakes of an answer about a name: of its size, and of the lines that free it."""
    name = ownership.name
    arrays = notebook.arrays
    reached = notebook.reached(name)
    truth = sum(arrays[array] for array in reached)
    mistakes = []
    if not is_near(ownership.size_bytes, truth):
        mistakes.append(f"{ownership.size_bytes / KIB:.0f} KiB, leads to {truth / KIB:.0f} KiB")
    for line in lines.all:
        left = notebook.left_after(line)
        alive = [array for array in reached if array in left]
        if alive and line == lines.together:
            mistakes.append(f"{line}: leaves {', '.join(alive)}")
        dropped = set(arrays).difference(left, reached)
        dropped_bytes = sum(map(arrays.__getitem__, dropped))
        if not is_near(announced_bytes(line), dropped_bytes):
            mistakes.append(f"{line}: drops {dropped_bytes / KIB:.0f} KiB of other data")
    return [f"{name}: {mistake}" for mistake in mistakes]


def announced_bytes(line: str) -> int:
    """Return the bytes of other data that a line drops, as it says."""
    announced = _OTHER_DATA.search(line)
    return parse_bytes(announced["size"]) if announced else 0


def is_near(said_bytes: int, truth_bytes: int) -> bool:
    """Return True if two sizes differ only by small objects and by a printed size's last digit."""
    return abs(said_bytes - truth_bytes) <= _WITHIN * truth_bytes + _MOST_NODES * SLACK_BYTES


def checked(shell: InteractiveShell, graph: Graph, part: str) -> tuple[int, list[str]]:
    """Return the number of lines for a graph's names, and the mistakes, found in a forked process.

    Args:
        shell: the prepared shell.
        graph: the graph.
        part: the part that each line is robbed of.
    """

    def work() -> tuple[int, list[str]]:
        notebook = Notebook(shell, graph)
        mistakes = []
        number = 0
        for name in graph.kept:
            report = notebook.report(name)
            (ownership,) = [one for one in report.records if isinstance(one, Ownership)]
            lines = lines_of(report, shell, part)
            number += len(lines.all)
            mistakes += mistakes_about(notebook, ownership, lines)
        return number, mistakes

    result = forked(work)
    if type(result) is str:
        return 0, [result]
    number, mistakes = result
    return number, mistakes


def main(arguments: Collection[str]) -> dict[str, Any]:
    """Return the number of lines, and the seeds that fail with their programs and mistakes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int, nargs="?")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--spoil", default="")
    options = parser.parse_args(list(arguments))
    shell = shell_without_libraries()
    failures = {}
    total = 0
    for seed in range(options.first, options.stop or options.first + 1):
        graph = plain_graph(seed)
        number, mistakes = checked(shell, graph, options.spoil)
        total += number
        if mistakes and options.shrink:
            graph = shrunk(graph, lambda one: is_mistaken(checked(shell, one, options.spoil)[1]))
            _, mistakes = checked(shell, graph, options.spoil)
        if mistakes:
            failures[f"seed {seed}"] = "\n".join([*mistakes, "", graph.code])
    return {"lines": total, "failures": failures}


def is_mistaken(mistakes: Sequence[str]) -> bool:
    """Return True if there are mistakes, and none of them is an error of the program."""
    return bool(mistakes) and not any("Error: " in mistake for mistake in mistakes)


if __name__ == "__main__":
    import_late_modules()
    if sys.argv[1:]:
        answer = main(sys.argv[1:])
        for title, text in answer["failures"].items():
            print(f"# {title}\n{text}\n")
        print(json.dumps(answer["lines"]), "lines")
    else:
        answer_questions(lambda arguments: forked(lambda: main(arguments)))
