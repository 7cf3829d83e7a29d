"""Budgets, enforced by torch's allocator on a real device."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ipygpumem.units import format_bytes
from tests.gpu.support import allocated, recovery, run_ok
from tests.kernel import Kernel


def take(gib: float) -> str:
    return f"x = torch.empty(int({gib} * 2**30), dtype=torch.uint8, device='cuda')"


def test_what_is_above_the_budget_is_refused(gpu_kernel: Kernel) -> None:
    """An experiment with --budget gpu=1GiB runs out of memory at 2 GiB, not at half a GiB; without it the cell runs."""
    run_ok(gpu_kernel, "%gpumem free")
    reply = gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(2)}")
    assert reply.error == "OutOfMemoryError"
    refusal = "the budget of experiment small (1.00 GiB) refused 2.00 GiB of cuda:0, although"
    assert refusal in recovery(reply)
    assert refusal in reply.reports("experiment")[0]
    run_ok(gpu_kernel, f"%%experiment fits --budget gpu=1GiB\n{take(0.5)}")
    record = gpu_kernel.value("__import__('ipygpumem').experiments()[-1].budget")
    assert 2**30 - 1 <= record["cuda:0"] <= 2**30
    run_ok(gpu_kernel, f"{take(2)}; del x")


def test_the_budget_of_a_block_is_named(gpu_kernel: Kernel) -> None:
    """After an OOM under a budget the report names the budget, and a limit of the user's own as torch's."""
    run_ok(gpu_kernel, "import ipygpumem\n%gpumem free")
    reply = gpu_kernel.run(f"with ipygpumem.budget(gpu='1GiB'):\n    {take(2)}")
    assert "the budget of the with block (1.00 GiB) refused 2.00 GiB of cuda:0, although" in recovery(reply)
    run_ok(gpu_kernel, "torch.cuda.set_per_process_memory_fraction(1 / 8)")
    try:
        total = gpu_kernel.value("torch.cuda.get_device_properties(0).total_memory")
        reply = gpu_kernel.run(take(total / 4 / 2**30))
        said = f"the limit of {format_bytes(total // 8)} on torch's allocator refused"
        assert said in recovery(reply)
    finally:
        run_ok(gpu_kernel, "torch.cuda.set_per_process_memory_fraction(1.0)")
    assert "refused" not in recovery(gpu_kernel.run(take(total / 2**29)))


def test_the_earlier_limit_is_back(gpu_kernel: Kernel) -> None:
    """After the block the limit that the user had set himself is in force again."""
    run_ok(gpu_kernel, "%gpumem free")
    run_ok(gpu_kernel, "import ipygpumem\ntotal = torch.cuda.get_device_properties(0).total_memory")
    run_ok(gpu_kernel, "torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)")
    try:
        reply = gpu_kernel.run(f"with ipygpumem.budget(gpu='1GiB'):\n    {take(2)}")
        assert reply.error == "OutOfMemoryError"
        if gpu_kernel.value("hasattr(torch.cuda, 'get_per_process_memory_fraction')"):
            run_ok(gpu_kernel, f"{take(2)}; del x")
            assert gpu_kernel.run(take(5)).error == "OutOfMemoryError"
    finally:
        run_ok(gpu_kernel, "torch.cuda.set_per_process_memory_fraction(1.0)")
    assert allocated(gpu_kernel) < 2**30


def test_what_the_allocator_has_cached_is_no_way_around(gpu_kernel: Kernel) -> None:
    """A budget of 1 GiB refuses 1.5 GiB also where the allocator has cached more than that, which it gives back."""
    run_ok(gpu_kernel, f"%gpumem free\n{take(3)}; del x")
    assert gpu_kernel.value("torch.cuda.memory_reserved()") >= 3 << 30
    assert gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(1.5)}").error == "OutOfMemoryError"
    assert gpu_kernel.value("torch.cuda.memory_reserved()") < 1 << 30
    run_ok(gpu_kernel, f"{take(1.5)}; del x")


def test_live_tensors_above_the_budget_are_said(gpu_kernel: Kernel) -> None:
    """Where live tensors hold more than the budget already, the report says so, and new memory is refused."""
    run_ok(gpu_kernel, f"%gpumem free\n{take(2)}")
    reply = gpu_kernel.run("%%experiment small --budget gpu=1GiB\ny = torch.empty(1 << 28, device='cuda')")
    assert reply.error == "OutOfMemoryError"
    (report,) = reply.reports("experiment")
    assert "2.00 GiB of cuda:0 stay reserved, 2.00 GiB of them by live tensors: more than the 1.00 GiB" in report
    reply = gpu_kernel.run("import ipygpumem\nwith ipygpumem.budget(gpu='1GiB'):\n    pass")
    assert "2.00 GiB of them by live tensors" in "".join(reply.reports("note"))
    started = run_ok(gpu_kernel, "%experiment start many --budget gpu=1GiB")
    assert "2.00 GiB of them by live tensors" in "".join(started.reports("note"))
    run_ok(gpu_kernel, "%experiment end\ndel x")


def test_the_pool_of_a_graph_counts(gpu_kernel: Kernel) -> None:
    """What a CUDA graph keeps for itself counts against a budget, is said, and serves no other tensor."""
    run_ok(
        gpu_kernel,
        f"%gpumem free\ngraph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n    {take(2)}\n"
        "    y = torch.zeros(9, device='cuda')\n    del x",
    )
    reply = gpu_kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(0.5)}")
    assert reply.error == "OutOfMemoryError"
    (report,) = reply.reports("experiment")
    assert re.search(r"2\.0\d GiB of cuda:0 stay reserved", report)
    run_ok(gpu_kernel, "del graph, y")
    run_ok(gpu_kernel, f"%%experiment small --budget gpu=1GiB\n{take(0.5)}")


def test_cuda_malloc_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the backend cudaMallocAsync a budget refuses live tensors above it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with Kernel() as kernel:
        run_ok(kernel, f"%load_ext ipygpumem\nimport torch\n{take(2)}; del x")
        run_ok(kernel, f"%%experiment small --budget gpu=1GiB\n{take(0.5)}")
        reply = kernel.run(f"%%experiment small --budget gpu=1GiB\n{take(1.5)}")
        assert reply.error == "OutOfMemoryError"


def test_a_budget_inside_another_empties_the_cache_once_more(gpu_kernel: Kernel) -> None:
    """A budget of 1 GiB inside one of 3 GiB is enforced too, and after it the outer one is in force again."""
    run_ok(gpu_kernel, f"%gpumem free\nimport ipygpumem\n{take(4)}; del x")
    inner = f"with ipygpumem.budget(gpu='1GiB'):\n        try: {take(1.5)}\n        except MemoryError_: no = 1"
    outer = f"with ipygpumem.budget(gpu='3GiB'):\n    {take(2)}; del x\n    {inner}\n    {take(2.5)}; del x"
    run_ok(gpu_kernel, f"no, MemoryError_ = 0, torch.cuda.OutOfMemoryError\n{outer}")
    assert gpu_kernel.value("no") == 1
    assert gpu_kernel.run(f"with ipygpumem.budget(gpu='3GiB'):\n    {take(3.5)}").error == "OutOfMemoryError"
    run_ok(gpu_kernel, f"{take(4)}; del x")


@pytest.mark.simulated
def test_a_budget_of_the_second_card(machine: Callable[..., None]) -> None:
    """A budget for cuda:1 alone limits that one, and the current device stays what it was."""
    machine(cards=2, gib=8)
    with Kernel() as kernel:
        run_ok(kernel, "%load_ext ipygpumem\nimport torch, ipygpumem")
        run_ok(kernel, f"for gpu in 'cuda:0', 'cuda:1': {take(3).replace(chr(39) + 'cuda' + chr(39), 'gpu')}\ndel x")
        start = "%%experiment small --budget cuda:1=1GiB\n"
        run_ok(kernel, f"{start}{take(3)}\nassert torch.cuda.current_device() == 0")
        reply = kernel.run(start + take(1.5).replace("'cuda'", "'cuda:1'"))
        assert reply.error == "OutOfMemoryError"


@pytest.mark.simulated
def test_a_card_that_is_not_used_is_left_alone(machine: Callable[..., None]) -> None:
    """A budget for gpu makes no context on a second card that this process does not use."""
    machine(cards=2, gib=8)
    with Kernel() as kernel:
        run_ok(kernel, f"%load_ext ipygpumem\nimport torch, pynvml\npynvml.nvmlInit()\n{take(2)}; del x")
        run_ok(kernel, "%%experiment small --budget gpu=1GiB\nx = torch.ones(9, device='cuda')")
        users = "len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex({})))"
        assert kernel.value("torch.cuda.get_per_process_memory_fraction(1)") == 1.0
        assert not kernel.value("torch._C._cuda_hasPrimaryContext(1)")
        assert [kernel.value(users.format(index)) for index in (0, 1)] == [1, 0]
