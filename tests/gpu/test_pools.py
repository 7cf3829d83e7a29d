"""Another library beside torch on one card: its pool's memory is the driver's own, and the parts add up.

A stand-in, that has CuPy's functions and takes real memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import ROUNDING, Card, ready, run_ok
from tests.gpu.test_reconcile import look, size
from tests.kernel import Kernel

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
"""


@pytest.mark.simulated
def test_a_pool_beside_torch_has_its_parts_and_all_add_up(
    kernel: Kernel, card: Card, figure: Callable[[str], None]
) -> None:
    ready(kernel)
    before = size(look(kernel), "context")
    run_ok(kernel, STAND_IN)
    reply = run_ok(kernel, "x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\npool.take(256 << 20)")
    (line,) = reply.reports("cell")
    assert re.search(r"cuda:0 \+64 MiB", line)
    assert re.search(r"cupy:0 \+256 MiB", line), line
    found = look(kernel)
    assert size(found, "CuPy: in use") == 256 * MIB
    assert size(found, "tensors: other") >= 64 * MIB
    assert abs(size(found, "context") - before) <= ROUNDING, "the pool is not counted as the context's"
    run_ok(kernel, "pool.let_go()")
    assert (size(look(kernel), "CuPy: in use"), size(look(kernel), "CuPy: pool's rest")) == (0, 256 * MIB)
    free = card.free_bytes
    run_ok(kernel, "%gpumem free")
    assert size(look(kernel), "CuPy") == 0
    assert card.free_bytes - free >= 256 * MIB - ROUNDING
    figure(", ".join(f"{part.name} {format_bytes(part.size_bytes or 0)}" for part in found.parts if part.size_bytes))
