"""The pytest marker ``memory``: fails a test whose peak, or what it leaves behind, is more than expected."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from ipygpumem.errors import MemoryExpectationError


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line(
        "markers",
        "memory(ram=SIZE, gpu=SIZE, leaks=N): fail if the peak rises further above the start of the test, "
        "or if more than N tensors and arrays stay alive after it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Measure a marked test, without its fixtures, as a part of the test itself: a wrapped hook needs a new pytest."""
    mark = pyfuncitem.get_closest_marker("memory")
    if mark is None:
        return
    if mark.args or not {"ram", "gpu", "leaks"}.issuperset(mark.kwargs):
        pytest.fail('the marker memory takes ram="200MiB", gpu="8GiB" and leaks=0', pytrace=False)
    from ipygpumem.api.traces import run_inside  # a session without marked tests needs none of it

    pyfuncitem.obj = run_inside(pyfuncitem.obj, functools.partial(_measured, **mark.kwargs))


@contextlib.contextmanager
def _measured(leaks: int | None = None, **limits: Any) -> Iterator[None]:
    from ipygpumem.api.inventories import diff, tensors  # as above
    from ipygpumem.extras.expectations.expect import expect

    before = None if leaks is None else tensors()
    with expect(**limits) if limits else contextlib.nullcontext():
        yield
    if before is not None and leaks is not None:
        gc.collect()
        change = diff(before, tensors())
        if (count := len(change.added)) > leaks:
            raise MemoryExpectationError(f"{count} tensors and arrays stay alive, expected {leaks}\n{change}")
