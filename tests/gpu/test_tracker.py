"""A tracker on a device."""

from __future__ import annotations

from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, run_ok
from tests.kernel import Kernel

_SETUP = """
import ipygpumem, torch, gc
def mib(n, dtype=torch.uint8): return torch.empty((n << 20) // dtype.itemsize, dtype=dtype, device="cuda")
def usage(record): return next(u for u in record.usages if u.device == "cuda:0")
def rows(tensors): return sorted((r.name, r.device, r.size_bytes >> 20) for r in tensors if r.device != "cpu")
"""


def test_a_tracker_counts_what_came_and_went_as_the_allocator_does(gpu_kernel: Kernel) -> None:
    """What a tracker says came and went on the device is exactly by how much torch's allocator rose and fell: with
    views, every dtype, and a tensor replaced by another of its shape."""
    run_ok(gpu_kernel, _SETUP + "gc.collect(); t = ipygpumem.tracker(silent=True); first = t.track()")
    run_ok(gpu_kernel, "x = mib(64); view = x[5:]; short = mib(8, torch.int16); wide = mib(16, torch.complex64)")
    run_ok(gpu_kernel, "second = t.track(); rose = torch.cuda.memory_allocated()")
    expected = [("short", DEVICE, 8), ("wide", DEVICE, 16), ("x", DEVICE, 64)]
    assert gpu_kernel.value("rows(second.came)") == expected
    assert gpu_kernel.value("second.changed_bytes['cuda:0']") == 88 * MIB
    assert gpu_kernel.value("usage(second).after_bytes == rose") is True
    assert gpu_kernel.value("usage(second).delta_bytes") == 88 * MIB
    run_ok(gpu_kernel, "old, x, view = x, mib(64), None\ndel old; third = t.track()")
    assert gpu_kernel.value("[rows(third.came), rows(third.went)]") == [[("x", DEVICE, 64)]] * 2
    assert gpu_kernel.value("(usage(third).delta_bytes, usage(third).peak_delta_bytes)") == (0, 64 * MIB)
    run_ok(gpu_kernel, "del x, short, wide")


def test_a_tracker_says_what_is_in_no_python_tensor(gpu_kernel: Kernel) -> None:
    """What only a graph keeps is said to be allocated and in no Python tensor, to the byte."""
    run_ok(gpu_kernel, _SETUP + "gc.collect(); t = ipygpumem.tracker(); first = t.track()")
    run_ok(
        gpu_kernel,
        "leaf = torch.ones(8 << 18, device='cuda', requires_grad=True)\nout = (leaf.exp() * 2).sum()",
    )
    reply = run_ok(gpu_kernel, "held = t.track()")
    gap = "(usage({0}).after_bytes - {0}.tensor_bytes.get('cuda:0', 0))"
    grown = gpu_kernel.value(f"{gap.format('held')} - {gap.format('first')}")
    assert grown == 8 * MIB + 508, "what exp() saved, and the rounding of a sum of 4 bytes to 512"
    (shown,) = reply.reports("tracker")
    assert "of it in no Python tensor, or rounding)" in shown
    run_ok(gpu_kernel, "del leaf, out")
