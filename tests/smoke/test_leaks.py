"""``%gpumem leaks`` and the survivors at an experiment's end, in a real kernel."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.steps import works

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

BIG = "numpy.zeros(1 << 20)"
"""8 MiB."""


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with the extension and NumPy loaded."""
    works(kernel, "import numpy")
    return kernel


def leaks(kernel: Kernel, options: str = "") -> str:
    (report,) = works(kernel, f"%gpumem leaks {options}").reports("leaks")
    return report


def test_without_a_leak_there_is_one_line_that_says_so(notebook: Kernel) -> None:
    works(notebook, f"mine = {BIG}")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_a_survivor_is_told_at_the_end_of_its_experiment_and_later(notebook: Kernel) -> None:
    works(notebook, "cache = {}")
    works(notebook, "%experiment start a")
    works(notebook, f"x = {BIG}; cache['run3'] = [x]")
    (report,) = works(notebook, "%experiment end").reports("experiment")
    line = (
        '8 MiB · x: ndarray float64 1048576 on cpu · cell 5 · held by notebook variable cache["run3"][0] · '
        "to free it: remove it from there"
    )
    assert line in report
    assert leaks(notebook).splitlines() == ["1 leak · 8 MiB", "  " + line]
    works(notebook, "cache.clear()")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_leaks_says_what_it_did_not_look_into(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem.notebook.leaks\nipygpumem.notebook.leaks._MOST = 2")
    for _ in range(3):
        works(notebook, f"{BIG}[:5]")
    first, *_, last = leaks(notebook).splitlines()
    assert first == "2 leaks · 16 MiB"
    assert last.startswith("  1 smaller storage, 8 MiB in all: not looked into")


def test_the_record_carries_the_holder_and_the_cell(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem; kept = []")
    works(notebook, f"%%experiment a\nx = {BIG}; kept.append(x)")
    found = notebook.value("[(h.name, h.cell, h.holder.path) for h in ipygpumem.experiments()[-1].survivors]")
    assert found == [("x", 4, "notebook variable kept[0]")]


def test_outputs_and_saved_tracebacks_are_leaks_that_no_name_leads_to(notebook: Kernel) -> None:
    works(notebook, f"{BIG}[:5]")
    notebook.run(f"def train(batch):\n    raise ValueError\ntrain({BIG})")
    found = leaks(notebook)
    assert "held by Out[3]" in found
    assert "held by the last error: saved traceback, train (cell 4) line 2, local batch" in found


@pytest.mark.parametrize(
    ("make", "tidy", "holder"),
    [
        ("1", "2", "Out[4]"),
        ("1", "", "Out[4]"),
        ("1", "del Out[4]", "IPython's output _"),
        ("_ = __ = ___ = 1", "del Out[4]; del _4", "IPython's hidden copy of _"),
    ],
)
def test_the_advice_about_an_output_frees_it(notebook: Kernel, make: str, tidy: str, holder: str) -> None:
    """IPython keeps copies of an output in up to seven places, and some of them only for the latest ones."""
    works(notebook, "import weakref\nclass Data(numpy.ndarray): pass")
    works(notebook, "made = [numpy.zeros(1 << 20).view(Data)]; alive = weakref.ref(made[0].base); made.pop().base")
    works(notebook, f"{make};")
    works(notebook, tidy)
    (line,) = [line for line in leaks(notebook).splitlines() if "held by" in line]
    path, advice = line.split("held by ")[1].split(" · to free it: ")
    assert path.startswith(holder)
    assert notebook.value("alive() is not None")
    works(notebook, advice.split("; ")[0].removesuffix(" lets go of it"))
    assert notebook.value("alive()") is None
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_the_threshold_can_be_chosen(notebook: Kernel) -> None:
    works(notebook, BIG)
    assert leaks(notebook, "--min 64MiB") == "no leak of at least 64 MiB was found"
    assert "held by Out[3]" in leaks(notebook, "--min 4MiB")


@pytest.mark.parametrize(
    ("options", "words"), [("--min much", "'much' is no size"), ("--max 3", "unrecognized"), ("now", "unrecognized")]
)
def test_a_mistake_gets_one_line(notebook: Kernel, options: str, words: str) -> None:
    reply = notebook.run(f"%gpumem leaks {options}")
    assert reply.error == "UsageError" or "UsageError" in reply.stderr
    assert words in reply.stderr + reply.message
    assert len((reply.stderr or reply.message).strip().splitlines()) == 1


def test_what_waits_to_be_restored_is_explained_half_way_through_a_scope(notebook: Kernel) -> None:
    works(notebook, f"model = {BIG}")
    works(notebook, "%experiment start a")
    works(notebook, "model = 1")
    assert "held by experiment a, which gives model back" in leaks(notebook)
    works(notebook, "%experiment end")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_objects_that_defend_themselves_are_not_touched(notebook: Kernel) -> None:
    works(
        notebook,
        "touched = []\n"
        "class Meta(type):\n"
        "    def __hash__(cls): touched.append('hash'); return 1\n"
        "    def __eq__(cls, other): touched.append('eq'); return False\n"
        "    def __instancecheck__(cls, other): touched.append('instance'); return False\n"
        "class Hostile(metaclass=Meta):\n"
        "    def __getattribute__(self, name): touched.append(name); raise RuntimeError(name)\n"
        "    def __repr__(self): touched.append('repr'); raise RuntimeError\n"
        "    __eq__ = __len__ = __iter__ = __bool__ = __repr__\n"
        "import weakref, types, sys\n"
        "class Lazy(types.ModuleType):\n"
        "    def __getattribute__(self, name): touched.append(name); raise ImportError(name)\n"
        "class Plain: pass\n"
        "plain = Plain(); proxy = weakref.proxy(plain)\n"
        "hostile = Hostile(); object.__setattr__(hostile, 'x', 1)\n"
        "boxes = []",
    )
    works(
        notebook,
        "%%experiment a\n"
        f"x = {BIG}\n"
        "boxes.append({hostile.__class__ if False else 1: x})\n"
        "h = hostile; p = proxy; lazy = Lazy('lazy')",
    )
    works(notebook, "touched.clear(); lazy = [Lazy('lazy'), proxy, hostile]")
    assert "held by notebook variable boxes[0][1]" in leaks(notebook)
    assert notebook.value("touched") == []


def test_explaining_changes_nothing(notebook: Kernel) -> None:
    works(notebook, f"import gc, sys; x = {BIG}; box = [[x]]")
    works(notebook, BIG)
    state = "(sys.getrefcount(x), gc.get_threshold(), gc.get_freeze_count())"
    works(notebook, "%gpumem leaks")
    before = notebook.value(state)
    first = leaks(notebook)
    assert leaks(notebook) == first
    assert notebook.value(state) == before
