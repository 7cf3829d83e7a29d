"""Fixtures of all tests."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.kernel import Kernel

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
# Threads of torch that wait take the processor from those that work, wherever there are more of both than processors.
# Read when torch is imported, here and in the kernels.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A fresh kernel with the extension loaded."""
    kernel = Kernel()
    reply = kernel.run("%load_ext ipygpumem")
    assert reply.status == "ok", reply.traceback
    yield kernel
    kernel.close()


@pytest.fixture
def bare_kernel() -> Iterator[Kernel]:
    """A fresh kernel without the extension."""
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython shell in this process, without the extension."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    yield shell
    if "ipygpumem" in shell.extension_manager.loaded:
        shell.run_line_magic("unload_ext", "ipygpumem")
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After every test: no sampler thread, no import hook, no wrapped torch function."""
    hooks = list(sys.meta_path)
    yield
    assert not [thread.name for thread in threading.enumerate() if "ipygpumem" in thread.name]
    assert sys.meta_path == hooks
    torch = sys.modules.get("torch")
    functions = vars(torch._C).values() if torch is not None else ()
    assert not [f for f in functions if getattr(f, "__module__", "") == "ipygpumem.probes.counters"]
