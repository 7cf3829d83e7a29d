"""Tools of the GPU tests: cells that must succeed, a cell's usage, and the card as NVML sees it."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.kernel import Kernel, Reply
from ipygpumem.records import Usage
from ipygpumem.units import MIB, parse_bytes
from tests.alone import printed
from tests.answering import Answerer
from tests.steps import run_failing, run_quietly

DEVICE = "cuda:0"
SAMPLES = os.environ.get("GPU_CASES") == "sample"
"""True in `make gpu-memory`, which runs a sample of what the whole suite repeats in many cases."""
ROUNDING = 16 * MIB
"""Reports show GiB with two decimals (5 MiB to either side), and the driver hands out pages of 2
MiB.
"""


def cases(number: int) -> int:
    """Return the number of random cases to run: all, or a quarter in a sample."""
    return number // 4 if SAMPLES else number


@functools.cache
def is_simulated() -> bool:
    """Return True if the driver here is that of simulated cards (tests/simulated_gpu)."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return "simulated" in str(nvml.nvmlSystemGetDriverVersion())


READY = """
import gc, sys
import torch
torch.ones(1, device='cuda').add_(1).cpu()
None
"""
CLEAR = """
gc.collect()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
"""
TIDY = ("%reset -f", f"%reload_ext ipygpumem\n{READY}\n{CLEAR}")
"""Cells that leave a kernel as it was after its first use of the device."""


def ready(kernel: Kernel) -> None:
    """Import torch in a kernel and use the device for the first time."""
    run_quietly(kernel, READY)


@contextmanager
def started_kernel(**settings: str) -> Iterator[Kernel]:
    """A kernel with the extension loaded, in an environment with ``settings``."""
    with Kernel(env={**os.environ, **settings}) as kernel:
        run_quietly(kernel, "%load_ext ipygpumem")
        yield kernel


def break_context(kernel: Kernel) -> Reply:
    """Run a cell that ends in a device-side assert: no call to the device works in its process from
    then on.

    Kernels assert nothing on a simulated card; its runtime has a switch for that.
    """
    failing = "torch.arange(4, device='cuda')[torch.tensor([99], device='cuda')]"
    if is_simulated():
        failing = "__import__('ctypes').CDLL('libcudart.so.13').simulate_error(710)"
    reply = run_failing(kernel, f"{failing}\ntorch.cuda.synchronize()", timeout=600)
    assert "device-side assert" in reply.message
    return reply


def cuda_usage(kernel: Kernel, device: str = DEVICE) -> Usage:
    usages = kernel.value("[usage.to_dict() for usage in __import__('ipygpumem').last().usages]")
    return next(Usage.from_dict(usage) for usage in usages if usage["device"] == device)


def allocated(kernel: Kernel) -> int:
    return int(kernel.value("torch.cuda.memory_allocated()"))


def recovery(reply: Reply) -> str:
    reports = reply.reports("recovery")
    assert len(reports) == 1, f"{len(reports)} recovery reports\n{reply.traceback}\n{reply.stderr}"
    return reports[0]


def size_after(label: str, text: str) -> int:
    """Return the size that follows ``label`` in a report's headline, such as ``asked for 4.00
    TiB``.
    """
    match = re.search(rf"{label} ?([\d.]+ (?:[KMGTP]i)?B)", text)
    assert match is not None, f"no {label!r} in: {text}"
    return parse_bytes(match[1])


def script(code: str, *, env: dict[str, str] | None = None) -> Any:
    """Run Python code in a process of its own and return what it printed last, as JSON.

    The process is a fork of one that has imported torch and not used a device yet. With ``env``,
    it is a new one: libraries read some variables when they are loaded.
    """
    if env is not None:
        text = printed("-c", code, env={**os.environ, **env})
    else:
        text, failure = _scripts().ask([code, dict(os.environ)])
        assert failure == "", failure
    return json.loads(text.splitlines()[-1])


@functools.cache
def _scripts() -> Answerer:
    """Return the process that forks for each script; it ends with pytest's process."""
    return Answerer("-m", "tests.gpu.scripts")


@contextmanager
def other_process(mib: int, *, visible: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds ``mib`` MiB of tensors on the device, or on the one that
    ``visible`` names.
    """
    code = (
        f"import torch; x = torch.zeros({mib} << 20, dtype=torch.uint8, device='cuda'); "
        f"torch.cuda.synchronize(); "
    )
    code += "print('holding', flush=True); input()"
    env = {**os.environ, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "holding"
        yield process
    finally:
        process.kill()
        process.wait()


class Card:
    """One device, as NVML sees it."""

    def __init__(self, properties: Any) -> None:
        """``properties`` are what torch tells of the device."""
        self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self.uuid = f"GPU-{properties.uuid}"
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        self.index = self._nvml.nvmlDeviceGetIndex(self._handle)
        """Its number in the order of the bus."""

    @property
    def memory(self) -> Any:
        """``total``, ``used`` by every process, and ``free``, in bytes."""
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle)

    def processes(self) -> dict[int, int | None]:
        """Return the use of each process, by process id; None where the driver does not tell,
        nothing if it refuses.
        """
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return {}
        return {process.pid: process.usedGpuMemory for process in running}

    def settle(self) -> int:
        """Wait until processes that ended have given their memory back, and return what is in use
        then.
        """
        deadline = time.monotonic() + 10
        before = self.memory.used
        while time.monotonic() < deadline:
            time.sleep(0.3)
            now = self.memory.used
            if now == before:
                return now
            before = now
        return before
