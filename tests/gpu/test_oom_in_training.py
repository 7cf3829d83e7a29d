"""Out of memory in each phase of a training step, and around data loaders that pin memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.support import ready, recovery, run_ok
from tests.kernel import Kernel
from tests.smoke.steps import fails, run

pytestmark = pytest.mark.simulated

TRAINING = """
import pynvml
from torch import nn
pynvml.nvmlInit()
phases = []

def make_model():
    return nn.Sequential(nn.AvgPool1d(16), *[nn.Linear(4096, 4096) for _ in range(4)]).cuda()

def step_of(model, optimizer, batch_size):
    phases[:] = ["batch"]
    batch = torch.zeros(batch_size, 65536, device="cuda")
    phases.append("forward")
    loss = model(batch).square().mean()
    phases.append("backward")
    loss.backward()
    phases.append("step")
    optimizer.step()
    phases.append("end")

def train(batch_size):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_of(model, optimizer, batch_size)

def held_by(model, optimizer):
    tensors = [tensor for weight in model.parameters() for tensor in (weight, weight.grad) if tensor is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

def memory():
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pynvml.nvmlDeviceGetMemoryInfo(device).used
"""
GIB = 2.6
BATCHES = {"forward": 5600, "backward": 4700, "step": 4096}
"""With which batch a card of that size has no room in which phase; Adam's first step makes its state."""
SMALLER = 256


@pytest.fixture
def training(machine: Callable[..., None]) -> Iterator[Kernel]:
    """A kernel on a small card, with a model to train."""
    machine(gib=GIB)
    kernel = Kernel()
    run_ok(kernel, "%load_ext ipygpumem")
    ready(kernel)
    run_ok(kernel, TRAINING)
    yield kernel
    kernel.close()


def test_an_oom_in_a_phase_gives_all_back(training: Kernel) -> None:
    """After an OOM in forward, backward or Adam's first step all memory is as before, and a smaller batch trains."""
    for phase, batch_size in BATCHES.items():
        run_ok(training, "%gpumem free")
        before = training.value("memory()")
        reply = fails(training, f"train({batch_size})", "OutOfMemoryError")
        assert training.value("phases[-1]") == phase
        assert training.value("memory()") == before
        told = recovery(reply)
        assert {("train", "model"), ("step_of", "batch")} <= named(told)
        assert "half of its state" not in told  # that optimizer is gone
        run_ok(training, f"train({SMALLER})")
        assert training.value("phases[-1]") == "end"


def test_what_the_notebooks_own_model_holds_stays(training: Kernel) -> None:
    """Where model and optimizer are the notebook's, an OOM in a phase leaves what these hold, to the byte."""
    run_ok(training, "model = make_model()\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)")
    for phase, batch_size in BATCHES.items():
        reply = fails(training, f"step_of(model, optimizer, {batch_size})", "OutOfMemoryError")
        assert training.value("phases[-1]") == phase
        told = recovery(reply)
        assert ("step_of", "batch") in named(told)
        assert ("AdamW has only half of its state" in told) == (phase == "step")
        assert training.value("memory()[0]") == training.value("held_by(model, optimizer)")
    run_ok(training, "optimizer.state.clear()")  # torch has made half of it, and fails with a KeyError on that
    run_ok(training, f"step_of(model, optimizer, {SMALLER})")
    assert training.value("phases[-1]") == "end"


def named(report: str) -> set[tuple[str, str]]:
    """Return function and name in each row of a recovery report's table."""
    rows = [line.split() for line in report.splitlines()]
    return {(row[2], row[4]) for row in rows if len(row) > 4 and row[1] in ("MiB", "GiB") and row[3].isdigit()}


LOADING = """
import sys, threading
from torch.utils.data import DataLoader

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.zeros(1 << 20)

def train(workers):
    loader = DataLoader(Images(), batch_size=8, num_workers=workers, pin_memory=True, persistent_workers=workers > 0)
    model = nn.Linear(1024, 1024).cuda()
    kept = []
    for batch in loader:
        kept.append(model(batch.cuda(non_blocking=True).view(-1, 1024)))
        if len(kept) == 3:
            torch.empty(1 << 40, device="cuda")

def left():
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return pinned, sorted(thread.name for thread in threading.enumerate()), torch.multiprocessing.active_children()
"""


def test_an_oom_beside_a_pinning_loader(training: Kernel) -> None:
    """After an OOM beside a DataLoader that pins, tensors, pinned memory, its thread and its workers are gone."""
    run_ok(training, LOADING)
    run_ok(training, "%gpumem free")
    before = training.value("memory()"), training.value("left()")
    for workers in (0, 2):
        reply = fails(training, f"train({workers})", "OutOfMemoryError")
        assert {("train", "model"), ("train", "kept")} <= named(recovery(reply))
        run_ok(training, "None")
        assert (training.value("memory()"), training.value("left()")) == before


PINNING = """
import psutil, resource, torch

class Batch:
    def __init__(self, samples):
        self.samples = samples
    def pin_memory(self):
        self.pinned = torch.empty(1 << 40, dtype=torch.uint8, pin_memory=True)
        return self

def train(workers):
    model = nn.Linear(1024, 1024).cuda()
    loader = DataLoader(Images(), batch_size=8, num_workers=workers, pin_memory=True, collate_fn=Batch)
    for batch in loader:
        pass

resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (4 << 30), -1))
"""


def test_pinning_that_fails(training: Kernel) -> None:
    """Where pinning itself finds no memory, in the loop or in the DataLoader's thread, all comes back; no restart."""
    run_ok(training, LOADING + PINNING)
    run_ok(training, "%gpumem free")
    before = training.value("memory()"), training.value("left()")
    for workers in (0, 2):
        reply = run(training, f"train({workers})")
        assert "out of memory" in reply.message
        told = recovery(reply)
        assert ("train", "model") in named(told)
        assert "Restart" not in told
        run_ok(training, "None")
        assert (training.value("memory()"), training.value("left()")) == before
