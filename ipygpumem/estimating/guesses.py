"""Guesses the values that fake tensors do not have: 1, 1.0 or False.

A condition before an ``assert`` or ``raise`` gets the value that passes it, and some values are
known: results of ``torch.full``, comparisons with them, random numbers and positions.
"""

from __future__ import annotations

import dis
import functools
import linecache
import math
import operator
import sys
import types
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.optim import lbfgs
from torch.utils.weak import WeakIdKeyDictionary

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import user_line
from ipygpumem.estimating.largest import largest_value
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storages import tensors_in
from ipygpumem.heap.holders.frames import stack
from ipygpumem.introspect import is_ours, is_users

COMPARES = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
"""Operators that return a truth value."""
_MOST_GUESSES = 10_000
"""Maximum number of guesses for one line.

A line that asks more often is taken for a loop that waits for a value.
"""


class Guesses:
    """The values that code asks for."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self.values = KnownValues()
        self.lines: dict[str, int] = {}
        """Lines that asked for a tensor's value and got a guess, in order, and how often."""
        self._given_to_lbfgs = 0

    def answer(self, func: Any, tensor: Any) -> bool | float | complex:
        """Return a guess for an operation that reads a value of ``tensor``."""
        compares = func in COMPARES
        is_condition = compares or tensor.dtype is torch.bool
        frame = _frame_of(torch.optim)
        if frame is not None and frame.f_code.co_filename == lbfgs.__file__:
            return self._answer_lbfgs(frame, is_condition=is_condition)
        self._count(user_line())
        truth = None if compares else self.values.truth(tensor)
        if is_condition:
            return bool(_value_without_error() if truth is None else truth)
        default = _default_number(tensor.dtype, is_of_optimizer=frame is not None)
        value = self.values.largest(tensor, default) if truth is None else truth
        return type(default)(value)

    def _count(self, line: str) -> None:
        """Count a guess for a line."""
        if _frame_of(torch.utils.data) is None:  # the value of a seed does not matter
            self.lines[line] = self.lines.get(line, 0) + 1
        if self.lines.get(line, 0) > _MOST_GUESSES:
            raise EstimateError(
                f"this line asked for a tensor's value {_MOST_GUESSES:,} times. An estimate has no "
                f"values, so the loop may never end: {line}"
            )

    def _answer_lbfgs(self, frame: types.FrameType, *, is_condition: bool) -> bool | float:
        """Return a guess for LBFGS, which reads values in each iteration.

        It keeps a step only if ``ys`` is positive, and stops if its loss does not change.
        """
        self._note("LBFGS: assumed to run all its iterations, and to keep their history")
        if is_condition:
            return "ys >" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self._given_to_lbfgs += 1
        return 1.0 / self._given_to_lbfgs


def _default_number(dtype: torch.dtype, *, is_of_optimizer: bool) -> float | complex:
    """Return the guess for a number of which nothing is known."""
    if dtype.is_floating_point:
        # An optimizer may divide by 1 minus the value.
        return 0.5 if is_of_optimizer else 1.0
    return 1j if dtype.is_complex else 1


def _frame_of(package: types.ModuleType) -> types.FrameType | None:
    """Return the innermost frame of a torch package; None if the user's code is further inside."""
    folder = str(Path(package.__file__ or "").parent)
    frames = stack(sys._getframe(1))
    for frame in takewhile(lambda frame: not is_users(frame.f_code.co_filename), frames):
        if frame.f_code.co_filename.startswith(folder):
            return frame
    return None


# -- known values ----------------------------------------------------------------------------------

_NEVER = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
_NOT = frozenset({"logical_not", "bitwise_not"})
_AND = frozenset({"logical_and", "bitwise_and", "mul"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_COPIES = ("_to_copy", "alias", "clone", "detach")
_VIEWS = ("_unsafe_view", "expand", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze")
_PARTS = ("select", "slice", "view")
_REDUCTIONS = ("_is_all_true", "_is_any_true", "all", "amax", "amin", "any", "max", "min", "prod")
_SAME = frozenset((*_COPIES, *_VIEWS, *_PARTS, *_REDUCTIONS))
"""Operators whose results have the values of their arguments."""
_COUNTS = frozenset({"sum", "count_nonzero"})


class KnownValues:
    """Values of fake tensors that follow from the operations alone."""

    def __init__(self) -> None:
        self._truths: Any = WeakIdKeyDictionary()
        """Truth values that all elements of a tensor have."""
        self._largest: Any = WeakIdKeyDictionary()
        """Largest values of random numbers and of positions."""

    def truth(self, value: Any) -> bool | None:
        """Return the truth value that all elements of a tensor are known to have, or None."""
        return self._truths.get(value) if isinstance(value, torch.Tensor) else None

    def largest(self, tensor: Any, default: Any) -> Any:
        """Return the largest value of a tensor, if it is known."""
        return self._largest.get(tensor, default)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the known values of an operation's result, and drop values that it has changed."""
        if not args:
            return
        name = func.__name__.partition(".")[0].rstrip("_")
        has_largest = self._see_largest(name, args, kwargs, result)
        if not isinstance(result, torch.Tensor):
            return
        if not has_largest:
            self._largest.pop(result, None)
        truth = self._truth_of(name, *args[:2])
        if result is args[0] and result._base is not None:
            self._truths.pop(result._base, None)
        if truth is None:
            self._truths.pop(result, None)
        else:
            self._truths[result] = truth

    def _see_largest(self, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        """Note the largest values of an operation's results; return False if they are unknown."""
        known = largest_value(name, args, kwargs, result)
        if known is not None:
            results, value = known
        elif (name in _SAME or name == "unbind") and args[0] in self._largest:
            results, value = result, self._largest[args[0]]
        else:
            return False
        for tensor in tensors_in(results):
            self._largest[tensor] = value
        return True

    def _truth_of(self, name: str, first: Any, second: Any = None) -> bool | None:
        """Return the truth value of an operator's results, if those of its arguments decide it."""
        if name == "full" and second is True:
            return True
        truth = self.truth(first)
        if name in _NEVER:
            return False
        if name in _NOT:
            return None if truth is None else not truth
        if name in _AND or name in _OR:
            return _joined(truth, self.truth(second), decisive=name in _OR)
        if name in _COMPARED:
            return _compared(name, first, truth, second)
        if name in _COUNTS:
            return False if truth is False else None
        return truth if name in _SAME else None


def _joined(first: bool | None, second: bool | None, *, decisive: bool) -> bool | None:
    """Return two truth values joined by "or", which True decides, or by "and"."""
    if decisive in (first, second):
        return decisive
    if first is None or second is None:
        return None
    return not decisive


def _compared(name: str, first: Any, truth: bool | None, second: Any) -> bool | None:
    """Return the result of a comparison; ``truth`` is the known value of ``first``."""
    if isinstance(second, (int, float)) and truth is not None:
        return bool(_COMPARED[name](truth, second))
    asks_for_nan = first is second
    asks_for_infinity = isinstance(second, float) and math.isinf(second)
    if name not in ("eq", "ne") or not (asks_for_nan or asks_for_infinity):
        return None
    return (name == "eq") is asks_for_nan


# -- the branch without an error -------------------------------------------------------------------

_COMPILER = tuple(str(Path(torch.__file__).with_name(name)) for name in ("_compile.py", "_dynamo"))
"""Files of torch that wrap the methods of modes."""
_ENDS = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "YIELD", "RERAISE")


def _value_without_error() -> bool | None:
    """Return the truth value with which the calling code passes its ``assert`` or ``raise``.

    None if it has none.
    """
    for frame in stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        # torch._check() and its like
        if name == torch.__file__ and frame.f_code.co_name.startswith("_check"):
            return True
        if not is_ours(name) and not name.startswith(_COMPILER):
            return _value_at(frame.f_code, frame.f_lasti)
    return None


@functools.lru_cache(maxsize=64)
def _value_at(code: types.CodeType, offset: int) -> bool | None:
    """Return the truth value that avoids an error, for the condition that a call returns."""
    skipped = ("EXTENDED_ARG", "NOP")
    steps = [step for step in dis.get_instructions(code) if step.opname not in skipped]
    numbers = {step.offset: number for number, step in enumerate(steps)}
    first = numbers.get(offset, len(steps))
    if first < len(steps) and steps[first].opname.startswith("CALL"):  # of item or bool
        first += 1
    is_negated = False
    for number, step in enumerate(steps[first:], first):
        name = step.opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            target = numbers.get(step.argval, len(steps))
            jumps_if = ("IF_TRUE" in name) is not is_negated
            return _branch_without_error(steps, number + 1, target, jumps_if=jumps_if)
        if name == "UNARY_NOT":
            is_negated = not is_negated
        elif name != "TO_BOOL":
            return None
    return None


def _branch_without_error(
    steps: Sequence[dis.Instruction], following: int, target: int, *, jumps_if: bool
) -> bool | None:
    """Return the truth value that leads to the branch without an error; None if both are alike."""
    here, there = _raises(steps, following), _raises(steps, target)
    if here is there:
        return None
    return jumps_if if here else not jumps_if


def _raises(steps: Sequence[dis.Instruction], start: int) -> bool:
    """Return True if the code from step ``start`` reaches a ``raise`` without a jump."""
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(_ENDS):
            return False
    return False
