"""What advice promises to save on a device, measured by torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.advice_cases import CASES, Case
from tests.gpu.support import DEVICE, run_ok
from tests.kernel import Kernel

_NEEDS_RESULTS = {"equal tensors", "a head with a copy of the embedding"}
"""Their content decides, which the simulated card does not compute."""
ON_DEVICE = {name: case for name, case in CASES.items() if case.where == "torch" and name not in _NEEDS_RESULTS}
IN_PIECES = {name: case for name, case in CASES.items() if case.where == "gaps"}
START = f"""import ipygpumem, gc, torch
from torch import nn
D = {DEVICE!r}
gc.collect(); torch.cuda.empty_cache()"""


@pytest.mark.parametrize("case", ON_DEVICE.values(), ids=list(ON_DEVICE))
def test_advice_on_a_device_saves_what_it_promises(
    case: Case, gpu_kernel: Kernel, figure: Callable[[str], None]
) -> None:
    """Each line of advice frees the bytes on the device that it promises, within 5 %."""
    promised, saved = _applied(gpu_kernel, case, "torch.cuda.memory_allocated()")
    figure(f"{case.code}: {promised} bytes promised, {saved} freed")
    assert saved == pytest.approx(promised, rel=0.05)


def test_emptying_the_cache_gives_back_what_is_promised(gpu_kernel: Kernel) -> None:
    """Emptying the cache gives back the bytes that the advice promises."""
    promised, saved = _applied(gpu_kernel, CASES["free segments"], "torch.cuda.memory_reserved()")
    assert saved == promised >= 64 << 20


@pytest.mark.parametrize("case", IN_PIECES.values(), ids=list(IN_PIECES))
def test_moving_a_model_in_pieces_gives_back_what_is_promised(
    case: Case, bare_kernel: Kernel, figure: Callable[[str], None]
) -> None:
    """A purge of a model that lies in pieces gives the memory back that the advice promises, within 5 %."""
    promised, saved = _applied(bare_kernel, case, "torch.cuda.memory_reserved()")
    figure(f"{case.code}: {promised} bytes promised, {saved} given back")
    assert saved == pytest.approx(promised, rel=0.05)
    assert promised >= 64 << 20


@pytest.mark.parametrize(
    "more",
    {
        "two optimizers": "a, b = (torch.optim.SGD(net.parameters(), 0.1) for step in 'ab')",
        "a second stream": "with torch.cuda.stream(torch.cuda.Stream()): other = torch.ones(8, device=D)",
        "a wrapped model": "net = nn.DataParallel(net)",
        "a tensor that another library may hold": "net[0].bias.requires_grad_(False); "
        "held = torch.utils.dlpack.to_dlpack(net[0].weight.detach())",
        "other settings": "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'roundup_power2_divisions:4'",
    }.items(),
    ids=lambda one: one[0],
)
def test_nothing_is_said_about_a_model_in_pieces_where_it_cannot_be_told(
    more: tuple[str, str], bare_kernel: Kernel
) -> None:
    """No purge is advised where it is not known what it would move, or where to."""
    run_ok(bare_kernel, START)
    run_ok(bare_kernel, CASES["a model in pieces"].setup)
    asked = "[a.kind for a in ipygpumem.advise().advice]"
    assert "fragmentation" in bare_kernel.value(asked)
    run_ok(bare_kernel, more[1])
    assert "fragmentation" not in bare_kernel.value(asked)


def _applied(kernel: Kernel, case: Case, counter: str) -> tuple[int, int]:
    run_ok(kernel, "%reset -f")
    run_ok(kernel, START)
    run_ok(kernel, case.setup)
    run_ok(kernel, f"advised = ipygpumem.advise(min_bytes='64KiB').advice\nbefore = {counter}")
    found = kernel.value(f"[a.saves_bytes for a in advised if a.code == {case.code!r} and a.device == D]")
    assert len(found) == 1, kernel.value("[a.code for a in advised]")
    run_ok(kernel, f"{case.code}\n{case.then}")
    return found[0], kernel.value(f"before - {counter}")
