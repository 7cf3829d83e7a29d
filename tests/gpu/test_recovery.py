"""After an out-of-memory error in each phase of a training, and an error that breaks the device's
context.
"""

import re
from collections.abc import Callable, Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB, TIB, format_bytes, parse_bytes
from tests.gpu.support import (
    DEVICE,
    ROUNDING,
    Card,
    allocated,
    break_context,
    is_simulated,
    ready,
    recovery,
    size_after,
    started_kernel,
)
from tests.steps import run, run_failing, run_quietly

FUNCTIONS = """
import pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
def forward(batch, gib):
    global free_before
    activations = torch.empty(64, 1024, 2048, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    free_before = pynvml.nvmlDeviceGetMemoryInfo(card).free
    return torch.empty(gib, 1 << 30, dtype=torch.uint8, device="cuda")
def train(gib):
    model = torch.zeros(128, 1024, 1024, device="cuda")
    optimizer = {"exp_avg": torch.zeros(128, 1024, 1024, device="cuda")}
    return forward(model, gib)
"""
HELD = 512 * MIB + 512 * MIB + 256 * MIB


def test_an_out_of_memory_error(
    gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]
) -> None:
    """After a CUDA OOM the report names each frame's tensors, what was asked for, and what was free
    as NVML told it; all that the failed call held is back, in the allocator and on the device.
    """
    run_quietly(gpu_kernel, f"%gpumem free\n{FUNCTIONS}")
    live = allocated(gpu_kernel)
    used = card.settle()
    reply = gpu_kernel.run("out = train(4096)")
    assert reply.error == "OutOfMemoryError"
    text = recovery(reply)

    # The rows of the report.
    rows = [" ".join(line.split()) for line in text.splitlines()]
    expected = [
        r"512 MiB train \d+ model Tensor 128 × 1024 × 1024 float32 cuda:0",
        r"512 MiB train \d+ optimizer dict 1 array float32 cuda:0",
        r"256 MiB forward \d+ activations Tensor 64 × 1024 × 2048 float16 cuda:0",
    ]
    # the batch is the model's storage
    listed = [row for row in rows if re.match(r"\d+ MiB (train|forward) ", row)]
    assert len(listed) == len(expected), f"one storage, listed twice, in\n{text}"
    for pattern, row in zip(expected, listed, strict=True):
        assert re.fullmatch(pattern, row), f"no {pattern!r} in\n{text}"

    # What was asked for and was free, and what has come back.
    assert size_after("asked for", text) == 4 * TIB
    assert (
        abs(size_after(rf"free: [^·]*{DEVICE}", text) - gpu_kernel.value("free_before")) <= ROUNDING
    )
    assert size_after(rf"freed: [^·\n]*{DEVICE}", text) == HELD
    assert allocated(gpu_kernel) == live
    left = card.memory.used - used
    assert left <= ROUNDING
    figure(f"{text.splitlines()[0]}; the device is {format_bytes(left)} above where it was")


TRAINING = """
import pynvml
from torch import nn
from torch.utils.data import DataLoader
pynvml.nvmlInit()

def make_model():
    return nn.Sequential(nn.AvgPool1d(16), *[nn.Linear(4096, 4096) for _ in range(4)]).cuda()

def step_of(model, optimizer, batch_size):
    global phase
    phase = "batch"
    batch = torch.zeros(batch_size, 65536, device="cuda")
    phase = "forward"
    loss = model(batch).square().mean()
    phase = "backward"
    loss.backward()
    phase = "step"
    optimizer.step()
    phase = "end"

def train(batch_size):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_of(model, optimizer, batch_size)

def held_by(model, optimizer):
    tensors = [tensor for weight in model.parameters() for tensor in (weight, weight.grad) if tensor is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.zeros(1 << 20)

class Batch:
    def __init__(self, samples):
        self.samples = samples
    def pin_memory(self):
        self.pinned = torch.empty(1 << 40, dtype=torch.uint8, pin_memory=True)
        return self

def load(workers, collate=None):
    model = nn.Linear(1024, 1024).cuda()
    loader = DataLoader(Images(), batch_size=8, num_workers=workers, pin_memory=True, collate_fn=collate)
    kept = []
    for batch in loader:
        kept.append(model(batch.cuda(non_blocking=True).view(-1, 1024)))
        if len(kept) == 3:
            torch.empty(1 << 40, device="cuda")

def memory():
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pynvml.nvmlDeviceGetMemoryInfo(device).used

def left():
    import threading
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    # IPython ends this thread before a fork, and starts it again when it writes the history.
    names = [thread.name for thread in threading.enumerate()]
    names = sorted(name for name in names if name != "IPythonHistorySavingThread")
    return pinned, names, torch.multiprocessing.active_children()
"""  # noqa: E501
BATCHES = {"forward": 5600, "backward": 4700, "step": 4096}
"""With which batch a card of 2.6 GiB has no room in which phase; Adam's first step makes its state.
"""


@pytest.fixture
def training(machine: Callable[..., None]) -> Iterator[Kernel]:
    machine(gib=2.6)
    with started_kernel() as kernel:
        ready(kernel)
        run_quietly(kernel, TRAINING, "%gpumem free")
        yield kernel


def named(report: str) -> set[tuple[str, str]]:
    """Return function and name in each row of a recovery report's table."""
    rows = [line.split() for line in report.splitlines()]
    return {
        (row[2], row[4])
        for row in rows
        if len(row) > 4 and row[1] in ("MiB", "GiB") and row[3].isdigit()
    }


def adds_up(report: str) -> bool:
    """Return True if the rows of a recovery report's table come to what came back to the device."""
    rows = re.findall(rf"^ +([\d.]+ [MG]iB) .*{DEVICE}$", report, re.MULTILINE)
    return (
        abs(sum(map(parse_bytes, rows)) - size_after(rf"freed: [^·\n]*{DEVICE}", report))
        <= ROUNDING
    )


@pytest.mark.simulated
def test_an_oom_in_a_phase(training: Kernel) -> None:
    """After an OOM in forward, backward or Adam's first step all memory is as before, but what the
    notebook's own model and optimizer hold, to the byte; a smaller batch trains.
    """
    before = training.value("memory()")
    for phase, batch_size in BATCHES.items():
        told = recovery(run_failing(training, f"train({batch_size})", "OutOfMemoryError"))
        assert training.value("phase, memory()") == (phase, before)
        assert {("train", "model"), ("step_of", "batch")} <= named(told)
        assert adds_up(told), told
        assert "optimizer state is incomplete" not in told  # that optimizer is gone

    # A model and an optimizer of the notebook's own.
    run_quietly(
        training, "model = make_model()\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
    )
    for phase, batch_size in BATCHES.items():
        told = recovery(
            run_failing(training, f"step_of(model, optimizer, {batch_size})", "OutOfMemoryError")
        )
        assert training.value("phase") == phase
        assert ("step_of", "batch") in named(told)
        assert adds_up(told), told
        assert ("AdamW: optimizer state is incomplete" in told) == (phase == "step")
        assert training.value("memory()[0]") == training.value("held_by(model, optimizer)")
    # torch has made half of it, and fails with a KeyError on that
    run_quietly(training, "optimizer.state.clear()")
    run_quietly(training, "step_of(model, optimizer, 256)")
    assert training.value("phase") == "end"


@pytest.mark.simulated
def test_an_oom_with_a_pinning_loader(training: Kernel) -> None:
    """After an OOM in a loop over a DataLoader that pins, or in the pinning itself, tensors, pinned
    memory, its thread and its workers are gone.
    """
    before = training.value("memory(), left()")
    for collate in ("None", "Batch"):
        if collate == "Batch":  # so that pinning finds no memory
            run_quietly(
                training, "import psutil, resource\nvms = psutil.Process().memory_info().vms"
            )
            run_quietly(training, "resource.setrlimit(resource.RLIMIT_AS, (vms + (4 << 30), -1))")
        for workers in (0, 2):
            reply = run(training, f"load({workers}, {collate})")
            assert "out of memory" in reply.message
            told = recovery(reply)
            assert ("load", "model") in named(told)
            assert "Restart" not in told
            run_quietly(training, "None")
            assert training.value("memory(), left()") == before


def test_a_device_side_assert(kernel: Kernel, figure: Callable[[str], None]) -> None:
    """An error that breaks the device's context is recognised: the report asks for a restart. What
    needs no device works on: cells under a budget, %gpumem leaks, tensors and status, which tells
    of it, and %gpumemit.
    """
    ready(kernel)
    run_quietly(
        kernel,
        "%experiment start kept\nx = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')",
    )

    # The report.
    text = recovery(break_context(kernel))
    assert "Restart the kernel" in text
    figure(text.splitlines()[0])

    # What needs no device.
    for command in ("leaks", "tensors", "status"):
        reply = kernel.run(f"%gpumem {command}")
        assert reply.status == "ok", reply.traceback
        assert reply.reports(command), command
    assert "context is broken" in reply.reports("status")[0]
    code = "[(row.size_bytes, row.note) for row in __import__('ipygpumem').tensors('x').tensors]"
    ((size, note),) = kernel.value(code)
    assert size == 64 * MIB or note.startswith("could not be read")

    # A budget, and commands that measure.
    reply = run_quietly(kernel, "%%experiment limited --budget gpu=1GiB\nprint('it ran')")
    assert reply.stdout == "it ran\n"
    refused = "budget: no device can be limited" in reply.reports("experiment")[0]
    assert refused == is_simulated()  # a real driver still answers what a limit needs
    assert "CUDA_LAUNCH_BLOCKING" not in reply.reports("experiment")[0], (
        "only the first line of an error is told"
    )
    assert "1 + 1" in run_quietly(kernel, "%gpumemit 1 + 1").reports()[0]
    assert "cuda cannot be used (" in kernel.run("%gpumem preload").stderr
