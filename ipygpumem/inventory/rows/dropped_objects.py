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
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity, instances_among
from ipygpumem.heap.kinds.arrays import is_array, library_type, object_arrays
from ipygpumem.heap.knowledge.frames import SUSPENDED
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.statements import outermost
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.walks.parts import cached
from ipygpumem.introspect import is_exactly
from ipygpumem.inventory.rows.held_rows import HeldRow


class RemovedObjects(NamedTuple):
    """The objects to which a line removes references. They die if nothing else refers to them."""

    objects: list[object]
    """The objects, once for each reference."""
    certain: set[int]
    """The identities of the objects to which the line itself removes a reference. A call, such as
    ``rows.close()`` of a generator, may end further ones.
    """

    @classmethod
    def of(cls, cuts: Sequence[Cut], removed_objects: Mapping[int, object]) -> RemovedObjects:
        """Return the objects at the end of the references that a line removes.

        Args:
            cuts: the references.
            removed_objects: the objects at the end of all lines' references, by identity.
        """
        removed = cls([], set())
        # ``del pair`` deletes a generator in a tuple with the tuple, and does not close it: so only
        # the outermost references count.
        for reference in outermost(cuts):
            if reference.removed_id in removed_objects:
                removed.objects.append(removed_objects[reference.removed_id])
                removed.certain.add(reference.removed_id)
            else:
                removed.objects.extend(_targets_of_call(reference, removed_objects))
        return removed

    @classmethod
    def joined(cls, by_lines: Iterable[RemovedObjects]) -> RemovedObjects:
        """Return the objects to which several lines remove references."""
        together = cls([], set())
        for removed in by_lines:
            together.objects.extend(removed.objects)
            together.certain.update(removed.certain)
        return together


def nodes_dropped(
    region: Region,
    removed: RemovedObjects,
    own_references: Mapping[int, int],
    in_ended_cycles: Set[int],
) -> set[NodeKey]:
    """Return the nodes that die when a line is run.

    Args:
        region: everything to which the removed objects lead.
        removed: the objects to which the line removes references.
        own_references: the number of our references to objects, by identity, which do not count.
        in_ended_cycles: the arrays in the cycles that the line ends, by identity.
    """
    held_before = region.held_from_outside(own_references)
    # Afterwards, the references that the line removes do not count either.
    own_and_removed = Counter(own_references)
    own_and_removed.update(map(id, removed.objects))
    held_after = region.held_from_outside(own_and_removed)
    held_after |= region.in_hidden_cycles() - in_ended_cycles
    # The region may have read the container that loses an object, if the object refers back to it,
    # as a child does to its parent. That container stays, and no longer leads to the object.
    lost = removed.certain - held_before
    alive = region.reach(held_after, without=lost)
    return region.reach(map(id, removed.objects)) - alive


def arrays_among(items: Sequence[object]) -> list[object]:
    """Return the tensors and NumPy arrays among the items."""
    array_type, tensor_type = library_type("numpy", "ndarray"), library_type("torch", "Tensor")
    bases = [kind for kind in (array_type, tensor_type) if kind is not None]
    return instances_among(items, *bases)


def plain_arrays(items: Sequence[object]) -> set[int]:
    """Return the identities of the arrays among the items behind which nothing else is: tensors,
    and arrays that are not of Python objects.
    """
    arrays = by_identity(arrays_among(items))
    of_numpy = list(filter(is_array, arrays.values()))
    with_objects = object_arrays(of_numpy)
    return arrays.keys() - set(map(id, with_objects))


def have_references(items: Sequence[object]) -> bool:
    """Return True if other objects may be behind the items: they are not all plain arrays."""
    return len(plain_arrays(items)) < len(by_identity(items))


def _targets_of_call(cut: Cut, removed_objects: Mapping[int, object]) -> Sequence[object]:
    """Return the objects that lose a reference when a call ends their owner: the variables of a
    generator that ``rows.close()`` ends, or the results of a cache that ``load.cache_clear()``
    empties.

    Args:
        cut: the reference that the call removes.
        removed_objects: the objects at the end of all lines' references, and their owners, by
            identity.
    """
    owner = removed_objects.get(cut.owner_id) if cut.kind is Kind.CALL else None
    if is_exactly(owner, *SUSPENDED):
        return gc.get_referents(owner)
    if type(owner) is _lru_cache_wrapper:
        return cached(owner)
    return []


def with_remarks(rows: Iterable[HeldRow], remarks: Mapping[str, str]) -> list[HeldRow]:
    """Return the rows, with the remark on its line added to each.

    Args:
        rows: the rows.
        remarks: the remarks by line; lines without a remark are missing.
    """
    return [row.with_comment(remarks.get(row.line, "")) for row in rows]
