"""Helpers for notebooks and scripts: right figures or a reason, and no context that the user did not make."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import DeviceError, GpuMemError
from ipygpumem.probes.device_memory import DeviceMemory
from tests.alone import ROOT
from tests.fakes import FakeAllocator, fake_torch
from tests.kernel import Kernel
from tests.test_nvml import FakeNvml


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two cards of one model, of which 300 of 1000 and 1700 of 2000 bytes are free; torch is not loaded."""
    driver = FakeNvml()
    monkeypatch.setattr(driver, "nvmlDeviceGetName", lambda handle: "card")
    monkeypatch.setattr(driver, "nvmlDeviceGetUUID", lambda handle: handle, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)
    return driver


def use_cuda(monkeypatch: pytest.MonkeyPatch, driver: FakeNvml, *, initialized: bool = True) -> FakeAllocator:
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


def test_the_host_has_what_the_system_says() -> None:
    found = ipygpumem.memory()
    assert found.device == "cpu"
    assert 0 < (found.total_bytes or 0) <= psutil.virtual_memory().total
    assert found.total_bytes == (found.used_bytes or 0) + (found.free_bytes or 0)
    assert found.allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert found.free_with_cache_bytes == found.free_bytes
    assert DeviceMemory.from_dict(found.to_dict()) == found


def test_a_device_that_torch_does_not_use_is_asked_through_the_driver(driver: FakeNvml) -> None:
    assert ipygpumem.memory("cuda:1") == DeviceMemory("cuda:1", 2000, 1700, 300, 0, 0)
    assert ipygpumem.memory(0) == ipygpumem.memory("cuda") == DeviceMemory("cuda:0", 1000, 300, 700, 0, 0)
    assert driver.shut_down


@pytest.mark.parametrize(
    ("visible", "totals"),
    [
        ("1,0", [2000, 1000]),
        ("1", [2000]),
        ("GPU-b, GPU-a", [2000, 1000]),
        ("GPU-b", [2000]),
        ("MIG-x", [500]),
        ("1,7,0", [2000]),
        ("1,1", []),
        ("GPU-", []),
        ("-1", []),
        ("", []),
    ],
)
def test_the_cards_are_those_that_cuda_would_show(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, totals: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [ipygpumem.memory(index).total_bytes for index in range(len(totals))] == totals
    with pytest.raises(DeviceError, match=f"^there is no cuda:{len(totals)} here$"):
        ipygpumem.memory(len(totals))


def test_an_order_of_cards_that_only_cuda_knows_is_no_guess(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "nvmlDeviceGetName", str)
    found = ipygpumem.memory("cuda:0")
    assert (found.total_bytes, found.free_bytes, found.free_with_cache_bytes) == (None, None, None)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.note
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert ipygpumem.memory("cuda:0").total_bytes == 1000


def test_a_device_that_torch_uses_has_a_cache(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = use_cuda(monkeypatch, driver)
    allocator.allocate(100)
    allocator.allocate(-40)
    found = ipygpumem.memory("cuda:0")
    assert found == DeviceMemory("cuda:0", 2000, 1700, 300, 60, 100)
    assert found.free_with_cache_bytes == 1740
    assert ipygpumem.memory("cuda").device == "cuda:1"
    with pytest.raises(DeviceError, match="no cuda:2 here"):
        ipygpumem.memory(2)


def test_without_nvml_only_a_device_with_a_context_is_asked(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.fail_init = True
    with pytest.raises(DeviceError, match=r"no cuda:0 here \(NVML: Driver Not Loaded\)"):
        ipygpumem.memory(0)
    use_cuda(monkeypatch, driver).allocate(100)
    assert ipygpumem.memory(0) == DeviceMemory("cuda:0", 1000, 850, 150, 100, 100)
    unknown = ipygpumem.memory(1)
    assert (unknown.total_bytes, unknown.free_bytes, unknown.note) == (1000, None, "NVML: Driver Not Loaded")


def test_nothing_is_known_of_an_allocator_that_does_not_count(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda(monkeypatch, driver)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    found = ipygpumem.memory(0)
    assert (found.free_bytes, found.allocated_bytes, found.free_with_cache_bytes) == (1700, None, None)
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in found.note


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:-1", "cuda:01", "xpu:0", "", -1, True, 1.0, None, [], object()]
)
def test_what_names_no_device_is_refused_in_one_line(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"^a device is 'cpu', or one such as 'cuda:0' or its number, and not .+$"):
        ipygpumem.memory(device)


def test_the_device_with_the_most_free_memory_is_found(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipygpumem.most_free_device() == "cuda:1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert ipygpumem.most_free_device() == "cuda:0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ipygpumem.most_free_device() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver.memory["GPU-b"] = driver.memory["GPU-a"]
    assert ipygpumem.most_free_device() == "cuda:0"
    use_cuda(monkeypatch, driver)
    driver.memory = {"GPU-uuid-0": (1000, 700), "GPU-uuid-1": (2000, 300)}
    assert ipygpumem.most_free_device() == "cuda:1"


def test_without_a_driver_there_is_no_device(driver: FakeNvml) -> None:
    driver.fail_init = True
    assert ipygpumem.most_free_device() is None


def test_the_most_free_device_is_no_guess(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(driver, "nvmlDeviceGetName", str)
        with pytest.raises(DeviceError, match=r"^which device .+ is not known: CUDA's order of cards .+$"):
            ipygpumem.most_free_device()
    use_cuda(monkeypatch, driver)
    driver.fail_init = True
    with pytest.raises(DeviceError, match=r"^which device .+ is not known: NVML: Driver Not Loaded$"):
        ipygpumem.most_free_device()


def test_a_script_needs_no_ipython() -> None:
    code = "import ipygpumem, sys; ipygpumem.memory(); assert not {'IPython', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_only_a_kernel_is_a_notebook(kernel: Kernel, shell: InteractiveShell) -> None:
    assert kernel.run("import ipygpumem; ipygpumem.in_notebook()").result == "True"
    assert shell.run_cell("import ipygpumem; ipygpumem.in_notebook()").result is False
    code = "import ipygpumem, sys; assert ipygpumem.in_notebook() is False; assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_a_seed_gives_the_same_numbers_again() -> None:
    ipygpumem.set_seed(2**64 - 1)
    first = random.random(), numpy.random.rand()
    assert (random.random(), numpy.random.rand()) != first
    ipygpumem.set_seed(2**64 - 1)
    assert (random.random(), numpy.random.rand()) == first


def test_a_seed_loads_nothing() -> None:
    code = "import ipygpumem, sys; ipygpumem.set_seed(1); assert not {'IPython', 'torch', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 1.5, True, "1", None])
def test_what_is_no_seed_is_refused_in_one_line(seed: Any) -> None:
    with pytest.raises(GpuMemError, match=r"^a seed is a whole number that fits into 64 bits, and not .+$"):
        ipygpumem.set_seed(seed)
