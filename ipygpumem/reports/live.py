"""Draws the line that is shown while a long cell runs: its time, and each device's curve of the last minute.

While ipygpumem itself works for long, the line says what it does, and how much of that is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from ipygpumem.model import Reading
from ipygpumem.reports.bars import curve_of, html_spark, text_spark
from ipygpumem.reports.layout import SEPARATOR, Curve, device_label
from ipygpumem.reports.text import ASCII
from ipygpumem.units import format_bytes, format_seconds, format_share

MINUTE_SECONDS = 60.0
_HTML_COLUMNS = 30
_TEXT_COLUMNS = (20, 10, 0)

_LINE = (
    '<div style="font: 0.85em/1.5 var(--jp-code-font-family, monospace); opacity: 0.8; '
    'margin-left: var(--jp-code-padding, 5px)">{}</div>'
)

_PART = '<span style="white-space: nowrap">{}</span>'
_BAR = (
    '<span style="display: inline-block; width: 8em; height: 0.7em; margin-left: 0.6em; '
    'border: 1px solid currentColor">'
    '<span style="display: block; width: {:.0%}; height: 100%; background: currentColor"></span></span>'
)
_TEXT_BAR = 20


class Work(NamedTuple):
    """Long work of ipygpumem's own, and the share of it that is done."""

    what: str
    share: float

    def __str__(self) -> str:
        return f"ipygpumem: {self.what} {self.share:.0%}"


class LivePoint(NamedTuple):
    """What was drawn of each device at one moment of a cell."""

    elapsed_seconds: float
    sizes: dict[str, int]


def sample_of(elapsed_seconds: float, readings: Iterable[Reading]) -> LivePoint:
    """Return what is drawn of ``readings``: a device's whole use where the driver reports it, else this process's."""
    return LivePoint(elapsed_seconds, {reading.device: _shown_bytes(reading) for reading in readings})


def live_html(readings: Sequence[Reading], samples: Sequence[LivePoint]) -> str:
    """Return the line for a notebook; ``samples`` are those of the running cell, the newest that of ``readings``."""
    parts = [escape(_time(samples[-1]))]
    for reading in _in_use(readings):
        curve = _curve(samples, reading, _HTML_COLUMNS)
        parts.append(_PART.format(escape(_words(reading)) + html_spark(curve)))
    return _LINE.format(SEPARATOR.join(parts))


def live_text(
    readings: Sequence[Reading], samples: Sequence[LivePoint], *, width: int, ascii_only: bool = False
) -> str:
    """Return the line for a terminal, at most ``width`` characters: curves get shorter first, then the line does."""
    text = ""
    for columns in _TEXT_COLUMNS:
        parts = [
            _words(reading) + (f" {text_spark(_curve(samples, reading, columns))}" if columns else "")
            for reading in _in_use(readings)
        ]
        text = SEPARATOR.join([_time(samples[-1]), *parts])
        if len(text) <= width:
            break
    return _for_row(text, width, ascii_only=ascii_only)


def work_html(work: Work) -> str:
    """Return the line for a notebook while ipygpumem itself works."""
    return _LINE.format(_PART.format(escape(str(work)) + _BAR.format(work.share)))


def work_text(work: Work, *, width: int, ascii_only: bool = False) -> str:
    """Return the line for a terminal while ipygpumem itself works, at most ``width`` characters."""
    done = round(_TEXT_BAR * work.share)
    text = f"{work} {'█' * done}{'░' * (_TEXT_BAR - done)}"
    return _for_row(text if len(text) <= width else str(work), width, ascii_only=ascii_only)


def _for_row(text: str, width: int, *, ascii_only: bool) -> str:
    return (text.translate(ASCII) if ascii_only else text)[:width]


def _time(now: LivePoint) -> str:
    seconds = int(now.elapsed_seconds)  # hundredths would only flicker
    return f"{seconds} s" if seconds < 60 else format_seconds(float(seconds))


def _in_use(readings: Iterable[Reading]) -> list[Reading]:
    return [item for item in readings if item.device == "cpu" or item.current_bytes or item.reserved_bytes]


def _shown_bytes(reading: Reading) -> int:
    mine = max(reading.current_bytes, reading.reserved_bytes or 0)
    return mine if reading.used_bytes is None else reading.used_bytes


def _words(reading: Reading) -> str:
    size = _shown_bytes(reading)
    if reading.total_bytes is None:
        text = format_bytes(size)
    elif reading.device == "cpu":
        text = f"{format_bytes(size)} / {format_bytes(reading.total_bytes)}"
    else:
        text = format_share(size, reading.total_bytes)
    children = f", children {format_bytes(reading.children_bytes)}" if reading.children_bytes else ""
    return f"{device_label(reading.device)} {text}{children}"


def _curve(samples: Sequence[LivePoint], reading: Reading, columns: int) -> Curve:
    """Return the highest value in each piece of the last minute."""
    piece = MINUTE_SECONDS / columns
    highest: dict[int, int] = {}
    for sample in samples:
        size = sample.sizes.get(reading.device, 0)
        index = int(sample.elapsed_seconds / piece)
        highest[index] = max(highest.get(index, 0), size)
    label = f"{device_label(reading.device)}, the last minute"
    return curve_of(label, list(highest.values())[-columns:], reading.total_bytes)
