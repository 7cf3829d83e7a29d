"""Usual training code is estimated: what cannot be known is answered and named, or refused, by its
line.

What code does beyond its tensors is named too: files, processes, the network, the screen,
iterators.
"""

from __future__ import annotations

import functools
import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.effects import effects_of
from ipygpumem.estimating.records import Estimate
from ipygpumem.estimating.user_lines import user_line
from tests.alone import alone
from tests.steps import run_cells

pytestmark = pytest.mark.usefixtures("no_modules_of_users")

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


def estimated(
    body: str, tmp_path: Path, *, device: str | None = "cuda", **options: Any
) -> Estimate:
    """Estimate the body of a function that stands in a file of the user's."""
    path = tmp_path / "users_code.py"
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    path.write_text(f"{USERS}\ndef step():\n{lines}")
    space: dict[str, Any] = {"__name__": "users_code"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return ipygpumem.estimate(space["step"], device=device, **options)


def as_functions(bodies: Any) -> str:
    """Return code that calls a function with each body, one after the other."""
    texts = [
        [f"def part{number}():", *body.strip().splitlines()] for number, body in enumerate(bodies)
    ]
    return "\n".join(
        "\n    ".join(lines) + f"\npart{number}()" for number, lines in enumerate(texts)
    )


TRAIN = """
loss = F.cross_entropy(model(x.to('cuda')), y.to('cuda'))
loss.backward()
"""
CASES = {
    "text": TRAIN
    + """
text = f'{loss:.4f} {x} {loss!r} {loss}'
assert 'nan' not in text
print(loss, x)
'%.3f' % loss, '{:.2e}'.format(loss)
logging.getLogger('users').warning('loss %s %.3f', loss, loss.item())
""",
    "tqdm": """
for _ in tqdm(range(2)):
    loss = model(x).sum()
    loss.backward()
""",
    "pinned": """
there = x.pin_memory().to('cuda', non_blocking=True)
assert model(there).shape == (64, 10)
there = torch.empty(4, 256, pin_memory=True)
assert model(there).shape == (4, 10)
model.share_memory()
""",
    "devices": """
torch.cuda.set_device(0)
with torch.cuda.device(0), torch.device('cuda'):
    assert model(torch.ones(3, 256)).shape
torch.cuda.synchronize('cuda:0'), torch.accelerator.synchronize()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
assert torch.accelerator.is_available() and torch.cuda.is_bf16_supported() in (True, False)
torch.cuda.get_device_name() + torch.cuda.get_device_properties(0).name, torch.cuda.get_device_capability()
""",  # noqa: E501
    "memory": """
torch.cuda.reset_peak_memory_stats()
"""
    + TRAIN
    + """
assert torch.cuda.max_memory_allocated() > 2**19
free, total = torch.cuda.mem_get_info()
assert torch.cuda.memory_allocated() > 0
torch.cuda.empty_cache()
torch.cuda.memory_summary(), torch.cuda.memory_stats()
""",
    "streams and events": """
c = torch.cuda
stream = c.Stream()
stream.wait_stream(c.current_stream())
with c.stream(stream):
    there = x.to('cuda', non_blocking=True)
    there.record_stream(stream)
begin, end = c.Event(enable_timing=True), c.Event(enable_timing=True)
begin.record()
model(there)
end.record(), end.synchronize()
begin.elapsed_time(end) / 1000
c.nvtx.range_push('step'), c.nvtx.range_pop()
""",
    "random states": """
torch.cuda.manual_seed(3), torch.cuda.manual_seed_all(3), torch.manual_seed(3)
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
model(x)
""",
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
    "values": TRAIN
    + """
best = 3
if loss < best or torch.isnan(loss):
    best = loss.item()
a, b, c = float(loss), int(y[0]), y.tolist()
d = [0] * 3
d[y[0]]
assert len(list(range(torch.tensor(3)))) == 3 and isinstance((y == y).float().mean().item(), float)
norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
assert not norm > 1e9
""",
    "schedulers": """
optimizer = torch.optim.Adam(model.parameters())
"""
    + TRAIN
    + """
optimizer.step()
torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(loss)
swa = torch.optim.swa_utils.AveragedModel(model)
swa.update_parameters(model)
swa(x)
""",
    "workers": """
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(
    data, 32, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
)
for images, labels in loader:
    F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
""",
    "code in backward": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, there):
        return there * 2
    @staticmethod
    def backward(context, gradient):
        return gradient * torch.full((1,), 2.0, device="cuda")
from torch.utils.checkpoint import checkpoint
here = model.to("cuda")
def last(a):
    return here(a) * torch.ones(10, device="cuda") * torch.ones(10)
with torch.device("cuda"):
    Doubled.apply(checkpoint(last, x.cuda(), use_reentrant=False)).sum().backward()
torch.set_default_device("cuda")
loss = Doubled.apply(nn.Linear(256, 10)(torch.ones(3, 256))).sum()
torch.set_default_device(None)
torch.autograd.grad(Doubled.apply(here(x.cuda())).sum() + loss, list(here.parameters()))
""",
    "states": """
torch.save(model.state_dict(), io.BytesIO())
state = {k: v.cpu().clone() for k, v in model.state_dict().items()}
model.load_state_dict(state)
""",
    "settings": """
torch.backends.cudnn.benchmark = True
torch.set_float32_matmul_precision('high')
torch.set_num_threads(4)
torch.compile(model)(x).sum().backward()
""",
}


@alone
def test_a_tensor_is_printed_in_the_first_estimate_of_a_process() -> None:
    def step() -> str:
        return f"{torch.zeros(4)}"

    assert ipygpumem.estimate(step, device="cuda", device_memory="8GiB").devices


def test_usual_training_code_is_estimated(tmp_path: Path) -> None:
    estimate = estimated(as_functions(CASES.values()), tmp_path, device_memory="8GiB")
    assert [device.device for device in estimate.devices] == ["cuda:0", "cpu"]
    assert estimate.peak_bytes >= 256 * 512 * 4
    assert not any("site-packages" in line for line in (*estimate.guesses, *estimate.notes))
    compiled = [note for note in estimate.notes if "torch.compile" in note]
    assert ["eager" in note for note in compiled] == [True]


FINE = [
    "assert torch.isfinite(x).all()",
    """
if not torch.isfinite(x.sum()):
    raise FloatingPointError
""",
    "assert (x >= 0).all() and x.isfinite().all().cpu().item()",
    """
if torch.isnan(x).any() or x.isinf().any():
    raise ValueError
""",
    """
if torch.isnan(x).sum() > 0 or x.isnan().sum().item():
    raise ValueError
""",
    """
if (~torch.isfinite(x)).any() or (x != x).any():
    raise ValueError
""",
    "assert not torch.logical_or(x.isnan(), x.isinf()).any()",
    """
bad = torch.isnan(x).any()
bad |= torch.isinf(x).any()
assert torch.logical_not(bad)
""",
    "assert torch.allclose(x, x + 1) and torch.equal(x, x + 1)",
    "assert x.sum() > 0 and x.max() < 3, 'message'",
    """
if (x > 0).any() or not torch.equal(x, y):
    raise ValueError
""",
    "assert any([(x > 0).all()]) and not (x < 0).any()",
    """
def positive():
    if (x > 0).all():
        return 3
    raise ValueError
positive()
""",
    "assert not any(torch.isnan(x).flatten().tolist())",
    "nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0, error_if_nonfinite=True)",
    "assert torch.distributions.Categorical(logits=model(x)).sample().shape == (64,)",
    """
d = torch.distributions
z = d.Categorical(logits=x)
z.log_prob(z.sample()).sum() + z.entropy().sum()
""",
    """
d = torch.distributions
z = d.Normal(x, x.exp())
z.log_prob(z.rsample()).mean() + z.cdf(x).sum()
""",
    """
d = torch.distributions
z = d.Independent(d.Laplace(x, x), 1)
d.kl_divergence(z, z) + z.log_prob(z.sample())
""",
    """
d = torch.distributions
z = d.MultivariateNormal(x[0], torch.eye(256))
z.log_prob(z.rsample())
""",
    """
d = torch.distributions
z = d.Beta(x, x)
z.log_prob(z.rsample()) + d.Gamma(x, x).rsample()
""",
]


BY_NAME = """
scores = torch.randn(6, 3, 5)
torch.softmax(input=scores, dim=-1)
torch.log_softmax(input=scores, dim=-1)
F.softmax(input=scores, dim=-1)
torch.dropout(input=scores, p=0.1, train=True)
F.dropout(input=scores, p=0.1, training=True)
F.linear(input=x, weight=model[0].weight, bias=model[0].bias)
F.rms_norm(input=x, normalized_shape=(256,))
F.scaled_dot_product_attention(query=scores, key=scores, value=scores)
targets = torch.ones(3, 2, dtype=torch.long)
lengths = {"input_lengths": [6] * 3, "target_lengths": [2] * 3}
F.ctc_loss(log_probs=scores, targets=targets, **lengths)
torch.ctc_loss(log_probs=scores, targets=targets, **lengths)
lstm = nn.LSTM(5, 5)
states = (torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))
options = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False}
torch.lstm(
    input=scores, hx=states, params=lstm._flat_weights, bidirectional=False, batch_first=False,
    **options,
)
"""


def test_functions_take_their_arguments_by_name_as_in_torch(tmp_path: Path) -> None:
    assert estimated(BY_NAME, tmp_path).peak_bytes > 0


def test_checks_on_values_pass(tmp_path: Path) -> None:
    assert estimated(as_functions(FINE), tmp_path, device=None).peak_bytes > 0


def test_lines_that_ask_for_values_are_named_and_loops_go_on(tmp_path: Path) -> None:
    body = """
kept = []
for n in range(8):
    kept.append(torch.ones(256))
    if (x == n).all():
        break
if (loss := x.sum()) > 3:
    return 0.0
return float(loss.item() + sum(x[0].tolist()))"""
    estimate = estimated(body, tmp_path, device=None)
    asked = [
        "if (x == n).all():",
        "if (loss := x.sum()) > 3:",
        "return float(loss.item() + sum(x[0].tolist()))",
    ]
    assert [line.partition(": ")[2] for line in estimate.guesses] == asked
    assert estimate.peak_bytes >= 8 * 1024


def test_an_endless_loop_on_values_is_refused_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipygpumem.estimating.operators.guesses._MOST_GUESSES_OF_LINE", 100)
    body = "done = torch.zeros(4, dtype=torch.bool)\nwhile not done.all():\n    done = done | (torch.rand(4) > 0.5)"  # noqa: E501
    with pytest.raises(EstimateError, match=r"users_code.py, line 15: while not done.all\(\):"):
        estimated(body, tmp_path)


LARGEST = {
    "x[x > 0]": (64 * 256,),
    "x[(x > 0).any(1)]": (64, 256),
    "x[:, (x > 0).any(0)]": (64, 256),
    "torch.masked_select(x, x > 0)": (64 * 256,),
    "nn.Parameter(x)[x > 0].sum().backward() or x[0]": (256,),
    "(x > 0).nonzero()": (64 * 256, 2),
    "torch.argwhere(x > 0)": (64 * 256, 2),
    "torch.where(x > 0)[1]": (64 * 256,),
    "(x.sum() > 0).nonzero()": (1, 0),
    "torch.unique(x)": (64 * 256,),
    "torch.unique(x, return_inverse=True)[1]": (64, 256),
    "torch.unique(x, dim=0, return_counts=True)[1]": (64,),
    "torch.unique_consecutive(x[0])": (256,),
    "torch.unique_consecutive(x, dim=1)": (64, 256),
    "torch.unique(x > 0)": (2,),
    "torch.zeros_like(x).index_add_(0, k := torch.where(x[:, 0] == 0)[0], model[2].weight.new_ones(len(k), 256))": (  # noqa: E501
        64,
        256,
    ),
    "torch.stack([row for row in x[x > 0]])": (64 * 256,),
}
"""Results whose size depends on values, and the largest size that they can have."""


def test_sizes_that_depend_on_values_are_the_largest_possible(tmp_path: Path) -> None:
    body = "".join(
        f"z = {line}\nassert z.shape == {shape}, z.shape\n" for line, shape in LARGEST.items()
    )
    estimate = estimated(body, tmp_path)
    assert [line.partition(": z = ")[2] for line in estimate.upper_bounds] == [*LARGEST]
    assert estimate.peak_bytes >= 64 * 256 * 2 * 8
    assert "cuda:0 peak at most " in str(estimate)
    assert "at most, since these lines" in str(estimate)


KNOWN = """
grid, done = torch.tensor([[1, 8, 8], [2, 4, 6]]), torch.zeros(2, dtype=torch.long)
assert grid.prod(-1).tolist() == [64, 48] and np.asarray(grid)[1, 2] == 6 and y.sum().item() == 0
assert [len(part) for part in x.split((grid.prod(-1) // 2 + 4)[[0, 1]].tolist())] == [36, 28]
assert (x[:6] * 2).repeat_interleave(grid[1].repeat(2), 0).shape == (24, 256) and (y == 0).nonzero().shape == (64, 1)
some, made = torch.tensor([True, False] * 32), grid.new_empty(2)
assert x[some].shape == (32, 256) and y[some].shape == (32,) and x[:, 0].masked_select(some).shape == (32,)
made.copy_(x[0, :2].long())
assert made.tolist() == [0, 0] and grid[:, 0].masked_select(x[:2, 0] > 0).tolist() == [0, 0]
grid[0, 0] = x[0, 0].long()
assert grid.tolist() == [[0] * 3] * 2
for step in range(5):  # as transformers' generate()
    stops = torch.full((2,), False) | (x[:2, 0] > 0) | torch.full((2,), step >= 3)
    done = torch.ones(2, dtype=torch.long) & ~stops
    if done.max() == 0:
        break
assert step == 3
torch._check_tensor_all(x > 0)
"""  # noqa: E501


def test_values_that_code_writes_down_are_known(tmp_path: Path) -> None:
    estimate = estimated(KNOWN, tmp_path, device=None)
    assert not any("split" in line or "prod" in line for line in estimate.guesses)
    assert not any("some" in line for line in estimate.upper_bounds)


UNTOLD = {
    "F.ctc_loss(x.view(32, 4, 128).log_softmax(2), x[:, 0].long(), *(x[:2, :4].long()), reduction='none')": (  # noqa: E501
        4,
    ),
    "torch._grouped_mm(x, x.new_ones(3, 256, 30), offs=x[0, :3].int())": (64, 30),
    "torch._grouped_mm(x.t(), x, offs=x[0, :3].int())": (3, 256, 256),
}


def test_results_that_torch_does_not_tell_are_known(tmp_path: Path) -> None:
    lines = {
        line: shape
        for line, shape in UNTOLD.items()
        if "grouped" not in line or hasattr(torch, "_grouped_mm")
    }
    estimated(
        "".join(
            f"z = {line}\nassert z.shape == {shape}, z.shape\n" for line, shape in lines.items()
        ),
        tmp_path,
    )


POSITIONS = [
    "[3][int(torch.empty(1).uniform_(0.0, 1.0).item())]",  # torchvision's way of choosing a size
    "[3][torch.randint(0, 1, (1,))], [3][torch.randint(1, (2,))[1].item()], [3][torch.randperm(1)[0]]",  # noqa: E501
    "[3][torch.zeros(4, 1).argmax(1)[2]], [3, 3, 3, 3][torch.zeros(4).argmax()], [3][torch.rand(1).topk(1)[1]]",  # noqa: E501
    "[3][torch.rand(1).sort().indices[0]], [3][torch.multinomial(torch.rand(1), 1)], [3][torch.rand(1).max(0)[1]]",  # noqa: E501
    "[3][(x > 0).nonzero()[0][1].item()], [3][torch.where(x > 0)[0][0]]",
]


def test_random_numbers_and_positions_are_valid_indices(tmp_path: Path) -> None:
    body = "\n".join([*POSITIONS, "assert torch.randint(8, 17, (1,)).item() == 16"])
    assert estimated(body, tmp_path).guesses


def test_arrays_of_tensors_have_guessed_values(tmp_path: Path) -> None:
    body = "a = x.cpu().detach().numpy(), np.asarray(x), np.array(y), (x > 0).numpy()\n"
    check = "assert [(b.shape, b.dtype.name, b.ravel()[0]) for b in a] == [((64, 256), 'float32', 1.0)] * 2 + ["  # noqa: E501
    estimate = estimated(
        body + check + "((64,), 'int64', 0), ((64, 256), 'bool', False)]", tmp_path
    )
    assert len(estimate.guesses) == 1


def test_a_line_is_named_where_autograd_has_a_thread_of_its_own() -> None:
    def step() -> None:
        named: list[str] = []
        thread = threading.Thread(target=named.extend, args=(map(user_line, [None]),))
        thread.start()  # waits for it, as backward() does
        thread.join()
        assert Path(__file__).name in named[0], named

    ipygpumem.estimate(step)


REFUSED = {
    "x.to_sparse()": "to_sparse",
    "torch.cuda.CUDAGraph()": "torch.cuda.CUDAGraph",
    "torch.cuda.make_graphed_callables(model, (x,))": "torch.cuda.make_graphed_callables",
    "model(x).data_ptr()": "data_ptr",
    "torch.cuda.get_device_properties(0).total_memory": "total_memory",
    "torch.cuda.memory_snapshot()": "torch.cuda.memory_snapshot",
    "torch.cuda.current_blas_handle()": "torch.cuda.current_blas_handle",
    "x.repeat_interleave(x[:, 0].long(), 0)": "output_size",
}


def test_unknown_values_are_refused_by_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "".join(
        f"try:\n    {line}\nexcept Exception as error:\n    print(error)\n" for line in REFUSED
    )
    estimated(body, tmp_path)
    shown = capsys.readouterr().out.splitlines()
    for number, (error, line, words) in enumerate(
        zip(shown, REFUSED, REFUSED.values(), strict=True)
    ):
        assert words in error
        assert f"users_code.py, line {15 + 4 * number}: {line}" in error


class Packed(nn.Parameter):
    """A parameter of a library's own kind that packs itself when it is moved, as
    bitsandbytes' do.
    """

    def __new__(cls, data: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_subclass(cls, data, False)  # type: ignore[attr-defined]
        made.scale = None
        return made

    def cuda(self, *_: Any) -> Packed:  # type: ignore[override]
        self.scale = self.data.abs().amax().cuda()
        self.data = self.data.cuda().to(torch.uint8)[:, ::2].contiguous()
        return self


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randn(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight).__name__ == "Packed"
        return x @ (self.weight.to(x.dtype).repeat(1, 2) * self.weight.scale)


def test_parameters_of_a_librarys_own_kind_are_estimated() -> None:
    there = Unpacking()
    moved = Unpacking()
    moved.weight.cuda = functools.partial(Packed.cuda, moved.weight)  # type: ignore[method-assign]
    moved.weight.scale, moved.weight.data = torch.ones(()), torch.zeros(256, 128, dtype=torch.uint8)

    def step() -> None:
        for model in (Unpacking().cuda(), there.cuda(), moved):
            x = torch.randn(8, 256, device="cuda", requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None

    (device,) = ipygpumem.estimate(step).devices
    assert device.parts["parameters"] >= 3 * 256 * 128
    assert type(there.weight) is Packed
    assert there.weight.scale is None


def test_tensors_made_of_other_tensors_have_their_sizes() -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no processes")
    fakes = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    tensors = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=fakes.FakeStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
        weight = nn.Parameter(
            tensors.distribute_tensor(torch.randn(1024, 256), mesh, [tensors.Shard(0)])
        )
        optimizer = torch.optim.Adam([weight])

        def step() -> None:
            (weight * 2).to_local().sum().backward()
            optimizer.step()

        # Each process has a quarter of 1024 × 256 numbers of 4 bytes.
        (device,) = ipygpumem.estimate(step).devices
        quarter = 1024 * 256
        assert device.before_bytes == quarter
        assert weight.grad is None
        assert len(optimizer.state) == 0
        assert [
            device.parts[name] // quarter for name in ("parameters", "gradients", "optimizer state")
        ] == [1, 1, 2]
    finally:
        torch.distributed.destroy_process_group()


SAVED = """
from tempfile import mkdtemp
f = {file}
torch.save(x, f)
torch.load(f)
"""
UNFOLLOWED = {
    """
from torch.nn.attention.flex_attention import flex_attention
q = x[None, None]
flex_attention(q, q, q)
""": "flex_attention",
    """
import torch.distributed as d
d.init_process_group('gloo', 'tcp://127.0.0.1:0', rank=0, world_size=1)
nn.parallel.DistributedDataParallel(model)
""": "reads a tensor",
    "torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)": "nested tensors",
    "\n\ng = torch.Generator(device='cuda')": "a generator",
    SAVED.format(file="mkdtemp() + '/x.pt'"): "torch.save wrote nothing",
    SAVED.format(file="io.BytesIO()"): "torch.save wrote nothing",
}


@pytest.mark.parametrize(("body", "told"), UNFOLLOWED.items())
def test_operators_that_need_values_are_refused_by_their_line(
    body: str, told: str, tmp_path: Path
) -> None:
    if "gloo" in body and not torch.distributed.is_available():
        pytest.skip("this torch has no processes")
    try:
        with pytest.raises(EstimateError, match=told) as caught:
            estimated(body, tmp_path)
    finally:
        if "gloo" in body:
            torch.distributed.destroy_process_group()
    assert str(caught.value).endswith(body.splitlines()[-1])


def test_threads_that_code_starts_are_followed(tmp_path: Path) -> None:
    body = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    kept = list(pool.map(lambda n: torch.zeros(n, 2**10, device="cuda"), [1, 2, 3] * 30))
assert all(type(t).__name__ == "FakeTensor" for t in kept)
"""
    assert estimated(body, tmp_path, device=None).peak_bytes == 180 * 4 * 2**10


def test_compiled_code_is_estimated_as_eager_code_with_a_note(tmp_path: Path) -> None:
    """torch wraps what its compiler leaves alone, such as checkpointing from its first call on: no
    word of that.
    """
    model = nn.Linear(128, 512)
    x = torch.randn(4, 128)
    compiled = torch.compile(model)
    disabled = torch._dynamo.disable(model)
    estimate = ipygpumem.estimate(lambda: compiled(x).sum().backward())

    def call_eagerly() -> None:
        model(x)
        disabled(x)
        checkpoint(model, x, use_reentrant=False)

    eager = ipygpumem.estimate(call_eagerly)
    assert [note for note in estimate.notes if "torch.compile" in note and "eager" in note]
    assert estimate.peak_bytes == ipygpumem.estimate(lambda: model(x).sum().backward()).peak_bytes
    assert eager.notes == ()


def test_data_loaders_start_no_process_and_no_file_is_saved(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64))
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True, num_workers=2)
    path = tmp_path / "model.pt"
    seen: list[Any] = []

    def read() -> None:
        seen.extend((*x.shape, *y.shape, loader.num_workers) for x, y in loader)
        assert seen == [(32, 8, 32, 0)] * 2
        torch.save(seen, path)

    estimate = ipygpumem.estimate(read)
    assert loader.num_workers == 2
    assert seen == []
    assert not path.exists()
    assert "torch.save wrote nothing" in estimate.notes[-1]
    assert estimate.guesses == ()


def test_free_memory_is_known_to_a_function_imported_by_name() -> None:
    free = torch.cuda.mem_get_info

    def ask() -> None:
        kept = torch.ones(2**28, device="cuda")  # 1 GiB
        assert (kept.ndim, *free()) == (1, *torch.cuda.mem_get_info()) == (1, 7 * 2**30, 8 * 2**30)

    ipygpumem.estimate(ask, device="cuda", device_memory="8GiB")
    with pytest.raises(EstimateError, match="device memory size unknown"):
        ipygpumem.estimate(free)


def test_saving_with_safetensors_writes_nothing(tmp_path: Path) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    weights = {"weight": torch.ones(3)}
    estimate = ipygpumem.estimate(
        lambda: safetensors.save_file(weights, tmp_path / "model.safetensors")
    )
    assert "safetensors wrote nothing" in estimate.notes[-1]
    assert not list(tmp_path.iterdir())


SAVING_TRAINER = """
import ipygpumem, transformers
def train(**options):
    options = transformers.TrainingArguments(max_steps=2, report_to=[], disable_tqdm=True, **options)
    data = [{"input_ids": [1] * 16, "labels": [1] * 16} for _ in range(16)]
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=options, train_dataset=data).train()
"""  # noqa: E501


@pytest.mark.thorough
def test_a_trainer_that_saves_its_model_is_refused_with_advice(
    bare_kernel: Kernel, tmp_path: Path
) -> None:
    run_cells(bare_kernel, SAVING_TRAINER)
    reply = bare_kernel.run(f"ipygpumem.estimate(train, output_dir={str(tmp_path)!r})")
    assert "data_ptr in line" in reply.message
    assert reply.message.endswith("save_strategy='no' for a Trainer")
    run_cells(
        bare_kernel, f"ipygpumem.estimate(train, output_dir={str(tmp_path)!r}, save_strategy='no')"
    )


IMPORTS = """
import io, json, os, pickle, shutil, subprocess, sqlite3, tempfile
import os.path as path
import numpy as np
import torch
from pathlib import Path
from pickle import dump
"""
REAL = "only tensors are fake; calls to these run for real: "


def effects_of_code(body: str) -> list[str]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS, space)
    return effects_of(compile(body, "cell", "exec"), (space,))


REACHES_OUT = {
    "np.save('x.npy', [1])": "np.save",
    "pickle.dump(1, f)": "pickle.dump",
    "os.makedirs('runs', exist_ok=True)": "os.makedirs",
    "subprocess.run(['ls'])": "subprocess.run",
    "Path('x').write_text('y')": "write_text",
    "open('x', 'w').write('y')": "open",
    "print(1)": "print",
    "torch.load('x.pt')": "torch.load",
    """
def f():
    np.save('x', 1)
f()
""": "np.save",
    "[np.save(str(n), n) for n in range(3)]": "np.save",
    """
import numpy
numpy.save('x', 1)
""": "numpy.save",
}
REACHES_NOTHING = [
    "torch.save({}, 'x')",
    "'text'.replace('a', 'b')",
    "path.join('a', 'b'), os.getpid(), os.environ.get('x'), os.path.exists('x')",
    "json.dumps({}), pickle.dumps({}), io.BytesIO()",
]


def test_only_calls_with_outside_effects_are_named() -> None:
    for body, name in REACHES_OUT.items():
        (note,) = effects_of_code(body)
        assert name in note.partition("run for real: ")[2].split(", "), body
    assert [effects_of_code(body) for body in REACHES_NOTHING] == [[]] * len(REACHES_NOTHING)


def test_functions_of_users_modules_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "effectsmodule.py").write_text(
        "import numpy\ndef keep(x):\n    numpy.save('x', x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import effectsmodule  # type: ignore[import-not-found]  # made above

    assert effects_of(compile("m.keep(3)", "cell", "exec"), ({"m": effectsmodule},)) == [
        REAL + "numpy.save"
    ]


def test_a_users_functions_effects_are_real_and_named(tmp_path: Path) -> None:
    def train(x: torch.Tensor, rounds: int) -> None:
        np.save(tmp_path / f"{rounds}.npy", np.ones(3))
        if rounds:
            train(x * 2, rounds - 1)

    assert ipygpumem.estimate(train, torch.ones(8), 2).notes == (REAL + "np.save",)
    assert len(list(tmp_path.iterdir())) == 3


class Counter:
    """An iterator that is no more than its attributes: code gets a copy."""

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count


def test_iterators_that_code_consumes_are_named(tmp_path: Path) -> None:
    batches = iter([torch.ones(3)])
    numbers = (n for n in range(3))
    counter = Counter()
    path = tmp_path / "rows"
    path.write_text("a\nb\n")
    with path.open() as rows:

        def step(given: Any) -> None:
            def inner() -> Any:
                return next(numbers), [0 for _ in rows]

            inner(), next(given), next(batches), next(counter)

        estimate = ipygpumem.estimate(step, zip([1], [2], strict=True))
    assert estimate.notes == (
        "items that the code takes from these iterators are lost: a zip, batches, numbers, rows",
    )
    assert counter.count == 0
    loader = iter(torch.utils.data.DataLoader(torch.ones(4, 2)))
    assert "loader" in ipygpumem.estimate(lambda: next(loader)).notes[0]
