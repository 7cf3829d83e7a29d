"""Scopes, survivors, seeds and recovery with torch on the CPU, in real kernels."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel import Kernel, Reply

pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")

SETUP = """
import gc, sys, weakref
import torch, ipygpumem
from torch import nn
torch.set_num_threads(2)
watched = {}
def watch(**things):
    for name, thing in things.items():
        watched.setdefault(name, []).append(weakref.ref(thing))
def alive():
    return sorted(name for name, refs in watched.items() if any(ref() is not None for ref in refs))
"""


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[Kernel]]:
    """One kernel that the tests of this module share; a test that breaks it takes it out of the list."""
    alive: list[Kernel] = []
    yield alive
    for kernel in alive:
        kernel.close()


@pytest.fixture
def notebook(kernels: list[Kernel]) -> Iterator[Kernel]:
    """A kernel with torch and the extension loaded, nothing open, and ``watch()`` and ``alive()``."""
    if kernels and not _is_well(kernels[0]):
        kernels.pop().close()
    if not kernels:
        kernels.append(Kernel())
        assert kernels[0].run("%load_ext ipygpumem").status == "ok"
        assert _is_well(kernels[0])
    return kernels[0]


def _is_well(kernel: Kernel) -> bool:
    try:
        kernel.run("%reset -f", timeout=15)
        return kernel.run("%reload_ext ipygpumem\n" + SETUP, timeout=60).status == "ok"
    except (TimeoutError, queue.Empty):
        return False


def works(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must succeed, in which nothing of ours may fail."""
    reply = kernel.run(code, **options)
    assert reply.status == "ok", (code, reply.message, reply.stderr, reply.traceback)
    assert "steps aside" not in reply.stderr, reply.stderr
    return reply


def recovery(kernel: Kernel, code: str) -> str:
    """Run a cell that runs out of memory, and return the report."""
    reply = kernel.run(code)
    assert reply.status == "error", reply
    assert "steps aside" not in reply.stderr, reply.stderr
    (text,) = reply.reports("recovery")
    return text


TRAIN = """
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for step in range(2):
    batch = torch.randn(512, 1024)
    hidden = model[0](batch)
    loss = model(batch).square().mean() + hidden.mean()
    optimizer.zero_grad(); loss.backward(retain_graph=True); optimizer.step(); scheduler.step()
handle = model[0].register_forward_hook(lambda module, inputs, output: None)
watch(model=model, optimizer=optimizer, loss=loss, hidden=hidden, weight=model[0].weight, batch=batch,
      grad=model[0].weight.grad, state=optimizer.state[model[0].weight]["exp_avg"])
"""


@pytest.mark.parametrize("form", ["%%experiment a\n{}", "%experiment start a\n{}\n%experiment end"])
def test_a_model_its_optimizer_and_its_graph_come_back(notebook: Kernel, form: str) -> None:
    works(notebook, "import psutil\ndef rss(): return psutil.Process().memory_info().rss\nwatched.clear()")
    works(notebook, form.format(TRAIN))  # the first training loads what torch loads lazily
    before = notebook.value("rss()")
    reply = works(notebook, form.format(TRAIN))
    assert notebook.value("alive()") == []
    assert notebook.value("rss()") - before < 12 << 20
    (text,) = reply.reports("experiment")
    assert "still alive" not in text
    assert "deleted: " in text
    record = "ipygpumem.experiments()[-1]"
    assert notebook.value(f"{record}.reclaimed['cpu']") > 30 << 20
    assert notebook.value(f"sorted({record}.deleted)") == sorted(
        ["model", "optimizer", "scheduler", "step", "batch", "hidden", "loss", "handle"]
    )


def test_survivors_are_those_that_something_outside_refers_to_with_their_sizes(notebook: Kernel) -> None:
    works(notebook, "leaked = []\nouter = torch.ones(1 << 20)\nwatched.clear()")
    reply = works(
        notebook,
        "%%experiment a\n"
        "free = torch.ones(1 << 20)\n"
        "model = nn.Linear(1024, 1024)\n"
        "kept = torch.ones(512, 1024)\n"
        "view = outer[10:20]\n"
        "hooks = [lambda: 0]\n"
        "leaked.append(model); leaked.append({'x': [kept]})",
    )
    found = notebook.value(
        "[(h.name, h.type_name, h.shape, h.dtype, h.device, h.size_bytes, h.arrays) for h in "
        "ipygpumem.experiments()[-1].survivors]"
    )
    size = 4 * (1024 * 1024 + 1024)
    assert found == [
        ("model", "Linear", None, "float32", "cpu", size, 2),
        ("kept", "Tensor", (512, 1024), "float32", "cpu", 2 << 20, 1),
    ]
    assert "still alive" in reply.reports("experiment")[0]


def test_a_survivor_is_named_once_although_several_names_lead_to_it(notebook: Kernel) -> None:
    works(notebook, "leaked = []")
    works(notebook, "%%experiment a\nx = torch.ones(1 << 20)\nsame = x\nview = x[1:]\nbox = [x]\nleaked.append(x)")
    assert notebook.value("[h.size_bytes for h in ipygpumem.experiments()[-1].survivors]") == [4 << 20]


def test_an_output_that_leaks_is_named_as_an_output(notebook: Kernel) -> None:
    works(notebook, "leaked = []")
    works(notebook, "%experiment start a")
    works(notebook, "leaked.append(torch.ones(1 << 20)) or leaked[0]")
    works(notebook, "%experiment end")
    assert notebook.value("[h.name.startswith('Out[') for h in ipygpumem.experiments()[-1].survivors]") == [True]


def test_outputs_of_a_scope_free_their_tensors(notebook: Kernel) -> None:
    works(notebook, "watched.clear()")
    works(notebook, "%experiment start a")
    for _ in range(4):
        works(notebook, "x = torch.ones(1 << 18); watch(x=x)\nx")
    works(notebook, "del x")
    assert notebook.value("alive()") == ["x"]
    works(notebook, "%experiment end")
    assert notebook.value("alive()") == []


# -- seeds ----------------------------------------------------------------------------------------------------------

DRAW = "numbers.append((random.random(), float(np.random.rand()), torch.rand(2).tolist(), torch.randperm(5).tolist()))"


def test_a_seeded_scope_gives_the_same_numbers_in_each_cell_and_on_each_run(notebook: Kernel) -> None:
    works(notebook, "import random, numpy as np\nnumbers = []")
    for _ in range(2):
        works(notebook, "%experiment start a --seed 7\n" + DRAW)
        works(notebook, DRAW)
        works(notebook, "%experiment end")
        works(notebook, f"%%experiment b --seed 7\n{DRAW}")
    works(notebook, f"with ipygpumem.experiment('c', seed=7):\n    {DRAW}")
    assert notebook.value("len(numbers), len(set(map(str, numbers)))") == (7, 1)
    works(notebook, f"%%experiment b --seed 8\n{DRAW}")
    works(notebook, DRAW)
    works(notebook, DRAW)
    assert notebook.value("len(set(map(str, numbers)))") == 4


def test_a_seed_counts_also_where_the_cell_is_the_first_to_import_numpy_and_torch() -> None:
    cell = (
        "%%experiment a --seed 3 --keep 'result*'\n"
        "import random\nimport numpy as np\nfrom torch import nn, rand\nimport torch\n"
        "result{} = (random.random(), float(np.random.rand()), rand(1).item(), nn.Linear(2, 2).weight.sum().item())"
    )
    with contextlib.closing(Kernel()) as kernel:
        works(kernel, "%load_ext ipygpumem")
        assert kernel.value("__import__('sys').modules.get('torch') is None") is True
        works(kernel, cell.format(1))
        works(kernel, cell.format(2))
        assert kernel.value("result1 == result2") is True
        assert kernel.value("[f for f in __import__('sys').meta_path if 'ipygpumem' in type(f).__module__]") == []
        works(kernel, "import importlib, numpy\nassert torch.__spec__.loader is not None\nimport torch.fft, numpy.fft")


# -- tensors that nobody expects ------------------------------------------------------------------------------------

ZOO = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
import warnings; warnings.simplefilter("ignore")
zoo = {
    "strided_nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
    "jagged_nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged),
    "sparse": torch.eye(100).to_sparse(),
    "csr": torch.eye(100).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(100), 0.1, 0, torch.qint8),
    "meta": torch.empty(1 << 30, device="meta"),
    "fake": FakeTensorMode().from_tensor(torch.ones(100)),
    "lazy": nn.LazyLinear(10),
    "complex": torch.ones(100, dtype=torch.complex64),
    "empty": torch.empty(0),
    "scalar": torch.tensor(1.0),
    "expanded": torch.ones(1).expand(1 << 20),
    "conjugate": torch.ones(10, dtype=torch.complex64).conj(),
    "parameter": nn.Parameter(torch.ones(100)),
    "parametrized": parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Identity()),
    "storage": torch.ones(100).untyped_storage(),
    "generator": torch.Generator(),
    "graph": (torch.ones(100, requires_grad=True) * 2).sum(),
    "packed": nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    "compiled": torch.compile(nn.Linear(2, 2)),
    "scripted": torch.jit.script(nn.Linear(2, 2)),
    "vmapped": None,
    "mkldnn": torch.ones(10).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
    "freed": torch.ones(100),
}
zoo["freed"].untyped_storage().resize_(0)
"""


def test_every_kind_of_tensor_can_be_in_a_scope_that_ends(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nleaked = []")
    works(notebook, "%experiment start a")
    works(notebook, "x = 'new'\n" + ZOO, timeout=180)
    works(notebook, "locals().update(zoo); leaked.append(zoo)")
    works(notebook, "%experiment status")
    reply = works(notebook, "%experiment end")
    assert len(reply.reports("experiment")) == 1
    assert notebook.value("x") == "old"
    assert notebook.value("[name for name in leaked[0] if name in globals()]") == []
    works(notebook, "leaked.clear()")


def test_tensors_without_memory_of_their_own_count_for_nothing_and_wrappers_for_what_they_hold(
    notebook: Kernel,
) -> None:
    works(notebook, "from torch._subclasses.fake_tensor import FakeTensorMode\nleaked = []")
    works(
        notebook,
        "%%experiment a\n"
        "meta = torch.empty(1 << 30, device='meta')\n"
        "with FakeTensorMode(): fake = torch.empty(1 << 30)\n"
        "jagged = torch.nested.nested_tensor([torch.ones(1 << 20), torch.ones(1 << 20)], layout=torch.jagged)\n"
        "module = nn.Linear(1 << 15, 1 << 15, device='meta')\n"
        "leaked += [meta, fake, jagged, module]",
    )
    found = notebook.value("[(h.name, h.size_bytes >> 20) for h in ipygpumem.experiments()[-1].survivors]")
    assert found == [("jagged", 8)]
    works(notebook, "leaked.clear()")


def test_every_kind_of_tensor_can_be_in_a_frame_of_an_oom(notebook: Kernel) -> None:
    works(notebook, ZOO, timeout=180)
    text = recovery(
        notebook, "def f(zoo):\n    mine = torch.ones(1 << 20); watch(mine=mine)\n    raise MemoryError\nf(zoo)"
    )
    assert notebook.value("alive()") == []
    assert "mine" in text
    text = recovery(
        notebook,
        "def inner(x):\n    mine = torch.ones(1 << 20); watch(mine=mine)\n    y = x * 2\n    raise MemoryError\n"
        "torch.func.vmap(inner)(torch.ones(3, 1 << 20))",
    )
    assert "mine" in text
    assert notebook.value("alive()") == []
    recovery(
        notebook,
        "def inner(x):\n    y = (x * 2).sum()\n    mine = torch.ones(1 << 20); watch(mine=mine)\n"
        "    raise MemoryError\n"
        "torch.func.grad(inner)(torch.ones(3))",
    )
    assert notebook.value("alive()") == []


HOSTILE = """
touched = []
def touch(what):
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ipygpumem"):
            touched.append(what)
            raise RuntimeError("hands off")
        frame = frame.f_back

class Function(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        touch("function " + str(function))
        return super().__torch_function__(function, types, args, kwargs or {})
    def __repr__(self): touch("repr"); return "?"
    def __len__(self): touch("len"); return 0
    def __eq__(self, other): touch("eq"); return False
    __hash__ = None
    shape = property(lambda self: touch("shape")); dtype = property(lambda self: touch("dtype"))
    device = property(lambda self: touch("device"))
    def untyped_storage(self): touch("storage")
    def numel(self): touch("numel")

class Dispatch(torch.Tensor):
    @staticmethod
    def __new__(cls, inner, policy):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, dispatch_sizes_strides_policy=policy,
            dispatch_device=policy is not None)
    def __init__(self, inner, policy): self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        touch("dispatch " + str(function))
        if "device" in str(function): return torch.device("cpu")
        return list(args[0].inner.shape)

def make():
    function = torch.ones(1 << 20).as_subclass(Function)
    return {"function": function, "plain": Dispatch(torch.ones(1 << 20), None),
            "sizes": Dispatch(torch.ones(1 << 20), "sizes"), "strides": Dispatch(torch.ones(1 << 20), "strides")}
"""


@pytest.mark.parametrize("kind", ["function", "plain", "strides", "sizes"])
def test_no_code_of_a_tensor_subclass_runs_at_exit_in_status_or_after_an_oom(notebook: Kernel, kind: str) -> None:
    works(notebook, HOSTILE + "\nwatched.clear()")
    works(notebook, "old = make()[KIND]\nleaked = []".replace("KIND", repr(kind)))
    works(notebook, "%experiment start a")
    works(notebook, f"tensor = make()[{kind!r}]; box = [make()[{kind!r}]]; old = 1; leaked.append(tensor)")
    works(notebook, "%experiment status")
    works(notebook, "%gpumem status")
    works(notebook, "%experiment end")
    assert notebook.value("touched") == []
    assert notebook.value("'tensor' in globals() or 'box' in globals() or type(old) is int") is False
    recovery(
        notebook,
        f"def f():\n    tensor = make()[{kind!r}]; watch(tensor=tensor)\n"
        "    error = MemoryError('no'); error.tensor = tensor\n    raise error\nf()",
    )
    assert notebook.value("touched") == []
    assert notebook.value("alive()") == []


# -- real allocation failures ---------------------------------------------------------------------------------------


def test_torchs_cpu_allocator_refusing_is_an_oom_with_its_size(notebook: Kernel) -> None:
    works(
        notebook,
        "watched.clear()\n"
        "def train(size):\n"
        "    model = nn.Linear(1024, 1024)\n"
        "    batch = torch.ones(256, 1024)\n"
        "    loss = model(batch).square().mean()\n"
        "    watch(model=model, batch=batch, loss=loss, weight=model.weight)\n"
        "    big = torch.empty(size, dtype=torch.uint8)\n"
        "    return 'trained'",
    )
    text = recovery(notebook, "train(1 << 50)")
    assert "out of memory (RuntimeError)" in text
    assert "asked for 1.00 PiB" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["train"]]
    assert [row[2] for row in rows] == ["model", "batch"]
    assert "Linear 2 arrays float32 cpu 4 MiB" in " ".join(rows[0])
    assert "256 × 1024 float32 cpu 1 MiB" in " ".join(rows[1])
    assert notebook.value("alive()") == []
    assert works(notebook, "train(1 << 20)").result == "'trained'"


def test_an_oom_in_backward_and_in_a_hook_leaves_no_graph(notebook: Kernel) -> None:
    works(notebook, "watched.clear()")
    recovery(
        notebook,
        "class Fails(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(context, x):\n        context.save_for_backward(x); context.more = x * 2\n"
        "        watch(more=context.more)\n        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(context, grad):\n        scratch = torch.ones(1 << 20); watch(scratch=scratch)\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.00 GiB')\n"
        "def train():\n    x = torch.ones(1 << 20, requires_grad=True); y = Fails.apply(x); watch(x=x, y=y)\n"
        "    y.sum().backward()\n"
        "train()",
    )
    assert notebook.value("alive()") == []
    recovery(
        notebook,
        "def hook(module, inputs, output):\n    extra = torch.ones(1 << 20); watch(extra=extra)\n"
        "    raise MemoryError\n"
        "def train():\n    model = nn.Linear(1024, 1024); model.register_forward_hook(hook)\n    watch(model=model)\n"
        "    with torch.no_grad():\n        model(torch.ones(64, 1024))\n"
        "train()",
    )
    assert notebook.value("alive()") == []


def test_an_oom_in_a_nested_training_step_frees_the_model_it_closes_over(notebook: Kernel) -> None:
    works(notebook, "watched.clear()")
    recovery(
        notebook,
        "def main():\n    model = nn.Linear(1024, 1024); watch(model=model, weight=model.weight)\n"
        "    optimizer = torch.optim.LBFGS(model.parameters())\n"
        "    def closure():\n        loss = model(torch.ones(8, 1024)).sum(); loss.backward()\n"
        "        raise MemoryError\n"
        "    optimizer.step(closure)\n"
        "main()",
    )
    assert notebook.value("alive()") == []


def test_an_oom_in_a_data_loaders_dataset_leaves_no_batch(notebook: Kernel) -> None:
    works(notebook, "watched.clear()")
    recovery(
        notebook,
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Images(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        if index == 3: raise MemoryError\n"
        "        image = torch.ones(1 << 18); watch(image=image)\n        return image\n"
        "def train():\n    for batch in DataLoader(Images(), batch_size=2): watch(batch=batch)\ntrain()",
    )
    assert notebook.value("alive()") == []


def test_forked_data_loader_workers_in_a_scope_end_with_it(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nfrom torch.utils.data import DataLoader")
    works(
        notebook,
        "%%experiment a\nx = 'new'\nloader = DataLoader(torch.arange(64.), batch_size=8, num_workers=1)\n"
        "total = sum(batch.sum().item() for batch in loader)\nassert total == 2016",
        timeout=60,
    )
    assert notebook.value("x") == "old"
