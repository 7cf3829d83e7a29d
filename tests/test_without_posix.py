"""A kernel without what Python lacks on Windows; `make verify` runs all of tests/smoke in such
kernels.
"""

import os
import re
import shutil
import textwrap
from pathlib import Path

from benchmarks.harness.kernel import Kernel
from tests.steps import run_failing, run_quietly

IMPORT_ALL = """
import importlib, pkgutil, sys, ipygpumem
sys.modules["torch"] = None  # it needs POSIX itself here
for module in pkgutil.walk_packages(ipygpumem.__path__, "ipygpumem."):
    if ".trainers." not in module.name:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.partition(".")[0] in ("torch", "anywidget"), error
del sys.modules["torch"]
"""
FILL_MEMORY = "rows = []\nwhile True: rows.append(bytearray(2**20))"
OUT_OF_MEMORY = textwrap.dedent(
    """\
    def f():
        held = bytearray(16 << 20)
        raise MemoryError
    f()"""
)
CELLS = (
    IMPORT_ALL,
    "%%experiment a --seed 1\nx = bytearray(8 << 20)",
    "%experiment start b",
    "y = bytearray(8 << 20)",
    "%experiment end",
    "%gpumem status",
    "%gpumem free",
    "%gpumem leaks",
    "%gpumem tensors",
    "%gpumem history",
    "%gpumem recorder on",
    "z = 1",
    "%gpumem recorder off",
    "%gpumem export session.json",
    "assert ipygpumem.load('session.json').experiments",
    "%gpumemit -r 1 sum(range(9))",
    "%%memlines\nfor i in range(2):\n    z = i",
    "%%autofit n=64 --min 2\nif n > 2: raise MemoryError",
    "for i in ipygpumem.track(range(2)): pass",
    "with ipygpumem.trace('part'): pass",
    "%reload_ext ipygpumem",
    "%config IPyGpuMem.host_peak = 'sampled'",
    "%config IPyGpuMem.host_peak = 'kernel'",
)


def test_the_extension_works_without_posix(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "without_posix", tmp_path / "profile_default")
    with Kernel(env={**os.environ, "IPYTHONDIR": str(tmp_path)}) as kernel:
        run_quietly(kernel, "import os, signal", f"os.chdir({str(tmp_path)!r})")
        assert kernel.value("[hasattr(os, 'fork'), hasattr(signal, 'SIGKILL')]") == [False, False]
        (line,) = run_quietly(kernel, "%load_ext ipygpumem", "x = 'old'").reports("cell")
        assert "RAM" in line
        (text,) = run_failing(kernel, OUT_OF_MEMORY, "MemoryError").reports("recovery")
        assert re.search(r"freed: RAM 1[4-7]", text), text
        run_quietly(kernel, *CELLS)
        run_quietly(kernel, "%gpumem guard on --limit 250MiB")
        assert (
            "the memory guard stopped the cell"
            in run_failing(kernel, FILL_MEMORY, "MemoryGuardError").reports("guard")[0]
        )
        run_quietly(kernel, "del rows", "%gpumem guard off")
        assert kernel.value("(x, n)") == ("old", 2)
