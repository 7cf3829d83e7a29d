"""An exception of a user's signal handler leaves our commands and hooks as it would leave the
user's code.

The signal is raised at a call of one of our functions, so that no test depends on time.
"""

import contextlib
import functools
import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem import interrupts
from ipygpumem.shell.app import app_of
from tests.tracing import is_called_by_others

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no alarms"),
    pytest.mark.usefixtures("only_this_test"),
]
PACKAGE = str(Path(ipygpumem.__file__).parent)


class Alarm(Exception):  # noqa: N818  # a name as users choose
    """A user's exception."""


class HardAlarm(BaseException):
    """A user's exception that no ``except Exception`` catches."""


ERRORS = (Alarm, HardAlarm, TimeoutError, KeyboardInterrupt, MemoryError)


class Ringing:
    """Installs a handler that raises ``error``, and rings the alarm at the ``number``-th call of
    our functions.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.calls = 0
        self.has_rung = False

    def handler(self, number: int, frame: object) -> None:
        self.fail()

    def fail(self) -> None:
        raise self.error("rang")

    def run(
        self, action: Callable[[], object], number: int, handler: Any = None
    ) -> BaseException | None:
        """Run ``action`` and return the exception that left it."""
        self.calls = 0
        self.has_rung = False

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if (
                event != "call"
                or not frame.f_code.co_filename.startswith(PACKAGE)
                or is_called_by_others(frame)
            ):
                return
            if frame.f_code.co_name == "<genexpr>":
                return  # the end of one that any() has left is a call, too: Python drops its error
            self.calls += 1
            if self.calls == number:
                self.has_rung = True
                signal.raise_signal(signal.SIGALRM)

        installed = handler or self.handler
        # An earlier test's signal may have come at the very end of a block.
        interrupts.stop_listening()
        earlier = signal.signal(signal.SIGALRM, installed)
        hook = sys.unraisablehook
        sys.setprofile(profile)
        try:
            action()
        except BaseException as error:
            return error
        finally:
            sys.setprofile(None)
            left = signal.getsignal(signal.SIGALRM)
            signal.signal(signal.SIGALRM, earlier)
            assert left is installed, "the user's handler is not back"
            assert sys.unraisablehook is hook, "the user's hook is not back"
        return None


def places(calls: int, most: int) -> list[int]:
    """Return the numbers of at most ``most`` calls, the first and the last among them."""
    if calls <= most:
        return list(range(1, calls + 1))
    step = (calls - 1) / (most - 1)
    return sorted({1 + round(index * step) for index in range(most)})


COMMANDS = (
    "%gpumem",
    "%gpumem on",
    "%gpumem quiet on",
    "%gpumem status",
    "%gpumem free",
    "%gpumem leaks",
    "%gpumem why data",
    "%gpumem why data[:2]",
    "%gpumem top",
    "%gpumem top data",
    "%gpumem tensors",
    "%gpumem tensors --by name",
    "%gpumem history",
    "%gpumem recorder status",
    "%gpumem guard off",
    "%experiment status",
    "%experiment list",
    "%experiment compare",
    "%experiment start other",
    "%experiment keep data",
    "%experiment end",
)
SAMPLES = [6, pytest.param(40, marks=pytest.mark.thorough)]


@pytest.fixture
def notebook(loaded: InteractiveShell, only_this_test: None) -> Iterator[InteractiveShell]:
    loaded.run_cell("""
        import numpy as np
        data = np.zeros(300_000)
        older = 1
        """)
    loaded.run_cell("%%experiment done\nold = 1")
    yield loaded
    for _ in app_of(loaded).experiments.open[:]:
        loaded.run_line_magic("experiment", "end")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", SAMPLES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_handlers_exception_leaves_the_command(
    notebook: InteractiveShell, command: str, most: int
) -> None:
    name, _, line = command.lstrip("%").partition(" ")
    experiments = app_of(notebook).experiments

    def begin() -> None:
        for experiment in reversed(experiments.open[:]):
            experiments.finish(experiment)
        if "keep" in command or "end" in command or "status" in command:
            notebook.run_line_magic("experiment", "start here")

    def action() -> None:
        notebook.run_line_magic(name, line)

    # Counts the calls at which a signal may come.
    begin()
    action()  # imports what is imported on first use
    begin()
    ringing = Ringing(Alarm)
    assert ringing.run(action, 0) is None

    # A signal comes at each of some of them.
    wrong = []
    for turn, number in enumerate(places(ringing.calls, most)):
        begin()
        ringing = Ringing(ERRORS[turn % len(ERRORS)])
        error = ringing.run(action, number)
        if ringing.has_rung and type(error) is not ringing.error:
            wrong.append(f"{ringing.error.__name__} at call {number}: {error!r}")
    assert not wrong, "\n".join(wrong)


def in_trace() -> None:
    with ipygpumem.trace("step", silent=True):
        pass


def in_expect() -> None:
    with ipygpumem.expect(ram="1GiB"):
        pass


def in_clearing() -> None:
    with ipygpumem.clear_tracebacks():
        pass


@ipygpumem.trace
def traced() -> None:
    """Do nothing, in a trace."""


BLOCKS: list[Any] = []
"""Keeps experiments alive: Python itself swallows what is raised in the finalisers of their parts.
"""


def in_experiment() -> None:
    with ipygpumem.experiment("block", report="none") as experiment:
        BLOCKS.append(experiment)


def in_loop() -> None:
    for _ in ipygpumem.track(range(2), silent=True):
        pass


def in_growing_loop() -> None:
    kept = [bytearray(4 << 20) for _ in ipygpumem.track(range(6), silent=True)]
    del kept


def in_functions() -> None:
    ipygpumem.top()
    ipygpumem.tensors()


PYTHON = (
    in_trace,
    in_expect,
    in_clearing,
    traced,
    in_experiment,
    in_loop,
    in_growing_loop,
    in_functions,
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", [12, pytest.param(60, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("action", PYTHON)
def test_a_handlers_exception_leaves_blocks_and_functions(
    notebook: InteractiveShell, action: Callable[[], None], most: int
) -> None:
    action()  # imports what is imported on first use
    ringing = Ringing(Alarm)
    assert ringing.run(action, 0) is None
    wrong = []
    for turn, number in enumerate(places(ringing.calls, most)):
        ringing = Ringing(ERRORS[turn % len(ERRORS)])
        error = ringing.run(action, number)
        if ringing.has_rung and type(error) is not ringing.error:
            wrong.append(f"{ringing.error.__name__} at call {number}: {error!r}")
        for experiment in app_of(notebook).experiments.open[:]:
            experiment.finish()
        BLOCKS.clear()
    assert not wrong, "\n".join(wrong)


def raising(error: type[BaseException], number: int, frame: object) -> None:
    raise error("rang")


class Handler:
    """A handler that is neither a function nor a method."""

    def __call__(self, number: int, frame: object) -> None:
        raising(Alarm, number, frame)


def one_shot(number: int, frame: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    raise Alarm("rang")


def swallowed_in_a_library(number: int, frame: object) -> None:
    try:
        raise ValueError
    except ValueError as error:
        raise Alarm("rang") from error


HANDLERS = (
    functools.partial(raising, Alarm),
    functools.partial(functools.partial(raising), Alarm),
    Handler(),
    Ringing(Alarm).handler,
    swallowed_in_a_library,
)


@pytest.mark.parametrize("number", range(len(HANDLERS)))
def test_any_kind_of_handler_is_recognised(notebook: InteractiveShell, number: int) -> None:
    ringing = Ringing(Alarm)

    def action() -> None:
        notebook.run_line_magic("gpumem", "top")

    action()  # imports what is imported on first use
    ringing.run(action, 0)
    *first, last = places(ringing.calls - 10, 4)  # the last calls may differ
    for call in (*first, last):
        error = ringing.run(action, call, HANDLERS[number])
        # A later look has fewer calls if objects of an earlier test are gone by then.
        assert type(error) is Alarm or (call == last and not ringing.has_rung), call


def test_a_handler_that_removes_itself_is_recognised(notebook: InteractiveShell) -> None:
    earlier = signal.signal(signal.SIGALRM, one_shot)

    def ring() -> None:
        with interrupts.reraise_swallowed():
            signal.raise_signal(signal.SIGALRM)

    try:
        with pytest.raises(Alarm) as raised:
            ring()
        assert interrupts.is_from_signal(raised.value)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, earlier)


def test_a_swallowed_exception_is_raised_at_the_blocks_end() -> None:
    """A probe that cannot be read is no error, and TimeoutError is an OSError."""
    ringing = Ringing(TimeoutError)
    earlier = signal.signal(signal.SIGALRM, ringing.handler)
    reached = []

    def read() -> None:
        with interrupts.reraise_swallowed():
            with contextlib.suppress(OSError):
                signal.raise_signal(signal.SIGALRM)
            reached.append(1)

    try:
        with pytest.raises(TimeoutError, match="rang"):
            read()
        assert reached == [1]
    finally:
        signal.signal(signal.SIGALRM, earlier)


def test_an_error_of_our_own_is_no_handlers() -> None:
    with pytest.raises(Alarm) as raised:
        raise Alarm
    assert not interrupts.is_from_signal(raised.value)


def test_the_traceback_shows_the_handler_and_not_our_frames(notebook: InteractiveShell) -> None:
    ringing = Ringing(Alarm)

    def action() -> None:
        notebook.run_line_magic("gpumem", "top")

    action()
    ringing.run(action, 0)
    error = ringing.run(action, ringing.calls // 2)
    assert error is not None
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(
            trace.tb_frame.f_code.co_qualname
            if sys.version_info >= (3, 11)
            else trace.tb_frame.f_code.co_name
        )
        trace = trace.tb_next
    assert names[-2:] == [
        name if sys.version_info >= (3, 11) else name.rpartition(".")[2]
        for name in ("Ringing.handler", "Ringing.fail")
    ]
    assert not [
        name for name in names if name in {"largest_names", "measure_names", "take_inventory"}
    ]


def struck_at_exit(block: object, *given: object) -> None:
    """Stand for the end of a block, when the signal arrives before its first instruction."""
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("method", ["start", "finish"])
def test_an_experiment_restores_handlers_after_a_signal(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # Handlers that the experiment has to restore.
    ringing = Ringing(Alarm)
    experiment = ipygpumem.experiment("e", report="none")
    if method == "finish":
        experiment.start()
    earlier = signal.signal(signal.SIGALRM, ringing.handler)
    handler = signal.getsignal(signal.SIGALRM)
    hook = sys.unraisablehook

    # The signal comes while it restores them.
    try:
        with monkeypatch.context() as patch:
            patch.setattr(interrupts.reraise_swallowed, "__exit__", struck_at_exit)
            with pytest.raises(Alarm):
                getattr(experiment, method)()
        assert signal.getsignal(signal.SIGALRM) is handler
        assert sys.unraisablehook == hook
    finally:
        interrupts.stop_listening()
        signal.signal(signal.SIGALRM, earlier)


CELLS = {
    "plain": "log.append(2)",
    "experiment": """%%experiment e
old = new = 2
log.append(old)
""",
    "a block": """
with ipygpumem.experiment("e"):
    old = new = 2
    log.append(old)
""",
}


def is_as_before(shell: InteractiveShell, text: str) -> bool:
    """Return True if names are restored, no experiment is open, and no failure of ours is shown."""
    names = shell.user_ns
    is_shown = "Error in callback" in text or "Your code is not affected" in text
    is_restored = names["old"] == 1 and "new" not in names and names["log"] in ([], [2])
    return is_restored and not is_shown and app_of(shell).experiments.open == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", [12, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CELLS)
def test_a_handlers_exception_in_our_hooks_is_the_cells(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], name: str, most: int
) -> None:
    """Before the cell's code its first statement raises it; afterwards it becomes
    the cell's error.
    """
    results: list[Any] = []

    def begin() -> None:
        loaded.run_cell("""
            import ipygpumem
            old, log = 1, []
            globals().pop('new', None)
            """)
        capsys.readouterr()

    def action() -> None:
        results.append(loaded.run_cell(CELLS[name]))

    # Counts the calls at which a signal may come.
    begin()
    action()
    begin()
    ringing = Ringing(Alarm)
    assert ringing.run(action, 0) is None

    # A signal comes at each of some of them.
    wrong = []
    for turn, number in enumerate(places(ringing.calls, most)):
        begin()
        results.clear()
        ringing = Ringing(ERRORS[turn % len(ERRORS)])
        error_of_shell = ringing.run(action, number)
        if not ringing.has_rung:
            continue
        text = "".join(capsys.readouterr())
        raised = [result.error_before_exec or result.error_in_exec for result in results]
        is_cells_error = [type(error) for error in raised] == [ringing.error]
        if error_of_shell is None and is_cells_error and is_as_before(loaded, text):
            continue
        names = {key: loaded.user_ns.get(key) for key in ("old", "new", "log")}
        errors = f"{error_of_shell!r}, {raised}"
        wrong.append(f"{ringing.error.__name__} at call {number}: {errors}, {names}\n{text}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)

    # The next cell is well.
    begin()
    assert loaded.run_cell(CELLS[name]).success


class Item:
    """An object that dies with its last reference."""


STRUCK_WORK = {
    "names to delete": (
        "ipygpumem.inventory.remaining.watched_names.watch_names",
        """%%experiment e
new = Item()
items.append(weakref.ref(new))
""",
    ),
    "an error's objects": (
        "ipygpumem.reclaim.listing.held_by_frames",
        """
def fail():
    local = Item()
    items.append(weakref.ref(local))
    raise MemoryError
fail()
""",
    ),
    "the reading before an error's release": (
        "ipygpumem.reclaim.reclaim._readings_now",
        """
def fail():
    local = Item()
    items.append(weakref.ref(local))
    raise MemoryError
fail()
""",
    ),
    "an error's objects at an end": (
        "ipygpumem.reclaim.listing.held_by_frames",
        """%%experiment e
def fail():
    new = Item()
    items.append(weakref.ref(new))
    raise MemoryError
new = Item()
items.append(weakref.ref(new))
fail()
""",
    ),
    "garbage": (
        "ipygpumem.heap.live.garbage.Garbage.collect",
        """%%experiment e
new = Item()
new.me = new
items.append(weakref.ref(new))
""",
    ),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("name", STRUCK_WORK)
def test_a_signal_as_a_cell_ends_keeps_no_object_alive(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals
) -> None:
    """The exception's traceback refers to our interrupted functions, which hold the objects."""
    items: list[weakref.ref[Item]] = []
    loaded.user_ns.update(Item=Item, items=items, weakref=weakref)
    place, cell = STRUCK_WORK[name]
    work = resolve_name(place)
    struck = []

    def strike(*given: Any, **options: Any) -> object:
        if struck:
            return work(*given, **options)
        struck.append(number)
        del given, options  # the handler's frame leads to this one, which is not the package's
        signal.raise_signal(number)
        raise AssertionError

    def ring(number: int, frame: object) -> None:
        raise Alarm("rang")

    # Without the collector: no cycle may keep the object.
    monkeypatch.setattr(place, strike)
    earlier = signal.signal(signal.SIGALRM, ring)
    gc.disable()
    try:
        loaded.run_cell(cell)
        left = [item for item in items if item() is not None]
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, earlier)
    assert (struck, left) == ([number], [])
