"""Leaves data of an experiment in random places of a notebook, runs the lines that ``leaks``
prints, and sees what died.

An experiment makes a few arrays and objects, derives others from them (views, tuples, closures),
and puts them into containers that the notebook has. Then every printed line is run. All data must
be dead, and everything that the notebook had before must still be there. Each program runs in a
forked process. With ``--places`` the containers are random, too, and the rows must have the sizes
of all data that is alive.

Run by test_random_leaks in a process of its own, which answers questions with such arguments:

    python -m tests.random_leaks 0 60            # prints the seeds that fail, with their programs
    python -m tests.random_leaks 17 --shrink     # prints the smallest program that still fails
    python -m tests.random_leaks 0 60 --places   # in random containers
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tests.agreement import Asker, import_late_modules, shell_without_libraries
from tests.answering import answer_questions, forked
from tests.graph_kinds import KINDS
from tests.random_graphs import Graph, helpers_of, random_nodes, with_late_references
from tests.remedies import Row, is_code, rows, spoiled

_MOST_STEPS = 8
"""Maximum number of times that ``leaks`` is asked."""
_WITHIN = 0.05
"""Largest relative difference between the rows and the truth: containers have bytes, too."""

PRELUDE = """
import collections, functools, gc, weakref
import sys
import numpy as np
torch = sys.modules.get("torch")
class Big(bytearray):
    __hash__ = object.__hash__
class Owner:
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
    item = Owner(len(innocent))
    innocent.append(weakref.ref(item))
    return item
"""
PLACES = """
rows = [old(), old()]
table = {"old": old(), 3: old()}
runs = {"first": [old()], "second": {"old": old()}}
owner = Owner(old()); owner.items = [old()]; owner.empty = None
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
    "owner": "Owner(np.ones(2**18))",
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
    "owner": "Owner({x})",
    "closure": "closing_over({x})",
    "partial": "functools.partial(print, {x})",
    "nested": '{{"inner": [1, ({x}, 2)]}}',
    "generator": "started(generated({x}))",
    "method": "Owner({x}).__init__",
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
    "owner.items[0] = Owner([{x}, owner.items[0]])",
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
    elif isinstance(item, Owner):
        watch(item.data)
    elif isinstance(item, dict):
        for value in item.values(): watch(value)
    elif isinstance(item, list):
        for value in item: watch(value)
def started(generator):
    next(generator)
    return generator
"""


def program(
    seed: int,
    *,
    has_torch: bool = False,
    has_older: bool = False,
    places: Graph | None = None,
) -> list[str]:
    """Return the statements of an experiment.

    Args:
        seed: the seed.
        has_torch: True to make tensors in most of them.
        has_older: True to put most of the data around older objects.
        places: the containers in which all data is put instead of those of ``PLACES``.
    """
    random = Random(seed)
    puts = PUTS
    if places is not None:
        puts = puts_into(places)
    elif has_older:
        puts = tuple(put for put in PUTS if put not in _INTO_REPLACED) + 3 * PUTS_AROUND
    statements = list[str]()
    data = DATA | DATA_OF_TORCH if has_torch else DATA
    if places is not None:
        data = {kind: data[kind] for kind in _FOUND_ANYWHERE}
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


# -- random places ------------------------------------------------------------------------------

STEPS = {
    "a list": ("[0]", "[1]", "[2]"),
    "a tuple": ("[0]", "[1]", "[2]"),
    "nested lists": ("[0][0][0]", "[0][0][1]", "[0][0][2]"),
    "a deque": ("[0]", "[1]", "[2]"),
    "a subclass of list": ("[0]", "[1]", "[2]"),
    "values of a dict": ('["first"]', '["second"]'),
    "a defaultdict": ('["first"]',),
    "an OrderedDict": ('["first"]', '["second"]'),
    "a UserDict": ('["first"]',),
    "attributes": (".first", ".second"),
    "slots": (".first", ".second"),
    "a SimpleNamespace": (".first",),
}
"""The code that leads from an object of each kind to the objects to which it refers."""
_FOUND_ANYWHERE = ("array", "rows", "list of arrays", "dict of arrays", "owner")
"""Data that is found however deep it is; other objects only near a name."""
_MOST_PLACES = 9
_MOST_NAMES = 3


def random_places(seed: int) -> Graph:
    """Return a graph of containers, and of arrays that are older than the experiment, below a few
    names.
    """
    random = Random(seed)
    containers = [KINDS[name] for name in STEPS]
    nodes = random_nodes(random, [KINDS["a NumPy array"]], containers, _MOST_PLACES)
    named = [node.name for node in nodes if node.kind.grows]
    kept = random.sample(named, min(len(named), random.randint(1, _MOST_NAMES)))
    graph = with_late_references(random, Graph(tuple(nodes), tuple(kept)))
    return graph if puts_into(graph) else random_places(seed + 1_000_000)


def puts_into(places: Graph) -> tuple[str, ...]:
    """Return the ways to put data into each container to which a name leads."""
    by_name = {node.name: node for node in places.nodes}
    paths = dict.fromkeys(places.kept)
    puts = []
    waiting = list(zip(places.kept, places.kept, strict=True))
    while waiting:
        name, path = waiting.pop()
        node = by_name[name]
        if node.kind.grows:
            puts.append(string.Template(node.kind.grows).substitute(n=path, b="{x}"))
        for other, step in zip(node.inputs, STEPS.get(node.kind.name, ()), strict=False):
            below = f"{path}{step}"
            if below in paths:
                continue
            paths[below] = None
            waiting.append((other, below))
            if by_name[other].kind.is_payload and node.kind.grows:
                puts.append(f"{below} = ({{x}}, {below})")  # around the older array
    return tuple(puts)


def cells_of(places: Graph) -> list[str]:
    """Return the cells that make the older containers, and note their arrays."""
    statements = places.statements
    number = len(places.nodes)
    arrays = [node.name for node in places.nodes if node.kind.is_payload]
    noted = [f"innocent.append(weakref.ref({name}))" for name in arrays]
    code = "\n".join([*statements[:number], *noted, *statements[number:]])
    return [helpers_of(code), code, "gc.collect();"]


# -- the comparison -----------------------------------------------------------------------------


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
    compares_sizes: bool = False
    """True if the rows must have the bytes of all data that is alive."""
    spoiled: str = ""
    """The part that each row is robbed of, to see that the checks can fail."""

    def rows(self, ask: Asker) -> list[Row]:
        """Return the rows of the report."""
        leak_rows = []
        for row in rows(ask, self.report):
            size_bytes = 0 if self.spoiled == "size" else row.size_bytes
            leak_rows.append(Row(size_bytes, row.path, spoiled(row.advice, self.spoiled)))
        return leak_rows


def prepared_shell() -> InteractiveShell:
    """Return the shell for all programs."""
    shell = shell_without_libraries()
    ask = Asker(shell)
    for cell in (PRELUDE, WATCH, PLACES):
        ask.run(cell)
    return shell


def failure(
    shell: InteractiveShell, statements: Sequence[str], order: Order, before: Sequence[str] = ()
) -> str:
    """Return the mistakes of the lines that are printed after an experiment; empty if none.

    Args:
        shell: the prepared shell.
        statements: the experiment's code.
        order: how the lines are run.
        before: cells that run before the experiment.
    """
    ask = Asker(shell)
    for cell in before:
        ask.run(cell)
    ask.run("%%experiment e\n" + "\n".join(statements))
    innocent = len(alive_among(shell, "innocent"))  # the experiment may drop some itself
    printed = list[Row]()
    wrong_size = wrong_size_of(shell, order.rows(ask)) if order.compares_sizes else ""
    if wrong_size:
        return wrong_size
    for _ in range(_MOST_STEPS):
        left = order.rows(ask)
        if order.is_stepwise:
            left = left[:1]
        for row in left:
            printed.append(row)
            if not is_code(shell, row.advice):
                return f"no code: {printed}"
            result = shell.run_cell(order.line or row.advice, store_history=True)
            if not result.success:
                return f"{result.error_in_exec or result.error_before_exec!r}: {printed}"
        if not left or not order.is_stepwise:
            break
    gc.collect()
    alive = len(alive_among(shell, "watched"))
    lost = innocent - len(alive_among(shell, "innocent"))
    says_lost = any("of older data" in row.advice for row in printed)
    if alive or (lost > 0) != says_lost:
        return f"{alive} alive, {lost} innocent lost: {printed}"
    return ""


def alive_among(shell: InteractiveShell, name: str) -> list[Any]:
    """Return the objects that are alive of a list of weak references."""
    objects = [reference() for reference in shell.user_ns[name]]
    return [item for item in objects if item is not None]


def wrong_size_of(shell: InteractiveShell, found: list[Row]) -> str:
    """Return the sum of the rows with the right one; empty if it is right."""
    truth = sum(map(_size_of, alive_among(shell, "watched")))
    said = sum(row.size_bytes for row in found)
    if abs(said - truth) <= _WITHIN * truth:
        return ""
    return f"rows have {said:,} of {truth:,} bytes: {found}"


def _size_of(item: Any) -> int:
    """Return the bytes of an array, or of an object that is a bytearray."""
    return len(item) if isinstance(item, bytearray) else int(item.nbytes)


def checked(
    shell: InteractiveShell, statements: Sequence[str], order: Order, before: Sequence[str] = ()
) -> str:
    """Return the mistakes of a program that runs in a forked process."""
    return str(forked(lambda: failure(shell, statements, order, before)))


def shrunk(
    shell: InteractiveShell, statements: list[str], order: Order, before: Sequence[str] = ()
) -> list[str]:
    """Return the fewest statements that still fail."""
    for position in reversed(range(len(statements))):
        fewer = [*statements[:position], *statements[position + 1 :]]
        wrong = checked(shell, fewer, order, before)
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
    parser.add_argument("--places", action="store_true")
    parser.add_argument("--spoil", default="")
    options = parser.parse_args(arguments)
    report = "survivors" if options.older or options.places else "leaks"
    order = Order(options.stepwise, options.lines, report, options.places, options.spoil)
    if options.torch:
        importlib.import_module("torch")
    shell = prepared_shell()
    failures = list[Any]()
    for seed in range(options.first, options.stop or options.first + 1):
        places = random_places(seed) if options.places else None
        before = cells_of(places) if places is not None else []
        statements = program(seed, has_torch=options.torch, has_older=options.older, places=places)
        wrong = checked(shell, statements, order, before)
        if wrong and options.shrink:
            statements = shrunk(shell, statements, order, before)
            wrong = checked(shell, statements, order, before)
        if wrong:
            failures.append([seed, [*before[:-1], *statements], wrong])
    return failures


if __name__ == "__main__":
    importlib.import_module("zmq")  # as a kernel has it
    import_late_modules()
    if sys.argv[1:]:
        print(json.dumps(main(sys.argv[1:]), indent=1))
    else:
        answer_questions(lambda arguments: forked(lambda: main(arguments)))
