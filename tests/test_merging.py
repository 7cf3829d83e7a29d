"""What several processes have measured becomes one report: who is lowest, highest, and who stands out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ipygpumem
from ipygpumem.errors import FileError
from ipygpumem.merging.merge import merge
from ipygpumem.merging.own import recorded
from ipygpumem.merging.recordings import merge_recordings
from ipygpumem.merging.records import Member, Merged
from ipygpumem.model import CellRecord, SessionRecord, TraceRecord, Usage
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


# -- recordings -----------------------------------------------------------------------------------------------

JOB = """
import os, sys, time
import ipygpumem
rank = int(os.environ["RANK"])
time.time = lambda: 1e9 + 1e6 * rank  # clocks disagree
if rank == 3: sys.exit("no recording")
with ipygpumem.trace("fill", silent=True):
    kept = bytearray(b"x") * ((1 + 15 * (rank == 2)) << 24)
ipygpumem.export(f"rank-{rank}.json")
assert "IPython" not in sys.modules
"""


def recording(rank: int | None, host: str = "one", pid: int = 1, **more: Any) -> SessionRecord:
    return SessionRecord(0.0, (), (), (trace("step", usage("cpu", 0, MIB)),), host, pid, rank, **more)


def test_four_processes_without_ipython_write_recordings_that_become_one_report(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB], cwd=tmp_path, env={**os.environ, **ranked}, stderr=subprocess.PIPE
        )
        for ranked in ({"RANK": str(number), "WORLD_SIZE": "4"} for number in range(4))
    ]
    ended = [(job.communicate(timeout=120)[1], job.returncode) for job in jobs]
    assert [code for _, code in ended] == [0, 0, 0, 1], ended
    damaged = tmp_path / "rank-1.json"
    damaged.write_text(damaged.read_text()[:-40])
    for path in (tmp_path, tmp_path / "rank-*.json", sorted(tmp_path.iterdir())):
        merged = ipygpumem.load(path)
        assert [member.name for member in merged.members] == ["rank 0", "rank 2"]
        assert [member.pid for member in merged.members] == [jobs[0].pid, jobs[2].pid]
        assert "rank-1.json is not JSON, or only a part of it" in merged.notes[0]
        assert merged.notes[1] == "no recording of ranks 1, 3, of 4"
        (row,) = merged.rows
        assert (row.label, row.members, row.kept.highest_name) == ("fill", 2, "rank 2")
        assert 250 * MIB < row.kept.highest < 270 * MIB
    shown = merged._repr_mimebundle_()["text/plain"]
    assert str(merged) == shown
    assert "2 ranks on 1 host" in shown
    assert "rank-1.json is not JSON" in shown
    assert f"rank 2 ({merged.members[1].host}, process {jobs[2].pid}): fill rose by 25" in shown


def test_ranks_that_several_hosts_number_alike_and_processes_without_one_have_names_of_their_own() -> None:
    found = [recording(0, "two"), recording(0), recording(1), recording(None, pid=9), recording(1, pid=2)]
    names = [member.name for member in merge_recordings(found, ()).members]
    assert names[:2] == ["rank 0 of one", "rank 0 of two"]
    assert names[2:] == ["rank 1 of one, process 1", "rank 1 of one, process 2", "process 9 of one"]


def test_many_missing_ranks_are_counted() -> None:
    notes = merge_recordings([recording(0, ranks=1000)], ("x is damaged",)).notes
    assert notes == ("x is damaged", "no recording of ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 989 more, of 1000")


def test_cells_are_merged_by_their_number_and_first_line() -> None:
    cell = CellRecord(3, None, None, 0.0, 1.0, True, None, (usage("cuda:0", MIB, 2 * MIB),), source_line="train()")
    ranks = [SessionRecord(0.0, (cell,), (), (), "one", number, number) for number in range(2)]
    assert [(row.label, row.device, row.members) for row in merge_recordings(ranks, ()).rows] == [
        ("cell 3: train()", "cuda", 2)
    ]


def test_a_rank_that_is_no_number_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, local, found in (("2", "1", (2, 4)), ("x", "1", (1, None)), ("-1", "", (None, None))):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", local)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        own = recorded((), (), ())
        assert (own.rank, own.ranks) == found
        assert (own.host, own.pid) == (socket.gethostname(), os.getpid())


def test_several_files_of_which_none_can_be_read_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"there is no \.json file in"):
        ipygpumem.load(tmp_path / "*.json")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(FileError, match="is not an export of ipygpumem"):
        ipygpumem.load(tmp_path)
    with pytest.raises(FileError, match="there is no"):
        ipygpumem.load([])
