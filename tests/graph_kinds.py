"""Kinds of objects of which random graphs are built, and the helpers that their code calls."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

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

_BUILT_IN_CONTAINERS = [
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
]
_INSTANCES = [
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
]
_FUNCTIONS = [
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
]
_CLASSES_AND_MODULES = [
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
]
_SUSPENDED_CODE_ERRORS_AND_FRAMES = [
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
]
_CONTEXTS = [
    Kind("a context", "$n = context_with($a)"),
    Kind("a token", "$n = contextvars.copy_context().run(var.set, $a)"),
    Kind(
        "the default of a context variable",
        "$n = contextvars.ContextVar('made', default=$a)",
        gives="hashable",
    ),
    Kind("a context variable", "$n = contextvars.ContextVar('made')\n$n.set($a)", gives="hashable"),
]
_WEAK_REFERENCES = [
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
]
_ITERATORS_AND_VIEWS = [
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
]
_ARRAYS_AND_BUFFERS = [
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
]
_LIBRARIES_AND_C = [
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
]
_HOLDERS_THAT_NO_NAME_LEADS_TO = [
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
CONTAINERS = [
    *_BUILT_IN_CONTAINERS,
    *_INSTANCES,
    *_FUNCTIONS,
    *_CLASSES_AND_MODULES,
    *_SUSPENDED_CODE_ERRORS_AND_FRAMES,
    *_CONTEXTS,
    *_WEAK_REFERENCES,
    *_ITERATORS_AND_VIEWS,
    *_ARRAYS_AND_BUFFERS,
    *_LIBRARIES_AND_C,
    *_HOLDERS_THAT_NO_NAME_LEADS_TO,
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
