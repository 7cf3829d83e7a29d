"""Cells in a child process, which can use a card only if the kernel has not."""

import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.gpu.support import started_kernel
from tests.steps import plain, run_failing, run_quietly

REFUSED = "cuda is in use in this kernel, and a forked child process cannot use it"


@pytest.mark.hardware("an import of torch that does not yet use the driver")
def test_an_isolated_cell_uses_a_card_unused_by_the_kernel() -> None:
    """Its context and its memory go with it."""
    with started_kernel() as kernel:
        run_quietly(kernel, "import torch")
        cell = textwrap.dedent(
            """\
            %%isolate --keep size
            large = torch.ones(2**20, device='cuda')
            size = torch.cuda.memory_allocated()"""
        )
        run_quietly(kernel, cell)
        assert kernel.value("(size, torch.cuda.is_initialized())") == (4 << 20, False)


@pytest.mark.parametrize(
    "code",
    [
        "small + 1",
        "use()",
        "parts['list'][0]",
        "torch.cuda.synchronize()",
        "torch.ones(1, device='cuda:0')",
        "where",
    ],
)
def test_a_cell_that_needs_a_used_card_is_refused(code: str, gpu_kernel: Kernel) -> None:
    names = (
        "small = torch.ones(8, device='cuda'); parts = {'list': [small]}; where = "
        "torch.device('cuda', 0)\n"
    )
    run_quietly(gpu_kernel, f"{names}def use(): return small + 1")
    assert REFUSED in run_failing(gpu_kernel, f"%%isolate\n{code}", None).stderr


def test_other_cells_run_next_to_a_used_card(gpu_kernel: Kernel) -> None:
    """Nothing of ours asks the driver there; torch explains a use that was not seen before."""
    run_quietly(
        gpu_kernel,
        "host = torch.ones(8); hidden = ['small'] ; small = torch.ones(8, device='cuda')",
    )
    reply = run_quietly(gpu_kernel, "%%isolate\nhost.sum()")
    assert (reply.result, reply.stderr) == ("tensor(8.)", "")
    reply = run_failing(gpu_kernel, "%%isolate\nglobals()[hidden[0]] + 1")
    assert "CUDA" in plain(reply.traceback)
    assert reply.error in ("RuntimeError", "AcceleratorError")
    run_quietly(gpu_kernel, "small + 1")
