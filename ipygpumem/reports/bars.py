"""Draws small bars, as text and as HTML that sanitizers of notebooks leave alone.

The colours are middle tones with an equal contrast to light and dark pages, since a sanitizer drops theme variables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from html import escape

from ipygpumem.model import Usage
from ipygpumem.reports.layout import LEAST_SHARE, Bar, clean
from ipygpumem.units import format_bytes

_CELLS = 8
BAR_COLUMNS = _CELLS + 2
"""What a bar takes in a terminal, with its two ends."""
_BLOCKS = (("▒", "\x1b[2m"), ("█", "\x1b[36m"), ("░", "\x1b[33m"))
_RESET = "\x1b[0m"

_TRACK = (
    '<span role="img" title="{label}" aria-label="{label}" style="display: inline-block; width: 64px; height: 8px; '
    "line-height: 8px; font-size: 0; text-align: left; white-space: nowrap; overflow: hidden; "
    'background: rgba(128, 128, 128, 0.22); border-radius: 2px{tick}">{pieces}</span>'
)
_PIECE = '<span style="display: inline-block; height: {}px; min-width: 2px; width: {:.1f}%; background: {}"></span>'
# The peak is past: it is half as high. In grey, too, what was in use before and what was kept differ.
_LOOKS = ((8, "rgba(128, 128, 128, 0.6)"), (8, "#1e88e5"), (4, "#64b5f6"))


class Scales:
    """How long each device's bar is: as the session's highest use, so that a change can be seen."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def note(self, usages: Iterable[Usage]) -> None:
        """Let the bars be long enough for ``usages``, from now on."""
        for usage in usages:
            self._highest[usage.device] = max(self._highest.get(usage.device, 0), sum(_sizes(usage)))

    def bar(self, name: str, usage: Usage) -> Bar | None:
        """Return the bar of what ``usage``'s device went through, under ``name``.

        It is as long as the highest use, rounded up so that it seldom changes (..., 1, 1.5, 2, 3, 4, 6 GiB, ...), or as
        the device's total, if that is less. There is none where the total is unknown, or where what was kept, given
        back or needed meanwhile is below 1 % of the length.
        """
        total = usage.total_bytes
        if not total:
            return None
        used, kept, peak = _sizes(usage)
        highest = max(self._highest.get(usage.device, 0), used + kept + peak)
        wanted = highest + highest // 20
        step = 1 << max(0, wanted.bit_length() - 2)
        length = min(total, -(-wanted // step) * step or 1)
        if max(kept, peak) < LEAST_SHARE * length:
            return None
        label = f"{name}: {format_bytes(used + kept)} of {format_bytes(total)} in use"
        if length < total:
            label += f"; the bar ends at {format_bytes(length)}"
        grain = -(-length // 1024)  # bars that look the same are equal
        used, kept, peak = (-(-size // grain) * grain for size in (used, kept, peak))
        return Bar(label, length, used, kept, peak, is_whole=length == total)


def _sizes(usage: Usage) -> tuple[int, int, int]:
    """Return what was in use before and still is, what was kept on top of that, and how far the peak was above both.

    What other processes, the context and the allocator's cache take counts as in use before, where it is known: their
    sum is what the whole device had in use at the peak.
    """
    kept = max(0, usage.delta_bytes)
    peak = max(0, usage.peak_bytes - usage.after_bytes)
    used = usage.after_bytes - kept
    if usage.used_bytes is not None:
        mine = usage.after_bytes if usage.reserved_bytes is None else usage.reserved_bytes
        # The peak lay in the allocator's cache, unless that was given back since.
        used = max(usage.used_bytes - kept - peak, usage.used_bytes - mine + used)
    return used, kept, peak


def text_bar(bar: Bar, *, colour: bool = False) -> str:
    """Return ``bar`` in characters, such as ``▕▒▒█░    ▏``, or ``▕▒▒█░    ┃`` up to the total.

    In use before is ``▒``, kept ``█``, the peak above ``░``; a piece has one character at least, where there is room.
    """
    pieces = [(block * number, code) for (block, code), number in zip(_BLOCKS, _lengths(bar), strict=True)]
    drawn = "".join(code + piece + _RESET if colour and piece else piece for piece, code in pieces)
    free = " " * (_CELLS - sum(len(piece) for piece, _ in pieces))
    return f"▕{drawn}{free}{'┃' if bar.is_whole else '▏'}"


def _lengths(bar: Bar) -> list[int]:
    pieces = bar.pieces
    ends = [0, *(round(sum(pieces[:number]) * _CELLS / bar.length_bytes) for number in (1, 2, 3))]
    found = [end - start for start, end in itertools.pairwise(ends)]
    for index in sorted(range(3), key=lambda index: -pieces[index]):
        if pieces[index] and not found[index]:  # at the cost of what is free, else of the longest piece
            found[index] = 1
            found[found.index(max(found))] -= sum(found) > _CELLS
    return found


def html_bar(bar: Bar) -> str:
    """Return ``bar`` as spans; its label is what a pointer shows and a screen reader says."""
    pieces = "".join(
        _PIECE.format(height, 100 * size / bar.length_bytes, colour)
        for size, (height, colour) in zip(bar.pieces, _LOOKS, strict=True)
        if size
    )
    tick = "; border-right: 2px solid rgba(128, 128, 128, 0.9)" if bar.is_whole else ""
    return _TRACK.format(label=escape(clean(bar.label)), pieces=pieces, tick=tick)
