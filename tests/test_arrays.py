"""What NumPy's arrays take."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from ipygpumem.objects.arrays import Array, describe, elements

numpy = pytest.importorskip("numpy")


def size(value: object) -> int:
    found = describe(value)
    assert isinstance(found, Array)
    return found.size_bytes


def test_an_array_takes_what_it_keeps_alive(tmp_path: Path) -> None:
    assert size(numpy.ones(1000)[:10][2:]) == 8000
    assert size(numpy.broadcast_to(numpy.ones(1), (1000, 1000))) == 8
    assert size(numpy.lib.stride_tricks.as_strided(numpy.ones(10), (5, 5), (0, 8))) == 80
    assert size(numpy.empty((0, 5))) == 0
    assert size(numpy.zeros(10, [("a", "i4"), ("b", "f8")])) == 120
    assert describe([1]) is None
    assert size(numpy.frombuffer(b"x" * 100, numpy.uint8)) == 100
    file = tmp_path / "map"
    file.write_bytes(bytes(8192))
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
        assert size(numpy.frombuffer(mapped, numpy.uint8)) == 8192
    assert size(numpy.memmap(file, numpy.uint8)[:10]) == 8192


def test_the_elements_of_object_arrays_are_seen() -> None:
    inner = numpy.ones(3)
    array = numpy.empty((1, 2), object)
    array[0, 1] = inner
    found = elements(array)
    assert found is not None
    assert found[0][1] is inner
    assert elements(numpy.ones(3)) is None
