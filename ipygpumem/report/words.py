"""Words of all reports: texts from users on one line, lists of names, numbers of objects."""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.units import format_shape

NAMES_SHOWN = 40
"""Maximum number of names in a list."""
VALUE_SHOWN = 24
"""Maximum number of letters of a parameter's name and value."""
_LONGEST_TEXT = 4000
_LONGEST_NAME = 80


def clean(text: str) -> str:
    """Return a text on one line. Control characters, which could change a terminal, are replaced,
    and a huge text is cut.
    """
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    if text.isprintable():
        return text
    letters = []
    for letter in text:
        if not letter.isprintable():
            letter = "\N{REPLACEMENT CHARACTER}"
        letters.append(letter)
    return "".join(letters)


def shorten(text: str, letters: int) -> str:
    """Return a text as ``clean`` does, with at most so many ``letters``. A longer one is cut in the
    middle, because its ends tell names apart.
    """
    text = clean(text)
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    head = letters - 1 - tail
    return f"{text[:head]}…{text[len(text) - tail :]}"


def clean_name(text: str) -> str:
    """Return a name, a type or another short text as ``clean`` does; shortened, if it is longer
    than names usually are.
    """
    return shorten(text, _LONGEST_NAME)


def listed(values: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """Return the first ``most`` values with commas between them, and the number of further ones:
    ``x, y and 3 more``.
    """
    shown = ", ".join(values[:most])
    hidden = len(values) - most
    if hidden > 0:
        return f"{shown} and {hidden} more"
    return shown


def count(number: int, thing: str) -> str:
    """Return a number with a noun, such as ``1 cell`` or ``2,000 cells``."""
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}s"


def number_text(number: int | None) -> str:
    """Return a number, such as that of a cell, as text; an empty text for None, whose place in a
    table stays empty.
    """
    if number is None:
        return ""
    return str(number)


def value_text(value: object) -> str:
    """Return the value of a parameter; a long text is shortened."""
    if type(value) is str:
        return shorten(value, VALUE_SHOWN)
    if type(value) is float:
        return f"{value:g}"
    return str(value)


def shape_label(shape: Sequence[int]) -> str:
    """Return a shape as reports show it: ``512 × 1024``, or ``scalar``."""
    return format_shape(shape) or "scalar"
