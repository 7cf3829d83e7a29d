"""``%gpumem advise`` and ``ipygpumem.advise()`` in a real kernel, with NumPy alone."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import fails, ok

pytest.importorskip("numpy")

IMPORT = "import numpy as np, ipygpumem"


def report(kernel: Kernel, line: str = "%gpumem advise") -> str:
    (text,) = ok(kernel, line).reports("advice")
    return text


def test_advice_is_a_figure_a_condition_and_a_line_of_code(notebook: Kernel) -> None:
    ok(notebook, IMPORT, "row = np.random.rand(1 << 10, 1 << 10)[0]")
    assert report(notebook).splitlines() == [
        "advice: 1 line of code would save · RAM 8 MiB",
        "  RAM 8 MiB · row is a view that keeps its whole base alive:",
        "  # if nothing is to be written through it into the base; next time keep a copy of the part alone",
        "  row = row.copy()",
    ]
    ok(notebook, "row = row.copy()")
    assert report(notebook) == "advice · nothing of yours would save memory worth a line"


def test_an_output_that_only_ipython_keeps_is_forgotten_by_its_line(notebook: Kernel) -> None:
    ok(notebook, IMPORT, "kept = np.random.rand(1 << 18)", "kept", "np.random.rand(1 << 18)", "1")
    number = notebook.value("sorted(Out)[-2]")
    ok(notebook, "import weakref; watched = weakref.ref(Out[sorted(Out)[-2]])")
    lines = notebook.value("[item.code for item in ipygpumem.advise().advice]")
    assert lines == [f"%xdel _{number}"]
    ok(notebook, lines[0])
    assert notebook.value("watched() is None and len(kept)") == 1 << 18
    assert report(notebook) == "advice · nothing of yours would save memory worth a line"
    ok(notebook, "2")
    assert notebook.value("_") == 2
    ok(notebook, "%reset -f out")


def test_min_and_top_choose(notebook: Kernel) -> None:
    ok(notebook, IMPORT, "a, b = (np.random.rand(n, 1 << 10)[0] for n in (1 << 8, 1 << 10))")
    text = report(notebook, "%gpumem advise --top 1")
    assert "b = b.copy()" in text
    assert "a = a.copy()" not in text
    assert text.splitlines()[-1] == "  b = b.copy()"
    assert "and 1 more that save less: %gpumem advise --top 2" in text
    assert "a = a.copy()" not in report(notebook, "%gpumem advise --min 4MiB")


@pytest.mark.parametrize("line", ["--min much", "--top many", "--nothing", "model"])
def test_a_mistake_in_the_options_is_one_line(notebook: Kernel, line: str) -> None:
    assert "%gpumem advise: " in fails(notebook, f"%gpumem advise {line}", None).stderr


def test_options_complete(notebook: Kernel) -> None:
    assert {"--min", "--top"} <= set(notebook.complete("%gpumem advise --"))
    assert "advise" in notebook.complete("%gpumem adv")


@pytest.mark.parametrize("size", ["'much'", "-1", "None", "[]"])
def test_a_wrong_size_is_one_line_from_python(notebook: Kernel, size: str) -> None:
    ok(notebook, "import ipygpumem")
    assert fails(notebook, f"ipygpumem.advise(min_bytes={size})", "UnitError").message.count("\n") == 0


def test_names_of_a_scope_are_advised_about_and_the_advice_ends_with_it(notebook: Kernel) -> None:
    ok(notebook, IMPORT, "%experiment start a", "row = np.random.rand(1 << 10, 1 << 10)[0]")
    assert "row = row.copy()" in report(notebook)
    ok(notebook, "%experiment end")
    assert report(notebook) == "advice · nothing of yours would save memory worth a line"
