"""Data frames and columns that an experiment leaves have one row with their parts."""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import (
    READ_LEAKS,
    READ_WHY,
    leak_parts,
    leak_rows,
    survivor_parts,
    survivor_rows,
)
from tests.process_memory import linux
from tests.steps import experiment, needs, run_cells, tidied_kernel

shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


def test_a_new_frame_of_numbers_has_a_row_with_its_columns(kernel: Kernel) -> None:
    needs("pandas")
    run_cells(kernel, READ_LEAKS, "import pandas as pd; outer = {}")
    run_cells(kernel, experiment("outer['f'] = pd.DataFrame({'a': np.arange(2**18), 'b': 1.5})"))
    (row,) = kernel.value(
        "[(row.type_name, sorted(row.parts)) for row in app.experiments.finished[-1].survivors]"
    )
    assert row == ("DataFrame", ["a", "b", "index"])


def test_a_frame_without_a_name_is_one_row_with_its_arrays(kernel: Kernel) -> None:
    needs("pandas")
    run_cells(
        kernel,
        READ_LEAKS,
        """
        import pandas as pd
        outer = {}
        texts = [str(number) for number in range(2**18)]
        """,
        """
        %%experiment e
        outer["a"] = pd.DataFrame({"a": np.arange(2**18), "t": np.array(texts, dtype=object)})
        """,
    )
    for rows in (survivor_rows(kernel), leak_rows(kernel)):
        (row,) = rows
        assert (row.path, row.line) == ('notebook variable outer["a"]', 'del outer["a"]')
        assert row.size_bytes > 15 << 18
        assert sum(leak_parts(kernel).values()) == pytest.approx(row.size_bytes, rel=0.02)
    kinds = kernel.value(
        "[(row.type_name, row.objects) for row in app.experiments.finished[-1].survivors]"
    )
    assert kinds == [("DataFrame", 1)]
    run_cells(kernel, row.line)
    assert leak_rows(kernel) == []


def test_two_frames_are_two_objects_with_their_columns(kernel: Kernel) -> None:
    needs("pandas")
    run_cells(
        kernel,
        READ_LEAKS,
        """
        import pandas as pd
        outer = {}
        def frame():
            texts = np.array([str(number) for number in range(2**17)], dtype=object)
            return pd.DataFrame({"a": np.arange(2**17), "t": texts, "f": np.ones(2**17)})
        """,
        experiment("for number in range(2): outer[number] = frame()"),
    )
    for rows in (survivor_rows(kernel), leak_rows(kernel)):
        (row,) = rows
        assert (row.path, row.line) == ("notebook variable outer", "outer.clear()")
    for parts in (survivor_parts(kernel), leak_parts(kernel)):
        assert parts.keys() == {"a", "t", "f"}
        assert sum(parts.values()) == pytest.approx(row.size_bytes, rel=0.02)
    kinds = kernel.value(
        "[(row.type_name, row.objects) for row in app.experiments.finished[-1].survivors]"
    )
    assert kinds == [("DataFrame", 2)]


@linux
def test_a_frame_s_older_columns_are_not_left() -> None:
    needs("pandas")
    # A kernel of its own: closed figures leave garbage with a shared one's libraries.
    with Kernel() as kernel:
        run_cells(
            kernel,
            "%load_ext ipygpumem",
            READ_LEAKS,
            "import pandas as pd; frame = pd.DataFrame({'old': np.ones(400_000)})",
            experiment("frame['texts'] = [str(n) * 9 for n in range(400_000)]"),
        )
        rows = survivor_rows(kernel)
    assert [(row.path, row.line) for row in rows] == [
        ('notebook variable frame["texts"]', 'del frame["texts"]')
    ]


@linux
def test_a_small_array_in_a_cell_of_an_older_series_is_left(kernel: Kernel) -> None:
    """Pandas gives the series a new manager, with its older block."""
    needs("pandas")
    run_cells(
        kernel,
        READ_LEAKS,
        "import pandas as pd; outer = pd.Series([None] * 30, dtype=object)",
        experiment("outer.iat[25] = np.ones(2**20)"),
    )
    rows = survivor_rows(kernel)
    assert [(row.path, row.line) for row in rows] == [
        ("notebook variable outer (in a column)", "outer.iat[25] = None")
    ]
    run_cells(kernel, "del outer")
