"""Host memory on this machine: real allocations, and each way in which the kernel may refuse."""

import ctypes
import mmap
import os
import resource
import traceback
from pathlib import Path

import psutil
import pytest

from ipygpumem.meter.meter import Meter
from ipygpumem.probes import host
from ipygpumem.probes.host import HostProbe, anonymous_bytes
from ipygpumem.units import MIB
from tests.alone import alone

needs_mark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc/self/clear_refs")


def touched(size: int) -> mmap.mmap:
    """Return ``size`` bytes of memory whose pages are really there."""
    memory = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


@needs_mark
def test_a_peak_inside_one_call_that_holds_the_gil_is_exact() -> None:
    meter = Meter([HostProbe()])
    span = meter.start()
    len(b"x" * (256 * MIB))
    (usage,) = meter.stop(span)
    meter.close()
    assert usage.method == "kernel"
    assert usage.peak_delta_bytes == pytest.approx(256 * MIB, rel=0.02)
    assert usage.delta_bytes < 8 * MIB


@needs_mark
@alone
def test_two_meters_see_each_their_own_peak_over_the_one_mark_of_the_process() -> None:
    """One opens, and resets the mark, inside a span of the other."""
    first = Meter([HostProbe()])
    around = first.start()
    len(b"x" * (64 * MIB))
    second = Meter([HostProbe()])  # resets the mark
    (usage,) = first.stop(around)
    assert usage.peak_delta_bytes == pytest.approx(64 * MIB, rel=0.02)
    around = first.start()
    len(b"x" * (128 * MIB))
    inside = second.start()  # resets the mark
    len(b"x" * (32 * MIB))
    (usage,) = second.stop(inside)
    assert usage.peak_delta_bytes == pytest.approx(32 * MIB, rel=0.02)
    (usage,) = first.stop(around)
    assert usage.peak_delta_bytes == pytest.approx(128 * MIB, rel=0.02)
    after = first.start()
    (usage,) = first.stop(after)
    assert usage.peak_delta_bytes < 8 * MIB
    first.close()
    second.close()


@pytest.mark.parametrize("exact", [pytest.param(True, marks=needs_mark), False])
@alone
def test_sampling_leaves_the_kernels_mark_alone(exact: bool) -> None:
    def highest() -> int:
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10

    touched(highest() + 768 * MIB).close()  # above the parent's, which an exec keeps
    before = highest()
    probe = HostProbe(exact=exact)
    probe.rearm()
    assert (before - highest() > 200 * MIB, probe.sampled) == (exact, not exact)


@pytest.mark.parametrize("missing", ["/proc/self/clear_refs", "/proc/self/status"])
def test_what_the_system_does_not_offer_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    original = host._open
    monkeypatch.setattr(host, "_open", lambda path, flags: None if path.startswith(missing) else original(path, flags))
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
    monkeypatch.setattr(HostProbe, "_rss_and_peak", lambda self: (100 * MIB, next(peaks, 100 * MIB)))
    probe = HostProbe()
    assert (probe.sampled, probe.note) == (False, "")
    probe.close()


@needs_mark
@alone
def test_a_forked_child_reads_its_own_memory_and_its_exact_peak() -> None:
    """It has used memory before it asks, and its parent has opened a span."""
    meter = Meter([HostProbe()])
    around = meter.start()
    meter.now()  # finds the mark at the RSS: nothing to reset
    if (child := os.fork()) == 0:
        code = 1
        try:
            touched(96 * MIB).close()
            (usage,) = meter.read(around)
            assert (usage.method, usage.note) == ("kernel", "")
            assert usage.peak_bytes - usage.after_bytes == pytest.approx(96 * MIB, rel=0.05)
            span = meter.start()
            memory = touched(64 * MIB)
            assert meter.read(span)[0].delta_bytes == pytest.approx(64 * MIB, rel=0.05)
            memory.close()
            (usage,) = meter.stop(span)
            assert usage.peak_delta_bytes == pytest.approx(64 * MIB, rel=0.05)
            code = 0
        finally:
            traceback.print_exc()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    meter.close()


needs_pages = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc/self/pagemap")


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@needs_pages
def test_only_pages_that_were_written_are_in_ram() -> None:
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(memory)
    assert anonymous_bytes([(address, 64 * MIB)]) == [0]
    memory[: 16 * MIB] = bytes(16 * MIB)
    # The kernel may round up to a huge page.
    (found,) = anonymous_bytes([(address, 64 * MIB)])
    assert 16 * MIB <= found <= 18 * MIB
    assert anonymous_bytes([(address + 4 * MIB, 8 * MIB), (address + 32 * MIB, 8 * MIB)]) == [8 * MIB, 0]


@needs_pages
def test_shared_and_file_pages_are_not_this_processs_own(tmp_path: Path) -> None:
    shared = mmap.mmap(-1, 8 * MIB)
    shared[:] = bytes(8 * MIB)
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * MIB))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert len(mapped[:]) == 8 * MIB
    assert anonymous_bytes([(address_of(shared), 8 * MIB), (address_of(mapped), 8 * MIB)]) == [0, 0]
    mapped[: 2 * MIB] = b"x" * (2 * MIB)  # written to, a private mapping's page is a copy of this process's own
    assert anonymous_bytes([(address_of(mapped), 8 * MIB)]) == [2 * MIB]
