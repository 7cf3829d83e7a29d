"""Advice on what training leaves behind: gradients and optimizer states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.modules import optimized
from ipygpumem.advising.places import entries, has_torchs, parameters_of
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import instance_dict, is_instance, type_name
from ipygpumem.objects.arrays import StorageKey, library_type


def gradients(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield the gradients of each optimizer's parameters, and of models that no optimizer trains."""
    to_come = graphs.waiting_for_backward
    done: set[int] = set()
    groups = [(item, path, optimized(item)) for item, path in look.named(look.heap.optimizers)]
    groups += [(item, path, parameters_of(item)) for item, path in look.models]
    for item, path, parameters in groups:
        ids = set(map(id, parameters))
        if ids & done or ids & to_come or not has_torchs(item, "zero_grad"):
            continue
        done |= ids
        grads = [gradient for gradient in (look.read("_grad", one) for one in parameters) if gradient is not None]
        shares = {key: look.sizes[key] for key in map(look.key, grads) if key and _goes(look, graphs, key)}
        yield from look.by_device(
            "gradients",
            shares,
            f"the gradients of {path} ({len(grads):,} tensors)",
            f"{path}.zero_grad(set_to_none=True)",
            "after a step and before the next backward(), or when training is over",
        )


def _goes(look: Look, graphs: Graphs, key: StorageKey) -> bool:
    return look.dies(key, set()) and not graphs.saves(key)


def states(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield what each optimizer remembers of its parameters, as Adam two averages."""
    named = list(look.named(look.heap.optimizers))
    every: dict[int, object] = {id(row): row for optimizer, _ in named for row in rows_of(optimizer)}
    holders = Counter(key for _, children in look.heap.referrers(every) for key in children) if every else Counter()
    for optimizer, path in named:
        rows = [row for row in rows_of(optimizer) if holders[id(row)] == 1]  # a state_dict() has them, too
        lists = [(name, value) for row in rows for name, value in row.items() if type(value) is list]  # of LBFGS
        inside = {*map(id, rows), *(id(value) for _, value in lists)}
        found = [
            *(pair for row in rows for pair in row.items()),
            *((name, one) for name, those in lists for one in those),
        ]
        tensors = [(name, item) for name, item in found if look.key(item) is not None]
        dropped = {id(item) for _, item in tensors if _only_in(inside, look.referrers(item))}
        keys = {look.key(item) for _, item in tensors}
        shares = {key: look.sizes[key] for key in keys if key and look.dies(key, dropped) and not graphs.saves(key)}
        names = dict.fromkeys(name for name, item in tensors if look.key(item) in shares and _is_large(look, item))
        yield from look.by_device(
            "optimizer state",
            shares,
            f"{' and '.join(names)} of {type_name(optimizer)}, for {len(rows):,} parameters",
            f"{path}.state.clear()",
            "when training is over: a further step would start from nothing; SGD without momentum keeps no such state",
        )


def rows_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return what an optimizer remembers of each parameter, by names."""
    state = (instance_dict(optimizer) or {}).get("state")
    rows = [row for row in entries(state).values() if type(row) is dict]
    return [row for row in rows if all(type(name) is str for name in row)]


def _only_in(holders: set[int], referrers: Sequence[object]) -> bool:
    return len(referrers) == 1 and id(referrers[0]) in holders


def _is_large(look: Look, item: Any) -> bool:
    base: Any = library_type("torch", "Tensor")
    return is_instance(item, base) and (look.read("nbytes", item) or 0) > 64  # a step's number is not
