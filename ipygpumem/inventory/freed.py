"""Computes what deleting each of many names would free, in one look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ipygpumem.heap.heap import undisturbed
from ipygpumem.heap.region import Region
from ipygpumem.inventory.top import LargestNames


def with_freed(
    found: LargestNames, named: Mapping[str, object], references: Mapping[int, int], namespaces: Iterable[int]
) -> LargestNames:
    """Return the names with the bytes that die with each object if all of its names are deleted.

    Args:
        found: the names.
        named: the only mapping of our callers that refers to the objects.
        references: number of references to each object, by identity, that end with its names.
        namespaces: identities of dicts that contain the names.
    """
    with undisturbed():
        roots = [named[row.name] for row in found.names]
        region = Region(roots, namespaces=[*namespaces, id(named)])
        keys = list(map(id, roots))
        ours = Counter(map(id, named.values()))
        ours.update(keys)
        ours.update({key: references.get(key, 0) for key in keys})
        freed = region.freed_by(keys, ours) if region.complete else None
    if freed is None:
        return found
    rows = []
    for row, size in zip(found.names, freed, strict=True):
        if row.is_at_least:  # what is freed may be a higher bound
            row = row._replace(device_bytes=dict(Counter(row.device_bytes) | size))
        rows.append(row._replace(freed_bytes=dict(size)))
    return replace(found, names=tuple(sorted(rows, key=lambda row: -row.size_bytes)))
