"""The flight recorder in real kernels: they are killed, and the next one reports how."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipygpumem.probes.host import process_space
from tests.control_group import limited_group, move
from tests.kernel import Kernel
from tests.waiting import wait_for

ON = "--IPyGpuMem.record=True"
ALLOCATE = "import time\nchunks = []\nwhile True:\n    chunks.append(bytearray(b'1' * 2**22))\n    time.sleep(0.02)"
Start = Callable[..., Kernel]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start kernels of one profile of the test's own."""
    kernels: list[Kernel] = []

    def call(*arguments: str) -> Kernel:
        kernels.append(Kernel(*arguments, env={**os.environ, "IPYTHONDIR": str(tmp_path)}))
        return kernels[-1]

    yield call
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "profile_default" / "ipygpumem"


def recorded(folder: Path, text: str) -> int:
    return sum(path.read_text().count(text) for path in folder.glob("*-*.jsonl"))


def run_until_dead(kernel: Kernel, code: str, *, kill_when: Callable[[], object] | None = None) -> None:
    pid = int(kernel.value("__import__('os').getpid()"))
    kernel._client.execute(code)
    if kill_when is not None:
        wait_for(kill_when)
        os.kill(pid, 9)
    wait_for(lambda: not kernel._manager.is_alive())


def told(kernel: Kernel, line: str = "%gpumem postmortem") -> str:
    (report,) = kernel.run(line).reports("postmortem")
    return report


def test_after_a_kill_and_a_crash_the_next_kernel_names_the_cell(start: Start, folder: Path) -> None:
    kernel = start(ON)
    kernel.run("%load_ext ipygpumem")
    run_until_dead(kernel, ALLOCATE, kill_when=lambda: recorded(folder, '"kind":"tick"') >= 3)
    kernel = start(ON)
    assert kernel.run("%load_ext ipygpumem").reports("note") == [
        "the previous kernel died in cell 2: see %gpumem postmortem"
    ]
    headline, *rest = told(kernel).split("\n")
    assert "died in cell 2" in headline
    assert "it was killed, or it crashed (unknown)" in headline
    assert [line.strip() for line in rest[-5:]] == [line.strip() for line in ALLOCATE.splitlines()]
    assert [line.split()[0] for line in rest if line.strip().startswith(("RAM", "machine"))] == ["RAM", "machine:"]
    run_until_dead(kernel, "import ctypes; ctypes.string_at(0)")
    after = start()
    after.run("%load_ext ipygpumem")
    headline = told(after).split("\n")[0]
    assert "a fault in native code (certain)" in headline or "it was killed, or it crashed (unknown)" in headline


def test_a_kernel_that_its_memory_limit_has_killed_before_its_first_tick_is_said_so(start: Start) -> None:
    with limited_group(300 * 2**20) as group:
        kernel = start()
        move(int(kernel.value("__import__('os').getpid()")), group)
        kernel.run("%load_ext ipygpumem\n%gpumem record on")
        run_until_dead(kernel, "all_at_once = bytearray(b'1') * 2**30")
        after = start()
        after.run("%load_ext ipygpumem")
        headline = told(after).split("\n")[0]
    assert "died in cell 2" in headline
    assert "OOM killer ended it" in headline


def test_a_shutdown_while_a_cell_runs_is_no_death(start: Start, folder: Path) -> None:
    busy, other = start(ON), start(ON)
    for kernel in (busy, other):
        kernel.run("%load_ext ipygpumem")
    busy._client.execute("import time; time.sleep(600)")
    wait_for(lambda: recorded(folder, "time.sleep(600)"))
    name = next(path.name for path in folder.glob("*.jsonl") if "sleep(600)" in path.read_text())
    assert "still runs" in told(other, f"%gpumem postmortem {name}").split("\n")[0]
    busy._manager.shutdown_kernel(now=False)  # is killed in the end: the cell goes on
    assert told(other).startswith("no kernel is known to have died while it was recorded (2 recordings in ")
    assert "it was asked to end" in told(other, f"%gpumem postmortem {name}").split("\n")[0]


def test_a_recording_has_each_cell_and_no_failure_of_it_reaches_one(start: Start, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "0.jsonl").write_bytes(b"\xff\n" * 1000 + b'{"kind":"tick","time":1,"memory":{"cpu":[]}}')
    os.mkfifo(folder / "1.jsonl")
    (folder / "2.jsonl").write_text(
        '{"kind":"kernel","time":1,"pid":-1,"started":1,"place":"' + process_space() + '"}\n'
    )
    (folder / "3.jsonl").symlink_to(folder / "nothing")
    kernel = start(ON)
    assert kernel.run("%load_ext ipygpumem").reports("note") == []
    (path,) = folder.glob("*-*.jsonl")
    kernel.run("%%capture\nx = bytearray(2**25)")
    kernel.run("1 / 0")
    kernel.run("import os\nif (child := os.fork()) == 0: os._exit(0)\nos.waitpid(child, 0)")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["kind"], entry.get("cell")) for entry in entries if entry["kind"] != "tick"] == [
        ("kernel", None),
        *((kind, cell) for cell in (2, 3, 4) for kind in ("cell", "cell end")),
    ]
    assert [entry["error"] for entry in entries if "error" in entry] == ["ZeroDivisionError"]
    for name in ("nowhere.jsonl", "/dev/zero", "0.jsonl", "2.jsonl"):
        assert "there is no such recording" in kernel.run(f"%gpumem postmortem {name}").stderr, name
    kernel.run("%gpumem record off")
    assert json.loads(path.read_text().splitlines()[-1])["reason"] == "recording was switched off"
    kernel.run("%gpumem record on")
    reply = kernel.run(
        "from ipygpumem.shell.app import current_app\n"
        "def full(moment): raise OSError(28, 'No space left on device')\n"
        "current_app().recorder._writer.write = full"
    )
    assert (reply.status, reply.stderr) == ("ok", "")
    assert reply.reports("note") == [
        "recording stopped (OSError: No space left on device): your code is not affected; %gpumem record on tries again"
    ]
    assert kernel.run("%gpumem record status").reports("note")[0].startswith("recording is off")
    kernel.run("%gpumem record on\n%unload_ext ipygpumem")
    assert recorded(folder, "the extension was unloaded") == 1
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'ipygpumem' in t.name]") == []
