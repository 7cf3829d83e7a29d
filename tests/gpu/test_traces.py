"""Traces on a device."""

from __future__ import annotations

from tests.gpu.support import ready, run_ok
from tests.kernel import Kernel

_SCRIPT = """
import ipygpumem, torch
def mib(n): return torch.empty(n << 20, dtype=torch.uint8, device="cuda")
def figures(usages): return [(u.delta_bytes >> 20, u.peak_delta_bytes >> 20) for u in usages if u.device == "cuda:0"][0]
"""


def test_nested_traces_have_exact_peaks_and_leave_the_users_counters_alone(gpu_kernel: Kernel) -> None:
    """A trace around another, in a cell of an experiment: each has its own kept bytes and its own exact peak, and
    torch's own `max_memory_allocated()` goes on over them."""
    run_ok(gpu_kernel, _SCRIPT)
    run_ok(
        gpu_kernel,
        "%%experiment traced --keep 'outer' --keep 'inner' --keep 'highest'\n"
        "torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()\n"
        "with ipygpumem.trace('outer', silent=True) as outer:\n"
        "    held = mib(64); mib(256)\n"
        "    with ipygpumem.trace('inner', silent=True) as inner:\n"
        "        more = mib(32); mib(128)\n"
        "highest = (torch.cuda.max_memory_allocated() - before) >> 20",
    )
    assert gpu_kernel.value("figures(inner.record.usages)") == (32, 160)
    assert gpu_kernel.value("figures(outer.record.usages)") == (96, 320)
    assert gpu_kernel.value("highest") == 320
    assert gpu_kernel.value("figures(ipygpumem.last().usages)[1]") == 320


def test_a_script_measures_exactly_too(bare_kernel: Kernel) -> None:
    """Without the extension, as in a script: kept bytes and peak of nested traces are exact, and so is what torch's
    `max_memory_allocated()` gives after them."""
    ready(bare_kernel)
    run_ok(bare_kernel, _SCRIPT)
    run_ok(
        bare_kernel,
        "before = torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats()\n"
        "with ipygpumem.trace('outer', silent=True) as outer:\n"
        "    mib(256)\n"
        "    with ipygpumem.trace('inner', silent=True) as inner:\n"
        "        more = mib(32); mib(128)\n",
    )
    assert bare_kernel.value("figures(inner.record.usages)") == (32, 160)
    assert bare_kernel.value("figures(outer.record.usages)") == (32, 256)
    assert bare_kernel.value("(torch.cuda.max_memory_allocated() - before) >> 20") == 256


def test_a_tracked_loop_says_what_each_iteration_leaves_on_the_device(gpu_kernel: Kernel) -> None:
    """`track` around a loop that keeps each iteration's output: every row is exact, the growth is said, and the list
    that holds it is named."""
    run_ok(gpu_kernel, _SCRIPT + "outputs = []")
    reply = run_ok(
        gpu_kernel,
        "loop = ipygpumem.track(range(8), 'step')\n"
        "for step in loop:\n"
        "    out = mib(64)\n"
        "    mib(32)\n"
        "    outputs.append(out)\n",
    )
    assert gpu_kernel.value("[figures(record.usages) for record in loop.records]") == [(64, 96)] * 8
    (table,) = reply.reports("track")
    assert "cuda:0 has grown by 64 MiB in each of the last 7 iterations" in table
    assert "left 64 MiB more on cuda:0, held by outputs (outputs[" in table
    run_ok(gpu_kernel, "del outputs, out")
