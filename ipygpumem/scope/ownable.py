"""Decides which names a scope may own: all but those that IPython, a front-end or a library uses
itself, such as ``_5`` or ``In``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import is_
from typing import Any

_SHELLS_OWN = re.compile(
    r"In|Out|exit|quit|get_ipython|_ih|_oh|_dh|_sh|_exit_code|_+|_i+|_i\d+|_\d+|__(name|doc|builtin|builtins|"
    r"nonzero|package|loader|spec|file|session|warningregistry)__|_VSCODE\w*|__VSCODE\w*|_jupyterlab_variableinspector\w*"
)
"""Matches names that IPython or a front-end keeps in the user's namespace; no scope owns them."""
LIBRARYS_OWN = re.compile(r"__\w+|\w*_\d+_c\d+(/.*)?")
"""Matches names that libraries bind, unless a cell does: torch.compile stores compiled code there,
and removes it itself.
"""


def is_ownable(name: object) -> bool:
    """Return True if a scope may own ``name``: a string that neither IPython nor a front-end uses
    itself.
    """
    return type(name) is str and _SHELLS_OWN.fullmatch(name) is None


def ownable(names: Iterable[Any]) -> list[str]:
    """Return the names that a scope may own, without a Python call for each of many."""
    names = list(names)
    return list(compress(names, are_ownable(names)))


def ownable_objects(namespace: Mapping[str, object]) -> dict[str, object]:
    """Return the names that a scope may own, with their objects.

    A search for holders keeps this instead of a copy of the whole namespace, which would itself be
    a holder of the outputs.
    """
    now = dict(namespace)  # a thread may delete names at any moment
    return {name: now[name] for name in ownable(now)}


def are_ownable(names: Sequence[Any]) -> list[bool]:
    """Return for each name whether a scope may own it, without a Python call for each of many."""
    are_texts = list(map(is_, map(type, names), repeat(str)))
    if all(are_texts):
        return list(map(is_, map(_SHELLS_OWN.fullmatch, names), repeat(None)))
    return list(map(is_ownable, names))
