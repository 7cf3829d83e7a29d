"""Leaves data of an experiment in random places of a notebook, runs the lines that ``leaks``
prints, and sees what died.

An experiment makes a few arrays and objects, derives others from them (views, tuples, closures),
and puts them into containers that the notebook has. Then every printed line is run. All data must
be dead, and everything that the notebook had before must still be there. Each program runs in a
forked process.

Run by test_random_leaks in a process of its own, which answers questions with such arguments:

    python -m tests.random_leaks 0 60            # prints the seeds that fail, with their programs
    python -m tests.random_leaks 17 --shrink     # prints the smallest program that still fails
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tests.agreement import Asker, import_late_modules, new_shell
from tests.answering import answer_questions, forked
from tests.remedies import is_code, rows

_MOST_STEPS = 8
"""Maximum number of times that ``leaks`` is asked."""

PRELUDE = """
import collections, functools, gc, weakref
import sys
import numpy as np
torch = sys.modules.get("torch")
class Big(bytearray):
    __hash__ = object.__hash__
class Plain:
    def __init__(self, data):
        self.data = data
class Slotted:
    __slots__ = ("data", "more", "rate", "__weakref__")
def closing_over(data):
    def load():
        return data
    return load
def generated(data):
    yield 1
    yield data
watched, innocent = [], []
def old():
    item = Plain(len(innocent))
    innocent.append(weakref.ref(item))
    return item
"""
PLACES = """
rows = [old(), old()]
table = {"old": old(), 3: old()}
runs = {"first": [old()], "second": {"old": old()}}
owner = Plain(old()); owner.items = [old()]; owner.empty = None
slotted = Slotted(); slotted.data = old(); slotted.more = [old()]
queue = collections.deque([old()])
groups = collections.defaultdict(list, old=[old()])
class Registry:
    entries = [old()]
    by_name = {"old": old()}
pairs = ([old()], {"old": old()})
"""
"""Containers of the notebook, which still have their items in the end."""

DATA = {
    "array": "np.ones(2**18)",
    "rows": "np.ones((2**9, 2**9))",
    "object": "Big(2**21)",
    "list of arrays": "[np.ones(2**17) for _ in range(3)]",
    "dict of arrays": "{key: np.ones(2**17) for key in 'abc'}",
    "owner": "Plain(np.ones(2**18))",
    "list of objects": "[Big(2**20) for _ in range(3)]",
}
"""Code that makes at least 1 MiB."""

DATA_OF_TORCH = {
    "tensor": "torch.ones(2**19)",
    "layer": "torch.nn.Linear(2**10, 2**9)",
    "list of tensors": "[torch.ones(2**18) for _ in range(3)]",
    "array below a tensor": "torch.from_numpy(np.ones(2**18))",
}

FORMS = {
    "itself": "{x}",
    "itself again": "{x}",
    "tuple": "(1, {x})",
    "list": "[{x}]",
    "dict": '{{"key": {x}}}',
    "owner": "Plain({x})",
    "closure": "closing_over({x})",
    "partial": "functools.partial(print, {x})",
    "nested": '{{"inner": [1, ({x}, 2)]}}',
    "generator": "started(generated({x}))",
    "method": "Plain({x}).__init__",
}
OF_ARRAYS = {
    "view": "{x}[:10]",
    "view of a view": "{x}[:20][3:]",
    "reshaped": "{x}.reshape(-1, 2)",
    "memory": "memoryview({x})",
}
"""Code of an object that keeps ``{x}`` alive."""

OF_TENSORS = {
    "view": "{x}[:10]",
    "detached": "{x}.detach()",
    "array": "{x}.numpy()",
}

PUTS = (
    "rows.append({x})",
    "rows.insert(0, {x})",
    'table["new"] = {x}',
    "table[{number}] = {x}",
    'runs["first"].append({x})',
    'runs["second"]["new"] = {x}',
    'runs["third"] = {x}',
    "owner.new = {x}",
    "owner.empty = {x}",
    "owner.items.append({x})",
    "slotted.more.append({x})",
    "slotted.rate = {x}",
    "queue.append({x})",
    'groups["new"].append({x})',
    'groups["old"].append({x})',
    "Registry.entries.append({x})",
    'Registry.by_name["new"] = {x}',
    "Registry.new = {x}",
    "pairs[0].append({x})",
    'pairs[1]["new"] = {x}',
)

PUTS_AROUND = (
    "rows[0] = ({x}, rows[0])",
    'table["old"] = [table["old"], {x}]',
    'runs["first"] = ({x}, runs.pop("first"))',
    'runs["second"]["old"] = {{"new": {x}, "old": runs["second"]["old"]}}',
    "owner.items[0] = Plain([{x}, owner.items[0]])",
    "owner.data = ({x}, owner.data)",
    "slotted.more[0] = ({x}, (slotted.more[0],))",
    "queue.append(({x}, queue.popleft()))",
    'groups["old"] = closing_over(({x}, groups["old"]))',
    "Registry.entries[0] = functools.partial(print, {x}, Registry.entries[0])",
)
"""Ways to put data around an older object, which no line can keep if it removes what is new."""

_INTO_REPLACED = ('runs["first"].append({x})', 'groups["old"].append({x})')
"""Ways to put data into lists that are no longer there then."""

WATCH = """
def watch(item):
    if isinstance(item, (np.ndarray, Big)):
        watched.append(weakref.ref(item))
    elif type(item).__module__.startswith("torch"):
        watched.append(weakref.ref(item))
    elif isinstance(item, Plain):
        watch(item.data)
    elif isinstance(item, dict):
        for value in item.values(): watch(value)
    elif isinstance(item, list):
        for value in item: watch(value)
def started(generator):
    next(generator)
    return generator
"""


def program(seed: int, *, has_torch: bool = False, has_older: bool = False) -> list[str]:
    """Return the statements of an experiment.

    Args:
        seed: the seed.
        has_torch: True to make tensors in most of them.
        has_older: True to put most of the data around older objects.
    """
    random = Random(seed)
    puts = PUTS
    if has_older:
        puts = tuple(put for put in PUTS if put not in _INTO_REPLACED) + 3 * PUTS_AROUND
    statements = list[str]()
    data = DATA | DATA_OF_TORCH if has_torch else DATA
    for number in range(random.choice([1, 1, 1, 2, 3])):
        name = f"x{number}"
        kind = random.choice(list(data))
        statements.append(f"{name} = {data[kind]}; watch({name})")
        forms = FORMS
        if kind in ("array", "rows"):
            forms = FORMS | OF_ARRAYS
        elif kind in ("tensor", "array below a tensor"):
            forms = FORMS | OF_TENSORS
        for _ in range(random.choice([1, 2, 2, 3, 4])):
            form = random.choice(list(forms.values())).format(x=name)
            put = random.choice(puts)
            statements.append(put.format(x=form, number=random.randrange(4, 9)))
    return statements


@dataclass(frozen=True)
class Order:
    """Way in which the printed lines are run."""

    is_stepwise: bool = False
    """True to run the first line only, and to ask again, until nothing is left."""
    line: str = ""
    """Code to run instead of each line, to see that the check can fail."""
    report: str = "leaks"
    """The report whose lines are run; ``survivors`` is the experiment's, whose lines say if they
    drop older objects.
    """


def prepared_shell() -> InteractiveShell:
    """Return the shell for all programs, in front of which the objects of libraries are hidden."""
    gc.collect()
    gc.freeze()
    shell = new_shell()
    ask = Asker(shell)
    for cell in (PRELUDE, WATCH, PLACES):
        ask.run(cell)
    return shell


def failure(shell: InteractiveShell, statements: Sequence[str], order: Order) -> str:
    """Return the mistakes of the lines that are printed after an experiment; empty if none.

    Args:
        shell: the prepared shell.
        statements: the experiment's code.
        order: how the lines are run.
    """
    ask = Asker(shell)
    ask.run("%%experiment e\n" + "\n".join(statements))
    printed = list[tuple[int, str, str]]()
    for _ in range(_MOST_STEPS):
        left = rows(ask, order.report)
        if order.is_stepwise:
            left = left[:1]
        for size, holder, advice in left:
            printed.append((size, holder, advice))
            if not is_code(shell, advice):
                return f"no code: {printed}"
            result = shell.run_cell(order.line or advice, store_history=True)
            if not result.success:
                return f"{result.error_in_exec or result.error_before_exec!r}: {printed}"
        if not left or not order.is_stepwise:
            break
    gc.collect()
    alive = sum(reference() is not None for reference in shell.user_ns["watched"])
    lost = sum(reference() is None for reference in shell.user_ns["innocent"])
    says_lost = any("of older data" in advice for _, _, advice in printed)
    if alive or (lost > 0) != says_lost:
        return f"{alive} alive, {lost} innocent lost: {printed}"
    return ""


def checked(shell: InteractiveShell, statements: Sequence[str], order: Order) -> str:
    """Return the mistakes of a program that runs in a forked process."""
    return str(forked(lambda: failure(shell, statements, order)))


def shrunk(shell: InteractiveShell, statements: list[str], order: Order) -> list[str]:
    """Return the fewest statements that still fail."""
    for position in reversed(range(len(statements))):
        fewer = [*statements[:position], *statements[position + 1 :]]
        wrong = checked(shell, fewer, order)
        if wrong and "NameError" not in wrong:
            statements = fewer
    return statements


def main(arguments: Sequence[str]) -> list[Any]:
    """Return the seeds that fail, each with its program and what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int, nargs="?")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--stepwise", action="store_true")
    parser.add_argument("--lines", default="")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--older", action="store_true")
    options = parser.parse_args(arguments)
    report = "survivors" if options.older else "leaks"
    order = Order(options.stepwise, options.lines, report)
    if options.torch:
        importlib.import_module("torch")
    shell = prepared_shell()
    failures = list[Any]()
    for seed in range(options.first, options.stop or options.first + 1):
        statements = program(seed, has_torch=options.torch, has_older=options.older)
        wrong = checked(shell, statements, order)
        if wrong and options.shrink:
            statements = shrunk(shell, statements, order)
            wrong = checked(shell, statements, order)
        if wrong:
            failures.append([seed, statements, wrong])
    return failures


if __name__ == "__main__":
    importlib.import_module("zmq")  # as a kernel has it
    import_late_modules()
    if sys.argv[1:]:
        print(json.dumps(main(sys.argv[1:]), indent=1))
    else:
        answer_questions(lambda arguments: forked(lambda: main(arguments)))
