"""Gives axes binary units, and time without its long pauses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import MultipleLocator

from ipygpumem.units import GIB, KIB, MIB, PIB, TIB, format_seconds

_UNITS = ((PIB, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_SMALL_STEPS = tuple(digit * 10.0**power for power in range(-4, 0) for digit in (1, 2, 5))
_PAUSES_SHARE = 0.25
"""How much of the time axis pauses may take before they are shortened."""


def set_bytes(axis: Axis, *, count: int = 6) -> None:
    """Let ``axis`` count bytes: ticks at multiples of a power of two within its limits, and one unit for all."""
    low, high = sorted(axis.get_view_interval())
    step = 2 ** max(0, math.ceil(math.log2((high - low) / count)))
    largest = max(-low, high)
    size, unit = next(item for item in _UNITS if largest >= item[0] or item[0] == 1)
    axis.set_major_locator(MultipleLocator(step))
    axis.set_major_formatter(
        lambda value, _: "0" if value == 0 else f"{value / size:g} {unit}".replace("-", "\N{MINUS SIGN}")
    )


class TimeAxis:
    """Where moments lie on the time axis: pauses between spans are shortened if they would fill it.

    Args:
        spans: beginnings and ends in seconds, in order and without overlap; at least one.
    """

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._spans = spans
        busy = sum(end - start for start, end in spans)
        pauses = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
        self.longest_pause = _longest(pauses, busy * _PAUSES_SHARE / (1 - _PAUSES_SHARE))
        """Pauses that are longer are drawn as if they took so many seconds."""
        self.shortened = [pause for pause in pauses if pause > self.longest_pause]
        moments, places = [spans[0][0]], [0.0]
        for index, (start, end) in enumerate(spans):
            if index:
                moments.append(start)
                places.append(places[-1] + min(pauses[index - 1], self.longest_pause))
            moments.append(end)
            places.append(places[-1] + end - start)
        self._moments, self._places = np.array(moments), np.array(places)

    @property
    def length(self) -> float:
        """How long the axis is, in seconds; never zero."""
        return float(self._places[-1]) or 1.0

    def place(self, moments: Any) -> Any:
        """Return where ``moments`` lie; those before the first span or after the last lie at its edge."""
        return np.interp(moments, self._moments, self._places)

    def ticks(self, width: float) -> list[tuple[float, str]]:
        """Return places and labels of time since the first span, no two nearer than ``width`` seconds of the axis."""
        first = float(self._moments[0])
        pauses = [(after[0] - before[1], after[0]) for before, after in itertools.pairwise(self._spans)]
        resumed = sorted((pause for pause in pauses if pause[0] > self.longest_pause), reverse=True)
        step = next((step for step in _SMALL_STEPS + _STEPS if step >= width), _STEPS[-1])
        wanted = [first, *(moment for _, moment in resumed)]
        for start, end in self._spans if resumed else [(first, float(self._moments[-1]))]:
            count = np.arange(np.ceil((start - first) / step), np.floor((end - first) / step) + 1)
            wanted += [first + step * number for number in count[:1000]]
        ticks: dict[float, str] = {}
        for moment in wanted:
            place = float(self.place(moment))
            sticks_out = place + width / 2 > self.length and ticks
            if not sticks_out and all(abs(place - other) >= width for other in ticks):
                ticks[place] = elapsed(moment - first, step)
        return sorted(ticks.items())


def _longest(pauses: Sequence[float], room: float) -> float:
    """Return the length to which pauses have to be shortened so that together they take ``room``."""
    left = room
    ordered = sorted(pauses)
    for index, pause in enumerate(ordered):
        share = left / (len(ordered) - index)
        if pause > share:
            return share
        left -= pause
    return float("inf")


def elapsed(seconds: float, step: float = 1) -> str:
    """Return a time as a clock shows it, ``2:05`` or ``1:04:10``; if ``step`` is short, ``2.5 s``."""
    if seconds <= 0:
        return "0"
    if step < 1 and seconds < 60:
        decimals = max(0, -math.floor(math.log10(step)))
        return format_seconds(seconds) if seconds < 1 else f"{round(seconds, decimals):g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
