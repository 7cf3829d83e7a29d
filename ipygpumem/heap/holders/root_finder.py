"""Finds the roots at which a search for holders ends: names, modules, threads, event loops."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.knowledge.frames import peek, running_frames
from ipygpumem.heap.knowledge.tasks import is_waiting_thread_timer
from ipygpumem.heap.paths.roots import EVENT_LOOP, Rank, Root, Roots, module_code
from ipygpumem.heap.paths.task_endings import context_values
from ipygpumem.introspect import attribute_of, is_instance, module_dict, text_of


class RootFinder:
    """Finds the roots by which an object is held: names in namespaces, threads, running functions.

    Attributes:
        invisible_roots: the roots whose references the collector does not show, by the identity of
            the object to which they refer. These are registries, context variables, and the local
            names of running functions.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        # ``__mp_main__`` is ``__main__``, which comes first.
        self._modules = {id(module_dict(module)): name for name, module in reversed(_modules())}
        self._keys: dict[int, dict[int, list[object]]] = {}
        """For each namespace, the keys of its values by the values' identities."""
        self._codes: dict[str, str] = {}
        """The user's expression for each module, by the module's name."""
        self.invisible_roots: dict[int, Root] = {}
        self._threads = set(map(id, threading.enumerate()))
        """The threads that have not ended."""

    def read_invisible_roots(self) -> None:
        """Fill ``invisible_roots`` with the registries, and with the context variables and running
        functions as they are now.
        """
        self.invisible_roots = dict(self._roots.registered)
        for variable in context_values(self._roots.names):
            self.invisible_roots[id(variable.value)] = Root.of_context(variable)
        for frame, thread in running_frames():
            for name, value in peek(frame).items():
                if is_waiting_thread_timer(value):
                    continue  # a registry has it, with the line that ends it
                if id(value) in self._threads:
                    self.invisible_roots[id(value)] = _of_thread(value)
                else:
                    self.invisible_roots[id(value)] = Root.of_running(frame, thread, name)

    def is_namespace(self, item: object) -> bool:
        """Return True for the dict of a notebook's or a module's names. Each name is a root, so the
        search ends there: nothing above such a dict matters.
        """
        return id(item) in self._roots.namespaces or id(item) in self._modules

    def roots_in(self, referrer: object, child: object) -> list[Root]:
        """Return the roots by which ``referrer`` holds ``child``.

        In a namespace, there is one for each name of the child, such as the variables ``x`` and
        ``y`` after ``x = y = []``. An ordinary object is no root: it has holders of its own.
        """
        key = id(referrer)
        if key in self._roots.namespaces:
            root_of = self._roots.namespaces[key]
            named = [root_of(name) for name in self._keys_of(referrer, child)]
            return [root for root in named if root is not None]
        if key in self._roots.objects:
            return [self._roots.objects[key]]
        if key in self._modules:
            module = self._modules[key]
            code = self._code_of(module)
            return [Root.of_module(module, name, code) for name in self._keys_of(referrer, child)]
        if type(referrer) is ModuleType:
            return _of_state_of_module(referrer)
        if id(referrer) in self._threads and not is_waiting_thread_timer(referrer):
            return [_of_thread(referrer)]
        if is_of_library(referrer, "asyncio", "AbstractEventLoop"):
            # Every task refers to the loop: above it, each would count as a holder of all of them.
            return [Root(EVENT_LOOP, Rank.PLACE, advice="let its tasks end, or cancel them")]
        return []

    def _code_of(self, module: str) -> str:
        """Return the user's expression for a module, which is written once: thousands of objects
        may be in one module.
        """
        code = self._codes.get(module)
        if code is None:
            code = self._codes[module] = module_code(module, self._roots.names)
        return code

    def _keys_of(self, namespace: Any, child: object) -> list[object]:
        """Return the keys under which a namespace, which may be large, keeps ``child``."""
        keys = self._keys.get(id(namespace))
        if keys is None:
            keys = self._keys[id(namespace)] = {}
            for key, value in list(dict.items(namespace)):
                keys.setdefault(id(value), []).append(key)
        return keys.get(id(child), [])


def _of_thread(thread: object) -> Root:
    """Return the root of a thread that has not ended: its own running functions refer to it."""
    name = text_of(attribute_of(thread, "_name"))
    return Root(f'thread "{name}"', Rank.PLACE, advice="let it end, then join() it")


def _of_state_of_module(module: ModuleType) -> list[Root]:
    """Return the root of an object in the state of a module written in C, to which the module
    itself refers without a name; none if the module is not imported.
    """
    name = text_of(module_dict(module).get("__name__"))
    if sys.modules.get(name) is not module:
        return []
    return [Root.of_module(name, key=None)]


def _modules() -> list[tuple[str, ModuleType]]:
    """Return the imported modules with their names, in the order of import."""
    modules = list(sys.modules.items())
    return [(name, module) for name, module in modules if is_instance(module, ModuleType)]
