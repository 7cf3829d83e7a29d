"""Writes chains of references as text, ``notebook variable cache["run3"][0]``, with the line that
frees the object.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from types import (
    ModuleType,
)
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.kinds.arrays import has_objects, is_of_library, library_type
from ipygpumem.heap.kinds.libraries import is_segment
from ipygpumem.heap.knowledge.frames import FORGET_LAST_ERROR
from ipygpumem.heap.knowledge.tasks import (
    is_pending,
    is_uncancelled_asyncio_timer,
    is_waiting_thread_timer,
)
from ipygpumem.heap.paths.attribute_steps import append_attribute_step
from ipygpumem.heap.paths.container_steps import (
    append_item,
    cuts_of_elements,
    cuts_of_repeated,
    has_plain_assignment,
    removal_of_repeated,
)
from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence
from ipygpumem.heap.paths.data_frame_steps import (
    append_frame_step,
    columns_in_frame,
    number_of_steps_to_blocks,
)
from ipygpumem.heap.paths.dataset_steps import append_dataset_step
from ipygpumem.heap.paths.estimator_steps import (
    clone_code,
    has_only_parameters_and_fit,
    is_estimator,
    is_forgotten_by_clone,
)
from ipygpumem.heap.paths.function_steps import append_function_step
from ipygpumem.heap.paths.item_fields import (
    ItemField,
    cut_by_field,
    with_only_places_marked,
)
from ipygpumem.heap.paths.items_and_attributes import (
    items_of,
    owns,
)
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.mock_steps import append_mock_step
from ipygpumem.heap.paths.patches import is_started_patch
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.heap.paths.queue_steps import append_protocol_step
from ipygpumem.heap.paths.registry_steps import append_registry_step
from ipygpumem.heap.paths.remedies import (
    NO_REMEDY,
    REMOVE,
    REMOVE_THEM,
    Holder,
    Remedy,
    comments_of,
)
from ipygpumem.heap.paths.roots import (
    EVENT_LOOP,
    Root,
    Roots,
    module_code,
)
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.suspended_steps import append_suspended_step, line_that_removes
from ipygpumem.heap.paths.torch_steps import (
    append_torch_step,
    is_needed_by_optimizer,
    remedy_for_graph,
    words_for_needed,
    words_for_parameter,
)
from ipygpumem.heap.paths.ways import ALL_REFERENCES, Way
from ipygpumem.introspect import (
    is_instance,
    module_dict,
    name_of,
    text_of,
    type_name,
)

_UNLESS_NEEDED = "if nothing needs it"
_NAMED = {Kind.NAME, Kind.KEY, Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE}
"""Kinds of references from a root that lead to the root's own object."""
_MOST_REMOVED_ITEMS = 300_000
"""Maximum number of items of one container to record as objects that a line removes."""
_MOST_WRITTEN_PARTS = 1000
"""Maximum number of parts of a container's items for each of which a line is written: a second
of work.
"""
_MOST_FIELDS = 20
"""Maximum number of fields of a container's items to recognise in further items."""
_MOST_WRITTEN_ITEMS = 10
"""Maximum number of items of one container whose code is written; of more, only the positions are
needed.
"""


class CutsInside(NamedTuple):
    """References by which a container, or its items, hold objects that a line is to free."""

    object_ids: set[int]
    """The identities of these objects."""
    cuts: list[Cut]
    """The references."""
    removed_references: set[tuple[int, int]]
    """The same references as the identities of both objects: the owner and the object."""

    @classmethod
    def empty(cls) -> CutsInside:
        """Return no references."""
        return cls(set(), [], set())

    def add(self, cuts: Sequence[Cut], item: object, references: Iterable[tuple[int, int]]) -> None:
        """Add the references to an object.

        Args:
            cuts: the references.
            item: the object.
            references: the references that the line removes with it, as identities.
        """
        self.object_ids.add(id(item))
        self.cuts.extend(cuts)
        self.removed_references.update(references)

    def add_way(self, way: Way, item: object, part: object) -> None:
        """Add all references from an item to its part, ``runs[0].model`` and ``runs[0].best``; none
        if the way has no line.

        Args:
            way: the way through the item to the part.
            item: the item of the container.
            part: the part.
        """
        if way.cut is None:
            return
        cuts = [way.cut]
        if way.cut.owner_id == id(item):
            cuts = cuts_of_repeated(way.cut, item, part)
        self.add(cuts, part, way.removed_references)


class PathWriter:
    """Writes chains of references as text.

    Args:
        roots: the names and objects from which the user can reach objects.
        of_leaks: True to write the line that removes a buffer of a model, or an option of an
            optimizer, which users do not remove unless it is a leak.
    """

    def __init__(self, roots: Roots, *, of_leaks: bool = False) -> None:
        self._cell_of = roots.cell_of
        self._names = roots.names
        self._root_of_name = roots.namespaces.get(id(roots.names))
        self._removed = roots.lines.removed
        self._ages = roots.lines.ages
        self._of_leaks = of_leaks

    def holder(self, root: Root, chain: Sequence[object]) -> Holder:
        """Return the path from a root along a chain of objects, with its remedy."""
        return self.way(root, chain).holder

    def way(self, root: Root, chain: Sequence[object], *, of_graph: bool = False) -> Way:
        """Return the path from a root along a chain of objects, and how to free the last one.

        Objects that the line removes are added to ``roots.lines.removed``.

        Args:
            root: the root, such as the variable ``cache``.
            chain: the objects, of which the root refers to the first: the dict ``cache``, a list
                in it, an array in the list.
            of_graph: True if the last object is a tensor that stays, and its graph is to be freed.
        """
        steps = without_own_dicts(chain)
        path = self._path_from(root, steps[0])
        ended_id = self._append_steps(path, steps)
        if of_graph:
            advised = path.advice.remedy
            return Way(path.holder(advised if advised.line else remedy_for_graph(steps, path)))
        if root.is_freed_by_command and is_instance(steps[-1], BaseException):
            # The root's advice, ``%gpumem free``, clears the frames of a traceback. It does not
            # free the error itself.
            path.replace_advised(Remedy(FORGET_LAST_ERROR))
        way = path.way(is_root_itself=len(steps) == 1, ended_id=ended_id)
        removed_cut = way.cut  # the reference that the line removes
        if not path.advice.remedy.line:
            remedy = self._remedy_unless_needed(steps, path, way.holder.remedy)
            if remedy.line != way.holder.remedy.line:
                removed_cut = None  # words remove no reference
            if remedy != way.holder.remedy:
                way = Way(replace(way.holder, remedy=remedy), words=words_for_parameter(steps))
        return replace(
            way,
            step_ids=tuple(map(id, steps)),
            removed_references=_references_removed_by(removed_cut, ended_id, steps),
        )

    def _path_from(self, root: Root, item: object) -> Path:
        """Return the path from a root to its object; it begins with words, such as ``a list that
        nothing visible from Python refers to``, if the object has no root.
        """
        if root.text:
            return Path(root, root.text)
        path = Path(root, self._words_without_root(item))
        if is_pending(item):
            path.replace_advised(_remedy_for_task(item))
        return path

    def _remedy_unless_needed(self, steps: Sequence[object], path: Path, remedy: Remedy) -> Remedy:
        """Return the remedy of a path. If a model or an optimizer needs the last object of its
        chain, return words instead, ``assign something smaller to model.mask``, or no remedy.
        """
        words = words_for_needed(steps, path)
        if not path.is_in_model:
            return Remedy(words) if words else remedy
        # A parameter may be older than its memory, as after ``model.half()``; optimizers need their
        # state.
        is_parameter = is_of_library(steps[-1], "torch.nn", "Parameter")
        is_needed = is_parameter or is_needed_by_optimizer(steps)
        if not self._of_leaks or is_needed or remedy in (NO_REMEDY, REMOVE):
            return NO_REMEDY  # users do not take parts out of a model, unless these are a leak
        if words:
            return Remedy(words)
        return Remedy(remedy.line, comments_of([remedy], last=_UNLESS_NEEDED))

    def _append_steps(self, path: Path, steps: Sequence[object]) -> int:
        """Append the steps through all objects of a chain.

        Returns:
            The identity of the object that the advice ends, such as a generator by ``close()``; 0
            if it ends none.
        """
        if path.cut is not None and path.cut.kind in _NAMED:
            self._record_removed(path, steps[0])
        ended_id = 0
        position = 0
        while True:
            parent = steps[position]
            is_last = position == len(steps) - 1
            # The object itself, to which the path leads so far, may have to be ended or replaced.
            self._advise_to_end(path, parent)
            if is_estimator(parent) and self._is_replaced_by_clone(steps[position:]):
                path.replace_by_copy(clone_code(self._names), self._other_names(path, parent))
            if not is_last:  # the step on to the next object
                cut_before = path.cut
                position += self._append_step(path, steps[position:])
                if path.cut is not cut_before:  # the line is now about this step
                    self._mark_if_replaced(path, parent)
                    self._record_removed(path, steps[position])
            if path.advice.is_ending and ended_id == 0:  # the first advice counts
                ended_object = path.advice.ended_object
                if ended_object is None:
                    ended_object = parent
                ended_id = id(ended_object)
                self._removed.add_object(ended_object)
            if is_last:
                return ended_id

    def _is_replaced_by_clone(self, steps: Sequence[object]) -> bool:
        """Return True if the line for the last object of a chain replaces the estimator at its
        beginning by a clone, which has no fit: ``clf = sklearn.base.clone(clf)``.

        Only an older estimator is replaced. A new one is deleted with its fit.

        Args:
            steps: the estimator, and the objects from it to the last one.
        """
        estimator = steps[0]
        is_lost_by_clone = is_forgotten_by_clone(steps)
        # In a search for leaks, a fitted estimator is itself what is to be freed.
        is_unwanted_estimator = self._of_leaks and is_estimator(steps[-1])
        if not is_lost_by_clone and not is_unwanted_estimator:
            return False
        return has_only_parameters_and_fit(estimator) and self._ages.learn_if_older(estimator)

    def _other_names(self, path: Path, item: object) -> list[Cut]:
        """Return the references of further variables to the object of a variable, which is the
        path's target.
        """
        if path.cut is None or path.cut.kind is not Kind.NAME or self._root_of_name is None:
            return []
        cuts = list[Cut]()
        for name, value in list(self._names.items()):
            root = self._root_of_name(name) if value is item else None
            if root is not None and root.cut is not None and root.cut != path.cut:
                cuts.append(root.cut)
        return cuts

    def _mark_if_replaced(self, path: Path, parent: Any) -> None:
        """Mark the path's reference if it is that of a list to an item in the place of an older
        one, as after ``rows[3] = x``.

        The line is ``rows[3] = None`` then, because ``del rows[3]`` would move later rows. An item
        that a call ends, such as a task, is deleted nevertheless.
        """
        cut = path.cut
        if cut is None or cut.kind is not Kind.ITEM or cut.owner_id != id(parent):
            return
        if cut.ending or not has_plain_assignment(parent):
            return
        if self._ages.learn_length(parent):
            path.cut = replace(cut, is_replaced=True)

    def _record_removed(self, path: Path, item: object) -> None:
        """Record an object as removed by the path's line, if the line has a reference to remove:
        that to the object.
        """
        if path.cut is not None:
            self._removed.add_object(item)
            path.cut = replace(path.cut, removed_id=id(item))

    def _advise_to_end(self, path: Path, item: object) -> None:
        """Advise the statement that ends the path's target, if deleting it is not enough: shared
        memory, a started patch, a timer.
        """
        if is_segment(item):
            path.advise(
                path.statement("{0}.close(); {0}.unlink()"), words="close() and unlink() it"
            )
        if is_started_patch(item) and path.code:
            path.advise(in_sequence([path.statement("{}.stop()"), path.removal]))
        is_timer = is_uncancelled_asyncio_timer(item) or is_waiting_thread_timer(item)
        if is_timer and path.code:
            path.advise(line_that_removes(item, path))

    def holder_from_name(self, name: str, chain: Sequence[object]) -> Holder:
        """Return the path from a notebook's name along ``chain``, which begins with the name's
        object.

        If that is a loaded module, the path is that of the module's global, ``module settings,
        global cache``. The name, ``s`` after ``import settings as s``, is not what keeps it alive.
        """
        return self.holder(*self._root_and_steps(name, chain))

    def _root_and_steps(self, name: str, chain: Sequence[object]) -> tuple[Root, Sequence[object]]:
        """Return the root of a chain that begins with a name's object, and the objects from it on:
        for a loaded module, its global and the objects after the module.
        """
        module: Any = chain[0]
        if not is_instance(module, ModuleType):
            return Root.of_variable(name), chain
        names = module_dict(module)
        steps = chain[1:]
        if steps and steps[0] is names:
            steps = steps[1:]
        module_name = text_of(names.get("__name__"))
        if not steps or sys.modules.get(module_name) is not module:  # itself, or not loaded
            return Root.of_variable(name), chain
        key = next((key for key, value in list(names.items()) if value is steps[0]), None)
        code = module_code(module_name, self._names)
        return Root.of_module(module_name, key, code), steps

    def cuts_inside(
        self, root: Root, chain: Sequence[object], wanted: Container[int]
    ) -> CutsInside:
        """Return the references by which a container or its items hold the wanted objects; none if
        they are too many to write the line of each.

        The wanted objects are either items of the container, or parts of its items::

            container --> wanted        container --> item --> wanted

        Args:
            root: the root of the chain.
            chain: the objects up to the container.
            wanted: the identities of the objects.
        """
        items = items_of(chain[-1])
        wanted_items = [item for item in items if id(item) in wanted]
        if wanted_items:
            return self._cuts_of_wanted_items(root, chain, wanted_items)
        return self._cuts_of_wanted_parts(root, chain, items, wanted)

    def _cuts_of_wanted_items(
        self, root: Root, chain: Sequence[object], wanted_items: Sequence[object]
    ) -> CutsInside:
        """Return the references from a chain's last object, such as a list, to wanted items of it:
        ``runs[3]`` and ``runs[5]``.
        """
        inside = CutsInside.empty()
        inside.cuts.extend(self.cuts_of_items(root, chain, wanted_items))
        if inside.cuts:
            inside.object_ids.update(map(id, wanted_items))
            container_id = id(chain[-1])
            inside.removed_references.update((container_id, id(item)) for item in wanted_items)
        return inside

    def _cuts_of_wanted_parts(
        self,
        root: Root,
        chain: Sequence[object],
        items: Sequence[object],
        wanted: Container[int],
    ) -> CutsInside:
        """Return the references from items of a chain's last object, such as a list, to wanted
        objects: ``runs[3].model``.

        The code of the first references is written: ``runs[0].model``. A later item with the same
        attribute gets the same code with another position, ``runs[7].model``, without a new path:
        there may be 200,000 of them.
        """
        inside = CutsInside.empty()
        fields = list[ItemField]()
        number_written = 0
        for position, item, part in _wanted_parts(items, wanted):
            cut = cut_by_field(fields, position, item, part)
            needs_no_code = number_written >= _MOST_WRITTEN_ITEMS
            if cut is not None and needs_no_code:  # runs[10].model and later ones
                self._removed.add_object(part)
                inside.add([cut], part, {(id(item), id(part))})
                continue
            # The first parts, and those that are by no field of earlier items.
            number_written += 1
            if number_written > _MOST_WRITTEN_PARTS:  # too many that are by no common field
                return CutsInside.empty()
            way = self.way(root, (*chain, item, part))
            inside.add_way(way, item, part)
            if cut is None and len(fields) < _MOST_FIELDS:  # the first part in this field
                field = ItemField.at_end(way, chain[-1], item, part)
                if field is not None:
                    fields.append(field)
        unique = list(by_identity(items).values())
        return inside._replace(cuts=with_only_places_marked(inside.cuts, fields, unique))

    def cuts_of_items(
        self, root: Root, chain: Sequence[object], items: Sequence[object]
    ) -> list[Cut]:
        """Return the references from a container to items, of which there may be very many: those
        of ``runs[3]`` and ``runs[5]``. They are empty if an item cannot be removed by itself.
        Otherwise it also notes the items as removed by the report's lines.

        Args:
            root: the root of the chain.
            chain: the objects up to the container.
            items: the items.
        """
        container = chain[-1]
        unique = by_identity(items)
        if len(unique) > 1 and has_objects(container):
            return self._cuts_of_elements(root, chain, unique)
        cuts = list[Cut]()
        # If there are very many items, the code of the first few shows if they can be removed.
        for item in list(unique.values())[:_MOST_WRITTEN_ITEMS]:
            way = self.way(root, (*chain, item))
            if way.cut is None or not way.is_direct:
                return []
            cuts += cuts_of_repeated(way.cut, container, item)
        if len(unique) <= _MOST_WRITTEN_ITEMS:
            return cuts
        if len(unique) <= _MOST_REMOVED_ITEMS:
            self._removed.objects.update(unique)
        # The statement for all of them needs only their positions.
        cuts_without_code = list[Cut]()
        for position, item in enumerate(items_of(container)):
            if id(item) in unique:
                cuts_without_code.append(cuts[0].of_item(position, item))
        return cuts_without_code

    def _cuts_of_elements(
        self, root: Root, chain: Sequence[object], wanted: dict[int, object]
    ) -> list[Cut]:
        """Return the references from an array of objects to elements of it, and note the elements
        as removed; none if an element cannot be removed by itself.

        Args:
            root: the root of the chain.
            chain: the objects up to the array.
            wanted: the elements by identity.
        """
        if len(wanted) > _MOST_REMOVED_ITEMS:
            return []
        way = self.way(root, (*chain, next(iter(wanted.values()))))
        if way.cut is None or not way.is_direct or way.cut.owner_id != id(chain[-1]):
            return []
        self._removed.objects.update(wanted)
        return cuts_of_elements(way.cut, chain[-1], wanted, columns_in_frame(chain))

    def removal_of_items(
        self, name: str, chain: Sequence[object], items: Sequence[object]
    ) -> Holder:
        """Return the path from a notebook's name to a container, with the line that removes items
        from it, or words.

        Args:
            name: the name.
            chain: the name's object, and the objects from it to the container.
            items: items of the container.
        """
        root, steps = self._root_and_steps(name, chain)
        holder = self.way(root, steps).holder
        cuts = self.cuts_of_items(root, steps, items)
        number_of_items = len(by_identity(items))
        # The items cannot be removed one by one, but a call may remove all of them.
        if not cuts and number_of_items >= len(by_identity(items_of(steps[-1]))):
            to_item = self.way(root, (*steps, items[0]))
            if to_item.is_advised:  # such as ``load.cache_clear()``
                return replace(holder, remedy=to_item.holder.remedy)
        if number_of_items == 1 and cuts:  # one object, which may be there 1,000 times
            line = removal_of_repeated(cuts, steps[-1])
        else:
            line = statement_of(cuts)
        return replace(holder, remedy=Remedy(line, cuts=tuple(cuts)) if line else REMOVE_THEM)

    def _words_without_root(self, item: object) -> str:
        """Return the words for an object at which a path begins although it is no root."""
        if is_instance(item, type):
            return f"class {name_of(item)}"  # type: ignore[arg-type]  # is_instance says so
        if is_pending(item):
            return EVENT_LOOP
        kind = type_name(item)
        return (
            f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} that nothing visible from "
            f"Python refers to"
        )

    def _append_step(self, path: Path, steps: Sequence[object]) -> int:
        """Append the step through the first object, by its type; return the number of references
        that the step takes.

        Each function returns 0 for objects that it does not know. Their order matters: a queue
        comes before its deque, and attributes of any object come last.
        """
        parent, child = steps[0], steps[1]
        return (
            append_registry_step(path, steps, self._names)
            or append_mock_step(path, steps)
            or append_protocol_step(path, steps, self._names)
            or append_function_step(path, steps, self._cell_of)
            or append_suspended_step(path, steps, self._cell_of)
            or int(append_item(path, parent, child))
            or append_frame_step(path, steps, self._ages)
            or append_dataset_step(path, steps)
            or append_torch_step(path, steps, self._names)
            or append_attribute_step(path, steps)
        )


def _remedy_for_task(task: object) -> Remedy:
    """Return the line that cancels a task to which only the event loop leads."""
    name = library_type("asyncio", "Task").get_name(task)  # type: ignore[union-attr]  # it is one of them
    tasks = f"task for task in asyncio.all_tasks() if task.get_name() == {literal(name)}"
    return Remedy(f"import asyncio; next({tasks}).cancel()")


class _WantedPart(NamedTuple):
    """A wanted object that is a part of a container's item."""

    position: int
    """The first position of the item in the container."""
    item: object
    part: object
    """The wanted object."""


def _wanted_parts(items: Sequence[object], wanted: Container[int]) -> list[_WantedPart]:
    """Return the wanted objects, given by identity, among the parts of a container's items: the
    models in ``runs[0].model`` and ``runs[1].model``.
    """
    wanted_parts = list[_WantedPart]()
    for position, item in _items_once(items):
        for part_id, part in by_identity(items_of(item)).items():
            if part_id in wanted:
                wanted_parts.append(_WantedPart(position, item, part))
    return wanted_parts


def _items_once(items: Sequence[object]) -> Iterator[tuple[int, object]]:
    """Yield the items, each once, with their first positions."""
    passed = set[int]()
    for position, item in enumerate(items):
        if id(item) not in passed:
            passed.add(id(item))
            yield position, item


def _references_removed_by(
    cut: Cut | None, ended_id: int, steps: Sequence[object]
) -> frozenset[tuple[int, int]]:
    """Return the references that a line removes, as the identities of both objects: the owner, and
    the object to which it refers, or ``ALL_REFERENCES``.

    Args:
        cut: the only reference that the line removes; None if it removes another one, or several.
        ended_id: the identity of an object that the line ends; 0 if it ends none.
        steps: the objects on the way.
    """
    if ended_id:
        return frozenset({(ended_id, ALL_REFERENCES)})
    if cut is None:
        return frozenset()
    step_ids = list(map(id, steps))
    if cut.owner_id not in step_ids[:-1]:
        return cut.also_removed
    position = step_ids.index(cut.owner_id)
    if cut.kind is Kind.COLUMN:  # the frame keeps its other blocks
        position += number_of_steps_to_blocks(steps[position:])
    return cut.also_removed | {(step_ids[position], step_ids[position + 1])}


def without_own_dicts(chain: Sequence[object]) -> list[object]:
    """Return a chain without the dicts of attributes in it: ``a.b`` is one step."""
    steps = [chain[0]]
    for owner, item in itertools.pairwise(chain):
        is_last = item is chain[-1]  # the dict itself is the target: ``vars(run)``
        if type(item) is dict and not is_last and owns(owner, item):
            continue
        steps.append(item)
    return steps
