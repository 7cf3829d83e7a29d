"""``leave_free`` and ``allocate`` leave or hold the requested memory until their end."""

import sys
import textwrap

import pytest

import ipygpumem
from ipygpumem.errors import DeviceError
from tests.alone import printed

FILL_MEMORY = """
import ipygpumem, sys
MIB = 1 << 20
def fits(size):
    try:
        bytearray(size)
    except MemoryError:
        return False
    return True
"""


def in_script(code: str) -> str:
    """Return the output of a script of its own: limits and RSS are those of a process."""
    return printed("-c", FILL_MEMORY + code).strip()


linux = pytest.mark.skipif(sys.platform != "linux", reason="limits on address space are Linux's")


@linux
def test_leave_free_leaves_this_process_the_requested_size() -> None:
    code = textwrap.dedent(
        """\
        with ipygpumem.leave_free('256 MiB', 'cpu'):
            inside = fits(250 * MIB), fits(260 * MIB)
        print(inside, fits(512 * MIB))"""
    )
    assert in_script(code) == "(True, False) True"


@linux
def test_leave_free_restores_the_users_limit_unless_changed() -> None:
    code = textwrap.dedent(
        """\
        import resource
        def limit(size): resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        def now(): return resource.getrlimit(resource.RLIMIT_AS)[0] // MIB
        limit(8000 * MIB)
        with ipygpumem.leave_free('64 MiB', 'cpu'): inside = now() < 8000
        print(inside, now())
        with ipygpumem.leave_free('64 MiB', 'cpu'): limit(7000 * MIB)
        print(now())
        filler = ipygpumem.leave_free('64 MiB', 'cpu'); del filler; print(now())"""
    )
    assert in_script(code).split() == ["True", "8000", "7000", "7000"]


def test_leave_free_holds_host_memory_in_ram_until_it_ends() -> None:
    code = (
        "def rss(): return ipygpumem.memory().allocated_bytes // MIB\nbefore = rss()\n"
        "with ipygpumem.allocate('256 MiB', 'cpu') as held: inside = rss() - before\n"
        "print(250 <= inside <= 262, rss() - before < 6, held.size_bytes, ipygpumem.allocate(0, "
        "'cpu'))"
    )
    assert in_script(code) == f"True True {256 << 20} <cpu: 0 B reserved until free()>"


def test_the_last_of_the_hosts_memory_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.probes.host.available_bytes", lambda: 100 << 20)
    with pytest.raises(DeviceError, match="the host can spare only 95 MiB, not 99 MiB"):
        ipygpumem.allocate("99 MiB", "cpu")
