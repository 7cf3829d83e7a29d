"""What all pictures have in common: a figure that shows itself, its style, and texts that fit where they stand."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from matplotlib import font_manager, style
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from ipygpumem.reports.content import clean

PAPER = "#fcfcfa"  # light, so that a picture reads the same on dark pages and in print
INK = "#26292e"
FAINT_INK = "#62666d"
GRID = "#dfe1e4"
BAND = "#eef0f2"
IN_USE = "#0b4f82"
IN_USE_AREA = "#a9cbe4"
PEAK = "#fbdf9f"
PEAK_EDGE = "#b97f12"
GIVEN_BACK = "#8fcbb5"
TROUBLE = "#b3261e"
OUT: dict[str, Any] = {"color": TROUBLE, "linewidth": 1.0, "linestyle": (0, (4, 1.5, 1, 1.5))}
"""The line where memory ran out."""

SMALL, NORMAL, LARGE = 7.5, 8.5, 11.0
"""Sizes of texts in points."""

_DPI = 96
_SCALE = 2
"""Pixels of a picture per pixel of the page: sharp on dense screens."""

_MORE_FONTS = (
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

_STYLE: dict[str, Any] = {
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": FAINT_INK,
    "axes.labelcolor": FAINT_INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a name may be $x$
    "xtick.color": FAINT_INK,
    "ytick.color": FAINT_INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "font.size": NORMAL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "ipygpumem",
}


@cache
def _families() -> list[str]:
    """Return matplotlib's own font, and those of this machine that have the letters which it lacks."""
    known = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _MORE_FONTS if name in known)]


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw in our own style: the user's settings change nothing here, and nothing here changes them."""
    with style.context(["default", {**_STYLE, "font.family": _families()}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


class Picture(Figure):
    """A figure that notebooks show as an image with a text beside it. pyplot does not know of it.

    Args:
        width: in inches.
        height: in inches.
        summary: the main figures in words, for who cannot see the picture.
    """

    def __init__(self, width: float, height: float, summary: str) -> None:
        super().__init__(figsize=(width, height), dpi=_DPI)
        FigureCanvasAgg(self)
        self.summary = summary

    def draw(self, renderer: RendererBase) -> None:
        """Draw in the style that the picture was made in."""
        with drawing():
            super().draw(renderer)

    def panel(self, left: float, top: float, width: float, height: float, **options: Any) -> Axes:
        """Add axes at a place in inches, counted from the left and from the top."""
        full_width, full_height = self.get_size_inches()
        place = (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
        return self.add_axes(place, **options)

    def write(self, left: float, top: float, text: str, **options: Any) -> None:
        """Write ``text`` with its baseline at a place in inches, counted from the left and from the top."""
        width, height = self.get_size_inches()
        self.text(left / width, 1 - top / height, text, **options)

    def render(self, kind: str = "png") -> bytes:
        """Return the picture as a file of ``kind``: ``png``, ``svg`` or ``pdf``. Equal pictures give equal files."""
        buffer = io.BytesIO()
        metadata = {
            "png": {"Software": "ipygpumem"},
            "svg": {"Date": None, "Creator": "ipygpumem"},
            "pdf": {"CreationDate": None, "Creator": "ipygpumem"},
        }
        with drawing():
            self.savefig(buffer, format=kind, dpi=_DPI * _SCALE, metadata=metadata.get(kind))
        return buffer.getvalue()

    def svg(self) -> str:
        """Return the picture as an ``<svg>`` element to be put into a page."""
        text = self.render("svg").decode()
        return text[text.index("<svg") :]

    def release(self) -> None:
        """Let go of everything drawn and of the pixels (7 MiB), at once and not when garbage is collected."""
        self.clear()
        FigureCanvasAgg(self)

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what IPython shows, by kinds, and metadata: the image where there is room for one, else the text."""
        width = round(self.get_figwidth() * _DPI)
        return {"image/png": self.render(), "text/plain": self.summary}, {"image/png": {"width": width}}

    def _ipython_display_(self) -> None:
        # Not _repr_mimebundle_: where %matplotlib inline is on, it would draw the image anew, cropped and half as fine.
        from IPython.display import display

        data, metadata = self.bundle()
        display(data, metadata=metadata, raw=True)


def inches(text: str, size: float, *, weight: str = "normal") -> float:
    """Return how wide ``text`` is; to be called while ``drawing``."""
    properties = FontProperties(size=size, weight=weight)
    width, _, _ = _renderer().get_text_width_height_descent(text, properties, ismath=False)
    return float(width) / _DPI * 1.02  # letters are rounded to pixels, differently in each size


@cache
def _renderer() -> Any:
    renderer: Any = RendererAgg  # not typed
    return renderer(_DPI, _DPI, _DPI)


def draw_boxes(axes: Axes, boxes: Iterable[tuple[float, float, float, float]], **look: Any) -> None:
    """Draw rectangles as one artist: as artists of their own, thousands would take seconds.

    Args:
        axes: where to; its limits stay as they are.
        boxes: left, right, bottom and top of each.
        look: as for matplotlib's collections: ``facecolors``, ``edgecolors``, ``linewidths``, ``zorder``, ``hatch``.
    """
    corners = [[(left, low), (left, high), (right, high), (right, low)] for left, right, low, high in boxes]
    axes.add_collection(PolyCollection(corners, **look), autolim=False)


def shorten(text: str, letters: int) -> str:
    """Return ``text`` on one line in at most ``letters`` letters: the middle gives way, since ends tell names apart."""
    text = clean(text[:4096])
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def fit(text: str, width: float, size: float) -> str:
    """Return ``text``, shortened to ``width`` inches; nothing if not even a few letters fit."""
    text = shorten(text, 200)
    whole = inches(text, size) if width > 0.1 else width + 1
    if whole <= width:
        return text
    for letters in range(int(len(text) * width / whole * 1.3), 4, -1):
        candidate = shorten(text, letters)
        if inches(candidate, size) <= width:
            return candidate
    return ""
