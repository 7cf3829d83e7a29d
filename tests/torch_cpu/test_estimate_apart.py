"""Estimates change nothing: not in the notebook, not in modules of the user's, in a child process or in place."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ipygpumem
from ipygpumem.errors import EstimateError
from ipygpumem.estimating import restoring, running, storage_log
from tests.kernel import Kernel
from tests.steps import kernel_with, works

MODULE = """
import collections, functools, random, threading
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    freqs = {}
    calls = 0
    mask = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x):
        Net.calls += 1
        self.seen = x
        if x.shape[1] not in Net.freqs:
            Net.freqs[x.shape[1]] = torch.arange(x.shape[1]) * 1.0
        Net.mask = mask(x.shape[1])
        return self.layer(x * Net.freqs[x.shape[1]] * Net.mask)

@functools.lru_cache
def mask(n):
    return torch.ones(n)

class Holder:
    table = nn.Parameter(torch.zeros(8))
    __slots__ = ("last",)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.1)
holder = Holder()
losses, by_name, queue, kept = [], {}, collections.deque(maxlen=3), set()
table = np.zeros(4)
real = torch.zeros(4)
generator, dice = np.random.default_rng(3), random.Random(3)
local = threading.local()
counter = 0

def train(x, steps=2):
    global counter
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        by_name["last"], by_name[counter] = loss, [loss]
        queue.append(loss)
        kept.add(loss)
        holder.last = loss
        counter += 1
    (Holder.table * 2).sum().backward()
    table[:] = 7
    real.add_(1)
    local.loss = loss
    generator.random(), dice.random(), np.random.rand(), random.random()
"""

SETUP = """
import sys, random
sys.path.insert(0, {path!r})
sys.modules.pop("usersmodule", None)  # another test's
import numpy as np, torch, usersmodule as m
x = torch.randn(64, 32)

def all_of_it():
    state = [v for entry in m.optimizer.state.values() for v in entry.values()]
    grads = [p.grad for p in m.model.parameters()]
    named = [p for p in m.model.parameters()] + state + [m.real, m.Holder.table, m.Holder.table.grad]
    plain = [(type(t).__name__, None if t is None else t.tolist()) for t in named + grads]
    numbers = (m.losses, m.by_name, list(m.queue), m.kept, m.counter, m.Net.calls, m.Net.mask, m.table.tolist())
    states = (m.generator.bit_generator.state["state"], hash(m.dice.getstate()), str(np.random.get_state()),
              hash(random.getstate()))
    caches = (sorted(m.Net.freqs), m.mask.cache_info().currsize, hasattr(m.holder, "last"),
              hasattr(m.local, "loss"), hasattr(m.model, "seen"), sorted(vars(m)) == names_of_it)
    return repr((plain, numbers, states, caches))

names_of_it = sorted(vars(m))
before = all_of_it()
"""


@pytest.fixture(scope="module", params=["apart", "in place"])
def estimating(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel that estimates in a child process, and one that cannot."""
    with Kernel() as kernel:
        works(kernel, "%load_ext ipygpumem")
        if request.param == "in place":
            works(kernel, "import os\ndel os.fork")
        yield kernel


@pytest.fixture
def users(estimating: Kernel, tmp_path: Path) -> Kernel:
    """A kernel with a fresh module of the user's that holds model, optimizer, lists and caches."""
    (tmp_path / "usersmodule.py").write_text(MODULE)
    works(estimating, "%reset -f")
    works(estimating, SETUP.format(path=str(tmp_path)))
    return estimating


def test_nothing_of_a_users_module_is_changed(users: Kernel) -> None:
    """Model, optimizer, class attributes, caches, lists and generators of a module are as they were."""
    reply = users.run("%%estimate\nm.train(x)\n")
    assert reply.status == "ok", reply.traceback + reply.stderr
    assert users.run("assert all_of_it() == before, (before, all_of_it())").message == ""
    assert "optimizer state" in reply.reports("estimate")[0]


def test_real_training_goes_on_after_an_estimate(users: Kernel) -> None:
    """After an estimate real steps move the weights as if there had been none."""
    users.run("import copy\ntorch.manual_seed(1)\nstate = copy.deepcopy(m.model.state_dict())\nm.train(x)")
    moved = users.value("m.model.layer.weight.tolist()")
    users.run(
        "m.model.load_state_dict(state); m.optimizer = torch.optim.Adam(m.model.parameters(), 0.1)\n"
        "m.losses.clear(); m.by_name.clear(); m.queue.clear(); m.kept.clear()"
    )
    assert users.run("%%estimate\nm.train(x)\n").status == "ok"
    assert users.run("m.train(x)").status == "ok"
    assert users.value("m.model.layer.weight.tolist()") == moved
    assert users.value("[type(t).__name__ for t in m.losses]") == ["Tensor", "Tensor"]


def test_an_estimate_that_fails_changes_nothing_either(users: Kernel) -> None:
    reply = users.run("%%estimate\nm.train(x)\nraise ValueError('stopped')\n")
    assert (reply.error, reply.message) == ("ValueError", "stopped")
    assert users.run("assert all_of_it() == before, (before, all_of_it())").message == ""


def test_no_fake_tensor_is_alive_afterwards(users: Kernel) -> None:
    fakes = "[t for t in gc.get_objects() if type(t).__name__ == 'FakeTensor']"
    works(users, f"import gc\nearlier = {fakes}")  # of an estimate that failed, in its traceback
    works(users, "%%estimate\nm.train(x)\n")
    assert users.value(f"len({fakes}) - len(earlier)") == 0


def test_a_summary_changes_nothing_either(users: Kernel) -> None:
    users.run("import ipygpumem")
    assert users.run("print(ipygpumem.summary(m.model, x))").stdout.startswith("Net: 264 parameters")
    assert users.run("assert all_of_it() == before, (before, all_of_it())").message == ""


NOTEBOOK = """
import functools, random
import numpy as np
class Table(torch.nn.Module):
    cache, count = {}, 0
    __slots__ = ()
    def forward(self, x):
        Table.count += 1
        Table.extra = x
        return Table.cache.setdefault(x.shape[0], torch.ones(x.shape[0]))
@functools.lru_cache(maxsize=None)
def mask(n): return torch.ones(n)
rng, dice, plain = np.random.default_rng(1), random.Random(1), np.zeros(3)
class Closed:
    def __init__(self): self.seen = []
    def __del__(self): pass
closed = Closed()
state = lambda: (Table.cache, Table.count, hasattr(Table, "extra"), mask.cache_info().currsize,
    rng.bit_generator.state["state"]["state"], dice.getstate()[1][:3], plain.tolist(), closed.seen)
"""


def test_what_the_notebook_shares_with_an_estimate_is_left_as_it_was(users: Kernel) -> None:
    """Class attributes, caches, NumPy's arrays and generators, objects that have no copy."""
    users.run(NOTEBOOK)
    before = users.value("state()")
    cell = "Table()(mask(3))\nrng.random(), dice.random()\nplain[:] = 7\nclosed.seen.append(x)\ny = x * 2"
    reply = users.run(f"%%estimate\n{cell}\n")
    assert reply.status == "ok", reply.traceback
    assert users.value("state()") == before
    assert "still holds" not in reply.reports("estimate")[0]


def test_what_the_error_of_an_estimate_holds_is_not_said_of_the_next(users: Kernel) -> None:
    """IPython keeps the last error's traceback, and with it the copies that the code had."""
    assert users.run("%%estimate\nkept = torch.ones(3)\nraise ValueError('mine')").error == "ValueError"
    reply = users.run("%%estimate\ny = torch.ones(3) * 2")
    assert "still holds" not in reply.reports("estimate")[0]


def test_the_report_says_which_way_it_took(users: Kernel, request: pytest.FixtureRequest) -> None:
    (report,) = users.run("%%estimate\nx * 2\n").reports("estimate")
    if "in place" in request.node.name:
        assert "made in this process in" in report
    else:
        assert "made in a child process in" in report


def test_the_figures_are_the_same_in_both_ways(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "usersmodule.py").write_text(MODULE)
    kernel.run("import os, ipygpumem\n" + SETUP.format(path=str(tmp_path)))
    call = "[d.to_dict() for d in ipygpumem.estimate(m.train, x, device='cuda').devices]"
    apart = kernel.value(call)
    kernel.run("del os.fork")
    assert kernel.value(call) == apart
    assert apart[0]["parts"]["parameters"] >= 32 * 8 * 4


# -- the child ---------------------------------------------------------------------------------------------------------


trainer = kernel_with(
    "%load_ext ipygpumem", "import os, sys, time, signal, warnings\nimport torch, ipygpumem\nx = torch.ones(4, 4)"
)


def test_a_childs_text_comes_in_order(trainer: Kernel) -> None:
    cell = "%%estimate\nprint('one')\nprint('two', file=sys.stderr)\nos.write(1, b'')\nprint('three', end='')\n"
    reply = trainer.run(cell)
    assert (reply.stdout, reply.stderr) == ("one\nthree", "two\n")


def test_much_text_is_no_deadlock(trainer: Kernel) -> None:
    reply = trainer.run("%%estimate\nfor n in range(3000):\n    print('y' * 100)\n")
    assert reply.stdout == ("y" * 100 + "\n") * 3000


def test_what_a_child_displays_is_displayed(trainer: Kernel) -> None:
    cell = "%%estimate\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'))\n"
    reply = trainer.run(cell)
    assert any(d["data"].get("text/html") == "<b>bold</b>" for d in reply.displays), reply.stderr
    assert reply.stderr == ""


def test_what_was_logged_before_goes_on_being_logged(trainer: Kernel) -> None:
    trainer.run("import logging\nlog = logging.getLogger('users')\nlog.addHandler(logging.StreamHandler(sys.stderr))")
    reply = trainer.run("%%estimate\nlog.warning('careful')\n")
    assert (reply.stderr, reply.status) == ("careful\n", "ok")


def test_an_error_is_shown_with_its_lines(trainer: Kernel) -> None:
    trainer.run("# two\n# lines\ndef deeper(x):\n    return x @ x[:, :3].T\n")
    reply = trainer.run("%%estimate\ny = x * 2\nz = deeper(y)\n")
    assert reply.error == "RuntimeError"
    text = without_colours(reply.traceback)
    assert "----> 3 z = deeper(y)" in text
    assert "----> 4     return x @ x[:, :3].T" in text
    assert "ipygpumem" not in text


def test_an_error_keeps_its_class_text_and_cause(trainer: Kernel) -> None:
    trainer.run("class Stop(ValueError):\n    def __init__(self, a, b): super().__init__(a); self.b = b\n")
    cell = "%%estimate\ntry:\n    {}['key']\nexcept KeyError as error:\n    raise Stop('enough', 3) from error\n"
    reply = trainer.run(cell)
    assert (reply.error, reply.message) == ("Stop", "enough")
    assert "KeyError" in reply.traceback
    assert "direct cause" in reply.traceback
    trainer.run("def f():\n    raise Stop('enough', 3)\n")
    assert trainer.run("try:\n    ipygpumem.estimate(f)\nexcept Stop as error:\n    found = error.b").status == "ok"
    assert trainer.value("found") == 3


def test_a_class_that_only_the_child_has_keeps_its_name(trainer: Kernel) -> None:
    cell = "%%estimate\nclass Mine(LookupError):\n    def __str__(self): return 'mine alone'\nraise Mine(x)\n"
    reply = trainer.run(cell)
    assert (reply.error, reply.message) == ("Mine", "mine alone")


def test_a_child_that_dies_is_one_line(trainer: Kernel) -> None:
    reply = trainer.run("%%estimate\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert "SIGKILL" in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert "status 7" in trainer.run("%%estimate\nos._exit(7)\n").stderr
    assert trainer.run("x.sum().item()", store_history=True).result == "16.0"


def test_a_child_never_returns_to_the_kernels_loop(trainer: Kernel) -> None:
    """Whatever leaves the code, a SystemExit or an error in a finally, one process answers."""
    for code in ("raise SystemExit(3)", "sys.exit()", "raise GeneratorExit", "raise BaseException('base')"):
        assert trainer.run(f"%%estimate\n{code}\n").status == "error"
    assert trainer.run("print(os.getpid())").stdout == f"{trainer.value('os.getpid()')}\n"
    assert children_of(trainer) == []


def test_a_loop_that_never_ends_is_stopped_and_its_line_named(trainer: Kernel) -> None:
    reply = trainer.run("%%estimate --timeout 5\ny = x * 2\nwhile True:\n    pass\n")
    assert reply.stderr.startswith("UsageError: the estimate was stopped after 5 s in line ")
    assert "line 3" in reply.stderr or "line 4" in reply.stderr
    slow = trainer.run("%%estimate --timeout 5\ntime.sleep(1000)\n")
    assert "line 2: time.sleep(1000)" in slow.stderr
    assert children_of(trainer) == []


def test_an_interrupt_ends_the_child_and_shows_its_line(trainer: Kernel) -> None:
    cell = "%%estimate\nprint('runs')\nos.kill(os.getppid(), signal.SIGINT)\nwhile True:\n    time.sleep(0.01)\n"
    reply = trainer.run(cell)  # as a Ctrl-C: the parent gets it
    assert (reply.error, reply.stdout) == ("KeyboardInterrupt", "runs\n")
    assert "time.sleep(0.01)" in without_colours(reply.traceback)
    assert children_of(trainer) == []
    assert trainer.run("%%estimate\nx * 2\n").status == "ok"


def test_a_child_that_takes_too_much_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.estimating.child.available_bytes", lambda: 256 * 2**20)

    def hoard() -> None:
        kept = []
        while True:
            kept.append(bytes(2**20))

    with pytest.raises(EstimateError, match="host memory"):
        ipygpumem.estimate(hoard)


def test_a_question_is_refused_with_its_line(trainer: Kernel) -> None:
    reply = trainer.run("%%estimate\nname = input('who? ')\n")
    assert "input in line 2: name = input('who? ')" in reply.stderr


def test_no_warning_about_forks_is_shown(trainer: Kernel) -> None:
    trainer.run("warnings.simplefilter('error')")
    reply = trainer.run("%%estimate\nx * 2\n")
    trainer.run("warnings.resetwarnings()")
    assert (reply.status, reply.stderr) == ("ok", "")


def test_garbage_of_the_notebook_is_finalised_once(trainer: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "finalised"
    code = f"""
import gc
class Noisy:
    def __del__(self): open({str(path)!r}, "a").write("x")
gc.collect(); gc.disable()
noisy = Noisy(); noisy.me = noisy
del noisy
"""
    trainer.run(code)
    assert trainer.run("%%estimate\nimport gc\ngc.collect()\n").status == "ok"
    assert not path.exists()
    trainer.run("gc.enable(); gc.collect()")
    assert path.read_text() == "x"


def test_random_numbers_of_an_estimate_are_those_that_would_come(trainer: Kernel) -> None:
    trainer.run("import random\nrandom.seed(5)")
    first = trainer.run("%%estimate\nimport random\nprint(random.random())\n").stdout
    assert first == trainer.run("print(random.random())").stdout


def test_a_child_is_no_fork_of_locks_that_others_hold() -> None:
    """A lock of the user's that another thread holds: the estimate is stopped and says where it waits."""
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def step() -> None:
        with lock:
            torch.ones(3)

    try:
        with pytest.raises(EstimateError, match="with lock:"):
            ipygpumem.estimate(step, timeout=5)
    finally:
        done.set()
        thread.join()


def test_it_works_after_parallel_work_and_backward_on_the_host() -> None:
    x = torch.randn(1000, 1000, requires_grad=True)
    (x @ x).sum().backward()

    def step() -> None:
        (x @ x).sum().backward()

    assert ipygpumem.estimate(step).forked


def test_a_process_that_cannot_be_forked_estimates_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    found = ipygpumem.estimate(lambda: torch.ones(3))
    assert not found.forked
    assert any("Resource temporarily unavailable" in note for note in found.notes)


def test_a_child_whose_autograd_refuses_leaves_it_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a backward on a device: torch refuses any in a forked child."""
    here, backward = os.getpid(), torch.autograd.backward

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        return backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", refuse)
    found = ipygpumem.estimate(lambda: torch.ones(3, requires_grad=True).sum().backward())
    assert not found.forked
    assert any("autograd" in note for note in found.notes)


def test_signals_of_the_child_do_not_wake_the_parents_loop(trainer: Kernel) -> None:
    cell = "%%estimate\nprint(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, signal.set_wakeup_fd(-1))\n"
    assert trainer.run(cell).stdout == "True -1\n"


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def children_of(kernel: Kernel) -> list[int]:
    """Return the kernel's children that are there."""
    return list(kernel.value("[c.pid for c in __import__('psutil').Process().children(recursive=True)]"))


# -- in place ----------------------------------------------------------------------------------------------------------


def test_in_place_a_holder_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps a fake tensor and is no module's, class's or object's of the user's is named with what to do."""
    monkeypatch.delattr(os, "fork")
    threads: list[Any] = []
    library = __import__("textwrap")
    monkeypatch.setattr(library, "kept", {}, raising=False)

    def step() -> None:
        library.kept["mask"] = torch.ones(3)
        threads.append(1)

    found = ipygpumem.estimate(step)
    assert any("textwrap.kept" in note or "dict" in note for note in found.notes), found.notes


def test_in_place_a_ctrl_c_that_strikes_as_a_tensor_is_noted_to_die_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "fork")
    died = storage_log.StorageLog._gone

    def struck(self: storage_log.StorageLog, key: int, reference: Any) -> None:
        died(self, key, reference)
        signal.raise_signal(signal.SIGINT)
        sum(range(3))

    monkeypatch.setattr(storage_log.StorageLog, "_gone", struck)
    with pytest.raises(KeyboardInterrupt):
        ipygpumem.estimate(lambda: float(torch.ones(3).sum().shape.numel()))


def test_in_place_one_thing_that_cannot_be_put_back_does_not_keep_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    kept = [1]

    def refuse() -> None:
        raise RuntimeError("this one refuses")

    put_back = restoring.Restorer.put_back

    def with_one_more(self: restoring.Restorer) -> list[str]:
        self.take(kept)
        kept.append(2)
        self._undo.append(refuse)
        return put_back(self)

    monkeypatch.setattr(restoring.Restorer, "put_back", with_one_more)
    found = ipygpumem.estimate(lambda: torch.ones(3))
    assert any("this one refuses" in note for note in found.notes)
    assert kept == [1]


def test_in_place_a_long_run_on_fake_values_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")

    def step() -> None:
        y = torch.ones(3)
        while True:
            y = y * 2

    with pytest.raises(EstimateError, match="y = y"):
        ipygpumem.estimate(step, timeout=5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_that_dies_before_it_begins_leaves_it_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may abort a forked child whose parent has used it."""
    here = os.getpid()

    def abort(_: Any) -> None:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGABRT)

    monkeypatch.setattr(running.Estimation, "_probe", abort)
    found = ipygpumem.estimate(lambda: torch.ones(3))
    assert not found.forked
    assert any("SIGABRT" in note for note in found.notes)


def test_locks_and_other_objects_of_c_have_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [threading.Lock(), threading.RLock(), re.compile("x"), threading.Event(), iter([1]), time.struct_time]
    with_partial = functools.partial(torch.ones, 3)

    def step() -> Any:
        with held[0], held[1]:
            return held[2].match("x"), with_partial()

    assert ipygpumem.estimate(step).forked
    monkeypatch.delattr(os, "fork")
    assert not ipygpumem.estimate(step).forked
    assert not held[0].locked()


def test_an_object_with_a_state_in_c_is_no_copy(notebook: Kernel) -> None:
    define = "import sqlite3, torch\nbase = sqlite3.connect(':memory:')"
    assert notebook.run(define).status == "ok"
    reply = notebook.run("%%estimate\nprint(base.execute('select 42').fetchone()[0])\ntorch.ones(2**20)")
    assert (reply.status, reply.stdout) == ("ok", "42\n"), reply.traceback


def test_a_class_of_the_cell_has_the_notebooks_module(notebook: Kernel) -> None:
    assert notebook.run("import torch").status == "ok"
    reply = notebook.run("%%estimate\nclass Own: pass\nprint(Own.__module__)\ntorch.ones(2**20)")
    assert (reply.status, reply.stdout) == ("ok", "__main__\n"), reply.traceback
