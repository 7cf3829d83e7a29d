"""The parts of a device's memory, in chosen and in 200 random states, against torch's counters and
NVML.
"""

import re
from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.inventory.devices.breakdown import Reconciliation
from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import DEVICE, ROUNDING, Card, cases, other_process, ready
from tests.steps import SharedKernel, run_quietly

LOOK = """
import gc as _gc
from ipygpumem.shell.app import current_app
from ipygpumem.inventory.devices.findings import reconcile as _reconcile, storages_of as _storages
def _look():
    kinds = ((t, "parameter" if type(t) is torch.nn.Parameter else "other") for t in _gc.get_objects()
             if type(t) in (torch.Tensor, torch.nn.Parameter))
    found = _reconcile(lambda: current_app().context.meter.now(detail=True), lambda: _storages(kinds))
    assert not found.failures, found.failures
    return [item.to_dict() for item in found.reconciliations]
"""  # noqa: E501


@pytest.fixture
def kernel(shared_gpu_kernel: SharedKernel) -> Kernel:
    """A kernel that has just used the device for the first time, or was tidied."""
    return shared_gpu_kernel.get()


def look(kernel: Kernel, device: str = DEVICE) -> Reconciliation:
    """Return the parts of a device; they sum exactly."""
    run_quietly(kernel, LOOK)
    memory = next(
        item
        for item in map(Reconciliation.from_dict, kernel.value("_look()"))
        if item.device == device
    )
    known = [part.size_bytes for part in memory.parts if part.size_bytes is not None]
    assert sum(known) == memory.total_bytes
    assert min(known) >= 0
    return memory


def size(memory: Reconciliation, name: str) -> int:
    return sum(part.size_bytes or 0 for part in memory.parts if part.name.startswith(name))


def test_memory_kept_by_autograd_has_its_own_part(kernel: Kernel, card: Card) -> None:
    """Memory that only a graph holds is a part of its own, and no tensor's."""
    run_quietly(
        kernel, "x = torch.ones(16 << 20, device='cuda', requires_grad=True)\nloss = x.exp().sum()"
    )
    memory = look(kernel)
    assert size(memory, "tensors: other") >= 64 * MIB
    # The result of exp(), in a segment that may be larger.
    assert 64 * MIB <= size(memory, "autograd or C++ code") < 80 * MIB
    run_quietly(kernel, "loss = loss.item()")
    assert size(look(kernel), "autograd or C++ code") < 16 * MIB


def test_workspaces_of_cublas_have_their_own_part(kernel: Kernel) -> None:
    """Memory that a matrix product leaves in the allocator is reported as possibly cuBLAS's, and
    %gpumem free takes it.
    """
    run_quietly(kernel, "x = torch.ones(512, 512, device='cuda')\ny = x @ x")
    (part,) = [part for part in look(kernel).parts if part.name == "autograd or C++ code"]
    # A workspace of cuBLAS has 4 MiB at least.
    assert (part.size_bytes or 0) >= 4 * MIB
    assert "cuBLAS" in part.advice
    run_quietly(kernel, "%gpumem free")
    assert size(look(kernel), "autograd or C++ code") < MIB


SPREAD = """
parts = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(12)]
del parts[1:-1]
"""
ADVICE = "ALLOC_CONF=expandable_segments:True"


def given_back(kernel: Kernel) -> tuple[int, int]:
    """Return the size that the parts called the allocator's cache, and the size that %gpumem free
    gives back.
    """
    cache, before = (
        size(look(kernel), "allocator cache"),
        kernel.value("torch.cuda.memory_reserved()"),
    )
    run_quietly(kernel, "%gpumem free")
    return cache, before - kernel.value("torch.cuda.memory_reserved()")


def test_many_gaps(kernel: Kernel) -> None:
    """If much is lost in gaps, %gpumem status says how to have fewer; once torch does so, the
    advice is gone.
    """
    run_quietly(
        kernel, "x = torch.empty(360 << 20, dtype=torch.uint8, device='cuda')\ndel x", SPREAD
    )
    # Nearly nothing: gaps between tensors cannot be given back.
    assert given_back(kernel)[1] < 20 * MIB
    assert ADVICE in run_quietly(kernel, "%gpumem status").reports("status")[0]
    run_quietly(
        kernel,
        """
        older = torch.cuda.memory._set_allocator_settings
        switch = getattr(torch._C, '_accelerator_setAllocatorSettings', older)
        switch('expandable_segments:True')
        del parts
        """,
    )
    try:
        run_quietly(kernel, "%gpumem free\n" + SPREAD)
        cache, came_back = given_back(kernel)
        assert cache == came_back > 250 * MIB
        assert ADVICE not in run_quietly(kernel, "%gpumem status").reports("status")[0]
    finally:
        run_quietly(kernel, "switch('expandable_segments:False')")


def test_a_deleted_graphs_pool(kernel: Kernel) -> None:
    """Memory that a CUDA graph has kept for itself is a part of its own, and %gpumem free gives it
    back once it is deleted.
    """
    run_quietly(
        kernel,
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = torch.zeros(200 << 20, dtype=torch.uint8, device='cuda')
            y = x.new_zeros(8)
            del x
        """,
    )
    assert size(look(kernel), "cache of private pools") >= 200 * MIB
    run_quietly(kernel, "%gpumem free")
    assert size(look(kernel), "cache of private pools") >= 200 * MIB
    run_quietly(kernel, "del graph, y", "%gpumem free")
    assert size(look(kernel), "cache of private pools") == 0


def test_status_changes_no_memory_of_the_card(kernel: Kernel, card: Card) -> None:
    """%gpumem status and an inventory leave torch's counters as they are, and take no memory on the
    device.
    """
    run_quietly(kernel, "kept = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')")
    counters = (
        "[torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), "
        "torch.cuda.max_memory_allocated(), "
        "torch.cuda.memory_stats()['allocation.all.allocated']]"
    )
    before = kernel.value(counters)
    run_quietly(kernel, "%gpumem status", "import ipygpumem\nlen(ipygpumem.tensors().tensors)")
    assert kernel.value(counters) == before


STATES = {"": 100, "expandable_segments:True": 50, "backend:cudaMallocAsync": 50}
"""Number of cases for each way in which torch's allocator can be set up."""
MANAGED = {"live", "allocator", "context", "process", "free"}
BLOCKS = MANAGED - {"live"} | {
    "tensors:",
    "autograd",
    "rounding",
    "waiting",
    "fragmentation",
    "cache",
}
"""Words with which the parts begin that are not empty in all states: the allocator's blocks tell
more.
"""


@pytest.mark.parametrize("allocator", STATES)
def test_the_parts_add_up_in_every_state(
    allocator: str,
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    """In 200 random states (gaps, streams, graphs, pinned, other processes) the parts add up to
    NVML's figure.
    """
    machine(gib=8)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    with Kernel() as kernel:
        run_quietly(kernel, "%load_ext ipygpumem")
        ready(kernel)
        run_quietly(kernel, "from tests.gpu.states import States\nstates = States(seed=15)")
        half = cases(STATES[allocator]) // 2
        wrong = kernel.value(f"states.run({half})")
        with other_process(700):
            wrong += kernel.value(f"states.run({half})")
        assert wrong == []
        assert kernel.value("states.seen") >= (MANAGED if "Async" in allocator else BLOCKS)
    figure(f"{2 * half} states with the allocator {allocator or 'as it is'}: no byte off")


STAND_IN = """
import ctypes, sys, types
class Pool:
    def __init__(self):
        self.blocks, self.idle = {}, {}
    def take(self, size):
        at = ctypes.c_void_p()
        assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)) == 0
        self.blocks[at.value] = size
    def let_go(self):
        self.idle.update(self.blocks)
        self.blocks.clear()
    def used_bytes(self):
        return sum(self.blocks.values())
    def total_bytes(self):
        return self.used_bytes() + sum(self.idle.values())
    def get_limit(self):
        return 0
    def free_all_blocks(self):
        for at in self.idle:
            assert ctypes.CDLL("libcudart.so.13").cudaFree(ctypes.c_void_p(at)) == 0
        self.idle.clear()
pool, pinned = Pool(), types.SimpleNamespace(free_all_blocks=lambda: None)
cupy = types.ModuleType("cupy")
cupy.get_default_memory_pool, cupy.get_default_pinned_memory_pool = lambda: pool, lambda: pinned
cupy.cuda = types.SimpleNamespace(
    is_available=lambda: True, runtime=types.SimpleNamespace(getDevice=lambda: 0, streamIsCapturing=lambda stream: 0),
    get_current_stream=lambda: types.SimpleNamespace(ptr=0, is_capturing=lambda: False),
)
sys.modules["cupy"] = cupy
"""  # noqa: E501


@pytest.mark.simulated
def test_a_pool_next_to_torch_has_parts_that_add_up(
    kernel: Kernel, card: Card, figure: Callable[[str], None]
) -> None:
    before = size(look(kernel), "context")
    run_quietly(kernel, STAND_IN)
    reply = run_quietly(
        kernel, "x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\npool.take(256 << 20)"
    )
    (line,) = reply.reports("cell")
    assert re.search(r"cuda:0 \+64 MiB", line)
    assert re.search(r"cupy:0 \+256 MiB", line), line
    memory = look(kernel)
    # What the cell has taken from the pool and from torch.
    assert size(memory, "CuPy: in use") == 256 * MIB
    assert size(memory, "tensors: other") >= 64 * MIB
    assert abs(size(memory, "context") - before) <= ROUNDING, (
        "the pool is not counted as the context's"
    )

    # The pool keeps what its user has let go of, until it is emptied.
    run_quietly(kernel, "pool.let_go()")
    assert (size(look(kernel), "CuPy: in use"), size(look(kernel), "CuPy: pool's rest")) == (
        0,
        256 * MIB,
    )
    free = card.memory.free
    run_quietly(kernel, "%gpumem free")
    assert size(look(kernel), "CuPy") == 0
    assert card.memory.free - free >= 256 * MIB - ROUNDING
    figure(
        ", ".join(
            f"{part.name} {format_bytes(part.size_bytes or 0)}"
            for part in memory.parts
            if part.size_bytes
        )
    )
    run_quietly(kernel, "del sys.modules['cupy']")
