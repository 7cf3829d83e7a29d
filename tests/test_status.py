"""The reconciliation as a whole, with stand-ins for torch and the driver: what is asked, what
fails, what is shown.
"""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipygpumem.heap.live.total import Total, total
from ipygpumem.inventory.devices import findings
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation, Storage
from ipygpumem.inventory.devices.findings import Findings
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import allocator, nvml
from ipygpumem.probes.accelerators import CachingAllocatorProbe, WholeDevice
from ipygpumem.probes.children import Child, _started_at, children
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.nvml import Nvml
from ipygpumem.records import CellRecord, Reading
from ipygpumem.report.status import started_in, status_report
from ipygpumem.units import GIB, MIB
from tests.device_parts import bytes_by_part, check
from tests.fake_nvml import FakeNvml
from tests.fake_nvml import driver as driver  # a fixture
from tests.fakes import FakeAllocator, fake_module, fake_torch
from tests.hostile import body, untouched
from tests.steps import OWN_PARTS

pytestmark = pytest.mark.usefixtures("others_out_of_sight")

SEGMENTS = [
    {
        "device": 0,
        "address": 1000,
        "segment_pool_id": (0, 0),
        "blocks": [
            {"address": 1000, "size": 512, "requested_size": 500, "state": "active_allocated"},
            {"address": 1512, "size": 100, "requested_size": 0, "state": "inactive"},
            {"address": 1612, "size": 28, "requested_size": 20, "state": "active_awaiting_free"},
        ],
    },
    {
        "device": 1,
        "address": 7000,
        "blocks": [  # as older versions of torch had it: no addresses, and another word
            {"size": 64, "state": "active_pending_free"},
            {"size": 36, "state": "active_allocated"},
        ],
    },
]


def torch_with_snapshot(**options: Any) -> Any:
    """A torch with one device: 512 bytes allocated, 640 reserved, the driver's use as the fake NVML
    tells.
    """
    counters = FakeAllocator()
    counters.allocate(640)
    counters.allocate(-128)
    torch = fake_torch(counters, **options)
    torch.cuda.memory_snapshot = lambda: SEGMENTS[:1]
    return torch


def read(probe: CachingAllocatorProbe) -> dict[str, Reading]:
    return {item.device: item for item in probe.read(detail=True)}


@pytest.fixture
def card(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver that knows torch's device: 5000 bytes, 2000 in use, 900 of them this process's."""
    driver.memory["GPU-uuid-0"] = (5000, 2000)
    used = {os.getpid(): 900, -7: 300}
    driver.processes["GPU-uuid-0"] = [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in used.items()
    ]
    monkeypatch.setitem(sys.modules, "torch", torch_with_snapshot())
    return driver


def found_with(card: FakeNvml, storages: list[Storage] | None = None) -> findings.Findings:
    probe = CachingAllocatorProbe("cuda", Nvml())
    try:
        return findings.reconcile(
            lambda: read(probe), None if storages is None else (lambda: storages)
        )
    finally:
        probe.close()


def test_snapshots_of_new_and_old_versions_are_read_by_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = torch_with_snapshot()
    torch.cuda.memory_snapshot = lambda: SEGMENTS
    monkeypatch.setitem(sys.modules, "torch", torch)

    # The figures of each device.
    snapshots = allocator.snapshots("cuda")
    first = snapshots["cuda:0"]
    second = snapshots["cuda:1"]
    assert first.reserved_bytes == 640
    assert first.allocated_bytes == 512
    assert first.requested_bytes == 500
    assert first.pending_bytes == 28
    assert sum(first.fragments) == 100
    assert first.cached_bytes == 0
    assert [block.address for block in second.segments[0].blocks] == [7000, 7064]
    assert second.pending_bytes == 64
    assert second.allocated_bytes == 36
    assert second.requested_bytes == 36
    asked: list[Any] = []  # the history of allocations may be long

    def note_traces(include_traces: bool = True) -> list[Any]:
        asked.append(include_traces)
        return []

    torch.cuda.memory_snapshot = note_traces
    assert allocator.snapshots("cuda") == {}
    assert asked == [False]

    # Where CUDA is not in use, nothing is asked.
    unused = torch_with_snapshot(initialized=False)
    unused.cuda.memory_snapshot = lambda **_: pytest.fail("asked")
    for module in (unused, fake_module(), None):
        monkeypatch.setitem(sys.modules, "torch", module)
        assert allocator.snapshots("cuda") == {}


def expandable(kind: str, *blocks: tuple[float, str]) -> dict[str, Any]:
    entries = [{"size": round(size * MIB), "state": state} for size, state in blocks]
    return {
        "device": 0,
        "address": 1 << 40,
        "is_expandable": True,
        "segment_type": kind,
        "blocks": entries,
    }


IN_USE = "active_allocated"
UNUSED = "inactive"


@pytest.mark.parametrize(
    ("segment", "cached", "gaps", "largest"),
    [
        (expandable("large", (30, IN_USE), (60, UNUSED), (30, IN_USE)), 40, 20, 10),
        (expandable("large", (30, IN_USE), (15, UNUSED), (35, IN_USE)), 0, 15, 15),
        (expandable("large", (40, IN_USE), (40, UNUSED)), 40, 0, 0),
        (expandable("large", (50, UNUSED), (50, IN_USE)), 40, 10, 10),
        (expandable("large", (100, UNUSED)), 100, 0, 0),
        (expandable("small", (1.5, IN_USE), (5, UNUSED), (0.5, IN_USE)), 4, 1, 0.5),
        (
            {
                **expandable("large", (30, IN_USE), (60, UNUSED), (30, IN_USE)),
                "is_expandable": False,
            },
            0,
            60,
            60,
        ),
    ],
)
def test_pages_of_a_segment_that_grows_in_place_are_cache(
    segment: dict[str, Any],
    cached: float,
    gaps: float,
    largest: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = torch_with_snapshot()
    torch.cuda.memory_snapshot = lambda: [segment]
    monkeypatch.setitem(sys.modules, "torch", torch)
    snapshot = allocator.snapshots("cuda")["cuda:0"]
    assert snapshot.reserved_bytes - snapshot.allocated_bytes == snapshot.cached_bytes + sum(
        snapshot.fragments
    )
    assert (snapshot.cached_bytes / MIB, sum(snapshot.fragments) / MIB) == (cached, gaps)
    assert max(snapshot.fragments, default=0) / MIB == largest


def gap_notes(
    card: FakeNvml, segment: dict[str, Any], version: str = "2.11.0+cu130", hip: str | None = None
) -> Any:
    """Return the notes on a device that has one segment, for a torch of that version."""
    torch: Any = sys.modules["torch"]
    torch.__version__, torch.version = version, SimpleNamespace(hip=hip)
    torch.cuda.memory_snapshot = lambda: [segment]
    result = found_with(card)
    assert result.failures == {}
    return result.reconciliations[0].notes


GAPS = {
    "device": 0,
    "address": 1000,
    "blocks": [{"size": 540, "state": IN_USE}, {"size": 100, "state": UNUSED}],
}
FEW = {
    "device": 0,
    "address": 1000,
    "blocks": [{"size": 580, "state": IN_USE}, {"size": 60, "state": UNUSED}],
}


def test_advice_on_fragmentation_adds_to_the_users_settings(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (note,) = gap_notes(card, GAPS)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in note
    assert "before torch first uses CUDA" in note
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    (note,) = gap_notes(card, GAPS)
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True" in note


def test_small_gaps_need_no_advice(card: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert gap_notes(card, FEW) == ()
    card.memory["GPU-uuid-0"] = (10_100, 2000)  # the gaps are less than a hundredth of the device
    assert gap_notes(card, GAPS) == ()


def test_advice_on_fragmentation_fits_the_torch_version(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert gap_notes(card, GAPS) == gap_notes(card, GAPS, "2.1.2") != ()
    assert gap_notes(card, GAPS, "2.0.1+cu118") == ()
    assert gap_notes(card, GAPS, hip="6.2") == ()
    assert gap_notes(card, {**GAPS, "is_expandable": True, "segment_type": "large"}) == ()
    assert gap_notes(card, GAPS, "a fork") == ()
    monkeypatch.setattr(sys, "platform", "win32")
    assert gap_notes(card, GAPS) == ()


def test_torchs_blocks_and_the_drivers_processes_make_one_sum(card: FakeNvml) -> None:
    result = found_with(card, [Storage("cuda:0", 1000, 500, "gradient")])
    (memory,) = result.reconciliations
    assert result.failures == {}
    torchs = {
        "tensors: gradient": 500,
        "rounding": 12,
        "waiting for a stream": 28,
        "fragmentation": 100,
    }
    drivers = {"context and libraries": 260, "process -7": 300, "unknown": 800, "free": 3000}
    assert bytes_by_part(memory) == torchs | drivers
    assert card.shut_down


def test_cards_are_shown_before_torch_has_used_one(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    driver.processes["GPU-a"] = [SimpleNamespace(pid=-7, usedGpuMemory=300)]
    # CuPy's or JAX's
    driver.processes["GPU-b"] = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=200)]

    # What other processes and other libraries have.
    first, second = findings.reconcile(dict).reconciliations
    assert (first.device, second.device) == ("nvml:0", "nvml:1")
    assert bytes_by_part(first) == {"process -7": 300, "unknown": 400, "free": 300}
    assert first.notes == ("card GPU-a, by the driver's numbers: not used by this process yet",)
    assert bytes_by_part(second) == {"context and libraries": 200, "unknown": 100, "free": 1700}
    assert "not by torch" in second.notes[0]

    # Without the memory of each process.
    driver.processes["GPU-a"] = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    first, _ = findings.reconcile(dict).reconciliations
    assert first.notes[0].endswith("the driver does not report whether this process uses it")

    # The driver fails.
    def fail() -> int:
        raise driver.NVMLError("Unknown Error")

    monkeypatch.setattr(driver, "nvmlDeviceGetCount", fail)
    assert findings.reconcile(dict).failures == {"NVML": "NVMLError: Unknown Error"}


def test_a_broken_context_is_named_and_the_sum_still_holds(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: int) -> tuple[int, int]:
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"
        )

    monkeypatch.setattr(sys.modules["torch"].cuda, "mem_get_info", broken)
    (memory,) = found_with(card).reconciliations
    check(memory)
    (note,) = memory.notes
    assert note == (
        "this process's context is broken (CUDA error: device-side assert triggered): restart the "
        "kernel"
    )


def test_without_snapshots_the_counters_are_used(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> list[Any]:
        raise RuntimeError("snapshot is not meaningful with cudaMallocAsync")

    monkeypatch.setattr(sys.modules["torch"].cuda, "memory_snapshot", refuse)
    result = found_with(card)
    assert "cudaMallocAsync" in result.failures["allocator of cuda"]
    assert bytes_by_part(result.reconciliations[0])["allocator cache and fragmentation"] == 128


def test_a_hidden_context_of_torch_is_not_another_processs(card: FakeNvml) -> None:
    """After empty_cache nothing is reserved, but the probe knows that the driver must list this
    process.
    """
    probe = CachingAllocatorProbe("cuda", Nvml())
    probe.read()
    sys.modules["torch"].cuda._library.reserved[0] = 0  # type: ignore[attr-defined]  # the fake's own
    sys.modules["torch"].cuda.memory_snapshot = list  # type: ignore[attr-defined]
    card.processes["GPU-uuid-0"] = [SimpleNamespace(pid=-7, usedGpuMemory=300)]
    (memory,) = findings.reconcile(lambda: read(probe)).reconciliations
    probe.close()
    assert "process -7" not in bytes_by_part(memory)
    assert "process ids are hidden" in memory.parts[-2].advice


@pytest.mark.parametrize("name", ["snapshots", "host_figures", "host_parts", "device_parts"])
def test_a_failure_is_named_and_the_rest_is_shown(
    card: FakeNvml, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*arguments: Any) -> Any:
        raise ValueError("out of order")

    monkeypatch.setattr(findings, name, fail)
    host = HostProbe()
    probe = CachingAllocatorProbe("cuda", Nvml())
    readings = {**read(probe), "cpu": host.read(detail=True)[0]}
    result = findings.reconcile(lambda: readings)
    host.close()
    probe.close()
    assert "ValueError: out of order" in result.failures.values()
    assert result.reconciliations
    for memory in result.reconciliations:
        check(memory)


def test_ram_is_summed_with_arrays_by_kind_as_before_the_look() -> None:
    block = np.ones(64 * MIB, dtype=np.uint8)
    untouched = np.zeros(64 * MIB, dtype=np.uint8)
    made = []

    def look() -> list[Storage]:
        made.append(np.ones(64 * MIB, dtype=np.uint8))  # a look takes memory, too
        return list(
            findings.storages_of([(block, "other"), (block[5:], "other"), (untouched, "buffer")])
        )

    host = HostProbe()
    result = findings.reconcile(lambda: {"cpu": host.read(detail=True)[0]}, look)

    # The look's own array is not in the reading.
    assert result.readings["cpu"].current_bytes < host.read(detail=True)[0].current_bytes - 32 * MIB
    host.close()
    ram = next(item for item in result.reconciliations if item.device == "cpu")
    parts = bytes_by_part(ram)
    if "arrays: other" in parts:  # where the kernel tells which pages are there
        assert parts["arrays: other"] == 64 * MIB
        assert (parts.get("arrays: buffer") or 0) < 4 * MIB

    # The parts of this process add up to it.
    parts_of_process = [
        parts.get(name) or 0
        for name in parts
        if name.startswith((*OWN_PARTS, "shared", "libraries"))
    ]
    assert abs(sum(parts_of_process) - result.readings["cpu"].current_bytes) < 32 * MIB


def test_a_storage_counts_once_without_running_subclass_code() -> None:
    whole = np.ones((100, 10))
    (storage,) = findings.storages_of(
        [(whole[::-1, 3], "other"), (whole, "buffer"), ("text", "other")]
    )
    assert storage == Storage("cpu", whole.ctypes.data, whole.nbytes, "other")
    array = np.ndarray.__new__(type("Array", (np.ndarray,), body), 10)
    with untouched():
        assert len(list(findings.storages_of([(array, "other")]))) == 1


def test_the_report_has_tables_of_devices_and_of_their_parts() -> None:
    readings = [Reading("cpu", MIB, MIB, "kernel", total_bytes=GIB, note="why")]
    parts = (
        Part("here", MIB, "do this"),
        Part("empty", 0, "never"),
        Part("unknown: rest", None, "hidden"),
    )
    memory = Reconciliation("cuda:0", MIB, "reserved", parts, ("a note",))
    report = status_report("head", ["no experiment is open"], readings, [memory])
    assert report.tables[0].columns == ("device", "in use", "total")
    assert report.lines == ("no experiment is open", "RAM: why", "cuda:0: a note")
    assert report.tables[1].title == "cuda:0: 1 MiB, reserved"
    assert report.tables[1].rows == (
        ("1 MiB", "here", "do this"),
        ("unknown", "unknown: rest", "hidden"),
    )


def cell(number: int | None, started: float, seconds: float) -> CellRecord:
    return CellRecord(number, None, None, started, seconds, True, None, ())


def child(started: float, pid: int = 7, size: int = MIB) -> Child:
    return Child(pid, "python", started, size, is_shared_out=True)


def test_a_process_belongs_to_the_cell_that_started_it() -> None:
    cells = [cell(1, 100.0, 1.0), cell(2, 101.01, 5.0), cell(None, 107.0, 9.0), cell(3, 120.0, 1.0)]
    places = [
        started_in(child(when), cells) for when in (100.5, 101.005, 103.0, 110.0, 121.005, 121.1)
    ]
    assert places == ["cell 1", "cell 1 or 2", "cell 2", "unknown cell", "cell 3", "unknown cell"]


def test_many_processes_are_the_largest_and_a_sum() -> None:
    many = [child(100.5, number, (20 - number) * MIB) for number in range(15)]
    used = [process._replace(on_devices=(("cuda:0", MIB), ("cuda:1", 2 * MIB))) for process in many]
    assert (
        status_report("x", [], [], (), used).tables[-1].rows[-1][1] == "cuda:0 5 MiB, cuda:1 10 MiB"
    )
    table = status_report("x", [], [], (), many, [cell(1, 100.0, 1.0)]).tables[-1]
    assert table.title == "child processes, by PSS: shared pages count by share"
    assert table.rows[0] == ("20 MiB", "0", "python", "cell 1")
    assert table.rows[10:] == (("40 MiB", "", "and 5 more", ""),)
    assert status_report("x", [], [], (), [], []).tables == []


def test_children_are_listed_with_their_memory_on_devices() -> None:
    two = [child(100.5, 7, 9 * MIB), child(100.5, 8)]
    result = Findings(children=two)
    result.note_processes("cuda:0", WholeDevice(other_processes=((8, 64 * MIB), (99, MIB))))
    result.note_processes("cuda:1", WholeDevice(other_processes=((8, 32 * MIB),)))
    table = status_report("x", [], [], (), result.children, []).tables[-1]
    assert table.columns == ("size", "on devices", "process", "name", "started in")
    assert [row[:3] for row in table.rows] == [
        ("1 MiB", "cuda:0 64 MiB, cuda:1 32 MiB", "8"),
        ("9 MiB", "", "7"),
    ]


def test_in_a_container_the_drivers_ids_match_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "SYSTEMS_PID_NAMESPACE", "pid:[1]")
    result = Findings(children=[child(100.5, 8)])
    result.note_processes("cuda:0", WholeDevice(other_processes=((8, 64 * MIB),)))
    assert result.children == [child(100.5, 8)]


@pytest.mark.skipif(sys.platform != "linux", reason="the time of a start is psutil's elsewhere")
def test_a_pause_between_two_clocks_shifts_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # another process ran after the first and the third reading of the other
    now = iter((1000.5, 1000.0, 1000.25))
    clocks = SimpleNamespace(
        clock_gettime=lambda _: 100.0, CLOCK_BOOTTIME=7, time=lambda: next(now)
    )
    monkeypatch.setattr("ipygpumem.probes.children.time", clocks)
    start = _started_at(os.getpid())
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert start == pytest.approx(900 + (ticks + 0.5) / os.sysconf("SC_CLK_TCK"))


@pytest.mark.skipif(sys.platform != "linux", reason="the time of a start is psutil's elsewhere")
def test_the_time_of_a_start_is_exact_enough_to_tell_cells_apart() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = time.time()
        (child_process,) = [item for item in children() if item.pid == process.pid]
        process.communicate(b"\n")
    assert before - 0.01 <= child_process.started_at <= after + 0.01
    assert child_process.memory_bytes > 0


def test_status_passes_over_the_heap_once(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    list_objects = gc.get_objects

    def counted(generation: int | None = None) -> list[Any]:
        if generation is None:  # the young generations are no pass over the heap
            passes.append(1)
        return list_objects(generation)

    shell.run_line_magic("load_ext", "ipygpumem")
    monkeypatch.setattr(gc, "get_objects", counted)
    shell.run_line_magic("gpumem", "status")
    assert passes == [1]


def test_objects_are_counted_even_if_the_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(observer: object) -> list[Storage]:
        raise ValueError("no look")

    def count() -> Total:
        counts.append(total())
        return counts[0]

    counts: list[Total] = []
    monkeypatch.setattr(findings, "roles_of_objects", fail)
    monkeypatch.setattr(findings, "total", count)
    meter = Meter([HostProbe()])
    result = findings.now(meter)
    meter.close()
    assert list(result.failures) == ["tensors and arrays"]
    assert len(counts) == 1
