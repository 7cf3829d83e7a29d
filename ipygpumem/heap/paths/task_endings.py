"""Writes the calls that end asyncio's tasks and threads' timers, ``task.cancel()``, and the code of
event loops and of the values of context variables.
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

from ipygpumem.heap.bulk import kinds_of, of_types
from ipygpumem.heap.kinds.arrays import is_of_library, library_type
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
    """Return the call that ends an object which ``del`` alone does not free, such as ``cancel()``;
    empty for any other object.

    The event loop keeps a pending task, a thread its timer, and a registry a finalizer.
    """
    if is_pending(item) or is_uncancelled_asyncio_timer(item) or is_waiting_thread_timer(item):
        return "cancel()"
    if is_of_library(item, "weakref", "finalize"):
        return "detach()"
    return ""


def line_that_cancels(tasks: Sequence[object]) -> str:
    """Return the line that cancels pending tasks, which it finds by the name of their function.

    Return words if that name is not enough: if the tasks run several functions, or if a further
    task runs the same one.
    """
    kind: Any = library_type("asyncio", "Task")
    asyncio: Any = sys.modules["asyncio"]
    functions = {_coroutine_name(task) for task in tasks}
    all_tasks = set[Any]()
    with contextlib.suppress(RuntimeError):  # no event loop is running
        all_tasks = asyncio.all_tasks()
    tasks_of_functions = list[Any]()
    for task in all_tasks:
        if type(task) is kind and _coroutine_name(task) in functions:
            tasks_of_functions.append(task)
    has_one_name = len(functions) == 1 and "" not in functions
    if not has_one_name or len(tasks_of_functions) != len(tasks):
        return "let its tasks end, or cancel them"
    condition = f'if task.get_coro().__name__ == "{functions.pop()}"'
    return f"import asyncio; [task.cancel() for task in asyncio.all_tasks() {condition}];"


def _coroutine_name(task: Any) -> str:
    """Return the name of the function that a task runs; empty for an unusual coroutine."""
    coroutine = library_type("asyncio", "Task").get_coro(task)  # type: ignore[union-attr]  # loaded
    return coroutine.__name__ if type(coroutine) is CoroutineType else ""


def event_loops(names: Mapping[str, object]) -> Iterator[tuple[object, str]]:
    """Yield the running event loop, and each further one that a name of the user refers to, each
    with its code.
    """
    kind = library_type("asyncio", "AbstractEventLoop")
    if kind is None:
        return
    asyncio: Any = sys.modules["asyncio"]
    running = asyncio._get_running_loop()
    if running is not None:
        yield running, "import asyncio; asyncio.get_running_loop()"
    names_now = dict(names)  # a thread may change them
    values = list(names_now.values())
    kinds = kinds_of(values, kind)  # in C: there may be 100,000 names
    if not kinds:
        return
    loop_ids = set(map(id, of_types(kinds, values)))
    for name, value in names_now.items():
        if id(value) in loop_ids and value is not running and target_of(name):
            yield value, target_of(name)


def line_that_cancels_timer(timer: threading.Timer) -> str:
    """Return the line that cancels a timer and waits until its thread has ended."""
    name = text_of(timer.name)
    names = [thread.name for thread in threading.enumerate()]
    condition = f"timer.name == {literal(name)}"
    if names.count(name) != 1:
        condition = f"id(timer) == {id(timer)}"
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
    """Yield the values of variables in the current context.

    Args:
        names: the user's names, which may refer to the variables.
    """
    context = copy_context()
    code_by_variable_id = _code_of_variables(names)
    contexts_of_pending = list(contexts_of_tasks())
    number_with_name = Counter(text_of(variable.name) for variable in context)
    for variable, value in context.items():
        name = text_of(variable.name)
        code = code_by_variable_id.get(id(variable), "")
        if not code and number_with_name[name] == 1:
            every = "for var in contextvars.copy_context()"
            code = f"import contextvars; next(var {every} if var.name == {literal(name)})"
        is_in_task = any(of_task.get(variable) is value for of_task in contexts_of_pending)
        # With the semicolon, IPython keeps no output: a token, which refers to the old value.
        advice = f"{code}.set(None);" if code and not is_in_task else ""
        yield ContextValue(name, value, f"{code}.get()" if code else "", advice)


def _code_of_variables(names: Mapping[str, object]) -> dict[int, str]:
    """Return the code of the user's names for context variables, by the variable's identity."""
    names_now = dict(names)  # a thread may change them
    are_variables = map(is_, map(type, names_now.values()), repeat(ContextVar))
    variables = compress(names_now.items(), are_variables)
    return {id(variable): target_of(name) for name, variable in variables}
