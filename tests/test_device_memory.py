"""``ipygpumem.memory``: right figures or a reason, and no context that the user did not make."""

import sys

import psutil
import pytest

import ipygpumem
from ipygpumem.errors import DeviceError
from ipygpumem.probes.device_memory import DeviceMemory
from tests.fake_nvml import FakeNvml
from tests.fakes import FakeAllocator, fake_torch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two cards of one model, of which 300 of 1000 and 1700 of 2000 bytes are free; torch is not
    loaded.
    """
    driver = FakeNvml()
    monkeypatch.setattr(driver, "nvmlDeviceGetName", lambda handle: "card")
    monkeypatch.setattr(driver, "nvmlDeviceGetUUID", lambda handle: handle, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)
    return driver


def use_cuda(
    monkeypatch: pytest.MonkeyPatch, driver: FakeNvml, *, initialized: bool = True
) -> FakeAllocator:
    """Let torch have two devices, the driver's cards in the other order."""
    allocator = FakeAllocator(devices=2)
    torch = fake_torch(allocator, initialized=initialized)
    torch.cuda.memory_allocated = allocator.current.__getitem__
    torch.cuda.memory_reserved = allocator.reserved.__getitem__
    torch.cuda.current_device = lambda: 1
    monkeypatch.setitem(sys.modules, "torch", torch)
    driver.memory = {"GPU-uuid-1": (1000, 700), "GPU-uuid-0": (2000, 300)}
    driver.processes = {name: [] for name in driver.memory}
    return allocator


def test_the_hosts_memory_is_the_systems_figure() -> None:
    memory = ipygpumem.memory()
    assert memory.device == "cpu"
    assert 0 < (memory.total_bytes or 0) <= psutil.virtual_memory().total
    assert memory.total_bytes == (memory.used_bytes or 0) + (memory.free_bytes or 0)
    assert memory.allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert memory.free_with_cache_bytes == memory.free_bytes
    assert DeviceMemory.from_dict(memory.to_dict()) == memory


def test_a_device_unused_by_torch_is_read_through_the_driver(driver: FakeNvml) -> None:
    assert ipygpumem.memory("cuda:1") == DeviceMemory("cuda:1", 2000, 1700, 300, 0, 0)
    assert (
        ipygpumem.memory(0)
        == ipygpumem.memory("cuda")
        == DeviceMemory("cuda:0", 1000, 300, 700, 0, 0)
    )
    assert driver.shut_down


@pytest.mark.parametrize(
    ("visible", "totals"),
    [
        ("1,0", [2000, 1000]),
        ("GPU-b, GPU-a", [2000, 1000]),
        ("MIG-x", [500]),
        ("1,7,0", [2000]),
        (" 1 , 0", [2000, 1000]),
        ("0,-1,1", [1000]),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-", []),
        ("-1", []),
        ("", []),
    ],
)
def test_only_cards_visible_to_cuda_are_listed(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, totals: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [ipygpumem.memory(index).total_bytes for index in range(len(totals))] == totals
    with pytest.raises(DeviceError, match=f"^there is no cuda:{len(totals)} here$"):
        ipygpumem.memory(len(totals))


def test_an_order_of_cards_that_only_cuda_knows_is_no_guess(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "nvmlDeviceGetName", str)
    memory = ipygpumem.memory("cuda:0")
    assert memory.total_bytes is None
    assert memory.free_bytes is None
    assert memory.free_with_cache_bytes is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in memory.note
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert ipygpumem.memory("cuda:0").total_bytes == 1000


def test_a_device_that_torch_uses_has_a_cache(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = use_cuda(monkeypatch, driver)
    allocator.allocate(100)
    allocator.allocate(-40)
    memory = ipygpumem.memory("cuda:0")
    assert memory == DeviceMemory("cuda:0", 2000, 1700, 300, 60, 100)
    assert memory.free_with_cache_bytes == 1740
    assert ipygpumem.memory("cuda").device == "cuda:1"
    with pytest.raises(DeviceError, match="no cuda:2 here"):
        ipygpumem.memory(2)


def test_without_nvml_only_a_device_with_a_context_is_asked(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.fail_init = True
    with pytest.raises(DeviceError, match=r"no cuda:0 here \(NVML: Driver Not Loaded\)"):
        ipygpumem.memory(0)
    use_cuda(monkeypatch, driver).allocate(100)
    assert ipygpumem.memory(0) == DeviceMemory("cuda:0", 1000, 850, 150, 100, 100)
    unknown = ipygpumem.memory(1)
    assert unknown.total_bytes == 1000
    assert unknown.free_bytes is None
    assert unknown.note == "NVML: Driver Not Loaded"
