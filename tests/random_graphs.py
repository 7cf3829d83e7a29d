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
import textwrap
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from ipygpumem.api import inventories
from ipygpumem.inventory.names import ownership, top

KIB = 1 << 10
SLACK_BYTES = 3 * KIB
"""Bytes of one object that is no payload, at most: a class has 1 to 2 KiB. All of a graph have less
than a payload.
"""
SIZES = range(160 * KIB, 640 * KIB, 8)
FEWEST, MOST = 3, 40
"""Number of nodes in a graph."""

HELPERS = """
import abc, array, asyncio, atexit, codecs, collections, concurrent.futures, contextlib, contextvars, copy, ctypes
import dataclasses, enum, functools, graphlib, itertools, logging, operator, queue, random, re, sched, string, sys
import threading, types, typing, weakref
import numpy as np

class Load(bytearray):
    __hash__ = object.__hash__

class Text(str):
    pass

class Plain:
    def __init__(self, first, second=None):
        self.first, self.second = first, second
    def show(self):
        return self.first

class Slotted:
    __slots__ = "first", "second", "late", "__weakref__"
    def __init__(self, first, second):
        self.first, self.second = first, second

class HalfSlotted(Slotted):
    pass

class Words(list):
    pass

class Table(dict):
    pass

class Row(tuple):
    pass

class Group(set):
    pass

class Line(collections.deque):
    pass

class Grid(np.ndarray):
    pass

Point = collections.namedtuple("Point", "x y")

class Typed(typing.NamedTuple):
    x: object
    y: object

@dataclasses.dataclass(eq=False)
class Entry:
    first: object
    second: object

@dataclasses.dataclass(eq=False, slots=True)
class SlottedEntry:
    first: object
    second: object

class Lazy:
    def __init__(self, first):
        self._make = lambda: [first]
    @functools.cached_property
    def content(self):
        return self._make()

def cached(value):
    lazy = Lazy(value)
    lazy.content
    return lazy

def ignore(*values, **more):
    pass

def closure(value, other=None):
    def inner(*given):
        return value, other
    return inner

def recursive(value):
    def inner():
        return inner, value
    return inner

def with_nonlocal(value):
    kept = None
    def keep(new):
        nonlocal kept
        kept = new
    keep(value)
    return keep

def suspended(value):
    yield 1
    yield value

def started(generator):
    next(generator)
    return generator

def delegating(value):
    yield from suspended(value)

@types.coroutine
def pause():
    yield

async def waiting(value):
    await pause()
    return value

async def awaiting(value):
    await waiting(value)

async def streaming(value):
    yield 1
    yield value

def sent(coroutine):
    try:
        coroutine.send(None)
    except StopIteration:
        pass
    return coroutine

def streamed(value):
    stream = streaming(value)
    sent(stream.__anext__())
    return stream

def failing(value):
    raise ValueError("failed")

def failed(value):
    try:
        failing([value])
    except ValueError as error:
        return error

def failed_while_handling(value, other):
    try:
        try:
            failing([value])
        except ValueError:
            raise KeyError(other)
    except KeyError as error:
        return error

def failed_from(value, other):
    try:
        raise KeyError(other) from ValueError(value)
    except KeyError as error:
        return error

def frame_of(value):
    return sys._getframe()

def read(frame):
    frame.f_locals
    return frame

var = contextvars.ContextVar("var")

def context_with(value):
    context = contextvars.copy_context()
    context.run(var.set, value)
    return context

def property_of(value):
    class Made:
        content = property(lambda self: value)
    return Made()

def instance_of_class_with(value):
    class Made:
        content = [value]
    return Made()

def dispatching(value):
    function = functools.singledispatch(closure(value))
    function.register(int, closure(value))
    return function

def boxed(*values):
    box = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        box[place] = value
    return box

def structured(value):
    table = np.zeros(2, dtype=[("number", "i8"), ("content", object)])
    table["content"][0] = value
    return table

def future_of(value):
    future = concurrent.futures.Future()
    future.set_result(value)
    return future

def stack_with(value):
    stack = contextlib.ExitStack()
    stack.callback(ignore, value)
    return stack

@contextlib.contextmanager
def managing(value):
    yield value

def entered(manager):
    manager.__enter__()
    return manager

def local_with(value):
    local = threading.local()
    local.content = value
    return local

def filled(made, *values):
    for value in values:
        made.put(value)
    return made

def with_attribute(owner, value):
    owner.content = value
    return owner

def stepped(iterator):
    next(iterator)
    return iterator

def incref(value):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value

@functools.lru_cache
def remember(value):
    return [value]

def remembered(value):
    @functools.lru_cache
    def load(key):
        return [key]
    load(value)
    return load

def method_cache(value):
    class Made:
        @functools.lru_cache
        def load(self):
            return [value]
    made = Made()
    made.load()
    return made

def weakly_keyed(key, value):
    table = weakref.WeakKeyDictionary()
    table[key] = value
    return table

def finalized(value, other):
    weakref.finalize(value, ignore, other)
    return value
"""  # noqa: E501


@dataclass(frozen=True)
class Kind:
    """One kind of object: the code that makes it.

    In the code ``$n`` is the object's name, ``$a`` and ``$b`` are objects that it refers to,
    ``$items`` is a list of one to three of them, and ``$size`` are the bytes of a payload.
    """

    name: str
    code: str
    takes: str = ""
    """A trait that every object in the place of ``$a`` and ``$items`` must have."""
    gives: str = ""
    """Its traits: ``hashable``, ``weak`` (it can be referenced weakly), and those of payloads."""
    grows: str = ""
    """The code that adds a reference to ``$b``, which may be a later node, so that cycles are
    closed.
    """
    since: tuple[int, int] = (3, 10)
    hides: bool = False
    """True if the collector does not see what it refers to: a cycle through it is never freed."""

    @property
    def is_payload(self) -> bool:
        """Return True if it has bytes of its own."""
        return "$size" in self.code


PAYLOADS = [
    Kind("a bytearray", "$n = Load($size)", gives="hashable weak buffer"),
    Kind("a NumPy array", "$n = np.ones($size // 8)", gives="weak array buffer"),
    Kind("an array.array", "$n = array.array('b', [0]) * $size", gives="weak buffer"),
    Kind("a text", "$n = Text('x' * $size)", gives="hashable weak text"),
    Kind(
        "an object with bytes",
        "$n = Plain(bytes($size))",
        gives="hashable weak",
        grows="$n.late = $b",
    ),
]
SAFE = "hashable weak"
CONTAINERS = [
    # built-in containers
    Kind("a list", "$n = [$items]", grows="$n.append($b)"),
    Kind("a tuple", "$n = ($items,)"),
    Kind("values of a dict", "$n = {'first': $a, 'second': $b}", grows="$n['late'] = $b"),
    Kind("keys of a dict", "$n = dict.fromkeys([$items])", takes="hashable"),
    Kind("a set", "$n = {$items}", takes="hashable", gives="weak"),
    Kind("a frozenset", "$n = frozenset([$items])", takes="hashable", gives=SAFE),
    Kind("a slice", "$n = slice($a, $b)"),
    Kind("a deque", "$n = collections.deque([$items])", gives="weak", grows="$n.append($b)"),
    Kind(
        "an OrderedDict",
        "$n = collections.OrderedDict(first=$a, second=$b)",
        gives="weak",
        grows="$n['late'] = $b",
    ),
    Kind(
        "keys of an OrderedDict",
        "$n = collections.OrderedDict.fromkeys([$items])",
        takes="hashable",
        gives="weak",
    ),
    Kind("a defaultdict", "$n = collections.defaultdict(list, first=$a)", grows="$n['late'] = $b"),
    Kind("the factory of a defaultdict", "$n = collections.defaultdict(closure($a))"),
    Kind("a ChainMap", "$n = collections.ChainMap({'first': $a}, {'first': $b})", gives="weak"),
    Kind("keys of a Counter", "$n = collections.Counter([$items])", takes="hashable", gives="weak"),
    Kind(
        "a UserDict", "$n = collections.UserDict(first=$a)", gives="weak", grows="$n['late'] = $b"
    ),
    Kind("a UserList", "$n = collections.UserList([$items])", gives="weak", grows="$n.append($b)"),
    Kind("a mappingproxy", "$n = types.MappingProxyType({'first': $a})"),
    Kind("nested lists", "$n = [[[$items]]]", grows="$n[0][0].append($b)"),
    # instances
    Kind("attributes", "$n = Plain($a, $b)", gives=SAFE, grows="$n.late = $b"),
    Kind(
        "attributes in a dict",
        "$n = Plain($a)\nvars($n)['other'] = $b",
        gives=SAFE,
        grows="$n.late = $b",
    ),
    Kind(
        "many attributes",
        "$n = Plain($a)\nfor i in range(40): setattr($n, f'a{i}', $b)",
        gives=SAFE,
    ),
    Kind("slots", "$n = Slotted($a, $b)", gives=SAFE, grows="$n.late = $b"),
    Kind("slots and attributes", "$n = HalfSlotted($a, $b)", gives=SAFE, grows="$n.more = $b"),
    Kind("a subclass of list", "$n = Words([$items])", gives="weak", grows="$n.append($b)"),
    Kind(
        "a subclass of list with attributes", "$n = with_attribute(Words([$a]), $b)", gives="weak"
    ),
    Kind("a subclass of dict", "$n = Table(first=$a)", gives="weak", grows="$n['late'] = $b"),
    Kind(
        "a subclass of dict with attributes",
        "$n = with_attribute(Table(first=$a), $b)",
        gives="weak",
    ),
    Kind("a subclass of tuple", "$n = Row([$items])", grows="$n.late = $b"),
    Kind(
        "a subclass of set", "$n = with_attribute(Group([$a]), $b)", takes="hashable", gives="weak"
    ),
    Kind(
        "a subclass of deque",
        "$n = with_attribute(Line([$a]), $b)",
        gives="weak",
        grows="$n.append($b)",
    ),
    Kind("a named tuple", "$n = Point($a, $b)"),
    Kind("a typed named tuple", "$n = Typed($a, $b)"),
    Kind("a dataclass", "$n = Entry($a, $b)", gives=SAFE, grows="$n.first = $b"),
    Kind(
        "a dataclass with slots",
        "$n = SlottedEntry($a, $b)",
        gives="hashable",
        grows="$n.first = $b",
    ),
    Kind("a cached property", "$n = cached($a)", gives=SAFE),
    Kind(
        "a SimpleNamespace", "$n = types.SimpleNamespace(first=$a)", gives="", grows="$n.late = $b"
    ),
    # functions
    Kind("a closure", "$n = closure($a, $b)", gives=SAFE, grows="$n.late = $b"),
    Kind("a closure on itself", "$n = recursive($a)", gives=SAFE),
    Kind("a nonlocal variable", "$n = with_nonlocal($a)", gives=SAFE, grows="$n($b)"),
    Kind("a default argument", "def $n(first, second=$a): return first", gives=SAFE),
    Kind("a keyword default", "def $n(*, first=$a): return first", gives=SAFE),
    Kind(
        "an attribute of a function",
        "def $n(): return 1\n$n.content = $a",
        gives=SAFE,
        grows="$n.late = $b",
    ),
    Kind("an annotation of a function", "def $n(first: $a): return first", gives=SAFE),
    Kind("a bound method", "$n = Plain($a).show", gives=SAFE),
    Kind("a bound built-in method", "$n = [$a].append"),
    Kind("a cell", "$n = closure($a).__closure__[0]"),
    Kind("a partial", "$n = functools.partial(ignore, $a, key=$b)", gives=SAFE),
    Kind("a partial method", "$n = functools.partialmethod(ignore, $a)", gives=SAFE),
    Kind("a cache", "$n = remembered($a)", takes="hashable", gives=SAFE),
    Kind("a cache of a method", "$n = method_cache($a)", gives=SAFE),
    Kind("a dispatching function", "$n = dispatching($a)", gives=SAFE),
    Kind("a static method", "$n = staticmethod(closure($a))", gives="hashable"),
    Kind("a class method", "$n = classmethod(closure($a))", gives="hashable"),
    Kind("a property object", "$n = property(closure($a))", gives="hashable"),
    Kind("a sort key", "$n = functools.cmp_to_key(ignore)($a)"),
    Kind("an itemgetter", "$n = operator.itemgetter(1, ($a, $b))", gives="hashable"),
    Kind("a methodcaller", "$n = operator.methodcaller('show', $a, key=$b)", gives="hashable"),
    Kind("a context manager", "$n = entered(managing($a))", gives=SAFE),
    Kind("an exit stack", "$n = stack_with($a)", gives=SAFE),
    # classes and modules
    Kind("a class", "class $n:\n    content = $a", gives=SAFE, grows="$n.late = $b"),
    Kind(
        "a class with a list",
        "class $n:\n    content = [$items]",
        gives=SAFE,
        grows="$n.content.append($b)",
    ),
    Kind("an annotation of a class", "class $n:\n    content: $a", gives=SAFE),
    Kind("a method's default", "class $n:\n    def show(self, first=$a): return first", gives=SAFE),
    Kind("a property", "$n = property_of($a)", gives=SAFE),
    Kind(
        "an instance's class",
        "$n = instance_of_class_with($a)",
        gives=SAFE,
        grows="type($n).late = $b",
    ),
    Kind(
        "a derived class",
        textwrap.dedent(
            """\
            class Base:
                content = [$a]
            class $n(Base): pass
            del Base"""
        ),
        gives=SAFE,
    ),
    Kind("a member of an enum", "$n = enum.Enum('Made', {'A': [$a]}).A", gives=SAFE),
    Kind("a super object", "$n = super(Plain, Plain($a))"),
    Kind(
        "a module",
        "$n = types.ModuleType('made')\n$n.content = $a",
        gives=SAFE,
        grows="$n.late = $b",
    ),
    Kind("a generic alias", "$n = types.GenericAlias(list, ($a,))"),
    # suspended code, errors and frames
    Kind("a generator", "$n = started(suspended($a))", gives=SAFE),
    Kind("a generator that has not begun", "$n = suspended($a)", gives=SAFE),
    Kind("a delegating generator", "$n = started(delegating($a))", gives=SAFE),
    Kind("a generator expression", "$n = (item for item in [$items])", gives=SAFE),
    Kind("a coroutine", "$n = sent(waiting($a))", gives=SAFE),
    Kind("an awaiting coroutine", "$n = sent(awaiting($a))", gives=SAFE),
    Kind("an asynchronous generator", "$n = streamed($a)", gives=SAFE),
    Kind("arguments of an error", "$n = ValueError($a)", gives="hashable", grows="$n.late = $b"),
    Kind("a frame of an error", "$n = failed($a)", gives="hashable", grows="$n.late = $b"),
    Kind("a traceback", "$n = failed($a).__traceback__", gives="hashable"),
    Kind("the context of an error", "$n = failed_while_handling($a, $b)", gives="hashable"),
    Kind("the cause of an error", "$n = failed_from($a, $b)", gives="hashable"),
    Kind(
        "errors in a group",
        "$n = ExceptionGroup('several', [ValueError($a)])",
        gives="hashable",
        since=(3, 11),
    ),
    Kind("a frame", "$n = frame_of($a)", gives="hashable"),
    Kind("a frame whose locals were read", "$n = read(frame_of($a))", gives="hashable"),
    # contexts
    Kind("a context", "$n = context_with($a)"),
    Kind("a token", "$n = contextvars.copy_context().run(var.set, $a)"),
    Kind(
        "the default of a context variable",
        "$n = contextvars.ContextVar('made', default=$a)",
        gives="hashable",
    ),
    Kind("a context variable", "$n = contextvars.ContextVar('made')\n$n.set($a)", gives="hashable"),
    # weak references
    Kind("a weak reference", "$n = weakref.ref($a)", takes="weak"),
    Kind("the callback of a weak reference", "$n = weakref.ref($a, closure($b))", takes="weak"),
    Kind("a weak set", "$n = weakref.WeakSet([$a])", takes="hashable weak", gives="weak"),
    Kind(
        "values of a weak dict",
        "$n = weakref.WeakValueDictionary(first=$a)",
        takes="weak",
        gives="weak",
    ),
    Kind("a weak method", "$n = weakref.WeakMethod(Plain($a).show)"),
    Kind(
        "values of a dict with weak keys",
        "$n = weakly_keyed($a, $b)",
        takes="hashable weak",
        gives="weak",
    ),
    Kind("a finalizer", "$n = finalized($a, $b)", takes="weak", gives="weak"),
    Kind("a proxy", "$n = [weakref.proxy($a)]", takes="weak"),
    # iterators and views
    Kind("an iterator of a list", "$n = iter([$items])"),
    Kind("an iterator of a tuple", "$n = stepped(iter(($items,)))"),
    Kind("an iterator of a dict", "$n = iter({'first': $a}.values())"),
    Kind("an iterator of a set", "$n = iter({$items})", takes="hashable"),
    Kind("an iterator of a deque", "$n = iter(collections.deque([$items]))"),
    Kind("an iterator of calls", "$n = iter(closure($a), $b)"),
    Kind("values of a view", "$n = {'first': $a}.values()"),
    Kind("keys of a view", "$n = {$a: 1}.keys()", takes="hashable"),
    Kind("items of a view", "$n = {'first': $a}.items()"),
    Kind("zip", "$n = zip([$a], [$b])"),
    Kind("a zip that was read", "$n = stepped(zip([$a], [$b]))"),
    Kind("map", "$n = map(closure($a), [$b])"),
    Kind("filter", "$n = filter(None, [$items])"),
    Kind("enumerate", "$n = stepped(enumerate([$items]))"),
    Kind("reversed", "$n = reversed([$items])"),
    Kind("chain", "$n = itertools.chain([$a], [$b])"),
    Kind("islice", "$n = itertools.islice([$items], 5)"),
    Kind("cycle", "$n = stepped(itertools.cycle([$items]))"),
    Kind("repeat", "$n = itertools.repeat($a)"),
    Kind("product", "$n = stepped(itertools.product([$a], [$b]))"),
    Kind("groupby", "$n = stepped(itertools.groupby([$items], key=id))"),
    Kind(
        "accumulate", "$n = stepped(itertools.accumulate([$a, $b], lambda first, second: second))"
    ),
    Kind("tee", "$n = stepped(itertools.tee([$items, 1])[0])"),
    Kind("a pair of tee", "$n = itertools.tee(iter([$items]))\nnext($n[0])"),
    # arrays and buffers
    Kind("an object array", "$n = boxed($items)", gives="weak", hides=True),
    Kind("a structured array", "$n = structured($a)", gives="weak", hides=True),
    Kind("a view of an object array", "$n = boxed($a, $b)[1:]", gives="weak", hides=True),
    Kind("a 0-d object array", "$n = boxed($a).reshape(())", gives="weak", hides=True),
    Kind("a view of an array", "$n = $a[1:10]", takes="array", gives="weak array"),
    Kind("a broadcast array", "$n = np.broadcast_to($a[:1], (3, 1))", takes="array", gives="weak"),
    Kind(
        "a strided view",
        "$n = np.lib.stride_tricks.as_strided($a, (3,), (8,))",
        takes="array",
        gives="weak",
    ),
    Kind("a subclass of array", "$n = with_attribute(np.ones(3).view(Grid), $a)", gives="weak"),
    Kind("a masked array", "$n = np.ma.masked_array($a, copy=False)", takes="array", gives="weak"),
    Kind("an array's iterator", "$n = $a.flat", takes="array"),
    Kind("nditer", "$n = np.nditer($a)", takes="array"),
    Kind("vectorize", "$n = np.vectorize(closure($a))", gives=SAFE),
    Kind("a ufunc", "$n = np.frompyfunc(closure($a), 1, 1)", gives="hashable"),
    Kind("metadata of a dtype", "$n = np.dtype('f8', metadata={'first': $a})"),
    Kind(
        "an array on a buffer", "$n = np.frombuffer($a, dtype='u1')", takes="buffer", gives="weak"
    ),
    Kind("a memoryview", "$n = memoryview($a)", takes="buffer", gives="weak"),
    Kind(
        "a part of a memoryview",
        "$n = memoryview($a).cast('B')[5:10]",
        takes="buffer",
        gives="weak",
    ),
    # libraries and C
    Kind("a queue", "$n = filled(queue.Queue(), $items)", gives=SAFE, grows="$n.put($b)"),
    Kind(
        "a SimpleQueue", "$n = filled(queue.SimpleQueue(), $items)", gives=SAFE, grows="$n.put($b)"
    ),
    Kind("a future", "$n = future_of($a)", gives=SAFE),
    Kind(
        "a thread that has not begun",
        "$n = threading.Thread(target=ignore, args=($a,))",
        gives=SAFE,
    ),
    Kind("a thread's locals", "$n = local_with($a)", gives=SAFE, grows="$n.late = $b"),
    Kind("a ctypes object", "$n = ctypes.py_object([$a])", gives="weak"),
    Kind("an array of ctypes objects", "$n = (ctypes.py_object * 2)([$a], [$b])", gives="weak"),
    Kind(
        "a log record",
        "$n = logging.makeLogRecord({'args': ($a, $b)})",
        gives=SAFE,
        grows="$n.late = $b",
    ),
    Kind("a match", "$n = re.match('x', $a)", takes="text"),
    Kind(
        "a topological sorter",
        "$n = graphlib.TopologicalSorter({$a: []})",
        takes="hashable",
        gives=SAFE,
    ),
    Kind("a scheduler", "$n = sched.scheduler()\n$n.enter(99, 1, ignore, ($a,))", gives=SAFE),
    Kind("a copy", "$n = copy.copy([$items])", grows="$n.append($b)"),
    Kind("another name", "$n = $a"),
    # holders that no name leads to
    Kind("an exit function", "$n = [$a]\natexit.register(ignore, $n)", grows="$n.append($b)"),
    Kind("an error handler", "$n = closure($a)\ncodecs.register_error('made.$n', $n)", gives=SAFE),
    Kind("a reference in C", "$n = incref([$a])", grows="$n.append($b)"),
    Kind("another function's cache", "$n = remember($a)", takes="hashable", grows="$n.append($b)"),
    Kind(
        "a registered module",
        "$n = sys.modules['made.$n'] = types.ModuleType('made')\n$n.content = $a",
        gives=SAFE,
    ),
]
KINDS = {kind.name: kind for kind in [*PAYLOADS, *CONTAINERS]}
HIDDEN_CYCLE = "a cycle through an object array"
_EPHEMERAL = "another object lives only as long as this one"
_UNSEEN = "the collector does not see what it refers to"
KNOWN_WRONG = {
    "the callback of a weak reference": _EPHEMERAL,
    "values of a dict with weak keys": _EPHEMERAL,
    "a finalizer": _EPHEMERAL,
    "an array's iterator": _UNSEEN,
    "nditer": _UNSEEN,
    "metadata of a dtype": _UNSEEN,
}
"""Kinds of which ``why`` is known to be wrong, with the reason; random graphs do without them."""


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


# -- random graphs ------------------------------------------------------------------------------


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


# -- comparison ---------------------------------------------------------------------------------

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
    died: tuple[str, ...] = field(default=())
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
    text = in_fork(lambda: json.dumps(examined(graph, look)))
    if not text:
        return [Difference("", 0, 0, failure="the process crashed")]
    return [
        Difference(name, said, freed, tuple(died), failure)
        for name, said, freed, died, failure in json.loads(text)
    ]


def examined(graph: Graph, look: Look) -> list[tuple[str, int, int, list[str], str]]:
    """Build a graph in a new main module and compare each kept name; return the wrong ones.

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
        return [("", 0, 0, [], f"{type(error).__name__}: {error}")]
    collect()
    before = {name for name, reference in alive.items() if reference() is not None}
    slack_bytes = SLACK_BYTES * (len(graph.nodes) + 1)
    wrong = list[tuple[str, int, int, list[str], str]]()
    for name in graph.kept:
        try:
            said = look(namespace, name)
        except Exception as error:
            wrong.append((name, 0, 0, [], f"{type(error).__name__}: {error}"))
            continue
        after = json.loads(in_fork(lambda name=name: alive_without(name, namespace, alive)))  # type: ignore[misc]  # a default
        died = sorted(before.difference(after))
        freed = sum(map(sizes.__getitem__, died))
        if abs(said - freed) > slack_bytes:
            wrong.append((name, said, freed, died, ""))
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


# -- shrinking ----------------------------------------------------------------------------------


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


# -- command ------------------------------------------------------------------------------------


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
