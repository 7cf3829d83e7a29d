"""What ipygpumem costs and how exact it is, beside ipyexperiments, in real kernels. ``python -m
benchmarks``.
"""
