"""A fault of ours at any call of any of our functions stops no code of the user's and loses no name
of theirs.

Each program is run once to list our functions that it calls; then once for each fault, which one
call raises. After it the program's own cells are run again, and must work.
"""

import contextlib
import functools
import gc
import inspect
import os
import random
import re
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.api import shell as where
from ipygpumem.meter.meter import Meter, Span
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.app import app_of
from ipygpumem.shell.cell import CellStack
from ipygpumem.shell.code_observer import CodeObserver, OpenExperiments
from ipygpumem.shell.display import Display
from ipygpumem.shell.experiments.ending import ExperimentEnd
from ipygpumem.shell.experiments.experiment_handle import Experiment
from ipygpumem.shell.experiments.experiment_log import ExperimentLog
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.shell.experiments.managed_experiment import ManagedExperiment
from ipygpumem.shell.experiments.measured_scope import MeasuredScope
from ipygpumem.shell.ipython import rewriting
from ipygpumem.shell.ipython.caches import Outputs
from ipygpumem.shell.recovery import Recovery
from ipygpumem.shell.session import Session
from tests.steps import plain
from tests.tracing import is_called_by_others

PACKAGE = str(Path(ipygpumem.__file__).parent)
ERRORS = (RuntimeError, KeyboardInterrupt, MemoryError, OSError)


class Program(NamedTuple):
    """The cell in which the fault strikes, and those around it, which end what it leaves open."""

    target: str
    before: str = ""
    after: str = ""
    error: str = ""


BODY = """
old = 2
new = np.zeros(300_000)
log.append(old)
"""
PROGRAMS = {
    "experiment": Program(f"%%experiment e\n{BODY}old + 40"),
    "a leak": Program(f"""
%%experiment e
{BODY}kept.append(new)
old + 40
"""),
    "an error": Program(f"%%experiment e\n{BODY}raise ValueError", error="ValueError"),
    "no memory": Program(f"%%experiment e\n{BODY}raise MemoryError", error="MemoryError"),
    "nested": Program(f"""
%%experiment e
get_ipython().run_cell({BODY!r})
old + 40
"""),
    "start": Program(f"%experiment start m\n{BODY}old + 40", after="%experiment end"),
    "inside": Program(f"{BODY}old + 40", before="%experiment start m", after="%experiment end"),
    "end": Program(
        """
%experiment end
old = 1; log.append(2)
42
""",
        before=f"%experiment start m\n{BODY}log.clear()",
    ),
    "plain": Program("log.append(2)\n42"),
    "plain error": Program("log.append(2)\nraise ValueError", error="ValueError"),
    "plain no memory": Program("log.append(2)\nraise MemoryError", error="MemoryError"),
}
BLOCKS = {
    "a block": Program(
        """
with ipygpumem.experiment("e"):
    old = 2
    new = np.zeros(300_000)
    log.append(old)
42
"""
    ),
    "a block with an error": Program(
        """
with ipygpumem.experiment("e"):
    old = new = 2
    log.append(old)
    raise ValueError
""",
        error="ValueError",
    ),
    "a block without memory": Program(
        """
with ipygpumem.experiment("e"):
    old = 2
    new = np.zeros(300_000)
    log.append(old)
    raise MemoryError
""",
        error="MemoryError",
    ),
    "a block in a block": Program(
        """
with ipygpumem.experiment("e"):
    old = 2
    with ipygpumem.experiment("inner", keep="new", note={"lr": 0.1}, seed=3) as inner:
        old, new = 3, 4
    log.append(2)
42
"""
    ),
    "a block in a function": Program(
        """
def train():
    with ipygpumem.experiment("e", report="full") as experiment:
        image = np.zeros(300_000)
        log.append(2)
        experiment.keep("image")
        return experiment.usage()
train()
42
"""
    ),
    "a block in %%experiment": Program(
        """%%experiment e
with ipygpumem.experiment("inner"):
    old = new = 2
    log.append(old)
42
"""
    ),
    "a block in %experiment start": Program(
        """
with ipygpumem.experiment("e"):
    old = new = 2
    log.append(old)
42
""",
        before="%experiment start m",
        after="%experiment end",
    ),
    "start and finish": Program(
        """
experiment = ipygpumem.experiment("e").start()
old = new = 2
log.append(old)
record = experiment.finish()
42
"""
    ),
    "a trace": Program(
        """
with ipygpumem.trace("step"):
    log.append(2)
42
"""
    ),
    "a traced function": Program(
        """
@ipygpumem.trace
def train():
    log.append(2)
    return 42
train()
"""
    ),
    "a budget": Program(
        """
with ipygpumem.budget(gpu="8GiB"):
    log.append(2)
42
"""
    ),
    "an expectation": Program(
        """
@ipygpumem.expect(ram="8GiB")
def train():
    log.append(2)
    return 42
with ipygpumem.expect(ram="8GiB"):
    found = train()
found
"""
    ),
    "cleared tracebacks": Program(
        """
@ipygpumem.clear_tracebacks
def train():
    log.append(2)
    return 42
with ipygpumem.clear_tracebacks():
    found = train()
ipygpumem.clear_tracebacks()
found
"""
    ),
    "a tracked loop": Program(
        """
for step in ipygpumem.track(range(3)):
    found = step + 40
log.append(2)
found
"""
    ),
    "a peak": Program(
        """
with ipygpumem.peak():
    log.append(2)
42
"""
    ),
}
CELLS = tuple(PROGRAMS)
PROGRAMS |= BLOCKS
EDGES = ("<module>", "error_isolation.py call", "extension.py visit", "dispatch.py __call__")
EDGES += (" __missing__", " record_loop", " __del__", " __enter__", " __exit__")
"""Called first by Python or by instrumented code: the very call is before any ``try``."""
EDGES += ("options.py checked_patterns",)  # of a cell's own call of ``keep``, which may raise
EDGES += tuple(f"loops.py {name}" for name in ("begins", "ended", "show", "close"))
"""Methods that are called by a loop of the user, and have a ``try`` of their own."""
SETUP = "import ipygpumem, numpy as np; old, log, kept = 1, [], []"


class Call(NamedTuple):
    """The ``number``-th call of one of our functions in a program's target."""

    program: str
    code: CodeType
    number: int

    def __str__(self) -> str:
        file = self.code.co_filename.removeprefix(PACKAGE + "/")
        return (
            f"{self.program}: {file}:{self.code.co_firstlineno} {self.code.co_name} #{self.number}"
        )


@functools.cache
def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(
        PACKAGE
    ) and not f"{Path(code.co_filename).name} {code.co_name}".endswith(EDGES)


def on_calls(action: Callable[[], object], seen: Callable[[CodeType], None]) -> None:
    """Run ``action``; ``seen`` is told of each call of a function of ours, and may raise in its
    place.
    """

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and is_ours(frame.f_code) and not is_called_by_others(frame):
            seen(frame.f_code)

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)


class World:
    """One shell, with the extension loaded anew for each program."""

    def __init__(self, shell: InteractiveShell, out: pytest.CaptureFixture[str]) -> None:
        self.shell = shell
        self.out = out

    def begin(self, program: Program) -> None:
        run = self.shell.run_cell
        for cell in (
            "%reset -f",
            "%load_ext ipygpumem",
            "%reload_ext ipygpumem",
            SETUP,
            program.before,
        ):
            run(cell)
        self.app = app_of(self.shell)
        where.tell_why_not_shown.cache_clear()
        self.out.readouterr()

    def calls(self, name: str) -> Iterator[Call]:
        """Yield the first, the second and the last call of each function in the target of a
        program.
        """
        target = PROGRAMS[name].target
        self.begin(PROGRAMS[name])
        self.shell.run_cell(target)  # what is imported on first use is there then
        self.begin(PROGRAMS[name])
        counts: dict[CodeType, int] = {}

        def count(code: CodeType) -> None:
            counts[code] = counts.get(code, 0) + 1

        on_calls(lambda: self.shell.run_cell(target), count)
        for code, most in counts.items():
            # to close it is a call, too, which cannot raise
            is_generator = code.co_flags & inspect.CO_GENERATOR
            numbers = {1} if is_generator else {1, min(2, most), most}
            yield from (Call(name, code, number) for number in sorted(numbers))

    def strike(self, call: Call, error: type[BaseException]) -> str | None:
        """Run the program of ``call``, which raises ``error``; return what is wrong then."""
        program = PROGRAMS[call.program]
        left = call.number
        results = list[Any]()
        self.begin(program)

        def seen(code: CodeType) -> None:
            nonlocal left
            if code is call.code:
                left -= 1
                if not left:
                    raise error("injected")

        with contextlib.suppress(KeyboardInterrupt):
            on_calls(
                lambda: results.append(self.shell.run_cell(program.target, store_history=True)),
                seen,
            )
        if left > 0:
            return None  # not so many calls this time
        text = plain("".join(self.out.readouterr()))
        try:
            self.check(call, results, text, error)
            self.goes_on(program)
        except AssertionError as wrong:
            return f"{wrong}\n{text}"
        return None

    def check(self, call: Call, results: list[Any], text: str, error: type[BaseException]) -> None:
        """Check that the code has run, that names are as they should be, and that one line says
        what failed.
        """
        program = PROGRAMS[call.program]
        is_interrupt = error is KeyboardInterrupt
        # A Ctrl-C may stop the code, or what follows.
        may_stop_code = is_interrupt and (not results or "KeyboardInterrupt" in text)
        if not may_stop_code:
            self._check_code_has_run(program, results, text, is_interrupt=is_interrupt)
        self._check_names(program, text, is_interrupt=is_interrupt)
        # Elsewhere objects may fail.
        is_ours_alone = re.search("/(shell|scope|report)/", call.code.co_filename)
        lines_about_fault = [line for line in text.splitlines() if "injected" in line]
        if not is_interrupt:
            assert "Traceback (most" not in text or program.error, "a traceback"
            assert len(lines_about_fault) <= 1, f"said {len(lines_about_fault)} times"
        # Else memory is short, or the user knows.
        if error in (RuntimeError, OSError) and is_ours_alone:
            assert lines_about_fault, "not said"
            says_what_was_not_done = " failed (" not in text or "not affected, but " in text
            assert says_what_was_not_done, "not said what was not done"

    def _check_code_has_run(
        self, program: Program, results: list[Any], text: str, *, is_interrupt: bool
    ) -> None:
        """Check that a program's code has run to its end, with its own error or without one."""
        raised = [
            type(result.error_before_exec or result.error_in_exec).__name__ for result in results
        ]
        came_after_code = (
            is_interrupt and "Ctrl-C arrived after" in text and raised == ["KeyboardInterrupt"]
        )
        assert came_after_code or raised == [program.error or "NoneType"], f"raised {raised}"
        assert self.shell.user_ns.get("log") == [2], "the code has not run"
        assert program.error or "]: 42" in text, "no result"
        assert "Error in callback" not in text, "an error in a callback"

    def _check_names(self, program: Program, text: str, *, is_interrupt: bool) -> None:
        """Check that the experiment has ended and given the older value back."""
        is_open = "e" in [experiment.name for experiment in self.app.experiments.open]
        # As documented, finish() can be called again.
        may_stay_open = is_interrupt and "finish()" in program.target
        assert not is_open or may_stay_open, "open after its cell"
        has_scope = re.search(r"%%experiment|experiment\(\"e", program.target)
        has_no_scope_now = re.search("without this scope|rewriting failed|could not be ended", text)
        if has_scope and not has_no_scope_now and not is_open:
            old = self.shell.user_ns.get("old")
            assert old == 1, f"old is {old}"

    def goes_on(self, program: Program) -> None:
        """Run the program again after what a fault has left: names and reports must be right."""
        shell = self.shell
        names = self.shell.user_ns
        for experiment in list(self.app.experiments.open):
            shell.run_cell(f"%experiment end {experiment.name}")
        assert not self.app.experiments.open, "cannot be ended"
        shell.run_cell("old, since = 1, 7; log.clear(); globals().pop('new', None)")
        for cell in filter(None, (program.before, program.target, program.after)):
            shell.run_cell(cell, store_history=True)
        text = "".join(self.out.readouterr())
        values = {name: names[name] for name in ("old", "since", "log", "new") if name in names}
        expected = {"old": 1, "since": 7, "log": [2]}
        assert values == expected, f"names are wrong later: {values}"
        assert "ipygpumem:" not in text, f"said again: {text}"
        assert re.search(r"^cell \d+ · ", text, re.MULTILINE), "no report later"
        assert not self.app.context.cells.running(), "a cell still runs"
        gc.collect()  # an error and its frames are a cycle, which may be old
        assert not len(self.app.context.meter._open), "a measurement is open"


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch, only_this_test: None) -> None:
    monkeypatch.setattr("ipygpumem.fitting.budgets.torch_cuda", lambda: None)


@pytest.fixture
def world(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> World:
    return World(shell, capsys)


SEED = int(os.environ.get("IPYGPUMEM_SEED", "0"))
"""Chooses the faults: each seed has others."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", [15, pytest.param(400, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("names", [CELLS, tuple(BLOCKS)], ids=["cells", "blocks"])
def test_a_fault_stops_no_code_and_loses_no_name(
    world: World, names: tuple[str, ...], most: int
) -> None:
    calls = [(call, error) for name in names for call in world.calls(name) for error in ERRORS]
    random.Random(most + SEED).shuffle(calls)
    turns = Counter[CodeType]()

    def turn(struck: tuple[Call, type[BaseException]]) -> int:
        turns[struck[0].code] += 1
        return turns[struck[0].code]

    calls = sorted(calls, key=turn)[:most]  # each function once before any comes twice
    wrong = [
        f"{error.__name__} in {call}: {what}"
        for call, error in calls
        if (what := world.strike(call, error))
    ]
    assert not wrong, f"{len(wrong)} of {len(calls)}\n" + "\n".join(wrong)


KINDS = (
    *(Session, CellStack, ExperimentManager, Experiment, ManagedExperiment, ExperimentLog),
    ExperimentEnd,
    *(CodeObserver, MeasuredScope, OpenExperiments, Scope, Outputs, Meter, Span, Recovery),
    Display,
)
FOREVER = [
    (kind, name)
    for kind in KINDS
    for name, function in vars(kind).items()
    if type(function) is FunctionType
]
FOREVER = [(kind, name) for kind, name in FOREVER if name not in ("__init__", "close")]


FAILING_BLOCK = """
import ipygpumem
with ipygpumem.experiment('e'):
    old = new = 2
    log.append(old)
"""


FAILING_CELL = PROGRAMS["an error"].target
EVERY_FAULT = [
    pytest.param(target, 0, 1, marks=pytest.mark.thorough)
    for target in (FAILING_CELL, FAILING_BLOCK)
]


@pytest.mark.parametrize(
    ("target", "first", "step"), [(FAILING_CELL, 0, 6), (FAILING_BLOCK, 1, 6), *EVERY_FAULT]
)
def test_a_fault_that_lasts_stops_no_code_and_loses_no_name(
    world: World, target: str, first: int, step: int
) -> None:
    wrong = []
    for kind, name in FOREVER[first::step]:
        is_handle = kind in (Experiment, ManagedExperiment)
        if target == FAILING_BLOCK and is_handle and name in ("keep", "__enter__", "__exit__"):
            continue  # called by the block itself
        world.begin(PROGRAMS["plain"])
        with pytest.MonkeyPatch.context() as patch:

            def fails(*_: object, **__: object) -> None:
                raise RuntimeError("injected")

            patch.setattr(kind, name, fails)
            world.shell.run_cell(target)

        # Neither this cell nor the next ones suffer.
        said = "".join(world.out.readouterr())
        for cell in ("since = 7", target):
            world.shell.run_cell(cell)
        values = {key: world.shell.user_ns.get(key) for key in ("old", "since", "log")}
        has_run = values["since"] == 7 and values["log"] == [2, 2]
        has_ended = not world.app.experiments.open and not world.app.context.cells.running()
        decides_on_names = name in ("_matches_keep", "_would_shadow")
        may_stay = "without this scope" in said or decides_on_names
        is_restored = values["old"] == 1 or may_stay
        if not (has_run and has_ended and is_restored):
            wrong.append(f"{kind.__name__}.{name}: {values}, {world.app.experiments.open}\n{said}")
    assert not wrong, f"{len(wrong)} of {len(FOREVER)}\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "by", ["run('0')", "later = Thread(target=run, args=['0']); later.start(); later.join()"]
)
@pytest.mark.parametrize("end", ["", "%experiment end", "%reload_ext ipygpumem"])
def test_code_run_during_an_experiments_end_does_not_end_it(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], by: str, end: str
) -> None:
    """A finaliser runs a cell, in its own thread or in another as a subshell does."""
    by = by.replace("'0'", repr(end or "0"))
    shell.run_cell("%load_ext ipygpumem")
    shell.run_cell("from threading import Thread\nrun = get_ipython().run_cell")
    shell.run_cell(f"""
        class Runs:
            def __del__(self):
                {by}
        first, old = 0, 1
        """)
    shell.run_cell("""
        %%experiment e
        first = Runs()
        old = new = 2
        """)
    values = [shell.user_ns.get(name) for name in ("first", "old", "new")]
    assert (values, app_of(shell).experiments.open) == ([0, 1, None], [])
    said = "".join(capsys.readouterr())
    assert not re.search("could not be ended|KeyError|the end of|unloaded with", said), said
    assert said.count("restored: first, old") == 1, said


TRIGGERS = (
    "import time\ntime.perf_counter = time.time = None",
    "import threading; threading.get_ident = None",
)
TRIGGERS += (
    textwrap.dedent(
        """\
        class Strikes:
            def __del__(self): raise KeyboardInterrupt
        item, other = Strikes(), Strikes()"""
    ),
)


@pytest.mark.parametrize("trigger", [*TRIGGERS, "%experiment start e\ninner = 1"])
def test_an_experiment_ends_with_its_cell(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, trigger: str
) -> None:
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # put back when the test ends
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(threading, "get_ident", threading.get_ident)
    shell.run_cell("%load_ext ipygpumem")
    cell = f"%%experiment e\n{trigger}\nnew = 1\nran = globals().setdefault('runs', []).append(1)"
    shell.run_cell("old, runs = 1, []")
    shell.run_cell(cell + "\nold = 2")
    assert app_of(shell).experiments.open == []
    shell.run_cell("since = 7")
    shell.run_cell(cell)
    assert [shell.user_ns.get(name) for name in ("old", "since", "runs")] == [1, 7, [1, 1]]


def test_each_kind_of_failure_is_reported_once_with_its_loss(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place and the text of an error may differ by a number; another type is
    another failure.
    """
    shell.run_cell("%load_ext ipygpumem")
    app = app_of(shell)
    numbers = iter(range(1000))

    def broken(kind: type[Exception]) -> Callable[..., None]:
        def fail(*_: object, **__: object) -> None:
            raise kind(f"reason {next(numbers)}")

        return fail

    def told() -> list[str]:
        return [line for line in capsys.readouterr().err.splitlines() if "ipygpumem:" in line]

    # Twenty cells fail alike: one line for each type of error.
    for kind in (RuntimeError, KeyError):
        monkeypatch.setattr(app.context.meter, "span", broken(kind))
        for _ in range(20):
            assert shell.run_cell("1").success
        (line,) = told()
        assert line.startswith(f"ipygpumem: pre_run_cell failed ({kind.__name__}: ")
        assert line.endswith("Your code is not affected, but this cell's memory was not measured.")

    # Another component fails.
    monkeypatch.setattr(app.session, "_finish_measurement", broken(RuntimeError))
    shell.run_cell("1")
    (line,) = told()
    assert line.startswith("ipygpumem: post_run_cell failed (RuntimeError: "), "another component"

    # After the extension was loaded again, a known failure is told once more.
    monkeypatch.undo()
    shell.run_cell("%reload_ext ipygpumem")
    monkeypatch.setattr(app_of(shell).context.meter, "span", broken(RuntimeError))
    shell.run_cell("1")
    assert len(told()) == 1, "the extension was loaded again"


def test_a_cell_runs_even_if_its_lines_variables_stay_unreplaced(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no frame")

    shell.run_cell("%load_ext ipygpumem\nname = 'e'")
    monkeypatch.setattr("ipygpumem.shell.dispatch._with_values_of_variables", fail)
    shell.run_cell("%%experiment {name}\nnew = 42\nprint(new)\n")
    captured = capsys.readouterr()
    assert "42" in captured.out.splitlines()
    assert captured.err.count("variables in its line were not replaced") == 1


@pytest.mark.parametrize(
    ("cell", "broken"),
    [
        ("%%experiment e\nran.append(1)", "gc.isenabled = None"),
        (
            "%%experiment e\nran.append(1)",
            "import ipygpumem.shell.ipython.rewriting as r; r.cell_magic = None",
        ),
        ("%%experiment e\nran.append(1)", "get_ipython().events.trigger = lambda *given: None"),
        (FAILING_BLOCK.replace("log.append(old)", "ran.append(1)"), "gc.isenabled = None"),
    ],
)
def test_each_cell_that_runs_without_its_scope_is_told_so(
    shell: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cell: str,
    broken: str,
) -> None:
    monkeypatch.setattr(gc, "isenabled", gc.isenabled)  # put back when the test ends
    monkeypatch.setattr(rewriting, "cell_magic", rewriting.cell_magic)
    shell.run_cell(f"""
        %load_ext ipygpumem
        import gc
        ran = []
        {broken}
        """)
    for times in (1, 2, 3):
        shell.run_cell(cell)
        text = capsys.readouterr().err
        assert "without this scope" in text
        said = [
            line for line in text.splitlines() if "failed (" in line and "post_run_cell" not in line
        ]
        assert len(said) == (times == 1), text
        assert shell.user_ns["ran"] == [1] * times
    assert app_of(shell).experiments.open == []


@pytest.mark.parametrize("owner", [Experiment, ExperimentManager])
@pytest.mark.parametrize(
    "form",
    [
        "with experiment:\n    ran = 1",
        """
experiment.start()
ran = 1
experiment.finish()
""",
    ],
)
def test_an_experiment_that_failed_to_start_has_a_record(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, form: str, owner: type
) -> None:
    """Code after the block reads it."""
    shell.run_cell("%load_ext ipygpumem\nimport ipygpumem")
    monkeypatch.setattr(owner, "__init__" if owner is Experiment else "begin", broken)
    cell = f"experiment = ipygpumem.experiment('e')\n{form}"
    assert shell.run_cell(
        f"{cell}\nread = experiment.record.name, experiment.record.usages, experiment.cells"
    ).success
    assert shell.user_ns["read"] == ("e", (), ())
    assert shell.user_ns["ran"] == 1


def test_code_of_an_unseen_cell_runs_without_a_scope(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%load_ext ipygpumem")

    def broken(*_: object) -> None:
        raise RuntimeError("no cell")

    monkeypatch.setattr(app_of(shell).context.cells, "push", broken)
    for cell in ("%%experiment e\nx = 1", "%experiment start m\ny = 2", "%experiment end"):
        shell.run_cell(cell)
    assert (shell.user_ns["x"], shell.user_ns.get("y")) == (1, None)
    text = capsys.readouterr().err
    assert "must be the first line" not in text
    assert "it runs without this scope" in text


def test_code_that_was_not_read_may_bind_any_name(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the look at the code nor the note that it has failed could be made."""
    shell.run_cell("%load_ext ipygpumem\nold = 1")
    cells = app_of(shell).context.cells
    calls = list[int]()
    running = cells.running

    def fail_twice(*given: Any) -> Any:
        calls.append(1)
        if len(calls) <= 2:
            raise ZeroDivisionError
        return running(*given)

    monkeypatch.setattr(cells, "running", fail_twice)
    shell.run_cell("%%experiment e\nold = new = 2")
    assert (shell.user_ns["old"], shell.user_ns.get("new")) == (1, None)
    assert len(calls) >= 2


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize("owner", [CellStack, Session])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_cell_whose_start_was_missed_loses_no_value(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, owner: type, in_thread: bool
) -> None:
    """A cell without a record: all objects are saved, and no name that it binds is deleted."""
    name = "push" if owner is CellStack else "cell_begins"

    # Names from before the scope, and from its first cells.
    shell.run_cell("%load_ext ipygpumem")
    shell.run_cell("old, other, gone = 'older', 'other', 'gone'")
    shell.run_cell("%experiment start m")
    shell.run_cell("""
        mine = old = 1
        again = 2
        del again
        """)

    # The cell without a record.
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        cell = "old = other = 2\nnew = again = 3\ndel gone"
        if in_thread:
            thread = threading.Thread(target=shell.run_cell, args=[cell])
            thread.start()
            thread.join()
        else:
            shell.run_cell(cell)

    # What the end restores and deletes.
    shell.run_cell("later = 4")
    shell.run_cell("%experiment end")
    names = {
        name: shell.user_ns.get(name) for name in ("old", "other", "new", "again", "mine", "later")
    }
    expected = {"old": "older", "other": "other", "new": 3, "again": 3, "mine": None, "later": None}
    if in_thread:  # another thread's cell: its names belong to no scope
        expected |= {"old": 2, "other": 2}
    assert names == expected


def test_cells_without_any_hook_lose_no_value(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run_cell("%load_ext ipygpumem")
    shell.run_cell("old = 'older'")
    shell.run_cell("%experiment start m")
    with monkeypatch.context() as patch:
        patch.setattr(shell.events, "trigger", lambda *_: None)
        shell.run_cell("old = 2\nnew = 3")
        shell.run_cell("%experiment end")
    assert (shell.user_ns["old"], shell.user_ns["new"]) == ("older", 3)


def test_a_silent_request_saves_nothing_for_an_open_scope(shell: InteractiveShell) -> None:
    """Front-ends send them after each cell; a variable that is deleted next must be
    freed at once.
    """
    shell.run_cell("%load_ext ipygpumem")
    shell.run_cell(
        """
        class Thing: pass
        thing = Thing()
        import weakref
        reference = weakref.ref(thing)
        """
    )
    shell.run_cell("%experiment start m")
    shell.run_cell("_jupyterlab_variableinspector_x = 1", silent=True)
    shell.run_cell("""
        del thing
        freed = reference() is None
        print(freed)
        """)
    assert shell.user_ns["freed"]
    shell.run_cell("%experiment end")
