"""Reports what would save memory: of each piece of advice its figure, and its code below the condition as a comment."""

from __future__ import annotations

from ipygpumem.advising.records import Advice, Advised
from ipygpumem.reports.layout import SEPARATOR, Listing, Report, clean, count, device_label
from ipygpumem.units import format_bytes


def advice_report(advised: Advised, *, top: int) -> Report:
    """Return the ``top`` pieces of advice that save most, and how many more there are."""
    notes = list(map(clean, advised.notes))
    if not advised.advice:
        return Report("advice", "advice · nothing of yours would save memory worth a line", tuple(notes))
    sizes = [f"{device_label(device)} {format_bytes(size)}" for device, size in advised.device_bytes.items()]
    headline = SEPARATOR.join([f"advice: {count(len(advised.advice), 'line')} of code would save", *sizes])
    rest = len(advised.advice) - top
    if rest > 0:
        notes.append(f"and {rest:,} more that save less: %gpumem advise --top {len(advised.advice)}")
    return Report("advice", headline, tuple(notes), listings=tuple(map(_listing, advised.advice[:top])))


def _listing(item: Advice) -> Listing:
    title = f"{device_label(item.device)} {format_bytes(item.saves_bytes)}{SEPARATOR}{item.what}"
    return Listing(clean(title), (clean(f"# {item.condition}"), clean(item.code)), code=True)
