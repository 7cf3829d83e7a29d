"""Tests with torch on the CPU: in kernels, and all those for which torch is imported in the tests'
own process.
"""

from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.alone import estimates_of_code_alone
from tests.steps import HIDE_LIBRARIES, run_cells, tidied_kernel

SETUP = """
import gc, sys, weakref
gc.unfreeze()
import torch, ipygpumem
from torch import nn
watched = {}
def watch(**things):
    for name, thing in things.items():
        watched.setdefault(name, []).append(weakref.ref(thing))
def alive():
    return sorted(name for name, refs in watched.items() if any(ref() is not None for ref in refs))
"""

shared_kernel, notebook = tidied_kernel("%reset -f", "%reload_ext ipygpumem\n" + SETUP, timeout=600)
"""A kernel with torch and the extension loaded, nothing open, and ``watch()`` and ``alive()``."""


@pytest.fixture
def small_heap(notebook: Kernel) -> None:
    """Let looks at the notebook's heap pass over what libraries made on import: most of a test's
    time.

    Not for tests of freeing, and some tests of each kind look at everything.
    """
    run_cells(notebook, "import pandas" + HIDE_LIBRARIES)


@pytest.fixture
def no_modules_of_users() -> Iterator[None]:
    """Let estimates put back arguments and closures alone."""
    with estimates_of_code_alone():
        yield
