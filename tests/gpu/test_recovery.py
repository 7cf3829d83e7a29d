"""After an out-of-memory error, an interrupt, and an error that breaks the device's context."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator

import pytest

from ipygpumem.units import MIB, TIB, format_bytes
from tests.gpu.support import DEVICE, ROUNDING, Card, allocated, break_context, ready, recovery, run_ok, size_after
from tests.kernel import Kernel

FUNCTIONS = """
import pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
free_before = []
def forward(batch, gib):
    activations = torch.empty(64, 1024, 2048, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    free_before.append(pynvml.nvmlDeviceGetMemoryInfo(card).free)
    return torch.empty(gib, 1 << 30, dtype=torch.uint8, device="cuda")
def train(gib):
    model = torch.zeros(128, 1024, 1024, device="cuda")
    optimizer = {"exp_avg": torch.zeros(128, 1024, 1024, device="cuda")}
    return forward(model, gib)
"""
CELL = "out = train(gib)"
HELD = 512 * MIB + 512 * MIB + 256 * MIB


@pytest.fixture(scope="module")
def training_kernel() -> Iterator[Kernel]:
    """A kernel with the extension and a function that asks for too much while it holds 1.25 GiB."""
    kernel = Kernel()
    run_ok(kernel, "%load_ext ipygpumem")
    ready(kernel)
    run_ok(kernel, FUNCTIONS)
    yield kernel
    kernel.close()


@pytest.fixture
def training(training_kernel: Kernel) -> Kernel:
    """The same kernel for every test, since an OOM must leave nothing behind; set to ask for 4 TiB."""
    run_ok(training_kernel, "gib = 4096; out = None")
    run_ok(training_kernel, "%gpumem free")
    return training_kernel


def test_the_frames_are_named(training: Kernel, figure: Callable[[str], None]) -> None:
    """After a CUDA OOM the report names what the frames held: function, line, name, shape, dtype, device and size."""
    reply = training.run(CELL)
    assert reply.error == "OutOfMemoryError"
    text = recovery(reply)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    expected = [
        r"512 MiB train \d+ model Tensor 128 × 1024 × 1024 float32 cuda:0",
        r"512 MiB train \d+ optimizer dict 1 array float32 cuda:0",
        r"256 MiB forward \d+ activations Tensor 64 × 1024 × 2048 float16 cuda:0",
    ]
    listed = [row for row in rows if re.match(r"\d+ MiB (train|forward) ", row)]  # the batch is the model's storage
    assert len(listed) == len(expected), f"one storage, listed twice, in\n{text}"
    for pattern, row in zip(expected, listed, strict=True):
        assert re.fullmatch(pattern, row), f"no {pattern!r} in\n{text}"
    figure(text.splitlines()[0])


def test_asked_for_and_free(training: Kernel, figure: Callable[[str], None]) -> None:
    """The report says what was asked for, and what was free on the device just before as NVML told it."""
    text = recovery(training.run(CELL))
    free = training.value("free_before[-1]")
    reported = size_after(rf"free: [^·]*{DEVICE}", text)
    assert size_after("asked for", text) == 4 * TIB
    assert abs(reported - free) <= ROUNDING
    figure(f"free in the report: {format_bytes(reported)}, by NVML: {format_bytes(free)}")


def test_the_memory_comes_back(training: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """After a CUDA OOM all that the failed call held is back, in the allocator and on the device."""
    live, used = allocated(training), card.settle()
    reply = training.run(CELL)
    assert size_after(rf"came back: [^·\n]*{DEVICE}", recovery(reply)) == HELD
    assert allocated(training) == live
    left = card.used_bytes - used
    assert left <= ROUNDING
    figure(f"{format_bytes(HELD)} came back; the device is {format_bytes(left)} above where it was")


def test_without_the_extension_it_stays(bare_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """Without the extension the same failure keeps the memory: the comparison that gives the rows above a meaning."""
    ready(bare_kernel)
    run_ok(bare_kernel, FUNCTIONS)
    live = allocated(bare_kernel)
    run_ok(bare_kernel, "gib = 4096")
    assert bare_kernel.run(CELL).error == "OutOfMemoryError"
    stays = bare_kernel.value("(gc.collect(), torch.cuda.empty_cache(), torch.cuda.memory_allocated())[-1]") - live
    assert stays >= HELD
    figure(f"{format_bytes(stays)} stay allocated after gc.collect() and empty_cache()")


def test_an_interrupt_in_training(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """Ctrl-C in a training loop gives back the model, its gradients and the batch."""
    run_ok(
        gpu_kernel,
        "done = []\n"
        "def train(steps):\n"
        "    layers = [torch.nn.Linear(4096, 4096, device='cuda') for _ in range(4)]\n"
        "    model = torch.nn.Sequential(*layers)\n"
        "    for step in range(steps):\n"
        "        batch = torch.rand(1024, 4096, device='cuda')\n"
        "        model(batch).square().mean().backward()\n"
        "        with torch.no_grad():\n"
        "            for weight in model.parameters():\n"
        "                weight -= 1e-3 * weight.grad\n"
        "                weight.grad = None\n"
        "        torch.cuda.synchronize()\n"
        "        done.append(step)\n"
        "        if step == 2: print('it trains', flush=True)\n"
        "train(1)",
    )
    run_ok(gpu_kernel, "%gpumem free")
    live = allocated(gpu_kernel)
    reply = gpu_kernel.run("done.clear(); train(10 ** 9)", interrupt_when="it trains")
    assert reply.error == "KeyboardInterrupt"
    assert gpu_kernel.value("len(done)") > 0
    came_back = size_after(rf"came back: [^·\n]*{DEVICE}", recovery(reply))
    assert came_back >= 4 * 64 * MIB
    assert allocated(gpu_kernel) == live
    figure(f"{format_bytes(came_back)} came back after {gpu_kernel.value('len(done)')} steps")


def test_a_device_side_assert(kernel: Kernel, figure: Callable[[str], None]) -> None:
    """An error that breaks the device's context is recognised: the report asks for a restart; the kernel answers."""
    ready(kernel)
    reply = break_context(kernel)
    text = recovery(reply)
    assert "Restart the kernel" in text
    assert run_ok(kernel, "1 + 1").result == "2"
    figure(text.splitlines()[0])


def test_an_error_of_cuda_that_breaks_nothing(gpu_kernel: Kernel) -> None:
    """An error of CUDA that leaves the context as it was, such as a device that is not there, asks for no restart."""
    reply = gpu_kernel.run("torch.zeros(1, device='cuda:63')")
    assert "invalid device ordinal" in reply.message
    assert "device-side assertions" in reply.message, "what torch adds to every text"
    assert not reply.reports("recovery")
    run_ok(gpu_kernel, "torch.zeros(1, device='cuda').cpu()\nNone")


def test_what_works_with_a_broken_context(kernel: Kernel) -> None:
    """After a device-side assert cells under a budget still run, %gpumemit measures what needs no device."""
    ready(kernel)
    break_context(kernel)
    reply = run_ok(kernel, "%%experiment limited --budget gpu=1GiB\nprint('it ran')")
    assert reply.stdout == "it ran\n"
    assert "budget: no device can be limited" in reply.reports("experiment")[0]
    assert "CUDA_LAUNCH_BLOCKING" not in reply.reports("experiment")[0], "only the first line of an error is told"
    assert "1 + 1" in run_ok(kernel, "%gpumemit 1 + 1").reports()[0]
    assert "cuda cannot be used (" in kernel.run("%gpumem preload").stderr


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@_needs("cupy")
def test_an_oom_of_cupy(kernel: Kernel) -> None:
    """CuPy's out-of-memory error is recognised, with what it asked for."""
    run_ok(kernel, "import cupy\ncupy.zeros(1)\nNone")
    reply = kernel.run("cupy.empty(1 << 42, dtype=cupy.uint8)")
    assert reply.error == "OutOfMemoryError"
    assert size_after("asked for", recovery(reply)) == 4 * TIB


@_needs("jax")
def test_an_oom_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's out-of-memory error is recognised, with what it asked for."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with Kernel() as kernel:
        run_ok(kernel, "%load_ext ipygpumem")
        run_ok(kernel, "import jax, jax.numpy as jnp\nplatform = jax.devices()[0].platform")
        if kernel.value("platform") != "gpu":
            pytest.skip("jax sees no GPU")
        reply = kernel.run("jnp.zeros((4096, 1 << 30), dtype=jnp.uint8).block_until_ready()")
        assert reply.status == "error"
        assert abs(size_after("asked for", recovery(reply)) - 4 * TIB) <= TIB // 100
