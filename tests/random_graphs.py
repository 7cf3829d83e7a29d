"""Builds random graphs of objects as notebook code, and compares what ``why`` promises of ``del``
with real deaths.

A graph is a list of nodes. Each node is one statement of code: it makes an object of one of the
``KINDS`` that refers to earlier nodes, or a payload of a known size. A few names are kept, all
others are deleted. Then each kept name is asked for the bytes that deleting it frees, and deleted
in a forked process, where weak references show which payloads died. Only Linux and macOS can fork.

Run by test_random_graphs in processes of their own, because a small heap makes ``why`` quick:

    python -m tests.random_graphs why 0 60           # prints the seeds that fail, with their
    programs, as JSON python -m tests.random_graphs why 17 --shrink    # prints the smallest program
    that still fails python -m tests.random_graphs why each           # each kind alone
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import json
import os
import re
import string
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from ipygpumem.api import inventories
from ipygpumem.inventory.names import ownership, top
from tests.graph_kinds import CONTAINERS, HELPERS, HIDDEN_CYCLE, KINDS, KNOWN_WRONG, PAYLOADS, Kind

KIB = 1 << 10

SLACK_BYTES = 3 * KIB
"""Bytes of one object that is no payload, at most: a class has 1 to 2 KiB. All of a graph have less
than a payload.
"""

SIZES = range(160 * KIB, 640 * KIB, 8)

FEWEST, MOST = 3, 40
"""Number of nodes in a graph."""


@dataclass(frozen=True)
class Node:
    """One object of a graph: its kind, and the names of the objects to which it refers."""

    name: str
    kind: Kind
    inputs: tuple[str, ...] = ()
    size_bytes: int = 0

    @property
    def code(self) -> str:
        """Return the statement that makes it."""
        first, second = [*self.inputs, "None", "None"][:2]
        places = {
            "n": self.name,
            "a": first,
            "b": second,
            "items": ", ".join(self.inputs),
            "size": self.size_bytes,
        }
        return string.Template(self.kind.code).substitute(places)


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of their making, later references between them, and the names that are
    kept.
    """

    nodes: tuple[Node, ...]
    kept: tuple[str, ...]
    late: tuple[tuple[str, str], ...] = ()
    """Pairs of names: the first object is made to refer to the second."""

    @property
    def statements(self) -> list[str]:
        """Return the code that builds the graph, without helpers."""
        kinds = {node.name: node.kind for node in self.nodes}
        made = [node.code for node in self.nodes]
        for name, other in self.late:
            made.append(string.Template(kinds[name].grows).substitute(n=name, b=other))
        unnamed = [node.name for node in self.nodes if node.name not in self.kept]
        if unnamed:
            made.append(f"del {', '.join(unnamed)}")
        return made

    @property
    def code(self) -> str:
        """Return the whole code, which can be pasted into a notebook."""
        body = "\n".join(self.statements)
        return f"{helpers_of(body)}\n{body}\n"


def helpers_of(body: str) -> str:
    """Return the helpers that some code needs, in their order."""
    texts, needed = helper_texts(), set[int]()
    words, count = set(re.findall(r"\w+", body)), -1
    while count != len(needed):
        count = len(needed)
        for place, (names, text) in enumerate(texts):
            if place not in needed and not words.isdisjoint(names):
                needed.add(place)
                words.update(re.findall(r"\w+", text))
    return "\n".join(texts[place][1] for place in sorted(needed))


@functools.cache
def helper_texts() -> list[tuple[set[str], str]]:
    """Return the names that each helper binds, with its code."""
    helpers = list[tuple[set[str], str]]()
    for statement in ast.parse(HELPERS).body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                helpers.append(
                    (
                        {alias.asname or alias.name.partition(".")[0]},
                        ast.unparse(ast.Import([alias])),
                    )
                )
        elif isinstance(statement, ast.Assign):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            helpers.append((names, ast.unparse(statement)))
        elif isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            helpers.append(({statement.name}, ast.unparse(statement)))
    return helpers


def usable(without: Collection[str]) -> tuple[list[Kind], list[Kind]]:
    """Return the payloads and containers that this Python has, without some kinds."""
    payloads = [kind for kind in PAYLOADS if kind.name not in without]
    containers = [
        kind for kind in CONTAINERS if kind.name not in without and sys.version_info >= kind.since
    ]
    return payloads, containers


def random_graph(seed: int, without: Collection[str] = ()) -> Graph:
    """Return the graph of a seed: mostly containers of recent nodes, some shared parts, some
    cycles.
    """
    random = Random(seed)
    nodes = random_nodes(random, *usable(without), MOST)
    used = {name for node in nodes for name in node.inputs}
    tops = [node.name for node in nodes if node.name not in used]
    kept = {*random.sample(tops, random.randint(1, min(4, len(tops))))}
    kept.update(node.name for node in random.sample(nodes, random.randint(0, 2)))
    graph = Graph(tuple(nodes), tuple(sorted(kept, key=lambda name: int(name[1:]))))
    return with_late_references(random, graph, without)


def random_nodes(
    random: Random, payloads: Sequence[Kind], containers: Sequence[Kind], most: int
) -> list[Node]:
    """Return at most ``most`` nodes of some kinds, each of which refers to earlier ones."""
    nodes = list[Node]()
    for number in range(random.randint(FEWEST, most)):
        kind = random.choice(containers)
        inputs = random_inputs(random, kind, nodes)
        if not inputs or random.random() < 0.2:
            kind, inputs = random.choice(payloads), ()
        size_bytes = random.choice(SIZES) if kind.is_payload else 0
        nodes.append(Node(f"n{number}", kind, inputs, size_bytes))
    return nodes


def with_late_references(random: Random, graph: Graph, without: Collection[str] = ()) -> Graph:
    """Return a graph in which some nodes also refer to random ones, which may close cycles."""
    for node in graph.nodes:
        if node.kind.grows and random.random() < 0.2:
            other = random.choice(graph.nodes)
            longer = replace(graph, late=(*graph.late, (node.name, other.name)))
            if HIDDEN_CYCLE not in without or not has_hidden_cycle(longer):
                graph = longer
    return graph


def has_hidden_cycle(graph: Graph) -> bool:
    """Return True if objects that the collector does not look into lead to themselves."""
    return any(node.name in reached(graph, node.name) for node in graph.nodes if node.kind.hides)


def reached(graph: Graph, start: str) -> set[str]:
    """Return the names of all nodes to which a node leads."""
    below = {node.name: [*node.inputs] for node in graph.nodes}
    for name, other in graph.late:
        below[name].append(other)
    reached_names, waiting = set[str](), list(below[start])
    while waiting:
        name = waiting.pop()
        if name not in reached_names:
            reached_names.add(name)
            waiting += below[name]
    return reached_names


def random_inputs(random: Random, kind: Kind, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the names of random nodes to which a new object refers; none if no node
    is suitable.
    """
    number = (
        random.randint(1, 3)
        if "$items" in kind.code
        else len(set(re.findall(r"\$[ab]\b", kind.code)))
    )
    used, chosen = {name for node in nodes for name in node.inputs}, list[str]()
    for place in range(number):
        wanted = set(kind.takes.split()) if place == 0 or "$items" in kind.code else set[str]()
        suitable = [node.name for node in nodes if wanted <= set(node.kind.gives.split())]
        if not suitable:
            return ()
        unused = [name for name in suitable if name not in used]
        if unused and random.random() < 0.6:  # else nearly everything would be shared
            suitable = unused
        chosen.append(random.choice(suitable))
    return tuple(chosen)


def lone_graphs(kind: Kind) -> Iterator[Graph]:
    """Yield graphs in which one object of a kind alone holds payloads, shares one, and is a small
    part of a list.
    """
    wanted = set(kind.takes.split())
    payload = next(one for one in PAYLOADS if wanted <= set(one.gives.split()))
    first = Node("first", payload, (), 200 * KIB)
    if kind.is_payload:
        yield Graph((replace(first, kind=kind),), ("first",))
        return
    second = Node("second", PAYLOADS[0], (), 300 * KIB)
    number = 2 if "$items" in kind.code else len(set(re.findall(r"\$[ab]\b", kind.code)))
    if kind.takes and "$items" in kind.code and kind.takes not in second.kind.gives:
        number = 1
    owner = Node("owner", kind, ("first", "second")[:number])
    nodes = (first, second, owner)
    yield Graph(nodes, ("owner",))
    yield Graph(nodes, ("first", "owner"))
    larger = Node("larger", PAYLOADS[0], (), 600 * KIB)
    yield Graph((*nodes, larger, Node("other", KINDS["a list"], ("owner", "larger"))), ("other",))


def graphs_of_each_kind(turn: int | None, without: Collection[str]) -> Iterator[tuple[str, Graph]]:
    """Yield the lone graphs of each kind, or one of them: another for the next kind, and for the
    next turn.
    """
    kinds = [kind for some in usable(without) for kind in some]
    for place, kind in enumerate(kinds):
        graphs = list(lone_graphs(kind))
        for number, graph in enumerate(graphs):
            if turn is None or number == (place + turn) % len(graphs):
                yield f"{kind.name} {number}", graph


Look = Callable[[dict[str, Any], str], int]
"""Returns the bytes that deleting a name of a namespace frees, as a command says."""


def freed_by_why(namespace: dict[str, Any], name: str) -> int:
    """Return the bytes that ``why`` promises."""
    holding = [namespace[name]]
    ownership_record = ownership.ownership_of(
        name, holding, inventories.roots(namespace), 2, is_name=True
    )
    return ownership_record.freed_bytes.get("cpu", 0)


def freed_by_top(namespace: dict[str, Any], name: str) -> int:
    """Return the bytes in the column "del frees" of ``top``, for which all names are looked at
    together.
    """
    named = {key: value for key, value in namespace.items() if not key.startswith("__")}
    references = Counter(map(id, named.values()))
    largest = top.measure_names(named, {}, references=references, namespaces=[id(namespace)])
    for row in largest.names:
        if name in (row.name, *row.same):
            return (
                (row.freed_bytes or {}).get("cpu", 0)
                if not row.same
                else freed_by_why(namespace, name)
            )
    return 0


def freed_by_nothing(namespace: dict[str, Any], name: str) -> int:
    """Return 0, to test the comparison itself."""
    return 0


LOOKS: dict[str, Look] = {"why": freed_by_why, "top": freed_by_top, "nothing": freed_by_nothing}


@dataclass(frozen=True)
class Difference:
    """A name of which a look is wrong."""

    name: str
    said_bytes: int
    freed_bytes: int
    died: list[str] = field(default_factory=list)
    """The payloads that died when the name was deleted."""
    failure: str = ""
    """The error of the look or of the graph's code, if there was one."""

    def __str__(self) -> str:
        if self.failure:
            return f"{self.name or 'the code'}: {self.failure}"
        died = ", ".join(self.died) or "nothing"
        return (
            f"del {self.name}: said {self.said_bytes / KIB:.1f} KiB, frees "
            f"{self.freed_bytes / KIB:.1f} KiB ({died})"
        )


def differences(graph: Graph, look: Look) -> list[Difference]:
    """Return the names of a graph of which ``look`` is wrong, found in a forked process."""

    def work() -> str:
        return json.dumps([asdict(difference) for difference in examined(graph, look)])

    text = in_fork(work)
    if not text:
        return [Difference("", 0, 0, failure="the process crashed")]
    return [Difference(**fields) for fields in json.loads(text)]


def examined(graph: Graph, look: Look) -> list[Difference]:
    """Build a graph in a new main module and compare each kept name; return the differences.

    Code, looks and deletions run in this one function: tracebacks of the graph's code refer to its
    frame, which looks leave out while it runs.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    namespace = vars(module)
    sizes = {node.name: node.size_bytes for node in graph.nodes if node.kind.is_payload}
    alive = dict[str, Any]()
    try:
        exec(compile(helpers_of("\n".join(graph.statements)), "helpers", "exec"), namespace)
        for node in graph.nodes:
            exec(compile(node.code, f"cell {node.name}", "exec"), namespace)
            if node.kind.is_payload:
                alive[node.name] = weakref.ref(namespace[node.name])
        for statement in graph.statements[len(graph.nodes) :]:
            exec(compile(statement, "cell", "exec"), namespace)
    except Exception as error:
        return [Difference("", 0, 0, failure=f"{type(error).__name__}: {error}")]
    collect()
    before = {name for name, reference in alive.items() if reference() is not None}
    slack_bytes = SLACK_BYTES * (len(graph.nodes) + 1)
    wrong = list[Difference]()
    for name in graph.kept:
        try:
            said = look(namespace, name)
        except Exception as error:
            wrong.append(Difference(name, 0, 0, failure=f"{type(error).__name__}: {error}"))
            continue
        after = json.loads(in_fork(functools.partial(alive_without, name, namespace, alive)))
        died = sorted(before.difference(after))
        freed = sum(map(sizes.__getitem__, died))
        if abs(said - freed) > slack_bytes:
            wrong.append(Difference(name, said, freed, died))
    return wrong


def alive_without(name: str, namespace: dict[str, Any], alive: dict[str, Any]) -> str:
    """Delete a name; return the payloads that are still alive."""
    del namespace[name]
    collect()
    return json.dumps([payload for payload, reference in alive.items() if reference() is not None])


def collect() -> None:
    """Collect garbage, and what it drops: arrays of objects and finalizers free more cycles."""
    for _ in range(3):
        gc.collect()


def in_fork(work: Callable[[], str]) -> str:
    """Return the text that ``work`` returns in a forked process; none if the process ends early."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                file.write(work())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def has_wrong_figure(differences: Sequence[Difference]) -> bool:
    """Return True if a look is wrong of a graph, and no code failed."""
    return bool(differences) and not any(difference.failure for difference in differences)


def shrunk(graph: Graph, fails: Callable[[Graph], bool]) -> Graph:
    """Return the smallest graph that still fails: greedily without names, references and nodes."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(graph):
            if fails(candidate):
                graph, is_smaller = candidate, True
                break
    return graph


def smaller(graph: Graph) -> Iterator[Graph]:
    """Yield graphs with one thing less, or with one simpler thing."""
    for place in range(len(graph.late)):
        yield replace(graph, late=graph.late[:place] + graph.late[place + 1 :])
    for name in graph.kept:
        if len(graph.kept) > 1:
            yield replace(graph, kept=tuple(other for other in graph.kept if other != name))
    used = {name for node in graph.nodes for name in node.inputs}
    used.update(graph.kept, *graph.late)
    for place, node in enumerate(graph.nodes):
        before, after = graph.nodes[:place], graph.nodes[place + 1 :]
        if node.name not in used:
            yield replace(graph, nodes=(*before, *after))
        for simpler in simpler_nodes(node, graph):
            changed = replace(graph, nodes=(*before, simpler, *after))
            if is_valid(changed):
                yield changed
        if node.name in graph.kept:
            for below in node.inputs:
                names = dict.fromkeys(below if name == node.name else name for name in graph.kept)
                yield replace(graph, kept=tuple(names))


def simpler_nodes(node: Node, graph: Graph) -> Iterator[Node]:
    """Yield the node with fewer references, with references that pass by one object, and as a list
    or bytearray.
    """
    by_name = {graph_node.name: graph_node for graph_node in graph.nodes}
    for place, name in enumerate(node.inputs):
        rest = node.inputs[:place], node.inputs[place + 1 :]
        if "$items" in node.kind.code and len(node.inputs) > 1:
            yield replace(node, inputs=(*rest[0], *rest[1]))
        for below in by_name[name].inputs:
            yield replace(node, inputs=(*rest[0], below, *rest[1]))
    simplest = KINDS["a bytearray" if node.kind.is_payload else "a list"]
    if node.kind not in (simplest, KINDS["a bytearray"]):
        yield replace(node, kind=simplest)


def is_valid(graph: Graph) -> bool:
    """Return True if all objects are as their holders need them."""
    kinds = {node.name: node.kind for node in graph.nodes}
    for node in graph.nodes:
        number = len(node.inputs) if "$items" in node.kind.code else 1
        needed = set(node.kind.takes.split())
        for name in node.inputs[:number]:
            if not needed <= set(kinds[name].gives.split()):
                return False
    return all(kinds[name].grows for name, _ in graph.late)


def failures(
    graphs: Iterable[tuple[str, Graph]], look: Look, *, shrinks: bool = False
) -> dict[str, str]:
    """Return the wrong figures with the program, by the graph's title."""
    texts = dict[str, str]()
    for title, graph in graphs:
        wrong = differences(graph, look)
        if has_wrong_figure(wrong) and shrinks:
            graph = shrunk(graph, lambda smaller: has_wrong_figure(differences(smaller, look)))
            wrong = differences(graph, look)
        if wrong:
            texts[title] = "\n".join([*map(str, wrong), "", graph.code])
    return texts


def main(arguments: Sequence[str]) -> None:
    """Print the failures as JSON, or as text if they are shrunk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("look", choices=LOOKS)
    parser.add_argument(
        "seeds",
        nargs="+",
        help="a seed, the first seed and the one after the last, 'each' for the graphs of each "
        "kind, or 'each' and a number for one graph of each kind",
    )
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--all", action="store_true", help="also kinds that are known to be wrong")
    options = parser.parse_args(arguments)
    without = () if options.all else KNOWN_WRONG
    graphs: Iterator[tuple[str, Graph]]
    if options.seeds[0] == "each":
        turn = int(options.seeds[1]) if len(options.seeds) > 1 else None
        graphs = graphs_of_each_kind(turn, without)
    else:
        first = int(options.seeds[0])
        stop = int(options.seeds[1]) if len(options.seeds) > 1 else first + 1
        graphs = ((f"seed {seed}", random_graph(seed, without)) for seed in range(first, stop))
    texts = failures(graphs, LOOKS[options.look], shrinks=options.shrink)
    if options.shrink:
        for title, text in texts.items():
            print(f"# {title}\n{text}\n")
    else:
        print(json.dumps(texts))


if __name__ == "__main__":
    for _, helper in helper_texts():
        if helper.startswith("import"):
            exec(helper)  # before the forks, because each import takes a while
    gc.collect()
    # else each look would pass over the libraries' objects: this takes five times as long
    gc.freeze()
    main(sys.argv[1:])
