"""The live line beside work on a device: what it says, and that it waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, cuda_usage, run_ok
from tests.kernel import Kernel

WORK = """
import threading
from tests.waiting import ticks
square = torch.rand(4096, 4096, device="cuda")
watch = threading.Thread(target=ticks, args=[4])
watch.start()
while watch.is_alive():
    for _ in range(50):
        square = (square @ square).clamp(-1, 1)
    torch.cuda.synchronize()
"""


def test_a_long_cells_line_names_the_device_and_leaves_its_peak_alone(gpu_kernel: Kernel) -> None:
    """While a cell works on the device the line has its use of its total; the cell's peak stays torch's own."""
    reply = run_ok(gpu_kernel, WORK + "peak = torch.cuda.max_memory_allocated()", browser=True)
    lines = [item["data"].get("text/html", "") for item in reply.updates]
    assert any(DEVICE in line for line in lines)
    assert cuda_usage(gpu_kernel).peak_bytes >= 64 * MIB
    assert gpu_kernel.value("peak") >= 2 * 64 * MIB


@pytest.mark.hardware("time")
def test_a_glance_does_not_wait_for_queued_kernels(gpu_kernel: Kernel, figure: Callable[[str], None]) -> None:
    """A look at the device from another thread is back long before the kernels that are queued have run."""
    run_ok(
        gpu_kernel,
        "import time\nfrom ipygpumem.notebook.notebook import current_notebook\n"
        "square = torch.rand(8192, 8192, device='cuda')\nmeter = current_notebook().tools.meter\nmeter.glance()\n"
        "torch.cuda.synchronize()\nstarted = time.perf_counter()\n"
        "for _ in range(100):\n    product = square @ square\n"
        "before = time.perf_counter()\nmeter.glance()\nglance = time.perf_counter() - before\n"
        "torch.cuda.synchronize()\nrest = time.perf_counter() - before",
    )
    glance, rest = gpu_kernel.value("glance"), gpu_kernel.value("rest")
    figure(f"a glance took {1000 * glance:.2f} ms while {1000 * rest:.0f} ms of kernels were queued")
    assert glance < rest / 4
