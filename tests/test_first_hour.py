"""What a new user types first works, or one line says how to write it."""

import re
import sys
import textwrap
from configparser import ConfigParser
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import how_to_install
from tests.alone import ROOT
from tests.steps import fails, kernel_with, ok

notebook = kernel_with("%load_ext ipygpumem")


def code(text: str) -> str:
    return textwrap.dedent(text).strip() + "\n"


# -- spellings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_line", ["%gpumem peak", "%%gpumem peak", "%gpumem peak --top 3"])
def test_peak_below_gpumem_is_the_magic_peak(notebook: Kernel, first_line: str) -> None:
    cell = f"{first_line}\n" + code(
        """
        block = bytearray(32 << 20)
        del block
        """
    )
    assert ok(notebook, cell).reports("peak")


def test_a_cell_magic_below_gpumem_gets_its_cell(notebook: Kernel) -> None:
    ok(notebook, "%gpumem isolate\ninner = 1")
    fails(notebook, "inner", "NameError")
    assert ok(notebook, "%%gpumem memlines\nlines = 1").reports("memlines")
    assert ok(notebook, "%%gpumem experiment demo\nscoped = 1").reports("experiment")
    fails(notebook, "scoped", "NameError")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x = 1\n%gpumem peak", "%gpumem: write %%peak as the first line of a cell"),
        ("x = 1\n%gpumem isolate --keep a", "%gpumem: write %%isolate as the first line"),
        ("%gpumem experiment start a", "%gpumem: write %experiment or %%experiment as the"),
        ("%gpumem gpumemit f()", "%gpumem: write %gpumemit or %%gpumemit as the first"),
        ("%gpumem peak", "%%peak: the cell is empty"),
    ],
)
def test_another_magic_below_gpumem_is_named(notebook: Kernel, line: str, says: str) -> None:
    assert says in fails(notebook, line, None).stderr


@pytest.mark.parametrize("line", ["%gpumem help", "%gpumem --help", "%gpumem -h"])
def test_help_shows_the_commands(notebook: Kernel, line: str) -> None:
    shown = ok(notebook, line).stdout
    assert "%gpumem top" in shown
    assert "%gpumem panel" in shown


def test_help_of_a_command_shows_its_options(notebook: Kernel) -> None:
    assert "--force" in ok(notebook, "%gpumem export --help").stdout
    assert "--keep" in ok(notebook, "%%isolate --help\nno code runs").stdout


# -- the panel -------------------------------------------------------------------------------------


def test_the_panel_is_a_command(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_line_magic("gpumem", "panel")
    assert "the panel needs a notebook" in capsys.readouterr().out


def test_the_command_panel_says_what_to_install(notebook: Kernel) -> None:
    ok(notebook, "import sys\nsys.modules['anywidget'] = None")
    (line,) = ok(notebook, "%gpumem panel").reports("note")
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
    monkeypatch.setitem(sys.modules, "IPython.core.interactiveshell", SimpleNamespace())
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
    ok(notebook, hide)
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


def test_readme_imports_what_its_examples_use() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    cells = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if "ipygpumem." in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL):
        assert any("import ipygpumem" in cell for cell in cells)
