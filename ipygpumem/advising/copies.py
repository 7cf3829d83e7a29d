"""Advice on memory that is there twice, or only because a small part of it is in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipygpumem.advising.contents import are_equal, beginning
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import Spot
from ipygpumem.advising.records import Finding
from ipygpumem.advising.rewriting import rewritings
from ipygpumem.objects.arrays import StorageKey, library_type

_SMALL = 0.5
"""A view of more than this share of its base saves too little."""


def views(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield tensors and arrays that are a small part of the memory that they keep alive."""
    for kind, operation in (
        (library_type("torch", "Tensor"), ".clone()"),
        (library_type("numpy", "ndarray"), ".copy()"),
    ):
        if kind is None:
            continue
        wanted = [(item, place) for item, place in look.spots(kind) if _is_small_view(look, item, kind)]
        for one in rewritings(look, wanted, operation):
            dropped = set(map(id, one.only))
            keys = {key for key in map(look.key, one.only) if key}
            shares = {k: look.sizes[k] for k in keys if look.dies(k, dropped) and not graphs.saves(k)}
            for item in one.items:
                key = look.key(item)
                if key in shares:
                    shares[key] -= own_bytes(look, item)
            what = f"{one.place} is a view" if len(one.items) == 1 else f"{len(one.items):,} views in {one.place}"
            whole = "keeps its whole base" if len(one.items) == 1 else "keep their whole bases"
            condition = "if nothing is to be written through it into the base; next time keep a copy of the part alone"
            yield from look.by_device("view of a large base", shares, f"{what} that {whole} alive", one.code, condition)


def own_bytes(look: Look, item: Any) -> int:
    """Return what the elements of a tensor or array take by themselves."""
    kind: Any = library_type("numpy", "ndarray")
    if type(item) is kind:
        return int(item.nbytes)
    return int(look.read("nbytes", item) or 0)


def _is_small_view(look: Look, item: Any, kind: type) -> bool:
    key = look.key(item)
    if key is None or look.read("requires_grad", item):
        return False
    return own_bytes(look, item) <= _SMALL * look.sizes[key]


def duplicates(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield tensors and arrays that have the content of another."""
    for kind in (library_type("torch", "Tensor"), library_type("numpy", "ndarray")):
        alike: dict[object, list[tuple[Any, Spot]]] = {}
        for item, place in look.spots(kind) if kind is not None else ():
            key = look.key(item)
            if key is None or look.sizes[key] < look.least or look.read("requires_grad", item):
                continue
            if own_bytes(look, item) == look.sizes[key]:
                looks = (tuple(item.shape), str(item.dtype), look.devices[key], beginning(item))
                alike.setdefault(looks, []).append((item, place))
        for several in alike.values():
            yield from _equal(look, graphs, several)


def _equal(look: Look, graphs: Graphs, several: list[tuple[Any, Spot]]) -> Iterator[Finding]:
    """Yield those of tensors that look alike which equal another that stays."""
    goes = {
        id(item)
        for item, place in several
        if place.takes and look.is_only_at(item, place) and _goes(look, graphs, look.key(item), {id(item)})
    }
    kept = [one for one in several if id(one[0]) not in goes]
    for item, place in several:
        key = look.key(item)
        if id(item) not in goes:
            continue
        same = [other for other in kept if look.key(other[0]) != key]
        twin = next((where for other, where in same if are_equal(look, other, item)), None)
        if twin is None or key is None:
            kept.append((item, place))
            continue
        yield from look.by_device(
            "duplicate",
            {key: look.sizes[key]},
            f"{place.code} has the same content as {twin.code}",
            f"{place.code} = {twin.code}",
            "if neither is to be changed in place: from then on both names stand for one tensor or array",
        )


def _goes(look: Look, graphs: Graphs, key: StorageKey | None, dropped: set[int]) -> bool:
    return key is not None and look.dies(key, dropped) and not graphs.saves(key)
