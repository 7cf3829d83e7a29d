"""Usual training code is estimated: what cannot be known is answered and named, or refused, by its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ipygpumem
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.records import Estimate
from ipygpumem.units import MIB
from tests.torch_cpu.networks import RealStorages

USERS = """
import io, json, logging, random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

x = torch.randn(64, 256)
y = torch.zeros(64, dtype=torch.long)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
"""


def estimated(body: str, tmp_path: Path, *, device: str | None = "cuda", **options: Any) -> Estimate:
    """Estimate the body of a function that stands in a file of the user's."""
    path = tmp_path / "users_code.py"
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    path.write_text(f"{USERS}\ndef step():\n{lines}")
    space: dict[str, Any] = {"__name__": "users_code"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return ipygpumem.estimate(space["step"], device=device, **options)


TRAIN = "loss = F.cross_entropy(model(x.to('cuda')), y.to('cuda'))\nloss.backward()\n"
CASES = {
    "text": TRAIN + "text = f'{loss:.4f} {x} {loss!r} {loss}'\nassert 'nan' not in text\nprint(loss, x)\n"
    "'%.3f' % loss, '{:.2e}'.format(loss)\nlogging.getLogger('users').warning('loss %s %.3f', loss, loss.item())",
    "tqdm": "for _ in tqdm(range(2)):\n    loss = model(x).sum()\n    loss.backward()",
    "pinned": "there = x.pin_memory().to('cuda', non_blocking=True)\nassert model(there).shape == (64, 10)\n"
    "there = torch.empty(4, 256, pin_memory=True)\nassert model(there).shape == (4, 10)\nmodel.share_memory()",
    "devices": "torch.cuda.set_device(0)\nwith torch.cuda.device(0), torch.device('cuda'):\n"
    "    assert model(torch.ones(3, 256)).shape\ntorch.cuda.synchronize('cuda:0'), torch.accelerator.synchronize()\n"
    "assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0\n"
    "assert torch.accelerator.is_available() and torch.cuda.is_bf16_supported() in (True, False)\n"
    "torch.cuda.get_device_name() + torch.cuda.get_device_properties(0).name, torch.cuda.get_device_capability()",
    "memory": "torch.cuda.reset_peak_memory_stats()\n" + TRAIN + "assert torch.cuda.max_memory_allocated() > 2**19\n"
    "free, total = torch.cuda.mem_get_info()\nassert torch.cuda.memory_allocated() > 0\ntorch.cuda.empty_cache()\n"
    "torch.cuda.memory_summary(), torch.cuda.memory_stats()",
    "streams and events": "c = torch.cuda\nstream = c.Stream()\nstream.wait_stream(c.current_stream())\n"
    "with c.stream(stream):\n    there = x.to('cuda', non_blocking=True)\n    there.record_stream(stream)\n"
    "begin, end = c.Event(enable_timing=True), c.Event(enable_timing=True)\nbegin.record()\nmodel(there)\n"
    "end.record(), end.synchronize()\nbegin.elapsed_time(end) / 1000\nc.nvtx.range_push('step'), c.nvtx.range_pop()",
    "legacy types": "model(torch.cuda.FloatTensor(64, 256).zero_() + torch.cuda.FloatTensor([1.0]))\n"
    "there = x.type(torch.cuda.HalfTensor)\nassert there.dtype is torch.float16",
    "random states": "torch.cuda.manual_seed(3), torch.cuda.manual_seed_all(3), torch.manual_seed(3)\n"
    "torch.cuda.set_rng_state(torch.cuda.get_rng_state())\nmodel(x)",
    "mixed precision": """
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16), torch.cuda.amp.autocast():
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer), scaler.update()
torch.cuda.amp.GradScaler().scale(loss)
assert optimizer.state
""",
    "values": TRAIN + "best = 3\nif loss < best or torch.isnan(loss):\n    best = loss.item()\n"
    "a, b, c = float(loss), int(y[0]), y.tolist()\nd = [0] * 3\nd[y[0]]\n"
    "assert len(list(range(torch.tensor(3)))) == 3 and isinstance((y == y).float().mean().item(), float)\n"
    "norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\nassert not norm > 1e9",
    "schedulers": "optimizer = torch.optim.Adam(model.parameters())\n" + TRAIN + "optimizer.step()\n"
    "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(loss)\n"
    "swa = torch.optim.swa_utils.AveragedModel(model)\nswa.update_parameters(model)\nswa(x)",
    "workers": "data = torch.utils.data.TensorDataset(x, y)\nloader = torch.utils.data.DataLoader(data, 32, "
    "shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)\nfor images, labels in loader:\n"
    "    F.cross_entropy(model(images.cuda()), labels.cuda()).backward()",
    "states": "torch.save(model.state_dict(), io.BytesIO())\n"
    "state = {k: v.cpu().clone() for k, v in model.state_dict().items()}\nmodel.load_state_dict(state)",
    "settings": "torch.backends.cudnn.benchmark = True\ntorch.set_float32_matmul_precision('high')\n"
    "torch.set_num_threads(4)\ntorch.compile(model)(x).sum().backward()",
}


@pytest.mark.parametrize("case", CASES)
def test_usual_training_code_is_estimated(case: str, tmp_path: Path) -> None:
    found = estimated(CASES[case], tmp_path, device_memory="8GiB")
    assert [device.device for device in found.devices] == ["cuda:0"]
    assert found.peak_bytes >= (256 * 512 * 4 if "model(" in CASES[case] else 512)
    assert not any("site-packages" in line for line in (*found.guesses, *found.notes))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("x.numpy()", "NumPy"),
        ("np.asarray(x)", "NumPy"),
        ("x.to_sparse()", "to_sparse"),
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
        ("torch.cuda.make_graphed_callables(model, (x,))", "torch.cuda.make_graphed_callables"),
        ("model(x).data_ptr()", "data_ptr"),
        ("torch.cuda.get_device_properties(0).total_memory", "total_memory"),
        ("torch.cuda.memory_snapshot()", "torch.cuda.memory_snapshot"),
        ("torch.cuda.current_blas_handle()", "torch.cuda.current_blas_handle"),
        ("for row in x[x > 0]:\n    pass", "index"),
    ],
)
def test_what_cannot_be_known_is_refused_by_its_line(body: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match=re.escape(told)) as caught:
        estimated(body, tmp_path)
    assert f"users_code.py, line 14: {body.splitlines()[0]}" in str(caught.value)
    assert "\n" not in str(caught.value)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256))


APART = {"Optimizer", "SparseAdam", "LBFGS"}
"""These have tests of their own."""
MATRICES = {"Muon"}
DENSE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in APART
)


def held_against_a_real_run(step: Callable[[], object], *before: torch.Tensor, rel: float = 0.02) -> None:
    """Estimate a step, run it, and hold the one against the other."""
    (found,) = ipygpumem.estimate(step).devices
    with RealStorages(*before) as real:
        step()
    assert found.peak_bytes == pytest.approx(real.peak, rel=rel)


@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_is_estimated_as_it_runs(name: str) -> None:
    model, x = network(), torch.randn(64, 128)
    parameters = [p for p in model.parameters() if name not in MATRICES or p.ndim == 2]
    optimizer = getattr(torch.optim, name)(parameters)

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()

    held_against_a_real_run(train, x, *model.parameters(), rel=0.05)


@pytest.mark.parametrize("optimizer", ["SparseAdam", "SGD"])
def test_sparse_gradients_are_counted(optimizer: str) -> None:
    table, words = nn.Embedding(2000, 256, sparse=True), torch.arange(1500)
    steps = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            steps.zero_grad()
            table(words).sum().backward()
            steps.step()

    held_against_a_real_run(train, words, table.weight, rel=0.1)


def test_a_sparse_tensor_that_code_makes_is_counted() -> None:
    def make() -> torch.Tensor:
        places, values = torch.zeros(2, 1 << 18, dtype=torch.long), torch.ones(1 << 18)
        return torch.sparse_coo_tensor(places, values, (512, 512)) * 2

    (found,) = ipygpumem.estimate(make).devices
    assert found.peak_bytes >= 2 * 5 * MIB
    assert found.after_bytes >= 5 * MIB


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("sizes", [(64, 128, 2, 32, 8), (256, 256, 1, 16, 10), (40, 200, 3, 64, 5), (32, 48, 1, 8, 10)])
def test_a_recurrent_network_is_estimated_as_it_runs(kind: str, sizes: tuple[int, ...]) -> None:
    given, wide, layers, batch, steps = sizes
    model = getattr(nn, kind)(given, wide, layers, batch_first=True, bidirectional=layers > 1)
    x = torch.randn(batch, steps, given)

    def train() -> None:
        for _ in range(2):
            model.zero_grad()
            model(x)[0].sum().backward()

    held_against_a_real_run(train, x, *model.parameters())


def test_what_a_loop_on_values_asks_for_ends_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.estimating.following._MOST_GUESSES", 1000)  # a tenth
    body = "done = torch.zeros(4, dtype=torch.bool)\nwhile not done.all():\n    done = done | (torch.rand(4) > 0.5)"
    with pytest.raises(EstimateError, match=r"users_code.py, line 15: while not done.all\(\):"):
        estimated(body, tmp_path)


def test_threads_that_code_starts_are_followed(tmp_path: Path) -> None:
    body = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    kept = list(pool.map(lambda n: torch.zeros(n, 2**10, device="cuda"), [1, 2, 3] * 100))
assert all(type(t).__name__ == "FakeTensor" for t in kept)
"""
    assert estimated(body, tmp_path, device=None).peak_bytes == 600 * 4 * 2**10


def test_compiled_code_is_estimated_as_eager_code_and_that_is_said(tmp_path: Path) -> None:
    compiled = estimated("torch.compile(model)(x).sum().backward()", tmp_path)
    assert [note for note in compiled.notes if "torch.compile" in note and "eager" in note]
    assert compiled.peak_bytes == estimated("model(x).sum().backward()", tmp_path).peak_bytes
    model, x = torch.compile(network()), torch.randn(4, 128)
    assert any("torch.compile" in note for note in ipygpumem.estimate(lambda: model(x)).notes)


@pytest.mark.parametrize("way", ["checkpointing", "a disabled module"])
def test_what_is_never_compiled_is_not_called_compiled(way: str) -> None:
    """torch wraps what its compiler is to leave alone, such as checkpointing from its first call on."""
    model, x = network(), torch.randn(4, 128)
    disabled = torch._dynamo.disable(model)

    def step() -> None:
        out = disabled(x) if way == "a disabled module" else checkpoint(model, x, use_reentrant=False)
        out.sum().backward()

    step()
    assert ipygpumem.estimate(step).notes == ()


def test_the_history_of_lbfgs_is_counted_as_long_as_its_iterations_make_it() -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.randn(512, 256)
    y = x @ torch.randn(256, 256)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, tolerance_grad=0, tolerance_change=0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    def train() -> None:
        optimizer.step(closure)
        optimizer.step(closure)

    found = ipygpumem.estimate(train)
    assert any("LBFGS" in note for note in found.notes)
    held_against_a_real_run(train, x, y, model.weight, rel=0.05)
    assert len(optimizer.state[model.weight]["old_dirs"]) > 30


def test_what_code_lets_go_of_is_gone() -> None:
    """Gradients of an earlier step, and tensors that a cast replaces, are not counted for good."""
    model, x = nn.Linear(512, 512, bias=False), torch.randn(8, 512)
    model(x).sum().backward()

    def train() -> None:
        model.zero_grad()
        model(x).sum().backward()

    held_against_a_real_run(train, x, model.weight)
    (found,) = ipygpumem.estimate(lambda: model.half()).devices
    assert found.after_bytes <= MIB // 2 + MIB  # the weights, and the gradient that a cast casts as well
