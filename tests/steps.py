"""What tests in folders of their own do alike with a kernel that they share."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel import Kernel, Reply


class SharedKernel:
    """One kernel for all tests of a module, tidied before each; one that a test broke is replaced."""

    def __init__(self, *tidy: str, timeout: float = 15) -> None:
        """``tidy`` are the cells before each test; the kernel is well where the last one succeeds in time."""
        self._tidy = tidy
        self._timeout = timeout
        self._kernel: Kernel | None = None

    def get(self) -> Kernel:
        """Return the kernel, tidied, or a new one with the extension loaded."""
        if self._kernel is not None and not self._is_well(self._kernel):
            self.close()
        if self._kernel is None:
            self._kernel = Kernel()
            assert self._kernel.run("%load_ext ipygpumem").status == "ok"
            assert self._is_well(self._kernel)
        return self._kernel

    def close(self) -> None:
        """End the kernel."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _is_well(self, kernel: Kernel) -> bool:
        try:
            replies = [kernel.run(cell, timeout=self._timeout) for cell in self._tidy]
        except (TimeoutError, queue.Empty):
            return False
        return replies[-1].status == "ok"


def kernel_with(*cells: str) -> Any:
    """Return a fixture: one kernel for all tests of a module, in which these cells have run."""

    @pytest.fixture(scope="module")
    def fixture() -> Iterator[Kernel]:
        with Kernel() as kernel:
            for cell in cells:
                works(kernel, cell)
            yield kernel

    return fixture


def tidied_kernel(*tidy: str, timeout: float = 15) -> tuple[Any, Any]:
    """Return two fixtures, ``shared_kernel`` of a module and ``notebook``: its kernel after these cells."""

    @pytest.fixture(scope="module")
    def shared_kernel() -> Iterator[SharedKernel]:
        shared = SharedKernel(*tidy, timeout=timeout)
        yield shared
        shared.close()

    @pytest.fixture
    def notebook(shared_kernel: SharedKernel) -> Kernel:
        return shared_kernel.get()

    return shared_kernel, notebook


def works(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must succeed, in which nothing of ours may fail."""
    reply = kernel.run(code, **options)
    assert reply.status == "ok", (code, reply.message, reply.stderr, reply.traceback)
    assert "is not affected" not in reply.stderr, reply.stderr
    return reply
