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


def test_filters_groups_and_the_rest(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import numpy as np
        x = np.ones(1 << 17)
        losses = [np.ones(1000 + i) for i in range(30)]
        """,
    )
    text = report(notebook, "%gpumem tensors 'losses*' --top 3")
    assert row(text, "losses[29]").startswith("8 KiB")
    assert "and 27 more" in text
    assert "and 25 more" in report(notebook, "%gpumem tensors 'losses*' -n 5")
    assert "x " not in text
    assert row(report(notebook, "%gpumem tensors --min 1MiB x --device RAM"), "x").startswith(
        "1 MiB"
    )
    assert row(report(notebook, "%gpumem tensors --by name --kind other"), "30").endswith(
        " 30 losses"
    )
    assert (
        "there is no cuda:99 here"
        in run_failing(notebook, "%gpumem tensors x --device cuda:99", None).stderr
    )
    assert run_failing(notebook, "%gpumem tensors --device RAMM", None).stderr.startswith(
        "UsageError: 'RAMM' is not a device"
    )


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
