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

from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import instance_dict, is_instance, is_name, module_dict, named_objects
from ipygpumem.probes.children import Child

_LOKY = ("joblib.externals.loky", "loky")
_KINDS = (
    ("subprocess", "Popen", "pid", "{name}.terminate()"),
    ("multiprocessing.process", "BaseProcess", "_popen", "{name}.terminate()"),
    ("multiprocessing.pool", "Pool", "_pool", "{name}.terminate()"),
    ("concurrent.futures.process", "ProcessPoolExecutor", "_processes", "{name}.shutdown()"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", "_workers", ""),
    ("torch.utils.data.dataloader", "DataLoader", "_iterator", ""),  # with persistent workers
)
"""Classes whose objects have processes: module, name, the attribute that leads to them, and the
line that ends them; empty if they end when nothing refers to the object.
"""
_MOST_ITEMS = 1000
"""Maximum number of items of a list or dict to look at."""
_MOST_STEPS = 3
"""Maximum number of steps from a name to an object that has processes."""


class ProcessGrowth(NamedTuple):
    """Processes that the same line ends, and the memory that they have taken since
    an earlier look.
    """

    grown_bytes: int
    processes: tuple[Child, ...]
    ends_by: str
    """The line that ends them; empty if none is known."""


def with_endings(children: Sequence[Child], namespace: dict[str, Any]) -> list[Child]:
    """Return ``children`` with the line that ends each, such as ``pool.terminate()``; empty if no
    named object leads to the process.
    """
    if not children:
        return []
    lines = _lines_of_loky()
    removals: dict[int, list[str]] = {}
    """The lines that remove references to what owns a process, by the process's number."""
    for owner in _named_owners(namespace):
        for module, kind, attribute, line in _KINDS:
            if not is_of_library(owner.value, module, kind):
                continue
            for pid in _processes(owner.value, attribute):
                if line:
                    lines[pid] = line.format(name=owner.code)
                else:
                    removals.setdefault(pid, []).append(owner.removal)
    for pid, removals_of_process in removals.items():
        # Persistent workers are held by the data loader and its iterator: ``del loader, batches``.
        lines.setdefault(pid, _removals_in_one_line(removals_of_process))
    return [child._replace(ends_by=lines.get(child.pid, "")) for child in children]


def _lines_of_loky() -> dict[int, str]:
    """Return the line that ends each process of joblib's executor (loky), by the process's number.
    The executor has no name in the notebook: joblib keeps it for its next calls.
    """
    lines: dict[int, str] = {}
    for package in _LOKY:
        loky: Any = sys.modules.get(f"{package}.reusable_executor")
        if is_instance(loky, ModuleType):
            executor = module_dict(loky).get("_executor")
            line = (
                f"from {package} import get_reusable_executor; get_reusable_executor().shutdown()"
            )
            for pid in _processes(executor, "_processes"):
                lines[pid] = line
    return lines


class _Owner(NamedTuple):
    """A named object, or an item of one, that may have processes: ``jobs[0]``."""

    code: str
    """The code that refers to it."""
    value: Any
    removal: str
    """The line that removes the reference, and leaves the positions of other items."""


def _removals_in_one_line(removals: Iterable[str]) -> str:
    """Return several removals as one line with a single ``del``: ``del loader`` and ``jobs[0] =
    None`` become ``jobs[0] = None; del loader``.
    """
    deleted = dict[str, None]()
    statements = dict[str, None]()
    for removal in removals:
        target = removal.removeprefix("del ")
        if target == removal:
            statements[removal] = None
        else:
            deleted[target] = None
    if deleted:
        statements[f"del {', '.join(deleted)}"] = None
    return "; ".join(statements)


def _named_owners(namespace: dict[str, Any]) -> Iterator[_Owner]:
    """Yield the items of named lists, tuples and dicts first, and then the named objects
    themselves.

    The last line of a process counts, so that a name replaces the line of an item, because it is
    shorter: ``process.terminate()``, not ``started[0].terminate()``.
    """
    named = list[tuple[str, Any]]()
    for name, value in named_objects(namespace):
        if is_name(name) and not name.startswith("_"):
            named.append((name, value))
    for name, value in named:
        yield from _items(_Owner(name, value, f"del {name}"), _MOST_STEPS)
    for name, value in named:
        yield _Owner(name, value, f"del {name}")


def _items(owner: _Owner, most_steps: int) -> Iterator[_Owner]:
    """Yield the items of a short list, tuple or dict; before each level, the items further inside.
    Yield nothing for any other object.
    """
    container = owner.value
    if type(container) not in (list, tuple, dict) or len(container) > _MOST_ITEMS:
        return
    items = list[_Owner]()
    if type(container) is dict:
        for key, item in list(container.items()):
            written = literal(key)
            if written:
                code = f"{owner.code}[{written}]"
                items.append(_Owner(code, item, f"del {code}"))
    else:
        for index, item in enumerate(list(container)):
            code = f"{owner.code}[{index}]"
            removal = f"{code} = None"
            if type(container) is tuple:
                removal = owner.removal  # with all other items
            items.append(_Owner(code, item, removal))
    if most_steps > 1:
        for item in items:
            yield from _items(item, most_steps - 1)
    yield from items


def _processes(value: object, attribute: str) -> Iterator[int]:
    """Yield the numbers of the processes to which an attribute of an object leads.

    A ``Popen`` has its number in ``pid``, an executor a dict by number, a pool a list of processes,
    each with a ``_popen``, and a data loader an iterator with ``_workers``.
    """
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
    """Return the growth of processes, the largest first: one entry for the processes that the same
    line ends, such as all workers of a pool.

    Args:
        before: bytes of the processes that ran earlier.
        now: the processes that run now, with their lines.
    """
    growths: dict[str, ProcessGrowth] = {}
    for child in now:
        grown_bytes = child.memory_bytes - before.get(child.pid, 0)
        if grown_bytes <= 0:
            continue
        key = child.ends_by or str(child.pid)
        earlier = growths.get(
            key, ProcessGrowth(grown_bytes=0, processes=(), ends_by=child.ends_by)
        )
        processes = (*earlier.processes, child)
        growths[key] = ProcessGrowth(earlier.grown_bytes + grown_bytes, processes, child.ends_by)
    return sorted(growths.values(), key=attrgetter("grown_bytes"), reverse=True)
