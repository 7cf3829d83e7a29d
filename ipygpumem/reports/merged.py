"""Reports what several processes of a job have measured: a row for each label and kind of device."""

from __future__ import annotations

from ipygpumem.merging.records import Merged, Row
from ipygpumem.reports.layout import Report, Table, clean, clean_name, count, device_label
from ipygpumem.reports.shown import Shown
from ipygpumem.units import format_bytes, format_change, format_seconds

_NUMBERS = frozenset({"of", "lowest peak", "median", "highest", "most kept", "slowest"})
_COLUMNS = (
    "label",
    "device",
    "of",
    "lowest peak",
    "median",
    "highest",
    "whose peak",
    "most kept",
    "whose kept",
    "slowest",
    "whose time",
)


def merged_report(merged: Merged) -> Report:
    """Return the spread of each figure over all members, and who stands out."""
    hosts = len({member.host for member in merged.members})
    headline = f"{count(len(merged.members), 'rank')} on {count(hosts, 'host')}"
    if not merged.rows:
        return Report("merged", f"{headline} · no trace", tuple(map(clean, merged.notes)))
    table = Table("", _COLUMNS, tuple(map(_cells, merged.rows)), _NUMBERS)
    return Report("merged", headline, tuple(map(clean, merged.notes)), (table.without_empty(),))


def _cells(row: Row) -> tuple[str, ...]:
    mark = " (sampled)" if row.is_sampled else ""
    return (
        clean_name(row.label),
        device_label(row.device),
        str(row.members),
        format_bytes(int(row.peak.lowest)),
        format_bytes(int(row.peak.median)),
        format_bytes(int(row.peak.highest)) + mark,
        clean_name(row.peak.highest_name),
        format_change(int(row.kept.highest)),
        clean_name(row.kept.highest_name),
        format_seconds(row.seconds.highest),
        clean_name(row.seconds.highest_name),
    )


class ShownMerged(Shown, Merged):
    """What several processes have measured, which shows itself."""

    _report = merged_report
