"""Bad options, an interpreter that the user's code has bent, and stubs in place of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.steps import goes_on, names, run, works


@pytest.mark.parametrize(
    ("bend", "mend"),
    [
        (
            "import sys, io\nkeep_out = sys.stdout\nclass Broken(io.StringIO):\n"
            "    def write(self, text): raise OSError\n"
            "sys.stdout = Broken()",
            "sys.stdout = keep_out",
        ),
        ("import sys\ndef trace(*a): return trace\nsys.settrace(trace)", "sys.settrace(None)"),
        ("import gc\ngc.disable()", "gc.enable()"),
        ("import gc\ndef fail(*a): raise ValueError\ngc.callbacks.append(fail)", "gc.callbacks.remove(fail)"),
        ("import warnings\nwarnings.simplefilter('error')", "warnings.resetwarnings()"),
        ("import sys\nsys.last_value = 5; sys.last_traceback = 'x'; sys.last_exc = []", "del sys.last_exc"),
        ("import builtins\nkeep_open, builtins.open = open, None", "builtins.open = keep_open"),
    ],
)
def test_cells_and_scopes_work_whatever_the_users_code_does_to_the_interpreter(
    notebook: Kernel, bend: str, mend: str
) -> None:
    works(notebook, f"x = 'old'\n{bend}")
    assert len(works(notebook, "y = 3").reports("cell")) == 1
    works(notebook, "%experiment start a", "x = 'new'")
    run(notebook, "1/0")
    for end in ("%experiment end", "%%experiment b\nx = 'new'\nz = 1"):
        assert len(works(notebook, end).reports("experiment")) == 1
    works(notebook, "%gpumem free", mend)
    assert notebook.value("x") == "old"
    goes_on(notebook)


def test_a_stub_in_place_of_torch_and_numpy_breaks_neither_cells_nor_scopes() -> None:
    stubs = ("None", "types.ModuleType('torch')", "types.SimpleNamespace(Tensor=7, ndarray=7)", "mock.MagicMock()")
    with Kernel() as kernel:
        works(kernel, "%load_ext ipygpumem", "import sys, types\nfrom unittest import mock")
        for stub in stubs:
            works(kernel, f"sys.modules['torch'] = {stub}\nx = 'old'")
            goes_on(kernel)
            works(kernel, "%%experiment a --seed 1\nx = 'new'\ny = [1]")
            assert (kernel.value("x"), "y" in names(kernel)) == ("old", False)
            works(kernel, f"sys.modules['numpy'] = {stub}", "%experiment start b --seed 1", "x = 'new'")
            works(kernel, "%gpumem status", "%gpumem free")
            run(kernel, "def f():\n    held = bytearray(1 << 20)\n    raise MemoryError\nf()")
            works(kernel, "%experiment end")
            assert kernel.value("x") == "old"
            works(kernel, "del sys.modules['torch'], sys.modules['numpy']")


SCRIPT = """import ipygpumem
x = 1
with ipygpumem.experiment("a", keep="y", report="none"):
    x = 2
    y = z = 3
print(x, y, "z" in globals())
"""


def test_a_script_without_ipython_is_said_in_one_line_what_to_use_and_that_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for arguments in ([script], ["-c", "import ipygpumem\nipygpumem.history()"]):
        plain = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600)
        assert plain.returncode == 1
        assert "ipython --ext ipygpumem" in plain.stderr.splitlines()[-1]
    command = [sys.executable, "-m", "IPython", "--ext", "ipygpumem", script]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "profile")}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=env)
    assert "1 3 False" in run.stdout.splitlines(), run.stderr
