"""Chooses the variables of loops in lines, ``for _item in runs: ...``, which must not be variables
of the user.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Container
from itertools import count

_LOOP = re.compile(r"for (\w+) in ")


def variable_for(code: str, name: str) -> str:
    """Return the variable for a loop over ``code``: the given name, or one with a number if the
    code has that name already.

    >>> variable_for("runs[0]", "_item"), variable_for("_item", "_item")
    ('_item', '_item2')
    """
    return _free_name(name, set(re.findall(r"\w+", code)))


def with_free_variable(line: str, names: Container[str]) -> str:
    """Return a line with another variable for its loop, if it would bind one of the names.

    >>> with_free_variable("for _item in runs: del _item['x']; del _item", {"_item"})
    "for _item2 in runs: del _item2['x']; del _item2"
    """
    loop = _LOOP.match(line)
    if loop is None or loop[1] not in names:
        return line
    variable = _free_name(loop[1], names, set(re.findall(r"\w+", line)))
    # Rename the variable, but neither an attribute nor a text with the same letters.
    written = list[str]()
    end = 0
    for token in tokenize.generate_tokens(io.StringIO(line).readline):
        if token.type == tokenize.NAME and token.string == loop[1]:
            start = token.start[1]
            is_attribute = line[:start].endswith(".")
            written += [line[end:start], loop[1] if is_attribute else variable]
            end = token.end[1]
    return "".join([*written, line[end:]])


def _free_name(name: str, *taken: Container[str]) -> str:
    """Return a name if none of the containers has it, else the first free one with a number:
    ``_item2``.
    """
    candidate = name
    for number in count(2):
        if not any(candidate in names for names in taken):
            return candidate
        candidate = f"{name}{number}"
    raise AssertionError("numbers never end")
