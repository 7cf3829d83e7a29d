"""Computes the memory that deleting a name would free, and the lines that free the rest of its
object's memory.

After ``runs = [model.layer]``, ``del model`` frees nothing of the layer: this takes
``del runs[0]``, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ipygpumem.heap.knowledge.barriers import is_never_followed
from ipygpumem.heap.live.heap import undisturbed
from ipygpumem.heap.paths.cuts import WITH_POSITIONS, Cut
from ipygpumem.heap.paths.remedies import MORE_THERE, Holder, Remedy
from ipygpumem.heap.paths.roots import RemovedByLines, Roots
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.introspect import type_name
from ipygpumem.inventory.names.other_holders import (
    LEAST_BYTES,
    LEAST_SHARE,
    SMALL,
    OtherHolders,
    OwnedObject,
    other_holders_of,
)
from ipygpumem.inventory.names.top import notes_on
from ipygpumem.inventory.rows.other_data import OtherData
from ipygpumem.records import Record, ReferencePath

_LEAST_DROPPED_BYTES = 1 << 16
"""Minimum bytes of other data that a line drops to mention."""
_PARTS_SHOWN = 5
"""Number of the object's largest parts in a report."""
_ALL_LINES = "all lines"
"""Stands for the lines of all holders together where lines are keys."""


@dataclass(frozen=True)
class HeldPart(Record):
    """Memory behind a name that another holder keeps alive, too."""

    holder: ReferencePath
    """The holder of the largest object; ``advice`` is the line that frees it."""
    objects: int
    """Number of objects to which it refers; they lead to the rest."""
    device_bytes: dict[str, int]
    """Bytes by device that no earlier part counts."""
    is_shared: bool = False
    """True if an earlier part counts memory that this holder keeps alive too."""
    shared_bytes: int = 0
    """Bytes of such memory on all devices."""

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())

    def keeps_much_of(self, size_bytes: int) -> bool:
        """Return True if the holder keeps more than a small part of an object of ``size_bytes``
        alive. Then the line for all holders must contain this one's.
        """
        return self.size_bytes + self.shared_bytes >= LEAST_SHARE * size_bytes

    @property
    def has_further_references(self) -> bool:
        """True if the holder has references that its line does not remove."""
        deletes_variables = bool(Remedy.of_text(self.holder.advice).deleted_names)
        return self.holder.path.endswith(MORE_THERE) and not deletes_variables


@dataclass(frozen=True)
class Ownership(Record):
    """The memory behind an object: the part that deleting its name frees, and the parts of other
    holders.
    """

    name: str
    """The name or expression."""
    is_name: bool
    """True if a name refers to the object; it does not count as a holder."""
    type_name: str
    device_bytes: dict[str, int]
    """Bytes by device that the object leads to."""
    freed_bytes: dict[str, int]
    """Bytes by device that deleting the name frees; of an expression, those that nothing else
    holds.
    """
    parts: tuple[tuple[str, int], ...]
    """The largest parts of the object with their bytes."""
    held: tuple[HeldPart, ...] = ()
    """Other holders, the largest first."""
    complete: bool = True
    """False if there were too many objects to follow all; then ``freed_bytes`` is empty."""
    followed: bool = True
    """False for a module, class, frame or part of IPython: its content is not counted."""
    notes: tuple[str, ...] = ()
    """Notes on the size, such as the libraries that keep memory which is not counted."""
    is_at_least: bool = False
    """True if the bytes are lower bounds."""
    has_graph: bool = False
    """True if an autograd graph is a part of it: graphs of other tensors may share its nodes, which
    are no Python objects.
    """
    in_graphs_bytes: int = 0
    """Bytes that are freed with it, and to which it leads through autograd graphs alone: these keep
    them for ``backward()``.
    """
    remark: str = ""
    """The other data that is dropped if the lines of all holders are run; empty if there is none.
    """
    outputs: tuple[str, ...] = ()
    """IPython's names of the outputs that are the object itself: ``%xdel`` of any of its names
    deletes all of them.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())

    @property
    def is_small(self) -> bool:
        """True if it is too small for advice, and no holder of it is named."""
        if self.size_bytes >= LEAST_BYTES:
            return False
        return all(part.holder == SMALL.record() for part in self.held)


def ownership_of(
    name: str, holding: list[object], roots: Roots, references: int, *, is_name: bool
) -> Ownership:
    """Return the memory behind an object: the part that only its name keeps alive, and the parts
    that other holders keep.

    Args:
        name: the name of the object, or the expression for it.
        holding: a list of the object alone: the only reference to it that our callers hold.
        roots: the names and objects from which the user can reach objects.
        references: number of references to the object that do not count: of the list, and of the
            name.
        is_name: True if the name does not count as a holder.
    """
    # A record of its own: only the objects that the lines of this report remove.
    roots = replace(roots, lines=replace(roots.lines, removed=RemovedByLines()))
    with undisturbed():
        # 1. Everything to which the object leads.
        region = Region(namespaces=roots.namespaces, keeps_folded=True)
        size = Sizes(region=region).measure(holding[0])
        owned = OwnedObject(name, is_name, holding, region)
        reached = owned.reached()
        # 2. The parts that other holders keep. All else is freed with the name.
        other_holders = other_holders_of(owned, references, reached, roots)
        parts = _parts_by_holder(region, other_holders)
        freed = reached - parts.counted
        freed_bytes = region.bytes_of(freed)
        # 3. The lines that free these parts.
        parts_by_holder = _in_order_of_lines(parts.with_memory())
        device_bytes = Counter(freed_bytes)
        for part in parts_by_holder.values():
            device_bytes += Counter(part.device_bytes)
        advised = _with_remarks(parts_by_holder, device_bytes.total(), roots, holding)
    shown_parts = [(part.name, part.size_bytes) for part in size.parts[:_PARTS_SHOWN]]
    return Ownership(
        name=name,
        is_name=is_name,
        type_name=type_name(holding[0]),
        device_bytes=dict(device_bytes),
        freed_bytes=dict(freed_bytes) if region.complete else {},
        parts=tuple(shown_parts),
        held=advised.parts,
        complete=region.complete,
        followed=not is_never_followed(holding[0]),
        notes=notes_on(holding[0], size),
        is_at_least=size.is_at_least,
        has_graph=region.graph.has_autograd,
        in_graphs_bytes=_bytes_in_graphs(owned, freed),
        remark=advised.remark_on_all,
    )


def _bytes_in_graphs(owned: OwnedObject, freed: Set[NodeKey]) -> int:
    """Return the bytes that are freed with an object, and to which it leads only through autograd
    graphs: ``detach()`` would free them.
    """
    region = owned.region
    if not region.graph.has_autograd:
        return 0
    without_graphs = region.reach([id(owned.holding[0])], region.nodes_of_graphs())
    return region.bytes_of(freed - without_graphs).total()


def _parts_by_holder(region: Region, other_holders: OtherHolders) -> _PartsByHolder:
    """Return the memory that each holder keeps alive, and that of nodes without a known holder."""
    parts = _PartsByHolder(region)
    with_holder = set[NodeKey]()
    for holder, keys in other_holders.groups.items():
        parts.add(holder, keys)
        with_holder |= keys
    parts.add_without_holder(other_holders.held_outside - with_holder)
    return parts


class _AdvisedParts(NamedTuple):
    """The parts of an object's memory that its other holders keep, each with the line that frees
    it.
    """

    parts: tuple[HeldPart, ...]
    remark_on_all: str
    """The other data that all lines together drop; empty if there is none."""


def _with_remarks(
    parts: Mapping[Holder, HeldPart], size_bytes: int, roots: Roots, holding: Sequence[object]
) -> _AdvisedParts:
    """Return the parts with a remark on each line that drops other data, such as the other items of
    a tuple; and the remark on all lines together, which may drop data that several containers
    share.

    The lines of small parts do not count among "all lines".

    Args:
        parts: the parts by their holders.
        size_bytes: bytes of the object.
        roots: ``roots.lines.removed`` has the objects that the lines remove.
        holding: a list of the object itself, of which a line may remove a name.
    """
    other_data = _other_data(_cuts_by_line(parts, size_bytes), roots, holding)
    remarks = other_data.remarks(_LEAST_DROPPED_BYTES, {}, is_certain=True)
    remarked = list[HeldPart]()
    for holder, part in parts.items():
        remedy = holder.remedy.with_comment(remarks.get(holder.remedy.line, ""))
        record = replace(holder, remedy=remedy).record(roots.names)
        remarked.append(replace(part, holder=record))
    return _AdvisedParts(tuple(remarked), remarks.get(_ALL_LINES, ""))


def _other_data(
    cuts: Mapping[str, Sequence[Cut]], roots: Roots, holding: Sequence[object]
) -> OtherData:
    """Return the search for other data that lines drop. Of our objects, only this search refers to
    the objects that the lines remove: further references, from ``roots`` or from a variable, would
    count as holders.

    Args:
        cuts: the references that each line removes.
        roots: ``roots.lines.removed`` has the objects that the lines remove.
        holding: a list of the object itself. Its name holds what dies with it, so no line drops
            that as other data.
    """
    removed_objects = dict(roots.lines.removed.objects)
    removed_objects.pop(id(holding[0]), None)
    roots.lines.removed.objects.clear()
    return OtherData(dict.fromkeys(cuts, 0), cuts, removed_objects, roots.namespaces)


def _cuts_by_line(parts: Mapping[Holder, HeldPart], size_bytes: int) -> dict[str, Sequence[Cut]]:
    """Return the references that each line removes, by line; and by ``_ALL_LINES`` those that all
    lines remove which free much of an object.

    Args:
        parts: the parts by their holders.
        size_bytes: bytes of the object.
    """
    cuts = dict[str, Sequence[Cut]]()
    lines_of_large_parts = set[str]()
    for holder, part in parts.items():
        line = holder.remedy.line
        cuts[line] = holder.remedy.removed or cuts.get(line, ())
        if part.keeps_much_of(size_bytes):
            lines_of_large_parts.add(line)
    cuts_of_large_parts = [cuts[line] for line in cuts if line in lines_of_large_parts]
    cuts[_ALL_LINES] = list(chain.from_iterable(cuts_of_large_parts))
    return cuts


def _in_order_of_lines(parts: Mapping[Holder, HeldPart]) -> dict[Holder, HeldPart]:
    """Return the parts in the order in which their lines can be run: the largest first. But of
    parts whose lines delete items of one list, the last item comes first, because the line of an
    earlier item would move it.
    """
    holders = sorted(parts, key=lambda holder: parts[holder].size_bytes, reverse=True)
    positions_by_list = dict[int, list[int]]()
    """The positions in ``holders`` of those whose lines delete items of the same list."""
    index_deleted_by = dict[int, int]()
    """The index in its list of the item that the line of the holder at a position deletes."""
    for position, holder in enumerate(holders):
        for cut in holder.remedy.removed:
            if cut.kind in WITH_POSITIONS and position not in index_deleted_by:
                positions_by_list.setdefault(cut.owner_id, []).append(position)
                index_deleted_by[position] = cut.position
    # Those of one list exchange their positions, and the remaining ones stay where they are.
    ordered = list(holders)
    for positions in positions_by_list.values():
        last_item_first = sorted(positions, key=index_deleted_by.__getitem__, reverse=True)
        for position, position_before in zip(positions, last_item_first, strict=True):
            ordered[position] = holders[position_before]
    return {holder: parts[holder] for holder in ordered}


class _CountedBytes(NamedTuple):
    """The bytes behind some nodes."""

    added: Counter[str]
    """Bytes by device that no earlier part has."""
    shared_bytes: int
    """Bytes that earlier parts have, too."""


class _PartsByHolder:
    """Collects the memory that each holder keeps alive. Memory that several holders keep counts for
    the first of them.

    Attributes:
        counted: the nodes of all parts so far.
    """

    def __init__(self, region: Region) -> None:
        self.counted = set[NodeKey]()
        self._region = region
        self._by_holder: dict[Holder, HeldPart] = {}

    def add(self, holder: Holder, keys: Collection[NodeKey]) -> None:
        """Add the memory behind the nodes to which a holder refers. If it is little, it counts as
        that of small objects.
        """
        added, shared_bytes = self._count(keys)
        is_shared = shared_bytes >= LEAST_BYTES
        if added.total() >= LEAST_BYTES or is_shared:
            part = HeldPart(holder.record(), len(keys), dict(added), is_shared, shared_bytes)
            self._join(holder, part)
        else:  # a number that the whole process shares is no reason to name its holder
            self._join_small(keys, added)

    def add_without_holder(self, keys: Collection[NodeKey]) -> None:
        """Add the memory behind nodes whose holders were not searched."""
        added, _ = self._count(keys)
        if added.total() < LEAST_BYTES:
            added.clear()  # constants, such as names of attributes
        self._join_small(keys, added)

    def with_memory(self) -> dict[Holder, HeldPart]:
        """Return the parts by their holders, without those that have no memory and share none with
        an earlier part.
        """
        parts = dict[Holder, HeldPart]()
        for holder, part in self._by_holder.items():
            if part.size_bytes or part.is_shared:
                parts[holder] = part
        return parts

    def _count(self, keys: Collection[NodeKey]) -> _CountedBytes:
        """Count the memory behind nodes: from now on, it is that of an earlier part."""
        reached = self._region.reach(keys)
        shared_bytes = self._region.bytes_of(reached & self.counted).total()
        added = self._region.bytes_of(reached - self.counted)
        self.counted |= reached
        return _CountedBytes(added, shared_bytes)

    def _join_small(self, keys: Collection[NodeKey], added: Counter[str]) -> None:
        """Add memory to the part of small objects, which has no holder of its own."""
        self._join(SMALL, HeldPart(SMALL.record(), len(keys), dict(added)))

    def _join(self, holder: Holder, part: HeldPart) -> None:
        """Add a part to that of the same holder, if there is one."""
        earlier = self._by_holder.get(holder)
        if earlier is not None:
            total = Counter(earlier.device_bytes)
            total.update(part.device_bytes)
            objects = earlier.objects + part.objects
            part = replace(part, objects=objects, device_bytes=dict(total))
        self._by_holder[holder] = part
