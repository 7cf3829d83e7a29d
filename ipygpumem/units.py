"""Bytes and seconds as people read them: binary units, few digits."""

from __future__ import annotations

import re

from ipygpumem.errors import UnitError, quoted

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
PIB = 1024 * TIB
_MOST = 2**63

_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB, "p": PIB}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(?:([kmgtp]?)(i?b)|bytes?)?\s*", re.IGNORECASE)


def format_bytes(count: int) -> str:
    """Return ``count`` bytes as text, such as ``512 MiB``, ``381.5 MiB``, ``16 KiB`` or ``1.31 GiB``.

    GiB and more carry two decimals, MiB and KiB one, and a lone decimal that says nothing is dropped.
    """
    size = abs(count)
    sign = "-" if count < 0 else ""
    for unit, name in ((PIB, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        # Half of the last digit shown: what would print as 1024.0 MiB is 1.00 GiB.
        if size >= unit - unit // 20480:
            shown = f"{size / unit:.2f}" if unit >= GIB else f"{size / unit:.1f}".removesuffix(".0")
            return f"{sign}{shown} {name}"
    return f"{sign}{size / KIB:.1f}".removesuffix(".0") + " KiB" if size >= KIB else f"{sign}{size} B"


def format_change(count: int) -> str:
    """Return a change in bytes with its sign, such as ``+512 MiB``, ``-1.20 GiB`` or ``+0``."""
    if count == 0:
        return "+0"
    return format_bytes(count) if count < 0 else f"+{format_bytes(count)}"


def format_share(used: int, total: int) -> str:
    """Return two sizes of one device in one unit, such as ``8.40/139.80 GiB``."""
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    return f"{used / unit:.2f}/{total / unit:.2f} {name}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` names: ``24GiB``, ``1.5 MiB``, ``4096``.

    ``KB``, ``MB``, ``GB`` are read as binary units, as GPU memory is sold and reported.

    Raises:
        UnitError: ``text`` is not a number with a known unit.
    """
    match = _SIZE.fullmatch(text) if len(text) <= 100 else None  # a search in more may take long
    if match is None:
        raise UnitError(f"{quoted(text)} is not a size: write a number and a unit, such as 8GiB or 512 MiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def checked_bytes(size: object) -> int:
    """Return the number of bytes that a caller means: a number of them, or a text as ``parse_bytes`` reads it.

    Raises:
        UnitError: it is neither, or more than any device has.
    """
    if isinstance(size, str):
        size = parse_bytes(size)
    if type(size) is float and size.is_integer():  # 8e9
        size = int(size)
    if type(size) is not int or size < 0:
        what = quoted(size) if type(size) in (int, float) else type(size).__name__
        raise UnitError(f"a size is a number of bytes, or a text such as '8GiB', and not {what}")
    if size >= _MOST:
        raise UnitError(f"no device has more than {format_bytes(_MOST)}: write a smaller size")
    return size


def format_short_seconds(seconds: float) -> str:
    """Return a duration as ``format_seconds`` does, and less than a millisecond as ``12 µs``."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.001 else format_seconds(seconds)


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``0.4 ms``, ``12 ms``, ``3.21 s``, ``2 min 5 s``, ``1 h 4 min``."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
