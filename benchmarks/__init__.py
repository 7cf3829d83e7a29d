"""Cost and exactness of ipygpumem next to ipyexperiments, in real kernels. ``python -m
benchmarks``.
"""
