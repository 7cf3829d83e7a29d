"""Host memory outside this process's RSS: shared memory segments, child processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
import sys
import tracemalloc
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import children
from ipygpumem.probes.outside import OutsideProbe
from ipygpumem.probes.segments import Segments
from ipygpumem.units import MIB
from tests.alone import alone
from tests.steps import run_cells

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def shm_of(probe: OutsideProbe) -> int | None:
    """Return the bytes of segments; ``SharedMemory`` starts a child process, too."""
    return next(
        (reading.current_bytes for reading in probe.read() if reading.device == "shm"), None
    )


@alone
def test_pages_of_a_segment_count_once_whether_touched_or_not() -> None:
    with contextlib.closing(OutsideProbe()) as probe:
        assert shm_of(probe) is None
        segment = SharedMemory(create=True, size=32 * MIB)
        assert shm_of(probe) is None, "no page is there yet"
        with Path(f"/dev/shm/{segment.name}").open("r+b") as file:
            file.write(bytes(32 * MIB))  # touches no page of the mapping
        assert shm_of(probe) == 32 * MIB
        assert segment.buf is not None
        segment.buf[:MIB] = bytes(MIB)
        assert shm_of(probe) == 32 * MIB, "a touched page counts once"
        segment.unlink()
        assert shm_of(probe) == 32 * MIB, "without a name, but still there"
        segment.close()
        assert shm_of(probe) == 0


@alone
def test_an_open_segment_counts_next_to_a_mapped_one() -> None:
    with contextlib.closing(OutsideProbe()) as probe:
        segment = SharedMemory(create=True, size=32 * MIB)
        assert segment.buf is not None
        segment.buf[:] = bytes(32 * MIB)
        memfd = os.memfd_create("frames")
        os.write(memfd, bytes(4 * MIB))
        assert shm_of(probe) == 36 * MIB
        os.write(memfd, bytes(4 * MIB))
        assert shm_of(probe) == 40 * MIB
        os.close(memfd)
        assert shm_of(probe) == 32 * MIB
        segment.unlink()
        segment.close()
        assert shm_of(probe) == 0


@alone
def test_a_segment_counts_until_it_is_unlinked_by_the_notes_line() -> None:
    with contextlib.closing(OutsideProbe()) as probe:
        segment = SharedMemory(create=True, size=32 * MIB)
        assert segment.buf is not None
        segment.buf[:] = bytes(32 * MIB)
        again = SharedMemory(segment.name)
        assert shm_of(probe) == 32 * MIB
        segment.close()
        assert shm_of(probe) == 32 * MIB
        again.close()
        assert shm_of(probe) == 32 * MIB, "closed, but not unlinked"
        note = next(reading.note for reading in probe.read() if reading.device == "shm")
        assert note.startswith("32 MiB stay until you unlink them: ")
        exec(note.partition(": ")[2])
        assert shm_of(probe) == 0


@pytest.mark.parametrize("is_named", [True, False])
@alone
def test_segments_of_closed_files_count_their_mapped_bytes(is_named: bool) -> None:
    path = Path(f"/dev/shm/ipygpumem-test-{os.getpid()}")
    path.write_bytes(bytes(8 * MIB))
    mapping = None
    try:
        with contextlib.closing(OutsideProbe()) as probe:
            assert shm_of(probe) is None, "the file of another process"

            # The file is mapped, and all descriptors are closed.
            with path.open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
            for link in list(Path("/proc/self/fd").iterdir()):  # Python keeps one
                with contextlib.suppress(OSError):
                    if link.readlink() == path:
                        os.close(int(link.name))
            if not is_named:
                path.unlink()
            assert shm_of(probe) == 8 * MIB
    finally:
        path.unlink(missing_ok=True)
        del mapping


@alone
def test_a_scan_of_many_mappings_takes_no_memory_to_speak_of() -> None:
    """The next reading of RSS would show it as growth: with torch it was 1 MiB."""
    path = Path(f"/dev/shm/ipygpumem-test-{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    mappings = list[mmap.mmap]()
    segments = Segments()
    try:
        with path.open("r+b") as file:
            for _ in range(1_000):
                mappings.append(mmap.mmap(file.fileno(), 0))

        # The first scan has loaded what it needs: the second one is measured.
        segments.scan(MIB)
        tracemalloc.start()
        assert segments.scan(MIB)[0] == mmap.PAGESIZE
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    finally:
        path.unlink()
        segments.close()
        mappings.clear()
    # Bytes that Python has allocated for the scan.
    assert peak_bytes < MIB / 16


CHILD_WITH_BLOCK = (
    "import sys; block = bytearray(64 << 20); print('ready', flush=True); sys.stdin.read()"
)
PARENT_OF_CHILD = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD_WITH_BLOCK!r}])"
)


@alone
def test_descendants_of_any_thread_count_by_pss() -> None:
    from concurrent.futures import ThreadPoolExecutor

    started = [sys.executable, "-c", PARENT_OF_CHILD]
    with contextlib.closing(OutsideProbe()) as probe, ThreadPoolExecutor(1) as threads:
        meter = Meter([probe])
        span = meter.span()
        child = threads.submit(
            subprocess.Popen, started, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ).result()
        child.stdout.readline()
        (usage,) = span.read()
        # The child's block of 64 MiB, and two interpreters.
        assert 64 * MIB < usage.delta_bytes < 96 * MIB
        assert usage.delta_bytes == pytest.approx(
            sum(one.memory_bytes for one in children.children()), rel=0.05
        )
        child.communicate()
        (usage,) = span.stop()
        assert (usage.after_bytes, usage.note) == (0, "")
        assert usage.peak_bytes > 64 * MIB


@pytest.mark.parametrize("missing", ["smaps_rollup", "children"])
@alone
def test_unreadable_children_are_reported(missing: str) -> None:
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == missing:
            raise PermissionError(1, "Operation not permitted")
        return original(path)

    probe = OutsideProbe()
    probe._kernel_lists_children &= missing != "children"
    setattr(Path, "read_bytes", read_bytes)  # noqa: B010  # mypy knows no methods that change
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD_WITH_BLOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    if missing == "children":
        assert probe.read() == ()
    (reading,) = probe.read(detail=True)
    assert reading.current_bytes > 64 * MIB
    assert reading.note == (children.NOT_SHARED_OUT if missing == "smaps_rollup" else "")
    child.communicate()
    probe.close()


BATCHES = """
from multiprocessing.shared_memory import SharedMemory
import subprocess, sys
segment = SharedMemory(create=True, size=64 << 20)
with open(f"/dev/shm/{segment.name}", "r+b") as file:
    file.write(bytes(64 << 20))
segment.unlink()
worker = subprocess.Popen([sys.executable, "-c", "block = bytearray(64 << 20); print(1, flush=True); input()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdout.readline()
"""  # noqa: E501


def test_a_cell_an_experiment_and_the_status_count_both(kernel: Kernel) -> None:
    (line,) = run_cells(kernel, BATCHES).reports("cell")
    assert "shared memory +64 MiB, 64 MiB of " in line
    assert "child processes +7" in line
    (text,) = run_cells(kernel, "%gpumem status").reports("status")
    assert re.search(r"shared memory +64 MiB", text)
    assert re.search(r"python\S* +cell 2 +worker.terminate\(\)", text), text
    # not of the next experiment
    run_cells(kernel, "segment.close(); del segment; older = worker; del worker")
    (text,) = run_cells(kernel, f"%%experiment batches --keep worker{BATCHES}").reports(
        "experiment"
    )
    assert re.search(r"shared memory +\+64 MiB +64 MiB$", text, re.MULTILINE), text
    # PSS varies
    assert re.search(r"child processes +\+[67][\d.]+ MiB +-?[\d.]+ (Ki)?B$", text, re.MULTILINE), (
        text
    )
    assert re.search("to end them: worker.terminate\\(\\)$", text, re.MULTILINE), text
    run_cells(kernel, "older.terminate()")


PARALLEL = """%%experiment parallel
import joblib
joblib.Parallel(n_jobs=2)(joblib.delayed(bytearray)(1 << 20) for _ in range(8))
"""
LOADER = """
import torch

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.ones(4, 1 << 20)

loader = torch.utils.data.DataLoader(Images(), num_workers=1, persistent_workers=True)
batches = iter(loader)
first = next(batches)
"""


def test_the_line_shown_ends_the_workers_of_joblib(kernel: Kernel) -> None:
    run_cells(kernel, "%config IPyGpuMem.min_held_bytes = '1 MiB'")
    (text,) = run_cells(kernel, PARALLEL).reports("experiment")
    line = re.search(
        r"to end them: (from joblib.* import .*; get_reusable_executor.*)$", text, re.MULTILINE
    )
    assert line is not None, text
    (text,) = run_cells(kernel, line[1]).reports("cell")
    assert re.search(r"child processes -\d", text), text


STARTED = """
%%experiment two --keep worker holder
import subprocess, sys, types
code = "data = bytearray(b'1' * (40 << 20)); print(1, flush=True); input()"
def started():
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
    process.stdout.readline()
    return process
worker, holder = started(), types.SimpleNamespace(process=started())
"""


def test_a_report_says_that_it_knows_no_line_for_some_processes(kernel: Kernel) -> None:
    (text,) = run_cells(kernel, STARTED).reports("experiment")
    line = re.search(r"to end them: (.*)$", text, re.MULTILINE)
    assert line is not None, text
    assert line[1] == "worker.terminate()  # %gpumem status lists the rest"
    run_cells(kernel, line[1], "holder.process.terminate()")


def test_the_line_shown_ends_the_workers_of_a_data_loader(kernel: Kernel) -> None:
    (text,) = run_cells(kernel, LOADER).reports("cell")
    assert re.search(r"shared memory \+\d+(\.\d)? MiB, .* child processes \+\d", text), text
    (text,) = run_cells(kernel, "%gpumem status").reports("status")
    assert re.search(r"pt_data_worker +cell 2 +del loader, batches$", text, re.MULTILINE), text
    (text,) = run_cells(kernel, "del batches, loader").reports("cell")
    assert re.search(r"child processes -\d", text), text


def test_an_array_of_a_closed_segment_has_no_memory(kernel: Kernel) -> None:
    """``leaks`` failed (mmap closed or invalid), and a report listed an array without pages."""
    run_cells(
        kernel,
        """
        import numpy as np
        from multiprocessing.shared_memory import SharedMemory
        store = {}
        """,
    )
    (report,) = run_cells(
        kernel,
        """
        %%experiment e
        segment = SharedMemory(create=True, size=16 << 20)
        array = np.ndarray((2 << 20,), buffer=segment.buf)
        array[:] = 1
        store["array"] = array
        segment.unlink(); segment.close()
        """,
    ).reports("experiment")
    assert "ndarray" not in report
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak")
    run_cells(kernel, "array = store['array']")
    (top,) = run_cells(kernel, "%gpumem top").reports("top")
    assert "ndarray" not in top
    (why,) = run_cells(kernel, "%gpumem why array").reports("why")
    assert "MiB" not in why
    (status,) = run_cells(kernel, "%gpumem status").reports("status")
    assert not re.search(r"MiB +arrays", status)
