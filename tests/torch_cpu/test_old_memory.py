"""Objects from before a scope are no leaks of it, even if new objects refer to them; with torch."""

import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import survivors
from tests.steps import experiment, run_cells

pytestmark = pytest.mark.usefixtures("small_heap")

OLD_MODELS = """
import collections, copy, dataclasses, functools, types
import numpy as np, pandas as pd
from torch.utils.data import DataLoader, Subset, TensorDataset
outer = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
ds = TensorDataset(torch.zeros(1024, 512))
many = [torch.zeros(1000) for _ in range(1000)]
ns = types.SimpleNamespace(train=np.zeros(1 << 18), tensor=torch.zeros(1 << 19))
class Config:
    array, tensor = np.zeros(1 << 18), torch.zeros(1 << 19)
class Images:
    def __init__(self): self.items = [np.zeros(4096) for _ in range(100)]
    def __len__(self): return len(self.items)
    def __getitem__(self, position): return self.items[position]
images, pairs = Images(), [(np.zeros(4096), 1) for _ in range(100)]
frame, series = pd.DataFrame({"a": np.zeros(1 << 18)}), pd.Series(np.zeros(1 << 18))
groups = collections.defaultdict(list, a=[np.zeros(1 << 18)])
objects = np.array([np.zeros(1 << 18), None], dtype=object)
def make(array, tensor):
    return lambda: (array, tensor)
get = make(np.zeros(1 << 18), torch.zeros(1 << 19))
used = nn.Linear(1024, 1024); used(torch.ones(2, 1024)).sum().backward()
sparse = torch.ones(600, 600).to_sparse()
mine = types.ModuleType("mine"); mine.DATA = np.zeros(1 << 18)
cache = []
"""


AROUND = """
sgd = torch.optim.SGD(outer.parameters()); schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)
adam = torch.optim.Adam(outer.parameters()); outer(torch.ones(2, 512)).sum().backward(); adam.step(); adam.zero_grad()
step = torch.optim.SGD(used.parameters()); step.step(); gradient = used.weight.grad
loader = DataLoader(ds, batch_size=64); part = Subset(ds, range(10))
for batch in loader: pass
m = outer; parameters = list(outer.parameters()); named = dict(outer.named_parameters()); transposed = m[0].weight.T
state = outer.state_dict(); best = outer[0].weight.detach().numpy(); data = outer[0].weight.data; v = many
train = ns.train; three = ns.train[:3]; inside = vars(ns); shown = ns.tensor.numpy(); given = torch.from_numpy(ns.train)
cache.append(torch.from_numpy(ns.train)); cache.append(ns.tensor.numpy()); cache.append(ns.tensor[:3])
a, b = Config.array, Config.tensor; c, d = get(); e = mine.DATA[:3]; f = groups["a"], objects[0]
loaded = DataLoader(images); items = images.items; shallow = copy.copy(images); some = [x for x, _ in pairs]
whole = frame; column = frame["a"]; head = frame[:9]; table = frame.to_numpy(copy=False); row = series.array, series[:9]
model = nn.Sequential(outer, nn.Linear(512, 2)); bound = outer.forward; partly = functools.partial(outer, 1)
same = sparse; values = sparse.coalesce().values()
"""  # noqa: E501


def test_objects_from_before_the_scope_are_no_leak(notebook: Kernel) -> None:
    (report,) = run_cells(notebook, OLD_MODELS, experiment(AROUND, name="a")).reports("experiment")
    assert "still alive" not in report
    assert notebook.value("ipygpumem.experiments()[-1].survivors") == ()


def test_a_gradient_made_for_an_outer_model_is_freed_by_its_line(notebook: Kernel) -> None:
    run_cells(notebook, "outer = nn.Linear(1024, 1024)")
    (report,) = run_cells(
        notebook, experiment("outer(torch.ones(2, 1024)).sum().backward()", name="a")
    ).survivors()
    (line,) = [line for line in report.splitlines() if "held by" in line]
    assert line.endswith(
        "held by notebook variable outer.weight.grad · to free it: outer.zero_grad()"
    )
    run_cells(notebook, "outer.zero_grad()")
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


def test_leaks_has_the_gradients_of_the_report(notebook: Kernel) -> None:
    run_cells(notebook, "outer = nn.Linear(1024, 1024)")
    run_cells(notebook, experiment("outer(torch.ones(2, 1024)).sum().backward()", name="a"))
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("1 leak")
    assert "held by notebook variable outer.weight.grad" in leaks
    assert leaks.endswith("to free it: outer.zero_grad()")


def test_a_sparse_gradient_of_an_older_model_is_named(notebook: Kernel) -> None:
    run_cells(notebook, "outer = nn.Sequential(nn.Embedding(100_000, 16, sparse=True))")
    run_cells(notebook, experiment("outer(torch.arange(100_000)).sum().backward()", name="a"))
    path = "notebook variable outer[0].weight.grad"
    (row,) = survivors(notebook)
    assert (row.path, row.line) == (path, "outer.zero_grad()")
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert path in leaks
    run_cells(notebook, "outer.zero_grad()")
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


def test_a_sparse_tensor_of_older_values_is_in_no_row(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        places, values = torch.arange(100_000)[None], torch.ones(100_000, 16)
        sparse = torch.sparse_coo_tensor(places, values, check_invariants=True)
        summed = sparse.coalesce(); outer = []
        """,
    )
    run_cells(
        notebook,
        """
        %%experiment a
        outer.append(torch.sparse_coo_tensor(places, values, check_invariants=True))
        outer.append(summed.detach())
        """,
    )
    assert survivors(notebook) == []
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


@pytest.mark.parametrize(
    ("makes", "line"),
    [
        pytest.param(
            "outer = [nn.Linear(512, 1024) for _ in range(6)]",
            "for _position in range(0, 6): outer[_position].zero_grad(); del _position",
            id="a list",
        ),
        pytest.param(
            "outer = {3 * n: nn.Linear(512, 1024) for n in range(5)}",
            "for _position in 0, 3, 6, 9, 12: outer[_position].zero_grad(); del _position",
            id="a dict",
        ),
        pytest.param(
            "outer = [torch.ones(1024, 512, requires_grad=True) for _ in range(2)]",
            "outer[0].grad = None; outer[1].grad = None",
            id="two tensors",
        ),
    ],
)
def test_one_line_frees_the_gradients_of_modules_in_a_container(
    notebook: Kernel, makes: str, line: str
) -> None:
    run_cells(notebook, makes)
    backward = """
        %%experiment a
        for item in outer.values() if type(outer) is dict else outer:
            (item(torch.ones(2, 512)) if callable(item) else item * 2).sum().backward()
        """
    run_cells(notebook, backward)
    assert {row.line for row in survivors(notebook)} == {line}
    run_cells(notebook, line)
    assert notebook.value("'_position' in globals()") is False
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


def test_a_gradient_of_an_outer_tensor_is_freed_by_its_line(notebook: Kernel) -> None:
    run_cells(notebook, "leaf = torch.ones(1 << 20, requires_grad=True)")
    (report,) = run_cells(notebook, experiment("(2 * leaf).sum().backward()", name="a")).survivors()
    assert "held by notebook variable leaf.grad · to free it: leaf.grad = None" in report
    run_cells(notebook, "leaf.grad = None")
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


NEXT_TO_OLDER = {
    "the other layer": (
        "outer = nn.Sequential(nn.Linear(1024, 512), nn.Linear(1024, 512)); train(outer[0])",
        "train(outer[1])",
        "outer[1].zero_grad()",
    ),
    "one parameter": (
        "outer = nn.Linear(1024, 512); outer.bias.grad = torch.ones(512)",
        "outer.weight.sum().backward()",
        "outer.weight.grad = None",
    ),
    "parameters of an optimizer": (
        "a, b = (torch.ones(1 << 19, requires_grad=True) for _ in range(2)); train(a)\n"
        "outer = [torch.optim.SGD([a, b])]; del a, b",
        "train(outer[0].param_groups[0]['params'][1])",
        'outer[0].param_groups[0]["params"][1].grad = None',
    ),
    "a tensor that is no parameter": (
        "outer = nn.Linear(10, 10); train(outer)\n"
        "outer.more = [torch.ones(1 << 19, requires_grad=True)]",
        "train(outer.more[0])",
        "outer.more[0].grad = None",
    ),
    "parameters whose gradients share memory": (
        "outer = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 512)); train(outer[0])",
        "flat = torch.zeros(1 << 19); size = 512 * 512\n"
        "outer[1].weight.grad = flat[:size].view(512, 512)\n"
        "outer[1].bias.grad = flat[size : size + 512]",
        "outer[1].zero_grad()",
    ),
    "tensors whose gradients share memory": (
        "outer = [torch.ones(1 << 18, requires_grad=True) for _ in range(2)]",
        "flat = torch.zeros(1 << 19)\n"
        "outer[0].grad, outer[1].grad = flat[: 1 << 18], flat[1 << 18 :]",
        "outer[0].grad = None; outer[1].grad = None",
    ),
    "a parameter that is frozen since": (
        "outer = nn.Linear(1024, 512)",
        "train(outer); outer.requires_grad_(False)",
        "outer.zero_grad()",
    ),
    "a tensor that is frozen since": (
        "outer = torch.ones(1 << 19, requires_grad=True)",
        "train(outer); outer.requires_grad_(False);",
        "outer.grad = None",
    ),
    "a part of a frozen model": (
        "outer = nn.Sequential(nn.Linear(1024, 512), nn.Linear(1024, 512)); train(outer[0])\n"
        "outer[0].requires_grad_(False);",
        "train(outer[1])",
        "outer[1].zero_grad()",
    ),
}
"""Code before an experiment, its code, and the line for the new gradients."""
TRAIN = """
import gc
def train(item):
    result = item(torch.ones(2, item.in_features)) if callable(item) else 2 * item
    result.sum().backward()
def number_of_gradients():
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    return sum(item.is_leaf and item.grad is not None for item in tensors)
"""


@pytest.mark.parametrize("case", NEXT_TO_OLDER)
def test_the_line_for_new_gradients_keeps_older_ones(notebook: Kernel, case: str) -> None:
    before, code, line = NEXT_TO_OLDER[case]
    run_cells(notebook, TRAIN, before, "older = number_of_gradients()")
    run_cells(notebook, experiment(code, name="a"))
    assert {row.line for row in survivors(notebook)} == {line}
    run_cells(notebook, line)
    assert notebook.value("number_of_gradients() == older")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("outer.data = torch.cat([outer.data, torch.ones(1 << 19)])", id="new data"),
        pytest.param("outer.set_(torch.ones(1 << 19).untyped_storage());", id="a new storage"),
        pytest.param(
            """
            outer.data = torch.ones(1 << 19)
            view = outer[3:]
            """,
            id="new data and a view",
        ),
        pytest.param("outer.resize_(1 << 19).fill_(1);", id="a new size"),
    ],
)
def test_a_line_says_that_a_tensor_is_older_than_its_memory(notebook: Kernel, code: str) -> None:
    run_cells(notebook, "outer = torch.ones(1000)", experiment(code, name="a"))
    line = "del outer  # also drops an older tensor, which has new memory"
    assert [row.line for row in survivors(notebook)] == [line]
    assert line in run_cells(notebook, "%gpumem leaks").leaks()[0]


def test_a_result_that_torch_has_saved_is_no_older_tensor(notebook: Kernel) -> None:
    """It gets its Python object when the end of the experiment looks for tensors."""
    run_cells(notebook, "outer = []; model = nn.Linear(512, 512)")
    code = """
        %%experiment a
        state = torch.ones(512, 512)
        for _ in range(5):
            state = torch.tanh(model(state))
            outer.append(state)
        """
    run_cells(notebook, code)
    rows = survivors(notebook)
    assert rows
    for row in rows:
        line, _, comment = row.line.partition("  #")
        assert line == "outer.clear()"
        assert "older" not in comment


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("outer[0].weight.data = torch.zeros(1024, 1024)", "outer[0].weight"),
        (
            "optimizer.state[outer[0].weight]['mean'] = torch.zeros(1 << 19)",
            "optimizer.state (under a key of type Parameter)",
        ),
        (
            textwrap.dedent(
                """\
                def replace():
                    global leak
                    leak = torch.zeros(1 << 19)
                replace()"""
            ),
            "leak",
        ),
    ],
)
def test_advice_deletes_only_objects_that_the_scope_made(
    notebook: Kernel, code: str, path: str
) -> None:
    run_cells(
        notebook,
        """
        leak = 1
        outer = nn.Sequential(nn.Linear(1024, 2))
        """,
    )
    run_cells(notebook, "optimizer = torch.optim.SGD(outer.parameters())")
    run_cells(notebook, experiment(code, name="a"))
    (row,) = survivors(notebook)
    assert row.path in (
        f"notebook variable {path}",
        'notebook variable optimizer.param_groups[0]["params"][0]',
    )
    assert row.line in ("", "del leak", 'del list(optimizer.state.values())[0]["mean"]')


PUT_INTO_OLD_LIST = """
cache.append(torch.ones(1 << 19))
model = nn.Linear(512, 1024)
cache.append(model)
images.items.append(np.zeros(1 << 18))
v = images
objects[1] = np.zeros(1 << 18)
element = objects[1]
frame['new'] = np.ones(1 << 18)
table = frame
x = torch.ones(700, 700).to_sparse()
cache.append(x)
y = torch.ones(1 << 19).numpy()
cache.append(y)
"""
HOLDERS = [
    ("notebook variable cache", "cache.clear()"),
    ('notebook variable frame["new"]', 'del frame["new"]'),  # the row has the frame's new arrays
    ("notebook variable images.items[100]", "del images.items[100]"),
    ("notebook variable objects (in an array of objects)", "objects[1] = None"),
]


def test_new_objects_inside_an_old_container_are_reported(notebook: Kernel) -> None:
    run_cells(notebook, OLD_MODELS, experiment(PUT_INTO_OLD_LIST, name="a"))
    assert sorted((row.path, row.line) for row in survivors(notebook)) == HOLDERS


def test_a_report_of_a_full_notebook_claims_only_known_facts(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import numpy as np
        from ipygpumem.inventory.remaining import baseline
        baseline.MOST_AT_START = 100
        """,
    )
    run_cells(notebook, "rows = [[np.zeros(1 << 18)]] + [[i] for i in range(200)]; cache = []")
    new = "y = torch.ones(1 << 19); cache += [y, [z := np.ones(1 << 18)]]"
    reply = run_cells(notebook, experiment(f"x = rows[0][0]; {new}", name="a"))
    (report,) = reply.survivors()
    run_cells(notebook, "baseline.MOST_AT_START = 50_000")
    lines = sorted(
        line.partition("variable ")[2] for line in report.splitlines() if "held by" in line
    )
    assert lines == [
        "cache · to free it: cache.clear()",
        "rows[0][0], possibly allocated before the experiment",
    ]
    run_cells(
        notebook,
        """
        cache.clear()
        %gpumem leaks
        """,
    )
