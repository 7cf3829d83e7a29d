"""Autofit, with out-of-memory errors of a real device and of models on cards of three sizes."""

from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.estimating.records import FITS
from ipygpumem.fitting.fit import TOO_LARGE
from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import SAMPLES, Card, allocated, ready
from tests.steps import run_failing, run_quietly

SETUP = """
import ipygpumem
def step(batch_size):
    model = torch.nn.Linear(1024, 1024, device="cuda")
    rows = torch.empty(batch_size, 64 << 20, dtype=torch.uint8, device="cuda")
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
    return rows.numel()
"""


def test_a_cell_is_halved_until_it_fits(
    gpu_kernel: Kernel, card: Card, figure: Callable[[str], None]
) -> None:
    """%%autofit halves a batch that does not fit on the device until it does, and shows no
    traceback. What a failed try held on the device is back before the next one, model, graph and
    cache included.
    """
    run_quietly(gpu_kernel, SETUP + "seen = []", "%gpumem free")
    live = allocated(gpu_kernel)
    start = 4 * card.memory.total // (64 * MIB)
    note = "seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))"
    reply = run_quietly(
        gpu_kernel,
        f"""
        %%autofit batch_size={start}
        {note}
        size = step(batch_size)
        """,
    )

    # The first of the halves that fits: more than a quarter of the card.
    fitted, size = gpu_kernel.value("batch_size, size")
    assert size == fitted * 64 * MIB
    assert size < card.memory.total < 4 * size
    # one for each thread that multiplied
    run_quietly(gpu_kernel, "torch._C._cuda_clearCublasWorkspaces()")
    assert allocated(gpu_kernel) - live < MIB
    assert reply.traceback == ""

    # Each try began with the device as it was at the first.
    seen = gpu_kernel.value("seen")
    assert len(seen) >= 3
    assert {before for before, _ in seen} == {seen[0][0]}
    assert max(reserved for _, reserved in seen) - seen[0][1] <= 32 * MIB
    (report,) = reply.reports("autofit")
    assert "out of memory, asked for" in report
    figure(f"{report.splitlines()[0]}; the device has {format_bytes(card.memory.total)}")


MODELS = """
import ipygpumem
from torch import nn

class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(256, 512, num_layers=2, batch_first=True)
    def forward(self, x):
        return self.layers(x)[0]

def step(model, *shape):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(shape, device="cuda")).square().mean().backward()
    optimizer.step()

def transformer(batch_size):
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    step(nn.TransformerEncoder(layer, 4), batch_size, 128, 512)

def convnet(batch_size):
    layers = [nn.Conv2d(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU()]
    step(nn.Sequential(*layers), batch_size, 3, 224, 224)

def lstm(batch_size):
    step(Sequence(), batch_size, 16, 256)

def live():
    torch._C._cuda_clearCublasWorkspaces()  # the first matrix product makes one, and it stays
    return torch.cuda.memory_allocated()
"""  # noqa: E501
STARTS = {"transformer": 2048, "convnet": 4096, "lstm": 1 << 16}
"""Too large for each card."""


@pytest.mark.simulated
@pytest.mark.parametrize("gib", [8] if SAMPLES else [4, 8, 24])
def test_a_batch_is_fitted_to_the_card(
    gib: int, machine: Callable[..., None], figure: Callable[[str], None]
) -> None:
    """On cards of 4, 8 and 24 GiB autofit finds for three models the batch that fits, while the
    next multiple of eight does not.
    """
    machine(gib=gib)
    with Kernel() as kernel:
        run_quietly(kernel, "%load_ext ipygpumem")
        ready(kernel)
        run_quietly(kernel, MODELS)
        fitted = {model: _search(kernel, model, start) for model, start in STARTS.items()}
    figure(f"on {gib} GiB fits {', '.join(f'{model} {size}' for model, size in fitted.items())}")


def _step(size: int) -> int:
    """Return the precision of a search for a batch: a multiple of eight, or a sixty-fourth."""
    return max(8, size // 64) if size >= 8 else 1


def _search(kernel: Kernel, model: str, start: int) -> int:
    """Search for the largest batch with ``ipygpumem.autofit``; return it."""
    live = kernel.value("live()")
    run_quietly(
        kernel,
        f"found = ipygpumem.autofit({model}, batch_size={start}, step='search', max_tries=40)",
    )
    outcomes = kernel.value("{one.values['batch_size']: one.outcome for one in found.tries}")
    size = int(kernel.value("found.value"))
    assert outcomes[size] == FITS
    assert min(value - size for value in outcomes if outcomes[value] in TOO_LARGE) <= _step(size)
    # at the limit, what the last try left between larger blocks can be in the way
    run_quietly(kernel, "%gpumem free")
    run_quietly(kernel, f"{model}({size})")
    assert kernel.value("live()") == live
    # A search leaves 5 % free.
    run_failing(kernel, f"{model}({size} + {size} // 7)", "OutOfMemoryError")
    assert kernel.value("live()") == live
    return size
