"""What an experiment gives back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ipygpumem.model import ExperimentRecord
from ipygpumem.units import GIB, MIB, format_bytes
from tests.gpu.support import DEVICE, ROUNDING, Card, allocated, run_ok, script
from tests.kernel import Kernel


def last_experiment(kernel: Kernel) -> ExperimentRecord:
    return ExperimentRecord.from_dict(kernel.value("__import__('ipygpumem').experiments()[-1].to_dict()"))


def test_the_exit_gives_memory_back(gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """At the end of an experiment its memory is back on the device: NVML's figure falls by what was reserved."""
    run_ok(gpu_kernel, "%gpumem free")
    live, idle = allocated(gpu_kernel), card.settle()
    run_ok(gpu_kernel, "%experiment start big")
    run_ok(gpu_kernel, "model = [torch.empty(256 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]")
    run_ok(gpu_kernel, "batch = torch.empty(512 << 20, dtype=torch.uint8, device='cuda'); del batch")
    reserved, used = gpu_kernel.value("torch.cuda.memory_reserved()"), card.used_bytes
    run_ok(gpu_kernel, "%experiment end")
    fallen = used - card.used_bytes
    returned = reserved - gpu_kernel.value("torch.cuda.memory_reserved()")
    assert returned >= GIB + 512 * MIB
    assert abs(fallen - returned) <= ROUNDING
    assert abs(card.used_bytes - idle) <= ROUNDING
    assert allocated(gpu_kernel) == live
    figure(f"reserved fell by {format_bytes(returned)}, NVML's used by {format_bytes(fallen)}")


def test_the_record_is_exact(gpu_kernel: Kernel) -> None:
    """An experiment's consumed, reclaimed and peak bytes on the device are exact over all its cells."""
    live = allocated(gpu_kernel)
    run_ok(gpu_kernel, "%experiment start exact")
    run_ok(gpu_kernel, "kept = torch.empty(48 << 20, dtype=torch.uint8, device='cuda')")
    run_ok(gpu_kernel, "tall = torch.empty(200 << 20, dtype=torch.uint8, device='cuda'); del tall")
    run_ok(gpu_kernel, "more = torch.empty(16 << 20, dtype=torch.uint8, device='cuda')")
    run_ok(gpu_kernel, "%experiment end")
    record = last_experiment(gpu_kernel)
    usage = next(usage for usage in record.usages if usage.device == DEVICE)
    assert (record.consumed[DEVICE], record.reclaimed[DEVICE]) == (64 * MIB, 64 * MIB)
    assert (usage.before_bytes, usage.delta_bytes, usage.peak_delta_bytes) == (live, 0, 248 * MIB)
    assert set(record.deleted) == {"kept", "more"}


def test_a_cell_experiment(gpu_kernel: Kernel) -> None:
    """%%experiment gives back what its cell took, restores the tensor that a name had, and keeps what --keep names."""
    run_ok(gpu_kernel, "x = torch.full((8 << 20,), 7, dtype=torch.uint8).cuda()")
    live = allocated(gpu_kernel)
    run_ok(
        gpu_kernel,
        "%%experiment one --keep result\n"
        "x = torch.empty(128 << 20, dtype=torch.uint8, device='cuda')\n"
        "y = x + 1\n"
        "result = torch.empty(4 << 20, dtype=torch.uint8, device='cuda')",
    )
    assert allocated(gpu_kernel) == live + 4 * MIB
    assert gpu_kernel.value("int(x[0]), len(x), 'y' in globals()") == (7, 8 << 20, False)
    run_ok(gpu_kernel, "del x, result")


def test_outputs_go(gpu_kernel: Kernel) -> None:
    """A tensor that a cell of the experiment displayed as Out[n] is given back too."""
    live = allocated(gpu_kernel)
    run_ok(gpu_kernel, "%%experiment shown\ntorch.zeros(32 << 20, dtype=torch.uint8, device='cuda')")
    assert allocated(gpu_kernel) == live


def test_a_reference_cycle_goes(gpu_kernel: Kernel) -> None:
    """Tensors that only a reference cycle holds are given back at the end."""
    live = allocated(gpu_kernel)
    run_ok(
        gpu_kernel,
        "%%experiment cycle\n"
        "gc.disable()\n"
        "box = {'t': torch.empty(64 << 20, dtype=torch.uint8, device='cuda')}; box['self'] = box",
    )
    run_ok(gpu_kernel, "gc.enable()")
    assert allocated(gpu_kernel) == live


def test_a_survivor_is_named(gpu_kernel: Kernel) -> None:
    """A tensor that something outside still refers to is named as a survivor, with its size and device."""
    run_ok(gpu_kernel, "results = []")
    run_ok(
        gpu_kernel,
        "%%experiment leak\nstate = torch.empty(96 << 20, dtype=torch.uint8, device='cuda'); results.append(state)",
    )
    (survivor,) = last_experiment(gpu_kernel).survivors
    assert (survivor.name, survivor.device, survivor.size_bytes) == ("state", DEVICE, 96 * MIB)
    run_ok(gpu_kernel, "results.clear()")


@pytest.mark.hardware("a kernel's result")
def test_the_seed_reaches_the_device(gpu_kernel: Kernel) -> None:
    """--seed resets the device's random generator before every cell of the experiment."""
    run_ok(gpu_kernel, "draws = []")
    run_ok(gpu_kernel, "%experiment start seeded --seed 7")
    for _ in range(2):
        run_ok(gpu_kernel, "draws.append(torch.rand(4, device='cuda').tolist())")
    run_ok(gpu_kernel, "%experiment end")
    first, second = gpu_kernel.value("draws")
    assert first == second


GRAPH = """
import json, torch
from ipygpumem.freeing.reclaim import empty_device_caches

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
    """A captured CUDA graph replays correctly, and writes over nobody's memory, after caches were given back."""
    assert script(GRAPH) == [True, True]


def test_a_cuda_graphs_pool(gpu_kernel: Kernel) -> None:
    """The private pool of a CUDA graph stays as long as the graph, and goes with the experiment that captured it."""
    run_ok(gpu_kernel, "%gpumem free")
    reserved = gpu_kernel.value("torch.cuda.memory_reserved()")
    run_ok(gpu_kernel, "%experiment start captured")
    run_ok(
        gpu_kernel,
        "graph, x = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device='cuda')\n"
        "with torch.cuda.graph(graph):\n    y = (x.expand(64, -1) + 1).sum(0)\ngraph.replay()",
    )
    run_ok(gpu_kernel, "%gpumem free\ngraph.replay()")
    assert gpu_kernel.value("torch.cuda.memory_reserved()") - reserved >= 256 * MIB
    assert "captured" in run_ok(gpu_kernel, "%experiment end").reports("experiment")[0]
    assert gpu_kernel.value("torch.cuda.memory_reserved()") == reserved


def test_an_experiment_inside_a_capture(gpu_kernel: Kernel) -> None:
    """An experiment that ends while a CUDA graph is captured frees nothing that CUDA forbids then: the graph is whole.

    Pinned memory that was freed lately is what a graph's capture does not survive the end of.
    """
    run_ok(gpu_kernel, "import ipygpumem\npinned = torch.empty(32 << 20, dtype=torch.uint8).pin_memory()")
    reply = run_ok(
        gpu_kernel,
        "graph, x = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device='cuda')\n"
        "with torch.cuda.graph(graph):\n"
        "    y = x + 1\n    del pinned\n"
        "    with ipygpumem.experiment('inside'):\n        z = y + 1\n"
        "    y += 1\n"
        "graph.replay()\ntorch.cuda.synchronize()",
    )
    assert "skipped while a CUDA graph is captured" in reply.reports("experiment")[0]
    run_ok(gpu_kernel, "del graph, y")
