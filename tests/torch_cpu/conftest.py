"""Tests with torch on the CPU: in kernels, and all those for which torch is imported in the tests' own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.kernel import Kernel
from tests.steps import SharedKernel
from tests.torch_cpu.steps import SETUP


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[SharedKernel]:
    """One kernel that the tests of a module share."""
    with contextlib.closing(SharedKernel("%reset -f", "%reload_ext ipygpumem\n" + SETUP, timeout=60)) as kernel:
        yield kernel


@pytest.fixture
def notebook(shared_kernel: SharedKernel) -> Kernel:
    """A kernel with torch and the extension loaded, nothing open, and ``watch()`` and ``alive()``."""
    return shared_kernel.get()
