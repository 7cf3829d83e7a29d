"""Finds the line that ends a child process: its own name, or that of its pool or data loader.

It reads attributes that the standard library, torch and loky store in their objects, and calls nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.introspect import instance_dict, is_instance, is_name, module_dict, named_objects
from ipygpumem.probes.outside import Child

_LOKY = ("joblib.externals.loky", "loky")
_KINDS = (
    ("subprocess", "Popen", "pid", "{name}.terminate()"),
    ("multiprocessing.process", "BaseProcess", "_popen", "{name}.terminate()"),
    ("multiprocessing.pool", "Pool", "_pool", "{name}.terminate()"),
    ("concurrent.futures.process", "ProcessPoolExecutor", "_processes", "{name}.shutdown()"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", "_workers", "del {name}"),
    ("torch.utils.data.dataloader", "DataLoader", "_iterator", "del {name}"),  # with persistent workers
)
"""Classes whose objects have processes: module, name, the attribute that leads to them, and the line that ends them."""


def with_endings(children: Sequence[Child], namespace: dict[str, Any]) -> list[Child]:
    """Return ``children`` with the line that ends each, as far as one is known."""
    lines: dict[int, str] = {}
    for name, value in named_objects(namespace) if children else ():
        if is_name(name) and not name.startswith("_"):
            for module, kind, attribute, line in _KINDS:
                for pid in _processes(value, attribute) if is_of_library(value, module, kind) else ():
                    # Workers that persist are held by the data loader and by its iterator.
                    is_held = line.startswith("del ") and lines.get(pid, "").startswith("del ")
                    lines[pid] = f"{lines[pid]}, {name}" if is_held else line.format(name=name)
    for package in _LOKY:
        loky: Any = sys.modules.get(f"{package}.reusable_executor")
        if is_instance(loky, ModuleType):
            line = f"from {package} import get_reusable_executor; get_reusable_executor().shutdown()"
            executor = module_dict(loky).get("_executor")
            lines |= dict.fromkeys(_processes(executor, "_processes"), line)
    return [child._replace(ends_by=lines.get(child.pid, "")) for child in children]


def _processes(value: object, attribute: str) -> Iterator[int]:
    """Yield the processes to which an attribute of an object leads."""
    found = (instance_dict(value) or {}).get(attribute)
    if type(found) is int:
        yield found
    elif type(found) is dict:
        yield from (pid for pid in list(found) if type(pid) is int)
    elif type(found) is list:
        for item in list(found):
            yield from _processes(item, "_popen")
    elif found is not None:  # a Popen of multiprocessing, or an iterator of a data loader
        for name in ("pid", "_workers"):
            yield from _processes(found, name)


def endings(children: Iterable[Child]) -> list[str]:
    """Return the lines that end ``children``, each once."""
    return list(dict.fromkeys(child.ends_by for child in children if child.ends_by))
