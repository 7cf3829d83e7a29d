"""Estimates against the device: the peak of a training is that of max_memory_allocated, within 10 %."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ipygpumem.units import format_bytes
from tests.gpu.support import run_ok
from tests.kernel import Kernel

PREPARE = """
import gc
import torch, ipygpumem
from torch import nn
from torch.nn import functional

def convolutional():
    first = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 1024, 10))

def transformer():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Flatten(), nn.Linear(512 * 128, 10))

shapes = {"convolutional": (128, 3, 64, 64), "transformer": (32, 128, 512)}

def train(model, optimizer, x, mixed):
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed):
            loss = functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()

def compare(name, kind, mixed):
    model = globals()[name]().cuda()
    x, optimizer = torch.randn(shapes[name], device="cuda"), getattr(torch.optim, kind)(model.parameters())
    others = torch.cuda.memory_allocated()
    estimate = ipygpumem.estimate(train, model, optimizer, x, mixed)
    device = next(device for device in estimate.devices if device.device.startswith("cuda"))
    unchanged = torch.cuda.memory_allocated() == others and all(p.grad is None for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, x, mixed)
    real = torch.cuda.max_memory_allocated() - others + device.before_bytes
    return device.peak_bytes, real, unchanged
"""


@pytest.fixture(scope="module")
def prepared(gpu_kernel: Kernel) -> Kernel:
    run_ok(gpu_kernel, PREPARE)
    return gpu_kernel


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed precision"])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("model", ["convolutional", "transformer"])
def test_the_estimated_peak_is_the_devices(
    prepared: Kernel, model: str, optimizer: str, mixed: bool, figure: Callable[[str], None]
) -> None:
    """The estimated peak of a training is max_memory_allocated within 10 %, and nothing is allocated for it."""
    # Whatever kernels take for themselves once, cuBLAS's workspace for one, is there before the comparison.
    run_ok(prepared, f"compare({model!r}, {optimizer!r}, {mixed})\ngc.collect()\ntorch.cuda.empty_cache()")
    estimated, real, unchanged = prepared.value(f"compare({model!r}, {optimizer!r}, {mixed})")
    figure(f"{model}, {optimizer}: estimated {format_bytes(estimated)}, allocated {format_bytes(real)}")
    assert estimated == pytest.approx(real, rel=0.1)
    assert unchanged
