"""Estimates of code whose memory is not followed exactly say that it fits perhaps, and why."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ipygpumem
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.units import MIB
from tests.alone import ROOT, printed

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
BODY = """
import torch
from torch import nn
from torch.nn import functional
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
weights = {name: weight.detach() for name, weight in model.named_parameters()}
many = {name: torch.stack([weight] * 4) for name, weight in weights.items()}
x = torch.randn(8, 16)
leaf = torch.randn(16, requires_grad=True)

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
    "functional.one_hot(x.argmax(1))",
    "functional.one_hot(torch.tensor([0, 2, 1]))",
    "functional.one_hot((x * 9).long(), 10)",
]
DOUBTED = {
    "torch.compile(model)(x).sum().backward()": "torch.compile",
    "torch.compile(model, backend='aot_eager_decomp_partition')(x)": "torch.compile",
    "torch.compile(loss, backend='aot_eager')(weights, x)": "torch.compile",
    "torch.compile(mode='reduce-overhead')(model)(x)": "torch.compile",
    "model.compile(); model(x)": "torch.compile",
    "torch.jit.trace(model, x)(x)": "torch.jit",
    "torch.jit.script(model)(x).sum().backward()": "torch.jit",
    "torch.vmap(torch.func.grad(loss), (0, None))(many, x)": "torch.vmap",
    "torch.func.vmap(loss, (None, 0))(weights, torch.stack([x, x]))": "torch.vmap",
    "torch.func.jacrev(lambda x: model(x).sum(0))(x)": "torch.vmap",
    "torch.func.jacfwd(lambda x: model(x).sum(0))(x)": "torch.vmap",
    "torch.func.jvp(model, (x,), (x,))": "forward-mode gradients",
    "x.requires_grad_(); torch.autograd.grad(model(x), x, torch.ones(2, 8, 16), "
    "is_grads_batched=True)": "torch.vmap",
    "torch.bincount(x.long().flatten())": "torch.bincount",
    "torch.bincount(x.long().flatten(), minlength=3)": "torch.bincount",
    "functional.one_hot((x * 9).long())": "torch.nn.functional.one_hot",
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
    estimate = estimate_of(step)
    (device,) = estimate.devices
    assert (estimate.verdict, estimate.fits) == ("fits perhaps", None)
    assert DOUBTED[step] in device.unfollowed
    assert f"fits perhaps ({DOUBTED[step]}" in str(estimate)
    assert any(DOUBTED[step] in note for note in estimate.notes)
    assert not estimate.upper_bounds


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
    model = Doubling()
    x = torch.ones(4)
    if kind == "compiled in place":
        model.compile(**options)
        compiled: Any = model
    else:
        compiled = torch.compile(model if kind == "module" else model.forward, **options)
    estimate = ipygpumem.estimate(lambda: compiled(x), device="cuda:0", device_memory="8GiB")
    assert estimate.verdict == verdict


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "traced", "function"])
def test_code_that_was_scripted_before_fits_perhaps(kind: str) -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(4)
    if kind == "scripted":
        scripted = torch.jit.script(model)
    else:
        scripted = torch.jit.trace(model if kind == "traced" else torch.sigmoid, x)
    estimate = ipygpumem.estimate(lambda: scripted(x), device="cuda:0", device_memory="8GiB")
    assert (estimate.verdict, estimate.devices[0].unfollowed) == ("fits perhaps", ("torch.jit",))


FIRST_USED_INSIDE = [
    "torch.vmap(torch.func.grad(loss), (None, 0))(weights, torch.stack([x, x]))",
    "torch.func.grad(lambda x: model(x).sum())(x)",
    "torch.func.grad(torch.func.grad(lambda v: (model(x) * v).sum()))(torch.ones(()))",
    "torch.vmap(lambda v: model(v).sum())(torch.ones(4, 16))",
    "torch.func.jacrev(lambda v: model(v))(torch.ones(16))",
    "torch.func.jvp(lambda v: model(v), (torch.ones(16),), (torch.ones(16),))",
    "torch.func.vjp(lambda v: (v * leaf).sum(), torch.ones(16))",
    "torch.func.functionalize(lambda v: model(v))(torch.ones(16))",
]


@pytest.mark.parametrize("step", FIRST_USED_INSIDE)
def test_a_model_may_be_used_first_inside_a_transform(step: str) -> None:
    """The copies of its parameters, which require gradients, are then made there."""
    names: dict[str, Any] = {"estimate": ipygpumem.estimate}
    body = BODY.replace("STEP", f"def step():\n    {step}")
    exec(f"{body}\nfound = estimate(step, device='cuda:0', device_memory='8GiB')", names)
    assert names["found"].fits is not False
    assert names["found"].peak_bytes > 0


def test_a_transform_works_on_tensors_of_the_notebook() -> None:
    """The fake copies of its arguments are made outside it."""
    names: dict[str, Any] = {"estimate": ipygpumem.estimate, "torch": torch}
    code = """
many, x = torch.ones(4, 1024, 1024), torch.ones(1024)
found = estimate(lambda: torch.func.vmap(lambda w: w @ x)(many), device="cuda:0")
"""
    exec(code, names)
    assert names["found"].peak_bytes >= names["many"].nbytes


SCRIPTED_INSIDE = """
import warnings
warnings.simplefilter("ignore")
import torch, ipygpumem
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = functional.dropout(self.layer(x), 0.1).softmax(-1)
        x = torch.dropout(torch.softmax(x, -1), 0.1, True) + functional.linear(x, self.layer.weight)
        return torch.log_softmax(x, -1).log_softmax(-1)

def step():
    scripted = torch.jit.script(Model())
    scripted(torch.ones(4, 8)).sum().backward()

found = ipygpumem.estimate(step, device="cuda:0", device_memory="8GiB")
assert found.verdict == "fits perhaps", found
assert torch.jit.script(Model())(torch.ones(4, 8)).shape == (4, 8)
print("both ran")
"""


def test_code_is_scripted_inside_an_estimate_and_after_it(tmp_path: Path) -> None:
    """torch.jit collects torch's functions at its first use, for the whole process."""
    file = tmp_path / "scripted.py"  # which torch.jit reads
    file.write_text(SCRIPTED_INSIDE)
    assert printed(str(file)).splitlines()[-1] == "both ran"


SAVED_WHILE_SCRIPTED = """
import warnings
warnings.simplefilter("ignore")
import os, threading, torch, ipygpumem
from torch import nn
from torch.nn import functional

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def __prepare_scriptable__(self):
        torch.save(self.layer.weight, "inside.pt")
        thread = threading.Thread(target=lambda: torch.save(torch.ones(2), "thread.pt"))
        thread.start()
        thread.join()
        return self

    def forward(self, x):
        return functional.dropout(self.layer(x), 0.1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return torch.softmax(self.inner(x), -1)

before = {name: value for name, value in vars(torch).items()}

def step():
    scripted = torch.jit.script(Model())
    scripted(torch.ones(4, 8)).sum().backward()
    assert torch.save is not before["save"]
    assert functional.dropout is not dropout
    torch.save(scripted.state_dict(), "after.pt")

dropout = functional.dropout
found = ipygpumem.estimate(step, device="cuda:0", device_memory="8GiB")
assert found.verdict == "fits perhaps", found
assert [name for name in os.listdir() if name.endswith(".pt")] == [], os.listdir()
assert torch.jit.script is before["jit"].script and functional.dropout is dropout
print("wrote nothing")
"""


def test_nothing_is_saved_while_code_is_scripted(tmp_path: Path) -> None:
    """The user's code, and its threads, run while torch.jit compiles."""
    file = tmp_path / "scripted.py"
    file.write_text(SAVED_WHILE_SCRIPTED)
    printed_text = printed(str(file), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert printed_text.splitlines()[-1] == "wrote nothing"


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_an_estimate_inside_a_transform_is_refused(transform: str) -> None:
    """If its code uses a tensor of the transform, which has no storage."""
    outer = torch.ones(8, 8)

    def inside(weights: torch.Tensor) -> torch.Tensor:
        estimate = ipygpumem.estimate(lambda: outer @ outer, device="cuda:0", device_memory="8GiB")
        assert estimate.verdict == "fits"
        with pytest.raises(EstimateError, match=f"torch.func.{transform}.*around the transform"):
            ipygpumem.estimate(lambda: (outer @ weights).sum(), device="cuda:0")
        return (outer @ weights).sum()

    getattr(torch.func, transform)(inside)(torch.ones(2, 8, 8) if transform == "vmap" else outer)


def test_a_disabled_compiler_leaves_no_doubt() -> None:
    # pytest's monkeypatch would delete the setting afterwards, and nothing could be compiled.
    with sys.modules["torch._dynamo"].config.patch(disable=True):
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
