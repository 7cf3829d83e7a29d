"""ipygpumem.estimate and %%estimate: the peak and its parts against real runs, and nothing of the notebook touched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

import ipygpumem
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.reading import free_bytes
from ipygpumem.probes.nvml import Card, DeviceWide, Nvml
from ipygpumem.units import MIB
from tests.kernel import Kernel
from tests.steps import kernel_with
from tests.torch_cpu.networks import MODELS, OPTIMIZERS, RealStorages, images, residual, training

MEMORY = "24GiB"


def compare(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, **options: Any) -> None:
    """Estimate a training, run it, and hold the one against the other."""
    estimate = ipygpumem.estimate(training, model, optimizer, x, **options)
    (found,) = estimate.devices
    real = RealStorages(*model.parameters(), *model.buffers(), x)
    with real:
        training(model, optimizer, x, **options)
    assert found.peak_bytes == pytest.approx(real.peak, rel=0.02)
    assert found.after_bytes == pytest.approx(real.now, rel=0.02)
    assert sum(found.parts.values()) == found.peak_bytes
    assert found.reserved_bytes >= found.peak_bytes


STEPS: list[tuple[str, str, dict[str, Any]]] = [
    *((model, "Adam", {}) for model in MODELS),
    *((model, optimizer, {}) for model in ("CNN", "decoder") for optimizer in OPTIMIZERS if optimizer != "Adam"),
    *((model, "Adam", options) for model in ("CNN", "decoder") for options in ({"mixed": True}, {"rounds": 3})),
]


@pytest.mark.parametrize(("model", "optimizer", "options"), STEPS, ids=str)
def test_the_peak_is_that_of_a_real_run(model: str, optimizer: str, options: dict[str, Any]) -> None:
    make, data = MODELS[model]
    network = make()
    compare(network, OPTIMIZERS[optimizer](network.parameters()), data(), **options)


def test_the_parts_of_a_linear_layers_training_are_exact() -> None:
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    optimizer = Adam(model.parameters())
    x = torch.randn(256, 1024)  # 1 MiB

    def step() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).relu().sum().backward()
            optimizer.step()

    (found,) = ipygpumem.estimate(step).devices
    assert found.before_bytes == 5 * MIB
    assert (found.parts["parameters"], found.parts["other"]) == (4 * MIB, MIB)
    assert found.parts["optimizer state"] == 8 * MIB + 512
    assert found.kept_bytes == 12 * MIB + 512  # the gradient, and the state with its count of steps


def test_a_forward_pass_without_gradients_has_temporaries_only() -> None:
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), torch.randn(1024, 512)

    @torch.no_grad()
    def infer() -> torch.Tensor:
        return model(x)

    (found,) = ipygpumem.estimate(infer).devices
    assert (found.parts["activations"], found.parts["gradients"]) == (0, 0)
    assert found.parts["temporaries"] == 4 * MIB  # what goes into a layer, and what comes out
    assert found.kept_bytes == 2 * MIB


def test_nothing_of_the_notebook_is_changed() -> None:
    """Parameters, gradients, buffers, optimizer state and random generators are the same, bit by bit."""
    model = residual()
    optimizer, generator = Adam(model.parameters()), torch.Generator().manual_seed(3)
    x = images()
    training(model, optimizer, x)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    log: list[float] = []

    def everything() -> list[tuple[int, torch.Tensor]]:
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        found = [x, *model.state_dict(keep_vars=True).values(), *gradients, *state]
        return [(id(tensor), tensor.untyped_storage().data_ptr(), tensor.detach().clone()) for tensor in found]

    def step() -> None:
        torch.manual_seed(7)
        random.seed(7)
        x.mul_(2)
        x.add_(torch.randn(x.shape, generator=generator))
        log.append(training(model, optimizer, x))
        schedule.step()
        model.eval()
        model.register_buffer("extra", torch.ones(3))

    before, generators = everything(), (torch.get_rng_state(), generator.get_state(), random.getstate())
    groups = {**optimizer.param_groups[0]}
    ipygpumem.estimate(step)
    after = everything()
    assert [(name, place) for name, place, _ in before] == [(name, place) for name, place, _ in after]
    assert all(torch.equal(old, new) for (_, _, old), (_, _, new) in zip(before, after, strict=True))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert torch.equal(generators[1], generator.get_state())
    assert generators[2] == random.getstate()
    assert {**optimizer.param_groups[0]} == groups
    assert (log, model.training, hasattr(model, "extra"), schedule.last_epoch) == ([], True, False, 0)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_tied_weights_and_views_have_tied_copies() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    rows = torch.zeros(512, 512)
    first, names = rows[0], [rows, rows.T]
    (found,) = ipygpumem.estimate(lambda: (model, first, names, rows)).devices
    assert found.before_bytes == 256 * 1024 + MIB


def test_a_fake_copy_has_its_originals_layout(capsys: pytest.CaptureFixture[str]) -> None:
    original = torch.zeros(4, 6, dtype=torch.float16)[1:, ::2].T

    def show() -> None:
        print(original.shape, original.stride(), original.storage_offset(), original.dtype)

    ipygpumem.estimate(show)
    show()
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_a_line_that_asks_for_a_value_is_reported() -> None:
    x = torch.randn(8, requires_grad=True)

    def step() -> float:
        loss = (x * 2).sum()
        if loss > 3:
            return 0.0
        return float(loss.item() + sum(x.tolist()))

    found = ipygpumem.estimate(step)
    lines = ["if loss > 3:", "return float(loss.item() + sum(x.tolist()))"]
    assert [line.partition(": ")[2] for line in found.guesses] == lines


def test_a_users_error_is_raised_as_it_is() -> None:
    x, save = torch.randn(2, 3), torch.save

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="reduction dim"):
        ipygpumem.estimate(lambda: x @ x)
    with pytest.raises(KeyboardInterrupt):
        ipygpumem.estimate(interrupted)
    assert ipygpumem.estimate(lambda: x @ x.T).devices  # and no mode is left on
    assert (type(torch.zeros(1)), torch.save) == (torch.Tensor, save)


def test_a_device_that_is_not_here_can_be_estimated() -> None:
    model = nn.Linear(1024, 1024, bias=False)

    def step() -> None:
        there = model.to("cuda")
        with torch.autocast("cuda"):
            y = there(torch.randn(64, 1024, device="cuda"))
        assert y.dtype is torch.float16
        y.float().sum().backward()

    found = ipygpumem.estimate(step, device_memory=MEMORY)
    (device,) = found.devices
    assert (device.device, device.room_bytes, device.fits) == ("cuda:0", 24 * 1024 * MIB, True)
    assert "cuda:0 is not here: tensors on it and on the host are counted together" in found.notes
    assert ipygpumem.estimate(step, device="cuda", device_memory="4MiB").fits is False
    assert ipygpumem.estimate(step, device="cuda").fits is None


def make_on_cuda() -> object:
    return torch.empty(1 << 20, dtype=torch.uint8, device="cuda")


def test_what_is_free_is_asked_without_making_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, int]:
        raise AssertionError("this makes a context")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    cards = [Card(0, "a card", DeviceWide(total_bytes=10 * MIB, used_bytes=4 * MIB))]
    monkeypatch.setattr(Nvml, "cards", lambda self: cards)
    found = ipygpumem.estimate(make_on_cuda)
    assert [(device.device, device.room_bytes) for device in found.devices] == [("cuda:0", 6 * MIB)]
    assert found.devices[0].context_bytes == 768 * MIB  # that of this process is still to be made
    cards.append(Card(1, "another", cards[0].wide))  # which of them is torch's first is not known yet
    assert ipygpumem.estimate(make_on_cuda).devices[0].room_bytes is None


def test_a_driver_that_breaks_off_leaves_the_room_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, int]:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(Nvml, "cards", refuse)
    (device,) = ipygpumem.estimate(make_on_cuda).devices
    assert (device.device, device.peak_bytes, device.room_bytes) == ("cuda:0", MIB, None)
    for name, value in (("memory_reserved", 3 * MIB), ("memory_allocated", MIB), ("mem_get_info", (5 * MIB, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)
    # What the allocator keeps counts as free.
    assert [free_bytes(name) for name in ("cuda", "cuda:0", "cuda:1")] == [7 * MIB, 7 * MIB, None]
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    assert free_bytes("cuda:0") is None


def test_free_on_the_host_is_what_a_containers_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.estimating.reading.available_bytes", lambda: 5 * MIB)
    (device,) = ipygpumem.estimate(lambda: torch.ones(4)).devices
    assert (device.device, device.room_bytes) == ("cpu", 5 * MIB)


def test_an_optimizer_of_an_accelerator_steps_as_torch_does_there() -> None:
    """There, Adam takes all parameters at once, which needs temporaries as large as all of them."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)])  # 4 MiB
    optimizer = Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    here, there = (ipygpumem.estimate(optimizer.step, device=device).peak_bytes for device in ("cpu", "cuda"))
    assert there - here >= 3 * MIB


def test_a_data_loader_starts_no_processes() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64))
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True, num_workers=2)
    seen: list[Any] = []

    def read() -> None:
        seen.extend((*x.shape, *y.shape, loader.num_workers) for x, y in loader)
        assert seen == [(32, 8, 32, 0)] * 2

    ipygpumem.estimate(read)
    assert (loader.num_workers, seen) == (2, [])


def test_a_checkpoint_is_not_written(tmp_path: Any) -> None:
    path, model = tmp_path / "model.pt", nn.Linear(2, 2)
    found = ipygpumem.estimate(lambda: torch.save(model.state_dict(), path))
    assert not path.exists()
    assert "torch.save wrote nothing" in found.notes[0]


@pytest.mark.parametrize(
    ("build", "peak", "after"),
    [
        (lambda: nn.Linear(512, 512, bias=False).to(torch.bfloat16).to("cuda"), None, MIB // 2),
        (lambda: nn.Linear(512, 512, bias=False, device="meta").to_empty(device="cuda"), MIB, MIB),
    ],
    ids=["moved and cast", "made on meta"],
)
def test_a_module_goes_to_a_device_that_is_not_here(build: Any, peak: int | None, after: int) -> None:
    (found,) = ipygpumem.estimate(build).devices
    assert (found.device, found.after_bytes, sum(found.parts.values())) == ("cuda:0", after, found.peak_bytes)
    assert peak is None or found.peak_bytes == peak


def test_functional_transforms_can_be_estimated() -> None:
    x, weights = torch.randn(64, 128), torch.randn(128)
    found = ipygpumem.estimate(lambda: torch.func.grad(lambda w: (x @ w).sum())(weights))
    assert found.devices[0].before_bytes == 64 * 128 * 4 + 512


def test_a_meta_model_is_a_template_as_well() -> None:
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
    (found,) = ipygpumem.estimate(lambda: model(torch.ones(1, 4096)).sum().backward()).devices
    assert (found.before_bytes, found.parts["parameters"]) == (64 * MIB, 64 * MIB)


SETUP = """
import torch
from torch import nn
model = nn.Linear(1024, 1024, bias=False)
x = torch.randn(256, 1024)
optimizer = torch.optim.Adam(model.parameters())
losses = []
def loss_of(y): return (y * scale).sum()
scale = 2
"""
trainer = kernel_with("%load_ext ipygpumem", SETUP)

CELL = """%%estimate --device-memory 24GiB --device cuda:0
loss = loss_of(model(x))
loss.backward()
optimizer.step()
losses.append(loss.item())
scale = 3
print(x.shape)
"""


def test_a_cell_is_estimated_and_leaves_nothing(trainer: Kernel) -> None:
    reply = trainer.run(CELL)
    assert (reply.status, reply.stdout) == ("ok", "torch.Size([256, 1024])\n"), reply.traceback + reply.stderr
    (report,) = reply.reports("estimate")
    for words in ("cuda:0 peak", "of 24.00 GiB", "optimizer state", "line 5: losses.append(loss.item())"):
        assert words in report
    assert "only tensors are fake; calls of these run for real: print\n" in report
    left = trainer.value("(losses, scale, 'loss' in globals(), model.weight.grad, len(optimizer.state))")
    assert left == ([], 2, False, None, 0)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%estimate --device-memory much\nx", "'much' is not a size"),
        ("%%estimate --device gpu\nx", "'gpu' is not a device"),
        ("%%estimate\n\n", "the cell is empty"),
        ("%%estimate\nawait x\n", "can await only inside an async function"),
        ("%%estimate --fast\nx", "'--fast' is not an option; use --device"),
        ("%%estimate\ny = x * 2\nz = y[y > 0]\n", "index in line 3: z = y[y > 0]"),
        ("%%estimate\n%%time\ny = x\n", "%%time acts on the notebook itself"),
        ("%%estimate\nfor _ in [1]:\n    %time y = x\n", "%time acts on the notebook itself"),
    ],
)
def test_a_mistake_in_a_cell_is_one_line(trainer: Kernel, cell: str, message: str) -> None:
    reply = trainer.run(cell)
    assert message in reply.stderr
    assert reply.stderr.count("\n") == 1


def test_a_summary_has_a_row_for_each_module() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Sequential(nn.Linear(512, 10), nn.Identity()))
    model[0].bias.requires_grad_(False)
    found = ipygpumem.summary(model, torch.randn(64, 256))
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["", "0", "1", "2", "2.0", "2.1"]
    assert [row.depth for row in found.rows] == [0, 1, 1, 1, 2, 2]
    assert [row.output_shape for row in found.rows] == [(64, 10), (64, 512), (64, 512), (64, 10), (64, 10), (64, 10)]
    assert (rows["0"].parameters, rows["0"].parameter_bytes) == (257 * 512, 257 * 512 * 4)
    assert rows[""].parameters == found.trainable_parameters + 512
    kept = {name: row.activation_bytes for name, row in rows.items()}
    # Nothing needs what the first layer gives: the ReLU keeps its own result, and the last layer's is the caller's.
    assert kept == {"": 64 * 522 * 4, "0": 0, "1": 64 * 512 * 4, "2": 64 * 40, "2.0": 64 * 40, "2.1": 0}


def test_a_summary_shows_itself_and_leaves_the_model_alone(kernel: Kernel) -> None:
    kernel.run("import torch, ipygpumem\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(8, 4), nn.Dropout())")
    reply = kernel.run("print(ipygpumem.summary(model, torch.ones(2, 8)))")
    assert reply.stdout.startswith("Sequential: 36 parameters, 36 trainable")
    assert reply.stdout.count("2 × 4") == 3
    assert kernel.run("ipygpumem.summary(model, torch.ones(2, 8))").result == reply.stdout.rstrip("\n")
    assert kernel.value("[len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]") == [0, 0, 0]
    assert kernel.value("(model[0].weight.grad, type(model[0].weight).__name__)") == (None, "Parameter")


def test_what_is_sparse_or_no_module_is_refused() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(EstimateError, match="sparse or quantized"):
        ipygpumem.estimate(lambda: sparse)
    with pytest.raises(EstimateError, match=r"a summary takes a torch.nn.Module, not int"):
        ipygpumem.summary(3)
