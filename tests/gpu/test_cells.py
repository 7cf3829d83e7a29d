"""Cost of a cell with each of torch's allocators; and no context before the user's own."""

from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import (
    DEVICE,
    ROUNDING,
    Card,
    allocated,
    cuda_usage,
    ready,
    recovery,
    size_after,
    started_kernel,
)
from tests.steps import run_quietly

DEFINE_MIB = """
def mib(n): return torch.empty(n << 20, dtype=torch.uint8, device='cuda')
"""


def test_delta_and_peak_to_the_byte(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """The memory that a cell kept and its peak are those of torch.cuda.memory_stats, to the byte,
    if the cell fails, too.
    """
    now = "torch.cuda.memory_stats()['allocated_bytes.all.current']"
    run_quietly(gpu_kernel, DEFINE_MIB)
    reply = gpu_kernel.run(
        f"""
        before = {now}
        kept, tall = mib(48), mib(160)
        odd = torch.empty(12_345_678, dtype=torch.uint8, device='cuda')
        high = {now}
        del tall
        after = {now}
        1 / 0
        """
    )
    assert reply.error == "ZeroDivisionError"
    usage = cuda_usage(gpu_kernel)
    before, high, after = gpu_kernel.value("(before, high, after)")
    assert usage.before_bytes == before
    assert usage.peak_bytes == high
    assert usage.after_bytes == after
    assert usage.delta_bytes >= 48 * MIB + 12_345_678
    assert usage.peak_delta_bytes == usage.delta_bytes + 160 * MIB
    assert usage.method == "allocator"
    figure(f"kept {usage.delta_bytes:,} B, peak {usage.peak_delta_bytes:,} B: no byte off")


def test_loading_after_the_first_use(bare_kernel: Kernel) -> None:
    """If CUDA was used before loading, earlier peaks are not put on the first cell."""
    ready(bare_kernel)
    run_quietly(
        bare_kernel,
        f"{DEFINE_MIB}mib(100); held = mib(20)",
        "%load_ext ipygpumem",
        "more = mib(30)",
    )
    usage = cuda_usage(bare_kernel)
    assert (usage.delta_bytes, usage.peak_delta_bytes) == (30 * MIB, 30 * MIB)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(setting: str, card: Card) -> None:
    """With expandable segments and with cudaMallocAsync a cell's figures are torch's, an OOM's
    memory comes back, an experiment's end gives the card its memory, a budget ends with its
    experiment, and %gpumem status answers.
    """
    with started_kernel(PYTORCH_CUDA_ALLOC_CONF=setting) as kernel:
        ready(kernel)

        # A cell's figures.
        run_quietly(kernel, f"{DEFINE_MIB}x = mib(64); mib(64); None")
        assert (cuda_usage(kernel).delta_bytes, cuda_usage(kernel).peak_delta_bytes) == (
            64 * MIB,
            128 * MIB,
        )

        # An out-of-memory error.
        live = allocated(kernel)
        used = card.settle()
        reply = kernel.run("""
            def fail():
                kept = mib(1024)
                return mib(1 << 22)
            fail()
            """)
        assert reply.error == "OutOfMemoryError"
        assert size_after(rf"freed: [^·\n]*{DEVICE}", recovery(reply)) == 1024 * MIB

        # A budget is for one experiment: the end gives all back.
        run_quietly(kernel, "%%experiment some --budget gpu=1GiB\nz = [mib(100) for _ in range(9)]")
        assert (
            kernel.run("%%experiment some --budget gpu=1GiB\nz = mib(1200)").error
            == "OutOfMemoryError"
        )
        assert allocated(kernel) == live
        assert card.settle() <= used

        # What status shows.
        (status,) = run_quietly(kernel, "y = mib(1536)", "%gpumem status").reports("status")
        assert ("live tensors" if "Async" in setting else "tensors: other") in status
        assert "restart with expandable_segments" not in status


def test_no_caching(machine: Callable[..., None]) -> None:
    """With PYTORCH_NO_CUDA_MEMORY_CACHING torch counts nothing: %gpumem status and a
    budget say so.
    """
    machine(gib=8)
    with started_kernel(PYTORCH_NO_CUDA_MEMORY_CACHING="1") as kernel:
        ready(kernel)
        run_quietly(kernel, f"{DEFINE_MIB}x = mib(100)")
        said = (
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts and limits nothing on CUDA devices"
        )
        assert said in run_quietly(kernel, "%gpumem status").reports("status")[0]
        reply = run_quietly(kernel, "%%experiment small --budget gpu=1GiB\n1")
        assert f"budget: {said}" in reply.reports("experiment")[0]


HOST_CELLS = [
    "%load_ext ipygpumem",
    "import torch",
    "x = torch.ones(1 << 20)",
    """
%%experiment host
y = x * 2
""",
    "%experiment start more",
    "z = [bytearray(1 << 20) for _ in range(8)]",
    "%experiment end",
    "%gpumem status",
    "%gpumem free",
    "%gpumem tensors",
]


def test_no_context(bare_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """Loading, cells on the host, an OOM there, experiments, status, free and tensors create no
    CUDA context.
    """
    before = card.settle()
    for cell in HOST_CELLS:
        run_quietly(bare_kernel, cell)
        assert (
            bare_kernel.value(
                "'torch' in __import__('sys').modules and torch.cuda.is_initialized()"
            )
            is False
        )
    assert bare_kernel.run("torch.empty(1 << 60, dtype=torch.uint8)").reports("recovery")
    assert bare_kernel.value("torch.cuda.is_initialized()") is False
    assert bare_kernel.value("__import__('os').getpid()") not in card.processes()
    risen = card.settle() - before
    assert risen < MIB
    figure(f"device memory rose by {risen} B in {len(HOST_CELLS)} cells")


def test_preload(kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """%gpumem preload creates the context, and says what the device uses then as NVML does; no
    tensor pays later.
    """
    before = card.settle()
    reply = run_quietly(kernel, "%gpumem preload")
    (note,) = reply.reports("note")
    assert note.startswith("cuda is ready · ")
    used = card.memory.used
    assert abs(size_after(DEVICE, note) - used) <= ROUNDING
    # A context takes far more.
    assert used - before > 50 * MIB
    assert kernel.value("__import__('torch').cuda.is_initialized()") is True
    figure(f"{note}; the context takes {format_bytes(used - before)}")
    used = card.settle()
    run_quietly(
        kernel, "import torch\nx = torch.empty(256 << 20, dtype=torch.uint8, device='cuda')"
    )
    assert abs(card.memory.used - used - 256 * MIB) <= ROUNDING
