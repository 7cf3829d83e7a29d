"""The harness that runs cells in real kernels."""

from __future__ import annotations

import pytest

from benchmarks.harness.kernel import Kernel


def test_a_cell_that_ends_its_kernel_fails_at_once() -> None:
    with Kernel() as kernel, pytest.raises(RuntimeError, match=r"the kernel died: .*_exit"):
        kernel.run("import os; os._exit(1)", timeout=10**6)
