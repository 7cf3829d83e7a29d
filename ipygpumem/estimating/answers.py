"""Answers code that asks for the value of a fake tensor, which has none, and notes the line that got a guess."""

from __future__ import annotations

import linecache
import sys
import types
from itertools import takewhile
from typing import Any

import torch
from torch.optim import lbfgs

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.conditions import answer_without_error
from ipygpumem.estimating.known_values import KnownValues
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.users_line import users_line
from ipygpumem.introspect import is_users
from ipygpumem.objects.holders.frames import stack

_MOST_GUESSES = 10_000
"""Answers that one line gets: more, and it is taken for a loop that waits for a value."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
_COMPARES = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
_KEEPS_A_STEP = "ys >"


class Answers:
    """Gives values of the right type: 1, 1.0 or False, or what lets code go past its ``assert`` or ``raise``."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self.known = KnownValues()
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
        known = None if compares else self.known.of(tensor)
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


def _lbfgs_frame() -> types.FrameType | None:
    """Return torch's LBFGS's own frame, if it is LBFGS that asks: it looks at values all the time."""
    ours_and_torchs = takewhile(lambda frame: not is_users(frame.f_code.co_filename), stack(sys._getframe(1)))
    return next((frame for frame in ours_and_torchs if frame.f_code.co_filename == lbfgs.__file__), None)
