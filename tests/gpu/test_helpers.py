"""Helpers on a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.support import ready, run_ok
from tests.kernel import Kernel


def test_asking_for_memory_makes_no_context(bare_kernel: Kernel) -> None:
    """`memory("cuda:0")` and `most_free_device()` answer before torch uses CUDA, and it does not use it afterwards."""
    run_ok(bare_kernel, "import torch, ipygpumem\nm = ipygpumem.memory('cuda:0'); best = ipygpumem.most_free_device()")
    assert bare_kernel.value("torch.cuda.is_initialized()") is False
    assert bare_kernel.value("m.free_bytes + m.used_bytes == m.total_bytes > 0, m.note") == (True, "")
    assert bare_kernel.value("best").startswith("cuda:")


def test_memory_knows_the_cache(bare_kernel: Kernel) -> None:
    """What `memory` says is torch's own count, and free memory with the cache is larger by what the cache has."""
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        "import ipygpumem\nx = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); del x\n"
        "m = ipygpumem.memory(torch.device('cuda'))",
    )
    assert bare_kernel.value("m.device, m.allocated_bytes, m.reserved_bytes") == bare_kernel.value(
        "'cuda:0', torch.cuda.memory_allocated(), torch.cuda.memory_reserved()"
    )
    assert bare_kernel.value("m.free_with_cache_bytes - m.free_bytes") >= 64 << 20
    assert bare_kernel.value("m.total_bytes > m.used_bytes >= m.reserved_bytes") is True


@pytest.mark.simulated
def test_the_most_free_of_two_cards_is_found_with_and_without_a_context(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two cards `most_free_device()` names the one without memory in use, in the order of `CUDA_VISIBLE_DEVICES`."""
    machine(cards=2, gib=8)
    with Kernel() as busy:
        run_ok(busy, "import torch\nx = torch.empty(1 << 30, dtype=torch.uint8, device='cuda:0')")
        for visible, best in (("0,1", "cuda:1"), ("1,0", "cuda:0")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            with Kernel() as kernel:
                run_ok(kernel, "import torch, ipygpumem")
                assert kernel.value("ipygpumem.most_free_device()") == best
                run_ok(kernel, f"torch.ones(1, device={best!r})")
                assert kernel.value("ipygpumem.most_free_device()") == best
