"""Input that nobody wants, in real kernels: each gets one clear line or simply works, and the next cell runs."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import Kernel, Reply

FRESH = "%reset -f\n%reload_ext ipygpumem"


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[Kernel]]:
    """One kernel that the tests of this module share; a test that breaks it takes it out of the list."""
    alive: list[Kernel] = []
    yield alive
    for kernel in alive:
        kernel.close()


@pytest.fixture
def notebook(kernels: list[Kernel]) -> Iterator[Kernel]:
    """A kernel with the extension loaded, nothing open and no names; after a broken test a new one."""
    if kernels and not _is_well(kernels[0]):
        kernels.pop().close()
    if not kernels:
        kernels.append(Kernel())
        assert kernels[0].run("%load_ext ipygpumem").status == "ok"
    return kernels[0]


def _is_well(kernel: Kernel) -> bool:
    try:
        return kernel.run(FRESH, timeout=15).status == "ok"
    except (TimeoutError, queue.Empty):
        return False


def run(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell in which nothing of ours may fail, whatever the user's code does."""
    reply = kernel.run(code, **options)
    for noise in ("steps aside", "Error in callback", "/ipygpumem/"):
        assert noise not in reply.stderr + reply.stdout + reply.traceback, (code, reply.stderr, reply.traceback)
    return reply


def works(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must succeed."""
    reply = run(kernel, code, **options)
    assert reply.status == "ok", (code, reply.message, reply.stderr, reply.traceback)
    return reply


def goes_on(kernel: Kernel) -> None:
    """The kernel's next cell runs, shows its result and its one line."""
    reply = works(kernel, "6 * 7")
    assert reply.result == "42"
    assert len(reply.reports("cell")) == 1


def refused(kernel: Kernel, code: str) -> str:
    """Run a cell that must end with one line of ``UsageError``; return that line."""
    reply = run(kernel, code)
    assert reply.status == "error"
    (line,) = reply.stderr.strip().splitlines()
    assert line.startswith("UsageError: ")
    goes_on(kernel)
    return line


def names(kernel: Kernel) -> list[str]:
    """The user's names, as %who_ls gives them."""
    found: list[str] = kernel.value("get_ipython().run_line_magic('who_ls', '')")
    return found


def open_now(kernel: Kernel) -> str:
    """What ``%experiment status`` says."""
    (text,) = works(kernel, "%experiment status").reports("note")
    return text


# -- a line that is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("%experiment", "a command is missing"),
        ("%experiment bogus", "bogus"),
        ("%experiment end", "no experiment is open"),
        ("%experiment end nothing", "no experiment is open"),
        ("%experiment keep x", "no experiment is open"),
        ("%experiment start", "name"),
        ("%%experiment\nx = 1", "name"),
        ("%%experiment --keep x\nx = 1", "name"),
        ("%experiment start a --bogus", "--bogus"),
        ("%%experiment a --bogus 3\nx = 1", "--bogus"),
        ("%experiment start a --help", "--help"),
        ("%experiment start a --see 1", "--see"),
        ("%experiment start a --seed x", "--seed"),
        ("%experiment start a --seed", "--seed"),
        ("%experiment start a --seed 1.5", "--seed"),
        ("%experiment start a --report loud", "--report"),
        ("%experiment start a --keep", "--keep"),
        ("%experiment start a --keep 'x y'", "x y"),
        ("%experiment start a --keep '<b>'", "<b>"),
        ("%experiment start don't", "quotation"),
        ("%%experiment 'unclosed\nx = 1", "quotation"),
        ("%gpumem", "on"),
        ("%gpumem bogus", "status"),
        ("%gpumem on off", "status"),
        ("%gpumem 'on", "quotation"),
    ],
)
def test_a_wrong_line_gets_one_line_that_names_the_mistake_and_opens_nothing(
    notebook: Kernel, line: str, part: str
) -> None:
    assert part in refused(notebook, line)
    assert "no experiment is open" in open_now(notebook)
    assert "x" not in names(notebook)


@pytest.mark.parametrize("seed", ["99999999999999999999999999", "-99999999999999999999999999"])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_is_open(notebook: Kernel, seed: str) -> None:
    assert "seed" in refused(notebook, f"%%experiment a --seed {seed}\nx = 1")
    assert "seed" in refused(notebook, f"%experiment start a --seed {seed}")
    assert "no experiment is open" in open_now(notebook)
    assert "x" not in names(notebook)


def test_a_negative_seed_works(notebook: Kernel) -> None:
    works(notebook, "import random, numpy\nseen = []")
    for _ in range(2):
        works(
            notebook,
            "%%experiment a --seed -3\nseen.append((random.random(), float(numpy.random.rand())))",
        )
    assert notebook.value("seen[0] == seen[1]") is True


@pytest.mark.parametrize(
    "call",
    [
        "experiment(7)",
        "experiment(None)",
        "experiment('')",
        "experiment('a', keep=[1])",
        "experiment('a', keep=3)",
        "experiment('a', seed='x')",
        "experiment('a', seed=1 << 80)",
        "experiment('a', report='loud')",
    ],
)
def test_a_wrong_argument_in_python_is_refused_when_it_is_given_and_loses_no_name(notebook: Kernel, call: str) -> None:
    works(notebook, "import ipygpumem\nx = 'old'\ndef attempt():\n    return ipygpumem." + call + ".start()")
    reply = run_ours(notebook, "handle = attempt()\nx = 'new'")
    assert reply.error in ("ExperimentError", "TypeError", "ValueError"), reply
    assert "no experiment is open" in open_now(notebook)
    assert notebook.value("x") == "old"
    goes_on(notebook)


def run_ours(kernel: Kernel, code: str) -> Reply:
    """Run a cell whose error comes from our own Python functions: the traceback may name our files."""
    reply = kernel.run(code)
    assert "steps aside" not in reply.stderr
    return reply


def test_an_experiment_is_started_once_and_finished_as_often_as_one_likes(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem\ne = ipygpumem.experiment('once').start()")
    works(notebook, "assert e.finish() is e.finish()")
    assert run_ours(notebook, "e.start()").error == "ExperimentError"
    assert run_ours(notebook, "ipygpumem.experiment('never').finish()").error == "ExperimentError"
    assert run_ours(notebook, "ipygpumem.experiment('never').usage()").error == "ExperimentError"
    goes_on(notebook)


# -- names that are no identifiers ----------------------------------------------------------------------------------

NASTY = "<script>alert(1)</script><b>&amp;\x1b[31mred\x07 {x} $y {{jinja}} %s %(a)s \u202e\ud7ff na\u00efve"


def _is_harmless(reply: Reply) -> None:
    for display in reply.displays:
        html, text = display["data"].get("text/html", ""), display["data"]["text/plain"]
        assert "<script" not in html
        assert "<b>" not in html
        for letter in ("\x1b", "\x07", "\u202e"):
            assert letter not in html + text


def test_a_name_with_html_and_control_characters_is_escaped_in_every_report(notebook: Kernel) -> None:
    works(
        notebook,
        f"import ipygpumem\nnasty = {NASTY!r}\ndef start(**options):\n"
        "    ipygpumem.experiment(nasty, **options).start()",
    )
    for style in ("full", "compact"):
        works(notebook, f"start(report={style!r})\nx = 1")
        status = works(notebook, "%experiment status")
        _is_harmless(status)
        assert "script" in status.displays[0]["data"]["text/html"]
        _is_harmless(works(notebook, "%gpumem status"))
        end = works(notebook, "%experiment end")
        _is_harmless(end)
        assert "&lt;script&gt;" in "".join(display["data"]["text/html"] for display in end.displays)
    assert notebook.value("ipygpumem.experiments()[-1].name == nasty") is True
    goes_on(notebook)


def test_a_magic_takes_any_words_as_a_name(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment lr=0.1 <b>bold</b> 3.5 'two words' class\nx = 1")
    assert "experiment lr=0.1 <b>bold</b> 3.5 two words class" in reply.reports("experiment")[0]
    _is_harmless(reply)
    assert "x" not in names(notebook)


def test_names_made_of_nasty_text_are_escaped_wherever_a_report_lists_them(notebook: Kernel) -> None:
    works(notebook, "import numpy as np\nleak = []")
    reply = works(
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
    (text,) = reply.reports("experiment")
    assert "still alive" in text
    assert "alert(1)" in text
    assert notebook.value("[n for n in globals() if 'script' in str(n) or n == '']") == []
    works(notebook, "del globals()[5], globals()[('t', 1)]")
    failed = run(
        notebook,
        f"nasty = {NASTY!r}\n"
        "code = compile('def f():\\n    t = np.ones(1 << 20)\\n    raise MemoryError(nasty)', '<s>', 'exec')\n"
        "exec(code)\nf.__code__ = f.__code__.replace(co_name=nasty, co_varnames=(nasty,))\nf()",
    )
    assert failed.error == "MemoryError"
    _is_harmless(failed)
    assert "alert(1)" in failed.reports("recovery")[0]
    goes_on(notebook)


def test_a_wrong_line_with_control_characters_does_not_write_over_the_terminal(notebook: Kernel) -> None:
    for line in ("%experiment end \x1b[31mred", "%experiment start a --\x1b[31mred", "%experiment \x1b[31mred"):
        assert "\x1b[31mred" not in notebook.run(line).stderr
    goes_on(notebook)


# -- keep -----------------------------------------------------------------------------------------------------------


def test_keep_of_a_name_that_does_not_exist_is_said_and_harms_nothing(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment a --keep missing --keep 'no*' --keep here\nhere, gone = 1, 2")
    (text,) = reply.reports("experiment")
    assert "no name matches 'missing'" in text
    assert "no name matches 'no*'" in text
    assert "'here'" not in text
    assert names(notebook) == ["here"]


def test_keep_of_a_name_that_the_scope_deleted_is_said(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment a --keep x\nx = 1\ndel x")
    assert "no name matches 'x'" in reply.reports("experiment")[0]
    assert names(notebook) == []


# -- the wrong order ------------------------------------------------------------------------------------------------


def test_ending_an_outer_scope_by_name_ends_those_inside_it_first(notebook: Kernel) -> None:
    works(notebook, "x = 0")
    for name in ("a", "b", "c"):
        works(notebook, f"%experiment start {name}")
        works(notebook, f"x = {name!r}; {name} = 1")
    reply = works(notebook, "%experiment end a")
    titles = [text for text in reply.reports("experiment")[0].splitlines() if text.startswith("experiment ")]
    assert [title.split(" ")[1] for title in titles] == ["c", "b", "a"]
    assert notebook.value("x") == 0
    assert names(notebook) == ["x"]
    assert "no experiment is open" in refused(notebook, "%experiment end b")


def test_ending_a_scope_that_is_not_open_names_those_that_are(notebook: Kernel) -> None:
    works(notebook, "%experiment start a\n%experiment start b")
    line = refused(notebook, "%experiment end z")
    assert "'z'" in line
    assert "'a'" in line
    assert "'b'" in line
    works(notebook, "%experiment end\n%experiment end")


def test_python_scopes_finished_in_the_wrong_order_give_all_names_back(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem\nx = 'old'")
    works(notebook, "a = ipygpumem.experiment('a').start()\nx = 'a'")
    works(notebook, "b = ipygpumem.experiment('b').start()\nx = 'b'; y = 1")
    works(notebook, "a.finish()")
    works(notebook, "ipygpumem.experiments()[-1].name == 'a' or 1/0")
    works(notebook, "z = 1")
    assert notebook.value("x") == "old"
    assert "y" not in names(notebook)
    assert "z" in names(notebook)
    assert "no experiment is open" in open_now(notebook)


def test_with_blocks_left_in_the_wrong_order_end_each_scope_once(notebook: Kernel) -> None:
    works(
        notebook,
        "import ipygpumem\n"
        "outer, inner = ipygpumem.experiment('outer'), ipygpumem.experiment('inner')\n"
        "outer.__enter__(); x = 1; inner.__enter__(); y = 2\n"
        "outer.__exit__(None, None, None); inner.__exit__(None, None, None)\n"
        "found = [record.name for record in ipygpumem.experiments()]",
    )
    assert notebook.value("found") == ["inner", "outer"]
    assert not {"x", "y"} & set(names(notebook))


def test_a_cell_scope_that_ends_itself_ends_once(notebook: Kernel) -> None:
    works(notebook, "x = 'old'")
    reply = works(notebook, "%%experiment a\nx = 1\n%experiment end\ny = x")
    assert len(reply.reports("experiment")) == 1
    assert notebook.value("y") == "old"


def test_a_cell_scope_that_leaves_another_open_ends_both(notebook: Kernel) -> None:
    works(notebook, "%%experiment a\nx = 1\n%experiment start b\ny = 2")
    assert names(notebook) == []
    assert "no experiment is open" in open_now(notebook)


def test_starting_a_name_that_is_open_finishes_it_with_all_inside(notebook: Kernel) -> None:
    works(notebook, "%experiment start a\n%experiment start b")
    works(notebook, "x = 1")
    reply = works(notebook, "%experiment start a")
    assert "experiment b" in reply.reports("experiment")[0]
    assert names(notebook) == []
    works(notebook, "%experiment end")
    assert "no experiment is open" in open_now(notebook)


# -- errors inside --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("y = (", "SyntaxError"),
        ("if True:\ny = 1", "IndentationError"),
        ("y = 1\n1/0", "ZeroDivisionError"),
        ("y = 1\nraise SystemExit(3)", "SystemExit"),
        ("y = 1\nraise KeyboardInterrupt", "KeyboardInterrupt"),
        ("y = 1\nraise GeneratorExit", "GeneratorExit"),
        ("y = 1\n%nosuchmagic", None),
        ("y = 1\nraise type('E', (Exception,), {'__str__': lambda s: 1/0})()", None),
        ("y = '\\ud800'\nraise ValueError(y)", None),
        ("return 5", "SyntaxError"),
        ("y = 1\nraise BaseException()", "BaseException"),
    ],
)
def test_an_error_ends_a_cell_scope_and_leaves_a_started_one_open(
    notebook: Kernel, body: str, error: str | None
) -> None:
    works(notebook, "x = 'old'")
    assert run(notebook, f"%%experiment a\nx = 'new'\n{body}").status == "error"
    assert "no experiment is open" in open_now(notebook)
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    works(notebook, "%experiment start b")
    reply = run(notebook, f"x = 'new'\n{body}")
    assert reply.status == "error"
    assert error is None or reply.error == error
    assert "experiment b" in open_now(notebook)
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    goes_on(notebook)


def test_the_traceback_of_a_cell_scope_shows_the_right_line(notebook: Kernel) -> None:
    reply = run(notebook, "%%experiment a\nx = 1\ny = 2\n1/0")
    assert "line 4" in reply.traceback or "----> 4" in reply.traceback or ":4" in reply.traceback


def test_an_exit_in_a_scope_loses_nothing(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nimport sys")
    assert run(notebook, "%%experiment a\nx = 'new'\nsys.exit(2)").error == "SystemExit"
    assert (notebook.value("x"), names(notebook)) == ("old", ["sys", "x"])
    goes_on(notebook)


# -- Ctrl-C ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_cell_scope_ends_it_and_in_a_started_one_leaves_it_open(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nimport time")
    reply = run(notebook, "%%experiment a\nx = 'new'\ntime.sleep(60)", interrupt_after=0.3)
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("x") == "old"
    works(notebook, "%experiment start b")
    assert run(notebook, "x = 'new'\ntime.sleep(60)", interrupt_after=0.3).error == "KeyboardInterrupt"
    assert notebook.value("x") == "new"
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    goes_on(notebook)


@pytest.mark.parametrize("how", ["%experiment end", "e.finish()"])
def test_ctrl_c_in_a_finaliser_during_the_exit_loses_no_name(notebook: Kernel, how: str) -> None:
    works(
        notebook,
        "import time, ipygpumem\nclass Slow:\n    def __del__(self): time.sleep(1.0)\nold = 'old'\ne = None",
    )
    works(notebook, "e = ipygpumem.experiment('a').start()\na = 1\nslow = Slow()\nold = 'new'\nz = 2")
    notebook.run(how, interrupt_after=0.3)
    finish_all(notebook)
    assert notebook.value("old") == "old"
    assert not {"a", "z", "slow"} & set(names(notebook))
    goes_on(notebook)


def finish_all(kernel: Kernel) -> None:
    """End what is open still, as a user would after an interrupted exit: with ``%experiment end``."""
    for _ in range(5):
        if "no experiment is open" in open_now(kernel):
            return
        works(kernel, "%experiment end")
    pytest.fail("an experiment cannot be ended")


def test_a_pending_ctrl_c_that_strikes_in_the_exit_itself_is_mended_by_another_end(notebook: Kernel) -> None:
    works(
        notebook,
        "import _thread\n"
        "class Bomb:\n    __del__ = staticmethod(_thread.interrupt_main)  # strikes after the finaliser, in our code\n"
        "old = 'old'",
    )
    works(notebook, "%experiment start a")
    works(notebook, "a = 1\nbomb = Bomb()\nold = 'new'\nz = 2")
    reply = notebook.run("%experiment end")
    assert reply.error == "KeyboardInterrupt"
    assert "experiment a" in open_now(notebook)
    finish_all(notebook)
    assert notebook.value("old") == "old"
    assert not {"a", "z", "bomb"} & set(names(notebook))
    # The same at the end of a cell: the cell is over, its scope is not.
    reply = notebook.run("%%experiment b\nbomb = Bomb()\nold = 'new'\nz = 2")
    assert any("%experiment end" in text for text in reply.reports("note")), reply
    assert "steps aside" not in reply.stderr
    finish_all(notebook)
    assert notebook.value("old") == "old"
    assert "z" not in names(notebook)
    goes_on(notebook)


INTERRUPT_EVERY_LINE = '''
import sys, ipygpumem, ipygpumem.reclaim as reclaim
from ipygpumem.notebook.session import current_session

def interrupt_every_line(limit):
    """Finish nested scopes with a Ctrl-C at the n-th line of our own code, for every n; return what was lost."""
    shell, session = get_ipython(), current_session()
    space, report = shell.user_ns, session.config.report
    steps, reclaim.memory_steps = reclaim.memory_steps, lambda: []
    session.config.report = False
    problems, where = [], None
    ours = ("scope.py", "reclaim.py", "outputs.py", "experiments.py", "session.py", "inventory.py")

    def finish_with_interrupt(experiment, n):
        count = 0
        def trace(frame, event, argument):
            nonlocal count, where
            if not frame.f_code.co_filename.endswith(ours) or "ipygpumem" not in frame.f_code.co_filename:
                return None
            if event == "line":
                count += 1
                if count == n:
                    where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return trace
        sys.settrace(trace)
        try:
            experiment.finish()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    n = 0
    while n < limit:
        n += 1
        space.update(t_old="old", t_keep="old")
        outer = ipygpumem.experiment("outer", report="none").start()
        shell.run_cell("t_old = 1; t_keep = 1; t_new = []", store_history=False)
        inner = ipygpumem.experiment("inner", keep="t_keep", report="none").start()
        shell.run_cell("t_old = 2; t_keep = 2; t_new2 = []", store_history=False)
        interrupted = finish_with_interrupt(outer, n)
        for _ in range(4):
            if not session.open:
                break
            try:
                shell.run_line_magic("experiment", "end")
            except BaseException as error:
                problems.append((n, where, f"end: {type(error).__name__}: {error}"))
                break
        if session.open:
            problems.append((n, where, "still open: " + ", ".join(e.name for e in session.open)))
            session.open.clear()
        found = {name: space.pop(name, "gone") for name in ("t_old", "t_keep", "t_new", "t_new2")}
        if found != {"t_old": "old", "t_keep": "old", "t_new": "gone", "t_new2": "gone"}:
            problems.append((n, where, str(found)))
        if not interrupted:
            break
    reclaim.memory_steps, session.config.report = steps, report
    return n, problems
'''


def test_an_exit_interrupted_at_any_line_of_our_code_is_finished_by_another_end(notebook: Kernel) -> None:
    works(notebook, INTERRUPT_EVERY_LINE)
    works(notebook, "lines, problems = interrupt_every_line(5000)", timeout=300)
    assert notebook.value("lines") in range(100, 5000)
    assert notebook.value("problems") == []
    goes_on(notebook)


# -- hostile objects ------------------------------------------------------------------------------------------------

HOSTILE = '''
import sys
touched = []

def touch(what):
    """Record a call that came through ipygpumem, and raise; other callers (IPython) just get the error."""
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ipygpumem"):
            touched.append(what)
            break
        frame = frame.f_back
    raise RuntimeError("hands off")

def trap(name):
    def method(*args, **kwargs):
        touch(name)
    return method

NAMES = """__repr__ __str__ __eq__ __ne__ __hash__ __bool__ __len__ __iter__ __getattr__ __getattribute__ __format__
__sizeof__ __reduce__ __reduce_ex__ __dir__ __contains__ __getitem__ __call__ __index__ __int__ __lt__ __array__
__enter__ __instancecheck__ __subclasscheck__ __setattr__ __delattr__ __array_interface__ __torch_function__
__iter__ __next__ __missing__ __copy__ __deepcopy__ __get__""".split()
body = {name: trap(name) for name in NAMES}
hostile_class = property(trap("__class__"))

class Meta(type):
    __name__ = property(trap("type.__name__"))
    __module__ = property(trap("type.__module__"))
    __repr__ = trap("type.__repr__"); __eq__ = trap("type.__eq__"); __hash__ = trap("type.__hash__")
    __bool__ = trap("type.__bool__"); __len__ = trap("type.__len__"); __iter__ = trap("type.__iter__")
    __instancecheck__ = trap("__instancecheck__"); __subclasscheck__ = trap("__subclasscheck__")
    __getattribute__ = trap("type.__getattribute__")

Hostile = Meta("Hostile", (), dict(body, __class__=hostile_class))
Container = Meta("Container", (dict,), dict(body, __class__=hostile_class))
Sequence = Meta("Sequence", (list,), dict(body, __class__=hostile_class))
Function = type("Function", (), {"__call__": trap("__call__"), "__getattribute__": trap("__getattribute__")})
'''


def test_no_method_of_a_users_object_is_called_at_exit_in_status_or_in_reports(notebook: Kernel) -> None:
    works(notebook, HOSTILE)
    works(notebook, "import numpy as np\nold = object.__new__(Hostile)")
    works(notebook, "%experiment start a --keep kept")
    works(
        notebook,
        "a = object.__new__(Hostile)\n"
        "b = dict.__new__(Container); dict.__setitem__(b, 'k', np.ones(1 << 19))\n"
        "c = list.__new__(Sequence); list.append(c, a)\n"
        "old = object.__new__(Hostile)\n"
        "kept = object.__new__(Hostile)\n"
        "d = [a, {'x': (a, b)}, Function()]\n"
        "Array = type('Array', (np.ndarray,), body)\n"
        "e = np.ndarray.__new__(Array, 1 << 19)\n"
        "f = Hostile",
    )
    works(notebook, "%experiment status")
    works(notebook, "%gpumem status")
    reply = works(notebook, "%experiment end")
    assert "deleted: " in reply.reports("experiment")[0]
    assert notebook.value("touched") == []
    assert not {"a", "b", "c", "d", "e", "f"} & set(names(notebook))
    assert notebook.value("type.__subclasscheck__(Hostile, type(old))") is True
    goes_on(notebook)


def test_no_method_of_a_users_object_is_called_after_an_oom(notebook: Kernel) -> None:
    works(notebook, HOSTILE)
    works(notebook, "import numpy as np\nold = object.__new__(Hostile)")
    works(
        notebook,
        "class Oom(MemoryError):\n"
        "    __str__ = trap('__str__'); __repr__ = trap('__repr__'); __eq__ = trap('__eq__')\n"
        "    __bool__ = trap('__bool__')\n"
        "    __len__ = trap('__len__'); args = property(trap('args')); __hash__ = trap('__hash__')\n"
        "    __getattribute__ = trap('__getattribute__')\n"
        "def fail():\n"
        "    Array = type('Array', (np.ndarray,), body)\n"
        "    array = np.ndarray.__new__(Array, 1 << 20)\n"
        "    thing = object.__new__(Hostile); box = dict.__new__(Container); row = list.__new__(Sequence)\n"
        "    list.append(row, thing); error = Oom((1, 2), thing)\n"
        "    BaseException.__setattr__(error, 'thing', thing)\n"
        "    raise error",
    )
    reply = run(notebook, "fail()")
    assert reply.status == "error"
    (text,) = reply.reports("recovery")
    assert "array" in text
    assert "Array" in text
    assert notebook.value("touched") == []
    goes_on(notebook)


def test_finalisers_that_raise_or_replace_names_do_not_stop_an_exit(notebook: Kernel) -> None:
    works(
        notebook,
        "class Raises:\n    def __del__(self): raise ValueError('from __del__')\n"
        "class Exits:\n    def __del__(self): raise SystemExit(4)\n"
        "class Deletes:\n    def __del__(self): globals().pop('zz', None); globals().pop('old2', None)\n"
        "class Adds:\n    def __del__(self): globals()['late'] = 1\n"
        "old, old2 = 'old', 'old2'",
    )
    works(notebook, "%experiment start a")
    works(notebook, "a, b, c, d = Raises(), Exits(), Deletes(), Adds()\nzz = 1\nold = 'new'")
    notebook.run("%experiment end")
    assert "no experiment is open" in open_now(notebook)
    assert notebook.value("old") == "old"
    assert not {"a", "b", "c", "d", "zz"} & set(names(notebook))
    goes_on(notebook)


def test_a_cycle_whose_finaliser_makes_new_garbage_does_not_keep_an_exit_busy(notebook: Kernel) -> None:
    works(
        notebook,
        "class Phoenix:\n    def __init__(self): self.me = self\n    def __del__(self): Phoenix()\nimport gc",
    )
    works(notebook, "%%experiment a\np = Phoenix()", timeout=30)
    works(notebook, "del Phoenix.__del__\ngc.collect()")
    goes_on(notebook)


# -- the user's names are the user's --------------------------------------------------------------------------------


def test_users_names_like_ours_are_ordinary_names(notebook: Kernel) -> None:
    ours = "ipygpumem experiment experiments exp meter session scope shell reclaim last history gpumem Session cell"
    works(notebook, "".join(f"{name} = 'old {name}'\n" for name in ours.split()))
    works(notebook, "%experiment start a")
    works(notebook, "".join(f"{name} = 'new {name}'\n" for name in ours.split()))
    works(notebook, "%gpumem status")
    works(notebook, "%experiment end")
    assert notebook.value(f"[globals()[n] == 'old ' + n for n in {ours.split()!r}].count(True)") == len(ours.split())
    works(notebook, "".join(f"del {name}\n" for name in ours.split()))
    works(notebook, "%%experiment b\n" + "".join(f"{name} = 1\n" for name in ours.split()))
    assert names(notebook) == []
    goes_on(notebook)


def test_users_own_underscore_is_back_and_a_scopes_one_is_gone(notebook: Kernel) -> None:
    works(notebook, "_ = 'translate'")
    works(notebook, "%%experiment a\nfor _ in range(3): pass\n_, __ = [], 5")
    assert notebook.value("_") == "translate"
    works(notebook, "del _")
    works(notebook, "%reset -f")
    works(notebook, "%%experiment a\nfor _ in range(3): pass")
    assert notebook.value("_") == ""


@pytest.mark.parametrize("name", ["Out", "In", "_oh", "_ih", "_dh", "get_ipython", "exit", "_i", "__name__"])
def test_deleting_or_replacing_ipythons_own_names_in_a_scope_breaks_nothing(notebook: Kernel, name: str) -> None:
    works(notebook, "x = 'old'")
    works(notebook, "%experiment start a")
    notebook.run(f"x = 'new'\ndel {name}")
    notebook.run("1 + 1")
    notebook.run("from IPython import get_ipython as g\ng().run_line_magic('experiment', 'end')")
    assert notebook.value("x") == "old"
    works(notebook, "%reset -f\nfrom IPython import get_ipython")
    works(notebook, "x = 'old'")
    works(notebook, "%experiment start a")
    notebook.run(f"x = 'new'\n{name} = 5")
    notebook.run("1 + 1")
    notebook.run("from IPython import get_ipython as g\ng().run_line_magic('experiment', 'end')")
    assert notebook.value("x") == "old"
    works(notebook, "from IPython import get_ipython\n_oh, __name__ = {}, '__main__'\n%reset -f")
    goes_on(notebook)


def test_threads_that_add_and_remove_names_during_an_exit_do_not_stop_it(notebook: Kernel) -> None:
    works(
        notebook,
        "import threading\nold = 'old'\nstop = threading.Event()\ncounts = [0]\n"
        "def churn():\n"
        "    space, number = globals(), 0\n"
        "    while not stop.is_set():\n"
        "        number += 1\n"
        "        space[f'churn{number % 500}'] = number\n"
        "        space.pop(f'churn{(number + 250) % 500}', None)\n"
        "        counts[0] = number\n"
        "threads = [threading.Thread(target=churn) for _ in range(2)]",
    )
    works(notebook, "for thread in threads: thread.start()")
    for _ in range(2):
        works(notebook, "%experiment start a")
        works(notebook, "x = 1; old = 'new'")
        works(notebook, "%experiment status")
        works(notebook, "%experiment end")
        assert notebook.value("old") == "old"
        assert "x" not in names(notebook)
    works(notebook, "stop.set()\nfor thread in threads: thread.join()")
    assert notebook.value("counts[0] > 100") is True
    goes_on(notebook)


# -- what IPython offers --------------------------------------------------------------------------------------------


def test_reset_in_a_scope_deletes_the_names_and_the_scope_ends_well(notebook: Kernel) -> None:
    works(notebook, "old = 'old'; other = 1")
    works(notebook, "%experiment start a")
    works(notebook, "old = 'new'; x = 1")
    works(notebook, "%reset -f")
    works(notebook, "y = 2\ny")
    works(notebook, "%experiment end")
    # The user deleted what was there. What was shadowed is not lost all the same.
    assert names(notebook) in ([], ["old"])
    goes_on(notebook)


def test_outputs_after_a_reset_in_a_scope_are_gone_at_its_end(notebook: Kernel) -> None:
    for number in range(6):
        works(notebook, f"{number}")
    works(notebook, "import weakref\nclass Thing: pass\nrefs = []")
    works(notebook, "%experiment start a")
    works(notebook, "%reset -f")
    works(
        notebook,
        "import weakref, builtins\nclass Thing: pass\nthing = Thing()\nbuiltins.test_ref = weakref.ref(thing)\nthing",
    )
    works(notebook, "7 * 7")
    works(notebook, "%experiment end")
    assert notebook.value("__import__('builtins').test_ref() is None") is True
    assert notebook.value("Out") == {}
    goes_on(notebook)


def test_reset_out_in_and_after_a_scope_loses_no_name(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nx")
    works(notebook, "%experiment start a")
    works(notebook, "x = [1]\nx")
    works(notebook, "%reset -f out")
    works(notebook, "x")
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    assert notebook.value("Out") == {}
    goes_on(notebook)


def test_loading_twice_changes_nothing_and_shows_one_line(notebook: Kernel) -> None:
    works(notebook, "%experiment start a\nx = 1")
    works(notebook, "%load_ext ipygpumem")
    works(notebook, "import ipygpumem\nipygpumem.load_ipython_extension(get_ipython())")
    assert "experiment a" in open_now(notebook)
    goes_on(notebook)
    works(notebook, "%experiment end")


def test_reloading_with_open_scopes_leaves_their_names_and_says_so(notebook: Kernel) -> None:
    works(notebook, "%experiment start a\n%experiment start b")
    works(notebook, "x = 1")
    reply = works(notebook, "%reload_ext ipygpumem")
    assert "'a'" in reply.stderr
    assert "'b'" in reply.stderr
    assert "x" in names(notebook)
    assert "no experiment is open" in open_now(notebook)
    goes_on(notebook)


def test_unloading_inside_a_cell_scope_leaves_the_names_and_loading_again_works(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment a\nx = 1\n%unload_ext ipygpumem\ny = 2")
    assert "'a'" in reply.stderr
    assert names(notebook) == ["x", "y"]
    assert notebook.run("1").reports() == []
    assert notebook.run("%experiment status").status == "error"
    works(notebook, "%load_ext ipygpumem")
    goes_on(notebook)


def test_unloading_inside_a_with_block_does_not_fail_the_block(notebook: Kernel) -> None:
    reply = notebook.run(
        "import ipygpumem\n"
        "with ipygpumem.experiment('a'):\n    x = 1\n    get_ipython().run_line_magic('unload_ext', 'ipygpumem')\ny = 2"
    )
    assert reply.status == "ok" or reply.error == "ExperimentError"
    assert "x" in names(notebook)
    works(notebook, "%load_ext ipygpumem")
    goes_on(notebook)


def test_unloading_works_after_the_user_cleared_ipythons_callbacks_and_lists() -> None:
    kernel = Kernel()
    try:
        works(kernel, "%load_ext ipygpumem")
        works(
            kernel,
            "ip = get_ipython()\nip.events.callbacks['post_run_cell'].clear()\n"
            "ip.events.callbacks['pre_run_cell'].clear()\n"
            "ip.ast_transformers.clear(); ip.input_transformers_cleanup.clear()\n"
            "ip.magics_manager.magics['line'].pop('experiment')",
        )
        reply = works(kernel, "%unload_ext ipygpumem")
        assert all(line.startswith("ipygpumem: unloading: ") for line in reply.stderr.splitlines())
        works(kernel, "%load_ext ipygpumem")
        works(kernel, "2")
        works(kernel, "%experiment start a\n%experiment end")
    finally:
        kernel.close()


@pytest.mark.parametrize(
    "code",
    [
        "",
        " ",
        "\n\n",
        "# only a comment",
        "pass;",
        "1;",
        "%%experiment a",
        "%%experiment a\n",
        "%%experiment a\n  \n\n",
        "%%experiment a\n# a comment",
        "\n\n%%experiment a\nx = 1",
        "%%experiment a\nx = 1;",
        "%%experiment a\r\nx = 1\r\n",
        "%%experiment\ta\nx = 1",
    ],
)
def test_cells_with_little_in_them_run(notebook: Kernel, code: str) -> None:
    works(notebook, code)
    assert names(notebook) == []
    assert "no experiment is open" in open_now(notebook)
    goes_on(notebook)


def test_silent_and_unrecorded_cells_run_in_a_scope(notebook: Kernel) -> None:
    works(notebook, "x = 'old'; y = 'old'")
    works(notebook, "%experiment start a")
    works(notebook, "x = 1\nx", silent=True)
    works(notebook, "y = 2\ny", store_history=False)
    works(notebook, "%experiment end")
    assert notebook.value("y") == "old"
    refused_silently = notebook.run("%%experiment b\nz = 1", silent=True)
    assert refused_silently.status == "error"
    assert "z" not in names(notebook)
    goes_on(notebook)


@pytest.mark.parametrize(
    ("code", "restored"),
    [
        ("%%capture out\nx = 1\nn = 2\nprint('hidden')", True),
        ("%%time\nx = 1\nn = 2", True),
        ("%time x = 1; n = 2", True),
        ("%%capture\n%%time\nx = 1\nn = 2", True),
        ("get_ipython().run_cell('x = 1; n = 2')", True),
        ("exec('n = 1')", True),
        ("%run -i SCRIPT", False),
        ("%run SCRIPT", False),
        ("%timeit -n 2 -r 1 n = 1", True),
        ("%%timeit -n 2 -r 1\nn = 1", True),
        ("globals()['n'] = 1", True),
        ("n = !echo hi", True),
        ("!echo hi", True),
        ("%%bash\necho hi", True),
        ("%%python\nx = 1", True),
        ("import numpy.linalg as n", True),
        ("n = lambda: (yield)\nn = [n for n in range(3)]", True),
    ],
)
def test_code_that_runs_through_a_magic_is_the_scopes_too(
    notebook: Kernel, tmp_path: Path, code: str, restored: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\nn = 2\n")
    code = code.replace("SCRIPT", str(script))
    works(notebook, "x = 'old'")
    works(notebook, "%experiment start a --drop-imports")
    works(notebook, code)
    works(notebook, "%experiment end")
    assert names(notebook) == ["x"]
    if restored:
        assert notebook.value("x") == "old"
    goes_on(notebook)
    works(notebook, f"%%experiment b --drop-imports\n{code}")
    assert names(notebook) == ["x"]
    goes_on(notebook)


def test_rerun_macro_and_recalled_cells_are_the_scopes_too(notebook: Kernel) -> None:
    works(notebook, "x = 'old'")
    count = int(works(notebook, "get_ipython().execution_count").result or 0)
    works(notebook, "x = 'inner'; n = 1")
    works(notebook, f"%macro -q m {count}")
    works(notebook, "x = 'old'\ndel n")
    works(notebook, "%experiment start a")
    works(notebook, "m")
    assert notebook.value("x") == "inner"
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["m", "x"])
    works(notebook, "%experiment start b")
    works(notebook, f"%rerun {count}")
    assert notebook.value("x") == "inner"
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    goes_on(notebook)


def test_a_nested_cell_is_counted_once_in_the_record(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem")
    works(notebook, "%%experiment a\nget_ipython().run_cell('x = 1')\nx")
    assert notebook.value("len(ipygpumem.experiments()[-1].cells)") == 1
    assert notebook.value("ipygpumem.experiments()[-1].cells[0].execution_count is not None") is True


@pytest.mark.parametrize(
    "code",
    [
        "%%capture\n%%experiment a\nx = 1",
        "%%time\n%%experiment a\nx = 1",
        "%%experiment a\n%%time\nx = 1",
        "%%experiment a\n%%capture\nx = 1",
        "%%experiment a\n%%experiment b\nx = 1",
        "%%experiment a\n%%experiment b\n%%time\nx = 1",
        "%%experiment a\n%%bash\necho x",
        "%%experiment a\n%%writefile FILE\nx = 1",
        "%%experiment a\n%%html\n<i>x</i>",
        "%%experiment a\n%%timeit -n 1 -r 1\nx = 1",
        "%%timeit -n 2 -r 2\n%%experiment a\nx = 1",
        "get_ipython().run_cell_magic('experiment', 'a', 'x = 1')",
        "get_ipython().run_cell('%%experiment a\\nx = 1')",
        "%%experiment a\n%run FILE2",
        "%%experiment a --keep 'n*'\n\n\nx = 1",
    ],
)
def test_cell_magics_before_and_after_a_cell_scope_work(notebook: Kernel, tmp_path: Path, code: str) -> None:
    (tmp_path / "two.py").write_text("x = 1\n")
    code = code.replace("FILE2", str(tmp_path / "two.py")).replace("FILE", str(tmp_path / "one.py"))
    reply = works(notebook, code)
    assert names(notebook) == []
    assert "no experiment is open" in open_now(notebook)
    if "%%writefile" in code:
        assert (tmp_path / "one.py").read_text() == "x = 1\n"
    if "echo" in code:
        assert reply.stdout == "x\n"
    if "%%time\n" in code:
        assert "Wall time" in reply.stdout
    goes_on(notebook)


@pytest.mark.parametrize(
    "code",
    [
        "%%experiment a\n%%nosuchmagic\nx = 1",
        "%%experiment a\n%%time\n1/0",
        "%%time\n%%experiment a\n1/0",
        "%%experiment a\n%%capture\n1/0",
        "%%experiment a\n%%bash\nexit 3",
    ],
)
def test_a_cell_magic_that_fails_in_a_cell_scope_ends_it(notebook: Kernel, code: str) -> None:
    works(notebook, "x = 'old'")
    run(notebook, code)
    assert "no experiment is open" in open_now(notebook)
    assert notebook.value("x") == "old"
    goes_on(notebook)


def test_help_on_the_magics_opens_nothing(notebook: Kernel) -> None:
    for code in ("%%experiment?", "%experiment?", "%gpumem?"):
        works(notebook, code)
    assert "no experiment is open" in open_now(notebook)


@pytest.mark.parametrize(
    "body",
    [
        "import asyncio\nx = await asyncio.sleep(0.01, 'new')\nx",
        "async def numbers():\n    for i in range(3): yield i\nasync for x in numbers(): pass\nx",
        "class M:\n    async def __aenter__(self): return 'new'\n    async def __aexit__(self, *a): pass\n"
        "async with M() as x: y = x\nx",
        "import asyncio\nx, y = await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))\nx",
    ],
)
def test_top_level_await_binds_a_scopes_names(notebook: Kernel, body: str) -> None:
    works(notebook, "x = 'old'")
    reply = works(notebook, f"%%experiment a --drop-imports\n{body}")
    assert reply.result is not None
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    works(notebook, "%experiment start b --drop-imports")
    works(notebook, body)
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    reply = run(notebook, f"%%experiment a --drop-imports\n{body}\nawait asyncio.sleep(0)\n1/0")
    assert reply.status == "error"
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    goes_on(notebook)


def test_a_task_that_outlives_its_cell_can_bind_names_later(notebook: Kernel) -> None:
    works(
        notebook,
        "import asyncio\nasync def later():\n    global late\n    await asyncio.sleep(0.1)\n    late = 1\ntask = None",
    )
    works(notebook, "%%experiment a\nbackground = asyncio.ensure_future(later())")
    works(notebook, "await asyncio.sleep(0.3)")
    assert "late" in names(notebook)
    goes_on(notebook)


# -- long and odd programs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "x = " + "+".join(["2"] * 700),
        "x = 'a'" + ".strip()" * 450,
        "if 0: pass\n" + "elif x == 1: pass\n" * 700 + "x = 1",
    ],
    ids=["sum", "chain", "elif"],
)
def test_code_that_is_deep_enough_for_python_is_not_too_deep_for_a_scope(notebook: Kernel, code: str) -> None:
    works(notebook, "x = 'old'")
    works(notebook, code)
    works(notebook, "x = 'old'")
    works(notebook, "%experiment start a")
    works(notebook, code)
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    works(notebook, f"%%experiment b\n{code}")
    assert notebook.value("x") == "old"


def test_ten_thousand_names_and_a_huge_cell_are_no_trouble(notebook: Kernel) -> None:
    works(notebook, "%%experiment a\n" + "\n".join(f"name{i} = {i}" for i in range(10_000)))
    assert names(notebook) == []


def test_a_long_list_costs_an_exit_no_memory_of_its_own(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem")
    works(notebook, "%experiment start a")
    works(notebook, "big = list(range(8_000_000))")
    works(notebook, "%experiment end")
    works(notebook, "record = ipygpumem.experiments()[-1]\n(usage,) = [u for u in record.usages if u.device == 'cpu']")
    consumed = notebook.value("record.consumed['cpu']")
    assert consumed > 250 << 20
    assert notebook.value("usage.peak_delta_bytes") < consumed + (30 << 20)


def test_a_name_deleted_and_bound_again_in_a_cell_that_fails_is_the_scopes(notebook: Kernel) -> None:
    works(notebook, "x = object()")
    works(notebook, "%experiment start a")
    assert run(notebook, "del x\nx = object()\n1/0").error == "ZeroDivisionError"
    works(notebook, "%experiment end")
    assert names(notebook) == []


# -- processes and threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peak", ["kernel", "sampled"])
def test_a_forked_child_in_a_scope_disturbs_nobody(notebook: Kernel, peak: str) -> None:
    works(notebook, f"%config IPyGpuMem.host_peak = '{peak}'")
    works(notebook, "import os, multiprocessing, ipygpumem\nx = 'old'")
    works(notebook, "%experiment start a")
    works(
        notebook,
        "x = 'new'\npid = os.fork()\n"
        "if pid == 0:\n"
        "    globals().clear(); import os; os._exit(0)\n"
        "done = os.waitpid(pid, 0)",
    )
    assert notebook.value("done[1]") == 0
    works(
        notebook,
        "def work(queue):\n"
        "    import ipygpumem\n"
        "    session = ipygpumem.notebook.session.current_session()\n"
        "    queue.put((os.getpid(), session.host.read()[0].current_bytes))\n"
        "fork = multiprocessing.get_context('fork')\nqueue = fork.Queue()\n"
        "process = fork.Process(target=work, args=(queue,)); process.start()\n"
        "child, size = queue.get(timeout=20); process.join(20)",
    )
    assert notebook.value("process.exitcode") == 0
    assert notebook.value("child != os.getpid() and size > 1 << 20") is True
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    works(notebook, "%config IPyGpuMem.host_peak = 'kernel'")
    goes_on(notebook)


def test_a_scope_in_a_forked_child_measures_the_child(notebook: Kernel) -> None:
    works(notebook, "import os, ipygpumem")
    works(
        notebook,
        "reader, writer = os.pipe()\npid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = b'no'\n"
        "    try:\n"
        "        ballast = bytearray(64 << 20)\n"
        "        usage = ipygpumem.notebook.session.current_session().meter.now()['cpu']\n"
        "        import psutil\n"
        "        ok = b'yes' if abs(usage.current_bytes - psutil.Process().memory_info().rss) < 1 << 23 else b'no'\n"
        "    finally:\n"
        "        os.write(writer, ok); os._exit(0)\n"
        "os.waitpid(pid, 0)\nanswer = os.read(reader, 10)\nos.close(reader); os.close(writer)",
    )
    assert notebook.value("answer") == b"yes"
    goes_on(notebook)


def test_scopes_and_cells_from_another_thread_do_not_disturb_the_notebooks(notebook: Kernel) -> None:
    works(notebook, "import threading, ipygpumem, time\nx = 'old'\nerrors = []")
    works(notebook, "%experiment start a")
    works(
        notebook,
        "def other():\n"
        "    try:\n"
        "        with ipygpumem.experiment('threads', report='none'):\n"
        "            time.sleep(0.2)\n"
        "    except BaseException as error:\n"
        "        errors.append(repr(error))\n"
        "x = 'new'\nthread = threading.Thread(target=other); thread.start()\ny = 1\nthread.join()",
    )
    assert notebook.value("errors") == []
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    assert "y" not in names(notebook)
    works(
        notebook,
        "import asyncio\nthread = threading.Thread(target=lambda: (asyncio.set_event_loop("
        "asyncio.new_event_loop()), get_ipython().run_cell('from_thread = 1')))\nthread.start(); thread.join()",
    )
    goes_on(notebook)


def test_a_subshell_runs_cells_while_a_scopes_cell_runs(notebook: Kernel) -> None:
    client = notebook._client
    message = client.session.msg("create_subshell_request", {})
    client.control_channel.send(message)
    answer = client.control_channel.get_msg(timeout=30)["content"]
    if answer.get("status") != "ok":
        pytest.skip("this ipykernel has no subshells")
    works(notebook, "import time\nx = 'old'")
    works(notebook, "%experiment start a")
    slow = client.session.msg("execute_request", _request("x = 'new'\ntime.sleep(1.0)\ny = 1"))
    quick = client.session.msg("execute_request", _request("during = x; time.sleep(0.1)"))
    quick["header"]["subshell_id"] = answer["subshell_id"]
    client.shell_channel.send(slow)
    client.shell_channel.send(quick)
    order = []
    while len(order) < 2:
        reply = client.get_shell_msg(timeout=30)
        assert reply["content"]["status"] == "ok", reply["content"]
        order.append(reply["parent_header"]["msg_id"])
    assert order == [quick["header"]["msg_id"], slow["header"]["msg_id"]]
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["time", "x"])
    closing = client.session.msg("delete_subshell_request", {"subshell_id": answer["subshell_id"]})
    client.control_channel.send(closing)
    client.control_channel.get_msg(timeout=30)
    goes_on(notebook)


def _request(code: str) -> dict[str, Any]:
    return {
        "code": code,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": True,
    }


# -- configuration --------------------------------------------------------------------------------------------------


def test_options_come_from_a_config_file_and_the_command_line(tmp_path: Path) -> None:
    profile = tmp_path / "profile_default"
    profile.mkdir()
    (profile / "ipython_kernel_config.py").write_text(
        "c.InteractiveShellApp.extensions = ['ipygpumem']\nc.IPyGpuMem.experiment_report = 'compact'\n"
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    with contextlib.closing(Kernel("--IPyGpuMem.min_cell_seconds=0.2", env=environment)) as kernel:
        assert kernel.run("1 + 1").reports("cell") == []
        reply = kernel.run("%%experiment a\nimport time\ntime.sleep(0.3)")
        assert len(reply.reports("cell")) == 1
        (text,) = reply.reports("experiment")
        assert "consumed" in text.splitlines()[-1]
        assert "device   " not in text


def test_a_bad_option_is_named_when_the_extension_loads_and_the_kernel_goes_on() -> None:
    with contextlib.closing(Kernel("--IPyGpuMem.release_frames=bogus")) as kernel:
        for option, value in (
            ("release_frames", None),
            ("history_length", "0"),
            ("sample_seconds", "-1.0"),
            ("report", "'maybe'"),
            ("host_peak", "3"),
        ):
            if value is not None:
                works(kernel, f"get_ipython().config.IPyGpuMem = type(get_ipython().config)({option}={value})")
            reply = kernel.run("%load_ext ipygpumem")
            assert option in reply.stderr + reply.stdout + reply.message
            assert kernel.run("6 * 7").result == "42"
            assert (
                kernel.value(
                    "[c for c in get_ipython().events.callbacks['pre_run_cell'] + get_ipython().ast_transformers"
                    " if 'ipygpumem' in type(c).__module__ + getattr(c, '__module__', '')]"
                )
                == []
            )
        works(kernel, "get_ipython().config.IPyGpuMem = type(get_ipython().config)()")
        works(kernel, "%load_ext ipygpumem")
        goes_on(kernel)


@pytest.mark.parametrize(
    "line",
    [
        "%config IPyGpuMem.release_frames = 'bogus'",
        "%config IPyGpuMem.history_length = -1",
        "%config IPyGpuMem.garbage_share = 'x'",
        "%config IPyGpuMem.host_peak = None",
        "%config IPyGpuMem.nosuch = 1",
    ],
)
def test_a_bad_option_in_the_notebook_changes_nothing(line: str, bad_config_kernel: Kernel) -> None:
    before = bad_config_kernel.run("%config IPyGpuMem").stdout
    works(bad_config_kernel, "x = 'old'")
    bad_config_kernel.run(line)
    goes_on(bad_config_kernel)
    works(bad_config_kernel, "%%experiment a\nx = 1")
    assert bad_config_kernel.value("x") == "old"
    assert bad_config_kernel.run("%config IPyGpuMem").stdout == before


@pytest.fixture(scope="module")
def bad_config_kernel() -> Iterator[Kernel]:
    """A kernel for bad options, which traitlets may go on to hold in its merged configuration."""
    kernel = Kernel()
    kernel.run("%load_ext ipygpumem")
    yield kernel
    kernel.close()


def test_switching_options_inside_a_scope_and_a_cell_works(notebook: Kernel) -> None:
    works(notebook, "x = 'old'")
    works(notebook, "%experiment start a")
    works(notebook, "x = 1\n%config IPyGpuMem.host_peak = 'sampled'\nimport threading, time")
    works(notebook, "time.sleep(0.1)\n%config IPyGpuMem.host_peak = 'kernel'\n%gpumem off")
    assert works(notebook, "1").reports("cell") == []
    works(notebook, "%gpumem on")
    works(notebook, "%config IPyGpuMem.collect_garbage = False")
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    assert "ipygpumem-sampler" not in notebook.value(
        "[t.name for t in threading.enumerate()]" if "threading" in names(notebook) else "[]"
    )
    goes_on(notebook)


# -- the interpreter, bent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bend", "mend"),
    [
        ("import sys, io\nkeep_out = sys.stdout\nsys.stdout = io.StringIO()", "sys.stdout = keep_out"),
        (
            "import sys, io\nkeep_out = sys.stdout\nclass Broken(io.StringIO):\n"
            "    def write(self, text): raise OSError\n"
            "sys.stdout = Broken()",
            "sys.stdout = keep_out",
        ),
        ("import sys\nsys.settrace(lambda *a: None)", "sys.settrace(None)"),
        ("import sys\ndef trace(*a): return trace\nsys.settrace(trace)", "sys.settrace(None)"),
        ("import sys\nsys.setprofile(lambda *a: None)", "sys.setprofile(None)"),
        ("import gc\ngc.disable()", "gc.enable()"),
        ("import gc\ngc.freeze()", "gc.unfreeze()"),
        ("import gc\ndef fail(*a): raise ValueError\ngc.callbacks.append(fail)", "gc.callbacks.remove(fail)"),
        ("import warnings\nwarnings.simplefilter('error')", "warnings.resetwarnings()"),
        ("import sys\nsys.setrecursionlimit(sys.getrecursionlimit() + 1)", "pass"),
        ("import os\nhere = os.getcwd()\nos.chdir('/')", "os.chdir(here)"),
        ("import locale\nlocale.setlocale(locale.LC_ALL, 'C')", "pass"),
        ("import sys\nsys.last_value = 5; sys.last_traceback = 'x'; sys.last_exc = []", "del sys.last_exc"),
        ("import builtins\nkeep_open, builtins.open = open, None", "builtins.open = keep_open"),
        ("import builtins\nkeep_print, builtins.print = print, None", "builtins.print = keep_print"),
    ],
)
def test_cells_and_scopes_work_whatever_the_users_code_does_to_the_interpreter(
    notebook: Kernel, bend: str, mend: str
) -> None:
    works(notebook, f"x = 'old'\n{bend}")
    cell = works(notebook, "y = 3")
    assert len(cell.reports("cell")) == 1
    works(notebook, "%experiment start a")
    works(notebook, "x = 'new'")
    run(notebook, "1/0")
    reply = works(notebook, "%experiment end")
    assert len(reply.reports("experiment")) == 1
    reply = works(notebook, "%%experiment b\nx = 'new'\nz = 1")
    assert len(reply.reports("experiment")) == 1
    works(notebook, "%gpumem free")
    works(notebook, mend)
    assert notebook.value("x") == "old"
    goes_on(notebook)


def test_what_another_ast_transformer_binds_is_the_scopes(notebook: Kernel) -> None:
    works(notebook, "z = 'old'")
    works(
        notebook,
        "import ast\n"
        "class Rename(ast.NodeTransformer):\n"
        "    def visit_Name(self, node):\n"
        "        return ast.copy_location(ast.Name('z' if node.id == 'y' else node.id, node.ctx), node)\n"
        "renamer = Rename()\nget_ipython().ast_transformers.append(renamer)",
    )
    works(notebook, "%experiment start a")
    works(notebook, "y = 'new'")
    assert notebook.value("z") == "new"
    works(notebook, "%experiment end")
    assert notebook.value("z") == "old"
    works(notebook, "%%experiment b\ny = 'new'")
    assert notebook.value("z") == "old"
    works(notebook, "get_ipython().ast_transformers.remove(renamer)")


def test_ast_and_input_transformers_that_raise_do_not_break_scopes(notebook: Kernel) -> None:
    works(notebook, "x = 'old'")
    works(
        notebook,
        "from IPython.core.interactiveshell import InteractiveShell\nfrom IPython.core.error import InputRejected\n"
        "class Rejects:\n    def visit(self, node):\n        import ast\n"
        "        if 'forbidden' in ast.dump(node): raise InputRejected('no')\n        return node\n"
        "class Breaks:\n    def visit(self, node): raise ValueError('broken transformer')\n"
        "rejects = Rejects()\nget_ipython().ast_transformers.append(rejects)",
    )
    works(notebook, "%experiment start a")
    run(notebook, "x = 'new'\nforbidden = 1")
    assert notebook.value("x") == "old"
    works(notebook, "get_ipython().ast_transformers.append(Breaks())")
    run(notebook, "x = 'new'")
    assert notebook.value("x") == "new"
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    run(notebook, "%%experiment b\nx = 'new'\nforbidden = 1")
    assert notebook.value("x") == "old"
    assert "no experiment is open" in open_now(notebook)
    works(notebook, "get_ipython().ast_transformers.remove(rejects)")
    goes_on(notebook)


def test_a_stub_in_place_of_torch_and_numpy_breaks_neither_cells_nor_scopes() -> None:
    stubs = (
        "None",
        "types.ModuleType('torch')",
        "5",
        "types.SimpleNamespace(Tensor=7, ndarray=7)",
        "mock.MagicMock(spec=[])",
        "mock.MagicMock()",
    )
    with contextlib.closing(Kernel()) as kernel:
        works(kernel, "%load_ext ipygpumem")
        works(kernel, "import sys, types\nfrom unittest import mock")
        for stub in stubs:
            works(kernel, f"sys.modules['torch'] = {stub}\nx = 'old'")
            goes_on(kernel)
            works(kernel, "%%experiment a --seed 1\nx = 'new'\ny = [1]")
            assert (kernel.value("x"), "y" in names(kernel)) == ("old", False)
            works(kernel, f"sys.modules['numpy'] = {stub}")
            works(kernel, "%experiment start b --seed 1")
            works(kernel, "x = 'new'")
            works(kernel, "%gpumem status")
            works(kernel, "%gpumem free")
            run(kernel, "def f():\n    held = bytearray(1 << 20)\n    raise MemoryError\nf()")
            works(kernel, "%experiment end")
            assert kernel.value("x") == "old"
            works(kernel, "del sys.modules['torch'], sys.modules['numpy']")


def test_the_extension_refuses_clearly_where_there_is_no_ipython() -> None:
    import ipygpumem
    from ipygpumem.errors import NotLoadedError

    with pytest.raises(NotLoadedError, match="%load_ext ipygpumem"):
        ipygpumem.history()
    with pytest.raises(NotLoadedError, match="%load_ext ipygpumem"):
        ipygpumem.experiment("a")
    assert "torch" not in sys.modules or sys.modules["torch"] is not None
