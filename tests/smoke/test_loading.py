"""Loading, reloading and unloading the extension in real kernels."""

from __future__ import annotations

from tests.kernel import Kernel
from tests.steps import exist, fails, ok, works

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
"""


def test_unloading_takes_every_hook_out_again(bare_kernel: Kernel) -> None:
    """Events, transformers, magics, configurables, completers, threads, open files: all as before. No session stays."""
    ok(bare_kernel, _HOOKS, "before = hooks()", "%load_ext ipygpumem", "%%experiment a --seed 1\nx = 1")
    ok(bare_kernel, "after = hooks()")
    changed = bare_kernel.value("sorted(kind for kind in before if before[kind] != after[kind])")
    assert {"configurables", "completers", "events", "magics", "transformers"} <= set(changed)
    reply = ok(bare_kernel, "%unload_ext ipygpumem")
    assert (reply.stderr, reply.displays) == ("", [])
    ok(bare_kernel, "after = hooks()")
    assert bare_kernel.value("[kind for kind in before if before[kind] != after[kind]]") == []
    assert bare_kernel.value("[f for f in files() if '/proc/' in f and ('refs' in f or 'stat' in f)]") == []
    ok(bare_kernel, "del before, after\nleft = gc.collect()")
    ours = "type(o).__name__ in ('Session', 'Experiment', 'Meter') and type(o).__module__.startswith('ipygpumem')"
    assert bare_kernel.value(f"[type(o).__name__ for o in gc.get_objects() if {ours}]") == []


def test_an_unloaded_extension_reports_nothing_and_can_be_loaded_again(kernel: Kernel) -> None:
    ok(kernel, "%reload_ext ipygpumem", "%load_ext ipygpumem", "%reload_ext ipygpumem")
    assert len(ok(kernel, "x = 1").reports("cell")) == 1
    assert ok(kernel, "%%experiment again\n42").result == "42"
    assert ok(kernel, "%unload_ext ipygpumem", "x = 1").displays == []
    fails(kernel, "%%experiment a\nx = 1", None)
    fails(kernel, "%gpumem status", None)
    ok(kernel, "%load_ext ipygpumem", "%%experiment a\ny = 1")
    assert exist(kernel, "x", "y") == ["x"]


def test_unloading_abandons_open_scopes_keeps_their_names_and_says_so(kernel: Kernel) -> None:
    ok(kernel, "old = 1", "%experiment start outer", "new = 2\nold = 3", "%experiment start inner", "more = 4")
    assert "'outer', 'inner'" in works(kernel, "%unload_ext ipygpumem").stderr
    assert kernel.value("(old, new, more)") == (3, 2, 4)
    ok(kernel, "%load_ext ipygpumem")
    fails(kernel, "%experiment end", None)
    assert kernel.value("(old, new, more)") == (3, 2, 4)
