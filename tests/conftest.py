"""The environment and the fixtures of all tests."""

# ruff: noqa: E402

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


def own_world() -> None:
    """Give this process, and all that it starts, folders of its own and a Ctrl-C that works.

    Before anything else is imported, because libraries read their folders' names on import.
    """
    world = Path(tempfile.mkdtemp(prefix="ipygpumem-tests-"))
    creator = os.getpid()
    atexit.register(lambda: os.getpid() == creator and shutil.rmtree(world, ignore_errors=True))
    folders = (
        "XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME MPLCONFIGDIR TORCHINDUCTOR_CACHE_DIR "
        "IPYTHONDIR"
    )
    jupyter = "JUPYTER_CONFIG_DIR JUPYTER_DATA_DIR JUPYTER_RUNTIME_DIR"
    for name in f"{folders} {jupyter}".split():
        os.environ[name] = str(world / name.lower())
        (world / name.lower()).mkdir()
    profile = world / "ipythondir" / "profile_default"  # its files are read by every kernel
    shutil.copytree(Path(__file__).parent / "quick_history", profile)
    if os.environ.get("IPYGPUMEM_WITHOUT_POSIX"):
        shutil.copytree(Path(__file__).parent / "without_posix", profile, dirs_exist_ok=True)
    for name in ("PYTHONSTARTUP", "JUPYTER_CONFIG_PATH", "MPLBACKEND"):
        os.environ.pop(name, None)
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
    # Processes of tests outnumber the processors. The threads of an operation wait for each other,
    # and each of them for a processor: the quickstart's training took ten times as long.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test asks for more threads
    # nohup and a shell's background jobs ignore SIGINT, and every process that is started here
    # would, too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


own_world()

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from benchmarks.harness.kernel import Kernel
from ipygpumem import introspect
from ipygpumem.api import shell as where
from ipygpumem.heap.knowledge import barriers, frames
from ipygpumem.meter.meter import Meter
from ipygpumem.meter.traces import Traces
from tests.alone import RUNNER
from tests.fakes import SCRIPT_BYTES, FakeProbe
from tests.hiding import hide_existing_objects, show_modules

TOOLS_OF_TESTS = {"pytest", "_pytest", "pluggy", "xdist", "execnet", "__channelexec__"}
"""Packages that run the tests; execnet gives a worker's main module the last name. Their functions
and objects lead to all tests of the process, so that looks do not follow them, as they do not
follow those of IPython.
"""
frames._LIBRARIES_OF_KERNELS.update(TOOLS_OF_TESTS)
barriers.TOOLS.update(TOOLS_OF_TESTS)


def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis, if it is installed, all the time that a busy machine takes, and the same
    examples in each run, unless ``--hypothesis-seed`` asks for other ones.
    """
    if not config.pluginmanager.hasplugin("hypothesispytest"):
        return
    from hypothesis import HealthCheck, settings

    patient = settings(
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=config.getoption("--hypothesis-seed") is None,
    )
    settings.register_profile("patient", patient)
    settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Hide pytest's objects and all tests; tests with kernels look into whole processes."""
    hide_existing_objects()


@pytest.fixture(scope="module", autouse=True)
def no_modules_of_other_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide the modules of other tests, which are users' modules, from looks and from what grows."""
    own = {request.module.__name__, "tests.conftest"}
    del request  # it would lead looks to all of pytest

    def users_modules() -> dict[str, ModuleType]:
        modules = introspect.users_modules()
        for name in list(modules):
            if name.partition(".")[0] == "tests" and name not in own:
                del modules[name]
        return modules

    # The fixture ``monkeypatch`` would be undone after all other fixtures of a test.
    with pytest.MonkeyPatch.context() as patch:
        show_modules(patch, users_modules)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_debugger_in_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start kernels without debugpy, except where tests want the kernels of users."""
    is_like_users = not {"smoke", "frontends"}.isdisjoint(request.path.parts)
    del request  # it would lead looks to all of pytest
    with pytest.MonkeyPatch.context() as patch:
        if not is_like_users:
            folder = Path(__file__).parent / "without_debugger"
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A fresh kernel with the extension loaded."""
    with Kernel() as kernel:
        reply = kernel.run("%load_ext ipygpumem")
        assert reply.status == "ok", reply.traceback
        yield kernel


@pytest.fixture
def bare_kernel() -> Iterator[Kernel]:
    """A fresh kernel without the extension."""
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython shell in this process, without the extension; nothing of it is left for the tests
    that follow.
    """
    InteractiveShell.clear_instance()
    # No thread, no file, and no colours, which take most of the time of a traceback.
    settings = {"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}}
    shell = InteractiveShell.instance(config=Config(settings))
    yield shell
    if "ipygpumem" in shell.extension_manager.loaded:
        shell.run_line_magic("unload_ext", "ipygpumem")
    atexit.unregister(shell.atexit_operations)  # which would keep it
    shell.atexit_operations()
    shell.cleanup()
    InteractiveShell.clear_instance()


@pytest.fixture
def loaded(shell: InteractiveShell) -> InteractiveShell:
    """The same, with the extension."""
    shell.run_line_magic("load_ext", "ipygpumem")
    return shell


@pytest.fixture
def meter() -> Iterator[Meter]:
    """A meter of host memory that nobody sets."""
    meter = Meter([FakeProbe()])
    yield meter
    meter.close()


@pytest.fixture
def others_out_of_sight() -> None:
    """Hide what earlier tests have left, too."""
    hide_existing_objects()


@pytest.fixture
def only_this_test(monkeypatch: pytest.MonkeyPatch, others_out_of_sight: None) -> None:
    """Hide, besides, the modules of tests and pytest's running functions, which lead looks to all
    tests of this process: each ``%gpumem leaks`` would take 5 s.

    Not for tests in which users' modules or running functions hold something.
    """
    show_modules(monkeypatch)
    monkeypatch.setattr("ipygpumem.heap.live.heap.running_locals", list)


@pytest.fixture
def script_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProbe]:
    """Memory that a test sets, which is what a script's traces measure."""
    probe = FakeProbe()
    probe.set(SCRIPT_BYTES)
    traces = Traces(Meter([probe]), history_length=5)
    monkeypatch.setattr(where.traces, "of_script", lambda: traces)
    yield probe
    traces.meter.close()


@pytest.fixture(scope="module", autouse=True)
def no_runner_of_another_module() -> Iterator[None]:
    """End the process that ran the tests of a module which must run alone."""
    yield
    RUNNER.close()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: no thread of ours or of a shell's history, no import hook, no wrapped torch
    function.

    And no torch, unless the test is one for which it is imported here: all looks at the heap would
    take longer then.
    """
    hooks = list(sys.meta_path)
    may_have_torch = "torch" in sys.modules or {"torch_cpu", "integrations", "gpu"} & set(
        request.path.parts
    )
    # This frame waits in a generator of the user. The request would lead looks to all of pytest.
    del request
    yield
    assert may_have_torch or "torch" not in sys.modules
    for thread in threading.enumerate():
        if thread.name == "ipygpumem-sampler":
            # a script's first trace looks for probes of others' there, and then it ends
            thread.join(10)
    names = [thread.name for thread in threading.enumerate()]
    assert not [
        name for name in names if "ipygpumem" in name or name == "IPythonHistorySavingThread"
    ]
    if sys.meta_path != hooks:
        gc.collect()  # a block in a suspended generator ends with it, which an error may keep
    assert sys.meta_path == hooks
    torch = sys.modules.get("torch")
    functions = vars(torch._C).values() if torch is not None else ()
    assert not [
        f for f in functions if getattr(f, "__module__", "") == "ipygpumem.probes.accelerators"
    ]
