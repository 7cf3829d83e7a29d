"""Reads asyncio tasks, timers and context variables: the event loop, threads and the running code
keep these out of Python's sight.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from itertools import compress, repeat
from operator import attrgetter, is_
from types import BuiltinFunctionType, CoroutineType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import is_of_library, library_type
from ipygpumem.heap.bulk import kinds_of, of_types, types_of
from ipygpumem.heap.paths.cuts import split
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import instance_dict, is_instance, target_of, text_of, type_name

BUILTIN, _NAME_OF, _WAKES = {id(BuiltinFunctionType)}, attrgetter("__name__"), "task_wakeup"


def is_pending(item: object) -> bool:
    """Return True for an asyncio task that is not done."""
    kind: Any = library_type("asyncio", "Task")
    return kind is not None and is_instance(item, kind) and not kind.done(item)


def ending_of(item: object) -> str:
    """Return the call that ends an object which ``del`` alone does not free; empty for any other
    object.

    The event loop keeps a pending task, a thread its timer, and a registry a finalizer.
    """
    if is_pending(item) or is_waiting_timer(item) or is_waiting_thread(item):
        return "cancel()"
    if is_of_library(item, "weakref", "finalize"):
        return "detach()"
    return ""


def pending(items: Sequence[object]) -> list[object]:
    """Return the asyncio tasks that are not done."""
    kind = library_type("asyncio", "Task")
    return [] if kind is None else list(filter(is_pending, of_types(kinds_of(items, kind), items)))


def cancelling(tasks: Sequence[object]) -> str:
    """Return the line that cancels pending tasks; words if it would cancel more than these."""
    kind: Any = library_type("asyncio", "Task")
    asyncio: Any = sys.modules["asyncio"]
    names = {_coroutine_name(task) for task in tasks}
    every = set[Any]()
    with contextlib.suppress(RuntimeError):  # no event loop is running
        every = asyncio.all_tasks()
    of_names = [task for task in every if type(task) is kind and _coroutine_name(task) in names]
    if len(names) != 1 or "" in names or len(of_names) != len(tasks):
        return "let its tasks end, or cancel them"
    condition = f'if task.get_coro().__name__ == "{names.pop()}"'
    return f"import asyncio; [task.cancel() for task in asyncio.all_tasks() {condition}];"


def _coroutine_name(task: Any) -> str:
    """Return the name of the function that a task runs; empty for an unusual coroutine."""
    coroutine = library_type("asyncio", "Task").get_coro(task)  # type: ignore[union-attr]  # loaded
    return coroutine.__name__ if type(coroutine) is CoroutineType else ""


def event_loops(names: Mapping[str, object]) -> Iterator[tuple[object, str]]:
    """Yield the running event loop, and those with names of the user, each with code for it."""
    kind = library_type("asyncio", "AbstractEventLoop")
    if kind is None:
        return
    asyncio: Any = sys.modules["asyncio"]
    running = asyncio._get_running_loop()
    if running is not None:
        yield running, "import asyncio; asyncio.get_running_loop()"
    named = dict(names)
    values = list(named.values())
    kinds = kinds_of(values, kind)  # in C: there may be 100,000 names
    if not kinds:
        return
    loops = set(map(id, of_types(kinds, values)))
    for name, value in named.items():
        if id(value) in loops and value is not running and target_of(name):
            yield value, target_of(name)


def timers_of(loop: object) -> list[Any]:
    """Return the timers of the user's code on one of asyncio's own event loops."""
    timers = list[Any]()
    for timer in list(scheduled_on(loop)):
        if not is_waiting_timer(timer):
            continue
        if module_of_function(timer._callback).partition(".")[0] not in _OF_LOOPS:
            timers.append(timer)
    return timers


def scheduled_on(loop: object) -> list[Any]:
    """Return the list in which an event loop keeps its timers; another list if it has none."""
    scheduled = (instance_dict(loop) or {}).get("_scheduled")
    return scheduled if type(scheduled) is list else []


def is_waiting_timer(item: Any) -> bool:
    """Return True for a timer of asyncio that has not been cancelled."""
    kind: Any = library_type("asyncio", "TimerHandle")
    return kind is not None and type(item) is kind and not kind.cancelled(item)


_OF_LOOPS = {"asyncio", "tornado", "zmq", "ipykernel"}
"""Modules whose timers belong to the kernel, or wake tasks."""


def module_of_function(function: object) -> str:
    """Return the module of a function or method, as its code says; empty for another object."""
    inner = function.__func__ if type(function) is MethodType else function
    return inner.__module__ if type(inner) is FunctionType else ""


def wakes_task(item: Any) -> bool:
    """Return True for the callback by which a future wakes a task: a future does not own the
    waiting task.
    """
    if type(item) is BuiltinFunctionType:
        return bool(item.__name__ == _WAKES)
    return type_name(item) == "TaskStepMethWrapper"


def without_wakeups(items: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """Return the items without the callbacks by which futures wake tasks, and these."""
    if _WAKES not in map(_NAME_OF, of_types(BUILTIN, items)):
        return items, []
    waking = list(filter(wakes_task, items))
    return [item for item in items if not wakes_task(item)], waking


# -- timers of threads ---------------------------------------------------------------------------


def is_waiting_thread(item: object) -> bool:
    """Return True for a ``threading.Timer`` that has started, and not yet called its function.

    ``cancel()`` ends such a timer. It does not end the function.
    """
    if type(item) is not threading.Timer:
        return False
    frame = sys._current_frames().get(item.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Event.wait.__code__ and _is_in_timer(frame.f_back):
            return True
        frame = frame.f_back
    return False


def _is_in_timer(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is threading.Timer.run.__code__


def waiting_timers() -> list[threading.Timer]:
    """Return the timers that have started, and not yet called their functions."""
    timers = list[threading.Timer]()
    for thread in threading.enumerate():
        if type(thread) is threading.Timer and is_waiting_thread(thread):
            timers.append(thread)
    return timers


def cancelling_timer(timer: threading.Timer) -> str:
    """Return the line that cancels a timer and waits until its thread has ended."""
    name = text_of(timer.name)
    names = [thread.name for thread in threading.enumerate()]
    condition = (
        f"timer.name == {literal(name)}" if names.count(name) == 1 else f"id(timer) == {id(timer)}"
    )
    timers = f"timer in threading.enumerate() if {condition}"
    return f"import threading; [(timer.cancel(), timer.join()) for {timers}];"


# -- context variables --------------------------------------------------------------------------


class ContextValue(NamedTuple):
    """The value of a variable in the current context."""

    variable: str
    """Name of the context variable."""
    value: object
    code: str
    """Code for the value; empty if neither a name of the user nor its own finds the variable."""
    advice: str
    """The statement that frees the value; empty if a task's context keeps it too."""

    @property
    def text(self) -> str:
        """The code if a name of the user refers to the variable; else words."""
        imports, code = split(self.code)
        return f"context variable {self.variable}" if imports else code


def context_values(names: Mapping[str, object]) -> Iterator[ContextValue]:
    """Yield the values in the current context; ``names`` are the user's."""
    context, now = copy_context(), dict(names)
    variables = compress(now.items(), map(is_, map(type, now.values()), repeat(ContextVar)))
    codes = {id(variable): target_of(name) for name, variable in variables}
    contexts = list(_contexts_of_tasks())
    called = Counter(text_of(variable.name) for variable in context)
    for variable, value in context.items():
        code = codes.get(id(variable), "")
        name = text_of(variable.name)
        if not code and called[name] == 1:
            every = "for var in contextvars.copy_context()"
            code = f"import contextvars; next(var {every} if var.name == {literal(name)})"
        is_shared = any(one.get(variable) is value for one in contexts)
        # With the semicolon, IPython keeps no output: a token, which refers to the old value.
        advice = f"{code}.set(None);" if code and not is_shared else ""
        yield ContextValue(name, value, f"{code}.get()" if code else "", advice)


def storage_of_context() -> list[object]:
    """Return the mapping that contains the values of the current context."""
    return gc.get_referents(copy_context())


def own_references_of_contexts(nodes: Sequence[object]) -> list[object]:
    """Return the references of some ``CONTEXT_NODES``, without the current values of variables.

    A task's context begins as a copy of the current one. Once the task sets a variable, it has
    nodes of its own, in which the values of all other variables stand, too.
    """
    references = gc.get_referents(*nodes)
    current = copy_context()
    values = map(current.get, of_types({id(ContextVar)}, references))
    shared = set(map(id, values))
    return [item for item in references if id(item) not in shared]


def _types_of_nodes() -> set[int]:
    context = Context()
    context.run(ContextVar[int]("example").set, 0)
    return types_of(gc.get_referents(*gc.get_referents(context)))


CONTEXT_NODES = _types_of_nodes()
"""The type of the nodes in which a context keeps its variables and their values."""


def _contexts_of_tasks() -> Iterator[Context]:
    """Yield the contexts of pending tasks, except copies of the current one."""
    current, asyncio, tasks = (
        set(map(id, storage_of_context())),
        sys.modules.get("asyncio"),
        set[Any](),
    )
    with contextlib.suppress(RuntimeError):  # no event loop is running
        tasks = asyncio.all_tasks() if asyncio is not None else tasks
    found = {
        id(item): item for task in tasks for item in gc.get_referents(task) if type(item) is Context
    }
    yield from (one for one in found.values() if current.isdisjoint(map(id, gc.get_referents(one))))
