"""Keeps debugpy out of the tests' kernels, in front of it in PYTHONPATH.

Its import takes a quarter of a kernel's start, and a fifth of a new kernel's objects are its own.
"""

raise ImportError("the tests' kernels have no debugger")
