"""Ways in which notebooks leak, one scenario each, in real kernels. ``python -m
benchmarks.torture`` prints the table.
"""
