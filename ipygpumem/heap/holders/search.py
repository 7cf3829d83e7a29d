"""Finds the shortest chain of references from a name of the user to an object.

The search goes backwards from the targets, one level of referrers at a time, each level one pass of the collector
over the heap in C. It ends at roots: namespaces, modules, threads, running functions. Only objects that were alive
when the ``Heap`` was made count, so that the search never finds itself. No user code runs: attributes are found by
identity in instance dicts and slots, and keys are shown if they are plain text or numbers.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

from ipygpumem.heap.arrays import (
    StorageKey,
    elements,
    is_array,
    is_of_library,
    is_of_pandas,
    library_type,
    slots,
    storage_key,
)
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.frames import FORGET_LAST_ERROR, peek, running_frames, running_ids
from ipygpumem.heap.holders.graphs import DETACH, GRADIENT, keepers, requiring_grad
from ipygpumem.heap.holders.rows import Row, RowHolders
from ipygpumem.heap.holders.tasks import ContextValue, context_values, is_pending, wakes_task
from ipygpumem.heap.libraries import is_segment
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_exactly,
    is_instance,
    is_name,
    is_users_class,
    is_users_module,
    key_text,
    module_dict,
    module_of,
    name_of,
    target_of,
    text_of,
    type_name,
)
from ipygpumem.records import ReferencePath


@dataclass(frozen=True)
class Roots:
    """The objects that the user can name, except modules, threads and running functions, which every program has.

    Attributes:
        namespaces: by the identity of a dict: returns the root of one of its keys; None to ignore the key.
        objects: roots by the identity of an object.
        hidden: identities of objects to skip, which refer to their contents only temporarily.
        cell_of: returns the number of the cell with a code's file name.
        names: the user's names, to write the statement that frees an object.
    """

    namespaces: Mapping[int, Callable[[object], Root | None]] = field(default_factory=dict)
    objects: Mapping[int, Root] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()
    cell_of: Callable[[str], int | None] = lambda filename: None
    names: Mapping[str, object] = field(default_factory=dict)


_Ways = dict[int, tuple["Root", int | None]]
"""For each object reachable from a root: the root, and the next object on the way up to it."""
_MAKES_DICTS = (3, 11) <= sys.version_info < (3, 13)
_MANAGED_DICT = 1 << 4
_MOST_OWNERS = 5000
MOST_VISITS = 20_000_000
_NO_OBJECT = ReferencePath(path="no Python object: C++ code keeps it", advice="let the library that made it free it")
_OUT_OF_SIGHT = ReferencePath(
    path="something that cannot be seen from Python: a running function or compiled code", advice=""
)
_NOT_REACHED = ReferencePath(
    path="something that the search did not reach within its limits",
    advice="free something, then ask %gpumem leaks again",
)
_CYCLE = ReferencePath(
    path="a cycle in torch's own C++ code: a gradient that has a graph, as after backward(create_graph=True)",
    advice="set .grad to None before you delete the tensor",
)


def explain(
    keys: Iterable[StorageKey],
    heap: Heap,
    roots: Roots,
    *,
    more: Iterable[object] = (),
    rows: Mapping[StorageKey, Row] | None = None,
    max_visits: int = MOST_VISITS,
) -> dict[StorageKey, ReferencePath]:
    """Return the holder that keeps each storage alive; the key of each of ``more`` is "object" and its identity.

    The holder of a storage that stands for a row in ``rows`` is the nearest one of all the row's arrays; it sets
    ``held`` of the row.
    """
    wanted = set(keys)
    objects: dict[StorageKey, list[object]] = {("object", id(item)): [item] for item in more}
    without_storage = objects.keys() - wanted
    for item in [*heap.tensors, *heap.ndarrays] if wanted else ():
        key = storage_key(item) or ("object", id(item))
        if key in wanted:
            objects.setdefault(key, []).append(item)
    of_rows = RowHolders(rows or {}, heap, roots.namespaces)
    holders, unnamed, left_out = _holders(objects, heap, roots, max_visits, of_rows)
    rest = wanted - holders.keys()
    if rest and heap.tensors:
        # A tensor saved by a graph may also be a Python object that only the graph refers to, which is no answer.
        candidates = requiring_grad(heap.tensors)
        owners = {("object", id(tensor)): [tensor] for tensor in candidates[:_MOST_OWNERS]}
        named, _, is_cut = _holders(owners, heap, roots, max_visits, of_graphs=True)
        ordered = sorted(named, key=lambda owner: _order(named[owner]))
        kept, complete = keepers([owners[owner][0] for owner in ordered], rest)
        for key, keeper in kept.items():
            owner = named["object", id(keeper.tensor)]
            holders[key] = ReferencePath(owner.path + keeper.how, keeper.advice and (owner.advice or keeper.advice))
        left_out |= is_cut or not complete or len(candidates) > _MOST_OWNERS
        among_themselves, _ = keepers(heap.tensors, rest - kept.keys())
        if any(keeper.how == GRADIENT for keeper in among_themselves.values()):
            holders.update(dict.fromkeys(among_themselves, _NOT_REACHED if left_out else _CYCLE))
    # An array's memory belongs to a Python object, which lives as long as the memory does.
    of_python = {key for key in wanted if key[0] == "numpy"} | without_storage
    unknown = dict.fromkeys(wanted, _NOT_REACHED if left_out else _NO_OBJECT)
    unknown.update((key, _NOT_REACHED if left_out else _OUT_OF_SIGHT) for key in of_python)
    return {**unknown, **unnamed, **holders}


def _holders(
    objects: dict[StorageKey, list[object]],
    heap: Heap,
    roots: Roots,
    max_visits: int,
    rows: RowHolders | None = None,
    *,
    of_graphs: bool = False,
) -> tuple[dict[StorageKey, ReferencePath], dict[StorageKey, ReferencePath], bool]:
    """Return the best-named holders of the storages' objects, then those that nothing visible refers to.

    The last value is True if some holders may not have been reached.
    """
    search = Search([item for items in objects.values() for item in items], heap, roots, max_visits)
    writer = PathWriter(roots)

    def best(ways: _Ways, key: StorageKey, items: list[object]) -> ReferencePath | None:
        chains = [chain for item in items if (chain := search.chain(item, ways)) is not None]
        nearest = min(((root.rank, len(steps)) for root, steps in chains), default=None)
        nearby = [way for way in chains if (way[0].rank, len(way[1])) == nearest]
        found = [(writer.holder(*way, of_graph=of_graphs), way) for way in nearby]
        if not found:
            return None
        holder, (root, steps) = min(found, key=lambda pair: _order(pair[0]))
        if rows is None:
            return holder
        shorter = rows.shortened(key, steps)
        return holder if len(shorter) == len(steps) else writer.holder_of_row(root, shorter, rows.number_in(key))

    named = {key: holder for key, items in objects.items() if (holder := best(search.named, key, items)) is not None}
    rest = [(key, items) for key, items in objects.items() if key not in named]
    unnamed = {key: holder for key, items in rest if (holder := best(search.unnamed, key, items)) is not None}
    return named, unnamed, search.is_cut and bool(rest)


def _order(holder: ReferencePath) -> tuple[bool, int, str]:
    """Return the sort key that picks the holder to show, independent of the order in which the collector lists them."""
    return (not holder.path.startswith(NOTEBOOK), len(holder.path), holder.path)


class Search:
    """A breadth-first search from many targets at once, against the direction of the references."""

    _MOST_LEVELS = 40
    _WIDEST_LEVEL = 20_000

    def __init__(
        self,
        targets: Sequence[object],
        heap: Heap,
        roots: Roots,
        max_visits: int = MOST_VISITS,
        *,
        for_all: bool = False,
    ) -> None:
        """Search for the nearest variable of each target, or ``for_all`` of its holders."""
        self._heap, self._roots, self._for_all = heap, roots, for_all
        # __mp_main__ is __main__
        self._modules = {id(module_dict(module)): name for name, module in reversed(_modules())}
        self._running = running_ids()
        self._objects = {id(target): target for target in targets}
        self._targets = frozenset(self._objects)
        self._direct: dict[int, Root] = {}
        """The roots of objects that no other object need refer to: context variables' values, and running locals."""
        self._referrers: dict[int, list[int]] = {}
        """Referrers of each examined object, without roots."""
        self._children: dict[int, list[int]] = {}
        """The objects by which each referrer was found."""
        self._keys: dict[int, dict[int, list[object]]] = {}
        """For each namespace, the keys of its values by the values' identities."""
        self._references: dict[int, Counter[int]] = {}
        """Number of references from each holder to each object, by their identities."""
        self._kept: list[tuple[Root, int]] = []
        """Roots, and the objects that they keep."""
        self._tops: list[int] = []
        """Objects without a known referrer."""
        self.is_cut = False
        """True if the search ended somewhere before it had seen everything."""
        self.named: _Ways = {}
        self._run(list(self._objects), max_visits)
        # An output, the last error or a module may also hold, by a longer path, an object of a variable: no leak.
        self.named = {**self._ways(self._kept), **self.named}
        self._roots_at: dict[int, list[Root]] = {}
        for root, key in self._kept:
            self._roots_at.setdefault(key, []).append(root)
        nowhere = Root("", 9, "end what keeps it: C++ code or a library")
        tops = sorted(self._tops, key=lambda key: type_name(self._objects[key]))
        self.unnamed = self._ways([(nowhere, key) for key in tops])

    def _run(self, targets: list[int], max_visits: int) -> None:
        if targets:
            self._direct = {id(found.value): Root.of_context(found) for found in context_values(self._roots.names)}
            for frame, thread in running_frames():
                local = peek(frame).items()
                self._direct.update((id(value), Root.of_running(frame, thread, name)) for name, value in local)
        for number in itertools.count():
            level = self._open(targets)
            if not level:
                return
            if number == self._MOST_LEVELS or (number + 1) * self._heap.size > max_visits:
                self.is_cut = True
                return
            self._kept += [(self._direct[key], key) for key in level if key in self._direct]
            self._look(level)
            self.named = self._ways([(root, key) for root, key in self._kept if root.rank == 0])

    def _open(self, targets: list[int]) -> list[int]:
        """Return the objects not examined yet that lead to a target without a variable known to hold it."""
        linked, ends = self._holders_of(targets) if self._for_all else ({}, targets)
        waiting = [key for key in ends if key not in self.named]
        seen = set(waiting)
        for key in waiting:  # the list grows
            new = [referrer for referrer in self._referrers.get(key, ()) if referrer not in seen]
            waiting += new
            seen.update(new)
        return [key for key in dict.fromkeys([*linked, *waiting]) if key not in self._referrers]

    def _holders_of(self, targets: Sequence[int]) -> tuple[dict[int, int | None], dict[int, int]]:
        """Return the targets with all that must die first, such as views and tuples, and the holders of these.

        The values are the objects by which the keys were found. A holder is one from which a user can remove an object.
        """
        linked, ends = dict[int, int | None].fromkeys(targets), dict[int, int]()
        waiting = list(linked)
        for key in waiting:  # the list grows
            for referrer in self._referrers.get(key, ()):
                if referrer not in linked and referrer not in ends:
                    if self._is_end(referrer):
                        ends[referrer] = key
                    else:
                        linked[referrer] = key
                        waiting.append(referrer)
        return linked, ends

    def _is_end(self, key: int) -> bool:
        item: Any = self._objects[key]
        if is_instance(item, dict):  # known once its referrers are: an object's own dict dies with the object
            owners = map(self._objects.__getitem__, self._referrers.get(key, ()))
            return key in self._referrers and not any(_owns(owner, item) for owner in owners)
        is_open = any(is_instance(item, kind) for kind in (list, set, deque, type)) or is_exactly(item, *_SUSPENDED)
        return is_open or (is_users_class(type(item)) and not (is_array(item) or is_instance(item, tuple)))

    def _look(self, level: list[int]) -> None:
        """Record all objects that refer to those of a level."""
        self._referrers.update((key, []) for key in level)
        self.is_cut |= len(level) > self._WIDEST_LEVEL
        objects = {key: self._objects[key] for key in level[: self._WIDEST_LEVEL]}
        referred: set[int] = set()
        for referrer, children in self._heap.referrers(objects):
            if wakes_task(referrer):
                children = [key for key in children if key in self._targets]
            elif type_name(referrer).startswith("hamt"):  # part of a context
                children = [key for key in children if key not in self._direct]
            if not children or id(referrer) in self._roots.hidden or id(referrer) in self._running:
                continue
            referred.update(children)
            for holder, held in _with_own_dict(referrer, children):
                found = [(root, key) for key in held for root in self._roots_in(holder, objects[key])]
                self._kept += found
                if not found and id(holder) not in self._roots.namespaces:
                    self._objects[id(holder)] = holder
                    self._children.setdefault(id(holder), []).extend(held)
                    for key in held:
                        self._referrers[key].append(id(holder))
                if holder is not referrer:
                    self._heap.add(holder)  # else the next search would end at the dict that this one has created
        self._tops += [key for key in objects if key not in referred and key in self._children]

    def _ways(self, kept: list[tuple[Root, int]]) -> _Ways:
        """Return the shortest way from a root to each object that roots lead to."""
        ways: _Ways = {}
        for root, key in sorted(kept, key=lambda pair: (pair[0].rank, pair[0].text)):
            ways.setdefault(key, (root, None))
        waiting = list(ways)
        for parent in waiting:  # the list grows
            for child in self._children.get(parent, ()):
                if child not in ways:
                    ways[child] = ways[parent][0], parent
                    waiting.append(child)
        return ways

    def chain(self, target: object, ways: _Ways) -> tuple[Root, tuple[object, ...]] | None:
        """Return a root and the chain of objects from it to ``target``, if there is one among ``ways``."""
        key: int | None = id(target)
        if key not in ways:
            return None
        chain: list[object] = []
        while key is not None:
            chain.insert(0, self._objects[key])
            root, key = ways[key]
        return root, tuple(chain)

    def ways_to(self, targets: Sequence[object]) -> list[tuple[list[Root], tuple[object, ...], int]]:
        """Return the roots that free a holder at once, a chain, and the number of references, for each holder.

        Variables come first. Only a search ``for_all`` knows all of them.
        """
        linked, ends = self._holders_of(list(map(id, targets)))
        found = list[tuple[list[Root], tuple[object, ...], int]]()
        for last, below in (*linked.items(), *ends.items()):
            item, down = self._objects[last], list[object]()
            while below is not None:
                down.append(self._objects[below])
                below = linked[below]
            if last in linked:
                roots: dict[str, list[Root]] = {}
                for root in sorted(self.roots_of(item), key=lambda root: (root.rank, root.text)):
                    is_alias = not down and root.rank == 0 and not root.advice  # one ``del`` names them all
                    kind = root.advice.partition(" ")[0] if root.advice[:1] == "%" else root.text * (not is_alias)
                    roots.setdefault(kind, []).append(root)
                found += [(several, (item, *down), 1) for several in roots.values()]
            elif (way := self.chain(item, self.named)) is not None:
                found.append(([way[0]], (*way[1], *down), self._references_from(item, linked)))
        found.sort(key=lambda way: way[0][0].rank)
        # IPython's own objects follow its outputs.
        of_users = [way for way in found if way[0][0].rank < _OF_IPYTHON and not _is_of_ipython(way[1][0])]
        return of_users or found

    def _references_from(self, holder: object, keys: Iterable[int]) -> int:
        """Return the number of references from an object, which may be large, to some objects."""
        counts = self._references.get(id(holder))
        if counts is None:
            counts = self._references[id(holder)] = Counter(map(id, gc.get_referents(holder)))
        return sum(map(counts.__getitem__, keys))

    def roots_of(self, target: object) -> list[Root]:
        """Return all roots that refer to ``target`` directly."""
        return self._roots_at.get(id(target), [])

    def _roots_in(self, referrer: object, child: object) -> list[Root]:
        """Return the roots with which ``referrer`` holds ``child``, if it is one."""
        key, found = id(referrer), list[Root]()
        if key in self._roots.namespaces:
            all_of_them = map(self._roots.namespaces[key], self._keys_of(referrer, child))
            found = [root for root in all_of_them if root is not None]
        elif key in self._roots.objects:
            found = [self._roots.objects[key]]
        elif key in self._modules:
            code = _module_code(self._modules[key], self._roots.names)
            found = [Root.of_module(self._modules[key], name, code) for name in self._keys_of(referrer, child)]
        elif type(referrer) is ModuleType:
            found = [Root.of_module(text_of(module_dict(referrer).get("__name__")), None)]
        elif is_instance(referrer, threading.Thread):
            name = text_of((instance_dict(referrer) or {}).get("_name"))
            found = [Root(f'thread "{name}"', 1, "let it end, then join() it")]
        elif is_of_library(referrer, "asyncio", "AbstractEventLoop"):  # every task refers to it, and owns no other one
            found = [Root(EVENT_LOOP, 1, "let its tasks end, or cancel them")]
        return found

    def _keys_of(self, namespace: Any, child: object) -> list[object]:
        """Return the keys under which a namespace, which may be large, keeps ``child``."""
        if id(namespace) not in self._keys:
            keys = self._keys[id(namespace)] = {}
            for key, value in list(dict.items(namespace)):
                keys.setdefault(id(value), []).append(key)
        return self._keys[id(namespace)].get(id(child), [])


def _with_own_dict(referrer: object, children: list[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield the holder of ``children``: an object itself, or the dict of its attributes.

    CPython 3.11 and 3.12 create that dict when it is read, and reading it here must not make paths longer.
    """
    if not _MAKES_DICTS or not type.__dict__["__flags__"].__get__(type(referrer)) & _MANAGED_DICT:
        yield referrer, children
        return
    names = instance_dict(referrer) or {}
    values = set(map(id, list(names.values())))
    inside = [child for child in children if child in values]
    if inside:
        yield names, inside
    if len(inside) < len(children):
        yield referrer, [child for child in children if child not in values]


def _modules() -> list[tuple[str, ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items()) if is_instance(module, ModuleType)]


def _module_code(name: str, names: Mapping[str, object]) -> str:
    """Return the code with which a notebook with these ``names`` refers to a loaded module; empty if there is none."""
    modules: dict[str, object] = dict(sys.modules)
    first = name.partition(".")[0]
    aliases = [key for key, value in list(names.items()) if value is modules[name]]
    if aliases:
        return aliases[0]
    is_bound = names.get(first) is modules.get(first) and "." in name
    written = name if all(map(str.isidentifier, name.split("."))) else ""
    return written if is_bound or not written else f"import {name}; {name}"


# -- in words: ``notebook variable cache["run3"][0]`` ---------------------------------------------------------------

_PARTS = {"_modules", "_parameters", "_buffers"}
_LONGEST_PATH = 240
_STEP = re.compile(r"[.\[]|: |, ")
OF_MODULE, _OF_IPYTHON = 2, 3
"""The ranks of modules' global names, and of IPython's own copies."""
NOTEBOOK, EVENT_LOOP = "notebook variable ", "the event loop"

_HANDLE = "call the hook's handle.remove(), if you have kept the handle"
_REMOVE = "remove it from there"
_OR_EXCEPTION = f"{_REMOVE}, or delete the exception once you have read it"
_OR_FUNCTION = f"{_REMOVE}, or delete the function when you no longer need it"
_SUSPENDED = {
    GeneratorType: ("gi", "generator", "{}.close()"),
    CoroutineType: ("cr", "coroutine", "{}.close()"),
    AsyncGeneratorType: ("ag", "async generator", "await {}.aclose()"),
}
"""The attribute prefix of each kind, its description, and the statement that ends it."""


@dataclass(frozen=True)
class Root:
    """A root of references, such as a variable; the one with the lowest ``rank`` is shown.

    No advice deletes more than the leak: a name may lead to much else, and be older than the leak.
    """

    text: str
    rank: int
    advice: str
    code: str = ""
    """The code to type for it, after a statement with its imports; empty if it cannot be typed."""
    is_all: bool = False
    """True if its target cannot be typed."""

    @classmethod
    def of_variable(cls, key: object) -> Root:
        """Return the root of a notebook's name."""
        return cls(f"{NOTEBOOK}{text_of(key)}", 0, "", code=target_of(key) if type(key) is str else "")

    @classmethod
    def of_module(cls, module: str, key: object, code: str = "") -> Root:
        """Return the root of a module's global name; ``code`` is the user's expression for the module."""
        if (module, text_of(key)) in _LAST_ERROR:
            return LAST_ERROR
        where = f"module {module}, global {text_of(key)}" if key is not None else f"module {module}"
        advice = "" if code and is_users_module(sys.modules.get(module)) else _REMOVE
        return cls(where, OF_MODULE, advice, f"{code}.{key}" if code and is_name(text_of(key)) else "")

    @classmethod
    def of_context(cls, found: ContextValue) -> Root:
        """Return the root of a context variable."""
        return cls(f"context variable {found.variable}", 1, found.advice, found.code)

    @classmethod
    def of_running(cls, frame: FrameType, thread: str, name: str) -> Root:
        """Return the root of a local name of a running function."""
        code = frame.f_code
        where = f'thread "{thread}": running {code.co_name}() line {frame.f_lineno}, local {name}'
        return cls(where, 1, "let the function return")


LAST_ERROR = Root("the last error", 1, "%gpumem free")
_LAST_ERROR = {("sys", name) for name in ("last_value", "last_traceback", "last_exc")}


class _Path:
    """A path under construction, and how to free its target."""

    def __init__(self, root: Root, text: str) -> None:
        self.text, self.code, self.nearest = text, root.code, root.code
        self.advice = "" if root.advice == _REMOVE or root.code else root.advice
        self._may_remove = root.advice != _REMOVE
        self.is_lost, self._is_all, self.is_fixed = root.is_all, root.is_all, False
        """Two flags: a step cannot be typed; nothing can be removed from the last step's object, such as a tuple."""

    def go(self, shown: str, code: str = "", *, is_fixed: bool = False) -> None:
        """Append an item or attribute; the path ends before one that cannot be typed."""
        if not self.is_lost:
            self.text, self.is_lost = self.text + shown, not code and shown.startswith(" (")
        self.code, self.is_fixed = self.code and code and self.code + code, is_fixed or (self.is_lost and self.is_fixed)
        if self.code and not is_fixed:
            self.nearest = self.code

    def say(self, words: str) -> None:
        """Append a step that only words can describe."""
        self.text, self.code, self.is_lost = self.text + words, "", self._is_all

    def statement(self, template: str, target: str | None = None) -> str:
        """Return a statement about the path's target, with its import; empty if there is none."""
        target = self.code if target is None else target
        needed, semicolon, code = target.rpartition("; ")
        return target and needed + semicolon + template.format(code)

    @property
    def removal(self) -> str:
        """The statement that removes the path's target, or the nearest object that can be removed; may be empty."""
        if not self._may_remove:
            return ""  # a library's global
        return self.statement("del {}", self.nearest) if self.is_fixed else self.statement("{} = None")

    def advise(self, advice: str, words: str) -> None:
        """Record how to free the path's target, unless that is known: by a statement, or else in words."""
        self.advice = self.advice or advice or words


class PathWriter:
    """Writes chains of references as text."""

    def __init__(self, roots: Roots) -> None:
        self._cell_of, self._names = roots.cell_of, roots.names

    def holder(self, root: Root, chain: Sequence[object], *, of_graph: bool = False) -> ReferencePath:
        """Return the path from ``root`` along ``chain``, whose last object may be a graph's tensor."""
        steps = _without_dicts(chain)
        path = _Path(root, root.text or self._name(steps[0]))
        if not root.text and is_pending(steps[0]):
            name = library_type("asyncio", "Task").get_name(steps[0])  # type: ignore[union-attr]  # it is one of them
            task = f"task for task in asyncio.all_tasks() if task.get_name() == {name!r}"
            path.advice = f"import asyncio; next({task}).cancel()"
        position, is_own = 0, False
        while position < len(steps):
            if is_segment(steps[position]):
                path.advise(path.statement("{0}.close(); {0}.unlink()"), "close() and unlink() it")
            if position == len(steps) - 1:
                break
            behind_name = "[" not in path.text  # and not in a list of models, from which one can be removed
            taken, is_part = self._step(steps[position:], path)
            is_own |= is_part and behind_name
            position += taken
        if of_graph:
            is_in_list = is_exactly(steps[-2] if len(steps) > 1 else None, list, deque)
            drop = f"{path.code.rpartition('[')[0]}.clear()" if is_in_list else path.statement("{0} = {0}.detach()")
            advice = f"{drop}  # and {DETACH}" if path.removal and not path.is_fixed else ""
            return ReferencePath(_ended(path.text), path.advice or advice)
        is_inside = root.rank == 1 and bool(root.code) and len(steps) > 1  # in the value of a context variable
        of_root = "" if is_inside else root.advice
        default = of_root if of_root or len(steps) == 1 else _REMOVE
        if not of_root and (path.is_fixed or root.rank == OF_MODULE or is_inside):
            default = path.removal or _REMOVE * (not path.is_fixed)
        advice = path.advice or ("" if is_own else default)
        if advice == LAST_ERROR.advice and is_instance(steps[-1], BaseException):
            advice = FORGET_LAST_ERROR  # %gpumem free clears frames, not what the error itself refers to
        return ReferencePath(path=_ended(path.text), advice=advice)

    def holder_from_name(self, name: str, chain: Sequence[object]) -> ReferencePath:
        """Return the path from a notebook's name along ``chain``, which begins with the name's object.

        The path of a loaded module does not depend on its name in the notebook.
        """
        module: Any = chain[0]
        if is_instance(module, ModuleType):
            names = module_dict(module)
            inside = chain[2:] if len(chain) > 1 and chain[1] is names else chain[1:]
            module_name = text_of(names.get("__name__"))
            if inside and sys.modules.get(module_name) is module:
                key = next((key for key, value in list(names.items()) if value is inside[0]), None)
                root = Root.of_module(module_name, key, _module_code(module_name, self._names))
                return self.holder(root, inside)
        return self.holder(Root.of_variable(name), chain)

    def holder_of_row(self, root: Root, chain: Sequence[object], number: int) -> ReferencePath:
        """Return the path to an object that holds a ``number`` of arrays, and maybe more than these."""
        found = self.holder(root, chain)
        if found.advice or len(chain) > 1:
            return found
        return replace(found, advice=_REMOVE if number == 1 else "remove them from there")

    def _name(self, item: object) -> str:
        if is_instance(item, type):
            return f"class {name_of(item)}"  # type: ignore[arg-type]  # is_instance says so
        if is_pending(item):
            return EVENT_LOOP
        kind = type_name(item)
        return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} that nothing visible from Python refers to"

    def _step(self, steps: Sequence[object], path: _Path) -> tuple[int, bool]:
        """Write the next piece of a path; return the number of its references, and whether it is a model's own."""
        parent, child = steps[0], steps[1]
        kind = type(parent)
        if kind is FunctionType:
            return self._function(steps, path), False
        if is_exactly(parent, *_SUSPENDED):
            return self._suspended(steps, path), False
        if kind is TracebackType or kind is FrameType or is_instance(parent, BaseException):
            return self._traceback(steps, path), False
        if kind is MethodType:
            path.advise(path.removal, "")
            path.say(f": bound method {self._code_name(parent.__func__)}, its object")  # type: ignore[attr-defined]
            return 1, False
        if kind is functools._lru_cache_wrapper:
            path.advise(path.statement("{}.cache_clear()"), "call cache_clear() of that function")
            path.say(f": lru_cache of function {self._code_name((instance_dict(parent) or {}).get('__wrapped__'))}")
            return 2 if type(child) is dict and len(steps) > 2 else 1, False
        if is_of_library(parent, "asyncio", "Task"):
            self._task(parent, child, path)
            return 1, False
        if kind is staticmethod or kind is classmethod or _went_into(path, parent, child):
            return 1, False  # users do not type ``.__func__``
        return self._instance(steps, path)

    # -- functions --------------------------------------------------------------------------------------------

    def _code_name(self, function: object) -> str:
        """Return a function's name and the cell that defined it."""
        if type(function) is not FunctionType:
            return type_name(function)
        return self._named(function.__code__)

    def _named(self, code: CodeType) -> str:
        cell = self._cell_of(code.co_filename)
        return code.co_name if cell is None else f"{code.co_name} (cell {cell})"

    def _function(self, steps: Sequence[object], path: _Path) -> int:
        function, child = steps[0], steps[1]
        assert type(function) is FunctionType
        name = self._code_name(function)
        after = steps[2] if len(steps) > 2 else None
        cells = function.__closure__
        path.advise(path.removal and f"{path.removal}  # when you no longer need the function", _OR_FUNCTION)
        if cells is not None and child is cells and type(after) is CellType:
            variable = function.__code__.co_freevars[_position(cells, after)]
            path.say(f": closure of function {name}, variable {variable}")
            return 3 if len(steps) > 3 else 2
        if child is function.__defaults__ or child is function.__kwdefaults__:
            path.say(f": default argument of function {name}")
            return 1 if after is None else 2
        if child is cells:
            path.say(f": closure of function {name}")
            return 1
        names = instance_dict(function)
        if after is not None and child is names:
            path.say(f": function {name}{_attribute(function, after)}")
            return 2
        path.say(f": function {name}{_attribute(function, child)}")
        return 1

    def _suspended(self, steps: Sequence[object], path: _Path) -> int:
        prefix, what, ending = _SUSPENDED[type(steps[0])]
        taken = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
        frame, code = (getattr(steps[0], f"{prefix}_{name}") for name in ("frame", "code"))
        is_started = getattr(steps[0], f"{prefix}_suspended", frame is not None and frame.f_lasti >= 0)
        # Python 3.13 keeps the arguments of one that has not started when it is closed.
        path.advise(path.statement(ending) if is_started else path.removal, f"close() the {what} when it is done")
        path.say(f": suspended {what} {self._named(code)}{_local(frame, steps[taken])}")
        return taken

    def _task(self, task: object, child: object, path: _Path) -> None:
        is_failure = is_exactly(child, CoroutineType, TracebackType) or is_instance(child, BaseException)
        if not is_pending(task) and not is_failure:
            path.go(".result()", ".result()", is_fixed=True)
            return
        cancel = f"{path.statement('{}.cancel()')}; " if path.code and is_pending(task) else ""
        path.advise(cancel + path.removal, "")
        path.say(": asyncio task")

    def _traceback(self, steps: Sequence[object], path: _Path) -> int:
        """Cover exceptions, tracebacks and frames up to the name that a frame holds."""
        line, position = 0, 0
        path.advise(path.removal and f"{path.removal}  # once you have read it", _OR_EXCEPTION)
        for position, item in enumerate(steps):
            if type(item) is TracebackType:
                line = item.tb_lineno
            elif type(item) is FrameType:
                break
            elif not is_instance(item, BaseException):
                if path.advice == LAST_ERROR.advice:
                    path.advice = FORGET_LAST_ERROR
                path.say(f": exception{_attribute(steps[position - 1], item)}")
                return position
        else:
            path.say(": exception")
            return len(steps) - 1
        frame = steps[position]
        assert type(frame) is FrameType
        if position == len(steps) - 1:
            path.say(": saved traceback")
            return position
        position += 2 if type(steps[position + 1]) is dict and position + 2 < len(steps) else 1
        where = f"{self._named(frame.f_code)} line {line or frame.f_lineno}"
        path.say(f": saved traceback, {where}{_local(frame, steps[position])}")
        return position

    # -- objects ----------------------------------------------------------------------------------------------

    def _instance(self, steps: Sequence[object], path: _Path) -> tuple[int, bool]:
        parent, child = steps[0], steps[1]
        kind = type_name(parent)
        if kind in ("DataFrame", "Series") and is_of_pandas(parent):  # users write no names for the objects inside
            inside = itertools.takewhile(lambda item: is_of_pandas(item) or is_exactly(item, tuple, list), steps)
            path.code = ""
            return min(sum(1 for _ in inside), len(steps) - 1), False
        if module_of(child) == "torch.autograd.function" or kind.endswith("Backward0"):
            path.advise("", DETACH)
            path.say(f": its autograd graph ({type_name(child)})")
            return 1, False
        name = _attribute(parent, child)
        if len(steps) > 2 and is_instance(child, dict):
            hook = _kind_of_hook(parent, name)
            items: Any = child
            key = next((key for key, value in list(dict.items(items)) if value is steps[2]), None)
            if hook:
                where = name or _hooks_of_tensor(parent, child)
                removal = f"{where}.clear()" if len(items) == 1 else f"{where}.pop({key!r})"
                path.advise(self._handle_of(child, key) or (where and path.statement("{}" + removal)), _HANDLE)
                path.text, path.code = f"{hook} on {path.text.removeprefix(NOTEBOOK)}", ""
                path.is_lost = True
                return 2, False
            if name[1:] in _PARTS:
                part = f".{key}" if text_of(key).isidentifier() else f".get_submodule({key!r})"
                path.go(f"[{key}]" if text_of(key).isdecimal() else part, part)
                return 2, True
        is_fixed = not name or is_instance(parent, functools.partial)
        path.go(name or f" ({kind})", name if name[:1] == "." else "", is_fixed=is_fixed)
        return 1, is_of_library(parent, "torch.optim", "Optimizer")

    def _handle_of(self, hooks: object, key: object) -> str:
        """Return the statement that removes one of ``hooks``, if its handle has a name."""
        for name, value in list(self._names.items()):
            handle = instance_dict(value) if is_of_library(value, "torch.utils.hooks", "RemovableHandle") else None
            if handle is not None and handle.get("id") == key and handle["hooks_dict_ref"]() is hooks:
                return f"{name}.remove()"
        return ""


def _is_of_ipython(item: object) -> bool:
    return module_of(item).partition(".")[0] in ("IPython", "ipykernel")


def _kind_of_hook(owner: object, name: str) -> str:
    """Return the kind of torch's hooks in attribute ``name``, empty for a tensor's; empty if it has none."""
    kinds = (("torch.nn", "Module"), ("torch.optim", "Optimizer"))
    has_hooks = is_of_library(owner, "torch", "Tensor") or (
        name.endswith("_hooks") and any(is_of_library(owner, *kind) for kind in kinds)
    )
    return f"{name.strip('._').removesuffix('hooks').replace('_', ' ')}hook" if has_hooks else ""


def _hooks_of_tensor(tensor: object, hooks: object) -> str:
    """Return ``.name`` for the attribute of a tensor that is ``hooks``; empty if there is none."""
    base: Any = library_type("torch", "Tensor")
    with sys.modules["torch"]._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hasattr(base, name) and getattr(base, name).__get__(tensor) is hooks:
                return f".{name}"
    return ""


def _ended(path: str) -> str:
    """Return a path up to the name or item before it becomes too long to read."""
    if len(path) <= _LONGEST_PATH:
        return path
    steps = [match.start() for match in _STEP.finditer(path, 0, _LONGEST_PATH)]
    return f"{path[: steps[-1] if steps else _LONGEST_PATH]} …"


def _went_into(path: _Path, parent: Any, child: object) -> bool:
    """Append an item and return True if ``parent`` is a container."""
    if is_instance(parent, dict):
        keys = [key for key, value in list(dict.items(parent)) if value is child]  # one copy: a thread may change it
        shown = key_text(keys[0]) if keys else None
        is_plain = shown is not None and shown == f'"{keys[0]}"' and keys[0].isprintable() and "\\" not in shown
        code = "" if shown in (None, "nan", "inf", "-inf") else f"[{shown}]" if is_plain else f"[{keys[0]!r}]"
        words = f" (under a key of type {type_name(keys[0])})" if keys else " (as a key)"
        path.go((code if len(code) < _LONGEST_PATH // 4 else f"[{shown}]") or words, code)
    elif is_instance(parent, list) or is_instance(parent, tuple) or type(parent) is deque:
        item = f"[{_position(parent, child)}]"
        path.go(item, item, is_fixed=is_instance(parent, tuple))
    elif is_instance(parent, set) or is_instance(parent, frozenset):
        path.go(" (in a set)")
    elif elements(parent) is not None:
        path.go(" (in an array of objects)")
    elif is_array(parent):
        pass  # a view: its own path says enough
    else:
        return False
    return True


def _position(items: Iterable[object], child: object) -> int:
    base: Any = next(kind for kind in (list, tuple, deque) if is_instance(items, kind))
    return next((index for index, item in enumerate(base.__iter__(items)) if item is child), 0)


def _local(frame: FrameType | None, child: object) -> str:
    """Return the local name of ``frame`` that refers to ``child``."""
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")


def _attribute(owner: object, child: object) -> str:
    """Return ``.name`` for the attribute of ``owner`` that is ``child``; empty if it has no name."""
    attributes = [*(instance_dict(owner) or {}).items(), *slots(owner).items()]
    name = next((text_of(name) for name, value in attributes if value is child), "")
    return f".{name}" if is_name(name) else " (in an attribute)" * bool(name)


def _without_dicts(chain: Sequence[object]) -> list[object]:
    """Return the chain without objects' own attribute dicts: ``a.b`` is one step."""
    steps = [chain[0]]
    for owner, item in itertools.pairwise(chain):
        is_own = type(item) is dict and item is not chain[-1] and _owns(owner, item)
        if not is_own:
            steps.append(item)
    return steps


def _owns(owner: object, names: dict[str, object]) -> bool:
    if is_instance(owner, type):
        return any(item is names for item in gc.get_referents(class_dict(owner)))
    return type(owner) is not FunctionType and instance_dict(owner) is names
