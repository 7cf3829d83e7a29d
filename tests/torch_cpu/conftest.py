"""Tests with torch on the CPU: in kernels, and all those for which torch is imported in the tests' own process."""

from __future__ import annotations

from tests.steps import tidied_kernel
from tests.torch_cpu.steps import SETUP

shared_kernel, notebook = tidied_kernel("%reset -f", "%reload_ext ipygpumem\n" + SETUP, timeout=60)
"""A kernel with torch and the extension loaded, nothing open, and ``watch()`` and ``alive()``."""
