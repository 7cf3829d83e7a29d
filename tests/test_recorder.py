"""The flight recorder without a kernel: its lines, files, and what is concluded from them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipygpumem.flight_recorder import archive, files, machine, reader, verdict
from ipygpumem.flight_recorder.entries import (
    CellEnd,
    CellStart,
    End,
    Entry,
    Figures,
    Header,
    Sample,
    decode,
    encode,
    first_lines,
)
from ipygpumem.flight_recorder.files import Segments
from ipygpumem.flight_recorder.machine import this_machine
from ipygpumem.flight_recorder.reader import Recording
from ipygpumem.flight_recorder.verdict import Scene, Verdict, judge
from ipygpumem.flight_recorder.writer import Writer
from ipygpumem.probes import kernel_log, pressure
from ipygpumem.probes.kernel_log import Death
from ipygpumem.reports import html, postmortem, text
from tests.control_group import FakeSystem, v1_system, v2_system

GIB = 2**30
HERE = this_machine()
HEADER = Header(
    time=100.0,
    pid=os.getpid(),
    process_started=machine.process_started(os.getpid()) or 0.0,
    boot=HERE.boot,
    namespace=HERE.namespace,
    host="h",
    python="3.11.7",
    ram_bytes=16 * GIB,
    group_limit_bytes=8 * GIB,
    limits={"RLIMIT_AS": 4 * GIB},
    counter="/sys/fs/cgroup/memory.events:7",
    oom_kills=2,
)
ENTRIES: tuple[Entry, ...] = (
    CellStart(101.0, 1, "x = 'ü\ud800'", 1, "id", "demo", 2, (Figures("cpu", GIB, total_bytes=16 * GIB),)),
    Sample(102.0, 1, GIB, 2 * GIB, 6 * GIB, 8 * GIB, 9, 2, (Figures("cpu", 2 * GIB), Figures("cuda:0", 5, 4, 3, 2, 1))),
    CellEnd(103.0, 1, 2.0, False, "ValueError", 2, (Figures("cpu", GIB, 2 * GIB),)),
    CellStart(104.0, 2, "y = 1\nz = 2", 2, oom_kills=2),
    End(105.0, "because"),
)


def lines_of(*entries: Entry) -> bytes:
    return b"".join(encode(entry, number) for number, entry in enumerate(entries))


VALID = lines_of(HEADER, *ENTRIES)


def write(folder: Path, content: bytes, name: str = "a.jsonl") -> Segments:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return Segments(folder / name)


def recording(*entries: Entry, header: Header | None = HEADER, skipped: int = 0) -> Recording:
    return Recording(Segments(Path("a.jsonl")), header, entries, skipped)


# -- lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [HEADER, *ENTRIES], ids=lambda entry: entry.kind)
def test_an_entry_comes_back_as_it_was_written(entry: Entry) -> None:
    assert decode(encode(entry, 7)) == (7, entry)


def test_a_line_says_what_it_is_and_leaves_out_what_is_unknown() -> None:
    data = json.loads(encode(CellStart(1.0, None, ""), 3))
    assert data == {"kind": "cell", "n": 3, "time": 1.0, "source": "", "lines": 0, "devices": []}


def test_a_source_is_bounded_in_lines_and_letters() -> None:
    kept = first_lines("\n\n" + "\n".join("x" * 10_000 for _ in range(10_000)))
    assert max(map(len, kept.split("\n"))) <= 160
    assert kept.count("\n") < 12


@given(st.integers(0, len(VALID)))
def test_a_file_that_is_cut_anywhere_gives_all_its_whole_lines(length: int) -> None:
    whole = [entry for line in VALID[:length].split(b"\n")[:-1] if (entry := decode(line))]
    found = reader._recording(Segments(Path("a")), [VALID[:length]])
    assert len(whole) == VALID[:length].count(b"\n")
    assert [found.header, *found.entries][: len(whole)] == [entry for _, entry in whole]
    assert found.skipped == 0


@given(st.binary(max_size=400), st.integers(0, len(VALID)))
def test_garbage_in_a_file_hides_one_line_at_most_and_is_never_an_error(garbage: bytes, place: int) -> None:
    found = reader._recording(Segments(Path("a")), [VALID[:place] + garbage + VALID[place:]])
    assert len(found.entries) + (found.header is not None) >= len(ENTRIES)
    assert text.render([postmortem.postmortem_report(found, judge(found, Scene("dead", True, 2)))])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({field.name for kind in (Header, CellStart, Sample, CellEnd, End) for field in dataclasses.fields(kind)})


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from([HEADER, *ENTRIES]), st.sampled_from([*NAMES, "kind", "n"]), JSON), max_size=6)
)
def test_lines_whose_fields_were_changed_to_anything_never_raise(changes: list[tuple[Entry, str, Any]]) -> None:
    lines = [HEADER, *ENTRIES]
    content = lines_of(*lines)
    for entry, name, value in changes:
        data = json.loads(encode(entry, lines.index(entry)))
        content += json.dumps({**data, name: value}).encode() + b"\n"
    found = reader._recording(Segments(Path("a")), [content])
    for state in ("dead", "alive", "unknown"):
        ended = judge(found, Scene(state, True, 5))  # type: ignore[arg-type]  # the list above
        html.render([postmortem.postmortem_report(found, ended), postmortem.list_report([(found, ended)], "f")])


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b"1",
        b'{"kind":[],"n":1}',
        b'{"kind":"end","n":true,"time":1,"reason":""}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_entry_is_none(line: bytes) -> None:
    assert decode(line) is None


# -- files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(files.new(tmp_path / "r"), HEADER, 2**16)
    yield writer
    writer._close()


def test_a_recording_is_readable_by_its_owner_only(writer: Writer) -> None:
    found = writer.segments.current
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700


def test_a_folder_that_is_there_already_becomes_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    folder.chmod(0o755)
    files.new(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_is_written_can_be_read_at_once(writer: Writer) -> None:
    for position, entry in enumerate(ENTRIES, 1):
        writer.write(entry)
        assert reader.read(writer.segments).entries == ENTRIES[:position]


def test_two_recordings_of_one_process_have_files_of_their_own(tmp_path: Path) -> None:
    assert len({files.new(tmp_path).name for _ in range(50)}) == 50


def test_a_recording_stays_within_its_bound_and_keeps_the_header_and_the_running_cell(writer: Writer) -> None:
    writer.write(ENTRIES[0])
    for number in range(5000):
        writer.write(dataclasses.replace(ENTRIES[1], time=102.0 + number))  # type: ignore[type-var]  # a dataclass
    assert 2**15 < writer.segments.size_bytes <= 2**16
    found = reader.read(writer.segments)
    assert (found.header, found.last_cell, found.skipped) == (HEADER, ENTRIES[0], 0)
    times = [entry.time for entry in found.entries if isinstance(entry, Sample)]
    assert times == [102.0 + number for number in range(5000 - len(times), 5000)]
    assert reader.read_tail(writer.segments).running == found.entries[-1]
    assert stat.S_IMODE(writer.segments.older.stat().st_mode) == 0o600


def test_a_cell_that_is_over_is_not_repeated_in_the_next_segment(writer: Writer) -> None:
    for entry in ENTRIES[:3]:
        writer.write(entry)
    writer._rotate()
    assert decode(writer.segments.current.read_bytes().rstrip()) == (0, HEADER)


def test_a_rotation_between_the_two_reads_hides_and_doubles_nothing(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write(ENTRIES[0])
    plain = reader._content

    def rotating(path: Path, **how: Any) -> bytes:
        found = plain(path, **how)
        if path == writer.segments.current and not path.with_name(path.name + ".1").exists():
            writer._rotate()
            writer.write(ENTRIES[1])
        return found

    monkeypatch.setattr(reader, "_content", rotating)
    assert reader.read(writer.segments).entries == ENTRIES[:2]


def test_a_file_is_read_while_another_process_writes_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.test_recorder import *\n"
        "w = Writer(Segments(Path(sys.argv[1])), HEADER, 2**16)\n"
        "for n in range(10000):\n    w.write(Sample(float(n), 1))\n    n % 100 or time.sleep(0.005)\n"
        "w.close(End(1.0, 'done'))"
    )
    path = tmp_path / "w.jsonl"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    seen: list[float] = []
    while process.poll() is None:
        found = reader.read(Segments(path))
        times = [entry.time for entry in found.entries if isinstance(entry, Sample)]
        assert found.skipped == 0
        assert times == [times[0] + step for step in range(len(times))]
        seen += times[-1:]
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert reader.read(Segments(path)).end == End(1.0, "done")


def test_a_forked_child_writes_nothing(writer: Writer) -> None:
    writer.write(ENTRIES[0])
    before = writer.segments.current.read_bytes()
    child = os.fork()
    if child == 0:
        writer.write(ENTRIES[1])
        writer.give_up(End(1.0, "child"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert writer.segments.current.read_bytes() == before


def test_old_recordings_go_and_live_ones_stay(tmp_path: Path) -> None:
    folder, month_ago = tmp_path / "r", time.time() - 40 * 86400
    gone = lines_of(dataclasses.replace(HEADER, process_started=1.0))
    live = Writer(Segments(write(folder, b"").current.with_name("0live.jsonl")), HEADER, 2**16)
    for number in range(30):
        write(folder, gone, f"1{number:02}.jsonl")
        write(folder, gone, f"1{number:02}.jsonl.1")
    for path in ("125.jsonl", "125.jsonl.1", "0live.jsonl"):
        os.utime(folder / path, (month_ago, month_ago))
    own = write(folder, VALID, "2own.jsonl")
    archive.prune(folder, own, HERE)
    live._close()
    names = {segments.name for segments in files.listed(folder)}
    assert {"0live.jsonl", "2own.jsonl", "129.jsonl"} <= names
    assert "125.jsonl" not in names
    assert not (folder / "125.jsonl.1").exists()
    assert len(names) == 1 + 1 + 18  # 19 others may stay; the old one of these went


def test_a_lock_tells_that_somebody_writes(writer: Writer) -> None:
    assert files.is_locked(writer.segments.current) is True
    writer._close()
    assert files.is_locked(writer.segments.current) is False
    assert files.is_locked(writer.segments.older) is None


def test_a_process_is_known_by_its_id_and_its_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    header = dataclasses.replace(HEADER, pid=process.pid, process_started=machine.process_started(process.pid))
    path = Path("none.jsonl")
    assert files.state(header, path, HERE) == "alive"
    assert files.state(dataclasses.replace(header, process_started=1.0), path, HERE) == "dead"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert files.state(header, path, HERE) == "dead"  # a zombie
    process.communicate()
    assert files.state(header, path, HERE) == "dead"


def test_in_another_container_the_lock_tells_whether_a_kernel_lives(writer: Writer) -> None:
    elsewhere = dataclasses.replace(HEADER, namespace="pid:[1]", process_started=1.0)
    assert files.state(elsewhere, writer.segments.current, HERE) == "alive"
    writer._close()
    assert files.state(elsewhere, writer.segments.current, HERE) == "dead"
    assert files.state(elsewhere, writer.segments.older, HERE) == "unknown"


def write_often(writer: Writer) -> None:
    for _ in range(5000):
        writer.write(ENTRIES[1])


def test_a_rotation_that_fails_leaves_no_recording_that_looks_like_a_death(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write(ENTRIES[0])
    real = os.open

    def full(path: Any, flags: int, mode: int = 0o777) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space left"):
        writer._rotate()
    writer.give_up(End(1.0, "full"))
    monkeypatch.setattr(os, "open", real)
    assert files.listed(writer.segments.current.parent) == []


def test_a_rotation_that_was_interrupted_is_mended_by_the_next_entry(writer: Writer) -> None:
    writer.write(ENTRIES[0])
    writer._close()
    writer.segments.current.replace(writer.segments.older)
    writer.write(ENTRIES[1])
    assert reader.read(writer.segments).entries == ENTRIES[:2]


def test_a_full_disk_leaves_a_recording_that_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk to be had here: {mounted.stderr.decode().strip()}")
    try:
        writer = Writer(files.new(disk / "r"), HEADER, 2**20)
        writer.write(ENTRIES[0])
        with pytest.raises(OSError, match="No space left"):
            write_often(writer)
        writer.give_up(End(1.0, "full"))
        found = reader.read(writer.segments)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert (found.header, found.end) == (HEADER, End(1.0, "full"))
    assert found.skipped <= 1  # the line in which it was cut


def test_where_nothing_at_all_can_be_written_no_recording_stays(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    writer.give_up(End(1.0, "full"))
    assert not writer.segments.current.exists()


def test_a_pipe_or_a_folder_in_place_of_a_file_is_an_empty_recording(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for segments in (*files.listed(tmp_path), Segments(tmp_path / "none.jsonl")):
        assert reader.read(segments).header is None
        assert reader.read_tail(segments).header is None
    assert len(files.listed(tmp_path)) == 2


def test_the_tail_of_a_long_recording_is_read_without_the_rest(tmp_path: Path) -> None:
    samples = [Sample(float(number), 1) for number in range(20_000)]
    tail = reader.read_tail(write(tmp_path, lines_of(HEADER, ENTRIES[0], *samples)))
    assert (tail.header, tail.running, tail.skipped) == (HEADER, samples[-1], 0)
    assert len(tail.entries) < 2000


def test_the_death_before_is_the_last_one_and_only_of_the_same_notebook(tmp_path: Path) -> None:
    dead = dataclasses.replace(HEADER, process_started=1.0, notebook="a.ipynb")
    write(tmp_path, lines_of(dead, ENTRIES[0]), "1.jsonl")
    for notebook, found in (("a.ipynb", True), ("b.ipynb", False), (None, True)):
        assert bool(archive.latest_death(tmp_path, notebook=notebook, here=HERE)) is found
    write(tmp_path, lines_of(HEADER, ENTRIES[0]), "2.jsonl")  # it lives: of another notebook at the same time
    assert archive.latest_death(tmp_path, notebook="a.ipynb", here=HERE)
    write(tmp_path, lines_of(dead, *ENTRIES), "3.jsonl")  # ended on purpose, later
    assert archive.latest_death(tmp_path, notebook="a.ipynb", here=HERE) is None
    write(tmp_path, lines_of(dead, *ENTRIES[:3]), "4.jsonl")  # died while no cell ran: often its server's end
    assert archive.latest_death(tmp_path, notebook="a.ipynb", here=HERE) is None


# -- recordings that cannot be read -----------------------------------------------------------------------------


def damaged(*entries: Entry) -> bytes:
    """The lines of a recording whose first one is damaged."""
    return b"\xff" + lines_of(HEADER, *entries)[1:]


def test_a_header_that_is_damaged_is_read_from_the_older_segment(tmp_path: Path) -> None:
    segments = write(tmp_path, damaged(*ENTRIES[:2]))
    write(tmp_path, lines_of(HEADER, *ENTRIES[:1]), "a.jsonl.1")
    assert reader.read_tail(segments).header == HEADER
    assert reader.read(segments).header == HEADER


def test_a_damaged_recording_whose_kernel_writes_is_alive_and_is_not_deleted(writer: Writer) -> None:
    with writer.segments.current.open("r+b") as file:
        file.write(b"\xff")
    tail = reader.read_tail(writer.segments)
    assert tail.header is None
    assert archive.state_of(tail, HERE) == "alive"
    writer._close()
    assert archive.state_of(tail, HERE) == "dead"


def test_the_death_before_is_not_told_of_an_older_kernel_if_the_last_recording_is_damaged(tmp_path: Path) -> None:
    dead = dataclasses.replace(HEADER, process_started=1.0)
    write(tmp_path, lines_of(dead, ENTRIES[0]), "1.jsonl")
    write(tmp_path, b"a file of the user's\n", "2.jsonl")
    assert archive.latest_death(tmp_path, notebook=None, here=HERE)
    write(tmp_path, damaged(ENTRIES[0]), "3.jsonl")
    assert archive.latest_death(tmp_path, notebook=None, here=HERE) is None


def test_what_cannot_be_known_is_counted_where_no_death_is_said() -> None:
    def told(**counts: int) -> str:
        return postmortem.nothing_report(archive.Counts(**{"found": 3, **counts}), on=True).headline

    assert told(alive=1) == "no kernel died while it was recorded (3 recordings, 1 of kernels that run)"
    assert told(alive=1, unreadable=1) == (
        "no kernel is known to have died while it was recorded (3 recordings, 1 of kernels that run, 1 that cannot be "
        "read: %gpumem postmortem --all lists it)"
    )
    assert told(unreadable=2).endswith("2 that cannot be read: %gpumem postmortem --all lists them)")
    assert "1 of kernels elsewhere, which may run" in told(unknown=1)


@pytest.mark.parametrize("content", [b"", b"nothing\n", damaged(*ENTRIES[:2])])
def test_a_recording_that_cannot_be_read_claims_nothing(tmp_path: Path, content: bytes) -> None:
    tail = reader.read_tail(write(tmp_path, content))
    found = judge(tail, verdict.scene(tail))
    row = postmortem.list_report([(tail, found)], "f").tables[0].rows[0]
    assert (found.grade, found.cause) == ("unknown", "unreadable")
    assert "died" not in row[-1]


# -- what the system says -----------------------------------------------------------------------------------


def with_kills(system: FakeSystem, name: str, text: str) -> Path:
    """Return a made-up system whose counters of kills are in this file, and in that of the whole machine."""
    system.write("proc/vmstat", "nr_free_pages 5\noom_kill 41\n")
    system.write(f"sys/fs/cgroup/{name}", text)
    return system.root


def test_oom_kills_are_those_of_the_own_group_in_both_versions(tmp_path: Path) -> None:
    second = with_kills(
        v2_system(tmp_path / "2", "/a/b"), "a/b/memory.events", "low 0\noom 9\noom_kill 3\noom_group_kill 8\n"
    )
    first = with_kills(v1_system(tmp_path / "1", "/a"), "memory/a/memory.oom_control", "under_oom 0\noom_kill 2\n")
    for root, kills in ((second, 3), (first, 2)):
        counter = pressure.KillCounter(root)
        assert counter.read() == kills
        assert counter.name is not None
        assert pressure.kills_counted(counter.name) == kills
        counter.close()


def test_without_a_counter_of_the_group_the_machine_s_is_read(tmp_path: Path) -> None:
    counter = pressure.KillCounter(with_kills(FakeSystem(tmp_path, "0::/", ""), "other", ""))
    assert counter.read() == 41
    counter.close()
    nothing = pressure.KillCounter(tmp_path / "nothing")
    assert (nothing.name, nothing.read()) == (None, None)


def test_the_counter_of_a_new_group_of_the_same_path_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "memory.events"
    path.write_text("oom_kill 1\n")
    assert pressure.kills_counted(f"{path}:{tmp_path.stat().st_ino}") == 1
    assert pressure.kills_counted(f"{path}:{tmp_path.stat().st_ino + 1}") is None
    assert pressure.kills_counted("/etc/passwd:1") is None
    assert pressure.kills_counted("") is None


LOG = {
    "Memory cgroup out of memory: Killed process 15 (python3) total-vm:1kB, anon-rss:2kB": (15, True),
    "Out of memory: Killed process 16 (ipython) total-vm:1kB": (16, True),
    "oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=17,uid=0": None,
    "python3[18]: segfault at 0 ip 00007f error 4 in libc.so.6": (18, False),
    "traps: python3[19] general protection fault ip:7f sp:7f error:0": (19, False),
    "traps: python3[20] trap invalid opcode ip:7f": (20, False),
    "EXT4-fs (vda): mounted filesystem": None,
}


@pytest.mark.parametrize("line", LOG)
def test_the_kernel_s_log_tells_whom_it_ended(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_records", lambda path: [f"3,100,5000000,-;{line}\n SUBSYSTEM=x\n", "garbage"])
    found = [(death.pid, death.oom) for death in kernel_log.deaths()]
    assert found == ([] if LOG[line] is None else [LOG[line]])


# -- the verdict ----------------------------------------------------------------------------------------------

SHORT = Sample(
    102.0, 1, available_bytes=GIB // 4, group_available_bytes=4 * GIB, group_limit_bytes=8 * GIB, oom_kills=2
)
FULL = Sample(102.0, 1, available_bytes=9 * GIB, group_available_bytes=GIB // 8, group_limit_bytes=8 * GIB, oom_kills=2)
PLENTY = Sample(
    102.0, 1, available_bytes=9 * GIB, group_available_bytes=4 * GIB, group_limit_bytes=8 * GIB, oom_kills=2
)
BOUND = dataclasses.replace(PLENTY, address_space_bytes=4 * GIB - 5)
LATER = dataclasses.replace(PLENTY, address_space_bytes=GIB - 5, address_space_limit_bytes=GIB)
DATA = dataclasses.replace(PLENTY, data_bytes=GIB - 5, data_limit_bytes=GIB)
GONE = Scene("dead", True, 2)
OOM = Death(103.0, 15, True, "Out of memory: Killed process 15 (python)")
GROUP_OOM = Death(103.0, 15, True, "Memory cgroup out of memory: Killed process 15 (python)")
FAULT = Death(103.0, 15, False, "python[15]: segfault at 0")

CASES = {
    "ended": (End(1.0, "why"), Scene("dead", True, 3), "certain", "ended", "why"),
    "alive": (PLENTY, Scene("alive", True, 3), "certain", "alive", "still runs"),
    "named by the log, in its group": (
        PLENTY,
        Scene("dead", True, 3, (GROUP_OOM,)),
        "certain",
        "memory",
        "its control group's limit was reached",
    ),
    "named by the log": (
        PLENTY,
        Scene("dead", True, 3, (OOM,)),
        "certain",
        "memory",
        "the machine's memory was used up",
    ),
    "a fault in the log": (PLENTY, Scene("dead", True, 2, (FAULT,)), "certain", "fault", "crashed"),
    "the group's counter grew": (PLENTY, Scene("dead", True, 3), "likely", "memory", "may use 8.00 GiB"),
    "it did not grow": (PLENTY, Scene("dead", True, 2), "unknown", "other", "not the OOM killer"),
    "it did not grow, but RAM was short": (SHORT, Scene("dead", True, 2), "likely", "memory", "earlyoom"),
    "address space was short": (BOUND, Scene("dead", True, 2), "likely", "memory", "had nearly run out"),
    "no counter, the group was full": (FULL, Scene("dead", True, None), "likely", "memory", "had nearly run out"),
    "no counter, plenty": (PLENTY, Scene("dead", True, None), "unknown", "other", "was not short"),
    "another boot, plenty": (PLENTY, Scene("dead", False, None), "unknown", "other", "was not short"),
    "no counter, nothing seen": (ENTRIES[3], Scene("dead", True, None), "unknown", "other", "was not seen"),
    "its own limit came later": (LATER, Scene("dead", True, 2), "likely", "memory", "had nearly run out"),
    "its data were short": (DATA, Scene("dead", True, 2), "likely", "memory", "had nearly run out"),
    "only the recording ended": (End(1.0, "recording was switched off"), GONE, "certain", "unrecorded", "switched off"),
    "elsewhere": (PLENTY, Scene("unknown", False, None), "unknown", "other", "may still run"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_claims_what_the_evidence_bears(case: str) -> None:
    last, seen, grade, cause, words = CASES[case]
    found = judge(recording(ENTRIES[0], last), seen)
    assert (found.grade, found.cause) == (grade, cause)
    assert words in found.text


def test_a_machine_that_may_be_another_is_not_said_to_have_been_restarted() -> None:
    found = judge(recording(ENTRIES[0], PLENTY), Scene("unknown", False, None))
    assert found.evidence[0] == "this is another machine, or it has been restarted since"


def test_the_machine_s_counter_alone_is_no_proof() -> None:
    header = dataclasses.replace(HEADER, counter="/proc/vmstat:1", group_limit_bytes=None)
    grew = Scene("dead", True, 3)
    assert judge(recording(ENTRIES[0], PLENTY, header=header), grew).grade == "unknown"
    assert judge(recording(ENTRIES[0], SHORT, header=header), grew).grade == "likely"


def test_a_full_group_is_no_evidence_once_its_cell_is_over() -> None:
    found = judge(recording(ENTRIES[0], FULL, ENTRIES[2]), Scene("dead", True, 2))
    assert found.cause == "other"


def test_no_death_is_said_to_be_for_other_reasons_than_memory() -> None:
    # An abort by std::bad_alloc, too, leaves no word: one request that is too large is in no sample.
    for last in (PLENTY, ENTRIES[3]):
        for kills in (2, None):
            found = judge(recording(ENTRIES[0], last), Scene("dead", True, kills))
            assert "want of memory" not in found.text
            assert any("RLIMIT_AS" in line and "4.00 GiB" in line for line in found.evidence)
    without = dataclasses.replace(HEADER, limits=None)
    found = judge(recording(ENTRIES[0], PLENTY, header=without), Scene("dead", True, 2))
    assert not any("RLIMIT_AS" in line for line in found.evidence)


def test_an_end_that_may_be_among_damaged_lines_is_said_to_be_there() -> None:
    found = recording(ENTRIES[0], PLENTY, skipped=2)
    report = text.render([postmortem.postmortem_report(found, judge(found, GONE))])
    assert "2 lines of the recording could not be read: its end may be among them" in report


def test_a_recording_that_was_switched_off_is_no_kernel_that_ended() -> None:
    found = recording(ENTRIES[0], End(105.0, "recording stepped aside: OSError"))
    headline = postmortem.postmortem_report(found, judge(found, GONE)).headline
    assert "ended on purpose" not in headline
    assert f"the recording of kernel process {HEADER.pid} ended" in headline
    for reason in ("the kernel's process ended by itself", "it was asked to end: a restart, a shutdown, or exit"):
        found = recording(ENTRIES[0], End(105.0, reason))
        assert "ended on purpose" in postmortem.postmortem_report(found, judge(found, GONE)).headline


def test_the_end_of_what_started_the_kernel_is_said() -> None:
    found = judge(recording(ENTRIES[0], PLENTY), Scene("dead", True, 2, parent_gone=True))
    assert any("had started the kernel is gone" in line for line in found.evidence)


def test_only_the_log_s_later_lines_on_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = [
        Death(50.0, HEADER.pid, True, "before"),
        Death(103.0, 1, True, "other"),
        Death(103.0, HEADER.pid, True, "it"),
    ]
    monkeypatch.setattr(kernel_log, "deaths", lambda: deaths)
    root = dataclasses.replace(HERE, namespace=machine._ROOT_NAMESPACE)
    header = dataclasses.replace(HEADER, namespace=root.namespace)
    assert [death.text for death in verdict.scene(recording(PLENTY, header=header), root).deaths] == ["it"]
    inside = dataclasses.replace(HERE, namespace="pid:[1]")  # here the log counts processes otherwise
    assert (
        verdict.scene(recording(PLENTY, header=dataclasses.replace(HEADER, namespace="pid:[1]")), inside).deaths == ()
    )


# -- the report -----------------------------------------------------------------------------------------------


def test_the_report_escapes_what_the_user_wrote() -> None:
    hostile = CellStart(101.0, 1, "<script>\x1b[2J\n\t<b>", 2, experiment="<i>\x07")
    header = dataclasses.replace(HEADER, notebook="<u>\x1b.ipynb")
    found = recording(
        hostile, CellEnd(102.0, 1, 1.0, False, "<e>"), dataclasses.replace(hostile, cell=2), header=header
    )
    report = postmortem.postmortem_report(found, judge(found, Scene("dead", True, 3)))
    page, plain = html.render([report]), text.render([report])
    assert "\x1b" not in page + plain
    assert not [tag for tag in ("<script>", "<b>", "<i>", "<u>", "<e>") if tag in page]
    assert "\n        <b>" in plain  # indented by its tab


def test_the_curve_shows_the_way_up_in_bounded_width() -> None:
    samples = [Sample(102.0 + n, 1, devices=(Figures("cpu", n * GIB), Figures("cuda:0", GIB))) for n in range(1000)]
    found = recording(CellStart(101.0, 1, "x", 1, devices=(Figures("cpu", 0),)), *samples)
    report = postmortem.postmortem_report(found, judge(found, Scene("dead", True, 2)))
    (table,) = report.tables
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["RAM", "cuda:0"]
    assert (len(rows["RAM"][1]), rows["RAM"][1][0], rows["RAM"][1][-1]) == (24, "▁", "█")
    assert list(rows["RAM"][1]) == sorted(rows["RAM"][1], key="▁▂▃▄▅▆▇█".index)
    assert rows["RAM"][2:6] == ("0 B", "0 B", "999.00 GiB", "999.00 GiB")
    assert set(rows["cuda:0"][1]) == {"▁"}


DIED = Verdict("unknown", "other", "x")


def test_the_border_has_the_colour_of_trouble_where_the_kernel_died() -> None:
    found = recording(CellStart(101.0, 1, "x", 1), Sample(102.0, 1, devices=(Figures("cpu", 1),)))
    borders = [
        re.findall("border-left-color: ([^;]+)", html.render([postmortem.postmortem_report(found, verdict)]))
        for verdict in (DIED, Verdict("certain", "ended", "x"), Verdict("certain", "alive", ""))
    ]
    assert "warn" in borders[0][0]
    assert ["warn" in border for (border,) in borders[1:]] == [False, False]
    headline = postmortem.postmortem_report(found, DIED).segments
    assert headline[0].text.endswith("died in cell 1")
    assert len(headline) == 3
