"""Writes the steps of paths through the mocks of ``unittest.mock``, which keep the arguments of
their calls: after ``mock.fit(data)``, the line is ``mock.reset_mock()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.items_and_attributes import attribute_text
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import is_exactly, is_name, text_of

_CALLS = {"_mock_call_args", "_mock_call_args_list", "_mock_mock_calls", "method_calls"}
"""Attributes in which a mock keeps the arguments of its calls."""
_RESET = "call its reset_mock()"
"""Advice for the arguments of calls if no code names the mock."""


def append_mock_step(path: Path, steps: Sequence[object]) -> int:
    """Append the steps from a mock to an object that it keeps, such as an argument of a call;
    return the number of references, 0 if the first object is no mock, or for any other step.

    ``mock.fit(data)`` is noted in ``mock.fit`` and in ``mock``. So the advice is ``reset_mock()``
    of the outermost mock, which forgets all calls.
    """
    if not _is_mock(steps[0]):
        return 0
    forgetting_calls = path.statement("{}.reset_mock()")
    taken = _append_inner_mocks(path, steps)
    if taken == len(steps) - 1:  # the chain ends at an inner mock
        path.advise(forgetting_calls, words=_RESET)
        return taken
    return taken + _append_kept_object(path, steps[taken:], forgetting_calls)


def _append_inner_mocks(path: Path, steps: Sequence[object]) -> int:
    """Append the mocks that a chain passes through, from the outermost one to the innermost one;
    return the number of references, 0 if there is only one mock.
    """
    taken = 0
    while taken < len(steps) - 1:
        number = _append_inner_mock(path, steps[taken:])
        if number == 0:
            break
        taken += number
    return taken


def _append_inner_mock(path: Path, steps: Sequence[object]) -> int:
    """Append the step from a mock to the mock in one of its attributes, ``mock.fit``, or to that of
    a call's result, ``mock.return_value``; return the number of references, 0 if there is none.
    """
    mock, child = steps[0], steps[1]
    name = attribute_text(mock, child)
    if name == "._mock_return_value" and _is_mock(child):
        path.append_fixed(".return_value", path.code and f"{path.code}.return_value")
        return 1
    if name != "._mock_children" or not is_exactly(child, dict) or len(steps) < 3:
        return 0
    pairs: Any = child
    key = next((text_of(key) for key, value in list(pairs.items()) if value is steps[2]), "")
    if not is_name(key):
        return 0
    path.append_fixed(f".{key}", path.code and f"{path.code}.{key}")
    return 2


def _append_kept_object(path: Path, steps: Sequence[object], forgetting_calls: str) -> int:
    """Append the step from a mock to the arguments of its calls, to its ``return_value`` or to its
    ``side_effect``; return 1, the number of references, or 0 for any other step.

    Args:
        path: the path to the mock.
        steps: the mock, and the objects after it.
        forgetting_calls: the statement that makes the mock forget its calls.
    """
    mock, child = steps[0], steps[1]
    name = attribute_text(mock, child).removeprefix(".")
    if name in _CALLS:
        path.advise(forgetting_calls, words=_RESET)
        path.append_fixed(" (arguments of its calls)")
        return 1
    if name == "_mock_return_value":
        imports, code = split(path.code)
        call = f"{imports}import unittest.mock; {code}.return_value = unittest.mock.DEFAULT"
        cut = Cut(Kind.CALL, id(mock), path.code, call) if code else None
        path.append_removable(".return_value", path.code and f"{path.code}.return_value", cut)
        return 1
    if name == "_mock_side_effect":
        target = path.code and f"{path.code}.side_effect"
        cut = Cut(Kind.ATTRIBUTE, id(mock), path.code, target) if target else None
        path.append_removable(".side_effect", target, cut)
        return 1
    return 0


def _is_mock(item: object) -> bool:
    """Return True for a mock of any class of ``unittest.mock``."""
    return is_of_library(item, "unittest.mock", "NonCallableMock")
