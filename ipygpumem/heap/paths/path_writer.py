"""Writes chains of references as text, ``notebook variable cache["run3"][0]``, with the line that
frees the object.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
)
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import has_objects, is_of_library, library_type
from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.knowledge.frames import FORGET_LAST_ERROR, code_of, frame_of, is_started, peek
from ipygpumem.heap.knowledge.tasks import (
    is_pending,
    is_uncancelled_asyncio_timer,
    is_waiting_thread_timer,
)
from ipygpumem.heap.libraries import is_segment
from ipygpumem.heap.paths.alike_references import (
    AlikeReferences,
    first_alike,
    noted_if_only_there,
)
from ipygpumem.heap.paths.attributes_to_remove import (
    is_added,
    kind_of_attribute,
    library_that_keeps,
)
from ipygpumem.heap.paths.container_steps import (
    append_item,
    cuts_of_elements,
    cuts_of_repeated,
    removal_of_repeated,
    takes_items,
)
from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence, split, with_repeated
from ipygpumem.heap.paths.data_frame_steps import append_frame_step, places_in_frame
from ipygpumem.heap.paths.dataset_steps import append_dataset_step
from ipygpumem.heap.paths.estimator_steps import (
    clone_code,
    has_only_a_fit,
    is_estimator,
    is_forgotten_by_clone,
)
from ipygpumem.heap.paths.items_and_attributes import (
    attribute_names,
    attribute_text,
    items_of,
    owns,
    position_of,
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
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.heap.paths.torch_steps import (
    append_torch_step,
    is_needed_by_optimizer,
    remedy_for_graph,
    words_for_needed,
    words_for_parameter,
)
from ipygpumem.heap.paths.ways import Way
from ipygpumem.introspect import (
    instance_dict,
    is_descriptor,
    is_exactly,
    is_instance,
    is_name,
    is_users,
    is_users_class,
    module_dict,
    name_of,
    text_of,
    type_name,
)

_OR_EXCEPTION = f"{REMOVE.line}, or delete the exception once you have read it"


_UNLESS_NEEDED = "if nothing needs it"


_OR_FUNCTION = f"{REMOVE.line}, or delete the function when you no longer need it"


_SUSPENSIONS = {
    GeneratorType: ("generator", "{}.close()"),
    CoroutineType: ("coroutine", "{}.close()"),
    AsyncGeneratorType: ("async generator", "await {}.aclose()"),
}
"""The description of each kind, and the statement that ends it."""


_NAMED = {Kind.NAME, Kind.KEY, Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE}
"""Kinds of references from a root that lead to the root's own object."""


class CutsInside(NamedTuple):
    """References by which a container or its items hold some objects."""

    reached: set[int]
    """The identities of the objects."""
    cuts: list[Cut]
    removed_references: set[tuple[int, int]]
    """The references as the identities of both objects."""

    @classmethod
    def empty(cls) -> CutsInside:
        """Return no references."""
        return cls(set(), [], set())

    def add(self, cut: Cut, item: object, references: Iterable[tuple[int, int]]) -> None:
        """Add a reference to one of the objects."""
        self.reached.add(id(item))
        self.cuts.append(cut)
        self.removed_references.update(references)


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
        self._removed_objects = roots.removed_objects
        self._is_older = roots.is_older
        self._is_as_long_as_before = roots.is_as_long_as_before
        self._of_leaks = of_leaks

    def holder(self, root: Root, chain: Sequence[object]) -> Holder:
        """Return the path from ``root`` along ``chain``."""
        return self.way(root, chain).holder

    def way(self, root: Root, chain: Sequence[object], *, of_graph: bool = False) -> Way:
        """Return the path from ``root`` along ``chain``, whose last object may be a
        graph's tensor.
        """
        steps = without_own_dicts(chain)
        path = Path(root, root.text or self._words_without_root(steps[0]))
        if not root.text and is_pending(steps[0]):
            name = library_type("asyncio", "Task").get_name(steps[0])  # type: ignore[union-attr]  # it is one of them
            task = f"task for task in asyncio.all_tasks() if task.get_name() == {literal(name)}"
            path.remedy = Remedy(f"import asyncio; next({task}).cancel()")
        ended_id = self._write(steps, path)
        if of_graph:
            remedy = path.remedy
            if not remedy.line:
                remedy = remedy_for_graph(steps, path)
            return Way(path.holder(remedy))
        if path.is_freed_by_command and is_instance(steps[-1], BaseException):
            # %gpumem free clears frames, not what the error itself refers to.
            path.remedy = Remedy(FORGET_LAST_ERROR)
        way = path.way(root, is_root_itself=len(steps) == 1, ended_id=ended_id)
        cut = way.cut
        if not path.remedy.line:
            remedy = self._remedy_for_needed(steps, path, way.holder.remedy)
            if remedy.line != way.holder.remedy.line:
                cut = None  # words remove no reference
            if remedy != way.holder.remedy:
                way = Way(replace(way.holder, remedy=remedy), words=words_for_parameter(steps))
        step_ids = tuple(map(id, steps))
        return replace(
            way,
            step_ids=step_ids,
            removed_references=_references_removed_by(cut, ended_id, step_ids),
        )

    def _remedy_for_needed(self, steps: Sequence[object], path: Path, remedy: Remedy) -> Remedy:
        """Return the remedy of a path if nothing needs the last object of its chain, or another
        one.
        """
        words = words_for_needed(steps, path)
        if not path.is_own:
            return Remedy(words) if words else remedy
        # A parameter may be older than its new memory, and optimizers need their state.
        is_parameter = is_of_library(steps[-1], "torch.nn", "Parameter")
        is_needed = is_parameter or is_needed_by_optimizer(steps)
        if not self._of_leaks or is_needed or remedy in (NO_REMEDY, REMOVE):
            return NO_REMEDY
        if words:
            return Remedy(words)
        return Remedy(remedy.line, comments_of([remedy], last=_UNLESS_NEEDED))

    def _write(self, steps: Sequence[object], path: Path) -> int:
        """Write all steps; return the identity of the object that the advice ends, 0 if none."""
        ended_id, position = 0, 0
        if path.cut is not None and path.cut.kind in _NAMED:
            self._note_removed(path, steps[0])
        while True:
            parent = steps[position]
            is_last = position == len(steps) - 1
            self._say_how_to_end(parent, path)
            if is_estimator(parent) and self._is_replaced_by_clone(steps[position:]):
                path.replace_by_copy(clone_code(self._names), self._other_names(path, parent))
            if not is_last:
                cut = path.cut
                position += self._step(steps[position:], path)
                if path.cut is not cut:
                    self._note_replaced(path, parent)
                    self._note_removed(path, steps[position])
            if path.is_ending and ended_id == 0:
                owner = parent if path.ended_object is None else path.ended_object
                ended_id = id(owner)
                self._removed_objects[ended_id] = owner
            if is_last:
                return ended_id

    def _is_replaced_by_clone(self, steps: Sequence[object]) -> bool:
        """Return True if the lines for an object forget the fit of an older estimator, from which
        some steps lead to it.
        """
        is_fit = is_forgotten_by_clone(steps) or (self._of_leaks and is_estimator(steps[-1]))
        return is_fit and has_only_a_fit(steps[0]) and self._is_older(steps[0])

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

    def _note_replaced(self, path: Path, parent: Any) -> None:
        """Record that the item of a list has the place of an older one, unless a call ends it."""
        cut = path.cut
        if cut is None or cut.kind is not Kind.ITEM or cut.ending or not takes_items(parent):
            return
        if cut.owner_id == id(parent) and self._is_as_long_as_before(parent):
            path.cut = replace(cut, is_replaced=True)

    def _note_removed(self, path: Path, item: object) -> None:
        """Record the object to which the reference that is removed leads."""
        if path.cut is not None:
            self._removed_objects[id(item)] = item
            path.cut = replace(path.cut, removed_id=id(item))

    def _say_how_to_end(self, item: object, path: Path) -> None:
        """Record the statement that ends the path's target, if it has to be ended."""
        if is_segment(item):
            path.advise(path.statement("{0}.close(); {0}.unlink()"), "close() and unlink() it")
        if is_started_patch(item) and path.code:
            path.advise(in_sequence([path.statement("{}.stop()"), path.removal]), "")
        if (is_uncancelled_asyncio_timer(item) or is_waiting_thread_timer(item)) and path.code:
            path.advise(_ending(item, path), "")

    def holder_from_name(self, name: str, chain: Sequence[object]) -> Holder:
        """Return the path from a notebook's name along ``chain``, which begins with the name's
        object.

        The path of a loaded module does not depend on its name in the notebook.
        """
        return self.holder(*self._from_name(name, chain))

    def _from_name(self, name: str, chain: Sequence[object]) -> tuple[Root, Sequence[object]]:
        """Return the root and the steps of a chain that begins with a name's object."""
        module: Any = chain[0]
        if not is_instance(module, ModuleType):
            return Root.of_variable(name), chain
        names = module_dict(module)
        steps = chain[1:]
        if steps and steps[0] is names:
            steps = steps[1:]
        module_name = text_of(names.get("__name__"))
        if not steps or sys.modules.get(module_name) is not module:
            return Root.of_variable(name), chain
        key = next((key for key, value in list(names.items()) if value is steps[0]), None)
        code = module_code(module_name, self._names)
        return Root.of_module(module_name, key, code), steps

    def cuts_inside(
        self, root: Root, chain: Sequence[object], wanted: Container[int]
    ) -> CutsInside:
        """Return all references by which the last object of a chain or its items hold the
        ``wanted`` objects, given by identity.

        The search for them ends one step below the items. It returns none if they are too many to
        write the line of each.
        """
        items = items_of(chain[-1])
        wanted_items = [item for item in items if id(item) in wanted]
        if wanted_items:
            return self._cuts_of_wanted_items(root, chain, wanted_items)
        return self._cuts_of_wanted_parts(root, chain, items, wanted)

    def _cuts_of_wanted_items(
        self, root: Root, chain: Sequence[object], wanted_items: Sequence[object]
    ) -> CutsInside:
        """Return the references by which the last object of a chain holds some of its items."""
        inside = CutsInside.empty()
        inside.cuts.extend(self.cuts_of_items(root, chain, wanted_items))
        if inside.cuts:
            inside.reached.update(map(id, wanted_items))
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
        """Return the references by which the items of a chain's last object hold wanted objects.

        The code of the first ones is written; later ones in the same place of their items have the
        same code with another position.
        """
        inside = CutsInside.empty()
        alike = list[AlikeReferences]()
        number_written = 0
        for position, item, part in _wanted_parts(items, wanted):
            cut = first_alike(alike, position, item, part)
            if cut is not None and number_written >= _MOST_WRITTEN:
                self._removed_objects[id(part)] = part
                inside.add(cut, part, {(id(item), id(part))})
                continue
            number_written += 1
            if number_written > _MOST_INSIDE:
                return CutsInside.empty()
            way = self.way(root, (*chain, item, part))
            if way.cut is None:
                continue
            if cut is None and len(alike) < _MOST_FIELDS:
                alike += AlikeReferences.of(way, chain[-1], item, part)
            inside.add(way.cut, part, way.removed_references)
            if way.cut.owner_id == id(item):
                inside.cuts[-1:] = cuts_of_repeated(way.cut, item, part)
        unique = list(by_identity(items).values())
        return inside._replace(cuts=noted_if_only_there(inside.cuts, alike, unique))

    def cuts_of_items(
        self, root: Root, chain: Sequence[object], items: Sequence[object]
    ) -> list[Cut]:
        """Return the references to some items of an object, which may be very many.

        The list is empty if an item cannot be removed by itself.
        """
        holder = chain[-1]
        unique = by_identity(items)
        if len(unique) > 1 and has_objects(holder):
            return self._cuts_of_elements(root, chain, unique)
        cuts = list[Cut]()
        for item in list(unique.values())[:_MOST_WRITTEN]:
            way = self.way(root, (*chain, item))
            if way.cut is None or not way.is_direct:
                return []
            cuts += cuts_of_repeated(way.cut, holder, item)
        if len(unique) <= _MOST_WRITTEN:
            return cuts
        first = cuts[0]
        if len(unique) <= _MOST_REMOVED:
            self._removed_objects.update(unique)
        of_items = list[Cut]()
        for position, item in enumerate(items_of(holder)):
            if id(item) in unique:
                of_items.append(first.of_item(position, item))
        return of_items

    def _cuts_of_elements(
        self, root: Root, chain: Sequence[object], wanted: dict[int, object]
    ) -> list[Cut]:
        """Return the references to some elements of an array of objects, given by identity."""
        if len(wanted) > _MOST_REMOVED:
            return []
        way = self.way(root, (*chain, next(iter(wanted.values()))))
        if way.cut is None or not way.is_direct or way.cut.owner_id != id(chain[-1]):
            return []
        self._removed_objects.update(wanted)
        return cuts_of_elements(way.cut, chain[-1], wanted, places_in_frame(chain))

    def removal_of_items(
        self, name: str, chain: Sequence[object], items: Sequence[object]
    ) -> Holder:
        """Return the path from a notebook's name to a container, with the line that removes items.

        Args:
            name: the name.
            chain: the name's object, and the objects from it to the container.
            items: items of the container.
        """
        root, steps = self._from_name(name, chain)
        holder = self.way(root, steps).holder
        cuts = self.cuts_of_items(root, steps, items)
        line = statement_of(cuts)
        if cuts and len(by_identity(items)) == 1:
            line = removal_of_repeated(cuts, steps[-1])
        if not cuts and len(by_identity(items)) >= len(by_identity(items_of(steps[-1]))):
            to_item = self.way(root, (*steps, items[0]))
            if to_item.is_advised:  # such as ``load.cache_clear()``
                return replace(holder, remedy=to_item.holder.remedy)
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

    def _step(self, steps: Sequence[object], path: Path) -> int:
        """Write the next piece of a path; return the number of its references."""
        parent, child = steps[0], steps[1]
        kind = type(parent)
        written = (
            append_registry_step(path, steps, self._names)
            or append_mock_step(path, steps)
            or append_protocol_step(path, steps, self._names)
        )
        if written:
            return written
        if kind is FunctionType:
            return self._append_function(steps, path)
        if is_exactly(parent, *_SUSPENSIONS):
            return self._append_suspended(steps, path)
        if kind is TracebackType or kind is FrameType or is_instance(parent, BaseException):
            return self._append_traceback(steps, path)
        if kind is functools._lru_cache_wrapper:
            return self._append_cache(steps, path)
        if is_exactly(parent, MethodType, BuiltinMethodType, MethodWrapperType):
            self._append_bound_method(parent, path)
        elif is_of_library(parent, "asyncio", "Task"):
            self._append_task(parent, child, path)
        elif kind is staticmethod or kind is classmethod:
            # Reading the attribute returns the function: users do not type ``.__func__``.
            path.append_fixed("", path.code)
        elif not append_item(path, parent, child):
            return self._append_instance(steps, path)
        return 1

    # -- functions -------------------------------------------------------------------------------

    def _name_of_function(self, function: object) -> str:
        """Return a function's name and the cell that defined it."""
        if type(function) is not FunctionType:
            return type_name(function)
        return self._name_of_code(function.__code__)

    def _name_of_code(self, code: CodeType) -> str:
        """Return the name of code and the cell that has it."""
        cell = self._cell_of(code.co_filename)
        return code.co_name if cell is None else f"{code.co_name} (cell {cell})"

    def _append_function(self, steps: Sequence[object], path: Path) -> int:
        """Write the step through a function's closure, default arguments or attributes."""
        function, child = steps[0], steps[1]
        assert type(function) is FunctionType
        name = self._name_of_function(function)
        after = steps[2] if len(steps) > 2 else None
        path.advise_if_nothing_later_can_go("when you no longer need the function", _OR_FUNCTION)
        cells = function.__closure__
        if cells is not None and child is cells:
            if type(after) is not CellType:
                path.say(f": closure of function {name}")
                return 1
            position = position_of(cells, after)
            variable = function.__code__.co_freevars[position]
            code = path.code and f"{path.code}.__closure__[{position}].cell_contents"
            words = f": closure of function {name}, variable {variable}"
            cut = _cut_of_variable(function, after, path.code)
            if cut is not None:
                path.enter(words, code, cut)
            else:
                path.say(words, code)
            return 3 if len(steps) > 3 else 2
        if child is function.__defaults__ or child is function.__kwdefaults__:
            code = path.code and _code_of_default(path.code, function, after)
            path.say(f": default argument of function {name}", code)
            return 1 if after is None else 2
        if after is not None and child is instance_dict(function):
            self._attribute_of_function(function, after, path)
            return 2
        self._attribute_of_function(function, child, path)
        return 1

    def _append_bound_method(self, method: Any, path: Path) -> None:
        """Write the step from a method to its object; one in C, as ``rows.append``, shows it."""
        if type(method) is MethodType:
            path.advise(path.removal, "")
            path.say(f": bound method {self._name_of_function(method.__func__)}, its object")
        else:
            path.append_fixed(".__self__", path.code and f"{path.code}.__self__")

    def _attribute_of_function(self, function: FunctionType, value: object, path: Path) -> None:
        """Append an attribute of a function, which users can remove from their own functions."""
        code = path.code
        attribute = attribute_text(function, value)
        path.say(f": function {self._name_of_function(function)}")
        kind = Kind.ATTRIBUTE
        if not is_users(function.__code__.co_filename):
            if not is_added(function, attribute[1:], value):
                path.append_fixed(attribute)
                return
            path.is_of_library = False
            kind = Kind.DELETED_ATTRIBUTE
        if not attribute.startswith("."):
            path.append_fixed(attribute)
            return
        target = code and f"{code}{attribute}"
        cuts = list[Cut]()
        for name in attribute_names(function, value):
            if kind is Kind.ATTRIBUTE or is_added(function, name, value):
                cuts.append(Cut(kind, id(function), code, f"{code}.{name}"))
        path.enter(attribute, target, with_repeated(cuts) if code else None)

    def _append_cache(self, steps: Sequence[object], path: Path) -> int:
        """Write the step through an ``lru_cache``, or through an attribute of it."""
        names = attribute_names(steps[0], steps[1])
        if names and names != ["__wrapped__"]:
            return self._append_instance(steps, path)
        function = (instance_dict(steps[0]) or {}).get("__wrapped__")
        path.advise(path.statement("{}.cache_clear()"), "call cache_clear() of that function")
        path.say(f": lru_cache of function {self._name_of_function(function)}")
        return 2 if type(steps[1]) is dict and len(steps) > 2 else 1

    def _append_suspended(self, steps: Sequence[object], path: Path) -> int:
        """Write the steps through a generator or coroutine, up to the name that its frame holds."""
        suspended = steps[0]
        what, ending = _SUSPENSIONS[type(suspended)]
        frame = frame_of(suspended)
        # Python 3.13 keeps the arguments of one that has not started when it is closed.
        advice = path.statement(ending) if is_started(suspended) else path.removal
        path.advise(advice, f"close() the {what} when it is done")
        taken = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
        name = self._name_of_code(code_of(suspended))
        path.say(f": suspended {what} {name}{_local(frame, steps[taken])}")
        return taken

    def _append_task(self, task: object, child: object, path: Path) -> None:
        """Write the step through a task: to its result, or through a task that is not done."""
        is_failure = is_exactly(child, CoroutineType, TracebackType) or is_instance(
            child, BaseException
        )
        if not is_pending(task) and not is_failure:
            path.append_fixed(".result()", path.code and f"{path.code}.result()")
            return
        path.advise(_ending(task, path), "")
        path.say(": asyncio task")

    def _append_traceback(self, steps: Sequence[object], path: Path) -> int:
        """Write the steps through exceptions and tracebacks, up to the name that a frame holds."""
        path.advise(path.removal, _OR_EXCEPTION, "once you have read it")
        line = 0
        for position, item in enumerate(steps):
            if type(item) is TracebackType:
                line = item.tb_lineno
            elif type(item) is FrameType:
                return self._append_frame(item, line, position, steps, path)
            elif not is_instance(item, BaseException):
                if path.is_freed_by_command:
                    path.remedy = Remedy(FORGET_LAST_ERROR)
                path.say(f": exception{attribute_text(steps[position - 1], item)}")
                return position
        path.say(": exception")
        return len(steps) - 1

    def _append_frame(
        self, frame: FrameType, line: int, position: int, steps: Sequence[object], path: Path
    ) -> int:
        """Write the step through a traceback's frame; ``line`` is 0 if no traceback leads to it."""
        if position == len(steps) - 1:
            path.say(": saved traceback")
            return position
        position += 1
        if type(steps[position]) is dict and position + 1 < len(steps):
            position += 1  # up to Python 3.12, the dict that shows its local names
        where = f"{self._name_of_code(frame.f_code)} line {line or frame.f_lineno}"
        path.say(f": saved traceback, {where}{_local(frame, steps[position])}")
        return position

    # -- objects ---------------------------------------------------------------------------------

    def _append_instance(self, steps: Sequence[object], path: Path) -> int:
        """Write the step through any other object, to the attribute that refers to the next one."""
        parent, child = steps[0], steps[1]
        written = (
            append_frame_step(path, steps, self._is_older)
            or append_dataset_step(path, steps)
            or append_torch_step(path, steps, self._names)
        )
        if written:
            return written
        name = attribute_text(parent, child)
        target = ""
        if path.code and name.startswith("."):
            target = f"{path.code}{name}"
        library = library_that_keeps(parent, name[1:], child)
        if library:
            path.advise("", f"let {library} remove it from there")
            path.append_fixed(name, target)
            return 1
        shown = name or f" ({type_name(parent)})"
        odd = _code_of_odd_attribute(parent, child, path.code) if path.code and not target else ""
        if odd:
            path.enter(shown, odd, Cut(Kind.KEY, id(parent), path.code, odd))
            return 1
        kind = kind_of_attribute(parent, name[1:], child)
        if (kind is None or path.is_of_library) and is_added(parent, name[1:], child):
            path.is_of_library = False
            kind = Kind.DELETED_ATTRIBUTE
        if kind is None and not self._append_guarded_attribute(path, parent, child, name):
            path.append_fixed(shown, target)
        elif kind is not None:
            cut = _cut_of_attributes(parent, child, path.code) if target else None
            path.enter(shown, _readable(parent, child, path.code, name), cut)
        return 1

    def _append_guarded_attribute(
        self, path: Path, parent: object, child: object, name: str
    ) -> bool:
        """Append an attribute of a variable's object that a statement cannot set, such as that of a
        frozen data class; return False for anything else.
        """
        is_variable = path.cut is not None and path.cut.kind is Kind.NAME and path.code != ""
        if not is_variable or not is_users_class(type(parent)) or not name.startswith("."):
            return False
        imports, code = split(path.code)
        cuts = list[Cut]()
        for attribute in filter(is_name, attribute_names(parent, child)):
            call = f'{imports}object.__setattr__({code}, "{attribute}", None)'
            cuts.append(Cut(Kind.CALL, id(parent), path.code, call))
        path.enter(name, f"{path.code}{name}", with_repeated(cuts))
        return True


def _items_once(items: Sequence[object]) -> Iterator[tuple[int, object]]:
    """Yield the items, each once, with their first positions."""
    seen = set[int]()
    for position, item in enumerate(items):
        if id(item) not in seen:
            seen.add(id(item))
            yield position, item


def _wanted_parts(
    items: Sequence[object], wanted: Container[int]
) -> list[tuple[int, object, object]]:
    """Return the wanted objects in the items of a container: each with its item, and the position
    of that.
    """
    wanted_parts = list[tuple[int, object, object]]()
    for position, item in _items_once(items):
        for key, part in by_identity(items_of(item)).items():
            if key in wanted:
                wanted_parts.append((position, item, part))
    return wanted_parts


def _ending(item: object, path: Path) -> str:
    """Return the line that ends an object, the path's target, if something must, and removes it."""
    removal = path.removal
    call = ending_of(item)
    if not call or f".{call}" in removal:
        return removal
    return in_sequence([path.statement(f"{{}}.{call}"), removal])


def _references_removed_by(
    cut: Cut | None, ended_id: int, step_ids: Sequence[int]
) -> frozenset[tuple[int, int]]:
    """Return the references that a line removes, as the identities of both objects.

    Args:
        cut: the only reference that it removes, if that is known.
        ended_id: the identity of an object that it ends; 0 if there is none.
        step_ids: the identities of the objects on the way.
    """
    if ended_id:
        return frozenset({(ended_id, 0)})
    if cut is None:
        return frozenset()
    if cut.owner_id not in step_ids[:-1]:
        return cut.also_removed
    position = step_ids.index(cut.owner_id)
    return cut.also_removed | {(cut.owner_id, step_ids[position + 1])}


def _code_of_odd_attribute(owner: object, child: object, code: str) -> str:
    """Return the code of an attribute that has no name as Python writes names, such as
    ``vars(m)["a b"]``; an empty text if it is another one, or not a user's.
    """
    names = attribute_names(owner, child)
    if not names or is_name(names[0]) or not is_users_class(type(owner)):
        return ""
    key = literal(names[0])
    if not key or names[0] not in (instance_dict(owner) or {}):
        return ""
    imports, expression = split(code)
    return f"{imports}vars({expression})[{key}]"


def _cut_of_attributes(owner: object, child: object, code: str) -> Cut | None:
    """Return the reference from an object to ``child``, with those of its other attributes.

    An attribute that a library's code may need stays.
    """
    cuts = list[Cut]()
    for name in attribute_names(owner, child):
        kind = kind_of_attribute(owner, name, child)
        if kind is None and is_added(owner, name, child):
            kind = Kind.DELETED_ATTRIBUTE
        if kind is not None:
            cuts.append(Cut(kind, id(owner), code, f"{code}.{name}"))
    return with_repeated(cuts)


def _cut_of_variable(function: FunctionType, cell: CellType, code: str) -> Cut | None:
    """Return the reference of a closure's variable, with those of its other variables to the same
    object; None if the function does not assign all of them.
    """
    value = _content_of(cell)
    cuts = list[Cut]()
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for position, (variable, other) in enumerate(variables):
        if other is not cell and (value is _EMPTY or _content_of(other) is not value):
            continue
        if not code or not _assigns(function.__code__, variable):
            return None
        target = f"{code}.__closure__[{position}].cell_contents"
        cuts.append(Cut(Kind.ATTRIBUTE, id(other), code, target))
    return with_repeated(cuts)


_EMPTY = object()


def _content_of(cell: CellType) -> object:
    """Return the object of a variable; ``_EMPTY`` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _readable(owner: object, child: object, code: str, name: str) -> str:
    """Return the code of an attribute; empty if there is none.

    Reading a class's attribute may run its ``__get__``, which returns something else.
    """
    if not code or not name.startswith("."):
        return ""
    if not is_instance(owner, type) or is_exactly(child, *_READ_AS_THEMSELVES):
        return f"{code}{name}"
    if not is_descriptor(child):
        return f"{code}{name}"
    imports, expression = split(code)
    return f'{imports}vars({expression})["{name[1:]}"]'


def _assigns(code: CodeType, variable: str) -> bool:
    """Return True if a function assigns a variable of the functions around it: ``nonlocal``."""
    return any(
        step.opname == "STORE_DEREF" and step.argval == variable
        for step in dis.get_instructions(code)
    )


_READ_AS_THEMSELVES = (
    FunctionType,
    property,
    functools.cached_property,
    staticmethod,
    classmethod,
    type(functools.lru_cache(len)),
)
"""Types of attributes which, read from a class, are themselves, or the function in them."""
_MOST_REMOVED = 300_000
"""Maximum number of items of one container to record as objects that a line removes."""
_MOST_INSIDE = 1000
"""Maximum number of parts of a container's items for each of which a line is written: a second
of work.
"""
_MOST_FIELDS = 20
"""Maximum number of places in an item whose references are compared with those of other items."""
_MOST_WRITTEN = 10
"""Maximum number of items of one container whose code is written; of more, only the positions are
needed.
"""


def _code_of_default(code: str, function: FunctionType, value: object) -> str:
    """Return the code of a default argument of a function; empty if it is not one."""
    defaults = function.__defaults__ or ()
    position = next((place for place, item in enumerate(defaults) if item is value), None)
    if position is not None:
        return f"{code}.__defaults__[{position}]"
    by_name = function.__kwdefaults__ or {}
    name = next((name for name, item in by_name.items() if item is value), "")
    return f'{code}.__kwdefaults__["{name}"]' if name else ""


def _local(frame: FrameType | None, child: object) -> str:
    """Return the local name of ``frame`` that refers to ``child``."""
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")


def without_own_dicts(chain: Sequence[object]) -> list[object]:
    """Return the chain without objects' own attribute dicts: ``a.b`` is one step."""
    steps = [chain[0]]
    for owner, item in itertools.pairwise(chain):
        is_own = type(item) is dict and item is not chain[-1] and owns(owner, item)
        if not is_own:
            steps.append(item)
    return steps
