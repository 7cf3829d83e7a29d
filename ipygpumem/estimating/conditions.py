"""Finds the answer to a condition that keeps code from raising an error, in its bytecode."""

from __future__ import annotations

import dis
import functools
import sys
import types
from pathlib import Path

import torch

from ipygpumem.introspect import is_ours
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
