"""Helpers on a device."""

from __future__ import annotations

import pytest

from tests.gpu.support import ready, run_ok
from tests.kernel import Kernel


def test_asking_for_memory(bare_kernel: Kernel) -> None:
    """`memory("cuda:0")` answers before torch uses CUDA, and makes no context. Then what it says is torch's own count,
    and free memory with the cache is larger by what the cache has."""
    run_ok(bare_kernel, "import torch, ipygpumem\nm = ipygpumem.memory('cuda:0')")
    assert bare_kernel.value("torch.cuda.is_initialized()") is False
    assert bare_kernel.value("m.free_bytes + m.used_bytes == m.total_bytes > 0, m.note") == (True, "")
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        "x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); del x",
        "m = ipygpumem.memory(torch.device('cuda'))",
    )
    assert bare_kernel.value("m.device, m.allocated_bytes, m.reserved_bytes") == bare_kernel.value(
        "'cuda:0', torch.cuda.memory_allocated(), torch.cuda.memory_reserved()"
    )
    assert bare_kernel.value("m.free_with_cache_bytes - m.free_bytes") >= 64 << 20
    assert bare_kernel.value("m.total_bytes > m.used_bytes >= m.reserved_bytes") is True


_FITS = (
    "import torch, ipygpumem\n"
    "def fits(n):\n"
    "    try: torch.empty(n, dtype=torch.uint8, device='cuda:0')\n"
    "    except torch.OutOfMemoryError: return False\n"
    "    finally: torch.cuda.empty_cache()\n"
    "    return True\n"
)


@pytest.mark.parametrize("mib", [20, 64, 3000])
def test_exactly_so_much_stays_free(bare_kernel: Kernel, mib: int) -> None:
    """Under `leave_free(n)` a request of n bytes fits, and one of n and two blocks of 2 MiB does not; afterwards it
    fits again."""
    ready(bare_kernel)
    run_ok(bare_kernel, f"{_FITS}n, more = {mib} << 20, {mib + 4} << 20")
    run_ok(
        bare_kernel,
        "cached = torch.empty(256 << 20, dtype=torch.uint8, device='cuda:0'); del cached\n"
        "with ipygpumem.leave_free(n) as filler:\n    inside = fits(n), fits(more)\n"
        "after = fits(more)",
    )
    assert bare_kernel.value("(inside, after)") == ((True, False), True)


def test_what_stays_free_is_what_torchs_own_limit_leaves(bare_kernel: Kernel) -> None:
    """Where the user has given torch a share of the card, `leave_free` leaves so much of the share, which it does not
    change."""
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        f"{_FITS}torch.cuda.set_per_process_memory_fraction(0.25, 0)\nask = torch.cuda.get_device_properties",
    )
    run_ok(bare_kernel, "with ipygpumem.leave_free('512 MiB'):\n    inside = fits(512 << 20), fits(516 << 20)")
    run_ok(bare_kernel, "total = ask(0).total_memory\nafter = fits(total // 5), fits(total // 3)")
    assert bare_kernel.value("(inside, after)") == ((True, False), (True, False))


def test_fillers_nest_and_give_back(bare_kernel: Kernel) -> None:
    """A filler inside another leaves less; each gives back what it held at its end, after an error, too."""
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        f"{_FITS}before = torch.cuda.memory_allocated(0)\n"
        "with ipygpumem.leave_free('1 GiB'):\n"
        "    with ipygpumem.leave_free('64 MiB'):\n        inner = fits(64 << 20), fits(68 << 20)\n"
        "    outer = fits(1 << 30), fits((1 << 30) + (4 << 20))\n"
        "with ipygpumem.allocate(12345) as held:\n    size = held.size_bytes, torch.cuda.memory_allocated(0) - before\n"
        "try:\n    with ipygpumem.allocate('1 GiB'):\n        1 / 0\nexcept ZeroDivisionError: pass\n"
        "try:\n    with ipygpumem.leave_free('9 TiB'):\n        pass\nexcept ipygpumem.errors.DeviceError as error:\n"
        "    said = str(error)\n"
        "after = torch.cuda.memory_allocated(0) - before",
    )
    assert bare_kernel.value("(inner, outer, size, after)") == ((True, False), (True, False), (12345, 12800), 0)
    assert bare_kernel.value("said").endswith(": 9.00 TiB cannot stay free")
