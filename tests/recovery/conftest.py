"""The kernel of the tests of recovery."""

from tests.recovery.cases import SETUP
from tests.steps import tidied_kernel

shared_kernel, notebook = tidied_kernel(
    "%reset -f\n%config IPyGpuMem.release_frames = 'oom+interrupt'", "%reload_ext ipygpumem\n" + SETUP
)
"""A kernel with the extension loaded, nothing open, and ``big()`` and ``alive()`` to watch arrays."""
