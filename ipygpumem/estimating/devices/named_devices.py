"""Distinguishes a CPU that the estimated code names from one that it gets elsewhere.

In a notebook without a card, ``"cpu"`` is also the device of all that would be on a card on another
machine: the value of a name such as ``device``, an attribute of a configuration, ``x.device``. An
estimate for a card takes only a CPU that the code itself names as the host::

    cache = torch.zeros(8, 4096, device="cpu")  # on the host
    mask = torch.zeros(8, 4096, device=x.device)  # on the card
    batch = batch.to(device)  # on the card

Known limit: a CPU from an object that is not copied, such as a class or a library's module, counts
as named if the running code also names the CPU elsewhere.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch

from ipygpumem.heap.knowledge.frames import stack
from ipygpumem.introspect import is_exactly, is_users

STAND_IN = torch.device("cpu")
"""The device that code gets for a tensor that stands for one on a card."""
ON_HOST = torch.device("cpu")
"""The device that code gets for a tensor that is on the host.

It equals ``STAND_IN``; the two are told apart by identity.
"""
_NAMES_OF_CPU = frozenset({"cpu", "cpu:0"})
_RUNNER = str(Path(__file__).parent.with_name("running.py"))
"""The file whose functions call the code of an estimate."""
_FILE_OF_TEXT = "<string>"
"""The file name of code that the user runs from a text, with ``exec`` or ``python -c``."""


class NotebooksText(str):
    """A device's name that is a value of the notebook: the code itself does not name it."""

    __slots__ = ()


def from_notebook(value: Any) -> Any:
    """Return a value of the notebook, marked as such if it is the CPU or its name.

    Other values are returned unchanged.
    """
    if type(value) is str and value in _NAMES_OF_CPU:
        return NotebooksText(value)
    if is_exactly(value, torch.device) and value.type == "cpu":
        return STAND_IN
    return value


def names_host(value: Any) -> bool:
    """Return True for a CPU that the estimated code itself names.

    A device or text without a mark may be made by the code, or come from an object that is not
    copied. It counts as named if code that runs now has the CPU's name.
    """
    if value is ON_HOST:
        return True
    if value is STAND_IN or isinstance(value, NotebooksText):
        return False
    if str(value) not in _NAMES_OF_CPU:
        return False
    return any(map(_has_name, _codes_of_user()))


def _codes_of_user() -> list[types.CodeType]:
    """Return the user's code that runs now, without the code that has started the estimate."""
    codes = []
    for frame in stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_filename == _RUNNER:  # the frames outside it do not belong to the estimate
            break
        if is_users(code.co_filename) or code.co_filename == _FILE_OF_TEXT:
            codes.append(code)
    return codes


def _has_name(code: types.CodeType) -> bool:
    """Return True if the CPU's name is a constant of the code, or an item of one."""
    for constant in code.co_consts:
        items = constant if is_exactly(constant, tuple) else (constant,)
        for item in items:
            if type(item) is str and item in _NAMES_OF_CPU:
                return True
    return False
