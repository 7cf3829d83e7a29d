"""Writes the calls that end asyncio's tasks and threads' timers, and code for event loops and the
values of context variables.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from itertools import compress, repeat
from operator import is_
from types import CoroutineType
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import is_of_library, library_type
from ipygpumem.heap.bulk import kinds_of, of_types
from ipygpumem.heap.knowledge.tasks import (
    contexts_of_tasks,
    is_pending,
    is_uncancelled_asyncio_timer,
    is_waiting_thread_timer,
)
from ipygpumem.heap.paths.cuts import split
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import target_of, text_of


def ending_of(item: object) -> str:
    """Return the call that ends an object which ``del`` alone does not free; empty for any other
    object.

    The event loop keeps a pending task, a thread its timer, and a registry a finalizer.
    """
    if is_pending(item) or is_uncancelled_asyncio_timer(item) or is_waiting_thread_timer(item):
        return "cancel()"
    if is_of_library(item, "weakref", "finalize"):
        return "detach()"
    return ""


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


def cancelling_timer(timer: threading.Timer) -> str:
    """Return the line that cancels a timer and waits until its thread has ended."""
    name = text_of(timer.name)
    names = [thread.name for thread in threading.enumerate()]
    condition = (
        f"timer.name == {literal(name)}" if names.count(name) == 1 else f"id(timer) == {id(timer)}"
    )
    timers = f"timer in threading.enumerate() if {condition}"
    return f"import threading; [(timer.cancel(), timer.join()) for {timers}];"


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
    contexts = list(contexts_of_tasks())
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
