"""Writes the steps of paths through containers from which only their owner's calls remove an item:
queues, heaps, schedulers.

An owner counts the items of its container, keeps their order, or wakes threads that wait for
one. ``del q.queue[1]`` would make ``q.join()`` wait forever.
"""

from __future__ import annotations

import functools
import gc
import heapq
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.paths.cuts import Cut, Kind, Protocol, split
from ipygpumem.heap.paths.items_and_attributes import attribute_text, position_of
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import (
    instance_dict,
    is_exactly,
    is_instance,
    is_name,
    is_users_class,
    text_of,
)

# Parts of statements, in which ``{0}`` is the code of the owner.
_TAKING = "{0}.get_nowait(){ending}"
_EVERY = "for _ in range({0}.qsize())"
_TAKING_COUNTED = f"[({_TAKING}, {{0}}.task_done()) {_EVERY}];"
_TAKING_ALL = f"[{_TAKING} {_EVERY}];"
_HEAPIFYING = "import heapq; heapq.heapify({items})"
_LEFT_OUT = "if position not in {positions}"

# The calls of each kind of owner: those that remove all items, then those that remove some items.
_SIMPLE_QUEUE = Protocol(
    removing_all=_TAKING_ALL,
    removing_some="[{0}.put(item) for position, item in enumerate("
    f"[{{0}}.get_nowait() {_EVERY}]) {_LEFT_OUT}];",
)
_CLOSING = "close() it when you no longer need what its callbacks refer to"
_EXIT_STACK = Protocol(removing_all="{0}.close()", words=_CLOSING)
_EVENTS = Protocol(
    removing_all="[{0}.cancel(event) for event in {0}.queue];",
    removing_some="[{0}.cancel(event) for event in {0}.queue if event.sequence in {keys}];",
)
_HEAP = Protocol(removing_all="{0}.clear()", removing_some=f"{{deleting}}; {_HEAPIFYING}")
_CALLS_OF_POOL = Protocol(
    removing_all=(
        f"[{{0}}._work_queue.get_nowait().future.cancel() {_EVERY.format('{0}._work_queue')}];"
    ),
    words="let the pool's calls end",
)
_PROCESS_QUEUE = Protocol(words="take it with the queue's get() in another process")
_LEARNING_RATES = Protocol(words="delete the learning rate's scheduler")
_BEHIND_SEMAPHORE = Protocol(words="let your code take it: a semaphore may count these items")


def append_protocol_step(path: Path, steps: Sequence[object], names: Mapping[str, object]) -> int:
    """Append an item that only its owner's calls remove, such as ``q.queue[1]``; return the number
    of references from the owner to the item, 0 if the next object is no such item.

    Args:
        path: the path to the owner.
        steps: the owner, and the objects from it to the target.
        names: the user's names.
    """
    owner, child = steps[0], steps[1]
    if not path.code:
        return 0
    if is_of_library(owner, "_queue", "SimpleQueue"):
        return _append_simple_queue_item(path, steps)
    if is_exactly(child, deque, list):
        protocol = _protocol_of(owner, child)
        if protocol is not None:
            return _append_queued_item(path, steps, protocol)
    if is_exactly(owner, list) and _is_heap(owner, names):
        _append_one_item(path, owner, list(owner), child, _HEAP, path.code)  # type: ignore[call-overload]  # a list
        return 1
    if is_of_library(owner, "concurrent.futures", "ThreadPoolExecutor"):
        return _append_pool_item(path, steps)
    if is_instance(owner, functools.partial) and len(steps) > 2:
        return _append_argument_of_partial(path, steps)
    return 0


def _protocol_of(owner: object, items: object) -> Protocol | None:
    """Return the calls by which an owner removes the items of its list or deque; None if ``del``
    may remove them, too.
    """
    name = attribute_text(owner, items)
    if is_of_library(owner, "queue", "Queue") and name == ".queue":
        is_heap = is_of_library(owner, "queue", "PriorityQueue")
        return _protocol_of_queue(owner, len(items), is_heap=is_heap)  # type: ignore[arg-type]  # a list or deque
    if is_of_library(owner, "asyncio", "Queue") and name == "._queue":
        is_heap = is_of_library(owner, "asyncio", "PriorityQueue")
        return _protocol_of_asyncio_queue(is_heap=is_heap)
    for module, kind, attribute, protocol in _PROTOCOLS_OF_LIBRARIES:
        if is_of_library(owner, module, kind) and attribute in ("", name):
            return protocol
    if is_users_class(type(owner)) and is_name(name.removeprefix(".")):
        return _protocol_of_users_object(owner)
    return None


_PROTOCOLS_OF_LIBRARIES = (
    ("multiprocessing.queues", "Queue", "._buffer", _PROCESS_QUEUE),
    ("sched", "scheduler", "._queue", _EVENTS),
    ("contextlib", "_BaseExitStack", "._exit_callbacks", _EXIT_STACK),
    ("torch.optim.lr_scheduler", "LRScheduler", "", _LEARNING_RATES),
)
"""The module and class of an owner, the attribute with its container, which is empty for any
attribute, and its calls.
"""


def _protocol_of_queue(queue: object, size: int, *, is_heap: bool) -> Protocol:
    """Return the calls that remove items of a ``queue.Queue``, which counts them until they are
    done.

    Args:
        queue: the queue.
        size: the number of its items.
        is_heap: True for a ``PriorityQueue``.
    """
    # Delete the items under the queue's lock, and do what ``get()`` does besides: keep the order,
    # count down, and wake a thread that waits for space.
    edits = ["{deleting}"]
    if is_heap:
        edits.append(_HEAPIFYING)
    unfinished: Any = (instance_dict(queue) or {}).get("unfinished_tasks")
    is_counted = is_exactly(unfinished, int) and unfinished >= size
    if is_counted:
        edits.append("{0}.unfinished_tasks -= {number}")
    edits.append("{0}.not_full.notify({number})")
    editing = f"with {{0}}.mutex: {'; '.join(edits)}"
    return Protocol(
        removing_all=_TAKING_COUNTED if is_counted else _TAKING_ALL,
        removing_some=editing,
        is_compound=True,
    )


def _protocol_of_asyncio_queue(*, is_heap: bool) -> Protocol:
    """Return the calls that remove items of an ``asyncio.Queue``, which counts them until they are
    done.
    """
    edits = ["{deleting}"]
    if is_heap:
        edits.append(_HEAPIFYING)
    edits.append("{0}._unfinished_tasks -= {number}")
    edits.append("[{0}._wakeup_next({0}._putters) for _ in range({number})];")
    return Protocol(removing_all=_TAKING_COUNTED, removing_some="; ".join(edits))


def _protocol_of_users_object(owner: object) -> Protocol | None:
    """Return the calls that remove items from a list or deque that an object of the user shares
    between threads, ``with buffer.condition: ...``; None if the object has neither a condition nor
    a semaphore.

    A thread that waits on the condition checks again when it is notified. A semaphore counts the
    items, so no line may remove one.
    """
    for name, value in (instance_dict(owner) or {}).items():
        if is_exactly(value, threading.Semaphore, threading.BoundedSemaphore):
            return _BEHIND_SEMAPHORE
        if is_exactly(value, threading.Condition) and is_name(text_of(name)):
            condition = f"{{0}}.{text_of(name)}"
            editing = f"with {condition}: {{deleting}}; {condition}.notify_all()"
            emptying = f"with {condition}: {{items}}.clear(); {condition}.notify_all()"
            return Protocol(removing_all=emptying, removing_some=editing, is_compound=True)
    return None


def _append_queued_item(path: Path, steps: Sequence[object], protocol: Protocol) -> int:
    """Append an item of an owner's list or deque, or the container itself if the path ends there;
    return the number of references.
    """
    owner, items = steps[0], steps[1]
    name = attribute_text(owner, items)
    if protocol is _LEARNING_RATES:
        return _append_learning_rate(path, steps, name)
    if len(steps) == 2:
        _append_all_items(path, items, name, protocol)
        return 1
    listed: list[Any] = list(items)  # type: ignore[call-overload]  # a list or deque
    if protocol is _EVENTS:
        protocol = protocol.with_keys([event.sequence for event in listed])
    path.text.shown += name
    _append_one_item(path, items, listed, steps[2], protocol, f"{path.code}{name}")
    return 2


def _append_learning_rate(path: Path, steps: Sequence[object], name: str) -> int:
    """Append an item of a list of a learning rate's scheduler; return the number of references.

    Such a list has one item for each group of the optimizer, so the scheduler is removed as a
    whole.

    Args:
        path: the path to the scheduler.
        steps: the scheduler, the list, and the objects after it.
        name: the attribute with the list, such as ``.lr_lambdas``.
    """
    path.set_fallback("when you no longer need the scheduler", _LEARNING_RATES.words)
    if len(steps) > 2:
        name += f"[{position_of(steps[1], steps[2])}]"  # type: ignore[arg-type]  # a list
    path.append_fixed(name, f"{path.code}{name}")
    return min(2, len(steps) - 1)


def _append_all_items(path: Path, items: Any, name: str, protocol: Protocol) -> None:
    """Append the list or deque of an owner itself, whose calls remove all items.

    Args:
        path: the path to the owner.
        items: the list or deque.
        name: its attribute, such as ``.queue``.
        protocol: the calls.
    """
    code = f"{path.code}{name}"
    size = len(items)
    calls = protocol.of_container(code)
    cut = Cut(Kind.QUEUED, id(items), path.code, code, position=0, size=size, protocol=calls)
    emptying = calls.statement(cut, range(size))
    if emptying:
        path.append_removable(name, code, Cut(Kind.CALL, id(items), path.code, emptying))
        return
    path.append_fixed(name, code)
    path.advise(words=protocol.words)


def _append_one_item(
    path: Path,
    container: object,
    items: Sequence[object],
    item: object,
    protocol: Protocol,
    code: str,
) -> None:
    """Append an item, which its owner's calls remove.

    Args:
        path: the path to the owner.
        container: the object that has the items.
        items: its items.
        item: the item.
        protocol: the calls.
        code: the code of the container.
    """
    position = position_of(list(items), item)
    target = f"{code}[{position}]"
    cut = Cut(
        Kind.QUEUED,
        id(container),
        path.code,
        target,
        position,
        len(items),
        protocol=protocol.of_container(code),
    )
    shown = " (in a queue)" if protocol is _SIMPLE_QUEUE else f"[{position}]"
    if cut.statement:
        path.append_removable(shown, target, cut)
        return
    path.append_fixed(shown, target)
    path.advise(words=protocol.words)


def _append_simple_queue_item(path: Path, steps: Sequence[object]) -> int:
    """Append an item of a ``SimpleQueue``; return the number of references."""
    queue: Any = steps[0]
    items = [item for item in gc.get_referents(queue) if item is not type(queue)]
    taken = 1
    if sys.version_info < (3, 13):  # a list, which begins with the places of former items
        taken = 2
        items = items[0] if items and is_exactly(items[0], list) else []
    size = queue.qsize() if is_of_library(queue, "_queue", "SimpleQueue") else 0
    items = items[len(items) - size :]
    if len(steps) <= taken or not any(item is steps[taken] for item in items):
        return 0
    _append_one_item(path, queue, items, steps[taken], _SIMPLE_QUEUE, path.code)
    path.code = ""  # no expression reads an item
    return taken


def _append_pool_item(path: Path, steps: Sequence[object]) -> int:
    """Append the queue of a ``ThreadPoolExecutor``, in which calls wait that hold an object; return
    1, the number of references, or 0 for any other step.

    If only one call waits, the line cancels it. If several do, nothing tells which of them holds
    the object.
    """
    queue: Any = steps[1]
    if attribute_text(steps[0], queue) != "._work_queue" or len(steps) == 2:
        return 0
    waiting = queue.qsize() if is_of_library(queue, "_queue", "SimpleQueue") else 0
    line = ""
    if waiting == 1:
        imports, pool = split(path.code)
        line = imports + _CALLS_OF_POOL.removing_all.format(pool, ending="")
    # The pool's threads refer to the queue, too.
    path.advise(line, words=_CALLS_OF_POOL.words, ended_object=queue)
    path.append_fixed("._work_queue (a call that waits)")
    return 1


def _append_argument_of_partial(path: Path, steps: Sequence[object]) -> int:
    """Append a keyword argument of a ``functools.partial``, ``f.keywords["data"]``; return 2, the
    number of references, or 0 for any other step.

    The partial fails without the argument, so the line removes the partial.
    """
    partial, arguments, value = steps[:3]
    name = attribute_text(partial, arguments)
    reader: Any = functools.partial.keywords
    if arguments is not reader.__get__(partial):
        return 0
    pairs = list(dict.items(arguments))
    key = next((literal(key) for key, item in pairs if item is value), "")
    shown = f".keywords[{key}]" if key else name
    path.append_fixed(shown, f"{path.code}.keywords[{key}]" if key else "")
    return 2


# -- heaps ----------------------------------------------------------------------------------------


def _is_heap(items: Any, names: Mapping[str, object]) -> bool:
    """Return True for a list that the user's code keeps as a heap with ``heapq``: deleting one of
    its items would break the order.

    A sorted list does not count: it is a heap, too, but it may be sorted for another reason. Only
    plain numbers and texts are compared, because no code of a user's object may run.
    """
    if len(items) < 3 or not _uses_heaps(names):
        return False
    keys = list(map(_plain_key, items))
    if not _are_comparable(keys):
        return False
    for position in range(1, len(keys)):
        position_of_parent = (position - 1) // 2
        if keys[position_of_parent] > keys[position]:
            return False
    return any(earlier > later for earlier, later in pairwise(keys))


def _uses_heaps(names: Mapping[str, object]) -> bool:
    """Return True if a name of the user is the module ``heapq`` or a function of it."""
    module_and_functions = (heapq, heapq.heappush, heapq.heappop, heapq.heapify)
    ids_of_heapq = set(map(id, module_and_functions))
    return not ids_of_heapq.isdisjoint(map(id, list(names.values())))


def _plain_key(item: Any) -> Any:
    """Return the number or text by which a heap orders an item, ``2`` for ``(2, job)``; None if it
    is another object.
    """
    key = item[0] if is_exactly(item, tuple) and item else item
    return key if is_exactly(key, int, float, str) else None


def _are_comparable(keys: Sequence[object]) -> bool:
    """Return True if all keys are numbers, or all are texts."""
    kinds = set(map(type, keys))
    return kinds == {str} or kinds <= {int, float}
