"""A stand-in for NVIDIA's driver with two cards."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


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
