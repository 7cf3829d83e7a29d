"""Moved to benchmarks/harness/kernel.py; here until every test imports it from there."""

from benchmarks.harness.kernel import Kernel, Reply  # noqa: F401
