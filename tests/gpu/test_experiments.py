"""Memory that an experiment frees, and memory that it names because something else holds it."""

from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.records import ExperimentRecord
from ipygpumem.units import GIB, MIB, format_bytes
from tests.gpu.support import DEVICE, ROUNDING, Card, allocated, script
from tests.steps import run_quietly

_RESERVED = "torch.cuda.memory_reserved()"
_PINNED = "torch.cuda.host_memory_stats()['allocated_bytes.current']"


def test_an_experiment_frees_its_memory_on_the_card(
    gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]
) -> None:
    """At the end of an experiment NVML's figure falls by what was reserved, caches and cuBLAS's
    workspace, too, and its consumed, freed and peak bytes are exact over all its cells.
    """
    run_quietly(
        gpu_kernel,
        "%gpumem free\ndef mib(n): return torch.empty(n << 20, dtype=torch.uint8, device='cuda')",
    )
    # The first product loads cuBLAS's kernels into the context, where they stay.
    run_quietly(
        gpu_kernel, "a = torch.ones(4096, 4096, device='cuda'); b = a @ a; del a, b\n%gpumem free"
    )
    live = allocated(gpu_kernel)
    idle = card.settle()
    run_quietly(gpu_kernel, "%experiment start big", "model = [mib(256) for _ in range(4)]")
    run_quietly(gpu_kernel, "for size in range(40, 520, 36): block = mib(size)", "del block")
    run_quietly(gpu_kernel, "a = torch.ones(4096, 4096, device='cuda'); b = a @ a")
    assert allocated(gpu_kernel) > live + GIB + 128 * MIB, "cuBLAS has no workspace"
    reserved = gpu_kernel.value(_RESERVED)
    used = card.memory.used
    run_quietly(gpu_kernel, "%experiment end")
    fallen = used - card.memory.used
    returned = reserved - gpu_kernel.value(_RESERVED)
    assert returned >= GIB + 512 * MIB
    assert abs(fallen - returned) <= ROUNDING
    assert abs(card.memory.used - idle) <= ROUNDING
    assert allocated(gpu_kernel) == live
    record = ExperimentRecord.from_dict(
        gpu_kernel.value("__import__('ipygpumem').experiments()[-1].to_dict()")
    )
    usage = next(usage for usage in record.usages if usage.device == DEVICE)
    assert record.consumed[DEVICE] == record.freed[DEVICE] >= GIB + 128 * MIB
    # The loop's largest blocks, of 508 and 472 MiB, were alive at once.
    assert usage.before_bytes == live
    assert usage.delta_bytes == 0
    assert usage.peak_delta_bytes == GIB + (508 + 472) * MIB
    figure(f"reserved fell by {format_bytes(returned)}, NVML's used by {format_bytes(fallen)}")


def test_an_experiment_frees_pinned_memory(
    gpu_kernel: Kernel, figure: Callable[[str], None]
) -> None:
    """Pinned host memory that the scope has used is unpinned: torch's cache for it
    is emptied too.
    """
    run_quietly(gpu_kernel, "%gpumem free")
    before = gpu_kernel.value(_PINNED)
    run_quietly(gpu_kernel, "%experiment start pinned")
    run_quietly(
        gpu_kernel,
        "batches = [torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]\n"
        "copies = [batch.cuda(non_blocking=True) for batch in batches]",
    )
    pinned = gpu_kernel.value(_PINNED) - before
    run_quietly(gpu_kernel, "%experiment end")
    assert pinned >= 128 * MIB
    assert gpu_kernel.value(_PINNED) == before
    figure(f"{format_bytes(pinned)} were pinned, none is left")


GRAPH = """
import json, torch
from ipygpumem.reclaim.emptying import empty_device_caches

def product():
    return left.T @ right  # long and thin: cuBLAS splits it and needs its workspace

left = torch.randn(32768, 640, device="cuda", dtype=torch.bfloat16)
right = torch.randn(32768, 640, device="cuda", dtype=torch.bfloat16)
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    expected = product()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    found = product()
empty_device_caches()
bystanders = [torch.full((32 << 20,), 5, dtype=torch.uint8, device="cuda") for _ in range(4)]
graph.replay()
torch.cuda.synchronize()
untouched = all(bool((bystander == 5).all()) for bystander in bystanders)
print(json.dumps([untouched, bool(torch.allclose(found, expected, rtol=0.05, atol=1.0))]))
"""


@pytest.mark.hardware("a kernel's result")
def test_a_cuda_graph_still_replays() -> None:
    """A captured CUDA graph replays correctly, and writes over nobody's memory, after caches were
    given back.
    """
    assert script(GRAPH) == [True, True]


def test_an_experiment_inside_a_capture(gpu_kernel: Kernel) -> None:
    """An experiment that ends while a CUDA graph is captured frees nothing that CUDA forbids then:
    the graph is whole.

    Pinned memory that was freed lately is what a graph's capture does not survive the end of.
    """
    run_quietly(
        gpu_kernel,
        "import ipygpumem\npinned = torch.empty(32 << 20, dtype=torch.uint8).pin_memory()",
    )
    reply = run_quietly(
        gpu_kernel,
        """
        graph, x = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device='cuda')
        with torch.cuda.graph(graph):
            y = x + 1
            del pinned
            with ipygpumem.experiment('inside'):
                z = y + 1
            y += 1
        graph.replay()
        torch.cuda.synchronize()
        """,
    )
    assert "skipped while a CUDA graph is captured" in reply.reports("experiment")[0]
    run_quietly(gpu_kernel, "del graph, y")
