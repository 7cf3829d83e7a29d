"""Estimates against the device: what torch's allocator has in use at the peak, what it reserves,
what fits.
"""

from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import GIB, KIB, MIB, format_bytes
from tests import hostile
from tests.gpu.support import is_simulated, script
from tests.steps import run_quietly


def test_an_estimate_makes_no_context() -> None:
    """Without a context of this process, an estimate of tensors on the device makes none there.
    (Where gradients are recorded, torch's autograd asks the driver for a stream, which makes one.)
    """
    code = """
import json, torch, ipygpumem
from ipygpumem.probes.nvml import Nvml
model, used = torch.nn.Linear(512, 512), Nvml().cards()[0].whole.used_bytes

def step():
    with torch.no_grad():
        model.cuda()(torch.ones(8, 512, device="cuda")).sum()

found = ipygpumem.estimate(step)
made = Nvml().cards()[0].whole.used_bytes > used + (1 << 27)
print(json.dumps([[device.device for device in found.devices], torch.cuda.is_initialized(), made]))
"""
    assert script(code) == [["cpu", "cuda:0"], False, False]


TRAIN = """
import gc
model, x = torch.nn.Linear(512, 512).cuda(), torch.ones(8, 512, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
def train():
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
torch.ones(3, device="cuda", requires_grad=True).sum().backward()  # from now on autograd has a thread for the device
gc.collect(); allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
"""  # noqa: E501
ASKS = """%%estimate
train()
torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(stream):
    y = model(torch.empty(8, 512, device="cuda"))
    y.record_stream(stream)
event.record(); event.elapsed_time(event); stream.query()
assert torch.cuda.memory_allocated() > 0 and torch.cuda.get_device_properties(0).total_memory > 0
y = model(x.cpu().pin_memory().cuda(non_blocking=True)); torch.cuda.empty_cache()
"""


def test_the_device_is_left_alone_after_a_backward_there(gpu_kernel: Kernel) -> None:
    """An estimate puts back what it changed, allocates nothing on the device, and asks nothing of
    it.
    """
    run_quietly(gpu_kernel, TRAIN)
    (report,) = run_quietly(gpu_kernel, ASKS).reports("estimate")
    assert "cuda:0 peak" in report
    now = "(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())"
    assert gpu_kernel.value(f"{now} == (allocated, peak)") is True
    assert gpu_kernel.value("model.weight.grad, len(optimizer.state)") == (None, 0)
    run_quietly(gpu_kernel, "del model, optimizer, x")


STEP = """
import json, torch, ipygpumem
from torch import nn

layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
model = nn.TransformerEncoder(layer, 6).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def train():
    for _ in range(2):
        model(torch.randn(32, 256, 512, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def figures():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    card = ipygpumem.estimate(train).devices[0].to_dict()
    train()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {**card, "allocated": allocated, "reserved": reserved, "there": before}
"""
MIXED = """
first = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3)]
model = nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(128 * 30 * 30, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters())

def train():
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(128, 3, 64, 64, device="cuda")).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""  # noqa: E501
RUN = f"""{STEP}
try:
    train()
    print(json.dumps(True))
except torch.OutOfMemoryError:
    print(json.dumps(False))
"""


@pytest.mark.parametrize(
    "model", ["", MIXED], ids=["transformer", "convolutional, mixed precision"]
)
def test_in_a_fresh_process_peak_and_reserved_are_the_allocators(
    model: str, figure: Callable[[str], None]
) -> None:
    """In a fresh process a training's estimate is max_memory_allocated within 1 %,
    max_memory_reserved within 3 %. (On hardware cuDNN's workspaces come on top, which no estimate
    knows.)
    """
    figures = script(f"{STEP}{model}\nprint(json.dumps(figures()))")
    figure(
        f"estimated {format_bytes(figures['peak_bytes'])}, allocated "
        f"{format_bytes(figures['allocated'])}"
    )
    assert figures["peak_bytes"] == pytest.approx(
        figures["allocated"], rel=0.01 if is_simulated() else 0.03
    )
    assert figures["reserved_bytes"] == pytest.approx(figures["reserved"], rel=0.03)
    assert figures["context_bytes"] == 0  # this process has its own already


def test_mixed_precision_is_estimated_with_and_without_device() -> None:
    """Autocast for CUDA is followed on a card that is here, with ``device=`` as well
    as without it.
    """
    code = """
import json, torch, ipygpumem
model, x = torch.nn.Linear(1024, 4096).cuda(), torch.ones(512, 1024, device="cuda")

def step():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    y.sum().backward()

print(json.dumps([ipygpumem.estimate(step, device=device).peak_bytes for device in (None, "cuda:0")]))
"""  # noqa: E501
    here, named = script(code)
    assert here == named > 0


def test_optimizer_estimates_equal_real_runs_within_one_percent() -> None:
    """An estimate of each of torch's optimizers is max_memory_allocated within 1 %, with
    ``device=`` and without.
    """
    code = """
import json, torch, ipygpumem
from benchmarks.harness.networks import every_optimizer
optimizers, found = every_optimizer("cuda"), []

def step():
    for optimizer in optimizers:
        optimizer.step(lambda: 0.0)

for _ in range(2):
    named = {"device": "cuda:0", "device_memory": "24GiB", "timeout": 3600.0}
    estimates = [ipygpumem.estimate(step, **options).peak_bytes for options in ({}, {"device": "cuda"}, named)]
    torch.cuda.reset_peak_memory_stats()
    step()
    found.append([*estimates, torch.cuda.max_memory_allocated()])
print(json.dumps(found))
"""  # noqa: E501
    for *estimates, real in script(code):
        assert estimates == pytest.approx([real] * 3, rel=0.01)


def test_an_existing_context_is_not_counted_again() -> None:
    """The headroom of an estimate for a context is 0 if there is one, also if the allocator has
    nothing reserved.
    """
    code = """
import json, torch, ipygpumem
found = []
for _ in range(2):
    found.append(ipygpumem.estimate(lambda: torch.ones(9, device="cuda")).devices[0].context_bytes)
    torch.ones(9, device="cuda")
    torch.cuda.empty_cache()
print(json.dumps([*found, torch.cuda.memory_reserved()]))
"""
    assert script(code) == [768 * MIB, 0, 0]


@pytest.mark.parametrize("more", [0, 616])
def test_a_budget_limits_the_room_of_an_estimate(machine: Callable[..., None], more: int) -> None:
    """Under a budget the room is what the budget leaves: without what else is in use, with what the
    code works on. NVML may report a larger card than torch's limit is a share of.
    """
    machine(gib=24, nvml_more_mib=more)
    code = """
import json, torch, ipygpumem
x, other, found = torch.ones(1 << 26, device="cuda"), torch.ones(1 << 27, device="cuda"), []
with ipygpumem.budget(gpu="1GiB"):
    found.append(ipygpumem.estimate(lambda: x + 1))
found.append(ipygpumem.estimate(lambda: x + 1))
print(json.dumps([(found.devices[0].room_bytes, found.verdict) for found in found]))
"""
    limited, free = script(code)
    assert limited == [GIB // 2, "does not fit"]
    assert (free[0] > 2 * GIB, free[1]) == (True, "fits")


def test_an_estimate_allocates_nothing_on_a_card_for_a_constant() -> None:
    code = """
import json, torch, ipygpumem
x, peak = torch.ones(1, device="cuda"), torch.cuda.max_memory_allocated()
ipygpumem.estimate(lambda: torch.tensor([1.0] * 4096, device="cuda"))
print(json.dumps(torch.cuda.max_memory_allocated() - peak))
"""
    assert script(code) == 0


def test_workspaces_that_are_there_already_count_as_there_before() -> None:
    """Memory that torch has taken for cuBLAS already counts as there before, and not once more."""
    figures = script(f"{STEP}\nfirst = figures()\nprint(json.dumps([first, figures()]))")
    fresh, later = figures
    assert later["parts"]["cuBLAS workspaces"] == fresh["parts"]["cuBLAS workspaces"] > 0
    assert later["before_bytes"] - fresh["before_bytes"] >= fresh["parts"]["cuBLAS workspaces"]
    assert later["peak_bytes"] == pytest.approx(later["allocated"], rel=0.01)


def test_reading_workspaces_calls_no_method_of_an_object_or_type() -> None:
    """Looking for workspaces that are there already, an estimate asks no other object of the
    process anything.
    """
    multiply = "torch.ones(2, 2, device='cuda') @ torch.ones(2, 2, device='cuda')"
    code = (
        f"{hostile.SOURCE}\n{STEP}\nthing = made(Hostile)\n{multiply}\nfigures()\n"
        f"print(json.dumps(touched))"
    )
    assert script(code) == []


@pytest.mark.simulated
def test_a_step_runs_on_a_card_with_its_least_memory(machine: Callable[..., None]) -> None:
    """A training runs on a card with as much memory as the estimate says it needs, and not with a
    tenth less.
    """
    machine(gib=24)
    figures = script(f"{STEP}\nprint(json.dumps(figures()))")
    needed = figures["needed_bytes"] + figures["spare_bytes"] + 768 * MIB
    machine(gib=needed / GIB)
    assert script(RUN) is True
    machine(gib=0.9 * needed / GIB)
    assert script(RUN) is False


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("capability", "workspace"), [(80, 8320 * KIB), (90, 32 * MIB), (100, 8320 * KIB)]
)
def test_workspaces_follow_the_compute_capability(
    capability: int, workspace: int, machine: Callable[..., None]
) -> None:
    """The workspace of cuBLAS in an estimate is as large as torch's on a card of that compute
    capability.
    """
    machine(capability=capability)
    code = """
import json, torch, ipygpumem
x = torch.ones(512, 1024, device="cuda")
before = torch.cuda.memory_allocated()
card = ipygpumem.estimate(lambda: (x @ x.T).sum()).devices[0]
(x @ x.T).sum()
print(json.dumps([card.parts["cuBLAS workspaces"], torch.cuda.memory_allocated() - before]))
"""
    assert script(code) == [workspace, workspace]


SPARSE = """
import gc, json, torch, ipygpumem
from torch import nn
from torch.nn.utils import rnn

def sparse_sgd():
    table = nn.Embedding(50000, 64, sparse=True, device="cuda")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(3):
        words = torch.randint(50000, (512, 20), device="cuda")
        table(words).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def sparse_adam():
    table = nn.EmbeddingBag(50000, 64, sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(3):
        words = torch.randint(50000, (512, 20), device="cuda")
        table(words).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def packed_lstm():
    model = nn.LSTM(64, 128, 2, batch_first=True, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    lengths = torch.tensor(list(range(50, 34, -1)))
    for _ in range(2):
        x = torch.randn(16, 50, 64, device="cuda")
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        outputs, _ = model(packed)
        padded, _ = rnn.pad_packed_sequence(outputs, batch_first=True)
        padded.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def packed_gru():
    model = nn.GRU(64, 128, device="cuda")
    parts = [torch.randn(length, 64, device="cuda") for length in (50, 40, 30)]
    outputs, _ = model(rnn.pack_sequence(parts))
    padded, _ = rnn.pad_packed_sequence(outputs)
    padded.sum().backward()

def part_on_the_host():
    table = nn.Embedding(100000, 64, device="cpu")
    model = nn.Linear(64, 256).cuda()
    optimizer = torch.optim.Adam([*table.parameters(), *model.parameters()])
    for _ in range(2):
        words = torch.randint(100000, (64, 20), device="cpu")
        model(table(words).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def figures(step):
    found = ipygpumem.estimate(step)
    card = [device for device in found.devices if device.device == "cuda:0"][0]
    places = [device.device for device in found.devices if device.peak_bytes > 1 << 20]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return card.peak_bytes, torch.cuda.max_memory_allocated(), places, len(found.upper_bounds)
"""
STEPS = {
    "sparse_sgd": (["cuda:0"], 0),
    "packed_lstm": (["cuda:0"], 0),
    "packed_gru": (["cuda:0"], 0),
    "part_on_the_host": (["cpu", "cuda:0"], 0),
}


@pytest.mark.simulated
@pytest.mark.parametrize("step", STEPS)
def test_estimates_of_sparse_and_packed_code_match_real_runs(step: str) -> None:
    (estimated, allocated, *rest) = script(
        f"{SPARSE}\ntorch.backends.cudnn.enabled = False\nprint(json.dumps(figures({step})))"
    )
    assert estimated == allocated
    assert tuple(rest) == STEPS[step]


PLACES = """
import gc, json, sys, torch, ipygpumem
from torch import nn
from torch.nn import functional as F

def cache_on_the_host():
    keys = torch.zeros(8, 16, 1024, 64, device="cpu")
    query = torch.zeros(8, 16, 1, 64, device="cuda")
    for position in range(0, 1024, 256):
        keys[:, :, position] = query.squeeze(2).cpu()
        part = keys[:, :, : position + 256].to("cuda")
        query = F.softmax(query @ part.transpose(2, 3), -1) @ part

def table_on_the_host():
    table = nn.Embedding(100000, 64, device="cpu")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.Adam([*table.parameters(), *model.parameters()])
    for _ in range(2):
        words = torch.randint(100000, (512, 20), device="cpu")
        model(table(words).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def activations_on_the_host():
    weights = [torch.zeros(1024, 1024, device="cuda", requires_grad=True) for _ in range(4)]
    x = torch.zeros(4096, 1024, device="cuda")
    with torch.autograd.graph.save_on_cpu():
        for weight in weights:
            x = torch.tanh(x @ weight)
    x.sum().backward()

def layers_in_turn():
    host = torch.device("cpu")
    layers = [nn.Linear(1024, 1024, device=host) for _ in range(6)]
    x = torch.zeros(256, 1024, device="cuda")
    with torch.no_grad():
        for layer in layers:
            layer.to("cuda")
            x = layer(x)
            layer.to(host)

def half_results():
    x = torch.zeros(4096, 1024, device="cuda")
    results = [(x * number).to("cpu", torch.float16) for number in range(4)]
    return torch.stack(results).to("cuda").float()

def peaks(step, device):
    rows = ipygpumem.estimate(step, device=device).devices
    by_device = {row.device: row.peak_bytes for row in rows}
    return by_device["cuda:0"], by_device["cpu"]

def allocated(step):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()

steps = [cache_on_the_host, table_on_the_host, activations_on_the_host]
steps += [layers_in_turn, half_results]
is_here = torch.cuda.is_available()
found = {}
for step in steps:
    figures = [peaks(step, None), peaks(step, "cuda:0")]
    found[step.__name__] = figures, allocated(step) if is_here else None
print(json.dumps(found))
"""


@pytest.mark.simulated
def test_tensors_on_the_host_are_counted_there_without_a_card() -> None:
    here = script(PLACES)
    hidden = script(PLACES, env={"CUDA_VISIBLE_DEVICES": ""})
    wrong = {}
    for name, (figures, allocated) in here.items():
        of_hidden, _ = hidden[name]
        cards = {card for card, _ in (*figures, *of_hidden)}
        on_host = {ram for _, ram in (*figures, *of_hidden)}
        errors = [abs(card / allocated - 1) for card in cards]
        if max(errors) > 0.0001 or max(on_host) > 1.01 * min(on_host):
            wrong[name] = figures, of_hidden, allocated
    assert wrong == {}


@pytest.mark.simulated
def test_sparse_gradients_count_each_index_once_for_sparse_adam() -> None:
    """On a simulated card, whose kernels compute nothing, all indices are the same."""
    estimated, allocated, places, bounds = script(
        f"{SPARSE}\nprint(json.dumps(figures(sparse_adam)))"
    )
    assert allocated < estimated < 1.5 * allocated
    assert (places, bounds) == (["cuda:0"], 1)
