"""Writes the steps of paths through the mocks of ``unittest.mock``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.items_and_attributes import attribute_text
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import is_exactly, is_name, text_of

_CALLS = {"_mock_call_args", "_mock_call_args_list", "_mock_mock_calls", "method_calls"}
"""Attributes in which a mock keeps the arguments of its calls."""


def append_mock_step(path: Path, steps: Sequence[object]) -> int:
    """Append the way from a mock to what it keeps; return the number of references.

    The number is 0 if the object is no mock. A mock notes its calls also in the mocks around it:
    ``reset_mock()`` of the outermost one forgets all of them.
    """
    if not _is_mock(steps[0]):
        return 0
    forgetting_calls = path.statement("{}.reset_mock()")
    taken = 0
    number = _into_inner_mock(path, steps)
    while number and taken + number < len(steps) - 1:
        taken += number
        number = _into_inner_mock(path, steps[taken:])
    if number:  # the inner mock itself
        path.advise(forgetting_calls, "call its reset_mock()")
        return taken + number
    mock, child = steps[taken], steps[taken + 1]
    name = attribute_text(mock, child).removeprefix(".")
    if name in _CALLS:
        path.advise(forgetting_calls, "call its reset_mock()")
        path.append_fixed(" (arguments of its calls)")
    elif name == "_mock_return_value":
        imports, code = split(path.code)
        call = f"{imports}import unittest.mock; {code}.return_value = unittest.mock.DEFAULT"
        cut = Cut(Kind.CALL, id(mock), path.code, call) if code else None
        path.append_removable(".return_value", path.code and f"{path.code}.return_value", cut)
    elif name == "_mock_side_effect":
        target = path.code and f"{path.code}.side_effect"
        cut = Cut(Kind.ATTRIBUTE, id(mock), path.code, target) if target else None
        path.append_removable(".side_effect", target, cut)
    else:
        return taken
    return taken + 1


def _into_inner_mock(path: Path, steps: Sequence[object]) -> int:
    """Append the way to a mock that was made for an attribute or a result; return the number of
    references, 0 if there is none.
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


def _is_mock(item: object) -> bool:
    return is_of_library(item, "unittest.mock", "NonCallableMock")
