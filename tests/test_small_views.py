"""Small views of large arrays are told from arrays, with the call that copies them."""

import sys
from pathlib import Path

import pytest

from ipygpumem.heap.knowledge.views import small_view
from ipygpumem.units import format_bytes
from tests import hostile

numpy = pytest.importorskip("numpy")
BIG = (500_000, 4)


def test_a_small_view_of_an_array_is_named_with_its_block() -> None:
    big = numpy.ones(BIG)
    notes = {
        "10 × 4 of an array of 15.3 MiB: .copy()": big[:10],
        "5 × 2 of an array of 15.3 MiB: .copy()": big[10:20, ::2][:5],
        "3 values of an array of 15.3 MiB: .copy()": big.ravel()[:3],
        "1 value of an array of 15.3 MiB: .copy()": big[0, 0, ...],
        "10 × 1 × 4 of an array of 15.3 MiB: .copy()": big[:10, None],
    }
    assert {small_view(view): view.shape for view in notes.values()} == {
        note: view.shape for note, view in notes.items()
    }


def test_arrays_and_large_or_cheap_views_need_no_note(tmp_path: Path) -> None:
    big = numpy.ones(BIG)
    mapped = numpy.memmap(tmp_path / "numbers", "f8", "w+", shape=BIG)
    views = [
        big,
        big[:200_000],
        big.T,
        big[:10].copy(),
        numpy.ones(1000)[:1],
        mapped[:10],
        numpy.broadcast_to(1.5, BIG),
    ]
    others = [None, "text", b"x" * 5_000_000, memoryview(b"x" * 5_000_000)[:1], [big[:10]]]
    assert {small_view(value) for value in [*views, *others]} == {""}


def test_texts_of_a_view_count_as_shown() -> None:
    pytest.importorskip("numpy", minversion="2.0")
    texts = numpy.array(
        [f"{number:0400d}" for number in range(10_000)], dtype=numpy.dtypes.StringDType()
    )
    assert small_view(texts) == small_view(texts[:]) == small_view(texts[:5_000]) == ""
    assert small_view(texts[:10]).startswith("10 values of an array of 4.")


def test_views_of_pandas_are_named_with_their_rows() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(numpy.ones(BIG))
    notes = {
        "10 rows of a block of 15.3 MiB: .copy()": frame[:10],
        "1 row of a block of 15.3 MiB: .copy()": frame.iloc[3:4],
        "5 rows of a block of 15.3 MiB: .copy()": frame.iloc[::100_000],
        "7 rows of a block of 15.3 MiB: .copy()": frame[1][:7],
    }
    assert {note: small_view(view) for note, view in notes.items()} == {
        note: note for note in notes
    }


def test_slices_of_arrow_are_named_with_their_buffers(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": arrow.array(numpy.ones(500_000)), "t": ["text"] * 500_000})
    note = f"10 rows of buffers of {format_bytes(table.nbytes)}: .take([*range(10)])"
    small = table.slice(5, 10)
    assert small_view(small) == small_view(small.to_batches()[0]) == note
    assert small_view(small["a"].chunk(0)).startswith("10 rows of buffers of 3.8 MiB")
    copied = small.take([*range(10)])
    assert copied.equals(small)
    assert {small_view(value) for value in (table, table.slice(250_000), copied)} == {""}
    path = str(tmp_path / "table")
    arrow.feather = pytest.importorskip("pyarrow.feather")
    arrow.feather.write_feather(table, path, compression="uncompressed")
    assert small_view(arrow.feather.read_table(path, memory_map=True).slice(0, 10)) == ""


def test_a_part_of_an_xarray_is_named_with_its_block() -> None:
    xarray = pytest.importorskip("xarray")
    big = xarray.DataArray(numpy.ones(BIG))
    assert small_view(big[:10]) == "10 × 4 of an array of 15.3 MiB: .copy()"
    assert {small_view(value) for value in (big, big[:10].copy(), big.chunksizes)} == {""}


def test_frames_and_copies_need_no_note() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(numpy.ones(BIG))
    whole = [
        frame,
        frame[:10].copy(),
        frame[0],
        frame[[0, 1]],
        frame.head(0).copy(),
        frame.columns,
        pandas.Series([1.5]),
    ]
    assert {small_view(value) for value in whole} == {""}


def test_no_code_of_an_object_runs() -> None:
    kinds = (hostile.Hostile, hostile.Container, hostile.Slotted, hostile.Lazy)
    with hostile.untouched():
        assert {small_view(hostile.made(kind)) for kind in kinds} == {""}


def test_torch_is_not_imported() -> None:
    assert small_view([]) == ""
    assert "torch" not in sys.modules
