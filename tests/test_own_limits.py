"""The limits that a process has by itself (``ulimit``): free memory is what they allow."""

from __future__ import annotations

import re
import resource
import sys

import pytest

from ipygpumem.fitting import fit
from ipygpumem.inventory.breakdown import host_parts
from ipygpumem.probes import host, own_limits
from ipygpumem.probes.host import HostFigures
from ipygpumem.records import Usage
from ipygpumem.units import GIB, MIB, parse_bytes
from tests.alone import alone
from tests.kernel import Kernel
from tests.steps import works

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
NAMES = pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])


def allow(name: str, more: int) -> int:
    """Let this process have so much more than it has, and return the limit."""
    limit = own_limits.used_bytes(name) + more
    resource.setrlimit(getattr(resource, name), (limit, -1))
    return limit


@NAMES
@alone
def test_what_is_free_is_what_the_limit_leaves(name: str) -> None:
    host.available_bytes()
    allow(name, 512 * MIB)
    free = host.available_bytes()
    block = bytearray(256 * MIB)
    held = host.available_bytes()
    assert 500 * MIB < free <= 512 * MIB
    assert abs(free - held - len(block)) < 4 * MIB
    with pytest.raises(MemoryError):
        bytearray(held + MIB)


@alone
def test_a_limit_on_the_address_space_is_the_total_from_the_next_reading_on() -> None:
    probe = host.HostProbe()
    before = probe.read()[0].total_bytes
    bound = allow("RLIMIT_AS", GIB)
    assert probe.read()[0].total_bytes == bound < before


def test_headroom_is_a_share_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    used = Usage("cpu", 100, 100, 500, 24_000, "kernel")
    monkeypatch.setattr(own_limits, "limits", lambda: [own_limits.Limit("RLIMIT_DATA", 1000, 100)])
    monkeypatch.setattr(fit, "available_bytes", lambda: 900)
    assert fit.crowded_device([used], 0.05) is None
    assert fit.crowded_device([used], 0.51) == "cpu"


def test_what_is_free_but_above_the_limit_is_out_of_reach_in_the_table() -> None:
    figures = HostFigures(10_000, 6000, 8000, 500, limit=own_limits.Limit("RLIMIT_AS", 2000, 800))
    found = host_parts(figures, None, lambda ranges: [])
    sizes = {part.name: part.size_bytes for part in found.parts if part.size_bytes}
    assert (found.total_bytes, sum(sizes.values())) == (10_000, 10_000)
    assert (sizes["free"], sizes["out of reach"]) == (1200, 4800)
    assert "RLIMIT_AS" in next(part.advice for part in found.parts if part.name == "out of reach")
    tighter = HostFigures(10_000, 600, 8000, 500, limit=own_limits.Limit("RLIMIT_AS", 2000, 800))
    assert {part.name: part.size_bytes for part in host_parts(tighter, None, lambda ranges: []).parts}["free"] == 600


@pytest.fixture
def limited(kernel: Kernel) -> Kernel:
    """A kernel that may have 512 MiB of address space more than it has."""
    works(kernel, "from tests.test_own_limits import allow\nbound = allow('RLIMIT_AS', 512 << 20)")
    return kernel


def test_free_memory_is_what_the_limit_leaves_wherever_it_is_said(limited: Kernel) -> None:
    reply = limited.run("bytearray(2 << 30)")
    (recovered,) = reply.reports("recovery")
    said = re.search(r"free: RAM ([\d.]+ \wiB)", recovered)
    assert said is not None, recovered
    assert 400 * MIB < parse_bytes(said[1]) <= 512 * MIB
    (status,) = works(limited, "%gpumem status").reports("status")
    row = re.search(r"^ +([\d.]+ \wiB)  +free ", status, re.MULTILINE)
    assert row is not None, status
    assert parse_bytes(row[1]) <= 512 * MIB
    assert re.search(r"^ +[\d.]+ \wiB  +out of reach  +RLIMIT_AS", status, re.MULTILINE), status


def test_an_autofit_that_fits_nothing_names_the_limit_and_contradicts_nothing(limited: Kernel) -> None:
    reply = limited.run("%%autofit n=2\nimport numpy\nnumpy.ones(2 << 28)\nn")
    needs = re.search(r"needs at least ([\d.]+ \wiB) of RAM, and (.*)$", reply.stderr.strip())
    assert needs is not None, reply.stderr
    assert parse_bytes(needs[1]) > 2 * GIB
    assert re.fullmatch(r"RLIMIT_AS allows this process [\d.]+ \wiB of address space", needs[2])
    assert "which has" not in reply.stderr
