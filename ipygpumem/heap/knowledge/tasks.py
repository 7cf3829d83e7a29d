"""Finds asyncio tasks, timers and the values of context variables, to which the event loop, threads
or the running code refer: the collector does not report all of these references.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from operator import attrgetter
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

from ipygpumem.heap.bulk import kinds_of, of_types, types_of, without_objects
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.knowledge.frames import stack
from ipygpumem.introspect import attribute_of, is_instance, type_name

BUILTIN = {id(BuiltinFunctionType)}
"""The type of functions in C, such as the callback by which a future wakes a task."""
_NAME_OF = attrgetter("__name__")
_WAKES = "task_wakeup"
"""Name of the callback in C by which a future wakes a task."""


def is_pending(item: object) -> bool:
    """Return True for an asyncio task that is not done."""
    kind: Any = library_type("asyncio", "Task")
    return kind is not None and is_instance(item, kind) and not kind.done(item)


def pending_tasks(items: Sequence[object]) -> list[object]:
    """Return the asyncio tasks among objects that are not done."""
    kind = library_type("asyncio", "Task")
    return [] if kind is None else list(filter(is_pending, of_types(kinds_of(items, kind), items)))


def timers_of(loop: object) -> list[Any]:
    """Return the timers of the user's code on an event loop of asyncio."""
    timers = list[Any]()
    for timer in list(scheduled_on(loop)):
        if not is_uncancelled_asyncio_timer(timer):
            continue
        if module_of_function(timer._callback).partition(".")[0] not in _KERNEL_PACKAGES:
            timers.append(timer)
    return timers


def scheduled_on(loop: object) -> list[Any]:
    """Return the list in which an event loop keeps its timers; a new one if it has no such list."""
    scheduled = attribute_of(loop, "_scheduled")
    return scheduled if type(scheduled) is list else []


def is_uncancelled_asyncio_timer(item: Any) -> bool:
    """Return True for a timer of asyncio that has not been cancelled."""
    kind: Any = library_type("asyncio", "TimerHandle")
    return kind is not None and type(item) is kind and not kind.cancelled(item)


_KERNEL_PACKAGES = {"asyncio", "tornado", "zmq", "ipykernel"}
"""Packages whose timers belong to the kernel, or wake tasks."""


def module_of_function(function: object) -> str:
    """Return the name of the module of a function or method written in Python; empty for another
    object.
    """
    plain_function = function.__func__ if type(function) is MethodType else function
    return plain_function.__module__ if type(plain_function) is FunctionType else ""


def wakes_task(item: Any) -> bool:
    """Return True for the callback by which a future wakes the task that waits for it. The future
    refers to the task, but does not own it.
    """
    if type(item) is BuiltinFunctionType:
        return bool(item.__name__ == _WAKES)
    return type_name(item) == "TaskStepMethWrapper"


def without_wakeups(items: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """Return the items without the callbacks by which futures wake tasks, and these callbacks."""
    if _WAKES not in map(_NAME_OF, of_types(BUILTIN, items)):
        return items, []
    wakeups = list(filter(wakes_task, items))
    return [item for item in items if not wakes_task(item)], wakeups


# -- timers of threads ---------------------------------------------------------------------------


def is_waiting_thread_timer(item: object) -> bool:
    """Return True for a ``threading.Timer`` that has started, and not yet called its function.

    ``cancel()`` ends such a timer. It does not end the function.
    """
    if type(item) is not threading.Timer:
        return False
    for frame in stack(sys._current_frames().get(item.ident or 0)):
        if frame.f_code is threading.Event.wait.__code__ and _is_in_timer(frame.f_back):
            return True
    return False


def _is_in_timer(frame: FrameType | None) -> bool:
    """Return True for the frame of a timer's thread."""
    return frame is not None and frame.f_code is threading.Timer.run.__code__


def waiting_thread_timers() -> list[threading.Timer]:
    """Return the timers that have started, and not yet called their functions."""
    timers = list[threading.Timer]()
    for thread in threading.enumerate():
        if type(thread) is threading.Timer and is_waiting_thread_timer(thread):
            timers.append(thread)
    return timers


# -- context variables --------------------------------------------------------------------------


def storage_of_context() -> list[object]:
    """Return the mapping with the values of the current context, as the only item of a list."""
    return gc.get_referents(copy_context())


def own_references_of_contexts(nodes: Sequence[object]) -> list[object]:
    """Return the objects to which nodes of contexts refer, without the values that the variables
    have in the current context.

    A task's context begins as a copy of the current one. Once the task sets a variable, it has
    nodes of its own, in which the values of all other variables stand, too.
    """
    references = gc.get_referents(*nodes)
    current = copy_context()
    current_values = map(current.get, of_types({id(ContextVar)}, references))
    return without_objects(current_values, references)


def _types_of_nodes() -> set[int]:
    """Return the identities of the types of the nodes of contexts."""
    context = Context()
    context.run(ContextVar[int]("example").set, 0)
    return types_of(gc.get_referents(*gc.get_referents(context)))


CONTEXT_NODES = _types_of_nodes()
"""The type of the nodes in which a context keeps its variables and their values."""


def contexts_of_tasks() -> Iterator[Context]:
    """Yield the contexts of pending tasks, except copies of the current one that no task has
    changed: they lead to the same values as the current context.
    """
    current_storage = set(map(id, storage_of_context()))
    asyncio: Any = sys.modules.get("asyncio")
    tasks = set[Any]()
    if asyncio is not None:
        with contextlib.suppress(RuntimeError):  # no event loop is running
            tasks = asyncio.all_tasks()
    contexts = dict[int, Context]()
    for task in tasks:
        for referent in gc.get_referents(task):
            if type(referent) is Context:
                contexts[id(referent)] = referent
    for context in contexts.values():
        if current_storage.isdisjoint(map(id, gc.get_referents(context))):
            yield context
