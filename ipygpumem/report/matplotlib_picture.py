"""A matplotlib figure for notebooks. matplotlib is optional and slow to import: import this module
only to draw.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ipygpumem.errors import PlotError, not_installed
from ipygpumem.report.colours import TEXT
from ipygpumem.units import format_bytes

try:
    from matplotlib import rcParams, rcParamsDefault
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator
except ImportError:
    raise not_installed(PlotError, "pictures need", "matplotlib") from None

_DPI = 96
LEGEND: dict[str, Any] = {"fontsize": "small", "frameon": False}
_NO_FORMULAS = {"text.parse_math": False, "text.usetex": False}  # a name may be $x$
_ON_ANY_PAGE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
"""Settings with which a picture is readable on a light and on a dark page."""


def style() -> Any:
    """Return the settings of matplotlib for a picture: those of the user's style if one was chosen,
    else settings that suit light and dark pages.
    """
    used: Mapping[str, Any] = cast(Any, rcParams)
    default: Mapping[str, Any] = cast(Any, rcParamsDefault)
    is_default = all(used[name] == default[name] for name in _ON_ANY_PAGE)
    return {**_NO_FORMULAS, **(_ON_ANY_PAGE if is_default else {})}


class Picture(Figure):
    """A figure that notebooks show as an image, without pyplot; ``summary`` is its text for other
    front-ends.
    """

    def __init__(self, height: float, summary: Sequence[str], width: float = 9) -> None:
        super().__init__(figsize=(width, height), dpi=_DPI, layout="constrained")
        self.summary = "\n  ".join(summary)
        self.suptitle(summary[0], x=0.01, ha="left", fontsize="medium")

    def _ipython_display_(
        self,
    ) -> None:  # _repr_mimebundle_ would draw it twice with %matplotlib inline
        from IPython.display import display

        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=2 * _DPI)
        data = {"image/png": buffer.getvalue(), "text/plain": self.summary}
        size = {"width": round(self.get_figwidth() * _DPI)}
        display(data, metadata={"image/png": size, "ipygpumem": {"reports": ["plot"]}}, raw=True)


def put_ticks_at_bytes(axis: Any) -> None:
    """Put the ticks of an axis at multiples of a power of two bytes, about five of them."""
    low, high = sorted(axis.get_view_interval())
    exponent = math.ceil(math.log2((high - low) / 5))
    axis.set_major_locator(MultipleLocator(2 ** max(0, exponent)))
    axis.set_major_formatter(lambda value, _: format_bytes(round(value)) if value else "0")
    axis.set_tick_params(labelsize="x-small")
