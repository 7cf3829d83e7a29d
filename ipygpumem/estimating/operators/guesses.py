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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import lbfgs
from torch.utils.weak import WeakIdKeyDictionary

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.memory.storages import tensors_in
from ipygpumem.estimating.operators.largest import largest_value
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.user_lines import user_line
from ipygpumem.heap.knowledge.frames import stack
from ipygpumem.introspect import is_ours, is_users

_ATEN = torch.ops.aten
COMPARISONS = (_ATEN.equal.default, _ATEN.allclose.default)
"""Operators that return a truth value."""
_MOST_GUESSES_OF_LINE = 10_000
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
        self._numbers_given_to_lbfgs = 0

    def guess_for(self, func: Any, tensor: Any) -> bool | float | complex:
        """Return a guess for an operation that reads a value of ``tensor``, as ``x.item()`` does.

        The line of the user's code is counted.

        Args:
            func: the operation: a comparison, or one that returns the value.
            tensor: its first argument.
        """
        compares = func in COMPARISONS
        is_condition = compares or tensor.dtype is torch.bool
        frame_of_optimizer = _frame_of(torch.optim)
        if frame_of_optimizer is not None:
            is_lbfgs = frame_of_optimizer.f_code.co_filename == lbfgs.__file__
            if is_lbfgs:
                return self._guess_for_lbfgs(frame_of_optimizer, is_condition=is_condition)
        self._count_guess(user_line())
        truth = None
        if not compares:
            truth = self.values.truth(tensor)
        if is_condition:
            if truth is None:
                truth = _value_without_error()
            return bool(truth)
        default = _default_number(tensor.dtype, is_of_optimizer=frame_of_optimizer is not None)
        number = type(default)
        if truth is not None:
            return number(truth)
        return number(self.values.largest(tensor, default))

    def _count_guess(self, line: str) -> None:
        """Count a guess for a line.

        Raises:
            EstimateError: the line got so many guesses that its loop may wait for a value.
        """
        count = self.lines.get(line, 0)
        if _frame_of(torch.utils.data) is None:  # the value of a seed does not matter
            count += 1
            self.lines[line] = count
        if count > _MOST_GUESSES_OF_LINE:
            often = f"{_MOST_GUESSES_OF_LINE:,} times"
            raise EstimateError(
                f"this line asked for a tensor's value {often}. An estimate has no values, so the "
                f"loop may never end: {line}"
            )

    def _guess_for_lbfgs(self, frame: types.FrameType, *, is_condition: bool) -> bool | float:
        """Return a guess for LBFGS, which reads values in each iteration, with which it takes the
        most memory.

        It keeps a step in its history only if ``ys > 1e-10``, and its other conditions end the
        iterations. It also stops if its loss does not change: each number is another one.
        """
        self._note("LBFGS: assumed to run all its iterations, and to keep their history")
        if is_condition:
            source = linecache.getline(lbfgs.__file__, frame.f_lineno)
            return "ys >" in source
        self._numbers_given_to_lbfgs += 1
        return 1.0 / self._numbers_given_to_lbfgs


def _default_number(dtype: torch.dtype, *, is_of_optimizer: bool) -> float | complex:
    """Return the guess for a number of which nothing is known."""
    if dtype.is_complex:
        return 1j
    if not dtype.is_floating_point:
        return 1
    if is_of_optimizer:  # which may divide by 1 minus the value
        return 0.5
    return 1.0


def _frame_of(package: types.ModuleType) -> types.FrameType | None:
    """Return the innermost frame of a package's code; None if a frame of the user's code is further
    inside, or there is none.
    """
    file = Path(package.__file__ or "")
    folder = str(file.parent)
    for frame in stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if is_users(name):
            return None
        if name.startswith(folder):
            return frame
    return None


# -- known values ----------------------------------------------------------------------------------

# Names of operators without their overloads:
_NEVER = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
"""Operators whose results count as false: no value is assumed to be infinite or not a number."""
_NOT = frozenset({"logical_not", "bitwise_not"})
_AND = frozenset({"logical_and", "bitwise_and", "mul"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_COPIES = ("_to_copy", "alias", "clone", "detach")
_VIEWS = ("_unsafe_view", "expand", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze")
_PARTS = ("select", "slice", "view")
_REDUCTIONS = ("_is_all_true", "_is_any_true", "all", "amax", "amin", "any", "max", "min", "prod")
_KEEP_VALUES = frozenset((*_COPIES, *_VIEWS, *_PARTS, *_REDUCTIONS))
"""Operators whose results have the values of their arguments."""
_COUNTS = frozenset({"sum", "count_nonzero"})
"""Operators whose results are 0 if all their arguments' elements are false."""


class KnownValues:
    """Values of fake tensors that follow from the operations alone."""

    def __init__(self) -> None:
        self._truths: Any = WeakIdKeyDictionary()
        """Tensors whose elements all have one truth value, and that value."""
        self._largest: Any = WeakIdKeyDictionary()
        """Tensors of random numbers or positions, and their largest possible value."""

    def truth(self, value: Any) -> bool | None:
        """Return the truth value that all elements of a tensor have; None if it does not follow
        from the operations.
        """
        if not self._truths or not isinstance(value, torch.Tensor):
            return None
        truth: bool | None = self._truths.get(value)
        return truth

    def largest(self, tensor: Any, default: Any) -> Any:
        """Return the largest value of a tensor; ``default`` if it is unknown."""
        return self._largest.get(tensor, default)

    def note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the values of an operation's result that follow from it, and forget the values that
        it has changed.
        """
        if not args:
            return
        packet, _, _ = func.__name__.partition(".")
        name = packet.rstrip("_")
        has_largest = self._note_largest(name, args, kwargs, result)
        if not isinstance(result, torch.Tensor):
            return
        if self._largest and not has_largest:
            self._largest.pop(result, None)
        truth = self._truth_of_result(name, *args[:2])
        if self._truths:  # otherwise each look-up would take some microseconds for nothing
            self._forget_truth(args[0], result)
        if truth is not None:
            self._truths[result] = truth

    def _forget_truth(self, first: Any, result: Any) -> None:
        """Forget the truth values of a result, and of the tensor of which it is a changed part."""
        is_in_place = result is first
        if is_in_place and result._base is not None:
            self._truths.pop(result._base, None)
        self._truths.pop(result, None)

    def _note_largest(self, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        """Note the largest values of an operation's results; return False if they are unknown."""
        source = args[0]
        keeps_values = name in _KEEP_VALUES or name == "unbind"
        largest = largest_value(name, args, kwargs, result)
        if largest is not None:
            result, value = largest
        elif keeps_values and source in self._largest:
            value = self._largest[source]
        else:
            return False
        for tensor in tensors_in(result):
            self._largest[tensor] = value
        return True

    def _truth_of_result(self, name: str, first: Any, second: Any = None) -> bool | None:
        """Return the truth value of an operator's results; None if it does not follow from the
        first two arguments.
        """
        if name == "full" and second is True:
            return True
        truth = self.truth(first)
        if name in _NEVER:
            return False
        if name in _NOT:
            return _negated(truth)
        if name in _AND:
            return _joined_truth(truth, self.truth(second), decisive=False)
        if name in _OR:
            return _joined_truth(truth, self.truth(second), decisive=True)
        if name in _COMPARE:
            return _truth_of_comparison(name, first, truth, second)
        if name in _COUNTS and truth is False:
            return False
        if name in _KEEP_VALUES:
            return truth
        return None


def _negated(truth: bool | None) -> bool | None:
    """Return the opposite of a truth value; None if it is unknown."""
    if truth is None:
        return None
    return not truth


def _joined_truth(first: bool | None, second: bool | None, *, decisive: bool) -> bool | None:
    """Return two truth values joined by "or" (``decisive`` is True) or by "and" (False).

    None stands for an unknown value: ``unknown and False`` is False, ``unknown or False`` unknown.
    """
    if decisive in (first, second):
        return decisive
    if first is None or second is None:
        return None
    return not decisive


def _truth_of_comparison(name: str, first: Any, truth: bool | None, second: Any) -> bool | None:
    """Return the result of a comparison; None if it is unknown.

    ``truth`` is the known value of ``first``. No value is assumed to be infinite or not a number:
    ``x == x`` is true, ``x == math.inf`` is not.
    """
    is_number = isinstance(second, (int, float))
    if is_number and truth is not None:
        compare = _COMPARE[name]
        return bool(compare(truth, second))
    if name not in ("eq", "ne"):
        return None
    asks_for_nan = first is second
    asks_for_infinity = isinstance(second, float) and math.isinf(second)
    if asks_for_nan:
        return name == "eq"
    if asks_for_infinity:
        return name == "ne"
    return None


# -- the branch without an error -------------------------------------------------------------------

_FOLDER = Path(torch.__file__).parent
_FILES_OF_COMPILER = (str(_FOLDER / "_compile.py"), str(_FOLDER / "_dynamo"))
"""Files of torch that wrap the methods of modes."""
_ENDS_OF_BRANCH = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "YIELD", "RERAISE")
"""Beginnings of CPython's instructions after which a branch does not simply continue."""


def _value_without_error() -> bool | None:
    """Return the truth value with which the code that asks for it runs into no error.

    It passes an ``assert``, or avoids a ``raise``, as in ``if loss.isnan(): raise ValueError``.
    None if the value is no such condition.
    """
    for frame in stack(sys._getframe(1)):
        code = frame.f_code
        file = code.co_filename
        # torch._check() and its like
        if file == torch.__file__ and code.co_name.startswith("_check"):
            return True
        if not is_ours(file) and not file.startswith(_FILES_OF_COMPILER):
            return _value_for_condition(code, frame.f_lasti)
    return None


@functools.lru_cache(maxsize=64)
def _value_for_condition(code: types.CodeType, offset: int) -> bool | None:
    """Return the truth value that avoids an error, if the call at ``offset`` returns a condition.

    For ``assert (x > 0).all()``, the bytecode after the call is ``POP_JUMP_IF_TRUE`` over a
    ``RAISE_VARARGS``.
    """
    instructions = dis.get_instructions(code)
    steps = [step for step in instructions if step.opname not in ("EXTENDED_ARG", "NOP")]
    end = len(steps)
    numbers_by_offset = {step.offset: number for number, step in enumerate(steps)}
    number = numbers_by_offset.get(offset, end)
    if number < end and steps[number].opname.startswith("CALL"):  # of item or bool
        number += 1
    is_negated = False  # by ``not`` between the call and the jump
    for step in steps[number:]:
        number += 1
        name = step.opname
        jumps_if_true = "IF_TRUE" in name
        tests_truth = jumps_if_true or "IF_FALSE" in name
        if "JUMP" in name and tests_truth:
            target = numbers_by_offset.get(step.argval, end)
            jumps_if = jumps_if_true is not is_negated
            return _branch_without_error(steps, number, target, jumps_if=jumps_if)
        if name == "UNARY_NOT":
            is_negated = not is_negated
        elif name != "TO_BOOL":
            return None
    return None


def _branch_without_error(
    steps: Sequence[dis.Instruction], following: int, target: int, *, jumps_if: bool
) -> bool | None:
    """Return the truth value that leads to the branch without an error.

    None if both branches raise, or neither does. One begins at the step ``following``, the other at
    ``target``, to which the code jumps if the condition is ``jumps_if``.
    """
    raises_here = _raises(steps, following)
    raises_there = _raises(steps, target)
    if raises_here is raises_there:
        return None
    if raises_here:
        return jumps_if
    return not jumps_if


def _raises(steps: Sequence[dis.Instruction], start: int) -> bool:
    """Return True if the code from step ``start`` reaches a ``raise`` without a jump."""
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(_ENDS_OF_BRANCH):
            return False
    return False
