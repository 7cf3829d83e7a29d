"""A Ctrl-C at every line of our own code while a cell or an experiment begins or ends leaves nothing half open."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.fitting import budgets
from ipygpumem.shell.app import App, app_of
from ipygpumem.shell.config import IPyGpuMem
from ipygpumem.shell.experiments import Experiment
from tests.fakes import FakeProbe
from tests.test_budget import KnowingCuda
from tests.tracing import interrupted_at

PACKAGE = Path(ipygpumem.__file__).parent
ENTERING = "session experiments allocation_file cell scope seeding meter budgets before survivors name_snapshot garbage"
LEAVING = "experiments scope reclaim outputs name_snapshot recovery session arrays survivors"


def files(stems: str) -> frozenset[str]:
    """Return files of ours by name, since that is asked at each call; a first look at what is alive makes very many."""
    return frozenset(str(path) for path in PACKAGE.rglob("*.py") if path.stem in stems.split())


FILES, LAST_FILES = files(ENTERING), files(LEAVING)


@pytest.fixture
def app(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    # The first look follows what users' modules hold. Here those are all tests that this process has run.
    monkeypatch.setattr("ipygpumem.inventory.baseline.users_modules", dict)
    app = App(shell, IPyGpuMem(), probes=[FakeProbe()])
    yield app
    app.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> KnowingCuda:
    """A torch.cuda whose limits a budget changes."""
    cuda = KnowingCuda()
    monkeypatch.setattr(budgets, "torch_cuda", lambda: cuda)
    return cuda


def is_entering(frame: FrameType) -> bool:
    """Return True in code that begins something; elsewhere a trace may raise where a signal cannot."""
    return frame.f_code.co_filename in FILES


def every_interrupt(action: Callable[[], object]) -> Iterator[int]:
    """Interrupt ``action`` at each line in turn, and yield after each."""
    line = 1
    while interrupted_at(line, action, is_entering, events=("line", "return")):
        yield line
        line += 1
    assert line > 10
    yield line


def test_no_measurement_is_left_open_by_an_interrupt_while_a_cell_begins(app: App) -> None:
    for _ in every_interrupt(lambda: app.session.cell_begins(SimpleNamespace(raw_cell="x", cell_id=None))):
        app.session.cell_ends(None)
        gc.collect(1)
        assert len(app.context.meter._open) == 0
        assert app.context.cells.running() == []


def test_an_experiment_whose_start_is_interrupted_is_not_open(app: App, cuda: KnowingCuda) -> None:
    app.context.namespace["shadowed"] = object()
    experiment, meta_path = None, list(sys.meta_path)

    def start() -> None:
        nonlocal experiment
        experiment = Experiment(app.experiments, "a", budget={"gpu": 8 << 30}, seed=1)
        experiment.start()

    for _ in every_interrupt(start):
        if experiment is not None and experiment in app.experiments.open:  # not interrupted, or once it was open
            assert cuda.fractions == pytest.approx([0.5, 1.0])
            experiment.abandon()
            app.experiments.open.clear()
        experiment = None
        gc.collect(1)
        left = app.experiments.open, budgets.in_force, cuda.fractions, len(app.context.meter._open)
        assert left == ([], [], [1.0, 1.0], 0)
        assert sys.meta_path == meta_path


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_end_that_is_interrupted_is_finished_by_another(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr("ipygpumem.inventory.baseline.users_modules", dict)
    monkeypatch.setattr("ipygpumem.shell.experiments.steps_that_free", lambda *_, **__: [])
    opened, space = app_of(loaded).experiments.open, loaded.user_ns
    app_of(loaded).context.config.report = False
    for line in itertools.count(1, step):
        space.update(t_old="old", t_keep="old")
        outer = ipygpumem.experiment("outer", report="none").start()
        loaded.run_cell("t_old = 1; t_keep = 1; t_new = []")
        ipygpumem.experiment("inner", keep="t_keep", report="none").start()
        loaded.run_cell("t_old = 2; t_keep = 2; t_new2 = []")
        came = interrupted_at(line, outer.finish, lambda frame: frame.f_code.co_filename in LAST_FILES)
        for _ in range(4):
            if opened:
                loaded.run_line_magic("experiment", "end")
        left = {name: space.pop(name, "gone") for name in ("t_old", "t_keep", "t_new", "t_new2")}
        assert (opened, left) == ([], {"t_old": "old", "t_keep": "old", "t_new": "gone", "t_new2": "gone"}), line
        if not came:
            break
    assert line > 100
