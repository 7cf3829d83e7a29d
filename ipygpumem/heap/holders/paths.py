"""Writes chains of references as text, ``notebook variable cache["run3"][0]``, with the line that frees the object."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
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
from typing import Any

from ipygpumem.heap.arrays import elements, is_array, is_of_library, is_of_pandas, library_type, slots
from ipygpumem.heap.holders.frames import FORGET_LAST_ERROR, peek
from ipygpumem.heap.holders.graphs import DETACH
from ipygpumem.heap.holders.roots import EVENT_LOOP, LAST_ERROR, NOTEBOOK, OF_MODULE, REMOVE, Root, Roots, module_code
from ipygpumem.heap.holders.tasks import is_pending
from ipygpumem.heap.libraries import is_segment
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_exactly,
    is_instance,
    is_name,
    key_text,
    module_dict,
    module_of,
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


class _Path:
    """A path under construction, and how to free its target."""

    def __init__(self, root: Root, text: str) -> None:
        self.text, self.code, self.nearest = text, root.code, root.code
        self.advice = "" if root.advice == REMOVE or root.code else root.advice
        self._may_remove = root.advice != REMOVE
        self.is_lost, self._is_all, self.is_fixed = root.is_all, root.is_all, False
        """Two flags: a step cannot be typed; nothing can be removed from the last step's object, such as a tuple."""

    def go(self, shown: str, code: str = "", *, is_fixed: bool = False) -> None:
        """Append an item or attribute; the path ends before one that cannot be typed."""
        if not self.is_lost:
            self.text, self.is_lost = self.text + shown, not code and shown.startswith(" (")
        self.code, self.is_fixed = self.code and code and self.code + code, is_fixed or (self.is_lost and self.is_fixed)
        if self.code and not is_fixed:
            self.nearest = self.code

    def say(self, words: str) -> None:
        """Append a step that only words can describe."""
        self.text, self.code, self.is_lost = self.text + words, "", self._is_all

    def statement(self, template: str, target: str | None = None) -> str:
        """Return a statement about the path's target, with its import; empty if there is none."""
        target = self.code if target is None else target
        needed, semicolon, code = target.rpartition("; ")
        return target and needed + semicolon + template.format(code)

    @property
    def removal(self) -> str:
        """The statement that removes the path's target, or the nearest object that can be removed; may be empty."""
        if not self._may_remove:
            return ""  # a library's global
        return self.statement("del {}", self.nearest) if self.is_fixed else self.statement("{} = None")

    def advise(self, advice: str, words: str) -> None:
        """Record how to free the path's target, unless that is known: by a statement, or else in words."""
        self.advice = self.advice or advice or words


class PathWriter:
    """Writes chains of references as text."""

    def __init__(self, roots: Roots) -> None:
        self._cell_of, self._names = roots.cell_of, roots.names

    def holder(self, root: Root, chain: Sequence[object], *, of_graph: bool = False) -> ReferencePath:
        """Return the path from ``root`` along ``chain``, whose last object may be a graph's tensor."""
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
            behind_name = "[" not in path.text  # and not in a list of models, from which one can be removed
            taken, is_part = self._step(steps[position:], path)
            is_own |= is_part and behind_name
            position += taken
        if of_graph:
            is_in_list = is_exactly(steps[-2] if len(steps) > 1 else None, list, deque)
            drop = f"{path.code.rpartition('[')[0]}.clear()" if is_in_list else path.statement("{0} = {0}.detach()")
            advice = f"{drop}  # and {DETACH}" if path.removal and not path.is_fixed else ""
            return ReferencePath(_ended(path.text), path.advice or advice)
        is_inside = root.rank == 1 and bool(root.code) and len(steps) > 1  # in the value of a context variable
        of_root = "" if is_inside else root.advice
        default = of_root if of_root or len(steps) == 1 else REMOVE
        if not of_root and (path.is_fixed or root.rank == OF_MODULE or is_inside):
            default = path.removal or REMOVE * (not path.is_fixed)
        advice = path.advice or ("" if is_own else default)
        if advice == LAST_ERROR.advice and is_instance(steps[-1], BaseException):
            advice = FORGET_LAST_ERROR  # %gpumem free clears frames, not what the error itself refers to
        return ReferencePath(path=_ended(path.text), advice=advice)

    def holder_from_name(self, name: str, chain: Sequence[object]) -> ReferencePath:
        """Return the path from a notebook's name along ``chain``, which begins with the name's object.

        The path of a loaded module does not depend on its name in the notebook.
        """
        module: Any = chain[0]
        if is_instance(module, ModuleType):
            names = module_dict(module)
            inside = chain[2:] if len(chain) > 1 and chain[1] is names else chain[1:]
            module_name = text_of(names.get("__name__"))
            if inside and sys.modules.get(module_name) is module:
                key = next((key for key, value in list(names.items()) if value is inside[0]), None)
                root = Root.of_module(module_name, key, module_code(module_name, self._names))
                return self.holder(root, inside)
        return self.holder(Root.of_variable(name), chain)

    def holder_of_row(self, root: Root, chain: Sequence[object], number: int) -> ReferencePath:
        """Return the path to an object that holds a ``number`` of arrays, and maybe more than these."""
        found = self.holder(root, chain)
        if found.advice or len(chain) > 1:
            return found
        return replace(found, advice=REMOVE if number == 1 else "remove them from there")

    def _name(self, item: object) -> str:
        if is_instance(item, type):
            return f"class {name_of(item)}"  # type: ignore[arg-type]  # is_instance says so
        if is_pending(item):
            return EVENT_LOOP
        kind = type_name(item)
        return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} that nothing visible from Python refers to"

    def _step(self, steps: Sequence[object], path: _Path) -> tuple[int, bool]:
        """Write the next piece of a path; return the number of its references, and whether it is a model's own."""
        parent, child = steps[0], steps[1]
        kind = type(parent)
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
            path.say(f": lru_cache of function {self._code_name((instance_dict(parent) or {}).get('__wrapped__'))}")
            return 2 if type(child) is dict and len(steps) > 2 else 1, False
        if is_of_library(parent, "asyncio", "Task"):
            self._task(parent, child, path)
            return 1, False
        if kind is staticmethod or kind is classmethod or _went_into(path, parent, child):
            return 1, False  # users do not type ``.__func__``
        return self._instance(steps, path)

    # -- functions --------------------------------------------------------------------------------------------

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
        path.advise(path.removal and f"{path.removal}  # when you no longer need the function", _OR_FUNCTION)
        if cells is not None and child is cells and type(after) is CellType:
            variable = function.__code__.co_freevars[_position(cells, after)]
            path.say(f": closure of function {name}, variable {variable}")
            return 3 if len(steps) > 3 else 2
        if child is function.__defaults__ or child is function.__kwdefaults__:
            path.say(f": default argument of function {name}")
            return 1 if after is None else 2
        if child is cells:
            path.say(f": closure of function {name}")
            return 1
        names = instance_dict(function)
        if after is not None and child is names:
            path.say(f": function {name}{_attribute(function, after)}")
            return 2
        path.say(f": function {name}{_attribute(function, child)}")
        return 1

    def _suspended(self, steps: Sequence[object], path: _Path) -> int:
        prefix, what, ending = _SUSPENSIONS[type(steps[0])]
        taken = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
        frame, code = (getattr(steps[0], f"{prefix}_{name}") for name in ("frame", "code"))
        is_started = getattr(steps[0], f"{prefix}_suspended", frame is not None and frame.f_lasti >= 0)
        # Python 3.13 keeps the arguments of one that has not started when it is closed.
        path.advise(path.statement(ending) if is_started else path.removal, f"close() the {what} when it is done")
        path.say(f": suspended {what} {self._named(code)}{_local(frame, steps[taken])}")
        return taken

    def _task(self, task: object, child: object, path: _Path) -> None:
        is_failure = is_exactly(child, CoroutineType, TracebackType) or is_instance(child, BaseException)
        if not is_pending(task) and not is_failure:
            path.go(".result()", ".result()", is_fixed=True)
            return
        cancel = f"{path.statement('{}.cancel()')}; " if path.code and is_pending(task) else ""
        path.advise(cancel + path.removal, "")
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

    # -- objects ----------------------------------------------------------------------------------------------

    def _instance(self, steps: Sequence[object], path: _Path) -> tuple[int, bool]:
        parent, child = steps[0], steps[1]
        kind = type_name(parent)
        if kind in ("DataFrame", "Series") and is_of_pandas(parent):  # users write no names for the objects inside
            inside = itertools.takewhile(lambda item: is_of_pandas(item) or is_exactly(item, tuple, list), steps)
            path.code = ""
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
                path.advise(self._handle_of(child, key) or (where and path.statement("{}" + removal)), _HANDLE)
                path.text, path.code = f"{hook} on {path.text.removeprefix(NOTEBOOK)}", ""
                path.is_lost = True
                return 2, False
            if name[1:] in _PARTS:
                part = f".{key}" if text_of(key).isidentifier() else f".get_submodule({key!r})"
                path.go(f"[{key}]" if text_of(key).isdecimal() else part, part)
                return 2, True
        is_fixed = not name or is_instance(parent, functools.partial)
        path.go(name or f" ({kind})", name if name[:1] == "." else "", is_fixed=is_fixed)
        return 1, is_of_library(parent, "torch.optim", "Optimizer")

    def _handle_of(self, hooks: object, key: object) -> str:
        """Return the statement that removes one of ``hooks``, if its handle has a name."""
        for name, value in list(self._names.items()):
            handle = instance_dict(value) if is_of_library(value, "torch.utils.hooks", "RemovableHandle") else None
            if handle is not None and handle.get("id") == key and handle["hooks_dict_ref"]() is hooks:
                return f"{name}.remove()"
        return ""


def _kind_of_hook(owner: object, name: str) -> str:
    """Return the kind of torch's hooks in attribute ``name``, empty for a tensor's; empty if it has none."""
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
        keys = [key for key, value in list(dict.items(parent)) if value is child]  # one copy: a thread may change it
        shown = key_text(keys[0]) if keys else None
        is_plain = shown is not None and shown == f'"{keys[0]}"' and keys[0].isprintable() and "\\" not in shown
        code = "" if shown in (None, "nan", "inf", "-inf") else f"[{shown}]" if is_plain else f"[{keys[0]!r}]"
        words = f" (under a key of type {type_name(keys[0])})" if keys else " (as a key)"
        path.go((code if len(code) < _LONGEST_PATH // 4 else f"[{shown}]") or words, code)
    elif is_instance(parent, list) or is_instance(parent, tuple) or type(parent) is deque:
        item = f"[{_position(parent, child)}]"
        path.go(item, item, is_fixed=is_instance(parent, tuple))
    elif is_instance(parent, set) or is_instance(parent, frozenset):
        path.go(" (in a set)")
    elif elements(parent) is not None:
        path.go(" (in an array of objects)")
    elif is_array(parent):
        pass  # a view: its own path says enough
    else:
        return False
    return True


def _position(items: Iterable[object], child: object) -> int:
    base: Any = next(kind for kind in (list, tuple, deque) if is_instance(items, kind))
    return next((index for index, item in enumerate(base.__iter__(items)) if item is child), 0)


def _local(frame: FrameType | None, child: object) -> str:
    """Return the local name of ``frame`` that refers to ``child``."""
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")


def _attribute(owner: object, child: object) -> str:
    """Return ``.name`` for the attribute of ``owner`` that is ``child``; empty if it has no name."""
    attributes = [*(instance_dict(owner) or {}).items(), *slots(owner).items()]
    name = next((text_of(name) for name, value in attributes if value is child), "")
    return f".{name}" if is_name(name) else " (in an attribute)" * bool(name)


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
