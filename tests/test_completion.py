"""Tab completion after our magics, and the magics in a real kernel, as a user types them."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython
import pytest
from IPython.core.interactiveshell import InteractiveShell

from benchmarks.harness.kernel import Kernel
from ipygpumem.magics.completions import files
from ipygpumem.magics.gpumem import WORDS_ON_RELEASING
from ipygpumem.shell.app import app_of
from ipygpumem.shell.commands.completion import complete
from ipygpumem.shell.commands.helps import help_of, printed_help
from ipygpumem.shell.config import IPyGpuMem
from ipygpumem.shell.dispatch import OTHER_NAMES
from ipygpumem.shell.ipython.rewriting import LINE_MAGICS, NEED_A_CELL
from ipygpumem.units import MIB
from tests.declared_commands import TABLE, all_commands, commands_in
from tests.steps import experiment, kernel_with

pytestmark = pytest.mark.filterwarnings("ignore:.*Completer.complete:PendingDeprecationWarning")
NAMES = sorted(TABLE.names)
LINES = ("", " ", "  ", " x", " -", " --", " on ", " end ", " start", " start a ", " plot", "\t")


def test_the_patterns_of_our_magics_name_all_of_them() -> None:
    """IPython's edge knows them without importing the table."""
    signs = set(TABLE.magics)
    with_line = {name.removeprefix("%") for name in signs if not name.startswith("%%")}
    of_cells = {name.removeprefix("%%") for name in signs if name.startswith("%%")}
    line_magics = {*with_line, *OTHER_NAMES.values()} - {"gpumemit"}  # which runs the user's code
    assert set(LINE_MAGICS.split("|")) == line_magics
    assert set(NEED_A_CELL.split("|")) == of_cells - with_line


@pytest.fixture
def loaded(shell: InteractiveShell) -> InteractiveShell:
    shell.run_line_magic("load_ext", "ipygpumem")
    # Its trees would stay: as many objects as all the rest of the process.
    shell.Completer.use_jedi = False
    return shell


def offered(shell: Any, line: str, until: int | None = None) -> set[str]:
    """Return the completions for a line and a cursor in it, as kernels ask and as terminals do."""
    place = len(line) if until is None else until
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newer way is called provisional
        newer = {item.text for item in shell.Completer.completions(line, place)}
    _, older = shell.complete(None, line, place)
    return newer | set(older)


def test_tab_never_fails(loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        assert list(loaded.strdispatchers["complete_command"].s_matches(f"%{name}"))
        for line in (f"{prefix}{name}{rest}" for prefix in ("", "%", "%%") for rest in LINES):
            offered(loaded, line)
            offered(loaded, f"{line}\nx = 1", len(line))
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "Error" not in shown.out + shown.err


def test_the_cursor_counts_and_a_variable_is_no_magic(loaded: InteractiveShell) -> None:
    line = "%gpumem plot --device  -n 3"
    assert "RAM" in offered(loaded, line, len("%gpumem plot --device "))
    assert loaded.complete("st", "%gpumem st")[1] == ["status"]
    assert "devices" in loaded.complete("", "%gpumem plot ")[1]
    loaded.run_cell("estimate = 5; experiment = 6")
    for line in ("estimate --", "experiment st"):
        assert not {"--device", "start"} & offered(loaded, line)


def test_files_in_folders_with_brackets_are_offered(
    loaded: InteractiveShell, tmp_path: Path
) -> None:
    folder = tmp_path / "runs[1]"
    folder.mkdir()
    (folder / "export.json").write_text("{}")
    assert files(app_of(loaded), f"{folder}/ex") == [f"{folder}/export.json"]


def completions(shell: InteractiveShell, line: str) -> list[str]:
    """Return the words after ``line``, with an open experiment and two variables."""
    app = app_of(shell)
    if not app.experiments.open:
        shell.run_cell("""
        %experiment start alpha
        weights = 1; _hidden = 2
        """)
    event = SimpleNamespace(line=line, text_until_cursor=line)
    return complete(app.commands, app, shell.user_ns, line.split()[0].strip("%"), event)


ALL_WORDS = {
    "%experiment ": ["start", "end", "keep", "status", "list", "compare"],
    "%experiment st": ["start", "end", "keep", "status", "list", "compare"],
    "%%experiment run --report ": ["full", "compact", "none"],
    "%experiment end ": ["alpha", "--on"],
    "%experiment end --on ": ["all"],
    "%gpumem on ": [],
    "%gpumem guard ": ["on", "off", "--limit", "--touched"],
    "%%isolate --time 3 ": ["--keep", "--memory", "--time"],
    "%gpumem recorder ": ["on", "off", "status"],
    "%gpumem recorder on ": [],
    "%gpumem plot devices --": ["--device", "-n"],
    "%gpumem export x.json --force ": ["--force"],
}


@pytest.mark.parametrize("line", ALL_WORDS)
def test_all_words_after_a_line_are_offered(loaded: InteractiveShell, line: str) -> None:
    assert completions(loaded, line) == ALL_WORDS[line]


def test_commands_and_options_are_offered(loaded: InteractiveShell) -> None:
    commands = {"on", "off", "status", "tensors", "history", "export"}
    assert commands <= set(completions(loaded, "%gpumem "))
    assert "--seed" in completions(loaded, "%experiment start run --")
    assert "--keep" in completions(loaded, "%%experiment run --k")


def test_names_of_variables_are_offered_but_no_private_ones(loaded: InteractiveShell) -> None:
    for line in ("%experiment keep ", "%%isolate --keep "):
        assert "weights" in completions(loaded, line)
    assert "_hidden" not in completions(loaded, "%%experiment b --keep ")


def test_a_command_asks_for_its_only_required_argument() -> None:
    for command in all_commands():
        questions = [item.missing for item in command.arguments if item.missing]
        assert len(questions) <= 1, command.name
        assert all(question.startswith("which ") for question in questions), command.name


def test_each_option_has_a_help_and_its_magic_shows_it() -> None:
    for magic in TABLE.magics:
        shown = " ".join(help_of(TABLE, magic).split())
        for command in commands_in(TABLE.find(magic)):
            assert command.name in shown
            for item in command.options.values():
                assert item.help, f"{command.name} {item.name}"
                assert item.usage in shown
                assert item.description in shown


shared = kernel_with(
    "%load_ext ipygpumem\nimport ipygpumem\ndef block(mib): return bytearray(b'x') * (mib << 20)"
)
"""Each of the tests below leaves it as it found it."""


def test_status_has_words_for_each_value_of_release_frames() -> None:
    assert WORDS_ON_RELEASING.keys() == set(IPyGpuMem.class_traits()["release_frames"].values)


def test_free_releases_garbage_and_stored_tracebacks(shared: Kernel) -> None:
    shared.run(
        """
        def fail():
            pinned = block(96)
            raise ValueError('kept for %debug')
        fail()
        """
    )
    shared.run("loop = [block(64)]; loop.append(loop); del loop")
    before = shared.value("ipygpumem.last().usages[0].after_bytes")
    (report,) = shared.run("%gpumem free").reports("note")
    # The loop may be collected by Python itself, at any moment.
    assert re.search(r"tracebacks \(RAM (9[56](\.\d)?|1(59|60)(\.\d)?) MiB\)", report)
    shared.run("pass")  # cells of our commands alone have no record
    # The block of 96 MiB, which the traceback kept.
    assert before - shared.value("ipygpumem.last().usages[0].after_bytes") > 90 * MIB


def test_our_own_search_of_names_is_not_in_an_experiments_peak(kernel: Kernel) -> None:
    # In a kernel of its own: what its start notes of earlier objects is the cell's memory alone.
    kernel.run("import ipygpumem")
    kernel.run(experiment("pass", name="first"))  # imports what ends need
    reply = kernel.run(experiment("corpus = [[i] for i in range(300_000)]", name="heavy"))
    assert reply.reports("experiment")
    cell, whole = kernel.value(
        "[r.usages[0].peak_delta_bytes for r in (ipygpumem.last(), ipygpumem.experiments()[-1])]"
    )
    # A list of all objects of the kernel takes more than 1 MiB.
    assert whole == pytest.approx(cell, abs=4 * MIB)


def test_an_error_in_nested_blocks_is_reported_once(shared: Kernel) -> None:
    shared.run("import numpy")
    reply = shared.run(
        """
        def fail():
            held = numpy.ones(1 << 20)
            numpy.ones(1 << 50)
        with ipygpumem.experiment('outer'):
            with ipygpumem.experiment('inner'):
                fail()
        """
    )
    (report,) = reply.reports("recovery")
    assert report.count("out of memory") == 1
    assert "held" in report


def test_closing_a_generator_inside_a_block_is_no_failure(shared: Kernel) -> None:
    shared.run("def items():\n    with ipygpumem.experiment('closed'): yield 1")
    shared.run("rest = items(); next(rest)")
    (report,) = shared.run("del rest").reports("experiment")
    assert "traceback" not in report


def test_an_error_after_a_caught_one_keeps_its_frames_for_debug(shared: Kernel) -> None:
    shared.run("import numpy, sys")
    shared.run(
        """
        def fail():
            numpy.ones(1 << 50)
        def other():
            wanted = 5
            raise ValueError
        try:
            with ipygpumem.experiment('caught'):
                fail()
        except MemoryError: pass
        other()
        """
    )
    frames = (
        "[f.f_locals.get('wanted') for f, _ in "
        "__import__('traceback').walk_tb(sys.last_traceback)][-1]"
    )
    assert shared.value(frames) == 5


@pytest.mark.skipif(
    IPython.version_info < (8, 6), reason="matchers of one's own are new in IPython 8.6"
)
def test_jedi_adds_no_python_names_to_our_options(shared: Kernel) -> None:
    shared.run(
        """
        from IPython.core.completer import provisionalcompleter
        def offered(line):
            with provisionalcompleter():
                return [item.text for item in get_ipython().Completer.completions(line, len(line))]
        """
    )
    assert shared.value("offered('%gpumem tensors --d')") == ["--device"]
    assert shared.value("offered('%%experiment a --ke')") == ["--keep"]
    assert "print" in shared.value("offered('pri')")


@pytest.mark.parametrize("words", [(), ("tensors",), ("leaks",)])
def test_help_fits_a_narrow_terminal(words: tuple[str, ...]) -> None:
    lines = printed_help(TABLE, "%gpumem", words, 80).splitlines()
    broken = [line for line in lines if not line.lstrip().startswith("[--kind ")]  # one usage
    assert max(map(len, broken)) <= 80
    wide = printed_help(TABLE, "%gpumem", words).splitlines()
    assert len(wide) < len(lines) or max(map(len, wide)) <= 80
