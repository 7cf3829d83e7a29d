"""Passing through objects makes later measurements count what measuring the objects would."""

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest

from ipygpumem.heap.sizes.sizes import Sizes
from tests import kinds

np: Any = pytest.importorskip("numpy")
kinds.lib["numpy"] = np

SIZE_BYTES = 1 << 20


def objects_that_show(value: Any) -> Any:
    """Return objects that show memory of the value, some of it without a reference to it."""
    if isinstance(value, bytes | bytearray):
        return [memoryview(value), np.frombuffer(value, "u1")]
    if isinstance(value, np.ndarray):
        return [value[:1]]
    if isinstance(value, io.BytesIO):
        return [value.getvalue()]
    return []


def counted_after(count: Callable[[Sizes], object], objects: list[object]) -> int:
    """Return the bytes that are left to measure in objects after a first count."""
    sizes = Sizes()
    count(sizes)
    return sizes.measure(objects).size_bytes


@pytest.mark.parametrize("library", ["", "numpy"])
def test_passing_leaves_to_measure_as_little_as_measuring(library: str) -> None:
    differences = {}
    for kind, make in kinds.KINDS[library].items():
        value = make(SIZE_BYTES)
        older = [value]
        newer = [value, *objects_that_show(value), bytes(SIZE_BYTES)]
        expected = counted_after(lambda sizes: sizes.together([older]), newer)  # noqa: B023
        size = counted_after(lambda sizes: sizes.pass_through([older]), newer)  # noqa: B023
        if size != expected:
            differences[kind] = size - expected
    assert not differences


def test_an_object_behind_a_passed_one_counts_as_counted() -> None:
    shared = [str(number) * 100 for number in range(10)]
    older = {"rows": [shared]}
    sizes = Sizes()
    sizes.pass_through([older])
    assert sizes.has_counted(shared)
    assert sizes.measure(shared).size_bytes == 0


def test_objects_excluded_from_passing_are_measured_later() -> None:
    new = [bytes(SIZE_BYTES)]
    older = [new, "text"]
    sizes = Sizes()
    with sizes.passing_over({id(new)}):
        sizes.pass_through([older])
    assert sizes.measure(new).size_bytes > SIZE_BYTES


def test_plain_objects_become_no_nodes() -> None:
    records = [{"number": number, "list": [number]} for number in range(1000)]
    tracked = gc.get_objects()  # each has another reference, as while a heap exists
    sizes = Sizes()
    sizes.pass_through([records])
    # Not one for each of the 1,000 records.
    assert len(sizes.region.objects) < 10
    del tracked
