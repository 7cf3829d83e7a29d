"""Puts chains of references in words: ``notebook variable cache["run3"][0]``.

Nothing here asks a user's object for anything: attributes are found in its dict and slots by identity, keys are shown
where they are plain text or numbers.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    TracebackType,
)
from typing import Any

from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_exactly,
    is_instance,
    key_text,
    module_of,
    name_of,
    text_of,
    type_name,
)
from ipygpumem.model import Holder
from ipygpumem.objects.arrays import elements, is_of_library, is_of_pandas, slots
from ipygpumem.objects.holders.frames import peek
from ipygpumem.objects.holders.graphs import DETACH

_SUSPENDED = ((GeneratorType, "gi"), (CoroutineType, "cr"), (AsyncGeneratorType, "ag"))
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_state_dict_hooks": "state_dict hook",
}
_PARTS = {"_modules", "_parameters", "_buffers"}
_LONGEST_PATH = 240
NOTEBOOK = "notebook variable "

_HANDLE = "call the hook's handle.remove() when you no longer need it"
_OR_EXCEPTION = "remove it from there, or delete the exception once you have read it"


_REMOVE = "remove it from there"
_OR_FUNCTION = f"{_REMOVE}, or delete the function when you no longer need it"


@dataclass(frozen=True)
class Place:
    """Where a root keeps something. Of several places the one of the lowest ``rank`` is shown.

    No advice takes more from the user than what leaked: a name may lead to much else, and be older than the leak.
    """

    text: str
    rank: int
    advice: str
    is_home: bool = False
    """Whether it is in the module to which what it keeps belongs."""

    @property
    def order(self) -> tuple[int, bool, str]:
        """Decides which of several that are equally near is shown."""
        return self.rank, not self.is_home, self.text

    @property
    def is_users(self) -> bool:
        """Whether it is the user's, and not one where IPython, Python or we keep things without being asked."""
        return not self.text.startswith(_NOT_THE_USERS)

    @classmethod
    def of_variable(cls, key: object) -> Place:
        """Return the place of a notebook's name."""
        name = text_of(key)
        return cls(f"{NOTEBOOK}{name}", 0, "")

    @classmethod
    def of_module(cls, module: str, key: object, *, is_home: bool = False) -> Place:
        """Return the place of a module's global name."""
        if (module, text_of(key)) in _LAST_ERROR:
            return cls(_LAST, 1, "%gpumem free lets go of it")
        where = f"module {module}, global {text_of(key)}" if key is not None else f"module {module}"
        return cls(where, 2, _REMOVE, is_home)

    @classmethod
    def of_thread(cls, thread: object) -> Place:
        """Return the place of what a thread object keeps."""
        name = text_of((instance_dict(thread) or {}).get("_name"))
        return cls(f'thread "{name}"', 1, "let it end, then join() it")

    @classmethod
    def of_running(cls, frame: FrameType, thread: str, name: str) -> Place:
        """Return the place of a local name of a running function."""
        code = frame.f_code
        where = f'thread "{thread}": running {code.co_name}() line {frame.f_lineno}, local {name}'
        return cls(where, 1, "let the function return")

    @classmethod
    def of_nobody(cls) -> Place:
        """Return the place of an object to which nothing that can be seen refers."""
        return cls("", 9, "end what keeps it: C++ code or a library")


_LAST = "the last error"
_NOT_THE_USERS = (
    "Out[",
    "IPython's ",
    "ipygpumem ",
    _LAST,
    "module sys,",
    "module builtins,",
)  # with displayhook and _
_LAST_ERROR = {("sys", name) for name in ("last_value", "last_traceback", "last_exc")}


class Writer:
    """Writes chains of references down."""

    def __init__(self, cell_of: Callable[[str], int | None]) -> None:
        self._cell_of = cell_of

    def holder(self, place: Place, chain: Sequence[object]) -> Holder:
        """Return the path from ``place``, which keeps the first of ``chain``, to the last."""
        steps = _without_dicts(chain)
        text, advice = place.text or self._name(steps[0]), place.advice or (_REMOVE if len(steps) > 1 else "")
        position, advised = 0, False
        while position < len(steps) - 1:
            behind_name = "[" not in text  # and not in a list of models, from which one can be removed
            taken, text, better = self._step(steps[position:], text)
            if not advised and (better or (better == "" and behind_name)):
                advice, advised = better, bool(better)
            position += taken
        return Holder(path=_shortened(text), advice=advice)

    def _name(self, item: object) -> str:
        if is_instance(item, type):
            return f"class {name_of(item)}"  # type: ignore[arg-type]  # is_instance says so
        return f"{_article(type_name(item))} that nothing visible from Python refers to"

    def _step(self, steps: Sequence[object], text: str) -> tuple[int, str, str | None]:
        """Return how many references the next piece of text covers, the text with it, and advice.

        The advice is None if this piece has none, and empty if nothing is to be advised unless a later piece has some.
        """
        parent, child = steps[0], steps[1]
        kind = type(parent)
        if kind is FunctionType:
            return self._function(steps, text)
        prefix = next((prefix for suspended, prefix in _SUSPENDED if kind is suspended), None)
        if prefix is not None:
            return self._suspended(steps, text, prefix)
        if kind is TracebackType or kind is FrameType or is_instance(parent, BaseException):
            return self._traceback(steps, text)
        if kind is MethodType:
            return 1, f"{text}: bound method {self._code_name(parent.__func__)}, its object", None  # type: ignore[attr-defined]
        if kind is staticmethod or kind is classmethod:
            return 1, text, None  # nobody writes ``.__func__``
        if kind is functools._lru_cache_wrapper:
            wrapped = (instance_dict(parent) or {}).get("__wrapped__")
            name = self._code_name(wrapped)
            taken = 2 if type(child) is dict and len(steps) > 2 else 1
            return taken, f"{text}: lru_cache of function {name}", f"{_expression(text)}.cache_clear()"
        if is_instance(parent, dict) or is_instance(parent, list) or is_instance(parent, tuple) or kind is deque:
            return 1, text + _item(parent, child), None
        if is_instance(parent, set) or is_instance(parent, frozenset):
            return 1, f"{text} (in a set)", None
        if elements(parent) is not None:
            return 1, f"{text} (in an array of objects)", None
        return self._instance(steps, text)

    # -- functions --------------------------------------------------------------------------------------------

    def _code_name(self, function: object) -> str:
        """Return a function's name and the cell that defined it."""
        if type(function) is not FunctionType:
            return type_name(function)
        return self._named(function.__code__)

    def _named(self, code: CodeType) -> str:
        cell = self._cell_of(code.co_filename)
        return code.co_name if cell is None else f"{code.co_name} (cell {cell})"

    def _function(self, steps: Sequence[object], text: str) -> tuple[int, str, str | None]:
        function, child = steps[0], steps[1]
        assert type(function) is FunctionType
        name = self._code_name(function)
        after = steps[2] if len(steps) > 2 else None
        cells = function.__closure__
        if cells is not None and child is cells and type(after) is CellType:
            taken = 3 if len(steps) > 3 else 2
            variable = function.__code__.co_freevars[_position(cells, after)]
            return taken, f"{text}: closure of function {name}, variable {variable}", _OR_FUNCTION
        if after is not None and (child is function.__defaults__ or child is function.__kwdefaults__):
            return 2, f"{text}: default argument of function {name}", _OR_FUNCTION
        return 1, f"{text}: function {name}{_attribute(function, child)}", _OR_FUNCTION

    def _suspended(self, steps: Sequence[object], text: str, prefix: str) -> tuple[int, str, str | None]:
        generator = steps[0]
        frame = getattr(generator, f"{prefix}_frame")
        code = getattr(generator, f"{prefix}_code")
        taken = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
        local = _local(frame, steps[taken])
        word = "coroutine" if prefix == "cr" else "generator"
        return taken, f"{text}: suspended {word} {self._named(code)}{local}", f"close() the {word} when it is done"

    def _traceback(self, steps: Sequence[object], text: str) -> tuple[int, str, str | None]:
        """Cover exceptions, tracebacks and frames up to the name that a frame holds."""
        line, position = 0, 0
        for position, item in enumerate(steps):
            if type(item) is TracebackType:
                line = item.tb_lineno
            elif type(item) is FrameType:
                break
            elif not is_instance(item, BaseException):
                return position, f"{text}: exception{_attribute(steps[position - 1], item)}", _OR_EXCEPTION
        else:
            return len(steps) - 1, f"{text}: exception", _OR_EXCEPTION
        frame = steps[position]
        assert type(frame) is FrameType
        if position == len(steps) - 1:
            return position, f"{text}: saved traceback", _OR_EXCEPTION
        position += 2 if type(steps[position + 1]) is dict and position + 2 < len(steps) else 1
        where = f"{self._named(frame.f_code)} line {line or frame.f_lineno}"
        text = f"{text}: saved traceback, {where}{_local(frame, steps[position])}"
        return position, text, None if text.startswith(_LAST) else _OR_EXCEPTION

    # -- objects ----------------------------------------------------------------------------------------------

    def _instance(self, steps: Sequence[object], text: str) -> tuple[int, str, str | None]:
        parent, child = steps[0], steps[1]
        kind = type_name(parent)
        if kind in ("DataFrame", "Series") and is_of_pandas(parent):  # what is inside has no names that users write
            inside = itertools.takewhile(lambda item: is_of_pandas(item) or is_exactly(item, tuple, list), steps)
            return min(sum(1 for _ in inside), len(steps) - 1), text, None
        if kind == "_Info" and module_of(parent) == "weakref":
            return 1, "weakref.finalize callback", "detach() the finalizer when you no longer need it"
        if kind == "Figure" and module_of(parent) == "matplotlib.figure":
            return 1, f"matplotlib figure{_attribute(parent, child)}", "plt.close() the figure once it has been shown"
        if module_of(child) == "torch.autograd.function" or kind.endswith("Backward0"):
            return 1, f"{text}: its autograd graph ({type_name(child)})", DETACH
        if is_of_library(parent, "torch", "Tensor") and is_instance(child, dict) and len(steps) > 2:
            return 2, f"hook on {text.removeprefix(NOTEBOOK)}", _HANDLE  # ``_backward_hooks`` is no attribute in a dict
        name = _attribute(parent, child)
        inner = name[1:]
        if len(steps) > 2 and inner in _PARTS and is_instance(child, dict):
            return 2, f"{text}.{text_of(key_of(child, steps[2]))}", ""  # a model's own
        if len(steps) > 2 and inner in _HOOKS and is_instance(child, dict):
            return 2, f"{_HOOKS[inner]} on {text.removeprefix(NOTEBOOK)}", _HANDLE
        is_own = is_of_library(parent, "torch.optim", "Optimizer")
        return 1, text + (name or f" ({kind})"), "" if is_own else None


def _expression(text: str) -> str:
    """Return what the user writes for an object, such as ``mymod.load``; without a name ``that function``."""
    written = text.removeprefix(NOTEBOOK).removeprefix("module ").replace(", global ", ".")
    return written if all(part.isidentifier() for part in written.split(".")) else "that function"


def key_of(mapping: object, child: object) -> object:
    """Return the key under which ``mapping`` keeps ``child``; None if it is not a dict or does not."""
    if not is_instance(mapping, dict):
        return None
    items: Any = mapping
    try:
        return next((key for key, value in dict.items(items) if value is child), None)
    except RuntimeError:  # a thread changes it while we look
        return None


def _shortened(path: str) -> str:
    """Return a path without its middle if it is too long to be read."""
    half = _LONGEST_PATH // 2
    return path if len(path) <= _LONGEST_PATH else f"{path[:half]} … {path[-half:]}"


def _item(parent: Any, child: object) -> str:
    """Return how an item of a dict, list, tuple or deque is written; a dict may have it as a key."""
    if not is_instance(parent, dict):
        return f"[{_position(parent, child)}]"
    keys = [key for key, value in list(dict.items(parent)) if value is child]  # one copy: a thread may change it
    return f"[{key_text(keys[0]) or f'<{type_name(keys[0])}>'}]" if keys else " (as a key)"


def _position(items: Iterable[object], child: object) -> int:
    base: Any = next(kind for kind in (list, tuple, deque) if is_instance(items, kind))
    return next((place for place, item in enumerate(base.__iter__(items)) if item is child), 0)


def _local(frame: FrameType | None, child: object) -> str:
    """Return which local name of ``frame`` refers to ``child``."""
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")


def _attribute(owner: object, child: object) -> str:
    """Return ``.name`` for the attribute of ``owner`` that is ``child``; nothing if it has no name."""
    attributes = [*(instance_dict(owner) or {}).items(), *slots(owner).items()]
    return next((f".{text_of(name)}" for name, value in attributes if value is child), "")


def _without_dicts(chain: Sequence[object]) -> list[object]:
    """Return the chain without the dicts that are objects' own: ``a.b`` is one step."""
    steps = [chain[0]]
    for owner, item in itertools.pairwise(chain):
        is_own = type(item) is dict and item is not chain[-1] and _owns(owner, item)
        if not is_own:
            steps.append(item)
    return steps


def _owns(owner: object, names: dict[str, object]) -> bool:
    if is_instance(owner, type):
        return any(item is names for item in gc.get_referents(class_dict(owner)))
    return type(owner) is not FunctionType and instance_dict(owner) is names


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
