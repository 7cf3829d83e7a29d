"""Budgets, and memory that is held or left free, by torch's allocator on a real device."""

import re
from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from tests.gpu.support import ready, recovery
from tests.steps import run_quietly


def take(gib: float) -> str:
    return f"x = torch.empty(int({gib} * 2**30), dtype=torch.uint8, device='cuda')"


def test_allocations_above_the_budget_are_refused(gpu_kernel: Kernel) -> None:
    """An experiment with --budget gpu=1GiB runs out of memory at 2 GiB, not at half a GiB; without
    it the cell runs.
    """
    run_quietly(gpu_kernel, "%gpumem free")
    reply = gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(2)}")
    assert reply.error == "OutOfMemoryError"
    refusal = "the budget of experiment small (1.00 GiB) refused 2.00 GiB of cuda:0, although"
    assert refusal in recovery(reply)
    assert refusal in reply.reports("experiment")[0]
    run_quietly(gpu_kernel, f"%%experiment fits --budget gpu=1GiB\n{take(0.5)}")
    record = gpu_kernel.value("__import__('ipygpumem').experiments()[-1].budget")
    # A limit is a fraction of the card, which may be rounded down by a byte.
    assert 2**30 - 1 <= record["cuda:0"] <= 2**30
    run_quietly(gpu_kernel, f"{take(2)}; del x")


def test_cached_memory_counts_against_the_budget(gpu_kernel: Kernel) -> None:
    """A budget of 1 GiB refuses 1.5 GiB also where the allocator has cached more than that, which
    it gives back.
    """
    run_quietly(gpu_kernel, f"%gpumem free\n{take(3)}; del x")
    # The allocator has cached all of the deleted tensor.
    assert gpu_kernel.value("torch.cuda.memory_reserved()") >= 3 << 30
    assert (
        gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(1.5)}").error
        == "OutOfMemoryError"
    )
    assert gpu_kernel.value("torch.cuda.memory_reserved()") < 1 << 30
    run_quietly(gpu_kernel, f"{take(1.5)}; del x")


def test_the_pool_of_a_graph_counts(gpu_kernel: Kernel) -> None:
    """The memory that a CUDA graph keeps for itself counts against a budget, is said, and serves no
    other tensor.
    """
    run_quietly(
        gpu_kernel,
        f"""
        %gpumem free
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            {take(2)}
            y = torch.zeros(9, device='cuda')
            del x
        """,
    )
    reply = gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(0.5)}")
    assert reply.error == "OutOfMemoryError"
    (report,) = reply.reports("experiment")
    assert re.search(r"2\.0\d GiB of cuda:0 stay reserved", report)
    run_quietly(gpu_kernel, "del graph, y", f"%%experiment small --budget gpu=1GiB\n{take(0.5)}")


@pytest.mark.simulated
def test_a_budget_of_the_second_card(machine: Callable[..., None]) -> None:
    """A budget for cuda:1 alone limits that one, and the current device stays what it was."""
    machine(cards=2, gib=8)
    with Kernel() as kernel:
        run_quietly(kernel, "%load_ext ipygpumem\nimport torch, ipygpumem")
        run_quietly(
            kernel,
            f"for gpu in 'cuda:0', 'cuda:1': {take(3).replace(chr(39) + 'cuda' + chr(39), 'gpu')}\n"
            f"del x",
        )
        start = "%%experiment small --budget cuda:1=1GiB\n"
        run_quietly(kernel, f"{start}{take(3)}\nassert torch.cuda.current_device() == 0")
        reply = kernel.run(start + take(1.5).replace("'cuda'", "'cuda:1'"))
        assert reply.error == "OutOfMemoryError"


@pytest.mark.simulated
def test_a_card_that_is_not_used_is_left_alone(machine: Callable[..., None]) -> None:
    """A budget for gpu makes no context on a second card that this process does not use."""
    machine(cards=2, gib=8)
    with Kernel() as kernel:
        run_quietly(
            kernel,
            f"""
            %load_ext ipygpumem
            import torch, pynvml
            pynvml.nvmlInit()
            {take(2)}; del x
            """,
        )
        run_quietly(
            kernel, "%%experiment small --budget gpu=1GiB\nx = torch.ones(9, device='cuda')"
        )
        users = "len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex({})))"  # noqa: E501
        assert kernel.value("torch.cuda.get_per_process_memory_fraction(1)") == 1.0
        assert not kernel.value("torch._C._cuda_hasPrimaryContext(1)")
        assert [kernel.value(users.format(index)) for index in (0, 1)] == [1, 0]


def test_memory_reads_the_card_without_making_a_context(bare_kernel: Kernel) -> None:
    """`memory("cuda:0")` answers before torch uses CUDA, and makes no context. Then what it says is
    torch's own count, and free memory with the cache is larger by what the cache has.
    """
    run_quietly(bare_kernel, "import torch, ipygpumem\nm = ipygpumem.memory('cuda:0')")
    assert bare_kernel.value("torch.cuda.is_initialized()") is False
    assert bare_kernel.value("m.free_bytes + m.used_bytes == m.total_bytes > 0, m.note") == (
        True,
        "",
    )
    ready(bare_kernel)
    run_quietly(bare_kernel, f"{take(1 / 16)}; del x", "m = ipygpumem.memory(torch.device('cuda'))")
    counted = bare_kernel.value(
        "'cuda:0', torch.cuda.memory_allocated(), torch.cuda.memory_reserved()"
    )
    assert bare_kernel.value("m.device, m.allocated_bytes, m.reserved_bytes") == counted
    # The cache has at least one freed tensor of 64 MiB.
    assert bare_kernel.value("m.free_with_cache_bytes - m.free_bytes") >= 64 << 20
    assert bare_kernel.value("m.total_bytes > m.used_bytes >= m.reserved_bytes") is True


_FITS = """
import torch, ipygpumem
def fits(n):
    try: torch.empty(n, dtype=torch.uint8, device='cuda:0')
    except torch.OutOfMemoryError: return False
    finally: torch.cuda.empty_cache()
    return True
"""


@pytest.mark.parametrize("mib", [20, 64, 3000])
def test_leave_free_leaves_exactly_the_requested_size(bare_kernel: Kernel, mib: int) -> None:
    """Under `leave_free(n)` a request of n bytes fits, and one of n and two blocks of 2 MiB does
    not; afterwards it fits again.
    """
    ready(bare_kernel)
    run_quietly(bare_kernel, f"{_FITS}n, more = {mib} << 20, {mib + 4} << 20")
    run_quietly(
        bare_kernel,
        """
        cached = torch.empty(256 << 20, dtype=torch.uint8, device='cuda:0'); del cached
        with ipygpumem.leave_free(n) as filler:
            inside = fits(n), fits(more)
        after = fits(more)
        """,
    )
    assert bare_kernel.value("(inside, after)") == ((True, False), True)


@pytest.mark.simulated
def test_memory_of_the_drivers_tables_is_not_free(machine: Callable[..., None]) -> None:
    """If the driver takes memory of its own for each block, so much less is reserved, and a request
    of n fits.
    """
    machine(gib=24, page_tables=2)
    with Kernel() as kernel:
        ready(kernel)
        run_quietly(
            kernel,
            f"{_FITS}n = 64 << 20\nwith ipygpumem.leave_free(n): inside = fits(n), fits(n + (4 << "
            f"20))",
        )
        assert kernel.value("inside") == (True, False)


def test_leave_free_respects_torchs_own_limit(bare_kernel: Kernel) -> None:
    """If the user has given torch a share of the card, `leave_free` leaves so much of the share,
    which it does not change.
    """
    ready(bare_kernel)
    run_quietly(bare_kernel, f"{_FITS}torch.cuda.set_per_process_memory_fraction(0.25, 0)")
    run_quietly(bare_kernel, "total = torch.cuda.get_device_properties(0).total_memory")
    run_quietly(
        bare_kernel,
        "with ipygpumem.leave_free('512 MiB'):\n    inside = fits(512 << 20), fits(516 << 20)",
    )
    run_quietly(bare_kernel, "after = fits(total // 5), fits(total // 3)")
    assert bare_kernel.value("(inside, after)") == ((True, False), (True, False))


def test_fillers_nest_and_give_back(bare_kernel: Kernel) -> None:
    """A filler inside another leaves less; each gives back what it held at its end, after an error,
    too.
    """
    ready(bare_kernel)
    run_quietly(
        bare_kernel,
        _FITS,
        """
        before = torch.cuda.memory_allocated(0)
        with ipygpumem.leave_free('1 GiB'):
            with ipygpumem.leave_free('64 MiB'):
                inner = fits(64 << 20), fits(68 << 20)
            outer = fits(1 << 30), fits((1 << 30) + (4 << 20))
        with ipygpumem.allocate(12345) as held:
            size = held.size_bytes, torch.cuda.memory_allocated(0) - before
        try:
            with ipygpumem.allocate('1 GiB'):
                1 / 0
        except ZeroDivisionError: pass
        try:
            with ipygpumem.leave_free('9 TiB'):
                pass
        except ipygpumem.errors.DeviceError as error:
            said = str(error)
        after = torch.cuda.memory_allocated(0) - before
        """,
    )
    # What is left free fits, a little more does not.
    assert bare_kernel.value("inner") == (True, False)
    assert bare_kernel.value("outer") == (True, False)
    # The allocator takes multiples of 512 bytes.
    assert bare_kernel.value("size") == (12345, 25 * 512)
    assert bare_kernel.value("after") == 0
    assert bare_kernel.value("said").endswith(": 9.00 TiB cannot stay free")
