"""Users' texts made harmless: nothing in them can move a cursor, turn the direction of writing or fill a page."""

from __future__ import annotations

_LONGEST_TEXT = 4000
_LONGEST_NAME = 80


def clean(text: str) -> str:
    """Return ``text`` on one line without control characters, which could write over a terminal; cut if it is huge."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    if text.isprintable():
        return text
    return "".join([letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text])


def clean_name(text: str) -> str:
    """Return a name, a type or the like as ``clean`` does, cut to a length that leaves room for what stands beside."""
    return clean(text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…")
