"""The parts of a device's memory, against torch's counters and NVML."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ipygpumem.reconcile.device import Reconciliation
from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import DEVICE, ROUNDING, Card, break_context, other_process, ready, run_ok
from tests.kernel import Kernel

LOOK = """
import gc as _gc
from ipygpumem.notebook.notebook import current_notebook as _notebook
from ipygpumem.reconcile.findings import reconcile as _reconcile, storages_of as _storages
def _look():
    kinds = ((t, "parameter" if type(t) is torch.nn.Parameter else "other") for t in _gc.get_objects()
             if type(t) in (torch.Tensor, torch.nn.Parameter))
    found = _reconcile(lambda: _notebook().context.meter.now(detail=True), lambda: _storages(kinds))
    assert not found.failures, found.failures
    return [item.to_dict() for item in found.reconciliations]
"""


def look(kernel: Kernel, device: str = DEVICE) -> Reconciliation:
    """Return the parts of a device; they sum exactly."""
    run_ok(kernel, LOOK)
    found = next(item for item in map(Reconciliation.from_dict, kernel.value("_look()")) if item.device == device)
    known = [part.size_bytes for part in found.parts if part.size_bytes is not None]
    assert sum(known) == found.total_bytes
    assert min(known) >= 0
    return found


def size(found: Reconciliation, name: str) -> int:
    """Return the bytes of the parts whose name begins with ``name``."""
    return sum(part.size_bytes or 0 for part in found.parts if part.name.startswith(name))


def test_every_byte_is_somebodys(kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """The parts of the device sum exactly to NVML's total, tensors and cache to what torch has reserved."""
    ready(kernel)
    run_ok(kernel, "layer = torch.nn.Linear(4096, 4096, bias=False, device='cuda')")
    run_ok(kernel, "kept = torch.empty(300 << 20, dtype=torch.uint8, device='cuda')")
    run_ok(kernel, "torch.empty(200 << 20, dtype=torch.uint8, device='cuda').fill_(0)\nNone")
    found = look(kernel)
    assert found.total_bytes == card.total_bytes
    assert size(found, "tensors: parameter") == 64 * MIB
    assert size(found, "tensors: other") >= 300 * MIB
    assert size(found, "allocator cache") >= 200 * MIB
    names = ("tensors:", "held by", "rounding", "waiting", "allocator", "fragmentation", "pools")
    reserved = kernel.value("torch.cuda.memory_reserved()")
    assert sum(size(found, name) for name in names) == reserved
    assert abs(size(found, "free") - card.free_bytes) <= ROUNDING
    figure(", ".join(f"{part.name} {format_bytes(part.size_bytes or 0)}" for part in found.parts if part.size_bytes))


def test_what_autograd_keeps(kernel: Kernel, card: Card) -> None:
    """What only a graph holds is a part of its own, and no tensor's."""
    ready(kernel)
    run_ok(kernel, "x = torch.ones(16 << 20, device='cuda', requires_grad=True)\nloss = x.exp().sum()")
    found = look(kernel)
    assert size(found, "tensors: other") >= 64 * MIB
    assert 64 * MIB <= size(found, "held by C++ or autograd") < 80 * MIB
    run_ok(kernel, "loss = loss.item()")
    assert size(look(kernel), "held by C++ or autograd") < 16 * MIB


def test_what_cublas_keeps(kernel: Kernel) -> None:
    """What a matrix product leaves in the allocator is told as what it may be, cuBLAS's, and %gpumem free takes it."""
    ready(kernel)
    run_ok(kernel, "x = torch.ones(512, 512, device='cuda')\ny = x @ x")
    (part,) = [part for part in look(kernel).parts if part.name == "held by C++ or autograd"]
    assert (part.size_bytes or 0) >= 4 * MIB
    assert "cuBLAS" in part.advice
    run_ok(kernel, "%gpumem free")
    assert size(look(kernel), "held by C++ or autograd") < MIB


def test_fragmentation(kernel: Kernel, card: Card) -> None:
    """A hole between blocks in use is fragmentation, and %gpumem free cannot give it back."""
    ready(kernel)
    run_ok(kernel, "parts = [torch.empty(4 << 20, dtype=torch.uint8, device='cuda') for _ in range(5)]")
    before = size(look(kernel), "fragmentation")
    run_ok(kernel, "del parts[2]")
    run_ok(kernel, "%gpumem free")
    assert size(look(kernel), "fragmentation") - before == 4 * MIB


SPREAD = "parts = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(12)]\ndel parts[1:-1]"
ADVICE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def given_back(kernel: Kernel) -> tuple[int, int]:
    """Return what the parts called the allocator's cache, and what %gpumem free gives back."""
    cache, before = size(look(kernel), "allocator cache"), kernel.value("torch.cuda.memory_reserved()")
    run_ok(kernel, "%gpumem free")
    return cache, before - kernel.value("torch.cuda.memory_reserved()")


def test_segments_that_grow_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With expandable_segments free pages between tensors are cache: %gpumem free gives back just that."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with Kernel() as kernel:
        run_ok(kernel, "%load_ext ipygpumem")
        ready(kernel)
        run_ok(kernel, SPREAD)
        cache, came_back = given_back(kernel)
        assert cache == came_back > 250 * MIB
        assert ADVICE not in run_ok(kernel, "%gpumem status").reports("status")[0]


def test_many_gaps(kernel: Kernel) -> None:
    """Where much is lost in gaps, %gpumem status says how to have fewer; once torch does so, it says so no more."""
    ready(kernel)
    run_ok(kernel, "x = torch.empty(360 << 20, dtype=torch.uint8, device='cuda')\ndel x")
    run_ok(kernel, SPREAD)
    assert given_back(kernel)[1] < 20 * MIB
    assert ADVICE in run_ok(kernel, "%gpumem status").reports("status")[0]
    run_ok(
        kernel,
        "switch = getattr(torch._C, '_accelerator_setAllocatorSettings', torch.cuda.memory._set_allocator_settings)\n"
        "switch('expandable_segments:True')\ndel parts",
    )
    try:
        run_ok(kernel, "%gpumem free\n" + SPREAD)
        cache, came_back = given_back(kernel)
        assert cache == came_back > 250 * MIB
        assert ADVICE not in run_ok(kernel, "%gpumem status").reports("status")[0]
    finally:
        run_ok(kernel, "switch('expandable_segments:False')")


def test_a_deleted_graphs_pool(kernel: Kernel) -> None:
    """What a CUDA graph has kept for itself is a part of its own, and %gpumem free gives it back once it is deleted."""
    ready(kernel)
    run_ok(
        kernel,
        "graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n"
        "    x = torch.zeros(200 << 20, dtype=torch.uint8, device='cuda')\n    y = x.new_zeros(8)\n    del x",
    )
    assert size(look(kernel), "pools' cache") >= 200 * MIB
    run_ok(kernel, "%gpumem free")
    assert size(look(kernel), "pools' cache") >= 200 * MIB
    run_ok(kernel, "del graph, y")
    run_ok(kernel, "%gpumem free")
    assert size(look(kernel), "pools' cache") == 0


def test_other_processes(kernel: Kernel, card: Card, figure: Callable[[str], None]) -> None:
    """Each other process is a part with its id and name, where NVML tells; else there is one part with the reason."""
    ready(kernel)
    with other_process(512) as process:
        card.settle()
        found = look(kernel)
        listed = card.processes()
    others = [part for part in found.parts if part.name.startswith("process ")]
    if (
        process.pid in listed
        and listed[process.pid] is not None
        and kernel.value("__import__('os').getpid()") in listed
    ):
        (part,) = [part for part in others if part.name.startswith(f"process {process.pid}")]
        assert (part.size_bytes or 0) >= 512 * MIB
        assert size(found, "context and libraries") > 50 * MIB
        figure(f"{part.name} {format_bytes(part.size_bytes or 0)}")
    else:
        assert size(found, "unknown: context, libraries and other processes") >= 512 * MIB
        figure("NVML hides processes here, and the part says so")


def test_a_broken_context(kernel: Kernel, card: Card) -> None:
    """After a device-side assert %gpumem status still answers, and says that the context is broken."""
    ready(kernel)
    break_context(kernel)
    reply = kernel.run("%gpumem status")
    assert reply.status == "ok", reply.traceback
    (status,) = reply.reports("status")
    assert "context is broken" in status
    assert "restart the kernel" in status


def test_looking_changes_nothing(kernel: Kernel, card: Card) -> None:
    """%gpumem status leaves torch's counters as they are, and takes no memory on the device."""
    ready(kernel)
    run_ok(kernel, "kept = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    counters = (
        "[torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated(), "
        "torch.cuda.memory_stats()['allocation.all.allocated']]"
    )
    before = kernel.value(counters)
    run_ok(kernel, "%gpumem status")
    assert kernel.value(counters) == before
