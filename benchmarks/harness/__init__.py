"""Tools of both tests and benchmarks: kernels, scenarios that leak, networks, control groups.

Tests import it; nothing here imports a test.
"""
