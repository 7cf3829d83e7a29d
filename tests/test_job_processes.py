"""Jobs of several processes that cells start: each process is listed with its cell, and none is
ever ended by us.
"""

import re
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import kernel_with, run_cells
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="PSS and the exact time of a start are Linux's"
)

MODULE = """
import os, subprocess, sys, time

def work():
    block = bytearray(b"x") * (64 << 20)
    open(os.path.join(os.path.dirname(__file__), f"ready-{os.getpid()}"), "w").close()
    time.sleep(600)

if sys.argv[1:] == ["launch"]:  # as torchrun, which takes ten seconds more
    for process in [subprocess.Popen([sys.executable, __file__, "work"]) for _ in range(2)]:
        process.wait()
elif sys.argv[1:] == ["work"]:
    work()
"""
SHARED = """
shared = bytearray(b"x") * (128 << 20)
if not (child := os.fork()): time.sleep(600)
"""
LAUNCH = "run = subprocess.Popen([sys.executable, 'job.py', 'launch'])"
kernel = kernel_with("%load_ext ipygpumem", "import os, psutil, subprocess, sys, time")
"""With a folder of its own as the current one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernel: Kernel) -> Iterator[Path]:
    """Folder in which the kernel's processes say that they are ready."""
    path = tmp_path_factory.mktemp("job")
    (path / "job.py").write_text(MODULE)
    run_cells(
        kernel,
        f"""
        os.chdir({str(path)!r}); sys.path.insert(0, {str(path)!r})
        import job
        """,
    )
    process = psutil.Process(kernel.value("os.getpid()"))
    yield path
    for child in process.children(recursive=True):  # a worker of torchrun would outlive all of them
        child.kill()


def ready(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in folder.glob("ready-*")}


def rows(status: str) -> dict[int, tuple[float, str]]:
    table = status[status.index("child processes, by PSS") :]
    pattern = r"^ *([\d.]+) ([KMG])iB +(\d+)  .*?(cell \d+(?: or \d+)?|unknown cell)(?:  .*)?$"
    matches = re.findall(pattern, table, re.MULTILINE)
    scale = {"K": 1 / 1024, "M": 1, "G": 1024}
    return {
        int(pid): (float(size) * scale[unit], place.strip()) for size, unit, pid, place in matches
    }


def listed(kernel: Kernel) -> dict[int, tuple[float, str]]:
    return rows(run_cells(kernel, "%gpumem status").reports("status")[0])


def started(kernel: Kernel, code: str) -> str:
    """Run a cell that starts processes, and return what it is called."""
    # the kernel counts starts in hundredths of a second: cells that are nearer cannot be told apart
    #
    time.sleep(0.05)
    run_cells(kernel, code)
    time.sleep(0.05)
    return f"cell {kernel.value('len(In) - 1')}"


def test_a_forked_process_shares_its_pages_with_the_kernel(kernel: Kernel, folder: Path) -> None:
    cell, child = started(kernel, SHARED), kernel.value("child")
    size, place = listed(kernel)[child]
    assert place == cell
    assert size < psutil.Process(child).memory_info().rss / 2**20 - 48, "128 MiB are shared by two"


def test_a_launchers_later_workers_belong_to_the_launchers_cell(
    kernel: Kernel, folder: Path
) -> None:
    before = ready(folder)
    cell = started(kernel, LAUNCH)
    launcher = kernel.value("run.pid")
    wait_for(lambda: len(ready(folder) - before) == 2)
    run_cells(kernel, "1 + 1")
    processes = listed(kernel)
    workers = ready(folder) - before
    assert {psutil.Process(pid).ppid() for pid in workers} == {launcher}
    assert {processes[pid][1] for pid in (launcher, *workers)} == {cell}


def test_a_left_over_process_stays_listed_with_its_cell(kernel: Kernel, folder: Path) -> None:
    inside = started(
        kernel,
        textwrap.dedent(
            """\
            %%experiment apart
            left = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)
            %experiment keep left"""
        ),
    )
    left = kernel.value("left.pid")
    before = listed(kernel)
    assert before[left][1] == inside
    for code in ("%gpumem free", "%%experiment other\nx = 1", "1 / 0"):
        kernel.run(code)
    assert {pid: cell for pid, (_, cell) in listed(kernel).items()} == {
        pid: cell for pid, (_, cell) in before.items()
    }
    run_cells(kernel, "%unload_ext ipygpumem", "%load_ext ipygpumem")
    assert set(listed(kernel)) == set(before)
    assert not [pid for pid in before if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE]
