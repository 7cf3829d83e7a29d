"""Hostile names, objects and environments: no method is called, and nothing is stopped."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel, Reply
from tests import hostile
from tests.hostile import SOURCE
from tests.steps import (
    assert_goes_on,
    open_experiments,
    recovery_report,
    run,
    run_cells,
    user_names,
)

NASTY = (
    "<script>alert(1)</script><b>&amp;\x1b[31mred\x07 {x} $y {{jinja}} %s %(a)s \u202e\ud7ff "
    "na\u00efve"
)


def _is_harmless(reply: Reply) -> None:
    for display in reply.displays:
        html, text = display["data"].get("text/html", ""), display["data"]["text/plain"]
        assert "<script" not in html
        assert "<b>" not in html
        for letter in ("\x1b", "\x07", "\u202e"):
            assert letter not in html + text


def test_reports_escape_names_with_markup_or_control_characters(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import numpy as np
        leak = []
        """,
    )
    reply = run_cells(
        notebook,
        "%%experiment a\n"
        f"nasty = {NASTY!r}\n"
        "globals()[nasty] = np.ones(1 << 20)\n"
        "leak.append(globals()[nasty])\n"
        "Odd = type(nasty.replace('\\ud7ff', ''), (np.ndarray,), {})\n"
        "odd = np.ones(1 << 20).view(Odd)\n"
        "leak.append(odd)\n"
        "globals()[''] = 0; globals()[5] = 'not a string'; globals()[('t', 1)] = 2",
    )
    _is_harmless(reply)
    (text,) = reply.survivors()
    assert "still alive" in text
    assert "alert(1)" in text
    assert notebook.value("[n for n in globals() if 'script' in str(n) or n == '']") == []
    run_cells(notebook, "del globals()[5], globals()[('t', 1)]")
    failed = run(
        notebook,
        f"nasty = {NASTY!r}\n"
        "code = compile('def f():\\n    t = np.ones(1 << 20)\\n    raise MemoryError(nasty)', "
        "'<s>', 'exec')\n"
        "exec(code)\nf.__code__ = f.__code__.replace(co_name=nasty, co_varnames=(nasty,))\nf()",
    )
    assert failed.error == "MemoryError"
    _is_harmless(failed)
    assert "alert(1)" in failed.reports("recovery")[0]
    assert_goes_on(notebook)


def test_errors_escape_control_characters_of_a_wrong_line(notebook: Kernel) -> None:
    for line in (
        "%experiment end \x1b[31mred",
        "%experiment start a --\x1b[31mred",
        "%experiment \x1b[31mred",
    ):
        assert "\x1b[31mred" not in notebook.run(line).stderr
    assert_goes_on(notebook)


@pytest.mark.parametrize("name", ["Out", "_oh", "get_ipython"])
@pytest.mark.parametrize("change", ["del {}", "{} = 5"])
def test_a_scope_survives_changes_of_ipythons_own_names(
    notebook: Kernel, change: str, name: str
) -> None:
    run_cells(notebook, "x = 'old'", "%experiment start a")
    for code in (f"x = 'new'\n{change.format(name)}", "1 + 1", "import IPython as i"):
        notebook.run(code)
    notebook.run("i.get_ipython().run_line_magic('experiment', 'end')")
    assert notebook.value("x") == "old"
    run_cells(
        notebook,
        """
        from IPython import get_ipython
        _oh, __name__ = {}, '__main__'
        %reset -f
        """,
    )
    assert_goes_on(notebook)


def test_a_scope_ends_while_threads_add_and_remove_names(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import threading, time
        old = 'old'
        stop = threading.Event()
        counts = [0]
        def churn():
            space, number = globals(), 0
            while not stop.is_set():
                number += 1
                space[f'churn{number % 500}'] = number
                space.pop(f'churn{(number + 250) % 500}', None)
                counts[0] = number
                if number % 50 == 0: time.sleep(0.001)  # leaves the processor to the cells
        threads = [threading.Thread(target=churn) for _ in range(2)]
        for thread in threads: thread.start()
        """,
    )
    for _ in range(2):
        run_cells(
            notebook,
            "%experiment start a",
            "x = 1; old = 'new'",
            "%experiment status",
            "%experiment end",
        )
        assert notebook.value("old") == "old"
        assert "x" not in user_names(notebook)
    run_cells(
        notebook,
        """
        stop.set()
        for thread in threads: thread.join()
        """,
    )
    assert notebook.value("counts[0] > 100") is True
    assert_goes_on(notebook)


@pytest.mark.parametrize(
    "kind", ["Hostile", "Container", "Sequence", "Slotted", "Lazy", "Oom", "Function"]
)
def test_the_hostile_objects_detect_access_by_our_code(kind: str) -> None:
    """The tests below mean something."""
    ours = {"__name__": "ipygpumem.somewhere", "thing": hostile.made(getattr(hostile, kind))}
    with pytest.raises(AssertionError), hostile.untouched(), contextlib.suppress(RuntimeError):
        exec("thing.name", ours)
    with hostile.untouched(), pytest.raises(RuntimeError, match="hands off"):
        exec("thing.name", {**ours, "__name__": "IPython.core"})


def test_no_user_method_runs_at_exit_in_status_or_in_reports(notebook: Kernel) -> None:
    run_cells(
        notebook,
        SOURCE,
        """
        import numpy as np
        old = made(Hostile)
        """,
        "%experiment start a --keep kept",
        """
        a = made(Hostile)
        b = made(Container, {'k': np.ones(1 << 19)})
        c = made(Sequence, [a])
        old = made(Hostile)
        kept = made(Hostile)
        d = [a, {'x': (a, b)}, Function()]
        Array = type('Array', (np.ndarray,), body)
        e = np.ndarray.__new__(Array, 1 << 19)
        f = Hostile
        """,
        "%experiment status",
        "%gpumem status",
    )
    reply = run_cells(notebook, "%experiment end")
    assert "deleted: " in reply.reports("experiment")[0]
    assert notebook.value("touched") == []
    assert not {"a", "b", "c", "d", "e", "f"} & set(user_names(notebook))
    assert notebook.value("type.__subclasscheck__(Hostile, type(old))") is True
    assert_goes_on(notebook)


def test_no_method_of_a_users_object_is_called_after_an_oom(notebook: Kernel) -> None:
    run_cells(
        notebook,
        SOURCE + "\nimport numpy as np",
        """
        def fail():
            Array = type('Array', (np.ndarray,), body)
            array = np.ndarray.__new__(Array, 1 << 20)
            thing = made(Hostile); box = made(Container); row = made(Sequence, [thing])
            error = MemoryError.__new__(Oom, (1, 2), thing)
            BaseException.__setattr__(error, 'thing', thing)
            raise error
        """,
    )
    text = recovery_report(notebook, "fail()")
    assert "array" in text
    assert "Array" in text
    assert notebook.value("touched") == []
    assert_goes_on(notebook)


def test_a_scope_ends_although_finalisers_raise_or_replace_names(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        class Raises:
            def __del__(self): raise ValueError('from __del__')
        class Exits:
            def __del__(self): raise SystemExit(4)
        class Deletes:
            def __del__(self): globals().pop('zz', None); globals().pop('old2', None)
        class Adds:
            def __del__(self): globals()['late'] = 1
        old, old2 = 'old', 'old2'
        """,
        "%experiment start a",
        """
        a, b, c, d = Raises(), Exits(), Deletes(), Adds()
        zz = 1
        old = 'new'
        """,
    )
    notebook.run("%experiment end")
    assert (notebook.value("old"), open_experiments(notebook)) == ("old", [])
    assert not {"a", "b", "c", "d", "zz"} & set(user_names(notebook))
    assert_goes_on(notebook)


@pytest.mark.parametrize(
    ("bend", "mend"),
    [
        pytest.param(
            """\
import sys, io
keep_out = sys.stdout
class Broken(io.StringIO):
    def write(self, text): raise OSError
sys.stdout = Broken()""",
            "sys.stdout = keep_out",
            id="a broken stdout",
        ),
        pytest.param(
            """
            import sys
            def trace(*a): return trace
            sys.settrace(trace)
            """,
            "sys.settrace(None)",
            id="a trace function",
        ),
        pytest.param(
            """
            import gc
            gc.disable()
            """,
            "gc.enable()",
            id="no collector",
        ),
        pytest.param(
            """
            import gc
            def fail(*a): raise ValueError
            gc.callbacks.append(fail)
            """,
            "gc.callbacks.remove(fail)",
            id="a callback of the collector that fails",
        ),
        pytest.param(
            """
            import warnings
            warnings.simplefilter('error')
            """,
            "warnings.resetwarnings()",
            id="warnings as errors",
        ),
        pytest.param(
            """
            import sys
            sys.last_value = 5
            sys.last_traceback = 'x'
            sys.last_exc = []
            """,
            "del sys.last_exc",
            id="odd last errors",
        ),
        pytest.param(
            """
            import builtins
            keep_open, builtins.open = open, None
            """,
            "builtins.open = keep_open",
            id="no open",
        ),
    ],
)
def test_cells_and_scopes_work_in_a_changed_interpreter(
    notebook: Kernel, bend: str, mend: str
) -> None:
    run_cells(notebook, "x = 'old'", bend)
    assert len(run_cells(notebook, "y = 3").reports("cell")) == 1
    run_cells(notebook, "%experiment start a", "x = 'new'")
    run(notebook, "1/0")
    for end in ("%experiment end", "%%experiment b\nx = 'new'\nz = 1"):
        assert len(run_cells(notebook, end).reports("experiment")) == 1
    run_cells(notebook, "%gpumem free", mend)
    assert notebook.value("x") == "old"
    assert_goes_on(notebook)


def test_cells_and_scopes_work_with_stubs_of_torch_and_numpy() -> None:
    stubs = (
        "None",
        "types.ModuleType('torch')",
        "types.SimpleNamespace(Tensor=7, ndarray=7)",
        "mock.MagicMock()",
    )
    with Kernel() as kernel:
        run_cells(
            kernel,
            "%load_ext ipygpumem",
            """
            import sys, types
            from unittest import mock
            """,
        )
        for stub in stubs:
            run_cells(
                kernel,
                f"""
                sys.modules['torch'] = {stub}
                x = 'old'
                """,
            )
            assert_goes_on(kernel)

            # A cell's own scope, then an open one in which a cell runs out of memory.
            run_cells(
                kernel,
                """
                %%experiment a --seed 1
                x = 'new'
                y = [1]
                """,
            )
            assert (kernel.value("x"), "y" in user_names(kernel)) == ("old", False)
            run_cells(
                kernel,
                f"sys.modules['numpy'] = {stub}",
                "%experiment start b --seed 1",
                "x = 'new'",
            )
            run_cells(kernel, "%gpumem status", "%gpumem free")
            run(
                kernel,
                """
                def f():
                    held = bytearray(1 << 20)
                    raise MemoryError
                f()
                """,
            )
            run_cells(kernel, "%experiment end")
            assert kernel.value("x") == "old"
            run_cells(kernel, "del sys.modules['torch'], sys.modules['numpy']")


SCRIPT = """import ipygpumem
x = 1
with ipygpumem.experiment("a", keep="y", report="none"):
    x = 2
    y = z = 3
print(x, y, "z" in globals())
"""


def test_a_script_without_ipython_gets_a_hint_that_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for arguments in ([script], ["-c", "import ipygpumem\nipygpumem.history()"]):
        plain = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600
        )
        assert plain.returncode == 1
        assert "ipython --ext ipygpumem" in plain.stderr.splitlines()[-1]
    command = [sys.executable, "-m", "IPython", "--ext", "ipygpumem", script]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "profile")}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=env)
    assert "1 3 False" in run.stdout.splitlines(), run.stderr
