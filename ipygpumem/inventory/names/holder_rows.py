"""Sorts the holders of many objects into rows, each with the line that frees its objects.

After ``runs = [model.fc1, model.fc2]`` and ``app.head = model.head``, ``%gpumem why model`` has two
rows: the list with two objects, and ``app.head`` with one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import by_identity, container_base
from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.chains import FoundChain, HolderChains
from ipygpumem.heap.holders.removal import HolderWays
from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.kinds.libraries import is_segment
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.paths.container_steps import cuts_of_repeated
from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import Rank, Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.heap.paths.ways import Way, joined
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.introspect import instance_dict, is_exactly, is_instance, is_users_class, module_of

_MOST_ALIASES = 4
"""Maximum number of names in a row."""
_MOST_ROWS = 4
"""Maximum number of rows of one root."""
_MOST_APART = 40
"""Maximum number of objects in one container whose lines are written one by one."""
Groups = dict[Holder, set[NodeKey]]
"""The nodes that each holder keeps alive."""


@dataclass
class _ItemsInContainer:
    """A container or object that refers to some of a row's objects: the list ``runs`` to two
    layers.

    Attributes:
        chain: the objects from the root to it.
        items: the objects by identity: a view and its array are one node.
    """

    chain: Sequence[object]
    items: dict[int, object] = field(default_factory=dict)


@dataclass
class _RowOfRoot:
    """The objects that one root holds, and the holder to name for one of them or for all.

    Attributes:
        root: the name, module or thread at which the paths to the objects begin.
        of_single: the holder with the line that frees one object.
        of_many: the holder with the line that frees several objects.
        further_references: number of references of the same root to one object for which there was
            no further row.
        is_whole: True if the line of ``of_many`` frees all to which the root leads.
        keys: the nodes of the objects.
        containers: those in which the root holds the objects, with these objects, by the identity
            of the container.
        has_unwritten: True if it holds them in more containers than these.
    """

    root: Root
    of_single: Holder
    of_many: Holder
    further_references: int
    is_whole: bool
    keys: set[NodeKey] = field(default_factory=set)
    containers: dict[int, _ItemsInContainer] = field(default_factory=dict)
    has_unwritten: bool = False

    def add(self, key: NodeKey, steps: Sequence[object]) -> None:
        """Add an object. The steps are the objects from the root's to this one, which is the
        last.
        """
        self.keys.add(key)
        if len(steps) > 1:
            in_container = self.containers.setdefault(id(steps[-2]), _ItemsInContainer(steps[:-1]))
            in_container.items[id(steps[-1])] = steps[-1]

    def add_further(self, key: NodeKey, found_chain: FoundChain) -> None:
        """Add an object in further items of its holder: ``runs[4]``, if ``runs[1]``
        is the same object.
        """
        _, *further_steps = found_chain.steps_through_items()
        for steps in further_steps:
            self.add(key, steps)
        if found_chain.many_items:
            self.has_unwritten = True

    def chains(self) -> list[Sequence[object]]:
        """Return the objects from the root to each container."""
        return [in_container.chain for in_container in self.containers.values()]

    def holder(self, cuts_of_all: Sequence[Cut]) -> Holder:
        """Return the holder of the row's objects, with the line that removes all of them.

        Args:
            cuts_of_all: the references to all objects; none if the advice for several is meant.
        """
        holder = self.of_many
        if len(self.keys) == 1:
            holder = self.of_single
        else:
            line = statement_of(cuts_of_all)
            if line:
                holder = replace(holder, remedy=Remedy(line, cuts=tuple(cuts_of_all)))
            elif not self.is_whole:
                holder = replace(holder, remedy=REMOVE_THEM)
        if self.further_references == 0:
            return holder
        return holder.with_more(f"{self.further_references:,}")


@dataclass(frozen=True)
class _Deletion:
    """A line such as ``del runs`` that deletes the object around those of a row.

    Attributes:
        position: the row's position among all rows.
        row: the row.
        item: the object whose variables it deletes.
        on_the_way: this object and those in it that lead to the row's objects: if one of them has
            further holders, it keeps the row's objects alive.
    """

    position: int
    row: _RowOfRoot
    item: object
    on_the_way: Sequence[object]


class _OtherWays(NamedTuple):
    """The ways from other holders to the objects that a line is to free."""

    ways: list[Way]
    number_unwritten: int
    """Number of further ways, which are too many to write."""


class _HoldersOfWay(NamedTuple):
    """The holder at the end of a way: ``box["x"]``."""

    of_single: Holder
    """With the line that frees one object: ``del box["x"]``."""
    of_many: Holder
    """With the line that frees several objects: ``del box``."""


class HolderRows:
    """The rows of holders. Each root has one row, or more if it leads to the same object in several
    ways.

    Args:
        search: has searched for all holders of the objects.
        roots: the names and objects from which the user can reach objects.
        not_searched: identities of objects whose holders were not searched; a container that holds
            a searched one may hold some of them.
        is_name: True if the lines are for a name's object, False for that of an expression.

    Attributes:
        without_holder: nodes of which no holder is known.
    """

    def __init__(
        self,
        search: BackwardSearch,
        roots: Roots,
        not_searched: Sequence[int],
        *,
        is_name: bool,
    ) -> None:
        self._removed_objects = roots.lines.removed.objects
        self.without_holder = set[NodeKey](not_searched)
        self._search = search
        self._chains = HolderChains(search)
        self._writer = PathWriter(roots)
        self._is_name = is_name
        self._by_root: dict[str, list[_RowOfRoot]] = {}
        self._references = ReferenceReader(Barriers())
        self._with_neighbours: set[int] = set()
        """Containers whose items have been added, by identity."""
        self._asked: set[int] = set()
        """Identities of the objects whose holders are asked for."""
        self._items_by_deletion: dict[str, object] = {}
        """Objects around the objects asked for, by the line that deletes all variables of each."""

    def add(self, key: NodeKey, items: Sequence[object]) -> None:
        """Add the holders of a node.

        Args:
            key: the node.
            items: its object, and other objects that show its memory.
        """
        self._asked.update(map(id, items))
        chains = self._chains.chains_to(items) or self._unnamed_chain(items)
        if not chains and (type(key) is int or self._search.is_limited):
            # An object to which nothing visible refers, such as an array in a tensor, belongs to
            # its partner here.
            self.without_holder.add(key)
        for found_chain in chains:
            for steps, references in _steps_through_each_attribute(found_chain):
                row = self._row_for(key, found_chain.roots, steps, references)
                if row is not None:
                    row.add(key, steps)
                    if references > 1:
                        row.add_further(key, found_chain)
                    self._add_neighbours(row, steps)

    def _unnamed_chain(self, items: Sequence[object]) -> list[FoundChain]:
        """Return a chain, in a list, from an object to which nothing visible refers: only C code
        keeps it. Return nothing if there is no such chain.
        """
        for item in items:
            chain_down = self._search.graph.chain(item, self._search.ways_from_unheld)
            if chain_down is not None:
                root, steps = chain_down
                return [FoundChain([root], steps, number_of_references=1)]
        return []

    def groups(self) -> dict[Holder, set[NodeKey]]:
        """Return the nodes by the holder that keeps them alive. Variables come first, because their
        lines are the simplest.
        """
        rows = sorted(chain.from_iterable(self._by_root.values()), key=_is_no_variable)
        holders = list[Holder]()
        for row in rows:
            cuts = list[Cut]()
            # An expression names a part, whose holder has other data.
            if len(row.keys) > 1 and not (row.is_whole and self._is_name):
                cuts = self._cuts_of(row)
            holders.append(row.holder(cuts))
        groups = Groups()
        for row, holder in zip(rows, self._with_other_holders(rows, holders), strict=True):
            groups.setdefault(holder, set()).update(row.keys)
        return groups

    def _with_other_holders(
        self, rows: Sequence[_RowOfRoot], holders: Sequence[Holder]
    ) -> list[Holder]:
        """Return the holders of rows. If a line deletes an object that has further holders, its row
        names these, too, and the line removes the object from all of them.

        ``del df`` alone frees no column of the frame if ``app.df`` is the frame, too.
        """
        complete = list(holders)
        deletions = self._deletions(rows, holders)
        if not deletions:
            return complete
        on_the_way = chain.from_iterable(deletion.on_the_way for deletion in deletions)
        self._search.search_for_all(list(by_identity(list(on_the_way)).values()))
        emptied = self._emptied_instead(deletions)
        for position, holder in emptied.items():
            complete[position] = holder
        deletions = [deletion for deletion in deletions if deletion.position not in emptied]
        for deletion in deletions:
            other = self._other_ways(deletion, deletions)
            if other.ways:
                of_deletion = Way(holders[deletion.position])
                all_ways = joined([of_deletion, *other.ways], other.number_unwritten)
                complete[deletion.position] = all_ways.holder
        return complete

    def _emptied_instead(self, deletions: Sequence[_Deletion]) -> dict[int, Holder]:
        """Return the holders of the rows whose line takes the objects out of a container, because
        deleting the container would not free them: it has other holders. They are by the position
        of the row.

        Such a container stays, so it may be a further holder of an object that another line
        deletes: then that line is examined again.
        """
        remaining = list(deletions)
        emptied = dict[int, Holder]()
        has_changed = True
        while has_changed:
            has_changed = False
            for deletion in list(remaining):
                other = self._other_ways(deletion, remaining)
                if not other.ways or not _is_container(deletion.item):
                    continue
                cuts = self._cuts_of(deletion.row)
                line = statement_of(cuts)
                if line:
                    remedy = Remedy(line, cuts=tuple(cuts))
                    emptied[deletion.position] = replace(deletion.row.of_many, remedy=remedy)
                    remaining.remove(deletion)
                    has_changed = True
        return emptied

    def _deletions(self, rows: Sequence[_RowOfRoot], holders: Sequence[Holder]) -> list[_Deletion]:
        """Return the deletions among the lines of rows: those that delete an object around the
        objects that were asked for.
        """
        deletions = list[_Deletion]()
        for position, (row, holder) in enumerate(zip(rows, holders, strict=True)):
            item = self._items_by_deletion.get(holder.remedy.line)
            if item is None or id(item) in self._asked:
                continue  # objects that were asked for have rows of their own
            on_the_way = by_identity(list(chain.from_iterable(row.chains())))
            for key in on_the_way.keys() & self._asked:
                del on_the_way[key]
            on_the_way[id(item)] = item
            deletions.append(_Deletion(position, row, item, list(on_the_way.values())))
        return deletions

    def _other_ways(self, deletion: _Deletion, deletions: Sequence[_Deletion]) -> _OtherWays:
        """Return the ways from other holders to the objects of a deletion.

        The variables that it deletes are no other holders, nor are objects that a deletion deletes.

        Args:
            deletion: the deletion.
            deletions: all deletions.
        """
        deleted_ids = {id(each.item) for each in deletions}
        ways = list[Way]()
        number_unwritten = 0
        for item in deletion.on_the_way:
            for found_chain in self._chains.chains_to([item]):
                steps = found_chain.steps
                is_of_variable = len(steps) == 1
                if is_of_variable or not deleted_ids.isdisjoint(map(id, steps[:-1])):
                    continue
                if len(ways) >= _MOST_APART or found_chain.many_items:
                    number_unwritten += 1
                else:
                    ways += self._ways_through(found_chain)
        return _OtherWays(ways, number_unwritten)

    def _ways_through(self, found_chain: FoundChain) -> list[Way]:
        """Return the ways through all items by which a holder leads to an object; one way, if one
        line removes all of these items.
        """
        root = found_chain.roots[0]
        to_holder = found_chain.to_holder
        if not to_holder:
            return [self._writer.way(root, found_chain.steps)]
        ways = list[Way]()
        items = list[object]()
        for steps in found_chain.steps_through_items():
            ways.append(self._writer.way(root, steps))
            items.append(steps[len(to_holder)])
        return HolderWays(to_holder[-1], ways, items).one_way_if_possible()

    def _cuts_of(self, row: _RowOfRoot) -> list[Cut]:
        """Return the references to all objects of a row; none if one of them cannot be removed by a
        line.
        """
        if row.has_unwritten:
            return []
        cuts = list[Cut]()
        for in_container in row.containers.values():
            cuts_of_items = self._cuts_in_container(row.root, in_container)
            if not cuts_of_items:
                return []
            cuts += cuts_of_items
        return cuts

    def _cuts_in_container(self, root: Root, in_container: _ItemsInContainer) -> list[Cut]:
        """Return the references from one container to a row's objects; none if one of them cannot
        be removed by a line. One statement may remove all of them (``runs.clear()``); otherwise
        each has its own, if they are few.
        """
        items = list(in_container.items.values())
        cuts = self._writer.cuts_of_items(root, in_container.chain, items)
        if cuts or len(items) > _MOST_APART:
            return cuts
        for item in items:
            steps = (*in_container.chain, item)
            way = self._writer.way(root, steps)
            if not way.cuts:
                return []
            cuts += _with_repeated(way.cuts, steps)
        return cuts

    def _row_for(
        self, key: NodeKey, roots: Sequence[Root], steps: Sequence[object], references: int
    ) -> _RowOfRoot | None:
        """Return the row to which to add a node, and make it if the root has none for it; None if
        the root has too many rows already.

        Each row has one way to each of its objects: a second way from the same root goes into the
        root's second row. Only if one line deletes the object on both ways, it is added to the row
        of the first.

        Args:
            key: the node.
            roots: the roots that refer to the first object of the steps.
            steps: the objects from there to the node's object.
            references: the number of references for which these steps stand.
        """
        root_text = roots[0].text or str(id(steps[0]))
        rows = self._by_root.setdefault(root_text, [])
        for row in rows:
            if key not in row.keys:
                return row
        if len(rows) == _MOST_ROWS:
            rows[-1].further_references += references
            return None
        new_row = self._new_row(roots, steps, references)
        if new_row.of_single.remedy.deletes:
            for row in rows:
                if row.of_single.remedy == new_row.of_single.remedy:
                    return row
        rows.append(new_row)
        return new_row

    def _new_row(
        self, roots: Sequence[Root], steps: Sequence[object], references: int
    ) -> _RowOfRoot:
        """Return the row of one way to a node, to which the node is not yet added. The arguments
        are those of ``_row_for``.
        """
        way = self._way(roots[0], steps)
        of_single, of_many = self._holders_of_way(way, roots, steps, references)
        first_id = id(steps[0])
        frees_first = any(cut.removed_id == first_id for cut in way.cuts)
        deletes_name = of_many.remedy != way.holder.remedy
        is_whole = not way.cuts or frees_first or deletes_name
        return _RowOfRoot(roots[0], of_single, of_many, references - 1, is_whole)

    def _way(self, root: Root, steps: Sequence[object]) -> Way:
        """Return the way to an object. A part of a model or optimizer may have no line of its own:
        then the line is that for the whole, such as ``del jobs["opt"]``.
        """
        way = self._writer.way(root, steps)
        if way.holder.remedy.text:
            return way
        for position, step in enumerate(steps):
            if position > 0 and _is_whole_of_torch(step):
                to_whole = self._writer.way(root, steps[: position + 1])
                remedy = to_whole.holder.remedy
                return replace(to_whole, holder=replace(way.holder, remedy=remedy))
        return way

    def _holders_of_way(
        self, way: Way, roots: Sequence[Root], steps: Sequence[object], references: int
    ) -> _HoldersOfWay:
        """Return the holder at the end of a way, with the lines for one object and for several.

        The lines differ only if the object at the start is a container that may have further items,
        which its user may want to keep. The arguments are those of ``_row_for``.
        """
        first = steps[0]
        of_whole = self._holder_of_whole(way, roots, steps)
        if self._is_deleted_as_a_whole(steps, references):
            return _HoldersOfWay(of_whole, of_whole)
        of_single = _with_names(way.holder, roots[:1], first, may_delete=False)
        is_whole = _is_whole_of_torch(first) or is_instance(first, type)
        if not of_single.remedy.text and is_whole:
            return _HoldersOfWay(of_whole, of_whole)  # no line removes a part of it
        if not _is_container(first):
            return _HoldersOfWay(of_single, of_single)
        return _HoldersOfWay(of_single, of_whole)

    def _holder_of_whole(self, way: Way, roots: Sequence[Root], steps: Sequence[object]) -> Holder:
        """Return the holder at the end of a way, with the line that deletes the object at its start
        if that may be deleted. Note this object for questions about the line.

        Args:
            way: the way.
            roots: the roots that refer to the first object of the steps.
            steps: the objects from there to the node's object.
        """
        first = steps[0]
        of_whole = _with_names(way.holder, roots, first, may_delete=self._may_delete(first))
        if len(steps) > 1 and of_whole.remedy.deletes:
            # Does the object have further holders? ``_with_other_holders`` searches for them.
            self._items_by_deletion[of_whole.remedy.line] = first
        if of_whole.remedy != way.holder.remedy and _may_have_other_data(first):
            # Does the line drop other data? ``ownership.py`` asks that.
            self._removed_objects[id(first)] = first
            remedy = replace(of_whole.remedy, cuts=_cuts_of_variables(roots, first))
            of_whole = replace(of_whole, remedy=remedy)
        return of_whole

    def _may_delete(self, item: object) -> bool:
        """Return True if deleting the variables of an object may free it."""
        if is_segment(item):
            return False  # it stays until it is unlinked
        roots = self._search.roots_of(item)
        if any(root.is_output for root in roots):
            return True  # ``%xdel`` removes it from all places where IPython keeps it
        return all(root.rank is not Rank.IPYTHON for root in roots)

    def _is_deleted_as_a_whole(self, steps: Sequence[object], references: int) -> bool:
        """Return True if a line may delete an object as a whole, because its user cannot want to
        keep anything in it but the objects that were asked about.

        Args:
            steps: the chain from it to an object that was asked about.
            references: number of its references to that object.
        """
        first = steps[0]
        if len(steps) == 1:
            return True  # it was asked about itself
        if self._is_name and not _may_hold_more(first):
            return True
        # All items of the container are the object, as in ``runs = [x] * 3``.
        return references > 1 and _is_container(first) and references == _number_of_items(first)

    def _add_neighbours(self, row: _RowOfRoot, steps: Sequence[object]) -> None:
        """Add the other objects of a container to a row. Of a list of 10,000 tensors, the holders
        of 2,000 were searched: the list holds the remaining ones, too.
        """
        if not self.without_holder or len(steps) == 1:
            return
        container = steps[-2]
        if id(container) in self._with_neighbours:
            return
        self._with_neighbours.add(id(container))
        referents = self._references.of([container]).of_python
        neighbours = {id(item): item for item in referents if id(item) in self.without_holder}
        for key, item in neighbours.items():
            row.add(key, (*steps[:-1], item))
        self.without_holder -= neighbours.keys()


def _with_repeated(cuts: Sequence[Cut], steps: Sequence[object]) -> list[Cut]:
    """Return references on a chain, with the further references from each owner to the same object:
    a list may refer twice to the tuple in which an object is.
    """
    objects = by_identity(steps)
    with_repeated = list[Cut]()
    for cut in cuts:
        if cut.owner_id in objects and cut.removed_id in objects:
            with_repeated += cuts_of_repeated(cut, objects[cut.owner_id], objects[cut.removed_id])
        else:
            with_repeated.append(cut)
    return with_repeated


def _steps_through_each_attribute(found_chain: FoundChain) -> list[tuple[Sequence[object], int]]:
    """Return the chains of steps to an object, each with the number of references for which it
    stands.

    If an object leads there, there is one chain for each of its attributes. If a container does,
    there is one chain through its first item, which stands for all: a list may have many views.
    """
    to_holder = found_chain.to_holder
    if to_holder and found_chain.has_all_steps() and _are_attributes(to_holder):
        return [(steps, 1) for steps in found_chain.steps_through_items()]
    return [(found_chain.steps, found_chain.number_of_references)]


def _are_attributes(steps: Sequence[object]) -> bool:
    """Return True if the last step leads to the next object by an attribute: it is an object, or
    the dict of its attributes.
    """
    if not _is_container(steps[-1]):
        return True
    return len(steps) > 1 and instance_dict(steps[-2]) is steps[-1]


def _cuts_of_variables(roots: Sequence[Root], item: object) -> tuple[Cut, ...]:
    """Return the references that ``del`` removes with the variables of an object."""
    cuts = list[Cut]()
    for root in roots:
        if root.cut is not None and root.rank is Rank.VARIABLE:
            cuts.append(replace(root.cut, removed_id=id(item)))
    return tuple(cuts)


def _is_no_variable(row: _RowOfRoot) -> bool:
    """Return False for the row of a variable: as a sort key, it puts these rows first."""
    return not row.of_single.is_variable


def _may_hold_more(item: object) -> bool:
    """Return True for a container, a user's object, a class or a cached function. A user may want
    to keep the other objects in it, so no line deletes all of it.
    """
    if is_instance(item, type) or is_exactly(item, functools._lru_cache_wrapper):
        return True
    return _is_container(item) or is_users_class(type(item))


def _may_have_other_data(item: object) -> bool:
    """Return True for an object that keeps other data, too, which its deletion would drop: a
    container, a function with its default arguments, a module of torch.
    """
    if _is_container(item) or is_exactly(item, FunctionType, functools.partial):
        return True
    return is_of_library(item, "torch.nn", "Module")


def _is_whole_of_torch(item: object) -> bool:
    """Return True for a torch module or optimizer. It would be broken without one of its parts, so
    there is no line for a part.
    """
    return is_of_library(item, "torch.nn", "Module") or is_of_library(
        item, "torch.optim", "Optimizer"
    )


def _number_of_items(container: Any) -> int:
    """Return the number of objects in a container, without the keys of a dict."""
    if is_instance(container, dict):
        return dict.__len__(container)
    return len(gc.get_referents(container))


def _is_container(item: object) -> bool:
    """Return True for a built-in container, or one of ``collections``."""
    if module_of(item) == "collections":
        return True
    return container_base(type(item)) is not None


def _with_names(holder: Holder, roots: Sequence[Root], item: object, *, may_delete: bool) -> Holder:
    """Return a holder whose path lists all names that refer to its object directly, such as
    ``model, best``; with ``may_delete``, its line deletes them.

    Args:
        holder: the path from the first root.
        roots: the roots that refer to the object, of which one line frees it.
        item: the object.
        may_delete: True if the line deletes the variables among the roots.
    """
    if may_delete and roots[0].rank is Rank.VARIABLE:
        holder = _with_deletion(holder, roots, item)
    aliases = _aliases(roots)
    names_shown = [holder.path, *aliases[:_MOST_ALIASES]]
    if len(aliases) > _MOST_ALIASES:
        number = len(aliases) - _MOST_ALIASES
        noun = "name" if number == 1 else "names"
        names_shown.append(f"{number} more {noun}")
    return replace(holder, path=", ".join(names_shown))


def _with_deletion(holder: Holder, roots: Sequence[Root], item: object) -> Holder:
    """Return a holder whose line deletes all variables among the roots: ``del model, best``. An
    object such as a task is ended first: ``task.cancel(); del task``.
    """
    variables = dict[str, None]()
    for root in roots:
        if root.rank is Rank.VARIABLE and root.code:
            variables[root.code] = None
    if not variables:
        return holder
    statement = f"del {', '.join(variables)}"
    ending = ending_of(item)
    if ending:
        statement = f"{next(iter(variables))}.{ending}; {statement}"
    # The line may have been the same before, with known references: that of a function, whose
    # default arguments are freed only with it.
    is_same = statement == holder.remedy.line
    cuts = holder.remedy.cuts if is_same else ()
    return replace(holder, remedy=Remedy(statement, cuts=cuts))


def _aliases(roots: Sequence[Root]) -> list[str]:
    """Return the other names of the first root's object. IPython keeps an output as ``Out[5]``,
    ``_5`` and ``_``: if the output itself is listed, the other two are left out.
    """
    has_output = any(root.rank is Rank.PLACE and root.is_output for root in roots)
    aliases = dict[str, None]()
    for root in roots:
        is_copy = has_output and root.rank > Rank.PLACE and root.is_output
        if root.text != roots[0].text and not is_copy:
            aliases[root.text] = None
    return list(aliases)
