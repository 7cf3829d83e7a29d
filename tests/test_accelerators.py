"""torch's devices, with the allocator's one resettable peak played by a stand-in: exact to the byte."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import ipygpumem
from ipygpumem.errors import DeviceError
from ipygpumem.inventory.records import Inventory, TensorRecord, select
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import CachingAllocatorProbe, parse_device
from ipygpumem.probes.pools import finder
from tests.fakes import FakeAllocator, fake_module, fake_torch


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    allocator = FakeAllocator(devices=2)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(allocator))
    return allocator


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((text, "cpu") for text in ("RAM", "ram", "Ram", "host", "HOST", "cpu", "CPU", "cpu:0", " RAM ")),
        *(("cuda", "cuda"), ("CUDA:1", "cuda:1"), (1, "cuda:1"), ("xpu:0", "xpu:0"), ("mps:0", "mps"), ("jax:2", None)),
        *(("Card", "Card"), ("Card:new", "Card:new")),
        *(("gpu", "cuda"), (" GPU ", "cuda")),
        *((text, None) for text in ("RAMM", "gpu:1", "cpu:1", "cuda:", "cuda:01", "cuda:x", "", "card", "Card:9", -1)),
        *((value, None) for value in (True, None, b"cpu", 1.0)),
    ],
)
def test_a_device_has_one_name_however_it_is_written(given: object, name: str | None) -> None:
    if name is not None:
        assert parse_device(given, known=["Card:new"]) == name
    else:
        with pytest.raises(DeviceError, match="is not a device"):
            parse_device(given, known=["Card:new"])


def test_gpu_means_the_accelerator_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", fake_module(backends=SimpleNamespace(mps=mps)))
    assert (parse_device("gpu"), parse_device("gpu", kinds=["cuda"])) == ("mps", "cuda")


def test_all_that_take_a_device_take_the_hosts_names() -> None:
    for name in ("RAM", "ram", "host", "cpu:0"):
        assert ipygpumem.memory(name).device == "cpu"
        with ipygpumem.allocate(1, name) as held:
            assert held.device == "cpu"
        assert {row.device for row in ipygpumem.tensors(device=name).tensors} <= {"cpu"}


@pytest.mark.usefixtures("allocator")
def test_a_device_that_is_not_here_is_refused_unless_a_record_has_it() -> None:
    row = TensorRecord("x", "Tensor", (), "float32", "cuda:7", 4)
    for device in ("cuda", "gpu", "cuda:1"):
        assert ipygpumem.tensors(device=device).tensors == ()
    for device in ("cuda:2", "cuda:7", "xpu", "xpu:0", "mps"):
        for look in (ipygpumem.tensors, ipygpumem.memory):
            with pytest.raises(DeviceError, match=f"^(there is no {device} here|.* is not a device.*)$"):
                look(device=device)
    assert select(Inventory((row,), 0.0), device="cuda:7").tensors == (row,)


@pytest.fixture
def meter(allocator: FakeAllocator) -> Iterator[Meter]:
    meter = Meter([CachingAllocatorProbe("cuda")])
    yield meter
    meter.close()


@pytest.fixture
def cuda(allocator: FakeAllocator) -> Any:
    return sys.modules["torch"].cuda


@pytest.mark.parametrize("torch", [None, fake_module(), MagicMock()], ids=["missing", "half imported", "a stand-in"])
def test_without_a_whole_torch_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert CachingAllocatorProbe("cuda").read() == ()


def test_a_backend_that_is_not_initialised_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, allocator: FakeAllocator, cuda: Any
) -> None:
    cuda.initialized = False
    monkeypatch.setattr(cuda, "device_count", lambda: pytest.fail("asked for the devices"))
    probe = CachingAllocatorProbe("cuda")
    assert probe.read() == ()
    probe.close()


def test_a_device_whose_cache_was_emptied_still_shows_what_the_whole_device_uses(
    meter: Meter, allocator: FakeAllocator
) -> None:
    allocator.allocate(10)
    meter.now()
    allocator.allocate(-10)
    allocator.reserved[0] = 0
    assert meter.now()["cuda:0"].used_bytes == 50


def test_every_visible_device_is_measured_to_the_byte(meter: Meter, allocator: FakeAllocator) -> None:
    allocator.allocate(100)
    span = meter.start()
    allocator.allocate(300)
    allocator.allocate(-250)
    allocator.allocate(7, device=1)
    first, second = meter.stop(span)
    assert (first.device, first.before_bytes, first.after_bytes, first.peak_bytes) == ("cuda:0", 100, 150, 400)
    assert (first.reserved_bytes, first.used_bytes, first.total_bytes) == (400, 450, 1000)
    assert (second.device, second.delta_bytes, second.peak_delta_bytes) == ("cuda:1", 7, 7)
    assert first.method == "allocator"


def test_an_unused_device_is_not_asked_for_free_memory(
    monkeypatch: pytest.MonkeyPatch, meter: Meter, allocator: FakeAllocator, cuda: Any
) -> None:
    asked: list[int] = []
    original = cuda.mem_get_info
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: asked.append(device) or original(device))
    allocator.allocate(1)
    meter.now(detail=True)
    assert asked == [0]


def test_the_users_reset_counts_from_there_and_loses_nothing_of_ours(
    meter: Meter, allocator: FakeAllocator, cuda: Any
) -> None:
    span = meter.start()
    allocator.allocate(500)
    allocator.allocate(-400)
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == 100
    allocator.allocate(50)
    assert cuda.max_memory_allocated() == 150
    assert meter.stop(span)[0].peak_bytes == 500
    assert cuda.max_memory_allocated() == 150


def test_closing_puts_torchs_own_functions_back(allocator: FakeAllocator, cuda: Any) -> None:
    meter = Meter([CachingAllocatorProbe("cuda")])
    meter.stop(meter.start())
    assert "_cuda_memoryStats" in vars(allocator)
    meter.close()
    allocator.allocate(5)
    assert vars(allocator).get("_cuda_memoryStats", FakeAllocator._cuda_memoryStats).__module__ == "tests.fakes"
    assert cuda.max_memory_allocated() == 5


def test_mps_is_sampled_and_has_no_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = SimpleNamespace(
        current_allocated_memory=lambda: 30, driver_allocated_memory=lambda: 64, recommended_max_memory=lambda: 1000
    )
    backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", fake_module(mps=mps, backends=backends))
    (probe,) = [probe for probe in finder()() if getattr(probe, "name", "") == "torch"]
    (reading,) = probe.read()
    assert probe.sampled
    assert (reading.device, reading.current_bytes, reading.reserved_bytes, reading.method) == ("mps", 30, 64, "sampled")


def test_a_glance_reports_the_whole_devices_use_where_the_driver_does(allocator: FakeAllocator) -> None:
    asked: list[tuple[int, bool]] = []

    def device(module: Any, index: int, *, processes: bool, has_context: bool) -> Any:
        asked.append((index, processes))
        return SimpleNamespace(total_bytes=1000, used_bytes=640, other_bytes=None, note="")

    probe = CachingAllocatorProbe("cuda", SimpleNamespace(device=device, close=lambda: None))
    allocator.allocate(70)
    first, second = probe.glance()
    probe.close()
    assert (first.used_bytes, second.used_bytes) == (640, None)
    assert asked == [(0, False)]


def test_torch_that_is_half_imported_is_not_wrapped_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, allocator: FakeAllocator
) -> None:
    torch = sys.modules["torch"]
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(_initializing=True))
    find = finder()
    assert not [probe for probe in find() if isinstance(probe, CachingAllocatorProbe)]
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(_initializing=False))
    assert [probe for probe in find() if isinstance(probe, CachingAllocatorProbe)]
