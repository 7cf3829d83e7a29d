"""After an OOM or an interrupt the memory is back, also where recovery itself gets none."""

import sys
import textwrap
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.meter.meter import Span
from ipygpumem.shell.app import app_of
from ipygpumem.shell.experiments.ending import ExperimentEnd
from ipygpumem.shell.experiments.measured_scope import MeasuredScope
from tests.recovery.cases import OOM, report_of_recovery
from tests.steps import experiment, plain, run_cells, run_failing


@pytest.mark.parametrize("code", OOM.values(), ids=OOM)
def test_after_an_oom_nothing_is_pinned_and_one_report_says_so(notebook: Kernel, code: str) -> None:
    text = report_of_recovery(notebook, code)
    assert "out of memory (" in text
    assert "freed: " in text
    assert "Restart" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            """
def f():
    x = big()
    raise MemoryError
def g():
    found = []
    for _ in range(2):
        try: f()
        except MemoryError as e: found.append(e)
    raise ExceptionGroup('both', [KeyError(), *found])
g()
""",
            id="a group",
        ),
        pytest.param(
            """
def f():
    x = big()
    raise MemoryError
def g():
    try: f()
    except* MemoryError as group:
        raise BaseExceptionGroup('outer', [group, KeyboardInterrupt()])
g()
""",
            id="groups in a group",
        ),
        pytest.param(
            """
async def f():
    x = big()
    await asyncio.sleep(0)
    raise MemoryError
async with asyncio.TaskGroup() as tasks:
    for _ in range(3): tasks.create_task(f())
""",
            id="a group of tasks",
        ),
    ],
)
def test_an_oom_inside_an_exception_group_is_found_and_released(
    notebook: Kernel, code: str
) -> None:
    assert "out of memory (MemoryError)" in report_of_recovery(notebook, code)


@pytest.mark.parametrize("how", ["%run", "%run -i", "%run -n"])
def test_an_oom_in_a_script_leaves_only_the_scripts_names(
    notebook: Kernel, tmp_path: Path, how: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """\
            import builtins, weakref
            import numpy as np
            def f():
                x = np.ones(4 << 17)
                builtins.script_ref = weakref.ref(x)
                raise MemoryError
            f()
            """
        )
    )
    reply = run_failing(notebook, f"{how} {script}")
    assert reply.error == "MemoryError"
    assert notebook.value("__import__('builtins').script_ref() is None") is True
    assert len(reply.reports("recovery")) == 1


@pytest.mark.parametrize("mode", ["Verbose", "Minimal"])
def test_no_traceback_style_pins_memory_and_tb_still_works(notebook: Kernel, mode: str) -> None:
    run_cells(notebook, f"%xmode {mode}")
    try:
        report_of_recovery(notebook, OOM["raise from"])
        report_of_recovery(notebook, OOM["a generator"])
        run_failing(notebook, OOM["a plain function"])
        # Frames whose locals the user's own code has read keep a copy of them before Python 3.13.
        run_failing(
            notebook,
            """
            def f():
                x = big()
                import sys; seen = sys._getframe().f_locals
                locals()
                raise MemoryError
            f()
            """,
        )
        assert notebook.value("alive()") == 0
        reply = notebook.run("%tb")
        assert "MemoryError" in reply.traceback + reply.stdout + reply.stderr
        assert notebook.value("alive()") == 0
    finally:
        notebook.run("%xmode Context")


def test_the_report_lists_memory_by_frame_largest_first(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        def inner(batch):
            small = big(2)
            weights = {'w': big(16), 'b': big(16)}
            raise MemoryError
        def outer():
            hooks = [lambda: 0]
            inner(big(8))
        notebooks_own = np.ones(64 << 17)
        """,
    )
    text = report_of_recovery(notebook, "outer()")
    rows = [
        line.split() for line in text.splitlines() if line.split()[2:3] in (["inner"], ["outer"])
    ]
    listed = ["32 MiB inner weights", "8 MiB inner batch", "2 MiB inner small"]
    assert [" ".join(row[:3] + row[4:5]) for row in rows] == listed
    assert rows[1][-3:] == ["1048576", "float64", "cpu"]
    assert "hooks" not in text
    assert "notebooks_own" not in text


def test_the_notebooks_own_names_are_not_touched_by_a_release(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        mine = big(4)
        also = {'x': mine}
        def f(x):
            y = x
            raise MemoryError
        """,
    )
    run_failing(notebook, "f(mine)")
    assert notebook.value("alive()") == 1
    assert notebook.value("mine is also['x'] and float(mine[0]) == 1.0") is True


def test_numpys_memory_error_is_shown_with_its_size(notebook: Kernel) -> None:
    text = report_of_recovery(
        notebook,
        """
        def f():
            x = big()
            return np.ones((1 << 25, 1 << 22))
        f()
        """,
    )
    assert "asked for 1.00 PiB" in text
    text = report_of_recovery(
        notebook,
        """
        def f():
            x = big()
            return np.ones(1 << 44, dtype='f4') + 1
        f()
        """,
    )
    assert "asked for 64.00 TiB" in text


def test_an_interrupt_in_a_training_loop_gives_the_memory_back(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        from tests.waiting import announce
        def train():
            weights = big(64)
            for step in range(10 ** 9):
                batch = big(4)
                if step == 3: announce()
        """,
    )
    reply = run_failing(notebook, "train()", interrupt_when="waits here")
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("alive()") == 0
    (text,) = reply.reports("recovery")
    assert "interrupted (KeyboardInterrupt)" in text
    assert "weights" in text
    reply = run_failing(notebook, "announce()", interrupt_when="waits here")
    assert reply.reports("recovery") == []
    trainer = "try: train()\nexcept KeyboardInterrupt: sys.exit(1)"  # as Lightning's
    reply = run_failing(notebook, trainer, interrupt_when="waits here")
    assert reply.error == "SystemExit"
    assert notebook.value("alive()") == 0
    assert "interrupted (KeyboardInterrupt)" in reply.reports("recovery")[0]


def test_an_interrupt_of_an_async_cell_gives_the_memory_back(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        async def train():
            weights = big(8)
            print('it trains', flush=True)
            while True: await asyncio.sleep(0.01)
        """,
    )
    reply = run_failing(notebook, "await train()", interrupt_when="it trains")
    assert reply.error in ("KeyboardInterrupt", "CancelledError")
    run_cells(notebook, "pass")
    assert notebook.value("alive()") == 0


FAILING = """
def f():
    secret = big()
    raise {}
f()
"""


@pytest.mark.parametrize(
    ("policy", "oom", "interrupt", "other"),
    [("never", 1, 1, 1), ("oom", 0, 1, 1), ("oom+interrupt", 0, 0, 1), ("always", 0, 0, 0)],
)
def test_an_option_selects_errors_to_release(
    notebook: Kernel, policy: str, oom: int, interrupt: int, other: int
) -> None:
    run_cells(notebook, f"%config IPyGpuMem.release_frames = '{policy}'")
    for error, left in (
        ("MemoryError", oom),
        ("KeyboardInterrupt", interrupt),
        ("ValueError", other),
    ):
        run_cells(notebook, "watched.clear(); gc.collect()")
        run_failing(notebook, FAILING.format(error))
        assert notebook.value("alive()") == left, error
        assert notebook.value("len(watched)") == 1
        run_cells(notebook, "pass")


def test_an_error_from_before_a_scope_keeps_its_frames_after_it(notebook: Kernel) -> None:
    run_failing(notebook, FAILING.format("ValueError"))
    run_cells(notebook, experiment("x = 1", name="a"))
    assert notebook.value("alive()") == 1
    assert notebook.value(
        "str([f.f_locals['secret'][0] for f, _ in "
        "__import__('traceback').walk_tb(sys.last_traceback)"
        " if 'secret' in f.f_locals])"
    ) in ("[1.0]", "[np.float64(1.0)]")


def test_a_recovery_frees_an_older_cycle_that_a_cell_dropped(notebook: Kernel) -> None:
    """No name shows that the cell did so: the first recovery after it collects all garbage."""
    run_cells(
        notebook,
        """
        class Part: pass

        trainer, model = Part(), Part()
        trainer.model, model.trainer, model.weights = model, model, big()
        del model
        """,
    )
    run_failing(notebook, "raise MemoryError")
    run_cells(notebook, "del trainer.model")
    run_failing(notebook, "raise MemoryError")
    assert notebook.value("alive()") == 0


def test_an_error_caught_in_an_earlier_cell_keeps_its_frames(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        kept = None
        try:
            (lambda x: 1 / 0)(big())
        except ZeroDivisionError as e:
            kept = e
        """,
    )
    run_failing(notebook, FAILING.format("MemoryError"))
    assert notebook.value("alive()") == 1
    assert notebook.value("float(kept.__traceback__.tb_next.tb_frame.f_locals['x'][0])") == 1.0


@pytest.mark.parametrize("error", ["ValueError", "MemoryError"])
def test_debug_reads_locals_but_none_that_an_oom_released(notebook: Kernel, error: str) -> None:
    run_failing(
        notebook,
        f"""
        def f():
            secret = 'the answer is ' + str(6 * 7)
            x = big()
            raise {error}
        f()
        """,
    )
    run_cells(notebook, "pass")
    text = notebook.run("%debug", answers=["p 'still ' + 'here'", "p secret", "q"]).stdout
    kept = error == "ValueError"
    assert "still here" in text
    assert ("the answer is 42" in text, notebook.value("alive()")) == (kept, kept)


@pytest.mark.parametrize(
    ("error", "option"), [("MemoryError", "never"), ("KeyboardInterrupt", "oom")]
)
def test_a_recovery_shows_small_locals_and_how_to_keep_all(
    notebook: Kernel, error: str, option: str
) -> None:
    run_cells(
        notebook,
        """
        class Number(int):
            def __repr__(self): raise SystemError
        """,
    )
    reply = run_failing(
        notebook,
        f"""
        def f(lr, name, flag=True, none=None):
            x, odd, huge = big(), Number(3), 10 ** 400
            hf_token, text = 'hf_1', 'a' * 99
            raise {error}
        f(0.1, '<b>run\\n')
        """,
    )
    (text,) = reply.reports("recovery")
    assert f"to keep them: %config IPyGpuMem.release_frames = '{option}'" in text
    shown = (
        f"lr = 0.1, name = '<b>run\\n', flag = True, none = None, hf_token = …, text = "
        f"'{'a' * 40}'…"
    )
    assert f"small locals of these frames:\n  f, line 4: {shown}\n" in text + "\n"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        pytest.param(
            """
def f():
    x = big(40)
    {}['missing']
f()
""",
            True,
            id="a large local",
        ),
        pytest.param(
            """
def f():
    x = big(30)
    raise ValueError
f()
""",
            False,
            id="a local of 30 MiB",
        ),
        pytest.param(
            """
mine = big(40)
def f(x): raise ValueError
f(mine)
""",
            False,
            id="an argument with a name",
        ),
        pytest.param(
            """
def f():
    x = big(40)
    raise MemoryError
f()
""",
            False,
            id="an out-of-memory error",
        ),
        pytest.param(
            """
%%experiment a
def f():
    x = big(40)
    raise ValueError
f()
""",
            False,
            id="an experiment",
        ),
        pytest.param(
            "get_ipython().run_cell('def f():\\n    x = big(40)\\n    1 / 0\\nf()').raise_error()",
            True,
            id="a cell in a cell",
        ),
    ],
)
def test_the_line_of_an_error_says_that_its_frames_hold_much(
    notebook: Kernel, code: str, says: bool
) -> None:
    line = run_failing(notebook, code).reports("cell")[-1]
    assert ("the traceback's frames still hold 40 MiB: %gpumem free frees it" in line) == says
    if says:
        run_cells(notebook, "%gpumem free")
        assert notebook.value("alive()") == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="new in Python 3.11")
def test_free_drops_an_error_shown_before_an_exception_group(notebook: Kernel) -> None:
    run_failing(
        notebook,
        textwrap.dedent(
            """\
            def f():
                x = big(40)
                1 / 0
            f()"""
        ),
    )
    run_failing(notebook, "raise ExceptionGroup('several', [ValueError(1)])")
    run_cells(notebook, "%gpumem free")
    assert notebook.value("alive()") == 0


def _fails(*_: object) -> None:
    raise OSError("not readable")


def _no_memory(*arguments: object, **options: object) -> object:
    raise MemoryError


@pytest.mark.parametrize("missing", ["measuring", "waiting", "watching"])
def test_names_are_deleted_even_if_memory_for_reports_is_short(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    loaded.run_cell("x = 'old'")
    loaded.run_cell("%experiment start a")
    loaded.run_cell("""
    x = 'new'
    y = 1
    """)
    with monkeypatch.context() as patch:
        if missing == "measuring":
            patch.setattr(Span, "read", _no_memory)
            patch.setattr(app_of(loaded).context.meter, "now", _no_memory)
        else:
            owner, method = {
                "waiting": (MeasuredScope, "saved_memory"),
                "watching": (ExperimentEnd, "_watch_arrays"),
            }[missing]
            patch.setattr(owner, method, _no_memory)
        loaded.run_cell("%experiment end")
    assert (loaded.user_ns["x"], "y" in loaded.user_ns) == ("old", False)
    (record,) = ipygpumem.experiments()
    assert "not enough memory to list everything that the experiment held" in record.notes


@pytest.mark.parametrize(
    "missing",
    [
        "a part's note of the code's end",
        "the reading before the recovery",
        "the list of what the error holds",
    ],
)
def test_a_failure_at_a_cells_end_prevents_no_recovery(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    loaded.user_ns["watched"] = []
    with monkeypatch.context() as patch:
        if missing == "the reading before the recovery":
            patch.setattr(Span, "fix_peaks", _no_memory)
        elif missing == "the list of what the error holds":
            patch.setattr("ipygpumem.reclaim.listing.held_by_frames", _fails)
        else:
            patch.setattr(app_of(loaded).experiments, "code_ended", _no_memory)
        loaded.run_cell(
            """
            import weakref
            class Thing: pass
            def f():
                mine = Thing(); watched.append(weakref.ref(mine))
                raise MemoryError
            f()
            """
        )
    assert loaded.user_ns["watched"][0]() is None


def test_a_recovery_that_fails_is_said_though_little_is_held(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise OSError("the traceback is locked")

    monkeypatch.setattr("ipygpumem.shell.recovery.release_stored", fail)
    loaded.run_cell("%config IPyGpuMem.release_frames = 'always'")
    loaded.run_cell("raise ValueError")
    assert "frames: OSError: the traceback is locked" in plain(capsys.readouterr().out)


def test_names_are_deleted_again_after_tracebacks(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.run_cell("%experiment start a")
    loaded.run_cell("y = 1")
    scope = app_of(loaded).experiments.open[-1].scope
    close = scope.close
    tries = iter([_no_memory])
    monkeypatch.setattr(
        scope, "close", lambda *given, **options: next(tries, close)(*given, **options)
    )
    loaded.run_cell("%experiment end")
    assert "y" not in loaded.user_ns
    (record,) = ipygpumem.experiments()
    assert record.deleted == ("y",)
    assert "names: memory ran out" in record.notes
