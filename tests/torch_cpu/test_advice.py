"""Each kind of advice is applied, and the saving measured; what only looks like it is left in peace."""

from __future__ import annotations

import ast
import gc
import inspect
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import pytest

import ipygpumem
from ipygpumem.advising import advisor, chains
from ipygpumem.advising.places import Scope
from ipygpumem.advising.records import Advice, Advised
from ipygpumem.units import KIB, MIB
from tests import allocated as measuring
from tests import hostile
from tests.advice_cases import CASES, NEAR_MISSES, Case
from tests.allocated import allocated
from tests.kernel import Kernel
from tests.steps import works
from tests.tracing import interrupted_at

torch: Any = pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")

pytestmark = [
    pytest.mark.usefixtures("others_out_of_sight"),
    pytest.mark.skipif(not measuring.is_known(), reason="this C library does not say what is allocated"),
]

IMPORTS = "import torch, numpy as np, pandas as pd\nfrom torch import nn\nD = 'cpu'\ntorch.manual_seed(0)\n"
ON_HOST = {name: case for name, case in CASES.items() if case.where in ("torch", "host")}
OUTPUTS = {name: case for name, case in CASES.items() if case.where == "output"}
TOLERANCE = 0.05


@pytest.fixture
def namespace() -> Iterator[dict[str, Any]]:
    """A script's names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS, names)
    yield names
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    gc.collect()  # dynamo misses the names that it put there, if it is told of a model's death when they are gone
    names.clear()


def advised(names: dict[str, Any], least: int = 64 * KIB) -> Advised:
    return advisor.advise(Scope(names, {}), least)


def lines(found: Advised) -> list[str]:
    return [item.code for item in found.advice]


def test_each_kind_of_advice_has_a_case() -> None:
    assert {case.finds for case in CASES.values()} == {kind.__name__ for kind in advisor.KINDS}


@pytest.mark.parametrize("case", ON_HOST.values(), ids=list(ON_HOST))
def test_advice_saves_what_it_promises(case: Case, namespace: dict[str, Any]) -> None:
    exec(case.setup, namespace)
    found = advised(namespace)
    assert case.code in lines(found)
    (promised,) = [item.saves_bytes for item in found.advice if item.code == case.code]
    before = allocated()
    exec(f"{case.code}\n{case.then}", namespace)
    assert before - allocated() == pytest.approx(promised, rel=TOLERANCE)
    assert promised >= MIB
    assert case.code not in lines(advised(namespace))


def test_blocks_are_left_in_peace_where_torch_does_not_tell_what_goes_into_them(
    namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes into these blocks nobody has saved, and checkpointing would keep it."""
    exec(
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.bias = nn.Parameter(torch.zeros(256))\n"
        "        self.inner = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))\n"
        "    def forward(self, x): return self.inner(x + self.bias)\n"
        "net = nn.Sequential(nn.Linear(8, 256), nn.Sequential(*(Block() for step in range(4))))\n"
        "loss = net(torch.rand(512, 8)).mean()",
        namespace,
    )
    (found,) = advised(namespace).advice
    inside, goes_in = 512 * (256 + 2 * 1024) * 4, 512 * 256 * 4
    assert (found.kind, found.saves_bytes) == ("checkpointing", 3 * (inside - goes_in))
    monkeypatch.setattr(chains, "METADATA", "_missing")
    assert advised(namespace).advice == ()


LATER = {name: case for name, case in CASES.items() if case.then}


@pytest.mark.parametrize("case", LATER.values(), ids=list(LATER))
def test_with_what_is_advised_a_model_computes_the_same(case: Case, namespace: dict[str, Any]) -> None:
    """RReLU draws its slopes anew, dropout its elements: from the same seed."""
    exec(case.setup.replace("torch.rand(8, 64, 256, device=D)).mean()", "torch.ones(8, 64, 256)).mean()"), namespace)
    found = []
    for line in ("", case.code):
        exec(f"{line}\ntorch.manual_seed(1)\ndel loss; loss = step(); loss.backward()", namespace)
        model = namespace["net"] if "net" in namespace else namespace["run"].net
        found.append(
            [namespace["loss"].detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]
        )
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1])


def test_advice_on_workers_saves_what_it_promises(namespace: dict[str, Any]) -> None:
    case = CASES["persistent workers"]
    exec(case.setup, namespace)
    processes = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    assert len(processes) == 2
    (found,) = [item for item in advised(namespace).advice if item.code == case.code]
    assert found.saves_bytes == pytest.approx(sum(one.memory_full_info().uss for one in processes), rel=TOLERANCE)
    assert found.saves_bytes > 16 * MIB, "what each of them keeps"
    running = namespace["running"] = iter(namespace["loader"])
    assert case.code not in lines(advised(namespace)), "a loop is running"
    del running, namespace["running"]
    exec(case.code, namespace)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert case.code not in lines(advised(namespace))


@pytest.mark.parametrize("case", OUTPUTS.values(), ids=list(OUTPUTS))
def test_advice_on_an_output_saves_what_it_promises(case: Case, notebook: Kernel) -> None:
    works(notebook, "import ipygpumem\n" + inspect.getsource(measuring).replace("from __future__", "#") + IMPORTS)
    assert works(notebook, case.setup).result is not None
    number = notebook.value("max(Out)")
    code = case.code.replace("1", str(number))
    works(notebook, "found = ipygpumem.advise().advice\nbefore = allocated()")
    (promised,) = [size for line, size in notebook.value("[(a.code, a.saves_bytes) for a in found]") if line == code]
    works(notebook, code)
    assert notebook.value("before - allocated()") == pytest.approx(promised, rel=TOLERANCE)
    assert f"Out[{number}]" not in str(works(notebook, "%gpumem advise").reports("advice"))


@pytest.mark.parametrize("setup", NEAR_MISSES.values(), ids=list(NEAR_MISSES))
def test_what_only_looks_like_it_is_left_in_peace(setup: str, namespace: dict[str, Any]) -> None:
    exec(setup, namespace)
    assert advised(namespace).advice == ()


def test_the_sum_counts_no_byte_twice(namespace: dict[str, Any]) -> None:
    """The copy is a duplicate and of float64, too; both lines stand there, and the sum has its bytes once."""
    exec("a = torch.rand(1 << 20, dtype=torch.float64)\nb = a.clone()", namespace)
    found = advised(namespace)
    assert sorted(lines(found)) == ["a = a.float()", "b = a", "b = b.float()"]
    assert found.device_bytes == {"cpu": 12 * MIB}
    before = allocated()
    exec("b = a\na = b = a.float()", namespace)
    assert before - allocated() == pytest.approx(12 * MIB, rel=TOLERANCE)


def test_what_saves_most_comes_first_and_little_is_left_out(namespace: dict[str, Any]) -> None:
    exec("a, b, c = (torch.rand(n, 1024, 4)[0] for n in (512, 1024, 256))", namespace)
    assert lines(advised(namespace)) == ["b = b.clone()", "a = a.clone()", "c = c.clone()"]
    assert lines(advised(namespace, 5 * MIB)) == ["b = b.clone()", "a = a.clone()"]


def test_records_go_through_dictionaries(namespace: dict[str, Any]) -> None:
    exec("a = torch.rand(1024, 1024)[0]", namespace)
    found = advised(namespace)
    assert Advised.from_dict(found.to_dict()) == found
    assert Advice.from_dict(found.advice[0].to_dict()) == found.advice[0]
    assert repr(found) == "<Advised: 1 pieces of advice: cpu 4 MiB>"


@pytest.mark.parametrize("key", ["it's", 'a"b', "two\nlines", "\u202eabc", "a\\b", "x" * 50])
def test_each_line_is_valid_whatever_a_key_is(key: str, namespace: dict[str, Any]) -> None:
    namespace["found"] = {key: torch.rand(1024, 1024)[0], "other": 1}
    for line in lines(advised(namespace)):
        assert line.isprintable()
        ast.parse(line)
        exec(line, namespace)
        assert namespace["found"][key].untyped_storage().nbytes() == 4096


@pytest.mark.parametrize("name", ["class", "two words", "1x", "x; y", "__x", ""])
def test_names_that_are_no_code_are_not_in_advice(name: str, namespace: dict[str, Any]) -> None:
    namespace[name] = torch.rand(1024, 1024)[0]
    assert advised(namespace).advice == ()


def test_a_function_in_a_script_is_told_about_its_own_names() -> None:
    def work() -> tuple[list[str], int]:
        row = torch.rand(1024, 1024)[0]
        found = lines(ipygpumem.advise())
        return found, row.numel()

    found, _ = work()
    assert "row = row.clone()" in found


def test_nothing_of_the_users_is_called() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS, names)
    names.update(hostile.tensors())
    names["thing"] = hostile.made(hostile.Hostile)
    names["box"] = hostile.made(hostile.Container, {"a": torch.rand(1024, 1024)[0]})
    names["row"] = hostile.made(hostile.Sequence, [torch.rand(1024, 1024)[0], names["thing"]])
    names["slotted"] = hostile.made(hostile.Slotted, torch.rand(1024, 1024)[0])
    names["plain"] = [names["thing"], {"k": (names["box"], torch.rand(1 << 20))}]
    names["twin"] = {"k": names["plain"][1]["k"][1].clone()}
    exec("frame = pd.DataFrame({'few': [thing] + ['a'] * (1 << 18)}, dtype=object)", names)
    exec("net = nn.Sequential(nn.Linear(512, 512), nn.LeakyReLU(), nn.Linear(512, 1))", names)
    exec("loss = net(torch.rand(2048, 512)).mean()", names)
    vars(names["net"][1])["negative_slope"] = names["thing"]
    with hostile.untouched():
        found = advised(names)
    assert lines(found) == ["twin['k'] = plain[1]['k'][1]"]


def test_a_look_leaves_nothing_behind(namespace: dict[str, Any]) -> None:
    exec("a = torch.rand(1024, 1024)\nb = a.clone()\nlosses = [(a.requires_grad_() * 2).sum()]", namespace)
    advised(namespace)
    before = allocated()
    found = advised(namespace)
    assert abs(allocated() - before) < 256 * KIB
    namespace.clear()
    assert before - allocated() > 7 * MIB
    assert found.notes == ()


@pytest.mark.parametrize("look", [ipygpumem.advise, ipygpumem.tensors])
def test_what_a_function_deletes_after_a_look_dies_at_once(look: Callable[[], object]) -> None:
    class _Thing:
        pass

    def work() -> bool:
        thing = _Thing()
        watched = weakref.ref(thing)
        look()
        look()
        del thing
        return watched() is None

    assert work()


def test_a_look_that_is_interrupted_at_any_line_keeps_nothing_alive(namespace: dict[str, Any]) -> None:
    exec("a = torch.rand(1024)\nlosses = [(a.requires_grad_() * 2).sum()]", namespace)
    line, count = 1, 0
    while line < 20_000 and interrupted_at(line, lambda: advised(namespace), _is_of_advice):
        watched = weakref.ref(namespace["a"])
        exec("del a, losses\na = torch.rand(1024)\nlosses = [(a.requires_grad_() * 2).sum()]", namespace)
        assert watched() is None, line
        assert gc.isenabled()
        line, count = line + 1 + line // 4, count + 1
    assert count > 10, "no line was interrupted"


def _is_of_advice(frame: FrameType) -> bool:
    return "/advising/" in frame.f_code.co_filename.replace("\\", "/")
