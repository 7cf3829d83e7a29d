"""Answers code that asks for the value of a fake tensor, and notes the lines that got a guess."""

from __future__ import annotations

import dis
import functools
import linecache
import math
import operator
import sys
import types
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.optim import lbfgs
from torch.utils.weak import WeakIdKeyDictionary

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.users_line import users_line
from ipygpumem.introspect import is_ours, is_users
from ipygpumem.objects.holders.frames import stack

_WRAPPERS = tuple(str(Path(torch.__file__).with_name(name)) for name in ("_compile.py", "_dynamo"))
"""torch wraps the methods of modes in these."""
_ENDS = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "YIELD", "RERAISE")


def answer_without_error() -> bool | None:
    """Return the value that lets the asking code pass its ``assert`` or ``raise``; None if there is no such value."""
    frame = next((frame for frame in stack(sys._getframe(1)) if not _is_between(frame.f_code.co_filename)), None)
    return None if frame is None else _answer(frame.f_code, frame.f_lasti)


def _is_between(filename: str) -> bool:
    return is_ours(filename) or filename.startswith(_WRAPPERS)


@functools.lru_cache(maxsize=64)
def _answer(code: types.CodeType, offset: int) -> bool | None:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "NOP")]
    places = {step.offset: number for number, step in enumerate(steps)}
    number, as_it_is = places.get(offset, len(steps)), True
    if number < len(steps) and steps[number].opname.startswith("CALL"):  # of item or bool
        number += 1
    for place in range(number, len(steps)):
        name = steps[place].opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            jumps = ("IF_TRUE" in name) is as_it_is
            here, there = (_raises(steps, start) for start in (place + 1, places.get(steps[place].argval, len(steps))))
            return None if here is there else jumps if here else not jumps
        if name == "UNARY_NOT":
            as_it_is = not as_it_is
        elif name != "TO_BOOL":
            return None
    return None


def _raises(steps: list[dis.Instruction], start: int) -> bool:
    """Whether code goes from a step straight to a ``raise``."""
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(_ENDS):
            return False
    return False


_NEVER = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
_NOT = frozenset({"logical_not", "bitwise_not"})
_AND = frozenset({"logical_and", "bitwise_and", "mul"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_SAME = frozenset(
    [
        *("alias", "detach", "clone", "_to_copy", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand"),
        *("all", "any", "_is_all_true", "_is_any_true", "select", "slice", "permute", "transpose", "t"),
        *("max", "min", "amax", "amin", "prod"),
    ]
)
"""Their results have the values of their arguments."""
_COUNTS = frozenset({"sum", "count_nonzero"})


_MOST_GUESSES = 10_000
"""Answers that one line gets: more, and it is taken for a loop that waits for a value."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
_COMPARES = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
_KEEPS_A_STEP = "ys >"


class Answers:
    """Gives values of the right type: 1, 1.0 or False, or what lets code go past its ``assert`` or ``raise``."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._known: Any = WeakIdKeyDictionary()
        self._given_to_lbfgs = 0
        self.guesses: dict[str, int] = {}
        """The lines that asked for a tensor's value and got a stand-in, in order, and how often they did."""

    def can_answer(self, func: Any) -> bool:
        """Whether an operation asks for a value, and not for a tensor whose shape depends on one."""
        return func is _SCALAR or func in _COMPARES

    def answer(self, func: Any, tensor: Any) -> bool | float | complex:
        """Return a value for an operation that ``can_answer``.

        Raises:
            EstimateError: the line has got so many that it is a loop without end.
        """
        compares, dtype = func in _COMPARES, tensor.dtype
        is_condition = compares or dtype is torch.bool
        if (frame := _lbfgs_frame()) is not None:
            self._note("LBFGS: assumed to run all its iterations, and to keep as much history as these make")
            if is_condition:  # it keeps a step only where ``ys`` is positive, and stops where its loss does not change
                return _KEEPS_A_STEP in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            self._given_to_lbfgs += 1
            return 1.0 / self._given_to_lbfgs
        self._count_guess()
        known = None if compares else self._known_value(tensor)
        if is_condition:
            return bool(answer_without_error() if known is None else known)
        plain = 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
        return plain if known is None else type(plain)(known)

    def _count_guess(self) -> None:
        line = users_line()
        self.guesses[line] = count = self.guesses.get(line, 0) + 1
        if count > _MOST_GUESSES:
            raise EstimateError(
                f"this line asked for a tensor's value {_MOST_GUESSES:,} times. An estimate has no values, so the "
                f"loop may never end: {line}"
            )

    # -- tensors whose elements are all taken to be True, or all False -------------------------------------------------

    def _known_value(self, value: Any) -> bool | None:
        """Return what all elements of a tensor are taken to be, True or False; None if that is not known."""
        return self._known.get(value) if isinstance(value, torch.Tensor) else None

    def see(self, func: Any, args: Any, result: Any) -> None:
        """Remember what an operation gives, or forget what was known of a tensor that it changed."""
        if not isinstance(result, torch.Tensor) or not args:
            return
        truth = self._given_by(func.__name__.partition(".")[0].rstrip("_"), *args[:2])
        if truth is not None:
            self._known[result] = truth
        else:
            self._known.pop(result, None)

    def _given_by(self, name: str, first: Any, second: Any = None) -> bool | None:
        known = self._known_value(first)
        if name in _NEVER:
            return False
        if name in _NOT:
            return None if known is None else not known
        if name in _AND or name in _OR:
            decides = name in _OR
            both = (known, self._known_value(second))
            return decides if decides in both else None if None in both else not decides
        if name in _COMPARED:
            return self._compared(name, first, second)
        if name in _COUNTS:
            return False if known is False else None
        return known if name in _SAME else None

    def _compared(self, name: str, first: Any, second: Any) -> bool | None:
        """Return what a comparison says of a known tensor, of NaN or of infinity."""
        known = self._known_value(first)
        if isinstance(second, (int, float)) and known is not None:
            return bool(_COMPARED[name](known, second))
        asks_for_odd = first is second or (isinstance(second, float) and math.isinf(second))
        if asks_for_odd and name in ("eq", "ne"):
            return (name == "eq") is (first is second)
        return None


def _lbfgs_frame() -> types.FrameType | None:
    """Return torch's LBFGS's own frame, if it is LBFGS that asks: it looks at values all the time."""
    ours_and_torchs = takewhile(lambda frame: not is_users(frame.f_code.co_filename), stack(sys._getframe(1)))
    return next((frame for frame in ours_and_torchs if frame.f_code.co_filename == lbfgs.__file__), None)
