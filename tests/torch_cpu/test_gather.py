"""The traces of four ranks of a real job come together on the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ipygpumem
from ipygpumem.errors import GpuMemError
from ipygpumem.merging.records import Merged

pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")

SCRIPT = """
import json, sys
import torch
import ipygpumem

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
with ipygpumem.trace("fill", silent=True):
    kept = torch.ones((1 + 15 * (rank == 2)) * (4 << 20))
if rank != 3:
    with ipygpumem.trace("more", silent=True): pass
found = ipygpumem.gather()
assert (found is not None) == (rank == 0)
if found is not None:
    with open(sys.argv[1], "w") as file:
        json.dump(found.to_dict(), file)
assert ipygpumem.gather(silent=True) is None or rank == 0, "it can be asked again"
torch.distributed.destroy_process_group()
"""


def test_four_ranks_have_one_report_on_the_first(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*run, "job.py", "out.json"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    merged = Merged.from_dict(json.loads((tmp_path / "out.json").read_text()))
    assert [member.name for member in merged.members] == [f"rank {number}" for number in range(4)]
    assert len({member.pid for member in merged.members}) == 4
    (row,) = [row for row in merged.rows if row.label == "fill"]
    assert (row.peak.highest_name, row.kept.highest_name) == ("rank 2", "rank 2")
    assert 250 << 20 < row.kept.highest < 270 << 20
    assert 12 << 20 < row.kept.median < 24 << 20
    pid = merged.members[2].pid
    assert any(f"process {pid}): fill rose by 25" in note for note in merged.notes)
    assert "rank 3 has no trace more" in merged.notes
    assert done.stdout.count("4 ranks on 1 host") == 1
    assert "rank 2" in done.stdout


def test_without_a_process_group_it_is_one_clear_line() -> None:
    with pytest.raises(GpuMemError, match=r"call torch\.distributed\.init_process_group"):
        ipygpumem.gather()
