"""Mapped files are called files, and only their pages in RAM count, whichever
library shows them.
"""

import mmap
from pathlib import Path
from typing import Any

import pytest

from ipygpumem.heap.kinds.mapped import MappedFiles
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.units import MIB
from tests.process_memory import NOTE, assert_read, linux

pytestmark = linux


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_bytes(b"x" * 8 * MIB)
    return path


def test_a_map_of_a_file_counts_the_pages_that_were_read(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert_read(Sizes().measure(mapped), pages=0)
        assert mapped[: 4 * MIB].count(b"y") == 0
        assert_read(Sizes().measure(mapped), pages=4 * MIB)


def test_a_map_without_a_file_is_no_file() -> None:
    with mmap.mmap(-1, 8 * MIB) as mapped:
        mapped[: 2 * MIB] = b"x" * 2 * MIB
        size = Sizes().measure(mapped)
    # The pages that were written to, of 8 MiB.
    assert 2 * MIB <= size.size_bytes <= 3 * MIB
    assert size.notes == (NOTE.replace("mapped file", "memory map"),)


def test_arrays_of_numpy_on_files_count_their_pages(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.memmap(path, "u1", "r")
    assert int(array[: 4 * MIB].max()) == ord("x")
    with path.open("rb") as file:
        other: Any = numpy.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "u1")
        assert_read(Sizes().measure(array), pages=4 * MIB)
        assert_read(Sizes().measure(other), pages=0)


def test_the_map_of_an_array_left_out_does_not_count(path: Path) -> None:
    """A leak of a memmap has a row of its array, and one of other memory."""
    numpy = pytest.importorskip("numpy")
    array = numpy.memmap(path, "u1", "r", offset=100)
    assert int(array.max()) == ord("x")
    for left_out in (array, array[MIB:]):
        sizes = Sizes()
        sizes.exclude_data([left_out])
        assert sizes.measure([array]).size_bytes < MIB


def test_a_map_counts_besides_a_small_array_left_out(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    part: Any = numpy.frombuffer(mapped, "u1", count=MIB)
    assert mapped[:] != b""
    sizes = Sizes()
    sizes.exclude_data([part])
    assert sizes.measure([mapped]).size_bytes > 4 * MIB


def test_tables_of_pyarrow_on_files_count_their_pages(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = str(tmp_path / "table")
    table = arrow.table({"a": arrow.array(range(MIB))})
    with arrow.OSFile(path, "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert Sizes().measure(table).notes == ()
    mapped = arrow.ipc.open_file(arrow.memory_map(path)).read_all()
    # Of 8 MiB, few pages have been read.
    assert Sizes().measure(mapped).size_bytes < 3 * MIB
    assert mapped["a"].slice(0, MIB // 2).to_numpy().max() == MIB // 2 - 1
    assert_read(Sizes().measure(mapped), pages=4 * MIB)


def test_the_kernels_list_is_read_once_and_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def mappings() -> list[tuple[int, int]]:
        calls.append(1)
        return [(1000, 2000), (2000, 3000), (5000, 6000)]

    monkeypatch.setattr("ipygpumem.heap.kinds.mapped.mapped_files", mappings)
    files = MappedFiles()
    assert calls == []
    spans = {
        (1000, 1000): True,
        (1500, 1500): True,
        (1500, 1501): False,
        (999, 10): False,
        (3000, 1): False,
    }
    assert {span: files.contain(*span) for span in spans} == spans
    assert calls == [1]
