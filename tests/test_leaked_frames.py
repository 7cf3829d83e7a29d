"""Data frames and columns that an experiment leaves have one row with their parts."""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import ASK, LEFT, left, left_by_experiment, parts_at_the_end, parts_later
from tests.process_memory import linux
from tests.steps import needs, tidied_kernel, works

shared_kernel, kernel = tidied_kernel("%reset -f", ASK, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


def test_a_new_frame_of_numbers_has_a_row_with_its_columns(kernel: Kernel) -> None:
    needs("pandas")
    works(kernel, LEFT, "import pandas as pd; outer = {}")
    works(kernel, "%%experiment e\nouter['f'] = pd.DataFrame({'a': np.arange(2**18), 'b': 1.5})")
    (row,) = kernel.value(
        "[(row.type_name, sorted(row.parts)) for row in app.experiments.finished[-1].survivors]"
    )
    assert row == ("DataFrame", ["a", "b", "index"])


def test_a_frame_without_a_name_is_one_row_with_its_arrays(kernel: Kernel) -> None:
    needs("pandas")
    works(
        kernel,
        LEFT,
        """
        import pandas as pd
        outer = {}
        texts = [str(number) for number in range(2**18)]
        """,
        """%%experiment e
outer["a"] = pd.DataFrame({"a": np.arange(2**18), "t": np.array(texts, dtype=object)})
""",
    )
    for rows in (left_by_experiment(kernel), left(kernel)):
        ((size, path, line),) = rows
        assert (path, line) == ('notebook variable outer["a"]', 'del outer["a"]')
        assert size > 15 << 18
        assert sum(parts_later(kernel).values()) == pytest.approx(size, rel=0.02)
    kinds = kernel.value(
        "[(row.type_name, row.objects) for row in app.experiments.finished[-1].survivors]"
    )
    assert kinds == [("DataFrame", 1)]
    works(kernel, line)
    assert left(kernel) == []


def test_two_frames_are_two_objects_with_their_columns(kernel: Kernel) -> None:
    needs("pandas")
    works(
        kernel,
        LEFT,
        """
        import pandas as pd
        outer = {}
        def frame():
            texts = np.array([str(number) for number in range(2**17)], dtype=object)
            return pd.DataFrame({"a": np.arange(2**17), "t": texts, "f": np.ones(2**17)})
        """,
        "%%experiment e\nfor number in range(2): outer[number] = frame()",
    )
    for rows in (left_by_experiment(kernel), left(kernel)):
        ((size, path, line),) = rows
        assert (path, line) == ("notebook variable outer", "outer.clear()")
    for parts in (parts_at_the_end(kernel), parts_later(kernel)):
        assert parts.keys() == {"a", "t", "f"}
        assert sum(parts.values()) == pytest.approx(size, rel=0.02)
    kinds = kernel.value(
        "[(row.type_name, row.objects) for row in app.experiments.finished[-1].survivors]"
    )
    assert kinds == [("DataFrame", 2)]


@linux
def test_a_frame_s_older_columns_are_not_left() -> None:
    needs("pandas")
    # A kernel of its own: closed figures leave garbage with a shared one's libraries.
    with Kernel() as kernel:
        works(
            kernel,
            "%load_ext ipygpumem",
            LEFT,
            "import pandas as pd; frame = pd.DataFrame({'old': np.ones(400_000)})",
            "%%experiment e\nframe['texts'] = [str(n) * 9 for n in range(400_000)]",
        )
        rows = left_by_experiment(kernel)
    assert [row[1:] for row in rows] == [('notebook variable frame["texts"]', 'del frame["texts"]')]


@linux
def test_a_small_array_in_a_cell_of_an_older_series_is_left(kernel: Kernel) -> None:
    """Pandas gives the series a new manager, with its older block."""
    needs("pandas")
    works(
        kernel,
        LEFT,
        "import pandas as pd; outer = pd.Series([None] * 30, dtype=object)",
        "%%experiment e\nouter.iat[25] = np.ones(2**20)",
    )
    rows = left_by_experiment(kernel)
    assert [row[1:] for row in rows] == [
        ("notebook variable outer (in a column)", "outer.iat[25] = None")
    ]
    works(kernel, "del outer")
