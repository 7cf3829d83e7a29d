"""Finds the objects that die when a line of a report is run.

``del box["top"]`` removes one reference. The objects that die with it are those to which only this
reference leads. ``older_data.py`` and ``other_data.py`` look among them for data that is not the
memory of the line's row.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import _lru_cache_wrapper
from itertools import compress
from typing import NamedTuple

from ipygpumem.heap.arrays import holding_objects, is_array, library_type
from ipygpumem.heap.bulk import by_identity, instances_among
from ipygpumem.heap.graph import NodeKey
from ipygpumem.heap.knowledge.frames import SUSPENDED
from ipygpumem.heap.parts import cached
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.statements import outermost
from ipygpumem.heap.region import Region
from ipygpumem.introspect import is_exactly
from ipygpumem.inventory.held_rows import HeldRow


class ObjectsOfLine(NamedTuple):
    """The objects that lose a reference when a line runs."""

    objects: list[object]
    """The objects, once for each reference."""
    certain: set[int]
    """The identities of the objects to which the line itself removes references, not a call."""

    @classmethod
    def of(cls, cuts: Sequence[Cut], removed_objects: Mapping[int, object]) -> ObjectsOfLine:
        """Return the objects at the end of a line's references.

        Args:
            cuts: the references.
            removed_objects: the objects at the end of all lines' references, by identity.
        """
        of_line = cls([], set())
        # The line does not close a generator that it deletes with a tuple around it.
        for reference in outermost(cuts):
            if reference.removed_id in removed_objects:
                of_line.objects.append(removed_objects[reference.removed_id])
                of_line.certain.add(reference.removed_id)
            else:
                of_line.objects.extend(_targets_of_call(reference, removed_objects))
        return of_line

    @classmethod
    def joined(cls, of_lines: Iterable[ObjectsOfLine]) -> ObjectsOfLine:
        """Return the objects of several lines."""
        together = cls([], set())
        for of_line in of_lines:
            together.objects.extend(of_line.objects)
            together.certain.update(of_line.certain)
        return together


def nodes_dropped(
    region: Region, of_line: ObjectsOfLine, ours: Mapping[int, int], ended: Set[int]
) -> set[NodeKey]:
    """Return the nodes that die with the objects that a line removes.

    Args:
        region: what these objects lead to.
        of_line: the objects.
        ours: the references that do not count, as in ``held_from_outside``.
        ended: the arrays in the cycles that the line ends, by identity.
    """
    held_before = region.held_from_outside(ours)
    ours_and_removed = Counter(ours)
    ours_and_removed.update(map(id, of_line.objects))
    held_after = region.held_from_outside(ours_and_removed)
    held_after |= region.in_hidden_cycles() - ended
    # A holder that is read, too, because a child refers to its parent, leads to what it loses.
    lost = of_line.certain - held_before
    alive = region.reach(held_after, without=lost)
    return region.reach(map(id, of_line.objects)) - alive


def arrays_among(items: Sequence[object]) -> list[object]:
    """Return the tensors and NumPy arrays among the items."""
    array_type, tensor_type = library_type("numpy", "ndarray"), library_type("torch", "Tensor")
    bases = [kind for kind in (array_type, tensor_type) if kind is not None]
    return instances_among(items, *bases)


def plain_arrays(items: Sequence[object]) -> set[int]:
    """Return the identities of the tensors and the arrays without objects."""
    arrays = by_identity(arrays_among(items))
    of_numpy = list(filter(is_array, arrays.values()))
    of_objects = compress(of_numpy, holding_objects(of_numpy))
    return arrays.keys() - set(map(id, of_objects))


def have_references(items: Sequence[object]) -> bool:
    """Return True if one of the items may have references: it is no array, or one of objects."""
    return len(plain_arrays(items)) < len(by_identity(items))


def _targets_of_call(cut: Cut, removed_objects: Mapping[int, object]) -> Sequence[object]:
    """Return the objects that lose a reference when a call ends their owner."""
    owner = removed_objects.get(cut.owner_id) if cut.kind is Kind.CALL else None
    if is_exactly(owner, *SUSPENDED):
        return gc.get_referents(owner)
    if type(owner) is _lru_cache_wrapper:
        return cached(owner)
    return []


def with_remarks(rows: Iterable[HeldRow], remarks: Mapping[str, str]) -> list[HeldRow]:
    """Return the rows with the remark on each one's line, by the line."""
    return [row.with_comment(remarks.get(row.line, "")) for row in rows]
