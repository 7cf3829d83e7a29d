"""How notebooks leak, one scenario per way, in real kernels. ``python -m benchmarks.torture``
prints the table.
"""
