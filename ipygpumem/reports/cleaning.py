"""Makes users' texts harmless: they cannot move a cursor, turn the direction of writing or fill a page."""

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


def shorten(text: str, letters: int) -> str:
    """Return ``text`` as ``clean`` does, but shorter: the middle gives way, since ends tell names apart."""
    text = clean(text)
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def clean_name(text: str) -> str:
    """Return a name, a type or the like in a length that leaves room for what stands beside it."""
    return shorten(text, _LONGEST_NAME)
