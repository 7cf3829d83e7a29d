"""Models, survivors, outputs, seeds, compiled code and odd tensors in scopes, with torch on the
CPU.
"""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.hostile import SOURCE
from tests.kernel_records import survivors
from tests.steps import experiment, kernel_with, recovery_report, run_cells


@pytest.mark.usefixtures("small_heap")
def test_leaks_are_objects_with_an_outside_reference(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        leaked = []
        outer = torch.ones(1 << 20)
        watched.clear()
        """,
    )
    reply = run_cells(
        notebook,
        """
        %%experiment a
        free = torch.ones(1 << 20)
        model = nn.Linear(1024, 1024)
        kept = same = torch.ones(512, 1024)
        box = [kept, kept[1:]]
        view = outer[10:20]
        hooks = [lambda: 0]
        wide = torch.ones(1 << 20)
        leaked.append(model); leaked.append({'x': [kept]}); leaked.append(wide[:1])
        """,
    )
    survivors = notebook.value(
        "[(h.name, h.type_name, h.shape, h.dtype, h.device, h.size_bytes, h.arrays) for h in "
        "ipygpumem.experiments()[-1].survivors]"
    )
    size = 4 * (1024 * 1024 + 1024)
    # One line frees all of them: lines for single items would name others after the first one.
    assert survivors == [
        ("model, wide, kept", "object", None, "", "cpu", size + (4 << 20) + (2 << 20), 0)
    ]
    (report,) = reply.survivors()
    assert "still alive" in report
    assert "leaked.clear()" in report or "del leaked[" in report


DRAW = (
    "numbers.append((random.random(), float(np.random.rand()), torch.rand(2).tolist(), "
    "torch.randperm(5).tolist()))"
)


def test_our_notes_on_many_tensors_are_in_no_row(notebook: Kernel) -> None:
    """A leak was ``module ipygpumem.heap.kinds.tensors, global ENDS_OF_STORAGES[140...]``."""
    run_cells(
        notebook,
        "leaked = []",
        """
        %%experiment a
        tensors = [torch.empty(1) for _ in range(60_000)]
        leaked.append([str(number) * 9 for number in range(60_000)])
        """,
    )
    rows = notebook.value(
        "[(row.holder.path, row.type_name) for row in ipygpumem.experiments()[-1].survivors]"
    )
    assert rows == [("notebook variable leaked[0]", "list")]


def test_a_seeded_scope_gives_the_same_numbers_on_each_run(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import random, numpy as np
        numbers = []
        """,
    )
    for _ in range(2):
        run_cells(notebook, "%experiment start a --seed 7\n" + DRAW, DRAW, "%experiment end")
        run_cells(notebook, f"%%experiment b --seed 7\n{DRAW}")
    run_cells(notebook, f"with ipygpumem.experiment('c', seed=7):\n    {DRAW}")
    assert notebook.value("len(numbers), len(set(map(str, numbers)))") == (7, 1)
    run_cells(notebook, f"%%experiment b --seed 8\n{DRAW}", DRAW, DRAW)
    assert notebook.value("len(set(map(str, numbers)))") == 4


def test_a_seed_works_if_the_cell_is_first_to_import_torch() -> None:
    cell = (
        "%%experiment a --seed 3 --keep 'result*'\n"
        "import random\nimport numpy as np\nfrom torch import nn, rand\nimport torch\n"
        "result{} = (random.random(), float(np.random.rand()), rand(1).item(), nn.Linear(2, "
        "2).weight.sum().item())"
    )
    with Kernel() as kernel:
        run_cells(kernel, "%load_ext ipygpumem")
        assert kernel.value("__import__('sys').modules.get('torch') is None") is True
        run_cells(kernel, cell.format(1), cell.format(2))
        assert kernel.value("result1 == result2") is True
        assert (
            kernel.value(
                "[f for f in __import__('sys').meta_path if 'ipygpumem' in type(f).__module__]"
            )
            == []
        )
        run_cells(
            kernel,
            """
            import importlib, numpy
            assert torch.__spec__.loader is not None
            import torch.fft, numpy.fft
            """,
        )


def test_results_saved_by_a_graph_name_their_experiment(notebook: Kernel) -> None:
    notebook.run(
        """
        rows, losses = torch.ones(1 << 20, requires_grad=True), []
        losses.append(rows.sigmoid().sum())
        """
    )
    notebook.run(experiment("losses.append(rows.exp().tanh().sum())", name="saves"))
    # What two of the graph's nodes have saved has the same line, and so one row.
    (row,) = survivors(notebook)
    assert row.size_bytes == 8 << 20
    assert row.path.startswith("notebook variable losses[1]: its autograd graph (")
    notebook.run("del rows, losses")


def test_no_line_frees_weights_that_a_model_and_graphs_have(notebook: Kernel) -> None:
    """It was ``losses.clear()  # and ; and keep ...``, which freed nothing."""
    run_cells(
        notebook,
        """
        model, losses = nn.Linear(1000, 1000), []
        losses.append(model(torch.ones(5, 1000)).sum())
        """,
        experiment("_ = model.half()", name="half"),
    )
    (row,) = survivors(notebook)
    assert row.path.startswith("notebook variable model.weight, notebook variable losses[0]: its")
    assert row.line == ""
    run_cells(notebook, "del model, losses, _")


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("runs.append({'batch': x, 'pred': model(x)})", id="a dict"),
        pytest.param(
            """
            model.last = x
            runs.append(model(x).sum())
            """,
            id="an attribute and a loss",
        ),
        pytest.param(
            """
            runs.append((x, model(x)))
            runs.append(model(x).sum())
            """,
            id="a pair and a loss",
        ),
        pytest.param(
            """
            runs.append(x.requires_grad_())
            runs.append(x.exp().sum())
            """,
            id="a batch with a gradient",
        ),
    ],
)
def test_a_line_also_frees_data_that_a_graph_has_saved(notebook: Kernel, code: str) -> None:
    run_cells(notebook, "model, runs = nn.Linear(1 << 18, 4), []")
    run_cells(notebook, experiment("x = torch.ones(4, 1 << 18)", "watch(x=x)", code, name="saves"))
    run_cells(notebook, *[row.line for row in survivors(notebook)])
    assert notebook.value("alive()") == []


@pytest.mark.usefixtures("small_heap")
def test_only_the_optimizer_state_of_a_leaked_model_is_a_leak(notebook: Kernel) -> None:
    step = "{0}(torch.ones(1, 1024)).sum().backward(); {1}.step()"

    # A model from before the experiment: its optimizer's state and gradients are new.
    run_cells(
        notebook,
        "ours = nn.Linear(1024, 1024); adam = torch.optim.Adam(ours.parameters()); adams = []",
    )
    (text,) = run_cells(notebook, experiment(step.format("ours", "adam"), name="own")).survivors()
    assert (
        "8 MiB · 2 × Tensor float32 1024 × 1024 · held by notebook variable adam.state "
        "(under" in text
    )
    headline, of_gradient = run_cells(notebook, "%gpumem leaks").leaks()[0].splitlines()
    assert headline == "1 leak · 4 MiB"
    assert of_gradient in text.splitlines()
    run_cells(notebook, of_gradient.rpartition("to free it: ")[2])
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]

    # A model of the experiment, which is kept alive by its optimizer.
    make = (
        "model = nn.Linear(1024, 1024); other = torch.optim.Adam(model.parameters()); "
        "adams.append(other)"
    )
    run_cells(notebook, f"%%experiment leaky\n{make}\n{step.format('model', 'other')}")
    (text,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert text.startswith("1 leak · 16 MiB")
    assert all(word in text for word in (" other, model: ", "Adam 8 MiB", "Linear 4 MiB"))
    assert not any(word in text for word in ("ours", " adam."))
    assert text.endswith("to free it: del adams[0]")  # its gradients die with it
    run_cells(notebook, "del adams[0]")
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]
    run_cells(notebook, "del ours, adam, adams")


shared = kernel_with(
    """
    %load_ext ipygpumem
    import gc, torch, weakref
    class Warm(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y.sum()
    # Else experiments leave objects of the compiler, and the search for their holders is long.
    torch.compile(Warm(2, 2), backend="eager")(torch.ones(2)).backward()
    """
)
COMPILED = "sum(name.startswith('__compiled_fn') for name in globals())"


def test_a_function_compiled_in_an_experiment_stays_compiled(shared: Kernel) -> None:
    run_cells(
        shared,
        """
        @torch.compile(backend='eager')
        def double(x): return x * 2
        """,
    )
    (text,) = run_cells(shared, experiment("double(torch.ones(3))", name="a")).reports("experiment")
    assert "deleted" not in text
    compiled = shared.value(COMPILED)
    assert compiled > 0
    run_cells(shared, "double(torch.ones(3))")
    assert shared.value(COMPILED) == compiled


def test_a_model_compiled_in_an_experiment_dies_with_it(shared: Kernel) -> None:
    run_cells(
        shared,
        """
        %%experiment a --keep gone
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(512, 512)
            def forward(self, x):
                y = self.layer(x)
                torch._dynamo.graph_break()
                return y.relu().sum()
        net = Net()
        torch.compile(net, backend='eager')(torch.ones(2, 512)).backward()
        gone = weakref.ref(net.layer.weight)
        __mine = 1
        """,
    )
    assert shared.value("gone() is None, '__mine' in globals()") == (True, False)
    assert run_cells(shared, "gc.collect(); torch._dynamo.reset(); gc.collect();").stderr == ""


@pytest.mark.usefixtures("small_heap")
def test_no_code_of_a_tensor_subclass_runs_in_our_work(notebook: Kernel) -> None:
    run_cells(
        notebook,
        SOURCE + "\nwatched.clear()",
        """
        old = [*tensors().values()]
        leaked = []
        """,
        "%experiment start a",
    )
    run_cells(notebook, "mine = tensors(); one, *box = mine.values(); old = 1; leaked.append(mine)")
    run_cells(notebook, "%experiment status", "%gpumem status", "%experiment end")
    assert notebook.value("touched") == []
    assert notebook.value("'mine' in globals() or 'box' in globals() or type(old) is int") is False
    recovery_report(
        notebook,
        """
        def f():
            mine = tensors(); watch(**mine)
            raise MemoryError('no')
        f()
        """,
    )
    assert notebook.value("touched") == []
    assert notebook.value("alive()") == []


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
    "expanded": torch.ones(1).expand(1 << 20),
    "conjugate": torch.ones(10, dtype=torch.complex64).conj(),
    "parameter": nn.Parameter(torch.ones(100)),
    "parametrized": parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Identity()),
    "storage": torch.ones(100).untyped_storage(),
    "graph": (torch.ones(100, requires_grad=True) * 2).sum(),
    "packed": nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    "compiled": torch.compile(nn.Linear(2, 2)),
    "scripted": torch.jit.script(nn.Linear(2, 2)),
    "mkldnn": torch.ones(10).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
    "freed": torch.ones(100),
}
zoo["freed"].untyped_storage().resize_(0)
"""  # noqa: E501


@pytest.mark.usefixtures("small_heap")
def test_every_kind_of_tensor_can_be_in_a_scope_that_ends(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        x = 'old'
        leaked = []
        """,
        "%experiment start a",
    )
    run_cells(notebook, "x = 'new'\n" + ZOO, timeout=600)
    reply = run_cells(
        notebook,
        "locals().update(zoo); leaked.append(zoo)",
        "%experiment status",
        "%experiment end",
    )
    assert len(reply.reports("experiment")) == 1
    assert notebook.value("x") == "old"
    assert notebook.value("[name for name in leaked[0] if name in globals()]") == []
    run_cells(notebook, "leaked.clear()")
