"""IPython 9 keeps what cells print and display: experiments drop their cells', the rest is named
and can be freed.
"""

import re

import IPython
import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import experiment, host_table, run_cells, run_failing, run_quietly, tidied_kernel

pytestmark = pytest.mark.skipif(
    IPython.version_info < (9, 1), reason="IPython keeps no printed text here"
)

shared_kernel, notebook = tidied_kernel(
    "%experiment end",
    "get_ipython().history_manager.outputs.clear(); "
    "get_ipython().history_manager.exceptions.clear()",
    "%reset -f",
    hides_libraries=True,
)

KEPT = """(lambda manager: sum(
    len(text)
    for outputs in manager.outputs.values()
    for output in outputs
    for value in output.bundle.values()
    for text in (value if isinstance(value, list) else [value])
    if isinstance(text, (str, bytes))
) + sum(len(error["evalue"]) for error in manager.exceptions.values())
    + sum(map(len, manager.output_hist_reprs.values())))(get_ipython().history_manager)"""
"""The letters that IPython keeps."""


def kept(kernel: Kernel) -> int:
    """Return the letters that IPython keeps of what cells printed, in MB."""
    return int(kernel.value(KEPT)) // 1_000_000


PRINT_4_MB = """
for line in range(4):
    print("x" * 1_000_000)
"""


def test_an_experiment_drops_its_cells_printed_text(notebook: Kernel) -> None:
    run_quietly(notebook, 'print("y" * 2_000_000)')
    reply = run_quietly(notebook, experiment(PRINT_4_MB, name="a"))
    assert kept(notebook) == 2
    (text,) = reply.reports("experiment")
    assert "not named" not in text


def test_an_experiment_of_many_cells_drops_their_output(notebook: Kernel) -> None:
    run_quietly(notebook, "%experiment start a", PRINT_4_MB, PRINT_4_MB)
    assert kept(notebook) == 8
    run_quietly(notebook, "%experiment end")
    assert kept(notebook) == 0


def test_text_printed_before_a_block_in_the_cell_stays(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import ipygpumem
        print("x" * 1_000_000)
        with ipygpumem.experiment("block"):
            print("x" * 4_000_000)
        print("x" * 2_000_000)
        """,
    )
    assert kept(notebook) == 3


def test_an_inner_experiment_leaves_the_outer_ones_text(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        "%experiment start outer",
        'print("x" * 1_000_000)',
        experiment(PRINT_4_MB, name="inner"),
    )
    assert kept(notebook) == 1
    run_quietly(notebook, "%experiment end")
    assert kept(notebook) == 0


def test_a_failing_cells_text_and_message_are_dropped(notebook: Kernel) -> None:
    run_failing(
        notebook,
        """
        %%experiment a
        print("x" * 4_000_000)
        raise ValueError("x" * 2_000_000)
        """,
    )
    assert kept(notebook) == 0


@pytest.mark.parametrize("store_history", [False, True])
def test_text_of_nested_cells_is_dropped(notebook: Kernel, store_history: bool) -> None:
    run_quietly(
        notebook,
        experiment(
            f"get_ipython().run_cell({PRINT_4_MB!r}, store_history={store_history})", name="a"
        ),
    )
    assert kept(notebook) == 0


def test_text_of_a_cell_without_a_number_is_dropped(notebook: Kernel) -> None:
    run_quietly(notebook, "%experiment start a")
    run_cells(notebook, PRINT_4_MB, store_history=False)
    assert kept(notebook) == 4
    run_quietly(notebook, "%experiment end")
    assert kept(notebook) == 0


def test_results_and_captured_text_are_dropped(notebook: Kernel) -> None:
    run_quietly(notebook, "%experiment start a", '"x" * 2_000_000', f"%%capture cap\n{PRINT_4_MB}")
    assert kept(notebook) >= 4
    run_quietly(notebook, "%experiment end")
    assert kept(notebook) == 0


def test_text_of_another_threads_cell_stays(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        "%experiment start a",
        """
        import threading
        code = 'print("x" * 2_000_000)'
        thread = threading.Thread(target=get_ipython().run_cell, args=(code,), kwargs={"store_history": True})
        thread.start()
        thread.join()
        """,  # noqa: E501
    )
    assert kept(notebook) == 4, "IPython adds what any thread prints to all running cells"
    run_quietly(notebook, "%experiment end")
    assert kept(notebook) == 2


def test_text_on_stderr_and_displays_are_dropped(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        %%experiment a
        import sys
        from IPython.display import HTML, display
        get_ipython().display_pub.store_display_history = True
        display(HTML("x" * 1_000_000))
        sys.stdout.write("x" * 1_000_000)
        print("x" * 1_000_000)
        sys.stderr.write("x" * 1_000_000)
        """,
    )
    run_quietly(notebook, "get_ipython().display_pub.store_display_history = False")
    assert kept(notebook) == 0


def test_kept_names_keep_the_printed_text_after_a_slip(notebook: Kernel) -> None:
    run_quietly(notebook, f"%%experiment a --keep lost\nlist_ = 1\n{PRINT_4_MB}")
    assert kept(notebook) == 4


def test_text_is_dropped_after_reset_restarts_the_count(notebook: Kernel) -> None:
    run_quietly(notebook, PRINT_4_MB, "%experiment start a", "%reset -f", PRINT_4_MB, PRINT_4_MB)
    run_quietly(notebook, "%experiment end")
    assert kept(notebook) == 0


def test_free_drops_the_printed_text_of_cells(notebook: Kernel) -> None:
    run_quietly(notebook, 'print("x" * 40_000_000)')
    (text,) = run_quietly(notebook, "%gpumem free").reports("note")
    assert kept(notebook) == 0
    assert re.search(r"printed output \(RAM 3\d(\.\d)? MiB\)", text), text
    # IPython adds to the last output of the running cell.
    assert run_quietly(notebook, "%gpumem free\nprint('still prints')").stdout == "still prints\n"


def test_leaks_lists_printed_text_with_its_cells(notebook: Kernel) -> None:
    run_quietly(notebook, 'print("x" * 40_000_000)')
    (text,) = run_quietly(notebook, "%gpumem leaks").leaks()
    (row,) = [line for line in text.splitlines() if "printed" in line]
    assert re.search(r"38\.\d MiB · printed and displayed by cell \d+, kept by IPython", row), text
    assert row.endswith("to free it: %gpumem free"), row
    assert " reclaimable item" in text or "kept by what is listed below" in text


def test_status_has_a_row_for_printed_text(notebook: Kernel) -> None:
    run_quietly(notebook, 'print("x" * 40_000_000)')
    _, parts = host_table(notebook)
    assert parts["printed by cells"] == pytest.approx(40_000_000, rel=0.05)
    run_quietly(notebook, "%gpumem free")
    assert "printed by cells" not in host_table(notebook)[1]


def test_a_users_own_text_is_not_counted_as_printed(notebook: Kernel) -> None:
    run_quietly(notebook, 'text = "x" * 40_000_000', "print(text)")
    (text,) = run_quietly(notebook, "%gpumem leaks").leaks()
    assert "printed" not in text, text
    run_quietly(notebook, "del text")
    (text,) = run_quietly(notebook, "%gpumem leaks").leaks()
    assert "printed" in text, text


def test_text_captured_by_a_deleted_name_is_named(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        %%capture cap
        for line in range(10):
            print("x" * 4_000_000)
        """,
        "del cap",
    )
    (text,) = run_quietly(notebook, "%gpumem leaks").leaks()
    assert re.search(r"38\.\d MiB · printed and displayed by ", text), text
    run_quietly(notebook, "%gpumem free")
    assert kept(notebook) == 0


def test_a_large_message_of_an_error_is_in_one_row(notebook: Kernel) -> None:
    run_failing(notebook, 'raise ValueError("x" * 5_000_000)', "ValueError")
    (text,) = run_quietly(notebook, "%gpumem leaks").leaks()
    rows = text.splitlines()[1:]
    assert len([row for row in rows if "printed and displayed" in row]) == 1, text
    assert not [row for row in rows if "IPython's shell" in row], text


def test_captured_displays_are_named_by_their_variable(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        %%capture cap
        from IPython.display import HTML, display
        display(HTML("x" * 40_000_000))
        """,
    )
    (text,) = run_quietly(notebook, "%gpumem top").reports("top")
    assert re.search(r"38\.\d MiB +\d+% +38\.\d MiB +cap ", text), text
    (text,) = run_quietly(notebook, "%gpumem why cap").reports()[:1]
    assert re.search(r"RAM 38\.\d MiB · del cap frees all of it", text), text


def test_a_cell_that_prints_with_every_run_is_explained(notebook: Kernel) -> None:
    # Captured, because what is sent to the front-end stays in RAM for a while.
    cell = '%%capture\nprint("x" * 32_000_000)'
    texts = [line for _ in range(8) for line in run_quietly(notebook, cell).reports("cell")]
    (text,) = [line for line in texts if "printed output" in line][:1]
    assert "%gpumem free" in text, texts
    assert "free in malloc's heap" not in text, "the text is not in free pages, too"
