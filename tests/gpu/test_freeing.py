"""Freeing by hand on a device: released, defragmented, and kept on the host for a while."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.support import allocated, ready, run_ok
from tests.kernel import Kernel

FRAGMENTED = """
import torch, ipygpumem
from torch import nn
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        kept, gone = [], []
        while torch.cuda.mem_get_info()[0] > 128 << 20:  # until the card is full
            kept.append(nn.Parameter(torch.full((1 << 19,), float(len(kept))).cuda()))
            gone += [torch.empty(2 << 20, dtype=torch.uint8, device='cuda') for _ in range(9)]
        self.weights = nn.ParameterList(kept)
many = Many()
def fits(gib=4):
    try:
        torch.empty(gib << 30, dtype=torch.uint8, device='cuda')
    except torch.OutOfMemoryError:
        return False
    return True
def right():
    return all(bool((weight.detach().cpu() == place).all()) for place, weight in enumerate(many.weights))
"""
"""A model of which each segment of the allocator has a piece, with garbage between."""


@pytest.mark.simulated
def test_a_block_that_does_not_fit_a_fragmented_card_fits_after_a_purge(
    machine: Callable[..., None], figure: Callable[[str], None]
) -> None:
    """A card is so fragmented that 4 GiB do not fit; after `purge` they do, the model as it was."""
    machine(cards=1, gib=6)
    with Kernel() as kernel:
        run_ok(kernel, FRAGMENTED)
        before = allocated(kernel)
        assert kernel.value("fits(), right()") == (False, True)
        run_ok(kernel, "torch.cuda.empty_cache()")
        assert kernel.value("fits()") is False
        run_ok(kernel, "ids = [id(w) for w in many.weights]\nrecord = ipygpumem.purge(many)")
        assert kernel.value("fits(), right(), ids == [id(w) for w in many.weights]") == (True, True, True)
        assert allocated(kernel) == before
        text = kernel.value("str(record)")
        figure(text.splitlines()[-1])
        old, new, size = kernel.value("record.before[0].largest_bytes, record.after[0].largest_bytes, 4 << 30")
        assert old < size <= new
        for name in ("before", "after"):  # what it says is what can be had
            assert kernel.value(f"record.{name}[0].reserved_bytes") > 0
        run_ok(kernel, f"del record\nx = torch.empty({new}, dtype=torch.uint8, device='cuda'); del x")


@pytest.mark.simulated
def test_what_does_not_fit_back_after_a_purge_stays_on_the_host(machine: Callable[..., None]) -> None:
    """If the card is full when a purge brings the model back, it stays on the host, whole, and a warning says so."""
    machine(cards=1, gib=6)
    with Kernel() as kernel:
        run_ok(kernel, FRAGMENTED + "from ipygpumem.freeing import moving\nfill = moving._Piece.fill\n")
        run_ok(
            kernel,
            "def taken(self, tries=[]):\n"
            "    tries.append(1)\n"
            "    if len(tries) == 5:\n"
            "        rest = torch.cuda.mem_get_info()[0] - (8 << 20)\n"
            "        tries.append(torch.empty(rest, dtype=torch.uint8, device='cuda'))\n"
            "    fill(self)\n"
            "moving._Piece.fill = taken",
        )
        reply = kernel.run("record = ipygpumem.purge(many)")
        assert reply.status == "ok"
        assert "stay on the host: they did not fit back (CUDA out of memory" in reply.stderr
        assert kernel.value("record.is_on_host, {w.device.type for w in many.weights}") == (True, {"cpu"})
        assert kernel.value("right()") is True
        run_ok(kernel, "moving._Piece.fill = fill; taken.__defaults__[0].clear()\nmany.cuda(); None")
        assert kernel.value("right()") is True


def test_a_purge_keeps_aliases_views_and_the_optimizers_state(bare_kernel: Kernel) -> None:
    """Tied weights, an LSTM's flat weights, views and an optimizer's references are what they were after a purge."""
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        "import ipygpumem\nfrom torch import nn\n"
        "model = nn.ModuleDict(dict(a=nn.Linear(64, 64), b=nn.Linear(64, 64), rnn=nn.LSTM(8, 8, 2))).cuda()\n"
        "model['b'].weight = model['a'].weight\n"
        "view = model['a'].weight.detach()[3:5].t()\n"
        "for p in model.parameters(): p.grad = torch.randn(p.shape).cuda()\n"
        "optimizer = torch.optim.Adam(model.parameters()); optimizer.step()\n"
        "def state():\n"
        "    states = [v for s in optimizer.state.values() for v in s.values()]\n"
        "    all_ = [*model.parameters(), view, *[p.grad for p in model.parameters()], *states]\n"
        "    keys = [t.untyped_storage()._cdata for t in all_]\n"
        "    values = [t.detach().cpu().tolist() for t in all_]\n"
        "    return [(id(t), t._version, k, str(t.device), t.stride(), v) for t, k, v in zip(all_, keys, values)]\n"
        "was = state()",
    )
    run_ok(bare_kernel, "record = ipygpumem.purge(model, optimizer)")
    assert bare_kernel.value("record.notes, record.is_on_host, state() == was") == ((), False, True)
    assert bare_kernel.value("record.moved_bytes > 0") is True
    run_ok(
        bare_kernel, "with ipygpumem.offload(model, optimizer): inside = {p.device.type for p in model.parameters()}"
    )
    assert bare_kernel.value("inside, state() == was") == ({"cpu"}, True)


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        ("torch.func.grad(lambda x: (ask(), x.sum())[1])(torch.ones(2).cuda())", "torch.func transforms this code"),
        ("torch.func.vmap(lambda x: (ask(), x)[1])(torch.ones(2).cuda())", "torch.func transforms this code"),
        ("torch.jit.trace(lambda x: (ask(), x)[1], torch.ones(2).cuda(), check_trace=False)", "torch is tracing"),
        ("with torch.cuda.graph(torch.cuda.CUDAGraph()): ask()", "a CUDA graph is being captured"),
        ("with FakeTensorMode(): ask()", ""),
        ("x = torch.ones(2, requires_grad=True).cuda(); x.register_hook(lambda g: ask()); x.sum().backward()", ""),
    ],
)
def test_a_purge_where_torch_does_something_else_is_refused_or_works(
    bare_kernel: Kernel, place: str, refusal: str
) -> None:
    """Inside a transform, a trace or a capture of a CUDA graph, `purge` and `offload` are refused in one line; among
    fake tensors and in a backward pass they work. The model is what it was each time."""
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        "import ipygpumem\nfrom torch._subclasses.fake_tensor import FakeTensorMode\n"
        "model = torch.nn.Linear(64, 64).cuda()\n"
        "def state():\n"
        "    return [(id(p), p._version, str(p.device), p.detach().cpu().tolist()) for p in model.parameters()]\n"
        "def ask():\n"
        "    for call in (ipygpumem.purge, offload):\n"
        "        try: said.append(call(model).notes if call is ipygpumem.purge else call(model))\n"
        "        except ipygpumem.errors.GpuMemError as error: said.append(str(error))\n"
        "def offload(model):\n"
        "    with ipygpumem.offload(model): return ()\n"
        "was, said = state(), []",
    )
    run_ok(bare_kernel, place)
    said = bare_kernel.value("said")
    assert bare_kernel.value("state() == was") is True
    if refusal:
        assert [refusal in text and text.endswith("outside of it") for text in said] == [True, True], said
    else:
        assert said == [(), ()]


def test_inside_offload_a_model_is_on_the_host_and_behind_it_on_the_device(bare_kernel: Kernel) -> None:
    """`with offload(model, optimizer)` gives memory back; what is done on the host meanwhile is kept."""
    ready(bare_kernel)
    run_ok(
        bare_kernel,
        "import ipygpumem\nfrom torch import nn\nmodel = nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    )
    before = allocated(bare_kernel)
    run_ok(
        bare_kernel,
        "with ipygpumem.offload(model, optimizer):\n"
        "    inside = torch.cuda.memory_allocated(), model.weight.device.type\n"
        "    model(torch.ones(1, 1024)).sum().backward(); optimizer.step()\n"
        "    with ipygpumem.offload(model): pass\n"
        "    values = model.weight.detach().clone()",
    )
    assert bare_kernel.value("inside") == (before - 4 * 1024 * 1025, "cpu")
    devices = "{t.device.type for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())}"
    assert bare_kernel.value(devices) == {"cuda"}
    assert bare_kernel.value("torch.equal(model.weight.detach().cpu(), values)") is True
    run_ok(bare_kernel, "optimizer.zero_grad(); model.cuda()")
    reply = bare_kernel.run("with ipygpumem.offload(model): 1/0")
    assert reply.error == "ZeroDivisionError"
    assert bare_kernel.value("model.weight.device.type") == "cuda"
    reply = bare_kernel.run("with ipygpumem.offload(model): model.half()")
    assert "2 MiB stay on the host: they were made or replaced there" in reply.stderr


def test_a_model_with_tensors_that_cannot_be_moved_stays_where_it_is(bare_kernel: Kernel) -> None:
    """`offload` refuses a model with a nested or sparse tensor, or a captured graph; all of it stays on the device."""
    ready(bare_kernel)
    run_ok(bare_kernel, "import ipygpumem\nfrom torch import nn")
    for odd in (
        "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device='cuda')",
        "torch.eye(4).to_sparse().cuda()",
        "torch.ones(4, dtype=torch.complex64, device='cuda').conj()",
    ):
        run_ok(bare_kernel, f"model = nn.Linear(4, 4).cuda(); model.register_buffer('odd', {odd})")
        reply = bare_kernel.run("with ipygpumem.offload(model): pass")
        assert "offload cannot move 1 of its tensors (sparse, quantized, nested" in reply.traceback
        assert bare_kernel.value("{item.device.type for item in model.parameters()}") == {"cuda"}
        reply = bare_kernel.run("ipygpumem.purge(model)")
        assert "purge cannot move 1 of its tensors" in reply.traceback
    run_ok(bare_kernel, "model = nn.Linear(4, 4).cuda(); pool = torch.cuda.MemPool()")
    run_ok(bare_kernel, "with torch.cuda.use_mem_pool(pool): kept = torch.ones(8, device='cuda')")
    reply = bare_kernel.run("with ipygpumem.offload(model): pass")
    assert "a captured CUDA graph may use addresses of cuda:0: nothing was moved" in reply.traceback
    assert bare_kernel.value("{item.device.type for item in model.parameters()}") == {"cuda"}


def test_a_released_model_gives_its_memory_back(bare_kernel: Kernel) -> None:
    """`%gpumem release` of a trainer gives back what only it holds on the device, and says who holds the rest."""
    ready(bare_kernel)
    run_ok(bare_kernel, "%load_ext ipygpumem\nimport ipygpumem\nfrom torch import nn")
    base = allocated(bare_kernel)
    run_ok(
        bare_kernel,
        "class Learner: pass\nlearner = Learner(); learner.me = learner\nlearner.model = nn.Linear(1024, 1024).cuda()\n"
        "learner.cache = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\nkept = learner.cache",
    )
    run_ok(bare_kernel, "learner")  # an output is no name of the user's
    run_ok(bare_kernel, "users = [learner]")
    reply = bare_kernel.run("%gpumem release learner")
    assert "notebook variable users[0] would find `learner` empty" in reply.stderr
    run_ok(bare_kernel, "users.clear()")
    reply = run_ok(bare_kernel, "%gpumem release learner")
    (text,) = reply.reports("release")
    assert "cuda:0 4 MiB" in text.splitlines()[0]
    assert "left: 1 MiB · learner.cache: Tensor uint8 1048576 on cuda:0 · held by notebook variable kept" in text
    assert allocated(bare_kernel) == base + (1 << 20)


@pytest.mark.simulated
def test_a_purge_leaves_each_part_on_its_own_device(machine: Callable[..., None]) -> None:
    """A model on two cards and the host comes back to where each part was."""
    machine(cards=2, gib=8)
    with Kernel() as kernel:
        run_ok(
            kernel,
            "import torch, ipygpumem\nfrom torch import nn\n"
            "model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))\n"
            "model[0].cuda(0); model[1].cuda(1)\n"
            "was = [(p.device, p.detach().cpu().tolist()) for p in model.parameters()]\n"
            "record = ipygpumem.purge(model)",
        )
        assert kernel.value("[room.device for room in record.after], record.notes") == (["cuda:0", "cuda:1"], ())
        assert kernel.value("was == [(p.device, p.detach().cpu().tolist()) for p in model.parameters()]") is True
