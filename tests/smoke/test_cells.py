"""Loading, the line after each cell, %%experiment, %gpumem status and records, in real kernels."""

import re
import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import GIB, MIB, parse_bytes
from tests.smoke.conftest import HAS_POSIX
from tests.steps import (
    OWN_PARTS,
    existing_names,
    experiment,
    host_table,
    mib_after,
    plain,
    run_cells,
    run_failing,
    run_quietly,
)

NOISE_MIB = 16
"""MiB that the kernel itself may take or give back during a cell."""


def test_the_line_shows_kept_memory_and_the_peak(notebook: Kernel) -> None:
    (line,) = run_quietly(notebook, "size = len(b'x' * (256 << 20))").reports("cell")
    if HAS_POSIX:  # else the peak is sampled
        assert abs(mib_after(line, "RAM")) < NOISE_MIB
        assert abs(mib_after(line, "peak") - 256) < NOISE_MIB
    run_quietly(notebook, "import ipygpumem", "block = bytearray(128 << 20)")
    assert notebook.value("ipygpumem.last().usages[0].delta_bytes >> 20") in (127, 128, 129)
    assert notebook.value("(ipygpumem.last().success, len(ipygpumem.history()) > 1)") == (
        True,
        True,
    )
    (line,) = run_quietly(notebook, "del block").reports("cell")
    assert abs(mib_after(line, "RAM") + 128) < NOISE_MIB


def test_an_idle_cells_line_is_short_and_hidden_by_quiet(notebook: Kernel) -> None:
    (line,) = run_quietly(notebook, "y = 1").reports("cell")
    assert re.fullmatch(r"cell \d+ · RAM [\d.]+ MiB", line)
    run_quietly(notebook, "%config IPyGpuMem.quiet = True")
    assert run_quietly(notebook, "y = 2").displays == []
    assert len(run_quietly(notebook, "z = bytearray(9 << 20)").reports("cell")) == 1
    (line,) = run_failing(notebook, "1 / 0", "ZeroDivisionError").reports("cell")
    assert " · ZeroDivisionError · RAM" in line
    assert "reports on, quiet" in run_quietly(notebook, "%gpumem status").reports("status")[0]
    run_quietly(notebook, "del z", "%config IPyGpuMem.quiet = False")


@pytest.mark.parametrize(
    "magic", ["%%time", "%%capture", "%%capture out", "%%prun -q", "%%timeit -n1 -r1"]
)
def test_a_cell_magic_changes_nothing_about_the_line(notebook: Kernel, magic: str) -> None:
    """Also where the magic runs its body as a cell of its own, so that events nest."""
    reply = run_quietly(notebook, f"{magic}\nx = 1")
    assert len(reply.reports("cell")) == 1
    assert len(run_quietly(notebook, "x = 1").reports("cell")) == 1


@pytest.mark.skipif(not HAS_POSIX, reason="needs fork")
def test_a_cell_runs_in_a_child_process(notebook: Kernel) -> None:
    cell = """\
%%isolate --keep kept
import asyncio
print('out')
kept = await asyncio.sleep(0, [1])
kept"""
    reply = run_quietly(notebook, cell)
    assert reply.stdout == "out\n"
    assert reply.stderr == ""
    assert reply.result == "[1]"
    assert notebook.value("kept") == [1]
    assert re.search(
        r"----> 2 .*1 / 0",
        plain(run_failing(notebook, "%%isolate\n1 / 0", "ZeroDivisionError").traceback),
    )
    reply = run_failing(
        notebook,
        """
        %%isolate
        import os; os.abort()
        """,
        "ChildProcessError",
    )
    assert reply.message == "the cell's child process was killed by SIGABRT (Aborted)"


def test_blank_silent_and_switched_off_cells_have_no_line(notebook: Kernel) -> None:
    assert run_quietly(notebook, "").displays == run_quietly(notebook, "\n  \n").displays == []
    assert notebook.run("silently = 1", silent=True).displays == []
    assert len(run_quietly(notebook, "x = 1").reports("cell")) == 1
    assert run_quietly(notebook, "%gpumem off", "x = 1").displays == []
    assert len(run_quietly(notebook, "%gpumem on", "x = 1").reports("cell")) == 1


def test_our_own_commands_have_a_line_only_if_memory_changed(notebook: Kernel) -> None:
    run_quietly(notebook, "%gpumem", "%gpumem free", "block = b'x' * (64 << 20)")
    assert run_quietly(notebook, "%gpumem").reports("cell") == []
    assert len(run_quietly(notebook, "%gpumem on\ndel block").reports("cell")) == 1
    assert run_quietly(notebook, "%gpumem quiet on").reports() == [
        "lines of cells that changed less than 1 MiB are hidden"
    ]
    assert run_quietly(notebook, "x = 1").displays == []
    assert len(run_quietly(notebook, "block = b'x' * (64 << 20)").reports("cell")) == 1
    assert "shown" in run_quietly(notebook, "%gpumem quiet off").reports()[0]
    assert len(run_quietly(notebook, "x = 1").reports("cell")) == 1


def test_the_last_expression_prints_and_magics_work_in_a_cell(notebook: Kernel) -> None:
    reply = run_quietly(
        notebook,
        """
        %%experiment a
        print('one')
        x = %pwd
        !echo two
        %time y = 3
        print(y)
        y * 14
        """,
    )
    assert (reply.result, len(reply.reports("experiment"))) == ("42", 1)
    assert reply.stdout.startswith("one\n")
    assert "two" in reply.stdout
    assert reply.stdout.endswith("3\n")
    assert existing_names(notebook, "x", "y") == []


def test_the_traceback_shows_the_right_lines(notebook: Kernel) -> None:
    cell = """\
%%experiment a

def half(x):
    return 1 / x

half(0)"""
    text = plain(run_failing(notebook, cell, "ZeroDivisionError").traceback)
    assert re.search(r"-> *6 half\(0\)", text)
    assert re.search(r"-> *4 +return 1 / x", text)


def test_options_are_read_from_the_first_line(notebook: Kernel) -> None:
    reply = run_quietly(
        notebook,
        """
        %%experiment my-run --keep x,y --report compact --seed 7
        import random
        x = random.random()
        """,
    )
    (text,) = reply.reports("experiment")
    assert "experiment my-run · " in text
    assert "keep: no name matches 'y'" in text
    run_quietly(
        notebook,
        """
        import random
        random.seed(7)
        """,
    )
    assert notebook.value("x == random.random()") is True
    assert (
        run_quietly(notebook, experiment("1", name="quiet", options="--report none")).reports(
            "experiment"
        )
        == []
    )


def test_help_and_completion_know_the_magic(notebook: Kernel) -> None:
    run_quietly(notebook, "%%experiment?", "%experiment?")
    assert {"%experiment", "%%experiment"} <= {
        match.strip() for match in notebook.complete("%experi")
    }
    assert "--drop-imports" in notebook.complete("%%experiment a --d")
    run_quietly(notebook, "loss_of_a = loss_of_b = 1")
    assert "loss_of_b" in notebook.complete("%%experiment a --keep loss_of_a lo")
    assert "--drop-imports" in notebook.complete("%%experiment a --keep loss_of_a --d")


def parts(kernel: Kernel) -> dict[str, int]:
    """Return the rows of the host's table; they sum to its title but for what rounding loses."""
    title, rows = host_table(kernel)
    total = parse_bytes(title.partition(",")[0].removeprefix("RAM: "))
    # Each row is rounded to a hundredth of its unit, of GiB at most.
    assert abs(sum(rows.values()) - total) < len(rows) * GIB // 100, (title, rows)
    return rows


def own(rows: dict[str, int]) -> int:
    return sum(size for name, size in rows.items() if name.startswith(OWN_PARTS))


def test_the_hosts_parts_follow_cells_and_sum_to_its_total(notebook: Kernel) -> None:
    before = own(parts(notebook))
    run_quietly(notebook, "block = bytearray(b'x') * (512 << 20)")
    assert abs(own(parts(notebook)) - before - 512 * MIB) < 2 * NOISE_MIB * MIB
    run_quietly(notebook, "del block")
    assert abs(own(parts(notebook)) - before) < 2 * NOISE_MIB * MIB


def test_loading_imports_no_framework_and_keeps_nothing_alive(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import gc, sys, threading, weakref
        class Thing: pass
        thing = Thing()
        thing.block = bytearray(1 << 20)
        died = []
        weakref.finalize(thing, died.append, 1).atexit = False
        """,
    )
    collector = "gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()"
    look = f"({collector}, threading.active_count(), 'torch' in sys.modules)"
    before = notebook.value(look)
    parts(notebook)
    assert notebook.value(look) == before
    run_quietly(notebook, "del thing")
    assert notebook.value("died") == [1]


FIGURES_OF_LAST = (
    "(lambda c, u: (u.before_bytes, u.after_bytes, u.peak_bytes, c.freed.get('cpu', 0)))"
)
ENDINGS = {
    "an experiment": (
        "%%experiment big --keep total\nblock = bytearray(256 << 20)\ntotal = len(block)",
        None,
    ),
    "experiments inside each other": (
        textwrap.dedent(
            """\
            %%experiment outer
            inner = ipygpumem.experiment('inner').start()
            block = bytearray(256 << 20)"""
        ),
        None,
    ),
    "a recovery": (
        """\
def fill():
    block = bytearray(256 << 20)
    raise MemoryError
fill()""",
        "MemoryError",
    ),
    "a recovery in an experiment": (
        """\
%%experiment failing
other = bytearray(128 << 20)
def fill():
    block = bytearray(128 << 20)
    raise MemoryError
fill()""",
        "MemoryError",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_kept_memory_is_measured_after_the_cells_own_clean_up(
    notebook: Kernel, ending: str
) -> None:
    """The peak includes memory that the cell's code held when it ended; memory freed afterwards has
    a field of its own.
    """
    code, error = ENDINGS[ending]
    run_quietly(
        notebook,
        """
        import ipygpumem
        %gpumem free
        """,
    )
    reply = run_quietly(notebook, code) if error is None else run_failing(notebook, code, error)
    line = reply.reports("cell")[0].splitlines()[0]
    assert abs(mib_after(line, "RAM")) < NOISE_MIB
    assert abs(mib_after(line, "peak") - 256) < NOISE_MIB
    before, after, peak, freed = notebook.value(
        f"{FIGURES_OF_LAST}(ipygpumem.last(), ipygpumem.last().usages[0])"
    )
    assert abs(after - before) < NOISE_MIB * MIB
    assert abs(peak - before - 256 * MIB) < NOISE_MIB * MIB
    assert abs(freed - 256 * MIB) < NOISE_MIB * MIB


_HOOKS = """
import gc, os, sys, threading

def hooks():
    shell = get_ipython()
    completers = shell.strdispatchers["complete_command"]
    return {
        "events": {name: list(found) for name, found in shell.events.callbacks.items()},
        "transformers": [*shell.ast_transformers, *shell.input_transformers_cleanup, *shell.input_transformers_post],
        "magics": {kind: dict(found) for kind, found in shell.magics_manager.magics.items()},
        "classes": dict(shell.magics_manager.registry),
        "configurables": list(shell.configurables),
        "completers": (dict(completers.strs), dict(completers.regexs)),
        "names": {name for name in globals() if not name.startswith("_")},
        "imports": list(sys.meta_path),
        "threads": {thread.name for thread in threading.enumerate()},
        "displayhook": (sys.displayhook, sys.excepthook, shell.displayhook, shell.display_pub),
        "errors": (shell.custom_exceptions, shell.CustomTB),
    }

def files():
    return [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]

@get_ipython().register_magic_function
def gpumem(line):
    "A magic of the user, which ours must not take away for good."

before = after = changed = None
%unload_ext nothing_of_this_name
"""  # noqa: E501


def test_unloading_takes_every_hook_out_again(bare_kernel: Kernel) -> None:
    """Events, transformers, magics, configurables, completers, threads, open files: all as before.
    No session stays.
    """
    run_quietly(
        bare_kernel,
        _HOOKS,
        "before = hooks()",
        "%load_ext ipygpumem",
        experiment("x = 1", name="a", options="--seed 1"),
    )
    run_quietly(bare_kernel, "after = hooks()")
    changed = bare_kernel.value("sorted(kind for kind in before if before[kind] != after[kind])")
    assert {"configurables", "completers", "events", "magics", "transformers"} <= set(changed)
    reply = run_quietly(bare_kernel, "%unload_ext ipygpumem")
    assert (reply.stderr, reply.displays) == ("", [])
    run_quietly(bare_kernel, "after = hooks()")
    assert bare_kernel.value("[kind for kind in before if before[kind] != after[kind]]") == []
    assert (
        bare_kernel.value("[f for f in files() if '/proc/' in f and ('refs' in f or 'stat' in f)]")
        == []
    )
    run_quietly(
        bare_kernel,
        """
        del before, after
        left = gc.collect()
        """,
    )
    ours = (
        "type(o).__name__ in ('Session', 'Experiment', 'Meter') and "
        "type(o).__module__.startswith('ipygpumem')"
    )
    assert bare_kernel.value(f"[type(o).__name__ for o in gc.get_objects() if {ours}]") == []


def test_an_unloaded_extension_is_silent_and_can_be_reloaded(kernel: Kernel) -> None:
    run_quietly(kernel, "%reload_ext ipygpumem", "%load_ext ipygpumem", "%reload_ext ipygpumem")
    assert len(run_quietly(kernel, "x = 1").reports("cell")) == 1
    assert run_quietly(kernel, experiment("42", name="again")).result == "42"
    assert run_quietly(kernel, "%unload_ext ipygpumem", "x = 1").displays == []
    run_failing(kernel, experiment("x = 1", name="a"), None)
    run_failing(kernel, "%gpumem status", None)
    run_quietly(kernel, "%load_ext ipygpumem", experiment("y = 1", name="a"))
    assert existing_names(kernel, "x", "y") == ["x"]


def test_unloading_abandons_open_scopes_and_keeps_their_names(kernel: Kernel) -> None:
    run_quietly(
        kernel,
        "old = 1",
        "%experiment start outer",
        """
        new = 2
        old = 3
        """,
        "%experiment start inner",
        "more = 4",
    )
    assert "'outer', 'inner'" in run_cells(kernel, "%unload_ext ipygpumem").stderr
    assert kernel.value("(old, new, more)") == (3, 2, 4)
    run_quietly(kernel, "%load_ext ipygpumem")
    run_failing(kernel, "%experiment end", None)
    assert kernel.value("(old, new, more)") == (3, 2, 4)
