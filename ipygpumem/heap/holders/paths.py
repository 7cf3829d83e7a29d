"""Writes chains of references as text, ``notebook variable cache["run3"][0]``, with the line that
frees the object.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import (
    elements,
    is_array,
    is_of_library,
    is_of_pandas,
    library_type,
    read_array,
    slots,
)
from ipygpumem.heap.holders.cuts import Cut, Kind, split, statement_of
from ipygpumem.heap.holders.frames import FORGET_LAST_ERROR, peek
from ipygpumem.heap.holders.graphs import DETACH
from ipygpumem.heap.holders.roots import (
    EVENT_LOOP,
    LAST_ERROR,
    NOTEBOOK,
    OF_MODULE,
    REMOVE,
    REMOVE_THEM,
    Root,
    Roots,
    module_code,
)
from ipygpumem.heap.holders.tasks import is_pending
from ipygpumem.heap.libraries import is_segment
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_exactly,
    is_instance,
    is_name,
    is_users,
    is_users_class,
    key_text,
    module_dict,
    module_of,
    mro_of,
    name_of,
    text_of,
    type_name,
)
from ipygpumem.records import ReferencePath

_PARTS = {"_modules", "_parameters", "_buffers"}
_LONGEST_PATH = 240
_STEP = re.compile(r"[.\[]|: |, ")
_HANDLE = "call the hook's handle.remove(), if you have kept the handle"
_OR_EXCEPTION = f"{REMOVE}, or delete the exception once you have read it"
_OR_FUNCTION = f"{REMOVE}, or delete the function when you no longer need it"
_SUSPENSIONS = {
    GeneratorType: ("gi", "generator", "{}.close()"),
    CoroutineType: ("cr", "coroutine", "{}.close()"),
    AsyncGeneratorType: ("ag", "async generator", "await {}.aclose()"),
}
"""The attribute prefix of each kind, its description, and the statement that ends it."""


@dataclass(frozen=True)
class Way:
    """A path to an object, and the references that its advice removes, if it does that alone."""

    holder: ReferencePath
    cuts: tuple[Cut, ...] = ()
    is_direct: bool = False
    """True if the only reference removed is the one to the object itself."""

    @property
    def cut(self) -> Cut | None:
        """The reference, if it is only one."""
        return self.cuts[0] if len(self.cuts) == 1 else None


class _Path:
    """A path under construction, and how to free its target.

    Attributes:
        text: the path so far.
        code: code of the path's target; empty if it cannot be typed.
        cut: the reference to remove, so that the target dies; None if there is none, or no code for
            it.
        is_fixed: True if the reference to the target itself cannot be removed, such as that of a
            tuple.
        advice: the statement that frees the target, or words, if a step knew one.
        is_lost: True if a step cannot be typed: the text ends there.
    """

    def __init__(self, root: Root, text: str) -> None:
        self.text = text
        self.code = root.code
        self.cut = root.cut
        self.is_fixed = False
        self.advice = ""
        if root.advice != REMOVE and not root.code:
            self.advice = root.advice
        self.is_lost = root.is_all
        self._is_all = root.is_all
        self._looks_up = root.rank == OF_MODULE
        self._is_of_library = root.advice == REMOVE
        self._unless_cut: Cut | None = None
        self._unless = ""
        """Advice for a target to which no reference can be removed inside a function."""

    def fixed(self, shown: str, code: str = "") -> None:
        """Append a reference that cannot be removed: that to its object is."""
        self._append(shown, code)
        self.is_fixed = True

    def enter(self, shown: str, code: str, cut: Cut | None) -> None:
        """Append a reference that can be removed, by ``cut`` if there is code for it."""
        was_out_of_reach = self.is_fixed and self.is_lost
        self._append(shown, code)
        if self._is_all or (cut is None and (self._unless or was_out_of_reach)):
            return
        if self._is_of_library and cut is not None and cut.kind is not Kind.CALL:
            cut = None  # the library's code may need it
        if cut is not None:
            outer = None if self.is_fixed else self.cut
            kind = Kind.ENTRY if cut.kind is Kind.KEY and self._looks_up else cut.kind
            cut = replace(cut, kind=kind, outer=outer)
            self._unless = ""
        self.cut = cut
        self.is_fixed = False

    def _append(self, shown: str, code: str) -> None:
        if not self.is_lost:
            self.text += shown
            self.is_lost = shown.startswith(" (")
        self.code = code

    def say(self, words: str, code: str = "") -> None:
        """Append a step that only words can describe."""
        self.text += words
        self.code = code
        self.is_fixed = True
        self.is_lost = self._is_all

    def statement(self, template: str) -> str:
        """Return a statement about the path's target, with its import; empty if there is no code
        for it.
        """
        imports, code = split(self.code)
        return imports + template.format(code) if code else ""

    @property
    def removal(self) -> str:
        """The statement that removes the target, or the nearest object that can be removed; may be
        empty.
        """
        if self.cut is None:
            return ""
        if self.cut.kind is Kind.NAME and not self.is_fixed:
            imports, code = split(self.cut.target)
            return f"{imports}{code} = None"
        return self.cut.statement

    def advise(self, advice: str, words: str) -> None:
        """Record how to free the path's target, unless that is known: by a statement, or else in
        words.
        """
        self.advice = self.advice or advice or words

    def advise_unless(self, comment: str, words: str) -> None:
        """Remove the current target unless the final one can be removed from an object further
        along the path.
        """
        if self._unless:
            return
        self._unless = f"{self.removal}{comment}" if self.removal else words
        self._unless_cut = self.cut

    def way(self, root: Root, *, is_root_itself: bool) -> Way:
        """Return the path with its advice, for a root that has advice of its own."""
        text = _ended(self.text)
        if self.advice:
            return Way(ReferencePath(text, self.advice))
        if self._unless:
            cuts = () if self._unless_cut is None else (self._unless_cut,)
            return Way(ReferencePath(text, self._unless), cuts)
        if self.cut is not None:
            # A name may lead to much that is older: only the caller knows if all of it is unwanted.
            is_name = self.cut.kind is Kind.NAME and not self.is_fixed
            is_direct = not self.is_fixed and (is_root_itself or not self._is_all)
            advice = "" if is_name else self.cut.statement
            return Way(ReferencePath(text, advice), (self.cut,), is_direct)
        return Way(ReferencePath(text, root.advice or REMOVE))


class PathWriter:
    """Writes chains of references as text."""

    def __init__(self, roots: Roots) -> None:
        self._cell_of = roots.cell_of
        self._names = roots.names

    def holder(self, root: Root, chain: Sequence[object]) -> ReferencePath:
        """Return the path from ``root`` along ``chain``."""
        return self.way(root, chain).holder

    def way(self, root: Root, chain: Sequence[object], *, of_graph: bool = False) -> Way:
        """Return the path from ``root`` along ``chain``, whose last object may be a
        graph's tensor.
        """
        steps = _without_dicts(chain)
        path = _Path(root, root.text or self._name(steps[0]))
        if not root.text and is_pending(steps[0]):
            name = library_type("asyncio", "Task").get_name(steps[0])  # type: ignore[union-attr]  # it is one of them
            task = f"task for task in asyncio.all_tasks() if task.get_name() == {name!r}"
            path.advice = f"import asyncio; next({task}).cancel()"
        position, is_own = 0, False
        while position < len(steps):
            if is_segment(steps[position]):
                path.advise(path.statement("{0}.close(); {0}.unlink()"), "close() and unlink() it")
            if position == len(steps) - 1:
                break
            # and not in a list of models, from which one can be removed
            behind_name = "[" not in path.text
            taken, is_part = self._step(steps[position:], path)
            is_own |= is_part and behind_name
            position += taken
        if of_graph:
            return Way(
                ReferencePath(_ended(path.text), path.advice or _advice_for_graph(steps, path))
            )
        if path.advice == LAST_ERROR.advice and is_instance(steps[-1], BaseException):
            path.advice = (
                FORGET_LAST_ERROR  # %gpumem free clears frames, not what the error itself refers to
            )
        if is_own and not path.advice:
            return Way(ReferencePath(_ended(path.text), ""))
        return path.way(root, is_root_itself=len(steps) == 1)

    def holder_from_name(self, name: str, chain: Sequence[object]) -> ReferencePath:
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
    ) -> list[tuple[object, Cut]]:
        """Return the references by which the last object of a chain, or an item of it, holds the
        ``wanted`` objects.

        The search for them ends one step below the items.
        """
        holder = chain[-1]
        items = items_of(holder)
        direct = [item for item in items if id(item) in wanted]
        found = list(zip(direct, self.cuts_of_items(root, chain, direct), strict=False))
        for item in items if not direct else ():
            for part in items_of(item):
                if id(part) in wanted:
                    cut = self.way(root, (*chain, item, part)).cut
                    if cut is not None:
                        found.append((part, cut))
        return found

    def cuts_of_items(
        self, root: Root, chain: Sequence[object], items: Sequence[object]
    ) -> list[Cut]:
        """Return the references to some items of an object, which may be very many.

        The list is empty if an item cannot be removed by itself.
        """
        cuts = list[Cut]()
        for item in items[:_MOST_WRITTEN]:
            way = self.way(root, (*chain, item))
            if way.cut is None or not way.is_direct:
                return []
            cuts.append(way.cut)
        if len(items) <= _MOST_WRITTEN:
            return cuts
        positions = {id(item): position for position, item in enumerate(items_of(chain[-1]))}
        first = cuts[0]
        return [replace(first, position=positions[id(item)], target="") for item in items]

    def removal_of_items(
        self, name: str, chain: Sequence[object], items: Sequence[object]
    ) -> ReferencePath:
        """Return the path from a notebook's name to a container, with the line that removes items.

        Args:
            name: the name.
            chain: the name's object, and the objects from it to the container.
            items: items of the container.
        """
        root, steps = self._from_name(name, chain)
        path = self.way(root, steps).holder.path
        cuts = self.cuts_of_items(root, steps, items)
        return ReferencePath(path, statement_of(cuts) or REMOVE_THEM)

    def _name(self, item: object) -> str:
        if is_instance(item, type):
            return f"class {name_of(item)}"  # type: ignore[arg-type]  # is_instance says so
        if is_pending(item):
            return EVENT_LOOP
        kind = type_name(item)
        return (
            f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} that nothing visible from "
            f"Python refers to"
        )

    def _step(self, steps: Sequence[object], path: _Path) -> tuple[int, bool]:
        """Write the next piece of a path; return the number of its references, and whether it is a
        model's own.
        """
        parent, child = steps[0], steps[1]
        kind = type(parent)
        taken = _went_into_registry(path, steps, self._names)
        if taken:
            return taken, False
        if kind is FunctionType:
            return self._function(steps, path), False
        if is_exactly(parent, *_SUSPENSIONS):
            return self._suspended(steps, path), False
        if kind is TracebackType or kind is FrameType or is_instance(parent, BaseException):
            return self._traceback(steps, path), False
        if kind is MethodType:
            path.advise(path.removal, "")
            path.say(f": bound method {self._code_name(parent.__func__)}, its object")  # type: ignore[attr-defined]
            return 1, False
        if kind is functools._lru_cache_wrapper:
            path.advise(path.statement("{}.cache_clear()"), "call cache_clear() of that function")
            path.say(
                f": lru_cache of function "
                f"{self._code_name((instance_dict(parent) or {}).get('__wrapped__'))}"
            )
            return 2 if type(child) is dict and len(steps) > 2 else 1, False
        if is_of_library(parent, "asyncio", "Task"):
            self._task(parent, child, path)
            return 1, False
        if kind is staticmethod or kind is classmethod:
            path.fixed("", path.code)  # reading the attribute returns the function
            return 1, False
        if _went_into(path, parent, child):
            return 1, False  # users do not type ``.__func__``
        return self._instance(steps, path)

    # -- functions -------------------------------------------------------------------------------

    def _code_name(self, function: object) -> str:
        """Return a function's name and the cell that defined it."""
        if type(function) is not FunctionType:
            return type_name(function)
        return self._named(function.__code__)

    def _named(self, code: CodeType) -> str:
        cell = self._cell_of(code.co_filename)
        return code.co_name if cell is None else f"{code.co_name} (cell {cell})"

    def _function(self, steps: Sequence[object], path: _Path) -> int:
        function, child = steps[0], steps[1]
        assert type(function) is FunctionType
        name = self._code_name(function)
        after = steps[2] if len(steps) > 2 else None
        cells = function.__closure__
        path.advise_unless("  # when you no longer need the function", _OR_FUNCTION)
        code = path.code
        if cells is not None and child is cells and type(after) is CellType:
            position = _position(cells, after)
            variable = function.__code__.co_freevars[position]
            path.say(
                f": closure of function {name}, variable {variable}",
                code and f"{code}.__closure__[{position}].cell_contents",
            )
            return 3 if len(steps) > 3 else 2
        if child is function.__defaults__ or child is function.__kwdefaults__:
            path.say(
                f": default argument of function {name}",
                code and _code_of_default(code, function, after),
            )
            return 1 if after is None else 2
        if child is cells:
            path.say(f": closure of function {name}")
            return 1
        names = instance_dict(function)
        value, taken = (after, 2) if after is not None and child is names else (child, 1)
        attribute = _attribute(function, value)
        path.say(f": function {name}")
        if attribute.startswith(".") and is_users(function.__code__.co_filename):
            target = code and f"{code}{attribute}"
            path.enter(
                attribute, target, Cut(Kind.ATTRIBUTE, id(function), code, target) if code else None
            )
        else:
            path.fixed(attribute)
        return taken

    def _suspended(self, steps: Sequence[object], path: _Path) -> int:
        prefix, what, ending = _SUSPENSIONS[type(steps[0])]
        taken = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
        frame, code = (getattr(steps[0], f"{prefix}_{name}") for name in ("frame", "code"))
        is_started = getattr(
            steps[0], f"{prefix}_suspended", frame is not None and frame.f_lasti >= 0
        )
        # Python 3.13 keeps the arguments of one that has not started when it is closed.
        path.advise(
            path.statement(ending) if is_started else path.removal,
            f"close() the {what} when it is done",
        )
        path.say(f": suspended {what} {self._named(code)}{_local(frame, steps[taken])}")
        return taken

    def _task(self, task: object, child: object, path: _Path) -> None:
        is_failure = is_exactly(child, CoroutineType, TracebackType) or is_instance(
            child, BaseException
        )
        if not is_pending(task) and not is_failure:
            path.fixed(".result()", path.code and f"{path.code}.result()")
            return
        removal = path.removal
        if path.code and is_pending(task) and f".{_CANCEL}" not in removal:
            removal = f"{path.statement('{}.cancel()')}; {removal}"
        path.advise(removal, "")
        path.say(": asyncio task")

    def _traceback(self, steps: Sequence[object], path: _Path) -> int:
        """Cover exceptions, tracebacks and frames up to the name that a frame holds."""
        line, position = 0, 0
        path.advise(path.removal and f"{path.removal}  # once you have read it", _OR_EXCEPTION)
        for position, item in enumerate(steps):
            if type(item) is TracebackType:
                line = item.tb_lineno
            elif type(item) is FrameType:
                break
            elif not is_instance(item, BaseException):
                if path.advice == LAST_ERROR.advice:
                    path.advice = FORGET_LAST_ERROR
                path.say(f": exception{_attribute(steps[position - 1], item)}")
                return position
        else:
            path.say(": exception")
            return len(steps) - 1
        frame = steps[position]
        assert type(frame) is FrameType
        if position == len(steps) - 1:
            path.say(": saved traceback")
            return position
        position += 2 if type(steps[position + 1]) is dict and position + 2 < len(steps) else 1
        where = f"{self._named(frame.f_code)} line {line or frame.f_lineno}"
        path.say(f": saved traceback, {where}{_local(frame, steps[position])}")
        return position

    # -- objects ---------------------------------------------------------------------------------

    def _instance(self, steps: Sequence[object], path: _Path) -> tuple[int, bool]:
        parent, child = steps[0], steps[1]
        kind = type_name(parent)
        if kind in ("DataFrame", "Series") and is_of_pandas(
            parent
        ):  # users write no names for the objects inside
            inside = itertools.takewhile(
                lambda item: is_of_pandas(item) or is_exactly(item, tuple, list), steps
            )
            path.enter("", "", None)  # one column of several
            return min(sum(1 for _ in inside), len(steps) - 1), False
        if module_of(child) == "torch.autograd.function" or kind.endswith("Backward0"):
            path.advise("", DETACH)
            path.say(f": its autograd graph ({type_name(child)})")
            return 1, False
        name = _attribute(parent, child)
        if len(steps) > 2 and is_instance(child, dict):
            hook = _kind_of_hook(parent, name)
            items: Any = child
            key = next((key for key, value in list(dict.items(items)) if value is steps[2]), None)
            if hook:
                where = name or _hooks_of_tensor(parent, child)
                removal = f"{where}.clear()" if len(items) == 1 else f"{where}.pop({key!r})"
                path.advise(
                    self._handle_of(child, key) or (where and path.statement("{}" + removal)),
                    _HANDLE,
                )
                path.text, path.code = f"{hook} on {path.text.removeprefix(NOTEBOOK)}", ""
                path.is_lost = True
                return 2, False
            if name[1:] in _PARTS:
                part = f".{key}" if text_of(key).isidentifier() else f".get_submodule({key!r})"
                target = path.code and f"{path.code}{part}"
                is_plain = bool(target) and text_of(key).isidentifier()
                cut = Cut(Kind.ATTRIBUTE, id(parent), path.code, target) if is_plain else None
                path.enter(f"[{key}]" if text_of(key).isdecimal() else part, target, cut)
                return 2, True
        if name == ".state" and is_of_library(parent, "torch.optim", "Optimizer"):
            path.advise(_clearing_state(parent, child, path), "")
        target = f"{path.code}{name}" if path.code and name[:1] == "." else ""
        kind_of_cut = _kind_of_attribute(parent, name[1:], child)
        if kind_of_cut is None:
            path.fixed(name or f" ({kind})", target)
        else:
            cut = Cut(kind_of_cut, id(parent), path.code, target) if target else None
            path.enter(name or f" ({kind})", target, cut)
        return 1, is_of_library(parent, "torch.optim", "Optimizer")

    def _handle_of(self, hooks: object, key: object) -> str:
        """Return the statement that removes one of ``hooks``, if its handle has a name."""
        for name, value in list(self._names.items()):
            handle = (
                instance_dict(value)
                if is_of_library(value, "torch.utils.hooks", "RemovableHandle")
                else None
            )
            if (
                handle is not None
                and handle.get("id") == key
                and handle["hooks_dict_ref"]() is hooks
            ):
                return f"{name}.remove()"
        return ""


_STATE_MADE_AT_START = {"Adagrad"}
"""Names of torch's optimizers that make their state in the constructor, and never again."""


_MADE_IN_STEPS = frozenset(
    [
        "step",
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "mu_product",
        "exp_inf",
        "square_avg",
        "acc_delta",
        "grad_avg",
        "eta",
        "mu",
        "ax",
        "prev",
        "step_size",
        "row_var",
        "col_var",
        "variance",
        "func_evals",
        "n_iter",
        "d",
        "t",
        "old_dirs",
        "old_stps",
        "ro",
        "H_diag",
        "prev_flat_grad",
        "prev_loss",
        "al",
    ]
)
"""The names of the state that torch's optimizers make in the first step in which it is missing."""


def _clearing_state(optimizer: object, state: Any, path: _Path) -> str:
    """Return the statement that drops the state of an optimizer; empty if that may do harm.

    All but one of torch's own optimizers begin without state, and make it in the first step. Other
    state is the user's.
    """
    module = module_of(optimizer)
    if not module.startswith("torch.optim.") or type_name(optimizer) in _STATE_MADE_AT_START:
        return ""
    for of_parameter in list(dict.values(state)):
        if not is_instance(of_parameter, dict):
            return ""
        for key in list(dict.keys(of_parameter)):
            if type(key) is not str or key not in _MADE_IN_STEPS:
                return ""
    clearing = path.statement("{}.state.clear()")
    return clearing and f"{clearing}{_COMMENT}its averages and momentum begin again"


_MOST_WRITTEN = 10
"""Maximum number of items of one container whose code is written; of more, only the positions are
needed.
"""


def items_of(holder: Any) -> list[object]:
    """Return the items of a container, or the attributes of an object."""
    if is_instance(holder, dict):
        return list(dict.values(holder))
    for base in (list, tuple, set, frozenset, deque):
        if is_instance(holder, base):
            return list(base.__iter__(holder))
    return [*(instance_dict(holder) or {}).values(), *slots(holder).values()]


_COMMENT = "  # "
_MOST_WAYS = 4
"""Maximum number of places to name that hold one object."""


def joined(ways: Sequence[Way]) -> Way:
    """Return the holders of one object as one, with the line that removes it from all of them."""
    paths = [way.holder.path for way in ways[:_MOST_WAYS]]
    path = ", ".join(paths)
    if len(ways) > _MOST_WAYS:
        path += f", and {len(ways) - _MOST_WAYS} more"
        return Way(ReferencePath(path, "remove it from all of these"))
    cuts = [cut for way in ways for cut in way.cuts]
    if all(way.cuts for way in ways):
        cuts = _ended_first(ways, cuts)
        advice = statement_of(cuts)
        if advice:
            comments = [way.holder.advice.partition(_COMMENT) for way in ways]
            comment = next((dashes + text for _, dashes, text in comments if text), "")
            return Way(ReferencePath(path, advice + comment), tuple(cuts))
    return Way(ReferencePath(path, ", and ".join(line_of(way.holder.advice) for way in ways)))


def _ended_first(ways: Sequence[Way], cuts: list[Cut]) -> list[Cut]:
    """Return the references to one object, which a user ends by its name if it has to be ended.

    An example is a widget in a dict: ``outer["w"].close(); del outer["w"]``.
    """
    direct = [way.cut for way in ways if way.is_direct and way.cut is not None]
    closing = [cut for cut in direct if cut.kind is Kind.CLOSED]
    named = [cut for cut in direct if cut.kind in _REFERENCES]
    if not closing or not named:
        return cuts
    ended = replace(named[0], ending=closing[0].ending)
    return [ended, *(cut for cut in cuts if cut not in (closing[0], named[0]))]


_REFERENCES = {Kind.NAME, Kind.ITEM, Kind.KEY, Kind.ATTRIBUTE, Kind.MADE, Kind.ENTRY, Kind.SLOT}
"""Kinds of references whose target is the code of an object."""


def line_of(advice: str) -> str:
    """Return the statement of a line of advice, without its comment."""
    return advice.partition(_COMMENT)[0]


def _kind_of_hook(owner: object, name: str) -> str:
    """Return the kind of torch's hooks in attribute ``name``, empty for a tensor's; empty if it has
    none.
    """
    kinds = (("torch.nn", "Module"), ("torch.optim", "Optimizer"))
    has_hooks = is_of_library(owner, "torch", "Tensor") or (
        name.endswith("_hooks") and any(is_of_library(owner, *kind) for kind in kinds)
    )
    return f"{name.strip('._').removesuffix('hooks').replace('_', ' ')}hook" if has_hooks else ""


def _hooks_of_tensor(tensor: object, hooks: object) -> str:
    """Return ``.name`` for the attribute of a tensor that is ``hooks``; empty if there is none."""
    base: Any = library_type("torch", "Tensor")
    with sys.modules["torch"]._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hasattr(base, name) and getattr(base, name).__get__(tensor) is hooks:
                return f".{name}"
    return ""


def _ended(path: str) -> str:
    """Return a path up to the name or item before it becomes too long to read."""
    if len(path) <= _LONGEST_PATH:
        return path
    steps = [match.start() for match in _STEP.finditer(path, 0, _LONGEST_PATH)]
    return f"{path[: steps[-1] if steps else _LONGEST_PATH]} …"


def _went_into(path: _Path, parent: Any, child: object) -> bool:
    """Append an item and return True if ``parent`` is a container."""
    if is_instance(parent, dict):
        _went_into_dict(path, parent, child)
    elif is_instance(parent, list) or type(parent) is deque:
        position = _position(parent, child)
        code = path.code and f"{path.code}[{position}]"
        cut = Cut(Kind.ITEM, id(parent), path.code, code, position, len(parent)) if code else None
        path.enter(f"[{position}]", code, _ended_by(child, cut))
    elif is_instance(parent, tuple):
        position = _position(parent, child)
        path.fixed(f"[{position}]", path.code and f"{path.code}[{position}]")
    elif is_instance(parent, set) or is_instance(parent, frozenset):
        _went_into_set(path, parent, child)
    elif elements(parent) is not None:
        _went_into_array(path, parent, child)
    elif is_array(parent):
        path.fixed("")  # a view: its own path says enough
    else:
        return False
    return True


_CANCEL = "cancel()"


def _ended_by(item: object, cut: Cut | None) -> Cut | None:
    """Return the reference to an item, with the call that ends the item if something must.

    The event loop keeps a pending task without any other reference.
    """
    if cut is None or not is_pending(item):
        return cut
    return replace(cut, ending=_CANCEL)


def is_opaque(item: object) -> bool:
    """Return True for a library's object that keeps its data in private attributes.

    Users write no names for what is inside: ``source`` of bokeh has ``_property_values``.
    """
    if is_users_class(type(item)) or is_array(item) or is_instance(item, BaseException):
        return False
    if any(is_instance(item, kind) for kind in _OPEN):
        return False
    return module_of(item).partition(".")[0] not in _OPEN_MODULES


def is_private(owner: object, item: object) -> bool:
    """Return True if an object refers to an item, or has its attributes, out of users' sight."""
    if item is instance_dict(owner):
        return True
    return not _attribute(owner, item).startswith(".") or _attribute(owner, item)[1:2] == "_"


_OPEN = (dict, list, tuple, set, frozenset, deque, type, ModuleType, FunctionType, MethodType)
"""Types whose contents users name."""
_OPEN_MODULES = {"", "builtins", "collections", "functools", "logging", "queue", "types", "weakref"}
"""Modules of types that users fill step by step."""


def _went_into_dict(path: _Path, parent: Any, child: object) -> None:
    """Append a value of a dict, or a key."""
    pairs = list(dict.items(parent))  # one copy: a thread may change it
    may_count = is_exactly(parent, *_IN_ORDER) and bool(path.code)
    for position, (key, value) in enumerate(pairs):
        if value is child:
            entry = _value_at(path.code, key, position, may_count=may_count)
            break
    else:
        position = next((place for place, (key, _) in enumerate(pairs) if key is child), 0)
        entry = _key_at(path.code, position, may_count=may_count)
    cut = None
    if entry.target:
        cut = Cut(Kind.KEY, id(parent), path.code, entry.target, position, len(pairs))
    path.enter(entry.shown, entry.code, _ended_by(child, cut))


class _Entry(NamedTuple):
    """A value or key of a dict, as a path shows it."""

    shown: str
    code: str
    """The expression for it; empty if it cannot be typed."""
    target: str
    """The expression to delete."""


def _value_at(owner: str, key: object, position: int, *, may_count: bool) -> _Entry:
    """Return the value under a key; a key that cannot be typed is told by its position."""
    literal = _literal(key)
    if literal:
        shown = f"[{literal}]"
        if len(shown) >= _LONGEST_PATH // 4:
            shown = f"[{key_text(key)}]"
        code = owner and f"{owner}[{literal}]"
        return _Entry(shown, code, code)
    shown = f" (under a key of type {type_name(key)})"
    if not may_count:
        return _Entry(shown, "", "")
    imports, expression = split(owner)  # ``import m; m.x`` is no expression
    code = f"{imports}list({expression}.values())[{position}]"
    return _Entry(shown, code, f"{imports}{expression}[list({expression})[{position}]]")


def _key_at(owner: str, position: int, *, may_count: bool) -> _Entry:
    """Return a key of a dict, told by its position."""
    if not may_count:
        return _Entry(" (as a key)", "", "")
    imports, expression = split(owner)
    key = f"list({expression})[{position}]"
    return _Entry(" (as a key)", f"{imports}{key}", f"{imports}{expression}[{key}]")


def cuts_of_repeated(cut: Cut, parent: Any, child: object) -> list[Cut]:
    """Return all references from a list, deque or dict to one object, given one of them."""
    if is_instance(parent, dict):
        pairs = list(dict.items(parent))
        may_count = is_exactly(parent, *_IN_ORDER)
        cuts = list[Cut]()
        for position, (key, value) in enumerate(pairs):
            if value is child or key is child:
                target = _value_at(cut.owner, key, position, may_count=may_count).target
                cuts.append(replace(cut, position=position, target=target))
        return cuts if all(cut.target for cut in cuts) else []
    if cut.kind is not Kind.ITEM:
        return []
    items = items_of(parent)
    positions = [position for position, item in enumerate(items) if item is child]
    return [
        replace(cut, position=position, target=f"{cut.owner}[{position}]") for position in positions
    ]


def _literal(key: object) -> str:
    """Return the code of a dict's key; empty if there is none that is sure to equal it."""
    if type(key) is tuple:
        parts = [_literal(part) for part in key]
        if not all(parts):
            return ""
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    shown = key_text(key)
    if shown in (None, "nan", "inf", "-inf"):
        return ""
    is_plain = shown == f'"{key}"' and text_of(key).isprintable() and "\\" not in text_of(key)
    return text_of(shown) if is_plain else repr(key)


def _went_into_set(path: _Path, parent: Any, child: object) -> None:
    """Append an element of a set."""
    base: Any = set if is_instance(parent, set) else frozenset
    items = list(base.__iter__(parent))
    position = next((place for place, item in enumerate(items) if item is child), 0)
    imports, owner = split(path.code)
    code = f"{imports}list({owner})[{position}]" if owner else ""
    if base is frozenset:
        path.fixed(" (in a set)", code)
    else:
        cut = Cut(Kind.ELEMENT, id(parent), path.code, code, position, len(items)) if code else None
        path.enter(" (in a set)", code, _ended_by(child, cut))


def _went_into_array(path: _Path, parent: Any, child: object) -> None:
    """Append an element of an array of objects, or a field of a structured array."""
    cut = None
    target = ""
    items = elements(parent) or []
    if path.code and len(read_array("shape", parent)) == 1:
        names = read_array("dtype", parent).names
        for position, item in enumerate(items):
            if item is child and names is None:
                target = f"{path.code}[{position}]"
            elif names is not None and type(item) is tuple:
                fields = [name for name, value in zip(names, item, strict=True) if value is child]
                target = f"{path.code}[{fields[0]!r}][{position}]" if fields else target
    if target:
        cut = Cut(Kind.SLOT, id(parent), path.code, target)
    path.enter(" (in an array of objects)", target, cut)


_IN_ORDER = (dict, defaultdict, Counter)
"""Dicts that list their keys in the order of ``dict.items``; a subclass may list them in another
one.
"""


def _went_into_registry(path: _Path, steps: Sequence[object], names: Mapping[str, object]) -> int:
    """Append an object that a library's registry keeps; return the number of references, 0 if there
    is no registry.
    """
    if len(steps) < 3 or not path.code:
        return 0
    parent, child, item = steps[:3]
    if is_exactly(child, list) and is_of_library(parent, "logging", "Filterer"):
        return _went_into_logger(path, parent, child, item)
    if is_exactly(child, dict) and parent is library_type("weakref", "finalize"):
        return _went_into_finalizers(path, child, item)
    is_manager = is_of_library(parent, "IPython.core.events", "EventManager")
    if is_manager and is_exactly(child, dict) and is_exactly(item, list) and len(steps) > 3:
        return _went_into_callbacks(path, child, item, steps[3], names)
    return 0


def _went_into_logger(path: _Path, owner: object, items: Any, item: object) -> int:
    """Append a handler or filter of a logger."""
    name = _attribute(owner, items)
    method = {".handlers": "removeHandler", ".filters": "removeFilter"}.get(name)
    if method is None:
        return 0
    position = _position(items, item)
    imports, code = split(path.code)
    call = f"{imports}{code}.{method}({code}{name}[{position}])"
    path.enter(
        f"{name}[{position}]",
        f"{path.code}{name}[{position}]",
        Cut(Kind.CALL, id(items), path.code, call),
    )
    return 2


def _went_into_finalizers(path: _Path, registry: Any, info: object) -> int:
    """Append the arguments of a ``weakref.finalize``."""
    pairs = list(dict.items(registry))
    position = next((place for place, (_, value) in enumerate(pairs) if value is info), 0)
    imports, code = split(path.code)
    # With the semicolon, IPython keeps no output: the arguments.
    call = f"{imports}list({code}._registry)[{position}].detach();"
    path.enter(
        "._registry (arguments of a finalizer)", "", Cut(Kind.CALL, id(registry), path.code, call)
    )
    path.is_lost = True
    path.is_fixed = True
    return 2


def _went_into_callbacks(
    path: _Path, callbacks: Any, functions: Any, function: object, names: Mapping[str, object]
) -> int:
    """Append a function that IPython calls at an event."""
    event = next((text_of(key) for key, value in callbacks.items() if value is functions), "")
    position = _position(functions, function)
    place = f'.callbacks["{event}"][{position}]'
    code = f"{path.code}{place}"
    name = next(
        (name for name, value in list(names.items()) if value is function and is_name(name)), ""
    )
    imports, manager = split(path.code)
    call = f'{imports}{manager}.unregister("{event}", {name or split(code)[1]})'
    path.enter(place, code, Cut(Kind.CALL, id(functions), path.code, call))
    return 3


def _code_of_default(code: str, function: FunctionType, value: object) -> str:
    """Return the code of a default argument of a function; empty if it is not one."""
    defaults = function.__defaults__ or ()
    position = next((place for place, item in enumerate(defaults) if item is value), None)
    if position is not None:
        return f"{code}.__defaults__[{position}]"
    by_name = function.__kwdefaults__ or {}
    name = next((name for name, item in by_name.items() if item is value), "")
    return f'{code}.__kwdefaults__["{name}"]' if name else ""


def _kind_of_attribute(owner: object, name: str, child: object) -> Kind | None:
    """Return the kind of an attribute; None if it cannot be removed, or if the code of a library
    may need it.
    """
    if not is_name(name) or is_instance(owner, functools.partial) or is_of_pandas(owner):
        return None
    if is_instance(owner, type):
        is_method = hasattr(type(child), "__get__")
        return Kind.MADE if is_method else Kind.ATTRIBUTE
    kind = type(owner)
    if type(_class_attribute(kind, name)) is functools.cached_property:
        return Kind.MADE
    if _class_attribute(kind, "__setattr__") is not object.__setattr__ and not is_of_library(
        owner, "torch.nn", "Module"
    ):
        return None  # such as a frozen data class
    if is_users_class(kind):
        return Kind.ATTRIBUTE
    is_stored = name in (instance_dict(owner) or {})
    return Kind.ATTRIBUTE if is_stored and not name.startswith("_") else None


def _class_attribute(kind: type, name: str) -> object:
    """Return an attribute of a class or its bases without running their code; None if there is
    none.
    """
    for base in mro_of(kind):
        found = class_dict(base).get(name)
        if found is not None:
            return found
    return None


def _advice_for_graph(steps: Sequence[object], path: _Path) -> str:
    """Return the advice for a tensor that keeps a graph: drop the graph, or the list of such
    tensors.
    """
    if not path.removal or path.is_fixed:
        return ""
    is_in_list = len(steps) > 1 and is_exactly(steps[-2], list, deque)
    drop = path.statement("{0} = {0}.detach()")
    if is_in_list:
        drop = f"{path.code.rpartition('[')[0]}.clear()"
    return f"{drop}  # and {DETACH}"


def _position(items: Iterable[object], child: object) -> int:
    base: Any = next(kind for kind in (list, tuple, deque) if is_instance(items, kind))
    return next((index for index, item in enumerate(base.__iter__(items)) if item is child), 0)


def _local(frame: FrameType | None, child: object) -> str:
    """Return the local name of ``frame`` that refers to ``child``."""
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")


def _attribute(owner: object, child: object) -> str:
    """Return ``.name`` for the attribute of ``owner`` that is ``child``; empty if it
    has no name.
    """
    attributes = [*(instance_dict(owner) or {}).items(), *slots(owner).items()]
    name = next((text_of(name) for name, value in attributes if value is child), "")
    if not name:
        return ""
    return f".{name}" if is_name(name) else " (in an attribute)"


def _without_dicts(chain: Sequence[object]) -> list[object]:
    """Return the chain without objects' own attribute dicts: ``a.b`` is one step."""
    steps = [chain[0]]
    for owner, item in itertools.pairwise(chain):
        is_own = type(item) is dict and item is not chain[-1] and owns(owner, item)
        if not is_own:
            steps.append(item)
    return steps


def owns(owner: object, names: dict[str, object]) -> bool:
    """Return True if a dict contains the attributes of an object or class."""
    if is_instance(owner, type):
        return any(item is names for item in gc.get_referents(class_dict(owner)))
    return type(owner) is not FunctionType and instance_dict(owner) is names
