"""A Ctrl-C at every line while a cell or an experiment begins or ends, and one that strikes while
objects die.
"""

import contextlib
import gc
import itertools
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem import interrupts
from ipygpumem.fitting import budgets
from ipygpumem.fitting.fit import Fit
from ipygpumem.fitting.functions import run_tries
from ipygpumem.fitting.plan import Plan
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.meter.meter import Meter
from ipygpumem.reclaim import reclaim
from ipygpumem.shell.app import App, app_of
from ipygpumem.shell.config import IPyGpuMem
from ipygpumem.shell.error_isolation import ErrorIsolation
from ipygpumem.shell.experiments.experiment_handle import Experiment
from tests.fake_cuda_limits import KnowingCuda
from tests.fakes import FakeProbe
from tests.hiding import show_modules
from tests.tracing import interrupted_at

pytestmark = pytest.mark.usefixtures("others_out_of_sight")
PACKAGE = Path(ipygpumem.__file__).parent
ENTERING = (
    "session experiments measured_scope experiment_log code_observer allocation_file cell scope "
    "seeding meter budgets baseline survivors name_snapshot garbage"
)
LEAVING = (
    "experiments ending measured_scope experiment_log code_observer scope reclaim caches "
    "last_errors recovery session arrays survivors"
)


def files(stems: str) -> frozenset[str]:
    """Return files of ours by name, since that is asked at each call; a first look at what is alive
    makes very many.
    """
    return frozenset(str(path) for path in PACKAGE.rglob("*.py") if path.stem in stems.split())


FILES = files(ENTERING)
LAST_FILES = files(LEAVING)


@pytest.fixture
def app(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    show_modules(monkeypatch)
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
    """Return True in code that begins something; elsewhere a trace may raise where a
    signal cannot.
    """
    return frame.f_code.co_filename in FILES


def every_interrupt(action: Callable[[], object], step: int = 1) -> Iterator[int]:
    """Interrupt ``action`` at each line in turn, or at every ``step``-th; yield after each."""
    line = 1
    while interrupted_at(line, action, is_entering, events=("line", "return")):
        yield line
        line += step
    # Else hardly any line was interrupted.
    assert line > 10
    yield line


def test_an_interrupt_as_a_cell_begins_leaves_no_span_open(app: App) -> None:
    for _ in every_interrupt(
        lambda: app.session.cell_begins(SimpleNamespace(raw_cell="x", cell_id=None))
    ):
        app.session.cell_ends(None)
        gc.collect(1)
        assert len(app.context.meter._open) == 0
        assert app.context.cells.running() == []


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_experiment_whose_start_is_interrupted_is_not_open(
    app: App, cuda: KnowingCuda, step: int
) -> None:
    app.context.namespace["shadowed"] = object()
    experiment = None
    meta_path = list(sys.meta_path)

    def start() -> None:
        nonlocal experiment
        experiment = Experiment(app.experiments, "a", budget={"gpu": 8 << 30}, seed=1)
        experiment.start()

    for _ in every_interrupt(start, step):
        # Not interrupted, or once it was open.
        if experiment is not None and experiment in app.experiments.open:
            assert cuda.fractions == pytest.approx([0.5, 1.0])
            experiment.abandon()
            app.experiments.open.clear()
        experiment = None
        gc.collect(1)

        # Nothing of the experiment is in force.
        assert app.experiments.open == []
        assert budgets.in_force == []
        assert cuda.fractions == [1.0, 1.0]
        assert len(app.context.meter._open) == 0
        assert sys.meta_path == meta_path


EVERY_LINE = [pytest.param(first, 8, marks=pytest.mark.thorough) for first in range(1, 9)]


@pytest.mark.parametrize(("first", "step"), [(1, 23), *EVERY_LINE])
def test_an_interrupted_end_can_be_finished(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, first: int, step: int
) -> None:
    show_modules(monkeypatch)
    monkeypatch.setattr("ipygpumem.reclaim.reclaim.steps_that_free", lambda *_, **__: [])
    opened = app_of(loaded).experiments.open
    space = loaded.user_ns
    app_of(loaded).context.config.report = False
    for line in itertools.count(first, step):
        # Two experiments, of which the outer one ends first.
        space.update(t_old="old", t_keep="old")
        outer = ipygpumem.experiment("outer", report="none").start()
        loaded.run_cell("t_old = 1; t_keep = 1; t_new = []")
        ipygpumem.experiment("inner", keep="t_keep", report="none").start()
        loaded.run_cell("t_old = 2; t_keep = 2; t_new2 = []")

        # The end is interrupted, then repeated.
        came = interrupted_at(
            line, outer.finish, lambda frame: frame.f_code.co_filename in LAST_FILES
        )
        for _ in range(4):
            if opened:
                loaded.run_line_magic("experiment", "end")

        # All names are as before both.
        left = {name: space.pop(name, "gone") for name in ("t_old", "t_keep", "t_new", "t_new2")}
        assert opened == [], line
        expected = {"t_old": "old", "t_keep": "old", "t_new": "gone", "t_new2": "gone"}
        assert left == expected, line
        if not came:
            break
    # Else hardly any line was interrupted.
    assert line > 100


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


class Plain:
    """An object that dies with its last name."""


def strike(_: object = None) -> None:
    """Be struck by a Ctrl-C in here, as whatever Python code runs first is after a
    long collection.
    """
    signal.raise_signal(signal.SIGINT)
    sum(range(3))


WATCHES: list[weakref.ref[Any]] = []


def struck_when_it_dies(kind: Callable[[], Any] = Cycle) -> Any:
    """Return an object at whose death a callback is struck by a Ctrl-C."""
    item = kind()
    WATCHES.append(weakref.ref(item, strike))
    return item


class StruckFinaliser(Cycle):
    def __del__(self) -> None:
        strike()


def test_a_ctrl_c_in_a_callback_is_raised_after_the_block() -> None:
    reached = []

    def block(make: Callable[[], object]) -> None:
        with interrupts.reraise_swallowed():
            make()
            gc.collect()
            reached.append(make)

    for make in (struck_when_it_dies, StruckFinaliser):
        with pytest.raises(KeyboardInterrupt):
            block(make)
        assert reached.pop() is make


def test_without_a_ctrl_c_nothing_is_raised_and_hooks_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Fails:
        def __del__(self) -> None:
            raise ValueError

    with interrupts.reraise_swallowed():
        Fails()
    assert [item.exc_type for item in told] == [ValueError]
    assert sys.unraisablehook == told.append


class Raises:
    def __del__(self) -> None:
        raise KeyboardInterrupt


class Throws:
    def __del__(self) -> None:
        for started in (True, False):
            waiting = (number for number in range(2))
            if started:
                next(waiting)
            with contextlib.suppress(KeyboardInterrupt) if started else contextlib.nullcontext():
                waiting.throw(KeyboardInterrupt)


class StruckAndRaises:
    def __del__(self) -> None:
        try:
            strike()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("mine") from None


@pytest.mark.parametrize("kind", [Raises, Throws, StruckAndRaises])
def test_a_callbacks_own_interrupt_is_no_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], object]
) -> None:
    """CPython prints it, as it does without us: a cell that is about to run must not be stopped by
    it.
    """
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    raised = (
        pytest.raises(KeyboardInterrupt) if kind is StruckAndRaises else contextlib.nullcontext()
    )
    with raised, interrupts.reraise_swallowed():
        kind()
    assert len(told) == 1


def test_a_ctrl_c_replaces_the_blocks_error_and_keeps_a_new_hook() -> None:
    earlier = sys.unraisablehook
    others = list[Any]().append

    def block() -> None:
        with interrupts.reraise_swallowed():
            struck_when_it_dies(Plain)
            sys.unraisablehook = others
            raise ValueError

    try:
        with pytest.raises(KeyboardInterrupt):
            block()
        assert sys.unraisablehook is others
    finally:
        sys.unraisablehook = earlier


def collect(meter: Meter) -> None:
    struck_when_it_dies()
    Garbage().collect()


def give_back(meter: Meter) -> None:
    held = [struck_when_it_dies(Plain)]
    reclaim.run_steps(meter, [("names", held.clear)], [])


def release_in_a_try(meter: Meter) -> None:
    def train(n: int) -> None:
        held = struck_when_it_dies(Plain)
        if n > 2:
            raise MemoryError(len(str(held)))

    run_tries(train, Fit(Plan({"n": 8}), meter))


def drop_a_result_that_was_too_large(meter: Meter) -> None:
    probe = FakeProbe("cuda:0")
    own = Meter([probe])

    def train(n: int) -> object:
        probe.spike(n)
        return struck_when_it_dies(Plain) if n > 900 else None

    with contextlib.closing(own):
        run_tries(train, Fit(Plan({"n": 1000}, headroom=0.1), own))


PLACES = (collect, give_back, release_in_a_try, drop_a_result_that_was_too_large)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_ctrl_c_in_a_callback_during_our_own_work_is_not_lost(
    place: Callable[[Meter], None], meter: Meter
) -> None:
    with pytest.raises(KeyboardInterrupt):
        place(meter)


@pytest.mark.parametrize("listens", [True, False])
def test_a_waiting_interrupt_keeps_no_object_alive(listens: bool) -> None:
    items: list[weakref.ref[Plain]] = []
    left = []

    def work() -> None:
        item = Plain()
        items.append(weakref.ref(item))

        def closure() -> None:  # a frame keeps its function's closure after its own locals
            strike(item)

        closure()

    def next_work() -> None:
        left.extend(item for item in items if item() is not None)

    block = interrupts.reraise_swallowed() if listens else contextlib.nullcontext()

    # The collector would free the cycles that the test looks for.
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt), block:
            ErrorIsolation().run_all("a test", (work, ""), (next_work, ""))
    finally:
        gc.enable()
    assert (len(items), left) == (1, [])


def test_a_waiting_interrupt_leaves_a_users_frames_alone() -> None:
    frames = []

    def callback() -> None:
        value = "kept"
        frames.append(sys._getframe())
        strike(value)

    with pytest.raises(KeyboardInterrupt):
        ErrorIsolation().run_all("a test", (callback, ""))
    assert frames[0].f_locals["value"] == "kept"
