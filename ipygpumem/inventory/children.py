"""Finds the line that ends a child process: its own name, or that of its pool or data loader.

It reads attributes that the standard library, torch and loky store in their objects, and calls
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.introspect import instance_dict, is_instance, is_name, module_dict, named_objects
from ipygpumem.probes.children import Child

_LOKY = ("joblib.externals.loky", "loky")
_KINDS = (
    ("subprocess", "Popen", "pid", "{name}.terminate()"),
    ("multiprocessing.process", "BaseProcess", "_popen", "{name}.terminate()"),
    ("multiprocessing.pool", "Pool", "_pool", "{name}.terminate()"),
    ("concurrent.futures.process", "ProcessPoolExecutor", "_processes", "{name}.shutdown()"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", "_workers", "del {name}"),
    (
        "torch.utils.data.dataloader",
        "DataLoader",
        "_iterator",
        "del {name}",
    ),  # with persistent workers
)
"""Classes whose objects have processes: module, name, the attribute that leads to them, and the
line that ends them.
"""
_MOST_ITEMS = 1000
"""Maximum number of items of a list or dict to look at."""


class ProcessGrowth(NamedTuple):
    """Processes that the same line ends, and the memory that they have taken since
    an earlier look.
    """

    grown_bytes: int
    processes: tuple[Child, ...]
    ends_by: str
    """The line that ends them; empty if none is known."""


def with_endings(children: Sequence[Child], namespace: dict[str, Any]) -> list[Child]:
    """Return ``children`` with the line that ends each, as far as one is known."""
    if not children:
        return []
    lines: dict[int, str] = {}
    for place, value in _named_owners(namespace):
        for module, kind, attribute, line in _KINDS:
            if is_of_library(value, module, kind):
                for pid in _processes(value, attribute):
                    _add_ending(lines, pid, place, line)
    for package in _LOKY:
        loky: Any = sys.modules.get(f"{package}.reusable_executor")
        if is_instance(loky, ModuleType):
            executor = module_dict(loky).get("_executor")
            line = (
                f"from {package} import get_reusable_executor; get_reusable_executor().shutdown()"
            )
            for pid in _processes(executor, "_processes"):
                lines[pid] = line
    return [child._replace(ends_by=lines.get(child.pid, "")) for child in children]


def _named_owners(namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of named lists, tuples and dicts, then the named objects, each with the code
    that refers to it.

    A name replaces the line of an item, because it is shorter: ``process.terminate()``, not
    ``started[0].terminate()``.
    """
    named = list[tuple[str, Any]]()
    for name, value in named_objects(namespace):
        if is_name(name) and not name.startswith("_"):
            named.append((name, value))
    for name, value in named:
        yield from _items(name, value)
    yield from named


def _items(name: str, container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a short list, tuple or dict, with the code that refers to each; none of
    any other object.
    """
    if type(container) not in (list, tuple, dict) or len(container) > _MOST_ITEMS:
        return
    if type(container) is dict:
        for key, item in list(container.items()):
            if type(key) in (int, str):
                yield f"{name}[{key!r}]", item
        return
    for index, item in enumerate(list(container)):
        yield f"{name}[{index}]", item


def _add_ending(lines: dict[int, str], pid: int, place: str, line: str) -> None:
    """Add the line that ends a process to ``lines``, for an object at ``place``."""
    earlier = lines.get(pid, "")
    if line.startswith("del ") and earlier.startswith("del "):
        # Workers that persist are held by the data loader and by its iterator.
        lines[pid] = f"{earlier}, {place}"
    else:
        lines[pid] = line.format(name=place)


def _processes(value: object, attribute: str) -> Iterator[int]:
    """Yield the processes to which an attribute of an object leads."""
    attributes = instance_dict(value) or {}
    processes = attributes.get(attribute)
    if type(processes) is int:
        yield processes
    elif type(processes) is dict:
        yield from (pid for pid in list(processes) if type(pid) is int)
    elif type(processes) is list:
        for process in list(processes):
            yield from _processes(process, "_popen")
    elif processes is not None:  # a Popen of multiprocessing, or an iterator of a data loader
        for name in ("pid", "_workers"):
            yield from _processes(processes, name)


def endings(children: Iterable[Child]) -> list[str]:
    """Return the lines that end ``children``, each once."""
    return list(dict.fromkeys(child.ends_by for child in children if child.ends_by))


def growth_by_ending(before: Mapping[int, int], now: Iterable[Child]) -> list[ProcessGrowth]:
    """Return the growth of processes by the line that ends them, the largest first.

    Args:
        before: bytes of the processes that ran earlier.
        now: the processes that run now, with their lines.
    """
    growths: dict[str, ProcessGrowth] = {}
    for child in now:
        grown = child.memory_bytes - before.get(child.pid, 0)
        if grown <= 0:
            continue
        key = child.ends_by or str(child.pid)
        earlier = growths.get(key, ProcessGrowth(0, (), child.ends_by))
        processes = (*earlier.processes, child)
        growths[key] = ProcessGrowth(earlier.grown_bytes + grown, processes, child.ends_by)
    return sorted(growths.values(), key=attrgetter("grown_bytes"), reverse=True)
