"""Estimates of code whose memory is not followed exactly say that it fits perhaps, and why."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

import ipygpumem
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.units import MIB

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
BODY = """
import torch
from torch import nn
from torch.nn import functional
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
weights = {name: weight.detach() for name, weight in model.named_parameters()}
many = {name: torch.stack([weight] * 4) for name, weight in weights.items()}
x = torch.randn(8, 16)

def loss(weights, x):
    return torch.func.functional_call(model, weights, (x,)).pow(2).mean()

STEP
"""
FOLLOWED = [
    "model(x).sum().backward()",
    "torch.func.functional_call(model, weights, (x,))",
    "torch.compile(model, backend='eager')(x).sum().backward()",
    "torch.compile(backend='eager')(model)(x)",
    "torch.compile(model, disable=True)(x)",
    "model.compile(backend='eager'); model(x)",
    "torch._dynamo.disable(model)(x)",
]
DOUBTED = {
    "torch.compile(model)(x).sum().backward()": "torch.compile",
    "torch.compile(model, backend='aot_eager_decomp_partition')(x)": "torch.compile",
    "torch.compile(loss, backend='aot_eager')(weights, x)": "torch.compile",
    "torch.compile(mode='reduce-overhead')(model)(x)": "torch.compile",
    "model.compile(); model(x)": "torch.compile",
    "torch.jit.trace(model, x)(x)": "torch.jit",
    "torch.vmap(torch.func.grad(loss), (0, None))(many, x)": "torch.vmap",
    "torch.func.vmap(loss, (None, 0))(weights, torch.stack([x, x]))": "torch.vmap",
    "torch.func.jacrev(lambda x: model(x).sum(0))(x)": "torch.vmap",
    "torch.func.jacfwd(lambda x: model(x).sum(0))(x)": "torch.vmap",
    "torch.func.jvp(model, (x,), (x,))": "forward-mode gradients",
    "x.requires_grad_(); torch.autograd.grad(model(x), x, torch.ones(2, 8, 16), "
    "is_grads_batched=True)": "torch.vmap",
}


def estimate_of(step: str) -> Estimate:
    names: dict[str, Any] = {}
    exec(BODY.replace("STEP", f"def step():\n    {step}"), names)
    return ipygpumem.estimate(names["step"], device="cuda:0", device_memory="8GiB")


@pytest.mark.parametrize("step", FOLLOWED)
def test_eager_code_fits_for_certain(step: str) -> None:
    assert estimate_of(step).verdict == "fits"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("step", DOUBTED)
def test_compiled_and_transformed_code_fits_perhaps(step: str) -> None:
    found = estimate_of(step)
    (device,) = found.devices
    assert (found.verdict, found.fits) == ("fits perhaps", None)
    assert DOUBTED[step] in device.unfollowed
    assert f"fits perhaps ({DOUBTED[step]}" in str(found)
    assert any(DOUBTED[step] in note for note in found.notes)


class Doubling(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"backend": "eager"}, "fits"),
        ({"backend": "aot_eager"}, "fits perhaps"),
        ({}, "fits perhaps"),
    ],
)
@pytest.mark.parametrize("kind", ["module", "function", "compiled in place"])
def test_code_that_was_compiled_before_fits_perhaps(
    options: dict[str, Any], verdict: str, kind: str
) -> None:
    model, x = Doubling(), torch.ones(4)
    if kind == "compiled in place":
        model.compile(**options)
        compiled: Any = model
    else:
        compiled = torch.compile(model if kind == "module" else model.forward, **options)
    found = ipygpumem.estimate(lambda: compiled(x), device="cuda:0", device_memory="8GiB")
    assert found.verdict == verdict


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "traced", "function"])
def test_code_that_was_scripted_before_fits_perhaps(kind: str) -> None:
    model, x = nn.Linear(4, 4), torch.ones(4)
    if kind == "scripted":
        scripted = torch.jit.script(model)
    else:
        scripted = torch.jit.trace(model if kind == "traced" else torch.sigmoid, x)
    found = ipygpumem.estimate(lambda: scripted(x), device="cuda:0", device_memory="8GiB")
    assert (found.verdict, found.devices[0].unfollowed) == ("fits perhaps", ("torch.jit",))


def test_a_disabled_compiler_leaves_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch._dynamo"].config, "disable", True)
    assert estimate_of("torch.compile(model)(x)").verdict == "fits"


def test_every_reason_for_perhaps_is_said() -> None:
    """Reasons add up; fragmentation alone is a reason, too."""
    figures = DeviceEstimate(
        "cuda:0", 0, 80 * MIB, 0, 100 * MIB, 90 * MIB, room_bytes=91 * MIB,
        unknown_operators=("_linalg_svd",), unfollowed=("torch.compile",),
    )  # fmt: skip
    assert figures.verdict == "fits perhaps"
    assert figures.doubts == ("_linalg_svd", "torch.compile", "fragmentation")
    estimate = Estimate((figures,), 0.0)
    assert "fits perhaps (_linalg_svd, torch.compile, fragmentation): needs" in str(estimate)
    none = DeviceEstimate("cuda:0", 0, 80 * MIB, 0, 90 * MIB, 90 * MIB, room_bytes=91 * MIB)
    assert (none.verdict, none.doubts) == ("fits", ())
