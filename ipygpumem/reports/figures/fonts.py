"""Finds fonts for names in any script, and the letters that no font of this machine has."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache

from matplotlib import font_manager, rcParams

from ipygpumem.reports.layout import listed

_OWN = "DejaVu Sans"
"""Matplotlib's own font, which is everywhere."""
_PREFERRED = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "WenQuanYi Micro Hei",
    "Noto Sans",
    "Noto Emoji",
)
_UNFIT = ("Last Resort", "Color Emoji")
"""Fonts of boxes, and those whose letters are pictures, which matplotlib cannot draw."""
_NAMED = 4
MISSING = "?"
"""Stands for a letter that no font has."""


@cache
def families() -> list[str]:
    """Return matplotlib's own font, and those of this machine that have most of the letters which it lacks."""
    known = {font.name for font in font_manager.fontManager.ttflist}
    return [_OWN, *(name for name in _PREFERRED if name in known)]


def provide(text: str) -> None:
    """Let the texts that are made from now on have a font for each letter of ``text``; to be called while drawing."""
    used = list(rcParams["font.family"])
    for letter in lacking(text, used):
        family = _family_with(letter)
        if family is not None and family not in used:
            used.append(family)
            rcParams["font.family"] = used


def lacking(text: str, used: Sequence[str]) -> list[str]:
    """Return the letters of ``text`` that no family in ``used`` has, each once."""
    if text.isascii():
        return []
    letters = [letter for letter in dict.fromkeys(text) if not letter.isascii() and not letter.isspace()]
    return [letter for letter in letters if not any(ord(letter) in _letters(_path(name)) for name in used)]


def without(text: str, letters: Iterable[str]) -> str:
    """Return ``text`` with a question mark for each of ``letters``; marks that only change others are dropped."""
    return text.translate({ord(letter): MISSING if _is_seen(letter) else "" for letter in letters})


def missing_line(letters: Iterable[str]) -> str:
    """Return one line that says which letters are not drawn; nothing where none of them would be seen."""
    codes = [f"U+{ord(letter):04X}" for letter in letters if _is_seen(letter)]
    return f"no font here has {listed(codes, _NAMED)}: drawn as {MISSING}" if codes else ""


def _is_seen(letter: str) -> bool:
    return unicodedata.category(letter)[0] not in "MC"


@cache
def _path(family: str) -> str:
    return str(font_manager.findfont(family))


@cache
def _letters(path: str) -> frozenset[int]:
    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):  # of a kind that matplotlib does not read
        return frozenset()


@cache
def _family_with(letter: str) -> str | None:
    """Return the first font of this machine that has ``letter``."""
    fonts = sorted({(font.name, font.fname) for font in font_manager.fontManager.ttflist if font.style == "normal"})
    fit = ((name, path) for name, path in fonts if not any(word in name for word in _UNFIT))
    return next((name for name, path in fit if ord(letter) in _letters(path)), None)
