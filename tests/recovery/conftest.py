"""The kernel of the tests of recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.kernel import Kernel
from tests.recovery.steps import SETUP
from tests.steps import SharedKernel


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[SharedKernel]:
    """One kernel that the tests of a module share."""
    with contextlib.closing(
        SharedKernel("%reset -f\n%config IPyGpuMem.release_frames = 'oom+interrupt'", "%reload_ext ipygpumem\n" + SETUP)
    ) as kernel:
        yield kernel


@pytest.fixture
def notebook(shared_kernel: SharedKernel) -> Kernel:
    """A kernel with the extension loaded, nothing open, and ``big()`` and ``alive()`` to watch arrays."""
    return shared_kernel.get()
