"""What each device's memory consists of: one stacked bar for each, with the parts' names and sizes below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ipygpumem.reconcile.records import Part, Reconciliation
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import set_bytes
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.layout import clean, device_label
from ipygpumem.units import format_bytes

_WIDTH, _LEFT, _RIGHT = 9.0, 0.35, 0.35
_ACROSS = _WIDTH - _LEFT - _RIGHT
_TOP, _TITLE, _BAR, _TICKS, _ROW, _GAP = 0.5, 0.3, 0.42, 0.34, 0.2, 0.2
_COLUMNS = 2
_SMALL_SHARE = 0.004
"""Parts with less of the device are drawn as one."""


@dataclass(frozen=True)
class _Look:
    color: str
    hatch: str = ""


_LOOKS = (  # by the beginning of a part's name; lightness tells neighbours apart, hatches tell kinds apart
    ("unknown", _Look("#ffffff", "xxxx")),
    ("tensors: parameter", _Look("#083d66")),
    ("tensors: gradient", _Look("#2a6ea3", "....")),
    ("tensors: optimizer state", _Look("#5b97c6")),
    ("tensors: buffer", _Look("#8bb8dc", "....")),
    ("arrays: parameter", _Look("#083d66")),
    ("arrays: gradient", _Look("#2a6ea3", "....")),
    ("arrays: optimizer state", _Look("#5b97c6")),
    ("arrays: buffer", _Look("#8bb8dc", "....")),
    ("tensors", _Look("#b4d2ea")),
    ("arrays", _Look("#b4d2ea")),
    ("live tensors", _Look("#2a6ea3")),
    ("held by C++", _Look("#5a3e85", "////")),
    ("allocator cache", _Look("#8fcbb5")),
    ("pools' cache", _Look("#b9e0d2", "....")),
    ("fragmentation", _Look("#4e9f83", "\\\\\\\\")),
    ("rounding", _Look("#d5ece3")),
    ("waiting for a stream", _Look("#4e9f83")),
    ("context and libraries", _Look("#c98b1b")),
    ("this process", _Look("#e0a83a")),
    ("shared memory", _Look("#f3cf86", "////")),
    ("libraries and mapped files", _Look("#fae6ba")),
    ("child processes", _Look("#b5543a", "....")),
    ("process", _Look("#cf7d63", "////")),
    ("other", _Look("#e3ab98", "////")),
    ("cache", _Look("#dcdfe3")),
    ("out of reach", _Look("#b7bcc4", "----")),
    ("free", _Look("#f6f7f8")),
)
_ANY = _Look("#a3a8b0")
_MERGED = _Look("#7a7f87")


def draw(reconciliations: Sequence[Reconciliation]) -> Picture:
    """Return one bar for each device; at least one."""
    parts = [_parts(found) for found in reconciliations]
    heights = [_TITLE + _BAR + _TICKS + _ROW * -(-len(own) // _COLUMNS) + _GAP for own in parts]
    with picture.drawing():
        figure = Picture(_WIDTH, _TOP + sum(heights), _summary(reconciliations))
        figure.write(0.12, 0.3, "What the memory consists of", size=picture.LARGE, weight="bold")
        top = _TOP
        for found, own, height in zip(reconciliations, parts, heights, strict=True):
            title = f"{_label(found)} · {format_bytes(found.total_bytes)}, {clean(found.basis)}"
            figure.write(_LEFT, top + _TITLE - 0.1, picture.fit(title, _ACROSS, picture.NORMAL), size=picture.NORMAL)
            _draw_bar(figure.panel(_LEFT, top + _TITLE, _ACROSS, _BAR), own, found.total_bytes)
            _draw_names(figure, own, top + _TITLE + _BAR + _TICKS, found.total_bytes)
            top += height
    return figure


def _parts(found: Reconciliation) -> list[Part]:
    """Return the parts that are not empty, the small ones of known kinds as one; what is unknown stays by itself."""
    filled = [part for part in found.parts if part.size_bytes != 0]
    limit = _SMALL_SHARE * found.total_bytes
    small = [
        part
        for part in filled
        if part.size_bytes is not None and part.size_bytes < limit and _look(part) is not _LOOKS[0][1]
    ]
    if len(small) < 2:
        return filled
    rest = Part(f"{len(small)} small parts", sum(part.size_bytes or 0 for part in small), "")
    kept = [part for part in filled if not any(part is other for other in small)]
    position = next((index for index, part in enumerate(kept) if part.name == "free"), len(kept))
    return [*kept[:position], rest, *kept[position:]]


def _look(part: Part) -> _Look:
    if part.name.endswith("small parts"):
        return _MERGED
    return next((look for start, look in _LOOKS if part.name.startswith(start)), _ANY)


def _draw_bar(axes: Axes, parts: Sequence[Part], total: int) -> None:
    axes.set(xlim=(0, total or 1), ylim=(0, 1))
    left = 0
    for part in parts:
        size = part.size_bytes or 0
        _box(axes, left, size, _look(part))
        left += size
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    set_bytes(axes.xaxis, count=6)


def _box(axes: Axes, left: float, width: float, look: _Look) -> None:
    axes.barh(
        0.5, width, left=left, height=1, facecolor=look.color, hatch=look.hatch, edgecolor=picture.INK, linewidth=0.5
    )


def _draw_names(figure: Picture, parts: Sequence[Part], top: float, total: int) -> None:
    """Write the parts' names and sizes below the bar, column by column, each beside its look."""
    rows = -(-len(parts) // _COLUMNS)
    axes = figure.panel(_LEFT, top, _ACROSS, max(rows, 1) * _ROW)
    axes.set(xlim=(0, _ACROSS), ylim=(max(rows, 1), 0))
    axes.axis("off")
    column = _ACROSS / _COLUMNS
    for index, part in enumerate(parts):
        left, row = index // rows * column, index % rows + 0.5
        look = _look(part)
        axes.barh(
            row,
            0.2,
            left=left,
            height=0.62,
            facecolor=look.color,
            hatch=look.hatch,
            edgecolor=picture.INK,
            linewidth=0.5,
        )
        size = _size(part, total)
        room = column - 0.63 - picture.inches(size, picture.SMALL)
        axes.text(left + 0.28, row, picture.fit(part.name, room, picture.SMALL), size=picture.SMALL, va="center")
        axes.text(left + column - 0.25, row, size, size=picture.SMALL, va="center", ha="right", color=picture.FAINT_INK)


def _size(part: Part, total: int) -> str:
    if part.size_bytes is None:
        return "unknown"
    share = 100 * part.size_bytes / total if total else 0.0
    return (
        f"{format_bytes(part.size_bytes)}  {share:.0f} %" if share >= 0.5 else f"{format_bytes(part.size_bytes)}  <1 %"
    )


def _label(found: Reconciliation) -> str:
    return picture.shorten(device_label(found.device), 24)


def _summary(reconciliations: Sequence[Reconciliation]) -> str:
    lines = ["what the memory consists of"]
    for found in reconciliations:
        parts = [part for part in found.parts if part.size_bytes != 0]
        largest = sorted(parts, key=lambda part: -(part.size_bytes or 0))[:6]
        sizes = [
            f"{clean(part.name)} {'unknown' if part.size_bytes is None else format_bytes(part.size_bytes)}"
            for part in largest
        ]
        lines.append(f"  {_label(found)}: {format_bytes(found.total_bytes)}, of which {', '.join(sizes)}")
    return "\n".join(lines)
