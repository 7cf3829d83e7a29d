"""The flight recorder: its lines, its files, its verdict, and real kernels that are killed."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.harness.control_group import limited_group, move
from benchmarks.harness.kernel import Kernel
from ipygpumem.extras.recorder import recordings
from ipygpumem.extras.recorder.recorder_commands import postmortem_report
from ipygpumem.extras.recorder.recordings import (
    Moment,
    RecordedKernel,
    Recording,
    RecordingWriter,
    decode,
    encode,
    judge,
    read,
)
from ipygpumem.probes import host, oom_kills
from ipygpumem.probes.host import process_space
from ipygpumem.probes.oom_kills import Death
from ipygpumem.report import text
from ipygpumem.units import GIB, KIB
from tests.control_group import v2_system
from tests.waiting import wait_for

ALIVE = RecordedKernel(
    100.0,
    os.getpid(),
    psutil.Process().create_time(),
    host.process_space(),
    "folder/a.ipynb",
    "group:7",
)
DEAD = dataclasses.replace(ALIVE, started=1.0)
ELSEWHERE = dataclasses.replace(ALIVE, place="another boot pid:[1]")
START = Moment("cell", 101.0, 1, {"cpu": GIB}, {"cpu": 16 * GIB}, 2, "x = 'ü\ud800'\n\ty")
TICK = Moment(
    "tick",
    102.0,
    1,
    {"cpu": 2 * GIB, "machine: available": GIB},
    {"machine: available": 16 * GIB},
    2,
)
CELL_END = Moment("cell end", 103.0, 1, {"cpu": GIB}, kills=2, error="ValueError")
END = Moment("end", 104.0, reason="because")
ENTRIES = (DEAD, START, TICK, CELL_END, END)
VALID = b"".join(map(encode, ENTRIES))


def write(folder: Path, content: bytes, name: str = "a.jsonl") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def recording(
    *moments: Moment, kernel: RecordedKernel | None = DEAD, skipped: int = 0
) -> Recording:
    end = next((moment for moment in moments if moment.kind == "end"), None)
    return Recording(
        Path("a.jsonl"),
        kernel,
        tuple(moment for moment in moments if moment is not end),
        end,
        skipped,
    )


def rendered(restored: Recording) -> str:
    return text.render([postmortem_report(restored, judge(restored))])


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_survives_encoding_without_its_unknown_fields(
    entry: RecordedKernel | Moment,
) -> None:
    assert decode(encode(entry)) == entry
    assert json.loads(encode(END)) == {"kind": "end", "time": 104.0, "reason": "because"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=400), st.integers(0, len(VALID)), st.integers(0, len(VALID)))
def test_garbage_and_a_torn_end_hide_no_whole_line(
    tmp_path: Path, garbage: bytes, place: int, cut: int
) -> None:
    restored = read(write(tmp_path, VALID[:cut]))
    assert restored.skipped == 0
    assert (restored.kernel is not None) + len(restored.cell) + (restored.end is not None) == VALID[
        :cut
    ].count(b"\n")
    damaged = read(write(tmp_path, VALID[:place] + garbage + VALID[place:]))
    assert (damaged.kernel is not None) + len(damaged.cell) + (damaged.end is not None) >= len(
        ENTRIES
    ) - 1
    assert rendered(damaged)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b'{"kind":[]}',
        b'{"kind":"tick","time":1e400}',
        b'{"kind":"tick","time":NaN}',
        b'{"kind":"tick","time":1,"memory":{"cpu":1' + b"0" * 400 + b"}}",
        b'{"kind":"tick","time":1,"memory":{'
        + b",".join(b'"%d":1' % n for n in range(20_000))
        + b"}}",
        b'{"kind":' + b"[" * 100_000,
        b"\xff\xfe",
        *(
            encode(ALIVE).replace(b'"pid":%d' % os.getpid(), b'"pid":' + x)
            for x in (b"-1", b"0", b"1" + b"0" * 400)
        ),
    ],
    ids=lambda line: line[:40].decode("ascii", "replace"),
)
def test_a_line_that_is_no_entry_is_skipped(line: bytes) -> None:
    assert decode(line) is None


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda to: to.symlink_to("/dev/zero"), lambda to: to.symlink_to(to)],
)
def test_only_plain_files_are_recordings(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl").kernel is None
    assert recordings.listed(tmp_path) == []


def test_no_file_is_read_because_a_recording_names_it(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill 7\n")
    name = f"{tmp_path}/vmstat:{tmp_path.stat().st_ino}"
    assert oom_kills.kill_count(name) == 7
    assert oom_kills.kill_count_in_recording(name) is None
    assert oom_kills.kill_count_in_recording(f"/sys/fs/cgroup/../../..{name}") is None
    assert (
        "cannot be counted"
        in judge(recording(START, kernel=dataclasses.replace(DEAD, counter=name))).evidence
    )
    system = v2_system(tmp_path / "s", "/a")
    system.write("sys/fs/cgroup/a/memory.events", "oom_kill 3\n")
    assert (
        oom_kills.kill_count_in_recording(oom_kills.kill_counter_name(system.root), system.root)
        == 3
    )


MOST_WRITTEN_BYTES = 64 * KIB
"""The size at which ``writer`` drops the older half of its recording."""


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingWriter]:
    monkeypatch.setattr(recordings, "MOST_WRITTEN_BYTES", MOST_WRITTEN_BYTES)
    writer = RecordingWriter(tmp_path / "r", DEAD)
    yield writer
    writer._file.close()


def test_only_the_owner_can_read_a_recording(writer: RecordingWriter) -> None:
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(writer.path.parent.stat().st_mode) == 0o700


def test_a_bounded_recording_keeps_its_kernel_and_running_cell(writer: RecordingWriter) -> None:
    writer.write(START)
    assert read(writer.path).cell == (START,)
    number_of_ticks = 5000
    for number in range(number_of_ticks):
        writer.write(dataclasses.replace(TICK, time=TICK.time + number))
    assert MOST_WRITTEN_BYTES / 2 < writer.path.stat().st_size <= MOST_WRITTEN_BYTES

    # The cell's start, then its last ticks.
    restored = read(writer.path)
    assert restored.kernel == DEAD
    assert restored.cell[0] == START
    assert restored.skipped == 0
    times = [tick.time for tick in restored.cell[1:]]
    first = number_of_ticks - len(times)
    assert times == [TICK.time + number for number in range(first, number_of_ticks)]

    # So are they in a part of the file.
    tail = read(writer.path, 4 * KIB)
    assert tail.kernel == DEAD
    assert tail.running == restored.running
    assert tail.skipped == 0


def test_a_forked_child_writes_nothing(writer: RecordingWriter) -> None:
    before = writer.path.read_bytes()
    child = os.fork()
    if child == 0:
        writer.write(START)
        writer.close("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert writer.path.read_bytes() == before


def test_only_old_recordings_of_dead_kernels_are_deleted(tmp_path: Path) -> None:
    forty_days_ago = time.time() - 40 * 86400
    own = write(tmp_path, VALID, "3own.jsonl")
    for number in range(30):
        write(tmp_path, encode(DEAD), f"1{number:02}.jsonl")
    write(tmp_path, encode(ELSEWHERE), "000elsewhere.jsonl")
    for name, content in {"000live": ALIVE, "125": DEAD, "2elsewhere": ELSEWHERE}.items():
        os.utime(write(tmp_path, encode(content), f"{name}.jsonl"), (forty_days_ago,) * 2)
    recordings.prune(tmp_path, own)
    names = [path.stem for path in recordings.listed(tmp_path)]
    assert names == [
        "3own",
        *(f"1{number}" for number in range(29, 11, -1) if number != 25),
        "000live",
        "000elsewhere",
    ]


def test_a_process_is_known_by_its_id_and_its_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kernel = dataclasses.replace(
        ALIVE, pid=process.pid, started=psutil.Process(process.pid).create_time()
    )
    assert recordings.state(kernel) == "alive"
    assert recordings.state(dataclasses.replace(kernel, started=1.0)) == "dead"
    assert recordings.state(dataclasses.replace(kernel, place="x")) == "unknown"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert recordings.state(kernel) == "dead", "a zombie"
    process.communicate()
    assert recordings.state(kernel) == "dead"


LINES_OF_SYSTEM_LOG = {
    "Memory cgroup out of memory: Killed process 15 (python3) total-vm:1kB, anon-rss:2kB": (
        15,
        True,
    ),
    "Out of memory: Killed process 16 (ipython) total-vm:1kB": (16, True),
    "oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=17,uid=0": None,
    "python3[18]: segfault at 0 ip 00007f error 4 in libc.so.6": (18, False),
    "traps: python3[19] general protection fault ip:7f sp:7f error:0": (19, False),
    "traps: python3[20] trap invalid opcode ip:7f": (20, False),
    "EXT4-fs (vda): mounted filesystem": None,
}
"""Lines of a system log: the process that has died by each, and whether for lack of memory."""


def test_the_system_log_names_processes_ended_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [f"3,100,5000000,-;{line}\n SUBSYSTEM=x\n" for line in LINES_OF_SYSTEM_LOG]
    monkeypatch.setattr(oom_kills, "_system_log", lambda path: ["garbage", *records])
    assert [(death.pid, death.oom) for death in oom_kills.deaths()] == [
        place for place in LINES_OF_SYSTEM_LOG.values() if place
    ]


OOM = Death(103.0, ALIVE.pid, True, "Out of memory: Killed process 15 (python)")
GROUP_OOM = OOM._replace(text="Memory cgroup out of memory: Killed process 15 (python)")
FAULT = OOM._replace(oom=False, text="python[15]: segfault at 0")
MACHINE = dataclasses.replace(DEAD, counter="/proc/vmstat:1")


class Evidence(NamedTuple):
    """Statements of a recording and of the system, and the verdict that they allow."""

    kernel: RecordedKernel | None
    last: Moment
    deaths: tuple[Death, ...]
    """In the system log."""
    kills: int | None
    """The counter's value now; 2 while the kernel ran."""
    grade: str
    words: str


VERDICTS = {
    "ended": Evidence(DEAD, END, (OOM,), 3, "", "because"),
    "alive": Evidence(ALIVE, TICK, (), 3, "", "still runs"),
    "elsewhere": Evidence(ELSEWHERE, TICK, (OOM,), 3, "", "may still run"),
    "damaged": Evidence(None, TICK, (OOM,), 3, "", "are unknown"),
    "the log, in its group": Evidence(
        DEAD,
        TICK,
        (GROUP_OOM,),
        3,
        "certain",
        "its control group's limit was reached",
    ),
    "the log": Evidence(DEAD, TICK, (OOM,), 3, "certain", "the machine's memory was used up"),
    "a fatal signal in the log": Evidence(DEAD, TICK, (FAULT,), 2, "certain", "crashed"),
    "the log, of another process": Evidence(
        DEAD,
        TICK,
        (OOM._replace(pid=1),),
        2,
        "unknown",
        "not the OOM killer",
    ),
    "the log, of an earlier one": Evidence(
        DEAD,
        TICK,
        (OOM._replace(time=50.0),),
        2,
        "unknown",
        "not the OOM killer",
    ),
    "its group's counter": Evidence(DEAD, TICK, (), 3, "likely", "the OOM killer ended it"),
    "the machine's counter": Evidence(MACHINE, TICK, (), 3, "unknown", "perhaps the OOM killer"),
    "the counter stayed": Evidence(DEAD, TICK, (), 2, "unknown", "not the OOM killer"),
    "no counter": Evidence(DEAD, TICK, (), None, "unknown", "was killed, or it crashed"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_claims_no_more_than_the_evidence(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = VERDICTS[case]
    monkeypatch.setattr(oom_kills, "deaths", lambda: evidence.deaths)
    monkeypatch.setattr(oom_kills, "kill_count_in_recording", lambda name: evidence.kills)
    monkeypatch.setattr(host, "SYSTEMS_PID_NAMESPACE", "")
    verdict = judge(recording(START, evidence.last, kernel=evidence.kernel))
    assert verdict.grade == evidence.grade
    assert evidence.words in verdict.text


def test_the_report_has_the_cell_its_memory_and_the_reason() -> None:
    page = rendered(recording(START, TICK, skipped=2))
    headline, *rows = page.split("\n")
    assert headline.startswith(
        f"kernel of a.ipynb, process {ALIVE.pid} died in cell 1 · 1970-01-01 "
    )
    assert "2 lines of the recording could not be read: its end may be among them" in page
    memory = [" ".join(row.split()) for row in rows if row.strip().startswith(("RAM", "machine"))]
    one = "1.00 GiB"
    assert memory == [
        f"RAM {one} {one} 2.00 GiB 2.00 GiB 16.00 GiB",
        f"machine: available {f'{one} ' * 4}16.00 GiB",
    ]
    assert "cell 1, ran 1.00 s until its last entry" in page
    assert "died while no cell ran" in rendered(recording(START, CELL_END))
    assert "cell 1, ran 2.00 s ValueError" in rendered(recording(START, CELL_END))
    assert "cell 1, ran 2.00 s:\n" in rendered(
        recording(START, dataclasses.replace(CELL_END, error=""))
    )


RECORDER_ON = "--IPyGpuMem.recorder=True"
ALLOCATE_UNTIL_KILLED = textwrap.dedent(
    """\
    import time
    chunks = []
    while True:
        chunks.append(bytearray(b'1' * 2**22))
        time.sleep(0.02)"""
)
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


def run_until_dead(
    kernel: Kernel, code: str, *, kill_when: Callable[[], object] | None = None
) -> None:
    pid = int(kernel.value("__import__('os').getpid()"))
    kernel._client.execute(code)
    if kill_when is not None:
        wait_for(kill_when)
        os.kill(pid, 9)
    wait_for(lambda: not kernel._manager.is_alive())


def postmortem(kernel: Kernel, line: str = "%gpumem postmortem") -> str:
    (report,) = kernel.run(line).reports("postmortem")
    return report


def test_after_a_kill_and_a_crash_the_next_kernel_names_the_cell(
    start: Start, folder: Path
) -> None:
    # The first kernel is killed.
    kernel = start(RECORDER_ON)
    kernel.run("%load_ext ipygpumem")
    run_until_dead(
        kernel, ALLOCATE_UNTIL_KILLED, kill_when=lambda: recorded(folder, '"kind":"tick"') >= 3
    )

    # The second one names its cell.
    kernel = start(RECORDER_ON)
    (note,) = kernel.run("%load_ext ipygpumem").reports("note")
    assert note == "the previous kernel died in cell 2: see %gpumem postmortem"
    headline, *rest = postmortem(kernel).split("\n")
    assert "died in cell 2" in headline
    assert "it was killed, or it crashed (unknown)" in headline
    assert [line.strip() for line in rest[-5:]] == [
        line.strip() for line in ALLOCATE_UNTIL_KILLED.splitlines()
    ]
    assert [line.split()[0] for line in rest if line.strip().startswith(("RAM", "machine"))] == [
        "RAM",
        "machine:",
    ]

    # The second one crashes, and a third one names the reason.
    run_until_dead(kernel, "import ctypes; ctypes.string_at(0)")
    after = start()
    after.run("%load_ext ipygpumem")
    headline = postmortem(after).split("\n")[0]
    assert (
        "a fault in native code (certain)" in headline
        or "it was killed, or it crashed (unknown)" in headline
    )


def test_a_kernel_killed_before_its_first_tick_is_reported(start: Start) -> None:
    with limited_group(300 * 2**20) as group:
        kernel = start()
        move(int(kernel.value("__import__('os').getpid()")), group)
        kernel.run("""
        %load_ext ipygpumem
        %gpumem recorder on
        """)
        run_until_dead(kernel, "all_at_once = bytearray(b'1') * 2**30")
        after = start()
        after.run("%load_ext ipygpumem")
        headline = postmortem(after).split("\n")[0]
    assert "died in cell 2" in headline
    assert "OOM killer ended it" in headline


def test_a_shutdown_while_a_cell_runs_is_no_death(start: Start, folder: Path) -> None:
    busy = start(RECORDER_ON)
    other = start(RECORDER_ON)
    for kernel in (busy, other):
        kernel.run("%load_ext ipygpumem")
    busy._client.execute("import time; time.sleep(600)")
    wait_for(lambda: recorded(folder, "time.sleep(600)"))
    name = next(path.name for path in folder.glob("*.jsonl") if "sleep(600)" in path.read_text())
    assert "still runs" in postmortem(other, f"%gpumem postmortem {name}").split("\n")[0]
    busy._manager.shutdown_kernel(now=False)  # is killed in the end: the cell goes on
    assert postmortem(other).startswith(
        "no kernel is known to have died while it was recorded (2 recordings in "
    )
    assert "it was asked to end" in postmortem(other, f"%gpumem postmortem {name}").split("\n")[0]


def entries_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_broken_recordings(folder: Path) -> None:
    """Write files with the ending of recordings: garbage, a pipe, no cell, and a dangling link."""
    folder.mkdir(parents=True)
    (folder / "0.jsonl").write_bytes(
        b"\xff\n" * 1000 + b'{"kind":"tick","time":1,"memory":{"cpu":[]}}'
    )
    os.mkfifo(folder / "1.jsonl")
    (folder / "2.jsonl").write_text(
        f'{{"kind":"kernel","time":1,"pid":-1,"started":1,"place":"{process_space()}"}}\n'
    )
    (folder / "3.jsonl").symlink_to(folder / "nothing")


def test_a_recording_has_each_cell_and_its_error(start: Start, folder: Path) -> None:
    kernel = start(RECORDER_ON)
    kernel.run("%load_ext ipygpumem")
    (path,) = folder.glob("*-*.jsonl")
    kernel.run("""
    %%capture
    x = bytearray(2**25)
    """)
    kernel.run("1 / 0")
    kernel.run("""
        import os
        if (child := os.fork()) == 0: os._exit(0)
        os.waitpid(child, 0)
        """)
    entries = [entry for entry in entries_of(path) if entry["kind"] != "tick"]
    assert [(entry["kind"], entry.get("cell")) for entry in entries] == [
        ("kernel", None),
        ("cell", 2),
        ("cell end", 2),
        ("cell", 3),
        ("cell end", 3),
        ("cell", 4),
        ("cell end", 4),
    ]
    assert [entry["error"] for entry in entries if "error" in entry] == ["ZeroDivisionError"]
    kernel.run("%gpumem recorder off")
    *_, last_line = path.read_text().splitlines()
    assert json.loads(last_line)["reason"] == "recording was switched off"


def test_broken_recordings_stop_no_recorder_and_are_none(start: Start, folder: Path) -> None:
    write_broken_recordings(folder)
    kernel = start(RECORDER_ON)
    assert kernel.run("%load_ext ipygpumem").reports("note") == []
    assert len(list(folder.glob("*-*.jsonl"))) == 1
    for name in ("nowhere.jsonl", "/dev/zero", "0.jsonl", "2.jsonl"):
        assert "there is no such recording" in kernel.run(f"%gpumem postmortem {name}").stderr, name


def test_a_full_disk_stops_the_recorder_and_no_cell(start: Start, folder: Path) -> None:
    kernel = start(RECORDER_ON)
    kernel.run("%load_ext ipygpumem")
    reply = kernel.run(
        """
        from ipygpumem.shell.app import current_app
        def full(moment): raise OSError(28, 'No space left on device')
        current_app().recorder._writer.write = full
        """
    )
    assert (reply.status, reply.stderr) == ("ok", "")
    assert reply.reports("note") == [
        "recording stopped (OSError: No space left on device): your code is not affected; "
        "%gpumem recorder on tries again"
    ]
    assert kernel.run("%gpumem recorder status").reports("note")[0].startswith("recording is off")
    kernel.run("""
    %gpumem recorder on
    %unload_ext ipygpumem
    """)
    assert recorded(folder, "the extension was unloaded") == 1
    names = kernel.value("[thread.name for thread in __import__('threading').enumerate()]")
    assert [name for name in names if "ipygpumem" in name] == []
