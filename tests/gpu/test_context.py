"""No context before the user's own, and what %gpumem preload and status say."""

from __future__ import annotations

import re
from collections.abc import Callable

from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import (
    DEVICE,
    ROUNDING,
    Card,
    allocated,
    other_process,
    ready,
    run_ok,
    size_after,
)
from tests.kernel import Kernel

HOST_CELLS = [
    "%load_ext ipygpumem",
    "import torch",
    "x = torch.ones(1 << 20)",
    "%%experiment host\ny = x * 2",
    "%experiment start more",
    "z = [bytearray(1 << 20) for _ in range(8)]",
    "%experiment end",
    "%gpumem status",
    "%gpumem free",
]


def test_no_context(bare_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """Loading, host-only cells, experiments, %gpumem status and free create no CUDA context: NVML sees no byte."""
    before = card.settle()
    for cell in HOST_CELLS:
        run_ok(bare_kernel, cell)
        assert bare_kernel.value("'torch' in __import__('sys').modules and torch.cuda.is_initialized()") is False
    assert bare_kernel.value("__import__('os').getpid()") not in card.processes()
    risen = card.settle() - before
    assert risen < MIB
    figure(f"device memory rose by {risen} B in {len(HOST_CELLS)} cells")


def test_an_out_of_memory_on_the_host_makes_no_context(kernel: Kernel, card: Card) -> None:
    """Recovering from a host OOM with torch imported creates no CUDA context."""
    run_ok(kernel, "import torch")
    before = card.settle()
    assert kernel.run("torch.empty(1 << 60, dtype=torch.uint8)").status == "error"
    assert kernel.value("torch.cuda.is_initialized()") is False
    assert card.settle() - before < MIB


def test_preload(kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """%gpumem preload creates the context, and says what the device uses then as NVML does; no tensor pays later."""
    before = card.settle()
    reply = run_ok(kernel, "%gpumem preload")
    (note,) = reply.reports("note")
    assert note.startswith("cuda is ready · ")
    used = card.used_bytes
    assert abs(size_after(DEVICE, note) - used) <= ROUNDING
    assert used - before > 50 * MIB
    assert kernel.value("__import__('torch').cuda.is_initialized()") is True
    figure(f"{note}; the context takes {format_bytes(used - before)}")
    used = card.settle()
    run_ok(kernel, "import torch\nx = torch.empty(256 << 20, dtype=torch.uint8, device='cuda')")
    assert abs(card.used_bytes - used - 256 * MIB) <= ROUNDING


def test_status(kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """%gpumem status shows tensors, cache, device use, other processes and total as torch and NVML tell them."""
    ready(kernel)
    run_ok(kernel, "kept = torch.empty(300 << 20, dtype=torch.uint8, device='cuda')")
    with other_process(768):
        card.settle()
        reply = run_ok(kernel, "%gpumem status")
        processes, used = card.processes(), card.used_bytes
    (status,) = reply.reports("status")
    lines = {
        line.split()[0]: re.split(r" {2,}", line.strip()) for line in reversed(status.splitlines()) if line.strip()
    }
    row = dict(zip(lines["device"], lines[DEVICE], strict=False))
    assert abs(size_after("", row["in use"]) - allocated(kernel)) <= MIB
    assert abs(size_after("", row["reserved"]) - kernel.value("torch.cuda.memory_reserved()")) <= MIB
    assert abs(size_after("", row["device used"]) - used) <= ROUNDING
    assert abs(size_after("", row["total"]) - card.total_bytes) <= ROUNDING
    pid = kernel.value("__import__('os').getpid()")
    sizes = {number: size for number, size in processes.items() if number != pid}
    if pid not in processes or None in processes.values():
        assert "others" not in row
        assert "other processes:" in status
        figure("NVML hides processes here, and the report says so instead of giving a figure")
        return
    expected = sum(size for size in sizes.values() if size is not None)
    assert expected >= 768 * MIB
    assert abs(size_after("", row["others"]) - expected) <= ROUNDING
    figure(f"others {row['others']} in {len(sizes)} processes, used {row['device used']}, total {row['total']}")
