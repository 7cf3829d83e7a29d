"""ipygpumem.estimate and summary: the peak and its parts against real runs, and what gradients and
optimizers take.
"""

import copy
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.optim import Adam

import ipygpumem
from benchmarks.harness.networks import MODELS, OPTIMIZERS, RealStorages, every_optimizer, training
from ipygpumem.errors import EstimateError, GpuMemError
from ipygpumem.estimating.allocation_tracker import AllocationTracker
from ipygpumem.estimating.operators import autocast
from ipygpumem.estimating.operators.torch_functions import TorchFunctions
from ipygpumem.introspect import is_ours
from ipygpumem.units import MIB

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
CARD = "cuda:0"


def held_against_a_real_run(
    step: Callable[[], object], *before: torch.Tensor, rel: float = 0.02
) -> None:
    """Estimate a step, run it, and hold the one against the other."""
    (device,) = ipygpumem.estimate(step).devices
    with RealStorages(*before) as real:
        step()
    assert device.peak_bytes == pytest.approx(real.peak, rel=rel)
    assert device.after_bytes == pytest.approx(real.now, rel=rel)
    assert sum(device.parts.values()) == device.peak_bytes <= device.reserved_bytes


REAL = [
    ("CNN", "Adam", {"mixed": True}),
    ("ResNet", "SGD", {}),
    ("decoder", "AdamW fused", {"rounds": 3}),
]


@pytest.mark.parametrize(
    ("name", "optimizer", "options"), [*REAL, ("checkpointing", "AdamW foreach", {})]
)
def test_the_peak_is_that_of_a_real_run(name: str, optimizer: str, options: dict[str, Any]) -> None:
    make, data = MODELS[name]
    model = make()
    x = data()
    steps = OPTIMIZERS[optimizer](model.parameters())
    held_against_a_real_run(
        lambda: training(model, steps, x, **options), *model.parameters(), *model.buffers(), x
    )


@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adagrad", "SGD"])
def test_sparse_gradients_are_counted(optimizer: str) -> None:
    table, words = nn.Embedding(2000, 256, sparse=True), torch.arange(1500)
    steps = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            table(words).sum().backward()
            steps.step()
            steps.zero_grad()

    bounds = [line.partition(": ")[2] for line in ipygpumem.estimate(train).upper_bounds]
    assert bounds == ([] if optimizer == "SGD" else ["steps.step()"])
    held_against_a_real_run(train, words, table.weight)


def test_the_notebooks_sparse_gradient_is_counted_and_left_alone() -> None:
    table, words = nn.Embedding(2000, 256, sparse=True), torch.arange(1500)
    table(words).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None

    def train() -> None:
        table(words).sum().backward()

    count, parts = gradient._nnz(), (gradient._indices(), gradient._values())
    old_bytes = sum(part.nbytes for part in parts)
    (device,) = ipygpumem.estimate(train).devices
    assert table.weight.grad is gradient
    assert gradient._nnz() == count
    assert device.kept_bytes == pytest.approx(old_bytes, rel=0.02)  # as many rows again
    assert device.peak_bytes - device.after_bytes >= old_bytes


BAGS = {"sum": "SparseAdam", "mean": "Adagrad"}


@pytest.mark.parametrize(("mode", "optimizer"), BAGS.items())
def test_a_bags_sparse_gradient_has_a_row_for_each_index(mode: str, optimizer: str) -> None:
    table, words = nn.EmbeddingBag(2000, 256, sparse=True, mode=mode), torch.arange(1500)
    steps = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)

    def train() -> None:
        table(words[None]).sum().backward()
        steps.step()

    held_against_a_real_run(train, words, table.weight, rel=0.05)


OTHER_LAYOUTS = {
    "torch.eye(9).to_sparse()": "sparse tensors: _to_sparse",
    "torch.eye(9).to_sparse_csr()": "sparse tensors: _to_sparse",
    "indices.t()": "sparse tensors: t in",
    "compressed * 2": "compressed or quantized",
}


@pytest.mark.parametrize(("code", "problem"), OTHER_LAYOUTS.items())
def test_other_sparse_tensors_are_refused_by_their_line(code: str, problem: str) -> None:
    indices = torch.eye(9).to_sparse()
    compressed = indices.to_sparse_csr()
    names = {"torch": torch, "indices": indices, "compressed": compressed}
    function = eval(f"lambda: {code}", names)
    with pytest.raises(EstimateError, match=problem):
        ipygpumem.estimate(function)


def test_a_sparse_product_fits_perhaps() -> None:
    """Kernels of cuSPARSE have workspaces of unknown size."""
    sparse, dense = torch.eye(9).to_sparse(), torch.ones(9, 9)
    estimate = ipygpumem.estimate(lambda: sparse @ dense, device=CARD, device_memory="8GiB")
    assert estimate.verdict == "fits perhaps"
    assert estimate.devices[0].unknown_operators == ("sparse mm",)


KINDS = {nn.LSTM: 0.15, nn.GRU: 0.15, nn.RNN: 0.02}
"""Largest difference from a run on the CPU, whose steps of an LSTM or GRU change results in place.

On a card, the estimate is exact (tests/gpu/test_estimate.py).
"""


DAILY = {(nn.LSTM, False), (nn.GRU, True), (nn.RNN, False)}
"""Each kind and each order of an input's dimensions once."""


@pytest.mark.parametrize(
    ("kind", "batch_first"),
    [
        pytest.param(
            kind, batch_first, marks=() if (kind, batch_first) in DAILY else pytest.mark.thorough
        )
        for kind in KINDS
        for batch_first in (False, True)
    ],
)
def test_packed_sequences_are_counted_by_their_lengths(
    kind: type[nn.RNNBase], batch_first: bool
) -> None:
    model = kind(32, 64, batch_first=batch_first)
    x = torch.randn(8, 40, 32, requires_grad=True)
    if not batch_first:
        x = x.detach().transpose(0, 1).contiguous().requires_grad_()
    lengths = torch.tensor([17, 40, 9, 25, 9, 30, 3, 12])

    def step() -> None:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
        outputs, _ = model(packed)
        padded, counts = rnn.pad_packed_sequence(outputs, batch_first, total_length=44)
        assert padded.shape == ((8, 44, 64) if batch_first else (44, 8, 64))
        assert len(counts) == len(lengths)
        padded.sum().backward()

    held_against_a_real_run(step, x, lengths, *model.parameters(), rel=KINDS[kind])
    assert not ipygpumem.estimate(step).upper_bounds


def test_values_at_unknown_positions_are_not_known() -> None:
    """torch reads them from memory without values."""
    numbers = torch.tensor([17, 40, 9])

    def step() -> None:
        _, order = numbers.sort()
        order.copy_(torch.rand(3).argsort())
        assert numbers[order].tolist() == [0, 0, 0]  # the guess

    assert len(ipygpumem.estimate(step).guesses) == 1


def test_a_line_selects_the_share_that_the_caller_assumes() -> None:
    def select() -> torch.Tensor:
        x = torch.zeros(1 << 20)
        return x[x > 0]

    line = select.__code__.co_firstlineno + 2
    place = f"test_estimate.py:{line}"
    assert ipygpumem.estimate(select).upper_bounds
    (device,) = ipygpumem.estimate(select, assume={place: 0.25}).devices
    assert device.kept_bytes == MIB
    for share in (2, -0.1, "half"):
        with pytest.raises(EstimateError, match=r"assume: 5: .* is not a number from 0 to 1"):
            ipygpumem.estimate(select, assume={5: share})
    with pytest.raises(EstimateError, match=r"the assumption 'five=0.5.*' is not LINE=FRACTION"):
        ipygpumem.estimate(select, assume={"five": 0.5})


COMPOSITE = [
    *(
        f"functional.interpolate(images, scale_factor=2, mode={mode!r})"
        for mode in ("nearest", "bilinear", "bicubic")
    ),
    "functional.dropout(images)",
    "nn.LSTM(64, 64)(images[0])[0]",
    "images @ images",
    "torch.stft(images.flatten(), 256, return_complex=True, window=torch.ones(256))",
]


@pytest.mark.parametrize("code", COMPOSITE)
def test_composite_operators_allocate_the_same_in_inference(code: str) -> None:
    names = {
        "torch": torch,
        "nn": nn,
        "functional": functional,
        "images": torch.zeros(8, 3, 64, 64),
    }
    for mode in ("no_grad", "inference_mode"):
        exec(f"def {mode}():\n    with torch.{mode}():\n        return {code}\n", names)
    figures = []
    for mode in ("no_grad", "inference_mode"):
        (device,) = ipygpumem.estimate(names[mode], device=CARD).devices
        figures.append((device.peak_bytes, device.reserved_bytes, device.kept_bytes))
    assert figures[0] == figures[1]


def test_inference_reads_a_part_of_a_tensor_of_another_module() -> None:
    """Its fake copy is made when the code reaches it, inside of inference mode."""
    names: dict[str, Any] = {"torch": torch, "images": torch.zeros(8, 1 << 18)}
    exec("def half():\n    with torch.inference_mode():\n        return images[0] * 2\n", names)
    (device,) = ipygpumem.estimate(names["half"], device=CARD).devices
    assert (device.before_bytes, device.kept_bytes) == (8 * MIB, MIB)


PLACES = "x.long().view(1, -1)"
OF_A_QUARTER = {
    "x.unique()": (1, 4),
    "x.unique(return_counts=True)": (3, 12),
    "x.unique_consecutive()": (4, 4),
    "x.unique_consecutive(return_counts=True)": (12, 12),
    "torch.unique_consecutive(x.view(1024, 1024), dim=0)": (1, 1),
    "x.view(1024, 1024).unique(dim=1)": (1, 1),
    "x.nonzero()": (2, 2),
    "(x > 0).unique()": (0, 0),
    "torch.bincount(x.long())": (2, 2),
    f"torch.sparse_coo_tensor({PLACES}, x, (1 << 20,)).coalesce()": (12, 9),
}
"""MiB that a quarter of 2**20 values keep in RAM, and on a card.

Some operators cut a tensor for all values. Their memory stays as it was.
"""


@pytest.mark.parametrize("code", OF_A_QUARTER)
def test_a_share_keeps_the_memory_that_torch_keeps(code: str) -> None:
    names: dict[str, Any] = {}
    source = f"def step():\n    return {code}\n"
    exec(compile(source, "a cell", "exec"), {"torch": torch, "x": torch.zeros(1 << 20)}, names)
    sizes = []
    for device in ("cpu", CARD):
        estimate = ipygpumem.estimate(names["step"], device=device, assume={2: 0.25})
        assert not estimate.upper_bounds
        assert any("assumed to select 0.25" in note for note in estimate.notes)
        sizes.append(estimate.devices[0].kept_bytes)
    assert [round(size / MIB) for size in sizes] == list(OF_A_QUARTER[code])


def test_unknown_sequence_lengths_are_assumed_to_be_the_longest() -> None:
    x = torch.randn(8, 40, 32)

    def step() -> torch.Tensor:
        lengths = (torch.rand(8) * 40).long() + 1
        packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return packed.data

    estimate = ipygpumem.estimate(step)
    (line,) = estimate.upper_bounds
    assert "pack_padded_sequence(x, lengths" in line
    label = line.partition(": ")[0].replace(", line ", ":")
    (note,) = ipygpumem.estimate(step, assume={label: 0.5}).notes
    assert note.endswith("is not used: values decide its size, but no share of them is selected")
    assert estimate.peak_bytes >= 2 * x.nbytes


RECURRENT = [
    ("LSTM", (64, 128, 2, 16, 8)),
    ("LSTM", (40, 200, 3, 16, 5)),
    ("GRU", (32, 48, 1, 8, 10)),
]


@pytest.mark.parametrize(("kind", "sizes"), [*RECURRENT, ("RNN", (8, 24, 2, 4, 5))])
def test_the_estimate_of_a_recurrent_network_matches_its_run(
    kind: str, sizes: tuple[int, ...]
) -> None:
    given, wide, layers, batch, steps = sizes
    model = getattr(nn, kind)(given, wide, layers, batch_first=True, bidirectional=layers > 1)
    x = torch.randn(batch, steps, given)

    def train() -> None:
        for _ in range(2):
            model.zero_grad()
            model(x)[0].sum().backward()

    held_against_a_real_run(train, x, *model.parameters())


def test_the_history_of_lbfgs_is_counted_for_its_iterations() -> None:
    model = nn.Linear(256, 256, bias=False)
    x = torch.randn(512, 256)
    y = x @ torch.randn(256, 256)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, tolerance_grad=0, tolerance_change=0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    # The estimate, then the same steps for real.
    estimate = ipygpumem.estimate(optimizer.step, closure)
    assert any("LBFGS" in note for note in estimate.notes)
    with RealStorages(x, y, model.weight) as real:
        optimizer.step(closure)
    assert estimate.peak_bytes == pytest.approx(real.peak, rel=0.1)
    assert len(optimizer.state[model.weight]["old_dirs"]) > 15


def test_memory_freed_by_the_code_is_not_counted() -> None:
    """Gradients of an earlier step, and tensors that a cast replaces, are not counted for good."""
    model = nn.Linear(512, 512, bias=False)
    x = torch.randn(8, 512)
    model(x).sum().backward()

    def train() -> None:
        model.zero_grad()
        model(x).sum().backward()

    held_against_a_real_run(train, x, model.weight)
    (device,) = ipygpumem.estimate(lambda: model.half()).devices
    # the weights, and the gradient that a cast casts as well
    assert device.after_bytes <= MIB // 2 + MIB


def test_the_parts_of_a_linear_layers_training_are_exact() -> None:
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    optimizer = Adam(model.parameters())
    x = torch.randn(256, 1024)  # 1 MiB

    def step() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).relu().sum().backward()
            optimizer.step()

    (device,) = ipygpumem.estimate(step).devices
    assert device.before_bytes == 5 * MIB
    assert (device.parts["parameters"], device.parts["other"]) == (4 * MIB, MIB)
    assert device.parts["optimizer state"] == 8 * MIB + 512
    assert (
        device.kept_bytes == 12 * MIB + 512
    )  # the gradient, and the state with its count of steps


def test_a_forward_pass_without_gradients_has_temporaries_only() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    x = torch.randn(1024, 512)
    (device,) = ipygpumem.estimate(torch.no_grad()(model), x).devices
    assert (device.parts["activations"], device.parts["gradients"]) == (0, 0)
    assert device.parts["temporaries"] == 4 * MIB  # what goes into a layer, and what comes out
    assert device.kept_bytes == 2 * MIB


def residual(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = y.exp()
    return y + z, z


@pytest.mark.parametrize(
    ("branch", "peak"),
    # x, y, both branches' values, what is given to backward, and the gradients of both branches:
    # those that meet are added up in place. Where a branch's gradient is the one given to backward,
    # the sum is a tensor of its own.
    [(lambda y: (y * 2.0 + y * 3.0,), 6), (residual, 7)],
    ids=["two branches", "a residual"],
)
def test_gradients_are_added_up_as_autograd_does(
    branch: Callable[[Any], tuple[Any, ...]], peak: int
) -> None:
    x = torch.ones(MIB // 4, requires_grad=True)

    def step() -> None:
        y = x * 1.0
        results = branch(y)
        results[0].backward(torch.ones_like(x))

    assert ipygpumem.estimate(step, device="cpu").peak_bytes // MIB == peak


def test_copies_have_their_originals_ties_and_layout(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    rows = torch.zeros(512, 512)
    odd = torch.zeros(4, 6, dtype=torch.float16)[1:, ::2].T
    first = rows[0]
    names = [rows, rows.T]

    def show() -> Any:
        print(odd.shape, odd.stride(), odd.storage_offset(), odd.dtype)
        return model, first, names, rows

    (device,) = ipygpumem.estimate(show).devices
    assert device.before_bytes == 256 * 1024 + MIB + 512
    show()
    shown, expected = capsys.readouterr().out.splitlines()
    assert shown == expected


def test_functional_transforms_and_a_meta_model_can_be_estimated() -> None:
    x = torch.randn(64, 128)
    weights = torch.randn(128)
    estimate = ipygpumem.estimate(lambda: torch.func.grad(lambda w: (x @ w).sum())(weights))
    assert estimate.devices[0].before_bytes == 64 * 128 * 4 + 512
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
    (device,) = ipygpumem.estimate(lambda: model(torch.ones(1, 4096)).sum().backward()).devices
    assert (device.before_bytes, device.parts["parameters"]) == (64 * MIB, 64 * MIB)


def test_a_device_that_is_not_here_can_be_estimated() -> None:
    model = nn.Linear(1024, 1024, bias=False)

    def step() -> None:
        there = model.to("cuda")
        with torch.autocast("cuda"):
            y = there(torch.randn(64, 1024, device="cuda"))
        assert y.dtype is torch.float16
        y.float().sum().backward()

    # The card of a given size, on which it fits.
    estimate = ipygpumem.estimate(step, device_memory="24GiB")
    (device,) = estimate.devices
    assert device.device == CARD
    assert device.room_bytes == 24 * 1024 * MIB
    assert device.fits is True
    assert (
        "cuda:0 is not available: tensors on it and on the host are counted together"
        in estimate.notes
    )

    # A small card, and one of unknown size.
    assert ipygpumem.estimate(step, device="cuda", device_memory="4MiB").fits is False
    assert ipygpumem.estimate(step, device="cuda").fits is None


HALF = [
    "y @ y",
    "torch.einsum('ij,kj->ik', y.float(), w)",
    "nn.LSTMCell(64, 64)(y)[0]",
    "F.linear(y, w)",
    "y + 1",
]
FLOAT32 = [
    "y.exp()",
    "y.pow(2)",
    "y.softmax(-1)",
    "y.log_softmax(-1)",
    "y.sum()",
    "y.sum(1)",
    "y.norm()",
    "y.prod()",
]
FLOAT32 += [
    "y.norm(dim=1)",
    "F.layer_norm(y, (64,))",
    "y.cumsum(0)",
    "torch.addcmul(y, y, w)",
    "F.mse_loss(y, y)",
]
FLOAT32 += ["torch.linalg.norm(y)", "F.kl_div(y, y)", "F.softplus(y)", "torch.logsumexp(y, -1)"]
FLOAT32 += [
    "F.cross_entropy(y, torch.zeros(64, dtype=torch.long))",
    "F.group_norm(y, 2)",
    "F.interpolate(y[None], 32)",
]


def test_without_a_card_autocast_has_the_lists_of_cuda() -> None:
    space = {"nn": nn, "F": functional, "torch": torch}

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") is torch.float16
            w = torch.randn(64, 64)
            y = w @ w
            values = {**space, "y": y, "w": w}
            assert [code for code in HALF if eval(code, values).dtype is not torch.float16] == []
            assert [code for code in FLOAT32 if eval(code, values).dtype is not torch.float32] == []

            Converted.apply(w.half().cuda())

    class Converted(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Any) -> Any:
            assert x.dtype is torch.float32
            return x.clone()

    ipygpumem.estimate(step, device="cuda")
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the CPU has its own lists again
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).exp().dtype is torch.bfloat16


def test_autocasts_operator_lists_match_this_torch() -> None:
    """torch brings its lists in a header: AT_FORALL_X(_) _(operator, overload) ..."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    theirs = {
        name: set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body))
        for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)", header)
    }
    result = theirs["FP32_SET_OPT_DTYPE"] | theirs["DIFFERENT_REDISPATCH_SIGNATURE"]
    lists = [theirs["LOWER_PRECISION_FP"], theirs["FP32"], result, theirs["PROMOTE"]]
    ours = (autocast._LOWER, autocast._FLOAT32, autocast._FLOAT32_RESULT, autocast._WIDEST)
    assert [set(names.split()) for names in ours] == lists


@pytest.mark.parametrize(
    ("build", "peak", "after"),
    [
        (lambda: nn.Linear(512, 512, bias=False).to(torch.bfloat16).to("cuda"), None, MIB // 2),
        (lambda: nn.Linear(512, 512, bias=False, device="meta").to_empty(device="cuda"), MIB, MIB),
    ],
    ids=["moved and cast", "made on meta"],
)
def test_a_module_goes_to_a_device_that_is_not_here(
    build: Any, peak: int | None, after: int
) -> None:
    (device,) = ipygpumem.estimate(build).devices
    assert device.device == CARD
    assert device.after_bytes == after
    assert sum(device.parts.values()) == device.peak_bytes
    assert peak is None or device.peak_bytes == peak


def test_every_optimizer_steps_on_a_named_card_with_all_options() -> None:
    optimizers = every_optimizer()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step(lambda: 0.0)

    first = ipygpumem.estimate(step, device=CARD)
    for optimizer in optimizers:
        if not optimizer.defaults.get("capturable"):  # which steps on cards only
            optimizer.step(lambda: 0.0)
    for options in (
        {"device": "cuda"},
        {"device": CARD, "device_memory": "24GiB", "timeout": 100.0},
    ):
        assert ipygpumem.estimate(step, **options).peak_bytes == pytest.approx(
            first.peak_bytes, rel=0.01
        )


def test_the_value_of_a_number_on_the_host_is_known() -> None:
    count = torch.tensor(1000)
    weight = nn.Parameter(torch.tensor(2.0))

    def step() -> Any:
        count.add_(24)
        (weight * torch.ones(int(count))).sum().backward()
        return torch.ones(int(count), int(weight * 128))

    estimate = ipygpumem.estimate(step)
    assert estimate.peak_bytes == pytest.approx(MIB, rel=0.02)
    assert estimate.guesses == ()
    assert int(count) == 1000
    assert weight.grad is None


@pytest.mark.parametrize("name", ["Adam", "Adafactor"])
def test_an_accelerators_optimizer_is_estimated_with_temporaries(name: str) -> None:
    """There, Adam takes all parameters at once, which needs temporaries as large as all of them;
    Adafactor does not.
    """
    if not hasattr(torch.optim, name):
        pytest.skip("this torch has no such optimizer")
    weights = [nn.Parameter(torch.zeros(256, 256)) for _ in range(16)]  # 4 MiB
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def peak(**options: Any) -> int:
        return ipygpumem.estimate(
            getattr(torch.optim, name)(weights, **options).step, device=CARD
        ).peak_bytes

    each = peak(foreach=False)
    together = peak(foreach=True)
    assert together - each >= 3 * MIB
    assert peak() == (together if name == "Adam" else each)


def bytes_kept_by(code: Any, device: str) -> int:
    """Return the memory that code keeps in addition to 1 MiB of result."""
    return ipygpumem.estimate(code, device=device).devices[0].kept_bytes - MIB


def test_dropout_and_attention_keep_the_same_memory_as_on_a_card() -> None:
    """On a card, dropout keeps a byte for each number, and attention no matrix of weights."""
    x = torch.ones(MIB // 4, requires_grad=True)
    heads = torch.ones(1, 4, 1024, 64, requires_grad=True)

    def attend() -> Any:
        return functional.scaled_dot_product_attention(
            heads, heads, heads, dropout_p=0.1, is_causal=True
        )

    assert bytes_kept_by(lambda: functional.dropout(x, 0.5), CARD) == MIB // 4
    assert bytes_kept_by(lambda: functional.dropout(x, 0.5), "cpu") == MIB
    assert bytes_kept_by(lambda: nn.Dropout(0.5).eval()(x), CARD) == -MIB  # it gives x itself
    assert (
        bytes_kept_by(attend, CARD)
        <= MIB // 16
        < 4 * 1024 * 1024 * 4
        < bytes_kept_by(attend, "cpu")
    )


def model_to_summarize() -> nn.Sequential:
    """Return a model with a module in another one, and a parameter that is not trained."""
    last = nn.Sequential(nn.Linear(512, 10), nn.Identity())
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), last)
    model[0].bias.requires_grad_(False)
    return model


def test_a_summary_has_a_row_for_each_module() -> None:
    summary = ipygpumem.summary(model_to_summarize(), torch.randn(64, 256))
    assert [(row.name, row.depth, row.output_shape) for row in summary.rows] == [
        ("", 0, (64, 10)),
        ("0", 1, (64, 512)),
        ("1", 1, (64, 512)),
        ("2", 1, (64, 10)),
        ("2.0", 2, (64, 10)),
        ("2.1", 2, (64, 10)),
    ]


def test_a_summary_counts_parameters() -> None:
    summary = ipygpumem.summary(model_to_summarize(), torch.randn(64, 256))
    whole, first, *_ = summary.rows
    assert (first.parameters, first.parameter_bytes) == (257 * 512, 257 * 512 * 4)
    assert whole.parameters == summary.trainable_parameters + 512


def test_a_summary_has_the_bytes_kept_for_backward() -> None:
    summary = ipygpumem.summary(model_to_summarize(), torch.randn(64, 256))
    # Nothing needs what the first layer gives: the ReLU keeps its own result, and the last layer's
    # is the caller's.
    assert {row.name: row.activation_bytes for row in summary.rows} == {
        "": 64 * 522 * 4,
        "0": 0,
        "1": 64 * 512 * 4,
        "2": 64 * 40,
        "2.0": 64 * 40,
        "2.1": 0,
    }


def test_a_summary_leaves_the_model_as_it_was() -> None:
    model = model_to_summarize()
    ipygpumem.summary(model, torch.randn(64, 256))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model[0].weight.grad is None
    assert type(model[0].weight) is nn.Parameter


def test_a_summary_is_printed_as_a_table() -> None:
    text = str(ipygpumem.summary(model_to_summarize(), torch.randn(64, 256)))
    assert text.startswith("Sequential: 136,714 parameters, 136,202 trainable")
    assert "64 × 512" in text


def test_a_summary_takes_only_a_module() -> None:
    with pytest.raises(EstimateError, match=r"a summary takes a torch.nn.Module, not int"):
        ipygpumem.summary(3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_memory": -5}, "not -5"),
        ({"device_memory": True}, "not an object of type bool"),
        ({"timeout": -1}, "timeout: -1 is not a number from"),
        ({"timeout": "x"}, "timeout: 'x' is not a number from"),
        ({"device_memory": 24}, "24 B is too little"),
        ({"device_memory": "24"}, "has no unit"),
    ],
)
def test_a_wrong_size_or_time_is_said_before_anything_runs(
    options: dict[str, Any], words: str
) -> None:
    ran: list[int] = []
    with pytest.raises(GpuMemError, match=words):
        ipygpumem.estimate(ran.append, 1, **options)
    assert ran == []


def test_estimates_read_tensors_without_the_functions_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a backward pass it is active while operations are followed: reads would call it."""
    in_operations: list[int] = []
    calls: list[object] = []
    follow, call = AllocationTracker._follow_operation, TorchFunctions.__torch_function__

    # Notes each call of a function while an operation is followed.
    def followed(self: Any, *args: Any) -> Any:
        in_operations.append(1)
        try:
            return follow(self, *args)
        finally:
            in_operations.pop()

    def called(self: Any, func: Any, *args: Any) -> Any:
        if in_operations:
            calls.append(func)
        return call(self, func, *args)

    monkeypatch.setattr(AllocationTracker, "_follow_operation", followed)
    monkeypatch.setattr(TorchFunctions, "__torch_function__", called)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()

    ipygpumem.estimate(step, device="cuda:0")
    assert not calls


def test_storages_are_marked_without_the_functions_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of a tensor would be a call of its handler, several for each parameter."""
    calls: list[str] = []
    call = TorchFunctions.__torch_function__

    # Notes each call of a function that our own code makes.
    def called(self: Any, func: Any, *args: Any) -> Any:
        caller = sys._getframe(1).f_code
        if is_ours(caller.co_filename):
            calls.append(f"{caller.co_name}: {func}")
        return call(self, func, *args)

    monkeypatch.setattr(TorchFunctions, "__torch_function__", called)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    ipygpumem.estimate(step, device="cuda:0")
    names = {text.partition(":")[0] for text in calls}
    assert names.isdisjoint(
        {"storages_of", "mark", "_fake_with_strides", "_fake_like", "_log_original"}
    )


def test_a_deep_copy_of_a_model_is_estimated() -> None:
    """An average of the weights, or a frozen reference, whose normalisation counts its batches."""
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512))
    size = sum(value.nbytes for value in model.state_dict().values())

    def average() -> nn.Module:
        copied = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for own, other in zip(copied.parameters(), model.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
        return copied

    (device,) = ipygpumem.estimate(average, device="cpu").devices
    assert device.kept_bytes == pytest.approx(size, abs=1024)
    assert int(model[1].num_batches_tracked) == 0

    def known() -> None:
        assert int(copy.deepcopy(model)[1].num_batches_tracked) == 0

    # Its number of batches is known, not guessed.
    estimate = ipygpumem.estimate(known, device="cpu")
    assert not estimate.guesses


def test_deep_copies_of_views_share_a_copy_of_the_whole_storage() -> None:
    whole = torch.zeros(1 << 18)
    weight = nn.Parameter(torch.zeros(1 << 18))
    weight.sum().backward()

    def views() -> list[torch.Tensor]:
        first, second = copy.deepcopy([whole[:10], whole[10:].view(2, -1)])
        first.add_(1)
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert (second.shape, second.storage_offset()) == ((2, (1 << 17) - 5), 10)
        return [first, second]

    def with_gradient() -> torch.Tensor:
        copied = copy.deepcopy(weight.detach().requires_grad_())
        copied.grad = copy.deepcopy(weight.grad)
        copied = copy.deepcopy(copied)
        assert copied.requires_grad
        return copied

    # The whole storage once; a tensor with its gradient.
    assert ipygpumem.estimate(views, device="cpu").devices[0].kept_bytes == MIB
    assert ipygpumem.estimate(with_gradient, device="cpu").devices[0].kept_bytes == 2 * MIB


def test_code_that_pickles_a_tensor_is_refused_and_copies_run() -> None:
    data = torch.zeros(1 << 18)
    with pytest.raises(EstimateError, match="needs the values of tensors: pickle in"):
        ipygpumem.estimate(lambda: pickle.dumps(data), device="cpu")
    copied = ipygpumem.estimate(lambda: copy.copy(data) + 1, device="cpu")
    assert copied.devices[0].kept_bytes == MIB
