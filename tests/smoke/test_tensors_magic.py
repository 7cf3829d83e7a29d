"""``%gpumem tensors`` and ``ipygpumem.tensors()`` in a real kernel, with NumPy alone."""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import needs, run_failing, run_quietly

pytest.importorskip("numpy")


def report(kernel: Kernel, line: str) -> str:
    (text,) = run_quietly(kernel, line).reports("tensors")
    return text


def row(text: str, name: str) -> str:
    return next(" ".join(line.split()) for line in text.splitlines() if line.split()[2:3] == [name])


def test_arrays_are_listed_with_the_cell_that_made_them(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        "import numpy as np",
        "big = np.zeros((512, 1024)); view = big[3:]",
        "cache = {'run3': [np.ones(1000)]}",
    )
    cell = notebook.value("get_ipython().execution_count") - 2
    text = report(notebook, "%gpumem tensors")
    assert row(text, "big") == f"4 MiB big +1 ndarray 512 × 1024 float64 cpu other {cell}"
    assert (
        row(text, 'cache["run3"][0]')
        == f'7.8 KiB cache["run3"][0] ndarray 1000 float64 cpu other {cell + 1}'
    )
    assert "view" not in text


@pytest.mark.parametrize(
    "magic", ["%%time\n", "%%capture\n", "%%capture\n%%time\n", "%time ", "%%prun -q\n"]
)
def test_an_array_made_inside_a_magic_has_the_cell_too(notebook: Kernel, magic: str) -> None:
    run_quietly(
        notebook,
        """
        import numpy as np
        inner = np.ones(3)
        """,
        magic + "inner = np.zeros(1 << 17)",
    )
    cell = notebook.value("get_ipython().execution_count") - 1
    assert row(report(notebook, "%gpumem tensors inner"), "inner").split()[-1] == str(cell)


def test_frames_and_series_have_their_names(notebook: Kernel) -> None:
    needs("pandas")
    run_quietly(
        notebook,
        "import numpy as np, pandas as pd",
        "frame = pd.DataFrame({'a': np.zeros(1 << 17), 'b': pd.Categorical(['x'] * (1 << 17))})",
        "series = pd.Series(np.zeros(1 << 17), index=np.arange(1 << 17) * 2.0); box = {'in': "
        "[series * 2]}",
    )
    cell = notebook.value("get_ipython().execution_count") - 2
    text = report(notebook, "%gpumem tensors --min 100KiB")
    assert row(text, "frame") == f"1 MiB frame ndarray 1 × 131072 float64 cpu other {cell}"
    assert f"128 KiB frame ndarray 131072 int8 cpu other {cell}" in " ".join(text.split())
    assert row(text, "series") == f"1 MiB series ndarray 131072 float64 cpu other {cell + 1}"
    assert (
        row(text, "series.index")
        == f"1 MiB series.index ndarray 131072 float64 cpu other {cell + 1}"
    )
    assert (
        row(text, 'box["in"][0]')
        == f'1 MiB box["in"][0] ndarray 131072 float64 cpu other {cell + 1}'
    )
    assert "(no name)" not in text


@pytest.fixture
def with_losses(notebook: Kernel) -> Kernel:
    """A notebook with an array of 1 MiB and a list of 30 small ones."""
    run_quietly(
        notebook,
        """
        import numpy as np
        x = np.ones(1 << 17)
        losses = [np.ones(1000 + i) for i in range(30)]
        """,
    )
    return notebook


def test_tensors_lists_the_largest_of_a_name(with_losses: Kernel) -> None:
    text = report(with_losses, "%gpumem tensors 'losses*' --top 3")
    assert row(text, "losses[29]").startswith("8 KiB")
    assert "and 27 more" in text
    assert "x " not in text
    assert "and 25 more" in report(with_losses, "%gpumem tensors 'losses*' -n 5")


def test_tensors_lists_large_tensors_of_a_device(with_losses: Kernel) -> None:
    text = report(with_losses, "%gpumem tensors --min 1MiB x --device RAM")
    assert row(text, "x").startswith("1 MiB")


def test_tensors_are_grouped_by_name(with_losses: Kernel) -> None:
    text = report(with_losses, "%gpumem tensors --by name --kind other")
    assert row(text, "30").endswith(" 30 losses")


def test_a_device_that_is_not_here_is_named(with_losses: Kernel) -> None:
    unknown = run_failing(with_losses, "%gpumem tensors x --device cuda:99", None).stderr
    assert "there is no cuda:99 here" in unknown
    misspelt = run_failing(with_losses, "%gpumem tensors --device RAMM", None).stderr
    assert misspelt.startswith("UsageError: 'RAMM' is not a device")


def test_the_difference_of_two_inventories_names_their_cells(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import numpy as np, ipygpumem
        old = np.ones(1 << 17)
        """,
        "first = ipygpumem.tensors()",
    )
    run_quietly(
        notebook,
        """
        del old
        new = np.ones(1 << 18)
        """,
        """
        second = ipygpumem.tensors()
        d = ipygpumem.diff(first, second)
        """,
    )
    assert "('new', 2097152)" in notebook.value("str([(r.name, r.size_bytes) for r in d.added])")
    assert "('old', 1048576)" in notebook.value("str([(r.name, r.size_bytes) for r in d.removed])")
    count = notebook.value("get_ipython().execution_count") - 1
    assert notebook.value("(d.before, d.after)") == (f"cell {count - 2}", f"cell {count}")
    assert "\n  added: 1\n   size   name " in (run_quietly(notebook, "d").result or "")
    assert run_quietly(notebook, "[d]").result == f"[{notebook.value('str(d)')}]"


def test_the_tensors_magic_works_without_the_extension(bare_kernel: Kernel) -> None:
    run_quietly(
        bare_kernel,
        """
        import numpy as np, ipygpumem
        x = np.ones(1 << 17)
        """,
        "found = ipygpumem.tensors('x')",
    )
    assert bare_kernel.value("[(r.name, r.size_bytes, r.cell) for r in found.tensors]") == [
        ("x", 1 << 20, 1)
    ]
    assert bare_kernel.value("repr(found)") == "<Inventory of 1 tensors and arrays: cpu 1 MiB>"
