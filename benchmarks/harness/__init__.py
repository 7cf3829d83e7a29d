"""What both tests and benchmarks run: kernels, scenarios that leak, networks, control groups.

Tests import it; nothing here imports a test.
"""
