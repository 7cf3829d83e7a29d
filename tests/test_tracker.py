"""A tracker follows arrays without torch, writes where it is told to, and refuses what makes no
sense.
"""

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest

import ipygpumem
from ipygpumem.extras.tracker.tracker import TrackerRecord, tracker_report
from ipygpumem.inventory.arrays.records import TensorRecord
from ipygpumem.records import Usage
from ipygpumem.report import text
from ipygpumem.units import MIB
from tests.fakes import FakeProbe

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def call(tracker: Any, größe: object = None) -> Any:
    """Make a call in a function whose names do not lead to all of pytest."""
    return tracker.track()


def test_a_call_shows_new_arrays_place_and_totals(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = ipygpumem.tracker()
    call(tracker)
    capsys.readouterr()

    # One new array of 1 MiB, with a view.
    box = {"array": numpy.ones(MIB // 8)}
    view = box["array"][5:]
    script_memory.spike(9 << 20)
    script_memory.set(3 << 20)
    record = call(tracker, view)

    # The lines that it shows.
    head, title, _, _, row, total = capsys.readouterr().out.splitlines()
    assert head.startswith("tracker 2 · ")
    assert head.endswith(f"{__file__}:{record.line} in {record.function} · RAM +1 MiB")
    assert (title, row.split()[:3]) == ("  added: 1", ["1", "MiB", "größe"])
    assert total.endswith(" in tensors and arrays; RSS 3 MiB, peak 9 MiB since the last call")
    # The spike since the last call.
    assert record.usages[0].peak_bytes == 9 << 20

    # The array has gone.
    del box, view
    assert [row.size_bytes for row in call(tracker).removed] == [MIB]


def test_each_call_is_appended_to_a_file(
    script_memory: FakeProbe,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text("before\n", encoding="utf-8")
    tracker = ipygpumem.tracker("log.txt")
    call(tracker)
    monkeypatch.chdir("/")
    call(tracker, numpy.ones(MIB))
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "before"
    assert [line.split(" · ")[0] for line in lines if line.startswith("tracker")] == [
        "tracker 1",
        "tracker 2",
    ]
    assert "größe" in lines[-2]
    assert capsys.readouterr().out == ""


def test_a_logger_gets_each_call_with_its_place(
    script_memory: FakeProbe, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("tests.tracker")
    caplog.set_level(logging.INFO, logger.name)
    record = call(ipygpumem.tracker(logger))
    (entry,) = caplog.records
    assert entry.pathname == __file__
    assert entry.lineno == record.line
    assert entry.levelname == "INFO"
    assert entry.getMessage().startswith("tracker 1 · ")
    call(ipygpumem.tracker(logging.LoggerAdapter(logger, {})))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("tensors", "allocated", "said"),
    [
        (
            64,
            96,
            "64 MiB in tensors; torch has allocated 96 MiB (32 MiB of it in no Python tensor, or "
            "rounding)",
        ),
        (64, 64, "64 MiB in tensors; torch has allocated 64 MiB, reserved 128 MiB, peak"),
        (
            64,
            60,
            "64 MiB in tensors; torch has allocated 60 MiB (4 MiB less: some are memory that torch "
            "does not",
        ),
    ],
)
def test_the_totals_of_a_device_stand_against_its_allocator(
    tensors: int, allocated: int, said: str
) -> None:
    usage = Usage(
        "cuda:0", 0, allocated * MIB, 100 * MIB, None, "allocator", reserved_bytes=128 * MIB
    )
    sizes = {"cuda:0": tensors * MIB, "meta": 0, "privateuseone:0": MIB}
    row = TensorRecord("x", "Tensor", (1,), "uint8", "cuda:0", MIB, kind="parameter")
    record = TrackerRecord(
        (row,), (), "", "cell 3, line 1", 2, 0.0, None, 1, 3, "", sizes, (usage,), ("a note",)
    )
    lines = tracker_report(record, top=5).lines
    assert lines[0].startswith(f"cuda:0: {said}")
    assert lines[0].endswith(", reserved 128 MiB, peak 100 MiB since the last call")
    assert lines[1:] == ["privateuseone:0: 1 MiB in tensors", "a note"]
    assert text.render([tracker_report(record, top=5)]).startswith(
        "tracker 2 · cell 3, line 1 · cuda:0 +1 MiB\n"
    )
