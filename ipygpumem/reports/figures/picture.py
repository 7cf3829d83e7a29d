"""Has what all pictures share: a figure that shows itself, its style, and texts that fit where they stand."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from typing import Any

import numpy as np
from matplotlib import image, style
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ipygpumem.reports import layout
from ipygpumem.reports.figures import fonts
from ipygpumem.reports.html import DARK_PICTURE

PAPER = "#fcfcfa"  # pages with a dark theme turn it dark
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

_DARK_PAGES = ("body[data-jp-theme-light=false]", "body.vscode-dark", "body.vscode-high-contrast", "html[theme=dark]")
"""How JupyterLab, Notebook, nbconvert, VS Code and Colab mark a page with a dark theme."""
_MARK = "ipygpumem-picture"

_DPI = 96
_SCALE = 2
"""Pixels of a picture per pixel of the page: sharp on dense screens."""

_TOP, _EDGE = 0.5, 0.12
"""Inches that the title takes with the line below it, and those at the sides."""

_COLOUR = re.compile(r"#[0-9a-f]{6}\b")

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


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw in our own style: the user's settings change nothing here, and nothing here changes them."""
    with style.context(["default", {**_STYLE, "font.family": fonts.families()}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


class Picture(Figure):
    """A figure that notebooks show as an image with a text beside it. pyplot does not know of it.

    Args:
        height: of what is below the title, in inches.
        summary: the main figures in words, for who cannot see the picture.
        title: stands at the left.
        number: stands at the right: of how much the picture is.
        width: in inches.
    """

    def __init__(self, height: float, summary: str, title: str, number: str = "", *, width: float = 9.0) -> None:
        super().__init__(figsize=(width, height + _TOP), dpi=_DPI)
        below = (_EDGE / width, 0, 1 - 2 * _EDGE / width, height / (height + _TOP))
        self._layout = ConstrainedLayoutEngine(rect=below, w_pad=0.06, h_pad=0.05)
        FigureCanvasAgg(self)
        self.summary = summary
        self._write(0.3, title, x=_EDGE / width, size=LARGE, weight="bold")
        self._write(0.3, number, x=1 - _EDGE / width, ha="right", size=SMALL)

    def _write(self, top: float, text: str, **options: Any) -> None:
        self.text(y=1 - top / self.get_figheight(), s=text, **options)

    def lay_out(self) -> None:
        """Give all panels their places, so that texts can be fitted into them; they stay there."""
        self._layout.execute(self)
        for axes in self.axes:  # the solver's last digits differ from run to run: equal pictures are equal files
            axes.set_position(Bbox(axes.get_position().get_points().round(6)))

    def draw(self, renderer: RendererBase) -> None:
        """Draw in the style that the picture was made in."""
        with drawing():
            self._say_what_is_missing()
            super().draw(renderer)

    def _say_what_is_missing(self) -> None:
        """Put question marks for letters that no font has, and say so in one line."""
        missing: dict[str, None] = {}
        for text in self.findobj(Text):
            found = fonts.lacking(text.get_text(), text.get_fontfamily())
            if found:
                text.set_text(fonts.without(text.get_text(), found))
                missing.update(dict.fromkeys(found))
        line = fonts.missing_line(missing)
        if line:
            self._write(0.46, line, x=_EDGE / self.get_figwidth(), size=SMALL, color=FAINT_INK)
            self.summary += f"\n  {line}"

    def render(self, kind: str = "png", *, dark: bool = False) -> bytes:
        """Return the picture as a file of ``kind``: ``png``, ``svg`` or ``pdf``. Equal pictures give equal files.

        Args:
            kind: of the file.
            dark: whether a ``png`` or ``svg`` has the colours of a dark page.
        """
        buffer = io.BytesIO()
        metadata: dict[str, dict[str, Any]] = {
            "png": {"Software": "ipygpumem"},
            "svg": {"Date": None, "Creator": "ipygpumem"},
            "pdf": {"CreationDate": None, "Creator": "ipygpumem"},
        }
        with drawing():
            if dark and kind == "png":
                self.set_dpi(_DPI * _SCALE)
                self.canvas.draw()
                pixels = np.asarray(self.canvas.buffer_rgba())[..., :3] / 255  # type: ignore[attr-defined]  # Agg's
                self.set_dpi(_DPI)
                image.imsave(buffer, darkened(pixels), dpi=_DPI * _SCALE, metadata=metadata["png"])
            else:
                self.savefig(buffer, format=kind, dpi=_DPI * _SCALE, metadata=metadata.get(kind))
        if dark and kind == "svg":
            return _COLOUR.sub(_darkened, buffer.getvalue().decode()).encode()
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
        """Return what IPython shows, by kinds, and metadata: the image where there is room for one, else the text.

        The HTML has the image and a rule, for such images alone, that makes it dark where the page's theme is dark.
        Where the rule is dropped the image is light.
        """
        width = round(self.get_figwidth() * _DPI)
        png = self.render()
        pages = ", ".join(f"{page} .{_MARK}" for page in _DARK_PAGES)
        html = (
            f"<style>{pages} {{ filter: {DARK_PICTURE} }}</style>"
            f'<img class="{_MARK}" width="{width}" style="max-width: 100%" alt="{escape(self.summary)}" '
            f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        )
        data = {"text/html": html, "image/png": png, "text/plain": self.summary}
        return data, {"image/png": {"width": width}}

    def _ipython_display_(self) -> None:
        # Not _repr_mimebundle_: where %matplotlib inline is on, it would draw the image anew, cropped and half as fine.
        from IPython.display import display

        data, metadata = self.bundle()
        display(data, metadata=metadata, raw=True)


def darkened(colours: Any) -> Any:
    """Return colours (red, green, blue from 0 to 1, in the last axis) as the filter of dark pages makes them."""
    inverted = 0.92 - 0.84 * colours
    luma = inverted @ np.array([0.2126, 0.7152, 0.0722])
    return np.clip(2 * luma[..., None] - inverted, 0, 1)


def _darkened(match: re.Match[str]) -> str:
    return str(to_hex(darkened(np.array(to_rgb(match[0])))))


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


def width_of(axes: Axes) -> float:
    """Return how many inches wide ``axes`` are, once they are laid out."""
    return float(axes.get_window_extent().width) / _DPI


def shorten(text: str, letters: int) -> str:
    """Return ``text`` shortened, with a font for each of its letters."""
    text = layout.shorten(text, letters)
    fonts.provide(text)
    return text


def fit(text: str, width: float, size: float) -> str:
    """Return ``text``, shortened to ``width`` inches; nothing if not even a few letters fit."""
    text = shorten(text, 200)
    whole = inches(text, size) if width > 0.1 else width + 1
    if whole <= width:
        return text
    for letters in range(int(len(text) * width / whole * 1.3), 2, -1):
        candidate = shorten(text, letters)
        if inches(candidate, size) <= width:
            return candidate
    return ""
