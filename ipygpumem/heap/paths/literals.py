"""Writes texts, numbers, tuples and magics as code, for lines to paste: ``runs["a"]``."""

from __future__ import annotations

from ipygpumem.introspect import key_text, text_of
from ipygpumem.records import COMMENT

_NO_COMMENT = r"  \x23 "
"""``COMMENT`` in the code of a text, where no comment begins."""


def literal(key: object) -> str:
    """Return the code of a dict's key that is a text, bytes, a number, a constant or a tuple of
    these; empty for any other key, and for ``nan`` and infinity, which have no such code.
    """
    if type(key) is tuple:
        parts = [literal(part) for part in key]
        if not all(parts):
            return ""
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    shown = key_text(key)
    if shown in (None, "nan", "inf", "-inf"):
        return ""
    # ``"a"`` as it is shown, with double quotes; ``repr`` writes what has to be escaped.
    is_plain = shown == f'"{key}"' and text_of(key).isprintable() and "\\" not in text_of(key)
    written = text_of(shown) if is_plain else repr(key)
    return written.replace(COMMENT, _NO_COMMENT)


def call_of_magic(line: str) -> str:
    """Return the call that runs a line magic, such as ``%xdel _5``, after which statements can
    follow.
    """
    name, _, argument = line.removeprefix("%").partition(" ")
    return f"get_ipython().run_line_magic({literal(name)}, {literal(argument)})"
