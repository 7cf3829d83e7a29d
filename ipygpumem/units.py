"""Formats and parses bytes and seconds, and checks numbers of options and arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

from ipygpumem.errors import UnitError, quoted

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
PIB = 1024 * TIB
_LIMIT_OF_SIZES = 2**63
"""No device has so many bytes."""
_LARGEST_INTEGER = 10**9
"""Maximum of integer arguments that have no maximum of their own."""
_LETTERS = " kmgtp"
"""First letters of units, each a power of 1000 or 1024 above the one before."""

UNIT = r"(?:([kmgtp])(ib?|b?)|(b|bytes?))"
_SIZE = re.compile(rf"\s*(-?[0-9]+\.?[0-9]*|-?\.[0-9]+)\s*{UNIT}?\s*", re.IGNORECASE)
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,25}\s*")


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as text, such as ``512 × 1024``; empty for a scalar."""
    return " × ".join(map(str, shape))


def format_bytes(count: int) -> str:
    """Return a number of bytes as text, such as ``512 MiB``, ``381.5 MiB``, ``16 KiB`` or ``1.31
    GiB``.

    GiB and larger units have two decimals, MiB and KiB one; a lone zero decimal is dropped.

    >>> format_bytes(400_000_000), format_bytes(3 * 2**29)
    ('381.5 MiB', '1.50 GiB')
    """
    size = abs(count)
    sign = "-" if count < 0 else ""
    for unit, name in ((PIB, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        # A size that would be rounded to 1024.0 MiB is 1.00 GiB: half of the last digit of the
        # smaller unit, 0.05 MiB, is a 20480th of a GiB.
        if size >= unit - unit // 20480:
            shown = f"{size / unit:.2f}" if unit >= GIB else f"{size / unit:.1f}".removesuffix(".0")
            return f"{sign}{shown} {name}"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f}".removesuffix(".0") + " KiB"
    return f"{sign}{size} B"


def format_at_least(count: int, *, is_at_least: bool) -> str:
    """Format a number of bytes that may be a lower bound; where nothing is counted, nothing is
    uncertain.

    >>> format_at_least(2 << 20, is_at_least=True)
    'at least 2 MiB'
    >>> format_at_least(0, is_at_least=True)
    '0 B'
    """
    text = format_bytes(count)
    return f"at least {text}" if is_at_least and count else text


def format_in(count: int, size: str) -> str:
    """Return a number of bytes in the unit of a size that the user typed, such as ``24GB``.

    A number that is too small for it gets a smaller unit of the same kind. Without a unit in
    ``size`` it is formatted by ``format_bytes``.

    >>> format_in(24 * 10**9, "24GB"), format_in(3 * 2**29, "2200MiB"), format_in(2**20, "24GB")
    ('24.00 GB', '1536 MiB', '1 MB')
    """
    match = _SIZE.fullmatch(size)
    if match is None or not match[2]:
        return format_bytes(count)
    if match[3].lower() == "b":
        base = 1000
        ending = "B"
    else:
        base = 1024
        ending = "iB"
    power = _LETTERS.index(match[2].lower())
    while power and abs(count) < base**power / 10:  # 0.05 GB is better read as 50 MB
        power -= 1
    if not power:
        return f"{count} B"
    amount = count / base**power
    is_giga_or_more = power > 2
    shown = f"{amount:.2f}" if is_giga_or_more else f"{amount:.1f}".removesuffix(".0")
    return f"{shown} {_LETTERS[power].upper()}{ending}"


def format_change(count: int) -> str:
    """Return a change in bytes with its sign, such as ``+512 MiB``, ``-1.20 GiB`` or ``+0``."""
    if count == 0:
        return "+0"
    if count < 0:
        return format_bytes(count)
    return f"+{format_bytes(count)}"


def format_share(used: int, total: int) -> str:
    """Return two sizes of one device in one unit, such as ``8.40/139.80 GiB``."""
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    return f"{used / unit:.2f}/{total / unit:.2f} {name}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text: ``24GiB`` or ``24G`` (2**30 each), ``24GB`` (10**9),
    ``9 bytes``.

    Raises:
        UnitError: ``text`` is not a number with a known unit; only 0 needs none.

    >>> parse_bytes("1.5 GiB"), parse_bytes("24GB")
    (1610612736, 24000000000)
    """
    size = _parsed_size(text)
    has_unit = size.letter or size.bytes_word
    if size.number and not has_unit:
        raise UnitError(
            f"{quoted(text)} has no unit: write {text.strip()}GiB, or {text.strip()} bytes"
        )
    base = 1000 if size.is_decimal else 1024
    power = _LETTERS.index(size.letter or " ")
    return int(size.number * base**power)


def divided_up(size: int, divisor: int) -> int:
    """Return the number of parts of a size, the last of which may be smaller than ``divisor``."""
    return -(-size // divisor)


def rounded_up(size: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``size``."""
    return divided_up(size, step) * step


def as_typed(size: object) -> str:
    """Return a size in the unit in which it was typed, written out so that no reader has to guess
    whether 1000 or 1024 bytes were meant: ``24g`` is 24 GiB.

    >>> as_typed("24GB"), as_typed("1.50g"), as_typed(2**20)
    ('24 GB', '1.50 GiB', '1 MiB')
    """
    if not isinstance(size, str):
        return format_bytes(checked_bytes(size))
    parsed = _parsed_size(size)
    number = re.findall(r"[0-9.]+", size)[0]
    if not parsed.letter:
        return f"{number} bytes"
    unit = "B" if parsed.is_decimal else "iB"
    return f"{number} {parsed.letter.upper()}{unit}"


def bytes_in_message(text: str) -> int:
    """Return the number of bytes in a library's message: PyTorch's MPS writes GB for GiB, CuPy no
    unit.
    """
    size = _parsed_size(text)
    return int(size.number * 1024 ** _LETTERS.index(size.letter or " "))


class _ParsedSize(NamedTuple):
    """A number with its unit."""

    number: float
    letter: str
    """The first letter of a unit such as ``gib``; empty for bytes."""
    is_decimal: bool
    """True for a unit such as ``gb``, of which 1000 are the next larger one."""
    bytes_word: str
    """The unit if it is bytes; empty otherwise."""


def _parsed_size(text: str) -> _ParsedSize:
    """Return the parts of a size.

    Raises:
        UnitError: the text is no size, or a negative one.
    """
    # A longer text could take long to match.
    match = _SIZE.fullmatch(text) if len(text) <= 100 else None
    if match is None:
        raise UnitError(
            f"{quoted(text)} is not a size: write a number and a unit, such as 8GiB or 512 MiB"
        )
    if match[1].startswith("-"):
        raise UnitError(f"a size cannot be negative: {quoted(text)}")
    letter, rest, bytes_word = ((match[group] or "").lower() for group in (2, 3, 4))
    return _ParsedSize(float(match[1]), letter, rest == "b", bytes_word)


def checked_bytes(size: object, minimum: int = 0) -> int:
    """Return a size argument in bytes: a number of bytes, or a text that ``parse_bytes`` accepts.

    Raises:
        UnitError: it is neither, less than ``minimum``, or more than any device has.
    """
    if isinstance(size, str):
        size = parse_bytes(size)
    if isinstance(size, float) and size.is_integer():  # 8e9
        size = int(size)
    size = _plain_integer(size)
    if type(size) is not int or size < 0:
        raise UnitError(
            f"a size must be a number of bytes or a string such as '8GiB', not {quoted(size)}"
        )
    if size >= _LIMIT_OF_SIZES:
        limit = format_bytes(_LIMIT_OF_SIZES)
        raise UnitError(f"no device has more than {limit}: write a smaller size")
    if size < minimum:
        raise UnitError(
            f"{format_bytes(size)} is too little: write a size of {format_bytes(minimum)} or more"
        )
    return size


def _plain_integer(value: object) -> object:
    """Return the plain integer that equals one of a library, such as NumPy's; any other object as
    it is.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


def checked_integer(value: object, minimum: int = 1, maximum: int = _LARGEST_INTEGER) -> int:
    """Return an integer argument within bounds.

    Raises:
        UnitError: it is no integer, or not within the bounds.
    """
    value = _plain_integer(value)
    if type(value) is not int or not minimum <= value <= maximum:
        if maximum == _LARGEST_INTEGER:
            bounds = f"of {minimum} or more"
        else:
            bounds = f"from {minimum} to {maximum}"
        raise UnitError(f"{quoted(value)} is not a whole number {bounds}")
    return value


def checked_number(value: object, minimum: float = 0.001, maximum: float = 1e9) -> float:
    """Return a number argument within bounds.

    Raises:
        UnitError: it is no number, or not within the bounds.
    """
    if isinstance(value, (int, float)):
        is_within_bounds = minimum <= value <= maximum
        if is_within_bounds and type(value) is not bool:
            return float(value)
    raise UnitError(f"{quoted(value)} is not a number from {minimum:g} to {maximum:g}")


def number_in(text: str) -> int | float | str:
    """Return the number in a text, or the text itself if it is not a number."""
    with contextlib.suppress(ValueError):
        if _WHOLE.fullmatch(text):
            return int(text)
        return float(text)
    return text


def format_short_seconds(seconds: float) -> str:
    """Return a duration like ``format_seconds``, but less than a millisecond as ``12 µs``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return format_seconds(seconds)


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``0.4 ms``, ``12 ms``, ``3.21 s``, ``2 min 5 s``,
    ``1 h 4 min``.
    """
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left} s"
    return f"{minutes // 60} h {minutes % 60} min"
