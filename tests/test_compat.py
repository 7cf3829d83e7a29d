"""A notebook that was written for ipyexperiments 0.1.29 does the same after its import is changed.

Each runs in two real kernels, under the original and under ours. The original takes the host's peaks from a thread that
samples, and counts what Python frees late: figures of 64 MiB and more are compared, with 8 MiB of tolerance.
"""

from __future__ import annotations

import ast
import importlib.util
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.compat.ipyexperiments import IPyExperimentsCPU
from ipygpumem.compat.ipyexperiments.cell_logger import set_seed
from ipygpumem.compat.ipyexperiments.utils.ipython import (
    IS_IN_IPYTHON,
    ipython_tb_clear_frames,
    ipython_tb_clear_frames_ctx,
)
from ipygpumem.compat.ipyexperiments.utils.mem import b2mb
from ipygpumem.errors import GpuMemError
from ipygpumem.notebook.notebook import notebook_of
from tests.kernel import Kernel, Reply
from tests.tracing import interrupted_at

MIB = 1 << 20
TOLERANCE = 8 * MIB
ORIGINAL, OURS = "ipyexperiments", "ipygpumem.compat.ipyexperiments"

needs_original = pytest.mark.skipif(
    importlib.util.find_spec(ORIGINAL) is None, reason="ipyexperiments 0.1.29 is not installed"
)

NAMES = "sorted(name for name in globals() if not name.startswith('_') and name not in ('In', 'Out', 'exit', 'quit'))"


TIDY = (
    "for _value in list(globals().values()):\n    if hasattr(type(_value), 'keep_var_names'): _value.finish()",
    "%reset -f",
)
"""In this order: the original's end within a reset deletes names that IPython then does not find."""


@pytest.fixture(scope="module")
def two_kernels() -> Iterator[tuple[Kernel, Kernel]]:
    with Kernel() as original, Kernel() as ours:
        yield original, ours


@pytest.fixture
def kernels(two_kernels: tuple[Kernel, Kernel]) -> tuple[Kernel, Kernel]:
    """One for the original, one for ours, without names and experiments of other tests."""
    for kernel in two_kernels:
        replies(kernel, "", TIDY)
    return two_kernels


def replies(kernel: Kernel, package: str, cells: Sequence[str]) -> list[Reply]:
    found = []
    for cell in cells:
        reply = kernel.run(cell.replace("PEER", package))
        assert reply.status == "ok", (package, cell, reply.traceback)
        assert "is not affected" not in reply.stderr
        found.append(reply)
    return found


def under_both(kernels: tuple[Kernel, Kernel], cells: Sequence[str], *values: str) -> list[tuple[Any, Any]]:
    """Run a notebook under both, and return what each of ``values`` is then: the original's, and ours."""
    original, ours = kernels
    replies(original, ORIGINAL, cells)
    replies(ours, OURS, cells)
    return [(original.value(value), ours.value(value)) for value in values]


def plain(value: str) -> str:
    """Return an expression for a data tuple as plain data, with its fields' names."""
    return f"[(name, tuple(part), part._fields) for name, part in {value}._asdict().items()]"


@needs_original
@pytest.mark.parametrize(
    "end",
    ["exp.finish()", "del exp", "exp = None", "exp.__exit__(None, None, None)"],
)
def test_new_names_go_kept_ones_stay_and_older_ones_are_as_bound_last(kernels: tuple[Kernel, Kernel], end: str) -> None:
    cells = [
        "import random\nolder, counter = [1], 0",
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()\nsame_cell = 1",
        "new, kept, _private = bytearray(10), 'kept', 'private'\ncounter = 5\nimport json",
        "exp.keep_var_names('kept', 'never_bound')",
        end,
    ]
    (names, ours), (values, our_values) = under_both(kernels, cells, NAMES, "(older, counter, kept, _private)")
    assert ours == names
    assert our_values == values == ([1], 5, "kept", "private")


@needs_original
def test_a_with_block_ends_at_an_error_too(kernels: tuple[Kernel, Kernel]) -> None:
    cells = [
        "from PEER import IPyExperimentsCPU\nouter = 1",
        "try:\n    with IPyExperimentsCPU() as exp: inside = 1; 1 / 0\nexcept ZeroDivisionError:\n    outer = 2",
    ]
    ((names, ours),) = under_both(kernels, cells, NAMES)
    assert "inside" not in ours
    assert ours == names


@needs_original
def test_an_older_name_of_a_deleted_object_stays_under_ours_alone(kernels: tuple[Kernel, Kernel]) -> None:
    """The original deletes by identity: each name of an object goes with the new one."""
    cells = [
        "model = bytearray(100)\nresults = [model]",
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()",
        "alias = model",
        "data = exp.finish()",
    ]
    ((original, ours),) = under_both(kernels, cells, "'model' in globals(), 'alias' in globals()")
    assert (original, ours) == ((False, False), (True, False))


@needs_original
def test_data_has_the_same_fields_and_figures(kernels: tuple[Kernel, Kernel]) -> None:
    cells = [
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()",
        "block = b'1' * (96 << 20)",
        "during, cell = exp.data, exp.cl.data\nexp.keep_var_names('during', 'cell', 'final')",
        "final = exp.finish()",
    ]
    original, ours = kernels
    replies(original, ORIGINAL, cells)
    replies(ours, OURS, cells)
    for name in ("during", "final"):
        theirs, our_own = original.value(plain(name)), ours.value(plain(name))
        assert [(part, fields) for part, _, fields in our_own] == [(part, fields) for part, _, fields in theirs]
        consumed, reclaimed, available = our_own[0][1]
        assert abs(consumed - 96 * MIB) < TOLERANCE
        assert abs(reclaimed - (96 * MIB if name == "final" else 0)) < TOLERANCE
        assert available > 0
        assert abs(our_own[0][1][0] - theirs[0][1][0]) < TOLERANCE
        assert abs(our_own[0][1][1] - theirs[0][1][1]) < TOLERANCE
        assert our_own[1][1] == theirs[1][1] == (0, 0, 0)
    theirs, our_own = original.value(plain("cell")), ours.value(plain("cell"))
    assert [(part, fields) for part, _, fields in our_own] == [(part, fields) for part, _, fields in theirs]
    assert abs(our_own[0][1][0] - theirs[0][1][0]) < TOLERANCE
    assert (theirs[1][1], our_own[1][1]) == ((0, -1, -1), (0, 0, 0))  # the original's marks for no device
    assert our_own[2][1][0] > 0


@needs_original
def test_a_cells_peak_is_what_it_needed_above_what_it_kept(kernels: tuple[Kernel, Kernel]) -> None:
    """Memory that lasts long enough is seen by the original's thread, too."""
    fill = "import time\nspike = bytearray(128 << 20); time.sleep(0.5); del spike\nblock = bytearray(b'1') * (64 << 20)"
    cells = ["from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()", fill, "cpu, gpu, took = exp.cl.data"]
    ((original, ours),) = under_both(kernels, cells, "(cpu.used_delta, cpu.peaked_delta, cpu.used_total > 0)")
    assert abs(ours[0] - 64 * MIB) < TOLERANCE
    assert original[2] is ours[2] is True
    assert abs(ours[1] - original[1]) < TOLERANCE
    assert abs(ours[0] - original[0]) < TOLERANCE


@needs_original
def test_what_a_cell_did_before_it_made_the_experiment_does_not_count(kernels: tuple[Kernel, Kernel]) -> None:
    kernels[1].run("%load_ext ipygpumem")  # then that cell has a record, of all of it
    make = "from PEER import IPyExperimentsCPU\nolder = b'1' * (64 << 20)\nexp = IPyExperimentsCPU()"
    ((original, ours),) = under_both(kernels, [make, "cell = exp.cl.data"], "cell.cpu.used_delta")
    assert abs(ours) < TOLERANCE
    assert abs(original) < TOLERANCE


@needs_original
def test_a_stop_in_a_cell_tells_what_that_cell_has_cost_by_then(kernels: tuple[Kernel, Kernel]) -> None:
    cells = [
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()\nimport time",
        "before = exp.cl.data",
        "block = b'1' * (64 << 20); time.sleep(0.2)\nexp.cl.stop()\nstopped = exp.cl.data",
        "more = b'1' * (64 << 20)",
        "same = exp.cl.data == stopped",
    ]
    value = "stopped.cpu.used_delta, stopped.time.time_delta >= 0.2, same"
    ((original, ours),) = under_both(kernels, cells, value)
    assert original[1:] == ours[1:] == (True, True)
    assert abs(ours[0] - 64 * MIB) < TOLERANCE
    assert abs(ours[0] - original[0]) < TOLERANCE


@needs_original
@pytest.mark.parametrize("enabled", [True, False])
def test_a_seed_gives_each_cell_the_same_numbers(kernels: tuple[Kernel, Kernel], enabled: bool) -> None:
    cells = [
        "import random, numpy\ndrawn = []",
        f"from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU(exp_enable={enabled}, cl_set_seed=42)",
        "drawn += [random.random(), float(numpy.random.rand())]",
        "drawn += [random.random(), float(numpy.random.rand())]",
        "exp.finish(); random.random()",
        "drawn += [random.random()]",
    ]
    ((original, ours),) = under_both(kernels, cells, "drawn")
    assert original[:4] == ours[:4]
    assert ours[:2] == ours[2:4]
    assert ours[4] != ours[0]


@needs_original
def test_with_the_cell_logger_alone_names_stay(kernels: tuple[Kernel, Kernel]) -> None:
    cells = [
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU(exp_enable=False, cl_compact=True)",
        "block = b'1' * (64 << 20)",
        "delta = exp.cl.data.cpu.used_delta",
        "end = exp.finish()",
    ]
    (names, ours), (delta, our_delta), (end, our_end) = under_both(kernels, cells, NAMES, "delta", "repr(end)")
    assert ours == names
    assert abs(delta - our_delta) < TOLERANCE
    assert end == our_end == "None"


@needs_original
def test_an_experiment_made_anew_in_its_cell_ends_the_older_one_alone(kernels: tuple[Kernel, Kernel]) -> None:
    make = "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()"
    cells = [make, "first = 1", make, "second = 2\nstill_runs = exp.running", "exp.keep_var_names('still_runs')"]
    (names, ours), (_, running) = under_both(kernels, cells, NAMES, "still_runs")
    assert ours == names
    assert running is True
    replies(kernels[0], ORIGINAL, ["exp.finish()"])
    replies(kernels[1], OURS, ["exp.finish()"])
    assert kernels[1].value(NAMES) == kernels[0].value(NAMES)
    assert "second" not in kernels[1].value(NAMES)


@needs_original
def test_two_experiments_end_in_any_order(kernels: tuple[Kernel, Kernel]) -> None:
    cells = [
        "from PEER import IPyExperimentsCPU\nouter = IPyExperimentsCPU()",
        "one = 1",
        "inner = IPyExperimentsCPU()",
        "two = 2",
        "outer.finish()",
    ]
    (names, ours), (_, runs) = under_both(kernels, cells, NAMES, "inner.running")
    assert ours == names
    assert runs is True


LEFT_OUT = {
    "exp": {
        "backend_init": "for a backend of one's own",
        "start": "for a backend of one's own",
        "gpu_ram_used_fast": "takes a handle of pynvml's",
        "namespace": "IPython's own magics",
    },
    "logger": {
        **dict.fromkeys(("pre_run_cell", "post_run_cell"), "what IPython calls"),
        **dict.fromkeys(("peak_monitor_func", "peak_monitoring"), "the thread that samples"),
        **dict.fromkeys(("cpu_mem_used_peak", "gpu_mem_used_peak"), "what that thread has seen so far"),
        "cpu_mem_used_at_cell_start": "a figure of a cell that is half measured",
        **dict.fromkeys(("gpu_ram", "gpu_ram_used", "gpu_ram_avail", "gpu_clear_cache"), "the experiment has them"),
        "gpu_ram_used_fast": "takes a handle of pynvml's",
        "ipython": "IPython's shell",
    },
    "modules['.cell_logger']": dict.fromkeys(("int2width", "secs2time"), "lays out the original's report"),
    "modules['.ipyexperiments']": {"int2width": "lays out the original's report"},
}
"""What the original has and we have not, with the reason."""

OBJECTS = (
    "import importlib\npackage = importlib.import_module('PEER')\nexp = package.IPyExperimentsCPU()",
    "logger = exp.cl\nmodules = {place: importlib.import_module('PEER' + place)"
    " for place in ('', '.ipyexperiments', '.cell_logger', '.utils.ipython')}",
    "exp.keep_var_names('*', *globals())\nend = exp.finish()",
)
OWN = "str(getattr(getattr({0}, name), '__module__', 'PEER')).startswith('PEER')"


@needs_original
def test_every_name_of_the_original_is_there_apart_from_a_short_list(kernels: tuple[Kernel, Kernel]) -> None:
    """On the objects themselves, once they have ended, and in the modules: what these have made themselves."""
    original, ours = kernels
    replies(original, ORIGINAL, OBJECTS)
    replies(ours, OURS, OBJECTS)
    places = [f"modules[{place!r}]" for place in ("", ".ipyexperiments", ".cell_logger", ".utils.ipython")]
    for place in ("exp", "logger", *places):
        its_own = OWN.format(place).replace("PEER", ORIGINAL) if place in places else "True"
        its_own += f" and type(getattr({place}, name)).__name__ not in ('module', 'Logger', 'Process')"
        names = original.value(f"[name for name in dir({place}) if name[0] != '_' and {its_own}]")
        missing = ours.value(f"[name for name in {names!r} if not hasattr({place}, name)]")
        assert set(missing) == set(LEFT_OUT.get(place, {})), place


def signatures(path: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return the parameters of each public function and method in a file, and their defaults as they are written.

    The original's ``utils.mem`` cannot be imported without a GPU.
    """
    found = {}
    tree = ast.parse(path.read_text("utf-8"))
    classes = {item: node.name for node in tree.body if isinstance(node, ast.ClassDef) for item in node.body}
    for node in [*tree.body, *classes]:
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
            names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
            defaults = [ast.unparse(default) for default in (*node.args.defaults, *node.args.kw_defaults) if default]
            found[".".join(filter(None, (classes.get(node), node.name)))] = names, defaults
    return found


@needs_original
@pytest.mark.parametrize("module", ["ipyexperiments", "cell_logger", "utils/mem", "utils/ipython"])
def test_parameters_and_defaults_are_those_of_the_original(module: str) -> None:
    folders = [Path(str(importlib.util.find_spec(package).origin)).parent for package in (ORIGINAL, OURS)]  # type: ignore[union-attr]
    theirs, ours = (signatures(folder / f"{module}.py") for folder in folders)
    ours.pop("CellLogger.__init__", None)  # made by an experiment only
    same = theirs.keys() & ours.keys()
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    if module == "utils/mem":
        assert theirs.keys() <= ours.keys()
        assert len(same) == 11


@needs_original
def test_attributes_say_the_same_while_it_runs_and_once_it_has_ended(kernels: tuple[Kernel, Kernel]) -> None:
    state = (
        "(exp.running, exp.reclaimed, exp.cl.running, exp.cl.backend, exp.cl_kwargs, exp.backend, exp.has_gpu,"
        " exp.var_names_keep, 'older' in exp.var_names_start, exp.start_time > 0, exp.cl.set_seed, exp.cl.compact,"
        " exp.cl.gc_collect, exp.cl.time_delta == exp.cl.data.time.time_delta, same,"
        " exp.cl.cpu_mem_used_delta == exp.cl.data.cpu.used_delta,"
        " exp.cl.cpu_mem_used_new == exp.cl.data.cpu.used_total, exp.cpu_ram_used_start > 0, exp.gpu_ram_used_start)"
    )
    cells = [
        "older = 1",
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU(cl_compact=True, cl_set_seed=3)",
        "a, b, c = 1, 2, 3\nexp.keep_var_names('a', 'state', 'logger')",
        "exp.var_names_keep.append('b')",
        "logger = exp.cl; logger.stop(); stopped = not logger.running\nsame = stopped and logger.start() is logger",
        f"state = {state}",
        "end = exp.finish()\nsecond = exp.cpu_ram_cons == end.cpu.consumed, exp.gpu_ram_cons",
    ]
    ended = "(exp.running, exp.reclaimed, exp.cl, logger.running, a, b, 'c' in globals(), exp.var_names_keep, second)"
    (state_then, our_state), (then, our_end) = under_both(kernels, cells, "state", ended)
    assert our_state == state_then
    assert our_end == then


# -- ours alone -----------------------------------------------------------------------------------------------


def test_the_report_says_what_was_before_then_what_was_consumed_reclaimed_and_the_peak(bare_kernel: Kernel) -> None:
    made, _, ended = replies(
        bare_kernel,
        OURS,
        [
            "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()",
            "block = b'1' * (64 << 20)",
            "exp.keep_var_names('result'); result = 1\nexp.finish();",
        ],
    )
    (before,) = made.reports("experiment")
    assert before.splitlines()[0] == "IPyExperimentsCPU started"
    assert before.splitlines()[1].split() == ["device", "used", "free", "total"]
    (report,) = ended.reports("experiment")
    assert report.startswith("experiment IPyExperimentsCPU · ")
    places = [report.index(word) for word in ("consumed", "reclaimed", "peak", "deleted: block", "kept: result", "now")]
    assert places[:3] == sorted(places[:3])
    assert places[-1] == max(places)


def test_a_cell_says_what_it_cost_unless_the_logger_is_off(bare_kernel: Kernel) -> None:
    cells = [
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()",
        "1",
        "exp = IPyExperimentsCPU(cl_enable=False, cl_gc_collect=False)",
        "1",
        "exp = IPyExperimentsCPU(cl_enable=False, cl_gc_collect=False)",
        "1",
        "exp.finish()",
        "1",
    ]
    lines = [len(reply.reports("cell")) for reply in replies(bare_kernel, OURS, cells)]
    assert lines == [0, 1, 0, 0, 0, 0, 1, 1]  # the cell that loads the extension has no line
    assert bare_kernel.value("get_ipython().run_line_magic('config', 'IPyGpuMem.collect_garbage')") is True


def test_imports_with_an_asterisk_leave_the_users_names(bare_kernel: Kernel) -> None:
    own = "F, Cell, Usage, utils, cell_logger, ipyexperiments"
    places = ("", ".ipyexperiments", ".cell_logger", ".utils.ipython", ".utils.mem")
    imports = [f"from PEER{place} import *" for place in places]
    replies(bare_kernel, OURS, [f"{own} = 'mine  '", *imports])
    assert bare_kernel.value(f"({own}) == tuple('mine  ')") is True
    names = "IPyExperiments, IPyExperimentsCPU, IPyExperimentsGPU, IPyExperimentsPytorch, CellLogger, set_seed, b2mb"
    assert bare_kernel.value(f"len(({names}, IS_IN_IPYTHON, ipython_tb_clear_frames))") == 9


def test_a_logger_of_an_extension_that_was_unloaded_does_not_start(bare_kernel: Kernel) -> None:
    """It would go along with no cell, and its figures would be zeros."""
    make = "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()\nlogger = exp.cl"
    replies(bare_kernel, OURS, [make, "1", "%unload_ext ipygpumem"])
    for cell in ("logger.start()", "%load_ext ipygpumem\nlogger.start()"):
        refused = bare_kernel.run(cell)
        assert (refused.error, "unloaded" in refused.message) == ("ExperimentError", True)
    replies(bare_kernel, OURS, ["logger.stop()"])
    assert bare_kernel.value("logger.running, logger.data.cpu.used_total > 0") == (False, True)


@pytest.mark.parametrize(("enabled", "logs"), [(True, True), (True, False), (False, False)])
def test_an_experiment_whose_start_is_interrupted_is_over(
    shell: InteractiveShell, enabled: bool, logs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    notebook = notebook_of(shell)
    parts, made, line = notebook.session.parts, [], 1

    def make() -> None:
        made.append(IPyExperimentsCPU(exp_enable=enabled, cl_enable=logs, cl_gc_collect=False, cl_set_seed=3))

    while interrupted_at(line, make, lambda frame: frame.f_code.co_name in ("_start", "start", "join")):
        assert (notebook.experiments.open, notebook.session.parts) == ([], parts)
        assert notebook.tools.config.report
        assert notebook.tools.config.collect_garbage
        line += 1
    assert line > 5
    assert len(made) == 1
    assert made[0].running
    made[0].finish()


def test_an_extension_that_is_unloaded_takes_the_experiment_with_it(bare_kernel: Kernel) -> None:
    replies(bare_kernel, OURS, ["from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU(cl_set_seed=1)", "x = 1"])
    assert "open experiments" in bare_kernel.run("%unload_ext ipygpumem").stderr
    refused = bare_kernel.run("exp.finish()")
    assert refused.error == "ExperimentError"
    assert "unloaded" in refused.message
    gone = bare_kernel.run("del exp")
    assert (gone.status, gone.stderr) == ("ok", "")
    assert bare_kernel.value("x") == 1
    replies(bare_kernel, OURS, ["exp = IPyExperimentsCPU()", "y = 1", "exp.finish()"])
    assert bare_kernel.value("'y' in globals()") is False


@pytest.mark.parametrize("enabled", [True, False])
def test_an_experiment_whose_extension_was_unloaded_shows_its_state_and_has_ended(
    bare_kernel: Kernel, enabled: bool
) -> None:
    make = f"from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU(exp_enable={enabled})"
    replies(bare_kernel, OURS, [make, "%unload_ext ipygpumem", "exp.print_state()"])
    assert bare_kernel.value("exp.cpu_ram_used() > 1 << 20, exp.running") == (True, False)
    read = bare_kernel.run("exp.data")  # where nothing can be measured, 0 is no figure
    assert (read.error, "unloaded" in read.message) == (("ExperimentError", True) if enabled else (None, False))
    replies(bare_kernel, OURS, ["%load_ext ipygpumem"])
    assert bare_kernel.value("exp.running") is False


@pytest.mark.parametrize("reset", ["%reset -f", "%reset_selective -f ."])
def test_a_reset_of_all_names_ends_an_experiment_and_finds_its_names(bare_kernel: Kernel, reset: str) -> None:
    """IPython deletes name by name, in no order: an end that deleted others of them would break it."""
    many = "\n".join(f"name_{number} = {number}" for number in range(50))
    replies(bare_kernel, OURS, ["from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()", many])
    reply = bare_kernel.run(reset)
    assert (reply.status, reply.message) == ("ok", "")
    assert len(reply.reports("experiment")) == 1
    assert bare_kernel.value("'exp' in globals(), 'name_7' in globals()") == (False, False)


def test_an_experiment_that_a_magic_has_ended_gives_its_data(bare_kernel: Kernel) -> None:
    cells = ["from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()", "x = 1", "%experiment end"]
    replies(bare_kernel, OURS, cells)
    assert bare_kernel.value("exp.running, 'x' in globals(), exp.finish()._fields") == (False, False, ("cpu", "gpu"))


def test_what_goes_along_with_an_experiment_ends_when_a_magic_has_ended_it(bare_kernel: Kernel) -> None:
    make = "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU(cl_enable=False, cl_gc_collect=False)"
    cells = [make, "%experiment end", "del exp", "1", "exp = IPyExperimentsCPU(cl_set_seed=7)", "x = 1"]
    assert [len(reply.reports("cell")) for reply in replies(bare_kernel, OURS, cells)] == [0, 0, 1, 1, 1, 1]
    draw = "import random\ndrawn = [*globals().get('drawn', []), random.random()]"
    replies(bare_kernel, OURS, ["%experiment end", draw, draw, "%config IPyGpuMem.report = False", "exp.finish()"])
    assert bare_kernel.value("drawn[0] == drawn[1], exp.running, exp.cl") == (False, False, None)
    assert len(bare_kernel.run("1").reports("cell")) == 0  # as was said after the experiment's end


def test_a_ctrl_c_while_a_deleted_experiment_ends_leaves_no_half_of_it(bare_kernel: Kernel) -> None:
    """Python drops what a ``__del__`` raises, and prints its traceback."""
    slow = "class Slow:\n    def __del__(self): print('begun', flush=True); __import__('time').sleep(9)"
    make = "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()"
    replies(bare_kernel, OURS, [make, slow, "slow, other = Slow(), 1"])
    reply = bare_kernel.run("del exp", interrupt_when="begun")
    assert (reply.stderr, len(reply.reports("experiment"))) == ("", 1)
    assert bare_kernel.value("'slow' in globals(), 'other' in globals()") == (False, False)
    assert "no experiment is open" in bare_kernel.run("%experiment end").stderr


def test_outputs_of_the_experiments_cells_go_and_kept_names_may_be_globs(bare_kernel: Kernel) -> None:
    cells = [
        "1",
        "from PEER import IPyExperimentsCPU\nexp = IPyExperimentsCPU()",
        "[2]",
        "loss_a, loss_b, other = 1, 2, 3",
    ]
    replies(bare_kernel, OURS, [*cells, "exp.keep_var_names('loss_*')\nexp.finish();"])
    assert bare_kernel.value("sorted(Out), loss_a + loss_b, 'other' in globals()") == ([1], 3, False)


def test_bad_input_is_one_clear_line_and_loses_nothing(bare_kernel: Kernel) -> None:
    replies(
        bare_kernel,
        OURS,
        ["from PEER import *\nfrom PEER import IPyExperimentsGPU\nexp = IPyExperimentsCPU()", "x = 1"],
    )
    for cell, error, text in (
        ("exp.keep_var_names('x', 1)", "ValueError", "takes names as text"),
        ("exp.var_names_keep = 'x'", "ValueError", "a list of names"),
        ("exp.var_names_keep = [1]", "ValueError", "a list of names"),
        ("IPyExperimentsGPU()", "ExperimentError", "use IPyExperimentsCPU or IPyExperimentsPytorch"),
        ("IPyExperimentsCPU(cl_set_seed='1')", "ExperimentError", "seed must be a whole number"),
        ("IPyExperimentsCPU(cl_set_seed=None)", "ExperimentError", "seed must be a whole number"),
        ("IPyExperimentsCPU(exp_enable=False, cl_enable=False, cl_set_seed=1.5)", "ExperimentError", "seed must be"),
        ("exp.cl.set_seed = 'x'", "ExperimentError", "seed must be a whole number"),
        ("IPyExperimentsCPU(compact=True)", "TypeError", "compact"),
        ("IPyExperimentsPytorch()", "ExperimentError", "torch sees no CUDA device"),
    ):
        reply = bare_kernel.run(cell)
        assert (reply.error, text in reply.message) == (error, True), (cell, reply.message)
        assert reply.stderr == ""
    assert bare_kernel.value("exp.cl.set_seed") == 0
    replies(bare_kernel, OURS, ["exp.var_names_keep.extend([1, None])", "exp.finish()"])
    assert bare_kernel.value("'x' in globals()") is False


def test_memory_functions_without_a_device(bare_kernel: Kernel) -> None:
    functions = "use_gpu, gpu_mem_get_mbs, gpu_mem_get_free_no_cache_mbs, gpu_mem_allocate_mbs, b2mb, preload_pytorch"
    replies(bare_kernel, OURS, ["from PEER.utils.mem import *"])
    assert bare_kernel.value(f"len(({functions}))") == 6
    found = bare_kernel.value("use_gpu, tuple(gpu_mem_get_mbs()), gpu_mem_get_free_no_cache_mbs(0), b2mb(3 << 20)")
    assert found == (False, (0, 0, 0), 0, 3)
    for cell in ("preload_pytorch()", "gpu_mem_allocate_mbs(1)", "gpu_mem_leave_free_mbs(1)"):
        reply = bare_kernel.run(cell)
        assert (reply.error, "CUDA device" in reply.message) == ("GpuMemError", True)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("b2mb('5')", "a number of bytes, and not '5'"),
        ("b2mb(None)", "a number of bytes, and not NoneType"),
        ("b2mb(float('nan'))", "a number of bytes, and not nan"),
        ("b2mb('5' * 10**6)", "a number of bytes, and not '555"),
        ("ipython_tb_clear_frames(5)", "stands above a function, and not above int"),
        ("set_seed('1')", "seed must be a whole number"),
        ("set_seed(1 << 70)", "seed must be a whole number"),
    ],
)
def test_a_helper_that_gets_what_it_cannot_use_says_so_in_one_line(call: str, text: str) -> None:
    with pytest.raises(GpuMemError) as raised:
        eval(call)
    message = str(raised.value)
    assert text in message
    assert len(message) < 150
    assert "\n" not in message


def test_sizes_are_whole_mib_rounded_towards_zero() -> None:
    assert [b2mb(size) for size in (3 * MIB, 1.5 * MIB, -1.5 * MIB, True)] == [3, 1, -1, 0]


def test_a_seed_of_zero_changes_no_generator() -> None:
    random.seed(5)
    before = random.getstate()
    set_seed()
    assert random.getstate() == before
    set_seed(5)
    assert random.getstate() == before


class PickyError(Exception):
    """Its constructor takes more than a message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Big:
    pass


def fails(alive: list[Any]) -> None:
    import weakref

    big = Big()
    alive.append(weakref.ref(big))
    raise PickyError(7, "text")


def test_an_error_leaves_a_function_without_its_locals_and_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original makes a new one, which fails for this type."""
    alive: list[Any] = []
    with pytest.raises(PickyError) as raised:
        ipython_tb_clear_frames(fails)(alive)
    assert alive[0]() is not None  # outside of IPython nothing changes
    assert IS_IN_IPYTHON is False
    monkeypatch.setattr("ipygpumem.compat.ipyexperiments.utils.ipython.current_shell", object)
    with pytest.raises(PickyError) as raised:
        ipython_tb_clear_frames(fails)(alive)
    assert raised.value.args == (7, "text")
    assert alive[1]() is None


def test_an_error_leaves_a_block_without_the_locals_of_functions() -> None:
    alive: list[Any] = []
    with ipython_tb_clear_frames_ctx():
        pass
    with pytest.raises(PickyError) as raised, ipython_tb_clear_frames_ctx():
        fails(alive)
    assert raised.value.args == (7, "text")
    assert alive[0]() is None
