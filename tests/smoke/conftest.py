"""One kernel for all tests of a module, tidied after each: starting one takes most of a second."""

import os
from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import HIDE_LIBRARIES, kernel_with, run

HAS_POSIX = os.name == "posix" and not os.environ.get("IPYGPUMEM_WITHOUT_POSIX")
"""True if the kernels have POSIX: see tests/without_posix."""

_FORGET_NAMES = """
for _name in [n for n in globals() if n[0] != "_" and n not in ("In", "Out", "exit", "quit", "get_ipython", "open")]:
    del globals()[_name]
"""  # noqa: E501


_module_kernel = kernel_with("%load_ext ipygpumem", HIDE_LIBRARIES)


@pytest.fixture
def notebook(_module_kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with the extension loaded, no open experiment and none of the user's names."""
    yield _module_kernel
    while run(_module_kernel, "%experiment end").status == "ok":
        pass
    assert run(_module_kernel, _FORGET_NAMES).status == "ok"
