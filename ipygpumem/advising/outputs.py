"""Advice on results that only IPython keeps, in ``Out``."""

from __future__ import annotations

from collections.abc import Iterator

from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import is_atom, type_name
from ipygpumem.objects.arrays import StorageKey
from ipygpumem.objects.inventory.naming import Names


def outputs(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield outputs that hold memory to which no name of the user's leads."""
    kept = look.scope.outputs
    values = {id(value): (number, value) for number in kept.numbers if not is_atom(value := kept.cache[number])}
    referrers: dict[int, list[object]] = {}
    for referrer, children in look.heap.referrers({key: value for key, (_, value) in values.items()}) if values else ():
        for child in children:
            referrers.setdefault(child, []).append(referrer)
    users = {id(value) for value in look.names.values()}
    for key, (number, value) in values.items():
        theirs = any(id(referrer) not in kept.keepers for referrer in referrers.get(key, ()))
        if key in users or theirs or look.is_in_frames(value):
            continue
        yield from look.by_device(
            "output",
            _shares(look, graphs, value),
            f"Out[{number}] ({type_name(value)}) is held by IPython alone",
            kept.code(number),
            "if it is of no use any more; next time end the cell's last line with a semicolon",
        )


def _shares(look: Look, graphs: Graphs, value: object) -> dict[StorageKey, int]:
    """Return the storages that live only as long as an output does."""
    walked = Names()
    walked.walk([("_", value)], look.heap.size)
    arrays = [one.array for one in walked.arrays.values() if not look.has_name(one.array)]
    allowed = walked.objects() | look.scope.outputs.keepers | {id(value)}
    inside = {id(item) for item in arrays if all(id(holder) in allowed for holder in look.referrers(item))}
    walked.drop()
    shares: dict[StorageKey, int] = {}
    for item in arrays:
        key = look.key(item)
        if key is not None and look.dies(key, inside):
            if not graphs.saves(key):
                shares[key] = look.sizes[key]
            if look.read("grad_fn", item) is not None:
                shares.update(graphs.freed_with(graphs.holder(item)))
    return shares
