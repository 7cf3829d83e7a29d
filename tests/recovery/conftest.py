"""The kernel of the tests of recovery."""

from tests.recovery.cases import SETUP
from tests.steps import tidied_kernel

RELEASE = "%reset -f\n%config IPyGpuMem.release_frames = 'oom+interrupt'"
shared_kernel, notebook = tidied_kernel(
    RELEASE, "%reload_ext ipygpumem\n" + SETUP, hides_libraries=True
)
"""A kernel with the extension loaded, nothing open, and ``big()`` and ``alive()`` to watch arrays.
"""
