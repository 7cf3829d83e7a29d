"""Small bars and sparklines, as text and as HTML that sanitizers of notebooks leave alone.

The colours are middle tones with an equal contrast to light and dark pages, since a sanitizer drops theme variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ipygpumem.model import Usage
from ipygpumem.reports.cleaning import clean
from ipygpumem.units import format_bytes

_CELLS = 8
_GRAINS = 1024
"""No bar shows a smaller part of its total: those that look the same are equal, and need not be drawn twice."""
_BLOCKS = ("▒", "█", "░")
_ASCII_BLOCKS = ("=", "#", "-")
_ANSI = ("\x1b[2m", "\x1b[36m", "\x1b[33m")
_RESET = "\x1b[0m"

_STEPS = "▁▂▃▄▅▆▇█"
_ASCII_STEPS = "_.-=+*#@"

_TRACK = (
    '<span role="img" title="{label}" aria-label="{label}" style="display: inline-block; width: {width}; height: 8px; '
    "line-height: 8px; font-size: 0; text-align: left; white-space: nowrap; overflow: hidden; "
    'background: rgba(128, 128, 128, 0.22); border-radius: 2px">{pieces}</span>'
)
_PIECE = '<span style="display: inline-block; height: {}px; min-width: 2px; width: {:.1f}%; background: {}"></span>'
# The peak is past: it is half as high. In grey, too, what was in use before and what was kept differ.
_LOOKS = ((8, "rgba(128, 128, 128, 0.6)"), (8, "#1e88e5"), (4, "#64b5f6"))

_SPARK = (
    '<span role="img" title="{label}" aria-label="{label}" style="display: inline-block; font-size: 0; '
    'white-space: nowrap; margin-left: 4px; border-bottom: 1px solid rgba(128, 128, 128, 0.5)">{columns}</span>'
)
_COLUMN = (
    '<span style="display: inline-block; width: 3px; height: {}px; background: #1e88e5; margin-right: 1px"></span>'
)
_SPARK_PIXELS = 12


@dataclass(frozen=True)
class Bar:
    """A device's memory as pieces of its total: in use before, kept on top of that, the peak above, the rest.

    ``label`` says in words what the bar shows.
    """

    label: str
    total_bytes: int
    used_bytes: int
    kept_bytes: int = 0
    peak_bytes: int = 0

    @property
    def pieces(self) -> tuple[int, int, int]:
        """The bytes of the pieces, none negative, together not above the total."""
        rest = self.total_bytes
        found = []
        for size in (self.used_bytes, self.kept_bytes, self.peak_bytes):
            found.append(max(0, min(size, rest)))
            rest -= found[-1]
        return (found[0], found[1], found[2])


def bar_of(name: str, usage: Usage) -> Bar | None:
    """Return the bar of what ``usage``'s device went through; None where its total is unknown.

    What other processes, the context and the allocator's cache take counts as in use before, where it is known: the
    bar is then as full as the whole device was at the peak.
    """
    if not usage.total_bytes:
        return None
    kept = max(0, usage.delta_bytes)
    peak = max(0, usage.peak_bytes - usage.after_bytes)
    used = usage.after_bytes - kept
    if usage.used_bytes is not None:
        mine = usage.after_bytes if usage.reserved_bytes is None else usage.reserved_bytes
        # The peak lay in the allocator's cache, unless that was given back since.
        used = max(usage.used_bytes - kept - peak, usage.used_bytes - mine + used)
    words = f"{name}: {format_bytes(used + kept)} of {format_bytes(usage.total_bytes)} in use"
    grain = -(-usage.total_bytes // _GRAINS)
    return Bar(words, usage.total_bytes, *[-(-size // grain) * grain for size in (used, kept, peak)])


def text_bar(bar: Bar, *, cells: int = _CELLS, ascii_only: bool = False, colour: bool = False) -> str:
    """Return ``bar`` in ``cells`` characters and two edges, such as ``▕▒▒█░    ▏``.

    In use before is ``▒``, kept ``█``, the peak above ``░``; what is not empty has one character at least.
    """
    blocks, (left, right) = (_ASCII_BLOCKS, "[]") if ascii_only else (_BLOCKS, "▕▏")
    drawn = [block * number for block, number in zip(blocks, _lengths(bar, cells), strict=True)]
    free = " " * (cells - sum(map(len, drawn)))
    if colour:
        drawn = [code + piece + _RESET if piece else "" for code, piece in zip(_ANSI, drawn, strict=True)]
    return left + "".join(drawn) + free + right


def _lengths(bar: Bar, cells: int) -> list[int]:
    pieces = bar.pieces
    ends = [round(sum(pieces[: index + 1]) * cells / bar.total_bytes) for index in range(3)]
    if ends[2] == 0 and any(pieces):
        return [int(index == pieces.index(max(pieces))) for index in range(3)]
    return [ends[0], ends[1] - ends[0], ends[2] - ends[1]]


def html_bar(bar: Bar, *, width: str = "64px") -> str:
    """Return ``bar`` as spans; its label is what a pointer shows and a screen reader says."""
    pieces = "".join(
        _PIECE.format(height, 100 * size / bar.total_bytes, colour)
        for size, (height, colour) in zip(bar.pieces, _LOOKS, strict=True)
        if size
    )
    return _TRACK.format(label=escape(clean(bar.label)), width=width, pieces=pieces)


def text_spark(values: Sequence[float], top: float, *, ascii_only: bool = False) -> str:
    """Return one character for each value, whose height is its share of ``top``."""
    steps = _ASCII_STEPS if ascii_only else _STEPS
    return "".join(steps[_level(value, top, len(steps) - 1)] for value in values)


def html_spark(values: Sequence[float], top: float, label: str) -> str:
    """Return one column for each value, whose height is its share of ``top``; ``label`` says it in words."""
    columns = "".join(_COLUMN.format(max(1, _level(value, top, _SPARK_PIXELS))) for value in values)
    return _SPARK.format(label=escape(clean(label)), columns=columns)


def _level(value: float, top: float, highest: int) -> int:
    return round(highest * min(1.0, max(0.0, value / top))) if top > 0 else 0
