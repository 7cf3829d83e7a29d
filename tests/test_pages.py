"""Which pages of this process are in RAM, by the kernel's word on real memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from ipygpumem.probes.host import anonymous_bytes
from ipygpumem.units import MIB

pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc/self/pagemap")


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_only_pages_that_were_written_are_in_ram() -> None:
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(memory)
    assert anonymous_bytes([(address, 64 * MIB)]) == [0]
    memory[: 16 * MIB] = bytes(16 * MIB)
    # The kernel may round up to a huge page.
    (found,) = anonymous_bytes([(address, 64 * MIB)])
    assert 16 * MIB <= found <= 18 * MIB
    assert anonymous_bytes([(address + 4 * MIB, 8 * MIB), (address + 32 * MIB, 8 * MIB)]) == [8 * MIB, 0]


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
