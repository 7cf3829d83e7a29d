"""Experiments in a real kernel: their first error, and the memory that their rows name."""

from benchmarks.harness.kernel import Kernel
from tests.steps import fails, ok

REMEMBER = """
import sys
before = set(sys.modules)
"""
NEW_LIBRARIES = """
sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"ipygpumem", "psutil"})
"""


def test_the_first_error_in_an_experiment_imports_nothing(kernel: Kernel) -> None:
    """IPython imports 34 modules for its first traceback: 2 MiB that no code of the user takes."""
    ok(kernel, "%load_ext ipygpumem", "%experiment start first", REMEMBER)
    fails(kernel, "1 / 0")
    assert kernel.value(NEW_LIBRARIES) == []
    ok(kernel, "%experiment end")
