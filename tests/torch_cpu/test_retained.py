"""Rows of ``%gpumem leaks`` besides leaks: graphs of stored results and evaluations, outputs,
allocator caches.
"""

import contextlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.kinds.arrays import storage_key
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.heap.live.live_tensors import live_tensors
from ipygpumem.introspect import is_atom
from ipygpumem.inventory.leaks import graph_nodes, retained
from ipygpumem.inventory.leaks.retained import Finding, Retained
from ipygpumem.probes.allocator import Segment, Snapshot, SnapshotBlock
from ipygpumem.units import MIB
from tests import hostile
from tests.steps import HIDE_LIBRARIES, run_cells

pytestmark = pytest.mark.usefixtures("others_out_of_sight")

SETUP = """
import torch, collections, dataclasses
from torch import nn
def network(): return nn.Sequential(nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 8))
x, net, model = torch.rand(1024, 256), network(), network().eval()
def step(): return net(x).mean()
def f(value): return lambda: value
class Run: pass
@dataclasses.dataclass
class Output(collections.OrderedDict):  # as transformers.ModelOutput
    loss: object
    def __post_init__(self): self["loss"] = self.loss
Pair = collections.namedtuple("Pair", "loss number")
Record = dataclasses.make_dataclass("Record", ["loss"])
"""
"""Each graph has saved 1 MiB of its own: the result of the sigmoid."""


class Case(NamedTuple):
    code: str
    """``it`` is the name that findings tell of."""
    what: str
    remedy: str
    size: float = 1
    """MiB."""


ONE = "it{} keeps its autograd graph"
SEVERAL = "it: {} tensors keep their autograd graphs"
TRAINED = "it = collections.defaultdict(list)\nfor _ in 'ab': it['train'].append(step())"
TOTAL = "it = Run(); it.total = 0\nfor _ in 'ab': it.total += step()"
NO_GRAD = "wrap the evaluation in with torch.no_grad():"
STORED = {
    "a list": Case(
        "it = [step() for _ in range(3)]", SEVERAL.format(3), "it.append(loss.item())", 3
    ),
    "a deque": Case(
        "it = collections.deque([step()])", ONE.format("[0]"), "it.append(loss.item())"
    ),
    "a hook's list": Case(
        "it = network()\nit.register_forward_hook((lambda acts: lambda m, i, o: "
        "acts.append(o))([])); it(x)",
        "a hook on it keeps its autograd graph",
        "keep result.detach() in the hook",
    ),
    "a tuple": Case("it = (1, step())", ONE.format("[1]"), "keep loss.item() in it"),
    "a namedtuple": Case("it = Pair(step(), 3)", ONE.format("[0]"), "keep loss.item() in it"),
    "a dict": Case("it = {'a b': step()}", ONE.format('["a b"]'), 'it["a b"] = loss.item()'),
    "a dict with keys of a user's class": Case(
        "it = {Run(): step()}", ONE.format(""), "keep loss.item() in it"
    ),
    "a dict whose value is in a list, too": Case(
        "it = {'last': step()}; other = [it['last']]",
        ONE.format('["last"]'),
        'it["last"] = loss.item() (and in 1 more place)',
    ),
    "a dict with numbers whose values are in a list, too": Case(
        "it = {3: step()}; more = [it[3]]",
        ONE.format("[3]"),
        "it[3] = loss.item() (and in 1 more place)",
    ),
    "a list whose item is in a dict, too": Case(
        "it = [step()]; last = {'a longer key': it[0]}",
        ONE.format("[0]"),
        "it.append(loss.item()) (and in 1 more place)",
    ),
    "a dict with many": Case(
        "it = {number: step() for number in range(5)}",
        SEVERAL.format(5),
        "it[0] = loss.item(); it[1] = loss.item(); it[2] = loss.item(); and 2 more",
        5,
    ),
    "totals in a dict": Case(
        "total = 0; it = {}\n"
        "for key in 'ab':\n    for _ in 'ab': total = total + step()\n    it[key] = total\n"
        "del total",
        SEVERAL.format(2),
        'it["a"] = loss.item(); it["b"] = loss.item()',
        4,
    ),
    "a defaultdict": Case(TRAINED, SEVERAL.format(2), 'it["train"].append(loss.item())', 2),
    "a result as transformers'": Case(
        "it = Output(step())", ONE.format('["loss"]'), 'it["loss"] = loss.item()'
    ),
    "a dataclass": Case("it = Record(step())", ONE.format(".loss"), "it.loss = loss.item()"),
    "a closure": Case("it = f(step())", ONE.format(""), "keep loss.item() in it"),
    "a total": Case("it = 0\nfor _ in 'ab': it += step()", ONE.format(""), "it += loss.item()", 2),
    "a total in an attribute": Case(TOTAL, ONE.format(".total"), "it.total += loss.item()", 2),
    "a mean": Case(
        "it = sum(step() for _ in 'abc') / 3", ONE.format(""), "keep loss.item() in it", 3
    ),
    "a graph with what a Function of the user's keeps": Case(
        textwrap.dedent(
            """\
            class Twice(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x): ctx.extra = torch.ones(1 << 18); return x * 2
                @staticmethod
                def backward(ctx, gradient): return gradient * 2
            it = [Twice.apply(step())]"""
        ),
        ONE.format("[0]"),
        "it.append(loss.item())",
        2,
    ),
    "a graph with weights that have no other name": Case(
        "alone = nn.Linear(512, 512)\nit = [alone(torch.ones(1, 512)).mean()]; del alone",
        ONE.format("[0]"),
        "it.append(loss.item())",
        (512 * 513 + 512) * 4 / MIB,
    ),
    "a result of a model in eval mode": Case("it = model(x)", ONE.format(""), NO_GRAD),
    "losses of a model in eval mode": Case(
        "it = [model(x).mean() for _ in 'ab']", SEVERAL.format(2), NO_GRAD, 2
    ),
}
NEAR_MISSES = {
    "a loss before backward": "it = step()",
    "a loss of several terms": "h = net(x); it = h.mean() + h.sum() + h.std(); del h",
    "a sum of two losses": "it = step() + step()",
    "a total of one loss": "it = 0; it += step()",
    "losses after backward": "it = [step()]; it[0].backward(); net.zero_grad()",
    "losses without graphs": "it = [step().detach()]",
    "numbers": "it = [step().item()]",
    "a state that the latest one needs": "it = [net(x)]; now = it[0].mean()",
    "a loss in a list that a name stands for": "it = step(); box = [it]",
    "an evaluation without a graph": "with torch.no_grad(): it = model(x)",
    "a saliency map": "y = x.clone().requires_grad_(); it = model(y)",
    "a model in training of which a part is in eval mode": "mixed = network(); mixed[1].eval(); it = mixed(x)",  # noqa: E501
    "objects that defend themselves": "it = [made(Hostile, 1), made(Lazy)]",
}


def findings(names: dict[str, Any], outputs: dict[int, Any] | None = None) -> list[Finding]:
    kept = outputs or {}
    live_tensors(Garbage())
    with undisturbed():
        labelled = {f"Out[{number}]": value for number, value in kept.items() if not is_atom(value)}
        paths, spaces = retained.paths_of(names, labelled)
        heap = Heap()
        look = Retained(heap, paths, labelled, spaces | {id(kept), id(names), id(labelled)})
        all_findings = [*look.graphs, *look.outputs(())]
        del look
        heap.drop()
    return [finding for finding in all_findings if sum(finding.shares.values()) >= MIB / 2]


@contextlib.contextmanager
def namespace(codes: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Run all codes; yield their names, of which each code's ``it`` is ``it0``,
    ``it1`` and so on.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(hostile.SOURCE, names)
    exec(SETUP, names)
    for number, code in enumerate(codes):
        exec(re.sub(r"\bit\b", f"it{number}", code), names)
    yield names
    names.clear()


@pytest.fixture(scope="module")
def stored() -> Iterator[dict[str, Finding]]:
    """Findings of one search for all cases, by the names of the stored objects."""
    with namespace(case.code for case in STORED.values()) as names:
        yield {re.findall(r"it\d+", finding.what)[0]: finding for finding in findings(names)}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_graph_is_reported_with_its_size_and_a_remedy(
    name: str, stored: dict[str, Finding]
) -> None:
    case = STORED[name]
    root = f"it{list(STORED).index(name)}"
    finding = stored[root]
    assert finding.what.replace(root, "it").removesuffix(", of a model in eval mode") == case.what
    assert finding.remedy.replace(root, "it") == f"unless you still call backward(): {case.remedy}"
    assert sum(finding.shares.values()) == pytest.approx(case.size * MIB, abs=64)
    assert finding.device == "cpu"


def test_graphs_that_may_be_needed_are_left_alone() -> None:
    with namespace(NEAR_MISSES.values()) as names:
        assert findings(names) == []
        assert names["touched"] == []


def test_the_reported_size_is_freed_by_the_remedy() -> None:
    with namespace(["it = [step() for _ in 'ab']; total = sum(it); mean = total / 2"]) as names:
        (finding,) = findings(names)
        assert finding.what == "total, mean, it0: 4 tensors keep their autograd graphs"
        storages = {storage_key(item) for item in live_tensors(Garbage())}
        assert finding.shares.keys() <= storages
        for name in ("total", "mean"):
            names[name] = names[name].item()
        names["it0"][:] = [item.item() for item in names["it0"]]
        assert finding.shares.keys().isdisjoint(
            storage_key(item) for item in live_tensors(Garbage())
        )


def test_too_many_graphs_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_nodes, "_MOST_NODES", 3)
    with namespace(["it = [step()]"]) as names:
        assert findings(names) == []


def test_an_output_held_only_by_ipython_is_reported() -> None:
    with namespace(["it = [0]"]) as names:
        array = numpy.ones(MIB)
        shared = numpy.ones(MIB)
        mine = torch.ones(MIB)
        of_numpy = torch.from_numpy(shared)
        tensors = [torch.ones(MIB // 8) for _ in range(8)]
        outputs = {1: tensors, 2: array, 3: names["step"](), 4: mine, 5: shared, 6: "text"}
        names["mine"] = [mine]
        del array, shared, mine, tensors
        sizes_by_what = {
            finding.what: sum(finding.shares.values()) for finding in findings(names, outputs)
        }
        sizes = {"Out[1]: list": 4 * MIB, "Out[2]: ndarray": 8 * MIB, "Out[3]: Tensor": MIB + 4}
        assert sizes_by_what == {
            f"{name} that only IPython holds": size for name, size in sizes.items()
        }
        assert of_numpy is not None


def test_an_allocators_cache_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SnapshotBlock(0, 3 * MIB, 0, "inactive")
    used = SnapshotBlock(0, MIB, MIB, "allocated")
    snapshot = Snapshot((Segment((free,)), Segment((used, free))))

    def snapshots(backend: str) -> dict[str, Snapshot]:
        if backend == "xpu":
            raise RuntimeError("no snapshots")
        return {"cuda:0": snapshot}

    monkeypatch.setattr(retained, "snapshots", snapshots)
    (cache,) = retained.allocator_caches()
    assert (cache.device, sum(cache.shares.values())) == ("cuda:0", 3 * MIB)
    assert cache.remedy.endswith("%gpumem free")


def test_leaks_lists_other_findings_below_the_leaks(notebook: Kernel) -> None:
    run_cells(notebook, SETUP, HIDE_LIBRARIES, "losses = [step() for _ in range(3)]")
    (report,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert report.splitlines() == [
        "no leak of at least 1 MiB, but 3 MiB are kept by what is listed below",
        "  3 MiB · losses: 3 tensors keep their autograd graphs · "
        "to free it: unless you still call backward(): losses.append(loss.item())",
    ]
    run_cells(
        notebook,
        "losses[:] = [loss.item() for loss in losses]",
        "[torch.ones(1 << 17) for _ in range(4)]",
    )
    number = notebook.value("get_ipython().execution_count - 1")
    (report,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert (
        f"2 MiB · Out[{number}]: list that only IPython holds · to free it: %xdel _{number}"
        in report
    )
    (report,) = run_cells(notebook, f"%xdel _{number}", "%gpumem leaks").leaks()
    assert report == "no leak of at least 1 MiB was found"
    # The graphs of leaks keep the leaks: the same bytes.
    scope = (
        "%%experiment a\nx = torch.ones(1 << 18, requires_grad=True); losses[:] = [x.exp() for _ "
        "in range(3)]"
    )
    (report,) = run_cells(notebook, scope, "%gpumem leaks").leaks()
    assert "losses: 3 tensors keep their autograd graphs" in report
    assert report.splitlines()[0] == "1 leak · 4 MiB"


NONE = "no leak of at least 1 MiB was found"
NAMED_RESULTS = {
    "a loss": ("loss = step()", [NONE]),
    "a loss of several names": ("loss = step(); also = loss", [NONE]),
    "an output of a model": ("prediction = net(x)", [NONE]),
    "a loss that is collected": (
        "losses = []\nfor _ in 'abc': losses.append(loss := step())",
        [
            "no leak of at least 1 MiB, but 2 MiB are kept by what is listed below",
            "  2 MiB · losses: 2 tensors keep their autograd graphs · "
            "to free it: unless you still call backward(): losses.append(loss.item())",
        ],
    ),
    "a loss that is collected and summed up": (
        "losses, total = [], 0\nfor _ in 'abc': loss = step(); total += loss; losses.append(loss)",
        [
            "no leak of at least 1 MiB, but 2 MiB are kept by what is listed below",
            "  2 MiB · total, losses: 3 tensors keep their autograd graphs · "
            "to free it: unless you still call backward(): total += loss.item(); "
            "losses.append(loss.item())",
        ],
    ),
    "a loss of a deleted model": (
        "model = nn.Linear(256, 2048); loss = model(x[:, :256]).mean(); del model",
        [
            "1 leak · 2 MiB",
            "  2 MiB · Parameter float32 2048 × 256 · held by notebook variable loss: its autograd "
            "graph (AccumulateGrad) · to free it: loss = loss.detach()  # and keep loss.item() or "
            "tensor.detach() instead of a tensor with its graph",
        ],
    ),
}
"""Code, and the report of ``%gpumem leaks``."""


@pytest.mark.parametrize("case", NAMED_RESULTS)
def test_leaks_lists_graphs_of_named_results_only_if_needless(notebook: Kernel, case: str) -> None:
    code, expected = NAMED_RESULTS[case]
    run_cells(notebook, SETUP, code)
    (report,) = run_cells(notebook, "%gpumem leaks").leaks()
    run_cells(notebook, "loss = also = losses = total = prediction = None")
    assert report.splitlines() == expected
