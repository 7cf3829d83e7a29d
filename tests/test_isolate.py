"""Cells in a child process: what they show, what comes back, and how they may die."""

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from benchmarks.harness.control_group import limited_group, move
from benchmarks.harness.kernel import Kernel, Reply
from ipygpumem.extras.isolate.packets import dump, load
from ipygpumem.records import CellRecord
from tests.steps import (
    assert_goes_on,
    dedented,
    existing_names,
    kernel_with,
    mib_after,
    plain,
    run,
    run_cells,
    run_failing,
    run_quietly,
)
from tests.terminal import Terminal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="%%isolate forks on Linux only")
kernel = kernel_with(
    """\
%load_ext ipygpumem
import ctypes, logging, os, random, signal, sys, time
from IPython.display import *
class Point: pass
old = [1]; model = {'old': old}; random.seed(1); handler = logging.StreamHandler()"""
)
GRANDCHILD = "import subprocess\nsleeper = subprocess.Popen(['sleep', '1000']).pid\n"


def isolated(kernel: Kernel, code: str, options: str = "") -> str:
    """Run a cell in a child process; return its result."""
    return str(run_quietly(kernel, f"%%isolate {options}\n{textwrap.dedent(code)}").result)


# -- what it shows ------------------------------------------------------------------------------


def test_a_cell_looks_as_usual(kernel: Kernel) -> None:
    code = """
        print('one')
        display(HTML('<b>two</b>'))
        print('three', file=sys.stderr)
        get_ipython().run_cell('1 / 0')
        handler.stream.write('five')
        old
    """
    reply = run_quietly(kernel, "%%isolate" + textwrap.dedent(code))
    assert reply.kinds[:3] == ["stdout", "display", "stderr"]
    assert reply.kinds[-2:] == ["result", "display"]
    assert (reply.result, reply.stdout.split()) == ("[1]", ["one"])
    assert reply.stderr == "three\nfive"
    assert (reply.error, reply.displays[0]["data"]["text/html"]) == (
        "ZeroDivisionError",
        "<b>two</b>",
    )
    assert run_quietly(kernel, "%%isolate\nold;").result is None


def test_output_comes_while_the_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    """The Ctrl-C is sent once the text has arrived; the cell would wait for it."""
    cell = """\
%%isolate --keep seen
seen = 1
print('now')
time.sleep(1000)"""
    reply = run_failing(kernel, cell, "KeyboardInterrupt", interrupt_when="now")
    # On a busy machine, the text may arrive before its line has ended.
    assert re.search(r"^-+> [34] (print|time)", plain(reply.traceback), re.MULTILINE)
    assert reply.reports("recovery") == []
    assert kernel.value("seen") == 1
    assert_goes_on(kernel)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            """
            def f():
                return 1 / 0
            f()
            """,
            id="an error of a function",
        ),
        pytest.param("x = (", id="a syntax error"),
        pytest.param("%nomagic", id="a missing magic"),
        pytest.param(
            """
            class Own(Exception): pass
            raise Own('text')
            """,
            id="an own class of errors",
        ),
    ],
)
def test_an_error_is_shown_as_usual_and_stops_the_next_cells(code: str, kernel: Kernel) -> None:
    plainly = run(kernel, "#%%isolate\n" + dedented(code))
    here = run(kernel, "%%isolate\n" + dedented(code))
    assert here.status == plainly.status == "error"

    def shown(reply: Reply) -> list[str]:
        texts = [str(reply.error), reply.message, reply.stderr, reply.traceback]
        return [re.sub(r"\[\d+\]|\d+\.py|ipykernel_\d+", "#", plain(text)) for text in texts]

    assert shown(here) == shown(plainly)
    number = re.search(r"Cell In\[(\d+)\]", plain(here.traceback))
    assert number is None or f"cell {number[1]} " in here.reports("cell")[0]


def test_figures_widgets_and_updates_reach_the_front_end(kernel: Kernel) -> None:
    reply = run_quietly(
        kernel,
        """
        %%isolate
        import matplotlib.pyplot as plt
        _ = plt.plot([1, 2])
        """,
    )
    assert "image/png" in reply.displays[0]["data"]
    assert "matplotlib" not in kernel.value("list(sys.modules)")
    reply = run_quietly(
        kernel,
        """
        %%isolate
        display(1, display_id='it')
        display(2, display_id='it', update=True)
        """,
    )
    assert reply.displays[0]["data"]["text/plain"] == "2"


def test_isolate_works_outside_of_cells(kernel: Kernel) -> None:
    run_quietly(
        kernel, "get_ipython().run_cell('%%isolate --keep silent\\nsilent = 5', silent=True)"
    )
    assert kernel.value("silent") == 5


def test_magics_work_around_and_inside_an_isolated_cell(kernel: Kernel) -> None:
    run_quietly(
        kernel,
        """
        %%capture caught
        %%isolate
        print('out')
        old
        """,
    )
    assert kernel.value("(caught.stdout, caught.outputs[0].data)") == (
        "out\n",
        {"text/plain": "[1]"},
    )

    # %%time is around it or inside it.
    assert (
        "Wall time"
        in run_quietly(
            kernel,
            """
            %%time
            %%isolate
            pass
            """,
        ).stdout
    )
    assert (
        "Wall time"
        in run_quietly(
            kernel,
            """
            %%isolate
            %%time
            pass
            """,
        ).stdout
    )

    # Both magics keep a name: only what both keep is there.
    reply = run_quietly(
        kernel,
        """
        %%experiment run --keep best
        %%isolate --keep best old fresh
        old, best, fresh = 2, 3, 4
        """,
    )
    assert existing_names(kernel, "fresh", "best") == ["best"]
    assert kernel.value("old") == [1]
    assert "restored: old" in reply.reports("experiment")[0]


def test_an_output_that_cannot_be_shown_is_named(kernel: Kernel) -> None:
    reply = run_quietly(
        kernel,
        """
        %%isolate
        class Text(str): pass
        display({'text/plain': Text('x')}, raw=True)
        print('next')
        """,
    )
    assert reply.stdout == "next\n"
    assert "an output was lost: AttributeError" in reply.reports("note")[0]


def test_messages_of_widgets_are_passed_on(kernel: Kernel) -> None:
    """A front-end's view of them would stay empty."""
    cell = textwrap.dedent(
        """\
        %%isolate
        from comm import create_comm
        _ = create_comm('mine', data={'a': 1}, buffers=[b'bytes'])"""
    )
    kernel._client.execute(cell)
    while (message := kernel._client.get_iopub_msg(timeout=60))["msg_type"] != "comm_open":
        assert message["msg_type"] != "error", message
    assert message["content"]["target_name"] == "mine"
    assert (message["content"]["data"], bytes(message["buffers"][0])) == ({"a": 1}, b"bytes")
    assert_goes_on(kernel)


def test_input_await_and_random_numbers_work(kernel: Kernel) -> None:
    assert (
        run_quietly(kernel, "%%isolate\nprint(input('name?'))", answers=["Ada"]).stdout == "Ada\n"
    )
    assert run_failing(kernel, "%%isolate\ninput()", "StdinNotImplementedError").stdout == ""
    assert isolated(kernel, "import asyncio\nawait asyncio.sleep(0, 'slept')") == "'slept'"
    assert isolated(kernel, "random.random()") == str(kernel.value("random.random()"))


def test_an_isolated_cell_shows_no_warning_and_writes_no_history(kernel: Kernel) -> None:
    assert (
        isolated(kernel, "get_ipython().run_cell('old # marked', store_history=True).result")
        == "[1]"
    )
    run_quietly(kernel, "history = get_ipython().history_manager; history.writeout_cache()")
    assert kernel.value("list(history.search('old # marked'))") == []
    assert kernel.value("len(list(history.search('*old # marked*')))") == 1


# -- what comes back ----------------------------------------------------------------------------


def test_only_kept_names_come_back(kernel: Kernel) -> None:
    code = """
        gone = loss_a = loss_b = 1
        def double(x): return 2 * x
        point, lock = Point(), handler.lock
        class New: pass
        new = New()
        model['new'] = model['old']
    """
    reply = run_quietly(
        kernel,
        "%%isolate --keep 'loss*' double,point lock new model nosuch" + textwrap.dedent(code),
    )
    assert existing_names(kernel, "gone", "loss_a", "loss_b", "lock", "New") == ["loss_a", "loss_b"]
    assert kernel.value("double(2)") == 4
    assert kernel.value("type(point) is Point") is True
    assert kernel.value("type(new).__name__") == "New"
    assert kernel.value("model['new'] is model['old']")
    (report,) = reply.reports("note")
    assert report.splitlines() == [
        "%%isolate --keep: nosuch did not come back: there is no such name",
        "%%isolate --keep: lock did not come back: TypeError: cannot pickle '_thread.RLock' object",
    ]


def test_a_value_that_only_the_child_can_load_is_named(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("class Thing: pass")
    code = f"sys.path.append({str(tmp_path)!r})\nimport only_there\nthing = only_there.Thing()"
    reply = run_quietly(kernel, f"%%isolate --keep thing\n{code}")
    assert "thing did not come back: ModuleNotFoundError" in reply.reports("note")[0]


def test_without_cloudpickle_code_of_the_cell_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code = eval("lambda: 1", {"__name__": "__main__"})
    with (tmp_path / "kept").open("w+b") as file:
        assert dump(file, {"f": code, "x": 1}, {}) == {
            "f": (
                "PicklingError: its code is defined in this cell: install cloudpickle, or define "
                "it before"
            )
        }
        assert dump(file, {"f": code}, {"f": code}) == {}


def test_files_that_the_cell_leaves_open_are_written(kernel: Kernel, tmp_path: Path) -> None:
    isolated(kernel, f"file = open({str(tmp_path / 'text')!r}, 'w'); _ = file.write('text')")
    assert (tmp_path / "text").read_text() == "text"


# -- how it may die -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param(
            "os.kill(os.getpid(), 40)",
            r"was killed by 40 \(Real-time signal 6\)",
            id="a real-time signal",
        ),
        pytest.param(
            "ctypes.string_at(0)",
            r"was killed by SIGSEGV \(Segmentation fault\)",
            id="a segmentation fault",
        ),
        pytest.param("os.abort()", r"was killed by SIGABRT \(Aborted\)", id="an abort"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)", r"was killed by SIGKILL \(Killed\)", id="a kill"
        ),
        pytest.param("os._exit(3)", "ended itself with exit code 3", id="an exit code"),
        pytest.param(
            "os.closerange(3, 1000); os._exit(0)",
            "ended itself with exit code 0",
            id="closed descriptors",
        ),
        pytest.param(
            "class End:\n    def __reduce__(self): return os._exit, (6,)\nold = End()",
            "ended itself with exit code 6",
            id="an exit while a name is sent",
        ),
    ],
)
def test_a_childs_death_is_the_cells_error(code: str, message: str, kernel: Kernel) -> None:
    reply = run_failing(kernel, f"%%isolate --keep old\n{code}", "ChildProcessError")
    assert re.fullmatch(f"the cell's child process {message}; no name came back", reply.message)
    assert ('.py", line 2 in <module>' in reply.traceback) == (
        code in ("ctypes.string_at(0)", "os.abort()")
    )
    assert reply.displays[-1]["metadata"]["ipygpumem"]["reports"] == ["cell"]
    assert_goes_on(kernel)


def test_the_oom_killer_takes_the_child(kernel: Kernel) -> None:
    with limited_group(300 * 2**20) as group, Kernel() as kernel:
        run_cells(
            kernel,
            """
            %load_ext ipygpumem
            held = bytearray(b'1') * (100 << 20)
            """,
        )
        move(int(kernel.value("__import__('os').getpid()")), group)
        reply = run_failing(
            kernel,
            """
            %%isolate
            rows = []
            while True: rows.append(bytearray(b'1') * 2**20)
            """,
        )
        assert (
            "SIGKILL (Killed): the OOM killer ended it, because its control group's memory was "
            "used up" in (reply.message)
        )
        assert run_cells(kernel, "len(held)").result == str(100 << 20)


def test_a_name_that_takes_much_memory_is_loaded_after_the_child(kernel: Kernel) -> None:
    """The kernel's process is refused the memory while the child process has it, too."""
    run_cells(
        kernel,
        """
        pid = os.getpid()
        def when_alone():
            children = open(f'/proc/{pid}/task/{pid}/children').read()
            if os.getpid() == pid and children: raise MemoryError
            return 'loaded'
        class Large:
            def __reduce__(self): return when_alone, ()
        """,
    )
    reply = run_cells(
        kernel,
        """
        %%isolate --keep large shared small
        large, shared, small = Large(), [old], 3
        """,
    )
    assert reply.reports("note") == []
    assert run_cells(kernel, "large, shared[0] is old, small").result == "('loaded', False, 3)"


def test_an_interrupt_after_the_cells_code_loses_no_name(kernel: Kernel) -> None:
    late = textwrap.dedent(
        """\
        class Late:
            def __reduce__(self):
                signal.raise_signal(signal.SIGINT); return int, (7,)"""
    )
    run_cells(kernel, late)
    run_failing(
        kernel,
        """
        %%isolate --keep late plain
        late, plain = Late(), 5
        """,
        "KeyboardInterrupt",
    )
    assert run_cells(kernel, "late, plain").result == "(7, 5)"


def test_a_value_that_cannot_be_loaded_loses_no_other(kernel: Kernel) -> None:
    code = """
        class Two(Exception):
            def __init__(self, a, b): super().__init__(a)
        class Once:
            def __setstate__(self, state): raise SystemExit
        bad, worse, good, shared = Two(1, 2), Once(), bytearray(b'1') * (100 << 20), [old]
        worse.a = 1
    """
    reply = run_cells(kernel, f"%%isolate --keep bad worse old good shared{textwrap.dedent(code)}")
    lost = "\n".join(reply.reports("note"))
    assert [line.split(": ")[1:3] for line in lost.splitlines()] == [
        ["bad did not come back", "TypeError"],
        ["worse did not come back", "SystemExit"],
    ]
    assert run_cells(
        kernel, "len(good) >> 20, shared[0] is old, {'bad', 'worse'} & {*globals()}"
    ).result == ("(100, True, set())")
    run_cells(kernel, "del good, shared")


def test_large_values_are_not_in_memory_twice() -> None:
    """The file is freed while it is loaded."""
    with os.fdopen(os.memfd_create("test"), "w+b") as file:
        dump(file, {"large": bytearray(b"1") * (48 << 20), "small": list(range(10_000))}, {})
        blocks = os.fstat(file.fileno()).st_blocks
        values = dict[str, object]()
        load(file, values, 1)
        # Most blocks of the file are free again.
        assert os.fstat(file.fileno()).st_blocks < blocks // 8
        assert values.keys() == {"large"}


def test_a_second_ctrl_c_ends_the_loading_of_a_name(kernel: Kernel) -> None:
    """The names before it come back."""
    strike = "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)"
    run_cells(
        kernel,
        f"class Slow:\n    def __setstate__(self, state):\n        {strike}\n        "
        f"time.sleep(10**6)",
    )
    # the child process does not load as much
    code = "slow, first, last = Slow(), bytes(70 << 20), 2\nslow.a = 1"
    reply = run_failing(kernel, f"%%isolate --keep first slow last\n{code}", "KeyboardInterrupt")
    assert reply.message == "the cell's child process was ended by the second Ctrl-C"
    assert existing_names(kernel, "first", "slow", "last") == ["first"]


def test_a_pool_that_the_cell_deletes_still_works_in_the_kernel(kernel: Kernel) -> None:
    run_cells(
        kernel,
        "import multiprocessing; pool = multiprocessing.get_context('fork').Pool(2); pool.map(abs, "
        "[1])",
    )
    for _ in range(8):
        run_cells(
            kernel,
            """
            %%isolate
            del pool
            """,
        )
        assert run_cells(kernel, "pool.map_async(abs, [-5]).get(60)").result == "[5]"
    run_cells(kernel, "pool.terminate(); del pool")


def test_limits_end_the_cell(kernel: Kernel) -> None:
    grow = "rows = []\nwhile True: rows.append(bytearray(b'1') * 2**20)"
    reply = run_failing(kernel, f"%%isolate --memory 80MiB --keep old\n{grow}", "MemoryError")
    assert "the limit of 80 MiB (--memory) was reached" in reply.reports("note")[0]
    # About the limit of 80 MiB.
    assert 60 < mib_after(reply.reports("cell")[0], "child process peak") < 110
    assert (
        run_failing(kernel, "%%isolate --memory 80MiB\nraise MemoryError", "MemoryError").reports(
            "note"
        )
        == []
    )
    assert "%debug" not in "".join(reply.reports()), "the frames were those of the child process"
    reply = run_failing(
        kernel, f"%%isolate --time 0.5 --keep sleeper\n{GRANDCHILD}time.sleep(1000)", "TimeoutError"
    )
    assert (
        reply.message
        == "the cell's child process was ended after 500 ms (--time); no name came back"
    )
    assert_goes_on(kernel)


def test_a_child_that_ignores_ctrl_c_is_ended_by_the_second(kernel: Kernel) -> None:
    code = (
        "signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
        "print('now')\n"
    )
    reply = run_failing(
        kernel,
        f"%%isolate\n{code}while True: time.sleep(1)",
        "KeyboardInterrupt",
        interrupt_when="now",
    )
    assert reply.message == "the cell's child process was ended by the second Ctrl-C"
    assert_goes_on(kernel)


def test_processes_of_the_cell_end_with_it(kernel: Kernel) -> None:
    run_quietly(kernel, f"%%isolate --keep sleeper\n{GRANDCHILD}")
    pid = kernel.value("sleeper")
    states = [path.read_text().split()[2] for path in Path(f"/proc/{pid}").glob("stat")]
    assert states in ([], ["Z"])
    reply = run_quietly(
        kernel,
        """
        %%isolate
        if os.fork(): _ = os.wait()
        print('here')
        """,
    )
    assert reply.stdout.count("here") == 2


def test_the_record_has_the_childs_peak(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        import ipygpumem
        large = bytearray(b'1') * (100 << 20)
        """,
    )
    reply = run_quietly(
        kernel,
        """
        %%isolate
        other = bytearray(b'1') * (64 << 20)
        """,
    )
    record = CellRecord.from_dict(kernel.value("ipygpumem.last().to_dict()"))
    assert record.child_peak_bytes is not None
    # The block of 64 MiB, and what Python itself takes.
    assert 64 << 20 <= record.child_peak_bytes < 80 << 20
    assert 64 <= mib_after(reply.reports("cell")[0], "child process peak") < 80
    run_quietly(
        kernel,
        """
        %%isolate
        for place in range(0, len(large), 4096): large[place] = 0
        """,
    )
    # Writing to the 100 MiB has copied their pages.
    assert 100 << 20 <= kernel.value("ipygpumem.last().child_peak_bytes") < 120 << 20
    run_cells(kernel, "del large")


def test_garbage_of_the_kernel_stays_the_kernels(kernel: Kernel) -> None:
    """Finalizers remove files, end pools, and so on."""
    run_cells(
        kernel,
        """
        import gc; gc.disable()
        class Loop:
            def __del__(self): print('deleted')
        loop = Loop(); loop.itself = loop; del loop
        """,
    )
    assert run_quietly(kernel, "%%isolate\ngc.collect();").stdout == ""
    assert run_quietly(kernel, "gc.enable(); gc.collect();").stdout == "deleted\n"


# -- what a fork cannot use ---------------------------------------------------------------------


def test_libraries_whose_threads_are_lost_are_refused() -> None:
    """Torch's and scikit-learn's OpenMP threads are ended before the fork; polars
    has no such call.
    """
    code = "torch.randn(300, 300) @ torch.randn(300, 300)\ntorch.randn(2000, 300).exp().sum()\n"
    with Kernel(env={**os.environ, "OMP_NUM_THREADS": "2"}) as kernel:
        run_cells(
            kernel,
            "%load_ext ipygpumem",
            "import torch",
            code,
            "threads = torch.get_num_threads()",
        )

        # Parallel code works in the child, and in the notebook afterwards.
        run_quietly(
            kernel,
            f"%%isolate --time 300\n{code}assert torch.get_num_threads() == threads",
        )

        # Where the threads cannot be ended, the child has one.
        run_cells(
            kernel,
            f"from ipygpumem.extras.isolate import openmp\nopenmp._PAUSE = 'missing before GCC "
            f"9'\n{code}",
        )
        run_quietly(
            kernel,
            f"%%isolate --time 300\n{code}assert torch.get_num_threads() == 1",
        )

        # Without such a call, a cell with the library's names is refused.
        run_cells(
            kernel,
            """
            import polars
            frame = polars.DataFrame({'a': [1]})
            def total(): return frame.sum()
            """,
        )
        reply = run_failing(
            kernel,
            """
            %%isolate
            total()
            """,
            None,
        )
        assert "%%isolate: polars cannot be used in a forked child process" in reply.stderr
        run_quietly(
            kernel,
            """
            %%isolate
            1
            """,
        )


def test_isolate_is_refused_in_one_line_on_other_systems(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {"darwin": "other systems' libraries break in a fork", "win32": "Windows has no fork"}
    for platform, reason in reasons.items():
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", platform)
            loaded.run_cell("""
            %%isolate
            1
            """)
        assert f"%%isolate works on Linux only: {reason}" in capsys.readouterr().err


def test_isolate_works_in_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    try:
        terminal.press(b"%%isolate --keep y\rprint(input('na' + 'me? ')); y = 5\ry\x1b\r")
        terminal.watch(lambda: any("name?" in row for row in terminal.rows))
        terminal.press(b"Ada\r")
        terminal.await_prompt()
        assert {"Ada", "Out[2]: 5"} <= set(terminal.rows)

        # An interrupt ends the child's cell.
        terminal.press(b"%%isolate\rprint('wa' + 'its')\rimport time; time.sleep(1000)\x1b\r")
        terminal.watch(lambda: "waits" in terminal.rows)
        terminal.press(b"\x03")
        terminal.await_prompt()
        assert "KeyboardInterrupt: " in "\n".join(row + " " for row in terminal.rows)

        # The value that was kept is there.
        terminal.run("print(y + 1, sep='')")
        assert "6" in terminal.rows
    finally:
        terminal.close()
