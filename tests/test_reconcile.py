"""The parts of a device's memory: hand-computed, and for any blocks and figures an exact sum."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.inventory.devices import device_parts
from ipygpumem.inventory.devices.breakdown import Part, Storage
from ipygpumem.inventory.devices.host_parts import host_parts
from ipygpumem.probes import allocator
from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.allocator import Segment, Snapshot, SnapshotBlock
from ipygpumem.probes.cgroup import ControlGroup
from ipygpumem.probes.host import HostFigures
from ipygpumem.probes.mappings import OwnPages
from ipygpumem.records import Reading
from ipygpumem.units import MIB
from tests.device_parts import bytes_by_part, check

DEVICE = "cuda:0"


def block(
    address: int, size: int, state: allocator.State = "allocated", requested: int | None = None
) -> SnapshotBlock:
    return SnapshotBlock(address, size, size if requested is None else requested, state)


IN_USE = block(10_000, 1024, requested=1000), block(11_024, 500, "inactive")
SNAPSHOT = Snapshot(
    (
        # Partly in use: 1000 requested of 1024, a gap of 500, 300 that a stream still uses, 176
        # C++ code keeps.
        Segment((*IN_USE, block(11_524, 300, "pending"), block(11_824, 176, requested=100))),
        Segment(
            (block(50_000, 3000, "inactive"), block(53_000, 1000, "inactive"))
        ),  # free as a whole
        Segment(
            (block(90_000, 200), block(90_200, 56, "inactive")), private=True
        ),  # a captured graph's
    )
)
"""2000 + 4000 + 256 reserved."""

HELD = [
    Storage(DEVICE, 10_000, 1000, "parameter"),
    Storage(DEVICE, 90_000, 150, "gradient"),
    Storage(DEVICE, 90_100, 100, "other"),  # shares 50 bytes with the one before it
    Storage("cpu", 11_824, 176, "other"),
]


def reading(**changes: Any) -> Reading:
    return Reading(DEVICE, 1400, 1400, "allocator", 20_000, 6256, 10_000)._replace(**changes)


def wide(**changes: Any) -> WholeDevice:
    processes = ((-1, 500), (-2, 1000))
    told = WholeDevice(20_000, 10_000, 1500, own_bytes=7000, other_processes=processes)
    return told._replace(**changes)


def test_every_byte_of_a_device_belongs_to_a_part() -> None:
    memory = device_parts.device_parts(reading(), SNAPSHOT, wide(), HELD)
    assert bytes_by_part(memory) == {
        "tensors: parameter": 1000,
        "tensors: gradient": 150,
        "tensors: other": 50,
        "autograd or C++ code": 176,
        "rounding": 24,
        "waiting for a stream": 300,
        "allocator cache": 4000,
        "fragmentation": 500,
        "cache of private pools": 56,
        "context and libraries": 7000 - 6256,
        "process -2": 1000,
        "process -1": 500,
        "unknown": 10_000 - 7000 - 1500,
        "free": 10_000,
    }
    assert (memory.total_bytes, memory.basis) == (20_000, "the device's memory")
    fragmentation = next(part for part in memory.parts if part.name == "fragmentation")
    assert "the largest of 500 B" in fragmentation.advice


def test_tensors_that_were_not_searched_are_called_live_tensors() -> None:
    parts = bytes_by_part(device_parts.device_parts(reading(), SNAPSHOT, wide(), None))
    # The requested bytes of the three blocks in use, and what these were rounded up by.
    assert parts["live tensors"] == 1000 + 100 + 200
    assert parts["rounding"] == 24 + 76
    assert not [name for name in parts if name.startswith(("tensors:", "autograd"))]


def test_a_view_into_a_block_counts_only_its_own_bytes() -> None:
    """A storage that covers only a part of what was asked for: somebody else asked for the rest."""
    snapshot = Snapshot((Segment((block(0, 1024, requested=1000),)),))
    storages = [Storage(DEVICE, 100, 300, "buffer")]
    parts = bytes_by_part(
        device_parts.device_parts(reading(reserved_bytes=1024), snapshot, wide(), storages)
    )
    assert parts["tensors: buffer"] == 300
    assert parts["autograd or C++ code"] == 700
    assert parts["rounding"] == 24


def test_other_libraries_memory_is_not_counted_as_the_allocators() -> None:
    storages = [*HELD, Storage(DEVICE, 500_000, 4 * MIB, "other")]
    memory = device_parts.device_parts(reading(), SNAPSHOT, wide(), storages)
    assert bytes_by_part(memory)["tensors: other"] == 50
    assert "4 MiB of tensors lie outside torch's allocator" in memory.notes[0]


@pytest.mark.parametrize(
    "used_by_driver", [wide(own_bytes=None, other_processes=(), note="hidden"), None]
)
def test_indistinct_processes_are_one_unknown_part_with_a_reason(
    used_by_driver: WholeDevice | None,
) -> None:
    memory = device_parts.device_parts(reading(note="hidden"), SNAPSHOT, used_by_driver, HELD)
    assert bytes_by_part(memory)["unknown: context, libraries and other processes"] == 10_000 - 6256
    assert next(part.advice for part in memory.parts if part.name.startswith("unknown")) == "hidden"


@pytest.mark.parametrize(
    "figures",
    [
        {"used_bytes": 6000},  # less than this process alone has reserved: unified memory
        {"used_bytes": 30_000},  # more than there is
    ],
)
def test_a_driver_that_contradicts_torch_is_not_believed(figures: dict[str, int]) -> None:
    memory = device_parts.device_parts(reading(), SNAPSHOT, wide(**figures), HELD)
    assert bytes_by_part(memory)["unknown: context, other processes, free"] is None
    assert (memory.total_bytes, memory.basis) == (6256, "reserved by torch's allocator")
    assert "contradict" in memory.parts[-1].advice


def test_without_the_drivers_figure_parts_sum_to_reserved_memory() -> None:
    plain = reading(total_bytes=None, used_bytes=None, note="NVML: Driver Not Loaded")
    memory = device_parts.device_parts(
        plain, SNAPSHOT, WholeDevice(note="NVML: Driver Not Loaded"), HELD
    )
    assert memory.total_bytes == 6256
    assert memory.parts[-1] == Part(
        "unknown: context, other processes, free", None, "NVML: Driver Not Loaded"
    )
    check(memory)


def test_apples_gpu_is_one_device_that_shares_the_hosts_memory() -> None:
    counters = Reading("mps", 1000, 1000, "sampled", total_bytes=9000, reserved_bytes=1500)
    parts = bytes_by_part(
        device_parts.device_parts(counters, None, None, [Storage("mps:0", 1, 900, "parameter")])
    )
    assert parts["live tensors"] == 1000
    assert parts["allocator cache and fragmentation"] == 500
    assert parts["unknown: context, other processes, free"] is None


STATES = st.sampled_from(["allocated", "pending", "inactive"])


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    address = 0
    segments = []
    for _ in range(draw(st.integers(0, 4))):
        address += draw(st.integers(0, 50))
        blocks = []
        for _ in range(draw(st.integers(1, 5))):
            size = draw(st.integers(1, 100))
            blocks.append(SnapshotBlock(address, size, draw(st.integers(0, size)), draw(STATES)))
            address += size
        segments.append(Segment(tuple(blocks), draw(st.booleans())))
    return Snapshot(tuple(segments))


PLACES = st.sampled_from([DEVICE, "cpu"])
ROLES = st.sampled_from(["parameter", "other", "new"])
EACH = st.builds(Storage, PLACES, st.integers(0, 600), st.integers(0, 120), ROLES)
STORAGES = st.none() | st.lists(EACH, max_size=12)
MAYBE = st.none() | st.integers(0, 4000)
PROCESSES = st.lists(st.tuples(st.integers(-9, -1), st.integers(0, 900)), max_size=3).map(tuple)
NOTES = st.sampled_from(["", "hidden"])
WIDE = st.none() | st.builds(WholeDevice, MAYBE, MAYBE, st.none(), NOTES, MAYBE, PROCESSES)


Storages = list[Storage] | None
Driver = WholeDevice | None
Size = int | None


@given(snapshots(), STORAGES, WIDE, MAYBE, MAYBE)
def test_any_blocks_sum_exactly(
    snapshot: Snapshot, storages: Storages, driver: Driver, total: Size, used: Size
) -> None:
    counters = reading(total_bytes=total, used_bytes=used, reserved_bytes=snapshot.reserved_bytes)
    memory = device_parts.device_parts(counters, snapshot, driver, storages)
    check(memory)
    reserved = [
        part
        for part in memory.parts
        if not part.name.startswith(("unknown", "process", "context", "free"))
    ]
    assert sum(part.size_bytes or 0 for part in reserved) == snapshot.reserved_bytes


@given(st.integers(0, 900), st.integers(0, 900), STORAGES, WIDE, MAYBE, MAYBE)
def test_any_counters_sum_exactly(
    now: int, reserved: int, storages: Storages, driver: Driver, total: Size, used: Size
) -> None:
    counters = reading(
        current_bytes=now, reserved_bytes=reserved, total_bytes=total, used_bytes=used
    )
    check(device_parts.device_parts(counters, None, driver, storages))


OWN = {"private_bytes": 1500, "shared_bytes": 200, "file_bytes": 300, "children_bytes": 400}
MACHINE = HostFigures(ram_bytes=10_000, free_bytes=2000, available_bytes=5000, **OWN)


def all_there(ranges: list[tuple[int, int]]) -> list[int]:
    return [size for _, size in ranges]


def test_every_byte_of_the_host_belongs_to_a_part() -> None:
    memory = host_parts(MACHINE, None, all_there)
    assert bytes_by_part(memory) == {
        "this process": 1500,
        "libraries and mapped files": 300 + 200,  # shared memory below a MiB
        "child processes": 400,
        "other processes and the system": 10_000 - 2000 - 2700 - 1500 - 200 - 300 - 400,
        "cache": 5000 - 2000 - 300,
        "free": 2000,
    }
    assert memory.basis == "the machine's RAM"


def test_shared_memory_from_a_mib_on_has_a_row() -> None:
    figures = HostFigures(
        ram_bytes=10_000 * MIB,
        free_bytes=2000 * MIB,
        available_bytes=5000 * MIB,
        private_bytes=1500 * MIB,
        shared_bytes=MIB,
        file_bytes=300 * MIB,
    )
    parts = bytes_by_part(host_parts(figures, None, all_there))
    assert parts["shared memory"] == MIB
    assert parts["libraries and mapped files"] == 300 * MIB


def test_arrays_count_as_far_as_they_are_in_ram() -> None:
    storages = [
        Storage("cpu", 1000, 800, "parameter"),
        Storage("cpu", 1600, 400, "other"),  # 200 of these are the parameter's
        Storage("cpu", 5000, 5000, "other"),  # asked for and never written to
        Storage(DEVICE, 1000, 900, "other"),
    ]
    asked: list[tuple[int, int]] = []

    def resident(ranges: list[tuple[int, int]]) -> list[int]:
        asked.extend(ranges)
        return [800, 200, 0]

    parts = bytes_by_part(host_parts(MACHINE, storages, resident))
    assert asked == [(1000, 800), (1800, 200), (5000, 5000)]
    assert (parts["arrays: parameter"], parts["arrays: other"]) == (800, 200)
    assert parts["not named"] == 500


def test_the_processs_own_pages_have_five_parts() -> None:
    figures = HostFigures(
        **{**vars(MACHINE), "own": OwnPages(100, 50, free_heap_bytes=60, free_blocks_bytes=30)}
    )
    storages = [Storage("cpu", 1000, 800, "other"), Storage("cpu", 5000, 40, "of pyarrow")]
    objects = {"Python objects": 150, "data of polars": 30}
    memory = host_parts(figures, storages, all_there, objects)
    expected = {"arrays: other": 800, "data of pyarrow": 40, **objects}
    expected |= {"data of libraries": 100, "stacks": 50, "free heap pages": 60}
    expected |= {"free blocks of Python": 30, "not named": 240}
    assert expected.items() <= bytes_by_part(memory).items()
    assert memory.notes == ()
    most = host_parts(figures, storages, all_there, {**objects, "Python objects": 300})
    assert most.notes == (), "less than a tenth"
    too_many = bytes_by_part(host_parts(figures, storages, all_there, {"Python objects": 5000}))
    # What arrays leave of the 1500 private bytes.
    assert too_many["Python objects"] == 660
    assert not {"stacks", "not named"} & too_many.keys()


def test_without_page_data_arrays_are_not_a_separate_part() -> None:
    def refuse(ranges: list[tuple[int, int]]) -> list[int]:
        raise PermissionError(1, "Operation not permitted")

    memory = host_parts(MACHINE, [Storage("cpu", 1, 800, "other")], refuse)
    assert bytes_by_part(memory)["this process"] == 1500
    assert "Operation not permitted" in memory.notes[0]
    too_large = host_parts(MACHINE, [Storage("cpu", 1, 1600, "other")], all_there)
    assert bytes_by_part(too_large)["this process"] == 1500
    assert "cannot be separated" in too_large.notes[0]


def test_in_a_container_the_limit_is_the_total() -> None:
    group = ControlGroup(limit_bytes=6000, used_bytes=3500, cache_bytes=900, mapped_bytes=100)
    memory = host_parts(HostFigures(**{**vars(MACHINE), "group": group}), None, all_there)
    assert bytes_by_part(memory) == {
        "this process": 1500,
        # the rest is charged to the process that read the files first; 200 are shared memory
        "libraries and mapped files": 100 + 200,
        "child processes": 400,
        "other processes in the container": 3500 - 1500 - 200 - 100 - 800 - 400,
        "cache": 800,
        "free": 2500,
    }
    assert memory.basis == "the container's limit (cgroup)"
    assert "200 B of this process's RSS are not charged to it here" in memory.notes[0]


def test_a_container_has_no_more_free_memory_than_its_machine() -> None:
    group = ControlGroup(limit_bytes=9000, used_bytes=3000)
    memory = host_parts(HostFigures(**{**vars(MACHINE), "group": group}), None, all_there)
    assert bytes_by_part(memory)["free"] == 5000
    assert bytes_by_part(memory)["out of reach"] == 1000


def test_indistinct_children_count_as_other_processes() -> None:
    memory = host_parts(HostFigures(**{**vars(MACHINE), "children_bytes": None}), None, all_there)
    assert bytes_by_part(memory)["other processes and the system"] == 10_000 - 2000 - 2700 - 2000
    assert "not known separately" in memory.notes[0]


SIZES = st.integers(0, 9000)


GROUPS = st.none() | st.builds(ControlGroup, SIZES, SIZES, SIZES, SIZES)


@given(
    st.builds(HostFigures, st.integers(1, 9000), *[SIZES] * 5, st.none() | SIZES, GROUPS), STORAGES
)
def test_any_figures_of_the_host_sum_exactly(
    figures: HostFigures, storages: list[Storage] | None
) -> None:
    check(host_parts(figures, storages, all_there))
