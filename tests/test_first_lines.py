"""A new user's first lines work, or one line says how to write them."""

import re
import sys
from configparser import ConfigParser
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import how_to_install
from ipygpumem.features import all_features
from ipygpumem.shell.commands.parsing import FUNCTIONS
from tests.alone import ROOT
from tests.steps import dedented, kernel_with, run_failing, run_quietly

notebook = kernel_with("%load_ext ipygpumem")
MAGICS = sorted(all_features().commands.magics)


# -- spellings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_line", ["%gpumem peak", "%%gpumem peak", "%gpumem peak --top 3"])
def test_peak_below_gpumem_is_the_magic_peak(notebook: Kernel, first_line: str) -> None:
    cell = f"{first_line}\n" + dedented(
        """
        block = bytearray(32 << 20)
        del block
        """
    )
    assert run_quietly(notebook, cell).reports("peak")


def test_a_cell_magic_below_gpumem_gets_its_cell(notebook: Kernel) -> None:
    run_quietly(notebook, "%gpumem isolate\ninner = 1")
    run_failing(notebook, "inner", "NameError")
    assert run_quietly(notebook, "%%gpumem memlines\nlines = 1").reports("memlines")
    assert run_quietly(notebook, "%%gpumem experiment demo\nscoped = 1").reports("experiment")
    run_failing(notebook, "scoped", "NameError")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x = 1\n%gpumem peak", "%gpumem: write %%peak as the first line of a cell"),
        ("x = 1\n%gpumem isolate --keep a", "%gpumem: write %%isolate as the first line"),
        ("%gpumem experiment start a", "%gpumem: write %experiment or %%experiment as the"),
        ("%gpumem gpumemit f()", "%gpumem: write %gpumemit or %%gpumemit as the first"),
        ("%gpumem peak", "%%peak: the cell is empty"),
        ("%gpumem estimate", "%%estimate: the cell is empty"),
        ("%gpumem isolate --keep a", "%%isolate: the cell is empty"),
        ("%%gpumemit", "%%gpumemit: which statements? Write them below"),
        ("%estimate", "%estimate: write %%estimate as the first line of a cell"),
        ("%isolate --keep a", "%isolate: write %%isolate as the first line of a cell"),
        ("%experiment start", "which name? Write it first: %experiment start demo"),
        ("%experiment demo", "to open one of this name: %experiment start demo"),
        ("%gpumem experiments", "%gpumem: write %experiment list"),
        ("%gpumem del x", "%gpumem: write del NAME in Python, or %gpumem why NAME for"),
        ("%gpumem export", "For instance: %gpumem export session.json"),
        ("%gpumem config", "%gpumem: write %config IPyGpuMem"),
        ("%gpumem trace", "%gpumem: write ipygpumem.trace(...) in Python"),
    ],
)
def test_another_magic_below_gpumem_is_named(notebook: Kernel, line: str, says: str) -> None:
    assert says in run_failing(notebook, line, None).stderr


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%gpumem list", "did you mean top?"),
        ("%%experiment --name x\na = 1", "the name stands alone, as in %%experiment x"),
        ("%experiment start --name=x", "the name stands alone, as in %experiment start x"),
        ("%%estimate cuda:0\na = 1", "did you mean --device cuda:0?"),
        ("%%estimate 24GiB\na = 1", "did you mean --device-memory 24GiB?"),
        ("%gpumem leaks 1MiB", "did you mean --min 1MiB?"),
        ("%gpumem tensors cuda", "did you mean --device cuda?"),
        ("%gpumem top cpu", "did you mean --device cpu?"),
        ("%gpumem top help", "did you mean %gpumem top -h?"),
        ("%gpumem save x.json", "did you mean export?"),
        ("%gpumem limit 4GB", "did you mean guard?"),
    ],
)
def test_a_value_without_its_option_is_named_with_it(
    notebook: Kernel, cell: str, says: str
) -> None:
    assert says in run_failing(notebook, cell, None).stderr


@pytest.mark.parametrize("line", ["%gpumem help", "%gpumem --help", "%gpumem -h"])
def test_help_shows_the_commands(notebook: Kernel, line: str) -> None:
    shown = run_quietly(notebook, line).stdout
    assert "%gpumem top" in shown
    assert "%gpumem panel" in shown


def test_a_variable_named_ram_is_not_taken_for_the_device(notebook: Kernel) -> None:
    run_quietly(notebook, "RAM = bytearray(4 << 20)", "%gpumem", "RAM += bytearray(60 << 20)")
    (report,) = run_quietly(notebook, "%gpumem").reports("note")
    changes = re.findall(r"RAM \+(\d+)", report.partition("since the last look: ")[2])
    assert len(changes) == 2
    # The variable and the device have both grown by 60 MiB.
    assert all(55 <= int(change) <= 75 for change in changes)
    run_quietly(notebook, "del RAM")


def test_help_names_each_option_once(notebook: Kernel) -> None:
    for magic in ("%gpumem", "%experiment"):
        shown = run_quietly(notebook, f"{magic} help").stdout
        usages = re.findall(r"^    (-.*?)(?:  |$)", shown, re.MULTILINE)
        # Else the pattern finds none.
        assert len(usages) > 5
        assert sorted(usages) == sorted(set(usages))
    shown = run_quietly(notebook, "%gpumem help").stdout
    assert "number of rows (20); of plot: only the last cells or experiments" in shown


def test_help_names_the_other_magics(notebook: Kernel) -> None:
    shown = run_quietly(notebook, "%gpumem help").stdout
    assert [magic for magic in MAGICS if magic not in shown] == []


def test_help_of_a_command_shows_its_options(notebook: Kernel) -> None:
    text = run_quietly(notebook, "%gpumem export --help").stdout
    assert "--force" in text
    assert "::" not in text
    assert "--keep" in run_quietly(notebook, "%%isolate --help\nno code runs").stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%gpumem leaks?", "--min SIZE"),
        ("%gpumem top ?", "-n N"),
        ("%ipygpumem tensors??", "--by"),
        ("%experiment start?", "--keep"),
        ("%gpumem help tensors", "--by"),
        ("%gpumem help recorder on", "Start the recording"),
        ("%gpumem ?", "%gpumem tensors"),
    ],
)
def test_help_of_a_command_can_be_asked_for_in_each_usual_way(
    notebook: Kernel, line: str, says: str
) -> None:
    reply = run_quietly(notebook, line)
    assert says in reply.stdout
    assert reply.reports("cell") == []


def test_a_question_mark_after_a_wrong_command_names_the_command(notebook: Kernel) -> None:
    assert "did you mean leaks?" in run_failing(notebook, "%gpumem leak?", None).stderr


def test_a_question_mark_behind_a_name_is_ipythons(notebook: Kernel) -> None:
    reply = run_quietly(notebook, "%gpumem why int?")
    assert "usage" not in reply.stdout
    assert reply.stderr == ""


@pytest.mark.parametrize("above", ["# a comment", "first = 1"])
@pytest.mark.parametrize("name", ["experiment", "peak", "estimate"])
def test_a_cell_magic_below_the_first_line_says_so(notebook: Kernel, name: str, above: str) -> None:
    reply = run_failing(notebook, f"{above}\n%%{name} a\nsecond = 1", None)
    assert f"%%{name} must be the first line of its cell" in reply.stderr
    assert notebook.value("'second' in globals()") is False
    assert run_quietly(notebook, "%lsmagic").result


def test_a_glob_at_the_end_of_a_first_line_asks_for_no_help(notebook: Kernel) -> None:
    reply = run_quietly(notebook, "%%experiment globs --keep kept_?\nkept_1 = kept_2 = gone = 3")
    assert reply.stderr == ""
    (report,) = reply.reports("experiment")
    assert "deleted: gone" in report
    assert "kept: kept_1, kept_2" in report
    run_quietly(notebook, "del kept_1, kept_2")


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize("magic", MAGICS)
def test_every_magic_answers_a_call_for_help(notebook: Kernel, magic: str, word: str) -> None:
    body = "\n1 / 0" if magic.startswith("%%") else ""
    for cell in {f"{magic} {word}", f"{magic} {word}{body}"}:
        reply = run_quietly(notebook, cell)
        assert magic in reply.stdout
        assert "UsageError" not in reply.stderr


@pytest.mark.parametrize(
    "line",
    [
        "%%peak --top 5 -h",
        "%%peak --help --top 5",
        "%%estimate --device-memory 24GiB -h",
        "%%experiment a --keep b -h",
        "%%isolate --memory 1GiB -h",
        "%%memlines --sort kept -h",
        "%%autofit n=8 -h",
        "%%gpumemit -r 3 -h",
    ],
)
def test_help_may_be_asked_for_next_to_other_options(notebook: Kernel, line: str) -> None:
    for cell in (line, f"{line}\n1 / 0"):
        reply = run_quietly(notebook, cell)
        assert line.split()[0] in reply.stdout
        assert "UsageError" not in reply.stderr


def test_a_quoted_text_asks_for_no_help(notebook: Kernel) -> None:
    cell = "%%experiment quoted --note 'call=ls -h x'\nran = 1\nran"
    assert run_quietly(notebook, cell).result == "1"


@pytest.mark.parametrize("command", ["top", "tensors"])
def test_a_number_is_the_number_of_rows(notebook: Kernel, command: str) -> None:
    run_quietly(
        notebook, "import numpy\na, b, c = numpy.ones(2**18), numpy.ones(2**19), numpy.ones(2**20)"
    )
    (report,) = run_quietly(notebook, f"%gpumem {command} 2").reports(command)
    assert run_quietly(notebook, f"%gpumem {command} -n 2").reports(command)
    rows = [row for row in report.splitlines() if re.search(r"\b[abc]\b.*ndarray|ndarray", row)]
    assert len(rows) == 2


def test_a_number_is_the_number_of_rows_of_the_history(notebook: Kernel) -> None:
    run_quietly(notebook, "a = 1", "a = 2", "a = 3")
    (shown,) = run_quietly(notebook, "%gpumem history 2").reports("history")
    assert shown.startswith("history · the last 2 of ")


def test_recorder_alone_shows_its_state(notebook: Kernel) -> None:
    (shown,) = run_quietly(notebook, "%gpumem recorder").reports("note")
    assert shown.startswith("recording is off")


def test_the_name_of_the_package_is_a_spelling_of_the_magic(notebook: Kernel) -> None:
    reply = run_quietly(notebook, "%ipygpumem history -n 1")
    assert reply.reports("history")
    assert reply.reports("cell") == []
    assert "top?" in run_failing(notebook, "%ipygpumem tpo", None).stderr


def test_functions_that_a_wrong_command_names_are_there() -> None:
    assert set(FUNCTIONS) <= set(ipygpumem.__all__)


@pytest.mark.parametrize("name", ["leaks", "status", "free"])
def test_a_command_called_as_a_function_is_named(name: str) -> None:
    with pytest.raises(AttributeError, match=f"it is a command, %gpumem {name}"):
        getattr(ipygpumem, name)
    group = all_features().commands.magics["%gpumem"].load()
    assert name in group.names  # type: ignore[union-attr]  # it is a group


def test_printed_help_has_no_marks_of_a_docstring(notebook: Kernel) -> None:
    for line in ("%gpumem help", "%experiment help", "%gpumem why -h"):
        assert "``" not in run_quietly(notebook, line).stdout


# -- the panel -------------------------------------------------------------------------------------


def test_the_panel_is_a_command(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_line_magic("gpumem", "panel")
    assert "the panel needs a notebook" in capsys.readouterr().out


def test_the_command_panel_names_the_package_to_install(notebook: Kernel) -> None:
    run_quietly(notebook, "import sys\nsys.modules['anywidget'] = None")
    (line,) = run_quietly(notebook, "%gpumem panel").reports("note")
    assert line == (
        "the panel needs anywidget: run %pip install anywidget, reload the page, then run this "
        "cell again"
    )


# -- what is missing is named with the line that installs it ---------------------------------------


def test_the_line_that_installs_is_for_this_environment(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert how_to_install("memray") == "%pip install memray"
    assert how_to_install("lightning[extra]") == "%pip install 'lightning[extra]'"
    outside = SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython.core.getipython", outside)
    assert how_to_install("memray") == f"{sys.executable} -m pip install memray"


@pytest.mark.parametrize(
    ("library", "cell", "line"),
    [
        ("matplotlib", "%gpumem plot", "%pip install matplotlib"),
        ("pandas", "import ipygpumem; ipygpumem.history().to_pandas()", "%pip install pandas"),
        ("torch", "%%estimate\n1", "%pip install torch"),
        ("torch", "%gpumem preload", "%pip install torch"),
        ("memray", "%%peak\nb = bytearray(9 << 20)", "%pip install memray"),
    ],
)
def test_a_missing_library_is_named_with_its_line(
    notebook: Kernel, library: str, cell: str, line: str
) -> None:
    hide = f"import sys; hidden = sys.modules.get('{library}'); sys.modules['{library}'] = None"
    run_quietly(notebook, hide)
    reply = notebook.run(cell)
    shown = [reply.stderr, reply.message or "", *reply.reports()]
    assert line in " ".join(" ".join(shown).split())


def test_one_extra_has_all_that_readme_needs() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    wanted = {
        line for name in ("notebook", "plot", "peak", "panel") for line in extras[name].split("\n")
    }
    assert set(extras["all"].split("\n")) == wanted
    assert "'.[all]'" in (ROOT / "README.md").read_text("utf-8")


def test_readme_imports_all_names_of_its_examples() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "import ipygpumem" in readme or "ipygpumem." not in readme
