"""Device totals through NVML, with a stand-in for the driver: right figures, or a reason instead."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from ipygpumem.probes import nvml
from ipygpumem.probes.nvml import Nvml


class NVMLError(Exception):
    pass


class NVMLLibraryMismatchError(Exception):
    """As in the package: no NVMLError."""


class FakeNvml(ModuleType):
    """Two cards; the process sees the second one first, as under CUDA_VISIBLE_DEVICES=1,0."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.memory = {"GPU-a": (1000, 700), "GPU-b": (2000, 300), "MIG-x": (500, 40)}
        self.processes: dict[str, list[Any]] = {"GPU-a": [], "GPU-b": []}
        self.graphics: list[Any] = []
        self.mig: set[str] = set()
        self.shut_down = False
        self.fail_init = False

    def nvmlInit(self) -> None:
        if self.fail_init:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.memory:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        total, used = self.memory[handle]
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self.processes[handle]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return self.graphics

    def nvmlDeviceGetCount(self) -> int:
        return len(self.processes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.processes)[index]

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"card {handle}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "GPU-a":
            raise NVMLError("Not Supported")
        return [int(handle in self.mig), 0]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    driver = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


def cuda_with(*uuids: str | None) -> Any:
    def properties(index: int) -> Any:
        uuid = uuids[index]
        return SimpleNamespace(total_memory=9) if uuid is None else SimpleNamespace(total_memory=9, uuid=uuid)

    return SimpleNamespace(get_device_properties=properties)


def test_devices_are_matched_by_uuid_and_one_that_cannot_be_has_a_reason(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml()
    found = [nvml.device(cuda_with("b", "a"), index, processes=False, has_context=True) for index in (0, 1)]
    assert [(item.total_bytes, item.used_bytes) for item in found] == [(2000, 300), (1000, 700)]
    assert (
        "cannot report the device's UUID" in Nvml().device(cuda_with(None), 0, processes=False, has_context=True).note
    )
    assert "Not Found" in Nvml().device(cuda_with("zzz"), 0, processes=False, has_context=True).note
    driver.fail_init = True
    assert "Driver Not Loaded" in Nvml().device(cuda_with("a"), 0, processes=False, has_context=True).note
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in Nvml().device(cuda_with("a"), 0, processes=False, has_context=True).note


@pytest.mark.parametrize("error", [NVMLError("Not Supported"), NVMLLibraryMismatchError("another version")], ids=str)
def test_a_driver_that_lists_no_processes_still_reports_what_is_in_use(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As in some sandboxes, and with drivers that are older than the package."""

    def refuse(handle: str) -> list[Any]:
        raise error

    monkeypatch.setattr(driver, "nvmlDeviceGetComputeRunningProcesses", refuse)
    found = Nvml().device(cuda_with("a"), 0, processes=True, has_context=True)
    assert (found.total_bytes, found.used_bytes, found.other_bytes) == (1000, 700, None)
    assert found.note == f"other processes: NVML: {error}"


def test_each_process_is_listed_with_what_it_has() -> None:
    """Also one that uses the card for graphics and for computing, which the driver lists twice."""
    driver = FakeNvml()
    driver.processes["GPU-a"] = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=100),
        SimpleNamespace(pid=-1, usedGpuMemory=250),
    ]
    driver.graphics = [SimpleNamespace(pid=-1, usedGpuMemory=250)]
    found = nvml._wide(driver, "GPU-a", processes=True, has_context=True)
    assert (found.own_bytes, found.other_processes, found.other_bytes) == (100, ((-1, 250),), 250)
    unasked = nvml._wide(driver, "GPU-a", processes=False, has_context=True)
    assert (unasked.own_bytes, unasked.other_processes, unasked.other_bytes) == (None, (), None)


def test_a_card_that_fails_does_not_hide_the_others(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    del driver.memory["GPU-a"]

    def lost(handle: str) -> Any:
        if handle == "GPU-a":
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=2000, used=300)

    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", lost)
    first, second = Nvml().cards()
    assert first.wide.note == "NVML: GPU is lost"
    assert second.wide.used_bytes == 300


def test_the_deprecated_package_of_that_name_does_not_warn_in_the_users_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    says = "import warnings\nwarnings.warn('deprecated', FutureWarning)\nclass NVMLError(Exception): pass\n"
    (tmp_path / "pynvml.py").write_text(f"{says}def nvmlInit(): raise NVMLError('no driver')\n")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert Nvml().cards() == []
    monkeypatch.delitem(sys.modules, "pynvml")
    assert list(recwarn) == []


def test_a_processs_name_is_reported_only_where_its_number_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  # as text
    assert nvml.process_name(os.getpid()) == psutil.Process().name()
    assert nvml.process_name(-1) == ""
    monkeypatch.setattr(nvml, "_FIRST_NAMESPACE", "pid:[1]")
    assert nvml.process_name(os.getpid()) == ""


@pytest.mark.parametrize(
    ("processes", "has_context", "used", "others", "reason"),
    [
        ([SimpleNamespace(pid=-1, usedGpuMemory=None)], True, 700, None, "does not report their memory"),
        ([SimpleNamespace(pid=-1, usedGpuMemory=5)], True, 700, None, "process ids are hidden"),
        ([], True, 700, None, "process ids are hidden"),
        ([], False, 5 << 30, None, "process ids are hidden"),
        ([SimpleNamespace(pid=-1, usedGpuMemory=250)], False, 700, 250, ""),
        ([], False, 700, 0, ""),
    ],
)
def test_where_the_driver_cannot_tell_processes_apart_there_is_a_reason(
    driver: FakeNvml, processes: list[Any], has_context: bool, used: int, others: int | None, reason: str
) -> None:
    driver.memory["GPU-a"], driver.processes["GPU-a"] = (10 << 30, used), processes
    found = Nvml().device(cuda_with("a"), 0, processes=True, has_context=has_context)
    assert (found.used_bytes, found.other_bytes) == (used, others)
    assert reason in found.note


def test_a_mig_slice_is_not_given_the_whole_cards_figures(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.mig.add("GPU-b")
    found = Nvml().device(cuda_with("b"), 0, processes=False, has_context=True)
    assert found.used_bytes is None
    assert "split by MIG" in found.note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x")
    assert Nvml().device(cuda_with("b"), 0, processes=False, has_context=True).used_bytes == 40
