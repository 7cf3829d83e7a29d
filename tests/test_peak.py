"""``%%peak`` and the cell's own peak agree: memory that is reserved and not used is not counted as
used.
"""

import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import FileError
from ipygpumem.extras.peak.bound import OURS, HostSpan, HostUse, bounded, unused_changes
from ipygpumem.extras.peak.peak import Peak
from ipygpumem.extras.peak.records import DevicePeak, PeakPoint, PeakRecord, PeakRow
from ipygpumem.inventory.arrays.records import Inventory
from ipygpumem.records import Usage
from ipygpumem.units import GIB, MIB, parse_bytes
from tests.alone import printed
from tests.steps import dedented, kernel_with, needs, run_cells, run_quietly


def outside(*rows: PeakRow, **more: Any) -> DevicePeak:
    ordered = tuple(sorted(rows, key=lambda row: -row.size_bytes))
    return DevicePeak("cpu", "memray", sum(row.size_bytes for row in rows), rows=ordered, **more)


def row(mib: int, allocator: str = "malloc", line: str = "") -> PeakRow:
    return PeakRow(mib * MIB, "outside torch", operation=f"{mib}", line=line, allocator=allocator)


def use(before: int, after: int, peak: int, *, free_heap: int = 0, unused: int = 0) -> HostUse:
    usage = Usage("cpu", before * MIB, after * MIB, peak * MIB, None, "kernel")
    return HostUse(usage, free_heap * MIB, unused * MIB)


# -- rows in, rows out --------------------------------------------------------------------------


def test_rows_within_the_peak_stay_as_they_are() -> None:
    device = outside(row(3), row(2))
    assert bounded(device, 5 * MIB) is device
    # the kernel's counters are not exact to the page
    assert bounded(device, 5 * MIB - 4096) is device


def test_bytes_above_the_peak_are_reserved_not_used() -> None:
    device = bounded(outside(row(1024, "mmap"), row(3)), 4 * MIB)
    assert [(part.size_bytes, part.reserved_bytes) for part in device.rows] == [
        (3 * MIB, 0),
        (MIB, 1023 * MIB),
    ]
    assert device.size_bytes == 4 * MIB
    assert device.reserved_bytes == 1023 * MIB
    assert device.is_bound


@pytest.mark.parametrize(
    ("rows", "used"),
    [
        ([row(100), row(200, "mmap")], {"100": 100, "200": 50}),
        ([row(300), row(100, "calloc")], {"300": 150, "100": 0}),
        ([row(100, "calloc"), row(100, "mmap")], {"100": 150}),
        ([row(90), row(80), row(70)], {"90": 0, "80": 80, "70": 70}),
    ],
)
def test_mapped_and_zeroed_memory_counts_as_unused_first(
    rows: list[PeakRow], used: dict[str, int]
) -> None:
    device = bounded(outside(*rows), 150 * MIB)
    figures: dict[str, int] = {}
    for item in device.rows:
        figures[item.operation] = figures.get(item.operation, 0) + item.size_bytes // MIB
    assert figures == used


@pytest.mark.parametrize(
    ("rows", "unused", "used"),
    [
        ([row(512), row(256)], [256], {"512": 512, "256": 0}),  # np.ones, then np.zeros
        ([row(512, "calloc"), row(256)], [256], {"512": 512, "256": 0}),
        ([row(600), row(512)], [128] * 4, {"600": 600, "512": 0}),  # np.zeros in a loop
        ([row(600), row(512)], [300], {"600": 300, "512": 512}),  # as large as no line
    ],
)
def test_lines_as_large_as_unused_mappings_are_unused_first(
    rows: list[PeakRow], unused: list[int], used: dict[str, int]
) -> None:
    size = sum(item.size_bytes for item in rows)
    device = bounded(outside(*rows), size - sum(unused) * MIB, [part * MIB for part in unused])
    assert {item.operation: item.size_bytes // MIB for item in device.rows} == used


def test_tensors_do_not_count_as_zeroed_memory() -> None:
    """memray calls all allocations of one line zeroed if a small one of them is."""
    tensor = PeakRow(64 * MIB, OURS, operation="tensor", allocator="calloc")
    device = bounded(outside(tensor, row(1024)), 64 * MIB)
    assert {item.operation: item.size_bytes // MIB for item in device.rows} == {
        "tensor": 64,
        "1024": 0,
    }


def test_a_new_arena_of_python_takes_nothing_from_other_rows() -> None:
    arena = PeakRow(MIB, OURS, allocator="mmap")
    device = outside(row(12), arena)
    assert bounded(device, 12 * MIB - MIB // 8) is device
    device = bounded(outside(row(12), row(64, "calloc"), arena), 12 * MIB)
    assert [item.size_bytes // MIB for item in device.rows] == [12, 1, 0]


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 2000), st.sampled_from(["mmap", "calloc", "malloc", ""])),
        max_size=20,
    ),
    most=st.integers(0, 20_000),
)
def test_rows_sum_to_their_headline_and_lose_nothing(
    sizes: list[tuple[int, str]], most: int
) -> None:
    device = outside(*(row(size, allocator) for size, allocator in sizes))
    bounded_device = bounded(device, most * MIB)
    assert (
        bounded_device.size_bytes
        == sum(item.size_bytes for item in bounded_device.rows)
        <= (most + 1) * MIB
    )
    assert bounded_device.is_bound == (bounded_device.size_bytes <= most * MIB < device.size_bytes)
    assert bounded_device.size_bytes + bounded_device.reserved_bytes == device.size_bytes
    assert [item.size_bytes for item in bounded_device.rows] == sorted(
        (item.size_bytes for item in bounded_device.rows), reverse=True
    )


def test_the_curve_stays_below_the_headline() -> None:
    curve = (
        PeakPoint(0.0, {"data": 2 * MIB}),
        PeakPoint(1.0, {"data": 9 * MIB, "temporaries": 4 * MIB}),
    )
    device = bounded(outside(row(13), curve=curve), 6 * MIB)
    assert [dict(point.parts) for point in device.curve] == [
        {"data": 2 * MIB},
        {"data": 2 * MIB, "temporaries": 4 * MIB},
    ]


@pytest.mark.parametrize(
    ("case", "figures", "kept", "freed", "room"),
    [
        ("np.zeros: nothing is used", use(100, 100, 100, unused=1024), 1024, 0, 0),
        ("np.zeros, used in part", use(100, 108, 108, unused=1016), 1024, 0, 8),
        ("del old; np.ones: old pages are used again", use(300, 236, 300), 64, 0, 64),
        ("the same, freed as well", use(300, 172, 300), 0, 64, 64),
        ("free pages of the heap are used again", use(300, 300, 300, free_heap=50), 0, 40, 40),
        ("an array that was freed, np.zeros after it", use(100, 100, 356), 0, 2048, 256),
        ("a name that is bound to np.empty again", use(1100, 84, 1100, unused=2040), 2048, 0, 8),
        ("no more than all of the process", use(100, 50, 120), 500, 500, 120),
    ],
)
def test_new_memory_has_the_room_of_growth_and_freed_memory(
    case: str, figures: HostUse, kept: int, freed: int, room: int
) -> None:
    assert figures.room_bytes(kept * MIB, freed * MIB) == room * MIB, case


def test_only_new_mappings_are_reserved_by_the_code() -> None:
    before = {(0, 100): 60, (500, 600): 70}
    assert unused_changes(before, before) == [0, 0]
    assert unused_changes(before, {**before, (200, 300): 90}) == [0, 0, 90]
    # the kernel has joined neighbours
    assert unused_changes(before, {(0, 200): 150, (500, 600): 70}) == [90, 0]
    assert unused_changes(before, {(200, 300): 90}) == [90]  # the others are gone
    assert unused_changes(before, {}) == []


def test_the_report_names_reserved_memory_that_is_not_used() -> None:
    device = bounded(outside(row(1024, "mmap", "line 2: pandas"), row(3)), 4 * MIB)
    text = str(PeakRecord((device,), 1.0))
    assert "RAM outside torch highest with 4 MiB at most" in text
    assert "reserved, not used: 1023 MiB (1023 MiB by 1024, line 2: pandas)" in text
    assert text.count("at most: the memory in use") == 1
    assert PeakRecord.from_dict(PeakRecord((device,), 1.0).to_dict()).devices[0] == device
    assert "reserved" not in str(PeakRecord((outside(row(3)),), 1.0))


def test_the_device_with_the_most_memory_comes_first() -> None:
    small = outside(row(3, line="line 1: small"))
    large = DevicePeak("cpu", "storages", 9 * MIB, rows=(row(9, line="line 2: large"),))
    text = str(PeakRecord((small, large), 1.0))
    order = [
        "RAM of tensors highest",
        "RAM outside torch highest",
        "line 2: large",
        "line 1: small",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    failed = replace(small, device="cuda:0", source="allocator", ran_out=True)
    text = str(PeakRecord((large, failed), 1.0))
    assert text.index("line 1: small") < text.index("line 2: large")  # it is about the failure


def test_rows_below_a_thousandth_are_folded_into_one() -> None:
    rows = [row(2000, line="line 1: large"), *(row(1, line=f"line {n}: x") for n in range(2, 9))]
    text = str(PeakRecord((outside(*rows),), 1.0))
    assert "line 1: large" in text
    assert "7 MiB                   7 smaller rows" in text
    assert "line 2: x" not in text


def test_without_memray_and_torch_the_processs_own_peak_is_shown() -> None:
    printed_text = printed(
        "-c",
        """
import sys
sys.modules["memray"] = sys.modules["torch"] = None
import ipygpumem
with ipygpumem.peak() as found:
    held = b"x" * 2**26
print(found.record.ram.peak_delta_bytes)
print(found.record)
""",
    )
    size, *report = printed_text.splitlines()
    # The text, and what importing takes.
    assert 64 * MIB <= int(size) < 72 * MIB
    text = "\n".join(report)
    shown = re.search(r"RAM of the process \+([\d.]+ MiB)", text)
    assert shown is not None, text
    assert parse_bytes(shown[1]) == pytest.approx(int(size), rel=0.01)
    assert "the lines that allocated RAM are not known: " in text
    assert "install memray" in text


def test_the_process_peak_is_not_repeated_next_to_memrays_rows() -> None:
    ram = Usage("cpu", 0, 5 * MIB, 9 * MIB, None, "kernel")
    assert "of the process" not in str(PeakRecord((outside(row(3)),), 1.0, ram=ram))
    record = PeakRecord((), 1.0, ram=ram)
    assert "RAM of the process +9 MiB at its peak, 9 MiB in use" in str(record)
    assert PeakRecord.from_dict(record.to_dict()) == record


# -- memray's flame graph -----------------------------------------------------------------------


def test_memrays_flame_graph_is_written_and_replaced(tmp_path: Path) -> None:
    needs("memray")
    page = tmp_path / "flame.html"
    code = f"""
import ipygpumem
for _ in range(2):
    with ipygpumem.peak(flame={str(page)!r}) as found:
        held = bytearray(2**25)
print(found.record)
"""
    text = printed("-c", code)
    assert f"saved: {page}" in text
    assert "allocated RAM highest with 32" in text
    html = page.read_text()
    assert "memray - flamegraph report" in html
    scripts = re.findall(r"<script[^>]* src=\"([^\"]*)|<link[^>]* href=\"([^\"]*)", html)
    assert scripts == []  # the page loads nothing


def test_a_flame_graph_replaces_no_other_file(tmp_path: Path) -> None:
    page = tmp_path / "notes.html"
    page.write_text("my notes")
    with pytest.raises(FileError, match="not a flame graph"):
        Peak(list, flame=page)
    with pytest.raises(FileError, match=r"ends in \.html"):
        Peak(list, flame=tmp_path / "flame.txt")
    with pytest.raises(FileError, match="not a folder"):
        Peak(list, flame=tmp_path / "none" / "flame.html")
    assert page.read_text() == "my notes"


class FakeHost:
    note = ""

    def __init__(self, page: str | Exception) -> None:
        self.page = page

    def stop(self) -> None:
        pass

    def flame_graph(self) -> str:
        if isinstance(self.page, Exception):
            raise self.page
        return self.page

    def read(self, _: object) -> DevicePeak:
        return outside(row(3))


@pytest.mark.parametrize(
    ("page", "note"),
    [
        (TypeError("no_web"), "too old"),
        (LookupError("ours"), "no flame graph was written: LookupError: ours"),
    ],
)
def test_a_flame_graph_that_fails_is_a_note(page: Exception, note: str, tmp_path: Path) -> None:
    peak = Peak(list, flame=tmp_path / "flame.html")
    peak._host, peak._began = FakeHost(page), 0.0
    record = peak.stop(lambda: Inventory(()))
    assert [text for text in record.notes if note in text]
    assert [device.size_bytes for device in record.devices] == [3 * MIB]


def test_a_flame_graph_says_that_cards_are_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = Peak(list, flame=tmp_path / "flame.html")
    card = DevicePeak("cuda:0", "allocator", 9 * MIB, rows=(row(9),))
    peak._host, peak._began = FakeHost("memray"), 0.0
    peak._tensor_follower = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr(peak, "_read_tensors", lambda *_: [card])
    record = peak.stop(lambda: Inventory(()))
    (note,) = record.notes
    assert note.endswith("It has RAM only; cuda:0 has a table here")


@pytest.mark.parametrize("broken", ["start", "stop"])
def test_code_runs_where_the_peak_cannot_be_measured(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr(HostSpan, broken, fail)
    followed = Peak(list)
    monkeypatch.setattr(
        followed, "_start_follower", lambda *_, **__: None
    )  # neither memray nor torch
    followed.start()
    record = followed.stop(lambda: Inventory(()))
    assert [note for note in record.notes if "not compared" in note and "LookupError: ours" in note]


# -- in a kernel --------------------------------------------------------------------------------

notebook = kernel_with("%load_ext ipygpumem", "import mmap, numpy as np")


def peak_of(kernel: Kernel, code: str) -> DevicePeak:
    """Run a cell with ``%%peak``, and return its allocations in RAM; compare it with the cell's
    own figures.
    """
    needs("memray")
    reply = run_cells(kernel, "%%peak\n" + dedented(code))
    (display,) = [
        item
        for item in reply.displays
        if "peak" in item["metadata"].get("ipygpumem", {}).get("reports", [])
    ]
    (record,) = [
        item for item in display["metadata"]["ipygpumem"]["records"] if item["kind"] == "PeakRecord"
    ]
    (device,) = [item for item in PeakRecord.from_dict(record).devices if item.source == "memray"]
    (text,) = reply.reports("peak")
    assert sum(item.size_bytes for item in device.rows) == device.size_bytes
    shown = re.search(r"allocated RAM highest with ([\d.]+ (?:[KMG]i)?B)", text)
    assert shown is not None, text
    assert parse_bytes(shown[1]) == pytest.approx(device.size_bytes, rel=0.1)
    assert device.size_bytes <= kernel.value(
        "__import__('ipygpumem').history()[-1].usages[0].peak_bytes"
    )
    return device


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("held = np.zeros(2**27)", id="zeros"),
        pytest.param("held = np.zeros(2**27)  # again", id="zeros in the place of others"),
        pytest.param("held = np.empty(2**27)", id="empty"),
        pytest.param(
            """
            held = np.zeros(2**27)
            del held
            """,
            id="zeros that are deleted",
        ),
        pytest.param("held = mmap.mmap(-1, 2**30)", id="a mapping"),
        pytest.param(
            "held = np.memmap('reserved.bin', mode='w+', shape=2**30)", id="a mapped file"
        ),
    ],
)
def test_memory_that_is_not_used_is_no_peak(
    notebook: Kernel, code: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A reserved mapping may use the pages of an array of an earlier test whose name it takes.
    run_cells(notebook, f"%cd -q {tmp_path_factory.mktemp('mapped')}", "held = None")
    device = peak_of(notebook, code)
    # The kernel's own threads and free heap pages take a few MiB.
    assert device.size_bytes < 16 * MIB
    assert device.reserved_bytes > GIB - 16 * MIB


@pytest.mark.parametrize(
    ("before", "code", "mib"),
    [
        pytest.param("", "held = np.ones(2**23)", 64, id="ones"),
        pytest.param(
            "",
            """
            held = np.zeros(2**23)
            held += 1
            """,
            64,
            id="zeros that are used",
        ),
        pytest.param(
            "old = np.ones(2**24)",
            """
            del old
            held = np.ones(2**23)
            """,
            64,
            id="ones in place of old ones",
        ),
        pytest.param(
            "old = np.ones(2**24)",
            """
            del old
            held = np.ones(2**23)
            del held
            """,
            64,
            id="ones that are deleted",
        ),
        pytest.param(
            "old = np.ones(2**24)", "old = np.ones(2**24)", 128, id="ones with the name of old ones"
        ),
        pytest.param("old = np.zeros(2**27)", "held = np.ones(2**23)", 64, id="ones next to zeros"),
    ],
)
def test_memory_that_is_used_is_not_called_reserved(
    notebook: Kernel, before: str, code: str, mib: int
) -> None:
    run_cells(notebook, before)
    device = peak_of(notebook, code)
    # The arrays, and what the kernel itself takes.
    assert mib * MIB <= device.size_bytes < (mib + 16) * MIB
    assert device.reserved_bytes < 8 * MIB


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system has no such advice")
def test_pages_that_a_pool_gives_back_were_used_at_the_peak(notebook: Kernel) -> None:
    code = """
pool = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for address in range(0, 2**26, 4096):
    pool[address] = 1
pool.madvise(mmap.MADV_DONTNEED)
"""
    device = peak_of(notebook, code)
    # All pages of the pool were used.
    assert device.size_bytes >= 64 * MIB
    assert device.reserved_bytes < 8 * MIB


def test_used_and_reserved_memory_in_one_cell_are_separate(notebook: Kernel) -> None:
    device = peak_of(notebook, "used = np.ones(2**23)\nreserved = np.zeros(2**27)")
    # The kernel's count may be behind by 256 KiB for each thread.
    assert 62 * MIB <= device.size_bytes < 80 * MIB
    lines = {
        item.line: item.reserved_bytes // MIB for item in device.rows if item.reserved_bytes >= MIB
    }
    assert lines == {"line 3: reserved = np.zeros(2**27)": pytest.approx(1024, abs=16)}


def test_a_large_array_in_use_is_not_taken_for_a_reserved_one(notebook: Kernel) -> None:
    device = peak_of(notebook, "used = np.ones(2**25)\nreserved = np.zeros(2**24)")
    lines = {
        item.line: item.reserved_bytes // MIB for item in device.rows if item.reserved_bytes >= MIB
    }
    assert lines == {"line 3: reserved = np.zeros(2**24)": pytest.approx(128, abs=16)}


STARTS = "import cProfile, sys\nprofiler = cProfile.Profile()\ndef called(): return np.ones(2**20)"


@pytest.mark.parametrize(
    ("start", "end", "name"),
    [
        pytest.param("profiler.enable()", "profiler.disable()", "cProfile", id="cProfile"),
        pytest.param(
            """
            seen = []
            sys.setprofile(lambda frame, *_: seen.append(frame.f_code))
            """,
            """
            sys.setprofile(None)
            assert called.__code__ in seen
            """,
            "a profiler (function, sys.setprofile)",
            id="a profile function",
        ),
    ],
)
def test_a_profiler_runs_on_and_memory_is_not_followed(
    start: str, end: str, name: str, notebook: Kernel
) -> None:
    needs("memray")
    run_quietly(notebook, STARTS, start)
    reply = run_quietly(
        notebook,
        """
        %%peak
        x = called()
        """,
    )
    note = f"not followed: allocations in RAM, because {name} runs"
    (text,) = reply.reports("peak")
    takes_the_same_hook = name != "cProfile" or sys.version_info < (3, 12)
    assert (note in text) == takes_the_same_hook
    run_quietly(notebook, end)
    if name == "cProfile":
        run_quietly(
            notebook, "assert any(item.code is called.__code__ for item in profiler.getstats())"
        )
    run_quietly(
        notebook,
        """
        %%peak
        x = called()
        """,
        "assert sys.getprofile() is None",
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile has another hook there")
def test_a_profiler_that_the_code_starts_runs_on(notebook: Kernel) -> None:
    needs("memray")
    run_quietly(notebook, STARTS)
    reply = run_quietly(
        notebook,
        """
        %%peak
        profiler.enable()
        x = called()
        """,
    )
    (text,) = reply.reports("peak")
    assert "cProfile was started: lines of RAM may be wrong from there" in text
    run_quietly(notebook, "def later(): pass", "later()", "profiler.disable()")
    run_quietly(notebook, "assert any(item.code is later.__code__ for item in profiler.getstats())")


def test_memory_of_another_moment_is_not_denied(notebook: Kernel) -> None:
    """memray keeps the moment at which most bytes were asked for, when the array that was used had
    been freed.
    """
    needs("memray")
    reply = run_cells(
        notebook,
        """
        %%peak
        used = np.ones(2**24); del used
        reserved = np.zeros(2**27)
        """,
    )
    (text,) = reply.reports("peak")
    assert "highest with" not in text
    missed = re.search(r"RAM at another moment: ([\d.]+ MiB) more, which no row lists", text)
    assert missed is not None, text
    # The array of 128 MiB, which was there for a moment.
    assert parse_bytes(missed[1]) >= 120 * MIB


def test_a_pool_that_pandas_reserves_is_no_gibibyte(kernel: Kernel) -> None:
    needs("pyarrow")
    run_cells(kernel, "import pandas as pd")
    device = peak_of(kernel, 'pd.DataFrame({"a": ["x", "y"]})')
    assert device.size_bytes <= 32 * MIB
