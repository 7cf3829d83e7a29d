"""What several processes have measured becomes one report: who is lowest, highest, and who stands out."""

from __future__ import annotations

import json

from ipygpumem.merging.merge import merge
from ipygpumem.merging.records import Member, Merged
from ipygpumem.model import TraceRecord, Usage
from ipygpumem.reports import text
from ipygpumem.reports.merged import merged_report
from ipygpumem.units import GIB, MIB


def usage(device: str, kept: int, peak: int, method: str = "allocator") -> Usage:
    return Usage(device, GIB, GIB + kept, GIB + peak, None, method)  # type: ignore[arg-type]


def rank(number: int, *traces: TraceRecord) -> Member:
    return Member(f"rank {number}", f"host{number // 2}", 100 + number, traces)


def trace(label: str, *usages: Usage, seconds: float = 1.0, error: str | None = None) -> TraceRecord:
    return TraceRecord(label, 0.0, seconds, error, usages)


def four(**of_the_third: object) -> list[Member]:
    """Four ranks, each on a card of its own."""
    ranks = []
    for number in range(4):
        values = {"kept": 16, "peak": 100 + number, "seconds": 2.0, **(of_the_third if number == 2 else {})}
        own = usage(f"cuda:{number}", values["kept"] * MIB, values["peak"] * MIB)  # type: ignore[operator]
        ranks.append(rank(number, trace("step", own, seconds=values["seconds"])))  # type: ignore[arg-type]
    return ranks


def test_each_figure_has_its_lowest_median_and_highest_over_all_cards_of_a_kind() -> None:
    merged = merge(four())
    (row,) = merged.rows
    assert (row.label, row.device, row.members, merged.notes) == ("step", "cuda", 4, ())
    peak = row.peak
    assert (peak.lowest, peak.median, peak.highest) == (100 * MIB, 101 * MIB, 103 * MIB)
    assert (peak.lowest_name, peak.highest_name) == ("rank 0", "rank 3")
    assert (row.kept.median, row.seconds.highest) == (16 * MIB, 2.0)


def test_a_rank_that_stands_out_is_named_with_its_host_and_process() -> None:
    assert merge(four(peak=900)).notes == (
        "rank 2 (host1, process 102): step rose by 900 MiB on cuda, the median is 101 MiB",
    )
    assert merge(four(seconds=9.0)).notes == ("rank 2 (host1, process 102): step took 9.00 s, the median is 2.00 s",)
    assert merge(four(peak=160, seconds=2.9)).notes == (), "a little is nothing"


def test_several_traces_of_one_label_are_one_figure_of_a_rank() -> None:
    steps = [trace("step", usage("cpu", 8 * MIB, peak * MIB, "sampled"), seconds=0.5) for peak in (10, 30, 20)]
    (row,) = merge([rank(0, *steps)]).rows
    assert (row.peak.highest, row.kept.highest, row.seconds.highest, row.is_sampled) == (30 * MIB, 24 * MIB, 1.5, True)


def test_errors_and_missing_traces_are_said() -> None:
    ranks = [
        rank(0, trace("load"), trace("step", usage("cpu", 0, MIB))),
        rank(1, trace("load"), trace("step", usage("cpu", 0, MIB), error="OutOfMemoryError")),
        rank(2, trace("load")),
        rank(3),
    ]
    assert merge(ranks).notes == (
        "rank 3 has no trace load",
        "rank 2, rank 3 have no trace step",
        "rank 1 (host0, process 101): step failed with OutOfMemoryError",
    )
    assert merge([]).rows == ()
    assert merged_report(merge([rank(0)])).headline == "1 rank on 1 host · no trace"


def test_many_that_stand_out_are_counted() -> None:
    ranks = [rank(number, trace("step", usage("cpu", 0, MIB), error="ValueError")) for number in range(50)]
    notes = merge(ranks).notes
    assert (len(notes), notes[-1]) == (21, "and 30 more that stand out")


def test_a_merge_goes_through_json_and_its_report_reads_as_a_table() -> None:
    merged = merge(four(peak=900))
    assert Merged.from_dict(json.loads(json.dumps(merged.to_dict()))) == merged
    assert repr(merged) == "<Merged: 4 members, 1 rows, 1 notes>"
    report = merged_report(merged)
    assert report.headline == "4 ranks on 2 hosts"
    assert report.tables[0].rows == (
        ("step", "cuda", "4", "100 MiB", "101 MiB", "900 MiB", "rank 2", "+16 MiB", "rank 0", "2.00 s", "rank 0"),
    )
    assert "rank 2 (host1, process 102): step rose by 900 MiB" in text.render([report])
