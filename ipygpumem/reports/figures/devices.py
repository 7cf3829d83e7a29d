"""Draws what each device's memory consists of: one stacked bar for each, the parts' names below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from ipygpumem.reconcile.records import Part, Reconciliation
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import set_bytes
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.figures.records import chosen
from ipygpumem.reports.layout import clean, device_label
from ipygpumem.units import format_bytes

_ABOUT_ACROSS = 8.6
_BAR, _ROW, _COLUMNS = 0.42, 0.16, 2
"""Inches that a bar takes and a row of names below it, and how many names are side by side."""
_NAMES: dict[str, Any] = {"ncol": _COLUMNS, "loc": "upper left", "columnspacing": 8, "borderpad": 0, "borderaxespad": 0}
_SMALL_SHARE = 0.004
"""Parts with less of the device are drawn as one."""


_LOOKS = {  # by the beginning of a part's name; lightness tells neighbours apart, hatches tell kinds apart
    "unknown": ("#ffffff", "xxxx"),
    "tensors: parameter": ("#083d66", ""),
    "tensors: gradient": ("#2a6ea3", "...."),
    "tensors: optimizer state": ("#5b97c6", ""),
    "tensors: buffer": ("#8bb8dc", "...."),
    "tensors": ("#b4d2ea", ""),
    "live tensors": ("#2a6ea3", ""),
    "held by C++": ("#5a3e85", "////"),
    "allocator cache": ("#8fcbb5", ""),
    "pools' cache": ("#b9e0d2", "...."),
    "fragmentation": ("#4e9f83", "\\\\\\\\"),
    "rounding": ("#d5ece3", ""),
    "waiting for a stream": ("#4e9f83", ""),
    "context and libraries": ("#c98b1b", ""),
    "this process": ("#e0a83a", ""),
    "shared memory": ("#f3cf86", "////"),
    "libraries and mapped files": ("#fae6ba", ""),
    "child processes": ("#b5543a", "...."),
    "process": ("#cf7d63", "////"),
    "other": ("#e3ab98", "////"),
    "cache": ("#dcdfe3", ""),
    "out of reach": ("#b7bcc4", "----"),
    "free": ("#f6f7f8", ""),
}
"""Colours and hatches."""
_ANY, _MERGED = ("#a3a8b0", ""), ("#7a7f87", "")


def draw(reconciliations: Sequence[Reconciliation], *, device: str | None = None) -> Picture:
    """Return one bar for each device; at least one."""
    names = chosen((found.device for found in reconciliations), device, "is not known")
    reconciliations = [found for found in reconciliations if found.device in names]
    parts = [_parts(found) for found in reconciliations]
    heights = [inches for own in parts for inches in (_BAR, _ROW * -(-len(own) // _COLUMNS))]
    with picture.drawing():
        figure = Picture(sum(heights) + 0.85 * len(parts), _summary(reconciliations), "What the memory consists of")
        panels = figure.subplots(len(heights), height_ratios=heights)
        for axes, below, found, own in zip(panels[::2], panels[1::2], reconciliations, parts, strict=True):
            title = f"{_label(found)} · {format_bytes(found.total_bytes)}, {clean(found.basis)}"
            title = picture.fit(title, _ABOUT_ACROSS, picture.NORMAL)
            axes.set_title(title, loc="left", size=picture.NORMAL, pad=4)
            _draw_bar(axes, own, found.total_bytes)
            below.axis("off")
            below.legend(*axes.get_legend_handles_labels(), **_NAMES)
        figure.lay_out()
    return figure


def _parts(found: Reconciliation) -> list[Part]:
    """Return the parts that are not empty, the small ones of known kinds as one; what is unknown stays by itself."""
    filled = [part for part in found.parts if part.size_bytes != 0]
    limit = _SMALL_SHARE * found.total_bytes
    known = [part for part in filled if part.size_bytes is not None and not part.name.startswith("unknown")]
    small = [part for part in known if (part.size_bytes or 0) < limit]
    if len(small) < 2:
        return filled
    rest = Part(f"{len(small)} small parts", sum(part.size_bytes or 0 for part in small), "")
    kept = [part for part in filled if not any(part is other for other in small)]
    position = next((index for index, part in enumerate(kept) if part.name == "free"), len(kept))
    return [*kept[:position], rest, *kept[position:]]


def _look(part: Part) -> tuple[str, str]:
    if part.name.endswith("small parts"):
        return _MERGED
    name = part.name.replace("arrays", "tensors", 1)  # the host's parts
    return next((look for start, look in _LOOKS.items() if name.startswith(start)), _ANY)


def _draw_bar(axes: Axes, parts: Sequence[Part], total: int) -> None:
    """Draw the parts one after the other."""
    axes.set(xlim=(0, total or 1), ylim=(-0.5, 0.5), yticks=[])
    left = 0
    for part in parts:
        (color, hatch), size = _look(part), _size(part, total)
        name = picture.fit(part.name, _ABOUT_ACROSS / _COLUMNS - 1.8, picture.SMALL)
        options: dict[str, Any] = {"facecolor": color, "hatch": hatch, "edgecolor": picture.INK}
        axes.barh(0, part.size_bytes or 0, 1, left, label=f"{name} · {size}", linewidth=0.5, **options)
        left += part.size_bytes or 0
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    set_bytes(axes.xaxis)


def _size(part: Part, total: int) -> str:
    if part.size_bytes is None:
        return "unknown"
    share = 100 * part.size_bytes / total if total else 0.0
    return f"{format_bytes(part.size_bytes)}, {f'{share:.0f}' if share >= 0.5 else '<1'} %"


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
