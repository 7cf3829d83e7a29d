"""Host memory on this machine, and the limits that control groups and the process itself
(``ulimit``) put on it.
"""

import contextlib
import ctypes
import mmap
import os
import re
import resource
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from benchmarks.harness.control_group import limited_group
from benchmarks.harness.kernel import Kernel
from ipygpumem.fitting import fit
from ipygpumem.inventory.devices.host_parts import host_parts
from ipygpumem.inventory.remaining import leftover
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import cgroup, host, malloc, oom_kills, own_limits
from ipygpumem.probes.cgroup import ControlGroup
from ipygpumem.probes.host import HostFigures, HostProbe
from ipygpumem.probes.pages import anonymous_bytes
from ipygpumem.records import Usage
from ipygpumem.units import GIB, MIB, parse_bytes
from tests.alone import alone
from tests.control_group import (
    NO_LIMIT_V1,
    V1_MOUNT,
    V2_MOUNT,
    FakeSystem,
    v1_system,
    v2_system,
)
from tests.process_memory import allow, touched
from tests.steps import host_table, run_cells

needs_mark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no /proc/self/clear_refs"
)


@needs_mark
def test_a_peak_inside_one_call_that_holds_the_gil_is_exact() -> None:
    meter = Meter([HostProbe()])
    span = meter.span()
    len(b"x" * (256 * MIB))
    (usage,) = span.stop()
    meter.close()
    assert usage.method == "kernel"
    assert usage.peak_delta_bytes == pytest.approx(256 * MIB, rel=0.02)
    # Of 256 MiB, nothing is kept; a process at rest takes some MiB at most.
    assert usage.delta_bytes < 8 * MIB


@needs_mark
@alone
def test_two_meters_measure_their_own_peaks_with_one_kernel_mark() -> None:
    """One opens, and resets the mark, inside a span of the other."""
    first = Meter([HostProbe()])

    # A meter that opens inside a span.
    around = first.span()
    len(b"x" * (64 * MIB))
    second = Meter([HostProbe()])  # resets the mark
    (usage,) = around.stop()
    assert usage.peak_delta_bytes == pytest.approx(64 * MIB, rel=0.02)

    # A span that opens inside one of another meter.
    around = first.span()
    len(b"x" * (128 * MIB))
    inside = second.span()  # resets the mark
    len(b"x" * (32 * MIB))
    (usage,) = inside.stop()
    assert usage.peak_delta_bytes == pytest.approx(32 * MIB, rel=0.02)
    (usage,) = around.stop()
    assert usage.peak_delta_bytes == pytest.approx(128 * MIB, rel=0.02)

    # None of it is in a later span.
    after = first.span()
    (usage,) = after.stop()
    assert usage.peak_delta_bytes < 8 * MIB
    first.close()
    second.close()


@pytest.mark.parametrize("exact", [pytest.param(True, marks=needs_mark), False])
@alone
def test_sampling_leaves_the_kernels_mark_alone(exact: bool) -> None:
    def highest() -> int:
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10

    touched(highest() + 320 * MIB).close()  # above the parent's, which an exec keeps
    before = highest()
    probe = HostProbe(exact=exact)
    probe.rearm()
    assert (before - highest() > 200 * MIB, probe.sampled) == (exact, not exact)


@pytest.mark.parametrize("missing", ["/proc/self/clear_refs", "/proc/self/status"])
def test_missing_system_features_are_replaced_and_reported(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    original = host.open_file

    def open_unless_missing(path: str, flags: int) -> Any:
        return None if path.startswith(missing) else original(path, flags)

    monkeypatch.setattr(host, "open_file", open_unless_missing)
    probe = HostProbe()
    (reading,) = probe.read()
    probe.close()
    assert reading.current_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    if missing == "/proc/self/clear_refs":
        assert (probe.sampled, reading.method) == (True, "sampled")
        assert "sampled" in reading.note


@needs_mark
def test_a_sandbox_that_ignores_the_reset_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostProbe, "_rss_and_peak", lambda self: (100 * MIB, 400 * MIB))
    probe = HostProbe()
    probe.close()
    assert probe.sampled
    assert "cannot be reset" in probe.note
    peaks = iter([400 * MIB])  # another thread's, which is over
    monkeypatch.setattr(
        HostProbe, "_rss_and_peak", lambda self: (100 * MIB, next(peaks, 100 * MIB))
    )
    probe = HostProbe()
    assert (probe.sampled, probe.note) == (False, "")
    probe.close()


@needs_mark
@alone
def test_a_forked_child_reads_its_own_memory_and_its_exact_peak() -> None:
    """It has used memory before it asks, and its parent has opened a span."""
    meter = Meter([HostProbe()])
    around = meter.span()
    meter.now()  # finds the mark at the RSS: nothing to reset
    if (child := os.fork()) == 0:
        code = 1
        try:
            # The peak of a span that its parent has opened.
            touched(96 * MIB).close()
            (usage,) = around.read()
            assert (usage.method, usage.note) == ("kernel", "")
            assert usage.peak_bytes - usage.after_bytes == pytest.approx(96 * MIB, rel=0.05)

            # A span of its own.
            span = meter.span()
            memory = touched(64 * MIB)
            assert span.read()[0].delta_bytes == pytest.approx(64 * MIB, rel=0.05)
            memory.close()
            (usage,) = span.stop()
            assert usage.peak_delta_bytes == pytest.approx(64 * MIB, rel=0.05)
            code = 0
        finally:
            traceback.print_exc()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    meter.close()


needs_pages = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="no /proc/self/pagemap"
)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@needs_pages
def test_only_pages_that_were_written_are_in_ram() -> None:
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(memory)
    assert anonymous_bytes([(address, 64 * MIB)]) == [0]
    memory[: 16 * MIB] = bytes(16 * MIB)
    # The kernel may round up to a huge page.
    (size,) = anonymous_bytes([(address, 64 * MIB)])
    assert 16 * MIB <= size <= 18 * MIB
    assert anonymous_bytes([(address + 4 * MIB, 8 * MIB), (address + 32 * MIB, 8 * MIB)]) == [
        8 * MIB,
        0,
    ]


@needs_pages
def test_shared_and_file_pages_are_not_this_processs_own(tmp_path: Path) -> None:
    shared = mmap.mmap(-1, 8 * MIB)
    shared[:] = bytes(8 * MIB)
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * MIB))
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    assert len(mapped[:]) == 8 * MIB
    assert anonymous_bytes([(address_of(shared), 8 * MIB), (address_of(mapped), 8 * MIB)]) == [0, 0]
    # written to, a private mapping's page is a copy of this process's own
    mapped[: 2 * MIB] = b"x" * (2 * MIB)
    assert anonymous_bytes([(address_of(mapped), 8 * MIB)]) == [2 * MIB]


def test_a_container_with_a_namespace_has_its_limit_at_the_root(tmp_path: Path) -> None:
    v2_system(tmp_path, "/").v2("", 1000, 400)
    assert cgroup.limits(tmp_path) == [ControlGroup(1000, 400)]
    # Of 1000, 400 are in use.
    assert host.available_bytes(tmp_path) == 600


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    system = v2_system(tmp_path, "/user.slice/user-1000.slice/app")
    system.v2("user.slice/user-1000.slice/app", "max", 100)
    system.v2("user.slice/user-1000.slice", 800, 500)
    system.v2("user.slice", 900, 850)
    assert cgroup.limits(tmp_path) == [ControlGroup(800, 500), ControlGroup(900, 850)]
    assert cgroup.tightest(tmp_path) == ControlGroup(800, 500)
    # What can still be had is another question: the wider group is nearly full.
    assert host.available_bytes(tmp_path) == 50


def test_version_1_is_understood_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    system = v1_system(tmp_path, "/docker/abc/inner")
    system.v1("docker/abc/inner", NO_LIMIT_V1, 100)
    system.v1("docker/abc", 2000, 700)
    system.v1("docker", NO_LIMIT_V1, 9000)
    system.v1("", NO_LIMIT_V1, 90000)
    assert cgroup.limits(tmp_path) == [ControlGroup(2000, 700)]
    # Of 2000, 700 are in use.
    assert host.available_bytes(tmp_path) == 1300


def test_a_container_without_a_namespace_resolves_the_hosts_path(tmp_path: Path) -> None:
    system = v1_system(tmp_path, "/docker/abc/inner", top="/docker/abc")
    system.v1("inner", 500, 80)
    system.v1("", 2000, 700)
    assert cgroup.limits(tmp_path) == [ControlGroup(500, 80), ControlGroup(2000, 700)]


def test_a_path_outside_the_mounted_group_means_that_group(tmp_path: Path) -> None:
    v1_system(tmp_path, "/elsewhere", top="/docker/abc").v1("", 2000, 700)
    assert cgroup.tightest(tmp_path) == ControlGroup(2000, 700)
    v2_system(tmp_path / "b", "/../sibling").v2("", 30, 7)
    assert cgroup.tightest(tmp_path / "b") == ControlGroup(30, 7)


def test_with_both_cgroup_versions_the_memory_controllers_counts(tmp_path: Path) -> None:
    mounts = V1_MOUNT.format(top="/") + V2_MOUNT.format(top="/", at="/sys/fs/cgroup/unified")
    system = FakeSystem(tmp_path, "4:memory:/job\n0::/job\n", mounts)
    system.v1("job", 4000, 1000)
    system.write("sys/fs/cgroup/unified/job/cgroup.procs", "1\n")
    assert cgroup.limits(tmp_path) == [ControlGroup(4000, 1000)]


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_of_the_group_can_be_taken_back(tmp_path: Path, version: int) -> None:
    if version == 2:
        stat = textwrap.dedent(
            """\
            anon 300
            file 500
            shmem 90
            inactive_file 250
            active_file 150
            file_mapped 60
            slab_reclaimable 20
            """
        )
        v2_system(tmp_path, "/").v2("", 1000, 900, stat)
        expected = ControlGroup(1000, 900, 420, 60)
    else:
        stat = textwrap.dedent(
            """\
            inactive_file 1
            total_inactive_file 250
            total_active_file 150
            total_mapped_file 60
            """
        )
        v1_system(tmp_path, "/").v1("", 1000, 900, stat)
        expected = ControlGroup(1000, 900, 400, 60)
    assert cgroup.tightest(tmp_path) == expected
    # Of 1000, 900 are in use.
    assert expected.available_bytes == 100 + expected.cache_bytes


def test_more_cache_than_is_in_use_is_no_room_beyond_the_limit(tmp_path: Path) -> None:
    """The kernel's two figures are counted at different moments."""
    v2_system(tmp_path, "/").v2("", 1000, 300, "inactive_file 250\nactive_file 150\n")
    # All of the limit, though 700 are free and 400 in caches.
    assert host.available_bytes(tmp_path) == 1000


@pytest.mark.parametrize("limit", ["max", "", "nonsense"])
def test_no_limit_or_one_that_cannot_be_read_is_none(tmp_path: Path, limit: str) -> None:
    v2_system(tmp_path, "/").v2("", limit, 5)
    assert cgroup.limits(tmp_path) == []
    assert host.total_bytes(tmp_path) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    "membership", ["", "garbage\n", "0\n", "::\n", "0::\n", "0::/\n", "4:memory:/\n"]
)
def test_files_that_make_no_sense_mean_no_limit(tmp_path: Path, membership: str) -> None:
    FakeSystem(tmp_path, membership, "garbage - cgroup2\n")
    assert cgroup.limits(tmp_path) == []


def test_a_lower_container_limit_is_the_hosts_total(tmp_path: Path) -> None:
    system = v2_system(tmp_path, "/")
    system.v2("", 64 * MIB, 5)
    assert host.total_bytes(tmp_path) == 64 * MIB
    system.v2("", 1 << 50, 5)
    assert host.total_bytes(tmp_path) == psutil.virtual_memory().total


@pytest.mark.parametrize("kind", ["v2", "v1", "machine"])
def test_kills_of_the_group_are_counted_from_look_to_look(tmp_path: Path, kind: str) -> None:
    system = (v1_system if kind == "v1" else v2_system)(tmp_path, "/job")
    system.write("proc/vmstat", "pgfault 3\noom_kill 2\n")
    place, before = {
        "v2": ("sys/fs/cgroup/job/memory.events", "low 0\noom 1\n"),
        "v1": ("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n"),
        "machine": ("proc/vmstat", "pgfault 3\n"),
    }[kind]
    system.write(place, f"{before}oom_kill 4\noom_group_kill 9\n")
    kills = oom_kills.Kills(tmp_path)
    assert (kills.since_last_call(), kills.of_machine) == (0, kind == "machine")
    system.write(place, f"{before}oom_kill 6\noom_group_kill 9\n")
    assert (kills.since_last_call(), kills.since_last_call()) == (2, 0)
    (tmp_path / place).unlink()
    assert kills.since_last_call() == 0


def test_without_a_counter_no_kill_is_told(tmp_path: Path) -> None:
    assert oom_kills.Kills(tmp_path).since_last_call() == 0


def test_a_changed_limit_is_in_the_next_detailed_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = host.HostProbe()
    monkeypatch.setattr(cgroup, "tightest", lambda root: ControlGroup(GIB, MIB))
    assert probe.read()[0].total_bytes != GIB
    assert probe.read(detail=True)[0].total_bytes == GIB
    assert probe.read()[0].total_bytes == GIB
    probe.close()


LIMIT = GIB


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of processes that may have 1 GiB; skips where none can be made."""
    with limited_group(LIMIT) as folder:
        yield folder


@contextlib.contextmanager
def kernel_in(group: Path, folder: Path) -> Iterator[Kernel]:
    """A kernel that is in ``group`` from its first page on; later it would take none of its pages
    along.
    """
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\necho $$ > {group / "cgroup.procs"}\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        kernel = Kernel()
    with contextlib.closing(kernel):
        run_cells(kernel, "%load_ext ipygpumem")
        yield kernel


def test_the_limit_is_the_total_and_the_parts_sum_to_it(group: Path, tmp_path: Path) -> None:
    with kernel_in(group, tmp_path) as kernel:
        title, before = host_table(kernel)
        run_cells(kernel, "block = bytearray(b'x') * (256 << 20)")
        _, held = host_table(kernel)
        (file,) = [
            name for name in ("memory.usage_in_bytes", "memory.current") if (group / name).exists()
        ]
        used = int((group / file).read_text())
    assert title == "RAM: 1.00 GiB, the container's limit (cgroup)"
    assert abs(sum(before.values()) - LIMIT) < MIB
    assert abs(sum(held.values()) - LIMIT) < MIB
    # The block of 256 MiB; a kernel at rest takes and gives back some MiB.
    assert abs(held["Python objects"] - before["Python objects"] - 256 * MIB) < 8 * MIB
    assert abs(before["free"] - held["free"] - 256 * MIB) < 16 * MIB
    assert abs(LIMIT - held["free"] - used) < 16 * MIB


NAMES = pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])


@NAMES
@alone
def test_free_memory_is_measured_against_the_limit(name: str) -> None:
    host.available_bytes()
    allow(name, 512 * MIB)
    free = host.available_bytes()
    block = bytearray(256 * MIB)
    held = host.available_bytes()
    # The limit, but for what has been taken since it was set.
    assert 500 * MIB < free <= 512 * MIB
    assert abs(free - held - len(block)) < 4 * MIB
    with pytest.raises(MemoryError):
        bytearray(held + MIB)


@alone
def test_an_address_space_limit_is_the_total_of_the_next_reading() -> None:
    probe = host.HostProbe()
    before = probe.read()[0].total_bytes
    bound = allow("RLIMIT_AS", GIB)
    assert probe.read()[0].total_bytes == bound < before


def test_headroom_is_a_share_of_the_processs_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    used = Usage("cpu", 100, 100, 500, 24_000, "kernel")
    monkeypatch.setattr(own_limits, "limits", lambda: [own_limits.Limit("RLIMIT_DATA", 1000, 100)])
    monkeypatch.setattr(fit, "available_bytes", lambda: 900)
    assert fit.crowded_device([used], 0.05) is None
    assert fit.crowded_device([used], 0.51) == "cpu"


def test_free_memory_above_the_limit_is_shown_as_out_of_reach() -> None:
    figures = HostFigures(10_000, 6000, 8000, 500, limit=own_limits.Limit("RLIMIT_AS", 2000, 800))
    reconciliation = host_parts(figures, None, lambda ranges: [])
    sizes = {part.name: part.size_bytes for part in reconciliation.parts if part.size_bytes}
    assert (reconciliation.total_bytes, sum(sizes.values())) == (10_000, 10_000)
    assert (sizes["free"], sizes["out of reach"]) == (1200, 4800)
    assert "RLIMIT_AS" in next(
        part.advice for part in reconciliation.parts if part.name == "out of reach"
    )
    tighter = HostFigures(10_000, 600, 8000, 500, limit=own_limits.Limit("RLIMIT_AS", 2000, 800))
    assert {
        part.name: part.size_bytes for part in host_parts(tighter, None, lambda ranges: []).parts
    }["free"] == 600


@pytest.fixture
def limited(kernel: Kernel) -> Kernel:
    """A kernel that may have 512 MiB of address space more than it has."""
    run_cells(
        kernel,
        """
        from tests.process_memory import allow
        bound = allow('RLIMIT_AS', 512 << 20)
        """,
    )
    return kernel


def test_all_reports_show_free_memory_within_the_limit(limited: Kernel) -> None:
    reply = limited.run("bytearray(2 << 30)")
    (recovered,) = reply.reports("recovery")
    said = re.search(r"free: RAM ([\d.]+ \wiB)", recovered)
    assert said is not None, recovered
    assert 400 * MIB < parse_bytes(said[1]) <= 512 * MIB
    (status,) = run_cells(limited, "%gpumem status").reports("status")
    row = re.search(r"^ +([\d.]+ \wiB)  +free ", status, re.MULTILINE)
    assert row is not None, status
    assert parse_bytes(row[1]) <= 512 * MIB
    assert re.search(r"^ +[\d.]+ \wiB  +out of reach  +RLIMIT_AS", status, re.MULTILINE), status


def test_an_autofit_without_a_fit_names_the_limit(limited: Kernel) -> None:
    reply = limited.run("""\
%%autofit n=2
import numpy
numpy.ones(2 << 28)
n
""")
    needs = re.search(r"needs at least ([\d.]+ \wiB) of RAM, and (.*)$", reply.stderr.strip())
    assert needs is not None, reply.stderr
    assert parse_bytes(needs[1]) > 2 * GIB
    assert re.fullmatch(r"RLIMIT_AS allows this process [\d.]+ \wiB of address space", needs[2])
    assert "which has" not in reply.stderr


def test_a_mock_in_place_of_a_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", MagicMock())
    assert type(malloc.allocated_bytes()) is int
    assert host.RamFigures.now().arrow_peak_bytes == 0


def ram(**figures: int) -> host.RamFigures:
    return host.RamFigures(
        **{
            "file_bytes": 0,
            "free_bytes": 0,
            "modules": 100,
            "arrow_peak_bytes": 50 * MIB,
            **figures,
        }
    )


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, "no known object and no free page accounts for them"),
        ({"arrow_peak_bytes": 80 * MIB}, "; up to 30 MiB may be free pages of pyarrow's pool"),
        ({"arrow_peak_bytes": 800 * MIB}, "; up to 95 MiB may be free pages of pyarrow's pool"),
        ({"modules": 220}, "; 120 modules were imported"),
    ],
)
def test_a_cause_is_named_only_if_its_figure_rose(now: dict[str, int], said: str) -> None:
    (line,) = leftover.notes_on_unnamed(ram(), ram(**now), 95 * MIB, {})
    assert line.endswith(said)
    assert "probably" not in line
    assert ("pyarrow" in line) == ("arrow_peak_bytes" in now)
    assert ("imported" in line) == ("modules" in now)


def test_free_blocks_of_python_are_named() -> None:
    (line,) = leftover.notes_on_unnamed(ram(), ram(free_blocks_bytes=85 * MIB), 95 * MIB, {})
    assert line == (
        "95 MiB of RAM are still in use: 85 MiB free blocks of Python between objects that are "
        "alive, 10 MiB not named: no known object and no free page accounts for them"
    )
    (line,) = leftover.notes_on_unnamed(ram(), ram(free_blocks_bytes=99 * MIB), 95 * MIB, {})
    assert line.endswith(
        "still in use: 95 MiB free blocks of Python between objects that are alive"
    )


def test_imports_are_mentioned_if_new_objects_cannot_be_told() -> None:
    (line,) = leftover.notes_on_unnamed(ram(), ram(modules=220), 95 * MIB, {}, lambda: False)
    assert "95 MiB not named: 120 modules were imported; after a full garbage collection" in line
    assert line.endswith("%gpumem leaks searches all of them")
