"""What a forked child does reaches nothing that its parent has open, shares or runs."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ipygpumem.errors import EstimateError
from tests.test_packing import apart

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process has open and shares is looked up there")


def test_a_file_that_is_being_read_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("".join(f"{number}\n" for number in range(20_000)))
    with path.open() as rows:
        assert next(rows) == "0\n"
        assert apart(lambda: sum(1 for _ in rows)) == 19_999
        assert sum(1 for _ in rows) == 19_999


def test_text_that_waits_in_an_open_file_is_written_once_and_a_childs_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with path.open("w") as log:
        log.write("epoch,loss\n")

        def work() -> None:
            log.write("0,1.000\n")
            log.flush()

        apart(work)
        log.write("0,0.5\n")
    assert path.read_text() == "epoch,loss\n0,0.5\n"


def test_memory_that_processes_share_is_a_childs_own(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    counter = multiprocessing.get_context("fork").Value("i", 1)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data, mmap.mmap(-1, 4096) as anonymous:
        anonymous[0] = 7

        def work() -> list[int]:
            assert anonymous[0] == 7
            data[0] = anonymous[0] = counter.value = 5
            return [data[0], anonymous[0], counter.value]

        assert apart(work) == [5, 5, 5]
        assert [data[0], anonymous[0], counter.value] == [0, 7, 1]


def test_a_handler_of_the_users_is_not_run_when_a_child_is_stopped(tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "checkpoint").write_text("saved"))
        while True:
            time.sleep(0.01)

    with pytest.raises(EstimateError, match=r"stopped after 3 s in test_apart.py, line \d+: (time.sleep|while|signal)"):
        apart(work, timeout=3)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_a_child_started_end_with_it() -> None:
    def work() -> list[int]:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        return [int(process.pid or 0), subprocess.Popen(["sleep", "600"]).pid]

    for pid in apart(work):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=30)
        assert not psutil.pid_exists(pid)


def test_what_a_childs_own_processes_print_does_not_mix_with_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> str:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=lambda: [print("x" * 30_000) for _ in range(50)]) for _ in range(2)]
        for process in processes:
            process.start()
        for _ in range(50):
            print("y" * 30_000)
        for process in processes:
            process.join()
        return "whole"

    assert apart(work) == "whole"
    assert capsys.readouterr().out.count("y" * 30_000) == 50


def test_a_child_that_is_stopped_in_its_own_child_says_nothing_false() -> None:
    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            os.getpid()

    with pytest.raises(EstimateError, match=r"after 3 s in an unknown line \(the child process did not answer\)"):
        apart(work, timeout=3)
