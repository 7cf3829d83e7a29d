"""Loading, unloading, configuring: the shell afterwards is the shell before."""

import signal
import sys
import threading
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError
from traitlets.config import Config

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import EstimateError, NotLoadedError
from ipygpumem.estimating import loading
from ipygpumem.shell import extension as hooks
from ipygpumem.shell.app import app_of
from ipygpumem.shell.config import IPyGpuMem, config_of
from tests.alone import alone, printed
from tests.steps import experiment, run_cells

pytestmark = pytest.mark.usefixtures("others_out_of_sight")
PACKAGE = Path(ipygpumem.__file__).parent


def registered(shell: InteractiveShell) -> dict[str, Any]:
    """Return everything that an extension may add to a shell."""
    completers = shell.strdispatchers.get("complete_command")
    return {
        "events": {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()},
        "ast": list(shell.ast_transformers),
        "cleanup": list(shell.input_transformers_cleanup),
        "magics": {kind: dict(magics) for kind, magics in shell.magics_manager.magics.items()},
        "registry": dict(shell.magics_manager.registry),
        "configurables": list(shell.configurables),
        "completers": sorted(completers.strs) if completers is not None else [],
    }


def test_a_load_that_fails_half_way_leaves_nothing(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = registered(shell)

    def broken(self: hooks.Extension) -> None:
        raise RuntimeError("half-way")

    monkeypatch.setattr(hooks.Extension, "_install_magics", broken)
    with pytest.raises(RuntimeError, match="half-way"):
        ipygpumem.load_ipython_extension(shell)
    assert registered(shell) == before


def broken(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("it is broken")


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("ipygpumem.extras.recorder.recorder.Recorder.__init__", "the recorder"),
        ("ipygpumem.extras.recorder.recorder.Recorder.start_if_it_can", "the recorder"),
        ("ipygpumem.shell.extension._matcher", "completion"),
        ("ipygpumem.extras.recorder.recordings.ended", ""),
        ("ipygpumem.extras.recorder.recordings.prune", ""),
    ],
)
def test_no_optional_part_prevents_loading(
    shell: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    part: str,
) -> None:
    before = registered(shell)
    monkeypatch.setattr(place, broken)
    shell.config = Config({"IPyGpuMem": {"recorder": True}})
    ipygpumem.load_ipython_extension(shell)
    assert shell.run_cell("%experiment start a\nx = 1").success
    assert shell.run_cell("%experiment end").success
    said = capsys.readouterr()
    assert (said.out + said.err).count("it is broken") == 1
    assert f"ipygpumem: {part} failed" in said.err or not part
    hooks.unload(shell)
    assert registered(shell) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["the first step", "a closer"])
def test_a_failure_as_a_cell_ends_loses_no_record(
    loaded: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: type[BaseException],
) -> None:
    """IPython prints a Ctrl-C in a callback and goes on; a cell that still ran then would have all
    others inside it.
    """
    app = app_of(loaded)
    cells = app.context.cells
    pop = app.context.cells.pop

    def struck(*_: Any) -> Any:
        monkeypatch.setattr(cells, "pop", pop)
        raise error

    def strike() -> None:
        if place == "a closer":
            cells.running()[-1].at_code_end.append(struck)
        else:
            monkeypatch.setattr(cells, "pop", struck)

    # The struck cell, and one after it.
    loaded.user_ns["strike"] = strike
    loaded.run_cell("strike()")
    loaded.run_cell("x = 2")
    assert [record.source_line for record in app.session.history] == ["strike()", "x = 2"]
    assert not cells.running()
    assert len(app.context.meter._open) == 0


@pytest.mark.parametrize("magic", ["unload_ext", "reload_ext"])
@pytest.mark.parametrize("then", ["y = 2", "raise ValueError('the cell own')"])
def test_a_block_ends_quietly_after_unloading(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], magic: str, then: str
) -> None:
    loaded.user_ns["ipygpumem"] = ipygpumem
    leave = f"get_ipython().run_line_magic('{magic}', 'ipygpumem')"
    result = loaded.run_cell(f"with ipygpumem.experiment('a'):\n    x = 1\n    {leave}\n    {then}")
    assert loaded.user_ns["x"] == 1
    assert type(result.error_in_exec) is (ValueError if "raise" in then else type(None))
    assert "unloaded with open experiments ('a'); their names are kept" in capsys.readouterr().err


def test_the_api_asks_to_load_the_extension_if_it_is_missing(shell: InteractiveShell) -> None:
    for call in (
        ipygpumem.last,
        ipygpumem.history,
        ipygpumem.experiments,
        lambda: ipygpumem.experiment("x"),
    ):
        with pytest.raises(NotLoadedError, match="%load_ext ipygpumem"):
            call()


def test_every_option_has_help_and_can_be_set_from_a_config_file(shell: InteractiveShell) -> None:
    traits = IPyGpuMem.class_traits(config=True)
    assert all(trait.help for trait in traits.values())
    shell.config = Config(
        {"IPyGpuMem": {"report": False, "host_peak": "sampled", "min_held_bytes": "2MiB"}}
    )
    shell.run_cell("%load_ext ipygpumem")
    app = app_of(shell)
    assert app.context.config.report is False
    assert app.host.sampled is True
    assert app.context.config.min_held_bytes == 2**21


def test_options_change_at_once_and_bad_values_are_refused(loaded: InteractiveShell) -> None:
    app = app_of(loaded)
    was_sampled = app.host.sampled
    loaded.run_cell("%config IPyGpuMem.host_peak = 'sampled'")
    assert app.host.sampled
    loaded.run_cell("%config IPyGpuMem.host_peak = 'kernel'")
    assert app.host.sampled is was_sampled
    for name, value, words in BAD_OPTIONS:
        with pytest.raises(TraitError, match=words) as caught:
            setattr(app.context.config, name, value)
        # A message of one or two lines, however large the value.
        assert len(str(caught.value)) < 200
    loaded.run_cell("%config IPyGpuMem.min_held_bytes = '2MiB'")
    assert app.context.config.min_held_bytes == 2**21


BAD_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("release_frames", "sometimes", "release_frames"),
    ("min_held_bytes", "24", "'24' has no unit"),
    ("min_held_bytes", -1, "a size must be a number of bytes"),
)


def test_bad_options_in_a_file_get_defaults_and_line(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {name: value for name, value, _ in BAD_OPTIONS}
    shell.config = Config({"IPyGpuMem": {**bad, "report": False}})
    ipygpumem.load_ipython_extension(shell)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == list(bad)
    config = app_of(shell).context.config
    assert config.release_frames == "oom+interrupt"
    assert config.min_held_bytes == 2**20
    assert config.report is False


def test_the_extension_reloads_after_a_refused_value(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_line_magic("config", "IPyGpuMem.release_frames = 'nonsense'")
    loaded.run_line_magic("config", "IPyGpuMem.report = False")
    capsys.readouterr()
    loaded.run_line_magic("reload_ext", "ipygpumem")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ipygpumem: option release_frames is set to its default: ")
    config = app_of(loaded).context.config
    assert (config.release_frames, config.report) == ("oom+interrupt", False)
    loaded.run_line_magic("reload_ext", "ipygpumem")
    assert capsys.readouterr().err == ""


def test_a_cell_runs_if_the_services_cannot_be_built(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ipygpumem.load_ipython_extension(shell)
    with monkeypatch.context() as patch:
        patch.setattr("ipygpumem.shell.app.Session", broken)
        for value in (1, 2):
            assert shell.run_cell(f"x = {value}").success
            assert shell.user_ns["x"] == value
        said = capsys.readouterr().err
        assert said.count("it is broken") == 1
        assert "it was not measured" in said
    shell.run_cell("x = 3")
    assert [record.source_line for record in app_of(shell).session.history] == ["x = 3"]


def test_an_interrupt_while_services_are_built_stops_the_cell(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ipygpumem.load_ipython_extension(shell)

    def strike(*_: object, **options: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("ipygpumem.shell.app.Session", strike)
        result = shell.run_cell("x = 1")
    assert type(result.error_in_exec) is KeyboardInterrupt
    assert "x" not in shell.user_ns
    assert shell.run_cell(experiment("y = 1", name="a")).success
    assert [item.name for item in app_of(shell).experiments.finished] == ["a"]
    assert "y" not in shell.user_ns
    assert "Error in callback" not in capsys.readouterr().err


def test_the_first_use_may_be_in_the_cell_that_loads(bare_kernel: Kernel) -> None:
    for first in ("%experiment start a", "ipygpumem.history()", "%gpumem guard on"):
        reply = run_cells(
            bare_kernel,
            f"""
            import ipygpumem
            %load_ext ipygpumem
            {first}
            x = 1
            """,
            "y = 1",
            "%reload_ext ipygpumem",
        )
        assert "Traceback" not in reply.stderr


def test_loading_twice_and_unloading_build_no_services(shell: InteractiveShell) -> None:
    before = registered(shell)
    for _ in range(2):
        ipygpumem.load_ipython_extension(shell)
    config = config_of(shell)
    assert config is not None
    config.host_peak = "sampled"
    hooks.unload(shell)
    assert config.extension._app is None
    assert registered(shell) == before
    with pytest.raises(NotLoadedError):
        hooks.unload(shell)


def test_cells_that_begin_in_several_threads_share_services(shell: InteractiveShell) -> None:
    """As the cells of subshells do."""
    ipygpumem.load_ipython_extension(shell)
    apps = list[object]()
    threads = [
        threading.Thread(target=lambda: apps.append(app_of(shell)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(apps) == len(threads)
    assert len(set(map(id, apps))) == 1


def imported_after(code: str) -> set[str]:
    """Return the modules that a script has imported, those of ours without the package's name."""
    code = (
        f"import sys\n{code}\nprint(*(name.removeprefix('ipygpumem.') for name in sys.modules))\n"
    )
    return set(printed("-c", code).split())


def test_loading_imports_nothing_that_takes_long() -> None:
    loaded = imported_after(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance().run_line_magic('load_ext', 'ipygpumem')"
    )
    assert "shell.extension" in loaded
    assert loaded.isdisjoint({"records", "shell.session", "heap.live.heap"})  # the first cell's
    assert loaded.isdisjoint({"torch", "matplotlib", "numpy", "jinja2", "rich", "pynvml"})
    assert loaded.isdisjoint({"report.history", "magics.gpumem", "magics.experiment"})


@pytest.mark.parametrize(
    ("name", "needed"), [("load", "report.export"), ("tensors", "inventory.arrays.survey")]
)
def test_a_script_imports_only_features_that_it_calls(name: str, needed: str) -> None:
    loaded = imported_after(f"import ipygpumem\nipygpumem.{name}")
    assert needed in loaded
    assert not [
        name
        for name in loaded
        if name.startswith(("IPython", "shell", "magics", "fitting", "estimating"))
    ]


@alone
def test_an_estimate_with_a_broken_torch_says_so_in_one_line() -> None:
    for torch in (ModuleType("torch"), module_from_spec(ModuleSpec("torch", None))):
        sys.modules["torch"] = torch
        with pytest.raises(EstimateError, match="torch cannot make estimates: "):
            loading.import_estimator()


EXPANDED = {
    "a name": "start {name}",
    "a dollar": "start $name",
    "an attribute": "start {name.upper()}",
    "nothing": "start plain",
    "an unknown name": "start {unknown}",
}


@pytest.mark.parametrize(
    "call", ["%experiment LINE", "get_ipython().run_line_magic('experiment', 'LINE')"]
)
@pytest.mark.parametrize("line", EXPANDED.values(), ids=EXPANDED)
def test_variables_in_a_line_are_replaced_as_ipython_does(
    loaded: InteractiveShell, call: str, line: str
) -> None:
    loaded.run_cell("name = 'one'")
    loaded.run_cell(call.replace("LINE", line))
    (experiment,) = app_of(loaded).experiments.open
    assert experiment.name == loaded.var_expand(line).removeprefix("start ")


def test_locals_of_the_calling_function_are_replaced_in_a_line(loaded: InteractiveShell) -> None:
    loaded.run_cell(
        """
        def inner(local):
            get_ipython().run_line_magic("experiment", "start {local}")
        inner("two")
        """
    )
    (experiment,) = app_of(loaded).experiments.open
    assert experiment.name == "two"


def test_functions_know_the_notebook_in_the_cell_that_loads(bare_kernel: Kernel) -> None:
    run_cells(
        bare_kernel,
        """
        %load_ext ipygpumem
        import ipygpumem
        with ipygpumem.trace("step", silent=True):
            data = bytearray(1 << 20)
        """,
    )
    assert bare_kernel.value("len(ipygpumem.traces())") == 1
