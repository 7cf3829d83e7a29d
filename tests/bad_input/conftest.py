"""The kernel of the tests of bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.kernel import Kernel
from tests.steps import SharedKernel


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[SharedKernel]:
    """One kernel that the tests of a module share."""
    with contextlib.closing(SharedKernel("%reset -f\n%reload_ext ipygpumem")) as kernel:
        yield kernel


@pytest.fixture
def notebook(shared_kernel: SharedKernel) -> Kernel:
    """A kernel with the extension loaded, nothing open and no names; after a broken test a new one."""
    return shared_kernel.get()
