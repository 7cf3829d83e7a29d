"""Most ends search only objects made since the start; they report the same as a search of
everything.
"""

import textwrap
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import experiment, run_cells

COUNT = """
import ipygpumem.heap.live.garbage as garbage, ipygpumem.probes.host as host
full, walks, files = [], [], {garbage.__file__, host.__file__}
def count(phase, info):
    if phase == "start" and info["generation"] == 2 and sys._getframe(1).f_code.co_filename in files:
        full.append(1)
gc.callbacks.append(count)
def counted(*bases, walk=garbage.live_instances):
    walks.append(1)
    return walk(*bases)
garbage.live_instances = counted
def seen(record):
    survivors = [(s.name, s.type_name, s.shape, s.size_bytes, s.arrays, s.cell and "a cell",
                  s.holder and (s.holder.path, s.holder.advice)) for s in record.survivors]
    notes = [note for note in record.notes if "meanwhile" not in note]
    return (record.deleted, record.restored, record.kept, survivors, notes, record.ooms,
            [(step.name, step.error) for step in record.steps], alive())
"""  # noqa: E501

SETUP = """
class Node:
    def __init__(self, held=None): self.me, self.held = self, held
class Closing:
    def __init__(self, close): self.me, self.close = self, close
    def __del__(self): self.close()
class Box:
    def __init__(self, held): self.held = held
old, older = Node(torch.ones(1 << 19)), {"node": Node(torch.ones(1 << 19))}
plain, box, weights = nn.Linear(512, 1024), Box(Node(torch.ones(1 << 19))), torch.ones(1 << 19)
results, x = [], 1
watch(old=old, older=older["node"], plain=plain, boxed=box.held, weights=weights)
"""

YOUNG = {
    "tensors": "a = torch.ones(1 << 19); b = [a, torch.zeros(10)]; watch(a=a)",
    "garbage with a tensor": "Node(torch.ones(1 << 19)); n = Node(torch.ones(1 << 18)); watch(n=n, held=n.held)",  # noqa: E501
    "a model that is trained": (
        "m = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)); o = "
        "torch.optim.SGD(m.parameters())\n"
        "for step in range(2):\n    o.zero_grad(); loss = m(torch.ones(4, 512)).sum(); "
        "loss.backward(); o.step()\n"
        "m.me = m; watch(m=m, weight=m[0].weight)"
    ),
    "a survivor": "a = torch.ones(1 << 19); results.append({'a': a}); watch(a=a)",
    "an old model's gradient": "plain(torch.ones(4, 512)).sum().backward()",
    "a view of what is old": "v = old.held[:10]; results.append(old.held[3:]); same = old",
    "a saved result": "y = torch.sigmoid(plain(torch.ones(1 << 10, 512))); results.append(y.sum())",
    "an output": "torch.ones(1 << 19)",
    "a restored name": "x = Node(torch.ones(1 << 19)); old = 1; watch(x=x)",
    "an old tensor that dies at once": "del weights",
    "an array": "import numpy as np; a = np.ones(1 << 19); results.append(a); b = np.ones(1 << 19)",
}

FULL = {
    "a collection of the user's": "n = Node(torch.ones(1 << 19)); watch(n=n); gc.collect()",
    "much allocated": "n = Node(torch.ones(1 << 19)); watch(n=n); many = [[] for _ in range(50_000)]",  # noqa: E501
    "an inner experiment": textwrap.dedent(
        """\
        n = Node(torch.ones(1 << 19)); watch(n=n)
        with ipygpumem.experiment('inner', report='none'):
            inner = Node(torch.ones(1 << 19)); watch(inner=inner)"""
    ),
    "an old object that is garbage now": "del old",
    "an old object that dies at once and leaves what it held": "del box",
    "a function binds an old name anew": textwrap.dedent(
        """\
        def f():
            global older
            older = 1
        f()"""
    ),
    "the collector is switched off": "n = Node(torch.ones(1 << 19)); watch(n=n); gc.disable()",
    "the heap is frozen": "n = Node(torch.ones(1 << 19)); watch(n=n); gc.freeze()",
    "a finaliser frees what is old": "c = Closing(older.clear); watch(c=c)",
    "a callback frees what is old": (
        "n = Node(); results.append(weakref.ref(n, lambda _: older.clear())); watch(n=n)"
    ),
}


_TIDY = "gc.enable(); gc.unfreeze(); gc.collect(); watched.clear()"


def ends(kernel: Kernel, code: str) -> tuple[Any, int, int]:
    """Run an experiment; return what it reports, and how many full collections and walks over the
    heap it took.
    """
    run_cells(
        kernel,
        SETUP,
        experiment("pass", name="warm"),
        "full.clear(); walks.clear()",
        "%%experiment a\n" + code,
    )
    seen, full, walks = kernel.value("(seen(ipygpumem.experiments()[-1]), len(full), len(walks))")
    run_cells(kernel, _TIDY)
    return seen, full, walks


_TRIES = 20
"""While a scope begins, threads of the kernel may run: then nobody can tell what is young; such a
try says nothing.
"""


@pytest.fixture
def counting(notebook: Kernel) -> Kernel:
    run_cells(notebook, "gc.callbacks.clear()\n" + COUNT)
    return notebook


SAMPLE = (
    "a model that is trained",
    "a survivor",
    "an old object that is garbage now",
)
REST = [
    pytest.param(name, marks=pytest.mark.thorough) for name in (*YOUNG, *FULL) if name not in SAMPLE
]


@pytest.mark.parametrize("name", [*SAMPLE, *REST])
def test_searching_young_objects_finds_the_same_as_a_full_search(
    counting: Kernel, name: str
) -> None:
    code = {**YOUNG, **FULL}[name]
    run_cells(counting, SETUP)
    # the first time torch loads what it loads lazily
    run_cells(counting, f"exec({code!r}, dict(globals()))")
    run_cells(counting, _TIDY)
    for _ in range(_TRIES):
        of_young, full, walks = ends(counting, code)
        if name in FULL or (full, walks) == (0, 0):
            break
    run_cells(counting, "garbage._YOUNG = ()")
    expected, *_ = ends(counting, code)
    run_cells(counting, "garbage._YOUNG = (0, 1)")
    assert of_young == expected
    if name in YOUNG:
        assert (full, walks) == (0, 0)
    else:
        assert full > 0


def test_torch_can_swap_tensors_after_an_experiment(counting: Kernel) -> None:
    # Seen: "Cannot swap t1 because it has weakref associated with it", from m.double() too.
    run_cells(
        counting,
        "m, tensors, swap = nn.Linear(2, 2), [torch.ones(3), torch.zeros(3)], "
        "torch.utils.swap_tensors",
    )
    run_cells(
        counting,
        "first, second = torch.ones(3), torch.zeros(3)",
        experiment("a = torch.ones(3)", name="a", options="--report none"),
    )
    assert counting.value(
        "[len(torch.utils.weakref.getweakrefs(item)) for item in (*tensors, first)]"
    ) == [0, 0, 0]
    run_cells(counting, "swap(*tensors); swap(first, second)")
    assert counting.value("(tensors[0].sum().item(), first.sum().item())") == (0, 0)
    run_cells(counting, "torch.__future__.set_swap_module_params_on_conversion(True); m.double();")
    run_cells(
        counting,
        "torch.__future__.set_swap_module_params_on_conversion(False)",
        "mine = weakref.ref(first)",
    )
    assert counting.run("swap(first, second)").status == "error"
    run_cells(
        counting,
        experiment("tensors.append(torch.ones(1 << 19))", name="a", options="--report none"),
    )
    assert counting.value("[s.size_bytes for s in ipygpumem.experiments()[-1].survivors]") == [
        4 << 19
    ]


def test_torch_has_its_own_module_back_after_unloading(counting: Kernel) -> None:
    run_cells(counting, experiment("w = torch.ones(3)", name="a"))
    assert counting.value("torch.utils.weakref is weakref") is False
    run_cells(counting, "%unload_ext ipygpumem")
    assert counting.value("torch.utils.weakref is weakref") is True
    run_cells(counting, "%load_ext ipygpumem")
