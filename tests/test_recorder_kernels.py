"""The flight recorder in real kernels: they are killed, and the next one tells how."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.control_group import limited_group, move
from tests.kernel import Kernel

MIB = 2**20
ON = "--IPyGpuMem.record=True"
ALLOCATE = """\
import time
chunks = []
while True:
    chunks.append(bytearray(b"1" * (4 * 2**20)))
    time.sleep(0.02)
"""

SAMPLE = '"kind":"sample"'

Start = Callable[..., Kernel]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts kernels of one profile, of the test's own, with the extension loaded."""
    kernels: list[Kernel] = []

    def call(*arguments: str, load: bool = True, **environment: str) -> Kernel:
        kernel = Kernel(*arguments, env={**os.environ, "IPYTHONDIR": str(tmp_path), **environment})
        kernels.append(kernel)
        if load:
            assert kernel.run("%load_ext ipygpumem").status == "ok"
        return kernel

    yield call
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "profile_default" / "ipygpumem"


def pid_of(kernel: Kernel) -> int:
    return int(kernel.value("__import__('os').getpid()"))


def wait_for(condition: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def run_until_dead(kernel: Kernel, code: str, *, kill_when: Callable[[], object] | None = None) -> None:
    """Execute ``code``, kill the kernel when it is time, if that is asked, and wait until its process is gone."""
    pid = pid_of(kernel)
    kernel._client.execute(code)
    if kill_when is not None:
        wait_for(kill_when, "the moment to kill it did not come")
        os.kill(pid, 9)
    wait_for(lambda: not kernel._manager.is_alive(), "it lives on")


def recorded(folder: Path, text: str) -> int:
    """Return how often ``text`` stands in what was recorded so far."""
    return sum(path.read_text().count(text) for path in folder.glob("*.jsonl"))


def told(kernel: Kernel, line: str = "%gpumem postmortem") -> str:
    reply = kernel.run(line)
    assert reply.status == "ok", reply.traceback
    (report,) = reply.reports("postmortem")
    return report


def entries(folder: Path) -> list[dict[str, object]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_after_a_kill_the_next_kernel_tells_the_cell_and_its_memory(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("first = 1")
    before = recorded(folder, SAMPLE)
    run_until_dead(kernel, ALLOCATE, kill_when=lambda: recorded(folder, SAMPLE) >= before + 8)
    following = start(ON, load=False)
    assert following.run("%load_ext ipygpumem").reports("note") == [
        "the previous kernel died in cell 3: see %gpumem postmortem"
    ]
    report = told(following)
    headline, *rest = report.split("\n")
    assert "died in cell 3" in headline
    assert "not the OOM killer: it was killed, or it crashed (unknown)" in headline
    source = [line.strip() for line in rest[-5:]]
    assert source == [line.strip() for line in ALLOCATE.splitlines()]
    (ram,) = [line.split() for line in rest if line.strip().startswith("RAM ")]
    assert len(ram[1]) >= 5  # samples: 4 a second from the start
    assert ram[1][-1] == max(ram[1]) > ram[1][0]  # the blocks are in the order of their heights
    assert any(line.strip().startswith("2 ") and "first = 1" in line for line in rest)


def test_a_kernel_that_its_memory_limit_has_killed_is_said_so(start: Start) -> None:
    with limited_group(300 * MIB) as group:
        kernel = start("--ip=127.0.0.1", load=False)
        move(pid_of(kernel), group)
        kernel.run("%load_ext ipygpumem")
        kernel.run("%gpumem record on")
        run_until_dead(kernel, ALLOCATE)
        report = told(start())
    headline = report.split("\n")[0]
    assert "died in cell 3" in headline
    log = "OOM killer ended it: its control group's limit was reached (certain)"
    counter = "OOM killer ended it; its control group may use 300 MiB (likely)"  # where the log may not be read
    assert headline.endswith((log, counter))
    (used,) = [line.split() for line in report.split("\n") if line.strip().startswith("control group ")]
    assert used[-2:] == ["300", "MiB"]


def test_a_kernel_killed_before_its_first_sample_is_said_as_well(start: Start) -> None:
    with limited_group(300 * MIB) as group:
        kernel = start(load=False)
        move(pid_of(kernel), group)
        kernel.run("%load_ext ipygpumem")
        kernel.run("%gpumem record on")
        run_until_dead(kernel, "all_at_once = bytearray(b'1') * 2**30")
        report = told(start())
    assert "died in cell 3" in report
    assert "OOM killer ended it" in report


def test_under_ulimit_an_allocation_fails_and_the_kernel_lives(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("import resource; resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))")
    kernel.run("%gpumem record off")
    kernel.run("%gpumem record on")
    assert kernel.run("x = bytearray(b'1') * 2**33").error == "MemoryError"
    assert kernel.run("1 + 1").result == "2"
    found = f"glob.glob({str(folder / '*.jsonl')!r})"
    run_until_dead(
        kernel,
        "import glob, os, time\nchunks = []\n"
        f"def samples(): return sum(open(path).read().count({SAMPLE!r}) for path in {found})\n"
        "try:\n    while True: chunks.append(bytes(2**20))\nexcept MemoryError:\n    del chunks[-20:]\n"
        "had = samples()\nwhile samples() < had + 3: time.sleep(0.05)\nos.abort()",
    )
    headline, *rest = told(start()).split("\n")
    assert "memory had nearly run out: perhaps an allocation failed" in headline
    assert "(likely)" in headline
    assert any("of 3.00 GiB allowed (RLIMIT_AS)" in line for line in rest)


@pytest.mark.parametrize("limited", [False, True])
def test_an_abort_by_bad_alloc_is_not_said_to_have_had_memory_enough(start: Start, *, limited: bool) -> None:
    kernel = start(ON)
    if limited:
        kernel.run("import resource; resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))")
    run_until_dead(
        kernel,
        "import ctypes\nallocate = ctypes.CDLL('libstdc++.so.6')._Znwm\nallocate.argtypes = [ctypes.c_size_t]\n"
        "from tests.waiting import ticks\nticks(2)\nallocate(2**46)",
    )
    headline, *rest = told(start()).split("\n")
    assert "not the OOM killer: it was killed, or it crashed (unknown)" in headline
    said = [line for line in rest if "RLIMIT_AS allowed it" in line]
    assert bool(said) is limited, rest
    assert not limited or "3.00 GiB" in said[0]


def test_a_recording_whose_first_line_is_damaged_is_counted_and_shown(start: Start, folder: Path) -> None:
    kernel = start(ON)
    run_until_dead(kernel, "import os; os.abort()")
    (path,) = folder.glob("*.jsonl")
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    following = start()
    assert told(following).startswith("no kernel is known to have died while it was recorded (1 recording, ")
    assert "1 that cannot be read" in told(following)
    assert "its beginning is damaged" in " ".join(told(following, "%gpumem postmortem --all").split())
    report = told(following, f"%gpumem postmortem {path.name}")
    assert report.startswith("its beginning is damaged")
    assert "import os; os.abort()" in report


def test_a_crash_is_not_called_a_want_of_memory(start: Start) -> None:
    kernel = start(ON)
    run_until_dead(kernel, "import ctypes; ctypes.string_at(0)")
    headline = told(start()).split("\n")[0]
    assert "died in cell 2" in headline
    assert "it crashed: a fault in native code (certain)" in headline or "not the OOM killer" in headline


def test_a_shutdown_or_a_restart_is_no_death_even_while_a_cell_runs(start: Start, folder: Path) -> None:
    idle, busy = start(ON), start(ON)
    idle._manager.shutdown_kernel(now=False)
    busy._client.execute("import time; time.sleep(600)")
    wait_for(lambda: recorded(folder, "time.sleep(600)"), "the cell was not recorded")
    busy._manager.shutdown_kernel(now=False)  # is killed in the end: the cell goes on
    following = start(ON, load=False)
    assert following.run("%load_ext ipygpumem").reports("note") == []
    assert told(following) == "no kernel died while it was recorded (3 recordings, 1 of kernels that run)"
    everything = " ".join(told(following, "%gpumem postmortem --all").split())
    assert everything.count("it was asked to end") + everything.count("ended by itself") == 2


def test_unloading_and_switching_off_end_a_recording(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("%config IPyGpuMem.record = False")
    kernel.run("%config IPyGpuMem.record = True")
    kernel.run("%unload_ext ipygpumem")
    reasons = sorted(json.loads(path.read_text().splitlines()[-1])["reason"] for path in folder.glob("*.jsonl"))
    assert reasons == ["recording was switched off", "the extension was unloaded"]
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'ipygpumem' in t.name]") == []


def test_nothing_is_written_unless_it_is_asked_for(start: Start, folder: Path) -> None:
    kernel = start()
    kernel.run("x = 1")
    assert not folder.exists()
    assert told(kernel) == "nothing was recorded yet: %gpumem record on starts it"


def test_two_kernels_write_at_once_and_read_each_other(start: Start, folder: Path) -> None:
    one, other = start(ON), start(ON)
    one._client.execute("import time\nfor n in range(8): time.sleep(600)")
    wait_for(lambda: recorded(folder, "time.sleep(600)"), "the cell was not recorded")
    name = next(path.name for path in folder.glob("*.jsonl") if f"-{pid_of(other)}-" not in path.name)
    report = told(other, f"%gpumem postmortem {name}")
    assert "still runs" in report.split("\n")[0]
    assert "for n in range(8): time.sleep(600)" in report
    assert len(list(folder.glob("*.jsonl"))) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.jsonl")} == {0o600}
    assert other.run("%gpumem record off --delete").reports("note") == [
        "recording is off · 1 recording deleted · 1 recording kept: their kernels still run, or may"
    ]
    assert [path.name for path in folder.glob("*.jsonl")] == [name]


def test_each_cell_leaves_its_start_and_its_end(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("%%capture\nx = bytearray(2**25)")
    kernel.run("1 / 0")
    kernel.run("%experiment start tuning")
    kernel.run("y = 1")
    everything = entries(folder)
    assert [entry["n"] for entry in everything] == list(range(len(everything)))
    found = [entry for entry in everything if entry["kind"] != "sample"]  # on a slow machine there are some
    assert [(entry["kind"], entry.get("cell")) for entry in found] == [
        ("kernel", None),
        *((kind, cell) for cell in (2, 3, 4, 5) for kind in ("cell", "cell end")),
    ]
    assert (found[4]["success"], found[4]["error"]) == (False, "ZeroDivisionError")
    assert found[7]["experiment"] == "tuning"
    (ram,) = found[2]["devices"]  # type: ignore[misc]  # JSON
    assert ram["peak_bytes"] >= found[1]["devices"][0]["current_bytes"] + 2**25  # type: ignore[index]  # JSON


def test_a_recording_that_begins_within_a_cell_knows_the_experiment_that_the_cell_has_started(
    start: Start, folder: Path
) -> None:
    start().run("%experiment start tuning\n%gpumem record on")
    (cell,) = (entry for entry in entries(folder) if entry["kind"] == "cell")
    assert cell["experiment"] == "tuning"


def test_a_folder_that_cannot_be_made_costs_one_line(start: Start, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file of the user's")
    kernel = start(ON, load=False)
    (message,) = kernel.run("%load_ext ipygpumem").reports("note")
    assert message.startswith("recording is off: ")
    assert "cannot be written (FileExistsError" in message
    assert kernel.run("1 + 1").result == "2"
    reply = kernel.run("%gpumem record on")
    assert reply.stderr.count("\n") <= 1
    assert "recording is off" in reply.stderr
    assert kernel.run("%gpumem record status").reports("note")[0].startswith("recording is off")
    assert folder.read_text() == "a file of the user's"


def test_a_write_that_fails_costs_one_line_and_no_cell(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("import os; real = os.write")
    reply = kernel.run(
        "def full(descriptor, data):\n"
        "    if data.startswith(b'{\"kind\":\"cell'): raise OSError(28, 'No space left on device')\n"
        "    return real(descriptor, data)\n"
        "os.write = full"
    )
    assert (reply.status, reply.stderr) == ("ok", "")
    assert reply.reports("note") == [
        "recording stopped (OSError: No space left on device): your code is not affected; %gpumem record on tries again"
    ]
    reply = kernel.run("1 + 1")
    assert (reply.result, reply.stderr, reply.reports("note")) == ("2", "", [])
    assert "recording is off" in kernel.run("%gpumem record status").reports("note")[0]
    first, *_, last = entries(folder)
    assert first["kind"] == "kernel"
    assert last["reason"] == "recording stopped: OSError: No space left on device"


def test_children_of_a_fork_leave_the_recording_alone(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("import multiprocessing; pool = multiprocessing.get_context('fork').Pool(2)")
    assert kernel.run("with pool: print(pool.map(abs, [-1, -2]))").stdout == "[1, 2]\n"
    kernel.run("import os, sys\nif (child := os.fork()) == 0: os._exit(0)\nos.waitpid(child, 0)")
    kernel.run("x = 1")
    found = entries(folder)
    assert [entry["n"] for entry in found] == list(range(len(found)))
    assert found[-1]["kind"] == "cell end"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%gpumem record", "a command is missing; use on, off, status"),
        ("%gpumem record on --delete", "'--delete' is not an option; this command takes none"),
        ("%gpumem postmortem --all x", "--all, or a file, and not both"),
        ("%gpumem postmortem nowhere.jsonl", "there is no such file"),
        ("%gpumem postmortem /dev/null", "it is not a recording"),
    ],
)
def test_a_mistake_costs_one_line_that_names_it(kernel: Kernel, line: str, message: str) -> None:
    reply = kernel.run(line)
    assert message in reply.stderr
    assert reply.stderr.count("\n") <= 1
