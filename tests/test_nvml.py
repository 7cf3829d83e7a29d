"""Device totals through NVML and torch's devices, with stand-ins: right figures, or a reason
instead.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

import ipygpumem
from ipygpumem.errors import DeviceError
from ipygpumem.inventory.arrays.records import Inventory, TensorRecord, select
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import nvml
from ipygpumem.probes.accelerators import CachingAllocatorProbe, parse_device
from ipygpumem.probes.nvml import Nvml
from ipygpumem.probes.pools import finder_of_probes
from tests.fake_nvml import FakeNvml, NVMLError, NVMLLibraryMismatchError
from tests.fake_nvml import driver as driver  # a fixture
from tests.fakes import FakeAllocator, fake_module, fake_torch


def cuda_with(*uuids: str | None) -> Any:
    def properties(index: int) -> Any:
        uuid = uuids[index]
        return (
            SimpleNamespace(total_memory=9)
            if uuid is None
            else SimpleNamespace(total_memory=9, uuid=uuid)
        )

    return SimpleNamespace(get_device_properties=properties)


def test_devices_are_matched_by_uuid_or_have_a_reason(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml()
    devices = [
        nvml.device(cuda_with("b", "a"), index, processes=False, has_context=True)
        for index in (0, 1)
    ]
    assert [(item.total_bytes, item.used_bytes) for item in devices] == [(2000, 300), (1000, 700)]
    assert (
        "report the device's UUID"
        in Nvml().device(cuda_with(None), 0, processes=False, has_context=True).note
    )
    assert "Not Found" in Nvml().device(cuda_with("zzz"), 0, processes=False, has_context=True).note
    driver.fail_init = True
    assert (
        "Driver Not Loaded"
        in Nvml().device(cuda_with("a"), 0, processes=False, has_context=True).note
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (
        "nvidia-ml-py is not installed"
        in Nvml().device(cuda_with("a"), 0, processes=False, has_context=True).note
    )


def test_loads_have_the_order_of_cudas_visible_cards(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(handle: str) -> Any:
        if handle != "GPU-b":
            raise NVMLError("Not Supported")  # as on a MIG slice
        return SimpleNamespace(gpu=87)

    # Only the second card reports its load.
    monkeypatch.setattr(driver, "nvmlDeviceGetUtilizationRates", rates, raising=False)
    monkeypatch.setattr(driver, "nvmlDeviceGetName", lambda handle: "one model")
    nvml = Nvml()

    # The user's order has the second card first, and the driver does not know torch's second one.
    used = cuda_with("b", "gone")
    used.device_count = lambda: 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    for _ in range(2):  # the second time with the handles of the first
        loads = nvml.loads(None)
        assert {
            index: (card.whole.used_bytes, card.utilization) for index, card in loads.items()
        } == {
            0: (300, 87),
            1: (700, None),
        }
        assert {index: card.utilization for index, card in nvml.loads(used).items()} == {0: 87}

    # Slices of a card, or a driver that fails, have no load.
    driver.mig.add("GPU-b")
    assert Nvml().loads(None) == {}
    driver.fail_init = True
    assert Nvml().loads(None) == {}


@pytest.mark.parametrize(
    "error", [NVMLError("Not Supported"), NVMLLibraryMismatchError("another version")], ids=str
)
def test_without_processes_use_is_reported(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As in some sandboxes, and with drivers that are older than the package."""

    def refuse(handle: str) -> list[Any]:
        raise error

    monkeypatch.setattr(driver, "nvmlDeviceGetComputeRunningProcesses", refuse)
    device = Nvml().device(cuda_with("a"), 0, processes=True, has_context=True)
    assert device.total_bytes == 1000
    assert device.used_bytes == 700
    assert device.other_bytes is None
    assert device.note == f"other processes: NVML: {error}"


def test_each_process_is_listed_with_its_memory() -> None:
    """Also one that uses the card for graphics and for computing, which the driver lists twice."""
    driver = FakeNvml()
    used = {os.getpid(): 100, -1: 250}
    driver.processes["GPU-a"] = [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in used.items()
    ]
    driver.graphics = [SimpleNamespace(pid=-1, usedGpuMemory=250)]
    device = nvml._whole_device(driver, "GPU-a", processes=True, has_context=True)
    assert device.own_bytes == 100
    assert device.other_processes == ((-1, 250),)
    assert device.other_bytes == 250
    unasked = nvml._whole_device(driver, "GPU-a", processes=False, has_context=True)
    assert unasked.own_bytes is None
    assert unasked.other_processes == ()
    assert unasked.other_bytes is None


def test_a_failing_card_does_not_hide_other_cards(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    del driver.memory["GPU-a"]

    def lost(handle: str) -> Any:
        if handle == "GPU-a":
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=2000, used=300)

    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", lost)
    first, second = Nvml().cards()
    assert first.whole.note == "NVML: GPU is lost"
    # What the driver says of the second card.
    assert second.whole.used_bytes == 300


def test_the_deprecated_pynvml_package_does_not_warn_in_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    says = textwrap.dedent(
        """\
        import warnings
        warnings.warn('deprecated', FutureWarning)
        class NVMLError(Exception): pass
        """
    )
    (tmp_path / "pynvml.py").write_text(f"{says}def nvmlInit(): raise NVMLError('no driver')\n")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert Nvml().cards() == []
    monkeypatch.delitem(sys.modules, "pynvml")
    assert list(recwarn) == []


def test_process_names_need_process_ids_of_the_same_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getpid()
    name = psutil.Process().name()
    monkeypatch.setattr(nvml, "SYSTEMS_PID_NAMESPACE", os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  # as text
    assert nvml.process_label(own) == f"process {own} ({name})"
    assert nvml.process_label(-1) == "process -1"
    waits = [sys.executable, "-c", "print(flush=True); input()", "ipykernel_launcher"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        next(iter(child.stdout or ()))  # from here on its command line is its own
        assert nvml.process_label(child.pid).endswith(", started by this kernel)")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert nvml.process_label(child.pid).endswith(", of another kernel)")
        child.communicate(b"\n")
    monkeypatch.setattr(nvml, "SYSTEMS_PID_NAMESPACE", "pid:[1]")
    assert nvml.process_label(own) == f"process {own}"


@pytest.mark.parametrize(
    ("processes", "has_context", "used", "others", "reason"),
    [
        (
            [SimpleNamespace(pid=-1, usedGpuMemory=None)],
            True,
            700,
            None,
            "does not report their memory",
        ),
        ([SimpleNamespace(pid=-1, usedGpuMemory=5)], True, 700, None, "process ids are hidden"),
        ([], True, 700, None, "process ids are hidden"),
        ([], False, 5 << 30, None, "process ids are hidden"),
        ([SimpleNamespace(pid=-1, usedGpuMemory=250)], False, 700, 250, ""),
        ([], False, 700, 0, ""),
    ],
)
def test_a_driver_that_cannot_tell_processes_apart_is_explained(
    driver: FakeNvml,
    processes: list[Any],
    has_context: bool,
    used: int,
    others: int | None,
    reason: str,
) -> None:
    driver.memory["GPU-a"], driver.processes["GPU-a"] = (10 << 30, used), processes
    device = Nvml().device(cuda_with("a"), 0, processes=True, has_context=has_context)
    assert (device.used_bytes, device.other_bytes) == (used, others)
    assert reason in device.note


def test_a_mig_slice_is_not_given_the_whole_cards_figures(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.mig.add("GPU-b")
    device = Nvml().device(cuda_with("b"), 0, processes=False, has_context=True)
    assert device.used_bytes is None
    assert "split by MIG" in device.note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x")
    assert Nvml().device(cuda_with("b"), 0, processes=False, has_context=True).used_bytes == 40


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    allocator = FakeAllocator(devices=2)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(allocator))
    return allocator


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(
            (text, "cpu")
            for text in ("RAM", "ram", "Ram", "host", "HOST", "cpu", "CPU", "cpu:0", " RAM ")
        ),
        *(
            ("cuda", "cuda"),
            ("CUDA:1", "cuda:1"),
            (1, "cuda:1"),
            ("xpu:0", "xpu:0"),
            ("mps:0", "mps"),
            ("jax:2", None),
        ),
        *(("Card", "Card"), ("Card:new", "Card:new")),
        *(("gpu", "cuda"), (" GPU ", "cuda")),
        *(
            (text, None)
            for text in (
                "RAMM",
                "gpu:1",
                "cpu:1",
                "cuda:",
                "cuda:01",
                "cuda:x",
                "",
                "card",
                "Card:9",
                -1,
            )
        ),
        *((value, None) for value in (True, None, b"cpu", 1.0)),
    ],
)
def test_all_spellings_of_a_device_mean_one_name(given: object, name: str | None) -> None:
    if name is not None:
        assert parse_device(given, known=["Card:new"]) == name
    else:
        with pytest.raises(DeviceError, match="is not a device"):
            parse_device(given, known=["Card:new"])


def test_gpu_means_the_accelerator_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", fake_module(backends=SimpleNamespace(mps=mps)))
    assert (parse_device("gpu"), parse_device("gpu", kinds=["cuda"])) == ("mps", "cuda")


@pytest.mark.usefixtures("others_out_of_sight")
def test_all_that_take_a_device_take_the_hosts_names() -> None:
    for name in ("RAM", "ram", "host", "cpu:0"):
        assert ipygpumem.memory(name).device == "cpu"
        with ipygpumem.allocate(1, name) as held:
            assert held.device == "cpu"
        assert {row.device for row in ipygpumem.tensors(device=name).tensors} <= {"cpu"}


@pytest.mark.usefixtures("allocator", "others_out_of_sight")
def test_a_missing_device_is_refused_unless_a_record_has_it() -> None:
    row = TensorRecord("x", "Tensor", (), "float32", "cuda:7", 4)
    for device in ("cuda", "gpu", "cuda:1"):
        assert ipygpumem.tensors(device=device).tensors == ()
    for device in ("cuda:2", "cuda:7", "xpu", "xpu:0", "mps"):
        for look in (ipygpumem.tensors, ipygpumem.memory):
            with pytest.raises(
                DeviceError, match=f"^(there is no {device} here|.* is not a device.*)$"
            ):
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


@pytest.mark.parametrize(
    "torch", [None, fake_module(), MagicMock()], ids=["missing", "half imported", "a stand-in"]
)
def test_without_a_whole_torch_there_is_nothing_to_read(
    monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert CachingAllocatorProbe("cuda").read() == ()


def test_an_unused_backend_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, allocator: FakeAllocator, cuda: Any
) -> None:
    cuda.initialized = False
    monkeypatch.setattr(cuda, "device_count", lambda: pytest.fail("asked for the devices"))
    probe = CachingAllocatorProbe("cuda")
    assert probe.read() == ()
    probe.close()


def test_a_device_with_an_empty_cache_still_shows_its_use(
    meter: Meter, allocator: FakeAllocator
) -> None:
    allocator.allocate(10)
    meter.now()
    allocator.allocate(-10)
    allocator.reserved[0] = 0
    assert meter.now()["cuda:0"].used_bytes == 50


def test_every_visible_device_is_measured_to_the_byte(
    meter: Meter, allocator: FakeAllocator
) -> None:
    allocator.allocate(100)
    span = meter.span()
    allocator.allocate(300)
    allocator.allocate(-250)
    allocator.allocate(7, device=1)
    first, second = span.stop()

    # The first device: 100 at the start, 400 at the peak, 150 at the end.
    assert first.device == "cuda:0"
    assert first.before_bytes == 100
    assert first.after_bytes == 150
    assert first.peak_bytes == 400
    assert first.reserved_bytes == 400
    assert first.used_bytes == 450
    assert first.total_bytes == 1000

    # The second device, which was empty.
    assert second.device == "cuda:1"
    assert second.delta_bytes == 7
    assert second.peak_delta_bytes == 7
    assert first.method == "allocator"


def test_an_unused_device_is_not_asked_for_free_memory(
    monkeypatch: pytest.MonkeyPatch, meter: Meter, allocator: FakeAllocator, cuda: Any
) -> None:
    asked: list[int] = []
    original = cuda.mem_get_info

    def note_device(device: int) -> Any:
        asked.append(device)
        return original(device)

    monkeypatch.setattr(cuda, "mem_get_info", note_device)
    allocator.allocate(1)
    meter.now(detail=True)
    assert asked == [0]


def test_a_reset_by_the_user_loses_no_measurement(
    meter: Meter, allocator: FakeAllocator, cuda: Any
) -> None:
    span = meter.span()
    allocator.allocate(500)
    allocator.allocate(-400)
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == 100
    allocator.allocate(50)
    assert cuda.max_memory_allocated() == 150
    assert span.stop()[0].peak_bytes == 500
    assert cuda.max_memory_allocated() == 150


def test_closing_puts_torchs_own_functions_back(allocator: FakeAllocator, cuda: Any) -> None:
    meter = Meter([CachingAllocatorProbe("cuda")])
    meter.span().stop()
    assert "_cuda_memoryStats" in vars(allocator)
    meter.close()
    allocator.allocate(5)
    assert (
        vars(allocator).get("_cuda_memoryStats", FakeAllocator._cuda_memoryStats).__module__
        == "tests.fakes"
    )
    assert cuda.max_memory_allocated() == 5


def test_mps_is_sampled_and_has_no_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "current_allocated_memory": 30,
        "driver_allocated_memory": 64,
        "recommended_max_memory": 1000,
    }
    mps = SimpleNamespace(**{name: lambda size=size: size for name, size in sizes.items()})
    backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", fake_module(mps=mps, backends=backends))
    (probe,) = [probe for probe in finder_of_probes()() if getattr(probe, "name", "") == "torch"]
    (reading,) = probe.read()
    assert probe.sampled
    assert reading.device == "mps"
    assert reading.current_bytes == 30
    assert reading.reserved_bytes == 64
    assert reading.method == "sampled"


def test_a_quick_reading_has_the_whole_devices_use_if_known(allocator: FakeAllocator) -> None:
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


def test_a_half_imported_torch_is_not_wrapped(
    monkeypatch: pytest.MonkeyPatch, allocator: FakeAllocator
) -> None:
    torch = sys.modules["torch"]
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(_initializing=True))
    find = finder_of_probes()
    assert not [probe for probe in find() if isinstance(probe, CachingAllocatorProbe)]
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(_initializing=False))
    assert [probe for probe in find() if isinstance(probe, CachingAllocatorProbe)]
