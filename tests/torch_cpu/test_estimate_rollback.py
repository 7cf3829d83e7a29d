"""%%estimate, and that estimates change nothing: not the notebook, not modules, not settings of the
process.
"""

import array
import collections
import contextlib
import functools
import gc
import importlib
import io
import mmap
import multiprocessing
import os
import queue
import random
import re
import signal
import sqlite3
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils import _python_dispatch

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.isolation import object_states, rollback
from ipygpumem.estimating.isolation.fake_copies import FakeCopies
from ipygpumem.estimating.limits import RunLimits
from ipygpumem.estimating.memory import storages
from tests.alone import alone, printed
from tests.steps import existing_names, kernel_with, plain, run_cells, run_failing, run_quietly

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
PARTS_THAT_KNOW_MODULES = [
    (module, name, getattr(module, name))
    for module, name in (
        (rollback, "is_imported_users_module"),
        (object_states, "is_imported_users_module"),
        (object_states, "is_users"),
    )
]


@pytest.fixture
def users_modules(no_modules_of_users: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let estimates put back users' modules, too; among those of tests that takes a second."""
    for module, name, function in PARTS_THAT_KNOW_MODULES:
        monkeypatch.setattr(module, name, function)


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
generator, dice, torchs = np.random.default_rng(3), random.Random(3), torch.Generator()
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
    generator.random(), dice.random(), np.random.rand(), random.random(), torch.rand(2, generator=torchs)
"""  # noqa: E501

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
              hash(random.getstate()), m.torchs.get_state().tolist())
    hooked = any(p._post_accumulate_grad_hooks for p in m.model.parameters())
    caches = (hooked, sorted(m.Net.freqs), m.mask.cache_info().currsize, hasattr(m.holder, "last"),
              hasattr(m.local, "loss"), hasattr(m.model, "seen"), sorted(vars(m)) == names_of_it)
    return repr((plain, numbers, states, caches))

names_of_it = sorted(vars(m))
before = all_of_it()
"""  # noqa: E501
FAKES = """
import gc
fakes = lambda: sum(type(t).__name__ == 'FakeTensor' and id(t) not in earlier for t in gc.get_objects())
earlier = {id(t) for t in gc.get_objects() if type(t).__name__ == 'FakeTensor'}
"""  # noqa: E501


shared = kernel_with("%load_ext ipygpumem")


@pytest.fixture
def estimating(shared: Kernel) -> Kernel:
    """The kernel of this module with these names alone."""
    imports = "import os, sys, time, signal, torch, ipygpumem"
    run_cells(shared, "%reset -f", f"{imports}\nx = torch.ones(4, 4)")
    return shared


TRAINING_CELL = """%%estimate --device-memory 24GiB --device cuda:0
loss = (model(x) * scale).sum()
loss.backward()
optimizer.step()
losses.append(loss.item())
scale = 3
print(x.mul_(2).shape)
model.eval(), torch.manual_seed(7)
"""


def test_a_cell_is_estimated_and_leaves_nothing(estimating: Kernel) -> None:
    run_cells(
        estimating,
        """
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        """,
    )
    run_cells(estimating, "losses, scale = [], 2")
    tensors = "[t.tolist() for t in (x, torch.get_rng_state(), *model.parameters())]"
    before = estimating.value(tensors)
    reply = estimating.run(TRAINING_CELL)

    # The report.
    assert (reply.status, reply.stdout) == ("ok", "torch.Size([4, 4])\n"), (
        reply.traceback + reply.stderr
    )
    (report,) = reply.reports("estimate")
    for words in (
        "cuda:0 peak",
        "of 24.00 GiB",
        " smaller parts",  # Adam's state among them
        "line 5: losses.append(loss.item())",
    ):
        assert words in report
    assert "only tensors are fake; calls to these run for real: print\n" in report

    # All names and tensors are as before.
    assert estimating.value(tensors) == before
    assert estimating.value("{'losses': losses, 'scale': scale}") == {"losses": [], "scale": 2}
    assert existing_names(estimating, "loss") == []
    assert estimating.value("model.weight.grad") is None
    assert estimating.value("len(optimizer.state)") == 0
    assert estimating.value("model.training") is True


MISTAKES = {
    "%%estimate --device-memory much\nx": "'much' is not a size",
    "%%estimate --device tpu\nx": "UsageError: 'tpu' is not a device: write RAM or a name such as cuda:0",  # noqa: E501
    "%%estimate --fit 24XB\nx": "--fit: '24XB' is not a size",
    "%%estimate --fit tpu\nx": "'tpu' is neither a size, such as 24GiB, nor a device, such as cuda:0",  # noqa: E501
    "%%estimate --fit 2GiB --device-memory 1GiB\nx": "leave out --device-memory",
    "%%estimate --batch n\nx": "--batch names what --fit makes smaller: write --fit 24GiB, too",
    "%%estimate --fit cuda:0\ny = x * 2": "the memory of the device is not known here: give a size",
    "%%estimate --device cuda --fit 8GiB\nnumber = 3": "--fit: the cell makes no tensor to fit",
    "%%estimate --fit 2GiB --batch n\ny = x * 2": "--batch n: neither the cell nor the notebook has this name",  # noqa: E501
    "%%estimate\n\n": "the cell is empty",
    """\
%%estimate
import numpy
y = numpy.ones(3)
while True: y = numpy.sin(y)""": "only tensors are estimated",
    "%%estimate\nawait x\n": "can await only inside an async function",
    """\
%%estimate
y = x * 2
z = y.to_sparse()
""": "to_sparse in line 3: z = y.to_sparse()",
    """\
%%estimate
%%time
y = x
""": "%%time acts on the notebook itself",
    """\
%%estimate
%%autofit n=8
y = x
""": "write %%autofit above %%estimate",
    """\
%%estimate
for _ in [1]:
    %time y = x
""": "%time acts on the notebook itself",
}


SELECTS = """
x = torch.randn(1 << 22)
y = x[x > 0]
rows = torch.where(x > 1)[0]
z = torch.unique(x)
"""


def test_a_line_selects_the_share_that_the_user_assumes(estimating: Kernel) -> None:
    (all_of_it,) = run_quietly(estimating, f"%%estimate{SELECTS}").reports("estimate")
    assert " at most " in all_of_it
    cell = f"%%estimate --assume 3=0.25 4=10% 5=0{SELECTS}"
    (report,) = run_quietly(estimating, cell).reports("estimate")
    assert " at most " not in report
    assert (
        "+23.2 MiB   still allocated at the end" in report
    )  # x, a quarter of it, and 10 % positions
    assert "assumed to select 0.25 of all that it can: line 3: y = x[x > 0]" in report
    (report,) = run_quietly(estimating, f"%%estimate --assume 3=0.25{SELECTS}").reports("estimate")
    assert " at most " in report
    assert "line 4: rows" in report.rpartition("these lines are assumed")[2]


def test_lines_of_earlier_cells_are_named_with_their_cell(estimating: Kernel) -> None:
    run_quietly(
        estimating,
        """
        def selected(x):
            return x[x > 0]
        """,
        "import os",
    )
    number = estimating.value("len(In) - 2")
    cell = "\nx = torch.randn(1 << 22)\ny = selected(x)"
    (report,) = run_quietly(estimating, f"%%estimate --assume 2=0.25{cell}").reports("estimate")
    assert f"cell {number}, line 2: return x[x > 0]" in report
    assert " at most " in report
    assert "the share of line 2 is not used: it selects nothing by values" in report
    (report,) = run_quietly(estimating, f"%%estimate --assume {number}:2=0.25{cell}").reports(
        "estimate"
    )
    assert f"assumed to select 0.25 of all that it can: cell {number}, line 2" in report
    assert " at most " not in report


def test_an_assumption_about_another_line_is_said_to_be_unused(estimating: Kernel) -> None:
    (report,) = run_quietly(
        estimating,
        """
        %%estimate --assume 2=0.5
        x = torch.ones(4)
        """,
    ).reports("estimate")
    assert "the share of line 2 is not used: it selects nothing by values" in report


@pytest.mark.parametrize("text", ["3", "3=2", "3=150%", "0=0.5", "3=", "x=0.5", "3=-1", "3=1/2"])
def test_a_wrong_assumption_is_one_line(estimating: Kernel, text: str) -> None:
    error = run_failing(
        estimating,
        f"""
        %%estimate --assume {text}
        x = torch.ones(4)
        """,
        None,
    ).stderr
    assert f"the assumption '{text}' is not LINE=FRACTION, such as 5=0.25" in error


def test_a_mistake_in_a_cell_is_one_line(estimating: Kernel) -> None:
    for cell, message in MISTAKES.items():
        reply = estimating.run(cell)
        assert message in reply.stderr
        assert reply.stderr.count("\n") == 1, reply.stderr


def test_estimates_find_the_largest_batch_for_an_absent_card(estimating: Kernel) -> None:
    cell = "%%autofit n={}\n%%estimate --device cuda {}\n"
    code = textwrap.dedent(
        """\
        layer = torch.nn.Linear(8192, 8192)
        with torch.no_grad():
            y = layer(torch.zeros(n << 12, 8192))"""
    )

    # As a cell.
    reply = run_cells(estimating, cell.format(4, "--device-memory 1600MiB") + code)
    assert estimating.value("n, 'layer' in globals()") == (2, False)
    shown, fitted = reply.reports("estimate") + reply.reports("autofit")
    assert "fits: needs" in shown
    assert "n=2 fits" in fitted

    # As a call of a function.
    run_cells(estimating, f"def step(n):\n    {code.replace(chr(10), chr(10) + '    ')}")
    call = "ipygpumem.autofit(lambda n: ipygpumem.estimate(step, n, {}), n=4).value"
    assert estimating.value(call.format("device='cuda', device_memory='1600MiB'")) == 2
    assert (
        run_cells(
            estimating, "%%autofit n=2\nipygpumem.estimate(step, n, device_memory='1TiB')"
        ).result
        is not None
    )

    # A card on which even one does not fit.
    reply = estimating.run(cell.format(2, "--device-memory 400MiB") + code)
    needs = reply.reports("estimate")[0].partition(" needs ")[2].partition(" \u00b7 ")[0]
    size, _, room = needs.partition(" of ")
    text = (
        f"UsageError: %%autofit: even n=1 does not fit: it needs {size} of cuda:0, which has {room}"
    )
    assert (reply.status, text in reply.stderr) == ("error", True)
    assert "pass --device-memory" in estimating.run(cell.format(1, "") + code).stderr


@pytest.fixture
def users(estimating: Kernel, tmp_path: Path) -> Kernel:
    """A kernel with a fresh module of the user's that holds model, optimizer, lists and caches."""
    (tmp_path / "usersmodule.py").write_text(MODULE)
    run_cells(estimating, "%reset -f", SETUP.format(path=str(tmp_path)))
    return estimating


TRAIN = "%%estimate\nm.train(x)\n"
INTERRUPT = (
    "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: time.sleep(0.01)"
)


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        (TRAIN, None),
        ("import ipygpumem\nipygpumem.summary(m.model, x)", None),
        (TRAIN + "raise ValueError('stopped')", "ValueError"),
        (TRAIN + INTERRUPT, "KeyboardInterrupt"),
    ],
    ids=["", "summary", "error", "interrupt"],
)
def test_nothing_of_a_users_module_is_changed(users: Kernel, cell: str, error: str | None) -> None:
    """Model, optimizer, class attributes, caches, lists and generators of a module are as they
    were.
    """
    run_cells(users, FAKES)
    reply = users.run(cell)
    assert reply.error == error, reply.traceback
    assert "ipygpumem" not in reply.traceback
    assert users.run("assert all_of_it() == before, (before, all_of_it())").message == ""
    if error is None:  # else the error's traceback has them
        assert users.value("fakes()") == 0


NOTEBOOK = """
class Table(torch.nn.Module):
    cache, __slots__ = {}, ()
    def forward(self, x):
        Table.extra = x
        return Table.cache.setdefault(x.shape[0], torch.ones(x.shape[0]))
class Closed:
    def __init__(self): self.seen = []
    def __del__(self): pass
plain, closed = np.zeros(3), Closed()
state = lambda: (Table.cache, hasattr(Table, "extra"), plain.tolist(), closed.seen)
"""


def test_code_in_texts_finds_the_notebooks_names(estimating: Kernel) -> None:
    run_cells(
        estimating,
        """
        import torch, ipygpumem
        first, second, third = torch.ones(3), torch.ones(5), 7
        """,
    )
    texts = (
        "eval('first.sum() + third'), exec('global fourth; fourth = second * third'), "
        "eval('[second[i] for i in [0]]"
    )
    check = "assert eval('own + third') == 10 and globals().get('first').shape"
    step = f"def step():\n    {texts}')\n    own = 3\n    {check}"
    run_cells(
        estimating,
        f"{step}\nassert ipygpumem.estimate(step).peak_bytes\nassert 'fourth' not in globals()",
    )


def test_objects_shared_with_an_estimate_are_restored(users: Kernel) -> None:
    """Class attributes, NumPy's arrays, objects that have no copy; a class of the cell has the
    notebook's module.
    """
    run_cells(users, NOTEBOOK)
    before = users.value("state()")
    cell = """\
Table()(x)
plain[:] = 7
closed.seen.append(x)
class Own: pass
print(Own.__module__)"""
    reply = users.run(f"%%estimate\n{cell}\n")
    assert (reply.status, reply.stdout) == ("ok", "__main__\n"), reply.traceback
    assert users.value("state()") == before
    assert "still holds" not in reply.reports("estimate")[0]


def frame() -> pandas.DataFrame:
    return pandas.DataFrame(
        {"a": [1, 2, 3], "b": [1.0, 2.0, 3.0], "c": ["x", "y", "z"], "o": [[1], [2], [3]]}
    )


def change_cells(frame: pandas.DataFrame) -> None:
    frame.loc[0, "a"] = 9
    frame.iloc[1, 1] = 7.0
    frame["o"].iloc[0].append(9)
    frame.attrs["seen"] = True


def change_columns(frame: pandas.DataFrame) -> None:
    frame["n"] = 3
    frame["a"] = frame["b"]
    frame.pop("c")


def change_in_place(frame: pandas.DataFrame) -> None:
    frame.sort_values("b", ascending=False, inplace=True)
    frame.index.set_names("i", inplace=True)


def change_names_in_place(frame: pandas.DataFrame) -> None:
    frame.rename(columns={"a": "z"}, inplace=True)


def change_values(frame: pandas.DataFrame) -> None:
    frame["a"].values[0] = 9


CHANGES = (
    change_cells,
    change_columns,
    change_in_place,
    change_names_in_place,
    change_values,
)


@pytest.mark.filterwarnings("ignore")
def test_a_dataframe_that_code_changes_is_put_back() -> None:
    tables = {change: frame() for change in CHANGES}
    column = frame()["b"]

    def step() -> None:
        for change, table in tables.items():
            # The values are read-only where pandas copies on write.
            with contextlib.suppress(ValueError):
                change(table)
        column.iloc[0] = 9.0

    ipygpumem.estimate(step)
    for table in tables.values():
        pandas.testing.assert_frame_equal(table, frame())
        assert (table.attrs, table.index.name) == ({}, None)
        table.loc[0, "a"] = 9
        assert table["a"].tolist() == [9, 2, 3]
    assert column.tolist() == [1.0, 2.0, 3.0]


def test_buffers_and_files_are_put_back(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(100)))
    counter = multiprocessing.get_context("spawn").Value("i", 1)
    anonymous = mmap.mmap(-1, 4096)
    data = bytearray(b"ab")
    numbers = array.array("i", [1, 2])
    memory = io.BytesIO(b"hello")
    objects = np.array([[1], None], dtype=object)
    mapped = np.memmap(path, mode="r+")
    with path.open("rb") as rows:

        def step() -> None:
            counter.value = anonymous[0] = mapped[0] = 5
            (
                data.extend(b"c"),
                numbers.append(3),
                rows.read(10),
                memory.write(b"J"),
                objects[0].append(2),
            )
            objects[1] = 3

        def state() -> Any:
            texts = map(str, (data, numbers, objects))
            return (
                counter.value,
                anonymous[0],
                mapped[0],
                *texts,
                rows.tell(),
                memory.getvalue(),
                memory.tell(),
            )

        before = state()
        ipygpumem.estimate(step)
        assert state() == before
        assert weakref.getweakrefs(objects) == [], "NumPy would not resize it"


@alone  # the first estimate of a process imports torch's compiler, which changes some
def test_settings_of_torch_and_of_the_process_are_put_back() -> None:
    def step() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.backends.cudnn.benchmark = True
        torch.set_grad_enabled(False)
        torch.autocast(
            "cuda", dtype=torch.float16, cache_enabled=False
        ).__enter__()  # usual in notebooks
        torch.manual_seed(3)
        random.seed(3)
        os.environ["IPYGPUMEM_TEST"] = "1"
        os.chdir(os.sep)
        sys.path.append("there")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.simplefilter("error")

    def state() -> Any:
        settings = (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            random.getstate(),
        )
        casts = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        nesting = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
        rest = (
            torch.backends.cudnn.benchmark,
            os.environ.copy(),
            Path.cwd(),
            [*sys.path],
            [*warnings.filters],
        )
        return (
            settings,
            casts,
            nesting,
            rest,
            signal.getsignal(signal.SIGTERM),
            torch.get_rng_state().tolist(),
        )

    before = state()
    ipygpumem.estimate(step)
    assert state() == before


@pytest.mark.usefixtures("users_modules")
def test_fake_tensors_leave_modules_and_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that code imports first is imported again, and a library's cache is emptied."""
    (tmp_path / "importedhere.py").write_text("import torch\nmask = torch.ones(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mask = functools.lru_cache(torch.ones)
    monkeypatch.setattr(textwrap, "mask", mask, raising=False)
    estimate = ipygpumem.estimate(lambda: __import__("importedhere").mask * textwrap.mask(3))  # type: ignore[attr-defined]
    assert estimate.notes == ()
    assert type(__import__("importedhere").mask) is type(mask(3)) is torch.Tensor


def test_a_library_that_code_imports_first_keeps_torchs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither fake tensors in its defaults, nor functions that an estimate replaces."""
    (tmp_path / "imported_lib.py").write_text(
        """\
import torch, imported_part
from torch import save
def scaled(x, scale=torch.tensor(2)):
    return x * scale
"""
    )
    (tmp_path / "imported_part.py").write_text("from torch import Tensor\nitem = Tensor.tolist\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("ipygpumem.estimating.isolation.patches.is_users", lambda file: False)
    for name in ("rollback", "object_states"):
        module = f"ipygpumem.estimating.isolation.{name}"
        monkeypatch.setattr(f"{module}.is_users_module", lambda module: False)

    def step() -> None:
        lib = importlib.import_module("imported_lib")
        assert lib.scaled(torch.ones(2)).shape == (2,)

    assert ipygpumem.estimate(step).notes == ()
    lib, part = (sys.modules.pop(name) for name in ("imported_lib", "imported_part"))
    assert (lib.save, part.item) == (torch.save, torch.Tensor.tolist)

    # Its functions still work.
    assert lib.scaled(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.fixture
def unfrozen(no_modules_of_users: None) -> Iterator[None]:
    """Take back what the module's fixture has frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("users_modules", "unfrozen")
def test_holders_of_fake_tensors_and_too_large_arrays_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(textwrap, "kept", {}, raising=False)
    estimate = ipygpumem.estimate(lambda: textwrap.kept.update(mask=torch.ones(3)))  # type: ignore[attr-defined]
    assert any("textwrap.kept" in note or "dict" in note for note in estimate.notes), estimate.notes
    monkeypatch.setattr(object_states, "_LARGEST_ARRAY_BYTES", 1000)
    large = np.zeros(1000)
    assert any(
        "numpy" in note or "ndarray of 7.8 KiB" in note
        for note in ipygpumem.estimate(lambda: torch.ones(large.size)).notes
    )


@pytest.mark.usefixtures("unfrozen")
def test_collections_skip_objects_from_before_the_estimate() -> None:
    """With large libraries loaded, a pass over the whole heap takes a tenth of an estimate."""
    frozen: list[int] = []

    # Notes how many objects each full collection skips.
    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            frozen.append(gc.get_freeze_count())

    gc.callbacks.append(watch)
    gc.disable()  # only our own collections count
    try:
        ipygpumem.estimate(lambda: torch.ones(3))
    finally:
        gc.enable()
        gc.callbacks.remove(watch)
    assert frozen
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0

    # After an error, too, none is left out.
    with pytest.raises(LookupError):
        ipygpumem.estimate(lambda: [torch.ones(3)][1])
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("unfrozen", "no_modules_of_users")
def test_copies_of_names_die_in_one_small_collection() -> None:
    """A function's copy and the copy of its globals refer to each other, and to a model's copy."""
    names: dict[str, Any] = {"torch": torch, "estimate": ipygpumem.estimate}
    code = """
model = torch.nn.Linear(8, 8)

def forward():
    return model(torch.ones(8, 8))

def step():
    forward().sum().backward()
"""
    exec(code, names)
    are_small: list[bool] = []

    # Notes for each full collection whether most objects are left out of it.
    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            are_small.append(gc.get_freeze_count() > 10_000)

    gc.callbacks.append(watch)
    gc.disable()
    try:
        exec("found = estimate(step, device='cuda:0')", names)
    finally:
        gc.enable()
        gc.callbacks.remove(watch)
    assert are_small == [True]


@pytest.mark.usefixtures("unfrozen")
def test_objects_frozen_by_the_user_stay_frozen() -> None:
    kept = [[]]
    gc.freeze()
    try:
        ipygpumem.estimate(lambda: torch.ones(3))
        assert not any(item is kept for item in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("users_modules")
def test_one_failure_of_the_rollback_does_not_stop_it() -> None:
    kept = [1]
    closed = io.BytesIO(b"x")

    def step() -> None:
        kept.append(2)
        closed.close()

    estimate = ipygpumem.estimate(step)
    assert any("could not be put back" in note for note in estimate.notes), estimate.notes
    assert kept == [1]


class Shared:
    """Has a finalizer, so that an estimate works on the object itself."""

    __slots__ = ("value",)
    default = None

    def __del__(self) -> None: ...


@pytest.mark.usefixtures("users_modules")
def test_objects_deleted_by_the_code_are_restored() -> None:
    """An attribute in a slot, and a class attribute that is None."""
    shared = Shared()
    shared.value = 3

    def step() -> None:
        del shared.value
        del Shared.default

    notes = ipygpumem.estimate(step).notes
    assert not any("could not be put back" in note for note in notes), notes
    assert shared.value == 3
    assert vars(Shared).get("default", "missing") is None


def test_an_error_is_not_hidden_by_a_half_made_fake_tensor() -> None:
    def step() -> None:
        half = torch.empty(1)
        vars(half).clear()  # as torch leaves it if an error strikes before it knows its mode
        raise LookupError

    with pytest.raises(LookupError):
        ipygpumem.estimate(step)


def test_an_error_is_shown_with_the_users_lines_alone(estimating: Kernel) -> None:
    run_cells(
        estimating,
        """
        # two
        # lines
        def deeper(x):
            return x @ x[:, :3].T
        """,
    )
    reply = estimating.run("""\
%%estimate
y = x * 2
z = deeper(y)
""")
    assert reply.error == "RuntimeError"
    text = plain(reply.traceback)
    assert "----> 3 z = deeper(y)" in text
    assert "----> 4     return x @ x[:, :3].T" in text
    assert "ipygpumem" not in text
    # IPython keeps the last error's traceback, and with it the copies that the code had.
    assert (
        "still holds"
        not in estimating.run("%%estimate\ny = torch.ones(3) * 2").reports("estimate")[0]
    )


def test_a_loop_that_never_ends_is_stopped_and_its_line_named(estimating: Kernel) -> None:
    reply = estimating.run("""\
%%estimate --timeout 2
y = x * 2
while True:
    pass
""")
    assert reply.stderr.startswith("UsageError: the estimate was stopped after 2 s in line ")
    assert "line 3" in reply.stderr or "line 4" in reply.stderr
    run_cells(estimating, "import time")
    slow = estimating.run("%%estimate --timeout 2\ntime.sleep(1000)\n")
    assert "line 2: time.sleep(1000)" in slow.stderr
    run_cells(estimating, "import queue; q = queue.Queue(); q.put(1)")
    assert "never return: q.join" in estimating.run("%%estimate --timeout 2\nq.join()").stderr
    caught = "try:\n    while True: x * 2\nexcept BaseException: pass"
    assert "while True: x * 2" in estimating.run(f"%%estimate --timeout 2\n{caught}").stderr
    assert estimating.value("type(x * 2).__name__") == "Tensor"


def test_a_thread_that_goes_on_leaves_no_mode_of_torch_on() -> None:
    """As that of a progress bar of tqdm; torch would compile code anew."""
    started, start = os.pipe()
    ended, end = os.pipe()

    def work() -> None:
        os.write(start, b"x")
        os.read(ended, 1)

    def step() -> None:
        threading.Thread(target=work, name="goes on").start()
        os.read(started, 1)
        assert torch.ones(3).shape == (3,)

    assert not _python_dispatch.is_in_torch_dispatch_mode()

    # Neither during the thread nor after it.
    ipygpumem.estimate(step)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    os.write(end, b"x")
    for thread in threading.enumerate():
        if thread.name == "goes on":
            thread.join()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    for end_of_pipe in (started, start, ended, end):
        os.close(end_of_pipe)


def test_an_estimate_in_a_thread_is_stopped_at_an_operation() -> None:
    def step() -> None:
        y = torch.ones(3)
        while True:
            y = y * 2

    def catching() -> None:
        with contextlib.suppress(BaseException):
            step()

    for code in (step, catching):
        with (
            futures.ThreadPoolExecutor() as pool,
            pytest.raises(EstimateError, match=r"after 0.3 s in .*: y = "),
        ):
            pool.submit(ipygpumem.estimate, code, timeout=0.3).result()


def test_code_that_takes_too_much_host_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.estimating.limits.available_bytes", lambda: 256 * 2**20)

    def hoard() -> None:
        kept = []
        while True:
            kept.append(bytes(2**20))

    with pytest.raises(EstimateError, match="host memory"):
        ipygpumem.estimate(hoard)


def test_a_ctrl_c_during_the_rollback_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = rollback.Rollback.put_back
    kept = [1]

    def struck(self: rollback.Rollback) -> None:
        signal.raise_signal(signal.SIGINT)
        put_back(self)

    monkeypatch.setattr(rollback.Rollback, "put_back", struck)
    with pytest.raises(KeyboardInterrupt):
        ipygpumem.estimate(lambda: kept.append(2))
    assert kept == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_while_a_tensor_dies_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    died = storages.StorageLog._log_death

    def struck(self: storages.StorageLog, key: int, reference: Any) -> None:
        died(self, key, reference)
        signal.raise_signal(signal.SIGINT)
        sum(range(3))

    monkeypatch.setattr(storages.StorageLog, "_log_death", struck)
    with pytest.raises(KeyboardInterrupt):
        ipygpumem.estimate(lambda: float(torch.ones(3).sum().shape.numel()))


def test_locks_and_other_objects_of_c_have_no_copies() -> None:
    held = [
        threading.Lock(),
        threading.RLock(),
        re.compile("x"),
        threading.Event(),
        iter([1]),
        time.struct_time,
    ]
    with_partial = functools.partial(torch.ones, 3)
    base = sqlite3.connect(":memory:")

    def step() -> None:
        with held[0], held[1]:
            assert held[2].match("x")
            assert with_partial().shape == (3,)
            assert base.execute("select 42").fetchone() == (42,)

    ipygpumem.estimate(step)
    assert not held[0].locked()


def test_a_container_that_a_thread_changes_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    items = collections.deque([[1], [2]])
    copied = FakeCopies.of

    def of(self: FakeCopies, value: Any) -> Any:
        if value is items[0]:
            items.append([3])
        return copied(self, value)

    monkeypatch.setattr(FakeCopies, "of", of)
    assert ipygpumem.estimate(lambda: len(items)).peak_bytes == 0


SHARED: queue.Queue[int] = queue.Queue()
SHARED.put(1)


def test_a_queue_keeps_changes_by_another_thread() -> None:
    asked = threading.Event()
    done = threading.Event()

    def work() -> None:
        asked.wait()
        SHARED.put(SHARED.get() + 1)
        done.set()

    def ask_and_wait() -> None:
        asked.set()
        done.wait()

    threading.Thread(target=work).start()
    ipygpumem.estimate(ask_and_wait)
    assert SHARED.get(timeout=0) == 2


class Counts:
    rows: list[int] = []  # noqa: RUF012  # of all instances
    total = 0


ROWS = [1]
SEEN = {"last": 1}
OTHER = [1]


def test_a_running_thread_keeps_its_containers_and_is_noted() -> None:
    asked = threading.Event()
    done = threading.Event()

    def work() -> None:
        asked.wait()
        ROWS.append(2)
        SEEN["last"] = 2
        Counts.rows.append(2)
        done.set()

    def code() -> None:
        OTHER.append(2)
        asked.set()
        done.wait()

    thread = threading.Thread(target=work, name="logger")
    thread.start()
    estimate = ipygpumem.estimate(code)
    thread.join()

    # What the thread has changed stays, what the code has changed is put back.
    assert ROWS == [1, 2]
    assert SEEN == {"last": 2}
    assert Counts.rows == [2]
    assert OTHER == [1]
    assert [note for note in estimate.notes if "threads of yours are running (logger)" in note]
    assert "threads of yours" not in " ".join(ipygpumem.estimate(code).notes)


def test_a_users_error_is_raised_unchanged() -> None:
    x = torch.randn(2, 3)
    save = torch.save
    with pytest.raises(RuntimeError, match="reduction dim"):
        ipygpumem.estimate(lambda: x @ x)
    assert ipygpumem.estimate(lambda: x @ x.T).devices  # and no mode is left on
    assert (type(torch.zeros(1)), torch.save) == (torch.Tensor, save)


def test_an_error_after_a_guess_says_which_lines_got_one(estimating: Kernel) -> None:
    reply = estimating.run(
        """\
%%estimate
loss = x.sum()
if loss.item() < 2:
    raise ValueError('small')
"""
    )
    assert reply.error == "ValueError"
    assert "guess" in reply.stderr
    assert "line 3: if loss.item() < 2:" in reply.stderr
    reply = estimating.run("""\
%%estimate
x.sum()
raise ValueError('small')
""")
    assert (reply.error, reply.stderr) == ("ValueError", "")


def test_a_syntax_error_is_shown_as_in_a_plain_cell(estimating: Kernel) -> None:
    for body in ("x = (]\n", "y = 2\nreturn 3\n", "exec('z = (')\n"):
        expected, estimated = estimating.run(f"#\n{body}"), estimating.run(f"%%estimate\n{body}")
        assert (estimated.status, estimated.error) == ("error", expected.error), body
        assert "ipygpumem" not in estimated.traceback, body
        ours, pythons = (
            re.sub(r"Cell.*?In *\[\d+\]", "", plain(each.traceback))
            for each in (estimated, expected)
        )
        assert ours.splitlines()[-4:] == pythons.splitlines()[-4:], body


def test_a_timeout_raises_nothing_inside_torchs_callbacks() -> None:
    """torch's C++ calls it for each operation, and cannot pass exceptions on."""
    rule = pytest.importorskip("torch._library.simple_registry").find_torch_dispatch_rule
    limits = RunLimits(300.0)
    with limits:
        limits._interrupt(0, SimpleNamespace(f_code=rule.__code__, f_back=None))


LIBRARIES = """
import builtins, json, torch, ipygpumem
spaces = [vars(builtins), vars(json), dict(vars(torch))]

def step():
    builtins.added = json.added = 1
    spaces.append(torch.ones(8).sum())

ipygpumem.estimate(step, device="cuda:0", device_memory="8GiB")
assert len(spaces) == 3 and zip is builtins.zip and builtins.added == json.added == 1
print("unharmed")
"""


def test_namespaces_of_libraries_are_not_restored(tmp_path: Path) -> None:
    """To empty that of ``builtins`` for a moment would break each function that runs then."""
    file = tmp_path / "libraries.py"
    file.write_text(LIBRARIES)
    assert printed(str(file)).splitlines()[-1] == "unharmed"
