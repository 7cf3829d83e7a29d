"""The pytest marker ``memory``: fails a test with a higher peak than expected, or after which more
tensors and arrays stay alive.
"""

from __future__ import annotations

import inspect
import unittest

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line(
        "markers",
        "memory(ram=SIZE, gpu=SIZE, leaks=N): fail if the peak rises further above the start of "
        "the test, "
        "or if more than N tensors and arrays stay alive after it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Wrap a marked test's function, so that the test is measured without its fixtures.

    A hook that runs around the test (``wrapper=True``) would need a new pytest.
    """
    mark = item.get_closest_marker("memory")
    if mark is None or not isinstance(item, pytest.Function):
        return
    leaks = mark.kwargs.get("leaks", 0)
    is_known = mark.kwargs and {"ram", "gpu", "leaks"}.issuperset(mark.kwargs)
    if mark.args or not is_known or type(leaks) is not int or leaks < 0:
        pytest.fail('the marker memory takes ram="200MiB", gpu="8GiB" and leaks=0', pytrace=False)
    if issubclass(item.cls or object, unittest.TestCase) and inspect.iscoroutinefunction(item.obj):
        pytest.fail("the marker memory cannot measure unittest's async tests", pytrace=False)
    from ipygpumem.extras.expectations.expect import measured  # only marked tests need it

    item.obj = measured(item.obj, **mark.kwargs)
