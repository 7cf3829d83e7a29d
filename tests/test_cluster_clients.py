"""What other clients of a cluster do on its engines meanwhile is theirs: it is in no experiment of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import CTRL_C, UNTIL, cluster_of, on_engines, record
from tests.kernel import Kernel
from tests.steps import works

shared = cluster_of(2)
OPEN = "len(__import__('ipygpumem.notebook.notebook').notebook.notebook.find_notebook(get_ipython()).experiments.open)"
THEIRS = "[globals().get(name) for name in ('cell', 'pushed', 'silent', 'old')]"
OTHER = """
    other[0].execute('cell = 1', silent=False, block=True)
    other[0].push({'pushed': 2}, block=True)
    other[0].execute('silent = 3; old = 4', block=True)
"""


TIDY = """
rc[:].execute('old = 0\\nfor name in ("cell", "pushed", "silent", "x"): globals().pop(name, None)', block=True)
"""


@pytest.fixture
def cluster(shared: Kernel) -> Iterator[Kernel]:
    """The module's cluster, and another client of it; ``old`` is there on its engines."""
    works(shared, "import threading\nother = cluster.connect_client_sync()\nother.wait_for_engines(2)")
    works(shared, TIDY)
    yield shared
    works(shared, "other.close()")


def while_engine_1_lags(kernel: Kernel, began: Path, end: Path) -> None:
    """Let the other client do what it does once engine 1 alone has something to do, and then let that end."""
    works(
        kernel,
        f"import time\nfrom pathlib import Path\ndef meanwhile():\n"
        f"    while not (Path({str(began)!r}).exists() and len(rc.outstanding) == 1): time.sleep(0.01)\n"
        f"{OTHER}    Path({str(end)!r}).touch()\nthread = threading.Thread(target=meanwhile)\nthread.start()",
    )


def test_what_another_client_makes_while_an_engine_still_runs_our_cell_stays(cluster: Kernel, tmp_path: Path) -> None:
    began, end = tmp_path / "began", tmp_path / "end"
    while_engine_1_lags(cluster, began, end)
    source = (
        f"%%experiment a --on all\n{UNTIL}x = 1\nif get_ipython().kernel.engine_id == 1:\n"
        f"    Path({str(began)!r}).touch(); until({str(end)!r})"
    )
    works(cluster, source)
    works(cluster, "thread.join()")
    assert on_engines(cluster, THEIRS)[0] == [1, 2, 3, 4]


def test_cells_of_another_client_are_in_no_experiment_of_ours(cluster: Kernel) -> None:
    works(cluster, "%experiment start span --on all")
    works(cluster, "%px x = old = 1")
    works(
        cluster,
        "other[0].execute('cell = 1', silent=False, block=True)\nother[0].execute('silent = 3; old = 4', block=True)",
    )
    works(cluster, "%experiment end")
    assert on_engines(cluster, THEIRS) == [[1, None, 3, 4], [None, None, None, 0]]
    assert record(cluster)["deleted"] == ("x",)
    assert [len(engine["record"]["cells"]) for engine in record(cluster)["engines"]] == [1, 1]


def test_clients_have_experiments_of_the_same_name_at_a_time(cluster: Kernel) -> None:
    """Each ends its own."""
    works(cluster, "%px %load_ext ipygpumem")
    works(cluster, "other[0].execute('%experiment start a\\ncell = 1', silent=False, block=True)")
    works(cluster, "%%experiment a --on 0\nx = 1")
    assert on_engines(cluster, THEIRS)[0][0] == 1
    assert record(cluster)["deleted"] == ("x",)
    works(cluster, "other[0].execute('%experiment end', silent=False, block=True)")
    assert on_engines(cluster, THEIRS)[0][0] is None


def test_a_ctrl_c_does_not_reach_another_clients_task_before_our_cell(cluster: Kernel, tmp_path: Path) -> None:
    end, long = tmp_path / "end", tmp_path / "long"
    works(cluster, f"busy = other[1].execute({f'{UNTIL}until({str(end)!r})'!r}, block=False)")
    works(
        cluster,
        f"import time\nfrom pathlib import Path\ndef meanwhile():\n"
        f"    while len(rc.outstanding) != 1: time.sleep(0.01)\n    global theirs\n"
        f"    theirs = other[0].execute({f'{UNTIL}until({str(long)!r})'!r}, block=False)\n"
        f"    Path({str(end)!r}).touch()\n"
        "thread = threading.Thread(target=meanwhile)\nthread.start()",
    )
    ran = tmp_path / "ran"
    works(cluster, f"{CTRL_C}\nctrl_c(lambda: os.path.exists({str(ran)!r}) and len(rc.outstanding) == 1)")
    source = f"%%experiment a --on all\nfrom pathlib import Path\nx = 1\nPath({str(ran)!r}).touch()"
    assert cluster.run(source, timeout=60).error == "KeyboardInterrupt"
    assert "its cell has not begun, and is taken back" in record(cluster)["engines"][0]["error"]
    assert cluster.value("theirs.ready()") is False
    long.touch()
    works(cluster, "theirs.get(60)")
    assert on_engines(cluster, "'x' in globals()") == [False, False]
    assert on_engines(cluster, OPEN) == [0, 0]
