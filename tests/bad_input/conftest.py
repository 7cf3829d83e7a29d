"""The kernel of the tests of bad input."""

from tests.steps import tidied_kernel

shared_kernel, notebook = tidied_kernel("%reset -f\n%reload_ext ipygpumem", hides_libraries=True)
"""A kernel with the extension loaded, nothing open and no names; after a broken test a new one."""
