"""Reports what would save memory."""

from __future__ import annotations

from ipygpumem.advising.records import Advice, Advised
from ipygpumem.reports.layout import SEPARATOR, Report, Table, clean, device_label, listed
from ipygpumem.units import format_bytes


def advice_report(advised: Advised, *, top: int) -> Report:
    """Return the ``top`` pieces of advice that save most, and how many more there are."""
    sizes = [f"{device_label(device)} {format_bytes(size)}" for device, size in advised.device_bytes.items()]
    if not sizes:
        return Report("advice", "advice · nothing of yours would save memory worth a line", tuple(map(clean, advised.notes)))
    headline = SEPARATOR.join(["advice: all of it saves", listed(sizes)])
    shown, rest = advised.advice[:top], advised.advice[top:]
    rows = [_row(item) for item in shown]
    if rest:
        rows.append(("", "", f"and {len(rest):,} more that save less: %gpumem advise --top {len(advised.advice)}", ""))
    columns = ("saves", "what", "code", "condition")
    table = Table("", columns, tuple(rows), frozenset({"saves"}), frozenset({"code"}))
    return Report("advice", headline, tuple(map(clean, advised.notes)), (table,))


def _row(item: Advice) -> tuple[str, ...]:
    return (format_bytes(item.saves_bytes), clean(item.what), clean(item.code), clean(item.condition))
